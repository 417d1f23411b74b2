//! The map of the slab: one node per run, free or live, linked to both address neighbours.
//!
//! Invariants: the nodes from [`EDGE`] along `next` and back cover the usable bytes without gap or
//! overlap; no two neighbours are both free; `free` has exactly the bits of free runs; vacant nodes are
//! chained along `next`. Positions and lengths are in granules here.
//!
//! A node fills half a cache line. Whether a neighbour is free is read from the bits, of which a line
//! holds 512, so that giving back a region between live neighbours touches no node but its own.

use alloc::vec;
use alloc::vec::Vec;

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

    /// What field `b` of a node that is not free holds: above every slot.
    #[inline]
    pub(super) const fn code(self) -> u32 {
        CODES | self as u32
    }

    #[inline]
    const fn of(b: u32) -> Self {
        if b < CODES {
            return Self::Free;
        }
        match b & !CODES {
            1 => Self::Caller,
            2 => Self::Leased,
            3 => Self::Idle,
            4 => Self::Waiting,
            5 => Self::Claimed,
            6 => Self::Quarantined,
            _ => Self::Vacant,
        }
    }
}

/// Numbers from here on are no slots but codes of tags.
///
/// The top bit of a slot is free for the index.
const CODES: u32 = !0xFF;

/// The slot that ends every chain of free runs. Links *of* it are written and never read, so that
/// linking needs no branch for the ends; its length is zero.
pub(super) const NONE: u32 = 0;

/// The slot between the last run and the first. It is no run, is not free and has no length. Nobody
/// writes its links in the index of free runs, so that it can stand for "no neighbour to unlink".
pub(super) const EDGE: u32 = 1;

/// Runs that can be numbered.
pub(crate) const RUNS_MAX: u32 = (1 << 31) - 2;

#[derive(Clone, Copy, Debug)]
#[repr(align(32))]
pub(crate) struct Node {
    pub(super) start: u64,
    pub(super) len: u64,
    pub(super) prev: u32,
    pub(super) next: u32,
    /// Free: a link of the index. Live: the owner's index in the table that the tag names.
    pub(super) a: u32,
    /// Free: a link of the index. Else the code of the tag.
    pub(super) b: u32,
}

/// A run as the rest of the crate sees it. `prev` and `next` are [`NIL`] at the ends of the map.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    pub(crate) start: u64,
    pub(crate) len: u64,
    pub(crate) prev: u32,
    pub(crate) next: u32,
    pub(crate) owner: u32,
    pub(crate) tag: Tag,
}

#[derive(Debug)]
pub(crate) struct Nodes {
    nodes: Vec<Node>,
    /// The third link of a free run, for the part of the index that needs three.
    down: Vec<u32>,
    /// Bit `slot % 64` of word `slot / 64`: the run is free.
    free: Vec<u64>,
    vacant: u32,
    count: u32,
}

/// The parts of a map while none is added to: what the compiler need not read again after every write.
pub(super) struct Parts<'a> {
    pub(super) nodes: NodeSlice<'a>,
    pub(super) down: &'a mut Vec<u32>,
    pub(super) free: FreeBits<'a>,
    pub(super) spares: Spares<'a>,
}

pub(super) struct NodeSlice<'a>(pub(super) &'a mut [Node]);

pub(super) struct FreeBits<'a>(&'a mut [u64]);

pub(super) struct Spares<'a> {
    vacant: &'a mut u32,
    count: &'a mut u32,
}

impl core::ops::Index<u32> for NodeSlice<'_> {
    type Output = Node;

    #[inline(always)]
    fn index(&self, slot: u32) -> &Node {
        &self.0[slot as usize]
    }
}

impl core::ops::IndexMut<u32> for NodeSlice<'_> {
    #[inline(always)]
    fn index_mut(&mut self, slot: u32) -> &mut Node {
        &mut self.0[slot as usize]
    }
}

impl FreeBits<'_> {
    #[inline(always)]
    pub(super) fn get(&self, slot: u32) -> bool {
        (self.0[(slot / 64) as usize] >> (slot % 64)) & 1 != 0
    }

    #[inline(always)]
    pub(super) fn set(&mut self, slot: u32) {
        self.0[(slot / 64) as usize] |= 1 << (slot % 64);
    }

    #[inline(always)]
    pub(super) fn clear(&mut self, slot: u32) {
        self.0[(slot / 64) as usize] &= !(1 << (slot % 64));
    }
}

impl Spares<'_> {
    /// A spare node for one more run, [`NONE`] if no more can be numbered. The caller fills it in and
    /// links it.
    #[inline(always)]
    pub(super) fn pop(&mut self, nodes: &NodeSlice<'_>) -> u32 {
        let slot = *self.vacant;
        if slot != NONE {
            *self.vacant = nodes[slot].next;
            *self.count += 1;
        }
        slot
    }

    /// Makes the node of `slot`, which a neighbour has taken the place of, a spare one.
    #[inline(always)]
    pub(super) fn push(&mut self, nodes: &mut NodeSlice<'_>, slot: u32) {
        let node = &mut nodes[slot];
        node.next = *self.vacant;
        node.b = Tag::Vacant.code();
        *self.vacant = slot;
        *self.count -= 1;
    }
}

#[inline]
const fn outside(slot: u32) -> u32 {
    if slot == EDGE { NIL } else { slot }
}

impl Nodes {
    /// The slot of the one run of a new map.
    pub(super) const FIRST: u32 = 2;

    /// The map of one run that is not free yet.
    pub(super) fn new(len: u64, reserved: usize) -> Self {
        // Two that are no runs, and one spare.
        let slots = reserved.saturating_add(3).max(4);
        let mut nodes = Vec::with_capacity(slots);
        let node = |len, neighbour| Node {
            start: 0,
            len,
            prev: neighbour,
            next: neighbour,
            a: NONE,
            b: NONE,
        };
        nodes.extend([node(0, NONE), node(0, Self::FIRST), node(len, EDGE)]);
        let mut down = Vec::with_capacity(slots);
        down.resize(3, NONE);
        let mut free = vec![0];
        free.reserve(slots / 64);
        Self {
            nodes,
            down,
            free,
            vacant: NONE,
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
    pub(crate) fn first(&self) -> u32 {
        outside(self[EDGE].next)
    }

    pub(crate) fn run(&self, slot: u32) -> Run {
        let Node {
            start,
            len,
            prev,
            next,
            a,
            b,
        } = self[slot];
        Run {
            start,
            len,
            prev: outside(prev),
            next: outside(next),
            owner: a,
            tag: Tag::of(b),
        }
    }

    #[inline]
    pub(super) fn get(&self, slot: u32) -> Option<&Node> {
        self.nodes.get(slot as usize)
    }

    /// The parts, after making sure that there is a spare node if one more run can be numbered.
    #[inline(always)]
    pub(super) fn parts_with_spare(&mut self) -> Parts<'_> {
        if self.vacant == NONE {
            self.grow();
        }
        self.parts()
    }

    #[inline(always)]
    pub(super) fn parts(&mut self) -> Parts<'_> {
        Parts {
            nodes: NodeSlice(&mut self.nodes),
            down: &mut self.down,
            free: FreeBits(&mut self.free),
            spares: Spares {
                vacant: &mut self.vacant,
                count: &mut self.count,
            },
        }
    }

    #[inline]
    pub(super) fn down(&self, slot: u32) -> u32 {
        self.down[slot as usize]
    }

    #[inline]
    pub(super) fn set_down(&mut self, slot: u32, to: u32) {
        self.down[slot as usize] = to;
    }

    pub(super) fn is_free(&self, slot: u32) -> bool {
        (self.free[(slot / 64) as usize] >> (slot % 64)) & 1 != 0
    }

    pub(super) fn set_free(&mut self, slot: u32) {
        self.parts().free.set(slot);
    }

    pub(super) fn clear_free(&mut self, slot: u32) {
        self.parts().free.clear(slot);
    }

    /// Writes the owner of a run that is not free (any more).
    pub(super) fn own(&mut self, slot: u32, tag: Tag, owner: u32) {
        let node = &mut self[slot];
        node.a = owner;
        node.b = tag.code();
    }

    /// Adds a spare node, unless no more can be numbered.
    #[cold]
    #[inline(never)]
    fn grow(&mut self) {
        if self.room() == 0 {
            return;
        }
        let slot = self.nodes.len() as u32;
        self.nodes.push(Node {
            next: self.vacant,
            b: Tag::Vacant.code(),
            ..self[NONE]
        });
        self.down.push(NONE);
        if slot.is_multiple_of(64) {
            self.free.push(0);
        }
        self.vacant = slot;
    }

    /// Puts a new run directly below `at`, whose bounds the caller sets. The caller checked
    /// [`room`](Self::room).
    pub(super) fn insert_before(&mut self, at: u32, start: u64, len: u64) -> u32 {
        let prev = self[at].prev;
        self.insert_between(prev, at, start, len)
    }

    /// Puts a new run directly above `at`, whose bounds the caller sets. The caller checked
    /// [`room`](Self::room).
    pub(super) fn insert_after(&mut self, at: u32, start: u64, len: u64) -> u32 {
        let next = self[at].next;
        self.insert_between(at, next, start, len)
    }

    fn insert_between(&mut self, prev: u32, next: u32, start: u64, len: u64) -> u32 {
        let Parts {
            mut spares, nodes, ..
        } = self.parts_with_spare();
        let slot = spares.pop(&nodes);
        let node = &mut self[slot];
        node.start = start;
        node.len = len;
        node.prev = prev;
        node.next = next;
        self[prev].next = slot;
        self[next].prev = slot;
        slot
    }

    /// Takes `slot` out of the map. A neighbour has taken over its granules.
    pub(super) fn unlink(&mut self, slot: u32) {
        let Node { prev, next, .. } = self[slot];
        self[prev].next = next;
        self[next].prev = prev;
        let Parts {
            mut spares,
            mut nodes,
            ..
        } = self.parts();
        spares.push(&mut nodes, slot);
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
