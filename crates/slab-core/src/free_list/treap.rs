//! Index of free runs by address, for [`Placement::FirstFit`](crate::Placement::FirstFit).
//!
//! A treap over the address order in which every node knows the longest run below it, so the lowest
//! run that is long enough is found on one path from the root. A run that shrinks or grows keeps its
//! place, so most calls only correct the maxima on one path. Depth is O(log n) expected.

use alloc::vec::Vec;

use super::nodes::Nodes;
use crate::heap::Links;
use crate::slots::NIL;

#[derive(Debug)]
pub(crate) struct Treap {
    root: u32,
    /// By node slot.
    extra: Vec<Extra>,
    random: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct Extra {
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
fn left(nodes: &Nodes, slot: u32) -> u32 {
    nodes[slot].links.child
}
fn right(nodes: &Nodes, slot: u32) -> u32 {
    nodes[slot].links.next
}
fn parent(nodes: &Nodes, slot: u32) -> u32 {
    nodes[slot].links.prev
}

impl Treap {
    pub(crate) fn new(reserved: usize) -> Self {
        Self {
            root: NIL,
            extra: Vec::with_capacity(reserved),
            random: 0x9E37_79B9,
        }
    }

    pub(crate) fn insert(&mut self, nodes: &mut Nodes, slot: u32) {
        let index = slot as usize;
        if self.extra.len() <= index {
            self.extra.resize(index + 1, Extra::default());
        }
        self.extra[index].priority = self.next_random();
        nodes[slot].links = Links::NONE;

        let start = nodes[slot].start;
        let (mut above, mut side) = (NIL, Side::Left);
        let mut at = self.root;
        while at != NIL {
            above = at;
            (side, at) = if start < nodes[at].start {
                (Side::Left, left(nodes, at))
            } else {
                (Side::Right, right(nodes, at))
            };
        }
        self.attach(nodes, above, side, slot);
        self.correct(nodes, slot);
        while above != NIL && self.priority(above) < self.priority(slot) {
            self.rotate_up(nodes, slot);
            above = parent(nodes, slot);
        }
        self.correct_upwards(nodes, slot);
    }

    pub(crate) fn remove(&mut self, nodes: &mut Nodes, slot: u32) {
        let Links {
            child: mut low,
            next: mut high,
            prev,
        } = nodes[slot].links;
        let mut above = prev;
        let mut side = if above != NIL && left(nodes, above) == slot {
            Side::Left
        } else {
            Side::Right
        };
        // Zips the two subtrees together below the gap that `slot` leaves.
        loop {
            if low == NIL || high == NIL {
                let rest = if low == NIL { high } else { low };
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
        nodes[slot].links = Links::NONE;
        self.correct_upwards(nodes, above);
    }

    /// Corrects the maxima after the length of `slot` changed. Its place in the order did not.
    pub(crate) fn resized(&mut self, nodes: &Nodes, slot: u32) {
        self.correct_upwards(nodes, slot);
    }

    /// The lowest run of at least `need` granules.
    pub(crate) fn find(&self, nodes: &Nodes, need: u64) -> Option<u32> {
        if self.longest(self.root) < need {
            return None;
        }
        let mut at = self.root;
        loop {
            // Invariant: the subtree of `at` has such a run.
            if self.longest(left(nodes, at)) >= need {
                at = left(nodes, at);
            } else if nodes[at].len >= need {
                return Some(at);
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
        if slot == NIL {
            0
        } else {
            self.extra[slot as usize].longest
        }
    }

    fn priority(&self, slot: u32) -> u32 {
        self.extra[slot as usize].priority
    }

    /// Makes `child`, which may be none, the child of `above`, or the root.
    fn attach(&mut self, nodes: &mut Nodes, above: u32, side: Side, child: u32) {
        match (above, side) {
            (NIL, _) => self.root = child,
            (above, Side::Left) => nodes[above].links.child = child,
            (above, Side::Right) => nodes[above].links.next = child,
        }
        if child != NIL {
            nodes[child].links.prev = above;
        }
    }

    fn rotate_up(&mut self, nodes: &mut Nodes, slot: u32) {
        let above = parent(nodes, slot);
        let top = parent(nodes, above);
        let top_side = if top != NIL && left(nodes, top) == above {
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

    fn correct(&mut self, nodes: &Nodes, slot: u32) {
        self.extra[slot as usize].longest = nodes[slot]
            .len
            .max(self.longest(left(nodes, slot)))
            .max(self.longest(right(nodes, slot)));
    }

    fn correct_upwards(&mut self, nodes: &Nodes, slot: u32) {
        let mut at = slot;
        while at != NIL {
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
