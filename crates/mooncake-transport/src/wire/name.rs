//! What peers are called: `host:port`, with IPv6 literals in brackets.

use std::fmt;
use std::net::Ipv6Addr;

/// Port assumed when a name has none.
pub const DEFAULT_PORT: u16 = 12001;

/// Longest name accepted, in bytes: a host name has at most 253, a scope and a port follow.
const NAME_BYTES_MAX: usize = 512;

/// A parsed peer name: where its control listener is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PeerName {
    host: String,
    port: u16,
}

/// Why a peer name was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PeerNameError {
    /// There is no host in the name.
    #[error("the name has no host; expected HOST:PORT")]
    NoHost,
    /// The name is too long.
    #[error("the name has {len} bytes, more than {max}")]
    TooLong {
        /// Bytes of the name.
        len: usize,
        /// Bytes accepted.
        max: usize,
    },
    /// The name contains white space, a control character or a slash.
    #[error("the name contains a character that no host has")]
    BadCharacter,
}

impl PeerName {
    /// Creates the name of `host` and `port`; IPv6 literals are given without brackets.
    ///
    /// # Errors
    /// [`PeerNameError`] if `host` is empty, too long or has characters that no host has.
    pub fn new(host: &str, port: u16) -> Result<Self, PeerNameError> {
        if host.is_empty() {
            return Err(PeerNameError::NoHost);
        }
        if host.len() > NAME_BYTES_MAX {
            return Err(PeerNameError::TooLong {
                len: host.len(),
                max: NAME_BYTES_MAX,
            });
        }
        if host
            .chars()
            .any(|c| c.is_whitespace() || c.is_control() || c == '/')
        {
            return Err(PeerNameError::BadCharacter);
        }
        Ok(Self {
            host: host.to_owned(),
            port,
        })
    }

    /// Parses a name; leading slashes are dropped first.
    ///
    /// In order: `[v6]` or `[v6]:port`; a bare IPv6 literal, which has no port; an IPv6 literal with
    /// a scope, `fe80::1%if:port`; else the last colon separates host and port. A port that is
    /// missing or no number from 0 to 65535 is [`DEFAULT_PORT`].
    ///
    /// # Errors
    /// As [`new`](PeerName::new).
    ///
    /// # Source
    /// The project's protocol page on the Mooncake wire, sections 2.3 and 6.
    pub fn parse(name: &str) -> Result<Self, PeerNameError> {
        let name = name.trim_start_matches('/');
        let port_of = |text: &str| text.parse().unwrap_or(DEFAULT_PORT);
        if let Some((host, rest)) = name.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            return Self::new(host, rest.strip_prefix(':').map_or(DEFAULT_PORT, port_of));
        }
        if name.parse::<Ipv6Addr>().is_ok() {
            return Self::new(name, DEFAULT_PORT);
        }
        if let Some((address, scope)) = name.split_once('%')
            && address.parse::<Ipv6Addr>().is_ok()
        {
            return match scope.rsplit_once(':') {
                Some((scope, port)) => Self::new(&format!("{address}%{scope}"), port_of(port)),
                None => Self::new(name, DEFAULT_PORT),
            };
        }
        match name.rsplit_once(':') {
            Some((host, port)) => Self::new(host, port_of(port)),
            None => Self::new(name, DEFAULT_PORT),
        }
    }

    /// Returns the host, without brackets.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Returns the port.
    pub fn port(&self) -> u16 {
        self.port
    }
}

impl fmt::Display for PeerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

/// Says whether `host`, with or without brackets, is a wildcard address, in whichever spelling a
/// resolver takes: nobody can dial it, and to the kernel it means this very machine.
#[cfg(feature = "tcp")]
pub(crate) fn is_wildcard(host: &str) -> bool {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let (address, _scope) = bare.split_once('%').unwrap_or((bare, ""));
    match address.parse::<std::net::IpAddr>() {
        Ok(address) => address.to_canonical().is_unspecified(),
        // `0`, `0x0.0` and the like are 0.0.0.0 to a resolver, and no host is called so.
        Err(_) => {
            address.starts_with('0') && address.chars().all(|c| matches!(c, '0' | 'x' | 'X' | '.'))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(name: &str, host: &str, port: u16) {
        let parsed = PeerName::parse(name).unwrap();
        assert_eq!((parsed.host(), parsed.port()), (host, port), "{name}");
    }

    // row: W2.3
    #[test]
    fn names_are_split_in_the_order_real_peers_use() {
        check("10.0.0.1:16001", "10.0.0.1", 16001);
        check("localhost:15609", "localhost", 15609);
        check("[::1]:15086", "::1", 15086);
        check("[::1]", "::1", DEFAULT_PORT);
        check("::1", "::1", DEFAULT_PORT);
        check("fe80::1", "fe80::1", DEFAULT_PORT);
        check("fe80::1%eth0:700", "fe80::1%eth0", 700);
        check("fe80::1%eth0", "fe80::1%eth0", DEFAULT_PORT);
        check("a:b:9", "a:b", 9);
    }

    // row: W2.3
    #[test]
    fn a_missing_or_bad_port_is_the_default_one() {
        check("host", "host", DEFAULT_PORT);
        check("host:", "host", DEFAULT_PORT);
        check("host:notaport", "host", DEFAULT_PORT);
        check("host:70000", "host", DEFAULT_PORT);
        check("[::1]:x", "::1", DEFAULT_PORT);
    }

    // row: W2.3
    #[test]
    fn leading_slashes_are_dropped() {
        check("//host:5", "host", 5);
    }

    #[cfg(feature = "tcp")]
    #[test]
    fn a_wildcard_is_known_in_every_spelling() {
        for wildcard in [
            "0.0.0.0",
            "::",
            "[::]",
            "::%eth0",
            "0:0::0",
            "::ffff:0.0.0.0",
            "0",
            "0.0",
            "0x0",
            "000.0.0.0",
        ] {
            assert!(is_wildcard(wildcard), "{wildcard}");
        }
        for host in [
            "127.0.0.1",
            "::1",
            "",
            "zero",
            "0x1",
            "10.0.0.0",
            "x0",
            "fe80::%eth0",
        ] {
            assert!(!is_wildcard(host), "{host}");
        }
    }

    #[test]
    fn names_without_a_usable_host_are_typed_errors() {
        assert_eq!(PeerName::parse(""), Err(PeerNameError::NoHost));
        assert_eq!(PeerName::parse("/"), Err(PeerNameError::NoHost));
        assert_eq!(PeerName::parse(":16413"), Err(PeerNameError::NoHost));
        assert_eq!(PeerName::parse("a b:1"), Err(PeerNameError::BadCharacter));
        assert!(matches!(
            PeerName::parse(&"a".repeat(1000)),
            Err(PeerNameError::TooLong { len: 1000, .. })
        ));
    }

    #[test]
    fn display_brackets_ipv6_and_parses_back() {
        for name in ["[::1]:15086", "host:1"] {
            assert_eq!(PeerName::parse(name).unwrap().to_string(), name);
        }
    }
}
