//! The index of free runs that a placement searches.
//!
//! `insert` and `remove` are for runs whose place in the map does not change; `cut` and `give` change map
//! and index together, because what is cheap differs: one index files runs by length, the other by
//! address.

use super::bins::Bins;
use super::nodes::Nodes;
use super::treap::Treap;
use crate::store::Store;

#[allow(
    clippy::large_enum_variant,
    reason = "one per slab, and the bitmap of the larger variant is read on every call"
)]
pub(super) enum Index<St: Store> {
    BestFit(Bins<St>),
    FirstFit(Treap<St>),
}

impl<St: Store> Index<St> {
    /// Length of the longest free run, zero if there is none.
    pub(super) fn largest(&self, nodes: &Nodes<St>) -> u64 {
        match self {
            Self::BestFit(bins) => bins.largest(nodes),
            Self::FirstFit(treap) => treap.largest(),
        }
    }

    /// Makes `need` granules the caller's, cut from the low end of the free run that the placement chooses.
    /// Returns their slot and first granule; the slot is [`NONE`](super::nodes::NONE) if no free run is
    /// long enough or one more run cannot be numbered.
    #[inline(always)]
    pub(super) fn take(&mut self, nodes: &mut Nodes<St>, need: u64) -> (u32, u64) {
        match self {
            Self::BestFit(bins) => bins.take(nodes, need),
            Self::FirstFit(treap) => treap.take(nodes, need),
        }
    }

    /// A [`take`](Self::take) that cannot succeed.
    #[inline]
    pub(super) fn miss(&mut self, need: u64) {
        if let Self::BestFit(bins) = self {
            bins.count(need);
        }
    }

    /// [`take`](Self::take) from the free run at `slot`, which is long enough.
    pub(super) fn cut(&mut self, nodes: &mut Nodes<St>, slot: u32, need: u64) -> (u32, u64) {
        match self {
            Self::BestFit(bins) => bins.cut(nodes, slot, need),
            Self::FirstFit(treap) => treap.cut(nodes, slot, need),
        }
    }

    /// Makes the live run at `slot` free, merges it with its free neighbours and returns the slot of the
    /// result: that of the free run below, else of the free run above, else its own.
    #[inline(always)]
    pub(super) fn give(&mut self, nodes: &mut Nodes<St>, slot: u32) -> u32 {
        match self {
            Self::BestFit(bins) => bins.give(nodes, slot),
            Self::FirstFit(treap) => treap.give(nodes, slot),
        }
    }

    /// Files the run at `slot`, which becomes free.
    pub(super) fn insert(&mut self, nodes: &mut Nodes<St>, slot: u32) {
        nodes.set_free(slot);
        match self {
            Self::BestFit(bins) => bins.insert(nodes, slot),
            Self::FirstFit(treap) => treap.insert(nodes, slot),
        }
    }

    /// Takes out the run at `slot`, which stops being free.
    pub(super) fn remove(&mut self, nodes: &mut Nodes<St>, slot: u32) {
        nodes.clear_free(slot);
        match self {
            Self::BestFit(bins) => bins.remove(nodes, slot),
            Self::FirstFit(treap) => treap.remove(nodes, slot),
        }
    }
}
