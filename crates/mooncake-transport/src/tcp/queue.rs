//! The order in which one peer's tasks get connections.
//!
//! [`PeerQueue`] belongs to the reactor and is pure: it is told what happened and says what to do
//! next.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::table::Key;
use crate::batch::Reason;

/// What to do next for a peer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step<J> {
    /// Nothing until something happens.
    Wait,
    /// Open one more lane.
    Open,
    /// Run the job on this lane, after checking that it is alive. With `fresh` no lane will do that
    /// has served anything.
    Assign { lane: Key, job: J, fresh: bool },
    /// Close this idle lane to make room for a fresh one.
    CloseIdle(Key),
}

/// What a lane that is between requests does next.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next<J> {
    /// Run this job.
    Run(J),
    /// Nothing for now.
    Idle,
    /// Close: it leads to where the peer was.
    Close,
}

/// What a failure to connect leads to.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum AfterFailure<J> {
    /// Jobs to settle with the reason; others wait for lanes that are still there.
    Fail(Vec<J>),
    /// Fetch the descriptor: the peer may have moved.
    Refresh,
}

struct Queued<J> {
    job: J,
    /// Only a connection that has served nothing yet will do.
    fresh: bool,
}

/// Jobs of one peer that wait for a lane, and its lanes by number.
pub(super) struct PeerQueue<J> {
    queue: VecDeque<Queued<J>>,
    lanes_max: usize,
    /// Lanes there are, connecting ones included.
    lanes: usize,
    connecting: usize,
    idle: Vec<IdleLane>,
    /// After a failure with other lanes alive, no further lane before this.
    grow_after: Option<Instant>,
    refresh_interval: Duration,
    refreshing: bool,
    refreshed_at: Option<Instant>,
    /// Every lane failed to connect with this; the descriptor is being fetched.
    pending: Option<Reason>,
    /// Endpoints tried in vain since a connection was last made.
    rounds: u32,
    /// Counts the endpoints this peer has had.
    pub(super) epoch: u32,
    /// When a byte last moved on any lane.
    progress_at: Instant,
    /// Requests that ran out of time since the peer last sent a byte.
    stalls: usize,
    /// Requests that were too slow since the peer last finished one.
    slow: usize,
}

struct IdleLane {
    key: Key,
    fresh: bool,
}

/// Endpoints tried, one after the other, before queued jobs fail: the cached and the fetched one.
const ROUNDS_MAX: u32 = 2;

impl<J> PeerQueue<J> {
    pub(super) fn new(lanes_max: usize, refresh_interval: Duration, now: Instant) -> Self {
        Self {
            queue: VecDeque::new(),
            lanes_max,
            lanes: 0,
            connecting: 0,
            idle: Vec::new(),
            grow_after: None,
            refresh_interval,
            refreshing: false,
            refreshed_at: None,
            pending: None,
            rounds: 0,
            epoch: 0,
            progress_at: now,
            stalls: 0,
            slow: 0,
        }
    }

    pub(super) fn push(&mut self, job: J, now: Instant) {
        if self.queue.is_empty() {
            self.progress_at = now;
        }
        self.queue.push_back(Queued { job, fresh: false });
    }

    /// Puts a job back whose lane turned out to be dead before anything was sent.
    pub(super) fn push_front(&mut self, job: J, fresh: bool) {
        self.queue.push_front(Queued { job, fresh });
    }

    /// Puts a job back that may only be sent again on a fresh connection.
    pub(super) fn retry(&mut self, job: J) {
        self.queue.push_front(Queued { job, fresh: true });
    }

    /// Says what to do next; repeat until `Wait`.
    pub(super) fn next_step(&mut self, now: Instant) -> Step<J> {
        let Some(front) = self.queue.front() else {
            return Step::Wait;
        };
        if self.pending.is_some() {
            return Step::Wait;
        }
        let fresh = front.fresh;
        let idle = self.idle.iter().rposition(|lane| lane.fresh || !fresh);
        if let Some(index) = idle
            && let Some(queued) = self.queue.pop_front()
        {
            return Step::Assign {
                lane: self.idle.remove(index).key,
                job: queued.job,
                fresh,
            };
        }
        let may_grow =
            self.lanes == 0 || self.grow_after.is_none_or(|grow_after| grow_after <= now);
        if self.lanes < self.lanes_max && self.connecting < self.queue.len() && may_grow {
            self.lanes += 1;
            self.connecting += 1;
            return Step::Open;
        }
        if fresh && self.connecting == 0 && !self.idle.is_empty() {
            self.lanes -= 1;
            return Step::CloseIdle(self.idle.remove(0).key);
        }
        Step::Wait
    }

    /// A lane has been connected. Returns the job for it, or makes it idle.
    pub(super) fn handle_connected(&mut self, key: Key) -> Option<J> {
        self.connecting -= 1;
        self.rounds = 0;
        self.grow_after = None;
        match self.queue.pop_front() {
            Some(queued) => Some(queued.job),
            None => {
                self.idle.push(IdleLane { key, fresh: true });
                None
            }
        }
    }

    /// A lane to the endpoint of `epoch` has finished a request.
    pub(super) fn handle_free(&mut self, key: Key, epoch: u32) -> Next<J> {
        if epoch != self.epoch {
            self.lanes -= 1;
            return Next::Close;
        }
        if self.queue.front().is_some_and(|queued| !queued.fresh)
            && let Some(queued) = self.queue.pop_front()
        {
            return Next::Run(queued.job);
        }
        self.idle.push(IdleLane { key, fresh: false });
        Next::Idle
    }

    /// A connected lane is gone, idle or not.
    pub(super) fn handle_gone(&mut self, key: Key) {
        self.lanes -= 1;
        self.idle.retain(|lane| lane.key != key);
    }

    /// A lane could not be connected.
    pub(super) fn handle_connect_failed(
        &mut self,
        reason: &Reason,
        now: Instant,
    ) -> AfterFailure<J> {
        self.connecting -= 1;
        self.lanes -= 1;
        self.grow_after = Some(now + self.refresh_interval);
        if self.lanes > 0 {
            // Whoever insists on a fresh connection has had it.
            let (fresh, rest): (VecDeque<_>, VecDeque<_>) =
                self.queue.drain(..).partition(|queued| queued.fresh);
            self.queue = rest;
            return AfterFailure::Fail(fresh.into_iter().map(|queued| queued.job).collect());
        }
        self.rounds += 1;
        if self.rounds < ROUNDS_MAX && (self.refreshing || self.may_refresh(now)) {
            self.pending = Some(reason.clone());
            return AfterFailure::Refresh;
        }
        self.rounds = 0;
        AfterFailure::Fail(self.drain())
    }

    fn may_refresh(&self, now: Instant) -> bool {
        self.refreshed_at
            .is_none_or(|at| now.duration_since(at) >= self.refresh_interval)
    }

    /// Says whether to fetch the descriptor now, and notes that it is being fetched.
    pub(super) fn start_refresh(&mut self, now: Instant) -> bool {
        if self.refreshing || !self.may_refresh(now) {
            return false;
        }
        self.refreshing = true;
        self.refreshed_at = Some(now);
        true
    }

    /// The fetch has ended, and has found the peer nowhere else: what could not be connected cannot be
    /// reached either. Returns the jobs that fail and why.
    pub(super) fn handle_unmoved(&mut self) -> Option<(Reason, Vec<J>)> {
        self.refreshing = false;
        self.pending.take().map(|reason| (reason, self.drain()))
    }

    /// The peer is elsewhere. Lanes that are idle or connecting lead to where it was, and are to be
    /// closed now; those that are busy close when they are through.
    pub(super) fn handle_moved(&mut self) {
        self.epoch += 1;
        self.grow_after = None;
        self.lanes -= self.idle.len() + self.connecting;
        self.connecting = 0;
        self.idle.clear();
    }

    /// The fetch has ended, and the peer is elsewhere: as [`handle_moved`](Self::handle_moved).
    pub(super) fn handle_found_elsewhere(&mut self) {
        self.refreshing = false;
        self.pending = None;
        self.handle_moved();
    }

    /// A lane that was to be opened has no endpoint to lead to. Returns the jobs that fail.
    pub(super) fn handle_nowhere(&mut self) -> Vec<J> {
        self.connecting -= 1;
        self.lanes -= 1;
        self.drain()
    }

    /// Bytes have moved on a lane; `heard` if some came from the peer.
    pub(super) fn note_progress(&mut self, now: Instant, heard: bool) {
        self.progress_at = now;
        if heard {
            self.stalls = 0;
        }
    }

    /// A request ran out of time after `timeout`. If the peer as a whole stands still, the jobs
    /// behind the request will fare no better, one deadline after the other: returns them.
    ///
    /// It stands still if no lane has moved a byte for a while, or if that many requests ran out of
    /// time without a word from it: what a new connection sends may only have filled the kernel's
    /// buffers.
    pub(super) fn handle_stalled(&mut self, timeout: Duration, now: Instant) -> Vec<J> {
        self.stalls += 1;
        let still = now.duration_since(self.progress_at) >= timeout / 2;
        if still || self.stalls >= self.lanes_max {
            self.drain()
        } else {
            Vec::new()
        }
    }

    /// A request took longer than one of its length may. As many as there are lanes, without one that
    /// is done, say that those behind them will take as long: returns them.
    pub(super) fn handle_too_slow(&mut self) -> Vec<J> {
        self.slow += 1;
        if self.slow >= self.lanes_max {
            self.drain()
        } else {
            Vec::new()
        }
    }

    /// A request is done.
    pub(super) fn note_done(&mut self, now: Instant) {
        self.slow = 0;
        self.note_progress(now, true);
    }

    pub(super) fn drain(&mut self) -> Vec<J> {
        self.rounds = 0;
        self.queue.drain(..).map(|queued| queued.job).collect()
    }
}

#[cfg(test)]
mod property;

#[cfg(test)]
mod tests {
    use super::super::table::Table;
    use super::*;

    struct Fixture {
        queue: PeerQueue<u32>,
        table: Table<()>,
        now: Instant,
    }

    fn fixture(lanes_max: usize, jobs: u32) -> Fixture {
        let now = Instant::now();
        let mut queue = PeerQueue::new(lanes_max, Duration::from_secs(1), now);
        for job in 0..jobs {
            queue.push(job, now);
        }
        Fixture {
            queue,
            table: Table::new(),
            now,
        }
    }

    impl Fixture {
        fn free(&mut self, key: Key) -> Next<u32> {
            self.queue.handle_free(key, self.queue.epoch)
        }

        fn connect_failed(&mut self) -> AfterFailure<u32> {
            self.queue.handle_connect_failed(&reason(), self.now)
        }

        fn step(&mut self) -> Step<u32> {
            self.queue.next_step(self.now)
        }

        fn connect(&mut self) -> (Key, Option<u32>) {
            assert_eq!(self.step(), Step::Open);
            let key = self.table.insert(());
            (key, self.queue.handle_connected(key))
        }
    }

    fn reason() -> Reason {
        Reason::Closed
    }

    #[test]
    fn lanes_are_opened_for_queued_work_up_to_the_limit() {
        let mut f = fixture(4, 2);
        assert_eq!(f.step(), Step::Open);
        assert_eq!(f.step(), Step::Open);
        assert_eq!(f.step(), Step::Wait);
        let mut f = fixture(4, 64);
        for _ in 0..4 {
            assert_eq!(f.step(), Step::Open);
        }
        assert_eq!(f.step(), Step::Wait);
    }

    #[test]
    fn a_lane_takes_job_after_job_and_then_idles() {
        let mut f = fixture(1, 2);
        let (key, job) = f.connect();
        assert_eq!(job, Some(0));
        assert_eq!(f.free(key), Next::Run(1));
        assert_eq!(f.free(key), Next::Idle);
        assert_eq!(f.step(), Step::Wait);
        f.queue.push(7, f.now);
        let assigned = Step::Assign {
            lane: key,
            job: 7,
            fresh: false,
        };
        assert_eq!(f.step(), assigned);
    }

    // row: W8.3c
    #[test]
    fn a_retried_job_gets_a_fresh_connection_and_never_a_used_one() {
        let mut f = fixture(2, 2);
        let (first, _) = f.connect();
        let (second, _) = f.connect();
        assert_eq!(f.free(first), Next::Idle);
        f.queue.handle_gone(second);
        f.queue.retry(1);
        let (_, job) = f.connect();
        assert_eq!(job, Some(1));
    }

    // row: W8.3c
    #[test]
    fn a_retried_job_insists_on_a_fresh_connection_although_the_first_one_was_dead() {
        let mut f = fixture(3, 3);
        let lanes = [f.connect().0, f.connect().0, f.connect().0];
        assert_eq!(f.free(lanes[0]), Next::Idle);
        // The other two close without an answer, one of them in a second attempt.
        f.queue.handle_gone(lanes[1]);
        f.queue.handle_gone(lanes[2]);
        f.queue.push(7, f.now);
        assert!(matches!(f.step(), Step::Assign { job: 7, .. }));
        assert_eq!(f.step(), Step::Wait);
        // A lane is connected for nothing, so it is fresh and idle.
        f.queue.push(8, f.now);
        assert_eq!(f.step(), Step::Open);
        assert_eq!(f.queue.drain(), [8]);
        let spare = f.table.insert(());
        assert_eq!(f.queue.handle_connected(spare), None);
        f.queue.retry(1);
        let expected = Step::Assign {
            lane: spare,
            job: 1,
            fresh: true,
        };
        assert_eq!(f.step(), expected);
        // It turns out to be dead: back with the job, under the condition it had.
        f.queue.handle_gone(spare);
        f.queue.push_front(1, true);
        assert_eq!(f.free(lanes[0]), Next::Idle);
        assert_eq!(f.step(), Step::Open);
        assert_eq!(f.step(), Step::Wait);
    }

    #[test]
    fn a_lane_that_was_connecting_to_where_the_peer_was_holds_no_job_back() {
        let mut f = fixture(2, 2);
        assert_eq!(f.step(), Step::Open);
        assert_eq!(f.step(), Step::Open);
        assert!(f.queue.start_refresh(f.now));
        f.queue.handle_found_elsewhere();
        assert_eq!((f.queue.lanes, f.queue.connecting), (0, 0));
        assert_eq!(f.connect().1, Some(0));
    }

    #[test]
    fn jobs_for_a_peer_that_is_nowhere_to_be_found_fail() {
        let mut f = fixture(2, 2);
        let (key, _) = f.connect();
        assert!(f.queue.start_refresh(f.now));
        f.queue.handle_found_elsewhere();
        assert_eq!(f.step(), Step::Open);
        assert_eq!(f.queue.handle_nowhere(), [1]);
        assert_eq!(f.queue.handle_free(key, 0), Next::Close);
        f.queue.push(5, f.now);
        assert_eq!(f.step(), Step::Open);
        assert_eq!(f.queue.handle_nowhere(), [5]);
        assert_eq!((f.queue.lanes, f.queue.connecting), (0, 0));
    }

    #[test]
    fn an_idle_lane_makes_room_for_a_fresh_one() {
        let mut f = fixture(1, 1);
        let (key, _) = f.connect();
        assert_eq!(f.free(key), Next::Idle);
        f.queue.retry(9);
        assert_eq!(f.step(), Step::CloseIdle(key));
        assert_eq!(f.connect().1, Some(9));
    }

    // row: W6c
    #[test]
    fn when_no_lane_connects_the_descriptor_is_fetched_once() {
        let mut f = fixture(2, 3);
        assert_eq!(f.step(), Step::Open);
        assert_eq!(f.step(), Step::Open);
        assert_eq!(f.connect_failed(), AfterFailure::Fail(Vec::new()));
        assert_eq!(f.connect_failed(), AfterFailure::Refresh);
        assert!(f.queue.start_refresh(f.now));
        assert_eq!(f.step(), Step::Wait);
        f.queue.handle_found_elsewhere();
        // The new endpoint fails as well: no second fetch, no endless loop.
        assert_eq!(f.step(), Step::Open);
        f.now += Duration::from_secs(60);
        assert_eq!(f.connect_failed(), AfterFailure::Fail(vec![0, 1, 2]));
    }

    #[test]
    fn an_unmoved_peer_fails_what_is_queued_with_the_connect_reason() {
        let mut f = fixture(1, 2);
        assert_eq!(f.step(), Step::Open);
        assert_eq!(f.connect_failed(), AfterFailure::Refresh);
        assert!(f.queue.start_refresh(f.now));
        assert_eq!(f.queue.handle_unmoved(), Some((reason(), vec![0, 1])));
    }

    // row: W6c
    #[test]
    fn fetches_are_rate_limited_and_work_is_not_held_back_for_them() {
        let mut f = fixture(1, 1);
        assert_eq!(f.step(), Step::Open);
        assert_eq!(f.connect_failed(), AfterFailure::Refresh);
        assert!(f.queue.start_refresh(f.now));
        assert!(f.queue.handle_unmoved().is_some());
        f.queue.push(5, f.now);
        assert_eq!(f.step(), Step::Open);
        assert_eq!(f.connect_failed(), AfterFailure::Fail(vec![5]));
        f.queue.push(6, f.now);
        f.now += Duration::from_secs(1);
        assert_eq!(f.step(), Step::Open);
        assert_eq!(f.connect_failed(), AfterFailure::Refresh);
    }

    #[test]
    fn a_failure_to_grow_leaves_work_to_the_lanes_there_are() {
        let mut f = fixture(2, 3);
        let (key, _) = f.connect();
        assert_eq!(f.step(), Step::Open);
        assert_eq!(f.connect_failed(), AfterFailure::Fail(Vec::new()));
        assert_eq!(f.step(), Step::Wait);
        assert_eq!(f.free(key), Next::Run(1));
        f.queue.handle_gone(key);
        assert_eq!(f.step(), Step::Open);
    }

    #[test]
    fn moving_forgets_the_idle_lanes_of_the_old_endpoint() {
        let mut f = fixture(1, 1);
        let (key, _) = f.connect();
        f.free(key);
        assert!(f.queue.start_refresh(f.now));
        f.queue.handle_found_elsewhere();
        assert_eq!(f.queue.lanes, 0);
    }

    #[test]
    fn jobs_behind_a_peer_that_stands_still_fail_with_it_and_not_one_by_one() {
        let timeout = Duration::from_secs(30);
        let mut f = fixture(1, 3);
        f.connect();
        f.queue
            .note_progress(f.now + Duration::from_secs(14), false);
        assert_eq!(f.queue.handle_stalled(timeout, f.now + timeout), [1, 2]);
    }

    #[test]
    fn jobs_behind_a_peer_that_only_trickles_fail_once_every_lane_was_too_slow() {
        let mut f = fixture(2, 4);
        assert_eq!((f.connect().1, f.connect().1), (Some(0), Some(1)));
        assert!(f.queue.handle_too_slow().is_empty());
        f.queue.note_done(f.now);
        assert!(f.queue.handle_too_slow().is_empty());
        // What trickles is progress, and no excuse.
        f.queue.note_progress(f.now, true);
        assert_eq!(f.queue.handle_too_slow(), [2, 3]);
    }

    #[test]
    fn jobs_behind_a_stalled_lane_wait_while_others_move() {
        let timeout = Duration::from_secs(30);
        let mut f = fixture(2, 3);
        f.queue
            .note_progress(f.now + Duration::from_secs(20), false);
        assert!(f.queue.handle_stalled(timeout, f.now + timeout).is_empty());
        // A word from the peer starts the count again.
        f.queue.note_progress(f.now + timeout, true);
        assert!(f.queue.handle_stalled(timeout, f.now + timeout).is_empty());
        // Without one, what new lanes have sent counts for nothing.
        f.queue.note_progress(f.now + timeout, false);
        assert_eq!(f.queue.handle_stalled(timeout, f.now + timeout), [0, 1, 2]);
    }
}
