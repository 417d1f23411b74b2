//! Segment descriptors: where a peer's data listener and registered memory are.

mod raw;

use std::fmt::Write as _;

use serde::Serialize;

use self::raw::{Protocol, RawDescriptor};
use super::data::DataVersion;
use super::json::{self, Document, JsonError, Scalar};

/// The only protocol this engine reaches a segment over.
const PROTOCOL: &str = "tcp";

/// One registered range of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(
    clippy::exhaustive_structs,
    reason = "a range has a start and a length"
)]
pub struct BufferRange {
    /// First byte, as an absolute address in the segment's process; never zero.
    pub address: u64,
    /// Length in bytes; never zero.
    pub len: u64,
}

/// A segment as its engine describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Descriptor {
    /// The name peers dial; notifications go to it. May be empty.
    pub name: String,
    /// Host of the data listener; `None`: the host the control connection was made to.
    pub data_host: Option<String>,
    /// Port of the data listener.
    pub data_port: u16,
    /// Version of the data protocol the segment's engine serves.
    pub version: DataVersion,
    /// Registered ranges when the descriptor was made. Ranges registered later are usable too.
    pub buffers: Vec<BufferRange>,
    /// When the descriptor was made, as local time; informational.
    pub timestamp: String,
}

/// Why a descriptor was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DescriptorError {
    /// The text is no JSON object or a member has the wrong type.
    #[error(transparent)]
    Json(#[from] JsonError),
    /// The peer answered `null` or nothing usable: it publishes its descriptor elsewhere.
    #[error("the peer has no descriptor to give; it may use a metadata store")]
    Null,
    /// The segment is not reachable over TCP.
    #[error("the segment is reachable only over {protocol:?}")]
    Protocol {
        /// What the descriptor names.
        protocol: String,
    },
    /// The data port is missing or no port number.
    #[error("the descriptor has no usable data port ({port})")]
    DataPort {
        /// The number in the descriptor, 0 if there is none.
        port: u64,
    },
    /// An entry of `buffers` has no name, no address or no length.
    #[error("buffer {index} of the descriptor is incomplete")]
    Buffer {
        /// Index of the entry.
        index: usize,
    },
}

/// The members as they are written; in the order real peers write them.
#[derive(Serialize)]
struct Encoded<'a> {
    buffers: Vec<EncodedBuffer<'a>>,
    name: &'a str,
    protocol: &'a str,
    rdma_server_name: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    tcp_data_host: Option<&'a str>,
    tcp_data_port: u16,
    tcp_proto_version: u32,
    timestamp: &'a str,
}

#[derive(Serialize)]
struct EncodedBuffer<'a> {
    addr: u64,
    length: u64,
    name: &'a str,
}

impl Descriptor {
    /// Creates the descriptor of a segment of that name without memory, which speaks the newest
    /// version of the data protocol at `data_port` of the host that control connections are made to.
    pub fn new(name: String, data_port: u16) -> Self {
        Self {
            name,
            data_host: None,
            data_port,
            version: DataVersion::V2,
            buffers: Vec::new(),
            timestamp: String::new(),
        }
    }

    /// Encodes the descriptor as JSON without a trailing newline.
    ///
    /// # Complexity
    /// O(buffers); see [`encoded_buffer_len`] for the growth per buffer.
    pub fn encode(&self) -> String {
        let encoded = Encoded {
            buffers: self
                .buffers
                .iter()
                .map(|buffer| EncodedBuffer {
                    addr: buffer.address,
                    length: buffer.len,
                    name: &self.name,
                })
                .collect(),
            name: &self.name,
            protocol: PROTOCOL,
            rdma_server_name: "",
            tcp_data_host: self.data_host.as_deref(),
            tcp_data_port: self.data_port,
            tcp_proto_version: match self.version {
                DataVersion::V1 => 1,
                DataVersion::V2 => 2,
            },
            timestamp: &self.timestamp,
        };
        // A struct of strings and integers always encodes.
        serde_json::to_string(&encoded).unwrap_or_default()
    }

    /// Decodes a descriptor, with the defaults of real peers for what is missing.
    ///
    /// # Errors
    /// [`DescriptorError`]; unknown members are ignored.
    ///
    /// # Complexity
    /// O(length of the text), in time and in memory, whatever the text says. Text that is not UTF-8
    /// is copied, and may become three times as long.
    pub fn decode(bytes: &[u8]) -> Result<Self, DescriptorError> {
        Self::decode_keeping::<true>(bytes)
    }

    /// Decodes a descriptor for who wants to know where the segment is: as [`decode`](Self::decode),
    /// but `buffers` is checked and left empty. Holds no more than a few scalars of the text.
    #[cfg(feature = "tcp")]
    pub(crate) fn decode_without_buffers(bytes: &[u8]) -> Result<Self, DescriptorError> {
        Self::decode_keeping::<false>(bytes)
    }

    fn decode_keeping<const KEEP: bool>(bytes: &[u8]) -> Result<Self, DescriptorError> {
        let raw = match json::decode::<Document<RawDescriptor<KEEP>>>(bytes)? {
            Document::Object(raw) => raw,
            Document::Null => return Err(DescriptorError::Null),
            Document::Other => return Err(JsonError::NotAnObject.into()),
        };
        let several = match &raw.protocol {
            Protocol::One(Scalar::Text(name)) if name == PROTOCOL => false,
            Protocol::Several(names) if names.iter().any(|name| name == PROTOCOL) => true,
            Protocol::One(Scalar::Text(name)) => {
                return Err(DescriptorError::Protocol {
                    protocol: name.clone(),
                });
            }
            Protocol::Several(names) => {
                return Err(DescriptorError::Protocol {
                    protocol: names.join(","),
                });
            }
            Protocol::One(Scalar::Absent | Scalar::Null) => return Err(DescriptorError::Null),
            Protocol::One(_) => return Err(JsonError::WrongType { member: "protocol" }.into()),
        };
        let port = raw.data_port.as_unsigned("tcp_data_port")?;
        let data_port = u16::try_from(port)
            .ok()
            .filter(|port| *port != 0)
            .ok_or(DescriptorError::DataPort { port })?;
        let version = match raw.version {
            // 2.0, 3 and what is beyond any integer mean the newest both sides know.
            Scalar::Float(version) if version >= 2.0 => DataVersion::V2,
            Scalar::Float(_) | Scalar::Signed(_) => DataVersion::V1,
            version if version.as_unsigned("tcp_proto_version")? >= 2 => DataVersion::V2,
            _ => DataVersion::V1,
        };
        let data_host = match raw.data_host {
            Scalar::Text(host) if !host.is_empty() => Some(host),
            _ => None,
        };
        let ranges = if several {
            raw.buffers.marked
        } else {
            raw.buffers.all
        };
        let buffers = ranges.0?;
        Ok(Self {
            name: raw.name.into_text("name").unwrap_or_default(),
            data_host,
            data_port,
            version,
            buffers,
            timestamp: raw.timestamp.into_text("timestamp").unwrap_or_default(),
        })
    }
}

/// Returns the bytes that one more buffer adds to an encoded descriptor of segment `name`, comma
/// included.
pub fn encoded_buffer_len(name: &str, buffer: BufferRange) -> usize {
    let entry = EncodedBuffer {
        addr: buffer.address,
        length: buffer.len,
        name,
    };
    serde_json::to_string(&entry).unwrap_or_default().len() + 1
}

/// Formats a moment as real peers write `timestamp`, in UTC: `2026-11-29 15:01:31.659971`.
pub fn timestamp(since_epoch: std::time::Duration) -> String {
    // Civil date from days since 1970-01-01, by the usual era arithmetic (400-year cycles that
    // start on 1 March).
    let seconds = since_epoch.as_secs();
    let days = (seconds / 86_400) as i64 + 719_468;
    let era = days.div_euclid(146_097);
    let day_of_era = days.rem_euclid(146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 {
        shifted_month + 3
    } else {
        shifted_month - 9
    };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    let in_day = seconds % 86_400;
    let mut text = String::with_capacity(26);
    // Writing to a string does not fail.
    let _ = write!(
        text,
        "{year:04}-{month:02}-{day:02} {:02}:{:02}:{:02}.{:06}",
        in_day / 3_600,
        in_day / 60 % 60,
        in_day % 60,
        since_epoch.subsec_micros()
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHEEL: &str = r#"{"buffers":[{"addr":140295982936080,"length":1048576,"name":"127.0.0.1:16941"}],"name":"127.0.0.1:16941","protocol":"tcp","rdma_server_name":"","tcp_data_host":"127.0.0.1","tcp_data_port":16164,"tcp_proto_version":2,"timestamp":"2026-11-29 15:01:31.659971"}"#;

    fn wheel() -> Descriptor {
        Descriptor {
            name: "127.0.0.1:16941".into(),
            data_host: Some("127.0.0.1".into()),
            data_port: 16164,
            version: DataVersion::V2,
            buffers: vec![BufferRange {
                address: 140_295_982_936_080,
                len: 1_048_576,
            }],
            timestamp: "2026-11-29 15:01:31.659971".into(),
        }
    }

    fn decode(text: &str) -> Result<Descriptor, DescriptorError> {
        Descriptor::decode(text.as_bytes())
    }

    fn with(members: &str) -> Result<Descriptor, DescriptorError> {
        decode(&format!(
            r#"{{"protocol":"tcp","tcp_data_port":9{members}}}"#
        ))
    }

    // row: W5.2a
    #[test]
    fn the_published_form_is_what_real_peers_publish() {
        assert_eq!(wheel().encode(), WHEEL);
        assert_eq!(decode(WHEEL), Ok(wheel()));
        let empty = Descriptor {
            buffers: Vec::new(),
            ..wheel()
        };
        assert!(empty.encode().contains(r#""buffers":[]"#));
    }

    #[test]
    fn a_buffer_grows_the_descriptor_by_what_is_announced() {
        let mut descriptor = wheel();
        let before = descriptor.encode().len();
        let buffer = BufferRange {
            address: u64::MAX,
            len: 1,
        };
        descriptor.buffers.push(buffer);
        assert_eq!(
            descriptor.encode().len() - before,
            encoded_buffer_len(&descriptor.name, buffer)
        );
    }

    // row: W5.4
    #[test]
    fn missing_members_take_the_defaults_of_real_peers() {
        let least = with("").unwrap();
        assert_eq!(least.data_host, None);
        assert_eq!(least.version, DataVersion::V1);
        assert!(least.buffers.is_empty());
        assert_eq!(with(r#","tcp_data_host":"""#).unwrap().data_host, None);
        assert_eq!(with(r#","tcp_data_host":5"#).unwrap().data_host, None);
        assert_eq!(
            with(r#","tcp_data_host":"h""#).unwrap().data_host,
            Some("h".into())
        );
        for (version, expected) in [
            ("null", DataVersion::V1),
            ("0", DataVersion::V1),
            ("1", DataVersion::V1),
            ("2", DataVersion::V2),
            ("2.0", DataVersion::V2),
            ("3", DataVersion::V2),
        ] {
            let descriptor = with(&format!(r#","tcp_proto_version":{version}"#)).unwrap();
            assert_eq!(descriptor.version, expected, "{version}");
        }
        for buffers in ["null", "[]", "{}", "\"x\""] {
            assert!(
                with(&format!(r#","buffers":{buffers}"#))
                    .unwrap()
                    .buffers
                    .is_empty()
            );
        }
        assert!(with(r#","anything":[{"else":1}],"rdma_server_name":7"#).is_ok());
    }

    #[cfg(feature = "tcp")]
    // row: W5.4
    #[test]
    fn without_buffers_the_same_descriptors_are_refused_and_the_rest_is_the_same() {
        for members in [
            "",
            r#","name":"n","buffers":[{"name":"n","addr":1,"length":1}]"#,
            r#","buffers":[{"name":"n","addr":1,"length":1},{"name":"n","addr":1}]"#,
            r#","buffers":[0]"#,
            r#","protocol":["tcp"],"buffers":[0,{"name":"n","addr":1,"length":1}]"#,
            r#","protocol":["tcp"],"buffers":[{"protocol":"tcp","addr":"1"}]"#,
            r#","tcp_data_port":0"#,
        ] {
            let text = format!(r#"{{"protocol":"tcp","tcp_data_port":9{members}}}"#);
            let whole = decode(&text).map(|descriptor| Descriptor {
                buffers: Vec::new(),
                ..descriptor
            });
            let without = Descriptor::decode_without_buffers(text.as_bytes());
            assert_eq!(without, whole, "{text}");
        }
    }

    #[test]
    fn addresses_above_2_to_the_63_are_kept() {
        let descriptor =
            with(r#","buffers":[{"name":"n","addr":18446744073709551000,"length":8}]"#).unwrap();
        assert_eq!(descriptor.buffers[0].address, 18_446_744_073_709_551_000);
    }

    // row: W5.4
    #[test]
    fn one_incomplete_buffer_refuses_the_descriptor() {
        for entry in [
            r#"{"addr":1,"length":1}"#,
            r#"{"name":"","addr":1,"length":1}"#,
            r#"{"name":"n","length":1}"#,
            r#"{"name":"n","addr":1,"length":0}"#,
        ] {
            let text = format!(r#","buffers":[{{"name":"n","addr":1,"length":1}},{entry}]"#);
            assert_eq!(
                with(&text),
                Err(DescriptorError::Buffer { index: 1 }),
                "{entry}"
            );
        }
    }

    // row: W5.4
    #[test]
    fn wrongly_typed_members_are_typed_errors() {
        let wrong = |member| Err(DescriptorError::Json(JsonError::WrongType { member }));
        assert_eq!(with(r#","tcp_data_port":"9""#), wrong("tcp_data_port"));
        assert_eq!(
            with(r#","tcp_proto_version":"2""#),
            wrong("tcp_proto_version")
        );
        assert_eq!(with(r#","protocol":5"#), wrong("protocol"));
        assert_eq!(
            with(r#","buffers":[{"name":"n","addr":"1","length":1}]"#),
            wrong("addr")
        );
        assert_eq!(
            with(r#","buffers":[{"name":"n","addr":-1,"length":1}]"#),
            wrong("addr")
        );
        assert_eq!(with(r#","buffers":[5]"#), wrong("buffers"));
    }

    // row: W5.4
    #[test]
    fn replies_that_are_no_descriptor_are_clean_errors() {
        assert_eq!(decode("null"), Err(DescriptorError::Null));
        assert_eq!(decode("{}"), Err(DescriptorError::Null));
        for text in ["[]", "5", "\"x\"", "true"] {
            assert_eq!(
                decode(text),
                Err(DescriptorError::Json(JsonError::NotAnObject))
            );
        }
        assert!(matches!(
            decode("{"),
            Err(DescriptorError::Json(JsonError::Malformed { .. }))
        ));
        assert!(matches!(
            decode(&"{\"a\":".repeat(2_000)),
            Err(DescriptorError::Json(JsonError::TooDeep { .. }))
        ));
        for port in ["0", "65536", "null"] {
            let text = format!(r#","tcp_data_port":{port}"#);
            assert!(
                matches!(with(&text), Err(DescriptorError::DataPort { .. })),
                "{port}"
            );
        }
    }

    #[test]
    fn other_protocols_are_named_in_the_error() {
        for (protocol, named) in [
            (r#""TCP""#, "TCP"),
            (r#""rdma""#, "rdma"),
            (r#""tcp,hip""#, "tcp,hip"),
            (r#"["rdma","hip"]"#, "rdma,hip"),
        ] {
            assert_eq!(
                with(&format!(r#","protocol":{protocol}"#)),
                Err(DescriptorError::Protocol {
                    protocol: named.into()
                })
            );
        }
    }

    // row: W5.4
    #[test]
    fn a_list_of_protocols_with_tcp_uses_the_buffers_marked_tcp() {
        let descriptor = with(
            r#","protocol":["rdma","tcp"],"buffers":[
                {"name":"n","addr":1,"length":10,"protocol":"rdma"},
                {"name":"n","addr":2,"length":20,"protocol":"tcp"},
                {"name":"n","addr":3,"length":30}]"#,
        )
        .unwrap();
        assert_eq!(
            descriptor.buffers,
            [BufferRange {
                address: 2,
                len: 20
            }]
        );
    }

    #[test]
    fn the_last_of_repeated_members_wins() {
        assert_eq!(
            with(r#","tcp_data_port":10,"name":"a","name":"b""#)
                .unwrap()
                .name,
            "b"
        );
        assert_eq!(with(r#","tcp_data_port":10"#).unwrap().data_port, 10);
    }

    #[test]
    fn timestamps_are_civil_dates() {
        use std::time::Duration;
        assert_eq!(timestamp(Duration::ZERO), "1970-01-01 00:00:00.000000");
        assert_eq!(
            timestamp(Duration::from_micros(951_782_399_000_007)),
            "2000-02-28 23:59:59.000007"
        );
        assert_eq!(
            timestamp(Duration::from_secs(951_782_400)),
            "2000-02-29 00:00:00.000000"
        );
        assert_eq!(
            timestamp(Duration::from_secs(4_107_542_400)),
            "2100-03-01 00:00:00.000000"
        );
    }
}
