//! Where a store is: which kind of store a text means, and the host and port in it.

/// Longest address accepted, in bytes.
const ADDRESS_BYTES_MAX: usize = 2_048;

/// Why the address of a metadata store was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreAddressError {
    /// `P2PHANDSHAKE` means that there is no store: start a [`TcpEngine`](crate::tcp::TcpEngine).
    #[error("P2PHANDSHAKE means that there is no metadata store")]
    Handshake,
    /// No store is known by that scheme: use `http://`, `etcd://` or `redis://`.
    #[error("no metadata store has the scheme {scheme:?}; known are http, etcd and redis")]
    UnknownScheme {
        /// What stands before `://`.
        scheme: String,
    },
    /// The store is known and this build is without it: build with the feature.
    #[error("this build has no metadata store for {scheme}://; build with the feature `{feature}`")]
    NotBuilt {
        /// The scheme asked for.
        scheme: &'static str,
        /// The crate's feature.
        feature: &'static str,
    },
    /// The address does not start with what this store's addresses start with.
    #[error("the address of the store does not start with {expected}")]
    Scheme {
        /// What it should start with.
        expected: &'static str,
    },
    /// TLS is not supported: put a proxy that speaks it on this machine.
    #[error("TLS is not supported; put a proxy on this machine, and give its address")]
    Tls,
    /// There is no host, or it has a character that no host has, or a user name where none is taken.
    #[error("the address of the store has no usable host; expected HOST:PORT")]
    Host,
    /// The port is missing where one is needed, or no number from 1 to 65535.
    #[error("the address of the store has no usable port; expected HOST:PORT")]
    Port,
    /// The path is missing where one is needed, or has a query, a fragment or a character that paths do
    /// not have. That of Mooncake's HTTP server is `/metadata`; etcd takes none; that of Redis is the
    /// number of a database.
    #[error("the address of the store has no usable path")]
    Path,
    /// User name or password cannot be read: escape all but letters and digits as `%XX`.
    #[error("the address of the store has no usable user name or password")]
    Credentials,
    /// There are too many servers in the address.
    #[error("the address of the store names {count} servers, more than {max}")]
    TooManyServers {
        /// Servers in the address.
        count: usize,
        /// Servers accepted.
        max: usize,
    },
    /// The address is too long.
    #[error("the address of the store has {len} bytes, more than {max}")]
    TooLong {
        /// Bytes of the address.
        len: usize,
        /// Bytes accepted.
        max: usize,
    },
}

/// Refuses what no store reads.
pub(super) fn check_len(text: &str) -> Result<(), StoreAddressError> {
    if text.len() > ADDRESS_BYTES_MAX {
        return Err(StoreAddressError::TooLong {
            len: text.len(),
            max: ADDRESS_BYTES_MAX,
        });
    }
    Ok(())
}
