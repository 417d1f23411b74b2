//! One constructor for every store, by the connection strings that real engines take.

use std::sync::Arc;

use super::MetadataStore;
use super::address::{StoreAddressError, check_len};
use super::timeouts::StoreTimeouts;

/// Creates the store that `address` names, as real engines choose it: `http://HOST:PORT/PATH`,
/// `etcd://HOST:PORT` or `HOST:PORT` alone (several servers separated by `;`), or
/// `redis://[USER:PASSWORD@]HOST:PORT[/DATABASE]`. Connects to nothing.
///
/// # Errors
/// [`StoreAddressError`]: among others [`UnknownScheme`](StoreAddressError::UnknownScheme), which ends the
/// process of a real engine, and [`NotBuilt`](StoreAddressError::NotBuilt) for a store whose feature this
/// build lacks.
///
/// # Source
/// The project's protocol page on the Mooncake wire, section 10.2.
pub fn open_store(
    address: &str,
    timeouts: StoreTimeouts,
) -> Result<Arc<dyn MetadataStore>, StoreAddressError> {
    check_len(address)?;
    if address == "P2PHANDSHAKE" {
        return Err(StoreAddressError::Handshake);
    }
    match address
        .split_once("://")
        .map_or("etcd", |(scheme, _)| scheme)
    {
        "http" => http(address, timeouts),
        "etcd" => etcd(address, timeouts),
        "redis" => redis(address, timeouts),
        "https" | "rediss" => Err(StoreAddressError::Tls),
        scheme => Err(StoreAddressError::UnknownScheme {
            scheme: scheme.to_owned(),
        }),
    }
}

/// Makes the constructor of one store, or what stands for it where its feature is not built.
macro_rules! constructor {
    ($name:ident, $feature:literal, $store:ident) => {
        #[cfg(feature = $feature)]
        fn $name(
            address: &str,
            timeouts: StoreTimeouts,
        ) -> Result<Arc<dyn MetadataStore>, StoreAddressError> {
            Ok(Arc::new(super::$store::with_timeouts(address, timeouts)?))
        }

        #[cfg(not(feature = $feature))]
        fn $name(_: &str, _: StoreTimeouts) -> Result<Arc<dyn MetadataStore>, StoreAddressError> {
            Err(StoreAddressError::NotBuilt {
                scheme: $feature,
                feature: $feature,
            })
        }
    };
}

constructor!(http, "http", HttpStore);
constructor!(etcd, "etcd", EtcdStore);
constructor!(redis, "redis", RedisStore);

#[cfg(test)]
mod tests {
    use super::*;

    /// What becomes of an address: the error, if it is one.
    fn check(address: &str, built: bool, feature: &'static str) {
        let scheme = feature;
        let expected = (!built).then_some(StoreAddressError::NotBuilt { scheme, feature });
        let found = open_store(address, StoreTimeouts::default()).err();
        assert_eq!(found, expected, "{address}");
    }

    // row: W10.2
    #[test]
    fn the_scheme_chooses_the_store_and_none_is_etcd() {
        check("http://h:1/metadata", cfg!(feature = "http"), "http");
        check("etcd://h:1;i:2", cfg!(feature = "etcd"), "etcd");
        check("h:1", cfg!(feature = "etcd"), "etcd");
        check("redis://h:1/2", cfg!(feature = "redis"), "redis");
    }

    // row: W10.2
    #[test]
    fn what_names_no_store_is_a_typed_error() {
        let check = |address: &str, error| {
            let found = open_store(address, StoreTimeouts::default()).err();
            assert_eq!(found, Some(error), "{address}");
        };
        check("P2PHANDSHAKE", StoreAddressError::Handshake);
        check("https://h:1/m", StoreAddressError::Tls);
        check("rediss://h:1", StoreAddressError::Tls);
        let unknown = |scheme: &str| StoreAddressError::UnknownScheme {
            scheme: scheme.to_owned(),
        };
        check("zookeeper://h:1", unknown("zookeeper"));
        check("HTTP://h:1", unknown("HTTP"));
        check("://", unknown(""));
        let len = 9_999;
        check(
            &"x".repeat(len),
            StoreAddressError::TooLong { len, max: 2_048 },
        );
    }
}
