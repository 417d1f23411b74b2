//! The map of the slab: one node per run, free or live, linked to both address neighbours.
//!
//! Invariants: the nodes from [`EDGE`] along `next` and back cover the usable bytes without gap or
//! overlap; no two neighbours are both free; `free` has exactly the bits of free runs; vacant nodes are
//! chained along `next`. Positions and lengths are in granules here.
//!
//! A node fills half a cache line. Whether a neighbour is free is read from the bits, of which a line
//! holds 512, so that giving back a region between live neighbours touches no node but its own.

use crate::slots::NIL;
use crate::store::{Array, Store};

/// Who owns a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Tag {
    /// Nobody: it can be handed out.
    Free,
    /// An [`Allocation`](crate::Allocation) in a caller's hands.
    Caller,
    /// A resident, leased or idle; `owner` is its entry.
    Resident,
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
    pub(crate) const COUNT: usize = 7;

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
            2 => Self::Resident,
            3 => Self::Waiting,
            4 => Self::Claimed,
            5 => Self::Quarantined,
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

/// Nodes that are no runs.
pub(super) const OTHERS: u32 = 2;

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

pub(crate) struct Nodes<St: Store> {
    nodes: St::Array<Node>,
    /// The third link of a free run, for the part of the index that needs three.
    down: St::Array<u32>,
    /// Bit `slot % 8` of byte `slot / 8`: the run is free.
    free: St::Array<u8>,
    vacant: u32,
    count: u32,
}

/// The parts of a map while none is added to: what the compiler need not read again after every write.
pub(super) struct Parts<'a, St: Store> {
    pub(super) nodes: NodeSlice<'a>,
    pub(super) down: &'a mut St::Array<u32>,
    pub(super) free: FreeBits<'a>,
    pub(super) spares: Spares<'a>,
}

pub(super) struct NodeSlice<'a>(pub(super) &'a mut [Node]);

pub(super) struct FreeBits<'a>(&'a mut [u8]);

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
        (self.0[(slot / 8) as usize] >> (slot % 8)) & 1 != 0
    }

    #[inline(always)]
    pub(super) fn set(&mut self, slot: u32) {
        self.0[(slot / 8) as usize] |= 1 << (slot % 8);
    }

    #[inline(always)]
    pub(super) fn clear(&mut self, slot: u32) {
        self.0[(slot / 8) as usize] &= !(1 << (slot % 8));
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

/// The slot of the one run of a new map.
pub(super) const FIRST: u32 = OTHERS;

/// What the arrays of a map of one free run of `len` granules start with: nodes, third links, bits.
pub(super) const fn initial(len: u64) -> ([Node; 3], [u32; 3], [u8; 1]) {
    const fn node(len: u64, neighbour: u32) -> Node {
        Node {
            start: 0,
            len,
            prev: neighbour,
            next: neighbour,
            a: NONE,
            b: NONE,
        }
    }
    let nodes = [node(0, NONE), node(0, FIRST), node(len, EDGE)];
    (nodes, [NONE; 3], [1 << FIRST])
}

#[inline]
const fn outside(slot: u32) -> u32 {
    if slot == EDGE { NIL } else { slot }
}

impl<St: Store> Nodes<St> {
    /// Runs that the store has room for.
    pub(super) const RUNS_MAX: u32 = St::NODES_MAX - OTHERS;

    /// The map of one run, which is free, in arrays that hold what [`initial`] gives.
    pub(super) const fn new(
        nodes: St::Array<Node>,
        down: St::Array<u32>,
        free: St::Array<u8>,
    ) -> Self {
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
        Self::RUNS_MAX - self.count
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
    pub(super) fn parts_with_spare(&mut self) -> Parts<'_, St> {
        if self.vacant == NONE {
            self.grow();
        }
        self.parts()
    }

    #[inline(always)]
    pub(super) fn parts(&mut self) -> Parts<'_, St> {
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
        (self.free[(slot / 8) as usize] >> (slot % 8)) & 1 != 0
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
        let node = Node {
            next: self.vacant,
            b: Tag::Vacant.code(),
            ..self[NONE]
        };
        let mut pushed = self.nodes.push(node).is_ok() && self.down.push(NONE).is_ok();
        if slot.is_multiple_of(8) {
            pushed &= self.free.push(0).is_ok();
        }
        assert!(pushed, "there is room for a node");
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

impl<St: Store> core::ops::Index<u32> for Nodes<St> {
    type Output = Node;

    #[inline]
    fn index(&self, slot: u32) -> &Node {
        &self.nodes[slot as usize]
    }
}

impl<St: Store> core::ops::IndexMut<u32> for Nodes<St> {
    #[inline]
    fn index_mut(&mut self, slot: u32) -> &mut Node {
        &mut self.nodes[slot as usize]
    }
}
