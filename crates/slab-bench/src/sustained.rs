//! How much of a slab stays in use when every failure evicts.

use crate::contender::{Contender, GRANULE};
use crate::random::{Random, Sizes};

const SEEDS: u64 = 3;
const TAKEN: u64 = 60_000;
/// What is taken before the state is steady.
const SKIPPED: u64 = 20_000;

/// The share of a slab of `capacity` bytes that regions of these sizes occupy, in per cent: each failure
/// gives random regions back until the request fits. Mean over three seeds of what holds after each of
/// 40,000 requests; sizes count rounded up to the granule.
#[must_use]
pub fn sustained<C: Contender>(capacity: u64, sizes: Sizes) -> f64 {
    let runs_max = match sizes {
        Sizes::Encoder | Sizes::EncoderLog => 1 << 14,
        Sizes::Small | Sizes::Equal => (capacity / GRANULE) as usize,
    };
    let mut sum = 0.0;
    for seed in 0..SEEDS {
        let mut random = Random::stream(0x1234_5678_9ABC_DEF1, seed);
        let mut contender = C::new(capacity, runs_max);
        let mut live: Vec<C::Region> = Vec::new();
        let mut used = 0;
        for taken in 0..TAKEN {
            let len = sizes.draw(&mut random);
            let region = loop {
                if let Some(region) = contender.take(len) {
                    break region;
                }
                let index = random.below(live.len() as u64) as usize;
                let region = live.swap_remove(index);
                used -= C::len(&region).next_multiple_of(GRANULE);
                contender.give(region);
            };
            live.push(region);
            used += len.next_multiple_of(GRANULE);
            if taken >= SKIPPED {
                sum += used as f64 / capacity as f64;
            }
        }
    }
    100.0 * sum / (SEEDS * (TAKEN - SKIPPED)) as f64
}
