//! Where the bytes of a push lie while the engine reads them.
//!
//! One slab, registered when the producer starts, from which regions of any size are carved. A source larger than
//! the slab gets memory of its own, registered for as long as it is needed. Memory that the caller brings is
//! registered where it lies, once for all pushes that use it at the same time.
//!
//! Every region and registration is owned by a value that gives it back when dropped, so no path leaks one
//! (row D11); the registration table changes only after the engine has said yes (row D13).

use std::any::Any;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::File;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use mooncake_transport::{Access, Engine, EngineError, Registration};
use sha2::{Digest, Sha256};
use slab_core::{Allocation, Error as PoolError, FreeList, FreeListConfig, PoolId};
use slab_memory::{CopyError, HostSlab, Memory, SlabError};

use crate::content_hash::{fill_hashed, hex};

/// The bytes to push.
pub enum Source {
    /// An owned buffer.
    Bytes(Vec<u8>),
    /// A range of an open file, read when it is about to be sent.
    File {
        /// The file. It must not change before the push has ended, or the content is not what its name says;
        /// `sha256` guards against that.
        file: Arc<File>,
        /// First byte and end.
        range: Range<u64>,
        /// Lower-case hexadecimal sha256 of the bytes, if they were hashed before: the push fails, and nothing is
        /// written, if it is not the digest of the very bytes that would be sent. Costs one pass of hashing.
        sha256: Option<String>,
    },
    /// A range of memory that the engine can read where it lies; nothing is copied.
    Memory {
        /// The memory.
        memory: Arc<dyn Memory>,
        /// First byte and end, from the start of the memory.
        range: Range<u64>,
        /// Whatever keeps the range unchanged, for instance a lease; dropped when nothing reads it any more.
        hold: Arc<dyn Any + Send + Sync>,
    },
}

impl Source {
    /// Number of bytes; nothing for a range that ends before it starts.
    pub fn len_bytes(&self) -> Option<u64> {
        match self {
            Self::Bytes(bytes) => Some(bytes.len() as u64),
            Self::File { range, .. } | Self::Memory { range, .. } => {
                range.end.checked_sub(range.start)
            }
        }
    }
}

impl std::fmt::Debug for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Bytes(bytes) => f.debug_tuple("Bytes").field(&bytes.len()).finish(),
            Self::File { range, .. } => f.debug_tuple("File").field(range).finish(),
            Self::Memory { range, .. } => f.debug_tuple("Memory").field(range).finish(),
        }
    }
}

/// Why a source could not be made ready for the engine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StageError {
    /// The bytes could not be read, or memory for them could not be had.
    #[error("cannot stage the bytes")]
    Slab(#[from] SlabError),
    /// The bytes could not be copied.
    #[error("cannot copy the bytes")]
    Copy(#[from] CopyError),
    /// The engine did not take the memory.
    #[error("the engine did not take the memory")]
    Register(#[from] EngineError),
    /// The same address is registered with another length.
    #[error("memory at {address:#x} is registered with {registered} bytes, not {asked}")]
    OtherLength {
        /// Address of the memory.
        address: u64,
        /// Bytes registered.
        registered: u64,
        /// Bytes of this memory.
        asked: u64,
    },
    /// The file's bytes are no longer those that were hashed.
    #[error(
        "the file has changed since its bytes were hashed; push it again when nobody writes to it"
    )]
    Changed,
    /// The staging slab had no room before the push's time was over.
    #[error("the staging slab had no room for {len} bytes in time")]
    Full {
        /// Bytes needed.
        len: u64,
    },
    /// The staging slab cannot be managed in the size asked for.
    #[error("the staging slab cannot be managed")]
    Pool(#[from] PoolError),
}

/// Bytes the engine can read: pass them to a task, with a clone of `hold`.
#[derive(Clone)]
pub(crate) struct Staged {
    pub(crate) memory: Arc<dyn Memory>,
    pub(crate) range: Range<u64>,
    pub(crate) hold: Arc<dyn Any + Send + Sync>,
}

/// The staging slab and the table of direct registrations.
pub(crate) struct Staging {
    engine: Arc<dyn Engine>,
    slab: Arc<HostSlab>,
    usable: u64,
    regions: Arc<Regions>,
    direct: Arc<Direct>,
    /// Dropped before the slab is unmapped: the registration owns a share of it.
    _registration: Registration,
}

impl Staging {
    /// Makes and registers a slab of `capacity` bytes.
    pub(crate) fn new(engine: Arc<dyn Engine>, capacity: u64) -> Result<Self, StageError> {
        let slab = Arc::new(HostSlab::new(capacity)?);
        let list = FreeList::new(FreeListConfig::new(PoolId::new(), capacity))?;
        let registration = engine.register(Arc::clone(&slab) as Arc<dyn Memory>, Access::Local)?;
        Ok(Self {
            engine,
            slab,
            usable: list.usable(),
            regions: Arc::new(Regions {
                list: Mutex::new(list),
                freed: Condvar::new(),
            }),
            direct: Arc::default(),
            _registration: registration,
        })
    }

    /// Puts `source` where the engine can read it; waits for room in the slab until `deadline`.
    pub(crate) fn stage(&self, source: Source, deadline: Instant) -> Result<Staged, StageError> {
        match source {
            Source::Bytes(bytes) => {
                let place = self.place(bytes.len() as u64, deadline)?;
                place.slab.copy_in(place.range.start, &bytes)?;
                Ok(place.into_staged())
            }
            Source::File {
                file,
                range,
                sha256,
            } => {
                let place = self.place(range.end.saturating_sub(range.start), deadline)?;
                match sha256 {
                    Some(sha256) => place.fill_checked(&file, range.start, &sha256)?,
                    None => place
                        .slab
                        .read_at(place.range.clone(), &file, range.start)?,
                }
                Ok(place.into_staged())
            }
            Source::Memory {
                memory,
                range,
                hold,
            } => {
                if range.end > memory.len() || range.start > range.end {
                    return Err(StageError::Copy(CopyError::OutOfBounds {
                        offset: range.start,
                        len: range.end.saturating_sub(range.start),
                        memory_len: memory.len(),
                    }));
                }
                let share = Direct::share(&self.direct, &*self.engine, &memory)?;
                Ok(Staged {
                    memory,
                    range,
                    hold: Arc::new((share, hold)),
                })
            }
        }
    }

    /// Finds `len` bytes in the slab, or registers memory of that size when the slab is too small for it.
    fn place(&self, len: u64, deadline: Instant) -> Result<Place, StageError> {
        if len <= self.usable {
            let region = Regions::take(&self.regions, len, deadline)?;
            let start = region.offset();
            return Ok(Place {
                slab: Arc::clone(&self.slab),
                range: start..start + len,
                hold: Arc::new(region),
            });
        }
        let slab = Arc::new(HostSlab::new(len)?);
        let memory: Arc<dyn Memory> = Arc::clone(&slab) as Arc<dyn Memory>;
        let share = Direct::share(&self.direct, &*self.engine, &memory)?;
        Ok(Place {
            slab,
            range: 0..len,
            hold: Arc::new(share),
        })
    }

    #[cfg(test)]
    fn free_bytes(&self) -> u64 {
        self.regions.lock().free_bytes()
    }
}

struct Place {
    slab: Arc<HostSlab>,
    range: Range<u64>,
    hold: Arc<dyn Any + Send + Sync>,
}

impl Place {
    /// Reads the place's bytes from `file`, from `offset` on, and compares their digest.
    fn fill_checked(&self, file: &File, offset: u64, sha256: &str) -> Result<(), StageError> {
        let mut hasher = Sha256::new();
        let read = fill_hashed(&self.slab, self.range.clone(), file, offset, |piece| {
            hasher.update(piece);
        });
        match read {
            Err(SlabError::FileEnded { .. }) => return Err(StageError::Changed),
            read => read?,
        }
        if hex(&hasher.finalize()) == sha256 {
            Ok(())
        } else {
            Err(StageError::Changed)
        }
    }

    fn into_staged(self) -> Staged {
        Staged {
            memory: self.slab,
            range: self.range,
            hold: self.hold,
        }
    }
}

/// The free list of the staging slab.
struct Regions {
    list: Mutex<FreeList>,
    freed: Condvar,
}

impl Regions {
    fn lock(&self) -> MutexGuard<'_, FreeList> {
        // The list's methods finish before anything else can panic under the lock.
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(this: &Arc<Self>, len: u64, deadline: Instant) -> Result<Region, StageError> {
        let mut list = this.lock();
        loop {
            match list.allocate(len) {
                Ok(allocation) => {
                    return Ok(Region {
                        home: Arc::clone(this),
                        allocation: Some(allocation),
                    });
                }
                Err(PoolError::Exhausted { .. }) => {}
                Err(error) => return Err(error.into()),
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(StageError::Full { len });
            }
            list = this
                .freed
                .wait_timeout(list, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

/// A region of the staging slab; dropping it gives it back.
struct Region {
    home: Arc<Regions>,
    /// Present until dropped.
    allocation: Option<Allocation>,
}

impl Region {
    fn offset(&self) -> u64 {
        self.allocation.as_ref().map_or(0, Allocation::offset)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if let Some(allocation) = self.allocation.take() {
            if let Err(refused) = self.home.lock().free(allocation) {
                tracing::error!(error = %refused.cause, "staging region lost");
            }
            self.home.freed.notify_all();
        }
    }
}

/// Registrations of memory outside the slab, counted by address.
#[derive(Default)]
struct Direct {
    table: Mutex<HashMap<u64, Counted>>,
}

struct Counted {
    count: usize,
    registration: Registration,
}

impl Direct {
    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Counted>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers `memory`, or joins the registration it has.
    fn share(
        this: &Arc<Self>,
        engine: &dyn Engine,
        memory: &Arc<dyn Memory>,
    ) -> Result<Share, StageError> {
        let address = memory.address();
        // Held while the engine registers, so that a second user of the address waits for the answer.
        let mut table = this.lock();
        match table.entry(address) {
            Entry::Occupied(mut entry) => {
                let registered = entry.get().registration.memory().len();
                if registered != memory.len() {
                    return Err(StageError::OtherLength {
                        address,
                        registered,
                        asked: memory.len(),
                    });
                }
                entry.get_mut().count += 1;
            }
            Entry::Vacant(entry) => {
                let registration = engine.register(Arc::clone(memory), Access::Local)?;
                entry.insert(Counted {
                    count: 1,
                    registration,
                });
            }
        }
        Ok(Share {
            home: Arc::clone(this),
            address,
        })
    }
}

/// One user of a direct registration; the last one dropped unregisters.
struct Share {
    home: Arc<Direct>,
    address: u64,
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut table = self.home.lock();
        let Entry::Occupied(mut entry) = table.entry(self.address) else {
            return;
        };
        entry.get_mut().count -= 1;
        if entry.get().count == 0 {
            let counted = entry.remove();
            // Still under the lock: the address must not be registered anew before this is done.
            if let Err(error) = counted.registration.unregister() {
                tracing::error!(
                    address = self.address,
                    %error,
                    "memory of a push stays registered and is leaked"
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::FileExt;
    use std::time::Duration;

    use super::*;
    use crate::fake_engine::FakeEngine;

    const SLAB: u64 = 4096;

    fn staging() -> (Arc<FakeEngine>, Staging) {
        let engine = FakeEngine::new();
        let staging = Staging::new(engine.clone(), SLAB).unwrap();
        (engine, staging)
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(20)
    }

    fn bytes_of(staged: &Staged) -> Vec<u8> {
        let mut bytes = vec![0; (staged.range.end - staged.range.start) as usize];
        staged
            .memory
            .copy_out(staged.range.start, &mut bytes)
            .unwrap();
        bytes
    }

    #[test]
    fn buffers_and_file_ranges_are_copied_into_the_slab_and_give_their_region_back() {
        let (engine, staging) = staging();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"0123456789").unwrap();
        let staged = [
            staging
                .stage(Source::Bytes(b"abc".to_vec()), soon())
                .unwrap(),
            staging
                .stage(
                    Source::File {
                        file: Arc::new(file),
                        range: 3..7,
                        sha256: None,
                    },
                    soon(),
                )
                .unwrap(),
        ];
        assert_eq!(bytes_of(&staged[0]), b"abc");
        assert_eq!(bytes_of(&staged[1]), b"3456");
        assert_eq!(staging.free_bytes(), SLAB - 512);
        assert_eq!(engine.registered(), 1, "only the slab");
        let held = staged[0].hold.clone();
        drop(staged);
        assert_eq!(staging.free_bytes(), SLAB - 256, "a hold keeps its region");
        drop(held);
        assert_eq!(staging.free_bytes(), SLAB);
    }

    // row: D17
    #[test]
    fn the_slab_is_registered_before_the_first_push() {
        let (engine, staging) = staging();
        assert_eq!(engine.registered(), 1);
        drop(staging);
        assert_eq!(engine.registered(), 0);
    }

    #[test]
    fn what_is_larger_than_the_slab_is_registered_by_itself() {
        let (engine, staging) = staging();
        let bytes = vec![7; SLAB as usize + 1];
        let staged = staging.stage(Source::Bytes(bytes.clone()), soon()).unwrap();
        assert_eq!(engine.registered(), 2);
        assert_eq!(bytes_of(&staged), bytes);
        assert_eq!(staging.free_bytes(), SLAB);
        drop(staged);
        assert_eq!(engine.registered(), 1);
    }

    #[test]
    fn a_full_slab_is_waited_for_until_the_deadline() {
        let (_, staging) = staging();
        let all = staging
            .stage(Source::Bytes(vec![1; SLAB as usize]), soon())
            .unwrap();
        assert!(matches!(
            staging.stage(Source::Bytes(vec![2]), soon()),
            Err(StageError::Full { len: 1 })
        ));
        let staged = std::thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                let late = Instant::now() + Duration::from_secs(30);
                staging.stage(Source::Bytes(vec![3]), late)
            });
            std::thread::sleep(Duration::from_millis(20));
            drop(all);
            waiting.join().unwrap()
        });
        assert_eq!(bytes_of(&staged.unwrap()), [3]);
    }

    #[test]
    fn a_file_whose_bytes_are_not_those_that_were_hashed_is_not_staged() {
        let (engine, staging) = staging();
        // Several pieces, the last of them short; larger than the slab.
        let content: Vec<u8> = (0..(3 << 18) + 5u32).map(|n| (n >> 3) as u8).collect();
        let len = content.len() as u64;
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"head").unwrap();
        file.write_all(&content).unwrap();
        let file = Arc::new(file);
        let digest = hex(&Sha256::digest(&content));
        let stage = |end, sha256: &str| {
            staging.stage(
                Source::File {
                    file: Arc::clone(&file),
                    range: 4..end,
                    sha256: Some(sha256.to_owned()),
                },
                soon(),
            )
        };
        let staged = stage(4 + len, &digest).unwrap();
        assert_eq!(bytes_of(&staged), content);
        drop(staged);

        let changed = |staged| matches!(staged, Err(StageError::Changed));
        assert!(changed(stage(3 + len, &digest)), "another range");
        assert!(changed(stage(4 + 100, &digest)), "into the slab");
        file.write_all_at(&[!content[len as usize - 1]], 3 + len)
            .unwrap();
        assert!(changed(stage(4 + len, &digest)), "one byte changed");
        file.write_all_at(&content, 4).unwrap();
        assert!(stage(4 + len, &digest).is_ok(), "and changed back");
        file.set_len(len).unwrap();
        assert!(changed(stage(4 + len, &digest)), "cut");
        assert_eq!(staging.free_bytes(), SLAB);
        assert_eq!(engine.registered(), 1);
    }

    // row: D11
    #[test]
    fn a_source_that_cannot_be_read_leaves_no_region_and_no_registration_behind() {
        let (engine, staging) = staging();
        for end in [100, SLAB + 100] {
            let failed = staging.stage(
                Source::File {
                    file: Arc::new(tempfile::tempfile().unwrap()),
                    range: 0..end,
                    sha256: None,
                },
                soon(),
            );
            assert!(matches!(failed, Err(StageError::Slab(_))));
        }
        assert_eq!(staging.free_bytes(), SLAB);
        assert_eq!(engine.registered(), 1);
    }

    #[test]
    fn memory_of_the_caller_is_registered_once_for_all_that_use_it() {
        let (engine, staging) = staging();
        let memory: Arc<dyn Memory> = Arc::new(HostSlab::new(1024).unwrap());
        memory.copy_in(10, b"xyz").unwrap();
        let hold: Arc<dyn Any + Send + Sync> = Arc::new(());
        let stage = |range| {
            staging
                .stage(
                    Source::Memory {
                        memory: Arc::clone(&memory),
                        range,
                        hold: Arc::clone(&hold),
                    },
                    soon(),
                )
                .unwrap()
        };
        let (one, two) = (stage(10..13), stage(0..1024));
        assert_eq!(bytes_of(&one), b"xyz");
        assert_eq!(engine.registered(), 2);
        drop(one);
        assert_eq!(engine.registered(), 2);
        drop(two);
        assert_eq!(engine.registered(), 1);
        assert_eq!(Arc::strong_count(&hold), 1, "holds are given back");
    }

    #[test]
    fn a_range_outside_the_callers_memory_is_refused() {
        let (engine, staging) = staging();
        let memory: Arc<dyn Memory> = Arc::new(HostSlab::new(1024).unwrap());
        #[expect(clippy::reversed_empty_ranges, reason = "the range under test")]
        for range in [0..1025, 8..7] {
            let failed = staging.stage(
                Source::Memory {
                    memory: Arc::clone(&memory),
                    range,
                    hold: Arc::new(()),
                },
                soon(),
            );
            assert!(matches!(failed, Err(StageError::Copy(_))));
        }
        assert_eq!(engine.registered(), 1);
    }

    // row: A8, D13
    #[test]
    fn a_refused_registration_leaves_the_table_as_it_was() {
        let (engine, staging) = staging();
        let memory: Arc<dyn Memory> = Arc::new(HostSlab::new(1024).unwrap());
        let stage = || {
            staging.stage(
                Source::Memory {
                    memory: Arc::clone(&memory),
                    range: 0..1,
                    hold: Arc::new(()),
                },
                soon(),
            )
        };
        engine.refuse_registrations(true);
        assert!(matches!(stage(), Err(StageError::Register(_))));
        engine.refuse_registrations(false);
        let staged = stage().unwrap();
        assert_eq!(engine.registered(), 2);
        drop(staged);
        assert_eq!(engine.registered(), 1);
    }
}
