//! What can be done to an allocator.

use proptest::prelude::*;

/// One call to an allocator. Sizes are bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FreeOp {
    /// Ask for this many bytes.
    Allocate(u64),
    /// Give one of the live regions back, counted modulo their number.
    Free(usize),
}

/// Lists of up to `count` operations for a slab of `capacity` bytes.
///
/// Lengths are mixed so that exact and wide size classes, empty requests, requests for everything and
/// overflowing ones all occur.
pub fn free_ops(capacity: u64, count: usize) -> impl Strategy<Value = Vec<FreeOp>> {
    let len = prop_oneof![
        1 => Just(0),
        8 => 1..=(capacity / 64).max(1),
        6 => 1..=(capacity / 8).max(1),
        2 => 1..=capacity,
        1 => (capacity - capacity.min(600))..=capacity.saturating_add(600),
        1 => (u64::MAX - 600)..=u64::MAX,
    ];
    let op = prop_oneof![
        3 => len.prop_map(FreeOp::Allocate),
        2 => any::<usize>().prop_map(FreeOp::Free),
    ];
    prop::collection::vec(op, 1..=count)
}
