//! Accepting connections, within limits.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use mio::net::{TcpListener, TcpStream};

use super::inbound::{Idleness, Inbound};
use super::{Connection, Deadline, Key, Reactor, Role, Serving, set_data_options};
use crate::error::Listener;
use crate::tcp::control::ControlServer;
use crate::tcp::socket::{Peeked, peek};

/// Connections accepted before others have their turn.
const TURN_ACCEPTS: usize = 64;

/// Pause after the system refused to accept, for want of descriptors or memory.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// How long a connection has to be idle before a new one may take its place: one that was accepted a
/// moment ago is about to be used, and one that is used all the time had better stay.
const IDLE_MIN: Duration = Duration::from_secs(1);

/// File descriptors that are not for data connections.
const DESCRIPTORS_LEFT: usize = 64;

/// Between two log lines about the same listener's limit.
const LOG_PERIOD: Duration = Duration::from_secs(10);

/// A listener and the connections that came from it.
pub(super) struct Listening {
    /// None in an engine that only initiates.
    listener: Option<TcpListener>,
    /// Connections that came from it and are open.
    pub(super) open: usize,
    /// There may be connections to accept.
    pub(super) pending: bool,
    /// When to try again after the system refused.
    pub(super) retry_at: Option<Instant>,
    /// A refusal has been logged and not been followed by success.
    warned: bool,
    /// Most connections at a time.
    max: usize,
    /// When the limit was last logged, and what was left out since.
    limit_logged: Option<Instant>,
    unlogged: u64,
}

impl Listening {
    pub(super) fn new(listener: Option<TcpListener>, max: usize) -> Self {
        Self {
            listener,
            open: 0,
            pending: false,
            retry_at: None,
            warned: false,
            max,
            limit_logged: None,
            unlogged: 0,
        }
    }

    /// Whether to log now that the limit has been met; the number is how many lines were left out.
    fn log_limit(&mut self, now: Instant) -> Option<u64> {
        if self
            .limit_logged
            .is_some_and(|at| now.duration_since(at) < LOG_PERIOD)
        {
            self.unlogged += 1;
            return None;
        }
        self.limit_logged = Some(now);
        Some(std::mem::take(&mut self.unlogged))
    }
}

/// Idle connections that may make way for new ones, the idlest first; looked up once in a turn.
type Idlest = Option<VecDeque<(Idleness, Key)>>;

/// Whether the system has no descriptor left, of this process or at all.
fn is_out_of_descriptors(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(code) if code == libc::EMFILE || code == libc::ENFILE
    )
}

/// Most data connections, as configured and as far as the process may open descriptors at all.
///
/// A quarter of them, and no fewer than [`DESCRIPTORS_LEFT`], are left to the rest of the process: a
/// control plane that cannot accept is as good as none.
pub(super) fn data_connections_max(configured: usize) -> usize {
    let Some(descriptors) = std::fs::read_to_string("/proc/self/limits")
        .ok()
        .and_then(|limits| descriptors_max(&limits))
    else {
        return configured;
    };
    let left = DESCRIPTORS_LEFT.max(descriptors / 4);
    let max = configured.min(descriptors.saturating_sub(left)).max(1);
    if max < configured {
        tracing::debug!(
            configured,
            max,
            "fewer data connections, for want of file descriptors"
        );
    }
    max
}

/// The soft limit of open files in the text of `/proc/self/limits`.
fn descriptors_max(limits: &str) -> Option<usize> {
    let line = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max open files"))?;
    line.split_whitespace().next()?.parse().ok()
}

impl Reactor {
    pub(super) fn accept_pending(&mut self) {
        let now = Instant::now();
        for which in [Listener::Data, Listener::Control] {
            let listening = self.listening(which);
            if listening.retry_at.is_some_and(|at| at <= now) {
                listening.retry_at = None;
                listening.pending = true;
            }
            if listening.pending {
                self.accept(which, now);
            }
        }
    }

    fn listening(&mut self, which: Listener) -> &mut Listening {
        match which {
            Listener::Data => &mut self.data,
            Listener::Control => &mut self.control,
        }
    }

    fn accept(&mut self, which: Listener, now: Instant) {
        let mut idlest = None;
        for _ in 0..TURN_ACCEPTS {
            let listening = self.listening(which);
            let Some(listener) = &listening.listener else {
                listening.pending = false;
                return;
            };
            match listener.accept() {
                Ok((stream, peer)) => {
                    listening.warned = false;
                    let is_full = listening.open >= listening.max;
                    if !self.shared.config.allows(&peer) {
                        tracing::debug!(%peer, listener = %which, "connection refused");
                        continue;
                    }
                    if is_full && !self.make_room(which, &mut idlest, now) {
                        let listening = self.listening(which);
                        if let Some(unlogged) = listening.log_limit(now) {
                            let (open, limit) = (listening.open, listening.max);
                            tracing::warn!(
                                %peer, listener = %which, open, limit, unlogged,
                                "too many connections, none of them idle: a new one is refused"
                            );
                        }
                        continue;
                    }
                    self.admit(which, stream, now);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    listening.pending = false;
                    return;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // The peer gave up before it was accepted.
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    if is_out_of_descriptors(&error) && self.make_room(which, &mut idlest, now) {
                        continue;
                    }
                    let listening = self.listening(which);
                    if !listening.warned {
                        listening.warned = true;
                        tracing::warn!(%error, listener = %which, "cannot accept connections for now");
                    }
                    listening.pending = false;
                    listening.retry_at = Some(now + RETRY_PAUSE);
                    return;
                }
            }
        }
        // More may be waiting; look again after the others, without sleeping.
        self.listening(which).retry_at = Some(now);
    }

    /// Closes the data connection that has been idle for longest, so that `which` can have another one.
    ///
    /// Nothing is lost with it: it is between requests, and no byte of a next one has arrived. A peer that sends one
    /// at this very moment gets no answer, and knows that it was not served.
    fn make_room(&mut self, which: Listener, idlest: &mut Idlest, now: Instant) -> bool {
        if which == Listener::Control && self.control.open >= self.control.max {
            // Every control connection is about to end by itself.
            return false;
        }
        let idlest = idlest.get_or_insert_with(|| self.idlest(now));
        while let Some((idleness, key)) = idlest.pop_front() {
            let Some(connection) = self.connections.get_mut(key) else {
                continue;
            };
            let is_idle = match &connection.role {
                Role::Inbound(inbound) => inbound.idleness() == Some(idleness),
                _ => false,
            };
            if !is_idle || peek(connection.stream.as_fd()) == Peeked::Bytes {
                continue;
            }
            let peer = connection.stream.peer_addr().ok();
            let idle_ms = now.saturating_duration_since(idleness.1).as_millis() as u64;
            self.close(key);
            let listening = &mut self.data;
            if let Some(unlogged) = listening.log_limit(now) {
                let limit = listening.max;
                tracing::warn!(
                    ?peer,
                    limit,
                    idle_ms,
                    unlogged,
                    "too many connections: the one that was idle for longest is closed for a new one"
                );
            }
            return true;
        }
        false
    }

    /// The idlest data connections, as many as can be needed in a turn.
    fn idlest(&self, now: Instant) -> VecDeque<(Idleness, Key)> {
        let mut idle: Vec<_> = self
            .connections
            .iter()
            .filter_map(|(key, connection)| match &connection.role {
                // What stands in the queue may have received something.
                Role::Inbound(inbound) if !connection.queued => Some((inbound.idleness()?, key)),
                _ => None,
            })
            .filter(|((_, since), _)| now.saturating_duration_since(*since) >= IDLE_MIN)
            .collect();
        if idle.len() > TURN_ACCEPTS {
            idle.select_nth_unstable(TURN_ACCEPTS);
            idle.truncate(TURN_ACCEPTS);
        }
        idle.sort_unstable();
        idle.into()
    }

    fn admit(&mut self, which: Listener, stream: TcpStream, now: Instant) {
        let timeouts = &self.shared.config.timeouts;
        let mut deadline = Deadline::default();
        let role = match which {
            Listener::Data => {
                set_data_options(&stream);
                Role::Inbound(Inbound::new(
                    self.shared.config.limits.reject_drain_bytes_max,
                    now,
                ))
            }
            Listener::Control => {
                let total = now + timeouts.control_total;
                deadline.set(Some((now + timeouts.control_idle).min(total)));
                Role::Server(Serving {
                    machine: ControlServer::new(),
                    total,
                    half_closed: false,
                })
            }
        };
        let connection = Connection {
            stream,
            readable: true,
            writable: true,
            queued: false,
            awaits_bounce: false,
            deadline,
            role,
        };
        match self.add(connection) {
            Ok(_) => self.listening(which).open += 1,
            Err(failed) => {
                let error = &failed.0;
                tracing::warn!(%error, listener = %which, "cannot watch a new connection");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_of_descriptors_is_read_where_there_is_one() {
        let line = "Max open files            1024                 524288               files     ";
        for (limits, expected) in [
            (
                format!("Limit  Soft Limit  Hard Limit  Units\n{line}\n"),
                Some(1024),
            ),
            (line.replace("1024", "unlimited"), None),
            ("Max open files".to_owned(), None),
            (String::new(), None),
        ] {
            assert_eq!(descriptors_max(&limits), expected, "{limits}");
        }
        assert_eq!(data_connections_max(1), 1);
    }

    #[test]
    fn one_line_about_the_limit_passes_and_the_next_is_counted() {
        let mut listening = Listening::new(None, 1);
        let now = Instant::now();
        assert_eq!(listening.log_limit(now), Some(0));
        assert_eq!(listening.log_limit(now + LOG_PERIOD / 2), None);
        assert_eq!(listening.log_limit(now + LOG_PERIOD), Some(1));
    }
}
