//! Any list of calls to a pool keeps the invariants, and the map agrees with the naive pool run for run.

mod cases;
mod pool_harness;

use cases::config;
use pool_harness::Harness;
use proptest::prelude::*;
use slab_core::{Lru, Placement};
use slab_model::pool_ops;

const GRANULES: u64 = 48;
const KEYS: u32 = 7;
/// Calls of a list; an interpreter takes minutes for as many as an ordinary run.
const OPS: usize = if cfg!(miri) { 25 } else { 150 };
const OPS_MANY: usize = if cfg!(miri) { 40 } else { 400 };

fn placements() -> impl Strategy<Value = Placement> {
    prop_oneof![Just(Placement::BestFit), Just(Placement::FirstFit)]
}

proptest! {
    #![proptest_config(config(600))]

    /// Conserved, disjoint, coalesced, one owner, leased stays, fenced, not in vain, claims on time.
    #[test]
    fn any_order_of_calls_keeps_every_invariant(
        placement in placements(),
        ops in pool_ops(GRANULES * pool_harness::ALIGNMENT, KEYS, OPS),
    ) {
        let mut harness = Harness::new(GRANULES, placement, |_| {});
        for op in &ops {
            harness.apply(op);
        }
        harness.give_everything_back();
    }

    /// The same with every bound within reach.
    #[test]
    fn any_order_of_calls_keeps_every_invariant_at_the_bounds(
        placement in placements(),
        ops in pool_ops(GRANULES * pool_harness::ALIGNMENT, KEYS, OPS),
    ) {
        let mut harness = Harness::new(GRANULES, placement, |config| {
            config.residents_max = 3;
            config.claims_max = 1;
            config.timelines_max = 2;
            config.reclaimed_max = 2;
        });
        for op in &ops {
            harness.apply(op);
        }
        harness.give_everything_back();
    }

    /// The same without a heap.
    #[test]
    fn any_order_of_calls_keeps_every_invariant_without_a_heap(
        placement in placements(),
        ops in pool_ops(GRANULES * pool_harness::ALIGNMENT, KEYS, OPS),
    ) {
        let mut harness = Harness::new_inline(GRANULES, placement, |config| {
            config.reclaimed_max = 5;
        });
        for op in &ops {
            harness.apply(op);
        }
        harness.give_everything_back();
    }

    /// The same with the other policy: the bounds of residents and of claims hold whatever the order.
    #[test]
    fn any_order_of_calls_keeps_every_invariant_with_least_recently_used(
        placement in placements(),
        ops in pool_ops(GRANULES * pool_harness::ALIGNMENT, KEYS, OPS),
    ) {
        let bounds = |config: &mut slab_core::PoolConfig| config.residents_max = 4;
        let mut harness =
            Harness::with_policy(GRANULES, placement, bounds, Lru::new(), true);
        for op in &ops {
            harness.apply(op);
        }
        harness.give_everything_back();
    }

    /// More idle residents than windows are grown from, so that the whole map must be looked at.
    #[test]
    fn any_order_of_calls_keeps_every_invariant_with_many_small_residents(
        placement in placements(),
        ops in pool_ops(GRANULES * pool_harness::ALIGNMENT, 40, OPS_MANY),
    ) {
        let mut harness = Harness::new(4 * GRANULES, placement, |_| {});
        for op in &ops {
            harness.apply(op);
        }
        harness.give_everything_back();
    }
}
