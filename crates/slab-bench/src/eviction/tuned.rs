//! The default policy with other constants than it ships with, to see what choosing them did.

use std::collections::{BTreeSet, HashMap};

use std::ops::{Index, IndexMut};

use slab_core::Evict;

/// What was chosen for [`Credit`](slab_core::Credit).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// Uses that count, at most.
    pub uses_max: u8,
    /// What a use is worth, in eighths of the gap.
    pub use_eighths: u64,
    /// What half the length is worth, in sixteenths of the gap.
    pub half_sixteenths: u64,
}

impl Tuning {
    /// As it ships.
    pub const SHIPPED: Self = Self {
        uses_max: 8,
        use_eighths: 4,
        half_sixteenths: 2,
    };

    /// All that are tried.
    pub fn all() -> impl Iterator<Item = Self> {
        let uses = [4, 8, 16].into_iter();
        uses.flat_map(|uses_max| {
            [2, 4, 8].into_iter().flat_map(move |use_eighths| {
                let halves = [0, 1, 2, 4].into_iter();
                halves.map(move |half_sixteenths| Self {
                    uses_max,
                    use_eighths,
                    half_sixteenths,
                })
            })
        })
    }
}

/// `Credit` with other constants: queues of equal credit, in a set each, and a memory without end of keys that left.
#[derive(Debug)]
pub struct Tuned {
    tuning: Tuning,
    entries: Vec<Entry>,
    /// Idle entries by credit, in the order of becoming idle.
    queues: Vec<BTreeSet<(u64, u32)>>,
    left: HashMap<u64, (u8, u64)>,
    clock: u64,
    gap: u64,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    hash: u64,
    touched: u64,
    uses: u8,
    /// Doublings of the length that 2^64 is away.
    small: u32,
    is_idle: bool,
}

impl Tuned {
    /// Without entries.
    #[must_use]
    pub fn new(tuning: Tuning) -> Self {
        Self {
            tuning,
            entries: Vec::new(),
            queues: Vec::new(),
            left: HashMap::new(),
            clock: 0,
            gap: 0,
        }
    }

    /// In sixteenths of the gap.
    fn credit(&self, entry: &Entry) -> u64 {
        2 * self.tuning.use_eighths * u64::from(entry.uses)
            + self.tuning.half_sixteenths * u64::from(entry.small)
    }

    fn due(&self, entry: u32) -> u64 {
        let entry = &self.entries[entry as usize];
        16 * entry.touched + self.gap * self.credit(entry)
    }

    fn learn(&mut self, gap: u64) {
        if self.gap == 0 {
            self.gap = gap;
        } else if gap > self.gap {
            self.gap += self.gap / 32 + 1;
        } else {
            self.gap -= self.gap / 32;
        }
    }

    fn unlink(&mut self, entry: u32) {
        let known = self.entries[entry as usize];
        let queue = self.credit(&known) as usize;
        if known.is_idle {
            self.queues[queue].remove(&(known.touched, entry));
            self.entries[entry as usize].is_idle = false;
        }
    }

    /// Idle entries in the order of giving them up.
    fn order(&self) -> impl Iterator<Item = u32> + '_ {
        let mut queues: Vec<_> = self.queues.iter().map(|q| q.iter().peekable()).collect();
        std::iter::from_fn(move || {
            let heads = queues.iter_mut().enumerate().filter_map(|(queue, heads)| {
                let (_, entry) = heads.peek()?;
                Some((self.due(*entry), queue))
            });
            let (_, queue) = heads.min()?;
            queues[queue].next().map(|(_, entry)| *entry)
        })
    }
}

impl Evict for Tuned {
    type Rank = ();

    fn on_insert(&mut self, entry: u32, hash: u64, len: u64) {
        let mut uses = 1;
        if let Some((before, touched)) = self.left.remove(&hash) {
            uses = (before + 1).min(self.tuning.uses_max);
            self.learn(self.clock - touched);
        }
        let fresh = Entry {
            hash,
            touched: self.clock,
            uses,
            small: len.max(1).leading_zeros(),
            is_idle: false,
        };
        let index = entry as usize;
        if self.entries.len() <= index {
            self.entries.resize(index + 1, fresh);
        }
        self.entries[index] = fresh;
    }

    fn on_hit(&mut self, entry: u32, _: &mut impl IndexMut<u32, Output = ()>) {
        let known = self.entries[entry as usize];
        if known.is_idle {
            self.learn(self.clock - known.touched);
            self.unlink(entry);
        }
        self.entries[entry as usize].uses = (known.uses + 1).min(self.tuning.uses_max);
    }

    fn on_idle(&mut self, entry: u32, _: &mut impl IndexMut<u32, Output = ()>) {
        self.clock += 1;
        let known = &mut self.entries[entry as usize];
        known.touched = self.clock;
        known.is_idle = true;
        let queue = self.credit(&self.entries[entry as usize]) as usize;
        if self.queues.len() <= queue {
            self.queues.resize(queue + 1, BTreeSet::new());
        }
        self.queues[queue].insert((self.clock, entry));
    }

    fn on_remove(&mut self, entry: u32, _: u64, _: &mut impl IndexMut<u32, Output = ()>) {
        self.unlink(entry);
        let Entry {
            hash,
            uses,
            touched,
            ..
        } = self.entries[entry as usize];
        self.left.insert(hash, (uses, touched));
    }

    fn coldest_first<'a>(
        &'a self,
        _: impl Index<u32, Output = ()> + 'a,
    ) -> impl Iterator<Item = u32> + 'a {
        self.order()
    }

    fn price(&self, entry: u32, coldest: u32, _: &impl Index<u32, Output = ()>) -> u64 {
        self.due(entry).saturating_sub(self.due(coldest)) + 1
    }
}
