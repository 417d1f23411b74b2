//! A policy by itself, where everything fits that is not too much.

use std::collections::HashMap;
use std::ops::{Index, IndexMut};

use slab_core::Evict;

use super::replay::Cache;

/// Evicts in the order of a policy, from a cache without fragmentation.
pub struct Unfragmented<E: Evict> {
    policy: E,
    ranks: Ranks<E::Rank>,
    capacity: u64,
    used: u64,
    entries: Vec<Held>,
    vacant: Vec<u32>,
    residents: HashMap<u32, u32>,
    leased: Vec<u32>,
    evicted: (u64, u64),
}

#[derive(Clone, Copy, Debug)]
struct Held {
    id: u32,
    len: u64,
    leases: u32,
}

impl<E: Evict> Unfragmented<E> {
    /// An empty cache of so many bytes.
    #[must_use]
    pub fn new(capacity: u64, policy: E) -> Self {
        Self {
            policy,
            ranks: Ranks(Vec::new()),
            capacity,
            used: 0,
            entries: Vec::new(),
            vacant: Vec::new(),
            residents: HashMap::new(),
            leased: Vec::new(),
            evicted: (0, 0),
        }
    }
}

impl<E: Evict> Cache for Unfragmented<E> {
    fn hit(&mut self, id: u32) -> bool {
        let Some(entry) = self.residents.get(&id) else {
            return false;
        };
        self.policy.on_hit(*entry, &mut self.ranks);
        self.entries[*entry as usize].leases += 1;
        self.leased.push(*entry);
        true
    }

    fn insert(&mut self, id: u32, len: u64) -> bool {
        while self.used + len > self.capacity {
            let Some(coldest) = self.policy.coldest(&self.ranks) else {
                return false;
            };
            let Held { id, len, .. } = self.entries[coldest as usize];
            self.policy.on_remove(coldest, hash(id), &mut self.ranks);
            self.residents.remove(&id);
            self.vacant.push(coldest);
            self.used -= len;
            self.evicted.0 += 1;
            self.evicted.1 += len;
        }
        self.used += len;
        let held = Held { id, len, leases: 1 };
        let entry = match self.vacant.pop() {
            Some(entry) => {
                self.entries[entry as usize] = held;
                entry
            }
            None => {
                self.entries.push(held);
                self.entries.len() as u32 - 1
            }
        };
        let rank = self.policy.on_insert(entry, hash(id), len);
        self.ranks.put(entry, rank);
        self.residents.insert(id, entry);
        self.leased.push(entry);
        true
    }

    fn end_request(&mut self) {
        for entry in self.leased.drain(..) {
            let leases = &mut self.entries[entry as usize].leases;
            *leases -= 1;
            if *leases == 0 {
                self.policy.on_idle(entry, &mut self.ranks);
            }
        }
    }

    fn evicted(&self) -> (u64, u64) {
        self.evicted
    }
}

/// Spread over all bits, as a hash of the key is in a pool.
fn hash(id: u32) -> u64 {
    let hash = u64::from(id + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let hash = (hash ^ hash >> 29).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    hash ^ hash >> 32
}

/// What the policy keeps of each entry.
struct Ranks<R>(Vec<R>);

impl<R> Ranks<R> {
    fn put(&mut self, entry: u32, rank: R) {
        if self.0.len() == entry as usize {
            self.0.push(rank);
        } else {
            self.0[entry as usize] = rank;
        }
    }
}

impl<R> Index<u32> for Ranks<R> {
    type Output = R;

    fn index(&self, entry: u32) -> &R {
        &self.0[entry as usize]
    }
}

impl<R> Index<u32> for &Ranks<R> {
    type Output = R;

    fn index(&self, entry: u32) -> &R {
        &self.0[entry as usize]
    }
}

impl<R> IndexMut<u32> for Ranks<R> {
    fn index_mut(&mut self, entry: u32) -> &mut R {
        &mut self.0[entry as usize]
    }
}
