//! A REQ socket that notices when its peer goes away.

use std::time::{Duration, Instant};

use super::{ClientError, ControlContext};
use crate::control::address::ControlAddress;
use crate::control::deadline::{has_passed, left_millis};
use crate::control::server::SocketReason;

/// One REQ socket and the monitor of its connection.
pub(super) struct Exchange {
    address: ControlAddress,
    socket: zmq::Socket,
    monitor: zmq::Socket,
}

/// Longest reply accepted. A full batch of replies is below 2 MB, a pool snapshot below 1 MB.
const REPLY_BYTES_MAX: i64 = 16 << 20;

impl Exchange {
    /// Makes the sockets; the connection comes about in the background.
    pub(super) fn connect(
        context: &ControlContext,
        address: &ControlAddress,
    ) -> Result<Self, ClientError> {
        let make = || -> Result<Self, zmq::Error> {
            let socket = context.context.socket(zmq::REQ)?;
            socket.set_ipv6(true)?;
            socket.set_linger(0)?;
            socket.set_maxmsgsize(REPLY_BYTES_MAX)?;
            // A request leaves only over a connection that stands, so one that could not be sent
            // is known not to have been seen.
            socket.set_immediate(true)?;
            let endpoint = context.monitor_endpoint();
            let events = zmq::SocketEvent::DISCONNECTED.to_raw()
                | zmq::SocketEvent::CONNECT_RETRIED.to_raw();
            socket.monitor(&endpoint, i32::from(events))?;
            let monitor = context.context.socket(zmq::PAIR)?;
            monitor.set_linger(0)?;
            monitor.connect(&endpoint)?;
            socket.connect(&address.to_string())?;
            Ok(Self {
                address: address.clone(),
                socket,
                monitor,
            })
        };
        make().map_err(|error| ClientError::Setup {
            address: address.clone(),
            source: SocketReason::new(error),
        })
    }

    /// Sends one frame as soon as there is a connection.
    pub(super) fn send(
        &mut self,
        frame: &[u8],
        deadline: Option<Instant>,
        fail_fast: bool,
    ) -> Result<(), ClientError> {
        // What happened to the connection since the last reply does not concern this request: a
        // connection that ended is made again while this waits.
        self.drain_monitor().map_err(|error| self.unsent(error))?;
        loop {
            let mut items = [
                self.socket.as_poll_item(zmq::POLLOUT),
                self.monitor.as_poll_item(zmq::POLLIN),
            ];
            poll(&mut items, deadline).map_err(|error| self.unsent(error))?;
            let (writable, told) = (items[0].is_writable(), items[1].is_readable());
            if writable {
                match self.socket.send(frame, zmq::DONTWAIT) {
                    Ok(()) => return Ok(()),
                    Err(zmq::Error::EAGAIN | zmq::Error::EINTR) => {}
                    Err(error) => return Err(self.unsent(error)),
                }
            }
            let refused = told && self.drain_monitor().map_err(|error| self.unsent(error))?;
            if (refused && fail_fast) || has_passed(deadline) {
                return Err(ClientError::Unreachable {
                    address: self.address.clone(),
                });
            }
        }
    }

    /// Waits for the one frame of the reply.
    pub(super) fn receive(
        &mut self,
        op: &'static str,
        deadline: Option<Instant>,
        timeout: Duration,
    ) -> Result<Vec<u8>, ClientError> {
        let mut ended = false;
        loop {
            let mut frame = zmq::Message::new();
            match self.socket.recv(&mut frame, zmq::DONTWAIT) {
                Ok(()) if frame.get_more() => {
                    return Err(ClientError::BadReply {
                        address: self.address.clone(),
                        op,
                        what: "it has several frames",
                        source: None,
                    });
                }
                Ok(()) => return Ok(frame.to_vec()),
                Err(zmq::Error::EAGAIN | zmq::Error::EINTR) => {}
                Err(error) => return Err(self.failed(error)),
            }
            // A reply that was waiting here when the connection ended was read above. One that was
            // still in the library's hands is lost with the connection.
            if ended {
                return Err(ClientError::Disconnected {
                    address: self.address.clone(),
                });
            }
            if has_passed(deadline) {
                return Err(ClientError::Timeout {
                    address: self.address.clone(),
                    timeout_ms: u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX),
                });
            }
            let mut items = [
                self.socket.as_poll_item(zmq::POLLIN),
                self.monitor.as_poll_item(zmq::POLLIN),
            ];
            poll(&mut items, deadline).map_err(|error| self.failed(error))?;
            if items[1].is_readable() {
                ended = self.drain_monitor().map_err(|error| self.failed(error))?;
            }
        }
    }

    /// Reads what the monitor has to say; whether it said anything.
    fn drain_monitor(&self) -> Result<bool, zmq::Error> {
        let mut told = false;
        loop {
            match self.monitor.recv_multipart(zmq::DONTWAIT) {
                Ok(_) => told = true,
                Err(zmq::Error::EAGAIN | zmq::Error::EINTR) => return Ok(told),
                Err(error) => return Err(error),
            }
        }
    }

    /// A failure before the request left.
    fn unsent(&self, error: zmq::Error) -> ClientError {
        ClientError::Setup {
            address: self.address.clone(),
            source: SocketReason::new(error),
        }
    }

    /// A failure after it.
    fn failed(&self, error: zmq::Error) -> ClientError {
        ClientError::Socket {
            address: self.address.clone(),
            source: SocketReason::new(error),
        }
    }
}

/// Waits until one of the items is ready or the deadline has come.
fn poll(items: &mut [zmq::PollItem<'_>], deadline: Option<Instant>) -> Result<(), zmq::Error> {
    match zmq::poll(items, left_millis(deadline)) {
        Ok(_) | Err(zmq::Error::EINTR) => Ok(()),
        Err(error) => Err(error),
    }
}
