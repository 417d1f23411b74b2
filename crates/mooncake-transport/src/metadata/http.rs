//! Mooncake's HTTP metadata service, over plain TCP connections.
//!
//! One request a connection, so that a store that was restarted is reached again by the next call.

mod answer;
mod url;

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

pub use self::answer::AnswerError;
use self::answer::{AnswerFailure, read_answer};
use self::url::StoreUrl;
pub use self::url::StoreUrlError;
use super::MetadataStore;
use super::error::StoreError;

/// Addresses of the store's host that are tried in turn.
const ADDRESSES_MAX: usize = 4;

/// Bounds of the waits for an HTTP metadata store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HttpTimeouts {
    /// For a connection, per address. Default 1.5 s.
    pub connect: Duration,
    /// For a call as a whole, name resolution apart. Default 3 s.
    pub total: Duration,
}

impl Default for HttpTimeouts {
    fn default() -> Self {
        Self {
            connect: Duration::from_millis(1_500),
            total: Duration::from_secs(3),
        }
    }
}

/// An HTTP metadata store: `GET`, `PUT` and `DELETE` of `URL?key=KEY`.
#[derive(Clone, Debug)]
pub struct HttpStore {
    url: StoreUrl,
    timeouts: HttpTimeouts,
}

impl HttpStore {
    /// Creates the store at `url`, as real engines take it: with the path, which for the server of the
    /// Mooncake package is `/metadata`. Connects to nothing.
    ///
    /// # Errors
    /// [`StoreUrlError`].
    pub fn new(url: &str) -> Result<Self, StoreUrlError> {
        Self::with_timeouts(url, HttpTimeouts::default())
    }

    /// As [`new`](HttpStore::new), with waits of the caller's choice. Waits below 1 ms count as 1 ms,
    /// those above a day as a day.
    ///
    /// # Errors
    /// [`StoreUrlError`].
    pub fn with_timeouts(url: &str, timeouts: HttpTimeouts) -> Result<Self, StoreUrlError> {
        let bounded =
            |wait: Duration| wait.clamp(Duration::from_millis(1), Duration::from_secs(86_400));
        Ok(Self {
            url: StoreUrl::parse(url)?,
            timeouts: HttpTimeouts {
                connect: bounded(timeouts.connect),
                total: bounded(timeouts.total),
            },
        })
    }

    fn store(&self) -> String {
        self.url.text().to_owned()
    }

    fn timeout(&self) -> StoreError {
        StoreError::Timeout {
            store: self.store(),
            timeout_ms: u64::try_from(self.timeouts.total.as_millis()).unwrap_or(u64::MAX),
        }
    }

    fn broken(&self, error: &io::Error) -> StoreError {
        match error.kind() {
            io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => self.timeout(),
            _ => StoreError::Connection {
                store: self.store(),
                source: error.into(),
            },
        }
    }

    fn connect(&self, deadline: Instant) -> Result<TcpStream, StoreError> {
        let unreachable = |error: &io::Error| StoreError::Unreachable {
            store: self.store(),
            source: error.into(),
        };
        let addresses: Vec<SocketAddr> = (self.url.host(), self.url.port())
            .to_socket_addrs()
            .map_err(|error| unreachable(&error))?
            .take(ADDRESSES_MAX)
            .collect();
        let mut last = io::Error::from(io::ErrorKind::NotFound);
        for address in addresses {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(self.timeout());
            }
            match TcpStream::connect_timeout(&address, left.min(self.timeouts.connect)) {
                Ok(stream) => return Ok(stream),
                Err(error) => last = error,
            }
        }
        Err(unreachable(&last))
    }

    /// One request; returns the status and the body, which is read only for status 200.
    fn ask(
        &self,
        method: &str,
        key: &str,
        body: Option<&[u8]>,
        len_max: u64,
    ) -> Result<(u16, Vec<u8>), StoreError> {
        let head = self.url.request(method, key, body.map(<[u8]>::len));
        // After the resolver, whose waits are the system's.
        let stream = {
            let deadline = Instant::now() + self.timeouts.total;
            Timed {
                stream: self.connect(deadline)?,
                deadline,
            }
        };
        let mut stream = stream;
        let mut request = head.into_bytes();
        request.extend_from_slice(body.unwrap_or_default());
        // A store may answer, and close, before it has read all of a body that it refuses.
        let sent = stream.write_all(&request);
        match read_answer(&mut stream, len_max) {
            Ok(answer) => Ok(answer),
            Err(AnswerFailure::Io(error)) => {
                Err(self.broken(sent.as_ref().err().unwrap_or(&error)))
            }
            Err(AnswerFailure::TooLong) => Err(StoreError::TooLong {
                key: key.to_owned(),
                max: len_max,
            }),
            Err(AnswerFailure::Malformed(source)) => Err(StoreError::Answer {
                store: self.store(),
                source,
            }),
        }
    }

    fn refused(&self, key: &str, code: u16) -> StoreError {
        StoreError::Refused {
            store: self.store(),
            key: key.to_owned(),
            code: u32::from(code),
        }
    }
}

/// Longest answer to a request whose answer is not used.
const IGNORED_BODY_MAX: u64 = 64 << 10;

impl MetadataStore for HttpStore {
    fn get(&self, key: &str, len_max: u64) -> Result<Option<Vec<u8>>, StoreError> {
        match self.ask("GET", key, None, len_max)? {
            (200, value) => Ok(Some(value)),
            (404, _) => Ok(None),
            (code, _) => Err(self.refused(key, code)),
        }
    }

    fn put(&self, key: &str, value: &[u8]) -> Result<(), StoreError> {
        match self.ask("PUT", key, Some(value), IGNORED_BODY_MAX)? {
            (200, _) => Ok(()),
            (code, _) => Err(self.refused(key, code)),
        }
    }

    fn delete(&self, key: &str) -> Result<bool, StoreError> {
        match self.ask("DELETE", key, None, IGNORED_BODY_MAX)? {
            (200, _) => Ok(true),
            (404, _) => Ok(false),
            (code, _) => Err(self.refused(key, code)),
        }
    }
}

/// A connection whose reads and writes end at a deadline, however little each of them moves.
struct Timed {
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
