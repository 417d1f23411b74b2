//! The host and port in the address of a store.

use std::net::Ipv6Addr;

use super::address::StoreAddressError;

/// Host and port of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Authority {
    text: String,
    host: String,
    port: u16,
}

impl Authority {
    /// Parses `HOST:PORT`, an IPv6 host in brackets; `default` is what a missing port means.
    pub(super) fn parse(text: &str, default: Option<u16>) -> Result<Self, StoreAddressError> {
        let (host, port) = match text.strip_prefix('[') {
            Some(rest) => {
                let (host, port) = rest.split_once(']').ok_or(StoreAddressError::Host)?;
                host.parse::<Ipv6Addr>()
                    .map_err(|_| StoreAddressError::Host)?;
                match port {
                    "" => (host, None),
                    port => (
                        host,
                        Some(port.strip_prefix(':').ok_or(StoreAddressError::Port)?),
                    ),
                }
            }
            None => match text.split_once(':') {
                Some((host, port)) => (host, Some(port)),
                None => (text, None),
            },
        };
        let of_host = |byte: u8| byte.is_ascii_alphanumeric() || b"-._:".contains(&byte);
        if host.is_empty() || !host.bytes().all(of_host) {
            return Err(StoreAddressError::Host);
        }
        let port = match port {
            None => default.ok_or(StoreAddressError::Port)?,
            Some(port) if port.bytes().all(|byte| byte.is_ascii_digit()) => {
                port.parse().map_err(|_| StoreAddressError::Port)?
            }
            Some(_) => return Err(StoreAddressError::Port),
        };
        if port == 0 {
            return Err(StoreAddressError::Port);
        }
        Ok(Self {
            text: text.to_owned(),
            host: host.to_owned(),
            port,
        })
    }

    /// As it was written.
    pub(super) fn text(&self) -> &str {
        &self.text
    }

    pub(super) fn host(&self) -> &str {
        &self.host
    }

    pub(super) fn port(&self) -> u16 {
        self.port
    }
}
