//! The one thread that drives every connection of an engine.
//!
//! Readiness is reported once (edge-triggered), so each connection remembers what its socket can
//! do until a call says otherwise, and a connection that still has work after its turn queues up
//! again. The machines in `target`, `exchange` and `control` decide; this file and its children
//! carry out.

mod accept;
mod control;
mod inbound;
mod lanes;
mod running;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token};

use self::accept::Listening;
use self::inbound::{FailureLog, Inbound};
use self::lanes::{Lane, PeerEntry};
use super::config::Waits;
use super::control::{ControlClient, ControlServer};
use super::local::BounceRoom;
use super::peer::PeerId;
use super::shared::{Command, ControlResult, Job, Shared};
use super::table::{Key, Table};
use super::timer::{Deadline, Timers};
use crate::batch::{Reason, Remote};
use crate::error::ControlError;

/// Tokens that are no connection.
pub(super) const WAKER: Token = Token(usize::MAX);
const DATA_LISTENER: Token = Token(usize::MAX - 1);
const CONTROL_LISTENER: Token = Token(usize::MAX - 2);

/// Readiness events taken at a time.
const EVENTS: usize = 256;

/// Bytes and calls after which a connection lets others have their turn.
const TURN_BYTES: usize = 4 << 20;
const TURN_CALLS: usize = 64;

/// Size of the buffer for control text and for bytes that are thrown away.
const SCRATCH_LEN: usize = 64 << 10;

/// Pause before a memory that was busy with a copy is asked again.
const BUSY_PAUSE: Duration = Duration::from_millis(1);

/// A connection and what is known about its socket.
struct Connection {
    stream: TcpStream,
    readable: bool,
    writable: bool,
    /// It stands in the queue of connections with work.
    queued: bool,
    /// It stands in the queue of those that wait for a bounce.
    awaits_bounce: bool,
    deadline: Deadline,
    role: Role,
}

enum Role {
    Inbound(Inbound),
    Server(Serving),
    Client(Client),
    Lane(Lane),
}

/// An accepted control connection.
struct Serving {
    machine: ControlServer,
    total: Instant,
    half_closed: bool,
}

/// A control connection that we opened.
struct Client {
    machine: ControlClient,
    waits: Waits,
    /// Set until the connection is made.
    connecting: Option<Connecting>,
    end: ExchangeEnd,
    /// What it counts for in `Reactor::refresh_bytes`.
    held: usize,
}

/// A connection in the making.
struct Connecting {
    endpoint: SocketAddr,
    /// Addresses to try after this one.
    rest: VecDeque<SocketAddr>,
}

/// Who waits for a control exchange.
enum ExchangeEnd {
    Caller(SyncSender<ControlResult>),
    Refresh(PeerId),
}

/// What to do with a connection after its turn.
#[derive(Debug, PartialEq, Eq)]
enum Flow {
    /// Wait for the socket or the deadline.
    Keep,
    /// There is more to do at once.
    Again,
    /// The local memory is busy: ask again after a pause.
    Pause,
    /// The local memory needs a bounce, and there are as many as may be: ask again when one has ended.
    AwaitBounce,
    Close,
}

/// What is left of one connection's turn.
struct Turn {
    bytes: usize,
    calls: usize,
}

impl Turn {
    fn new() -> Self {
        Self {
            bytes: TURN_BYTES,
            calls: TURN_CALLS,
        }
    }

    fn spend(&mut self, bytes: usize) {
        self.bytes = self.bytes.saturating_sub(bytes);
        self.calls = self.calls.saturating_sub(1);
    }

    fn is_over(&self) -> bool {
        self.bytes == 0 || self.calls == 0
    }
}

pub(super) struct Reactor {
    poll: Poll,
    shared: Arc<Shared>,
    connections: Table<Connection>,
    timers: Timers,
    /// Connections with work that does not wait for the socket.
    ready: VecDeque<Key>,
    /// Connections whose memory was busy.
    paused: Vec<Key>,
    bounces: BounceRoom,
    /// Connections that wait for a bounce.
    bounce_waiting: VecDeque<Key>,
    failures: FailureLog,
    peers: HashMap<PeerId, PeerEntry>,
    /// Peers that may have something to start.
    dispatch: VecDeque<PeerId>,
    data: Listening,
    control: Listening,
    /// Bytes of replies that refreshes have received and not used yet.
    refresh_bytes: usize,
    scratch: Box<[u8]>,
}

impl Reactor {
    pub(super) fn new(
        poll: Poll,
        shared: Arc<Shared>,
        mut data: Option<TcpListener>,
        mut control: Option<TcpListener>,
    ) -> io::Result<Self> {
        for (listener, token) in [(&mut data, DATA_LISTENER), (&mut control, CONTROL_LISTENER)] {
            if let Some(listener) = listener {
                poll.registry()
                    .register(listener, token, Interest::READABLE)?;
            }
        }
        let limits = &shared.config.limits;
        let data_max = accept::data_connections_max(limits.inbound_data_max);
        let control_max = limits.inbound_control_max;
        let bounces = BounceRoom::new(limits.bounces_max);
        Ok(Self {
            poll,
            shared,
            connections: Table::new(),
            timers: Timers::default(),
            ready: VecDeque::new(),
            paused: Vec::new(),
            bounces,
            bounce_waiting: VecDeque::new(),
            failures: FailureLog::default(),
            peers: HashMap::new(),
            dispatch: VecDeque::new(),
            data: Listening::new(data, data_max),
            control: Listening::new(control, control_max),
            refresh_bytes: 0,
            scratch: vec![0; SCRATCH_LEN].into_boxed_slice(),
        })
    }

    /// Runs until the engine shuts down.
    pub(super) fn run(&mut self) {
        let mut events = Events::with_capacity(EVENTS);
        loop {
            let timeout = self.poll_timeout();
            if let Err(error) = self.poll.poll(&mut events, timeout)
                && error.kind() != io::ErrorKind::Interrupted
            {
                tracing::error!(%error, "waiting for events failed; the engine stops");
                self.shared.close();
            }
            for event in &events {
                match event.token() {
                    WAKER => {}
                    DATA_LISTENER => self.data.pending = true,
                    CONTROL_LISTENER => self.control.pending = true,
                    Token(index) => {
                        let readable = event.is_readable() || event.is_read_closed();
                        let writable = event.is_writable() || event.is_write_closed();
                        self.note_ready(
                            index,
                            readable || event.is_error(),
                            writable || event.is_error(),
                        );
                    }
                }
            }
            let (commands, closed) = self.shared.take_commands();
            for command in commands {
                self.handle_command(command);
            }
            if closed {
                break;
            }
            self.accept_pending();
            for key in std::mem::take(&mut self.paused) {
                self.queue(key);
            }
            self.resume_bounces();
            // Only those that are ready now: a connection that queues up again waits for events to
            // be looked at, so that none starves.
            for _ in 0..self.ready.len() {
                if let Some(key) = self.ready.pop_front() {
                    self.drive(key);
                }
            }
            self.fire_timers();
            while let Some(peer) = self.dispatch.pop_front() {
                self.dispatch(peer);
            }
        }
        self.shut_down();
    }

    fn poll_timeout(&self) -> Option<Duration> {
        let may_bounce = !self.bounce_waiting.is_empty() && self.bounces.left() > 0;
        if !self.ready.is_empty() || !self.dispatch.is_empty() || may_bounce {
            return Some(Duration::ZERO);
        }
        let now = Instant::now();
        let timers = [
            self.timers.next(),
            self.data.retry_at,
            self.control.retry_at,
        ];
        let next = timers.into_iter().flatten().min();
        let next = next.map(|at| at.saturating_duration_since(now));
        if self.paused.is_empty() {
            next
        } else {
            Some(next.map_or(BUSY_PAUSE, |next| next.min(BUSY_PAUSE)))
        }
    }

    /// Lets as many connections go on as there may be further bounces, those that waited longest first.
    fn resume_bounces(&mut self) {
        let mut left = self.bounces.left();
        while left > 0
            && let Some(key) = self.bounce_waiting.pop_front()
        {
            if let Some(connection) = self.connections.get_mut(key) {
                connection.awaits_bounce = false;
                self.queue(key);
                left -= 1;
            }
        }
    }

    fn note_ready(&mut self, index: usize, readable: bool, writable: bool) {
        let Some(key) = self.connections.key_at(index) else {
            return;
        };
        let Some(connection) = self.connections.get_mut(key) else {
            return;
        };
        connection.readable |= readable;
        connection.writable |= writable;
        self.queue(key);
    }

    /// Gives the connection a turn.
    fn queue(&mut self, key: Key) {
        if let Some(connection) = self.connections.get_mut(key)
            && !connection.queued
        {
            connection.queued = true;
            self.ready.push_back(key);
        }
    }

    fn handle_command(&mut self, command: Command) {
        match command {
            Command::Submit(jobs) => self.submit(jobs),
            Command::Exchange {
                addresses,
                kind,
                text,
                waits,
                result,
            } => {
                let descriptor_max = self.shared.config.limits.peer_descriptor_bytes_max;
                let machine = ControlClient::new(kind, &text, descriptor_max);
                self.open_client(addresses, machine, waits, ExchangeEnd::Caller(result));
            }
            Command::CutOff(registration, done) => {
                let inside: Vec<Key> = self
                    .connections
                    .iter()
                    .filter(|(_, connection)| match &connection.role {
                        Role::Inbound(inbound) => inbound.touches(registration),
                        _ => false,
                    })
                    .map(|(key, _)| key)
                    .collect();
                for key in inside {
                    self.close(key);
                }
                // The caller may have stopped waiting; nothing is lost then.
                let _ = done.send(());
            }
            Command::Moved(peer) => self.moved(peer),
            Command::Forget(peer) => self.forget(peer),
        }
    }

    /// Registers a connection with the poll and gives it its first turn.
    fn add(&mut self, mut connection: Connection) -> Result<Key, Box<(io::Error, Connection)>> {
        connection.queued = false;
        let key = self.connections.insert(connection);
        let registered = match self.connections.get_mut(key) {
            Some(connection) => self.poll.registry().register(
                &mut connection.stream,
                Token(key.index),
                Interest::READABLE | Interest::WRITABLE,
            ),
            None => Ok(()),
        };
        match registered {
            Ok(()) => {
                self.queue(key);
                Ok(key)
            }
            Err(error) => match self.connections.remove(key) {
                Some(connection) => Err(Box::new((error, connection))),
                None => Ok(key),
            },
        }
    }

    /// Gives a connection its turn.
    fn drive(&mut self, key: Key) {
        let Some(mut connection) = self.connections.take(key) else {
            return;
        };
        connection.queued = false;
        let flow = match &connection.role {
            Role::Inbound(_) => self.drive_inbound(&mut connection),
            Role::Server(_) => self.drive_server(&mut connection),
            Role::Client(_) => self.drive_client(key, &mut connection),
            Role::Lane(_) => self.drive_lane(key, &mut connection),
        };
        self.after_turn(key, connection, flow);
    }

    fn after_turn(&mut self, key: Key, mut connection: Connection, flow: Flow) {
        if flow == Flow::Close {
            self.connections.remove(key);
            self.discard(connection);
            return;
        }
        self.timers.arm(key, &mut connection.deadline);
        if flow == Flow::AwaitBounce && !connection.awaits_bounce {
            connection.awaits_bounce = true;
            self.bounce_waiting.push_back(key);
        }
        self.connections.put_back(key, connection);
        match flow {
            Flow::Again => self.queue(key),
            Flow::Pause => self.paused.push(key),
            Flow::AwaitBounce => {}
            Flow::Keep | Flow::Close => {}
        }
    }

    /// Closes a connection that is in the table. Lanes and clients have been dealt with before.
    fn close(&mut self, key: Key) {
        if let Some(connection) = self.connections.remove(key) {
            self.discard(connection);
        }
    }

    fn discard(&mut self, mut connection: Connection) {
        match connection.role {
            Role::Inbound(_) => self.data.open -= 1,
            Role::Server(_) => self.control.open -= 1,
            Role::Client(_) | Role::Lane(_) => {}
        }
        self.timers.disarm(&mut connection.deadline);
        // Closing the descriptor deregisters it anyway; failure changes nothing.
        let _ = self.poll.registry().deregister(&mut connection.stream);
    }

    fn fire_timers(&mut self) {
        let now = Instant::now();
        // None is lent out now.
        self.timers
            .sweep(|key| self.connections.get(key).map(|found| &found.deadline));
        while let Some((at, key)) = self.timers.pop_due(now) {
            let Some(connection) = self.connections.get_mut(key) else {
                continue;
            };
            if !connection.deadline.is_due(now) {
                self.timers.fired(key, at, &mut connection.deadline);
                continue;
            }
            let Some(mut connection) = self.connections.take(key) else {
                continue;
            };
            self.timers.disarm(&mut connection.deadline);
            let flow = match &mut connection.role {
                Role::Inbound(_) | Role::Server(_) => Flow::Close,
                Role::Client(_) => self.client_overdue(key, &mut connection),
                Role::Lane(_) => self.lane_overdue(key, &mut connection, now),
            };
            self.after_turn(key, connection, flow);
        }
    }

    fn shut_down(&mut self) {
        let keys: Vec<Key> = self.connections.iter().map(|(key, _)| key).collect();
        for key in keys {
            let Some(connection) = self.connections.remove(key) else {
                continue;
            };
            match connection.role {
                Role::Lane(lane) => {
                    // Close first: the peer should not go on while we report.
                    drop(connection.stream);
                    lane.give_up(Reason::ShutDown);
                }
                Role::Client(Client {
                    end: ExchangeEnd::Caller(result),
                    ..
                }) => {
                    // The caller may be gone.
                    let _ = result.send(Err(ControlError::ShutDown));
                }
                _ => {}
            }
        }
        for (_, mut entry) in self.peers.drain() {
            for job in entry.queue.drain() {
                job.finish(Remote::Ended(Reason::ShutDown));
            }
        }
    }
}

/// Begins a connection to the next address in the place of `stream`, which could not be made.
fn redial(poll: &Poll, key: Key, stream: &mut TcpStream, endpoint: SocketAddr) -> io::Result<()> {
    let mut next = TcpStream::connect(endpoint)?;
    // Replaced by the new one; closing it deregisters it anyway.
    let _ = poll.registry().deregister(stream);
    let interest = Interest::READABLE | Interest::WRITABLE;
    poll.registry()
        .register(&mut next, Token(key.index), interest)?;
    *stream = next;
    Ok(())
}

/// Receives into `buffer`, and notes when the socket has no more.
fn receive(connection: &mut Connection, buffer: &mut [u8]) -> io::Result<Option<usize>> {
    match super::socket::receive(connection.stream.as_fd(), buffer, None) {
        Ok(count) => Ok(Some(count)),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            connection.readable = false;
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Sends from `bytes`, and notes when the socket is full.
fn send(connection: &mut Connection, bytes: &[u8]) -> io::Result<Option<usize>> {
    match super::socket::send(connection.stream.as_fd(), bytes, None) {
        Ok(count) => Ok(Some(count)),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            connection.writable = false;
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Sets what every data connection has: no delay for small frames, and keepalive, so that a peer
/// that vanished is noticed between requests too.
fn set_data_options(stream: &TcpStream) {
    let socket = socket2::SockRef::from(stream);
    let keepalive = socket2::TcpKeepalive::new()
        .with_time(Duration::from_secs(60))
        .with_interval(Duration::from_secs(15))
        .with_retries(4);
    // Only a connection that has failed refuses these, and the next call on it will say so.
    let _ = socket.set_tcp_nodelay(true);
    let _ = socket.set_tcp_keepalive(&keepalive);
}

/// Fails jobs that nothing was sent for.
fn fail_all(jobs: Vec<Job>, reason: &Reason) {
    for job in jobs {
        job.finish(Remote::Ended(reason.clone()));
    }
}
