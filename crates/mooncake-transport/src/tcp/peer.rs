//! What an engine knows of one peer, and the order in which its tasks get connections.
//!
//! [`PeerLink`] is the part that segments share with the reactor. [`PeerQueue`] belongs to the
//! reactor and is pure: it is told what happened and says what to do next.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::shared::{Command, Shared};
use super::table::Key;
use crate::batch::Reason;
use crate::wire::descriptor::Descriptor;

/// Identity of one opened peer within its engine.
pub(super) type PeerId = u64;

/// Where a peer's data listener is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Endpoint {
    /// Host as the descriptor names it; `None`: the control host.
    pub(super) host: Option<String>,
    pub(super) port: u16,
    /// Addresses of the host, to be tried in turn; never empty.
    pub(super) addresses: Vec<SocketAddr>,
}

/// The part of an opened peer that segments share with the reactor.
pub(super) struct PeerLink {
    pub(super) id: PeerId,
    /// The name the segment was opened by.
    pub(super) name: String,
    /// Addresses of the control listener, to be tried in turn.
    pub(super) control: Vec<SocketAddr>,
    /// Where notifications go: the name in the descriptor.
    pub(super) notify_name: String,
    endpoint: Mutex<Endpoint>,
    /// The peer has moved to a host that the reactor cannot resolve.
    pub(super) stale: AtomicBool,
}

impl PeerLink {
    pub(super) fn new(
        id: PeerId,
        name: String,
        control: Vec<SocketAddr>,
        notify_name: String,
        endpoint: Endpoint,
    ) -> Self {
        Self {
            id,
            name,
            control,
            notify_name,
            endpoint: Mutex::new(endpoint),
            stale: AtomicBool::new(false),
        }
    }

    pub(super) fn endpoint(&self) -> MutexGuard<'_, Endpoint> {
        self.endpoint.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes over where a new descriptor says the data listener is, without resolving names.
    /// Returns whether it has moved.
    pub(super) fn update(&self, descriptor: &Descriptor) -> Result<bool, Reason> {
        let mut endpoint = self.endpoint();
        let data_host = dialable(descriptor.data_host.clone());
        if endpoint.host == data_host && endpoint.port == descriptor.data_port {
            return Ok(false);
        }
        let port = descriptor.data_port;
        let addresses = match &data_host {
            host if *host == endpoint.host => at_port(&endpoint.addresses, port),
            None => at_port(&self.control, port),
            Some(host) => match host.parse() {
                Ok(address) => with_fallback(vec![SocketAddr::new(address, port)], &self.control),
                Err(_) => return Err(Reason::Unresolved { host: host.clone() }),
            },
        };
        *endpoint = Endpoint {
            host: data_host,
            port,
            addresses,
        };
        Ok(true)
    }
}

/// Drops a wildcard address: nobody can dial it, and to the kernel it means this very machine.
pub(super) fn dialable(host: Option<String>) -> Option<String> {
    host.filter(|host| {
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        !bare
            .parse::<IpAddr>()
            .is_ok_and(|address| address.is_unspecified())
    })
}

/// Returns the hosts of `addresses`, each with `port`.
pub(super) fn at_port(addresses: &[SocketAddr], port: u16) -> Vec<SocketAddr> {
    addresses
        .iter()
        .map(|address| SocketAddr::new(address.ip(), port))
        .collect()
}

/// Adds the hosts that answered for control, in case the advertised data host cannot be reached.
pub(super) fn with_fallback(mut data: Vec<SocketAddr>, control: &[SocketAddr]) -> Vec<SocketAddr> {
    if let Some(port) = data.first().map(SocketAddr::port) {
        for address in at_port(control, port) {
            if !data.contains(&address) {
                data.push(address);
            }
        }
    }
    data
}

/// What a segment remembers: the link, and the duty to tell the reactor when the last user is gone.
pub(super) struct PeerHandle {
    pub(super) link: std::sync::Arc<PeerLink>,
    pub(super) shared: Weak<Shared>,
}

impl Drop for PeerHandle {
    fn drop(&mut self) {
        if let Some(shared) = self.shared.upgrade() {
            // After shutdown there is nothing left to forget.
            let _ = shared.command(Command::Forget(self.link.id));
        }
    }
}

/// What to do next for a peer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step<J> {
    /// Nothing until something happens.
    Wait,
    /// Open one more lane.
    Open,
    /// Run the job on this lane, after checking that it is alive.
    Assign(Key, J),
    /// Close this idle lane to make room for a fresh one.
    CloseIdle(Key),
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
        }
    }

    pub(super) fn push(&mut self, job: J, now: Instant) {
        if self.queue.is_empty() {
            self.progress_at = now;
        }
        self.queue.push_back(Queued { job, fresh: false });
    }

    /// Puts a job back whose lane turned out to be dead before anything was sent.
    pub(super) fn push_front(&mut self, job: J) {
        self.queue.push_front(Queued { job, fresh: false });
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
            return Step::Assign(self.idle.remove(index).key, queued.job);
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

    /// A lane has finished a request and can serve another. Returns the job for it, or makes it
    /// idle.
    pub(super) fn handle_free(&mut self, key: Key) -> Option<J> {
        if self.queue.front().is_some_and(|queued| !queued.fresh) {
            return self.queue.pop_front().map(|queued| queued.job);
        }
        self.idle.push(IdleLane { key, fresh: false });
        None
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

    /// The fetch has ended; `moved` if the peer is elsewhere now. Returns the jobs that fail and
    /// why, and the idle lanes to close.
    pub(super) fn handle_refreshed(
        &mut self,
        moved: Result<bool, Reason>,
    ) -> (Option<(Reason, Vec<J>)>, Vec<Key>) {
        self.refreshing = false;
        let pending = self.pending.take();
        match moved {
            Ok(true) => {
                self.epoch += 1;
                self.lanes -= self.idle.len();
                (None, self.idle.drain(..).map(|lane| lane.key).collect())
            }
            Ok(false) => (pending.map(|reason| (reason, self.drain())), Vec::new()),
            Err(reason) => (pending.map(|_| (reason, self.drain())), Vec::new()),
        }
    }

    /// The fetch has failed: what could not be connected cannot be reached either.
    pub(super) fn handle_refresh_failed(&mut self) -> Option<(Reason, Vec<J>)> {
        self.refreshing = false;
        self.pending.take().map(|reason| (reason, self.drain()))
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

    pub(super) fn drain(&mut self) -> Vec<J> {
        self.rounds = 0;
        self.queue.drain(..).map(|queued| queued.job).collect()
    }
}

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
        fn step(&mut self) -> Step<u32> {
            self.queue.next_step(self.now)
        }

        fn connect(&mut self) -> (Key, Option<u32>) {
            assert_eq!(self.step(), Step::Open);
            let key = self.table.insert(());
            (key, self.queue.handle_connected(key))
        }
    }

    fn link(host: Option<&str>) -> PeerLink {
        let control = vec!["10.0.0.1:15000".parse().unwrap()];
        let endpoint = Endpoint {
            host: host.map(str::to_owned),
            port: 7,
            addresses: at_port(&control, 7),
        };
        PeerLink::new(0, "10.0.0.1:15000".into(), control, String::new(), endpoint)
    }

    fn descriptor(host: Option<&str>, port: u16) -> Descriptor {
        Descriptor {
            name: String::new(),
            data_host: host.map(str::to_owned),
            data_port: port,
            version: crate::wire::data::DataVersion::V2,
            buffers: Vec::new(),
            timestamp: String::new(),
        }
    }

    #[test]
    fn a_new_descriptor_moves_the_endpoint_without_resolving_names() {
        let addresses = |link: &PeerLink| -> Vec<String> {
            link.endpoint()
                .addresses
                .iter()
                .map(ToString::to_string)
                .collect()
        };
        let peer = link(Some("worker"));
        assert_eq!(peer.update(&descriptor(Some("worker"), 7)), Ok(false));
        assert_eq!(peer.update(&descriptor(Some("worker"), 8)), Ok(true));
        assert_eq!(addresses(&peer), ["10.0.0.1:8"]);
        assert_eq!(peer.update(&descriptor(Some("10.0.0.2"), 9)), Ok(true));
        assert_eq!(addresses(&peer), ["10.0.0.2:9", "10.0.0.1:9"]);
        assert_eq!(
            peer.update(&descriptor(Some("other"), 9)),
            Err(Reason::Unresolved {
                host: "other".into()
            })
        );
        assert_eq!(addresses(&peer), ["10.0.0.2:9", "10.0.0.1:9"]);
    }

    // row: W5.2b
    #[test]
    fn a_wildcard_as_data_host_means_the_host_that_answered_for_control() {
        for wildcard in ["0.0.0.0", "::", "[::]"] {
            assert_eq!(dialable(Some(wildcard.into())), None, "{wildcard}");
            let peer = link(None);
            assert_eq!(peer.update(&descriptor(Some(wildcard), 7)), Ok(false));
        }
        assert_eq!(dialable(Some("::1".into())), Some("::1".into()));
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
        assert_eq!(f.queue.handle_free(key), Some(1));
        assert_eq!(f.queue.handle_free(key), None);
        assert_eq!(f.step(), Step::Wait);
        f.queue.push(7, f.now);
        assert_eq!(f.step(), Step::Assign(key, 7));
    }

    // row: W8.3c
    #[test]
    fn a_retried_job_gets_a_fresh_connection_and_never_a_used_one() {
        let mut f = fixture(2, 2);
        let (first, _) = f.connect();
        let (second, _) = f.connect();
        assert_eq!(f.queue.handle_free(first), None);
        f.queue.handle_gone(second);
        f.queue.retry(1);
        let (_, job) = f.connect();
        assert_eq!(job, Some(1));
    }

    #[test]
    fn an_idle_lane_makes_room_for_a_fresh_one() {
        let mut f = fixture(1, 1);
        let (key, _) = f.connect();
        assert_eq!(f.queue.handle_free(key), None);
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
        assert_eq!(
            f.queue.handle_connect_failed(&reason(), f.now),
            AfterFailure::Fail(Vec::new())
        );
        assert_eq!(
            f.queue.handle_connect_failed(&reason(), f.now),
            AfterFailure::Refresh
        );
        assert!(f.queue.start_refresh(f.now));
        assert_eq!(f.step(), Step::Wait);
        assert_eq!(f.queue.handle_refreshed(Ok(true)), (None, Vec::new()));
        // The new endpoint fails as well: no second fetch, no endless loop.
        assert_eq!(f.step(), Step::Open);
        f.now += Duration::from_secs(60);
        assert_eq!(
            f.queue.handle_connect_failed(&reason(), f.now),
            AfterFailure::Fail(vec![0, 1, 2])
        );
    }

    #[test]
    fn an_unmoved_peer_fails_what_is_queued_with_the_connect_reason() {
        let mut f = fixture(1, 2);
        assert_eq!(f.step(), Step::Open);
        assert_eq!(
            f.queue.handle_connect_failed(&reason(), f.now),
            AfterFailure::Refresh
        );
        assert!(f.queue.start_refresh(f.now));
        assert_eq!(
            f.queue.handle_refreshed(Ok(false)),
            (Some((reason(), vec![0, 1])), Vec::new())
        );
    }

    // row: W6c
    #[test]
    fn fetches_are_rate_limited_and_work_is_not_held_back_for_them() {
        let mut f = fixture(1, 1);
        assert_eq!(f.step(), Step::Open);
        assert_eq!(
            f.queue.handle_connect_failed(&reason(), f.now),
            AfterFailure::Refresh
        );
        assert!(f.queue.start_refresh(f.now));
        assert!(f.queue.handle_refresh_failed().is_some());
        f.queue.push(5, f.now);
        assert_eq!(f.step(), Step::Open);
        assert_eq!(
            f.queue.handle_connect_failed(&reason(), f.now),
            AfterFailure::Fail(vec![5])
        );
        f.queue.push(6, f.now);
        f.now += Duration::from_secs(1);
        assert_eq!(f.step(), Step::Open);
        assert_eq!(
            f.queue.handle_connect_failed(&reason(), f.now),
            AfterFailure::Refresh
        );
    }

    #[test]
    fn a_failure_to_grow_leaves_work_to_the_lanes_there_are() {
        let mut f = fixture(2, 3);
        let (key, _) = f.connect();
        assert_eq!(f.step(), Step::Open);
        assert_eq!(
            f.queue.handle_connect_failed(&reason(), f.now),
            AfterFailure::Fail(Vec::new())
        );
        assert_eq!(f.step(), Step::Wait);
        assert_eq!(f.queue.handle_free(key), Some(1));
        f.queue.handle_gone(key);
        assert_eq!(f.step(), Step::Open);
    }

    #[test]
    fn moving_closes_the_idle_lanes_of_the_old_endpoint() {
        let mut f = fixture(1, 1);
        let (key, _) = f.connect();
        f.queue.handle_free(key);
        assert!(f.queue.start_refresh(f.now));
        assert_eq!(f.queue.handle_refreshed(Ok(true)), (None, vec![key]));
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
