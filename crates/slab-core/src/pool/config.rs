//! What a pool is made from. Every bound of the pool is here.

use crate::free_list::FreeListConfig;
use crate::id::PoolId;
use crate::placement::Placement;

/// What a [`Pool`](crate::Pool) is made from.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub struct PoolConfig {
    /// Identity of the pool, carried by its tokens.
    pub id: PoolId,
    /// Bytes of the slab. What lies above the last whole granule cannot be handed out.
    pub capacity: u64,
    /// Granule in bytes, a power of two. 256 by default.
    pub alignment: u64,
    /// Where regions go.
    pub placement: Placement,
    /// Most residents at a time, displaced ones that are still leased included. 65,536 by default. A
    /// publish beyond it evicts the coldest idle resident, and is refused if there is none.
    pub residents_max: u32,
    /// Most timelines that can be added. 16 by default.
    pub timelines_max: u32,
    /// Most claims at a time. 1,024 by default. Beyond it a reserve does without waiting bytes.
    pub claims_max: u32,
    /// Most evictions remembered between two drains. 4,096 by default. Beyond it the drain answers
    /// [`Reclaimed::All`](crate::Reclaimed::All).
    pub reclaimed_max: u32,
    /// Runs to make room for at once, so that the map does not grow under a lock later. 64 by default.
    pub runs_reserved: usize,
    /// Residents to make room for at once. 64 by default.
    pub residents_reserved: usize,
}

impl PoolConfig {
    /// The defaults of each field for a slab of `capacity` bytes.
    #[must_use]
    pub const fn new(id: PoolId, capacity: u64) -> Self {
        Self {
            id,
            capacity,
            alignment: 256,
            placement: Placement::BestFit,
            residents_max: 65_536,
            timelines_max: 16,
            claims_max: 1024,
            reclaimed_max: 4096,
            runs_reserved: 64,
            residents_reserved: 64,
        }
    }
    /// What the pool's map is made from.
    pub(super) const fn list(&self) -> FreeListConfig {
        let mut list = FreeListConfig::new(self.id, self.capacity);
        list.alignment = self.alignment;
        list.placement = self.placement;
        list.runs_reserved = self.runs_reserved;
        list
    }
}
