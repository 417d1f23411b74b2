//! Tasks that run on a lane.

use std::net::Shutdown;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;

use slab_memory::{BounceDirection, CopyError};

use super::control::millis;
use super::lanes::{Lane, LaneState};
use super::{Connection, Flow, Key, Reactor, Role, Turn, fail_all};
use crate::batch::{Reason, Remote};
use crate::tcp::exchange::{Exchange, Outcome, Overdue};
use crate::tcp::local::{BounceRoom, LocalSide, Moved};
use crate::tcp::queue::Next;
use crate::tcp::shared::Job;
use crate::tcp::socket::{Peeked, peek};
use crate::wire::data::{DataVersion, Op, STATUS_LEN};

/// A task on a lane.
pub(super) struct Running {
    exchange: Exchange,
    /// None until there may be a bounce for it; nothing is sent before.
    local: Option<LocalSide>,
    job: Job,
    /// When it has to be done, however it moves; none if that is beyond what a clock can say.
    ends_by: Option<Instant>,
}

impl Lane {
    /// Ends whatever runs, because the engine ends. The connection has been closed.
    pub(super) fn give_up(self, reason: Reason) {
        if let LaneState::Busy(running) = self.state {
            let Running {
                mut exchange,
                local,
                job,
                ..
            } = *running;
            let is_quiet = local.is_none_or(LocalSide::end);
            exchange.handle_given_up(reason.clone());
            let remote = exchange.outcome().map(|outcome| outcome.remote.clone());
            finish(job, is_quiet, remote.unwrap_or(Remote::Unknown(reason)));
        }
    }
}

/// Ends a job, and keeps what it reserves if its range may still be touched.
fn finish(job: Job, is_quiet: bool, remote: Remote) {
    if is_quiet {
        job.finish(remote);
    } else {
        job.finish_held(remote);
    }
}

/// Makes the local side of a job, or none if it has to wait for a bounce.
fn local_side(job: &Job, room: &BounceRoom) -> Result<Option<LocalSide>, CopyError> {
    let direction = match job.op {
        Op::Read => BounceDirection::In,
        Op::Write => BounceDirection::Out,
    };
    LocalSide::new(Arc::clone(&*job.memory), job.range.clone(), direction, room)
}

impl Reactor {
    /// Sets a lane to a job. If the local memory refuses, the job has ended and the lane is free.
    pub(super) fn begin(&mut self, connection: &mut Connection, job: Job) -> Result<(), ()> {
        let Role::Lane(lane) = &mut connection.role else {
            job.finish(Remote::Ended(Reason::Lost));
            return Err(());
        };
        match local_side(&job, &self.bounces) {
            Ok(local) => {
                let exchange = Exchange::new(job.op, lane.version, job.remote, job.len());
                let timeouts = &self.shared.config.timeouts;
                let now = Instant::now();
                let ends_by = now.checked_add(timeouts.task_max(job.len()));
                lane.state = LaneState::Busy(Box::new(Running {
                    exchange,
                    local,
                    job,
                    ends_by,
                }));
                // Less than `task_max`.
                connection.deadline.set(Some(now + timeouts.progress));
                Ok(())
            }
            Err(source) => {
                job.finish(Remote::Ended(Reason::Memory { source }));
                Err(())
            }
        }
    }

    pub(super) fn drive_busy(&mut self, key: Key, connection: &mut Connection) -> Flow {
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
                exchange,
                local,
                job,
                ..
            } = &mut **running;
            let local = match local {
                Some(local) => local,
                None => match local_side(job, &self.bounces) {
                    Ok(None) => return Flow::AwaitBounce,
                    Ok(Some(made)) => local.insert(made),
                    Err(source) => {
                        return self.give_up_unsent(key, connection, Reason::Memory { source });
                    }
                },
            };
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

    /// Ends a request of which nothing was sent, so that its lane is as it was.
    fn give_up_unsent(&mut self, key: Key, connection: &mut Connection, reason: Reason) -> Flow {
        connection.deadline.set(None);
        let Role::Lane(lane) = &mut connection.role else {
            return Flow::Close;
        };
        if let LaneState::Busy(running) = std::mem::replace(&mut lane.state, LaneState::Idle) {
            running.job.finish(Remote::Ended(reason));
        }
        self.lane_free(key, connection)
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
        let at = now + timeout;
        let at = running.ends_by.map_or(at, |ends_by| ends_by.min(at));
        connection.deadline.set(Some(at));
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
        let is_quiet = local.is_none_or(LocalSide::end);
        if outcome.reusable {
            lane.served += 1;
            if let Some(entry) = self.peers.get_mut(&lane.peer) {
                entry.queue.note_done(now);
            }
            finish(job, is_quiet, outcome.remote);
            return self.lane_free(key, connection);
        }
        // Closed before anything is reported or sent again.
        let _ = connection.stream.shutdown(Shutdown::Both);
        let reused = lane.served > 0;
        let peer = lane.peer;
        let flow = self.lane_gone(key, connection);
        let Some(entry) = self.peers.get_mut(&peer) else {
            finish(job, is_quiet, outcome.remote);
            return flow;
        };
        if outcome.unanswered && reused && !job.retried && is_quiet {
            job.retried = true;
            entry.queue.retry(job);
        } else {
            let closed = outcome.remote.reason() == Some(&Reason::Closed);
            finish(job, is_quiet, outcome.remote);
            if closed {
                self.refresh(peer, now);
            }
        }
        flow
    }

    /// A lane is between requests: gives it the next job, or lets it idle.
    pub(super) fn lane_free(&mut self, key: Key, connection: &mut Connection) -> Flow {
        loop {
            let Role::Lane(lane) = &connection.role else {
                return Flow::Close;
            };
            let (peer, epoch) = (lane.peer, lane.epoch);
            if lane.version < DataVersion::V2 && peek(connection.stream.as_fd()) != Peeked::Nothing
            {
                // Nothing would tell what came unasked from the answer to the next request.
                return self.lane_gone(key, connection);
            }
            let Some(entry) = self.peers.get_mut(&peer) else {
                return Flow::Close;
            };
            let job = match entry.queue.handle_free(key, epoch) {
                Next::Run(job) => job,
                Next::Idle => {
                    // The queue may hold jobs that want a fresh connection.
                    self.dispatch.push_back(peer);
                    return Flow::Again;
                }
                Next::Close => {
                    self.dispatch.push_back(peer);
                    return Flow::Close;
                }
            };
            if self.begin(connection, job).is_ok() {
                // Queued up behind the other connections, so that none starves.
                return Flow::Again;
            }
        }
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
                let too_slow = running.ends_by.is_some_and(|at| at <= now);
                let (overdue, timeout) = if too_slow {
                    let longest = timeouts.task_max(running.job.len());
                    let timeout_ms = millis(longest);
                    (Overdue::Total { timeout_ms }, longest)
                } else if running.exchange.awaits_status() && timeouts.status <= timeouts.progress {
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
                    let behind = if too_slow {
                        entry.queue.handle_too_slow()
                    } else {
                        entry.queue.handle_stalled(timeout, now)
                    };
                    fail_all(behind, &reason);
                }
                flow
            }
        }
    }
}
