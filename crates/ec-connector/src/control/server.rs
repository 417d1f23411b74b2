//! The control server: one thread that answers requests in order and announces ready items.
//!
//! # Bounds
//! One request is handled at a time. A frame is at most [`ServerConfig::message_bytes_max`];
//! libzmq closes the connection of a peer that sends more. libzmq does not bound the *number* of
//! frames of one message, so a peer can make it hold many small ones until the last has arrived.
//! At most [`ServerConfig::events_max`] events wait for a subscriber; then the oldest is dropped.

mod socket;

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use self::socket::{Received, Sockets, ZmqSockets};
use super::address::ControlAddress;
use super::dispatch::{Dispatcher, Shard, Site};
use super::throttle::Throttle;

/// Where and how a control server listens.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ServerConfig {
    /// Address to bind both sockets to.
    pub host: IpAddr,
    /// Control port; zero picks a free one.
    pub port: u16,
    /// Control ports of all shards in rank order; nothing stands for this server's port alone.
    pub peers: Option<Vec<u16>>,
    /// `host:port` of the engine that receives the bytes.
    pub session: String,
    /// Absolute address of the slab's first byte as peers write to it.
    pub base: u64,
    /// Longest frame accepted, in bytes. A full batch of vLLM's requests is below 400 KB.
    pub message_bytes_max: u32,
    /// Most events that wait for a subscriber.
    pub events_max: usize,
}

impl ServerConfig {
    /// A server of one shard with the protocol's limits.
    pub fn new(host: IpAddr, port: u16, session: impl Into<String>, base: u64) -> Self {
        Self {
            host,
            port,
            peers: None,
            session: session.into(),
            base,
            message_bytes_max: 4 << 20,
            events_max: 4096,
        }
    }
}

/// Why a control server did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServerError {
    /// The port is in use, or the address is not one of this machine.
    #[error("cannot listen on {endpoint}: {reason}")]
    Bind {
        /// What was to be bound.
        endpoint: String,
        /// What the system says.
        reason: SocketReason,
    },
    /// A socket could not be made or set up.
    #[error("cannot set up a socket: {0}")]
    Socket(SocketReason),
    /// The thread could not be started.
    #[error("cannot start the control thread")]
    Thread(#[source] std::io::Error),
}

/// An error of a message socket, as its library words it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketReason {
    code: i32,
    text: &'static str,
}

impl SocketReason {
    pub(super) fn new(error: zmq::Error) -> Self {
        Self {
            code: error.to_raw(),
            text: error.message(),
        }
    }

    /// The system's error number, or the library's own beyond that range.
    pub fn code(self) -> i32 {
        self.code
    }
}

impl std::fmt::Display for SocketReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.text)
    }
}

/// Totals since a server started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ServerCounters {
    /// Requests answered, whatever the answer.
    pub requests: u64,
    /// Events handed to the socket.
    pub events_sent: u64,
    /// Events dropped because too many were waiting (row D15).
    pub events_dropped: u64,
}

/// A running control server.
///
/// Dropping it stops it; both take about 100 ms at most unless a request is being handled.
/// Events that no subscriber fetched are lost then.
pub struct ControlServer {
    address: ControlAddress,
    event_port: u16,
    stop: Arc<AtomicBool>,
    counters: Arc<Counters>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Counters {
    requests: AtomicU64,
    events_sent: AtomicU64,
    events_dropped: Arc<AtomicU64>,
}

impl ControlServer {
    /// Binds both sockets, then serves on a thread of its own.
    ///
    /// # Errors
    /// [`ServerError`]; nothing listens then.
    pub fn start(config: ServerConfig, shard: Arc<dyn Shard>) -> Result<Self, ServerError> {
        let sockets = ZmqSockets::bind(config.host, config.port, config.message_bytes_max)?;
        let control_port = sockets.control_port();
        let event_port = sockets.event_port();
        let site = Site {
            session: config.session,
            base: config.base,
            peers: config.peers.unwrap_or_else(|| vec![control_port]),
            control_port,
            event_port,
        };
        let counters = Arc::new(Counters::default());
        let stop = Arc::new(AtomicBool::new(false));
        let dispatcher =
            Dispatcher::with_drop_count(shard, site, Arc::clone(&counters.events_dropped));
        let mut service = Service {
            sockets,
            dispatcher,
            backlog: Backlog::new(config.events_max),
            expired_at: Instant::now(),
            counters: Arc::clone(&counters),
            throttle: Throttle::default(),
        };
        let stopped = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name("ec-control".to_owned())
            .spawn(
                move || {
                    while !stopped.load(Ordering::Acquire) && service.turn() {}
                },
            )
            .map_err(ServerError::Thread)?;
        Ok(Self {
            address: ControlAddress::new(config.host, control_port),
            event_port,
            stop,
            counters,
            thread: Some(thread),
        })
    }

    /// Where it listens.
    pub fn address(&self) -> &ControlAddress {
        &self.address
    }

    /// The control port.
    pub fn control_port(&self) -> u16 {
        self.address.port()
    }

    /// The event port.
    pub fn event_port(&self) -> u16 {
        self.event_port
    }

    /// Totals since the start.
    pub fn counters(&self) -> ServerCounters {
        ServerCounters {
            requests: self.counters.requests.load(Ordering::Relaxed),
            events_sent: self.counters.events_sent.load(Ordering::Relaxed),
            events_dropped: self.counters.events_dropped.load(Ordering::Relaxed),
        }
    }

    /// Whether the thread still serves; false only after a fault of the message library.
    pub fn is_serving(&self) -> bool {
        self.thread
            .as_ref()
            .is_some_and(|thread| !thread.is_finished())
    }

    /// Stops serving and waits until the sockets are closed.
    pub fn stop(mut self) -> ServerCounters {
        self.join();
        self.counters()
    }

    fn join(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("control thread panicked");
        }
    }
}

impl Drop for ControlServer {
    fn drop(&mut self) {
        self.join();
    }
}

/// How long one turn waits for a request.
const TICK: Duration = Duration::from_millis(100);

/// Expiry runs at least once a second; a turn may wait for a tick after looking at the clock.
const EXPIRY_PERIOD: Duration = Duration::from_millis(900);

/// The loop's state; generic so that its rules can be tested without a network.
struct Service<S> {
    sockets: S,
    dispatcher: Dispatcher,
    backlog: Backlog,
    expired_at: Instant,
    counters: Arc<Counters>,
    throttle: Throttle,
}

impl<S: Sockets> Service<S> {
    /// Sends what waits, expires if it is time, answers at most one request. False: the sockets
    /// are gone.
    fn turn(&mut self) -> bool {
        self.send_events();
        // Looked at in every turn, so a stream of requests cannot starve it.
        if self.expired_at.elapsed() >= EXPIRY_PERIOD {
            let events = self.dispatcher.expire();
            self.queue(events);
            self.expired_at = Instant::now();
        }
        match self.sockets.receive(TICK) {
            Ok(Received::Nothing) => true,
            Ok(Received::Request { frame, frame_count }) => {
                let answer = self.dispatcher.answer(&frame, frame_count);
                // Counted first: a client that has its reply finds itself counted.
                self.counters.requests.fetch_add(1, Ordering::Relaxed);
                let sent = self.sockets.reply(&answer.reply);
                self.queue(answer.events);
                self.survive(sent)
            }
            Err(reason) => self.survive(Err(reason)),
        }
    }

    /// Goes on after a socket error unless the library itself is shutting down.
    fn survive(&mut self, result: Result<(), zmq::Error>) -> bool {
        match result {
            Ok(()) => true,
            Err(zmq::Error::ETERM | zmq::Error::ENOTSOCK) => {
                tracing::error!("control sockets are gone");
                false
            }
            Err(error) => {
                if let Some(suppressed) = self.throttle.admit() {
                    tracing::error!(%error, suppressed, "control socket failed");
                }
                // An error that persists must not turn the loop into a busy one.
                std::thread::sleep(Duration::from_millis(10));
                true
            }
        }
    }

    fn queue(&mut self, events: Vec<Vec<u8>>) {
        for event in events {
            if self.backlog.push(event) {
                let dropped = 1 + self.counters.events_dropped.fetch_add(1, Ordering::Relaxed);
                if let Some(suppressed) = self.throttle.admit() {
                    tracing::warn!(dropped, suppressed, "event backlog is full");
                }
            }
        }
    }

    fn send_events(&mut self) {
        while let Some(event) = self.backlog.first() {
            match self.sockets.send_event(event) {
                Ok(true) => {
                    self.backlog.pop();
                    self.counters.events_sent.fetch_add(1, Ordering::Relaxed);
                }
                // Nobody listens, or not fast enough: the events wait.
                Ok(false) => return,
                Err(error) => {
                    if let Some(suppressed) = self.throttle.admit() {
                        tracing::error!(%error, suppressed, "event socket failed");
                    }
                    return;
                }
            }
        }
    }
}

/// Events that wait for a subscriber, oldest first.
struct Backlog {
    events: VecDeque<Vec<u8>>,
    limit: usize,
}

impl Backlog {
    fn new(limit: usize) -> Self {
        Self {
            events: VecDeque::new(),
            limit: limit.max(1),
        }
    }

    /// Appends; says whether the oldest had to make way.
    fn push(&mut self, event: Vec<u8>) -> bool {
        let full = self.events.len() >= self.limit;
        if full {
            self.events.pop_front();
        }
        self.events.push_back(event);
        full
    }

    fn first(&self) -> Option<&[u8]> {
        self.events.front().map(Vec::as_slice)
    }

    fn pop(&mut self) {
        self.events.pop_front();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::AtomicUsize;

    use super::*;
    use crate::control::dispatch::ReserveReply;
    use crate::control::message::snapshot::PoolSnapshot;
    use crate::dtype::Dtype;
    use crate::name::{MmHash, ReservationId, TransferId};
    use crate::reservation::{
        CancelKind, CancelMatch, Completion, Effect, ItemStatus, ReservationState, ReserveError,
        ReserveRequest,
    };
    use crate::tensor::TensorSpec;

    /// A shard that announces an item per completion, and panics where it is told to.
    #[derive(Default)]
    struct ScriptedShard {
        expired: AtomicUsize,
        panic_in_expire: bool,
        panic_in_status: bool,
    }

    impl Shard for ScriptedShard {
        fn reserve(
            &self,
            _: &ReserveRequest,
            _: &mut Vec<Effect>,
        ) -> Result<ReserveReply, ReserveError> {
            Ok(ReserveReply::Cancelled)
        }

        fn complete(
            &self,
            id: &TransferId,
            _: Option<ReservationId>,
            effects: &mut Vec<Effect>,
        ) -> Completion {
            effects.push(Effect::Ready(ItemStatus {
                transfer_id: id.clone(),
                mm_hash: MmHash::new("h").unwrap(),
                tensor: TensorSpec::new(Dtype::UINT8, [1]).unwrap(),
                reservation_id: ReservationId::from_random(0),
                state: ReservationState::Ready,
                cached: false,
            }));
            Completion {
                completed: true,
                became_ready: true,
            }
        }

        fn cancel(
            &self,
            _: &TransferId,
            _: CancelMatch,
            _: CancelKind,
            _: &mut Vec<Effect>,
        ) -> bool {
            true
        }

        fn status(&self, _: &TransferId) -> Option<ItemStatus> {
            assert!(!self.panic_in_status, "as told");
            None
        }

        fn expire(&self, _: &mut Vec<Effect>) {
            self.expired.fetch_add(1, Ordering::Relaxed);
            assert!(!self.panic_in_expire, "as told");
        }

        fn snapshot(&self) -> PoolSnapshot {
            PoolSnapshot::default()
        }
    }

    /// Requests to hand out, and a log of what was sent in which order.
    #[derive(Default)]
    struct ScriptedSockets {
        requests: VecDeque<Vec<u8>>,
        errors: VecDeque<zmq::Error>,
        subscribed: bool,
        log: Arc<Mutex<Vec<String>>>,
    }

    impl Sockets for ScriptedSockets {
        fn receive(&mut self, _: Duration) -> Result<Received, zmq::Error> {
            if let Some(error) = self.errors.pop_front() {
                return Err(error);
            }
            Ok(match self.requests.pop_front() {
                Some(frame) => Received::Request {
                    frame,
                    frame_count: 1,
                },
                None => Received::Nothing,
            })
        }

        fn reply(&mut self, bytes: &[u8]) -> Result<(), zmq::Error> {
            let text = String::from_utf8_lossy(bytes).into_owned();
            self.log.lock().unwrap().push(text);
            Ok(())
        }

        fn send_event(&mut self, bytes: &[u8]) -> Result<bool, zmq::Error> {
            if self.subscribed {
                let value: serde_json::Value = serde_json::from_slice(bytes).unwrap();
                self.log
                    .lock()
                    .unwrap()
                    .push(format!("event {}", value["transfer_id"]));
            }
            Ok(self.subscribed)
        }
    }

    fn service(shard: ScriptedShard, events_max: usize) -> Service<ScriptedSockets> {
        let site = Site {
            session: "127.0.0.1:1".to_owned(),
            base: 0,
            peers: vec![1],
            control_port: 1,
            event_port: 2,
        };
        let counters = Arc::new(Counters::default());
        Service {
            sockets: ScriptedSockets::default(),
            dispatcher: Dispatcher::with_drop_count(
                Arc::new(shard),
                site,
                Arc::clone(&counters.events_dropped),
            ),
            backlog: Backlog::new(events_max),
            expired_at: Instant::now(),
            counters,
            throttle: Throttle::default(),
        }
    }

    fn complete(id: &str) -> Vec<u8> {
        format!(r#"{{"op":"complete","transfer_id":"{id}","reservation_id":"r"}}"#).into_bytes()
    }

    const PEERS: &[u8] = br#"{"op":"peers"}"#;

    #[test]
    fn an_event_leaves_right_after_the_reply_of_its_request() {
        let mut service = service(ScriptedShard::default(), 8);
        service.sockets.subscribed = true;
        service.sockets.requests = [complete("a"), PEERS.to_vec()].into();
        while !service.sockets.requests.is_empty() {
            assert!(service.turn());
        }
        let log = service.sockets.log.lock().unwrap();
        assert!(log[0].contains("became_ready"), "{log:?}");
        assert_eq!(log[1], "event \"a\"");
        assert!(log[2].contains("ports"), "{log:?}");
    }

    // row: D15
    #[test]
    fn events_wait_for_a_subscriber_and_the_oldest_is_dropped_and_counted() {
        let mut service = service(ScriptedShard::default(), 2);
        service.sockets.requests = ["a", "b", "c", "d"].map(complete).into();
        for _ in 0..4 {
            assert!(service.turn());
        }
        assert_eq!(service.counters.events_dropped.load(Ordering::Relaxed), 2);
        service.sockets.log.lock().unwrap().clear();
        service.sockets.subscribed = true;
        assert!(service.turn());
        assert_eq!(
            *service.sockets.log.lock().unwrap(),
            ["event \"c\"", "event \"d\""]
        );
        assert_eq!(service.counters.events_sent.load(Ordering::Relaxed), 2);
    }

    // row: D2
    #[test]
    fn a_panic_in_the_expiry_tick_is_survived() {
        let shard = ScriptedShard {
            panic_in_expire: true,
            ..ScriptedShard::default()
        };
        let mut service = service(shard, 8);
        service.expired_at -= Duration::from_secs(2);
        service.sockets.requests = [PEERS.to_vec()].into();
        assert!(service.turn());
        let log = service.sockets.log.lock().unwrap();
        assert!(log[0].contains(r#""ok": true"#), "{log:?}");
    }

    #[test]
    fn a_panic_in_a_request_is_answered_with_an_error_and_survived() {
        let shard = ScriptedShard {
            panic_in_status: true,
            ..ScriptedShard::default()
        };
        let mut service = service(shard, 8);
        let status = br#"{"op":"status","transfer_id":"t"}"#.to_vec();
        service.sockets.requests = [status, PEERS.to_vec()].into();
        assert!(service.turn());
        assert!(service.turn());
        let log = service.sockets.log.lock().unwrap();
        assert_eq!(
            log[0],
            r#"{"ok": false, "error": "internal error", "code": "internal"}"#
        );
        assert!(log[1].contains(r#""ok": true"#));
    }

    #[test]
    fn expiry_runs_every_second_also_while_requests_keep_coming() {
        let shard = Arc::new(ScriptedShard::default());
        let mut service = service(ScriptedShard::default(), 8);
        let site = Site {
            session: String::new(),
            base: 0,
            peers: vec![],
            control_port: 1,
            event_port: 2,
        };
        service.dispatcher = Dispatcher::new(shard.clone(), site);
        for round in 0..3 {
            service.sockets.requests = vec![PEERS.to_vec(); 100].into();
            service.expired_at -= Duration::from_secs(1);
            for _ in 0..100 {
                assert!(service.turn());
            }
            assert_eq!(shard.expired.load(Ordering::Relaxed), round + 1);
        }
    }

    #[test]
    fn a_socket_error_is_survived_and_a_lost_library_ends_the_loop() {
        let mut service = service(ScriptedShard::default(), 8);
        service.sockets.errors = [zmq::Error::EFSM, zmq::Error::ETERM].into();
        service.sockets.requests = [PEERS.to_vec()].into();
        assert!(service.turn());
        assert!(!service.turn());
        assert!(service.turn(), "the request is still there");
    }
}
