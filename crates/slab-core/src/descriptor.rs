//! Lists of raw copies, as a batched copy call takes them, and how they follow from blocks.
//!
//! A region of equal blocks holds a tensor in blocks that need not lie side by side. [`runs`] finds those that do,
//! [`Blocks::save`] and [`Blocks::load`] turn them into [`CopySpan`]s, and a [`CopyList`] collects the spans of a
//! whole step in the three arrays that a driver's batch call wants. Addresses are plain numbers here: nothing is
//! copied, and nothing is dereferenced.

#[cfg(feature = "alloc")]
mod list;

use core::error;
use core::fmt;
use core::num::NonZeroU64;

#[cfg(feature = "alloc")]
pub use list::{CopyList, CopyListPool};

/// Blocks that follow one another, both in the list of block ids and in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockRun {
    /// Index of the first one in the list.
    pub slot: usize,
    /// Id of the first one.
    pub first: u64,
    /// Number of blocks, at least one.
    pub len: usize,
}

/// The fewest runs that `ids` consist of, in order. No ids make no runs.
///
/// A new run begins wherever an id is not one more than the id before it: descending and repeated ids make runs of
/// one. O(ids) in all, without memory of its own.
///
/// ```
/// use slab_core::runs;
///
/// let found: Vec<_> = runs(&[7, 8, 9, 3]).map(|run| (run.slot, run.first, run.len)).collect();
/// assert_eq!(found, [(0, 7, 3), (3, 3, 1)]);
/// assert_eq!(runs(&[]).count(), 0);
/// ```
pub fn runs(ids: &[u64]) -> impl Iterator<Item = BlockRun> + '_ {
    let mut slot = 0;
    core::iter::from_fn(move || {
        let rest = ids.get(slot..)?;
        let first = *rest.first()?;
        let steps = rest
            .windows(2)
            .take_while(|pair| pair[0].checked_add(1) == Some(pair[1]));
        let run = BlockRun {
            slot,
            first,
            len: 1 + steps.count(),
        };
        slot += run.len;
        Some(run)
    })
}

/// One copy of raw bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CopySpan {
    /// Address of the first byte read.
    pub source: u64,
    /// Address of the first byte written.
    pub destination: u64,
    /// Bytes.
    pub len: u64,
}

/// Why copies could not be listed; nothing has changed. All sizes are bytes.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DescriptorError {
    /// The tensor is larger than its blocks.
    TooFewBlocks {
        /// Bytes of the tensor.
        bytes: u64,
        /// Number of blocks.
        blocks: usize,
        /// Bytes of a block.
        block_bytes: u64,
    },
    /// The region has no block of that id.
    NoSuchBlock {
        /// The id.
        id: u64,
        /// Number of blocks of the region.
        blocks: u64,
    },
    /// An address would not fit 64 bits.
    AddressOverflow,
    /// The list has not that many places.
    OutOfPlaces {
        /// First place asked for.
        first: usize,
        /// Number of copies.
        count: usize,
        /// Places of the list.
        capacity: usize,
    },
}

impl fmt::Display for DescriptorError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::TooFewBlocks {
                bytes,
                blocks,
                block_bytes,
            } => write!(
                f,
                "a tensor of {bytes} bytes does not fit {blocks} blocks of {block_bytes} bytes"
            ),
            Self::NoSuchBlock { id, blocks } => {
                write!(f, "block {id} was named, the region has {blocks}")
            }
            Self::AddressOverflow => f.write_str("an address would not fit 64 bits"),
            Self::OutOfPlaces {
                first,
                count,
                capacity,
            } => write!(
                f,
                "{count} copies from place {first} on do not fit a list of {capacity}"
            ),
        }
    }
}

impl error::Error for DescriptorError {}

/// A region of equal blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks {
    base: u64,
    block_bytes: NonZeroU64,
    count: u64,
}

impl Blocks {
    /// The region of `count` blocks of `block_bytes` bytes at address `base`.
    ///
    /// # Errors
    /// [`DescriptorError::AddressOverflow`] if its end does not fit 64 bits.
    pub fn new(base: u64, block_bytes: NonZeroU64, count: u64) -> Result<Self, DescriptorError> {
        count
            .checked_mul(block_bytes.get())
            .and_then(|bytes| base.checked_add(bytes))
            .ok_or(DescriptorError::AddressOverflow)?;
        Ok(Self {
            base,
            block_bytes,
            count,
        })
    }

    /// Blocks that a tensor of `bytes` bytes occupies.
    #[must_use]
    pub fn needed(&self, bytes: u64) -> u64 {
        bytes.div_ceil(self.block_bytes.get())
    }

    /// Copies that store a tensor of `bytes` bytes, lying at `tensor`, into the blocks `ids`.
    ///
    /// Only the blocks needed are written. The last copy is cut, so that the lengths add up to `bytes`.
    ///
    /// # Errors
    /// [`DescriptorError`] but for `OutOfPlaces`. All ids that are needed are checked before the first copy is made.
    ///
    /// # Complexity
    /// O(ids) for the check and again for the copies, which are as few as the ids allow.
    pub fn save<'a>(
        &self,
        ids: &'a [u64],
        tensor: u64,
        bytes: u64,
    ) -> Result<impl Iterator<Item = CopySpan> + use<'a>, DescriptorError> {
        let too_few = DescriptorError::TooFewBlocks {
            bytes,
            blocks: ids.len(),
            block_bytes: self.block_bytes.get(),
        };
        let needed = usize::try_from(self.needed(bytes)).map_err(|_| too_few)?;
        let ids = ids.get(..needed).ok_or(too_few)?;
        Ok(self
            .copies(ids, tensor, bytes)?
            .map(|(block, other, len)| CopySpan {
                source: other,
                destination: block,
                len,
            }))
    }

    /// Copies that bring the blocks `ids`, whole and in order, to `destination`.
    ///
    /// What the blocks hold beyond the tensor comes along, so the destination takes `ids.len()` blocks.
    ///
    /// # Errors
    /// [`DescriptorError::NoSuchBlock`] or [`DescriptorError::AddressOverflow`].
    ///
    /// # Complexity
    /// As [`save`](Self::save).
    pub fn load<'a>(
        &self,
        ids: &'a [u64],
        destination: u64,
    ) -> Result<impl Iterator<Item = CopySpan> + use<'a>, DescriptorError> {
        let bytes = (ids.len() as u64)
            .checked_mul(self.block_bytes.get())
            .ok_or(DescriptorError::AddressOverflow)?;
        Ok(self
            .copies(ids, destination, bytes)?
            .map(|(block, other, len)| CopySpan {
                source: block,
                destination: other,
                len,
            }))
    }

    /// Address in the region, address on the other side, bytes; cut where `bytes` are used up.
    fn copies<'a>(
        &self,
        ids: &'a [u64],
        other: u64,
        bytes: u64,
    ) -> Result<impl Iterator<Item = (u64, u64, u64)> + use<'a>, DescriptorError> {
        if let Some(&id) = ids.iter().find(|id| **id >= self.count) {
            return Err(DescriptorError::NoSuchBlock {
                id,
                blocks: self.count,
            });
        }
        // With this, and the check in `new`, no address below can overflow.
        other
            .checked_add(bytes)
            .ok_or(DescriptorError::AddressOverflow)?;
        let Self {
            base, block_bytes, ..
        } = *self;
        let block_bytes = block_bytes.get();
        Ok(runs(ids).map(move |run| {
            let from = run.slot as u64 * block_bytes;
            let len = (run.len as u64 * block_bytes).min(bytes - from);
            (base + run.first * block_bytes, other + from, len)
        }))
    }
}
