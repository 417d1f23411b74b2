//! The memory that a pool divides.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use slab_memory::{CopyError, HostSlab, Memory, SlabError};

/// A host slab, which files can be written from directly, or other memory.
#[derive(Clone)]
pub(super) enum PoolMemory {
    Host(Arc<HostSlab>),
    Other(Arc<dyn Memory>),
}

/// Copied at a time on the way to a file. A copy from a device costs some microseconds whatever its length.
const PIECE: u64 = 1 << 20;

impl PoolMemory {
    pub(super) fn host(bytes: u64) -> Result<Self, SlabError> {
        HostSlab::new(bytes).map(|slab| Self::Host(Arc::new(slab)))
    }

    pub(super) fn shared(&self) -> Arc<dyn Memory> {
        match self {
            Self::Host(slab) => Arc::clone(slab) as Arc<dyn Memory>,
            Self::Other(memory) => Arc::clone(memory),
        }
    }

    pub(super) fn copy_out(&self, offset: u64, target: &mut [u8]) -> Result<(), CopyError> {
        match self {
            Self::Host(slab) => slab.copy_out(offset, target),
            Self::Other(memory) => memory.copy_out(offset, target),
        }
    }

    /// Writes `range` to `file`, from `offset` on.
    pub(super) fn write_at(
        &self,
        range: Range<u64>,
        file: &File,
        offset: u64,
    ) -> Result<(), SlabError> {
        let memory = match self {
            Self::Host(slab) => return slab.write_at(range, file, offset),
            Self::Other(memory) => memory,
        };
        let len = range.end.saturating_sub(range.start);
        let mut buffer = vec![0; PIECE.min(len) as usize];
        let mut done = 0;
        while done < len {
            let piece = &mut buffer[..PIECE.min(len - done) as usize];
            memory.copy_out(range.start + done, piece)?;
            let at = offset.checked_add(done).ok_or(SlabError::File {
                done,
                source: io::ErrorKind::FileTooLarge.into(),
            })?;
            file.write_all_at(piece, at)
                .map_err(|source| SlabError::File { done, source })?;
            done += piece.len() as u64;
        }
        Ok(())
    }
}
