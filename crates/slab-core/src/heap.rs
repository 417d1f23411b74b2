//! Pairing heap over links that live in the caller's slots.
//!
//! A heap is the index of its root, [`NIL`] when empty. Three indices a node make insertion O(1) and
//! removal of *any* node O(log n) amortised (Fredman, Sedgewick, Sleator, Tarjan, "The pairing heap",
//! 1986), without memory of its own and without recursion.

use crate::slots::NIL;

/// Place of one node in a heap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Links {
    /// First child.
    pub(crate) child: u32,
    /// Next sibling.
    pub(crate) next: u32,
    /// Previous sibling, or the parent for a first child, or [`NIL`] for the root.
    pub(crate) prev: u32,
}

impl Links {
    pub(crate) const NONE: Self = Self {
        child: NIL,
        next: NIL,
        prev: NIL,
    };
}

/// Nodes that can be linked into heaps.
pub(crate) trait Linked {
    fn links(&self, index: u32) -> Links;
    fn links_mut(&mut self, index: u32) -> &mut Links;
    /// Whether `a` may stand above `b`. Total on the values compared.
    fn stands_above(&self, a: u32, b: u32) -> bool;
}

/// Adds `item`, which is in no heap, and returns the new root. O(1).
pub(crate) fn push<N: Linked + ?Sized>(nodes: &mut N, root: u32, item: u32) -> u32 {
    *nodes.links_mut(item) = Links::NONE;
    if root == NIL {
        item
    } else {
        meld(nodes, root, item)
    }
}

/// Removes `item`, which is in the heap of `root`, and returns the new root. O(log n) amortised.
pub(crate) fn remove<N: Linked + ?Sized>(nodes: &mut N, root: u32, item: u32) -> u32 {
    let links = nodes.links(item);
    *nodes.links_mut(item) = Links::NONE;
    if item == root {
        return merge_children(nodes, links.child);
    }
    // `prev` is the parent exactly when its first child is `item`: a sibling's child cannot be.
    if nodes.links(links.prev).child == item {
        nodes.links_mut(links.prev).child = links.next;
    } else {
        nodes.links_mut(links.prev).next = links.next;
    }
    if links.next != NIL {
        nodes.links_mut(links.next).prev = links.prev;
    }
    match merge_children(nodes, links.child) {
        NIL => root,
        orphan => meld(nodes, root, orphan),
    }
}

/// Makes one heap of two roots.
fn meld<N: Linked + ?Sized>(nodes: &mut N, a: u32, b: u32) -> u32 {
    let (top, below) = if nodes.stands_above(a, b) {
        (a, b)
    } else {
        (b, a)
    };
    let first = nodes.links(top).child;
    let links = nodes.links_mut(below);
    links.next = first;
    links.prev = top;
    if first != NIL {
        nodes.links_mut(first).prev = below;
    }
    nodes.links_mut(top).child = below;
    top
}

/// Makes one heap of a chain of siblings: pairs from left to right, then folds from right to left.
fn merge_children<N: Linked + ?Sized>(nodes: &mut N, first: u32) -> u32 {
    let mut pairs = NIL;
    let mut rest = first;
    while rest != NIL {
        let a = rest;
        let b = nodes.links(a).next;
        rest = NIL;
        detach(nodes, a);
        let mut pair = a;
        if b != NIL {
            rest = nodes.links(b).next;
            detach(nodes, b);
            pair = meld(nodes, a, b);
        }
        nodes.links_mut(pair).next = pairs;
        pairs = pair;
    }
    let mut root = NIL;
    while pairs != NIL {
        let pair = pairs;
        pairs = nodes.links(pair).next;
        detach(nodes, pair);
        root = if root == NIL {
            pair
        } else {
            meld(nodes, root, pair)
        };
    }
    root
}

fn detach<N: Linked + ?Sized>(nodes: &mut N, item: u32) {
    let links = nodes.links_mut(item);
    links.next = NIL;
    links.prev = NIL;
}

#[cfg(test)]
mod tests {
    use super::{Linked, Links, push, remove};
    use crate::slots::NIL;
    use alloc::vec::Vec;

    struct Nodes(Vec<(u32, Links)>);

    impl Linked for Nodes {
        fn links(&self, index: u32) -> Links {
            self.0[index as usize].1
        }
        fn links_mut(&mut self, index: u32) -> &mut Links {
            &mut self.0[index as usize].1
        }
        fn stands_above(&self, a: u32, b: u32) -> bool {
            self.0[a as usize].0 <= self.0[b as usize].0
        }
    }

    #[test]
    fn any_order_of_pushes_and_removals_pops_in_order() {
        // A multiplicative sequence visits all residues, so values are distinct and scrambled.
        let values: Vec<u32> = (1..211).map(|i| i * 37 % 211).collect();
        let mut nodes = Nodes(values.iter().map(|v| (*v, Links::NONE)).collect());
        let mut root = NIL;
        for index in 0..values.len() as u32 {
            root = push(&mut nodes, root, index);
            if index % 3 == 2 {
                root = remove(&mut nodes, root, index - 1);
            }
        }
        let mut popped = Vec::new();
        while root != NIL {
            popped.push(nodes.0[root as usize].0);
            root = remove(&mut nodes, root, root);
        }
        let mut expected: Vec<u32> = values
            .iter()
            .enumerate()
            .filter(|(i, _)| i % 3 != 1)
            .map(|(_, v)| *v)
            .collect();
        expected.sort_unstable();
        assert_eq!(popped, expected);
    }
}
