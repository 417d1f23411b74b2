//! The published crates that do the same.

use std::alloc::Layout;
use std::ops::Range;
use std::ptr::NonNull;

use crate::contender::{Contender, GRANULE};

#[inline]
fn granules(len: u64) -> u32 {
    len.div_ceil(GRANULE) as u32
}

/// The crate `offset-allocator`: two levels of bins by size, eight to a power of two.
pub struct OffsetAllocator(offset_allocator::Allocator<u32>);

impl Contender for OffsetAllocator {
    const NAME: &'static str = "offset-allocator";
    type Region = (offset_allocator::Allocation<u32>, u64);

    fn new(capacity: u64, runs_max: usize) -> Self {
        let runs_max = u32::try_from(runs_max).expect("the workloads make fewer runs");
        let granules = granules(capacity);
        Self(offset_allocator::Allocator::with_max_allocs(
            granules, runs_max,
        ))
    }

    #[inline]
    fn take(&mut self, len: u64) -> Option<Self::Region> {
        Some((self.0.allocate(granules(len))?, len))
    }

    #[inline]
    fn give(&mut self, region: Self::Region) {
        self.0.free(region.0);
    }

    fn offset(&self, region: &Self::Region) -> u64 {
        u64::from(region.0.offset) * GRANULE
    }

    #[inline]
    fn len(region: &Self::Region) -> u64 {
        region.1
    }
}

/// The crate `range-alloc`: best fit by a scan over all holes.
pub struct RangeAlloc(range_alloc::RangeAllocator<u32>);

impl Contender for RangeAlloc {
    const NAME: &'static str = "range-alloc";
    type Region = (Range<u32>, u64);

    fn new(capacity: u64, _: usize) -> Self {
        Self(range_alloc::RangeAllocator::new(0..granules(capacity)))
    }

    #[inline]
    fn take(&mut self, len: u64) -> Option<Self::Region> {
        Some((self.0.allocate_range(granules(len)).ok()?, len))
    }

    #[inline]
    fn give(&mut self, region: Self::Region) {
        self.0.free_range(region.0);
    }

    fn offset(&self, region: &Self::Region) -> u64 {
        u64::from(region.0.start) * GRANULE
    }

    #[inline]
    fn len(region: &Self::Region) -> u64 {
        region.1
    }
}

/// The crate `rlsf`: two-level segregated fit.
///
/// It keeps its headers inside the memory it manages, so it cannot manage a device's. Here it manages a
/// shadow of the slab, 32 bytes for each granule, and a region costs one more granule for its header.
pub struct Rlsf {
    tlsf: rlsf::Tlsf<'static, u32, u32, 28, 32>,
    base: usize,
}

const SHADOW: u64 = 32;

impl Contender for Rlsf {
    const NAME: &'static str = "rlsf";
    type Region = (NonNull<u8>, u64);

    fn new(capacity: u64, _: usize) -> Self {
        let len = (u64::from(granules(capacity)) * SHADOW) as usize;
        // Leaked: what is never touched takes no memory, and the program is short.
        let shadow = Box::leak(Box::<[u8]>::new_uninit_slice(len + SHADOW as usize));
        let skipped = shadow.as_ptr().align_offset(SHADOW as usize);
        let shadow = &mut shadow[skipped..skipped + len];
        let base = shadow.as_ptr() as usize;
        let mut tlsf = rlsf::Tlsf::new();
        tlsf.insert_free_block(shadow);
        Self { tlsf, base }
    }

    #[inline]
    fn take(&mut self, len: u64) -> Option<Self::Region> {
        let bytes = (u64::from(granules(len)) * SHADOW) as usize;
        let layout = Layout::from_size_align(bytes, 8).ok()?;
        let pointer = self.tlsf.allocate(layout)?;
        Some((pointer, len))
    }

    #[inline]
    fn give(&mut self, region: Self::Region) {
        // SAFETY: `take` got the pointer from this allocator with this alignment, and regions are neither
        // copied nor given back twice.
        unsafe { self.tlsf.deallocate(region.0, 8) }
    }

    fn offset(&self, region: &Self::Region) -> u64 {
        // The header lies in the same granule, below the pointer.
        (region.0.as_ptr() as usize - self.base) as u64 / SHADOW * GRANULE
    }

    #[inline]
    fn len(region: &Self::Region) -> u64 {
        region.1
    }
}
