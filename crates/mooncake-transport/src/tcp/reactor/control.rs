//! Control connections, accepted and opened.

use std::collections::VecDeque;
use std::io;
use std::net::{Shutdown, SocketAddr};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use mio::net::TcpStream;

use super::{
    Client, Connecting, Connection, Deadline, ExchangeEnd, Flow, Key, Reactor, Role, Turn, receive,
    redial,
};
use crate::error::{ControlError, IoFailure};
use crate::tcp::config::Waits;
use crate::tcp::control::{ClientWant, ControlClient, Request, ServerWant};
use crate::tcp::socket;
use crate::wire::control::FrameError;

/// Longest descriptor that the reactor reads when it fetches one again: decoding it takes some
/// milliseconds, in which no other connection is served.
pub(super) const REFRESH_BYTES_MAX: u64 = 1 << 20;

/// Bytes of such replies held at a time, of all peers together.
const REFRESH_BYTES_HELD_MAX: usize = 64 << 20;

/// How a connection in the making stands.
pub(super) enum Made {
    Yes,
    NotYet,
    Failed(io::Error),
}

/// Looks whether a connection has been made, once the socket has become writable.
pub(super) fn look_if_made(connection: &Connection) -> Made {
    if !connection.writable {
        return Made::NotYet;
    }
    match connection.stream.take_error() {
        Ok(Some(error)) | Err(error) => return Made::Failed(error),
        Ok(None) => {}
    }
    match connection.stream.peer_addr() {
        // Where nobody listens on a port of the ephemeral range, the kernel may pick that very port
        // for our side and connect the socket to itself.
        Ok(peer)
            if connection
                .stream
                .local_addr()
                .is_ok_and(|local| local == peer) =>
        {
            Made::Failed(io::ErrorKind::ConnectionRefused.into())
        }
        Ok(_) => Made::Yes,
        Err(error) if error.kind() == io::ErrorKind::NotConnected => Made::NotYet,
        Err(error) => Made::Failed(error),
    }
}

pub(super) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

impl Reactor {
    pub(super) fn drive_server(&mut self, connection: &mut Connection) -> Flow {
        let mut turn = Turn::new();
        let mut progressed = false;
        let flow = loop {
            if turn.is_over() {
                break Flow::Again;
            }
            let Role::Server(serving) = &mut connection.role else {
                return Flow::Close;
            };
            let moved = match serving.machine.want() {
                ServerWant::Answer(Request::Metadata) => {
                    let descriptor = self.shared.registry().descriptor().encode();
                    serving.machine.reply_descriptor(&descriptor);
                    continue;
                }
                ServerWant::Answer(Request::Notify(notice)) => {
                    self.shared.notices().push(notice.clone());
                    serving.machine.reply_taken();
                    continue;
                }
                ServerWant::Send(bytes) => {
                    if !connection.writable {
                        break Flow::Keep;
                    }
                    match socket::send(connection.stream.as_fd(), bytes, None) {
                        Ok(count) => {
                            serving.machine.handle_sent(count);
                            count
                        }
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                            connection.writable = false;
                            break Flow::Keep;
                        }
                        Err(_) => break Flow::Close,
                    }
                }
                want @ (ServerWant::Receive | ServerWant::AwaitClose) => {
                    if want == ServerWant::AwaitClose && !serving.half_closed {
                        serving.half_closed = true;
                        // A peer that is gone ends the connection below.
                        let _ = connection.stream.shutdown(Shutdown::Write);
                    }
                    if !connection.readable {
                        break Flow::Keep;
                    }
                    let received = receive(connection, &mut self.scratch);
                    let Role::Server(serving) = &mut connection.role else {
                        return Flow::Close;
                    };
                    match received {
                        Ok(None) => break Flow::Keep,
                        Ok(Some(0)) => {
                            serving.machine.handle_eof();
                            0
                        }
                        Ok(Some(count)) => {
                            serving.machine.handle_received(&self.scratch[..count]);
                            count
                        }
                        Err(_) => break Flow::Close,
                    }
                }
                ServerWant::Close => break Flow::Close,
            };
            progressed |= moved > 0;
            turn.spend(moved);
        };
        if progressed && let Role::Server(serving) = &connection.role {
            let idle = Instant::now() + self.shared.config.timeouts.control_idle;
            connection.deadline.set(Some(idle.min(serving.total)));
        }
        flow
    }

    /// Opens a control connection to the first address that accepts one.
    pub(super) fn open_client(
        &mut self,
        addresses: Vec<SocketAddr>,
        machine: ControlClient,
        waits: Waits,
        end: ExchangeEnd,
    ) {
        let mut rest: VecDeque<SocketAddr> = addresses.into();
        let mut last = ControlError::Closed;
        while let Some(endpoint) = rest.pop_front() {
            match TcpStream::connect(endpoint) {
                Ok(stream) => {
                    let mut deadline = Deadline::default();
                    deadline.set(Some(Instant::now() + waits.connect));
                    let role = Role::Client(Client {
                        machine,
                        waits,
                        connecting: Some(Connecting { endpoint, rest }),
                        end,
                        held: 0,
                    });
                    let connection = Connection {
                        stream,
                        readable: false,
                        writable: false,
                        queued: false,
                        awaits_bounce: false,
                        deadline,
                        role,
                    };
                    if let Err(failed) = self.add(connection) {
                        let (error, connection) = *failed;
                        let source = IoFailure::from(&error);
                        if let Role::Client(client) = connection.role {
                            self.end_exchange(client.end, Err(ControlError::Io { source }));
                        }
                    }
                    return;
                }
                Err(error) => {
                    last = ControlError::Connect {
                        endpoint,
                        source: IoFailure::from(&error),
                    };
                }
            }
        }
        self.end_exchange(end, Err(last));
    }

    pub(super) fn drive_client(&mut self, key: Key, connection: &mut Connection) -> Flow {
        let Role::Client(client) = &connection.role else {
            return Flow::Close;
        };
        if let Some(connecting) = &client.connecting {
            let endpoint = connecting.endpoint;
            match look_if_made(connection) {
                Made::NotYet => return Flow::Keep,
                Made::Failed(error) => {
                    let source = IoFailure::from(&error);
                    let failure = ControlError::Connect { endpoint, source };
                    return self.next_address(key, connection, failure);
                }
                Made::Yes => {
                    let reply = Instant::now() + client.waits.reply;
                    if let Role::Client(client) = &mut connection.role {
                        client.connecting = None;
                    }
                    connection.readable = true;
                    connection.deadline.set(Some(reply));
                }
            }
        }
        let mut turn = Turn::new();
        loop {
            if turn.is_over() {
                return Flow::Again;
            }
            let Role::Client(client) = &mut connection.role else {
                return Flow::Close;
            };
            match client.machine.want() {
                ClientWant::Send(bytes) => {
                    if !connection.writable {
                        return Flow::Keep;
                    }
                    match socket::send(connection.stream.as_fd(), bytes, None) {
                        Ok(count) => {
                            client.machine.handle_sent(count);
                            turn.spend(count);
                        }
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                            connection.writable = false;
                            return Flow::Keep;
                        }
                        Err(error) => client.machine.handle_failure(failure(&error)),
                    }
                }
                ClientWant::Receive => {
                    if !connection.readable {
                        return Flow::Keep;
                    }
                    let received = receive(connection, &mut self.scratch);
                    let Role::Client(client) = &mut connection.role else {
                        return Flow::Close;
                    };
                    match received {
                        Ok(None) => return Flow::Keep,
                        Ok(Some(0)) => client.machine.handle_failure(ControlError::Closed),
                        Ok(Some(count)) => {
                            client.machine.handle_received(&self.scratch[..count]);
                            turn.spend(count);
                            if matches!(client.end, ExchangeEnd::Refresh(_)) {
                                client.held += count;
                                self.refresh_bytes += count;
                                if self.refresh_bytes > REFRESH_BYTES_HELD_MAX {
                                    client.machine.handle_failure(too_much_held());
                                }
                            }
                        }
                        Err(error) => client.machine.handle_failure(failure(&error)),
                    }
                }
                ClientWant::Done => return self.client_done(connection),
            }
        }
    }

    /// Hands the result to whoever waits, and closes.
    fn client_done(&mut self, connection: &mut Connection) -> Flow {
        let Role::Client(client) = &mut connection.role else {
            return Flow::Close;
        };
        let result = client
            .machine
            .take_result()
            .unwrap_or(Err(ControlError::Closed));
        self.refresh_bytes -= std::mem::take(&mut client.held);
        // Closed before the result is used: a real peer serves nobody else until we have.
        let _ = connection.stream.shutdown(Shutdown::Both);
        let end = match &client.end {
            ExchangeEnd::Caller(sender) => ExchangeEnd::Caller(sender.clone()),
            ExchangeEnd::Refresh(peer) => ExchangeEnd::Refresh(*peer),
        };
        self.end_exchange(end, result);
        Flow::Close
    }

    pub(super) fn client_overdue(&mut self, key: Key, connection: &mut Connection) -> Flow {
        let Role::Client(client) = &mut connection.role else {
            return Flow::Close;
        };
        if let Some(connecting) = &client.connecting {
            let timeout_ms = millis(client.waits.connect);
            let endpoint = connecting.endpoint;
            let failure = ControlError::ConnectTimeout {
                endpoint,
                timeout_ms,
            };
            return self.next_address(key, connection, failure);
        }
        let timeout_ms = millis(client.waits.reply);
        client
            .machine
            .handle_failure(ControlError::ReplyTimeout { timeout_ms });
        self.client_done(connection)
    }

    /// Tries the next address in place of the one that failed.
    fn next_address(
        &mut self,
        key: Key,
        connection: &mut Connection,
        failure: ControlError,
    ) -> Flow {
        let Role::Client(client) = &mut connection.role else {
            return Flow::Close;
        };
        let mut last = failure;
        while let Some(connecting) = &mut client.connecting
            && let Some(endpoint) = connecting.rest.pop_front()
        {
            connecting.endpoint = endpoint;
            match redial(&self.poll, key, &mut connection.stream, endpoint) {
                Ok(()) => {
                    connection.readable = false;
                    connection.writable = false;
                    let timeout = client.waits.connect;
                    connection.deadline.set(Some(Instant::now() + timeout));
                    return Flow::Keep;
                }
                Err(error) => {
                    last = ControlError::Connect {
                        endpoint,
                        source: IoFailure::from(&error),
                    };
                }
            }
        }
        client.machine.handle_failure(last);
        self.client_done(connection)
    }

    pub(super) fn end_exchange(&mut self, end: ExchangeEnd, result: Result<Vec<u8>, ControlError>) {
        match end {
            // The caller waits for exactly one result and may be gone.
            ExchangeEnd::Caller(sender) => drop(sender.send(result)),
            ExchangeEnd::Refresh(peer) => self.refreshed(peer, result),
        }
    }
}

/// A reply that would be read if there were not so many others.
fn too_much_held() -> ControlError {
    let max = REFRESH_BYTES_HELD_MAX as u64;
    FrameError::TooLong { len: max + 1, max }.into()
}

fn failure(error: &io::Error) -> ControlError {
    match error.kind() {
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => ControlError::Closed,
        _ => ControlError::Io {
            source: IoFailure::from(error),
        },
    }
}
