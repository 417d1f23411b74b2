//! A queue under any order of events, compared with a naive account of jobs and lanes.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::super::table::{Key, Table};
use super::{AfterFailure, Next, PeerQueue, Step};
use crate::batch::Reason;

const LANES_MAX: usize = 3;
const TIMEOUT: Duration = Duration::from_secs(10);

/// What happens to the peer, one after the other. The number picks a lane.
#[derive(Clone, Copy, Debug)]
enum Event {
    Push,
    /// The reactor does what the queue says; the number is a lane that turns out to be dead then.
    Dispatch(u8),
    Connect(u8),
    ConnectFails(u8),
    /// A request is done and its lane free.
    Finish(u8),
    /// A busy lane is closed by the peer without an answer.
    Close(u8),
    /// A busy lane runs out of time, `true`: although bytes moved.
    Overdue(u8, bool),
    IdleCloses(u8),
    Fetched(Fetched),
    OpenedElsewhere,
    Later,
}

#[derive(Clone, Copy, Debug)]
enum Fetched {
    Moved,
    Unmoved,
    Unresolved,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Lane {
    Connecting,
    Idle,
    Busy(u32),
}

/// What is true of one lane.
struct Entry {
    lane: Lane,
    epoch: u32,
    served: bool,
}

/// The reactor's part, kept as simply as can be.
struct Driver {
    queue: PeerQueue<u32>,
    table: Table<()>,
    lanes: BTreeMap<Key, Entry>,
    fetching: bool,
    now: Instant,
    pushed: u32,
    queued: BTreeSet<u32>,
    settled: BTreeSet<u32>,
    /// Jobs that were sent once and only may go over a fresh connection now.
    retried: BTreeSet<u32>,
}

impl Driver {
    fn new() -> Self {
        let now = Instant::now();
        Self {
            queue: PeerQueue::new(LANES_MAX, Duration::from_secs(1), now),
            table: Table::new(),
            lanes: BTreeMap::new(),
            fetching: false,
            now,
            pushed: 0,
            queued: BTreeSet::new(),
            settled: BTreeSet::new(),
            retried: BTreeSet::new(),
        }
    }

    fn nth(&self, pick: u8, wanted: impl Fn(&Lane) -> bool) -> Option<Key> {
        let lanes = self.lanes.iter().filter(|(_, entry)| wanted(&entry.lane));
        let keys: Vec<Key> = lanes.map(|(key, _)| *key).collect();
        let index = usize::from(pick).checked_rem(keys.len())?;
        Some(keys[index])
    }

    fn settle(&mut self, job: u32) {
        assert!(self.settled.insert(job), "job {job} settled twice");
    }

    fn fail(&mut self, jobs: Vec<u32>) {
        for job in jobs {
            assert!(self.queued.remove(&job), "job {job} failed unasked");
            self.settle(job);
        }
    }

    fn run(&mut self, key: Key, job: u32) {
        assert!(self.queued.remove(&job), "job {job} is not to be run");
        let epoch = self.queue.epoch;
        let entry = self.lanes.get_mut(&key).unwrap();
        assert_eq!(entry.epoch, epoch, "job {job} goes to where the peer was");
        assert!(
            !entry.served || !self.retried.contains(&job),
            "job {job} needs a fresh lane"
        );
        entry.lane = Lane::Busy(job);
    }

    fn next(&mut self, key: Key, next: Next<u32>) {
        match next {
            Next::Run(job) => self.run(key, job),
            Next::Idle => self.lanes.get_mut(&key).unwrap().lane = Lane::Idle,
            Next::Close => drop(self.lanes.remove(&key)),
        }
    }

    /// As the reactor does after it closed a busy lane.
    fn closed(&mut self, key: Key, job: u32) {
        let served = self.lanes.remove(&key).unwrap().served;
        self.queue.handle_gone(key);
        if served && self.retried.insert(job) {
            self.queued.insert(job);
            self.queue.retry(job);
        } else {
            self.settle(job);
            self.fetching |= self.queue.start_refresh(self.now);
        }
    }

    fn dispatch(&mut self, dead: Option<u8>) {
        let mut dead = dead.and_then(|pick| self.nth(pick, |lane| *lane == Lane::Idle));
        // Each step makes a lane busy, open or gone.
        for _ in 0..100 {
            match self.queue.next_step(self.now) {
                Step::Wait => return,
                Step::Open => {
                    let key = self.table.insert(());
                    let epoch = self.queue.epoch;
                    let (lane, served) = (Lane::Connecting, false);
                    self.lanes.insert(
                        key,
                        Entry {
                            lane,
                            epoch,
                            served,
                        },
                    );
                }
                Step::CloseIdle(key) => {
                    let entry = self.lanes.remove(&key).unwrap();
                    assert_eq!(entry.lane, Lane::Idle);
                }
                Step::Assign { lane, job, fresh } => {
                    assert_eq!(self.lanes[&lane].lane, Lane::Idle);
                    assert_eq!(fresh, self.retried.contains(&job));
                    if dead.take_if(|dead| *dead == lane).is_some() {
                        self.lanes.remove(&lane);
                        self.queue.handle_gone(lane);
                        self.queue.push_front(job, fresh);
                    } else {
                        self.run(lane, job);
                    }
                }
            }
        }
        panic!("the queue never waits");
    }

    fn handle(&mut self, event: Event) {
        let connecting = |lane: &Lane| *lane == Lane::Connecting;
        let busy = |lane: &Lane| matches!(lane, Lane::Busy(_));
        match event {
            Event::Push => {
                self.queued.insert(self.pushed);
                self.queue.push(self.pushed, self.now);
                self.pushed += 1;
            }
            Event::Dispatch(dead) => self.dispatch(Some(dead)),
            Event::Connect(pick) => {
                if let Some(key) = self.nth(pick, connecting) {
                    match self.queue.handle_connected(key) {
                        Some(job) => self.run(key, job),
                        None => self.lanes.get_mut(&key).unwrap().lane = Lane::Idle,
                    }
                }
            }
            Event::ConnectFails(pick) => {
                if let Some(key) = self.nth(pick, connecting) {
                    self.lanes.remove(&key);
                    match self.queue.handle_connect_failed(&Reason::Closed, self.now) {
                        AfterFailure::Fail(jobs) => self.fail(jobs),
                        AfterFailure::Refresh => {
                            self.fetching |= self.queue.start_refresh(self.now);
                        }
                    }
                }
            }
            Event::Finish(pick) => {
                if let Some(key) = self.nth(pick, busy)
                    && let Lane::Busy(job) = self.lanes[&key].lane
                {
                    self.settle(job);
                    let entry = self.lanes.get_mut(&key).unwrap();
                    entry.served = true;
                    self.queue.note_done(self.now);
                    let next = self.queue.handle_free(key, entry.epoch);
                    self.next(key, next);
                }
            }
            Event::Close(pick) => {
                if let Some(key) = self.nth(pick, busy)
                    && let Lane::Busy(job) = self.lanes[&key].lane
                {
                    self.closed(key, job);
                }
            }
            Event::Overdue(pick, moved) => {
                if let Some(key) = self.nth(pick, busy)
                    && let Lane::Busy(job) = self.lanes[&key].lane
                {
                    self.lanes.remove(&key);
                    self.queue.handle_gone(key);
                    self.settle(job);
                    let behind = if moved {
                        self.queue.handle_too_slow()
                    } else {
                        self.queue.handle_stalled(TIMEOUT, self.now)
                    };
                    self.fail(behind);
                }
            }
            Event::IdleCloses(pick) => {
                if let Some(key) = self.nth(pick, |lane| *lane == Lane::Idle) {
                    self.lanes.remove(&key);
                    self.queue.handle_gone(key);
                }
            }
            Event::Fetched(fetched) => {
                if std::mem::take(&mut self.fetching) {
                    match fetched {
                        Fetched::Moved => {
                            self.queue.handle_found_elsewhere();
                            self.leave();
                        }
                        Fetched::Unresolved => {
                            self.queue.handle_found_elsewhere();
                            let jobs = self.queue.drain();
                            self.fail(jobs);
                            self.leave();
                        }
                        Fetched::Unmoved => {
                            let failed = self.queue.handle_unmoved();
                            self.fail(failed.map_or(Vec::new(), |(_, jobs)| jobs));
                        }
                    }
                }
            }
            Event::OpenedElsewhere => {
                self.queue.handle_moved();
                self.leave();
            }
            Event::Later => self.now += Duration::from_secs(1),
        }
        self.check();
    }

    fn leave(&mut self) {
        self.lanes
            .retain(|_, entry| matches!(entry.lane, Lane::Busy(_)));
    }

    fn check(&self) {
        let count = |wanted: fn(&Lane) -> bool| {
            let lanes = self.lanes.values().filter(|entry| wanted(&entry.lane));
            lanes.count()
        };
        assert_eq!(self.queue.lanes, self.lanes.len());
        assert!(self.queue.lanes <= LANES_MAX);
        assert_eq!(
            self.queue.connecting,
            count(|lane| *lane == Lane::Connecting)
        );
        assert_eq!(self.queue.idle.len(), count(|lane| *lane == Lane::Idle));
        let waiting: BTreeSet<u32> = self.queue.queue.iter().map(|queued| queued.job).collect();
        assert_eq!(waiting, self.queued);
        let running = count(|lane| matches!(lane, Lane::Busy(_)));
        let known = waiting.len() + running + self.settled.len();
        assert_eq!(known, self.pushed as usize, "a job was lost");
    }
}

fn event() -> impl Strategy<Value = Event> {
    let fetched = prop_oneof![
        Just(Fetched::Moved),
        Just(Fetched::Unmoved),
        Just(Fetched::Unresolved),
    ];
    prop_oneof![
        6 => Just(Event::Push),
        8 => any::<u8>().prop_map(Event::Dispatch),
        6 => any::<u8>().prop_map(Event::Connect),
        2 => any::<u8>().prop_map(Event::ConnectFails),
        6 => any::<u8>().prop_map(Event::Finish),
        3 => any::<u8>().prop_map(Event::Close),
        2 => (any::<u8>(), any::<bool>()).prop_map(|(pick, moved)| Event::Overdue(pick, moved)),
        2 => any::<u8>().prop_map(Event::IdleCloses),
        3 => fetched.prop_map(Event::Fetched),
        1 => Just(Event::OpenedElsewhere),
        1 => Just(Event::Later),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn property_each_job_settles_once_on_a_lane_that_suits_it(
        events in proptest::collection::vec(event(), 0..120),
    ) {
        let mut driver = Driver::new();
        for event in events {
            driver.handle(event);
        }
        // From here on the peer behaves, and everything that was asked of it comes to an end.
        for _ in 0..4 * driver.pushed + 40 {
            for event in [
                Event::Fetched(Fetched::Unmoved),
                Event::Later,
                Event::Connect(0),
                Event::Finish(0),
            ] {
                driver.handle(event);
                driver.dispatch(None);
            }
        }
        prop_assert_eq!(driver.settled.len(), driver.pushed as usize);
    }
}
