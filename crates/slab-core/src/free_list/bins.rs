//! Index of free runs by size class, for [`Placement::BestFit`](crate::Placement::BestFit).
//!
//! A class is a power of two and the next six bits of the length, so it is at most 1/64 wide; below 128
//! granules it is one exact length. Its members are a chain of which the first is the longest. That is
//! what makes the search complete without a scan: one look at the first member says whether the class that
//! contains the request has a run for it, and any member of a higher class will do.
//!
//! A request below an eighth of the running mean sees one run each of a few classes up to a half longer,
//! and takes the lowest: small regions then gather at the low end and leave the large holes whole, which
//! keeps more of the slab in use than the tightest fit (`docs/FIGURES.md`).
//!
//! A chain is a pairing heap in disguise (Fredman, Sedgewick, Sleator, Tarjan, "The pairing heap", 1986):
//! the first member is the root and the others are its children, who may have children of their own along
//! `down`; heads mark the classes where any does. Filing a run costs O(1); taking any run out costs O(log
//! runs of its class) amortised, and O(1) from a class of one length, or without such children unless it
//! is the first of three. Links in a node: `a` the previous member (or, of a first child below the chain,
//! the parent), `b` the next, `down` the first child; a root has no `down`, since its children are the
//! chain.

use core::mem;
use core::ops::DerefMut;

use super::nodes::{NONE, Node, NodeSlice, Nodes, Parts, Tag};
use crate::slots::NIL;
use crate::store::Store;
use crate::twin::{Twin, is_left_out};

/// Binary logarithm of the classes in one power of two.
const CLASS_BITS: u32 = 6;
/// Lengths from here on share a class with others.
const EXACT_BELOW: u64 = 2 << CLASS_BITS;
/// Class of `u64::MAX` granules is 3775, in word 58.
const WORDS: usize = 64;

/// In a head: members of the class have children along `down`.
const DEEP: u32 = 1 << 31;

pub(crate) struct Bins<St: Store> {
    /// First member of each class, up to the class of the capacity.
    heads: St::Heads,
    /// Bit `c % 64` of word `c / 64`: class `c` has members.
    words: [u64; WORDS],
    /// Bit `w`: word `w` may be other than zero. A bit is cleared when a search finds it wrong.
    summary: u64,
    /// Running mean of the lengths taken, times [`MEAN_OF`].
    mean: u64,
}

/// Lengths that the running mean looks back on, about.
const MEAN_OF: u64 = 256;
/// Longer ones count as this, so that the mean times [`MEAN_OF`] cannot overflow.
const COUNTED_MAX: u64 = 1 << 54;
/// Classes of which a small request sees a member at most.
const CLASSES_SEEN_MAX: usize = 8;

#[inline(always)]
pub(super) const fn class_of(len: u64) -> usize {
    let shift = (u64::BITS - 1 - CLASS_BITS) - (len | (EXACT_BELOW - 1)).leading_zeros();
    ((shift as usize) << CLASS_BITS) + (len >> shift) as usize
}

impl<St: Store> Bins<St> {
    /// The index of a map whose one free run has `len` granules. `heads` holds its slot for the class of that
    /// length and [`NONE`] for those below.
    pub(super) const fn new(heads: St::Heads, len: u64) -> Self {
        let class = class_of(len);
        let mut words = [0; WORDS];
        words[class / 64] = 1 << (class % 64);
        Self {
            heads,
            words,
            summary: 1 << (class / 64),
            mean: 0,
        }
    }

    /// Files a run that is in no chain.
    pub(crate) fn insert(&mut self, nodes: &mut Nodes<St>, slot: u32) {
        let mut nodes = nodes.parts().nodes;
        let len = nodes[slot].len;
        self.slices().insert(&mut nodes, slot, len);
    }

    /// Takes a run out of its chain.
    pub(crate) fn remove(&mut self, nodes: &mut Nodes<St>, slot: u32) {
        let Parts {
            mut nodes, down, ..
        } = nodes.parts();
        let class = class_of(nodes[slot].len);
        self.slices().remove(&mut nodes, down, slot, class);
    }

    /// Makes `need` granules the caller's, cut from the low end of a free run. Returns their slot and first
    /// granule; [`NONE`] if no free run is long enough or one more run cannot be numbered.
    #[inline(always)]
    pub(crate) fn take(&mut self, nodes: &mut Nodes<St>, need: u64) -> (u32, u64) {
        let parts = nodes.parts_with_spare();
        let is_small = need < self.mean / (8 * MEAN_OF);
        self.count(need);
        let mut bins = self.slices();
        let own = class_of(need);
        let mut class = bins.next_class(own);
        let mut head = bins.head(class);
        let mut slot = head;
        if class != own || (need >= EXACT_BELOW && parts.nodes[head].len < need) {
            if class == own {
                class = bins.next_class(own + 1);
                head = bins.head(class);
            }
            if head == NONE {
                return (NONE, 0);
            }
            slot = one_of(&parts.nodes, head);
        }
        if is_small {
            slot = bins.lowest_within_a_half(&parts.nodes, slot, need);
        }
        bins.cut(parts, slot, need)
    }

    /// Counts a request in the running mean.
    #[inline(always)]
    pub(crate) fn count(&mut self, need: u64) {
        self.mean = self.mean - self.mean / MEAN_OF + need.min(COUNTED_MAX);
    }

    /// Makes the low `need` granules of the free run at `slot` the caller's.
    pub(crate) fn cut(&mut self, nodes: &mut Nodes<St>, slot: u32, need: u64) -> (u32, u64) {
        let parts = nodes.parts_with_spare();
        self.slices().cut(parts, slot, need)
    }

    /// Makes the live run at `slot` free and merges it with its free neighbours. Returns the slot of the
    /// result: that of the free run below, else of the free run above, else its own.
    #[inline(always)]
    pub(crate) fn give(&mut self, nodes: &mut Nodes<St>, slot: u32) -> u32 {
        let Parts {
            mut nodes,
            down,
            mut free,
            mut spares,
        } = nodes.parts();
        let mut bins = self.slices();
        let Node {
            start,
            mut len,
            prev,
            mut next,
            ..
        } = nodes[slot];
        let is_above = free.get(next) && !is_left_out(Twin::MergeAbove);
        let kept;
        if free.get(prev) {
            kept = prev;
            if is_above {
                let Node {
                    len: len_above,
                    next: beyond,
                    ..
                } = nodes[next];
                bins.remove(&mut nodes, down, next, class_of(len_above));
                free.clear(next);
                spares.push(&mut nodes, next);
                len += len_above;
                next = beyond;
            }
            nodes[prev].next = next;
            nodes[next].prev = prev;
        } else if is_above {
            kept = next;
            nodes[prev].next = next;
            let above = &mut nodes[next];
            above.prev = prev;
            above.start = start;
        } else {
            free.set(slot);
            bins.insert(&mut nodes, slot, len);
            return slot;
        }
        spares.push(&mut nodes, slot);
        let len = nodes[kept].len + len;
        bins.resize(&mut nodes, down, kept, len);
        kept
    }

    #[inline(always)]
    fn slices(&mut self) -> Slices<'_> {
        Slices {
            heads: &mut self.heads,
            words: &mut self.words,
            summary: &mut self.summary,
        }
    }

    /// Length of the longest free run, zero if there is none.
    pub(crate) fn largest(&self, nodes: &Nodes<St>) -> u64 {
        let mut words = self.summary;
        while let Some(word) = words.checked_ilog2() {
            if let Some(bit) = self.words[word as usize].checked_ilog2() {
                let class = word as usize * 64 + bit as usize;
                return nodes[self.heads[class] & !DEEP].len;
            }
            words ^= 1 << word;
        }
        0
    }
}

/// The parts of the bins: what the compiler need not read again after every write.
struct Slices<'a> {
    heads: &'a mut [u32],
    words: &'a mut [u64; WORDS],
    summary: &'a mut u64,
}

impl Slices<'_> {
    #[inline(always)]
    fn insert(&mut self, nodes: &mut NodeSlice<'_>, slot: u32, len: u64) {
        let class = class_of(len);
        let entry = &mut self.heads[class];
        if *entry == NONE {
            *entry = slot;
            let node = &mut nodes[slot];
            node.a = NONE;
            node.b = NONE;
            let word = (class / 64) % WORDS;
            self.words[word] |= 1 << (class % 64);
            *self.summary |= 1 << word;
            return;
        }
        let head = *entry & !DEEP;
        let Node {
            len: longest,
            b: second,
            ..
        } = nodes[head];
        // First if it is the longest, else second.
        let is_first = len >= longest;
        let prev = if is_first { NONE } else { head };
        let next = if is_first { head } else { second };
        *entry ^= if is_first { head ^ slot } else { 0 };
        let node = &mut nodes[slot];
        node.a = prev;
        node.b = next;
        nodes[next].a = slot;
        nodes[prev].b = slot;
    }

    #[inline(always)]
    fn remove<D: DerefMut<Target = [u32]>>(
        &mut self,
        nodes: &mut NodeSlice<'_>,
        down: &mut D,
        slot: u32,
        class: usize,
    ) {
        let Node {
            a: prev, b: next, ..
        } = nodes[slot];
        let entry = &mut self.heads[class];
        if prev | next == NONE {
            *entry = NONE;
            self.words[(class / 64) % WORDS] &= !(1 << (class % 64));
            return;
        }
        let is_first = prev == NONE;
        let has_third = (next != NONE) & (nodes[next].b != NONE);
        if (*entry >= DEEP) | (is_first & has_third & (class >= EXACT_BELOW as usize)) {
            return remove_from_heap(entry, NodeSlice(nodes.0), down, slot);
        }
        *entry = if is_first { next } else { *entry };
        nodes[next].a = prev;
        nodes[prev].b = next;
    }

    /// Files a free run anew whose length changes.
    #[inline(always)]
    fn resize<D: DerefMut<Target = [u32]>>(
        &mut self,
        nodes: &mut NodeSlice<'_>,
        down: &mut D,
        slot: u32,
        len: u64,
    ) {
        let node = &mut nodes[slot];
        let class = class_of(node.len);
        node.len = len;
        if class != class_of(len) || node.a | node.b != NONE {
            self.remove(nodes, down, slot, class);
            self.insert(nodes, slot, len);
        }
    }

    #[inline(always)]
    fn cut<St: Store>(&mut self, parts: Parts<'_, St>, slot: u32, need: u64) -> (u32, u64) {
        let Parts {
            mut nodes,
            down,
            mut free,
            mut spares,
        } = parts;
        let Node {
            start, len, prev, ..
        } = nodes[slot];
        if len == need {
            self.remove(&mut nodes, down, slot, class_of(len));
            free.clear(slot);
            let node = &mut nodes[slot];
            node.a = NIL;
            node.b = Tag::Caller.code();
            return (slot, start);
        }
        let taken = spares.pop(&nodes);
        if taken != NONE {
            nodes[taken] = Node {
                start,
                len: need,
                prev,
                next: slot,
                a: NIL,
                b: Tag::Caller.code(),
            };
            nodes[prev].next = taken;
            let rest = &mut nodes[slot];
            rest.start = start + need;
            rest.prev = taken;
            self.resize(&mut nodes, down, slot, len - need);
        }
        (taken, start)
    }

    /// The first class from `from` on that has members, or one that does not exist.
    #[inline(always)]
    fn next_class(&mut self, from: usize) -> usize {
        let word = (from / 64) % WORDS;
        let here = self.words[word] & (u64::MAX << (from % 64));
        if here != 0 {
            return word * 64 + here.trailing_zeros() as usize;
        }
        loop {
            let above = *self.summary & (u64::MAX << word) & !(1 << word);
            if above == 0 {
                return usize::MAX;
            }
            let word = above.trailing_zeros() as usize;
            let bits = self.words[word % WORDS];
            if bits != 0 {
                return word * 64 + bits.trailing_zeros() as usize;
            }
            *self.summary ^= 1 << word;
        }
    }

    /// The lowest of `slot` and one run each of the next classes that hold runs up to a half longer than
    /// `need`.
    #[inline(never)]
    fn lowest_within_a_half(&self, nodes: &NodeSlice<'_>, slot: u32, need: u64) -> u32 {
        let class = class_of(nodes[slot].len) + 1;
        let last = class_of(need + need / 2);
        // Bit `i`: class `class + i` has members. A half is at most 48 classes.
        let (word, shift) = (class / 64, class % 64);
        let above = self.words[(word + 1) % WORDS] << 1 << (63 - shift);
        let mut members = self.words[word % WORDS] >> shift | above;
        members &= !(u64::MAX << (last + 1).saturating_sub(class).min(63));
        let mut lowest = slot;
        for _ in 1..CLASSES_SEEN_MAX {
            if members == 0 {
                break;
            }
            let other = one_of(nodes, self.head(class + members.trailing_zeros() as usize));
            if nodes[other].start < nodes[lowest].start {
                lowest = other;
            }
            members &= members - 1;
        }
        lowest
    }

    #[inline(always)]
    fn head(&self, class: usize) -> u32 {
        self.heads.get(class).copied().unwrap_or(NONE) & !DEEP
    }
}

/// A member of the class with this first member, all of which are long enough: rather the second than the
/// first, which would have to be replaced by the longest of the others.
#[inline(always)]
fn one_of(nodes: &NodeSlice<'_>, head: u32) -> u32 {
    let Node { len, b: second, .. } = nodes[head];
    if (len >= EXACT_BELOW) & (second != NONE) {
        second
    } else {
        head
    }
}

/// Takes a run out of the chain with this head: not the only one, of a chain some of whose members have
/// children, or the first of three or more.
#[cold]
#[inline(never)]
fn remove_from_heap<D: DerefMut<Target = [u32]>>(
    head: &mut u32,
    mut nodes: NodeSlice<'_>,
    down: &mut D,
    slot: u32,
) {
    // Not a slice from the caller: it would be read from the array there, on the way to what is not cold.
    let nodes = &mut nodes;
    let Node {
        a: prev, b: next, ..
    } = nodes[slot];
    let root = *head & !DEEP;
    if slot == root {
        let root = merge_siblings(nodes, down, next);
        let first = mem::replace(&mut down[root as usize], NONE);
        nodes[root].a = NONE;
        nodes[root].b = first;
        *head = root | DEEP;
        return;
    }
    if down[prev as usize] == slot {
        down[prev as usize] = next;
    } else {
        nodes[prev].b = next;
    }
    nodes[next].a = prev;
    let orphans = mem::replace(&mut down[slot as usize], NONE);
    if orphans != NONE {
        let child = merge_siblings(nodes, down, orphans);
        let second = nodes[root].b;
        nodes[child].a = root;
        nodes[child].b = second;
        nodes[second].a = child;
        nodes[root].b = child;
    }
}

/// Makes one heap of a chain of siblings, which is not empty, and returns its root with children along
/// `down`: pairs from the first to the last, then folds from the last to the first.
fn merge_siblings(nodes: &mut NodeSlice<'_>, down: &mut [u32], first: u32) -> u32 {
    let mut pairs = NONE;
    let mut rest = first;
    while rest != NONE {
        let one = rest;
        let other = nodes[one].b;
        rest = NONE;
        let mut pair = one;
        if other != NONE {
            rest = nodes[other].b;
            pair = meld(nodes, down, one, other);
        }
        nodes[pair].b = pairs;
        pairs = pair;
    }
    let mut root = pairs;
    pairs = nodes[root].b;
    while pairs != NONE {
        let pair = pairs;
        pairs = nodes[pair].b;
        root = meld(nodes, down, root, pair);
    }
    root
}

/// Makes the shorter of two roots the first child of the other.
fn meld(nodes: &mut NodeSlice<'_>, down: &mut [u32], one: u32, other: u32) -> u32 {
    let (top, below) = if nodes[one].len >= nodes[other].len {
        (one, other)
    } else {
        (other, one)
    };
    let first = down[top as usize];
    nodes[below].a = top;
    nodes[below].b = first;
    nodes[first].a = below;
    down[top as usize] = below;
    top
}

#[cfg(test)]
mod tests {
    use super::{Bins, EXACT_BELOW, WORDS, class_of};
    use crate::free_list::nodes::{FIRST, Nodes, initial};
    use crate::store::Heap;
    use alloc::vec;
    use alloc::vec::Vec;

    #[test]
    fn classes_are_ordered_and_at_most_a_64th_wide() {
        let mut last = class_of(1);
        let mut first_of_class = 1u64;
        // An interpreter takes minutes for as many, here and below.
        for len in 2..if cfg!(miri) { 5_000 } else { 100_000u64 } {
            let class = class_of(len);
            assert!(class == last || class == last + 1, "length {len}");
            if class == last {
                assert!((len - first_of_class) * 64 < first_of_class, "length {len}");
            } else {
                first_of_class = len;
            }
            last = class;
        }
        assert!(class_of(u64::MAX) < WORDS * 64);
    }

    #[test]
    fn short_lengths_have_a_class_of_their_own() {
        for len in 1..EXACT_BELOW {
            assert_eq!(class_of(len), len as usize);
        }
        assert_eq!(class_of(EXACT_BELOW), class_of(EXACT_BELOW + 1));
    }

    /// Runs that all share one class or two: taking out the first, the last and those between, with and
    /// without children, must leave the longest where it is found.
    #[test]
    fn the_longest_of_a_crowded_class_is_found_after_any_removals() {
        let lens = |i: u64| 4096 + (i * 37) % 101;
        let (node, down, free) = initial(1 << 20);
        let mut nodes = Nodes::<Heap>::new(node.into(), down.into(), free.into());
        let mut heads = vec![0; class_of(1 << 20) + 1];
        heads[class_of(1 << 20)] = FIRST;
        let mut bins = Bins::new(heads, 1 << 20);
        bins.remove(&mut nodes, FIRST);
        let mut filed: Vec<(u32, u64)> = Vec::new();
        let mut random = 1u64;
        for i in 0..if cfg!(miri) { 400 } else { 6000 } {
            random = random.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(99);
            let fills = (i / 150) % 2 == 0;
            if filed.is_empty() || (random >> 33) % 4 < if fills { 3 } else { 1 } {
                let slot = nodes.insert_after(FIRST, 0, lens(i));
                bins.insert(&mut nodes, slot);
                filed.push((slot, lens(i)));
            } else {
                let pick = match (random >> 40) % 3 {
                    // The longest is the root.
                    0 => (0..filed.len()).max_by_key(|k| filed[*k].1),
                    1 => Some(filed.len() - 1),
                    _ => Some((random >> 45) as usize % filed.len()),
                };
                let (slot, _) = filed.swap_remove(pick.expect("not empty"));
                bins.remove(&mut nodes, slot);
                nodes.unlink(slot);
            }
            let longest = filed.iter().map(|(_, len)| *len).max();
            assert_eq!(bins.largest(&nodes), longest.unwrap_or(0));
        }
    }
}
