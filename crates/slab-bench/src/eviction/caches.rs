//! The caches that are compared: the pool, vLLM's rule, and orders without fragmentation.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{BuildHasherDefault, DefaultHasher};

use slab_core::{Evict, Heap, Lease, Pool, PoolConfig, PoolId, Reserve};

use super::replay::Cache;
use super::trace::size;

const ALIGNMENT: u64 = 256;

/// The same keys in each run, so that two runs agree.
type Hasher = BuildHasherDefault<DefaultHasher>;

/// The pool under test with a policy.
pub struct Ours<E: Evict> {
    pool: Pool<u32, (), Hasher, Heap, E>,
    leases: Vec<Lease>,
}

impl<E: Evict> Ours<E> {
    /// `None` if the pool would be too small for a granule.
    #[must_use]
    pub fn new(capacity: u64, policy: E) -> Option<Self> {
        let mut config = PoolConfig::new(PoolId::new(), capacity);
        config.residents_max = 1 << 20;
        let pool = Pool::with_policy(config, Hasher::default(), policy).ok()?;
        let leases = Vec::new();
        Some(Self { pool, leases })
    }
}

impl<E: Evict> Cache for Ours<E> {
    fn hit(&mut self, id: u32) -> bool {
        let lease = self.pool.acquire(&id);
        let hit = lease.is_some();
        self.leases.extend(lease);
        hit
    }

    fn insert(&mut self, id: u32, len: u64) -> bool {
        let Reserve::Ready(bytes) = self.pool.reserve(len) else {
            return false;
        };
        let lease = self.pool.publish(id, bytes, ());
        self.leases.push(lease.expect("a bound out of reach"));
        true
    }

    fn end_request(&mut self) {
        for lease in self.leases.drain(..) {
            self.pool.release(lease, &[]).expect("own lease");
        }
    }

    fn evicted(&self) -> (u64, u64) {
        let stats = self.pool.stats();
        (stats.evictions, stats.evicted_bytes)
    }
}

/// vLLM's rule: the lowest hole that fits; while there is none, the least recently used resident goes, and
/// if that never helps all of them have gone.
#[derive(Debug)]
pub struct Vllm {
    /// Start to length.
    holes: BTreeMap<u64, u64>,
    residents: HashMap<u32, Held>,
    /// Idle residents by when they became so.
    idle: BTreeMap<u64, u32>,
    leased: Vec<u32>,
    clock: u64,
    evicted: (u64, u64),
}

#[derive(Debug)]
struct Held {
    start: u64,
    len: u64,
    /// Key in `idle`, or none while leased.
    idle_since: Option<u64>,
}

impl Vllm {
    /// An empty cache of so many bytes.
    #[must_use]
    pub fn new(capacity: u64) -> Self {
        Self {
            holes: BTreeMap::from([(0, capacity / ALIGNMENT * ALIGNMENT)]),
            residents: HashMap::new(),
            idle: BTreeMap::new(),
            leased: Vec::new(),
            clock: 0,
            evicted: (0, 0),
        }
    }

    fn free(&mut self, mut start: u64, mut len: u64) {
        if let Some((below, below_len)) = self.holes.range(..start).next_back()
            && below + below_len == start
        {
            (start, len) = (*below, below_len + len);
        }
        if let Some(above) = self.holes.remove(&(start + len)) {
            len += above;
        }
        self.holes.insert(start, len);
    }
}

impl Cache for Vllm {
    fn hit(&mut self, id: u32) -> bool {
        let Some(held) = self.residents.get_mut(&id) else {
            return false;
        };
        if let Some(since) = held.idle_since.take() {
            self.idle.remove(&since);
            self.leased.push(id);
        }
        true
    }

    fn insert(&mut self, id: u32, len: u64) -> bool {
        let need = len.next_multiple_of(ALIGNMENT);
        loop {
            let fits = self.holes.iter().find(|(_, hole)| **hole >= need);
            if let Some((start, hole)) = fits.map(|(start, hole)| (*start, *hole)) {
                self.holes.remove(&start);
                if hole > need {
                    self.holes.insert(start + need, hole - need);
                }
                let held = Held {
                    start,
                    len: need,
                    idle_since: None,
                };
                self.residents.insert(id, held);
                self.leased.push(id);
                return true;
            }
            let Some((_, oldest)) = self.idle.pop_first() else {
                return false;
            };
            if let Some(Held { start, len, .. }) = self.residents.remove(&oldest) {
                self.evicted.0 += 1;
                self.evicted.1 += len;
                self.free(start, len);
            }
        }
    }

    fn end_request(&mut self) {
        for id in self.leased.drain(..) {
            if let Some(held) = self.residents.get_mut(&id) {
                self.clock += 1;
                held.idle_since = Some(self.clock);
                self.idle.insert(self.clock, id);
            }
        }
    }

    fn evicted(&self) -> (u64, u64) {
        self.evicted
    }
}

/// What an order without fragmentation knows of an id.
#[derive(Clone, Copy, Debug, Default)]
pub struct Known {
    /// Bytes.
    pub len: u64,
    /// Uses since it became resident.
    pub uses: u64,
    /// Uses ever.
    pub uses_ever: u64,
    /// References of the whole trace so far.
    pub now: u64,
}

/// Evicts by rank, lowest first, from a cache in which everything fits that is not too much.
#[derive(Debug)]
pub struct Ranked<F> {
    capacity: u64,
    used: u64,
    rank: F,
    /// Rank of what was evicted last: the clock of greedy-dual orders.
    floor: f64,
    known: HashMap<u32, Known>,
    /// Residents, with their place in `idle` while idle.
    residents: HashMap<u32, Option<(u64, u64)>>,
    idle: BTreeSet<(u64, u64, u32)>,
    leased: Vec<u32>,
    references: u64,
    ticks: u64,
    evicted: (u64, u64),
}

impl<F: FnMut(u32, &Known, f64) -> f64> Ranked<F> {
    /// `rank` gives the rank of an id that becomes idle, not negative, from what is known and the floor.
    pub fn new(capacity: u64, rank: F) -> Self {
        Self {
            capacity,
            used: 0,
            rank,
            floor: 0.0,
            known: HashMap::new(),
            residents: HashMap::new(),
            idle: BTreeSet::new(),
            leased: Vec::new(),
            references: 0,
            ticks: 0,
            evicted: (0, 0),
        }
    }

    fn note(&mut self, id: u32, is_new: bool) {
        let known = self.known.entry(id).or_default();
        known.len = size(id);
        known.uses = if is_new { 1 } else { known.uses + 1 };
        known.uses_ever += 1;
    }
}

impl<F: FnMut(u32, &Known, f64) -> f64> Cache for Ranked<F> {
    fn hit(&mut self, id: u32) -> bool {
        self.references += 1;
        let Some(place) = self.residents.get_mut(&id) else {
            return false;
        };
        if let Some((rank, tick)) = place.take() {
            self.idle.remove(&(rank, tick, id));
            self.leased.push(id);
        }
        self.note(id, false);
        true
    }

    fn insert(&mut self, id: u32, len: u64) -> bool {
        while self.used + len > self.capacity {
            let Some((rank, _, coldest)) = self.idle.pop_first() else {
                return false;
            };
            self.floor = self.floor.max(f64::from_bits(rank));
            self.residents.remove(&coldest);
            self.used -= size(coldest);
            self.evicted.0 += 1;
            self.evicted.1 += size(coldest);
        }
        self.used += len;
        self.residents.insert(id, None);
        self.leased.push(id);
        self.note(id, true);
        true
    }

    fn end_request(&mut self) {
        for id in self.leased.drain(..) {
            self.ticks += 1;
            let known = Known {
                now: self.references,
                ..self.known[&id]
            };
            // Bits of floats that are not negative sort as the floats do.
            let rank = (self.rank)(id, &known, self.floor).max(0.0).to_bits();
            self.residents.insert(id, Some((rank, self.ticks)));
            self.idle.insert((rank, self.ticks, id));
        }
    }

    fn evicted(&self) -> (u64, u64) {
        self.evicted
    }
}
