//! Mooncake's HTTP metadata service, over plain TCP connections.

use std::fmt::Write as _;

use super::MetadataStore;
use super::address::{StoreAddressError, check_len};
use super::authority::Authority;
use super::dial::{Dialer, Share};
use super::error::StoreError;
use super::timeouts::StoreTimeouts;
use super::web::{Answer, Request, ask};

/// Longest answer to a request whose answer is not used.
const IGNORED_BODY_MAX: u64 = 64 << 10;

/// An HTTP metadata store: `GET`, `PUT` and `DELETE` of `URL?key=KEY`.
///
/// Its [`swap`](MetadataStore::swap) is several requests: two engines that replace the same entry at the
/// same time may both succeed for a moment, and the later one keeps it. Mooncake's server refuses to
/// replace the value that claims a name, so that of two engines that claim a name which is free one is refused.
#[derive(Clone, Debug)]
pub struct HttpStore {
    dialer: Dialer,
    path: String,
}

impl HttpStore {
    /// Creates the store at `url`, as real engines take it: with the path, which for the server of the
    /// Mooncake package is `/metadata`. Connects to nothing.
    ///
    /// # Errors
    /// [`StoreAddressError`].
    pub fn new(url: &str) -> Result<Self, StoreAddressError> {
        Self::with_timeouts(url, StoreTimeouts::default())
    }

    /// As [`new`](HttpStore::new), with waits of the caller's choice.
    ///
    /// # Errors
    /// [`StoreAddressError`].
    pub fn with_timeouts(url: &str, timeouts: StoreTimeouts) -> Result<Self, StoreAddressError> {
        check_len(url)?;
        if url.starts_with("https://") {
            return Err(StoreAddressError::Tls);
        }
        let expected = "http://";
        let rest = url
            .strip_prefix(expected)
            .ok_or(StoreAddressError::Scheme { expected })?;
        let at = rest.find('/').ok_or(StoreAddressError::Path)?;
        let (authority, path) = rest.split_at(at);
        let of_path = |byte: u8| byte.is_ascii_graphic() && !b"?#\"<>\\^`{|}".contains(&byte);
        if !path.bytes().all(of_path) {
            return Err(StoreAddressError::Path);
        }
        let authority = Authority::parse(authority, Some(80))?;
        Ok(Self {
            dialer: Dialer::new(url.to_owned(), authority, timeouts),
            path: path.to_owned(),
        })
    }

    fn ask(
        &self,
        method: &'static str,
        key: &str,
        body: Option<&[u8]>,
        len_max: u64,
    ) -> Result<Answer, StoreError> {
        let request = Request {
            method,
            target: &self.target(key),
            body,
            key,
            len_max,
        };
        ask(&self.dialer, Share { servers: 1 }, &request)
    }

    /// Path and query of the requests for `key`.
    fn target(&self, key: &str) -> String {
        let mut text = format!("{}?key=", self.path);
        for byte in key.bytes() {
            // Everything but the unreserved characters of URIs is escaped, as real engines do. Writing to
            // a string never fails.
            let _ = if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
                text.write_char(char::from(byte))
            } else {
                write!(text, "%{byte:02X}")
            };
        }
        text
    }

    fn refused(&self, key: &str, answer: &Answer) -> StoreError {
        StoreError::Refused {
            store: self.dialer.store(),
            key: key.to_owned(),
            status: answer.status,
        }
    }
}

impl MetadataStore for HttpStore {
    fn get(&self, key: &str, len_max: u64) -> Result<Option<Vec<u8>>, StoreError> {
        let answer = self.ask("GET", key, None, len_max)?;
        match answer.status {
            200 => Ok(Some(answer.body)),
            404 => Ok(None),
            _ => Err(self.refused(key, &answer)),
        }
    }

    fn put(&self, key: &str, value: &[u8]) -> Result<(), StoreError> {
        let answer = self.ask("PUT", key, Some(value), IGNORED_BODY_MAX)?;
        match answer.status {
            200 => Ok(()),
            _ => Err(self.refused(key, &answer)),
        }
    }

    fn delete(&self, key: &str) -> Result<bool, StoreError> {
        let answer = self.ask("DELETE", key, None, IGNORED_BODY_MAX)?;
        match answer.status {
            200 => Ok(true),
            404 => Ok(false),
            _ => Err(self.refused(key, &answer)),
        }
    }

    fn swap(
        &self,
        key: &str,
        expected: Option<&[u8]>,
        new: Option<&[u8]>,
    ) -> Result<bool, StoreError> {
        let len_max = expected.map_or(0, <[u8]>::len) as u64;
        let is_expected = match self.get(key, len_max) {
            Ok(found) => found.as_deref() == expected,
            Err(StoreError::TooLong { .. }) => false,
            Err(error) => return Err(error),
        };
        if !is_expected {
            return Ok(false);
        }
        // Mooncake's server does not replace the values that claim a name.
        if expected.is_some() && !self.delete(key)? {
            return Ok(false);
        }
        let Some(new) = new else {
            return Ok(true);
        };
        match self.put(key, new) {
            Err(StoreError::Refused { .. }) if self.exists(key)? => Ok(false),
            put => put.map(|()| true),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_port_and_path_are_found() {
        let check = |text, authority, path| {
            let store = HttpStore::new(text).unwrap();
            assert_eq!((store.dialer.authority(), &*store.path), (authority, path));
        };
        check(
            "http://127.0.0.1:8080/metadata",
            "127.0.0.1:8080",
            "/metadata",
        );
        check("http://store/a/b", "store", "/a/b");
        check("http://[::1]:9/", "[::1]:9", "/");
        check("http://[::1]/m", "[::1]", "/m");
    }

    #[test]
    fn addresses_that_cannot_work_are_refused_each_for_its_reason() {
        let check =
            |text: &str, error| assert_eq!(HttpStore::new(text).err(), Some(error), "{text}");
        let scheme = || StoreAddressError::Scheme {
            expected: "http://",
        };
        check("https://a/m", StoreAddressError::Tls);
        check("a:1/m", scheme());
        check("P2PHANDSHAKE", scheme());
        check("http://a:1", StoreAddressError::Path);
        check("http://a/m?key=", StoreAddressError::Path);
        check("http://a/m\r\nX: y", StoreAddressError::Path);
        check("http:///m", StoreAddressError::Host);
        check("http://user@a/m", StoreAddressError::Host);
        check("http://[x]/m", StoreAddressError::Host);
        check("http://a:/m", StoreAddressError::Port);
        check("http://a:0/m", StoreAddressError::Port);
        check("http://a:65536/m", StoreAddressError::Port);
        check("http://a:+1/m", StoreAddressError::Port);
        check("http://[::1]x/m", StoreAddressError::Port);
        let len = 3_000;
        let error = StoreAddressError::TooLong { len, max: 2_048 };
        check(&"x".repeat(len), error);
    }

    // row: W10.6
    #[test]
    fn a_key_is_escaped_as_real_engines_do_and_cannot_leave_its_place() {
        let store = HttpStore::new("http://h:1/metadata").unwrap();
        let check = |key, target| assert_eq!(store.target(key), target);
        check("mooncake/ram/a:1", "/metadata?key=mooncake%2Fram%2Fa%3A1");
        check("a b\r\n&\u{e9}", "/metadata?key=a%20b%0D%0A%26%C3%A9");
    }
}
