//! The address of an HTTP metadata store, and the requests made of it.

use std::fmt::Write as _;

/// Longest address accepted, in bytes.
const URL_BYTES_MAX: usize = 2_048;

/// Why an address of a metadata store was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreUrlError {
    /// The address does not start with `http://`.
    #[error("the address of the store does not start with http://")]
    Scheme,
    /// TLS is not supported: put a proxy that speaks it on this machine.
    #[error("https:// is not supported; use http://")]
    Tls,
    /// There is no host, or it has a character that no host has, or it has a user name.
    #[error("the address of the store has no usable host; expected http://HOST:PORT/PATH")]
    Host,
    /// The port is no number from 1 to 65535.
    #[error("the address of the store has no usable port; expected http://HOST:PORT/PATH")]
    Port,
    /// The path is missing, or has a query, a fragment or a character that paths do not have.
    #[error("the address of the store has no usable path; that of Mooncake's server is /metadata")]
    Path,
    /// The address is too long.
    #[error("the address of the store has {len} bytes, more than {max}")]
    TooLong {
        /// Bytes of the address.
        len: usize,
        /// Bytes accepted.
        max: usize,
    },
}

/// A parsed address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StoreUrl {
    text: String,
    /// Host and port as they were written.
    authority: String,
    host: String,
    port: u16,
    path: String,
}

impl StoreUrl {
    pub(super) fn parse(text: &str) -> Result<Self, StoreUrlError> {
        if text.len() > URL_BYTES_MAX {
            return Err(StoreUrlError::TooLong {
                len: text.len(),
                max: URL_BYTES_MAX,
            });
        }
        if text.starts_with("https://") {
            return Err(StoreUrlError::Tls);
        }
        let rest = text.strip_prefix("http://").ok_or(StoreUrlError::Scheme)?;
        let at = rest.find('/').ok_or(StoreUrlError::Path)?;
        let (authority, path) = rest.split_at(at);
        let of_path = |byte: u8| byte.is_ascii_graphic() && !b"?#\"<>\\^`{|}".contains(&byte);
        if !path.bytes().all(of_path) {
            return Err(StoreUrlError::Path);
        }
        let (host, port) = match authority.strip_prefix('[') {
            Some(rest) => {
                let (host, port) = rest.split_once(']').ok_or(StoreUrlError::Host)?;
                host.parse::<std::net::Ipv6Addr>()
                    .map_err(|_| StoreUrlError::Host)?;
                match port {
                    "" => (host, None),
                    port => (
                        host,
                        Some(port.strip_prefix(':').ok_or(StoreUrlError::Port)?),
                    ),
                }
            }
            None => match authority.split_once(':') {
                Some((host, port)) => (host, Some(port)),
                None => (authority, None),
            },
        };
        let of_host = |byte: u8| byte.is_ascii_alphanumeric() || b"-._:".contains(&byte);
        if host.is_empty() || !host.bytes().all(of_host) {
            return Err(StoreUrlError::Host);
        }
        let port = match port {
            None => 80,
            Some(port) if port.bytes().all(|byte| byte.is_ascii_digit()) => {
                port.parse().map_err(|_| StoreUrlError::Port)?
            }
            Some(_) => return Err(StoreUrlError::Port),
        };
        if port == 0 {
            return Err(StoreUrlError::Port);
        }
        Ok(Self {
            text: text.to_owned(),
            authority: authority.to_owned(),
            host: host.to_owned(),
            port,
            path: path.to_owned(),
        })
    }

    pub(super) fn text(&self) -> &str {
        &self.text
    }

    pub(super) fn host(&self) -> &str {
        &self.host
    }

    pub(super) fn port(&self) -> u16 {
        self.port
    }

    /// Returns everything of a request before its body.
    pub(super) fn request(&self, method: &str, key: &str, body_len: Option<usize>) -> String {
        let mut text = format!("{method} {}?key=", self.path);
        for byte in key.bytes() {
            // Everything but the unreserved characters of URIs is escaped, as real engines do.
            let _ = if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
                text.write_char(char::from(byte))
            } else {
                write!(text, "%{byte:02X}")
            };
        }
        let _ = write!(
            text,
            " HTTP/1.1\r\nHost: {}\r\nAccept: */*\r\nConnection: close\r\n",
            self.authority
        );
        if let Some(len) = body_len {
            let _ = write!(
                text,
                "Content-Type: application/json\r\nContent-Length: {len}\r\n"
            );
        }
        text.push_str("\r\n");
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_port_and_path_are_found() {
        let check = |text, host, port, path| {
            let url = StoreUrl::parse(text).unwrap();
            assert_eq!((url.host(), url.port(), &*url.path), (host, port, path));
        };
        check(
            "http://127.0.0.1:8080/metadata",
            "127.0.0.1",
            8080,
            "/metadata",
        );
        check("http://store/a/b", "store", 80, "/a/b");
        check("http://[::1]:9/", "::1", 9, "/");
        check("http://[::1]/m", "::1", 80, "/m");
    }

    #[test]
    fn addresses_that_cannot_work_are_refused_each_for_its_reason() {
        let check = |text: &str, error| assert_eq!(StoreUrl::parse(text), Err(error), "{text}");
        check("https://a/m", StoreUrlError::Tls);
        check("a:1/m", StoreUrlError::Scheme);
        check("P2PHANDSHAKE", StoreUrlError::Scheme);
        check("http://a:1", StoreUrlError::Path);
        check("http://a/m?key=", StoreUrlError::Path);
        check("http://a/m\r\nX: y", StoreUrlError::Path);
        check("http:///m", StoreUrlError::Host);
        check("http://user@a/m", StoreUrlError::Host);
        check("http://[x]/m", StoreUrlError::Host);
        check("http://a:/m", StoreUrlError::Port);
        check("http://a:0/m", StoreUrlError::Port);
        check("http://a:65536/m", StoreUrlError::Port);
        check("http://a:+1/m", StoreUrlError::Port);
        check("http://[::1]x/m", StoreUrlError::Port);
    }

    #[test]
    fn a_key_is_escaped_as_real_engines_do_and_cannot_leave_its_place() {
        let url = StoreUrl::parse("http://h:1/metadata").unwrap();
        let request = url.request("GET", "mooncake/ram/a:1", None);
        assert!(
            request
                .starts_with("GET /metadata?key=mooncake%2Fram%2Fa%3A1 HTTP/1.1\r\nHost: h:1\r\n")
        );
        let request = url.request("PUT", "a b\r\n&\u{e9}", Some(3));
        assert!(request.starts_with("PUT /metadata?key=a%20b%0D%0A%26%C3%A9 HTTP/1.1\r\n"));
        assert!(request.ends_with("\r\nContent-Length: 3\r\n\r\n"));
    }
}
