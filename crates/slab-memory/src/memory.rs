//! The contract of memory that engines may touch.
// The trait is unsafe to implement; nothing in this file dereferences anything.
#![allow(unsafe_code)]

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::fmt;
use core::ops::Range;
use core::ptr::NonNull;

use crate::bounce::{BlockingBounce, Bounce, BounceDirection};

/// Where a [`Memory`] lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MemoryKind {
    /// Ordinary or pinned host memory.
    Host,
    /// Memory of the accelerator with this ordinal.
    Device(u32),
}

/// Why a copy in or out of a [`Memory`] did not happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CopyError {
    /// The range does not lie inside the memory.
    OutOfBounds {
        /// First byte asked for, counted from the start of the memory.
        offset: u64,
        /// Bytes asked for.
        len: u64,
        /// Length of the memory.
        memory_len: u64,
    },
    /// The memory's own code panicked. Whether bytes were copied is not known.
    Panicked,
    /// The driver that owns the memory refused or lost the copy.
    Driver {
        /// The driver's own code.
        code: i32,
    },
    /// As [`Driver`](Self::Driver), and nobody knows whether the copy still runs: bytes of the range
    /// may be written at any later time. Whatever reserves the range has to be kept for ever
    /// (`std::mem::forget`), so that nobody else gets it.
    Unsettled {
        /// The driver's own code.
        code: i32,
    },
}

impl fmt::Display for CopyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OutOfBounds {
                offset,
                len,
                memory_len,
            } => write!(
                f,
                "{len} bytes at offset {offset} do not lie inside a memory of {memory_len} bytes"
            ),
            Self::Panicked => f.write_str("the code of the memory panicked"),
            Self::Driver { code } => write!(f, "the driver failed the copy with code {code}"),
            Self::Unsettled { code } => write!(
                f,
                "the driver failed the copy with code {code}, and may still write: the range must not be used again"
            ),
        }
    }
}

impl core::error::Error for CopyError {}

/// One contiguous range of memory that engines may read and write, from any thread.
///
/// # Safety
/// An implementation promises, from construction until the value is dropped:
/// - `len`, `kind`, `address` and `host_ptr` always answer the same, and `address + len` does not
///   wrap around 2^64;
/// - if `host_ptr` is `Some`, all `len` bytes from it are mapped, readable and writable for this
///   process, and stay so even if the value moves;
/// - no Rust reference to any of these bytes exists, here or in a caller: they may be written by
///   the kernel, a device or another thread at any moment.
pub unsafe trait Memory: Send + Sync + 'static {
    /// Returns the length in bytes; never zero for memory that can be registered.
    fn len(&self) -> u64;

    /// Says whether the memory has no bytes at all.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Says where the memory lives.
    fn kind(&self) -> MemoryKind;

    /// Returns the address of the first byte as peers name it on the wire.
    ///
    /// It is an opaque number to them; for host memory it is the virtual address.
    fn address(&self) -> u64;

    /// Returns the host address of the first byte, or `None` if the host cannot address it.
    fn host_ptr(&self) -> Option<NonNull<u8>>;

    /// Copies `source` into the memory, starting `offset` bytes from its start, and waits for it.
    ///
    /// # Errors
    /// [`CopyError::OutOfBounds`] before anything is written; [`CopyError::Driver`] with the range
    /// partly written; [`CopyError::Unsettled`] if it may still be written later.
    fn copy_in(&self, offset: u64, source: &[u8]) -> Result<(), CopyError>;

    /// Copies from the memory, starting `offset` bytes from its start, into `target`, and waits.
    ///
    /// What another thread or a peer writes meanwhile may appear in part.
    ///
    /// # Errors
    /// [`CopyError::OutOfBounds`] or [`CopyError::Driver`].
    fn copy_out(&self, offset: u64, target: &mut [u8]) -> Result<(), CopyError>;

    /// Starts one request's worth of bounced bytes over `range`.
    ///
    /// The default copies blockingly; device memory overrides it with asynchronous copies.
    ///
    /// # Errors
    /// [`CopyError::OutOfBounds`] if `range` does not lie inside the memory.
    fn bounce(
        self: Arc<Self>,
        direction: BounceDirection,
        range: Range<u64>,
    ) -> Result<Box<dyn Bounce>, CopyError> {
        Ok(Box::new(BlockingBounce::new(self, direction, range)?))
    }
}

/// Checks that `range` lies inside a memory of `memory_len` bytes, and returns its length.
///
/// # Errors
/// [`CopyError::OutOfBounds`], also for a range whose end is before its start.
pub fn checked_len(range: &Range<u64>, memory_len: u64) -> Result<u64, CopyError> {
    let len = range.end.saturating_sub(range.start);
    if range.start > range.end || range.end > memory_len {
        return Err(CopyError::OutOfBounds {
            offset: range.start,
            len,
            memory_len,
        });
    }
    Ok(len)
}

/// Checks that `len` bytes from `offset` lie inside `memory_len` bytes.
pub(crate) fn check_range(offset: u64, len: u64, memory_len: u64) -> Result<(), CopyError> {
    match offset.checked_add(len) {
        Some(end) if end <= memory_len => Ok(()),
        _ => Err(CopyError::OutOfBounds {
            offset,
            len,
            memory_len,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_checked_without_wrapping() {
        assert!(check_range(0, 0, 0).is_ok());
        assert!(check_range(3, 5, 8).is_ok());
        assert!(check_range(8, 0, 8).is_ok());
        assert!(check_range(4, 5, 8).is_err());
        assert!(check_range(9, 0, 8).is_err());
        assert!(check_range(u64::MAX, 2, 8).is_err());
        assert_eq!(checked_len(&(3..8), 8), Ok(5));
        assert_eq!(checked_len(&(8..8), 8), Ok(0));
        assert!(checked_len(&(3..9), 8).is_err());
        assert!(checked_len(&(9..9), 8).is_err());
        let reversed = Range { start: 5, end: 3 };
        assert!(checked_len(&reversed, 8).is_err());
    }

    /// Host memory whose copies fail, or panic.
    #[cfg(feature = "std")]
    struct Failing(crate::HostSlab, Option<CopyError>);

    #[cfg(feature = "std")]
    // SAFETY: all but the copies is as the slab has it.
    unsafe impl Memory for Failing {
        fn len(&self) -> u64 {
            self.0.len()
        }

        fn kind(&self) -> MemoryKind {
            self.0.kind()
        }

        fn address(&self) -> u64 {
            self.0.address()
        }

        fn host_ptr(&self) -> Option<NonNull<u8>> {
            None
        }

        fn copy_in(&self, _offset: u64, _source: &[u8]) -> Result<(), CopyError> {
            Err(self.1.expect("on purpose"))
        }

        fn copy_out(&self, _offset: u64, _target: &mut [u8]) -> Result<(), CopyError> {
            Err(self.1.expect("on purpose"))
        }
    }

    #[cfg(feature = "std")]
    fn bounce_over(error: Option<CopyError>) -> Box<dyn Bounce> {
        let memory = Arc::new(Failing(crate::HostSlab::new(4096).unwrap(), error));
        memory.bounce(BounceDirection::In, 0..10).unwrap()
    }

    #[cfg(feature = "std")]
    #[test]
    fn a_copy_that_may_still_run_leaves_the_range_unquiet() {
        for (error, is_quiet) in [
            (CopyError::Driver { code: 719 }, true),
            (CopyError::Unsettled { code: 719 }, false),
        ] {
            let mut bounce = bounce_over(Some(error));
            assert_eq!(bounce.commit(1), Err(error));
            assert_eq!(bounce.quiesce(), is_quiet, "{error}");
        }
        let mut bounce = bounce_over(None);
        let commit = std::panic::AssertUnwindSafe(|| bounce.commit(1));
        assert!(std::panic::catch_unwind(commit).is_err());
        assert!(!bounce.quiesce(), "a panic leaves open what was begun");
    }
}
