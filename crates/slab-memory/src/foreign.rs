//! Host memory that somebody else owns.
// Wraps an address that the caller vouches for.
#![allow(unsafe_code)]

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU8, Ordering};

use crate::memory::{CopyError, Memory, MemoryKind, check_range};

/// Host memory at an address that was given from outside, such as by a C program. It frees nothing.
///
/// The bytes may be read and written by their owner at any time; what is copied meanwhile may be seen in
/// part.
#[derive(Debug)]
pub struct ForeignMemory {
    base: NonNull<u8>,
    len: usize,
}

impl ForeignMemory {
    /// Wraps the `len` bytes from `addr` on.
    ///
    /// `None` if `addr` is null, if there are more bytes than an object may have (`isize::MAX`), or if
    /// the range wraps around the end of the address space.
    ///
    /// # Safety
    /// As long as the value lives, and an engine may keep it until a request that touches it has ended:
    /// - all `len` bytes are mapped, readable and writable for this process;
    /// - no Rust reference to any of them exists, and other Rust code accesses them only by raw pointers,
    ///   not at the same time as [`copy_in`](Memory::copy_in) or [`copy_out`](Memory::copy_out) of an
    ///   overlapping range.
    pub unsafe fn new(addr: *mut u8, len: usize) -> Option<Self> {
        let base = NonNull::new(addr)?;
        let end = addr.addr().checked_add(len);
        (isize::try_from(len).is_ok() && end.is_some()).then_some(Self { base, len })
    }

    /// The bytes from `offset` on, one by one: nothing is known about alignment.
    fn bytes(&self, offset: u64, len: usize) -> Result<&[AtomicU8], CopyError> {
        check_range(offset, len as u64, self.len as u64)?;
        // SAFETY: the range lies inside the memory, which `new`'s caller promises to be mapped and
        // accessed by nobody else in a way that a shared slice of atomics does not allow.
        Ok(unsafe {
            core::slice::from_raw_parts(self.base.as_ptr().add(offset as usize).cast(), len)
        })
    }
}

// SAFETY: the address is not tied to a thread, and every access here is atomic.
unsafe impl Send for ForeignMemory {}
// SAFETY: as for `Send`.
unsafe impl Sync for ForeignMemory {}

// SAFETY: the two fields never change; `new`'s caller promises that the bytes stay mapped and that no
// reference to them exists; `new` refuses a range that wraps.
unsafe impl Memory for ForeignMemory {
    fn len(&self) -> u64 {
        self.len as u64
    }

    fn kind(&self) -> MemoryKind {
        MemoryKind::Host
    }

    fn address(&self) -> u64 {
        self.base.as_ptr().addr() as u64
    }

    fn host_ptr(&self) -> Option<NonNull<u8>> {
        Some(self.base)
    }

    /// A byte at a time; engines go through [`host_ptr`](Memory::host_ptr) instead.
    fn copy_in(&self, offset: u64, source: &[u8]) -> Result<(), CopyError> {
        let bytes = self.bytes(offset, source.len())?;
        for (byte, value) in bytes.iter().zip(source) {
            byte.store(*value, Ordering::Relaxed);
        }
        Ok(())
    }

    fn copy_out(&self, offset: u64, target: &mut [u8]) -> Result<(), CopyError> {
        let bytes = self.bytes(offset, target.len())?;
        for (byte, value) in bytes.iter().zip(target) {
            *value = byte.load(Ordering::Relaxed);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;

    #[test]
    fn bytes_go_to_and_from_the_owner() {
        let mut owned = vec![0u8; 100];
        let start = owned.as_mut_ptr();
        // SAFETY: the vector lives on, and is not touched while `memory` does.
        let memory = unsafe { ForeignMemory::new(start.add(1), 98) }.unwrap();
        assert_eq!(
            (memory.len(), memory.address()),
            (98, start.addr() as u64 + 1)
        );
        memory.copy_in(95, b"abc").unwrap();
        let mut read = [0; 4];
        memory.copy_out(94, &mut read).unwrap();
        assert_eq!(&read, b"\0abc");
        assert!(memory.copy_in(96, b"abc").is_err());
        assert!(memory.copy_out(u64::MAX, &mut read).is_err());
        assert_eq!(owned[95..], [0, b'a', b'b', b'c', 0]);
    }

    #[test]
    fn what_is_no_object_is_refused() {
        // SAFETY: nothing is accessed.
        let new = |address: usize, len| unsafe {
            ForeignMemory::new(core::ptr::without_provenance_mut(address), len)
        };
        assert!(new(0, 5).is_none());
        assert!(new(4096, isize::MAX as usize + 1).is_none());
        assert!(new(usize::MAX - 3, 5).is_none());
        assert!(new(4096, 0).is_some_and(|memory| memory.is_empty()));
    }
}
