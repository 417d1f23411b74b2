//! Watches the connection of a socket, whether or not its direction is called.
//!
//! The library tells of each connection and of each end of one through a queue, and its thread, which moves
//! the bytes of all sockets of the pipe, waits while that queue is full or has no reader. So a thread that does
//! nothing else reads it, until the library has closed the socket, and passes on what
//! changes for the pipe: three things at most, however often a peer comes and goes.

use std::sync::mpsc::channel;
use std::thread::JoinHandle;

use super::error::{SocketReason, StartError};

/// What is known of a connection that the library makes again by itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Link {
    /// It has not been there.
    #[default]
    Unmade,
    Up,
    /// It was there and is not.
    Gone,
    /// It was there, and another was made since; nothing that follows changes that.
    Another,
}

impl Link {
    fn after_up(self) -> Self {
        match self {
            Self::Unmade => Self::Up,
            // The library keeps one connection: whatever came of the first, this is a second.
            Self::Up | Self::Gone | Self::Another => Self::Another,
        }
    }

    fn after_down(self) -> Self {
        match self {
            // An end without a connection is that of a try.
            Self::Unmade | Self::Another => self,
            Self::Up | Self::Gone => Self::Gone,
        }
    }

    /// It has been there.
    pub(super) fn was_up(self) -> bool {
        self != Self::Unmade
    }

    pub(super) fn is_gone(self) -> bool {
        self == Self::Gone
    }

    pub(super) fn is_another(self) -> bool {
        self == Self::Another
    }
}

/// The links, by the byte that stands for each in a message.
const LINKS: [Link; 4] = [Link::Unmade, Link::Up, Link::Gone, Link::Another];

/// The watch over a connection. Dropping it waits until the socket, which has to be dropped before, is closed.
pub(super) struct Watch {
    // Dropped after the thread has ended.
    news: zmq::Socket,
    link: Link,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// Watches `socket`, which is not connected yet, to `endpoint`. `name` tells the sockets of one context
    /// apart.
    pub(super) fn start(
        context: &zmq::Context,
        socket: &zmq::Socket,
        name: &str,
        endpoint: &str,
    ) -> Result<Self, StartError> {
        let failed = |error| StartError::Socket {
            endpoint: endpoint.to_owned(),
            source: SocketReason::new(error),
        };
        let (monitor, changes, news) = sockets(context, name).map_err(failed)?;
        let (hand_over, taken_over) = channel();
        let run = move || {
            // There is none if the library cannot be told.
            if let Ok(monitor) = taken_over.recv() {
                watch(&monitor, &changes);
            }
        };
        let thread = std::thread::Builder::new()
            .name("mooncake-pipe".to_owned())
            .spawn(run)
            .map_err(|error| StartError::Thread {
                source: error.into(),
            })?;
        // Last of all: the library tells of the socket's close as well, and its thread would wait in vain for
        // somebody to read that.
        tell(socket, name, &monitor).map_err(failed)?;
        // The thread has not ended.
        let _ = hand_over.send(monitor);
        Ok(Self {
            news,
            link: Link::default(),
            thread: Some(thread),
        })
    }

    /// Returns how the connection was at the last look.
    pub(super) fn link(&self) -> Link {
        self.link
    }

    /// Takes what the thread has passed on, and returns how the connection is.
    pub(super) fn look(&mut self) -> Result<Link, SocketReason> {
        loop {
            match self.news.recv_bytes(zmq::DONTWAIT) {
                Ok(bytes) => {
                    let link = bytes.first().and_then(|byte| LINKS.get(usize::from(*byte)));
                    self.link = link.copied().unwrap_or(self.link);
                }
                Err(zmq::Error::EAGAIN | zmq::Error::EINTR) => return Ok(self.link),
                Err(error) => return Err(SocketReason::new(error)),
            }
        }
    }

    /// What is ready when [`look`](Self::look) has something to take.
    pub(super) fn as_poll_item(&self) -> zmq::PollItem<'_> {
        self.news.as_poll_item(zmq::POLLIN)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            // A panic of its own would have been printed.
            let _ = thread.join();
        }
    }
}

type Sockets = (zmq::Socket, zmq::Socket, zmq::Socket);

/// What the library is to tell the thread by, and both ends of what the thread passes on by.
fn sockets(context: &zmq::Context, name: &str) -> Result<Sockets, zmq::Error> {
    let pair = || -> Result<zmq::Socket, zmq::Error> {
        let pair = context.socket(zmq::PAIR)?;
        pair.set_linger(0)?;
        Ok(pair)
    };
    let (monitor, changes, news) = (pair()?, pair()?, pair()?);
    let passed_on = format!("inproc://{name}-news");
    news.bind(&passed_on)?;
    changes.connect(&passed_on)?;
    Ok((monitor, changes, news))
}

/// Has the library tell `monitor` of the connection of `socket`.
fn tell(socket: &zmq::Socket, name: &str, monitor: &zmq::Socket) -> Result<(), zmq::Error> {
    let told = format!("inproc://{name}");
    let events = zmq::SocketEvent::HANDSHAKE_SUCCEEDED.to_raw()
        | zmq::SocketEvent::DISCONNECTED.to_raw()
        | zmq::SocketEvent::MONITOR_STOPPED.to_raw();
    socket.monitor(&told, i32::from(events))?;
    // Needs no descriptor any more, and fails only where the context is at its end, which wakes the library's thread.
    monitor.connect(&told)
}

/// Reads what the library tells until the socket is closed.
fn watch(monitor: &zmq::Socket, changes: &zmq::Socket) {
    let mut link = Link::default();
    loop {
        let event = match monitor.recv_multipart(0) {
            Ok(frames) => frames,
            Err(zmq::Error::EINTR) => continue,
            Err(error) => {
                tracing::error!(%error, "a connection of the pipe is not watched any more");
                return;
            }
        };
        // Two bytes of event in the machine's own order, four of value, then the endpoint.
        let kind = event
            .first()
            .and_then(|frame| frame.first_chunk::<2>())
            .map(|bytes| u16::from_ne_bytes(*bytes));
        let is = |event: zmq::SocketEvent| kind == Some(event.to_raw());
        let next = if is(zmq::SocketEvent::HANDSHAKE_SUCCEEDED) {
            link.after_up()
        } else if is(zmq::SocketEvent::DISCONNECTED) {
            link.after_down()
        } else if is(zmq::SocketEvent::MONITOR_STOPPED) {
            return;
        } else {
            link
        };
        if next != link {
            link = next;
            // There is room: a link changes three times at most. Nobody may be left to hear of it.
            let _ = changes.send(&[link as u8][..], zmq::DONTWAIT);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::time::{Duration, Instant};

    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    // row: P7.7
    #[test]
    fn a_connection_is_gone_only_after_it_was_there() {
        let link = Link::default().after_down();
        assert!(!link.was_up() && !link.is_gone() && !link.is_another());
        let link = link.after_up();
        assert!(link.was_up() && !link.is_gone() && !link.is_another());
        let link = link.after_down();
        assert!(link.was_up() && link.is_gone() && !link.is_another());
        let link = link.after_up();
        assert!(link.was_up() && !link.is_gone() && link.is_another());
        assert_eq!(link.after_down(), link);
        assert_eq!(link.after_up(), link);
        assert!(Link::Up.after_up().is_another());
    }

    /// A listener, the watch, and a socket that connects, which is to be dropped before the watch.
    fn watched() -> (TcpListener, Watch, zmq::Socket) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("tcp://{}", listener.local_addr().unwrap());
        let context = zmq::Context::new();
        let socket = context.socket(zmq::PULL).unwrap();
        let watch = Watch::start(&context, &socket, "watched", &endpoint).unwrap();
        socket.connect(&endpoint).unwrap();
        (listener, watch, socket)
    }

    /// Takes a connection, within `LONG`.
    #[track_caller]
    fn accept(listener: &TcpListener) -> TcpStream {
        listener.set_nonblocking(true).unwrap();
        let deadline = Instant::now() + LONG;
        let stream = loop {
            match listener.accept() {
                Ok((stream, _)) => break stream,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    assert!(Instant::now() < deadline, "nobody connects");
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(error) => panic!("{error}"),
            }
        };
        stream.set_nonblocking(false).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream.set_write_timeout(Some(LONG)).unwrap();
        stream
    }

    /// Takes a connection as a socket of the other kind does, as far as the handshake goes.
    #[track_caller]
    fn take(listener: &TcpListener) -> TcpStream {
        let mut stream = accept(listener);
        let mut greeting = [0; 64];
        greeting[..12].copy_from_slice(b"\xFF\0\0\0\0\0\0\0\0\x7F\x03\0");
        greeting[12..16].copy_from_slice(b"NULL");
        stream.write_all(&greeting).unwrap();
        let ready = b"\x04\x1A\x05READY\x0BSocket-Type\0\0\0\x04PUSH";
        stream.write_all(ready).unwrap();
        stream.read_exact(&mut greeting).unwrap();
        let mut head = [0; 2];
        stream.read_exact(&mut head).unwrap();
        let mut command = vec![0; head[1].into()];
        stream.read_exact(&mut command).unwrap();
        stream
    }

    #[test]
    fn where_no_watch_can_be_started_the_library_waits_for_nobody() {
        for taken in ["inproc://watched", "inproc://watched-news"] {
            let context = zmq::Context::new();
            let other = context.socket(zmq::PAIR).unwrap();
            other.bind(taken).unwrap();
            let socket = context.socket(zmq::PULL).unwrap();
            let endpoint = "tcp://127.0.0.1:1";
            let error = Watch::start(&context, &socket, "watched", endpoint).err();
            let expected = SocketReason::new(zmq::Error::EADDRINUSE);
            assert!(
                matches!(error, Some(StartError::Socket { source, .. }) if source == expected),
                "{error:?}"
            );
            drop(socket);
            // The thread that closes this socket also closes those that follow.
            for _ in 0..20 {
                let next = context.socket(zmq::PULL).unwrap();
                next.bind("tcp://127.0.0.1:*").unwrap();
                let bound = next.get_last_endpoint().unwrap().unwrap();
                drop(next);
                let bound = bound.strip_prefix("tcp://").unwrap();
                let deadline = Instant::now() + LONG;
                while TcpStream::connect(bound).is_ok() {
                    assert!(Instant::now() < deadline, "{taken}: no socket is closed");
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        }
    }

    #[track_caller]
    fn until(watch: &mut Watch, is: impl Fn(Link) -> bool) {
        let deadline = Instant::now() + LONG;
        while !is(watch.look().unwrap()) {
            assert!(Instant::now() < deadline, "{:?}", watch.link());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn what_becomes_of_a_connection_is_seen() {
        let (listener, mut watch, socket) = watched();
        // Whoever hangs up before the handshake was never there.
        drop(accept(&listener));
        let first = take(&listener);
        until(&mut watch, Link::was_up);
        assert_eq!(watch.link(), Link::Up);
        drop(first);
        until(&mut watch, Link::is_gone);
        let _second = take(&listener);
        until(&mut watch, Link::is_another);
        drop(socket);
    }

    #[test]
    fn a_peer_that_comes_and_goes_while_nobody_looks_leaves_three_messages() {
        let (listener, mut watch, socket) = watched();
        for _ in 0..6 {
            drop(accept(&listener));
        }
        for _ in 0..12 {
            drop(take(&listener));
        }
        // The thread has read all that the library tells once it has ended.
        drop(socket);
        let thread = watch.thread.take().unwrap();
        let deadline = Instant::now() + LONG;
        while !thread.is_finished() {
            assert!(Instant::now() < deadline, "the socket's close is not told");
            std::thread::sleep(Duration::from_millis(1));
        }
        thread.join().unwrap();
        let mut messages = Vec::new();
        while let Ok(message) = watch.news.recv_bytes(zmq::DONTWAIT) {
            messages.push(message);
        }
        let expected = [Link::Up, Link::Gone, Link::Another];
        assert_eq!(messages, expected.map(|link| vec![link as u8]));
    }
}
