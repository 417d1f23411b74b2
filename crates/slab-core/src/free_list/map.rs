//! The map by slot, lengths in granules: what [`FreeList`] and the pool are built on.

use super::FreeList;
use super::nodes::{Node, RUNS_MAX, Tag};
use crate::error::Error;
use crate::region::{Allocation, Region};
use crate::slots::NIL;

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
        self.index.largest(&self.nodes)
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
