//! A look at a peer's descriptor before the library sees it: the library ends the process on a member of a type
//! that it does not expect.
//!
//! It narrows the window and does not close it: the library asks the peer once more.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use serde::de::{IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::config::Transport;
use crate::error::{ControlError, EngineError};
use crate::wire::JsonError;
use crate::wire::control::{FrameDecoder, FrameKind, FrameLimits, encode_frame};
use crate::wire::descriptor::DescriptorError;
use crate::wire::json::{self, Document, Members, Scalar};
use crate::wire::name::PeerName;

/// Bytes read from the peer at a time.
const CHUNK: usize = 64 << 10;

/// The longest that one address of the peer may take to accept a connection, so that the next one is tried too.
const CONNECT_MAX: Duration = Duration::from_secs(5);

/// Which descriptors are let through to the library.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rules {
    /// The protocols that a peer may have. With another one the library reads members that are not looked at here.
    pub(super) protocols: &'static [&'static str],
    /// The library dials addresses of IPv6, and no others.
    pub(super) ipv6: bool,
}

impl Rules {
    /// Those of an engine with this transport. The library reads `MC_USE_IPV6`.
    pub(super) fn of(transport: &Transport) -> Self {
        Self {
            protocols: match transport {
                Transport::Tcp => &["tcp"],
                Transport::Rdma | Transport::RdmaOver(_) => &["rdma", "tcp"],
            },
            ipv6: std::env::var_os("MC_USE_IPV6").is_some(),
        }
    }
}

/// Asks the peer for its descriptor, and says whether the library would survive it. Takes at most `timeout`, beside
/// what the system takes to resolve the name.
pub(super) fn vet(name: &str, rules: Rules, timeout: Duration) -> Result<(), EngineError> {
    let parsed = PeerName::parse(name).map_err(|source| EngineError::PeerName {
        name: name.to_owned(),
        source,
    })?;
    let addresses: Vec<SocketAddr> = (parsed.host(), parsed.port())
        .to_socket_addrs()
        .map_err(|error| EngineError::Resolve {
            host: parsed.host().to_owned(),
            source: error.into(),
        })?
        // Where the library will ask.
        .filter(|address| address.is_ipv6() == rules.ipv6)
        .collect();
    if addresses.is_empty() {
        return Err(EngineError::Resolve {
            host: parsed.host().to_owned(),
            source: std::io::Error::from(std::io::ErrorKind::AddrNotAvailable).into(),
        });
    }
    let failed = |source| EngineError::Control {
        peer: name.to_owned(),
        source,
    };
    let text = fetch(&addresses, timeout).map_err(failed)?;
    check(&text, rules.protocols).map_err(|source| EngineError::Descriptor {
        peer: name.to_owned(),
        source,
    })
}

/// One control exchange.
fn fetch(addresses: &[SocketAddr], timeout: Duration) -> Result<Vec<u8>, ControlError> {
    let deadline = Instant::now() + timeout;
    let timeout_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
    let left = || {
        let left = deadline.saturating_duration_since(Instant::now());
        // Zero would wait without end.
        (!left.is_zero()).then_some(left)
    };
    let mut stream = connect(addresses, timeout_ms, left)?;
    let mut exchange = || -> std::io::Result<Option<Result<Vec<u8>, ControlError>>> {
        // Nothing about ourselves: the library's own request says it.
        stream.set_write_timeout(left())?;
        stream.write_all(&encode_frame(FrameKind::Metadata, b"null"))?;
        let mut decoder = FrameDecoder::new(FrameLimits::CLIENT);
        let mut chunk = vec![0; CHUNK];
        loop {
            let Some(left) = left() else {
                return Ok(None);
            };
            stream.set_read_timeout(Some(left))?;
            let count = match stream.read(&mut chunk) {
                Ok(0) => return Ok(Some(Err(ControlError::Closed))),
                Ok(count) => count,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            match decoder.push(&chunk[..count]) {
                Ok(None) => {}
                Ok(Some(frame)) if frame.kind == FrameKind::Metadata => {
                    return Ok(Some(Ok(frame.body)));
                }
                Ok(Some(_)) => return Ok(Some(Err(ControlError::WrongType))),
                Err(error) => return Ok(Some(Err(error.into()))),
            }
        }
    };
    use std::io::ErrorKind;
    match exchange() {
        Ok(Some(result)) => result,
        Ok(None) => Err(ControlError::ReplyTimeout { timeout_ms }),
        Err(error) => Err(match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => {
                ControlError::ReplyTimeout { timeout_ms }
            }
            ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => ControlError::Closed,
            _ => ControlError::Io {
                source: error.into(),
            },
        }),
    }
}

fn connect(
    addresses: &[SocketAddr],
    timeout_ms: u64,
    left: impl Fn() -> Option<Duration>,
) -> Result<TcpStream, ControlError> {
    let mut failure = ControlError::Closed;
    for endpoint in addresses.iter().copied() {
        let late = ControlError::ConnectTimeout {
            endpoint,
            timeout_ms,
        };
        let Some(left) = left() else {
            return Err(late);
        };
        match TcpStream::connect_timeout(&endpoint, left.min(CONNECT_MAX)) {
            Ok(stream) => return Ok(stream),
            Err(error) if error.kind() == std::io::ErrorKind::TimedOut => failure = late,
            Err(error) => {
                failure = ControlError::Connect {
                    endpoint,
                    source: error.into(),
                };
            }
        }
    }
    Err(failure)
}

/// Says whether each member that the library reads has a type that it can read.
///
/// What the library refuses by itself, such as `null`, is let through. The members that only RDMA has are not
/// looked at.
fn check(text: &[u8], protocols: &[&str]) -> Result<(), DescriptorError> {
    let descriptor = match json::decode::<Document<Suspect>>(text)? {
        Document::Object(descriptor) => descriptor,
        Document::Null => return Ok(()),
        Document::Other => return Err(JsonError::NotAnObject.into()),
    };
    check_text(&descriptor.name, "name")?;
    check_text(&descriptor.protocol, "protocol")?;
    check_text(&descriptor.rdma_server_name, "rdma_server_name")?;
    check_text(&descriptor.timestamp, "timestamp")?;
    let protocol = descriptor.protocol.into_text("protocol")?;
    if !protocol.is_empty() && !protocols.contains(&&*protocol) {
        return Err(DescriptorError::Protocol { protocol });
    }
    check_int(&descriptor.data_port, "tcp_data_port")?;
    check_int(&descriptor.version, "tcp_proto_version")?;
    Ok(descriptor.buffers.0?)
}

/// Scalars have a text.
fn check_text(value: &Scalar, member: &'static str) -> Result<(), JsonError> {
    match value {
        Scalar::Array | Scalar::Object => Err(JsonError::WrongType { member }),
        _ => Ok(()),
    }
}

/// Reads as a signed number of 32 bits.
fn check_int(value: &Scalar, member: &'static str) -> Result<(), JsonError> {
    let is_int = match *value {
        Scalar::Absent | Scalar::Null | Scalar::Bool(_) => true,
        Scalar::Unsigned(value) => i32::try_from(value).is_ok(),
        Scalar::Signed(value) => i32::try_from(value).is_ok(),
        Scalar::Float(value) => (f64::from(i32::MIN)..=f64::from(i32::MAX)).contains(&value),
        Scalar::Text(_) | Scalar::Array | Scalar::Object => false,
    };
    if is_int {
        Ok(())
    } else {
        Err(JsonError::WrongType { member })
    }
}

#[derive(Default)]
struct Suspect {
    name: Scalar,
    protocol: Scalar,
    rdma_server_name: Scalar,
    timestamp: Scalar,
    data_port: Scalar,
    version: Scalar,
    buffers: Buffers,
}

impl Members for Suspect {
    fn take<'de, A: MapAccess<'de>>(&mut self, member: &str, map: &mut A) -> Result<(), A::Error> {
        match member {
            "name" => self.name = map.next_value()?,
            "protocol" => self.protocol = map.next_value()?,
            "rdma_server_name" => self.rdma_server_name = map.next_value()?,
            "timestamp" => self.timestamp = map.next_value()?,
            "tcp_data_port" => self.data_port = map.next_value()?,
            "tcp_proto_version" => self.version = map.next_value()?,
            "buffers" => self.buffers = map.next_value()?,
            _ => drop(map.next_value::<IgnoredAny>()?),
        }
        Ok(())
    }
}

#[derive(Default)]
struct SuspectBuffer {
    name: Scalar,
    address: Scalar,
    len: Scalar,
}

impl Members for SuspectBuffer {
    fn take<'de, A: MapAccess<'de>>(&mut self, member: &str, map: &mut A) -> Result<(), A::Error> {
        match member {
            "name" => self.name = map.next_value()?,
            "addr" => self.address = map.next_value()?,
            "length" => self.len = map.next_value()?,
            _ => drop(map.next_value::<IgnoredAny>()?),
        }
        Ok(())
    }
}

fn check_buffer(entry: Document<SuspectBuffer>) -> Result<(), JsonError> {
    match entry {
        Document::Object(entry) => {
            check_text(&entry.name, "name")?;
            entry.address.as_unsigned("addr")?;
            entry.len.as_unsigned("length")?;
            Ok(())
        }
        Document::Null => Ok(()),
        Document::Other => Err(JsonError::WrongType { member: "buffers" }),
    }
}

/// What is wrong with the first bad entry of `buffers`. Of an object the library looks at the values; any scalar counts
/// as none.
struct Buffers(Result<(), JsonError>);

impl Default for Buffers {
    fn default() -> Self {
        Self(Ok(()))
    }
}

impl<'de> Deserialize<'de> for Buffers {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct BuffersVisitor;
        impl<'de> Visitor<'de> for BuffersVisitor {
            type Value = Buffers;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("any JSON value")
            }
            fn visit_unit<E>(self) -> Result<Buffers, E> {
                Ok(Buffers::default())
            }
            fn visit_bool<E>(self, _: bool) -> Result<Buffers, E> {
                Ok(Buffers::default())
            }
            fn visit_u64<E>(self, _: u64) -> Result<Buffers, E> {
                Ok(Buffers::default())
            }
            fn visit_i64<E>(self, _: i64) -> Result<Buffers, E> {
                Ok(Buffers::default())
            }
            fn visit_f64<E>(self, _: f64) -> Result<Buffers, E> {
                Ok(Buffers::default())
            }
            fn visit_str<E>(self, _: &str) -> Result<Buffers, E> {
                Ok(Buffers::default())
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Buffers, A::Error> {
                let mut found = Ok(());
                while let Some(entry) = seq.next_element::<Document<SuspectBuffer>>()? {
                    found = found.and_then(|()| check_buffer(entry));
                }
                Ok(Buffers(found))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Buffers, A::Error> {
                let mut found = Ok(());
                while let Some((IgnoredAny, entry)) =
                    map.next_entry::<IgnoredAny, Document<SuspectBuffer>>()?
                {
                    found = found.and_then(|()| check_buffer(entry));
                }
                Ok(Buffers(found))
            }
        }
        deserializer.deserialize_any(BuffersVisitor)
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::wire::control::FrameError;

    const TCP: Rules = Rules {
        protocols: &["tcp"],
        ipv6: false,
    };

    fn wrong(member: &'static str) -> Result<(), DescriptorError> {
        Err(JsonError::WrongType { member }.into())
    }

    fn check(text: &[u8]) -> Result<(), DescriptorError> {
        super::check(text, TCP.protocols)
    }

    // row: W12.11.4
    #[test]
    fn what_would_end_the_process_is_found_and_what_the_library_survives_is_let_through() {
        let real = r#"{"buffers":[{"addr":140295982936080,"length":1048576,"name":"127.0.0.1:16941"}],"name":"127.0.0.1:16941","protocol":"tcp","rdma_server_name":"","tcp_data_host":"127.0.0.1","tcp_data_port":16164,"tcp_proto_version":2,"timestamp":"2026-11-29 15:01:31.659971"}"#;
        let survived = [
            real,
            "{}",
            "null",
            r#"{"protocol":"tcp","buffers":[{"addr":18446744073709551615,"length":1,"rkey":[7]}],"devices":[{}]}"#,
            r#"{"protocol":"","tcp_data_port":null,"tcp_proto_version":2.0}"#,
            r#"{"protocol":"tcp","buffers":"x","timestamp":7,"rdma_server_name":null}"#,
            r#"{"protocol":"tcp","buffers":[null,{"addr":null,"length":true,"name":1e2}]}"#,
            r#"{"protocol":"tcp","buffers":{"a":{"addr":7}}}"#,
        ];
        for text in survived {
            assert_eq!(check(text.as_bytes()), Ok(()), "{text}");
        }
        let fatal = [
            ("[]", Err(JsonError::NotAnObject.into())),
            (r#""text""#, Err(JsonError::NotAnObject.into())),
            ("7", Err(JsonError::NotAnObject.into())),
            (r#"{"protocol":"tcp","timestamp":[]}"#, wrong("timestamp")),
            (
                r#"{"protocol":"tcp","rdma_server_name":{}}"#,
                wrong("rdma_server_name"),
            ),
            (
                r#"{"protocol":"tcp","buffers":{"a":{"addr":"1"}}}"#,
                wrong("addr"),
            ),
            (r#"{"protocol":"tcp","buffers":{"a":1}}"#, wrong("buffers")),
            (r#"{"protocol":["tcp"]}"#, wrong("protocol")),
            (r#"{"protocol":{}}"#, wrong("protocol")),
            (r#"{"name":[]}"#, wrong("name")),
            (r#"{"tcp_data_port":"16164"}"#, wrong("tcp_data_port")),
            (r#"{"tcp_data_port":2147483648}"#, wrong("tcp_data_port")),
            (r#"{"tcp_data_port":-2147483649}"#, wrong("tcp_data_port")),
            (r#"{"tcp_data_port":1e18}"#, wrong("tcp_data_port")),
            (r#"{"tcp_proto_version":"2"}"#, wrong("tcp_proto_version")),
            (r#"{"tcp_proto_version":[2]}"#, wrong("tcp_proto_version")),
            (r#"{"buffers":[{"addr":"1"}]}"#, wrong("addr")),
            (r#"{"buffers":[{"addr":-1}]}"#, wrong("addr")),
            (
                r#"{"buffers":[{"addr":18446744073709551616}]}"#,
                wrong("addr"),
            ),
            (r#"{"buffers":[{"length":{}}]}"#, wrong("length")),
            (r#"{"buffers":[{"name":[]}]}"#, wrong("name")),
            (
                r#"{"buffers":[{},{"length":-5},{"addr":"1"}]}"#,
                wrong("length"),
            ),
            (r#"{"buffers":[7]}"#, wrong("buffers")),
        ];
        for (text, expected) in fatal {
            assert_eq!(check(text.as_bytes()), expected, "{text}");
        }
        let deep = format!("{{\"x\":{}{}}}", "[".repeat(1_001), "]".repeat(1_001));
        assert!(matches!(
            check(deep.as_bytes()),
            Err(DescriptorError::Json(JsonError::TooDeep { .. }))
        ));
        assert!(matches!(
            check(b"\xff\xfe"),
            Err(DescriptorError::Json(JsonError::Malformed { .. }))
        ));
        // What the library would read of it depends on the protocol.
        for protocol in ["rdma", "ascend", "tcp,hip", "TCP"] {
            let text = format!(r#"{{"protocol":"{protocol}"}}"#);
            let expected = DescriptorError::Protocol {
                protocol: protocol.to_owned(),
            };
            assert_eq!(check(text.as_bytes()), Err(expected));
        }
        let rdma = Rules::of(&Transport::Rdma).protocols;
        assert_eq!(super::check(br#"{"protocol":"rdma"}"#, rdma), Ok(()));
    }

    /// Vets a peer that reads a request, answers with `reply`, and then closes or stays.
    fn vet_answer(reply: Vec<u8>, stays: bool, timeout: Duration) -> Result<(), EngineError> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let name = listener.local_addr().unwrap().to_string();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (mut stream, _) = listener.accept().unwrap();
                let mut request = vec![0; encode_frame(FrameKind::Metadata, b"null").len()];
                stream.read_exact(&mut request).unwrap();
                stream.write_all(&reply).unwrap();
                if stays {
                    // Until the other side closes.
                    let _ = stream.read(&mut [0]);
                }
            });
            vet(&name, TCP, timeout)
        })
    }

    fn control_error(result: Result<(), EngineError>) -> ControlError {
        match result {
            Err(EngineError::Control { source, .. }) => source,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn every_answer_of_a_peer_is_an_outcome_within_the_time() {
        const LIMIT: Duration = Duration::from_secs(20);
        let metadata = |text: &[u8]| encode_frame(FrameKind::Metadata, text);
        assert_eq!(vet_answer(metadata(b"{}\n"), true, LIMIT), Ok(()));
        let refused = vet_answer(metadata(b"[]"), true, LIMIT);
        assert!(matches!(
            refused,
            Err(EngineError::Descriptor {
                source: DescriptorError::Json(JsonError::NotAnObject),
                ..
            })
        ));
        let closed = vet_answer(metadata(b"{}")[..7].to_vec(), false, LIMIT);
        assert_eq!(control_error(closed), ControlError::Closed);
        let other = vet_answer(encode_frame(FrameKind::Notify, b"{}"), true, LIMIT);
        assert_eq!(control_error(other), ControlError::WrongType);
        let endless = vet_answer(u64::MAX.to_le_bytes().to_vec(), true, LIMIT);
        assert!(matches!(
            control_error(endless),
            ControlError::Frame(FrameError::TooLong { .. })
        ));
        let begin = Instant::now();
        let silent = vet_answer(Vec::new(), true, Duration::from_millis(200));
        assert_eq!(
            control_error(silent),
            ControlError::ReplyTimeout { timeout_ms: 200 }
        );
        assert!(begin.elapsed() < LIMIT);
    }

    #[test]
    fn a_peer_that_is_not_there_is_a_refused_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let name = listener.local_addr().unwrap().to_string();
        drop(listener);
        assert!(matches!(
            control_error(vet(&name, TCP, Duration::from_secs(20))),
            ControlError::Connect { .. }
        ));
    }

    #[test]
    fn only_addresses_that_the_library_dials_are_asked() {
        let v6 = Rules { ipv6: true, ..TCP };
        for (name, rules) in [("[::1]:7", TCP), ("127.0.0.1:7", v6)] {
            let error = vet(name, rules, Duration::from_secs(20)).unwrap_err();
            assert!(
                matches!(error, EngineError::Resolve { .. }),
                "{name}: {error:?}"
            );
        }
    }
}
