//! Any list of calls agrees with the naive allocators: placements, failures, map and byte counts.

mod cases;
mod free_list_harness;

use cases::config;
use free_list_harness::{Checked, pick_from};
use proptest::prelude::*;
use slab_core::{FreeList, FreeListConfig, Placement, PoolId};
use slab_model::{FreeOp, NaiveFirstFit, free_ops};

const ALIGNMENT: u64 = 256;
/// Enough granules for wide size classes (64 and up), and a tail that is not a whole one.
const CAPACITY: u64 = if cfg!(miri) { 150 } else { 700 } * ALIGNMENT + 77;
/// Calls of a list; an interpreter takes minutes for as many, and for as large a slab, as an ordinary run.
const OPS: usize = if cfg!(miri) { 30 } else { 120 };
/// Regions of a crowded class.
const CROWD: u64 = if cfg!(miri) { 6 } else { 40 };
const OPS_CROWDED: usize = if cfg!(miri) { 60 } else { 300 };

fn crowded_op() -> impl Strategy<Value = FreeOp> {
    prop_oneof![
        2 => (1..4u64).prop_map(FreeOp::Allocate),
        3 => (248..264u64).prop_map(FreeOp::Allocate),
        4 => any::<usize>().prop_map(FreeOp::Free),
    ]
}

proptest! {
    #![proptest_config(config(400))]

    #[test]
    fn first_fit_places_as_a_scan_over_the_ordered_holes(ops in free_ops(CAPACITY, OPS)) {
        let mut checked = Checked::new(Placement::FirstFit, CAPACITY, ALIGNMENT);
        let mut naive = NaiveFirstFit::new(CAPACITY / ALIGNMENT);
        for op in &ops {
            if let FreeOp::Free(pick) = op && !checked.live.is_empty() {
                let allocation = &checked.live[pick % checked.live.len()];
                if !allocation.is_empty() {
                    let region = allocation.region();
                    naive.free(region.offset() / ALIGNMENT, region.len() / ALIGNMENT);
                }
            }
            checked.apply(op, |granules, start, _, _| {
                assert_eq!(naive.allocate(granules), start);
            });
        }
        checked.free_all();
    }

    #[test]
    fn a_list_without_a_heap_agrees_with_one_on_the_heap(
        placement in prop_oneof![Just(Placement::BestFit), Just(Placement::FirstFit)],
        ops in free_ops(CAPACITY, OPS),
    ) {
        let mut heap = Checked::new(placement, CAPACITY, ALIGNMENT);
        let mut inline = Checked::new_inline(placement, CAPACITY, ALIGNMENT);
        for op in &ops {
            let mut places = Vec::new();
            heap.apply(op, |_, start, _, _| places.push(start));
            inline.apply(op, |_, start, _, _| assert_eq!(places.pop(), Some(start)));
        }
        heap.free_all();
        inline.free_all();
    }

    #[test]
    fn best_fit_cuts_from_the_tightest_class_and_fails_only_if_nothing_fits(
        ops in free_ops(CAPACITY, OPS),
    ) {
        let mut checked = Checked::new(Placement::BestFit, CAPACITY, ALIGNMENT);
        for op in &ops {
            checked.apply(op, |granules, start, chosen, tightest| {
                if start.is_some() {
                    // A class is at most 1/64 of its lower end wide.
                    let is_tight = (chosen - tightest) * 64 <= tightest;
                    // What is small beside the usual may go lower, into what is a half longer.
                    let is_near = chosen * 64 <= (granules + granules / 2) * 65;
                    assert!(is_tight || is_near, "{chosen} instead of {tightest} for {granules}");
                }
            });
        }
        checked.free_all();
    }

    /// Regions of nearly one size with slivers between them: wide classes are crowded, and holes grow and
    /// shrink inside their class.
    #[test]
    fn best_fit_keeps_crowded_classes_in_order(ops in prop::collection::vec(crowded_op(), 1..OPS_CROWDED)) {
        let mut checked = Checked::new(Placement::BestFit, CROWD * 260, 1);
        for op in &ops {
            checked.apply(op, |_, _, _, _| {});
        }
        checked.free_all();
    }

    /// Many holes of nearly one size: the search inside a wide class must not miss the one that fits.
    #[test]
    fn best_fit_finds_the_only_hole_of_a_crowded_class(
        sizes in prop::collection::vec(256u64..264, 2..40),
        order in any::<u64>(),
        want in 256u64..264,
    ) {
        let mut config = FreeListConfig::new(PoolId::new(), 40 * 300);
        config.alignment = 1;
        let mut list = FreeList::new(config).expect("valid configuration");
        let mut holes = Vec::new();
        let mut walls = Vec::new();
        for size in &sizes {
            holes.push(list.allocate(*size).expect("room"));
            walls.push(list.allocate(1).expect("room"));
        }
        let rest = list.largest_free();
        walls.push(list.allocate(rest).expect("room"));
        let mut order = order;
        while !holes.is_empty() {
            let hole = pick_from(&mut holes, order as usize).expect("not empty");
            list.free(hole).expect("own token");
            order = order.rotate_left(7).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        }
        let longest = sizes.iter().max().copied().unwrap_or(0);
        assert_eq!(list.largest_free(), longest);
        assert_eq!(list.allocate(want).is_ok(), want <= longest);
    }
}
