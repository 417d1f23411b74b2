//! Pool operations with fences and claims, on the heap and without, against the naive pool.
#![no_main]

#[allow(dead_code)]
#[path = "../../crates/slab-core/tests/pool_harness/mod.rs"]
mod pool_harness;

use libfuzzer_sys::fuzz_target;
use pool_harness::{ALIGNMENT, Harness};
use slab_core::{Evict, Placement, PoolConfig, Store};
use slab_fuzz::{Tape, choose_twin};

const GRANULES: u64 = 48;
const KEYS: u32 = 7;

fuzz_target!(|bytes: &[u8]| {
    choose_twin();
    let mut tape = Tape::new(bytes);
    let Some(first) = tape.byte() else { return };
    let placement = if first & 1 == 0 {
        Placement::BestFit
    } else {
        Placement::FirstFit
    };
    // With the second bit every bound is within reach; with the third the pool has no heap.
    let adjust = |config: &mut PoolConfig| {
        if first & 2 != 0 {
            config.residents_max = 3;
            config.claims_max = 1;
            config.timelines_max = 2;
            config.reclaimed_max = 2;
        }
    };
    if first & 4 == 0 {
        drive(Harness::new(GRANULES, placement, adjust), tape);
    } else {
        drive(Harness::new_inline(GRANULES, placement, adjust), tape);
    }
});

fn drive<St: Store, E: Evict>(mut harness: Harness<St, E>, mut tape: Tape<'_>) {
    while let Some(op) = tape.pool_op(GRANULES * ALIGNMENT, KEYS) {
        harness.apply(&op);
    }
    harness.give_everything_back();
}
