//! Least recently used first.

use alloc::vec::Vec;

use super::Evict;
use crate::slots::NIL;

/// Least recently used first: the order is that of the ends of last leases. All O(1).
#[derive(Debug)]
pub struct Lru {
    links: Vec<Link>,
    coldest: u32,
    warmest: u32,
    clock: u64,
}

#[derive(Clone, Copy, Debug)]
struct Link {
    colder: u32,
    warmer: u32,
    /// Zero while the entry is not idle.
    idle_since: u64,
}

impl Link {
    const NONE: Self = Self {
        colder: NIL,
        warmer: NIL,
        idle_since: 0,
    };
}

impl Lru {
    /// A policy without entries, with room for this many before it grows.
    #[must_use]
    pub fn with_capacity(entries: usize) -> Self {
        Self {
            links: Vec::with_capacity(entries),
            coldest: NIL,
            warmest: NIL,
            clock: 0,
        }
    }

    fn unlink(&mut self, entry: u32) {
        let Link {
            colder,
            warmer,
            idle_since,
        } = self.links[entry as usize];
        if idle_since == 0 {
            return;
        }
        match colder {
            NIL => self.coldest = warmer,
            colder => self.links[colder as usize].warmer = warmer,
        }
        match warmer {
            NIL => self.warmest = colder,
            warmer => self.links[warmer as usize].colder = colder,
        }
        self.links[entry as usize].idle_since = 0;
    }
}

impl Evict for Lru {
    fn on_insert(&mut self, entry: u32, _hash: u64, _len: u64) {
        let index = entry as usize;
        if self.links.len() <= index {
            self.links.resize(index + 1, Link::NONE);
        }
        self.links[index] = Link::NONE;
    }

    fn on_hit(&mut self, entry: u32) {
        self.unlink(entry);
    }

    fn on_idle(&mut self, entry: u32) {
        self.clock += 1;
        self.links[entry as usize] = Link {
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

    fn on_remove(&mut self, entry: u32) {
        self.unlink(entry);
    }

    fn coldest_first(&self) -> impl Iterator<Item = u32> + '_ {
        let mut at = self.coldest;
        core::iter::from_fn(move || {
            let entry = at;
            (entry != NIL).then(|| {
                at = self.links[entry as usize].warmer;
                entry
            })
        })
    }

    fn price(&self, entry: u32, coldest: u32) -> u64 {
        // Relative to the coldest, so that an old pool prices as a young one does.
        let base = self.links[coldest as usize].idle_since;
        self.links[entry as usize].idle_since.saturating_sub(base) + 1
    }
}
