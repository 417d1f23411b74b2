//! Ranges of a slab: plain ones that anybody may copy, and owned ones.

use core::fmt;

use crate::id::PoolId;

/// A range of bytes in a slab. Says where, owns nothing.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Region {
    offset: u64,
    len: u64,
}

impl Region {
    /// The range of `len` bytes from `offset`, or `None` if its end does not fit in a `u64`.
    #[must_use]
    pub const fn new(offset: u64, len: u64) -> Option<Self> {
        match offset.checked_add(len) {
            Some(_) => Some(Self { offset, len }),
            None => None,
        }
    }

    /// The `len` bytes at `offset`, rounded up to granules of `1 << shift`. They lie in a slab, so their end
    /// does not overflow.
    pub(crate) const fn of_granules(offset: u64, len: u64, shift: u32) -> Self {
        if len == 0 {
            return Self::EMPTY;
        }
        Self {
            offset,
            len: (((len - 1) >> shift) + 1) << shift,
        }
    }

    /// The empty range at the start of the slab.
    pub(crate) const EMPTY: Self = Self { offset: 0, len: 0 };

    /// First byte, counted from the start of the slab.
    #[must_use]
    pub const fn offset(self) -> u64 {
        self.offset
    }

    /// Length in bytes.
    #[must_use]
    pub const fn len(self) -> u64 {
        self.len
    }

    /// One past the last byte. Cannot overflow: [`Region::new`] checked it.
    #[must_use]
    pub const fn end(self) -> u64 {
        self.offset + self.len
    }

    /// Whether the range has no bytes.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Whether every byte of `other` lies in this range.
    #[must_use]
    pub const fn contains(self, other: Self) -> bool {
        self.offset <= other.offset && other.end() <= self.end()
    }

    /// Whether the two ranges share a byte.
    #[must_use]
    pub const fn overlaps(self, other: Self) -> bool {
        !self.is_empty()
            && !other.is_empty()
            && self.offset < other.end()
            && other.offset < self.end()
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.offset, self.end())
    }
}

/// The right to use one region: who holds it is the only one to do so.
///
/// Made by [`FreeList::allocate`](crate::FreeList::allocate) or
/// [`Pool::reserve`](crate::Pool::reserve) and consumed by the call that gives the bytes back or turns
/// them into a resident. It cannot be cloned, so there is no double free. **Dropping it leaks the
/// region** until the pool itself goes; wrap it in an `AllocationGuard`
/// where that could happen.
#[must_use = "dropping an allocation leaks its region"]
#[derive(PartialEq, Eq)]
pub struct Allocation {
    pool: PoolId,
    offset: u64,
    /// Bytes asked for. The region is this, rounded up to the granule.
    len: u64,
    /// Slot of its run, and above it the binary logarithm of the granule: a token of four equal words is
    /// moved word by word, where one with a tail of small fields is put together and taken apart again.
    place: u64,
}

impl Allocation {
    /// `len` bytes, not zero, at `offset`, in the run at `slot` of a pool with granules of `1 << shift`.
    #[inline]
    pub(crate) const fn new(pool: PoolId, slot: u32, offset: u64, len: u64, shift: u32) -> Self {
        Self {
            pool,
            offset,
            len,
            place: (shift as u64) << 32 | slot as u64,
        }
    }

    /// The allocation of no bytes: owns nothing, so any number of them exist.
    pub(crate) const fn empty(pool: PoolId) -> Self {
        Self::new(pool, crate::slots::NIL, 0, 0, 0)
    }

    /// The run it owns, `NIL` if none.
    #[inline]
    pub(crate) const fn slot(&self) -> u32 {
        self.place as u32
    }

    /// First byte, counted from the start of the slab. Zero for an empty allocation.
    #[inline]
    #[must_use]
    pub const fn offset(&self) -> u64 {
        self.offset
    }

    /// Bytes that were asked for.
    #[inline]
    #[must_use]
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// The region owned: from [`offset`](Self::offset), at least [`len`](Self::len) bytes, a multiple
    /// of the alignment.
    #[must_use]
    pub const fn region(&self) -> Region {
        Region::of_granules(self.offset, self.len, (self.place >> 32) as u32)
    }

    /// Whether zero bytes were asked for, so that nothing is owned.
    #[inline]
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The pool that made it.
    #[inline]
    #[must_use]
    pub const fn pool(&self) -> PoolId {
        self.pool
    }
}

impl fmt::Debug for Allocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Allocation({:?} of {:?}, {} bytes)",
            self.region(),
            self.pool,
            self.len
        )
    }
}

#[cfg(test)]
mod tests {
    use super::Region;

    fn region(offset: u64, len: u64) -> Region {
        Region::new(offset, len).expect("in range")
    }

    #[test]
    fn a_region_whose_end_overflows_is_refused() {
        assert_eq!(Region::new(u64::MAX, 1), None);
        assert_eq!(region(u64::MAX - 1, 1).end(), u64::MAX);
    }

    #[test]
    fn regions_that_only_touch_do_not_overlap() {
        assert!(!region(0, 4).overlaps(region(4, 4)));
        assert!(region(0, 5).overlaps(region(4, 4)));
        assert!(!region(2, 0).overlaps(region(0, 8)));
        assert!(region(0, 8).contains(region(4, 4)));
        assert!(!region(0, 8).contains(region(4, 5)));
    }
}
