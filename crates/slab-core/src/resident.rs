//! Residents: keyed content that is ready to read, with a count of its leases.
//!
//! Invariants: the index holds exactly the *current* entry of each key; an entry that is not current was
//! displaced by a publish with other metadata and lives only for its leases; `leases` counts the lease
//! tokens that exist for the entry.

use alloc::vec::Vec;
use core::borrow::Borrow;
use core::fmt;
use core::hash::{BuildHasher, Hash};

use hashbrown::HashTable;

use crate::fence::Marks;
use crate::id::PoolId;
use crate::region::Region;
use crate::slots::Slots;

/// A counted borrow of a resident: while it exists, the bytes stay where they are and what they are.
///
/// Made by [`Pool::publish`](crate::Pool::publish) and [`Pool::acquire`](crate::Pool::acquire), consumed
/// by [`Pool::release`](crate::Pool::release). It cannot be cloned, so there is no double release.
/// **Dropping it keeps its resident for ever**; wrap it in a `LeaseGuard` where
/// that could happen.
#[must_use = "dropping a lease keeps its resident for ever"]
#[derive(PartialEq, Eq)]
pub struct Lease {
    pub(crate) pool: PoolId,
    pub(crate) entry: u32,
    pub(crate) region: Region,
    pub(crate) len: u64,
}

impl Lease {
    /// First byte, counted from the start of the slab. Zero if the resident has no bytes.
    #[must_use]
    pub const fn offset(&self) -> u64 {
        self.region.offset()
    }

    /// Bytes of the content.
    #[must_use]
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Whether the content has no bytes.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The region that is held, a multiple of the alignment.
    #[must_use]
    pub const fn region(&self) -> Region {
        self.region
    }

    /// The pool that made it.
    #[must_use]
    pub const fn pool(&self) -> PoolId {
        self.pool
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Lease({:?} of {:?}, {} bytes)",
            self.region, self.pool, self.len
        )
    }
}

#[derive(Debug)]
pub(crate) struct Entry<K, M> {
    pub(crate) key: K,
    pub(crate) meta: M,
    /// Slot of the run, `NIL` for content without bytes.
    pub(crate) run: u32,
    pub(crate) region: Region,
    pub(crate) len: u64,
    pub(crate) leases: u64,
    /// Whether the index has it; otherwise it was displaced.
    pub(crate) current: bool,
    /// Fences of the leases that ended.
    pub(crate) marks: Marks,
}

/// Keys evicted since the last drain that are not resident now.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "what the drain reports is not reported again"]
pub enum Reclaimed<K> {
    /// Exactly these.
    Keys(Vec<K>),
    /// More than the pool was configured to remember: take every key that is not resident as reclaimed.
    All,
}

#[derive(Debug)]
pub(crate) struct Residents<K, M, S> {
    pub(crate) entries: Slots<Entry<K, M>>,
    index: HashTable<u32>,
    hasher: S,
    reclaimed: HashTable<K>,
    reclaimed_max: u32,
    reclaimed_overflow: bool,
}

impl<K: Eq + Hash, M, S: BuildHasher> Residents<K, M, S> {
    pub(crate) fn new(hasher: S, reserved: usize, reclaimed_max: u32) -> Self {
        Self {
            entries: Slots::with_capacity(reserved),
            index: HashTable::with_capacity(reserved),
            hasher,
            reclaimed: HashTable::new(),
            reclaimed_max,
            reclaimed_overflow: false,
        }
    }

    /// The current entry of `key`.
    #[inline]
    pub(crate) fn find<Q>(&self, key: &Q) -> Option<u32>
    where
        K: Borrow<Q>,
        Q: Eq + Hash + ?Sized,
    {
        let hash = self.hasher.hash_one(key);
        self.index
            .find(hash, |entry| self.entries[*entry].key.borrow() == key)
            .copied()
    }

    /// Keys that are resident.
    pub(crate) fn count(&self) -> usize {
        self.index.len()
    }

    /// The current entries, in no order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Entry<K, M>> + '_ {
        self.index.iter().map(|entry| &self.entries[*entry])
    }

    /// Adds an entry for a key that has no current one. Returns it and the hash of its key.
    pub(crate) fn insert(&mut self, entry: Entry<K, M>) -> (u32, u64) {
        let hash = self.hasher.hash_one(&entry.key);
        if let Ok(found) = self.reclaimed.find_entry(hash, |key| *key == entry.key) {
            found.remove();
        }
        let index = self.entries.insert(entry);
        let Self {
            entries,
            index: table,
            hasher,
            ..
        } = self;
        table.insert_unique(hash, index, |entry| hasher.hash_one(&entries[*entry].key));
        (index, hash)
    }

    /// Takes an entry out of the index: its key is not resident any more.
    pub(crate) fn unindex(&mut self, entry: u32) {
        let hash = self.hasher.hash_one(&self.entries[entry].key);
        if let Ok(found) = self.index.find_entry(hash, |other| *other == entry) {
            found.remove();
        }
        self.entries[entry].current = false;
    }

    /// Remembers an evicted key until the next drain.
    pub(crate) fn remember(&mut self, key: K) {
        if self.reclaimed_overflow {
            return;
        }
        if self.reclaimed.len() >= self.reclaimed_max as usize {
            self.reclaimed.clear();
            self.reclaimed_overflow = true;
            return;
        }
        let Self {
            reclaimed, hasher, ..
        } = self;
        // Not there yet: a key leaves the table when it becomes resident, and only residents are evicted.
        reclaimed.insert_unique(hasher.hash_one(&key), key, |key| hasher.hash_one(key));
    }

    pub(crate) fn drain_reclaimed(&mut self) -> Reclaimed<K> {
        if core::mem::take(&mut self.reclaimed_overflow) {
            return Reclaimed::All;
        }
        Reclaimed::Keys(self.reclaimed.drain().collect())
    }
}
