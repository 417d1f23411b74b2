//! What an allocator has to offer to take part, this project's own, and none at all.

use slab_core::{Allocation, FreeList, FreeListConfig, Placement, PoolId};

/// Bytes of a granule.
pub const GRANULE: u64 = 256;

/// An allocator of offsets.
pub trait Contender: Sized {
    /// What the tables call it.
    const NAME: &'static str;

    /// All that a user keeps of a region: what giving it back needs, and the bytes asked for.
    type Region;

    /// An empty slab. `runs_max` is a bound on live regions and holes together, for contenders that
    /// allocate their map beforehand.
    fn new(capacity: u64, runs_max: usize) -> Self;

    /// Takes `len` bytes, not zero, if there is room.
    fn take(&mut self, len: u64) -> Option<Self::Region>;

    /// Gives a region back.
    fn give(&mut self, region: Self::Region);

    /// First byte of a region.
    fn offset(&self, region: &Self::Region) -> u64;

    /// Bytes asked for.
    fn len(region: &Self::Region) -> u64;
}

/// What the measuring itself costs: hands out offsets that mean nothing.
#[derive(Debug)]
pub struct Nothing(u64);

impl Contender for Nothing {
    const NAME: &'static str = "(no allocator)";
    type Region = (u64, u64);

    fn new(_: u64, _: usize) -> Self {
        Self(0)
    }

    #[inline]
    fn take(&mut self, len: u64) -> Option<Self::Region> {
        self.0 += GRANULE;
        Some((self.0, len))
    }

    #[inline]
    fn give(&mut self, _: Self::Region) {}

    fn offset(&self, region: &Self::Region) -> u64 {
        region.0
    }

    #[inline]
    fn len(region: &Self::Region) -> u64 {
        region.1
    }
}

macro_rules! own {
    ($name:ident, $placement:ident, $label:literal, $doc:literal) => {
        #[doc = $doc]
        #[derive(Debug)]
        pub struct $name(FreeList);

        impl Contender for $name {
            const NAME: &'static str = $label;
            type Region = Allocation;

            fn new(capacity: u64, runs_max: usize) -> Self {
                let mut config = FreeListConfig::new(PoolId::new(), capacity);
                config.alignment = GRANULE;
                config.placement = Placement::$placement;
                config.runs_reserved = runs_max;
                Self(FreeList::new(config).expect("the workloads' slabs are valid"))
            }

            #[inline]
            fn take(&mut self, len: u64) -> Option<Allocation> {
                self.0.allocate(len).ok()
            }

            #[inline]
            fn give(&mut self, region: Allocation) {
                assert!(self.0.free(region).is_ok(), "a token of this list");
            }

            fn offset(&self, region: &Allocation) -> u64 {
                region.offset()
            }

            #[inline]
            fn len(region: &Allocation) -> u64 {
                region.len()
            }
        }
    };
}

own!(
    BestFit,
    BestFit,
    "slab-core best fit",
    "`slab-core` with `Placement::BestFit`."
);
own!(
    FirstFit,
    FirstFit,
    "slab-core first fit",
    "`slab-core` with `Placement::FirstFit`."
);
