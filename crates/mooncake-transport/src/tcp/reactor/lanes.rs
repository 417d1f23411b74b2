//! Data connections to peers, and the tasks that run on them.

use std::collections::VecDeque;
use std::net::{Shutdown, SocketAddr};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;

use mio::net::TcpStream;
use mio::{Interest, Token};
use slab_memory::BounceDirection;

use super::control::{Made, look_if_made, millis};
use super::{
    Connecting, Connection, Deadline, ExchangeEnd, Flow, Key, Reactor, Role, Turn, fail_all,
    set_data_options,
};
use crate::batch::{Reason, Remote};
use crate::error::IoFailure;
use crate::tcp::control::ControlClient;
use crate::tcp::exchange::{Exchange, Outcome, Overdue};
use crate::tcp::local::{LocalSide, Moved};
use crate::tcp::peer::{AfterFailure, PeerId, PeerLink, PeerQueue, Step};
use crate::tcp::shared::{ControlResult, Job};
use crate::tcp::socket::{Peeked, peek};
use crate::wire::control::FrameKind;
use crate::wire::data::{DataVersion, Op, STATUS_LEN};
use crate::wire::descriptor::Descriptor;

/// A peer with work or connections.
pub(super) struct PeerEntry {
    link: Arc<PeerLink>,
    pub(super) queue: PeerQueue<Job>,
}

/// A data connection to a peer.
pub(super) struct Lane {
    peer: PeerId,
    /// Which of the peer's endpoints it leads to.
    epoch: u32,
    /// Requests served.
    served: u64,
    state: LaneState,
}

enum LaneState {
    Connecting(Connecting),
    Idle,
    Busy(Box<Running>),
}

/// A task on a lane.
struct Running {
    exchange: Exchange,
    local: LocalSide,
    job: Job,
}

impl Lane {
    /// Ends whatever runs, because the engine ends. The connection has been closed.
    pub(super) fn give_up(self, reason: Reason) {
        if let LaneState::Busy(running) = self.state {
            let Running {
                mut exchange,
                local,
                job,
            } = *running;
            drop(local);
            exchange.handle_given_up(reason.clone());
            let remote = exchange.outcome().map(|outcome| outcome.remote.clone());
            job.finish(remote.unwrap_or(Remote::Unknown(reason)));
        }
    }
}

impl Reactor {
    pub(super) fn submit(&mut self, jobs: Vec<Job>) {
        let now = Instant::now();
        let config = &self.shared.config;
        for job in jobs {
            let id = job.link.id;
            let entry = self.peers.entry(id).or_insert_with(|| PeerEntry {
                link: Arc::clone(&job.link),
                queue: PeerQueue::new(
                    config.limits.lanes_per_peer,
                    config.timeouts.refresh_interval,
                    now,
                ),
            });
            entry.queue.push(job, now);
            if self.dispatch.back() != Some(&id) {
                self.dispatch.push_back(id);
            }
        }
    }

    /// Nobody uses the peer any more: its jobs are done, for they keep it in use.
    pub(super) fn forget(&mut self, peer: PeerId) {
        self.peers.remove(&peer);
        let lanes: Vec<Key> = self
            .connections
            .iter()
            .filter(|(_, c)| matches!(&c.role, Role::Lane(lane) if lane.peer == peer))
            .map(|(key, _)| key)
            .collect();
        for key in lanes {
            self.close(key);
        }
    }

    /// Starts what can be started for a peer.
    pub(super) fn dispatch(&mut self, peer: PeerId) {
        let now = Instant::now();
        loop {
            let Some(entry) = self.peers.get_mut(&peer) else {
                return;
            };
            match entry.queue.next_step(now) {
                Step::Wait => return,
                Step::Open => self.open_lane(peer),
                Step::CloseIdle(key) => self.close(key),
                Step::Assign(key, job) => self.assign(peer, key, job),
            }
        }
    }

    /// Runs a job on an idle lane, if that is still alive.
    fn assign(&mut self, peer: PeerId, key: Key, job: Job) {
        let alive = self
            .connections
            .get_mut(key)
            .is_some_and(|connection| peek(connection.stream.as_fd()) == Peeked::Nothing);
        let connection = if alive {
            self.connections.take(key)
        } else {
            None
        };
        let Some(mut connection) = connection else {
            self.close(key);
            if let Some(entry) = self.peers.get_mut(&peer) {
                entry.queue.handle_gone(key);
                entry.queue.push_front(job);
            } else {
                job.finish(Remote::Ended(Reason::Lost));
            }
            return;
        };
        let flow = match self.begin(&mut connection, job) {
            Ok(()) => self.drive_lane(key, &mut connection),
            Err(()) => self.lane_free(key, &mut connection),
        };
        self.after_turn(key, connection, flow);
    }

    /// Sets a lane to a job. If the local memory refuses, the job has ended and the lane is free.
    fn begin(&mut self, connection: &mut Connection, job: Job) -> Result<(), ()> {
        let Role::Lane(lane) = &mut connection.role else {
            job.finish(Remote::Ended(Reason::Lost));
            return Err(());
        };
        let direction = match job.op {
            Op::Read => BounceDirection::In,
            Op::Write => BounceDirection::Out,
        };
        match LocalSide::new(Arc::clone(&job.memory), job.range.clone(), direction) {
            Ok(local) => {
                let exchange = Exchange::new(job.op, job.remote, job.len());
                lane.state = LaneState::Busy(Box::new(Running {
                    exchange,
                    local,
                    job,
                }));
                let now = Instant::now();
                connection
                    .deadline
                    .set(Some(now + self.shared.config.timeouts.progress));
                Ok(())
            }
            Err(source) => {
                job.finish(Remote::Ended(Reason::Memory { source }));
                Err(())
            }
        }
    }

    fn open_lane(&mut self, peer: PeerId) {
        let Some(entry) = self.peers.get_mut(&peer) else {
            return;
        };
        let epoch = entry.queue.epoch;
        let mut rest: VecDeque<SocketAddr> = entry.link.endpoint().addresses.clone().into();
        let mut last = Reason::Closed;
        while let Some(endpoint) = rest.pop_front() {
            match TcpStream::connect(endpoint) {
                Ok(stream) => {
                    let mut deadline = Deadline::default();
                    deadline.set(Some(Instant::now() + self.shared.config.timeouts.connect));
                    let state = LaneState::Connecting(Connecting { endpoint, rest });
                    let connection = Connection {
                        stream,
                        readable: false,
                        writable: false,
                        queued: false,
                        deadline,
                        role: Role::Lane(Lane {
                            peer,
                            epoch,
                            served: 0,
                            state,
                        }),
                    };
                    match self.add(connection) {
                        Ok(_) => return,
                        Err(failed) => {
                            let source = IoFailure::from(&failed.0);
                            last = Reason::Connect { endpoint, source };
                            break;
                        }
                    }
                }
                Err(error) => {
                    last = Reason::Connect {
                        endpoint,
                        source: IoFailure::from(&error),
                    };
                }
            }
        }
        self.lane_not_made(peer, &last);
    }

    /// No address of the peer accepted a lane.
    fn lane_not_made(&mut self, peer: PeerId, reason: &Reason) {
        let now = Instant::now();
        let Some(entry) = self.peers.get_mut(&peer) else {
            return;
        };
        match entry.queue.handle_connect_failed(reason, now) {
            AfterFailure::Fail(jobs) => fail_all(jobs, reason),
            AfterFailure::Refresh => self.refresh(peer, now),
        }
        self.dispatch.push_back(peer);
    }

    /// Fetches the peer's descriptor again, unless that has just been done.
    fn refresh(&mut self, peer: PeerId, now: Instant) {
        let Some(entry) = self.peers.get_mut(&peer) else {
            return;
        };
        if !entry.queue.start_refresh(now) {
            return;
        }
        let addresses = entry.link.control.clone();
        let text = self.shared.registry().request_descriptor().encode();
        let machine = ControlClient::new(FrameKind::Metadata, text.as_bytes());
        self.open_client(addresses, machine, ExchangeEnd::Refresh(peer));
    }

    /// A fetch of the peer's descriptor has ended.
    pub(super) fn refreshed(&mut self, peer: PeerId, result: ControlResult) {
        let Some(entry) = self.peers.get_mut(&peer) else {
            return;
        };
        let descriptor = result.ok().and_then(|text| Descriptor::decode(&text).ok());
        let usable = descriptor.filter(|found| found.version >= DataVersion::V2);
        let (failed, idle) = match usable {
            None => (entry.queue.handle_refresh_failed(), Vec::new()),
            Some(descriptor) => {
                let moved = entry.link.update(&descriptor);
                if moved.is_err() {
                    entry
                        .link
                        .stale
                        .store(true, std::sync::atomic::Ordering::Relaxed);
                }
                if moved == Ok(true) {
                    tracing::info!(peer = entry.link.name, "the peer has moved");
                }
                entry.queue.handle_refreshed(moved)
            }
        };
        if let Some((reason, jobs)) = failed {
            fail_all(jobs, &reason);
        }
        for key in idle {
            self.close(key);
        }
        self.dispatch.push_back(peer);
    }

    pub(super) fn drive_lane(&mut self, key: Key, connection: &mut Connection) -> Flow {
        let Role::Lane(lane) = &connection.role else {
            return Flow::Close;
        };
        match &lane.state {
            LaneState::Connecting(connecting) => {
                let endpoint = connecting.endpoint;
                match look_if_made(connection) {
                    Made::NotYet => Flow::Keep,
                    Made::Failed(error) => {
                        let source = IoFailure::from(&error);
                        self.next_endpoint(key, connection, Reason::Connect { endpoint, source })
                    }
                    Made::Yes => self.lane_made(key, connection),
                }
            }
            LaneState::Idle => {
                if connection.readable && peek(connection.stream.as_fd()) != Peeked::Nothing {
                    // Closed by the peer, or it speaks unasked: not to be used again.
                    return self.lane_gone(key, connection);
                }
                connection.readable = false;
                Flow::Keep
            }
            LaneState::Busy(_) => self.drive_busy(key, connection),
        }
    }

    fn lane_made(&mut self, key: Key, connection: &mut Connection) -> Flow {
        set_data_options(&connection.stream);
        connection.deadline.set(None);
        connection.readable = true;
        let Role::Lane(lane) = &mut connection.role else {
            return Flow::Close;
        };
        lane.state = LaneState::Idle;
        let Some(entry) = self.peers.get_mut(&lane.peer) else {
            return Flow::Close;
        };
        match entry.queue.handle_connected(key) {
            None => Flow::Keep,
            Some(job) => match self.begin(connection, job) {
                Ok(()) => self.drive_busy(key, connection),
                Err(()) => self.lane_free(key, connection),
            },
        }
    }

    /// Tries the next address in place of the one that failed.
    fn next_endpoint(&mut self, key: Key, connection: &mut Connection, reason: Reason) -> Flow {
        let Role::Lane(lane) = &mut connection.role else {
            return Flow::Close;
        };
        let LaneState::Connecting(connecting) = &mut lane.state else {
            return Flow::Close;
        };
        let mut last = reason;
        while let Some(endpoint) = connecting.rest.pop_front() {
            connecting.endpoint = endpoint;
            let reconnected = TcpStream::connect(endpoint).and_then(|mut stream| {
                // Replaced by the new one; closing it deregisters it anyway.
                let _ = self.poll.registry().deregister(&mut connection.stream);
                let interest = Interest::READABLE | Interest::WRITABLE;
                self.poll
                    .registry()
                    .register(&mut stream, Token(key.index), interest)?;
                Ok(stream)
            });
            match reconnected {
                Ok(stream) => {
                    connection.stream = stream;
                    connection.readable = false;
                    connection.writable = false;
                    let timeout = self.shared.config.timeouts.connect;
                    connection.deadline.set(Some(Instant::now() + timeout));
                    return Flow::Keep;
                }
                Err(error) => {
                    last = Reason::Connect {
                        endpoint,
                        source: IoFailure::from(&error),
                    };
                }
            }
        }
        let peer = lane.peer;
        self.lane_not_made(peer, &last);
        Flow::Close
    }

    fn drive_busy(&mut self, key: Key, connection: &mut Connection) -> Flow {
        let mut turn = Turn::new();
        let mut progressed = false;
        loop {
            let Role::Lane(Lane {
                state: LaneState::Busy(running),
                ..
            }) = &mut connection.role
            else {
                return Flow::Close;
            };
            let Running {
                exchange, local, ..
            } = &mut **running;
            let mut moved = 0;
            let mut busy = false;

            if connection.writable
                && let Some((head, payload)) = exchange.sending()
            {
                let fd = connection.stream.as_fd();
                let sent = if payload > 0 {
                    local.send(fd, head)
                } else {
                    match crate::tcp::socket::send(fd, head, None) {
                        Ok(count) => Moved::Bytes(count),
                        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                            Moved::WouldBlock
                        }
                        Err(error) => Moved::Io(error),
                    }
                };
                match sent {
                    Moved::Bytes(count) => {
                        exchange.handle_sent(count as u64);
                        moved += count;
                    }
                    Moved::WouldBlock => connection.writable = false,
                    Moved::Busy => busy = true,
                    Moved::Io(error) => {
                        exchange.handle_send_error(&error);
                        // What the peer had to say before it closed may be waiting; a shorter
                        // deadline applies to that.
                        connection.readable = true;
                        progressed = true;
                    }
                    Moved::Memory(source) => exchange.handle_given_up(Reason::Memory { source }),
                }
            }

            if connection.readable
                && let Some((status_missing, payload)) = exchange.receiving()
            {
                let fd = connection.stream.as_fd();
                let mut status = [0; STATUS_LEN];
                let status = &mut status[..status_missing];
                let received = if payload > 0 {
                    local.receive(fd, status)
                } else {
                    match crate::tcp::socket::receive(fd, status, None) {
                        Ok(count) => Moved::Bytes(count),
                        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                            Moved::WouldBlock
                        }
                        Err(error) => Moved::Io(error),
                    }
                };
                match received {
                    Moved::Bytes(0) => exchange.handle_eof(),
                    Moved::Bytes(count) => {
                        let of_status = count.min(status.len());
                        exchange.handle_received(&status[..of_status], (count - of_status) as u64);
                        moved += count;
                    }
                    Moved::WouldBlock => connection.readable = false,
                    Moved::Busy => busy = true,
                    Moved::Io(error) => exchange.handle_receive_error(&error),
                    Moved::Memory(source) => exchange.handle_given_up(Reason::Memory { source }),
                }
            }

            progressed |= moved > 0;
            if let Some(outcome) = exchange.outcome() {
                let mut outcome = outcome.clone();
                let in_place = if outcome.reusable {
                    local.poll_in_place()
                } else {
                    Ok(true)
                };
                match in_place {
                    Ok(true) => return self.lane_finished(key, connection, outcome),
                    Ok(false) => busy = true,
                    Err(source) => {
                        outcome.remote = Remote::Ended(Reason::Memory { source });
                        return self.lane_finished(key, connection, outcome);
                    }
                }
            }
            turn.spend(moved);
            if moved == 0 || busy || turn.is_over() {
                if progressed {
                    self.note_progress(connection);
                }
                return if busy {
                    Flow::Pause
                } else if moved == 0 {
                    Flow::Keep
                } else {
                    Flow::Again
                };
            }
        }
    }

    /// Moves the deadline of a running request after bytes have moved.
    fn note_progress(&mut self, connection: &mut Connection) {
        let now = Instant::now();
        let Role::Lane(lane) = &connection.role else {
            return;
        };
        let LaneState::Busy(running) = &lane.state else {
            return;
        };
        if let Some(entry) = self.peers.get_mut(&lane.peer) {
            entry.queue.note_progress(now, running.exchange.has_heard());
        }
        let timeouts = &self.shared.config.timeouts;
        let timeout = if running.exchange.is_broken() {
            timeouts.reject_drain.min(timeouts.progress)
        } else if running.exchange.awaits_status() {
            timeouts.status.min(timeouts.progress)
        } else {
            timeouts.progress
        };
        connection.deadline.set(Some(now + timeout));
    }

    /// A request has ended, in whichever way.
    fn lane_finished(&mut self, key: Key, connection: &mut Connection, outcome: Outcome) -> Flow {
        let now = Instant::now();
        connection.deadline.set(None);
        let Role::Lane(lane) = &mut connection.role else {
            return Flow::Close;
        };
        let LaneState::Busy(running) = std::mem::replace(&mut lane.state, LaneState::Idle) else {
            return Flow::Close;
        };
        let Running { local, mut job, .. } = *running;
        drop(local);
        if outcome.reusable {
            lane.served += 1;
            if let Some(entry) = self.peers.get_mut(&lane.peer) {
                entry.queue.note_progress(now, true);
            }
            job.finish(outcome.remote);
            return self.lane_free(key, connection);
        }
        // Closed before anything is reported or sent again.
        let _ = connection.stream.shutdown(Shutdown::Both);
        let reused = lane.served > 0;
        let peer = lane.peer;
        let flow = self.lane_gone(key, connection);
        let Some(entry) = self.peers.get_mut(&peer) else {
            job.finish(outcome.remote);
            return flow;
        };
        if outcome.unanswered && reused && !job.retried {
            job.retried = true;
            entry.queue.retry(job);
        } else {
            let closed = outcome.remote.reason() == Some(&Reason::Closed);
            job.finish(outcome.remote);
            if closed {
                self.refresh(peer, now);
            }
        }
        flow
    }

    /// A lane is between requests: gives it the next job, or lets it idle.
    fn lane_free(&mut self, key: Key, connection: &mut Connection) -> Flow {
        loop {
            let Role::Lane(lane) = &connection.role else {
                return Flow::Close;
            };
            let (peer, epoch) = (lane.peer, lane.epoch);
            let Some(entry) = self.peers.get_mut(&peer) else {
                return Flow::Close;
            };
            if entry.queue.epoch != epoch {
                return self.lane_gone(key, connection);
            }
            let Some(job) = entry.queue.handle_free(key) else {
                // The queue may hold jobs that want a fresh connection.
                self.dispatch.push_back(peer);
                return Flow::Again;
            };
            if self.begin(connection, job).is_ok() {
                // Queued up behind the other connections, so that none starves.
                return Flow::Again;
            }
        }
    }

    /// A connected lane is to be closed.
    fn lane_gone(&mut self, key: Key, connection: &mut Connection) -> Flow {
        if let Role::Lane(lane) = &connection.role
            && let Some(entry) = self.peers.get_mut(&lane.peer)
        {
            entry.queue.handle_gone(key);
            self.dispatch.push_back(lane.peer);
        }
        Flow::Close
    }

    pub(super) fn lane_overdue(
        &mut self,
        key: Key,
        connection: &mut Connection,
        now: Instant,
    ) -> Flow {
        let timeouts = self.shared.config.timeouts.clone();
        let Role::Lane(lane) = &mut connection.role else {
            return Flow::Close;
        };
        let peer = lane.peer;
        match &mut lane.state {
            LaneState::Connecting(connecting) => {
                let endpoint = connecting.endpoint;
                let timeout_ms = millis(timeouts.connect);
                self.next_endpoint(
                    key,
                    connection,
                    Reason::ConnectTimeout {
                        endpoint,
                        timeout_ms,
                    },
                )
            }
            LaneState::Idle => Flow::Keep,
            LaneState::Busy(running) => {
                let (overdue, timeout) =
                    if running.exchange.awaits_status() && timeouts.status <= timeouts.progress {
                        let timeout_ms = millis(timeouts.status);
                        (Overdue::Status { timeout_ms }, timeouts.status)
                    } else {
                        let timeout_ms = millis(timeouts.progress);
                        (Overdue::Progress { timeout_ms }, timeouts.progress)
                    };
                running.exchange.handle_overdue(overdue);
                let Some(outcome) = running.exchange.outcome().cloned() else {
                    return Flow::Close;
                };
                let reason = outcome.remote.reason().cloned();
                let flow = self.lane_finished(key, connection, outcome);
                if let Some(reason) = reason
                    && let Some(entry) = self.peers.get_mut(&peer)
                {
                    fail_all(entry.queue.handle_stalled(timeout, now), &reason);
                }
                flow
            }
        }
    }
}
