//! The configuration file of a pipe, and which side of it this process is.
//!
//! The file is JSON: an object with the keys of the table in `docs/protocol/mooncake-pipe.md`. Keys
//! that are missing or of the wrong type are found here and not when they are first used.

use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::net::Ipv6Addr;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::ports::PortUse;
use crate::error::IoFailure;

/// The environment variable that names the configuration file.
pub const CONFIG_VARIABLE: &str = "MOONCAKE_CONFIG_PATH";

/// Longest configuration file read, in bytes; a real one has a few hundred.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// Which side of a pipe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_enums, reason = "a pipe has two ends")]
pub enum Role {
    /// The process that fills caches (`kv_rank` 0).
    Prefill,
    /// The process that uses them (any other `kv_rank`).
    Decode,
}

impl Role {
    /// Returns the role that a `kv_rank` stands for: 0 is prefill, anything else decode.
    pub fn from_kv_rank(kv_rank: i64) -> Self {
        if kv_rank == 0 {
            Self::Prefill
        } else {
            Self::Decode
        }
    }

    /// Returns the other side.
    pub fn peer(self) -> Self {
        match self {
            Self::Prefill => Self::Decode,
            Self::Decode => Self::Prefill,
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        })
    }
}

/// Where one side is: the text before and the number after the last colon of its URL.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HostPort {
    host: String,
    port: u16,
}

impl HostPort {
    /// Returns the host, without the brackets of an IPv6 address.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Returns the configured port; rank and use are added to it.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Writes a port of this host as peers name it, `host:port` or `[v6]:port`.
    pub fn at(&self, port: u16) -> String {
        if self.host.contains(':') {
            format!("[{}]:{port}", self.host)
        } else {
            format!("{}:{port}", self.host)
        }
    }

    fn parse(text: &str) -> Result<Self, AddressProblem> {
        let (host, port) = match text.strip_prefix('[') {
            Some(rest) => rest
                .split_once("]:")
                .filter(|(host, _)| host.parse::<Ipv6Addr>().is_ok())
                .ok_or(AddressProblem::Shape)?,
            None => text.rsplit_once(':').ok_or(AddressProblem::Shape)?,
        };
        let is_host = !host.is_empty()
            && host.len() <= 253
            && (text.starts_with('[') || !host.contains(':'))
            && !host.chars().any(|c| {
                c.is_whitespace() || c.is_control() || matches!(c, '/' | '*' | '[' | ']' | ';')
            });
        if !is_host {
            return Err(AddressProblem::Host);
        }
        match port.parse() {
            Ok(0) | Err(_) => Err(AddressProblem::Port),
            Ok(port) => Ok(Self {
                host: host.to_owned(),
                port,
            }),
        }
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.at(self.port))
    }
}

/// A store through which engines find each other, where the file names one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MetadataBackend {
    /// etcd.
    Etcd,
    /// Redis.
    Redis,
}

impl fmt::Display for MetadataBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Etcd => "etcd",
            Self::Redis => "redis",
        })
    }
}

/// What is wrong with a `HOST:PORT`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AddressProblem {
    /// It is not of the form `HOST:PORT` or `[IPV6]:PORT`.
    Shape,
    /// The host is empty, too long, or has characters that no host has.
    Host,
    /// The port is no number from 1 to 65535.
    Port,
}

impl fmt::Display for AddressProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Shape => "expected HOST:PORT, or [ADDRESS]:PORT for IPv6",
            Self::Host => "the part before the port is no host",
            Self::Port => "the port has to be a number from 1 to 65535",
        })
    }
}

/// Why a configuration cannot be used. Each variant names the key, the file or the port.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The environment variable is not set: let it name the configuration file.
    #[error("the environment variable {CONFIG_VARIABLE} is not set")]
    NotSet,
    /// The file could not be read.
    #[error("cannot read the pipe's configuration {path:?}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: IoFailure,
    },
    /// The file is longer than any configuration.
    #[error("the configuration is longer than {max} bytes")]
    TooLong {
        /// Bytes accepted.
        max: u64,
    },
    /// The text is not JSON.
    #[error("the configuration is not JSON (line {line}, column {column})")]
    Json {
        /// Line, counted from 1.
        line: usize,
        /// Column, counted from 1.
        column: usize,
    },
    /// The JSON text is not an object.
    #[error("the configuration is not a JSON object")]
    NotAnObject,
    /// A key without a default is missing or null.
    #[error("the configuration lacks `{field}`")]
    Missing {
        /// The key.
        field: &'static str,
    },
    /// A key has a value that is no text.
    #[error("`{field}` has to be a text")]
    NotAText {
        /// The key.
        field: &'static str,
    },
    /// A key has an empty value.
    #[error("`{field}` is empty")]
    Empty {
        /// The key.
        field: &'static str,
    },
    /// A key is no address.
    #[error("`{field}` is {value:?}: {problem}")]
    Address {
        /// The key.
        field: &'static str,
        /// Its value.
        value: String,
        /// What is wrong with it.
        problem: AddressProblem,
    },
    /// The metadata backend is neither `etcd` nor `redis`, nor null.
    #[error("`metadata_backend` is {value:?}; it has to be \"etcd\", \"redis\" or null")]
    Backend {
        /// The value.
        value: String,
    },
    /// A derived port does not exist: choose a lower port, or fewer ranks.
    #[error("{taken} would need port {port}, which is above 65535")]
    PortTooHigh {
        /// Who needs it.
        taken: PortUse,
        /// The number.
        port: u32,
    },
    /// Two uses need the same port of one host: move the configured ports apart, or use fewer ranks.
    #[error("port {port} would be both {first} and {second}")]
    PortOverlap {
        /// The port.
        port: u16,
        /// One use.
        first: PortUse,
        /// The other.
        second: PortUse,
    },
    /// There are no ranks, or more than the port layout has room for.
    #[error("{ranks} ranks; there can be 1 to {max}")]
    Ranks {
        /// Ranks asked for.
        ranks: u16,
        /// Most that are possible.
        max: u16,
    },
}

/// A checked configuration. The same file serves both sides and every rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PipeConfig {
    prefill: HostPort,
    decode: HostPort,
    metadata_server: String,
    metadata_backend: Option<MetadataBackend>,
    protocol: String,
    device_name: String,
}

impl PipeConfig {
    /// Reads the file that the environment variable [`CONFIG_VARIABLE`] names.
    ///
    /// # Errors
    /// [`ConfigError`]: the variable is not set, or as [`from_file`](Self::from_file).
    pub fn from_env() -> Result<Self, ConfigError> {
        Self::from_variable(std::env::var_os(CONFIG_VARIABLE))
    }

    fn from_variable(value: Option<OsString>) -> Result<Self, ConfigError> {
        Self::from_file(Path::new(&value.ok_or(ConfigError::NotSet)?))
    }

    /// Reads a file.
    ///
    /// # Errors
    /// [`ConfigError`]: the file cannot be read or is too long, or as [`from_json`](Self::from_json).
    pub fn from_file(path: &Path) -> Result<Self, ConfigError> {
        let read = || -> std::io::Result<Vec<u8>> {
            let mut text = Vec::new();
            // One byte more tells a file that is too long.
            File::open(path)?
                .take(CONFIG_BYTES_MAX + 1)
                .read_to_end(&mut text)?;
            Ok(text)
        };
        let text = read().map_err(|source| ConfigError::Read {
            path: path.to_owned(),
            source: source.into(),
        })?;
        Self::from_json(&text)
    }

    /// Reads a JSON text. Unknown keys are ignored; of a key that comes twice the last one counts.
    ///
    /// # Errors
    /// [`ConfigError`]: what is wrong, and with which key.
    pub fn from_json(text: &[u8]) -> Result<Self, ConfigError> {
        if text.len() as u64 > CONFIG_BYTES_MAX {
            let max = CONFIG_BYTES_MAX;
            return Err(ConfigError::TooLong { max });
        }
        let value = serde_json::from_slice(text).map_err(|error| ConfigError::Json {
            line: error.line(),
            column: error.column(),
        })?;
        let Value::Object(keys) = value else {
            return Err(ConfigError::NotAnObject);
        };
        let metadata_server = required(&keys, "metadata_server")?;
        // Left out with `--cfg slab_twin`, for the fuzz target to notice.
        if metadata_server.is_empty() && !cfg!(slab_twin) {
            let field = "metadata_server";
            return Err(ConfigError::Empty { field });
        }
        let metadata_backend = optional(&keys, "metadata_backend")?
            .map(|value| match value.to_lowercase().as_str() {
                "etcd" => Ok(MetadataBackend::Etcd),
                "redis" => Ok(MetadataBackend::Redis),
                _ => Err(ConfigError::Backend {
                    value: value.to_owned(),
                }),
            })
            .transpose()?;
        Ok(Self {
            prefill: address(&keys, "prefill_url")?,
            decode: address(&keys, "decode_url")?,
            metadata_server: metadata_server.to_owned(),
            metadata_backend,
            protocol: optional(&keys, "protocol")?.unwrap_or("tcp").to_owned(),
            device_name: optional(&keys, "device_name")?
                .unwrap_or_default()
                .to_owned(),
        })
    }

    /// Returns where a side is.
    pub fn side(&self, role: Role) -> &HostPort {
        match role {
            Role::Prefill => &self.prefill,
            Role::Decode => &self.decode,
        }
    }

    /// Returns the address of the engine's metadata, or `P2PHANDSHAKE`.
    pub fn metadata_server(&self) -> &str {
        &self.metadata_server
    }

    /// Returns the store that `metadata_server` is, if the file names one.
    pub fn metadata_backend(&self) -> Option<MetadataBackend> {
        self.metadata_backend
    }

    /// Returns the engine's protocol.
    pub fn protocol(&self) -> &str {
        &self.protocol
    }

    /// Returns the engine's device, which is empty for TCP.
    pub fn device_name(&self) -> &str {
        &self.device_name
    }
}

/// A key's text; null is as good as missing.
fn optional<'a>(
    keys: &'a Map<String, Value>,
    field: &'static str,
) -> Result<Option<&'a str>, ConfigError> {
    match keys.get(field) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(_) => Err(ConfigError::NotAText { field }),
    }
}

fn required<'a>(keys: &'a Map<String, Value>, field: &'static str) -> Result<&'a str, ConfigError> {
    optional(keys, field)?.ok_or(ConfigError::Missing { field })
}

fn address(keys: &Map<String, Value>, field: &'static str) -> Result<HostPort, ConfigError> {
    let value = required(keys, field)?;
    HostPort::parse(value).map_err(|problem| ConfigError::Address {
        field,
        value: value.to_owned(),
        problem,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn full() -> Value {
        json!({
            "prefill_url": "10.0.0.1:13003",
            "decode_url": "worker-2:13003",
            "metadata_server": "10.0.0.1:2379",
            "metadata_backend": "ETCD",
            "protocol": "rdma",
            "device_name": "mlx5_0",
            "something": ["else"],
        })
    }

    fn with(field: &str, value: Value) -> Result<PipeConfig, ConfigError> {
        let mut config = full();
        config[field] = value;
        PipeConfig::from_json(config.to_string().as_bytes())
    }

    fn without(field: &str) -> Result<PipeConfig, ConfigError> {
        let mut config = full();
        config.as_object_mut().unwrap().remove(field);
        PipeConfig::from_json(config.to_string().as_bytes())
    }

    // row: P1.1
    #[test]
    fn every_key_is_read_and_unknown_ones_are_ignored() {
        let config = PipeConfig::from_json(full().to_string().as_bytes()).unwrap();
        assert_eq!(config.side(Role::Prefill).to_string(), "10.0.0.1:13003");
        assert_eq!(config.side(Role::Decode).host(), "worker-2");
        assert_eq!(config.side(Role::Decode).port(), 13_003);
        assert_eq!(config.metadata_server(), "10.0.0.1:2379");
        assert_eq!(config.metadata_backend(), Some(MetadataBackend::Etcd));
        assert_eq!(config.protocol(), "rdma");
        assert_eq!(config.device_name(), "mlx5_0");
    }

    // row: P1.1
    #[test]
    fn missing_keys_get_their_defaults() {
        assert_eq!(without("protocol").unwrap().protocol(), "tcp");
        assert_eq!(without("device_name").unwrap().device_name(), "");
        for config in [
            without("metadata_backend"),
            with("metadata_backend", Value::Null),
        ] {
            assert_eq!(config.unwrap().metadata_backend(), None);
        }
        let redis = with("metadata_backend", json!("Redis")).unwrap();
        assert_eq!(redis.metadata_backend(), Some(MetadataBackend::Redis));
    }

    // row: P1.2
    #[test]
    fn what_is_missing_or_of_the_wrong_type_is_named() {
        for field in ["prefill_url", "decode_url", "metadata_server"] {
            assert_eq!(without(field), Err(ConfigError::Missing { field }));
            let missing = Err(ConfigError::Missing { field });
            assert_eq!(with(field, Value::Null), missing);
        }
        for field in [
            "prefill_url",
            "decode_url",
            "metadata_server",
            "metadata_backend",
            "protocol",
            "device_name",
        ] {
            for value in [json!(7), json!(["x"]), json!({}), json!(true)] {
                assert_eq!(with(field, value), Err(ConfigError::NotAText { field }));
            }
        }
        let field = "metadata_server";
        assert_eq!(with(field, json!("")), Err(ConfigError::Empty { field }));
        for value in ["", "http", "P2PHANDSHAKE", "etcd "] {
            let refused = with("metadata_backend", json!(value)).unwrap_err();
            let value = value.to_owned();
            assert_eq!(refused, ConfigError::Backend { value });
        }
        let text = without("decode_url").unwrap_err().to_string();
        assert_eq!(text, "the configuration lacks `decode_url`");
    }

    // row: P1.2
    #[test]
    fn addresses_are_checked() {
        let problem = |value: &str| match with("decode_url", json!(value)) {
            Err(ConfigError::Address { field, problem, .. }) => {
                assert_eq!(field, "decode_url");
                problem
            }
            other => panic!("{value}: {other:?}"),
        };
        for value in ["", "host", "[::1]", "[::1", "[host]:1", "::1]:5"] {
            assert!(
                matches!(problem(value), AddressProblem::Shape | AddressProblem::Host),
                "{value}"
            );
        }
        for value in [":1", "::1:5", "a b:1", "tcp://a:1", "*:1"] {
            assert_eq!(problem(value), AddressProblem::Host, "{value}");
        }
        for value in ["a:", "a:0", "a:65536", "a:-1", "a:x", "a: 1"] {
            assert_eq!(problem(value), AddressProblem::Port, "{value}");
        }
        let v6 = with("decode_url", json!("[::1]:9")).unwrap();
        assert_eq!(v6.side(Role::Decode).host(), "::1");
        assert_eq!(v6.side(Role::Decode).at(10), "[::1]:10");
    }

    // row: P1.2
    #[test]
    fn texts_that_are_no_object_are_refused_with_the_place() {
        assert_eq!(
            PipeConfig::from_json(b"{\n \"a\": }"),
            Err(ConfigError::Json { line: 2, column: 7 })
        );
        assert_eq!(PipeConfig::from_json(b"[]"), Err(ConfigError::NotAnObject));
        for bad in [&b""[..], b"\xff", b"{} {}"] {
            assert!(matches!(
                PipeConfig::from_json(bad),
                Err(ConfigError::Json { .. })
            ));
        }
        let deep = "[".repeat(100_000);
        assert!(matches!(
            PipeConfig::from_json(deep.as_bytes()),
            Err(ConfigError::Json { .. })
        ));
        let long = vec![b' '; CONFIG_BYTES_MAX as usize + 1];
        let max = CONFIG_BYTES_MAX;
        assert_eq!(
            PipeConfig::from_json(&long),
            Err(ConfigError::TooLong { max })
        );
    }

    // row: P1.3
    #[test]
    fn the_variable_names_the_file() {
        assert_eq!(PipeConfig::from_variable(None), Err(ConfigError::NotSet));
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pipe.json");
        let refused = PipeConfig::from_variable(Some(path.clone().into()));
        assert!(matches!(refused, Err(ConfigError::Read { path: p, .. }) if p == path));
        std::fs::write(&path, full().to_string()).unwrap();
        let config = PipeConfig::from_variable(Some(path.into())).unwrap();
        assert_eq!(config.side(Role::Prefill).host(), "10.0.0.1");
    }

    #[test]
    fn rank_zero_is_prefill_and_every_other_decode() {
        assert_eq!(Role::from_kv_rank(0), Role::Prefill);
        assert_eq!(Role::from_kv_rank(1), Role::Decode);
        assert_eq!(Role::from_kv_rank(-1), Role::Decode);
        assert_eq!(Role::Prefill.peer(), Role::Decode);
        assert_eq!(Role::Decode.peer(), Role::Prefill);
    }
}
