//! Residents: a lease beside a hash table's lookup, an eviction beside vLLM's, from 10 to 100,000.
//!
//! Run it with `cargo xtask bench resident [--json]`. The contenders of a row take turns; each figure is the
//! best of several rounds, since whatever else runs on the machine only ever adds time.

use std::collections::VecDeque;
use std::hash::{BuildHasher, RandomState};
use std::hint::black_box;
use std::time::Instant;

use hashbrown::HashMap;
use serde_json::json;
use slab_core::{Pool, PoolConfig, PoolId, Reserve};

const RESIDENTS: [u64; 5] = [10, 100, 1_000, 10_000, 100_000];
/// Bytes of a resident: one granule, so that the pool is full with exactly the residents.
const LEN: u64 = 256;
const ROUNDS: usize = 15;
const CALLS: u64 = 20_000;

type TestPool<S> = Pool<u64, (), S>;

fn main() -> Result<(), String> {
    let as_json = match std::env::args().nth(1).as_deref() {
        None => false,
        Some("--json") => true,
        Some(other) => return Err(format!("unknown argument {other}; give --json or nothing")),
    };
    if !as_json {
        println!(
            "{:>9} {:>14} {:>13} | {:>9} {:>9} {:>11} {:>13}",
            "residents",
            "lease / lookup",
            "vLLM / evict",
            "lease ns",
            "lookup ns",
            "evict ns",
            "vLLM evict ns"
        );
    }
    for residents in RESIDENTS {
        let [lease, lookup, evict, vllm] = row(residents);
        if as_json {
            let row = json!({
                "bench": "resident", "residents": residents,
                "lease_over_lookup": lease / lookup, "vllm_over_evict": vllm / evict,
                "lease_ns": lease, "lookup_ns": lookup,
                "evict_insert_release_ns": evict, "vllm_evict_insert_release_ns": vllm,
            });
            println!("{row}");
        } else {
            println!(
                "{residents:>9} {:>14.2} {:>13.1} | {lease:>9.1} {lookup:>9.1} {evict:>11.1} {vllm:>13.1}",
                lease / lookup,
                vllm / evict
            );
        }
    }
    Ok(())
}

/// Nanoseconds of a lease, of a lookup, of an eviction with what follows, and of vLLM's.
fn row(residents: u64) -> [f64; 4] {
    let hasher = RandomState::new();
    let mut pool = full_pool(residents, hasher.clone());
    let mut turnover = full_pool(residents, hasher.clone());
    let mut table: HashMap<u64, u64, RandomState> = HashMap::with_hasher(hasher);
    table.extend((0..residents).map(|key| (key, key)));
    let mut vllm = CopiedList::new(residents);
    let keys: Vec<u64> = scrambled(residents);
    // vLLM's copies the list of all residents for each: fewer, so that a row takes no minutes.
    let vllm_calls = (20_000_000 / residents).clamp(20, CALLS);
    let mut best = [f64::INFINITY; 4];
    let mut next = residents;
    for _ in 0..ROUNDS {
        let round = [
            time(CALLS, |call| {
                let key = &keys[call as usize];
                let lease = pool.acquire(key).expect("resident");
                pool.release(lease, &[]).expect("own lease");
            }),
            time(CALLS, |call| {
                black_box(table.get(&keys[call as usize]));
            }),
            time(CALLS, |call| insert(&mut turnover, next + call)),
            time(vllm_calls, |call| vllm.turn_over(next + call)),
        ];
        next += CALLS;
        for (best, ns) in best.iter_mut().zip(round) {
            *best = best.min(ns);
        }
    }
    best
}

fn time(calls: u64, mut call: impl FnMut(u64)) -> f64 {
    let begin = Instant::now();
    for index in 0..calls {
        call(index);
    }
    begin.elapsed().as_nanos() as f64 / calls as f64
}

/// As many keys as calls, in no order that a cache could foresee.
fn scrambled(residents: u64) -> Vec<u64> {
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    (0..CALLS)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % residents
        })
        .collect()
}

fn full_pool<S: BuildHasher>(residents: u64, hasher: S) -> TestPool<S> {
    let mut config = PoolConfig::new(PoolId::new(), residents * LEN);
    config.residents_max = u32::MAX;
    config.residents_reserved = residents as usize + 1;
    config.runs_reserved = residents as usize + 2;
    let mut pool = Pool::with_hasher(config, hasher).expect("valid configuration");
    for key in 0..residents {
        insert(&mut pool, key);
    }
    pool
}

/// Once the pool is full, this evicts one.
fn insert<S: BuildHasher>(pool: &mut TestPool<S>, key: u64) {
    let Reserve::Ready(bytes) = pool.reserve(LEN) else {
        panic!("one is always idle")
    };
    let lease = pool.publish(key, bytes, ()).expect("own token");
    pool.release(lease, &[]).expect("own lease");
}

/// The cost shape of vLLM's pool: an eviction walks a copy of the list of all idle residents.
struct CopiedList {
    idle: VecDeque<u64>,
    residents: HashMap<u64, u64, RandomState>,
}

impl CopiedList {
    fn new(residents: u64) -> Self {
        Self {
            idle: (0..residents).collect(),
            residents: (0..residents).map(|key| (key, key)).collect(),
        }
    }

    fn turn_over(&mut self, key: u64) {
        let copy: Vec<u64> = self.idle.iter().copied().collect();
        if let Some(oldest) = black_box(&copy).first() {
            self.residents.remove(oldest);
            self.idle.pop_front();
        }
        self.residents.insert(key, key);
        self.idle.push_back(key);
    }
}
