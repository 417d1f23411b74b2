//! Offset allocator over one slab.
//!
//! Invariants, by name:
//! - *cover*: the runs, free and live, cover the usable bytes without gap or overlap;
//! - *coalesced*: no two free runs touch;
//! - *conserved*: free bytes and live bytes add up to the usable capacity;
//! - *complete*: an allocation fails only if no free run is large enough.
//!
//! Not here: residents, leases, fences. [`Pool`](crate::Pool) adds them over the same map.

mod bins;
mod index;
mod map;
mod nodes;
mod treap;

use crate::error::{Error, Refused};
use crate::id::PoolId;
use crate::placement::Placement;
use crate::region::{Allocation, Region};
use index::Index;
use nodes::{NONE, Nodes, RUNS_MAX};

pub(crate) use nodes::Tag;

/// What a [`FreeList`] is made from.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub struct FreeListConfig {
    /// Identity of the list, carried by its tokens.
    pub id: PoolId,
    /// Bytes of the slab. What lies above the last whole granule cannot be handed out.
    pub capacity: u64,
    /// Granule in bytes, a power of two: every offset and every region's length is a multiple of it.
    /// 256 by default.
    pub alignment: u64,
    /// Where regions go.
    pub placement: Placement,
    /// Runs (free and live) to make room for at once, so that the map does not grow later. It grows
    /// beyond when needed.
    pub runs_reserved: usize,
}

impl FreeListConfig {
    /// The defaults: granules of 256 bytes, [`Placement::BestFit`], room for 64 runs.
    #[must_use]
    pub const fn new(id: PoolId, capacity: u64) -> Self {
        Self {
            id,
            capacity,
            alignment: 256,
            placement: Placement::BestFit,
            runs_reserved: 64,
        }
    }
}

/// Carves regions of any size from a slab and takes them back, touching no memory but its own map.
///
/// ```
/// use slab_core::{FreeList, FreeListConfig, PoolId};
///
/// # fn main() -> Result<(), slab_core::Error> {
/// let mut list = FreeList::new(FreeListConfig::new(PoolId::from_raw(1), 1 << 20))?;
/// let a = list.allocate(1000)?;
/// assert_eq!((a.offset(), a.len(), a.region().len()), (0, 1000, 1024));
/// list.free(a).expect("a token of this list");
/// assert_eq!(list.largest_free(), 1 << 20);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct FreeList {
    id: PoolId,
    capacity: u64,
    /// Binary logarithm of the alignment.
    shift: u32,
    placement: Placement,
    nodes: Nodes,
    index: Index,
    /// Granules by the tag of their run, but none for [`Tag::Caller`], which has the rest.
    granules: [u64; Tag::COUNT],
}

/// One run of the map of a [`FreeList`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FreeRun {
    /// Where it is.
    pub region: Region,
    /// Whether it can be handed out; otherwise an [`Allocation`] owns it.
    pub is_free: bool,
}

impl FreeList {
    /// Makes the list of a slab that is entirely free.
    ///
    /// # Errors
    /// [`Error::InvalidAlignment`] if the alignment is not a power of two;
    /// [`Error::CapacityTooSmall`] if not one granule fits.
    pub fn new(config: FreeListConfig) -> Result<Self, Error> {
        let FreeListConfig {
            id,
            capacity,
            alignment,
            placement,
            runs_reserved,
        } = config;
        if !alignment.is_power_of_two() {
            return Err(Error::InvalidAlignment { alignment });
        }
        let shift = alignment.trailing_zeros();
        let len = capacity >> shift;
        if len == 0 {
            return Err(Error::CapacityTooSmall {
                capacity,
                alignment,
            });
        }
        let mut nodes = Nodes::new(len, runs_reserved);
        let mut index = Index::new(placement, len, runs_reserved);
        index.insert(&mut nodes, Nodes::FIRST);
        let mut granules = [0; Tag::COUNT];
        granules[Tag::Free as usize] = len;
        Ok(Self {
            id,
            capacity,
            shift,
            placement,
            nodes,
            index,
            granules,
        })
    }

    /// Takes a region of at least `len` bytes, aligned, from the low end of a free run.
    ///
    /// Zero bytes give an empty allocation that owns nothing; that never fails.
    ///
    /// # Errors
    /// [`Error::TooLarge`] if `len` exceeds the usable capacity, [`Error::Exhausted`] if no free run is
    /// large enough now, [`Error::TooManyRuns`] if the map cannot number one more run. Nothing has
    /// changed then.
    ///
    /// # Complexity
    /// O(log runs), see [`Placement`].
    #[inline]
    pub fn allocate(&mut self, len: u64) -> Result<Allocation, Error> {
        if len == 0 {
            return Ok(Allocation::empty(self.id));
        }
        let need = self.granules_of(len);
        match self.take_or_none(need) {
            (NONE, _) => Err(self.refusal(len, need)),
            (slot, start) => Ok(Allocation::new(
                self.id,
                slot,
                start << self.shift,
                len,
                self.shift,
            )),
        }
    }

    #[cold]
    #[inline(never)]
    fn refusal(&self, len: u64, need: u64) -> Error {
        if need > self.total() {
            Error::TooLarge {
                requested: len,
                usable: self.usable(),
            }
        } else if need <= self.largest() {
            Error::TooManyRuns { runs_max: RUNS_MAX }
        } else {
            Error::Exhausted {
                requested: len,
                free: self.free_bytes(),
                largest_free: self.largest_free(),
            }
        }
    }

    /// Gives a region back. It merges with free neighbours at once.
    ///
    /// # Errors
    /// [`Error::ForeignToken`], with the token, if another list made it.
    ///
    /// # Complexity
    /// O(1) to find the neighbours and O(log runs) amortised to file the result. Needs no memory.
    #[inline]
    pub fn free(&mut self, allocation: Allocation) -> Result<(), Refused<Allocation>> {
        if self.knows(&allocation) {
            self.give_callers(allocation.slot());
            return Ok(());
        }
        self.free_unknown(allocation)
    }

    /// Frees an empty allocation, or says why the allocation cannot be freed here.
    #[cold]
    #[inline(never)]
    fn free_unknown(&self, allocation: Allocation) -> Result<(), Refused<Allocation>> {
        match self.check(&allocation) {
            Ok(()) => Ok(()),
            Err(cause) => Err(Refused {
                value: allocation,
                cause,
            }),
        }
    }

    /// The id its tokens carry.
    #[must_use]
    pub const fn id(&self) -> PoolId {
        self.id
    }

    /// Bytes of the slab, as configured.
    #[must_use]
    pub const fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Bytes that can be handed out: the capacity rounded down to the alignment.
    #[must_use]
    pub fn usable(&self) -> u64 {
        self.total() << self.shift
    }

    /// Bytes above the last whole granule, which are never handed out.
    #[must_use]
    pub fn unusable_tail(&self) -> u64 {
        self.capacity - self.usable()
    }

    /// Granule in bytes.
    #[must_use]
    pub const fn alignment(&self) -> u64 {
        1 << self.shift
    }

    /// Where regions go.
    #[must_use]
    pub const fn placement(&self) -> Placement {
        self.placement
    }

    /// Free bytes in all runs together.
    #[must_use]
    pub const fn free_bytes(&self) -> u64 {
        self.granules[Tag::Free as usize] << self.shift
    }

    /// Length of the largest free run: the largest request that succeeds now. O(1).
    #[must_use]
    pub fn largest_free(&self) -> u64 {
        self.largest() << self.shift
    }

    /// Runs of the map, free and live.
    #[must_use]
    pub const fn run_count(&self) -> u32 {
        self.nodes.count()
    }

    /// The map in address order. O(1) a step.
    pub fn runs(&self) -> impl Iterator<Item = FreeRun> + '_ {
        self.slots().map(|slot| FreeRun {
            region: self.region(slot),
            is_free: self.nodes.is_free(slot),
        })
    }
}
