//! Index of free runs by address, for [`Placement::FirstFit`](crate::Placement::FirstFit).
//!
//! A treap over the address order in which every node knows the longest run below it, so the lowest
//! run that is long enough is found on one path from the root. A run that shrinks or grows keeps its
//! place, so most calls only correct the maxima on one path. Depth is O(log n) expected.

use super::nodes::{FIRST, NONE, Node, Nodes, Tag};
use crate::slots::NIL;
use crate::store::{Array, Store};
use crate::twin::{Twin, is_left_out};

pub(crate) struct Treap<St: Store> {
    root: u32,
    /// By node slot.
    extra: St::Array<Extra>,
    random: u32,
}

#[derive(Clone, Copy, Default)]
pub(super) struct Extra {
    /// Longest run in the subtree.
    longest: u64,
    priority: u32,
}

#[derive(Clone, Copy)]
enum Side {
    Left,
    Right,
}

// The three links of a node, read as a binary tree.
fn left<St: Store>(nodes: &Nodes<St>, slot: u32) -> u32 {
    nodes[slot].a
}
fn right<St: Store>(nodes: &Nodes<St>, slot: u32) -> u32 {
    nodes[slot].b
}
fn parent<St: Store>(nodes: &Nodes<St>, slot: u32) -> u32 {
    nodes.down(slot)
}

/// What the array of an index of one free run of `len` granules starts with.
pub(super) const fn initial(len: u64) -> [Extra; 3] {
    const OTHER: Extra = Extra {
        longest: 0,
        priority: 0,
    };
    let first = Extra {
        longest: len,
        priority: 0,
    };
    [OTHER, OTHER, first]
}

impl<St: Store> Treap<St> {
    /// The index of a map with one free run, in an array that holds what [`initial`] gives.
    pub(super) const fn new(extra: St::Array<Extra>) -> Self {
        Self {
            root: FIRST,
            extra,
            random: 0x9E37_79B9,
        }
    }

    /// Files a run that is not in the tree.
    pub(crate) fn insert(&mut self, nodes: &mut Nodes<St>, slot: u32) {
        let index = slot as usize;
        while self.extra.len() <= index {
            let pushed = self.extra.push(Extra::default());
            assert!(pushed.is_ok(), "a slot of the map has its place here");
        }
        self.extra[index].priority = self.next_random();
        nodes[slot].a = NONE;
        nodes[slot].b = NONE;

        let start = nodes[slot].start;
        let (mut above, mut side) = (NONE, Side::Left);
        let mut at = self.root;
        while at != NONE {
            above = at;
            (side, at) = if start < nodes[at].start {
                (Side::Left, left(nodes, at))
            } else {
                (Side::Right, right(nodes, at))
            };
        }
        nodes.set_down(slot, NONE);
        self.attach(nodes, above, side, slot);
        self.correct(nodes, slot);
        while above != NONE && self.priority(above) < self.priority(slot) {
            self.rotate_up(nodes, slot);
            above = parent(nodes, slot);
        }
        self.correct_upwards(nodes, slot);
    }

    /// Takes a run out of the tree.
    pub(crate) fn remove(&mut self, nodes: &mut Nodes<St>, slot: u32) {
        let Node {
            a: mut low,
            b: mut high,
            ..
        } = nodes[slot];
        let mut above = parent(nodes, slot);
        let mut side = if above != NONE && left(nodes, above) == slot {
            Side::Left
        } else {
            Side::Right
        };
        // Zips the two subtrees together below the gap that `slot` leaves.
        loop {
            if low == NONE || high == NONE {
                let rest = if low == NONE { high } else { low };
                self.attach(nodes, above, side, rest);
                break;
            }
            let top = if self.priority(low) > self.priority(high) {
                low
            } else {
                high
            };
            self.attach(nodes, above, side, top);
            above = top;
            if top == low {
                side = Side::Right;
                low = right(nodes, low);
            } else {
                side = Side::Left;
                high = left(nodes, high);
            }
        }
        self.correct_upwards(nodes, above);
    }

    /// Makes the lowest `need` granules that are free in a row the caller's. Returns their slot and first
    /// granule; [`NONE`] if no free run is long enough or one more run cannot be numbered.
    pub(crate) fn take(&mut self, nodes: &mut Nodes<St>, need: u64) -> (u32, u64) {
        match self.find(nodes, need) {
            NONE => (NONE, 0),
            slot => self.cut(nodes, slot, need),
        }
    }

    /// Makes the low `need` granules of the free run at `slot` the caller's.
    pub(crate) fn cut(&mut self, nodes: &mut Nodes<St>, slot: u32, need: u64) -> (u32, u64) {
        let Node { start, len, .. } = nodes[slot];
        let taken = if len == need {
            self.remove(nodes, slot);
            nodes.clear_free(slot);
            slot
        } else {
            if nodes.room() == 0 {
                return (NONE, 0);
            }
            let taken = nodes.insert_before(slot, start, need);
            // What shrinks or grows keeps its place among the others; only the maxima change.
            let rest = &mut nodes[slot];
            rest.start += need;
            rest.len -= need;
            self.correct_upwards(nodes, slot);
            taken
        };
        nodes.own(taken, Tag::Caller, NIL);
        (taken, start)
    }

    /// Makes the live run at `slot` free and merges it with its free neighbours. Returns the slot of the
    /// result: that of the free run below, else of the free run above, else its own.
    pub(crate) fn give(&mut self, nodes: &mut Nodes<St>, slot: u32) -> u32 {
        let Node {
            start,
            len,
            prev,
            next,
            ..
        } = nodes[slot];
        let is_above = nodes.is_free(next) && !is_left_out(Twin::MergeAbove);
        if nodes.is_free(prev) {
            let mut grown = len;
            if is_above {
                grown += nodes[next].len;
                self.remove(nodes, next);
                nodes.clear_free(next);
                nodes.unlink(next);
            }
            nodes.unlink(slot);
            nodes[prev].len += grown;
            self.correct_upwards(nodes, prev);
            return prev;
        }
        if is_above {
            let node = &mut nodes[next];
            node.start = start;
            node.len += len;
            nodes.unlink(slot);
            self.correct_upwards(nodes, next);
            return next;
        }
        nodes.set_free(slot);
        self.insert(nodes, slot);
        slot
    }

    /// The lowest run of at least `need` granules.
    ///
    /// [`NONE`] if there is none.
    fn find(&self, nodes: &Nodes<St>, need: u64) -> u32 {
        if self.longest(self.root) < need {
            return NONE;
        }
        let mut at = self.root;
        loop {
            // Invariant: the subtree of `at` has such a run.
            if self.longest(left(nodes, at)) >= need {
                at = left(nodes, at);
            } else if nodes[at].len >= need {
                return at;
            } else {
                at = right(nodes, at);
            }
        }
    }

    /// Length of the longest free run, zero if there is none.
    pub(crate) fn largest(&self) -> u64 {
        self.longest(self.root)
    }

    fn longest(&self, slot: u32) -> u64 {
        if slot == NONE {
            0
        } else {
            self.extra[slot as usize].longest
        }
    }

    fn priority(&self, slot: u32) -> u32 {
        self.extra[slot as usize].priority
    }

    /// Makes `child`, which may be none, the child of `above`, or the root.
    fn attach(&mut self, nodes: &mut Nodes<St>, above: u32, side: Side, child: u32) {
        match (above, side) {
            (NONE, _) => self.root = child,
            (above, Side::Left) => nodes[above].a = child,
            (above, Side::Right) => nodes[above].b = child,
        }
        if child != NONE {
            nodes.set_down(child, above);
        }
    }

    fn rotate_up(&mut self, nodes: &mut Nodes<St>, slot: u32) {
        let above = parent(nodes, slot);
        let top = parent(nodes, above);
        let top_side = if top != NONE && left(nodes, top) == above {
            Side::Left
        } else {
            Side::Right
        };
        if left(nodes, above) == slot {
            let between = right(nodes, slot);
            self.attach(nodes, above, Side::Left, between);
            self.attach(nodes, slot, Side::Right, above);
        } else {
            let between = left(nodes, slot);
            self.attach(nodes, above, Side::Right, between);
            self.attach(nodes, slot, Side::Left, above);
        }
        self.attach(nodes, top, top_side, slot);
        self.correct(nodes, above);
        self.correct(nodes, slot);
    }

    fn correct(&mut self, nodes: &Nodes<St>, slot: u32) {
        self.extra[slot as usize].longest = nodes[slot]
            .len
            .max(self.longest(left(nodes, slot)))
            .max(self.longest(right(nodes, slot)));
    }

    fn correct_upwards(&mut self, nodes: &Nodes<St>, slot: u32) {
        let mut at = slot;
        while at != NONE {
            self.correct(nodes, at);
            at = parent(nodes, at);
        }
    }

    /// Xorshift: priorities need spread, not secrecy.
    fn next_random(&mut self) -> u32 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 17;
        self.random ^= self.random << 5;
        self.random
    }
}
