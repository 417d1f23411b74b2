//! Offset allocator over one slab.
//!
//! Invariants, by name:
//! - *cover*: the runs, free and live, cover the usable bytes without gap or overlap;
//! - *coalesced*: no two free runs touch;
//! - *conserved*: free bytes and live bytes add up to the usable capacity;
//! - *complete*: an allocation fails only if no free run is large enough.
//!
//! Not here: residents, leases, fences. [`Pool`](crate::Pool) adds them over the same map.

mod bins;
mod nodes;
mod treap;

use crate::error::{Error, Refused};
use crate::id::PoolId;
use crate::placement::Placement;
use crate::region::{Allocation, Region};
use crate::slots::NIL;
use bins::Bins;
use nodes::{Nodes, RUNS_MAX};
use treap::Treap;

pub(crate) use nodes::{Node, Tag};

/// What a [`FreeList`] is made from.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub struct FreeListConfig {
    /// Identity of the list, carried by its tokens.
    pub id: PoolId,
    /// Bytes of the slab. What lies above the last whole granule cannot be handed out.
    pub capacity: u64,
    /// Granule in bytes, a power of two: every offset and every region's length is a multiple of it.
    /// 256 by default.
    pub alignment: u64,
    /// Where regions go.
    pub placement: Placement,
    /// Runs (free and live) to make room for at once, so that the map does not grow later. It grows
    /// beyond when needed.
    pub runs_reserved: usize,
}

impl FreeListConfig {
    /// The defaults: granules of 256 bytes, [`Placement::BestFit`], room for 64 runs.
    #[must_use]
    pub const fn new(id: PoolId, capacity: u64) -> Self {
        Self {
            id,
            capacity,
            alignment: 256,
            placement: Placement::BestFit,
            runs_reserved: 64,
        }
    }
}

/// Carves regions of any size from a slab and takes them back, touching no memory but its own map.
///
/// ```
/// use slab_core::{FreeList, FreeListConfig, PoolId};
///
/// # fn main() -> Result<(), slab_core::Error> {
/// let mut list = FreeList::new(FreeListConfig::new(PoolId::from_raw(1), 1 << 20))?;
/// let a = list.allocate(1000)?;
/// assert_eq!((a.offset(), a.len(), a.region().len()), (0, 1000, 1024));
/// list.free(a).expect("a token of this list");
/// assert_eq!(list.largest_free(), 1 << 20);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct FreeList {
    id: PoolId,
    capacity: u64,
    /// Binary logarithm of the alignment.
    shift: u32,
    placement: Placement,
    nodes: Nodes,
    index: Index,
    /// Granules by the tag of their run.
    granules: [u64; Tag::COUNT],
}

/// One run of the map of a [`FreeList`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FreeRun {
    /// Where it is.
    pub region: Region,
    /// Whether it can be handed out; otherwise an [`Allocation`] owns it.
    pub is_free: bool,
}

#[derive(Debug)]
#[allow(
    clippy::large_enum_variant,
    reason = "one per slab, and the bitmap of the larger variant is read on every call"
)]
enum Index {
    BestFit(Bins),
    FirstFit(Treap),
}

impl FreeList {
    /// Makes the list of a slab that is entirely free.
    ///
    /// # Errors
    /// [`Error::InvalidAlignment`] if the alignment is not a power of two;
    /// [`Error::CapacityTooSmall`] if not one granule fits.
    pub fn new(config: FreeListConfig) -> Result<Self, Error> {
        let FreeListConfig {
            id,
            capacity,
            alignment,
            placement,
            runs_reserved,
        } = config;
        if !alignment.is_power_of_two() {
            return Err(Error::InvalidAlignment { alignment });
        }
        let shift = alignment.trailing_zeros();
        let len = capacity >> shift;
        if len == 0 {
            return Err(Error::CapacityTooSmall {
                capacity,
                alignment,
            });
        }
        let mut nodes = Nodes::new(len, runs_reserved);
        let mut index = match placement {
            Placement::BestFit => Index::BestFit(Bins::new(len)),
            Placement::FirstFit => Index::FirstFit(Treap::new(runs_reserved)),
        };
        index.insert(&mut nodes, 0);
        let mut granules = [0; Tag::COUNT];
        granules[Tag::Free as usize] = len;
        Ok(Self {
            id,
            capacity,
            shift,
            placement,
            nodes,
            index,
            granules,
        })
    }

    /// Takes a region of at least `len` bytes, aligned, from the low end of a free run.
    ///
    /// Zero bytes give an empty allocation that owns nothing; that never fails.
    ///
    /// # Errors
    /// [`Error::TooLarge`] if `len` exceeds the usable capacity, [`Error::Exhausted`] if no free run is
    /// large enough now, [`Error::TooManyRuns`] if the map cannot number one more run. Nothing has
    /// changed then.
    ///
    /// # Complexity
    /// O(log runs), see [`Placement`].
    #[inline]
    pub fn allocate(&mut self, len: u64) -> Result<Allocation, Error> {
        if len == 0 {
            return Ok(Allocation::empty(self.id));
        }
        let need = self.granules_of(len);
        if need > self.total() {
            return Err(Error::TooLarge {
                requested: len,
                usable: self.usable(),
            });
        }
        match self.take(need)? {
            Some(slot) => Ok(self.token(slot, len)),
            None => Err(Error::Exhausted {
                requested: len,
                free: self.free_bytes(),
                largest_free: self.largest_free(),
            }),
        }
    }

    /// Gives a region back. It merges with free neighbours at once.
    ///
    /// # Errors
    /// [`Error::ForeignToken`], with the token, if another list made it.
    ///
    /// # Complexity
    /// O(1) to find the neighbours and O(log runs) amortised to file the result. Needs no memory.
    #[inline]
    pub fn free(&mut self, allocation: Allocation) -> Result<(), Refused<Allocation>> {
        if let Err(cause) = self.check(&allocation) {
            return Err(Refused {
                value: allocation,
                cause,
            });
        }
        if !allocation.is_empty() {
            self.give(allocation.slot);
        }
        Ok(())
    }

    /// The id its tokens carry.
    #[must_use]
    pub const fn id(&self) -> PoolId {
        self.id
    }

    /// Bytes of the slab, as configured.
    #[must_use]
    pub const fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Bytes that can be handed out: the capacity rounded down to the alignment.
    #[must_use]
    pub fn usable(&self) -> u64 {
        self.total() << self.shift
    }

    /// Bytes above the last whole granule, which are never handed out.
    #[must_use]
    pub fn unusable_tail(&self) -> u64 {
        self.capacity - self.usable()
    }

    /// Granule in bytes.
    #[must_use]
    pub const fn alignment(&self) -> u64 {
        1 << self.shift
    }

    /// Where regions go.
    #[must_use]
    pub const fn placement(&self) -> Placement {
        self.placement
    }

    /// Free bytes in all runs together.
    #[must_use]
    pub const fn free_bytes(&self) -> u64 {
        self.granules[Tag::Free as usize] << self.shift
    }

    /// Length of the largest free run: the largest request that succeeds now. O(1).
    #[must_use]
    pub fn largest_free(&self) -> u64 {
        self.largest() << self.shift
    }

    /// Runs of the map, free and live.
    #[must_use]
    pub const fn run_count(&self) -> u32 {
        self.nodes.count()
    }

    /// The map in address order. O(1) a step.
    pub fn runs(&self) -> impl Iterator<Item = FreeRun> + '_ {
        self.slots().map(|slot| FreeRun {
            region: self.region(slot),
            is_free: self.nodes[slot].tag == Tag::Free,
        })
    }
}

/// What the pool builds on: runs by slot, lengths in granules.
impl FreeList {
    /// Rounds up without overflow. `len` is at least 1.
    #[inline]
    pub(crate) const fn granules_of(&self, len: u64) -> u64 {
        ((len - 1) >> self.shift) + 1
    }

    /// All granules of the map.
    #[inline]
    pub(crate) const fn total(&self) -> u64 {
        self.capacity >> self.shift
    }

    /// Bytes in runs with this tag.
    pub(crate) const fn bytes(&self, tag: Tag) -> u64 {
        self.granules[tag as usize] << self.shift
    }

    pub(crate) fn largest(&self) -> u64 {
        match &self.index {
            Index::BestFit(bins) => bins.largest(&self.nodes),
            Index::FirstFit(treap) => treap.largest(),
        }
    }

    /// Whether the map can number `more` further runs.
    pub(crate) const fn has_room(&self, more: u32) -> bool {
        self.nodes.room() >= more
    }

    pub(crate) fn node(&self, slot: u32) -> &Node {
        &self.nodes[slot]
    }

    /// The run at the lowest address.
    pub(crate) const fn first_slot(&self) -> u32 {
        self.nodes.first()
    }

    /// Slots in address order.
    pub(crate) fn slots(&self) -> impl Iterator<Item = u32> + '_ {
        let mut at = self.nodes.first();
        core::iter::from_fn(move || {
            let slot = at;
            (slot != NIL).then(|| {
                at = self.nodes[slot].next;
                slot
            })
        })
    }

    pub(crate) fn region(&self, slot: u32) -> Region {
        let node = &self.nodes[slot];
        self.region_of(node.start, node.len)
    }

    /// The bytes of granules that lie in the slab.
    pub(crate) fn region_of(&self, start: u64, len: u64) -> Region {
        // Cannot overflow: what lies in the slab ends at or below the capacity.
        Region::new(start << self.shift, len << self.shift).unwrap_or(Region::EMPTY)
    }

    /// The token for `len` bytes of the caller's run at `slot`.
    #[inline]
    pub(crate) fn token(&self, slot: u32, len: u64) -> Allocation {
        Allocation {
            pool: self.id,
            slot,
            region: self.region(slot),
            len,
        }
    }

    /// Whether `allocation` names a run that one of this list's tokens owns.
    #[inline]
    pub(crate) fn check(&self, allocation: &Allocation) -> Result<(), Error> {
        if allocation.pool != self.id {
            return Err(Error::ForeignToken {
                token: allocation.pool,
                pool: self.id,
            });
        }
        if allocation.is_empty() {
            return Ok(());
        }
        // A token of this list always passes; one of a list that was given the same id may not.
        let known = self.nodes.get(allocation.slot).is_some_and(|node| {
            node.tag == Tag::Caller
                && node.start << self.shift == allocation.region.offset()
                && node.len << self.shift == allocation.region.len()
        });
        if known {
            Ok(())
        } else {
            Err(Error::UnknownToken { pool: self.id })
        }
    }

    /// Makes a run of `need` granules the caller's, or returns `None` if no free run is long enough.
    #[inline]
    pub(crate) fn take(&mut self, need: u64) -> Result<Option<u32>, Error> {
        match self.index.find(&self.nodes, need) {
            Some(slot) => self.take_from(slot, need).map(Some),
            None => Ok(None),
        }
    }

    /// Makes the low `need` granules of the free run at `slot` the caller's.
    #[inline]
    pub(crate) fn take_from(&mut self, slot: u32, need: u64) -> Result<u32, Error> {
        let Node { start, len, .. } = self.nodes[slot];
        let taken = if len == need {
            self.index.remove(&mut self.nodes, slot);
            self.nodes[slot].tag = Tag::Caller;
            slot
        } else {
            if !self.has_room(1) {
                return Err(Error::TooManyRuns { runs_max: RUNS_MAX });
            }
            let taken = self.nodes.insert_before(slot, start, need, Tag::Caller);
            let rest = &mut self.nodes[slot];
            rest.start += need;
            rest.len -= need;
            self.index.resized(&mut self.nodes, slot, len);
            taken
        };
        self.granules[Tag::Free as usize] -= need;
        self.granules[Tag::Caller as usize] += need;
        Ok(taken)
    }

    /// Cuts `[from, to)` out of the free run at `slot` that contains it and makes it the caller's. The
    /// caller checked that there is room for two more runs.
    pub(crate) fn carve(&mut self, slot: u32, from: u64, to: u64) -> u32 {
        let Node { start, len, .. } = self.nodes[slot];
        let end = start + len;
        self.index.remove(&mut self.nodes, slot);
        if start < from {
            let low = self
                .nodes
                .insert_before(slot, start, from - start, Tag::Free);
            self.index.insert(&mut self.nodes, low);
        }
        if to < end {
            let high = self.nodes.insert_after(slot, to, end - to, Tag::Free);
            self.index.insert(&mut self.nodes, high);
        }
        let node = &mut self.nodes[slot];
        node.start = from;
        node.len = to - from;
        node.tag = Tag::Caller;
        self.granules[Tag::Free as usize] -= to - from;
        self.granules[Tag::Caller as usize] += to - from;
        slot
    }

    /// Gives the live run at `slot` back and returns the slot of the free run it became part of.
    #[inline]
    pub(crate) fn give(&mut self, slot: u32) -> u32 {
        let Node {
            start,
            len,
            prev,
            next,
            tag,
            ..
        } = self.nodes[slot];
        self.granules[tag as usize] -= len;
        self.granules[Tag::Free as usize] += len;
        let below = prev != NIL && self.nodes[prev].tag == Tag::Free;
        let above = next != NIL && self.nodes[next].tag == Tag::Free;
        if below {
            let was = self.nodes[prev].len;
            let mut grown = was + len;
            if above {
                grown += self.nodes[next].len;
                self.index.remove(&mut self.nodes, next);
                self.nodes.unlink(next);
            }
            self.nodes.unlink(slot);
            self.nodes[prev].len = grown;
            self.index.resized(&mut self.nodes, prev, was);
            return prev;
        }
        if above {
            let node = &mut self.nodes[next];
            let was = node.len;
            node.start = start;
            node.len += len;
            self.nodes.unlink(slot);
            self.index.resized(&mut self.nodes, next, was);
            return next;
        }
        self.nodes[slot].tag = Tag::Free;
        self.index.insert(&mut self.nodes, slot);
        slot
    }

    /// Hands the live run at `slot` to another owner.
    #[inline]
    pub(crate) fn retag(&mut self, slot: u32, tag: Tag, owner: u32) {
        let node = &mut self.nodes[slot];
        self.granules[node.tag as usize] -= node.len;
        self.granules[tag as usize] += node.len;
        node.tag = tag;
        node.owner = owner;
    }

    /// Joins the live run at `slot` with the runs above it up to `end`. They all have the same tag.
    pub(crate) fn join(&mut self, slot: u32, end: u64) {
        loop {
            let Node {
                start, len, next, ..
            } = self.nodes[slot];
            if start + len >= end || next == NIL {
                return;
            }
            self.nodes[slot].len = len + self.nodes[next].len;
            self.nodes.unlink(next);
        }
    }

    /// Gives back what the live run at `slot` has above its low `keep` granules. If the map cannot
    /// number one more run, the run stays whole: its owner then has more than it asked for.
    pub(crate) fn trim(&mut self, slot: u32, keep: u64) {
        let Node {
            start,
            len,
            tag,
            owner,
            ..
        } = self.nodes[slot];
        if len <= keep || !self.has_room(1) {
            return;
        }
        let rest = self.nodes.insert_after(slot, start + keep, len - keep, tag);
        self.nodes[rest].owner = owner;
        self.nodes[slot].len = keep;
        self.give(rest);
    }
}

impl Index {
    #[inline]
    fn find(&self, nodes: &Nodes, need: u64) -> Option<u32> {
        match self {
            Self::BestFit(bins) => bins.find(nodes, need),
            Self::FirstFit(treap) => treap.find(nodes, need),
        }
    }

    #[inline]
    fn insert(&mut self, nodes: &mut Nodes, slot: u32) {
        match self {
            Self::BestFit(bins) => bins.insert(nodes, slot),
            Self::FirstFit(treap) => treap.insert(nodes, slot),
        }
    }

    #[inline]
    fn remove(&mut self, nodes: &mut Nodes, slot: u32) {
        match self {
            Self::BestFit(bins) => bins.remove(nodes, slot),
            Self::FirstFit(treap) => treap.remove(nodes, slot),
        }
    }

    #[inline]
    fn resized(&mut self, nodes: &mut Nodes, slot: u32, was: u64) {
        match self {
            Self::BestFit(bins) => bins.resized(nodes, slot, was),
            Self::FirstFit(treap) => treap.resized(nodes, slot),
        }
    }
}
