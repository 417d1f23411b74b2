//! Host memory for slabs: one anonymous mapping, faulted in at creation.
// Maps, unmaps and hands raw pointers of the mapping to the kernel.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::limit::{MemoryLimit, available_memory};
use crate::memory::{CopyError, Memory, MemoryKind, check_range, checked_len};
use crate::words::Words;

/// Why a [`HostSlab`] could not be made, or not be read from or written to a file.
#[derive(Debug)]
#[non_exhaustive]
pub enum SlabError {
    /// A slab of no bytes was asked for.
    Empty,
    /// The slab is larger than this process may still take; ask for at most `available` bytes.
    TooLarge {
        /// Bytes asked for.
        requested: u64,
        /// Bytes that may be taken now.
        available: u64,
        /// What bounds them.
        limit: MemoryLimit,
    },
    /// The system refused the mapping.
    Map {
        /// Bytes asked for, rounded up to whole pages.
        len: u64,
        /// The system's answer.
        source: io::Error,
    },
    /// The range does not lie inside the slab.
    Copy(CopyError),
    /// Reading or writing the file failed after `done` bytes.
    File {
        /// Bytes moved before the failure.
        done: u64,
        /// The system's answer.
        source: io::Error,
    },
    /// The file ended early.
    FileEnded {
        /// Bytes wanted.
        wanted: u64,
        /// Bytes read before the end of the file.
        done: u64,
    },
}

impl std::fmt::Display for SlabError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Empty => f.write_str("a slab needs at least one byte"),
            Self::TooLarge {
                requested,
                available,
                limit,
            } => {
                let limit = match limit {
                    MemoryLimit::Machine => "the memory of this machine allows",
                    MemoryLimit::Cgroup => "the memory limit of this control group allows",
                    MemoryLimit::AddressSpace => "the address space allows",
                };
                write!(
                    f,
                    "a slab of {requested} bytes is more than the {available} bytes {limit}"
                )
            }
            Self::Map { len, .. } => write!(f, "mapping {len} bytes failed"),
            Self::Copy(error) => error.fmt(f),
            Self::File { done, .. } => write!(f, "file I/O failed after {done} bytes"),
            Self::FileEnded { wanted, done } => {
                write!(f, "the file ended after {done} of {wanted} bytes")
            }
        }
    }
}

impl std::error::Error for SlabError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Map { source, .. } | Self::File { source, .. } => Some(source),
            _ => None,
        }
    }
}

impl From<CopyError> for SlabError {
    fn from(error: CopyError) -> Self {
        Self::Copy(error)
    }
}

/// A private anonymous mapping of host memory, zeroed and faulted in.
///
/// All access is by copy, and safe at any time: what a peer or another thread writes meanwhile may
/// be seen in part, never as undefined behaviour. The mapping goes when the value is dropped, so an
/// engine that holds it in an `Arc` keeps it mapped.
pub struct HostSlab {
    base: NonNull<u8>,
    /// Bytes asked for.
    len: u64,
    /// Bytes mapped: `len` in whole pages.
    mapped: usize,
    words: Words,
}

// SAFETY: the mapping belongs to the value alone, is not tied to a thread, and is only accessed
// through `Words` (atomics) and by the kernel.
unsafe impl Send for HostSlab {}
// SAFETY: as for `Send`; no method gives out a reference to the bytes.
unsafe impl Sync for HostSlab {}

impl HostSlab {
    /// Maps `len` bytes and faults all of them in.
    ///
    /// # Errors
    /// [`SlabError::Empty`] for zero; [`SlabError::TooLarge`] if the machine or the control group
    /// does not have that much left; [`SlabError::Map`] if the system refuses the mapping.
    ///
    /// # Complexity
    /// O(pages): about a third of a second for 1 GiB of small pages.
    pub fn new(len: u64) -> Result<Self, SlabError> {
        if len == 0 {
            return Err(SlabError::Empty);
        }
        let page = rustix::param::page_size();
        let too_large = |available, limit| SlabError::TooLarge {
            requested: len,
            available,
            limit,
        };
        let mapped = usize::try_from(len)
            .ok()
            .and_then(|len| len.checked_next_multiple_of(page))
            .filter(|mapped| isize::try_from(*mapped).is_ok())
            .ok_or(too_large(isize::MAX as u64, MemoryLimit::AddressSpace))?;
        if let Some((available, limit)) = available_memory()
            && mapped as u64 > available
        {
            return Err(too_large(available, limit));
        }
        let map_error = |errno: rustix::io::Errno| SlabError::Map {
            len: mapped as u64,
            source: errno.into(),
        };
        // SAFETY: a new private anonymous mapping at an address of the kernel's choice aliases
        // nothing.
        let base = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                mapped,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }
        .map_err(map_error)?;
        let Some(base) = NonNull::new(base.cast::<u8>()) else {
            return Err(map_error(rustix::io::Errno::NOMEM));
        };
        // SAFETY: pages are 8-byte aligned and a multiple of 8 long; they stay mapped until `drop`,
        // and nothing but this `Words` and the kernel touches them.
        let words = unsafe { Words::new(base, mapped) };
        let slab = Self {
            base,
            len,
            mapped,
            words,
        };
        slab.fault_in(page).map_err(map_error)?;
        Ok(slab)
    }

    /// Makes every page present, so that no transfer pays for page faults later.
    fn fault_in(&self, page: usize) -> Result<(), rustix::io::Errno> {
        let base = self.base.as_ptr().cast();
        #[cfg(target_os = "linux")]
        {
            // Fewer, larger faults and fewer TLB misses; only a hint, so refusal is fine.
            // SAFETY: a hint about pages of our own mapping; contents stay.
            let _ = unsafe { madvise(base, self.mapped, Advice::LinuxHugepage) };
            // SAFETY: faults in pages of our own mapping; contents stay.
            match unsafe { madvise(base, self.mapped, Advice::LinuxPopulateWrite) } {
                Ok(()) => return Ok(()),
                // Kernels before 5.14 do not know the advice.
                Err(rustix::io::Errno::INVAL) => {}
                Err(errno) => return Err(errno),
            }
        }
        let _ = base;
        for offset in (0..self.mapped).step_by(page) {
            self.words.store(offset, &[0]);
        }
        Ok(())
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Always `false`: a slab has at least one byte.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Returns the address of the first byte as peers name it.
    pub fn address(&self) -> u64 {
        self.base.as_ptr().addr() as u64
    }

    /// Copies `source` into the slab from byte `offset` on.
    ///
    /// # Errors
    /// [`CopyError::OutOfBounds`], with nothing written.
    pub fn copy_in(&self, offset: u64, source: &[u8]) -> Result<(), CopyError> {
        check_range(offset, source.len() as u64, self.len)?;
        self.words.store(offset as usize, source);
        Ok(())
    }

    /// Copies from the slab, from byte `offset` on, into `target`.
    ///
    /// # Errors
    /// [`CopyError::OutOfBounds`], with nothing read.
    pub fn copy_out(&self, offset: u64, target: &mut [u8]) -> Result<(), CopyError> {
        check_range(offset, target.len() as u64, self.len)?;
        self.words.load(offset as usize, target);
        Ok(())
    }

    /// Fills `range` of the slab from `file`, starting at byte `file_offset` of the file.
    ///
    /// The bytes go from the page cache to the slab without a second buffer, and the file's own
    /// position does not matter or move.
    ///
    /// # Errors
    /// [`SlabError::Copy`] before anything is read; [`SlabError::FileEnded`] or
    /// [`SlabError::File`] with the range partly filled.
    pub fn read_at(
        &self,
        range: Range<u64>,
        file: &File,
        file_offset: u64,
    ) -> Result<(), SlabError> {
        self.each_piece(range, file_offset, |pointer, len, at| {
            // SAFETY: `each_piece` passes `len` bytes inside the mapping, which outlives the call;
            // the kernel may write there because no Rust reference to them exists.
            unsafe { libc::pread(file.as_raw_fd(), pointer.cast(), len, at) }
        })
    }

    /// Writes `range` of the slab to `file`, starting at byte `file_offset` of the file.
    ///
    /// # Errors
    /// [`SlabError::Copy`] before anything is written; [`SlabError::File`] with the file partly
    /// written.
    pub fn write_at(
        &self,
        range: Range<u64>,
        file: &File,
        file_offset: u64,
    ) -> Result<(), SlabError> {
        self.each_piece(range, file_offset, |pointer, len, at| {
            // SAFETY: `each_piece` passes `len` bytes inside the mapping, which outlives the call.
            unsafe { libc::pwrite(file.as_raw_fd(), pointer.cast(), len, at) }
        })
    }

    /// Calls `io` with pointer, length and file position until all of `range` has been moved.
    fn each_piece(
        &self,
        range: Range<u64>,
        file_offset: u64,
        mut io: impl FnMut(*mut u8, usize, libc::off_t) -> isize,
    ) -> Result<(), SlabError> {
        let wanted = checked_len(&range, self.len)?;
        let mut done = 0;
        while done < wanted {
            let at = file_offset
                .checked_add(done)
                .and_then(|at| libc::off_t::try_from(at).ok())
                .ok_or_else(|| SlabError::File {
                    done,
                    source: io::Error::from_raw_os_error(libc::EFBIG),
                })?;
            // SAFETY: `range.start + done` is below `range.end`, which lies inside the mapping.
            let pointer = unsafe { self.base.as_ptr().add((range.start + done) as usize) };
            match io(pointer, (wanted - done) as usize, at) {
                0 => return Err(SlabError::FileEnded { wanted, done }),
                moved if moved > 0 => done += moved as u64,
                _ => {
                    let source = io::Error::last_os_error();
                    if source.kind() != io::ErrorKind::Interrupted {
                        return Err(SlabError::File { done, source });
                    }
                }
            }
        }
        Ok(())
    }
}

// SAFETY: `len`, `mapped` and `base` never change and `base` does not move with the value; the
// mapping is readable and writable until `drop`; a mapping cannot wrap; every access in this crate
// is by atomics or system calls, never through a reference to the bytes.
unsafe impl Memory for HostSlab {
    fn len(&self) -> u64 {
        self.len
    }

    fn kind(&self) -> MemoryKind {
        MemoryKind::Host
    }

    fn address(&self) -> u64 {
        self.address()
    }

    fn host_ptr(&self) -> Option<NonNull<u8>> {
        Some(self.base)
    }

    fn copy_in(&self, offset: u64, source: &[u8]) -> Result<(), CopyError> {
        self.copy_in(offset, source)
    }

    fn copy_out(&self, offset: u64, target: &mut [u8]) -> Result<(), CopyError> {
        self.copy_out(offset, target)
    }
}

impl std::fmt::Debug for HostSlab {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostSlab")
            .field("base", &self.base)
            .field("len", &self.len)
            .finish()
    }
}

impl Drop for HostSlab {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping that `new` made. Nobody uses it any more: engines hold the
        // slab in an `Arc` for as long as a request of theirs may touch it.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.mapped) };
        // Only wrong arguments fail, and `drop` must not panic; the mapping then stays, which is
        // safe.
        debug_assert!(unmapped.is_ok());
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek, Write};
    use std::sync::Arc;

    use super::*;

    #[test]
    fn a_new_slab_is_zero_and_keeps_what_is_copied_in() {
        let slab = HostSlab::new(10_001).unwrap();
        assert_eq!(slab.len(), 10_001);
        assert_eq!(Memory::len(&slab), 10_001);
        assert_ne!(slab.address(), 0);
        let mut bytes = [1; 5];
        slab.copy_out(9_996, &mut bytes).unwrap();
        assert_eq!(bytes, [0; 5]);
        slab.copy_in(9_996, b"hello").unwrap();
        slab.copy_out(9_996, &mut bytes).unwrap();
        assert_eq!(&bytes, b"hello");
    }

    #[test]
    fn a_slab_of_no_bytes_is_refused() {
        assert!(matches!(HostSlab::new(0), Err(SlabError::Empty)));
    }

    #[test]
    fn a_slab_larger_than_memory_is_refused_with_what_is_available() {
        let Err(SlabError::TooLarge {
            requested,
            available,
            ..
        }) = HostSlab::new(1 << 50)
        else {
            panic!("a pebibyte was granted");
        };
        assert_eq!(requested, 1 << 50);
        assert!(available > 0 && available < 1 << 50);
        let error = HostSlab::new(u64::MAX).unwrap_err();
        assert!(matches!(
            error,
            SlabError::TooLarge {
                limit: MemoryLimit::AddressSpace,
                ..
            }
        ));
        assert!(error.to_string().contains("address space"));
    }

    #[test]
    fn ranges_outside_the_slab_are_refused_and_nothing_is_copied() {
        let slab = HostSlab::new(100).unwrap();
        let expected = CopyError::OutOfBounds {
            offset: 98,
            len: 3,
            memory_len: 100,
        };
        // The mapping has whole pages, the slab has not.
        assert_eq!(slab.copy_in(98, b"abc"), Err(expected));
        assert_eq!(slab.copy_out(98, &mut [0; 3]), Err(expected));
        assert!(slab.copy_in(u64::MAX, b"ab").is_err());
        let mut byte = [9];
        slab.copy_out(98, &mut byte).unwrap();
        assert_eq!(byte, [0]);
    }

    #[test]
    fn a_range_that_ends_before_it_starts_is_refused_and_no_file_is_touched() {
        let slab = HostSlab::new(100).unwrap();
        let file = tempfile::tempfile().unwrap();
        let refused = |result: Result<(), SlabError>| {
            assert!(matches!(
                result,
                Err(SlabError::Copy(CopyError::OutOfBounds { offset: 10, .. }))
            ));
        };
        refused(slab.read_at(Range { start: 10, end: 5 }, &file, 0));
        refused(slab.write_at(Range { start: 10, end: 5 }, &file, 0));
        assert_eq!(file.metadata().unwrap().len(), 0);
    }

    #[test]
    fn files_are_read_and_written_in_place() {
        let slab = HostSlab::new(1 << 20).unwrap();
        let mut file = tempfile::tempfile().unwrap();
        let bytes: Vec<u8> = (0..300_007u32).map(|i| (i % 253) as u8).collect();
        file.write_all(b"head").unwrap();
        file.write_all(&bytes).unwrap();
        slab.read_at(33..33 + bytes.len() as u64, &file, 4).unwrap();
        let mut copied = vec![0; bytes.len()];
        slab.copy_out(33, &mut copied).unwrap();
        assert_eq!(copied, bytes);

        let mut other = tempfile::tempfile().unwrap();
        slab.write_at(33..33 + bytes.len() as u64, &other, 2)
            .unwrap();
        let mut written = Vec::new();
        other.rewind().unwrap();
        other.read_to_end(&mut written).unwrap();
        assert_eq!(written[..2], [0, 0]);
        assert_eq!(written[2..], bytes);
    }

    #[test]
    fn a_short_file_is_a_typed_error() {
        let slab = HostSlab::new(4096).unwrap();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"12345").unwrap();
        assert!(matches!(
            slab.read_at(0..10, &file, 0),
            Err(SlabError::FileEnded {
                wanted: 10,
                done: 5
            })
        ));
        assert!(matches!(
            slab.read_at(0..4097, &file, 0),
            Err(SlabError::Copy(_))
        ));
        assert!(matches!(
            slab.read_at(0..1, &file, u64::MAX),
            Err(SlabError::File { .. })
        ));
    }

    #[test]
    fn a_file_that_cannot_be_written_reports_the_system_error() {
        let slab = HostSlab::new(4096).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        std::fs::write(&path, b"x").unwrap();
        let file = File::open(path).unwrap();
        assert!(matches!(
            slab.write_at(0..1, &file, 0),
            Err(SlabError::File { done: 0, .. })
        ));
    }

    #[test]
    fn threads_may_copy_over_each_other() {
        let slab = Arc::new(HostSlab::new(64 * 1024).unwrap());
        let writers: Vec<_> = (1..=2u8)
            .map(|value| {
                let slab = Arc::clone(&slab);
                std::thread::spawn(move || {
                    for _ in 0..200 {
                        slab.copy_in(3, &[value; 5_001]).unwrap();
                    }
                })
            })
            .collect();
        let mut seen = vec![0; 5_001];
        for _ in 0..200 {
            slab.copy_out(3, &mut seen).unwrap();
            assert!(seen.iter().all(|byte| *byte <= 2));
        }
        for writer in writers {
            writer.join().unwrap();
        }
        slab.copy_out(3, &mut seen).unwrap();
        assert!(seen.iter().all(|byte| *byte == 1 || *byte == 2));
    }
}
