//! What can be done to a pool.

use proptest::prelude::*;

/// A fence, relative to how far its timeline has come when it is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FencePick {
    /// Which timeline, counted modulo their number.
    pub timeline: usize,
    /// How far ahead; 0 is reached already.
    pub ahead: u64,
}

/// One call to a pool. Tokens are picked among the live ones, counted modulo their number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PoolOp {
    /// Ask for this many bytes.
    Reserve {
        /// Bytes.
        len: u64,
    },
    /// Publish an allocation.
    Publish {
        /// Which allocation.
        held: usize,
        /// Under which key.
        key: u32,
        /// With which metadata.
        meta: u32,
    },
    /// Lease a resident.
    Acquire {
        /// Which key.
        key: u32,
    },
    /// End a lease.
    Release {
        /// Which lease.
        lease: usize,
        /// What its user may still do.
        fences: Vec<FencePick>,
    },
    /// Give an allocation back.
    Free {
        /// Which allocation.
        held: usize,
        /// What its user may still do.
        fences: Vec<FencePick>,
    },
    /// Put an allocation out of use.
    Quarantine {
        /// Which allocation.
        held: usize,
    },
    /// Evict a resident by name.
    Evict {
        /// Which key.
        key: u32,
    },
    /// Add a timeline.
    AddTimeline,
    /// A timeline comes further.
    Reach {
        /// Which timeline.
        timeline: usize,
        /// How much further.
        by: u64,
    },
    /// A timeline fails.
    Fail {
        /// Which timeline.
        timeline: usize,
    },
    /// Poll a claim.
    Poll {
        /// Which claim.
        claim: usize,
    },
    /// Give a claim up.
    DropClaim {
        /// Which claim.
        claim: usize,
    },
    /// Ask for the reclaimed keys.
    Drain,
}

/// Lists of up to `count` operations for a slab of `capacity` bytes and `keys` keys.
pub fn pool_ops(capacity: u64, keys: u32, count: usize) -> impl Strategy<Value = Vec<PoolOp>> {
    let len = prop_oneof![
        1 => Just(0),
        12 => 1..=(capacity / 10).max(1),
        8 => 1..=(capacity / 4).max(1),
        3 => 1..=capacity,
        1 => capacity..=capacity.saturating_add(1000),
    ];
    let pick = || any::<usize>();
    let fences = || {
        let fence =
            (any::<usize>(), 0..4u64).prop_map(|(timeline, ahead)| FencePick { timeline, ahead });
        prop_oneof![
            2 => Just(Vec::new()),
            3 => prop::collection::vec(fence, 1..4),
        ]
    };
    let op = prop_oneof![
        12 => len.prop_map(|len| PoolOp::Reserve { len }),
        9 => (pick(), 0..keys, prop_oneof![4 => Just(0), 1 => Just(1u32)])
            .prop_map(|(held, key, meta)| PoolOp::Publish { held, key, meta }),
        4 => (0..keys).prop_map(|key| PoolOp::Acquire { key }),
        10 => (pick(), fences()).prop_map(|(lease, fences)| PoolOp::Release { lease, fences }),
        4 => (pick(), fences()).prop_map(|(held, fences)| PoolOp::Free { held, fences }),
        // Rare: what it takes never comes back.
        1 => prop_oneof![
            1 => pick().prop_map(|held| PoolOp::Quarantine { held }),
            1 => pick().prop_map(|timeline| PoolOp::Fail { timeline }),
            6 => Just(PoolOp::AddTimeline),
        ],
        2 => (0..keys).prop_map(|key| PoolOp::Evict { key }),
        6 => (pick(), 1..3u64).prop_map(|(timeline, by)| PoolOp::Reach { timeline, by }),
        4 => pick().prop_map(|claim| PoolOp::Poll { claim }),
        1 => pick().prop_map(|claim| PoolOp::DropClaim { claim }),
        1 => Just(PoolOp::Drain),
    ];
    prop::collection::vec(op, 1..=count)
}
