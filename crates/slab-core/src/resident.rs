//! Residents: keyed content that is ready to read, with a count of its leases.
//!
//! Invariants: the index holds exactly the *current* entry of each key; an entry that is not current was
//! displaced by a publish with other metadata and lives only for its leases; `leases` counts the lease
//! tokens that exist for the entry.

use core::borrow::Borrow;
use core::fmt;
use core::hash::{BuildHasher, Hash};
use core::mem;
use core::ops::{Deref, DerefMut, Index, IndexMut};

use crate::fence::Marks;
use crate::id::PoolId;
use crate::region::Region;
use crate::slots::Slots;
use crate::store::{Array, Index as _, Store};

/// A counted borrow of a resident: while it exists, the bytes stay where they are and what they are.
///
/// Made by [`Pool::publish`](crate::Pool::publish) and [`Pool::acquire`](crate::Pool::acquire), consumed
/// by [`Pool::release`](crate::Pool::release). It cannot be cloned, so there is no double release.
/// **Dropping it keeps its resident for ever**; wrap it in a `LeaseGuard` where
/// that could happen.
#[must_use = "dropping a lease keeps its resident for ever"]
#[derive(PartialEq, Eq)]
pub struct Lease {
    pool: PoolId,
    offset: u64,
    len: u64,
    /// Entry, and above it the binary logarithm of the granule: a token of four equal words is moved word by
    /// word.
    place: u64,
}

impl Lease {
    #[inline]
    pub(crate) const fn new(pool: PoolId, entry: u32, offset: u64, len: u64, shift: u32) -> Self {
        Self {
            pool,
            offset,
            len,
            place: (shift as u64) << 32 | entry as u64,
        }
    }

    #[inline]
    pub(crate) const fn entry(&self) -> u32 {
        self.place as u32
    }

    /// First byte, counted from the start of the slab. Zero if the resident has no bytes.
    #[inline]
    #[must_use]
    pub const fn offset(&self) -> u64 {
        self.offset
    }

    /// Bytes of the content.
    #[inline]
    #[must_use]
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Whether the content has no bytes.
    #[inline]
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The region that is held, a multiple of the alignment.
    #[must_use]
    pub const fn region(&self) -> Region {
        Region::of_granules(self.offset, self.len, (self.place >> 32) as u32)
    }

    /// The pool that made it.
    #[inline]
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
            self.region(),
            self.pool,
            self.len
        )
    }
}

/// `R` is what the eviction policy keeps.
pub(crate) struct Entry<K, M, R> {
    pub(crate) key: K,
    /// Of the key, by the pool's hasher.
    pub(crate) hash: u64,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) rank: R,
    /// Stays at its maximum once there, so that leaked leases cannot wrap it.
    pub(crate) leases: u32,
    /// Slot of the run, `NIL` for content without bytes.
    pub(crate) run: u32,
    /// Fences of the leases that ended.
    pub(crate) marks: Marks,
    /// Whether the index has it; otherwise it was displaced.
    pub(crate) current: bool,
    pub(crate) meta: M,
}

/// Keys evicted since the last drain that are not resident now.
#[must_use = "what the drain reports is not reported again"]
pub enum Reclaimed<K, St: Store> {
    /// Exactly these, each once, in no order.
    Keys(ReclaimedKeys<K, St>),
    /// More evictions than the pool was configured to remember: take every key that is not resident as
    /// reclaimed.
    All,
}

impl<K: fmt::Debug, St: Store> fmt::Debug for Reclaimed<K, St> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Keys(keys) => f.debug_tuple("Keys").field(keys).finish(),
            Self::All => f.write_str("All"),
        }
    }
}

/// The keys of [`Reclaimed`]: a slice, and an iterator by value.
pub struct ReclaimedKeys<K, St: Store>(St::Array<K>);

impl<K, St: Store> Deref for ReclaimedKeys<K, St> {
    type Target = [K];

    fn deref(&self) -> &[K] {
        &self.0
    }
}

impl<K, St: Store> DerefMut for ReclaimedKeys<K, St> {
    fn deref_mut(&mut self) -> &mut [K] {
        &mut self.0
    }
}

impl<K, St: Store> IntoIterator for ReclaimedKeys<K, St> {
    type Item = K;
    type IntoIter = <St::Array<K> as IntoIterator>::IntoIter;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

impl<K: fmt::Debug, St: Store> fmt::Debug for ReclaimedKeys<K, St> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&**self).finish()
    }
}

pub(crate) type Entries<K, M, R, St> = Slots<Entry<K, M, R>, St>;

pub(crate) struct Residents<K, M, S, R, St: Store> {
    pub(crate) entries: Entries<K, M, R, St>,
    index: St::Index,
    hasher: S,
    /// Keys in the order of eviction. Which of them are resident again, and which left twice, is found out
    /// when they are asked for, not at each eviction.
    evicted: St::Array<K>,
    evicted_max: u32,
    has_forgotten: bool,
}

impl<K, M, S, R, St: Store> Residents<K, M, S, R, St> {
    pub(crate) const fn new(
        hasher: S,
        entries: Entries<K, M, R, St>,
        index: St::Index,
        evicted_max: u32,
    ) -> Self {
        Self {
            entries,
            index,
            hasher,
            evicted: <St::Array<K> as Array<K>>::EMPTY,
            evicted_max,
            has_forgotten: false,
        }
    }
}

impl<K: Eq + Hash, M, S: BuildHasher, R, St: Store> Residents<K, M, S, R, St> {
    #[inline]
    pub(crate) fn hash_of<Q: Hash + ?Sized>(&self, key: &Q) -> u64 {
        self.hasher.hash_one(key)
    }

    /// The current entry of `key`.
    #[inline]
    pub(crate) fn find<Q>(&self, key: &Q) -> Option<u32>
    where
        K: Borrow<Q>,
        Q: Eq + Hash + ?Sized,
    {
        self.find_hashed(self.hash_of(key), key)
    }

    /// The current entry of `key`, whose hash is known.
    #[inline]
    pub(crate) fn find_hashed<Q>(&self, hash: u64, key: &Q) -> Option<u32>
    where
        K: Borrow<Q>,
        Q: Eq + ?Sized,
    {
        let is_key = |entry| self.entries[entry].key.borrow() == key;
        self.index.find(hash, is_key)
    }

    /// Keys that are resident.
    pub(crate) fn count(&self) -> usize {
        self.index.len()
    }

    /// The current entries, in no order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Entry<K, M, R>> + '_ {
        self.index.iter().map(|entry| &self.entries[entry])
    }

    /// Adds an entry for a key that has no current one.
    pub(crate) fn insert(&mut self, entry: Entry<K, M, R>) -> u32 {
        let hash = entry.hash;
        let number = self.entries.insert(entry);
        let entries = &self.entries;
        self.index.insert(hash, number, |entry| entries[entry].hash);
        number
    }

    /// Takes an entry out of the index: its key is not resident any more.
    pub(crate) fn unindex(&mut self, entry: u32) {
        let entries = &self.entries;
        let hash = entries[entry].hash;
        self.index.remove(hash, entry, |entry| entries[entry].hash);
        self.entries[entry].current = false;
    }

    /// Remembers an evicted key until the next drain.
    pub(crate) fn remember(&mut self, key: K) {
        if self.has_forgotten {
            return;
        }
        if self.evicted.len() >= self.evicted_max as usize || self.evicted.push(key).is_err() {
            self.evicted.clear();
            self.has_forgotten = true;
        }
    }

    pub(crate) fn drain_reclaimed(&mut self) -> Reclaimed<K, St> {
        if mem::take(&mut self.has_forgotten) {
            return Reclaimed::All;
        }
        let mut keys = <St::Array<K> as Array<K>>::EMPTY;
        let mut seen = St::Index::EMPTY;
        for key in mem::replace(&mut self.evicted, Array::EMPTY) {
            let hash = self.hash_of(&key);
            if self.find_hashed(hash, &key).is_some()
                || seen.find(hash, |at| keys[at as usize] == key).is_some()
            {
                continue;
            }
            seen.insert(hash, keys.len() as u32, |at| {
                self.hash_of(&keys[at as usize])
            });
            let pushed = keys.push(key);
            debug_assert!(pushed.is_ok(), "as many as were remembered");
        }
        Reclaimed::Keys(ReclaimedKeys(keys))
    }
}

/// The ranks of all entries, as a policy sees them.
pub(crate) struct Ranks<'a, K, M, R, St: Store>(pub(crate) &'a Entries<K, M, R, St>);

/// As [`Ranks`], to be changed.
pub(crate) struct RanksMut<'a, K, M, R, St: Store>(pub(crate) &'a mut Entries<K, M, R, St>);

impl<K, M, R, St: Store> Index<u32> for Ranks<'_, K, M, R, St> {
    type Output = R;

    #[inline]
    fn index(&self, entry: u32) -> &R {
        &self.0[entry].rank
    }
}

impl<K, M, R, St: Store> Index<u32> for RanksMut<'_, K, M, R, St> {
    type Output = R;

    #[inline]
    fn index(&self, entry: u32) -> &R {
        &self.0[entry].rank
    }
}

impl<K, M, R, St: Store> IndexMut<u32> for RanksMut<'_, K, M, R, St> {
    #[inline]
    fn index_mut(&mut self, entry: u32) -> &mut R {
        &mut self.0[entry].rank
    }
}
