//! The control server: one thread that answers requests in order and announces ready items.
//!
//! # Bounds
//! One request is handled at a time. A frame is at most [`ServerConfig::message_bytes_max`];
//! libzmq closes the connection of a peer that sends more. libzmq does not bound the *number* of
//! frames of one message, so a peer can make it hold many small ones until the last has arrived.
//! At most [`ServerConfig::events_max`] events wait for a subscriber; then the oldest is dropped.

mod socket;
#[cfg(test)]
mod tests;

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
    #[error("cannot listen on {endpoint}")]
    Bind {
        /// What was to be bound.
        endpoint: String,
        /// What the system says.
        source: SocketReason,
    },
    /// A socket could not be made or set up.
    #[error("cannot set up a socket")]
    Socket(#[source] SocketReason),
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

impl std::error::Error for SocketReason {}

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
            backlog_throttle: Throttle::new(BACKLOG_LOG_PERIOD),
            failures: 0,
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

/// Between two log lines about events that nobody fetches.
const BACKLOG_LOG_PERIOD: Duration = Duration::from_secs(60);

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
    backlog_throttle: Throttle,
    /// Errors of the request socket since it last worked.
    failures: u32,
}

/// Errors in a row after which a socket is taken to be in a state that it cannot leave. Each is followed by a pause.
const FAILURES_MAX: u32 = 200;
const FAILURE_PAUSE: Duration = Duration::from_millis(10);

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
            Ok(Received::Nothing) => self.survive(Ok(())),
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

    /// Goes on after a socket error unless the library itself is shutting down, or errors do not end.
    fn survive(&mut self, result: Result<(), zmq::Error>) -> bool {
        match result {
            Ok(()) => {
                self.failures = 0;
                true
            }
            Err(zmq::Error::ETERM | zmq::Error::ENOTSOCK) => {
                tracing::error!("control sockets are gone");
                false
            }
            Err(error) => {
                if let Some(suppressed) = self.throttle.admit() {
                    tracing::error!(%error, suppressed, "control socket failed");
                }
                self.failures += 1;
                if self.failures >= FAILURES_MAX {
                    tracing::error!(%error, "control socket does not recover");
                    return false;
                }
                // An error that persists must not turn the loop into a busy one.
                std::thread::sleep(FAILURE_PAUSE);
                true
            }
        }
    }

    fn queue(&mut self, events: Vec<Vec<u8>>) {
        for event in events {
            if self.backlog.push(event) {
                let dropped = 1 + self.counters.events_dropped.fetch_add(1, Ordering::Relaxed);
                let Some(suppressed) = self.backlog_throttle.admit() else {
                    continue;
                };
                if self.counters.events_sent.load(Ordering::Relaxed) == 0 {
                    tracing::debug!(
                        dropped,
                        suppressed,
                        "nobody fetches ready events, and the oldest make way; items stay as they are"
                    );
                } else {
                    tracing::warn!(
                        dropped,
                        suppressed,
                        "ready events are not fetched fast enough, and the oldest make way; items stay as they are"
                    );
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
