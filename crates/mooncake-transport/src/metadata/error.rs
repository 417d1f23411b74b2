//! Why a metadata store could not be used.

use crate::error::{IoFailure, seconds};
use crate::wire::JsonError;
use crate::wire::name::PeerNameError;

/// Why a call to a metadata store failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// No connection: start the store, or correct its address. The next call tries anew.
    #[error("the metadata store at {store} cannot be reached; is it running?")]
    Unreachable {
        /// The store.
        store: String,
        /// The system's answer.
        source: IoFailure,
    },
    /// The store did not answer in time. The next call tries anew.
    #[error("the metadata store at {store} did not answer within {}", seconds(*timeout_ms))]
    Timeout {
        /// The store.
        store: String,
        /// The time allowed for the whole call.
        timeout_ms: u64,
    },
    /// The connection to the store failed half way, or the store closed it before it had answered (then the
    /// kind of `source` is [`UnexpectedEof`](std::io::ErrorKind::UnexpectedEof)). The next call tries anew.
    #[error("the connection to the metadata store at {store} failed")]
    Connection {
        /// The store.
        store: String,
        /// The system's answer.
        source: IoFailure,
    },
    /// What answered is no store of that kind: check the address.
    #[error("what answers at {store} is no metadata store of that kind")]
    Answer {
        /// The store.
        store: String,
        /// What is wrong with the answer.
        source: AnswerError,
    },
    /// The store refused the request: check the address and its path, and the store's log.
    #[error("the metadata store at {store} answered with the status {status} for the key {key:?}")]
    Refused {
        /// The store.
        store: String,
        /// The key asked for.
        key: String,
        /// Status of the HTTP answer.
        status: u16,
    },
    /// The Redis server answered with an error, which says what it lacks: memory, a role, a permission.
    #[error("the metadata store at {store} answered {reply:?} for the key {key:?}")]
    ErrorReply {
        /// The store.
        store: String,
        /// The key asked for.
        key: String,
        /// The server's words, at most 200 characters.
        reply: String,
    },
    /// The Redis server takes no calls from us: correct user, password or database in its address.
    #[error("the metadata store at {store} answered {reply:?} to {command}")]
    Denied {
        /// The store.
        store: String,
        /// The command that was refused, without its arguments.
        command: &'static str,
        /// The server's words, at most 200 characters.
        reply: String,
    },
    /// A value is longer than is read.
    #[error("the value of the key {key:?} has more than {max} bytes")]
    TooLong {
        /// The key.
        key: String,
        /// Bytes accepted.
        max: u64,
    },
    /// Somebody has put a value there that no engine writes: delete the key.
    #[error("the value of the key {key:?} is unusable")]
    Value {
        /// The key.
        key: String,
        /// What is wrong with it.
        source: ValueError,
    },
    /// No engine of that name is in the store: start it, or check the name and the cluster.
    #[error("no engine has published the key {key:?}")]
    NotPublished {
        /// The key that is missing.
        key: String,
    },
    /// Another engine has this name, or may have it: choose another. If that engine is gone for good,
    /// delete the key.
    #[error("the name of the key {key:?} is taken by an engine at {holder}")]
    NameTaken {
        /// The key that says so.
        key: String,
        /// Where that engine is, `host:port`.
        holder: String,
        /// Whether it has answered; otherwise it is not known to be gone.
        answers: bool,
    },
    /// Other engines change the key at the same time: try again.
    #[error("the key {key:?} is being changed by others")]
    Contended {
        /// The key.
        key: String,
    },
    /// The call came from the engine's own thread, where a task's hold is dropped and a batch is woken.
    /// Make it from another thread.
    #[error("called from the engine's own thread, which must not wait for a metadata store")]
    OnEngineThread,
    /// A name or a cluster id that has no key: it is empty, too long, or has a character that it must not have.
    #[error("{name:?} cannot be a part of a key")]
    Name {
        /// The name.
        name: String,
    },
}

/// Why the answer of a store was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AnswerError {
    /// The answer does not start like one of HTTP.
    #[error("the answer is not HTTP/1")]
    NotHttp,
    /// A line of the head is too long, or there are too many.
    #[error("the head of the answer is too long")]
    HeadTooLong,
    /// A header has no colon, or one that says where the body ends cannot be read, or two disagree.
    #[error("a header of the answer is malformed")]
    Header,
    /// Nothing says where the body ends, so that a cut one would pass for a whole one.
    #[error("the answer has no length")]
    NoLength,
    /// The body has an encoding other than chunks.
    #[error("the answer has an encoding that was not asked for")]
    Encoding,
    /// A chunk of the body is malformed.
    #[error("a chunk of the answer is malformed")]
    Chunk,
    /// The body is not what the JSON gateway of etcd answers.
    #[error("the answer is none of etcd's JSON gateway")]
    NotEtcd,
    /// The reply is not in the protocol of Redis, or of a kind that the command does not have.
    #[error("the reply is none of a Redis server")]
    NotRedis,
}

/// Why a value of a metadata store was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ValueError {
    /// The value is no JSON object or a member has the wrong type.
    #[error(transparent)]
    Json(#[from] JsonError),
    /// The host is missing or none.
    #[error("the value names no host")]
    Host(#[from] PeerNameError),
    /// The host is an address that no peer can dial.
    #[error("the value names the host {host:?}, which no peer can dial")]
    Wildcard {
        /// The host in the value.
        host: String,
    },
    /// The port is missing or no port number.
    #[error("the value has no usable port ({port})")]
    Port {
        /// The number in the value, 0 if there is none.
        port: u64,
    },
}
