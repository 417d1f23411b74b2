//! Members of a descriptor as they stand in the JSON text, before they are judged.

use serde::de::{IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::{BufferRange, PROTOCOL};
use crate::wire::json::{Document, Members, Scalar};

#[derive(Default)]
pub(super) struct RawDescriptor {
    pub(super) name: Scalar,
    pub(super) protocol: Protocol,
    pub(super) data_host: Scalar,
    pub(super) data_port: Scalar,
    pub(super) version: Scalar,
    pub(super) buffers: RawBuffers,
    pub(super) timestamp: Scalar,
}

impl Members for RawDescriptor {
    fn take<'de, A: MapAccess<'de>>(&mut self, member: &str, map: &mut A) -> Result<(), A::Error> {
        match member {
            "name" => self.name = map.next_value()?,
            "protocol" => self.protocol = map.next_value()?,
            "tcp_data_host" => self.data_host = map.next_value()?,
            "tcp_data_port" => self.data_port = map.next_value()?,
            "tcp_proto_version" => self.version = map.next_value()?,
            "buffers" => self.buffers = map.next_value()?,
            "timestamp" => self.timestamp = map.next_value()?,
            _ => drop(map.next_value::<IgnoredAny>()?),
        }
        Ok(())
    }
}

/// `protocol` as one name, or as the list that builds with several protocols publish.
pub(super) enum Protocol {
    One(Scalar),
    Several(Vec<String>),
}

impl Default for Protocol {
    fn default() -> Self {
        Self::One(Scalar::Absent)
    }
}

impl<'de> Deserialize<'de> for Protocol {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ProtocolVisitor;
        impl<'de> Visitor<'de> for ProtocolVisitor {
            type Value = Protocol;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("any JSON value")
            }
            fn visit_unit<E>(self) -> Result<Protocol, E> {
                Ok(Protocol::One(Scalar::Null))
            }
            fn visit_bool<E>(self, value: bool) -> Result<Protocol, E> {
                Ok(Protocol::One(Scalar::Bool(value)))
            }
            fn visit_u64<E>(self, value: u64) -> Result<Protocol, E> {
                Ok(Protocol::One(Scalar::Unsigned(value)))
            }
            fn visit_i64<E>(self, value: i64) -> Result<Protocol, E> {
                Ok(Protocol::One(Scalar::Signed(value)))
            }
            fn visit_f64<E>(self, value: f64) -> Result<Protocol, E> {
                Ok(Protocol::One(Scalar::Float(value)))
            }
            fn visit_str<E>(self, value: &str) -> Result<Protocol, E> {
                Ok(Protocol::One(Scalar::Text(value.to_owned())))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Protocol, A::Error> {
                /// More names than any build has; the rest is not kept.
                const NAMES_MAX: usize = 16;
                let mut names = Vec::new();
                while let Some(name) = seq.next_element::<Scalar>()? {
                    if let Scalar::Text(name) = name
                        && names.len() < NAMES_MAX
                    {
                        names.push(name);
                    }
                }
                Ok(Protocol::Several(names))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Protocol, A::Error> {
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(Protocol::One(Scalar::Object))
            }
        }
        deserializer.deserialize_any(ProtocolVisitor)
    }
}

/// One entry of `buffers`, reduced to numbers while it is read.
pub(super) struct RawBuffer {
    pub(super) range: BufferRange,
    pub(super) named: bool,
    /// `Some(true)` if the entry is marked with the protocol of this engine.
    pub(super) protocol: Option<bool>,
    pub(super) wrong_type: Option<&'static str>,
}

#[derive(Default)]
struct RawBufferMembers {
    name: Scalar,
    address: Scalar,
    len: Scalar,
    protocol: Scalar,
}

impl Members for RawBufferMembers {
    fn take<'de, A: MapAccess<'de>>(&mut self, member: &str, map: &mut A) -> Result<(), A::Error> {
        match member {
            "name" => self.name = map.next_value()?,
            "addr" => self.address = map.next_value()?,
            "length" => self.len = map.next_value()?,
            "protocol" => self.protocol = map.next_value()?,
            _ => drop(map.next_value::<IgnoredAny>()?),
        }
        Ok(())
    }
}

impl RawBuffer {
    fn from_document(document: Document<RawBufferMembers>) -> Self {
        let Document::Object(members) = document else {
            return Self {
                range: BufferRange { address: 0, len: 0 },
                named: false,
                protocol: None,
                wrong_type: Some("buffers"),
            };
        };
        let mut wrong_type = None;
        let mut number = |scalar: &Scalar, member| {
            scalar.as_unsigned(member).unwrap_or_else(|_| {
                wrong_type = Some(member);
                0
            })
        };
        let range = BufferRange {
            address: number(&members.address, "addr"),
            len: number(&members.len, "length"),
        };
        let protocol = match members.protocol {
            Scalar::Text(name) => Some(name == PROTOCOL),
            _ => None,
        };
        let named = members
            .name
            .into_text("name")
            .is_ok_and(|name| !name.is_empty());
        Self {
            range,
            named,
            protocol,
            wrong_type,
        }
    }
}

/// The entries of `buffers`; anything but an array counts as none, as for a real decoder.
#[derive(Default)]
pub(super) struct RawBuffers(pub(super) Vec<RawBuffer>);

impl<'de> Deserialize<'de> for RawBuffers {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct BuffersVisitor;
        impl<'de> Visitor<'de> for BuffersVisitor {
            type Value = RawBuffers;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("any JSON value")
            }
            fn visit_unit<E>(self) -> Result<RawBuffers, E> {
                Ok(RawBuffers::default())
            }
            fn visit_bool<E>(self, _: bool) -> Result<RawBuffers, E> {
                Ok(RawBuffers::default())
            }
            fn visit_u64<E>(self, _: u64) -> Result<RawBuffers, E> {
                Ok(RawBuffers::default())
            }
            fn visit_i64<E>(self, _: i64) -> Result<RawBuffers, E> {
                Ok(RawBuffers::default())
            }
            fn visit_f64<E>(self, _: f64) -> Result<RawBuffers, E> {
                Ok(RawBuffers::default())
            }
            fn visit_str<E>(self, _: &str) -> Result<RawBuffers, E> {
                Ok(RawBuffers::default())
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<RawBuffers, A::Error> {
                let mut buffers = Vec::new();
                while let Some(entry) = seq.next_element::<Document<RawBufferMembers>>()? {
                    buffers.push(RawBuffer::from_document(entry));
                }
                Ok(RawBuffers(buffers))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawBuffers, A::Error> {
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(RawBuffers::default())
            }
        }
        deserializer.deserialize_any(BuffersVisitor)
    }
}
