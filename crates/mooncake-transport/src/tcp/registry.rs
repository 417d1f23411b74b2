//! Memory that peers may address, and what is published about it.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::error::EngineError;
use crate::registration::Access;
use crate::wire::data::{DataVersion, Header, Op};
use crate::wire::descriptor::{BufferRange, Descriptor, encoded_buffer_len, timestamp};

/// Identity of one registration; never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct RegistrationId(u64);

struct Entry<M> {
    id: RegistrationId,
    len: u64,
    access: Access,
    memory: M,
}

/// Registered ranges by address, each with the memory `M` behind it. No two overlap.
pub(super) struct Registry<M> {
    /// The descriptor without buffers and timestamp.
    base: Descriptor,
    entries: BTreeMap<u64, Entry<M>>,
    next_id: u64,
    /// Bytes of the encoded descriptor.
    descriptor_len: u64,
    descriptor_len_max: u64,
}

/// A range that a request may touch.
pub(super) struct Admitted<M> {
    pub(super) id: RegistrationId,
    pub(super) memory: M,
    pub(super) range: Range<u64>,
}

impl<M: Clone> Registry<M> {
    pub(super) fn new(
        session: String,
        data_host: String,
        data_port: u16,
        descriptor_len_max: u64,
    ) -> Self {
        let base = Descriptor {
            name: session,
            data_host: Some(data_host),
            data_port,
            version: DataVersion::V2,
            buffers: Vec::new(),
            timestamp: now(),
        };
        let descriptor_len = base.encode().len() as u64;
        Self {
            base,
            entries: BTreeMap::new(),
            next_id: 0,
            descriptor_len,
            descriptor_len_max,
        }
    }

    /// Adds the `len` bytes at `address`, to be touched by peers as `access` says.
    pub(super) fn insert(
        &mut self,
        address: u64,
        len: u64,
        access: Access,
        memory: M,
    ) -> Result<RegistrationId, EngineError> {
        let end = address
            .checked_add(len)
            .filter(|_| address != 0 && len != 0);
        let Some(end) = end else {
            return Err(EngineError::UnusableMemory { address, len });
        };
        // Ranges do not overlap, so only the last one that starts before our end can reach in.
        if let Some((&other_address, other)) = self.entries.range(..end).next_back()
            && other_address + other.len > address
        {
            return Err(EngineError::Overlap {
                address,
                len,
                other_address,
                other_len: other.len,
            });
        }
        let growth = encoded_buffer_len(&self.base.name, BufferRange { address, len }) as u64;
        let grown = self.descriptor_len + growth;
        if grown > self.descriptor_len_max {
            return Err(EngineError::DescriptorTooLong {
                len: grown,
                max: self.descriptor_len_max,
            });
        }
        self.descriptor_len = grown;
        let id = RegistrationId(self.next_id);
        self.next_id += 1;
        self.entries.insert(
            address,
            Entry {
                id,
                len,
                access,
                memory,
            },
        );
        Ok(id)
    }

    /// Removes the registration at `address`, if it is still `id`.
    pub(super) fn remove(&mut self, address: u64, id: RegistrationId) {
        if self
            .entries
            .get(&address)
            .is_some_and(|entry| entry.id == id)
            && let Some(entry) = self.entries.remove(&address)
        {
            let buffer = BufferRange {
                address,
                len: entry.len,
            };
            self.descriptor_len -= encoded_buffer_len(&self.base.name, buffer) as u64;
        }
    }

    /// Finds the one registration that holds all of the request's range and allows it.
    ///
    /// # Complexity
    /// O(log registrations).
    pub(super) fn admit(&self, header: &Header) -> Option<Admitted<M>> {
        let end = header.address.checked_add(header.size)?;
        if header.size == 0 {
            return None;
        }
        let (&address, entry) = self.entries.range(..=header.address).next_back()?;
        let allowed = match (header.op, entry.access) {
            (_, Access::Local) => false,
            (Op::Read, _) | (Op::Write, Access::RemoteWrite) => true,
            (Op::Write, Access::RemoteRead) => false,
        };
        if !allowed || end > address + entry.len {
            return None;
        }
        let start = header.address - address;
        Some(Admitted {
            id: entry.id,
            memory: entry.memory.clone(),
            range: start..start + header.size,
        })
    }

    /// Returns the descriptor as it is now.
    pub(super) fn descriptor(&self) -> Descriptor {
        let buffers = self
            .entries
            .iter()
            .map(|(&address, entry)| BufferRange {
                address,
                len: entry.len,
            })
            .collect();
        Descriptor {
            buffers,
            timestamp: now(),
            ..self.base.clone()
        }
    }

    /// Returns the small descriptor that goes into our own requests.
    pub(super) fn request_descriptor(&self) -> Descriptor {
        Descriptor {
            timestamp: now(),
            ..self.base.clone()
        }
    }
}

fn now() -> String {
    timestamp(
        SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn registry() -> Registry<()> {
        Registry::new("127.0.0.1:1".into(), "127.0.0.1".into(), 2, 1 << 20)
    }

    fn add(
        registry: &mut Registry<()>,
        address: u64,
        len: u64,
    ) -> Result<RegistrationId, EngineError> {
        registry.insert(address, len, Access::RemoteWrite, ())
    }

    fn admits(registry: &Registry<()>, op: Op, address: u64, size: u64) -> bool {
        registry
            .admit(&Header {
                size,
                address,
                op,
                version: DataVersion::V2,
            })
            .is_some()
    }

    // row: W7.4a
    #[test]
    fn a_range_is_admitted_only_inside_one_registration() {
        let mut registry = registry();
        add(&mut registry, 1000, 100).unwrap();
        add(&mut registry, 1100, 100).unwrap();
        let check = |address, size, expected| {
            assert_eq!(
                admits(&registry, Op::Write, address, size),
                expected,
                "{address}+{size}"
            );
            assert_eq!(
                admits(&registry, Op::Read, address, size),
                expected,
                "{address}+{size}"
            );
        };
        check(1000, 100, true);
        check(1199, 1, true);
        check(1050, 50, true);
        check(500, 1, false);
        check(999, 1, false);
        check(1199, 2, false);
        check(1000, 101, false);
        check(1050, 100, false);
        check(1200, 1, false);
        check(u64::MAX, 1, false);
        check(u64::MAX, u64::MAX, false);
        check(1000, u64::MAX, false);
        check(1000, 0, false);
    }

    #[test]
    fn access_decides_who_may_write() {
        let mut registry = registry();
        registry.insert(1000, 10, Access::RemoteRead, ()).unwrap();
        assert!(admits(&registry, Op::Read, 1000, 10));
        assert!(!admits(&registry, Op::Write, 1000, 10));
    }

    #[test]
    fn overlapping_empty_and_unnameable_memory_is_refused() {
        let mut registry = registry();
        add(&mut registry, 1000, 100).unwrap();
        for (address, len) in [(1000, 100), (1050, 10), (950, 51), (1099, 1), (900, 500)] {
            assert_eq!(
                add(&mut registry, address, len),
                Err(EngineError::Overlap {
                    address,
                    len,
                    other_address: 1000,
                    other_len: 100
                })
            );
        }
        add(&mut registry, 900, 100).unwrap();
        add(&mut registry, 1100, 100).unwrap();
        for (address, len) in [(0, 5), (5000, 0), (u64::MAX, 2)] {
            assert_eq!(
                add(&mut registry, address, len),
                Err(EngineError::UnusableMemory { address, len })
            );
        }
    }

    // row: W6b
    #[test]
    fn a_removed_registration_admits_nothing_and_its_id_removes_no_other() {
        let mut registry = registry();
        let first = add(&mut registry, 1000, 100).unwrap();
        registry.remove(1000, first);
        assert!(!admits(&registry, Op::Read, 1000, 1));
        add(&mut registry, 1000, 100).unwrap();
        registry.remove(1000, first);
        assert!(admits(&registry, Op::Read, 1000, 1));
    }

    // row: W3.2a
    #[test]
    fn the_descriptor_is_kept_within_what_peers_read() {
        let mut registry = Registry::new("127.0.0.1:1".into(), "127.0.0.1".into(), 2, 1024);
        let mut count = 0;
        let error = loop {
            match add(&mut registry, 4096 * (count + 1), 16) {
                Ok(_) => count += 1,
                Err(error) => break error,
            }
        };
        assert!(matches!(
            error,
            EngineError::DescriptorTooLong { max: 1024, .. }
        ));
        assert!(count > 5);
        let len = registry.descriptor().encode().len() as u64;
        assert!(len <= 1024 && len + 60 > 1024, "{len}");
    }

    // row: W5.2a
    #[test]
    fn the_descriptor_lists_what_is_registered() {
        let mut registry = registry();
        add(&mut registry, 8192, 4096).unwrap();
        let descriptor = registry.descriptor();
        assert_eq!(
            descriptor.buffers,
            [BufferRange {
                address: 8192,
                len: 4096
            }]
        );
        assert_eq!(descriptor.name, "127.0.0.1:1");
        assert_eq!(descriptor.data_host.as_deref(), Some("127.0.0.1"));
        assert_eq!(
            (descriptor.data_port, descriptor.version),
            (2, DataVersion::V2)
        );
        assert!(registry.request_descriptor().buffers.is_empty());
    }
}
