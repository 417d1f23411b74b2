//! The map of the slab: one node per run, free or live, linked to both address neighbours.
//!
//! Invariants: the nodes from `first` along `next` cover the usable bytes without gap or overlap; no
//! two neighbours are both [`Tag::Free`]; vacant nodes are chained along `next` and tagged
//! [`Tag::Vacant`]. Positions and lengths are in granules here.

use alloc::vec::Vec;

use crate::heap::{Linked, Links};
use crate::slots::NIL;

/// Who owns a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Tag {
    /// Nobody: it can be handed out.
    Free,
    /// An [`Allocation`](crate::Allocation) in a caller's hands.
    Caller,
    /// A resident with leases; `owner` is its entry.
    Leased,
    /// A resident without leases; `owner` is its entry.
    Idle,
    /// Nobody, once fences are reached; `owner` is its wait.
    Waiting,
    /// A claim that withholds it; `owner` is the claim.
    Claimed,
    /// Nobody, and never reused.
    Quarantined,
    /// Not a run: a spare node.
    Vacant,
}

impl Tag {
    pub(crate) const COUNT: usize = 8;
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Node {
    pub(crate) start: u64,
    pub(crate) len: u64,
    pub(crate) prev: u32,
    pub(crate) next: u32,
    /// Place in the index of free runs. The treap reads them as left, right and parent.
    pub(crate) links: Links,
    /// Index of the owner in the table that `tag` names.
    pub(crate) owner: u32,
    pub(crate) tag: Tag,
}

#[derive(Debug)]
pub(crate) struct Nodes {
    nodes: Vec<Node>,
    vacant: u32,
    first: u32,
    count: u32,
}

/// One less than the number of indices, since `NIL` is none.
pub(crate) const RUNS_MAX: u32 = NIL;

impl Nodes {
    /// The map of one free run at slot 0.
    pub(crate) fn new(len: u64, reserved: usize) -> Self {
        let mut nodes = Vec::with_capacity(reserved.max(1));
        nodes.push(Node {
            start: 0,
            len,
            prev: NIL,
            next: NIL,
            links: Links::NONE,
            owner: NIL,
            tag: Tag::Free,
        });
        Self {
            nodes,
            vacant: NIL,
            first: 0,
            count: 1,
        }
    }

    pub(crate) const fn count(&self) -> u32 {
        self.count
    }

    /// How many more runs the map can hold.
    pub(crate) const fn room(&self) -> u32 {
        RUNS_MAX - self.count
    }

    /// The run at the lowest address.
    pub(crate) const fn first(&self) -> u32 {
        self.first
    }

    pub(crate) fn get(&self, slot: u32) -> Option<&Node> {
        self.nodes.get(slot as usize)
    }

    /// Puts a new run directly below `at`. The caller checked [`room`](Self::room) and fixes `at`.
    pub(crate) fn insert_before(&mut self, at: u32, start: u64, len: u64, tag: Tag) -> u32 {
        let prev = self[at].prev;
        let slot = self.take_vacant(Node {
            start,
            len,
            prev,
            next: at,
            links: Links::NONE,
            owner: NIL,
            tag,
        });
        self[at].prev = slot;
        match prev {
            NIL => self.first = slot,
            prev => self[prev].next = slot,
        }
        slot
    }

    /// Puts a new run directly above `at`. The caller checked [`room`](Self::room) and fixes `at`.
    pub(crate) fn insert_after(&mut self, at: u32, start: u64, len: u64, tag: Tag) -> u32 {
        let next = self[at].next;
        let slot = self.take_vacant(Node {
            start,
            len,
            prev: at,
            next,
            links: Links::NONE,
            owner: NIL,
            tag,
        });
        self[at].next = slot;
        if next != NIL {
            self[next].prev = slot;
        }
        slot
    }

    /// Takes `slot` out of the map. A neighbour has taken over its granules.
    pub(crate) fn unlink(&mut self, slot: u32) {
        let Node { prev, next, .. } = self[slot];
        match prev {
            NIL => self.first = next,
            prev => self[prev].next = next,
        }
        if next != NIL {
            self[next].prev = prev;
        }
        let vacant = self.vacant;
        let node = &mut self[slot];
        node.tag = Tag::Vacant;
        node.next = vacant;
        self.vacant = slot;
        self.count -= 1;
    }

    fn take_vacant(&mut self, node: Node) -> u32 {
        self.count += 1;
        if self.vacant == NIL {
            self.nodes.push(node);
            return (self.nodes.len() - 1) as u32;
        }
        let slot = self.vacant;
        self.vacant = self[slot].next;
        self[slot] = node;
        slot
    }
}

impl core::ops::Index<u32> for Nodes {
    type Output = Node;

    #[inline]
    fn index(&self, slot: u32) -> &Node {
        &self.nodes[slot as usize]
    }
}

impl core::ops::IndexMut<u32> for Nodes {
    #[inline]
    fn index_mut(&mut self, slot: u32) -> &mut Node {
        &mut self.nodes[slot as usize]
    }
}

/// Heaps of free runs have the longest on top.
impl Linked for Nodes {
    #[inline]
    fn links(&self, index: u32) -> Links {
        self[index].links
    }

    #[inline]
    fn links_mut(&mut self, index: u32) -> &mut Links {
        &mut self[index].links
    }

    #[inline]
    fn stands_above(&self, a: u32, b: u32) -> bool {
        self[a].len >= self[b].len
    }
}
