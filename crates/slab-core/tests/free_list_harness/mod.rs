//! Drives a free list and the oracle of its holes through the same calls and compares them after each.

use slab_core::{
    Allocation, Error, FreeList, FreeListConfig, Heap, Inline, Placement, PoolId, Store,
};
use slab_model::{FreeOp, NaiveHoles};

fn config(placement: Placement, capacity: u64, alignment: u64) -> FreeListConfig {
    let mut config = FreeListConfig::new(PoolId::new(), capacity);
    config.alignment = alignment;
    config.placement = placement;
    config.runs_reserved = 0;
    config
}

/// The list and the oracle that checks every placement.
pub(crate) struct Checked<St: Store = Heap> {
    list: FreeList<St>,
    alignment: u64,
    holes: NaiveHoles,
    pub(crate) live: Vec<Allocation>,
}

impl Checked {
    /// On the heap.
    pub(crate) fn new(placement: Placement, capacity: u64, alignment: u64) -> Self {
        let config = config(placement, capacity, alignment);
        Self::of(FreeList::new(config).expect("valid configuration"))
    }
}

/// Room for more runs than the slabs of the tests can be cut into.
pub(crate) type InlineStore = Inline<1024, 384>;

impl Checked<InlineStore> {
    /// Without a heap.
    pub(crate) fn new_inline(placement: Placement, capacity: u64, alignment: u64) -> Self {
        Self::of(FreeList::new_inline(config(placement, capacity, alignment)))
    }
}

impl<St: Store> Checked<St> {
    fn of(list: FreeList<St>) -> Self {
        let alignment = list.alignment();
        Self {
            alignment,
            holes: NaiveHoles::new(list.capacity() / alignment),
            list,
            live: Vec::new(),
        }
    }

    /// Applies one call. `placed` sees granules asked for, start, hole chosen and tightest hole.
    pub(crate) fn apply(
        &mut self,
        op: &FreeOp,
        mut placed: impl FnMut(u64, Option<u64>, u64, u64),
    ) {
        let alignment = self.alignment;
        match *op {
            FreeOp::Allocate(len) => {
                let granules = len.div_ceil(alignment);
                match self.list.allocate(len) {
                    Ok(allocation) => {
                        assert_eq!(allocation.len(), len);
                        assert_eq!(allocation.region().len(), granules * alignment);
                        assert_eq!(allocation.offset() % alignment, 0);
                        if len > 0 {
                            let start = allocation.offset() / alignment;
                            let (chosen, tightest) = self.holes.placed(start, granules);
                            placed(granules, Some(start), chosen, tightest);
                        }
                        self.live.push(allocation);
                    }
                    Err(error) => {
                        self.holes.refused(granules);
                        placed(granules, None, 0, 0);
                        let usable = self.list.usable();
                        let expected = if granules > self.list.usable() / alignment {
                            Error::TooLarge {
                                requested: len,
                                usable,
                            }
                        } else {
                            Error::Exhausted {
                                requested: len,
                                free: self.list.free_bytes(),
                                largest_free: self.holes.longest() * alignment,
                            }
                        };
                        assert_eq!(error, expected);
                    }
                }
            }
            FreeOp::Free(pick) => {
                if let Some(allocation) = pick_from(&mut self.live, pick) {
                    if !allocation.is_empty() {
                        let region = allocation.region();
                        self.holes
                            .freed(region.offset() / alignment, region.len() / alignment);
                    }
                    self.list.free(allocation).expect("own token");
                }
            }
        }
        self.check_map();
    }

    /// Cover, coalesced, conserved: the map is the oracle's, run for run.
    fn check_map(&self) {
        let alignment = self.alignment;
        let runs: Vec<_> = self
            .list
            .runs()
            .map(|run| {
                (
                    run.region.offset() / alignment,
                    run.region.len() / alignment,
                    run.is_free,
                )
            })
            .collect();
        assert_eq!(runs, self.holes.runs());
        assert!(
            runs.windows(2).all(|pair| !(pair[0].2 && pair[1].2)),
            "two free runs touch"
        );
        let free: u64 = runs.iter().filter(|run| run.2).map(|run| run.1).sum();
        assert_eq!(self.list.free_bytes(), free * alignment);
        assert_eq!(self.list.largest_free(), self.holes.longest() * alignment);
        assert_eq!(self.list.run_count() as usize, runs.len());
    }

    pub(crate) fn free_all(mut self) {
        while let Some(allocation) = self.live.pop() {
            self.list.free(allocation).expect("own token");
        }
        assert_eq!(self.list.largest_free(), self.list.usable());
        assert_eq!(self.list.run_count(), 1);
    }
}

pub(crate) fn pick_from<T>(values: &mut Vec<T>, pick: usize) -> Option<T> {
    (!values.is_empty()).then(|| values.swap_remove(pick % values.len()))
}
