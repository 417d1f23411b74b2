//! The three arrays of a batched copy call, and their reuse.

use alloc::vec::Vec;

use super::{CopySpan, DescriptorError};

/// Places for copies: source addresses, destination addresses and byte counts, in three arrays of one length.
///
/// A place that was not written since the list was made holds zeros, and one of a list that was used before holds
/// what that use left; hand a driver only what was stored.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct CopyList {
    sources: Vec<u64>,
    destinations: Vec<u64>,
    lengths: Vec<u64>,
}

impl CopyList {
    /// A list of `places` places. O(places).
    #[must_use]
    pub fn new(places: usize) -> Self {
        let mut list = Self::default();
        list.grow(places);
        list
    }

    fn grow(&mut self, places: usize) {
        self.sources.resize(places, 0);
        self.destinations.resize(places, 0);
        self.lengths.resize(places, 0);
    }

    /// Number of places.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.sources.len()
    }

    /// Source addresses.
    #[must_use]
    pub fn sources(&self) -> &[u64] {
        &self.sources
    }

    /// Destination addresses.
    #[must_use]
    pub fn destinations(&self) -> &[u64] {
        &self.destinations
    }

    /// Byte counts.
    #[must_use]
    pub fn lengths(&self) -> &[u64] {
        &self.lengths
    }

    /// Stores copies at the places from `first` on, and returns the place after the last one.
    ///
    /// # Errors
    /// [`DescriptorError::OutOfPlaces`] if they do not fit. The places that exist may have been written.
    ///
    /// # Complexity
    /// O(copies).
    pub fn store(
        &mut self,
        first: usize,
        copies: impl IntoIterator<Item = CopySpan>,
    ) -> Result<usize, DescriptorError> {
        let capacity = self.capacity();
        let mut copies = copies.into_iter();
        let places = self.sources.get_mut(first..).into_iter().flatten();
        let places = places
            .zip(self.destinations.get_mut(first..).into_iter().flatten())
            .zip(self.lengths.get_mut(first..).into_iter().flatten());
        let mut stored = 0;
        // The places are asked first, so that no copy is taken for a place that does not exist.
        for ((source, destination), length) in places {
            let Some(copy) = copies.next() else {
                return Ok(first + stored);
            };
            *source = copy.source;
            *destination = copy.destination;
            *length = copy.len;
            stored += 1;
        }
        let left = copies.count();
        if left == 0 && first <= capacity {
            Ok(first + stored)
        } else {
            Err(DescriptorError::OutOfPlaces {
                first,
                count: stored + left,
                capacity,
            })
        }
    }
}

/// Idle [`CopyList`]s for reuse.
///
/// A list is either here or in somebody's hands: it is moved out and back and cannot be cloned, so none can be
/// handed out twice.
///
/// ```
/// use slab_core::CopyListPool;
///
/// let mut pool = CopyListPool::new(8);
/// let large = pool.acquire(1000);
/// let small = pool.acquire(10);
/// pool.release(large);
/// pool.release(small);
/// assert_eq!(pool.acquire(5).capacity(), 10, "the smallest that is large enough");
/// assert_eq!(pool.acquire(500).capacity(), 1000);
/// ```
#[derive(Debug)]
pub struct CopyListPool {
    /// By capacity.
    idle: Vec<CopyList>,
    idle_max: usize,
}

impl CopyListPool {
    /// A pool that keeps at most `idle_max` idle lists.
    #[must_use]
    pub fn new(idle_max: usize) -> Self {
        Self {
            idle: Vec::new(),
            idle_max,
        }
    }

    /// The smallest idle list of at least `places` places; else the largest one, grown; else a new one of just as
    /// many.
    ///
    /// # Complexity
    /// O(log idle) to find it and O(idle) to take it out; growing is O(places).
    pub fn acquire(&mut self, places: usize) -> CopyList {
        let at = self.idle.partition_point(|list| list.capacity() < places);
        if at < self.idle.len() {
            return self.idle.remove(at);
        }
        match self.idle.pop() {
            Some(mut list) => {
                list.grow(places);
                list
            }
            None => CopyList::new(places),
        }
    }

    /// Takes a list back. If the pool is full, the smallest one is dropped.
    ///
    /// Only once whoever read the arrays is done with them: a driver may read them after its call has returned.
    ///
    /// # Complexity
    /// O(idle).
    pub fn release(&mut self, list: CopyList) {
        let at = self
            .idle
            .partition_point(|idle| idle.capacity() < list.capacity());
        self.idle.insert(at, list);
        if self.idle.len() > self.idle_max {
            self.idle.remove(0);
        }
    }

    /// Number of idle lists.
    #[must_use]
    pub fn idle(&self) -> usize {
        self.idle.len()
    }
}
