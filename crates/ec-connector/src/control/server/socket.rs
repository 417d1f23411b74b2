//! The two sockets of a control server.

use std::net::IpAddr;
use std::time::Duration;

use super::{ServerError, SocketReason};

/// What the server's loop needs from its sockets.
pub(super) trait Sockets {
    /// Waits for one request, with all its frames. After a request `reply` is due.
    fn receive(&mut self, wait: Duration) -> Result<Received, zmq::Error>;

    /// Answers the request received last.
    fn reply(&mut self, bytes: &[u8]) -> Result<(), zmq::Error>;

    /// Hands an event over without waiting; false if it would have to wait.
    fn send_event(&mut self, bytes: &[u8]) -> Result<bool, zmq::Error>;
}

pub(super) enum Received {
    Nothing,
    /// Frames after the first are counted and dropped: no request has any.
    Request {
        frame: Vec<u8>,
        frame_count: usize,
    },
}

pub(super) struct ZmqSockets {
    requests: zmq::Socket,
    /// The frames that go before the reply to the request received last.
    route: Vec<Vec<u8>>,
    events: zmq::Socket,
    control_port: u16,
    event_port: u16,
}

impl ZmqSockets {
    pub(super) fn bind(
        host: IpAddr,
        port: u16,
        message_bytes_max: u32,
    ) -> Result<Self, ServerError> {
        let context = zmq::Context::new();
        // A REP socket would do, but for a defect of the library: frames without an envelope from a connection that is
        // gone by the time they are read make it lose the next peer's reply.
        let requests = bound(&context, zmq::ROUTER, host, port, message_bytes_max)?;
        let events = bound(&context, zmq::PUSH, host, 0, message_bytes_max)?;
        Ok(Self {
            control_port: requests.1,
            event_port: events.1,
            requests: requests.0,
            route: Vec::new(),
            events: events.0,
        })
    }

    pub(super) fn control_port(&self) -> u16 {
        self.control_port
    }

    pub(super) fn event_port(&self) -> u16 {
        self.event_port
    }
}

impl Sockets for ZmqSockets {
    fn receive(&mut self, wait: Duration) -> Result<Received, zmq::Error> {
        let millis = i64::try_from(wait.as_millis()).unwrap_or(i64::MAX);
        match self.requests.poll(zmq::POLLIN, millis) {
            Ok(0) | Err(zmq::Error::EINTR) => return Ok(Received::Nothing),
            Ok(_) => {}
            Err(error) => return Err(error),
        }
        let mut frame = zmq::Message::new();
        match self.requests.recv(&mut frame, zmq::DONTWAIT) {
            Ok(()) => {}
            Err(zmq::Error::EAGAIN | zmq::Error::EINTR) => return Ok(Received::Nothing),
            Err(error) => return Err(error),
        }
        // First whom to answer, then the envelope up to an empty frame, then the request. All frames of a message are
        // there once the first one is.
        let mut route = vec![frame.to_vec()];
        let mut request = None;
        let mut frame_count = 0;
        let mut is_enveloped = false;
        while frame.get_more() {
            frame = zmq::Message::new();
            self.requests.recv(&mut frame, zmq::DONTWAIT)?;
            if is_enveloped {
                frame_count += 1;
                request.get_or_insert_with(|| frame.to_vec());
            } else if route.len() < ROUTE_FRAMES_MAX {
                is_enveloped = frame.is_empty();
                route.push(frame.to_vec());
            }
        }
        let Some(frame) = request else {
            // Not from a request socket: nobody waits for an answer.
            return Ok(Received::Nothing);
        };
        self.route = route;
        Ok(Received::Request { frame, frame_count })
    }

    fn reply(&mut self, bytes: &[u8]) -> Result<(), zmq::Error> {
        // For a peer that is gone or does not read, the library drops the reply.
        for frame in self.route.drain(..) {
            self.requests.send(frame, zmq::DONTWAIT | zmq::SNDMORE)?;
        }
        self.requests.send(bytes, zmq::DONTWAIT)
    }

    fn send_event(&mut self, bytes: &[u8]) -> Result<bool, zmq::Error> {
        match self.events.send(bytes, zmq::DONTWAIT) {
            Ok(()) => Ok(true),
            Err(zmq::Error::EAGAIN | zmq::Error::EINTR) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// Frames of an envelope; request sockets send one, proxies one more each.
const ROUTE_FRAMES_MAX: usize = 16;

/// A socket bound to `host`, and its port.
fn bound(
    context: &zmq::Context,
    kind: zmq::SocketType,
    host: IpAddr,
    port: u16,
    message_bytes_max: u32,
) -> Result<(zmq::Socket, u16), ServerError> {
    let set_up = |error| ServerError::Socket(SocketReason::new(error));
    let socket = context.socket(kind).map_err(set_up)?;
    socket.set_ipv6(true).map_err(set_up)?;
    socket.set_linger(0).map_err(set_up)?;
    socket
        .set_maxmsgsize(i64::from(message_bytes_max))
        .map_err(set_up)?;
    let host = match host {
        IpAddr::V4(v4) => v4.to_string(),
        IpAddr::V6(v6) => format!("[{v6}]"),
    };
    let wanted = if port == 0 {
        "*".to_owned()
    } else {
        port.to_string()
    };
    let endpoint = format!("tcp://{host}:{wanted}");
    let bind = |error| ServerError::Bind {
        endpoint: endpoint.clone(),
        source: SocketReason::new(error),
    };
    socket.bind(&endpoint).map_err(bind)?;
    let bound = socket.get_last_endpoint().map_err(set_up)?;
    let port = bound
        .ok()
        .and_then(|text| text.rsplit_once(':')?.1.parse().ok())
        .ok_or_else(|| bind(zmq::Error::EADDRNOTAVAIL))?;
    Ok((socket, port))
}
