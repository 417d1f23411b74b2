//! Data connections to peers, and the tasks that run on them.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;

use mio::net::TcpStream;

use super::control::{Made, REFRESH_BYTES_MAX, look_if_made};
use super::running::Running;
use super::{
    Connecting, Connection, Deadline, ExchangeEnd, Flow, Key, Reactor, Role, fail_all, redial,
    set_data_options,
};
use crate::batch::{Reason, Remote};
use crate::error::{ControlError, IoFailure};
use crate::tcp::control::ControlClient;
use crate::tcp::peer::{PeerId, PeerLink};
use crate::tcp::queue::{AfterFailure, PeerQueue, Step};
use crate::tcp::shared::{ControlResult, Job};
use crate::tcp::socket::{Peeked, peek};
use crate::wire::control::{FrameError, FrameKind};
use crate::wire::data::DataVersion;
use crate::wire::descriptor::Descriptor;

/// A peer with work or connections.
pub(super) struct PeerEntry {
    link: Arc<PeerLink>,
    pub(super) queue: PeerQueue<Job>,
}

/// A data connection to a peer.
pub(super) struct Lane {
    pub(super) peer: PeerId,
    /// Which of the peer's endpoints it leads to.
    pub(super) epoch: u32,
    /// What is spoken there.
    pub(super) version: DataVersion,
    /// Requests served.
    pub(super) served: u64,
    pub(super) state: LaneState,
}

pub(super) enum LaneState {
    Connecting(Connecting),
    Idle,
    Busy(Box<Running>),
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

    /// The peer is where `open_segment` has found it, and no longer where lanes lead.
    pub(super) fn moved(&mut self, peer: PeerId) {
        let Some(entry) = self.peers.get_mut(&peer) else {
            return;
        };
        entry.queue.handle_moved();
        self.leave(peer);
        self.dispatch.push_back(peer);
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
                Step::Assign { lane, job, fresh } => self.assign(peer, lane, job, fresh),
            }
        }
    }

    /// Runs a job on an idle lane, if that is still alive.
    fn assign(&mut self, peer: PeerId, key: Key, job: Job, fresh: bool) {
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
                entry.queue.push_front(job, fresh);
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

    fn open_lane(&mut self, peer: PeerId) {
        let Some(entry) = self.peers.get_mut(&peer) else {
            return;
        };
        let epoch = entry.queue.epoch;
        let (mut rest, version): (VecDeque<SocketAddr>, _) = match entry.link.addresses() {
            Ok((addresses, version)) => (addresses.into(), version),
            Err(reason) => {
                fail_all(entry.queue.handle_nowhere(), &reason);
                return;
            }
        };
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
                        awaits_bounce: false,
                        deadline,
                        role: Role::Lane(Lane {
                            peer,
                            epoch,
                            version,
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
    pub(super) fn refresh(&mut self, peer: PeerId, now: Instant) {
        let Some(entry) = self.peers.get_mut(&peer) else {
            return;
        };
        if !entry.queue.start_refresh(now) {
            return;
        }
        let addresses = entry.link.control.clone();
        let text = self.shared.registry().request_descriptor().encode();
        let limits = &self.shared.config.limits;
        let max = limits.peer_descriptor_bytes_max.min(REFRESH_BYTES_MAX);
        let machine = ControlClient::new(FrameKind::Metadata, text.as_bytes(), max);
        let waits = self.shared.config.timeouts.waits();
        self.open_client(addresses, machine, waits, ExchangeEnd::Refresh(peer));
    }

    /// A fetch of the peer's descriptor has ended.
    pub(super) fn refreshed(&mut self, peer: PeerId, result: ControlResult) {
        let Some(entry) = self.peers.get_mut(&peer) else {
            return;
        };
        if let Err(ControlError::Frame(FrameError::TooLong { .. })) = result {
            entry.link.note_unread();
        }
        let usable = result
            .ok()
            .and_then(|text| Descriptor::decode_without_buffers(&text).ok());
        let moved = usable.map_or(Ok(false), |descriptor| entry.link.update(&descriptor));
        if moved == Ok(false) {
            if let Some((reason, jobs)) = entry.queue.handle_unmoved() {
                fail_all(jobs, &reason);
            }
        } else {
            tracing::info!(peer = entry.link.name, "the peer has moved");
            entry.queue.handle_found_elsewhere();
            if let Err(reason) = moved {
                fail_all(entry.queue.drain(), &reason);
            }
            self.leave(peer);
        }
        self.dispatch.push_back(peer);
    }

    /// Closes the lanes that lead to where the peer was, except for those that are busy. None is having
    /// its turn now.
    fn leave(&mut self, peer: PeerId) {
        let lanes: Vec<Key> = self
            .connections
            .iter()
            .filter(|(_, connection)| match &connection.role {
                Role::Lane(lane) => lane.peer == peer && !matches!(lane.state, LaneState::Busy(_)),
                _ => false,
            })
            .map(|(key, _)| key)
            .collect();
        for key in lanes {
            self.close(key);
        }
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
    pub(super) fn next_endpoint(
        &mut self,
        key: Key,
        connection: &mut Connection,
        reason: Reason,
    ) -> Flow {
        let Role::Lane(lane) = &mut connection.role else {
            return Flow::Close;
        };
        let LaneState::Connecting(connecting) = &mut lane.state else {
            return Flow::Close;
        };
        let mut last = reason;
        while let Some(endpoint) = connecting.rest.pop_front() {
            connecting.endpoint = endpoint;
            match redial(&self.poll, key, &mut connection.stream, endpoint) {
                Ok(()) => {
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

    /// A connected lane is to be closed.
    pub(super) fn lane_gone(&mut self, key: Key, connection: &mut Connection) -> Flow {
        if let Role::Lane(lane) = &connection.role
            && let Some(entry) = self.peers.get_mut(&lane.peer)
        {
            entry.queue.handle_gone(key);
            self.dispatch.push_back(lane.peer);
        }
        Flow::Close
    }
}
