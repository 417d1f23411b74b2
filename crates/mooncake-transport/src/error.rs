//! Errors of engine calls. What became of a single task is a [`Reason`](crate::Reason) instead.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};

use crate::wire::JsonError;
use crate::wire::control::FrameError;
use crate::wire::descriptor::DescriptorError;
use crate::wire::name::PeerNameError;

/// A system error that can be copied and compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoFailure {
    kind: io::ErrorKind,
    code: Option<i32>,
}

impl IoFailure {
    /// Returns the kind of the error.
    pub fn kind(&self) -> io::ErrorKind {
        self.kind
    }

    /// Returns the system's error number, if it came from the system.
    pub fn code(&self) -> Option<i32> {
        self.code
    }
}

impl From<&io::Error> for IoFailure {
    fn from(error: &io::Error) -> Self {
        Self {
            kind: error.kind(),
            code: error.raw_os_error(),
        }
    }
}

impl From<io::Error> for IoFailure {
    fn from(error: io::Error) -> Self {
        Self::from(&error)
    }
}

impl fmt::Display for IoFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.code {
            Some(code) => io::Error::from_raw_os_error(code).fmt(f),
            None => self.kind.fmt(f),
        }
    }
}

impl std::error::Error for IoFailure {}

/// Which listener of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Listener {
    /// The one whose address is the session name.
    Control,
    /// The one that serves transfers.
    Data,
}

impl fmt::Display for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Control => "control",
            Self::Data => "data",
        })
    }
}

/// Why an engine call failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// Peers cannot dial a wildcard address: say which host to advertise, or bind to one address.
    #[error("binding to {bind} needs an advertised host that peers can reach")]
    WildcardBind {
        /// The address asked for.
        bind: IpAddr,
    },
    /// The advertised host is a wildcard address: name this machine, or one address of it.
    #[error("the advertised host {host:?} is an address that no peer can dial")]
    WildcardAdvertised {
        /// The host asked for.
        host: String,
    },
    /// The advertised host is no host name or address.
    #[error("the advertised host {host:?} is unusable")]
    AdvertisedHost {
        /// The host asked for.
        host: String,
        /// What is wrong with it.
        source: PeerNameError,
    },
    /// A listener could not be opened; the port may be in use, or the address not be this machine's.
    #[error("cannot listen for {listener} connections on {address}")]
    Bind {
        /// Which listener.
        listener: Listener,
        /// The address asked for; port 0 stands for any.
        address: SocketAddr,
        /// The system's answer.
        source: IoFailure,
    },
    /// The engine's thread or its event queue could not be set up.
    #[error("cannot start the engine")]
    Start {
        /// The system's answer.
        source: IoFailure,
    },
    /// A configured number, or a wait in milliseconds, is outside its range.
    #[error("{setting} is {value}, but must be from {min} to {max}")]
    Setting {
        /// Name of the setting.
        setting: &'static str,
        /// The value given.
        value: u64,
        /// Least value accepted.
        min: u64,
        /// Largest value accepted.
        max: u64,
    },
    /// Memory of no bytes, or at address zero, which peers cannot name.
    #[error("memory of {len} bytes at {address:#x} cannot be registered")]
    UnusableMemory {
        /// Address of the memory.
        address: u64,
        /// Its length in bytes.
        len: u64,
    },
    /// The memory overlaps a range that is registered already.
    #[error("{len} bytes at {address:#x} overlap the registered {other_len} at {other_address:#x}")]
    Overlap {
        /// Address of the memory.
        address: u64,
        /// Its length in bytes.
        len: u64,
        /// Address of the registered range.
        other_address: u64,
        /// Its length in bytes.
        other_len: u64,
    },
    /// With one more buffer the descriptor would be longer than peers read: register fewer, larger
    /// memories.
    #[error("the descriptor would have {len} bytes, more than the {max} that peers read")]
    DescriptorTooLong {
        /// Bytes it would have.
        len: u64,
        /// Bytes allowed.
        max: u64,
    },
    /// The name of the peer cannot be parsed.
    #[error("{name:?} is no peer name")]
    PeerName {
        /// The name given.
        name: String,
        /// What is wrong with it.
        source: PeerNameError,
    },
    /// A host name could not be resolved.
    #[error("cannot resolve host {host:?}")]
    Resolve {
        /// The host name.
        host: String,
        /// The system's answer.
        source: IoFailure,
    },
    /// The control exchange with the peer failed.
    #[error("control exchange with {peer} failed")]
    Control {
        /// The peer.
        peer: String,
        /// What went wrong.
        source: ControlError,
    },
    /// The peer's descriptor cannot be used.
    #[error("the descriptor of {peer} is unusable")]
    Descriptor {
        /// The peer.
        peer: String,
        /// What is wrong with it.
        source: DescriptorError,
    },
    /// A batch has more tasks than are accepted at once: split it.
    #[error("a batch of {count} tasks is more than the {max} accepted")]
    TooManyTasks {
        /// Tasks in the batch.
        count: usize,
        /// Tasks accepted.
        max: usize,
    },
    /// Too many tasks are under way: wait for earlier batches, then submit again.
    #[error("{queued} tasks under way and {count} new ones are more than the {max} accepted")]
    Full {
        /// Tasks under way.
        queued: usize,
        /// Tasks of the batch.
        count: usize,
        /// Tasks accepted.
        max: usize,
    },
    /// A task names a range that does not lie inside its memory.
    #[error("task {task}: bytes {start}..{end} do not lie inside a memory of {len} bytes")]
    OutOfBounds {
        /// Index of the task.
        task: usize,
        /// First byte named.
        start: u64,
        /// End of the bytes named.
        end: u64,
        /// Length of the memory.
        len: u64,
    },
    /// A segment was opened by another engine.
    #[error("segment {name:?} belongs to another engine")]
    ForeignSegment {
        /// Name of the segment.
        name: String,
    },
    /// Peers cannot reach an engine that was started without listeners: register the memory with
    /// [`Access::Local`](crate::Access::Local), or start the engine with listeners.
    #[error("without listeners no peer can reach registered memory")]
    NotListening,
    /// The engine over Mooncake's C interface failed.
    #[cfg(feature = "ffi")]
    #[error("the engine over the Mooncake library failed")]
    Library {
        /// What went wrong.
        source: crate::ffi::LibraryError,
    },
    /// The metadata store could not be used, or does not know the name.
    #[cfg(feature = "tcp")]
    #[error(transparent)]
    Store(#[from] crate::metadata::StoreError),
    /// This engine does not offer the call.
    #[error("this engine does not support {call}")]
    Unsupported {
        /// Name of the call.
        call: &'static str,
    },
    /// The engine has shut down.
    #[error("the engine has shut down")]
    ShutDown,
}

/// What went wrong in a control exchange.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ControlError {
    /// No address of the peer accepted a connection.
    #[error("no connection to {endpoint}")]
    Connect {
        /// The address tried last.
        endpoint: SocketAddr,
        /// The system's answer.
        source: IoFailure,
    },
    /// The peer did not accept a connection in time.
    #[error("no connection to {endpoint} within {}", seconds(*timeout_ms))]
    ConnectTimeout {
        /// The address tried last.
        endpoint: SocketAddr,
        /// The time allowed.
        timeout_ms: u64,
    },
    /// The reply did not come in time.
    #[error("no reply within {}", seconds(*timeout_ms))]
    ReplyTimeout {
        /// The time allowed.
        timeout_ms: u64,
    },
    /// The peer closed the connection without a reply: it refused the request.
    #[error("the peer closed the connection without a reply")]
    Closed,
    /// The connection failed.
    #[error("the connection failed")]
    Io {
        /// The system's answer.
        source: IoFailure,
    },
    /// The reply is no frame.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The reply has another type than the request.
    #[error("the reply has another type than the request")]
    WrongType,
    /// The text of the reply is not JSON.
    #[error(transparent)]
    Json(#[from] JsonError),
    /// The peer took the notification and refused it.
    #[error("the peer refused the notification")]
    NotifyRefused,
    /// The call came from the engine's own thread, where a task's hold is dropped and a batch is woken:
    /// it would wait for itself. Make it from another thread.
    #[error("called from the engine's own thread, which must not wait for itself")]
    OnEngineThread,
    /// The engine shut down meanwhile.
    #[error("the engine has shut down")]
    ShutDown,
}

/// A configured wait for people: in seconds, if it is a whole number of them.
pub(crate) fn seconds(millis: u64) -> String {
    if millis.is_multiple_of(1_000) {
        format!("{} s", millis / 1_000)
    } else {
        format!("{millis} ms")
    }
}

/// A value that a call refused, given back with the reason.
#[expect(
    clippy::exhaustive_structs,
    reason = "a value and why it was refused; engines of others make it"
)]
pub struct Refused<T> {
    /// The value that was passed in, untouched.
    pub value: T,
    /// Why it was refused.
    pub cause: EngineError,
}

impl<T> fmt::Debug for Refused<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Refused")
            .field("cause", &self.cause)
            .finish_non_exhaustive()
    }
}

impl<T> fmt::Display for Refused<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.cause.fmt(f)
    }
}

impl<T> std::error::Error for Refused<T> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        std::error::Error::source(&self.cause)
    }
}
