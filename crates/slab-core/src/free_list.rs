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

#[cfg(feature = "alloc")]
use alloc::{vec, vec::Vec};
use core::fmt;

use crate::error::{Error, Refused};
use crate::id::PoolId;
use crate::placement::Placement;
use crate::region::{Allocation, Region};
#[cfg(feature = "alloc")]
use crate::store::Heap;
use crate::store::{Inline, Store};
use bins::Bins;
use index::Index;
use nodes::{FIRST, NONE, Nodes};
use treap::Treap;

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

    /// Granules of the slab, at least one.
    const fn granules(&self) -> Result<u64, Error> {
        if !self.alignment.is_power_of_two() {
            return Err(Error::InvalidAlignment {
                alignment: self.alignment,
            });
        }
        match self.capacity >> self.alignment.trailing_zeros() {
            0 => Err(Error::CapacityTooSmall {
                capacity: self.capacity,
                alignment: self.alignment,
            }),
            len => Ok(len),
        }
    }
}

// The type is written once for both cases of the default store, which exists only with the feature.
macro_rules! define_free_list {
    ($($default:tt)*) => {
        /// Carves regions of any size from a slab and takes them back, touching no memory but its own map.
        ///
        #[cfg_attr(feature = "alloc", doc = "```")]
        #[cfg_attr(not(feature = "alloc"), doc = "```ignore")]
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
        pub struct FreeList<St: Store $($default)*> {
            id: PoolId,
            capacity: u64,
            /// Binary logarithm of the alignment.
            shift: u32,
            placement: Placement,
            nodes: Nodes<St>,
            index: Index<St>,
            /// Granules by the tag of their run, but none for [`Tag::Caller`], which has the rest.
            granules: [u64; Tag::COUNT],
        }
    };
}

#[cfg(feature = "alloc")]
define_free_list!(= Heap);
#[cfg(not(feature = "alloc"))]
define_free_list!();

/// One run of the map of a [`FreeList`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FreeRun {
    /// Where it is.
    pub region: Region,
    /// Whether it can be handed out; otherwise an [`Allocation`] owns it.
    pub is_free: bool,
}

#[cfg(feature = "alloc")]
impl FreeList<Heap> {
    /// Makes the list of a slab that is entirely free.
    ///
    /// # Errors
    /// [`Error::InvalidAlignment`] if the alignment is not a power of two;
    /// [`Error::CapacityTooSmall`] if not one granule fits.
    ///
    /// # Complexity
    /// O(runs reserved), and O(size classes of the capacity) for best fit.
    pub fn new(config: FreeListConfig) -> Result<Self, Error> {
        fn with_room<T, const N: usize>(values: [T; N], room: usize) -> Vec<T> {
            let mut array = Vec::with_capacity(room.max(N));
            array.extend(values);
            array
        }
        let len = config.granules()?;
        // One node more than the map needs, since one is kept spare.
        let slots = config.runs_reserved.saturating_add(3);
        let (nodes, down, free) = nodes::initial(len);
        let nodes = Nodes::new(
            with_room(nodes, slots),
            with_room(down, slots),
            with_room(free, slots / 8 + 1),
        );
        let index = match config.placement {
            Placement::BestFit => {
                let mut heads = vec![NONE; bins::class_of(len) + 1];
                heads[bins::class_of(len)] = FIRST;
                Index::BestFit(Bins::new(heads, len))
            }
            Placement::FirstFit => {
                Index::FirstFit(Treap::new(with_room(treap::initial(len), slots)))
            }
        };
        Ok(Self::assemble(&config, len, nodes, index))
    }
}

impl<const SLOTS: usize, const CLASSES: usize> FreeList<Inline<SLOTS, CLASSES>> {
    /// Makes the list of a slab that is entirely free, without a heap. `runs_reserved` has no meaning here.
    ///
    /// # Panics
    /// If the alignment is not a power of two, not one granule fits, or the capacity needs more size classes
    /// than the store has. In a `const` or `static` that is a compile error.
    ///
    /// # Complexity
    /// O(slots + size classes) of the store.
    #[must_use]
    pub const fn new_inline(config: FreeListConfig) -> Self {
        const { Inline::<SLOTS, CLASSES>::IS_VALID };
        let len = match config.granules() {
            Ok(len) => len,
            Err(Error::InvalidAlignment { .. }) => panic!("the alignment is no power of two"),
            Err(_) => panic!("the capacity holds no granule"),
        };
        let (nodes, down, free) = nodes::initial(len);
        let nodes = Nodes::new(
            heapless::Vec::from_array(nodes),
            heapless::Vec::from_array(down),
            heapless::Vec::from_array(free),
        );
        let index = match config.placement {
            Placement::BestFit => {
                let class = bins::class_of(len);
                assert!(class < CLASSES, "the capacity needs more size classes");
                let mut heads = [NONE; CLASSES];
                heads[class] = FIRST;
                Index::BestFit(Bins::new(heapless::Vec::from_array(heads), len))
            }
            Placement::FirstFit => {
                let extra = heapless::Vec::from_array(treap::initial(len));
                Index::FirstFit(Treap::new(extra))
            }
        };
        Self::assemble(&config, len, nodes, index)
    }
}

impl<St: Store> FreeList<St> {
    const fn assemble(
        config: &FreeListConfig,
        len: u64,
        nodes: Nodes<St>,
        index: Index<St>,
    ) -> Self {
        let mut granules = [0; Tag::COUNT];
        granules[Tag::Free as usize] = len;
        Self {
            id: config.id,
            capacity: config.capacity,
            shift: config.alignment.trailing_zeros(),
            placement: config.placement,
            nodes,
            index,
            granules,
        }
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
    /// O(log runs), see [`Placement`]; O(runs) where the map can number no more of them.
    #[inline]
    pub fn allocate(&mut self, len: u64) -> Result<Allocation, Error> {
        if len == 0 {
            return Ok(Allocation::empty(self.id));
        }
        let need = self.granules_of(len);
        match self.take_or_none(need) {
            (NONE, _) => self.allocate_exact(len, need),
            (slot, start) => Ok(self.allocation(slot, start, len)),
        }
    }

    /// Where nothing can be cut: because nothing is long enough, or because no rest can be numbered.
    #[cold]
    #[inline(never)]
    fn allocate_exact(&mut self, len: u64, need: u64) -> Result<Allocation, Error> {
        if self.largest() < need {
            return Err(self.refusal(len, need));
        }
        match self.take_exact(need) {
            (NONE, _) => Err(self.refusal(len, need)),
            (slot, start) => Ok(self.allocation(slot, start, len)),
        }
    }

    #[inline]
    fn allocation(&self, slot: u32, start: u64, len: u64) -> Allocation {
        Allocation::new(self.id, slot, start << self.shift, len, self.shift)
    }

    fn refusal(&self, len: u64, need: u64) -> Error {
        if need > self.total() {
            Error::TooLarge {
                requested: len,
                usable: self.usable(),
            }
        } else if need <= self.largest() {
            self.too_many_runs()
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

impl<St: Store> fmt::Debug for FreeList<St> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FreeList")
            .field("id", &self.id)
            .field("placement", &self.placement)
            .field("usable", &self.usable())
            .field("free", &self.free_bytes())
            .field("runs", &self.run_count())
            .finish_non_exhaustive()
    }
}
