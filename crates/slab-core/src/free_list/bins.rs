//! Index of free runs by size class, for [`Placement::BestFit`](crate::Placement::BestFit).
//!
//! A class is a power of two and the next five bits of the length, so it is at most 1/32 wide; below
//! 64 granules it is one exact length. Exact classes are lists (every member fits as well as any other);
//! wider classes are pairing heaps with the longest run on top, so one look at the root says whether
//! the class that contains the request has a run for it. That is what makes the search complete without
//! a scan: only the root of one class, and then any member of the next class that is not empty.

use alloc::vec;
use alloc::vec::Vec;

use super::nodes::Nodes;
use crate::heap;
use crate::heap::Links;
use crate::slots::NIL;

/// Lengths from here on share a class with others.
const EXACT_BELOW: usize = 64;
/// Class of `u64::MAX` granules is 1919.
const CLASSES_MAX: usize = 1920;
const WORDS: usize = CLASSES_MAX / 64;
/// Members of a class among which the lowest address is taken.
const EXAMINED_MAX: u32 = 8;

#[derive(Debug)]
pub(crate) struct Bins {
    /// First member (list) or root (heap) of each class, up to the class of the capacity.
    heads: Vec<u32>,
    /// Bit `c % 64` of word `c / 64`: class `c` has members.
    words: [u64; WORDS],
    /// Bit `w`: word `w` is not zero.
    summary: u32,
}

#[inline]
const fn class_of(len: u64) -> usize {
    if len < 32 {
        return len as usize;
    }
    let log2 = 63 - len.leading_zeros();
    let mantissa = (len >> (log2 - 5)) & 31;
    ((log2 - 4) as usize) * 32 + mantissa as usize
}

impl Bins {
    pub(crate) fn new(capacity: u64) -> Self {
        Self {
            heads: vec![NIL; class_of(capacity) + 1],
            words: [0; WORDS],
            summary: 0,
        }
    }

    pub(crate) fn insert(&mut self, nodes: &mut Nodes, slot: u32) {
        let class = class_of(nodes[slot].len);
        let head = self.heads[class];
        if class < EXACT_BELOW {
            nodes[slot].links = Links {
                child: NIL,
                next: head,
                prev: NIL,
            };
            if head != NIL {
                nodes[head].links.prev = slot;
            }
            self.heads[class] = slot;
        } else {
            self.heads[class] = heap::push(nodes, head, slot);
        }
        if head == NIL {
            self.words[class / 64] |= 1 << (class % 64);
            self.summary |= 1 << (class / 64);
        }
    }

    pub(crate) fn remove(&mut self, nodes: &mut Nodes, slot: u32) {
        self.remove_from(nodes, slot, class_of(nodes[slot].len));
    }

    /// Files `slot` anew after its length changed from `was`.
    pub(crate) fn resized(&mut self, nodes: &mut Nodes, slot: u32, was: u64) {
        let node = &nodes[slot];
        let class = class_of(was);
        // A leaf may shrink and the root may grow where they stand.
        let stays = if node.len <= was {
            node.links.child == NIL
        } else {
            node.links.prev == NIL
        };
        if class == class_of(node.len) && stays {
            return;
        }
        self.remove_from(nodes, slot, class);
        self.insert(nodes, slot);
    }

    /// The run to cut `need` granules from. `None` only if no free run is long enough.
    pub(crate) fn find(&self, nodes: &Nodes, need: u64) -> Option<u32> {
        let class = class_of(need);
        let head = *self.heads.get(class)?;
        if head != NIL && nodes[head].len >= need {
            return Some(lowest(nodes, class, head, need));
        }
        let class = self.next_class(class + 1)?;
        Some(lowest(nodes, class, self.heads[class], need))
    }

    /// Length of the longest free run, zero if there is none.
    pub(crate) fn largest(&self, nodes: &Nodes) -> u64 {
        let Some(word) = self.summary.checked_ilog2() else {
            return 0;
        };
        let class = word as usize * 64 + self.words[word as usize].ilog2() as usize;
        // The head of a list and the root of a heap are both as long as their class gets.
        nodes[self.heads[class]].len
    }

    fn remove_from(&mut self, nodes: &mut Nodes, slot: u32, class: usize) {
        let head = self.heads[class];
        if class < EXACT_BELOW {
            let Links { next, prev, .. } = nodes[slot].links;
            match prev {
                NIL => self.heads[class] = next,
                prev => nodes[prev].links.next = next,
            }
            if next != NIL {
                nodes[next].links.prev = prev;
            }
        } else {
            self.heads[class] = heap::remove(nodes, head, slot);
        }
        if self.heads[class] == NIL {
            let word = &mut self.words[class / 64];
            *word &= !(1 << (class % 64));
            if *word == 0 {
                self.summary &= !(1 << (class / 64));
            }
        }
    }

    /// The first class from `from` on that has members.
    #[inline]
    fn next_class(&self, from: usize) -> Option<usize> {
        let word = from / 64;
        if word >= WORDS {
            return None;
        }
        let here = self.words[word] & (u64::MAX << (from % 64));
        if here != 0 {
            return Some(word * 64 + here.trailing_zeros() as usize);
        }
        let above = u64::from(self.summary) & (u64::MAX << (word + 1));
        if above == 0 {
            return None;
        }
        let word = above.trailing_zeros() as usize;
        Some(word * 64 + self.words[word].trailing_zeros() as usize)
    }
}

/// The lowest address among the first members of a class that are long enough; `head` is.
#[inline]
fn lowest(nodes: &Nodes, class: usize, head: u32, need: u64) -> u32 {
    let mut best = head;
    let links = nodes[head].links;
    let mut member = if class < EXACT_BELOW {
        links.next
    } else {
        links.child
    };
    let mut examined = 1;
    while member != NIL && examined < EXAMINED_MAX {
        let node = &nodes[member];
        if node.len >= need && node.start < nodes[best].start {
            best = member;
        }
        member = node.links.next;
        examined += 1;
    }
    best
}

#[cfg(test)]
mod tests {
    use super::{CLASSES_MAX, EXACT_BELOW, class_of};

    #[test]
    fn classes_are_ordered_and_at_most_a_32nd_wide() {
        let mut last = class_of(1);
        let mut first_of_class = 1u64;
        for len in 2..100_000u64 {
            let class = class_of(len);
            assert!(class == last || class == last + 1, "length {len}");
            if class == last {
                assert!((len - first_of_class) * 32 < first_of_class, "length {len}");
            } else {
                first_of_class = len;
            }
            last = class;
        }
        assert_eq!(class_of(u64::MAX), CLASSES_MAX - 1);
    }

    #[test]
    fn short_lengths_have_a_class_of_their_own() {
        for len in 1..EXACT_BELOW as u64 {
            assert_eq!(class_of(len), len as usize);
        }
        assert_eq!(class_of(64), class_of(65));
    }
}
