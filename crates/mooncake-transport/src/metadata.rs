//! Names kept in a metadata store, beside the P2P handshake: [`StoreEngine`] publishes itself there
//! and finds its peers there, in the keys and values that real engines use.
//!
//! [`MetadataStore`] is the seam: `HttpStore` (feature `http`) is Mooncake's HTTP metadata service,
//! others may be passed in.
//!
//! Invariants: an engine never takes over what a dead one has left, it starts from an empty
//! descriptor; a later descriptor is never overwritten by an earlier one of the same engine; an
//! entry that names somebody else is not deleted, unless nobody listens there any more.
//!
//! Not here: leases (an entry of a crashed engine stays until the name is claimed again), TLS.

mod engine;
mod error;
#[cfg(feature = "http")]
mod http;
mod key;
mod publisher;
mod value;

pub use self::engine::{StoreConfig, StoreEngine};
pub use self::error::{StoreError, ValueError};
#[cfg(feature = "http")]
pub use self::http::{AnswerError, HttpStore, HttpTimeouts, StoreUrlError};
pub use self::key::Keys;
pub use self::value::RpcMeta;

/// A key-value store that engines publish themselves in.
///
/// Calls may come from any thread and block; an implementation bounds how long, and how many bytes
/// it takes from the store. What it returns is not trusted.
pub trait MetadataStore: Send + Sync {
    /// Returns the value of `key`, if there is one.
    ///
    /// # Errors
    /// [`StoreError`] if the store cannot be asked, or the value has more than `len_max` bytes.
    fn get(&self, key: &str, len_max: u64) -> Result<Option<Vec<u8>>, StoreError>;

    /// Sets the value of `key`. A store may refuse to replace a value that is there.
    ///
    /// # Errors
    /// [`StoreError`]; unless it says that the store refused, the value may have been set.
    fn put(&self, key: &str, value: &[u8]) -> Result<(), StoreError>;

    /// Removes `key`; returns whether it was there.
    ///
    /// # Errors
    /// [`StoreError`]; unless it says that the store refused, the key may have been removed.
    fn delete(&self, key: &str) -> Result<bool, StoreError>;
}
