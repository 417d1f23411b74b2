//! One hot call over and over, for an instruction counter: `hot_calls CALL COUNT`.
//!
//! `cargo xtask bench instructions` runs it twice, with no and with many calls, and divides the
//! difference. Nothing here depends on the clock, on an address or on a random seed.

use std::hash::{BuildHasherDefault, Hasher};
use std::hint::black_box;

use slab_bench::{BestFit, Contender, FirstFit, Random};
use slab_core::{Pool, PoolConfig, PoolId, Reserve};

const RESIDENTS: u64 = 1000;
const LEN: u64 = 4096;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let call = arguments.next().unwrap_or_default();
    let count: u64 = arguments
        .next()
        .and_then(|count| count.parse().ok())
        .unwrap_or(0);
    match call.as_str() {
        "best-fit-allocate" => allocate::<BestFit>(count, false),
        "best-fit-allocate-free" => allocate::<BestFit>(count, true),
        "best-fit-pair" => pairs::<BestFit>(count),
        "first-fit-pair" => pairs::<FirstFit>(count),
        "acquire-release" => acquire_release(count),
        "evict-insert-release" => evict_insert_release(count),
        _ => {
            eprintln!("unknown call {call:?}");
            std::process::exit(2);
        }
    }
}

/// Calls that are counted at most.
const COUNT_MAX: usize = 20_000;

/// Regions of 1 to 32 granules, cut one after the other; then, if `frees`, given back in random order.
fn allocate<C: Contender>(count: u64, frees: bool) {
    let mut random = Random::new(7);
    let mut contender = C::new(1 << 30, 2 * COUNT_MAX);
    let mut live = Vec::with_capacity(COUNT_MAX);
    // Not counted: the map grows to its final size.
    for _ in 0..COUNT_MAX {
        live.push(contender.take(1).expect("room"));
    }
    live.drain(..).for_each(|region| contender.give(region));
    for _ in 0..count {
        live.push(contender.take(1 + random.below(8192)).expect("room"));
    }
    while frees && !live.is_empty() {
        let index = random.below(live.len() as u64) as usize;
        contender.give(live.swap_remove(index));
    }
    black_box(&live);
}

/// A random region is given back and one of another size taken, in a slab that is half full.
fn pairs<C: Contender>(count: u64) {
    let mut random = Random::new(11);
    let mut contender = C::new(1 << 26, 4096);
    let mut live: Vec<C::Region> = (0..1000)
        .map(|_| contender.take(1 + random.below(65_536)).expect("room"))
        .collect();
    for _ in 0..count {
        let index = random.below(live.len() as u64) as usize;
        contender.give(live.swap_remove(index));
        live.push(contender.take(1 + random.below(65_536)).expect("room"));
    }
}

/// Hashes that are the same everywhere: what is counted is the pool, not a hash function.
#[derive(Default)]
struct Multiplied(u64);

impl Hasher for Multiplied {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, value: u64) {
        let product = (self.0 ^ value).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = product ^ (product >> 32);
    }
}

type TestPool = Pool<u64, (), BuildHasherDefault<Multiplied>>;

/// A pool that idle residents fill to the last byte.
fn full_pool() -> TestPool {
    let mut config = PoolConfig::new(PoolId::from_raw(1), RESIDENTS * LEN);
    config.runs_reserved = 2 * RESIDENTS as usize;
    config.residents_reserved = RESIDENTS as usize;
    let mut pool = TestPool::with_hasher(config, BuildHasherDefault::default()).expect("valid");
    for key in 0..RESIDENTS {
        insert(&mut pool, key);
    }
    pool
}

fn insert(pool: &mut TestPool, key: u64) {
    let Reserve::Ready(bytes) = pool.reserve(LEN) else {
        panic!("every resident can be evicted");
    };
    let lease = pool.publish(key, bytes, ()).expect("a token of this pool");
    pool.release(lease, &[]).expect("a token of this pool");
}

fn acquire_release(count: u64) {
    let mut pool = full_pool();
    let mut random = Random::new(13);
    for _ in 0..count {
        let lease = pool.acquire(&random.below(RESIDENTS)).expect("resident");
        pool.release(lease, &[]).expect("a token of this pool");
    }
}

fn evict_insert_release(count: u64) {
    let mut pool = full_pool();
    for key in 0..count {
        insert(&mut pool, RESIDENTS + key);
        if key % 512 == 0 {
            drop(pool.drain_reclaimed());
        }
    }
}
