//! W-TinyLFU.

use std::ops::{Index, IndexMut};

use slab_core::Evict;

use super::shelf::{NIL, Shelf};

const WINDOW: usize = 0;
/// Left the window for the last insertion, and has to prove itself for this one.
const CANDIDATES: usize = 1;
const PROBATION: usize = 2;
const PROTECTED: usize = 3;

/// A small window of what is new, and behind it a segmented queue into which only what was used more often
/// than its victim gets.
///
/// As published, in bytes: the window is a hundredth of the capacity (at least the newest entry), four fifths
/// of the rest are protected; frequencies are four-bit counts of a sketch that is halved after ten times
/// as many uses as the cache has entries. A candidate that has not been evicted when the next entry comes is in.
///
/// # Source
/// Einziger, Friedman, Manes: "TinyLFU: a highly efficient cache admission policy" (ACM TOS 2017).
#[derive(Debug)]
pub struct WTinyLfu {
    shelf: Shelf<4>,
    sketch: Sketch,
    window_max: u64,
    protected_max: u64,
}

impl WTinyLfu {
    /// Without entries, for a cache of so many bytes, in which about so many entries fit.
    #[must_use]
    pub fn new(capacity: u64, entries: usize) -> Self {
        let window_max = capacity / 100;
        Self {
            shelf: Shelf::new(),
            sketch: Sketch::new(entries),
            window_max,
            protected_max: (capacity - window_max) / 5 * 4,
        }
    }

    fn frequency(&self, entry: u32) -> u8 {
        self.sketch.estimate(self.shelf.get(entry).hash)
    }

    fn idle(&self, queue: usize) -> impl Iterator<Item = u32> + '_ {
        let oldest_first = self.shelf.oldest_first(queue);
        oldest_first.filter(|entry| self.shelf.is_idle(*entry))
    }

    /// Idle entries in the order of giving them up.
    fn order(&self) -> impl Iterator<Item = u32> + '_ {
        let mut candidates = self.idle(CANDIDATES).peekable();
        let mut victims = self
            .idle(PROBATION)
            .chain(self.idle(PROTECTED))
            .chain(self.idle(WINDOW))
            .peekable();
        std::iter::from_fn(move || match (candidates.peek(), victims.peek()) {
            (Some(candidate), Some(victim))
                if self.frequency(*candidate) <= self.frequency(*victim) =>
            {
                candidates.next()
            }
            (Some(_), None) => candidates.next(),
            _ => victims.next(),
        })
    }
}

impl Evict for WTinyLfu {
    type Rank = ();

    fn on_insert(&mut self, entry: u32, hash: u64, len: u64) {
        self.sketch.add(hash);
        while self.shelf.oldest(CANDIDATES) != NIL {
            self.shelf.move_to(self.shelf.oldest(CANDIDATES), PROBATION);
        }
        self.shelf.insert(entry, hash, len, WINDOW);
        while self.shelf.bytes(WINDOW) > self.window_max && self.shelf.oldest(WINDOW) != entry {
            self.shelf.move_to(self.shelf.oldest(WINDOW), CANDIDATES);
        }
    }

    fn on_hit(&mut self, entry: u32, _: &mut impl IndexMut<u32, Output = ()>) {
        self.sketch.add(self.shelf.get(entry).hash);
        self.shelf.get_mut(entry).idle = false;
        if self.shelf.get(entry).queue != WINDOW {
            self.shelf.move_to(entry, PROTECTED);
            while self.shelf.bytes(PROTECTED) > self.protected_max {
                self.shelf.move_to(self.shelf.oldest(PROTECTED), PROBATION);
            }
        }
    }

    fn on_idle(&mut self, entry: u32, _: &mut impl IndexMut<u32, Output = ()>) {
        self.shelf.get_mut(entry).idle = true;
        self.shelf.move_to(entry, self.shelf.get(entry).queue);
    }

    fn on_remove(&mut self, entry: u32, _: u64, _: &mut impl IndexMut<u32, Output = ()>) {
        self.shelf.remove(entry);
    }

    fn coldest_first<'a>(
        &'a self,
        _: impl Index<u32, Output = ()> + 'a,
    ) -> impl Iterator<Item = u32> + 'a {
        self.order()
    }

    fn price(&self, entry: u32, _: u32, _: &impl Index<u32, Output = ()>) -> u64 {
        (self.shelf.distance(entry) + 1) * (u64::from(self.frequency(entry)) + 1)
    }
}

/// How often keys were used lately, by hash.
#[derive(Debug)]
struct Sketch {
    counts: Vec<u8>,
    additions: usize,
    additions_max: usize,
}

const ROWS: u64 = 4;
/// Enough that collisions are rare.
const COUNTS_AN_ENTRY: usize = 16;
const COUNT_MAX: u8 = 15;

impl Sketch {
    fn new(entries: usize) -> Self {
        let entries = entries.max(16);
        Self {
            counts: vec![0; (COUNTS_AN_ENTRY * entries).next_power_of_two()],
            additions: 0,
            additions_max: 10 * entries,
        }
    }

    fn places(&self, hash: u64) -> impl Iterator<Item = usize> + use<> {
        let mask = self.counts.len() - 1;
        (1..=ROWS).map(move |row| {
            let mixed = (hash ^ row.wrapping_mul(0x9E37_79B9_7F4A_7C15))
                .wrapping_mul(0xD6E8_FEB8_6659_FD93);
            (mixed ^ mixed >> 32) as usize & mask
        })
    }

    fn estimate(&self, hash: u64) -> u8 {
        let counts = self.places(hash).map(|place| self.counts[place]);
        counts.min().unwrap_or(0)
    }

    /// Only the lowest counts of a key grow, so that collisions cost less.
    fn add(&mut self, hash: u64) {
        let least = self.estimate(hash);
        if least < COUNT_MAX {
            for place in self.places(hash) {
                if self.counts[place] == least {
                    self.counts[place] += 1;
                }
            }
        }
        self.additions += 1;
        if self.additions >= self.additions_max {
            self.additions /= 2;
            for count in &mut self.counts {
                *count /= 2;
            }
        }
    }
}
