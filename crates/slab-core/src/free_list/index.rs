//! The index of free runs that a placement searches.

use super::bins::Bins;
use super::nodes::Nodes;
use super::treap::Treap;
use crate::placement::Placement;

#[derive(Debug)]
#[allow(
    clippy::large_enum_variant,
    reason = "one per slab, and the bitmap of the larger variant is read on every call"
)]
pub(super) enum Index {
    BestFit(Bins),
    FirstFit(Treap),
}

impl Index {
    /// An index without runs, for a map of `len` granules.
    pub(super) fn new(placement: Placement, len: u64, runs_reserved: usize) -> Self {
        match placement {
            Placement::BestFit => Self::BestFit(Bins::new(len)),
            Placement::FirstFit => Self::FirstFit(Treap::new(runs_reserved)),
        }
    }

    /// Length of the longest free run, zero if there is none.
    pub(super) fn largest(&self, nodes: &Nodes) -> u64 {
        match self {
            Self::BestFit(bins) => bins.largest(nodes),
            Self::FirstFit(treap) => treap.largest(),
        }
    }

    #[inline]
    pub(super) fn find(&self, nodes: &Nodes, need: u64) -> Option<u32> {
        match self {
            Self::BestFit(bins) => bins.find(nodes, need),
            Self::FirstFit(treap) => treap.find(nodes, need),
        }
    }

    #[inline]
    pub(super) fn insert(&mut self, nodes: &mut Nodes, slot: u32) {
        match self {
            Self::BestFit(bins) => bins.insert(nodes, slot),
            Self::FirstFit(treap) => treap.insert(nodes, slot),
        }
    }

    #[inline]
    pub(super) fn remove(&mut self, nodes: &mut Nodes, slot: u32) {
        match self {
            Self::BestFit(bins) => bins.remove(nodes, slot),
            Self::FirstFit(treap) => treap.remove(nodes, slot),
        }
    }

    #[inline]
    pub(super) fn resized(&mut self, nodes: &mut Nodes, slot: u32, was: u64) {
        match self {
            Self::BestFit(bins) => bins.resized(nodes, slot, was),
            Self::FirstFit(treap) => treap.resized(nodes, slot),
        }
    }
}
