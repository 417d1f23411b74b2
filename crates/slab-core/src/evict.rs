//! The order in which idle residents are given up, behind one trait.
//!
//! A policy sees entry numbers and events only, never keys or bytes: what fits where is the planner's
//! business (`pool/plan.rs`), what an entry is worth is the policy's.

use alloc::vec::Vec;

use crate::slots::NIL;

/// Prices idle entries. Entries are small numbers that are used again after `on_remove`.
pub(crate) trait Evict {
    /// The entry's last lease ended: it can be evicted from now on.
    fn on_idle(&mut self, entry: u32);
    /// An idle entry was leased.
    fn on_leased(&mut self, entry: u32);
    /// An idle entry is being removed.
    fn on_remove(&mut self, entry: u32);
    /// The idle entry to give up first.
    fn coldest(&self) -> Option<u32>;
    /// The idle entry to give up after `entry`.
    fn warmer_than(&self, entry: u32) -> Option<u32>;
    /// What giving up an idle entry costs, at least 1, comparable and addable among entries of now;
    /// does not fall along `warmer_than`.
    fn price(&self, entry: u32) -> u64;
}

/// Least recently used first: the order is that of the ends of last leases. All O(1).
#[derive(Debug)]
pub(crate) struct Lru {
    links: Vec<Link>,
    coldest: u32,
    warmest: u32,
    clock: u64,
}

#[derive(Clone, Copy, Debug)]
struct Link {
    colder: u32,
    warmer: u32,
    idle_since: u64,
}

impl Lru {
    pub(crate) fn with_capacity(entries: usize) -> Self {
        Self {
            links: Vec::with_capacity(entries),
            coldest: NIL,
            warmest: NIL,
            clock: 0,
        }
    }

    fn unlink(&mut self, entry: u32) {
        let Link { colder, warmer, .. } = self.links[entry as usize];
        match colder {
            NIL => self.coldest = warmer,
            colder => self.links[colder as usize].warmer = warmer,
        }
        match warmer {
            NIL => self.warmest = colder,
            warmer => self.links[warmer as usize].colder = colder,
        }
    }
}

impl Evict for Lru {
    fn on_idle(&mut self, entry: u32) {
        let index = entry as usize;
        if self.links.len() <= index {
            self.links.resize(
                index + 1,
                Link {
                    colder: NIL,
                    warmer: NIL,
                    idle_since: 0,
                },
            );
        }
        self.clock += 1;
        self.links[index] = Link {
            colder: self.warmest,
            warmer: NIL,
            idle_since: self.clock,
        };
        match self.warmest {
            NIL => self.coldest = entry,
            warmest => self.links[warmest as usize].warmer = entry,
        }
        self.warmest = entry;
    }

    fn on_leased(&mut self, entry: u32) {
        self.unlink(entry);
    }

    fn on_remove(&mut self, entry: u32) {
        self.unlink(entry);
    }

    fn coldest(&self) -> Option<u32> {
        (self.coldest != NIL).then_some(self.coldest)
    }

    fn warmer_than(&self, entry: u32) -> Option<u32> {
        let warmer = self.links[entry as usize].warmer;
        (warmer != NIL).then_some(warmer)
    }

    fn price(&self, entry: u32) -> u64 {
        // Relative to the coldest, so that an old pool prices as a young one does.
        let base = self
            .coldest()
            .map_or(0, |coldest| self.links[coldest as usize].idle_since);
        self.links[entry as usize].idle_since.saturating_sub(base) + 1
    }
}
