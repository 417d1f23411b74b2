//! What can go wrong with a pipe: before it runs, in one call, and for good.

use std::fmt;

use super::config::ConfigError;
use super::frame::{AnswerError, Dtype, ImageError, NoticeError};
use crate::batch::Reason;
use crate::error::{EngineError, IoFailure, seconds};
use crate::metadata::StoreAddressError;

/// An error of a message socket, as its library words it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketReason {
    code: i32,
    text: &'static str,
}

impl SocketReason {
    pub(super) fn new(error: zmq::Error) -> Self {
        Self {
            code: error.to_raw(),
            text: error.message(),
        }
    }

    /// Returns the system's error number, or the library's own beyond that range.
    pub fn code(self) -> i32 {
        self.code
    }
}

impl fmt::Display for SocketReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text)
    }
}

impl std::error::Error for SocketReason {}

/// Why a pipe could not be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The configuration, or the ports that follow from it.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// An option is outside its range. Waits are in milliseconds.
    #[error("{setting} is {value}, but must be from {min} to {max}")]
    Setting {
        /// Name of the option.
        setting: &'static str,
        /// The value given.
        value: u64,
        /// Least value accepted.
        min: u64,
        /// Largest value accepted.
        max: u64,
    },
    /// The native engine does not speak this protocol: pass an engine that does to `with_engine`.
    #[error("`protocol` is {protocol:?}; the native engine has \"tcp\" only")]
    Protocol {
        /// The value in the configuration.
        protocol: String,
    },
    /// The configured store is none that this build has, or its address is unusable. The address is not
    /// repeated: it may hold a password.
    #[error("`metadata_server` is no metadata store that can be used")]
    Metadata(#[source] StoreAddressError),
    /// The host of the own side has no address.
    #[error("cannot resolve host {host:?}")]
    Resolve {
        /// The host.
        host: String,
        /// The system's answer.
        source: IoFailure,
    },
    /// The memory for buffers could not be had.
    #[error("no memory for buffers")]
    Memory(#[source] slab_memory::SlabError),
    /// The engine refused to start, or to register the buffers.
    #[error("the engine refused")]
    Engine(#[from] EngineError),
    /// A message socket could not be set up; the port may be in use, or the address not be this
    /// machine's.
    #[error("cannot set up the socket {endpoint}")]
    Socket {
        /// Where it binds or connects.
        endpoint: String,
        /// The library's answer.
        source: SocketReason,
    },
    /// The thread that watches a connection could not be started.
    #[error("cannot start a thread")]
    Thread {
        /// The system's answer.
        source: IoFailure,
    },
}

/// Why bytes could not be read from the peer's engine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReadFailure {
    /// The peer's engine could not be reached under its name.
    #[error("the peer's engine cannot be opened")]
    Open(#[source] EngineError),
    /// The engine did not take the task.
    #[error("the read was not accepted")]
    Submit(#[source] EngineError),
    /// The read failed.
    #[error("the read failed")]
    Task(#[source] Reason),
}

/// Why one direction of a pipe has ended for good. The other direction may go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Broken {
    /// The connection to the peer ended: it closed the pipe, died, or cannot be reached any more.
    #[error("the peer is gone")]
    PeerGone,
    /// The peer came back after it was gone; what it had announced is no longer there.
    #[error("the peer has restarted")]
    PeerRestarted,
    /// A message socket failed.
    #[error("a message socket failed")]
    Socket(#[source] SocketReason),
    /// The peer sent a notice that is none.
    #[error("the peer broke the protocol")]
    Notice(#[source] NoticeError),
    /// The peer sent an answer that is none, or one that nothing waited for.
    #[error("the peer broke the protocol")]
    Answer(#[source] AnswerError),
    /// The peer did not answer in time. Its reads may go on, so the buffers stay until the close.
    #[error("the peer did not answer a tensor within {}", seconds(*timeout_ms))]
    NoAnswer {
        /// The time allowed.
        timeout_ms: u64,
    },
    /// The peer could not take a tensor and said so; its own error says why.
    #[error("the peer could not take a tensor")]
    PeerFailed,
    /// The peer announced more bytes than are accepted: give the receiver more memory.
    #[error("the peer announced {len} bytes, more than the {max} that are accepted")]
    TooLong {
        /// Bytes announced.
        len: u64,
        /// Bytes accepted.
        max: u64,
    },
    /// What the peer sent is no image of a tensor.
    #[error("the peer sent something else than a tensor")]
    Image(#[source] ImageError),
    /// The bytes could not be read, at the second try either.
    #[error("a tensor could not be read")]
    Read(#[source] ReadFailure),
    /// The bytes did not come in time.
    #[error("a tensor was not read within {}", seconds(*timeout_ms))]
    ReadTimeout {
        /// The time allowed.
        timeout_ms: u64,
    },
    /// The own memory could not be read.
    #[error("copying from the own memory failed")]
    Copy(#[source] slab_memory::CopyError),
}

/// What a call was waiting for when its time was up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Waiting {
    /// The peer's connection.
    Peer,
    /// A tensor.
    Tensor,
    /// Bytes of a tensor that is being read.
    Bytes,
    /// Room for a tensor: received ones have to be dropped, or sent ones to be answered.
    Room,
    /// The peer's answers.
    Answers,
}

impl fmt::Display for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Peer => "the peer to connect",
            Self::Tensor => "a tensor",
            Self::Bytes => "the bytes of a tensor",
            Self::Room => "room in the buffers",
            Self::Answers => "the peer's answers",
        })
    }
}

/// Why a tensor was not sent, or is not known to have arrived.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SendError {
    /// The number of bytes is not what type and shape say.
    #[error("{len} bytes, where type and shape need {need}")]
    Length {
        /// Bytes given.
        len: u64,
        /// Bytes needed.
        need: u64,
    },
    /// The tensor has no image.
    #[error("the tensor cannot be sent")]
    Tensor(#[source] ImageError),
    /// A tensor without dimensions, which an old peer does not take; one of our kind does, once it
    /// is known to be one.
    #[error("a tensor without dimensions, which peers of the old kind do not take")]
    NoDimensions,
    /// An old peer would take the tensor for "no tensor"; one of our kind does not, once it is known
    /// to be one.
    #[error("a {dtype} tensor that peers of the old kind take for no tensor")]
    LooksLikeNone {
        /// Its type.
        dtype: Dtype,
    },
    /// The image is larger than all buffers together: give the sender more memory.
    #[error("an image of {len} bytes is more than the {max} of all buffers")]
    TooLarge {
        /// Bytes of the image.
        len: u64,
        /// Bytes of all buffers.
        max: u64,
    },
    /// The time was up. The pipe works on, and the call can be made again.
    #[error("time is up while waiting for {0}")]
    TimedOut(Waiting),
    /// This direction has ended; every later call says the same.
    #[error("this direction of the pipe has ended")]
    Broken(#[source] Broken),
    /// Copying into the own memory failed.
    #[error("copying into the own memory failed")]
    Copy(#[source] slab_memory::CopyError),
}

/// Why no tensor was received.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RecvError {
    /// The time was up. Nothing is lost: the next call goes on where this one stopped.
    #[error("time is up while waiting for {0}")]
    TimedOut(Waiting),
    /// This direction has ended; every later call says the same.
    #[error("this direction of the pipe has ended")]
    Broken(#[source] Broken),
}
