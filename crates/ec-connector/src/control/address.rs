//! Control addresses.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

/// Where a control server listens: `tcp://HOST:PORT`.
///
/// HOST is a name, an IPv4 literal, or an IPv6 literal in brackets.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ControlAddress {
    /// With brackets if it is an IPv6 literal.
    host: Arc<str>,
    port: u16,
}

/// The text is no control address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AddressError {
    /// It does not begin with `tcp://`.
    #[error("control address must begin with tcp://")]
    NotTcp,
    /// There is no host, or one with characters no host has.
    #[error("control address needs a host name, an IPv4 address, or an IPv6 address in brackets")]
    Host,
    /// There is no port in 1..=65535.
    #[error("control address needs a port from 1 to 65535")]
    Port,
}

impl ControlAddress {
    /// Reads `tcp://HOST:PORT`.
    ///
    /// # Errors
    /// [`AddressError`] says which part is wrong.
    pub fn parse(text: &str) -> Result<Self, AddressError> {
        let rest = text.strip_prefix("tcp://").ok_or(AddressError::NotTcp)?;
        let (host, port) = rest.rsplit_once(':').ok_or(AddressError::Port)?;
        let port = match port.parse() {
            Ok(number) if number > 0 && port.bytes().all(|b| b.is_ascii_digit()) => number,
            _ => return Err(AddressError::Port),
        };
        let good = match host.strip_prefix('[').and_then(|h| h.strip_suffix(']')) {
            Some(literal) => literal.parse::<std::net::Ipv6Addr>().is_ok(),
            None => {
                !host.is_empty()
                    && host.len() <= HOST_BYTES_MAX
                    && host
                        .bytes()
                        .all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b))
            }
        };
        if !good {
            return Err(AddressError::Host);
        }
        Ok(Self {
            host: host.into(),
            port,
        })
    }

    /// The address of a port of this machine or another one.
    pub fn new(host: IpAddr, port: u16) -> Self {
        let host = match host {
            IpAddr::V4(v4) => v4.to_string(),
            IpAddr::V6(v6) => format!("[{v6}]"),
        };
        Self {
            host: host.into(),
            port,
        }
    }

    /// The host as written, an IPv6 literal with its brackets.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The same host with another port; how the shards of a consumer and their event sockets are
    /// addressed.
    #[must_use]
    pub fn with_port(&self, port: u16) -> Self {
        Self {
            host: Arc::clone(&self.host),
            port,
        }
    }
}

impl fmt::Display for ControlAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tcp://{}:{}", self.host, self.port)
    }
}

impl std::str::FromStr for ControlAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        Self::parse(text)
    }
}

/// Longest host name of the domain name system.
const HOST_BYTES_MAX: usize = 253;

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, expected: Result<(&str, u16), AddressError>) {
        let address = ControlAddress::parse(text);
        let parts = address.as_ref().map(|a| (a.host(), a.port()));
        assert_eq!(parts.map_err(|error| *error), expected, "{text}");
        if let Ok(address) = &address {
            assert_eq!(address.to_string(), text);
        }
    }

    #[test]
    fn names_and_literals_are_addresses() {
        check("tcp://127.0.0.1:14579", Ok(("127.0.0.1", 14579)));
        check("tcp://gpu-3.example:1", Ok(("gpu-3.example", 1)));
        check("tcp://[::1]:65535", Ok(("[::1]", 65535)));
    }

    #[test]
    fn other_texts_say_what_is_wrong() {
        check("127.0.0.1:1", Err(AddressError::NotTcp));
        check("ipc:///tmp/x", Err(AddressError::NotTcp));
        check("tcp://host", Err(AddressError::Port));
        check("tcp://host:", Err(AddressError::Port));
        check("tcp://host:0", Err(AddressError::Port));
        check("tcp://host:65536", Err(AddressError::Port));
        check("tcp://host:+1", Err(AddressError::Port));
        check("tcp://:1", Err(AddressError::Host));
        check("tcp://::1:1", Err(AddressError::Host));
        check("tcp://[x]:1", Err(AddressError::Host));
        check("tcp://a;b:1", Err(AddressError::Host));
        check("tcp://a b:1", Err(AddressError::Host));
    }

    #[test]
    fn another_port_keeps_the_host() {
        let base = ControlAddress::new("::1".parse().unwrap(), 1);
        assert_eq!(base.with_port(2).to_string(), "tcp://[::1]:2");
    }
}
