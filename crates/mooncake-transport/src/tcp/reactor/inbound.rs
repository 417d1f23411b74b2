//! Data connections that peers opened.

use std::net::Shutdown;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use mio::net::TcpStream;
use slab_memory::{BounceDirection, CopyError};

use super::{Connection, Flow, Reactor, Role, Turn, receive, send};
use crate::tcp::local::{LocalSide, Moved};
use crate::tcp::registry::RegistrationId;
use crate::tcp::target::{Patience, Target, Want};
use crate::wire::data::{HEADER_LEN, Header, Op};

/// A target machine and the memory its request touches.
pub(super) struct Inbound {
    machine: Target,
    local: Option<UnderWay>,
    /// Headers received.
    requests: u64,
    /// What the deadline was set for: this patience, in this request.
    timed: (Patience, u64),
    /// When the request under way has to be done, however it moves.
    ends_by: Option<Instant>,
    /// Since when it waits for a request, if it does.
    idle_since: Instant,
    /// We have said that we send nothing more.
    half_closed: bool,
}

/// The request under way and its memory. Holding it keeps it mapped.
struct UnderWay {
    header: Header,
    registration: RegistrationId,
    side: LocalSide,
}

/// How a connection between requests compares with others when one has to go: first those that never
/// sent a request, then those that sent their last one longest ago.
pub(super) type Idleness = (bool, Instant);

impl Inbound {
    pub(super) fn new(drain_bytes_max: u64, now: Instant) -> Self {
        Self {
            machine: Target::new(drain_bytes_max),
            local: None,
            requests: 0,
            timed: (Patience::Unlimited, 0),
            ends_by: None,
            idle_since: now,
            half_closed: false,
        }
    }

    /// How idle the connection is; nothing in the middle of a request.
    pub(super) fn idleness(&self) -> Option<Idleness> {
        self.machine
            .is_between_requests()
            .then_some((self.requests > 0, self.idle_since))
    }

    /// Says whether a request under way touches the registration.
    pub(super) fn touches(&self, registration: RegistrationId) -> bool {
        self.local
            .as_ref()
            .is_some_and(|under_way| under_way.registration == registration)
    }
}

/// Between two log lines of one kind about memory that fails: peers ask again at once, and it mostly goes on failing.
const LOG_PERIOD: Duration = Duration::from_secs(10);

/// Lets one log line pass in each [`LOG_PERIOD`].
#[derive(Default)]
struct LogLimit {
    logged: Option<Instant>,
    unlogged: u64,
}

impl LogLimit {
    /// Whether to log now; the number is how many lines were left out.
    fn admit(&mut self, now: Instant) -> Option<u64> {
        if self
            .logged
            .is_some_and(|at| now.duration_since(at) < LOG_PERIOD)
        {
            self.unlogged += 1;
            return None;
        }
        self.logged = Some(now);
        Some(std::mem::take(&mut self.unlogged))
    }
}

/// What is said about memory that fails requests of peers. They learn only that a request was rejected or cut off, so
/// that nobody else says why.
#[derive(Default)]
pub(super) struct FailureLog {
    copies: LogLimit,
    bounces: LogLimit,
}

impl FailureLog {
    fn copy_failed(&mut self, stream: &TcpStream, header: &Header, error: &CopyError) {
        if let Some(unlogged) = self.copies.admit(Instant::now()) {
            let (peer, op) = (stream.peer_addr().ok(), header.op);
            let (address, len) = (header.address, header.size);
            tracing::error!(
                ?peer, ?op, address, len, %error, unlogged,
                "a copy of a peer's request has failed; its connection is closed"
            );
        }
    }

    fn bounce_refused(&mut self, stream: &TcpStream, header: &Header, error: &CopyError) {
        if let Some(unlogged) = self.bounces.admit(Instant::now()) {
            let (peer, op) = (stream.peer_addr().ok(), header.op);
            let (address, len) = (header.address, header.size);
            tracing::warn!(
                ?peer, ?op, address, len, %error, unlogged,
                "the memory has no bounce to give; a peer's request is rejected"
            );
        }
    }
}

impl Reactor {
    pub(super) fn drive_inbound(&mut self, connection: &mut Connection) -> Flow {
        let mut turn = Turn::new();
        let mut progressed = false;
        let flow = loop {
            if turn.is_over() {
                break Flow::Again;
            }
            match self.step_inbound(connection) {
                Stepped::Moved(bytes) => {
                    progressed |= bytes > 0;
                    turn.spend(bytes);
                }
                Stepped::Wait(flow) => break flow,
            }
        };
        let timeouts = &self.shared.config.timeouts;
        let Role::Inbound(inbound) = &mut connection.role else {
            return Flow::Close;
        };
        let timing = (inbound.machine.patience(), inbound.requests);
        let changed = timing != inbound.timed;
        if !changed && !progressed {
            return flow;
        }
        inbound.timed = timing;
        let now = Instant::now();
        let after = |wait| Some(now + wait);
        match timing.0 {
            Patience::Unlimited => {
                connection.deadline.set(None);
                inbound.idle_since = now;
            }
            Patience::Header if changed => {
                connection
                    .deadline
                    .set(after(timeouts.header.min(timeouts.progress)));
            }
            Patience::Progress => {
                let at = now + timeouts.progress;
                let at = inbound.ends_by.map_or(at, |ends_by| ends_by.min(at));
                connection.deadline.set(Some(at));
            }
            Patience::Drain if changed => connection.deadline.set(after(timeouts.reject_drain)),
            Patience::Header | Patience::Drain => {}
        }
        flow
    }

    fn step_inbound(&mut self, connection: &mut Connection) -> Stepped {
        let Role::Inbound(Inbound {
            machine,
            local,
            requests,
            ends_by,
            half_closed,
            ..
        }) = &mut connection.role
        else {
            return Stepped::Wait(Flow::Close);
        };
        match machine.want() {
            Want::Header(max) => {
                if !connection.readable {
                    return Stepped::Wait(Flow::Keep);
                }
                *ends_by = None;
                let mut bytes = [0; HEADER_LEN];
                let received = receive(connection, &mut bytes[..max]);
                with_machine(connection, |machine| match received {
                    Ok(None) => Stepped::Wait(Flow::Keep),
                    Ok(Some(0)) | Err(_) => Stepped::Wait(Flow::Close),
                    Ok(Some(count)) => {
                        machine.handle_header(&bytes[..count]);
                        Stepped::Moved(count)
                    }
                })
            }
            Want::Decide(header) => {
                match self.admit_request(&header) {
                    Admission::Full => return Stepped::Wait(Flow::AwaitBounce),
                    Admission::Yes(under_way) => {
                        *local = Some(under_way);
                        machine.admit();
                    }
                    Admission::Refused(error) => {
                        let stream = &connection.stream;
                        self.failures.bounce_refused(stream, &header, &error);
                        machine.reject();
                    }
                    Admission::No => machine.reject(),
                }
                // Only now: while it waits, its deadline stays as it is.
                *requests += 1;
                let longest = self.shared.config.timeouts.task_max(header.size);
                *ends_by = Instant::now().checked_add(longest);
                Stepped::Moved(0)
            }
            Want::Payload(_) => {
                if !connection.readable {
                    return Stepped::Wait(Flow::Keep);
                }
                let Some(UnderWay { header, side, .. }) = local else {
                    return Stepped::Wait(Flow::Close);
                };
                match side.receive(connection.stream.as_fd(), &mut []) {
                    Moved::Bytes(0) | Moved::Io(_) => Stepped::Wait(Flow::Close),
                    Moved::Memory(error) => {
                        let stream = &connection.stream;
                        self.failures.copy_failed(stream, header, &error);
                        Stepped::Wait(Flow::Close)
                    }
                    Moved::Bytes(count) => {
                        machine.handle_payload(count as u64);
                        Stepped::Moved(count)
                    }
                    Moved::WouldBlock => {
                        connection.readable = false;
                        Stepped::Wait(Flow::Keep)
                    }
                    Moved::Busy => Stepped::Wait(Flow::Pause),
                }
            }
            Want::Settle => {
                if let Some(UnderWay { header, side, .. }) = local {
                    match side.poll_in_place() {
                        Ok(true) => {}
                        Ok(false) => return Stepped::Wait(Flow::Pause),
                        Err(error) => {
                            let stream = &connection.stream;
                            self.failures.copy_failed(stream, header, &error);
                            return Stepped::Wait(Flow::Close);
                        }
                    }
                }
                *local = None;
                machine.handle_in_place();
                Stepped::Moved(0)
            }
            Want::Send(head, payload) => {
                if !connection.writable {
                    return Stepped::Wait(Flow::Keep);
                }
                let moved = match local {
                    Some(UnderWay { side, .. }) if payload > 0 => {
                        side.send(connection.stream.as_fd(), head)
                    }
                    _ => {
                        // At most one status frame; copied so that the connection is free.
                        let mut frame = [0; crate::wire::data::STATUS_LEN];
                        let frame = &mut frame[..head.len()];
                        frame.copy_from_slice(head);
                        match send(connection, frame) {
                            Ok(Some(count)) => Moved::Bytes(count),
                            Ok(None) => Moved::WouldBlock,
                            Err(error) => Moved::Io(error),
                        }
                    }
                };
                match moved {
                    Moved::Bytes(count) => {
                        let Role::Inbound(inbound) = &mut connection.role else {
                            return Stepped::Wait(Flow::Close);
                        };
                        inbound.machine.handle_sent(count as u64);
                        if inbound.machine.is_between_requests() {
                            inbound.local = None;
                        }
                        Stepped::Moved(count)
                    }
                    Moved::WouldBlock => {
                        connection.writable = false;
                        Stepped::Wait(Flow::Keep)
                    }
                    Moved::Busy => Stepped::Wait(Flow::Pause),
                    Moved::Io(_) => Stepped::Wait(Flow::Close),
                    Moved::Memory(error) => {
                        if let Role::Inbound(inbound) = &connection.role
                            && let Some(UnderWay { header, .. }) = &inbound.local
                        {
                            let stream = &connection.stream;
                            self.failures.copy_failed(stream, header, &error);
                        }
                        Stepped::Wait(Flow::Close)
                    }
                }
            }
            Want::Drain(max) => {
                if !*half_closed {
                    *half_closed = true;
                    // A peer that is gone ends the connection below.
                    let _ = connection.stream.shutdown(Shutdown::Write);
                }
                if !connection.readable {
                    return Stepped::Wait(Flow::Keep);
                }
                let max = usize::try_from(max)
                    .unwrap_or(usize::MAX)
                    .min(self.scratch.len());
                let received = receive(connection, &mut self.scratch[..max]);
                with_machine(connection, |machine| match received {
                    Ok(None) => Stepped::Wait(Flow::Keep),
                    Ok(Some(0)) | Err(_) => Stepped::Wait(Flow::Close),
                    Ok(Some(count)) => {
                        machine.handle_drained(count as u64);
                        Stepped::Moved(count)
                    }
                })
            }
            Want::Close => Stepped::Wait(Flow::Close),
        }
    }

    /// Looks the range of a request up among what is registered now.
    fn admit_request(&self, header: &Header) -> Admission {
        let Some(admitted) = self.shared.registry().admit(header) else {
            return Admission::No;
        };
        let direction = match header.op {
            Op::Read => BounceDirection::Out,
            Op::Write => BounceDirection::In,
        };
        match LocalSide::new(admitted.memory, admitted.range, direction, &self.bounces) {
            Ok(Some(side)) => Admission::Yes(UnderWay {
                header: *header,
                registration: admitted.id,
                side,
            }),
            Ok(None) => Admission::Full,
            Err(error) => Admission::Refused(error),
        }
    }
}

/// Whether a request is served.
enum Admission {
    Yes(UnderWay),
    /// Nothing that peers may touch in this way is registered there.
    No,
    /// Its memory cannot begin.
    Refused(CopyError),
    /// Its memory needs a bounce, and there are as many as may be.
    Full,
}

/// What one step of a connection came to.
enum Stepped {
    /// It went on, and moved this many bytes.
    Moved(usize),
    /// There is nothing to do for now.
    Wait(Flow),
}

fn with_machine(connection: &mut Connection, step: impl FnOnce(&mut Target) -> Stepped) -> Stepped {
    match &mut connection.role {
        Role::Inbound(inbound) => step(&mut inbound.machine),
        _ => Stepped::Wait(Flow::Close),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_about_failing_memory_passes_and_the_next_is_counted() {
        let mut limit = LogLimit::default();
        let now = Instant::now();
        assert_eq!(limit.admit(now), Some(0));
        assert_eq!(limit.admit(now + LOG_PERIOD / 2), None);
        assert_eq!(limit.admit(now + LOG_PERIOD), Some(1));
    }
}
