//! Least recently used first.

use core::ops::{Index, IndexMut};

use super::Evict;
use crate::slots::NIL;

/// Least recently used first: the order is that of the ends of last leases. All O(1), no memory of its own.
#[derive(Debug)]
pub struct Lru {
    coldest: u32,
    warmest: u32,
    clock: u64,
}

/// Place of an entry in the order of [`Lru`].
#[derive(Clone, Copy, Debug)]
pub struct LruRank {
    colder: u32,
    warmer: u32,
    /// Zero while the entry is not idle.
    idle_since: u64,
}

impl Lru {
    /// A policy without entries.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            coldest: NIL,
            warmest: NIL,
            clock: 0,
        }
    }

    fn unlink(&mut self, entry: u32, ranks: &mut impl IndexMut<u32, Output = LruRank>) {
        let LruRank {
            colder,
            warmer,
            idle_since,
        } = ranks[entry];
        if idle_since == 0 {
            return;
        }
        match colder {
            NIL => self.coldest = warmer,
            colder => ranks[colder].warmer = warmer,
        }
        match warmer {
            NIL => self.warmest = colder,
            warmer => ranks[warmer].colder = colder,
        }
        ranks[entry].idle_since = 0;
    }
}

impl Default for Lru {
    fn default() -> Self {
        Self::new()
    }
}

impl Evict for Lru {
    type Rank = LruRank;

    fn on_insert(&mut self, _entry: u32, _hash: u64, _len: u64) -> LruRank {
        LruRank {
            colder: NIL,
            warmer: NIL,
            idle_since: 0,
        }
    }

    fn on_hit(&mut self, entry: u32, ranks: &mut impl IndexMut<u32, Output = LruRank>) {
        self.unlink(entry, ranks);
    }

    fn on_idle(&mut self, entry: u32, ranks: &mut impl IndexMut<u32, Output = LruRank>) {
        self.clock += 1;
        ranks[entry] = LruRank {
            colder: self.warmest,
            warmer: NIL,
            idle_since: self.clock,
        };
        match self.warmest {
            NIL => self.coldest = entry,
            warmest => ranks[warmest].warmer = entry,
        }
        self.warmest = entry;
    }

    fn on_remove(
        &mut self,
        entry: u32,
        _hash: u64,
        ranks: &mut impl IndexMut<u32, Output = LruRank>,
    ) {
        self.unlink(entry, ranks);
    }

    fn coldest_first<'a>(
        &'a self,
        ranks: impl Index<u32, Output = LruRank> + 'a,
    ) -> impl Iterator<Item = u32> + 'a {
        let mut at = self.coldest;
        core::iter::from_fn(move || {
            let entry = at;
            (entry != NIL).then(|| {
                at = ranks[entry].warmer;
                entry
            })
        })
    }

    fn price(&self, entry: u32, coldest: u32, ranks: &impl Index<u32, Output = LruRank>) -> u64 {
        // Relative to the coldest, so that an old pool prices as a young one does.
        let base = ranks[coldest].idle_since;
        ranks[entry].idle_since.saturating_sub(base) + 1
    }
}
