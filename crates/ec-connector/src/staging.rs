//! Where the bytes of a push lie while the engine reads them.
//!
//! One slab, registered when the producer starts, from which regions of any size are carved. A source larger than
//! the slab gets memory of its own, registered for as long as it is needed. Memory that the caller brings is
//! registered where it lies, once for all pushes that use it at the same time.
//!
//! Every region and registration is owned by a value that gives it back when dropped, so no path leaks one
//! (row D11); the registration table changes only after the engine has said yes (row D13).

mod direct;
mod regions;

use std::any::Any;
use std::fs::File;
use std::ops::Range;
use std::sync::Arc;

use mooncake_transport::{Access, Engine, EngineError, Registration};
use sha2::{Digest, Sha256};
use slab_core::{Error as PoolError, FreeList, FreeListConfig, PoolId};
use slab_memory::{CopyError, HostSlab, Memory, SlabError};

use self::direct::Direct;
use self::regions::Regions;
use crate::content_hash::{fill_hashed, hex};

pub(crate) use self::regions::Turn;

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

/// What became of staging a source.
pub(crate) enum Stage {
    Ready(Staged),
    /// There is no room now. Whoever waits keeps the place in line, and tries again when it is told that there may be.
    Later(Source, Turn),
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
    /// Makes and registers a slab of `capacity` bytes. `room` is called whenever whoever is first in line for room may
    /// find some, by any thread and under no lock of this module.
    pub(crate) fn new(
        engine: Arc<dyn Engine>,
        capacity: u64,
        room: impl Fn() + Send + Sync + 'static,
    ) -> Result<Self, StageError> {
        let slab = Arc::new(HostSlab::new(capacity)?);
        let list = FreeList::new(FreeListConfig::new(PoolId::new(), capacity))?;
        let usable = list.usable();
        let registration = engine.register(Arc::clone(&slab) as Arc<dyn Memory>, Access::Local)?;
        Ok(Self {
            engine,
            slab,
            usable,
            regions: Regions::new(list, Box::new(room)),
            direct: Arc::default(),
            _registration: registration,
        })
    }

    /// Puts `source` where the engine can read it, if there is room. Does not wait for any; `turn` is the place in
    /// line that an earlier try was given.
    pub(crate) fn stage(&self, source: Source, turn: Option<Turn>) -> Result<Stage, StageError> {
        match source {
            Source::Bytes(bytes) => match self.place(bytes.len() as u64, turn)? {
                Ok(place) => {
                    place.slab.copy_in(place.range.start, &bytes)?;
                    Ok(Stage::Ready(place.into_staged()))
                }
                Err(turn) => Ok(Stage::Later(Source::Bytes(bytes), turn)),
            },
            Source::File {
                file,
                range,
                sha256,
            } => match self.place(range.end.saturating_sub(range.start), turn)? {
                Ok(place) => {
                    match sha256 {
                        Some(sha256) => place.fill_checked(&file, range.start, &sha256)?,
                        None => place
                            .slab
                            .read_at(place.range.clone(), &file, range.start)?,
                    }
                    Ok(Stage::Ready(place.into_staged()))
                }
                Err(turn) => {
                    let source = Source::File {
                        file,
                        range,
                        sha256,
                    };
                    Ok(Stage::Later(source, turn))
                }
            },
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
                Ok(Stage::Ready(Staged {
                    memory,
                    range,
                    hold: Arc::new((share, hold)),
                }))
            }
        }
    }

    /// Finds `len` bytes in the slab, or registers memory of that size when the slab is too small for it.
    fn place(&self, len: u64, turn: Option<Turn>) -> Result<Result<Place, Turn>, StageError> {
        if len <= self.usable {
            return Ok(Regions::take(&self.regions, len, turn)?.map(|region| {
                let start = region.offset();
                Place {
                    slab: Arc::clone(&self.slab),
                    range: start..start + len,
                    hold: Arc::new(region),
                }
            }));
        }
        let slab = Arc::new(HostSlab::new(len)?);
        let memory: Arc<dyn Memory> = Arc::clone(&slab) as Arc<dyn Memory>;
        let share = Direct::share(&self.direct, &*self.engine, &memory)?;
        Ok(Ok(Place {
            slab,
            range: 0..len,
            hold: Arc::new(share),
        }))
    }

    #[cfg(test)]
    pub(crate) fn free_bytes(&self) -> u64 {
        self.regions.free_bytes()
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

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::FileExt;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::fake_engine::FakeEngine;

    const SLAB: u64 = 4096;

    fn staging() -> (Arc<FakeEngine>, Staging) {
        let engine = FakeEngine::new();
        let staging = Staging::new(engine.clone(), SLAB, || {}).unwrap();
        (engine, staging)
    }

    fn ready(stage: Result<Stage, StageError>) -> Result<Staged, StageError> {
        stage.map(|stage| match stage {
            Stage::Ready(staged) => staged,
            Stage::Later(..) => panic!("no room"),
        })
    }

    fn now(staging: &Staging, source: Source) -> Result<Staged, StageError> {
        ready(staging.stage(source, None))
    }

    fn later(stage: Result<Stage, StageError>) -> (Source, Turn) {
        match stage {
            Ok(Stage::Later(source, turn)) => (source, turn),
            Ok(Stage::Ready(_)) => panic!("there was room"),
            Err(error) => panic!("{error}"),
        }
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
            now(&staging, Source::Bytes(b"abc".to_vec())).unwrap(),
            now(
                &staging,
                Source::File {
                    file: Arc::new(file),
                    range: 3..7,
                    sha256: None,
                },
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
        let staged = now(&staging, Source::Bytes(bytes.clone())).unwrap();
        assert_eq!(engine.registered(), 2);
        assert_eq!(bytes_of(&staged), bytes);
        assert_eq!(staging.free_bytes(), SLAB);
        drop(staged);
        assert_eq!(engine.registered(), 1);
    }

    #[test]
    fn a_full_slab_lets_nobody_wait_inside_and_serves_in_order_of_asking() {
        let engine = FakeEngine::new();
        let calls = Arc::new(AtomicUsize::new(0));
        let told = Arc::clone(&calls);
        let staging = Staging::new(engine, SLAB, move || {
            told.fetch_add(1, Ordering::SeqCst);
        })
        .unwrap();
        let bytes = |len: u64| Source::Bytes(vec![1; len as usize]);
        let small = now(&staging, bytes(256)).unwrap();
        let other = now(&staging, bytes(256)).unwrap();

        let (large, first) = later(staging.stage(bytes(SLAB), None));
        assert_eq!(large.len_bytes(), Some(SLAB), "the source comes back");
        // There is room for this one, but it came later.
        let (second_source, second) = later(staging.stage(bytes(256), None));
        assert!(first.number() < second.number());
        assert_eq!(calls.load(Ordering::SeqCst), 0);

        drop(small);
        assert_eq!(calls.load(Ordering::SeqCst), 1);
        let (large, first) = later(staging.stage(large, Some(first)));
        drop(other);
        assert_eq!(calls.load(Ordering::SeqCst), 2);
        let (second_source, second) = later(staging.stage(second_source, Some(second)));
        let large = ready(staging.stage(large, Some(first))).unwrap();
        assert_eq!(calls.load(Ordering::SeqCst), 3, "the next in line may look");
        let (second_source, second) = later(staging.stage(second_source, Some(second)));
        // One that gives up makes way as well.
        let (_, third) = later(staging.stage(bytes(256), None));
        drop(large);
        assert_eq!(calls.load(Ordering::SeqCst), 4);
        drop(second);
        assert_eq!(calls.load(Ordering::SeqCst), 5);
        assert!(ready(staging.stage(second_source, Some(third))).is_ok());
        assert_eq!(calls.load(Ordering::SeqCst), 5, "nobody is left to be told");
        assert_eq!(staging.free_bytes(), SLAB);
    }

    #[test]
    fn the_last_user_of_a_registration_never_waits_for_a_thread_that_registers() {
        let (engine, staging) = staging();
        let memory = || -> Source {
            Source::Memory {
                memory: Arc::new(HostSlab::new(1024).unwrap()),
                range: 0..1,
                hold: Arc::new(()),
            }
        };
        let first = now(&staging, memory()).unwrap();
        let (entered, has_entered) = std::sync::mpsc::channel();
        let (dropped, is_dropped) = std::sync::mpsc::channel();
        let is_dropped = std::sync::Mutex::new(is_dropped);
        // An engine whose thread has to drop a hold before it can register.
        engine.when_registering(move || {
            entered.send(()).unwrap();
            let wait = std::time::Duration::from_secs(10);
            is_dropped
                .lock()
                .unwrap()
                .recv_timeout(wait)
                .expect("the hold is dropped meanwhile");
        });
        std::thread::scope(|scope| {
            let second = scope.spawn(|| now(&staging, memory()));
            has_entered.recv().unwrap();
            drop(first);
            dropped.send(()).unwrap();
            assert!(second.join().unwrap().is_ok());
        });
        assert_eq!(engine.registered(), 1);
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
            now(
                &staging,
                Source::File {
                    file: Arc::clone(&file),
                    range: 4..end,
                    sha256: Some(sha256.to_owned()),
                },
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
            let failed = now(
                &staging,
                Source::File {
                    file: Arc::new(tempfile::tempfile().unwrap()),
                    range: 0..end,
                    sha256: None,
                },
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
            now(
                &staging,
                Source::Memory {
                    memory: Arc::clone(&memory),
                    range,
                    hold: Arc::clone(&hold),
                },
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
            let failed = now(
                &staging,
                Source::Memory {
                    memory: Arc::clone(&memory),
                    range,
                    hold: Arc::new(()),
                },
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
            now(
                &staging,
                Source::Memory {
                    memory: Arc::clone(&memory),
                    range: 0..1,
                    hold: Arc::new(()),
                },
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
