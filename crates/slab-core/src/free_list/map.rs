//! The map by slot, lengths in granules: what [`FreeList`] and the pool are built on.

use super::FreeList;
use super::nodes::{NONE, Node, Nodes, Run, Tag};
use crate::error::Error;
use crate::region::{Allocation, Region};
use crate::slots::NIL;
use crate::store::Store;

impl<St: Store> FreeList<St> {
    /// Rounds up without overflow. `len` is at least 1.
    #[inline]
    pub(crate) const fn granules_of(&self, len: u64) -> u64 {
        ((len - 1) >> self.shift) + 1
    }

    /// `len` bytes rounded up to whole granules. They lie in the slab.
    #[inline]
    pub(crate) const fn rounded(&self, len: u64) -> u64 {
        Region::of_granules(0, len, self.shift).len()
    }

    /// Binary logarithm of the granule.
    #[inline]
    pub(crate) const fn shift(&self) -> u32 {
        self.shift
    }

    /// All granules of the map.
    #[inline]
    pub(crate) const fn total(&self) -> u64 {
        self.capacity >> self.shift
    }

    /// Bytes in runs with this tag.
    pub(crate) fn bytes(&self, tag: Tag) -> u64 {
        let granules = match tag {
            Tag::Caller => self.total() - self.granules.iter().sum::<u64>(),
            tag => self.granules[tag as usize],
        };
        granules << self.shift
    }

    pub(crate) fn largest(&self) -> u64 {
        self.index.largest(&self.nodes)
    }

    #[cold]
    pub(super) const fn too_many_runs(&self) -> Error {
        Error::TooManyRuns {
            runs_max: Nodes::<St>::RUNS_MAX,
        }
    }

    /// Whether the map can number `more` further runs.
    pub(crate) const fn has_room(&self, more: u32) -> bool {
        self.nodes.room() >= more
    }

    pub(crate) fn node(&self, slot: u32) -> Run {
        self.nodes.run(slot)
    }

    /// The run at the lowest address.
    pub(crate) fn first_slot(&self) -> u32 {
        self.nodes.first()
    }

    /// Slots in address order.
    pub(crate) fn slots(&self) -> impl Iterator<Item = u32> + '_ {
        let mut at = self.nodes.first();
        core::iter::from_fn(move || {
            let slot = at;
            (slot != NIL).then(|| {
                at = self.nodes.run(slot).next;
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
        let offset = self.nodes[slot].start << self.shift;
        Allocation::new(self.id, slot, offset, len, self.shift)
    }

    /// Whether `allocation` owns a run of this list.
    #[inline]
    pub(super) fn knows(&self, allocation: &Allocation) -> bool {
        // A token of this list always passes; one of a list that was given the same id may not.
        allocation.pool() == self.id
            && self.nodes.get(allocation.slot()).is_some_and(|node| {
                node.b == Tag::Caller.code()
                    && node.start << self.shift == allocation.offset()
                    && node.len >= self.granules_of(allocation.len())
            })
    }

    /// Whether `allocation` is one of this list: empty, or the owner of a run.
    #[inline]
    pub(crate) fn check(&self, allocation: &Allocation) -> Result<(), Error> {
        if self.knows(allocation) {
            return Ok(());
        }
        if allocation.pool() != self.id {
            return Err(Error::ForeignToken {
                token: allocation.pool(),
                pool: self.id,
            });
        }
        if allocation.is_empty() {
            return Ok(());
        }
        Err(Error::UnknownToken { pool: self.id })
    }

    /// Makes a run of `need` granules the caller's, or returns `None` if no free run is long enough.
    pub(crate) fn take(&mut self, need: u64) -> Result<Option<u32>, Error> {
        if self.granules[Tag::Free as usize] < need {
            // The commonest case of a full pool. What a placement learns from requests it learns from this one too.
            self.index.miss(need);
            return Ok(None);
        }
        match self.take_or_none(need).0 {
            NONE if self.largest() >= need => match self.take_exact(need).0 {
                NONE => Err(self.too_many_runs()),
                slot => Ok(Some(slot)),
            },
            NONE => Ok(None),
            slot => Ok(Some(slot)),
        }
    }

    /// Makes the low `need` granules of the free run at `slot` the caller's.
    pub(crate) fn take_from(&mut self, slot: u32, need: u64) -> Result<u32, Error> {
        let (taken, _) = self.index.cut(&mut self.nodes, slot, need);
        if taken == NONE {
            return Err(self.too_many_runs());
        }
        self.granules[Tag::Free as usize] -= need;
        Ok(taken)
    }

    /// Makes a run of `need` granules the caller's and returns its slot and first granule, with [`NONE`] as
    /// slot if none is long enough or one more cannot be numbered: what fits into two registers.
    #[inline(never)]
    pub(super) fn take_or_none(&mut self, need: u64) -> (u32, u64) {
        let taken = self.index.take(&mut self.nodes, need);
        if taken.0 != NONE {
            self.granules[Tag::Free as usize] -= need;
        }
        taken
    }

    /// Takes the lowest free run of exactly this length, which can be had where no rest can be numbered, as
    /// [`take_or_none`](Self::take_or_none) would. O(runs).
    #[cold]
    pub(super) fn take_exact(&mut self, need: u64) -> (u32, u64) {
        let is_exact = |slot: &u32| self.nodes.is_free(*slot) && self.nodes[*slot].len == need;
        let found = self.slots().find(is_exact);
        let Some(slot) = found else {
            return (NONE, 0);
        };
        self.granules[Tag::Free as usize] -= need;
        self.index.cut(&mut self.nodes, slot, need)
    }

    /// Cuts `[from, to)` out of the free run at `slot` that contains it and makes it the caller's. The
    /// caller checked that there is room for two more runs.
    pub(crate) fn carve(&mut self, slot: u32, from: u64, to: u64) -> u32 {
        let Node { start, len, .. } = self.nodes[slot];
        let end = start + len;
        self.index.remove(&mut self.nodes, slot);
        if start < from {
            let low = self.nodes.insert_before(slot, start, from - start);
            self.index.insert(&mut self.nodes, low);
        }
        if to < end {
            let high = self.nodes.insert_after(slot, to, end - to);
            self.index.insert(&mut self.nodes, high);
        }
        let node = &mut self.nodes[slot];
        node.start = from;
        node.len = to - from;
        self.nodes.own(slot, Tag::Caller, NIL);
        self.granules[Tag::Free as usize] -= to - from;
        slot
    }

    /// Gives the live run at `slot` back and returns the slot of the free run it became part of: of two
    /// free runs that merge, the lower keeps its slot.
    pub(crate) fn give(&mut self, slot: u32) -> u32 {
        self.account(slot, Tag::Caller);
        self.give_callers(slot)
    }

    /// [`give`](Self::give) for a run that is the caller's.
    #[inline(never)]
    pub(super) fn give_callers(&mut self, slot: u32) -> u32 {
        self.granules[Tag::Free as usize] += self.nodes[slot].len;
        self.index.give(&mut self.nodes, slot)
    }

    /// Granules of the live run at `slot`, and of the free run that it would become part of.
    pub(crate) fn len_once_free(&self, slot: u32) -> (u64, u64) {
        let Node {
            len, prev, next, ..
        } = self.nodes[slot];
        let mut merged = len;
        for neighbour in [prev, next] {
            if self.nodes.is_free(neighbour) {
                merged += self.nodes[neighbour].len;
            }
        }
        (len, merged)
    }

    /// Hands the live run at `slot` to another owner.
    pub(crate) fn retag(&mut self, slot: u32, tag: Tag, owner: u32) {
        self.account(slot, tag);
        self.nodes.own(slot, tag, owner);
    }

    /// Moves the granules of the live run at `slot` to another tag. Those of [`Tag::Caller`] are what is
    /// left of all, so that the commonest calls count once.
    #[inline]
    fn account(&mut self, slot: u32, tag: Tag) {
        let Run { len, tag: was, .. } = self.nodes.run(slot);
        if was != Tag::Caller {
            self.granules[was as usize] -= len;
        }
        if tag != Tag::Caller {
            self.granules[tag as usize] += len;
        }
    }

    /// Joins the live run at `slot` with the runs above it up to `end`. They all have the same tag.
    pub(crate) fn join(&mut self, slot: u32, end: u64) {
        loop {
            let Run {
                start, len, next, ..
            } = self.nodes.run(slot);
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
        let Run {
            start,
            len,
            tag,
            owner,
            ..
        } = self.nodes.run(slot);
        if len <= keep || !self.has_room(1) {
            return;
        }
        let rest = self.nodes.insert_after(slot, start + keep, len - keep);
        self.nodes.own(rest, tag, owner);
        self.nodes[slot].len = keep;
        self.give(rest);
    }
}
