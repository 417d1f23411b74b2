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
    /// The connection to the store failed half way. The next call tries anew.
    #[error("the connection to the metadata store at {store} failed")]
    Connection {
        /// The store.
        store: String,
        /// The system's answer.
        source: IoFailure,
    },
    /// What answered does not speak HTTP as a metadata store does: check the address.
    #[cfg(feature = "http")]
    #[error("what answers at {store} is no metadata store")]
    Answer {
        /// The store.
        store: String,
        /// What is wrong with the answer.
        source: super::AnswerError,
    },
    /// The store refused the request: check the address and its path, and the store's log.
    #[error("the metadata store at {store} answered {code} for the key {key:?}")]
    Refused {
        /// The store.
        store: String,
        /// The key asked for.
        key: String,
        /// The store's code; for HTTP the status.
        code: u32,
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
    /// A name or a cluster id that has no key: it is empty, too long, or has a character that it must not have.
    #[error("{name:?} cannot be a part of a key")]
    Name {
        /// The name.
        name: String,
    },
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
