//! Accepting connections, within limits.

use std::io;
use std::time::{Duration, Instant};

use mio::net::{TcpListener, TcpStream};

use super::inbound::Inbound;
use super::{Connection, Deadline, Reactor, Role, Serving, set_data_options};
use crate::error::Listener;
use crate::tcp::control::ControlServer;

/// Connections accepted before others have their turn.
const TURN_ACCEPTS: usize = 64;

/// Pause after the system refused to accept, for want of descriptors or memory.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

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
}

impl Listening {
    pub(super) fn new(listener: Option<TcpListener>) -> Self {
        Self {
            listener,
            open: 0,
            pending: false,
            retry_at: None,
            warned: false,
        }
    }
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
        for _ in 0..TURN_ACCEPTS {
            let listening = self.listening(which);
            let Some(listener) = &listening.listener else {
                listening.pending = false;
                return;
            };
            match listener.accept() {
                Ok((stream, peer)) => {
                    listening.warned = false;
                    let open = listening.open;
                    let limits = &self.shared.config.limits;
                    let max = match which {
                        Listener::Data => limits.inbound_data_max,
                        Listener::Control => limits.inbound_control_max,
                    };
                    if !self.shared.config.allows(&peer) || open >= max {
                        tracing::debug!(%peer, listener = %which, open, "connection refused");
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

    fn admit(&mut self, which: Listener, stream: TcpStream, now: Instant) {
        let timeouts = &self.shared.config.timeouts;
        let mut deadline = Deadline::default();
        let role = match which {
            Listener::Data => {
                set_data_options(&stream);
                Role::Inbound(Inbound::new(
                    self.shared.config.limits.reject_drain_bytes_max,
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
