//! The four message sockets of a pipe, two to a direction. Each belongs to one value and so to one
//! thread at a time.
//!
//! Liveness is read off the connecting sockets: they have one connection each, whose ups and downs
//! their monitor reports. A binding socket may have any number, which cannot be told apart.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::error::{SocketReason, StartError};
use super::frame::{FRAME_BYTES_MAX, FRAMES_KEPT};

/// Keep-alive of the connections, in seconds and probes: a host that vanished is noticed in half a
/// minute, where the system's default would take hours.
const KEEPALIVE_IDLE_S: i32 = 10;
const KEEPALIVE_INTERVAL_S: i32 = 5;
const KEEPALIVE_PROBES: i32 = 4;

/// What is known of a connection that is made again by itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Link {
    /// How often it was made.
    ups: u32,
    is_up: bool,
}

impl Link {
    fn handle_up(&mut self) {
        self.ups = self.ups.saturating_add(1);
        self.is_up = true;
    }

    fn handle_down(&mut self) {
        self.is_up = false;
    }

    /// It has been there.
    pub(super) fn was_up(self) -> bool {
        self.ups > 0
    }

    /// It was there and is not.
    pub(super) fn is_gone(self) -> bool {
        self.ups > 0 && !self.is_up
    }

    /// It is not the first one any more.
    pub(super) fn is_another(self) -> bool {
        self.ups > 1
    }
}

/// A socket that binds, and sends.
pub(super) struct Outgoing(zmq::Socket);

/// A socket that connects, and receives; with the monitor of its connection.
pub(super) struct Incoming {
    socket: zmq::Socket,
    /// There until it is dropped.
    monitor: Option<zmq::Socket>,
    link: Link,
    monitors: Monitors,
}

/// The monitors of sockets that are closed, for both directions of a pipe: they live as long as either.
///
/// Closing a socket returns before the library has done it, and until then the library tells the monitor that
/// the connection has ended. It waits for a monitor that is gone to come back, and its thread, which
/// serves the other direction as well, waits with it.
#[derive(Clone, Default)]
pub(super) struct Monitors(Arc<Mutex<Vec<zmq::Socket>>>);

impl Drop for Incoming {
    fn drop(&mut self) {
        let mut kept = self
            .monitors
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        kept.extend(self.monitor.take());
    }
}

fn prepare(socket: &zmq::Socket, linger: Duration) -> Result<(), zmq::Error> {
    socket.set_ipv6(true)?;
    // At most a minute: the options are checked.
    socket.set_linger(i32::try_from(linger.as_millis()).unwrap_or(i32::MAX))?;
    socket.set_maxmsgsize(FRAME_BYTES_MAX as i64)?;
    socket.set_tcp_keepalive(1)?;
    socket.set_tcp_keepalive_idle(KEEPALIVE_IDLE_S)?;
    socket.set_tcp_keepalive_intvl(KEEPALIVE_INTERVAL_S)?;
    socket.set_tcp_keepalive_cnt(KEEPALIVE_PROBES)
}

impl Outgoing {
    pub(super) fn bind(
        context: &zmq::Context,
        address: IpAddr,
        port: u16,
        linger: Duration,
    ) -> Result<Self, StartError> {
        let endpoint = match address {
            IpAddr::V4(address) => format!("tcp://{address}:{port}"),
            IpAddr::V6(address) => format!("tcp://[{address}]:{port}"),
        };
        let make = || -> Result<zmq::Socket, zmq::Error> {
            let socket = context.socket(zmq::PUSH)?;
            prepare(&socket, linger)?;
            socket.bind(&endpoint)?;
            Ok(socket)
        };
        make().map(Self).map_err(|error| StartError::Socket {
            endpoint: endpoint.clone(),
            source: SocketReason::new(error),
        })
    }

    /// Hands a message to the library, if it has a connection with room; false if not.
    pub(super) fn try_send(&self, frames: &[Vec<u8>]) -> Result<bool, SocketReason> {
        match self.0.send_multipart(frames, zmq::DONTWAIT) {
            Ok(()) => Ok(true),
            Err(zmq::Error::EAGAIN | zmq::Error::EINTR) => Ok(false),
            Err(error) => Err(SocketReason::new(error)),
        }
    }
}

impl Incoming {
    /// `name` tells the sockets of one context apart, `monitors` are those of the pipe.
    pub(super) fn connect(
        context: &zmq::Context,
        target: &str,
        name: &str,
        linger: Duration,
        monitors: &Monitors,
    ) -> Result<Self, StartError> {
        let endpoint = format!("tcp://{target}");
        let make = || -> Result<Self, zmq::Error> {
            let socket = context.socket(zmq::PULL)?;
            prepare(&socket, linger)?;
            let told = format!("inproc://{name}");
            let events = zmq::SocketEvent::HANDSHAKE_SUCCEEDED.to_raw()
                | zmq::SocketEvent::DISCONNECTED.to_raw();
            socket.monitor(&told, i32::from(events))?;
            let monitor = context.socket(zmq::PAIR)?;
            monitor.set_linger(0)?;
            // No bound: the library hands an event over with a send that waits while the queue is full, and
            // its thread serves all sockets of the pipe. So events pile up while nobody calls this direction: two
            // for each time that the connection is lost and made again, which is ten times a second at most
            // (ZMQ_RECONNECT_IVL), of two short frames each. A connection that stays adds none.
            monitor.set_rcvhwm(0)?;
            monitor.connect(&told)?;
            let incoming = Self {
                socket,
                monitor: Some(monitor),
                link: Link::default(),
                monitors: monitors.clone(),
            };
            incoming.socket.connect(&endpoint)?;
            Ok(incoming)
        };
        make().map_err(|error| StartError::Socket {
            endpoint: endpoint.clone(),
            source: SocketReason::new(error),
        })
    }

    /// Says whether the connection has been there, as of the last look.
    pub(super) fn was_up(&self) -> bool {
        self.link.was_up()
    }

    /// Takes a message, if one is there: its first frames, as many as are needed to see that there
    /// are too many. The library does not bound how many frames a peer puts into one message.
    pub(super) fn try_receive(&self) -> Result<Option<Vec<Vec<u8>>>, SocketReason> {
        let mut frames = Vec::new();
        let mut frame = zmq::Message::new();
        loop {
            match self.socket.recv(&mut frame, zmq::DONTWAIT) {
                Ok(()) => {}
                // All frames of a message are there once the first one is.
                Err(zmq::Error::EAGAIN | zmq::Error::EINTR) if frames.is_empty() => {
                    return Ok(None);
                }
                Err(zmq::Error::EINTR) => continue,
                Err(error) => return Err(SocketReason::new(error)),
            }
            if frames.len() < FRAMES_KEPT {
                frames.push(frame.to_vec());
            }
            if !frame.get_more() {
                return Ok(Some(frames));
            }
        }
    }

    fn monitor_item(&self) -> Option<zmq::PollItem<'_>> {
        let monitor = self.monitor.as_ref()?;
        Some(monitor.as_poll_item(zmq::POLLIN))
    }

    /// Reads what the monitor has to say, and returns how the connection is.
    pub(super) fn link(&mut self) -> Result<Link, SocketReason> {
        loop {
            let Some(monitor) = &self.monitor else {
                return Ok(self.link);
            };
            let event = match monitor.recv_multipart(zmq::DONTWAIT) {
                Ok(frames) => frames,
                Err(zmq::Error::EAGAIN | zmq::Error::EINTR) => return Ok(self.link),
                Err(error) => return Err(SocketReason::new(error)),
            };
            // Two bytes of event in the machine's own order, four of value, then the endpoint.
            let kind = event
                .first()
                .and_then(|frame| frame.first_chunk::<2>())
                .map(|bytes| u16::from_ne_bytes(*bytes));
            if kind == Some(zmq::SocketEvent::HANDSHAKE_SUCCEEDED.to_raw()) {
                self.link.handle_up();
            } else if kind == Some(zmq::SocketEvent::DISCONNECTED.to_raw()) {
                self.link.handle_down();
            }
        }
    }
}

/// Waits until a message or news of the connection has come, or until `outgoing` has room, if it is
/// given, or until `deadline`.
pub(super) fn wait(
    incoming: &Incoming,
    outgoing: Option<&Outgoing>,
    deadline: Instant,
) -> Result<(), SocketReason> {
    let mut items = vec![incoming.socket.as_poll_item(zmq::POLLIN)];
    items.extend(incoming.monitor_item());
    items.extend(outgoing.map(|outgoing| outgoing.0.as_poll_item(zmq::POLLOUT)));
    poll(&mut items, deadline)
}

/// Waits until news of the connection has come, or until `outgoing` has room, or until `deadline`.
pub(super) fn wait_to_send(
    incoming: &Incoming,
    outgoing: &Outgoing,
    deadline: Instant,
) -> Result<(), SocketReason> {
    let mut items = vec![outgoing.0.as_poll_item(zmq::POLLOUT)];
    items.extend(incoming.monitor_item());
    poll(&mut items, deadline)
}

fn poll(items: &mut [zmq::PollItem<'_>], deadline: Instant) -> Result<(), SocketReason> {
    let left = deadline.saturating_duration_since(Instant::now());
    // Rounded up, so that the last wait does not become a busy one.
    let millis = i64::try_from(left.as_micros().div_ceil(1_000)).unwrap_or(i64::MAX);
    match zmq::poll(items, millis) {
        Ok(_) | Err(zmq::Error::EINTR) => Ok(()),
        Err(error) => Err(SocketReason::new(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // row: P7.7
    #[test]
    fn a_connection_is_gone_only_after_it_was_there() {
        let mut link = Link::default();
        link.handle_down();
        assert!(!link.is_gone() && !link.is_another());
        link.handle_up();
        assert!(!link.is_gone() && !link.is_another());
        link.handle_down();
        assert!(link.is_gone() && !link.is_another());
        link.handle_up();
        assert!(!link.is_gone() && link.is_another());
    }
}
