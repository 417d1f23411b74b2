//! The four message sockets of a pipe, two to a direction. Each belongs to one value and so to one
//! thread at a time.
//!
//! Liveness is read off the connecting sockets: they have one connection each, whose ups and downs
//! are watched. A binding socket may have any number, which cannot be told apart.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::error::{SocketReason, StartError};
use super::frame::{FRAME_BYTES_MAX, FRAMES_KEPT};
use super::watch::{Link, Watch};

/// Keep-alive of the connections, in seconds and probes: a host that vanished is noticed in half a
/// minute, where the system's default would take hours.
const KEEPALIVE_IDLE_S: i32 = 10;
const KEEPALIVE_INTERVAL_S: i32 = 5;
const KEEPALIVE_PROBES: i32 = 4;

/// A socket that binds, and sends.
pub(super) struct Outgoing(zmq::Socket);

/// A socket that connects, and receives; with the watch over its connection.
pub(super) struct Incoming {
    // Dropped in this order: the watch ends once the socket is closed.
    socket: zmq::Socket,
    watch: Watch,
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
    /// `name` tells the sockets of one context apart.
    pub(super) fn connect(
        context: &zmq::Context,
        target: &str,
        name: &str,
        linger: Duration,
    ) -> Result<Self, StartError> {
        let endpoint = format!("tcp://{target}");
        let failed = |error| StartError::Socket {
            endpoint: endpoint.clone(),
            source: SocketReason::new(error),
        };
        let make = || -> Result<zmq::Socket, zmq::Error> {
            let socket = context.socket(zmq::PULL)?;
            prepare(&socket, linger)?;
            Ok(socket)
        };
        let socket = make().map_err(failed)?;
        let watch = Watch::start(context, &socket, name, &endpoint)?;
        let incoming = Self { socket, watch };
        incoming.socket.connect(&endpoint).map_err(failed)?;
        Ok(incoming)
    }

    /// Says whether the connection has been there, as of the last look.
    pub(super) fn was_up(&self) -> bool {
        self.watch.link().was_up()
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

    /// Takes what there is to know of the connection, and returns how it is.
    pub(super) fn link(&mut self) -> Result<Link, SocketReason> {
        self.watch.look()
    }
}

/// Waits until a message or news of the connection has come, or until `outgoing` has room, if it is
/// given, or until `deadline`.
pub(super) fn wait(
    incoming: &Incoming,
    outgoing: Option<&Outgoing>,
    deadline: Instant,
) -> Result<(), SocketReason> {
    let mut items = vec![
        incoming.socket.as_poll_item(zmq::POLLIN),
        incoming.watch.as_poll_item(),
    ];
    items.extend(outgoing.map(|outgoing| outgoing.0.as_poll_item(zmq::POLLOUT)));
    poll(&mut items, deadline)
}

/// Waits until news of the connection has come, or until `outgoing` has room, or until `deadline`.
pub(super) fn wait_to_send(
    incoming: &Incoming,
    outgoing: &Outgoing,
    deadline: Instant,
) -> Result<(), SocketReason> {
    let mut items = [
        outgoing.0.as_poll_item(zmq::POLLOUT),
        incoming.watch.as_poll_item(),
    ];
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
