//! The value beside the descriptor: where an engine takes control exchanges.

use serde::Serialize;
use serde::de::{IgnoredAny, MapAccess};

use super::error::ValueError;
use crate::wire::JsonError;
use crate::wire::json::{self, Document, Members, Scalar};
use crate::wire::name::{PeerName, is_wildcard};

/// Where an engine takes control exchanges, as it is written in a store.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RpcMeta {
    /// Host name or address, without brackets.
    pub host: String,
    /// Port; never zero.
    pub port: u16,
}

#[derive(Serialize)]
struct Encoded<'a> {
    ip_or_host_name: &'a str,
    rpc_port: u16,
}

#[derive(Debug, Default, PartialEq)]
struct Raw {
    host: Scalar,
    port: Scalar,
}

impl Members for Raw {
    fn take<'de, A: MapAccess<'de>>(&mut self, member: &str, map: &mut A) -> Result<(), A::Error> {
        match member {
            "ip_or_host_name" => self.host = map.next_value()?,
            "rpc_port" => self.port = map.next_value()?,
            _ => drop(map.next_value::<IgnoredAny>()?),
        }
        Ok(())
    }
}

impl RpcMeta {
    /// Creates the value of an engine at `host` and `port`.
    ///
    /// # Errors
    /// [`ValueError::Host`], [`ValueError::Wildcard`] and [`ValueError::Port`] for what nobody can dial.
    pub fn new(host: &str, port: u16) -> Result<Self, ValueError> {
        let bare = host
            .strip_prefix('[')
            .and_then(|host| host.strip_suffix(']'))
            .unwrap_or(host);
        PeerName::new(bare, port)?;
        if is_wildcard(bare) {
            let host = bare.to_owned();
            return Err(ValueError::Wildcard { host });
        }
        if port == 0 {
            return Err(ValueError::Port { port: 0 });
        }
        let host = bare.to_owned();
        Ok(Self { host, port })
    }

    /// Encodes the value as JSON without a newline.
    pub fn encode(&self) -> String {
        let encoded = Encoded {
            ip_or_host_name: &self.host,
            rpc_port: self.port,
        };
        // A struct of a string and an integer always encodes.
        serde_json::to_string(&encoded).unwrap_or_default()
    }

    /// Decodes a value; unknown members are ignored, and what follows the object is too.
    ///
    /// # Errors
    /// [`ValueError`].
    ///
    /// # Complexity
    /// O(length of the value), in time and in memory.
    pub fn decode(bytes: &[u8]) -> Result<Self, ValueError> {
        let Document::Object(raw) = json::decode::<Document<Raw>>(bytes)? else {
            return Err(JsonError::NotAnObject.into());
        };
        let port = raw.port.as_unsigned("rpc_port")?;
        let host = raw.host.into_text("ip_or_host_name")?;
        let port = u16::try_from(port).map_err(|_| ValueError::Port { port })?;
        Self::new(&host, port)
    }

    /// Returns the address as text, `host:port`.
    pub(super) fn holder(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // row: W10.3
    #[test]
    fn the_value_is_what_real_engines_write_and_read() {
        let text = r#"{"ip_or_host_name":"127.0.0.1","rpc_port":16875}"#;
        let value = RpcMeta::new("127.0.0.1", 16_875).unwrap();
        assert_eq!(value.encode(), text);
        assert_eq!(RpcMeta::decode(text.as_bytes()), Ok(value.clone()));
        // Other backends have a newline behind it.
        assert_eq!(RpcMeta::decode(format!("{text}\n").as_bytes()), Ok(value));
    }

    // row: W10.8d
    #[test]
    fn values_that_no_engine_writes_are_typed_errors() {
        let check = |text: &str, error| {
            assert_eq!(RpcMeta::decode(text.as_bytes()), Err(error), "{text}");
        };
        check("null", JsonError::NotAnObject.into());
        check("[]", JsonError::NotAnObject.into());
        check("{}", crate::wire::name::PeerNameError::NoHost.into());
        check(
            r#"{"ip_or_host_name":"a","rpc_port":0}"#,
            ValueError::Port { port: 0 },
        );
        check(
            r#"{"ip_or_host_name":"a","rpc_port":65536}"#,
            ValueError::Port { port: 65_536 },
        );
        for host in ["0.0.0.0", "[::]", "0"] {
            let text = format!(r#"{{"ip_or_host_name":"{host}","rpc_port":1}}"#);
            let host = host.trim_matches(['[', ']']).to_owned();
            check(&text, ValueError::Wildcard { host });
        }
        let member = "rpc_port";
        check(
            r#"{"ip_or_host_name":"a","rpc_port":"1"}"#,
            JsonError::WrongType { member }.into(),
        );
        check(
            r#"{"ip_or_host_name":"a b","rpc_port":1}"#,
            crate::wire::name::PeerNameError::BadCharacter.into(),
        );
    }
}
