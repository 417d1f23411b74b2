//! Which tasks are handed to the library next. Pure.
//!
//! Invariants: a peer never has more tasks in the library than allowed, and at most one thread hands it
//! some; peers take turns; the tasks of a peer start in the order of submission.

use std::collections::{HashMap, VecDeque};
use std::time::Instant;

/// Names a peer: segments that lead to the same peer share one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct PeerKey(pub(super) u64);

/// Tasks in one call. The library looks at every task of a batch again when one is done, so that batches
/// are best kept in the hundreds.
pub(super) const CHUNK_MAX: usize = 128;

/// What the queue has to know about a task.
pub(super) trait Queued {
    /// The library's number of the segment.
    fn segment(&self) -> i32;
    /// When it is too late to start.
    fn deadline(&self) -> Instant;
}

pub(super) struct Queue<J> {
    lines: HashMap<PeerKey, Line<J>>,
    /// Peers that can be handed tasks, each once.
    ready: VecDeque<PeerKey>,
    in_flight_max: usize,
    waiting: usize,
    /// No task that waits is late before this.
    earliest: Option<Instant>,
    is_closed: bool,
}

struct Line<J> {
    jobs: VecDeque<J>,
    in_flight: usize,
    is_submitting: bool,
    is_listed: bool,
    /// Tasks for the next call. Small until the peer has shown that it answers: without its connection
    /// pool the library connects inside the call, for each task, and a peer may let it wait.
    chunk: usize,
}

/// Tasks for one call.
pub(super) struct Chunk<J> {
    pub(super) peer: PeerKey,
    pub(super) jobs: Vec<J>,
}

impl<J: Queued> Queue<J> {
    pub(super) fn new(in_flight_max: usize) -> Self {
        Self {
            lines: HashMap::new(),
            ready: VecDeque::new(),
            in_flight_max,
            waiting: 0,
            earliest: None,
            is_closed: false,
        }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.is_closed
    }

    /// Adds a task; hands it back once the queue is closed.
    pub(super) fn push(&mut self, peer: PeerKey, job: J) -> Result<(), J> {
        if self.is_closed {
            return Err(job);
        }
        let deadline = job.deadline();
        self.earliest = Some(self.earliest.map_or(deadline, |e| e.min(deadline)));
        let line = self.lines.entry(peer).or_insert_with(|| Line {
            jobs: VecDeque::new(),
            in_flight: 0,
            is_submitting: false,
            is_listed: false,
            chunk: 1,
        });
        line.jobs.push_back(job);
        self.waiting += 1;
        self.list(peer);
        Ok(())
    }

    /// Lists the peer as ready if it is.
    fn list(&mut self, peer: PeerKey) {
        if let Some(line) = self.lines.get_mut(&peer)
            && !line.is_listed
            && !line.is_submitting
            && !line.jobs.is_empty()
            && line.in_flight < self.in_flight_max
        {
            line.is_listed = true;
            self.ready.push_back(peer);
        }
    }

    /// Takes tasks for one call. Their peer gets no further ones until [`submitted`](Queue::submitted).
    pub(super) fn next(&mut self) -> Option<Chunk<J>> {
        while let Some(peer) = self.ready.pop_front() {
            let Some(line) = self.lines.get_mut(&peer) else {
                continue;
            };
            line.is_listed = false;
            // Tasks may have been taken away, as late.
            let Some(first) = line.jobs.front() else {
                continue;
            };
            let segment = first.segment();
            let room = self.in_flight_max.saturating_sub(line.in_flight);
            let count = line
                .jobs
                .iter()
                .take(room.min(line.chunk))
                .take_while(|job| job.segment() == segment)
                .count();
            if count == 0 {
                continue;
            }
            let jobs = line.jobs.drain(..count).collect();
            line.in_flight += count;
            line.is_submitting = true;
            self.waiting -= count;
            return Some(Chunk { peer, jobs });
        }
        None
    }

    /// The call for tasks of the peer has returned.
    pub(super) fn submitted(&mut self, peer: PeerKey) {
        if let Some(line) = self.lines.get_mut(&peer) {
            line.is_submitting = false;
        }
        self.list(peer);
    }

    /// So many tasks of the peer are in the library no longer. Says whether there is something to hand on.
    pub(super) fn landed(&mut self, peer: PeerKey, applied: usize, failed: usize) -> bool {
        if let Some(line) = self.lines.get_mut(&peer) {
            line.in_flight = line.in_flight.saturating_sub(applied + failed);
            if failed > 0 {
                line.chunk = 1;
            } else if applied > 0 {
                line.chunk = (line.chunk * 2).min(CHUNK_MAX);
            }
        }
        self.list(peer);
        !self.ready.is_empty()
    }

    /// Takes the tasks that waited too long.
    pub(super) fn take_late(&mut self, now: Instant) -> Vec<J> {
        if self.earliest.is_none_or(|earliest| earliest > now) {
            return Vec::new();
        }
        let mut late = Vec::new();
        let mut earliest: Option<Instant> = None;
        for line in self.lines.values_mut() {
            for job in std::mem::take(&mut line.jobs) {
                let deadline = job.deadline();
                if deadline <= now {
                    late.push(job);
                } else {
                    earliest = Some(earliest.map_or(deadline, |e| e.min(deadline)));
                    line.jobs.push_back(job);
                }
            }
        }
        self.earliest = earliest;
        self.waiting -= late.len();
        late
    }

    /// Closes the queue and takes what waits.
    pub(super) fn close(&mut self) -> Vec<J> {
        self.is_closed = true;
        self.ready.clear();
        self.waiting = 0;
        self.lines
            .values_mut()
            .flat_map(|line| std::mem::take(&mut line.jobs))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Job {
        number: usize,
        segment: i32,
        deadline: Instant,
    }

    impl Queued for Job {
        fn segment(&self) -> i32 {
            self.segment
        }

        fn deadline(&self) -> Instant {
            self.deadline
        }
    }

    const A: PeerKey = PeerKey(1);
    const B: PeerKey = PeerKey(2);

    fn job(number: usize) -> Job {
        Job {
            number,
            segment: 1,
            deadline: Instant::now() + Duration::from_secs(1_000),
        }
    }

    fn filled(in_flight_max: usize, count: usize) -> Queue<Job> {
        let mut queue = Queue::new(in_flight_max);
        for number in 0..count {
            queue.push(A, job(number)).unwrap();
        }
        queue
    }

    #[test]
    fn calls_grow_while_tasks_succeed_and_start_over_after_a_failure() {
        let mut queue = filled(1_000, 1_000);
        let mut sizes = Vec::new();
        let mut numbers = Vec::new();
        for round in 0..10 {
            let chunk = queue.next().unwrap();
            sizes.push(chunk.jobs.len());
            numbers.extend(chunk.jobs.iter().map(|job| job.number));
            queue.submitted(A);
            let failed = usize::from(round == 8);
            queue.landed(A, chunk.jobs.len() - failed, failed);
        }
        assert_eq!(sizes, [1, 2, 4, 8, 16, 32, 64, 128, 128, 1]);
        assert!(numbers.is_sorted());
    }

    #[test]
    fn a_peer_never_has_more_than_allowed_in_the_library() {
        let mut queue = filled(100, 5_000);
        let mut in_flight = 0;
        let mut done = 0;
        while done < 5_000 {
            while let Some(chunk) = queue.next() {
                in_flight += chunk.jobs.len();
                assert!(in_flight <= 100);
                assert!(queue.next().is_none(), "one call at a time for a peer");
                queue.submitted(A);
            }
            assert!(in_flight > 0);
            let landed = in_flight.div_ceil(3);
            queue.landed(A, landed, 0);
            in_flight -= landed;
            done += landed;
        }
        assert_eq!(queue.waiting, 0);
    }

    #[test]
    fn peers_take_turns_and_do_not_wait_for_each_other() {
        let mut queue = filled(4, 10);
        queue.push(B, job(77)).unwrap();
        let first = queue.next().unwrap();
        assert_eq!(first.peer, A);
        // The call for A has not returned.
        let second = queue.next().unwrap();
        assert_eq!((second.peer, second.jobs[0].number), (B, 77));
        assert!(queue.next().is_none());
        queue.submitted(A);
        assert_eq!(queue.next().unwrap().peer, A);
    }

    #[test]
    fn one_call_has_tasks_of_one_segment() {
        let mut queue = Queue::new(100);
        for (number, segment) in [(0, 1), (1, 1), (2, 2), (3, 1)] {
            let job = Job {
                segment,
                ..job(number)
            };
            queue.push(A, job).unwrap();
        }
        let mut chunks = Vec::new();
        queue.lines.get_mut(&A).unwrap().chunk = 100;
        while let Some(chunk) = queue.next() {
            chunks.push(chunk.jobs.len());
            queue.submitted(A);
        }
        assert_eq!(chunks, [2, 1, 1]);
    }

    #[test]
    fn late_tasks_are_taken_and_the_others_stay() {
        let mut queue = filled(10, 3);
        let now = Instant::now();
        for number in [3, 4] {
            let deadline = now + Duration::from_millis(number as u64);
            let job = Job {
                deadline,
                ..job(number)
            };
            queue.push(B, job).unwrap();
        }
        assert!(queue.take_late(now).is_empty());
        let late = queue.take_late(now + Duration::from_millis(3));
        assert_eq!(late.iter().map(|job| job.number).collect::<Vec<_>>(), [3]);
        let late = queue.take_late(now + Duration::from_millis(4));
        assert_eq!(late.iter().map(|job| job.number).collect::<Vec<_>>(), [4]);
        // B is listed and has nothing any more.
        assert_eq!(queue.next().unwrap().peer, A);
        assert_eq!(queue.waiting, 2);
    }

    #[test]
    fn a_closed_queue_hands_everything_back() {
        let mut queue = filled(10, 3);
        let chunk = queue.next().unwrap();
        assert_eq!(queue.close().len(), 2);
        assert!(queue.push(A, job(9)).is_err());
        queue.submitted(A);
        assert!(!queue.landed(A, chunk.jobs.len(), 0));
        assert!(queue.next().is_none());
    }
}
