//! Connections to a store's server: an address, and waits that end at a deadline.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use super::authority::Authority;
use super::error::StoreError;
use super::timeouts::StoreTimeouts;

/// Addresses of the server's host that are tried in turn.
const ADDRESSES_MAX: usize = 4;

/// A server, and how long it may take.
#[derive(Clone, Debug)]
pub(super) struct Dialer {
    /// What the server is called in errors.
    store: String,
    at: Authority,
    timeouts: StoreTimeouts,
}

impl Dialer {
    pub(super) fn new(store: String, at: Authority, timeouts: StoreTimeouts) -> Self {
        Self {
            store,
            at,
            timeouts: timeouts.bounded(),
        }
    }

    pub(super) fn store(&self) -> String {
        self.store.clone()
    }

    /// Host and port as they were written.
    #[cfg(any(feature = "http", feature = "etcd"))]
    pub(super) fn authority(&self) -> &str {
        self.at.text()
    }

    /// Connects, for an exchange that ends after `share` of the time that a call has, at the latest. The
    /// resolver comes on top of it: its waits are the system's.
    pub(super) fn connect(&self, share: Share) -> Result<Timed, StoreError> {
        let addresses: Vec<SocketAddr> = (self.at.host(), self.at.port())
            .to_socket_addrs()
            .map_err(|error| self.unreachable(&error))?
            .take(ADDRESSES_MAX)
            .collect();
        let deadline = Instant::now() + share.of(self.timeouts.total);
        let mut last = io::Error::from(io::ErrorKind::NotFound);
        for address in addresses {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(self.timeout());
            }
            match TcpStream::connect_timeout(&address, left.min(self.timeouts.connect)) {
                Ok(stream) => {
                    return Ok(Timed { stream, deadline });
                }
                Err(error) => last = error,
            }
        }
        Err(self.unreachable(&last))
    }

    fn unreachable(&self, error: &io::Error) -> StoreError {
        StoreError::Unreachable {
            store: self.store(),
            source: error.into(),
        }
    }

    fn timeout(&self) -> StoreError {
        StoreError::Timeout {
            store: self.store(),
            timeout_ms: u64::try_from(self.timeouts.total.as_millis()).unwrap_or(u64::MAX),
        }
    }

    /// What an error of a connection means.
    pub(super) fn broken(&self, error: &io::Error) -> StoreError {
        match error.kind() {
            io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => self.timeout(),
            _ => StoreError::Connection {
                store: self.store(),
                source: error.into(),
            },
        }
    }
}

/// The part of a call's time that one server gets: where several may be asked, a silent one must leave
/// time for the others.
#[derive(Clone, Copy, Debug)]
pub(super) struct Share {
    /// Servers that may be asked, this one included; at least one.
    pub(super) servers: u32,
}

impl Share {
    fn of(self, total: Duration) -> Duration {
        total / self.servers
    }
}

/// A connection whose reads and writes end at a deadline, however little each of them moves.
pub(super) struct Timed {
    stream: TcpStream,
    deadline: Instant,
}

impl Timed {
    fn left(&self) -> io::Result<Duration> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        Ok(left)
    }
}

impl Read for Timed {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(Some(self.left()?))?;
        self.stream.read(buffer)
    }
}

impl Write for Timed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(Some(self.left()?))?;
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}
