//! An item the owner has taken.

use std::any::Any;
use std::fmt;
use std::fs::File;
use std::ops::Range;
use std::sync::Arc;

use slab_core::LeaseGuard;
use slab_memory::{CopyError, SlabError};

use super::memory::PoolMemory;
use super::shard::Taken;
use crate::content_hash::{ContentDigest, ContentHasher};
use crate::name::{MmHash, ReservationId, TransferId};
use crate::staging::Source;
use crate::tensor::TensorSpec;

/// An item with its owner lease: as long as it exists its bytes cannot be evicted.
///
/// Dropping it retires the item: it stays resident, and makes room when room is needed.
pub struct TakenItem {
    transfer_id: TransferId,
    mm_hash: MmHash,
    tensor: TensorSpec,
    reservation_id: ReservationId,
    cached: bool,
    lease: LeaseGuard,
    memory: PoolMemory,
}

/// The bytes of an item could not be read.
#[derive(Debug, thiserror::Error)]
#[error("cannot read the item's bytes")]
pub struct ItemError(#[from] CopyError);

impl TakenItem {
    pub(super) fn new(taken: Taken, memory: PoolMemory) -> Self {
        Self {
            transfer_id: taken.transfer_id,
            mm_hash: taken.mm_hash,
            tensor: taken.tensor,
            reservation_id: taken.reservation_id,
            cached: taken.cached,
            lease: taken.lease,
            memory,
        }
    }

    /// Names the push.
    pub fn transfer_id(&self) -> &TransferId {
        &self.transfer_id
    }

    /// Names the content.
    pub fn mm_hash(&self) -> &MmHash {
        &self.mm_hash
    }

    /// Shape and type.
    pub fn tensor(&self) -> &TensorSpec {
        &self.tensor
    }

    /// Names the reservation.
    pub fn reservation_id(&self) -> ReservationId {
        self.reservation_id
    }

    /// No bytes were written for this push: the content was there, or another push brought it.
    pub fn is_cached(&self) -> bool {
        self.cached
    }

    /// Number of bytes.
    pub fn len_bytes(&self) -> u64 {
        self.tensor.len_bytes()
    }

    /// Copies bytes of the item, from `offset` on, into `target`.
    ///
    /// # Errors
    /// [`ItemError`] if the range does not lie inside the item, or if a device cannot be read.
    pub fn copy_out(&self, offset: u64, target: &mut [u8]) -> Result<(), ItemError> {
        let len = target.len() as u64;
        match offset.checked_add(len) {
            Some(end) if end <= self.len_bytes() => {}
            _ => {
                return Err(ItemError(CopyError::OutOfBounds {
                    offset,
                    len,
                    memory_len: self.len_bytes(),
                }));
            }
        }
        if target.is_empty() {
            return Ok(());
        }
        self.memory.copy_out(self.lease.offset() + offset, target)?;
        Ok(())
    }

    /// Writes all bytes to `file`, from `offset` on: from a host slab without a buffer in between, from other memory
    /// through one of 1 MiB.
    ///
    /// # Errors
    /// [`SlabError::File`], for instance if the disk is full; [`SlabError::Copy`] if a device cannot be read.
    pub fn write_to(&self, file: &File, offset: u64) -> Result<(), SlabError> {
        if self.len_bytes() == 0 {
            return Ok(());
        }
        self.memory.write_at(self.range(), file, offset)
    }

    /// Hashes the bytes.
    ///
    /// # Errors
    /// As [`copy_out`](Self::copy_out), which for an item's own range only a device can fail.
    ///
    /// # Complexity
    /// Reads the item once, through a buffer of 256 KiB.
    pub fn digest(&self) -> Result<ContentDigest, ItemError> {
        let mut hasher = ContentHasher::new(&self.tensor);
        let mut buffer = vec![0; HASH_BUFFER.min(self.len_bytes()) as usize];
        let mut offset = 0;
        while offset < self.len_bytes() {
            let len = HASH_BUFFER.min(self.len_bytes() - offset);
            let chunk = &mut buffer[..len as usize];
            self.copy_out(offset, chunk)?;
            hasher.update(chunk);
            offset += len;
        }
        Ok(hasher.finish())
    }

    /// The item as the source of a push to another consumer; its bytes are read where they lie.
    pub fn into_source(self) -> Source {
        Source::Memory {
            memory: self.memory.shared(),
            range: self.range(),
            hold: Arc::new(self) as Arc<dyn Any + Send + Sync>,
        }
    }

    /// The owner lease alone. Whoever holds it decides when the bytes may be reused: at once, by dropping it, or behind
    /// fences ([`LeaseGuard::release_after`]).
    pub fn into_lease(self) -> LeaseGuard {
        self.lease
    }

    fn range(&self) -> Range<u64> {
        let start = self.lease.offset();
        start..start + self.len_bytes()
    }
}

/// Small enough to stay in cache between copying and hashing.
const HASH_BUFFER: u64 = 256 << 10;

impl fmt::Debug for TakenItem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TakenItem")
            .field("transfer_id", &self.transfer_id)
            .field("mm_hash", &self.mm_hash)
            .field("cached", &self.cached)
            .finish_non_exhaustive()
    }
}
