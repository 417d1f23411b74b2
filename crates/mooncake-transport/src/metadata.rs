//! Names kept in a metadata store, beside the P2P handshake: [`StoreEngine`] publishes itself there
//! and finds its peers there, in the keys and values that real engines use.
//!
//! [`MetadataStore`] is the seam. `HttpStore` (feature `http`) is Mooncake's HTTP metadata service,
//! `EtcdStore` (feature `etcd`) an etcd cluster, `RedisStore` (feature `redis`) a Redis server;
//! [`open_store`] chooses among them by connection string, and others may be passed in.
//!
//! Invariants: an engine never takes over what a dead one has left, it starts from an empty
//! descriptor; a later descriptor is never overwritten by an earlier one of the same engine, unless
//! by a request that the store was still at when it was given up; an entry that names somebody else
//! is not deleted, unless nobody listens there any more; the engine's own thread never waits for a store.
//!
//! Not here: leases (an entry of a crashed engine stays until the name is claimed again), TLS.

mod address;
#[cfg(any(feature = "http", feature = "etcd", feature = "redis"))]
mod authority;
#[cfg(any(feature = "http", feature = "etcd", feature = "redis"))]
mod dial;
mod engine;
mod error;
#[cfg(feature = "etcd")]
mod etcd;
#[cfg(feature = "http")]
mod http;
mod keeper;
mod key;
mod open;
mod publisher;
#[cfg(feature = "redis")]
mod redis;
mod timeouts;
mod value;
#[cfg(any(feature = "http", feature = "etcd"))]
mod web;

pub use self::address::StoreAddressError;
pub use self::engine::{StoreConfig, StoreEngine};
pub use self::error::{AnswerError, StoreError, ValueError};
#[cfg(feature = "etcd")]
pub use self::etcd::EtcdStore;
#[cfg(feature = "http")]
pub use self::http::HttpStore;
pub use self::key::Keys;
pub use self::open::open_store;
#[cfg(feature = "redis")]
pub use self::redis::RedisStore;
pub use self::timeouts::StoreTimeouts;
pub use self::value::RpcMeta;

/// A key-value store that engines publish themselves in.
///
/// Calls may come from any thread and block; an implementation bounds how long, and how many bytes
/// it takes from the store. What it returns is not trusted.
pub trait MetadataStore: Send + Sync {
    /// Returns the value of `key`, if there is one.
    ///
    /// # Errors
    /// [`StoreError`] if the store cannot be asked; [`StoreError::TooLong`] if the value has more than
    /// `len_max` bytes.
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

    /// Sets the value of `key` to `new`, or removes it for `None`, if it is `expected` now, where `None`
    /// is no value; returns whether it was. Two engines that are started under one name both do this: a
    /// store that can does it in one step.
    ///
    /// # Errors
    /// [`StoreError`]; unless it says that the store refused, the value may have been set or removed.
    fn swap(
        &self,
        key: &str,
        expected: Option<&[u8]>,
        new: Option<&[u8]>,
    ) -> Result<bool, StoreError>;

    /// Says whether `key` has a value, whatever it is.
    ///
    /// # Errors
    /// [`StoreError`] if the store cannot be asked.
    fn exists(&self, key: &str) -> Result<bool, StoreError> {
        match self.get(key, 0) {
            Ok(value) => Ok(value.is_some()),
            Err(StoreError::TooLong { .. }) => Ok(true),
            Err(error) => Err(error),
        }
    }

    /// What real engines write after the text of every value in this store; nothing by default.
    fn value_end(&self) -> &'static str {
        ""
    }
}
