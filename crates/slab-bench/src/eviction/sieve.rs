//! SIEVE.

use std::ops::{Index, IndexMut};

use slab_core::Evict;

use super::shelf::{NIL, Shelf};

/// One FIFO queue and a hand that sweeps it from old to new: what was used since it passed stays where it is.
///
/// As published. What gives way is decided when it is asked for; the hand moves when it has gone. An entry
/// that the pool cannot use, or that is leased, is passed over.
///
/// # Source
/// Zhang, Yang, Yue, Vigfusson, Rashmi: "SIEVE is simpler than LRU" (NSDI 2024), algorithm 1.
#[derive(Debug)]
pub struct Sieve {
    shelf: Shelf<1>,
    /// Where the sweep goes on; none if at the oldest.
    hand: u32,
}

impl Default for Sieve {
    fn default() -> Self {
        Self::new()
    }
}

impl Sieve {
    /// Without entries.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            shelf: Shelf::new(),
            hand: NIL,
        }
    }

    fn start(&self) -> u32 {
        match self.hand {
            NIL => self.shelf.oldest(0),
            hand => hand,
        }
    }

    /// All entries in the order of the sweep.
    fn sweep(&self) -> impl Iterator<Item = u32> + '_ {
        let start = self.start();
        let older = self.shelf.oldest_first(0);
        self.shelf
            .from(start)
            .chain(older.take_while(move |entry| *entry != start))
    }

    /// Sweeps up to `entry` and past it.
    fn sweep_to(&mut self, entry: u32) {
        let mut at = self.start();
        while at != entry || self.shelf.get(entry).uses > 0 {
            if self.shelf.is_idle(at) {
                self.shelf.get_mut(at).uses = 0;
            }
            at = match self.shelf.newer(at) {
                NIL => self.shelf.oldest(0),
                newer => newer,
            };
        }
        self.hand = entry;
    }

    /// Idle entries in the order of giving them up.
    fn order(&self) -> impl Iterator<Item = u32> + '_ {
        (0..=1).flat_map(move |uses| {
            self.sweep().filter(move |entry| {
                self.shelf.is_idle(*entry) && self.shelf.get(*entry).uses == uses
            })
        })
    }
}

impl Evict for Sieve {
    type Rank = ();

    fn on_insert(&mut self, entry: u32, hash: u64, len: u64) {
        self.shelf.insert(entry, hash, len, 0);
    }

    fn on_hit(&mut self, entry: u32, _: &mut impl IndexMut<u32, Output = ()>) {
        let entry = self.shelf.get_mut(entry);
        (entry.uses, entry.idle) = (1, false);
    }

    fn on_idle(&mut self, entry: u32, _: &mut impl IndexMut<u32, Output = ()>) {
        self.shelf.get_mut(entry).idle = true;
    }

    fn on_remove(&mut self, entry: u32, _: u64, _: &mut impl IndexMut<u32, Output = ()>) {
        if self.order().next() == Some(entry) {
            self.sweep_to(entry);
        }
        if self.hand == entry {
            self.hand = self.shelf.newer(entry);
        }
        self.shelf.remove(entry);
    }

    fn coldest_first<'a>(
        &'a self,
        _: impl Index<u32, Output = ()> + 'a,
    ) -> impl Iterator<Item = u32> + 'a {
        self.order()
    }

    fn price(&self, entry: u32, coldest: u32, _: &impl Index<u32, Output = ()>) -> u64 {
        let known = self.shelf.get(entry);
        // The sweep goes round: what is older than the coldest comes after what is newer.
        let (at, from) = (self.shelf.distance(entry), self.shelf.distance(coldest));
        let steps = match at.checked_sub(from) {
            Some(steps) => steps,
            None => at + self.shelf.span(0) - from,
        };
        (steps + 1) * (u64::from(known.uses) + 1)
    }
}
