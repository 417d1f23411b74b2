//! Members of a descriptor as they stand in the JSON text, before they are judged.

use serde::de::{IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::{BufferRange, DescriptorError, PROTOCOL};
use crate::wire::json::{Document, JsonError, Members, Scalar};

#[derive(Default)]
pub(super) struct RawDescriptor<const KEEP: bool> {
    pub(super) name: Scalar,
    pub(super) protocol: Protocol,
    pub(super) data_host: Scalar,
    pub(super) data_port: Scalar,
    pub(super) version: Scalar,
    pub(super) buffers: RawBuffers<KEEP>,
    pub(super) timestamp: Scalar,
}

impl<const KEEP: bool> Members for RawDescriptor<KEEP> {
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

#[derive(Default)]
struct RawBuffer {
    name: Scalar,
    address: Scalar,
    len: Scalar,
    protocol: Scalar,
}

impl Members for RawBuffer {
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
    fn is_marked(&self) -> bool {
        matches!(&self.protocol, Scalar::Text(name) if name == PROTOCOL)
    }

    fn range(&self, index: usize) -> Result<BufferRange, DescriptorError> {
        let range = BufferRange {
            address: self.address.as_unsigned("addr")?,
            len: self.len.as_unsigned("length")?,
        };
        let named = match &self.name {
            Scalar::Absent | Scalar::Null | Scalar::Array | Scalar::Object => false,
            Scalar::Text(name) => !name.is_empty(),
            Scalar::Bool(_) | Scalar::Unsigned(_) | Scalar::Signed(_) | Scalar::Float(_) => true,
        };
        // Left out with `--cfg slab_twin`, for the fuzz target to notice.
        let no_address = range.address == 0 && !cfg!(slab_twin);
        if no_address || range.len == 0 || !named {
            return Err(DescriptorError::Buffer { index });
        }
        Ok(range)
    }
}

/// The ranges of some entries of `buffers`, up to the first entry that has none.
///
/// An entry with a range takes more text than its range takes memory, and nothing is kept behind
/// one without. So what a peer sends decides how much is held, and it is never more than it sent.
pub(super) struct Ranges(pub(super) Result<Vec<BufferRange>, DescriptorError>);

impl Default for Ranges {
    fn default() -> Self {
        Self(Ok(Vec::new()))
    }
}

impl Ranges {
    fn add(&mut self, range: &Result<BufferRange, DescriptorError>, keep: bool) {
        let Ok(ranges) = &mut self.0 else { return };
        match range {
            Ok(range) if keep => ranges.push(*range),
            Ok(_) => {}
            Err(error) => self.0 = Err(error.clone()),
        }
    }
}

/// The entries of `buffers`; anything but an array counts as none, as for a real decoder.
///
/// With `KEEP` the ranges are kept, without they are only checked.
#[derive(Default)]
pub(super) struct RawBuffers<const KEEP: bool> {
    /// Of all entries: what counts if the segment has one protocol.
    pub(super) all: Ranges,
    /// Of the entries that are marked with the protocol of this engine: what counts if it has
    /// several. Which of the two it is may be said only behind the entries.
    pub(super) marked: Ranges,
}

impl<const KEEP: bool> RawBuffers<KEEP> {
    fn add(&mut self, index: usize, entry: Document<RawBuffer>) {
        match entry {
            Document::Object(entry) => {
                let range = entry.range(index);
                self.all.add(&range, KEEP);
                if entry.is_marked() {
                    self.marked.add(&range, KEEP);
                }
            }
            Document::Null | Document::Other => {
                let wrong = JsonError::WrongType { member: "buffers" };
                self.all.add(&Err(wrong.into()), KEEP);
            }
        }
    }
}

impl<'de, const KEEP: bool> Deserialize<'de> for RawBuffers<KEEP> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct BuffersVisitor<const KEEP: bool>;
        impl<'de, const KEEP: bool> Visitor<'de> for BuffersVisitor<KEEP> {
            type Value = RawBuffers<KEEP>;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("any JSON value")
            }
            fn visit_unit<E>(self) -> Result<Self::Value, E> {
                Ok(RawBuffers::default())
            }
            fn visit_bool<E>(self, _: bool) -> Result<Self::Value, E> {
                Ok(RawBuffers::default())
            }
            fn visit_u64<E>(self, _: u64) -> Result<Self::Value, E> {
                Ok(RawBuffers::default())
            }
            fn visit_i64<E>(self, _: i64) -> Result<Self::Value, E> {
                Ok(RawBuffers::default())
            }
            fn visit_f64<E>(self, _: f64) -> Result<Self::Value, E> {
                Ok(RawBuffers::default())
            }
            fn visit_str<E>(self, _: &str) -> Result<Self::Value, E> {
                Ok(RawBuffers::default())
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
                let mut buffers = RawBuffers::default();
                let mut index = 0;
                while let Some(entry) = seq.next_element()? {
                    buffers.add(index, entry);
                    index += 1;
                }
                Ok(buffers)
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(RawBuffers::default())
            }
        }
        deserializer.deserialize_any(BuffersVisitor::<KEEP>)
    }
}
