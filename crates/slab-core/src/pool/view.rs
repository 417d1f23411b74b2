//! Looking at a pool: nothing here changes it or counts as use.

use core::borrow::Borrow;
use core::hash::{BuildHasher, Hash};

use super::{Pool, PoolStats, RunState, RunView, SizeClassStats};
use crate::evict::Evict;
use crate::free_list::Tag;
use crate::id::PoolId;
use crate::placement::Placement;
use crate::resident::Lease;
use crate::store::Store;

impl<K: Eq + Hash, M, S: BuildHasher, St: Store, E: Evict> Pool<K, M, S, St, E> {
    /// Whether `key` is resident. O(1) expected; does not count as use.
    #[must_use]
    pub fn is_resident<Q>(&self, key: &Q) -> bool
    where
        K: Borrow<Q>,
        Q: Eq + Hash + ?Sized,
    {
        self.residents.find(key).is_some()
    }

    /// Metadata of the resident of `key`. O(1) expected; does not count as use.
    #[must_use]
    pub fn meta<Q>(&self, key: &Q) -> Option<&M>
    where
        K: Borrow<Q>,
        Q: Eq + Hash + ?Sized,
    {
        let entry = self.residents.find(key)?;
        Some(&self.residents.entries[entry].meta)
    }

    /// Leases on the resident of `key`. O(1) expected.
    #[must_use]
    pub fn lease_count<Q>(&self, key: &Q) -> Option<u64>
    where
        K: Borrow<Q>,
        Q: Eq + Hash + ?Sized,
    {
        let entry = self.residents.find(key)?;
        Some(u64::from(self.residents.entries[entry].leases))
    }

    /// Metadata of what a lease holds, which its key need not be bound to any more. `None` if another
    /// pool made the lease. O(1).
    #[must_use]
    pub fn lease_meta(&self, lease: &Lease) -> Option<&M> {
        self.leased(lease).ok().map(|resident| &resident.meta)
    }

    /// Keys that are resident with their metadata and leases, in no order. O(1) a step.
    pub fn residents(&self) -> impl Iterator<Item = (&K, &M, u64)> + '_ {
        self.residents
            .iter()
            .map(|entry| (&entry.key, &entry.meta, u64::from(entry.leases)))
    }

    /// Counts and bytes of this moment. O(1).
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        let residents = self.residents.count() as u64;
        let mut stats = PoolStats {
            capacity: self.list.capacity(),
            usable: self.list.usable(),
            free: self.list.bytes(Tag::Free),
            owned: self.list.bytes(Tag::Caller),
            resident_leased: self.list.bytes(Tag::Resident) - self.idle,
            resident_idle: self.idle,
            waiting: self.list.bytes(Tag::Waiting),
            claimed: self.list.bytes(Tag::Claimed),
            quarantined: self.list.bytes(Tag::Quarantined),
            largest_free: self.list.largest_free(),
            residents,
            displaced: u64::from(self.residents.entries.len()) - residents,
            leases: self.leases,
            claims: u64::from(self.claims.len()),
            runs: u64::from(self.list.run_count()),
            evictions: 0,
            evicted_bytes: 0,
            refusals: 0,
            too_large: self.too_large,
        };
        self.classes.sum_into(&mut stats);
        stats
    }

    /// Evictions and refusals by power of two of the length, for classes in which any happened. 65 classes are looked at.
    pub fn size_classes(&self) -> impl Iterator<Item = SizeClassStats> + '_ {
        self.classes.iter()
    }

    /// The slab map in address order. O(1) a step.
    pub fn runs(&self) -> impl Iterator<Item = RunView> + '_ {
        self.list.slots().map(|slot| {
            let node = self.list.node(slot);
            let state = match node.tag {
                Tag::Resident => RunState::Resident {
                    leases: u64::from(self.residents.entries[node.owner].leases),
                },
                Tag::Waiting => RunState::Waiting,
                Tag::Claimed => RunState::Claimed,
                Tag::Quarantined => RunState::Quarantined,
                Tag::Caller => RunState::Caller,
                // Vacant nodes are in no chain.
                Tag::Free | Tag::Vacant => RunState::Free,
            };
            RunView {
                region: self.list.region(slot),
                state,
            }
        })
    }

    /// The id its tokens carry.
    #[must_use]
    pub const fn id(&self) -> PoolId {
        self.list.id()
    }

    /// Granule in bytes.
    #[must_use]
    pub const fn alignment(&self) -> u64 {
        self.list.alignment()
    }

    /// Where regions go.
    #[must_use]
    pub const fn placement(&self) -> Placement {
        self.list.placement()
    }
}
