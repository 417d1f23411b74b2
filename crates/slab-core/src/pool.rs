//! Slab map, residents, fences and claims as one state machine.
//!
//! Invariants, by name:
//! - *conserved*: free, owned, resident, waiting, claimed and quarantined bytes add up to the usable
//!   capacity;
//! - *disjoint*: no two runs overlap; *coalesced*: no two free runs touch;
//! - *one owner*: every run that is not free is owned by exactly one of caller, resident, wait, claim,
//!   quarantine;
//! - *leased stays*: a resident with a lease is never evicted, and its bytes are nobody else's;
//! - *fenced*: a region is handed out again only after every fence recorded on it is reached;
//! - *not in vain*: a reserve that fails evicts nothing.
//!
//! Not here: addresses, clocks, threads, copying. Facts go in through `handle_*`, decisions come out.

mod claim;
mod config;
mod plan;
mod reserve;
mod stats;
mod view;

use core::borrow::Borrow;
use core::fmt;
use core::hash::{BuildHasher, Hash};

use crate::error::{Error, Refused};
use crate::evict::{Credit, Evict};
use crate::fence::{Fence, Marks, Standing, TimelineId, Timelines};
use crate::free_list::{FreeList, Tag};
use crate::region::Allocation;
use crate::resident::{Entry, Lease, Ranks, RanksMut, Reclaimed, Residents};
use crate::slots::{NIL, Slots};
#[cfg(feature = "alloc")]
use crate::store::Heap;
use crate::store::{Index, Inline, Store};
use crate::twin::{Twin, is_left_out};
use stats::SizeClasses;

pub use claim::Claim;
pub use config::PoolConfig;
pub use reserve::Reserve;
pub use stats::{PoolStats, RunState, RunView, SizeClassStats};

/// Keys that left and are remembered by the default policy at most: half a MiB.
#[cfg(feature = "alloc")]
const GHOSTS_MAX: u32 = 65_536;

// The type is written once for all cases of its defaults: one that names a type of `std` or of `alloc` exists
// only with the feature.
macro_rules! define_pool {
    ([$($hasher:tt)*] [$($store:tt)*] [$($policy:tt)*]) => {
        /// Memory for keyed content: regions on request, residents with leases, reuse gated by fences.
        ///
        /// All methods take `&mut self` and return at once; `SharedPool` puts a
        /// lock around it. Content is published under a key of type `K` with metadata `M` (whatever the
        /// bytes must agree with, such as shape and element type), and stays resident until its bytes
        /// are needed for a reserve and nobody leases it. `S` hashes the keys, `St` says where the pool keeps
        /// its map, `E` which residents give way.
        ///
        #[cfg_attr(feature = "std", doc = "```")]
        #[cfg_attr(not(feature = "std"), doc = "```ignore")]
        /// use slab_core::{Pool, PoolConfig, PoolId, Reserve};
        ///
        /// # fn main() -> Result<(), slab_core::Error> {
        /// let mut pool: Pool<&str, u32> = Pool::new(PoolConfig::new(PoolId::new(), 4096))?;
        /// let Reserve::Ready(bytes) = pool.reserve(4000) else { panic!("the pool is empty") };
        /// let lease = pool.publish("a", bytes, 7).expect("a token of this pool");
        /// assert_eq!(pool.reserve(1), Reserve::Full); // "a" is leased
        /// pool.release(lease, &[]).expect("a token of this pool");
        /// assert!(matches!(pool.reserve(1), Reserve::Ready(_))); // "a" gave way
        /// # Ok(())
        /// # }
        /// ```
        pub struct Pool<K, M, S $($hasher)*, St: Store $($store)*, E: Evict $($policy)*> {
            list: FreeList<St>,
            residents: Residents<K, M, S, E::Rank, St>,
            residents_max: u32,
            order: E,
            timelines: Timelines<St>,
            claims: Slots<claim::Record, St>,
            claims_max: u32,
            leases: u64,
            /// Bytes of residents without leases.
            idle: u64,
            /// Granules of the smallest request refused since something last became free or evictable.
            refused_min: u64,
            classes: SizeClasses,
            too_large: u64,
        }
    };
}

#[cfg(feature = "std")]
define_pool!([= std::hash::RandomState] [= Heap] [= Credit<St>]);
#[cfg(all(feature = "alloc", not(feature = "std")))]
define_pool!([] [= Heap] [= Credit<St>]);
#[cfg(not(feature = "alloc"))]
define_pool!([] [] [= Credit<St>]);

#[cfg(feature = "std")]
impl<K: Eq + Hash, M> Pool<K, M, std::hash::RandomState> {
    /// Makes a pool of a slab that is entirely free, with the standard library's hasher.
    ///
    /// # Errors
    /// As [`with_hasher`](Self::with_hasher).
    ///
    /// # Complexity
    /// As [`with_hasher`](Self::with_hasher).
    pub fn new(config: PoolConfig) -> Result<Self, Error> {
        Self::with_hasher(config, std::hash::RandomState::new())
    }
}

#[cfg(feature = "alloc")]
impl<K: Eq + Hash, M, S: BuildHasher> Pool<K, M, S, Heap> {
    /// Makes a pool of a slab that is entirely free. Where keys come from a network, `hasher` must be
    /// one that a peer cannot provoke collisions in.
    ///
    /// # Errors
    /// [`Error::InvalidAlignment`] if the alignment is not a power of two;
    /// [`Error::CapacityTooSmall`] if not one granule fits.
    ///
    /// # Complexity
    /// O(runs and residents reserved + keys that the policy remembers).
    pub fn with_hasher(config: PoolConfig, hasher: S) -> Result<Self, Error> {
        let policy = Credit::new(config.residents_max.min(GHOSTS_MAX));
        Self::with_policy(config, hasher, policy)
    }
}

#[cfg(feature = "alloc")]
impl<K: Eq + Hash, M, S: BuildHasher, E: Evict> Pool<K, M, S, Heap, E> {
    /// Makes a pool of a slab that is entirely free, with an eviction policy of the caller's choice, which
    /// has seen no entry yet. Otherwise as [`with_hasher`](Pool::with_hasher).
    ///
    /// # Errors
    /// As [`with_hasher`](Pool::with_hasher).
    ///
    /// # Complexity
    /// O(runs and residents reserved).
    pub fn with_policy(config: PoolConfig, hasher: S, policy: E) -> Result<Self, Error> {
        let list = FreeList::new(config.list())?;
        let reserved = config.residents_reserved.min(config.residents_max as usize);
        let residents = Residents::new(
            hasher,
            Slots::new(alloc::vec::Vec::with_capacity(reserved)),
            hashbrown::HashTable::with_capacity(reserved),
            config.reclaimed_max,
        );
        Ok(Self::assemble(&config, list, residents, policy))
    }
}

impl<K, M, S, const SLOTS: usize, const CLASSES: usize> Pool<K, M, S, Inline<SLOTS, CLASSES>> {
    /// Makes a pool of a slab that is entirely free, without a heap. Each bound of the configuration is lowered
    /// to the store's; what it says about room made at once has no meaning here.
    ///
    /// # Panics
    /// If the alignment is not a power of two, not one granule fits, or the capacity needs more size classes
    /// than the store has. In a `const` or `static` that is a compile error.
    ///
    /// # Complexity
    /// O(slots + size classes) of the store.
    #[must_use]
    pub const fn new_inline(config: PoolConfig, hasher: S) -> Self {
        Self::new_inline_with_policy(config, hasher, Credit::new_inline())
    }
}

impl<K, M, S, E: Evict, const SLOTS: usize, const CLASSES: usize>
    Pool<K, M, S, Inline<SLOTS, CLASSES>, E>
{
    /// As [`new_inline`](Pool::new_inline), with an eviction policy of the caller's choice, which has seen no
    /// entry yet.
    ///
    /// # Panics
    /// As [`new_inline`](Pool::new_inline).
    #[must_use]
    pub const fn new_inline_with_policy(config: PoolConfig, hasher: S, policy: E) -> Self {
        let list = FreeList::new_inline(config.list());
        let residents = Residents::new(hasher, Slots::EMPTY, Index::EMPTY, config.reclaimed_max);
        Self::assemble(&config, list, residents, policy)
    }
}

impl<K, M, S, St: Store, E: Evict> Pool<K, M, S, St, E> {
    const fn assemble(
        config: &PoolConfig,
        list: FreeList<St>,
        residents: Residents<K, M, S, E::Rank, St>,
        policy: E,
    ) -> Self {
        const fn at_most<St: Store>(bound: u32) -> u32 {
            if bound < St::SLOTS_MAX {
                bound
            } else {
                St::SLOTS_MAX
            }
        }
        Self {
            timelines: Timelines::new(list.id(), config.timelines_max),
            list,
            residents,
            residents_max: match at_most::<St>(config.residents_max) {
                bound if bound < E::ENTRIES_MAX => bound,
                _ => E::ENTRIES_MAX,
            },
            order: policy,
            claims: Slots::EMPTY,
            claims_max: at_most::<St>(config.claims_max),
            leases: 0,
            idle: 0,
            refused_min: u64::MAX,
            classes: SizeClasses::new(),
            too_large: 0,
        }
    }
}

impl<K: Eq + Hash, M, S: BuildHasher, St: Store, E: Evict> Pool<K, M, S, St, E> {
    /// Makes the bytes of an allocation the resident of `key`, leased to the caller.
    ///
    /// If the key is resident with equal metadata and length, that resident stays, the new bytes are free
    /// at once, and the lease is on the resident. With other metadata or length the key is bound anew;
    /// the old bytes live until their last lease ends.
    ///
    /// # Errors
    /// Key, allocation and metadata, with [`Error::TooManyResidents`] if the bound is reached and every
    /// resident is leased, or [`Error::ForeignToken`] if another pool made the allocation. Nothing has
    /// changed then.
    ///
    /// # Complexity
    /// O(1) expected, plus O(log runs) if bytes become free.
    pub fn publish(
        &mut self,
        key: K,
        allocation: Allocation,
        meta: M,
    ) -> Result<Lease, Refused<(K, Allocation, M)>>
    where
        M: Eq,
    {
        if let Err(cause) = self.list.check(&allocation) {
            return Err(Refused {
                value: (key, allocation, meta),
                cause,
            });
        }
        let hash = self.residents.hash_of(&key);
        let previous = self.residents.find_hashed(hash, &key);
        if let Some(entry) = previous {
            let resident = &self.residents.entries[entry];
            if resident.meta == meta && resident.len == allocation.len() {
                let lease = self.lease(entry);
                self.discard(allocation);
                return Ok(lease);
            }
        }
        // An idle resident of the key makes room by going.
        let frees_one = previous.is_some_and(|entry| self.residents.entries[entry].leases == 0);
        if !frees_one && !self.make_room_for_resident() {
            let cause = Error::TooManyResidents {
                residents_max: self.residents_max,
            };
            return Err(Refused {
                value: (key, allocation, meta),
                cause,
            });
        }
        if let Some(entry) = previous {
            self.displace(entry);
        }
        let (slot, offset, len) = (allocation.slot(), allocation.offset(), allocation.len());
        // The policy is asked first, so that the entry is written once.
        let entry = self.residents.entries.next_index();
        let rank = self.order.on_insert(entry, hash, len);
        self.residents.insert(Entry {
            key,
            hash,
            offset,
            len,
            rank,
            leases: 1,
            run: slot,
            marks: Marks::NONE,
            current: true,
            meta,
        });
        if slot != NIL {
            self.list.retag(slot, Tag::Resident, entry);
        }
        self.leases += 1;
        Ok(self.lease_token(entry, offset, len))
    }

    /// Borrows the resident of `key`, or returns `None` if there is none. O(1) expected.
    pub fn acquire<Q>(&mut self, key: &Q) -> Option<Lease>
    where
        K: Borrow<Q>,
        Q: Eq + Hash + ?Sized,
    {
        let entry = self.residents.find(key)?;
        Some(self.lease(entry))
    }

    /// Ends a lease. Whoever used the bytes through it may still do so until `fences` are reached.
    ///
    /// With the last lease the resident becomes evictable, as the youngest; if its key was bound anew
    /// meanwhile, its bytes are free once every fence recorded on them is reached.
    ///
    /// # Errors
    /// The lease, with [`Error::ForeignToken`] if another pool made it, [`Error::UnknownTimeline`] if another
    /// pool made a fence, or [`Error::TooManyFences`] if an inline store is full of them. Nothing has changed
    /// then.
    ///
    /// # Complexity
    /// O(fences × timelines), else O(1); O(log runs) if bytes become free.
    pub fn release(&mut self, lease: Lease, fences: &[Fence]) -> Result<(), Refused<Lease>> {
        self.forget_reached_if_short(fences);
        let marks_checked = |resident: &Entry<K, M, E::Rank>| {
            if fences.is_empty() {
                return Ok(());
            }
            self.timelines.check_all(&resident.marks, fences)
        };
        if let Err(cause) = self.leased(&lease).and_then(marks_checked) {
            return Err(Refused {
                value: lease,
                cause,
            });
        }
        self.leases -= 1;
        let entry = lease.entry();
        let resident = &mut self.residents.entries[entry];
        if resident.leases < u32::MAX {
            resident.leases -= 1;
        }
        if !fences.is_empty() {
            self.timelines.record(&mut resident.marks, fences);
        }
        if resident.leases > 0 {
            return Ok(());
        }
        if resident.current {
            self.idle += self.list.rounded(resident.len);
            self.order
                .on_idle(entry, &mut RanksMut(&mut self.residents.entries));
            self.note_gain();
        } else if let Some(Entry { run, marks, .. }) = self.residents.entries.remove(entry) {
            self.let_go(run, marks);
        }
        Ok(())
    }

    /// Gives back bytes that were never published. They are free once `fences` are reached.
    ///
    /// # Errors
    /// The allocation, with [`Error::ForeignToken`], [`Error::UnknownTimeline`] or [`Error::TooManyFences`].
    /// Nothing has changed then.
    ///
    /// # Complexity
    /// O(fences × timelines + log runs) amortised.
    pub fn free(
        &mut self,
        allocation: Allocation,
        fences: &[Fence],
    ) -> Result<(), Refused<Allocation>> {
        self.forget_reached_if_short(fences);
        let checked = self
            .list
            .check(&allocation)
            .and_then(|()| self.timelines.check_all(&Marks::NONE, fences));
        if let Err(cause) = checked {
            return Err(Refused {
                value: allocation,
                cause,
            });
        }
        if !allocation.is_empty() {
            let mut marks = Marks::NONE;
            self.timelines.record(&mut marks, fences);
            self.let_go(allocation.slot(), marks);
        }
        Ok(())
    }

    /// Takes bytes out of use for good: something may still write to them, and nobody can say until when.
    ///
    /// # Errors
    /// The allocation, with [`Error::ForeignToken`], if another pool made it.
    ///
    /// # Complexity
    /// O(1).
    pub fn quarantine(&mut self, allocation: Allocation) -> Result<(), Refused<Allocation>> {
        if let Err(cause) = self.list.check(&allocation) {
            return Err(Refused {
                value: allocation,
                cause,
            });
        }
        if !allocation.is_empty() {
            self.list.retag(allocation.slot(), Tag::Quarantined, NIL);
        }
        Ok(())
    }

    /// Evicts the resident of `key` if nobody leases it, and says whether it did.
    ///
    /// # Complexity
    /// O(1) expected, plus O(log runs).
    pub fn evict<Q>(&mut self, key: &Q) -> bool
    where
        K: Borrow<Q>,
        Q: Eq + Hash + ?Sized,
    {
        match self.residents.find(key) {
            Some(entry)
                if self.residents.entries[entry].leases == 0 || is_left_out(Twin::SpareLeased) =>
            {
                self.evict_entry(entry);
                true
            }
            _ => false,
        }
    }

    /// Adds a timeline, which starts at 0.
    ///
    /// # Errors
    /// [`Error::TooManyTimelines`] if the configured number exists. Timelines are never removed.
    pub fn add_timeline(&mut self) -> Result<TimelineId, Error> {
        self.timelines.add()
    }

    /// Takes note that the timeline has reached `value`: bytes whose last fence that was are free.
    ///
    /// A value below one that was reached before changes nothing.
    ///
    /// # Errors
    /// [`Error::UnknownTimeline`] if another pool made it; [`Error::TimelineFailed`] if it has failed.
    ///
    /// # Complexity
    /// O(log waits + log runs) amortised for each run that waited for this.
    pub fn handle_reached(&mut self, timeline: TimelineId, value: u64) -> Result<(), Error> {
        let index = self.timelines.check(timeline)?;
        self.timelines.reach(index, value)?;
        // Residents may give way now that had to wait before.
        self.note_gain();
        while let Some(wait) = self.timelines.next_reached(index) {
            if wait.claim == NIL {
                self.list.give(wait.run);
            } else {
                self.claimed_run_reached(wait.run, wait.claim);
            }
        }
        Ok(())
    }

    /// Takes note that nothing more on the timeline will be reached: bytes that wait for it are
    /// quarantined, now or, if they are resident, when they are evicted.
    ///
    /// # Errors
    /// [`Error::UnknownTimeline`] if another pool made it.
    ///
    /// # Complexity
    /// O(waits × timelines).
    pub fn handle_failed(&mut self, timeline: TimelineId) -> Result<(), Error> {
        let index = self.timelines.check(timeline)?;
        self.timelines.fail(index);
        let mut cursor = self.timelines.first_wait();
        while let Some((wait, next)) = self.timelines.next_failed(cursor) {
            self.list.retag(wait.run, Tag::Quarantined, NIL);
            if wait.claim != NIL {
                self.claimed_run_failed(wait.claim);
            }
            cursor = next;
        }
        Ok(())
    }

    /// Reports the keys evicted since the last drain that are not resident now, in no order.
    ///
    /// # Complexity
    /// O(evictions since the last drain) expected.
    pub fn drain_reclaimed(&mut self) -> Reclaimed<K, St> {
        self.residents.drain_reclaimed()
    }

    /// Something became free, evictable or waiting: refusals must be thought over.
    const fn note_gain(&mut self) {
        self.refused_min = u64::MAX;
    }

    /// Evicts an idle resident. Returns the slot of the run its bytes are part of now.
    fn evict_entry(&mut self, entry: u32) -> u32 {
        let Some(Entry {
            key,
            run,
            len,
            marks,
            ..
        }) = self.unbind(entry)
        else {
            return NIL;
        };
        self.residents.remember(key);
        self.classes.count_eviction(len, self.list.rounded(len));
        self.let_go(run, marks)
    }

    /// The key of a resident is about to be bound anew.
    fn displace(&mut self, entry: u32) {
        if let Some(Entry { run, marks, .. }) = self.unbind(entry) {
            self.let_go(run, marks);
        }
    }

    /// Takes a resident from its key, and returns it unless leases keep it.
    fn unbind(&mut self, entry: u32) -> Option<Entry<K, M, E::Rank>> {
        let Entry {
            hash, leases, len, ..
        } = self.residents.entries[entry];
        self.order
            .on_remove(entry, hash, &mut RanksMut(&mut self.residents.entries));
        self.residents.unindex(entry);
        if leases > 0 {
            return None;
        }
        self.idle -= self.list.rounded(len);
        self.residents.entries.remove(entry)
    }

    /// Whether one more entry fits, after evicting the coldest if need be.
    fn make_room_for_resident(&mut self) -> bool {
        if self.residents.entries.len() < self.residents_max {
            return true;
        }
        // At the bound exactly, so one less is room. With a bound of zero nothing is ever idle.
        match self.coldest() {
            Some(entry) => {
                self.evict_entry(entry);
                true
            }
            None => false,
        }
    }

    fn coldest(&self) -> Option<u32> {
        self.order.coldest(Ranks(&self.residents.entries))
    }

    #[inline]
    fn lease(&mut self, entry: u32) -> Lease {
        self.order
            .on_hit(entry, &mut RanksMut(&mut self.residents.entries));
        let resident = &mut self.residents.entries[entry];
        if resident.leases == 0 {
            self.idle -= self.list.rounded(resident.len);
        }
        resident.leases = resident.leases.saturating_add(1);
        self.leases += 1;
        let (offset, len) = (resident.offset, resident.len);
        self.lease_token(entry, offset, len)
    }

    #[inline]
    fn lease_token(&self, entry: u32, offset: u64, len: u64) -> Lease {
        Lease::new(self.list.id(), entry, offset, len, self.list.shift())
    }

    /// Frees the bytes of a checked allocation at once.
    fn discard(&mut self, allocation: Allocation) {
        if !allocation.is_empty() {
            self.let_go(allocation.slot(), Marks::NONE);
        }
    }

    /// Lets the bytes of an owner that gave way go: free, waiting for `marks`, or quarantined. Returns the
    /// slot of the run they are part of now.
    fn let_go(&mut self, run: u32, marks: Marks) -> u32 {
        if run == NIL {
            // Content without bytes: nothing to wait for.
            self.timelines.forget(marks);
            return NIL;
        }
        if !is_left_out(Twin::ForgetRefusal) {
            self.note_gain();
        }
        match self.timelines.standing(&marks) {
            Standing::Reached => {
                self.timelines.forget(marks);
                self.list.give(run)
            }
            Standing::Pending => {
                let wait = self.timelines.park(run, marks);
                self.list.retag(run, Tag::Waiting, wait);
                run
            }
            Standing::Failed => {
                self.timelines.forget(marks);
                self.list.retag(run, Tag::Quarantined, NIL);
                run
            }
        }
    }

    /// Makes room for marks where a store has a bound on them: reached ones stay with their resident until then.
    fn forget_reached_if_short(&mut self, fences: &[Fence]) {
        if !self.timelines.is_short_of_marks(fences) {
            return;
        }
        for resident in self.residents.entries.values_mut() {
            self.timelines.forget_reached(&mut resident.marks);
        }
        self.timelines.forget_reached_of_waits();
    }

    /// What a lease holds.
    #[inline]
    fn leased(&self, lease: &Lease) -> Result<&Entry<K, M, E::Rank>, Error> {
        let pool = self.list.id();
        // A lease of this pool always passes; one of a pool that was given the same id may not.
        match self.residents.entries.get(lease.entry()) {
            Some(resident)
                if lease.pool() == pool
                    && resident.leases > 0
                    && resident.offset == lease.offset()
                    && resident.len == lease.len() =>
            {
                Ok(resident)
            }
            _ if lease.pool() == pool => Err(Error::UnknownToken { pool }),
            _ => Err(Error::ForeignToken {
                token: lease.pool(),
                pool,
            }),
        }
    }
}

impl<K, M, S, St: Store, E: Evict> fmt::Debug for Pool<K, M, S, St, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("map", &self.list)
            .field("residents", &self.residents.entries.len())
            .field("leases", &self.leases)
            .field("claims", &self.claims.len())
            .finish_non_exhaustive()
    }
}
