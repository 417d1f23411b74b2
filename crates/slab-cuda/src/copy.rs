//! Copies between memories that the device can reach, many with one call where the driver has such a call.
//!
//! Invariant: the arrays of a batch, the memories that it names and whatever else it holds stay until the event behind
//! its last copy is passed, whatever becomes of the handle.

// Hands arrays of addresses to the driver.
#![allow(unsafe_code)]

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use cudarc::driver::sys;
use slab_core::{CopyList, CopySpan, DescriptorError};
use slab_memory::MemoryKind;

use crate::api::{CopyBatch as BatchCall, call};
use crate::caught::let_go;
use crate::device::{Device, Side};
use crate::error::{CudaError, Refused};
use crate::slab::CudaMemory;
use crate::stage::QUIET_LIMIT;
use crate::stream::{Backoff, Event, Stream};
use crate::sync::{Mutex, lock};
use crate::track::{Point, Track, failed_before};

// The list's lengths are handed over as they are.
const _: () = assert!(size_of::<usize>() == size_of::<u64>());

/// Most batches under way per copier.
const PENDING_MAX: usize = 1024;

/// Copies to be made, and what they need until they have ended.
pub struct CopyBatch {
    list: CopyList,
    places: Range<usize>,
    memories: Vec<Arc<dyn CudaMemory>>,
    hold: Box<dyn Any + Send>,
}

impl CopyBatch {
    /// The copies at `places` of a list, between `memories`. `hold` is whatever keeps the ranges, such as leases: it is
    /// dropped only when the copies have ended, and nobody has the [`Copying`] any more. With `()` nothing keeps a region
    /// of a pool from being handed out again.
    ///
    /// Copies of one batch run in any order and at the same time, so none may read or write what another writes, nor
    /// what it writes itself: the bytes are anything then.
    #[must_use]
    pub fn new(
        list: CopyList,
        places: Range<usize>,
        memories: Vec<Arc<dyn CudaMemory>>,
        hold: impl Any + Send,
    ) -> Self {
        Self {
            list,
            places,
            memories,
            hold: Box::new(hold),
        }
    }

    /// One copy of `len` bytes between two memories, from and to their offsets.
    #[must_use]
    pub fn one(
        source: (&Arc<dyn CudaMemory>, u64),
        target: (&Arc<dyn CudaMemory>, u64),
        len: u64,
        hold: impl Any + Send,
    ) -> Self {
        let mut list = CopyList::new(1);
        let span = CopySpan {
            source: source.0.address().saturating_add(source.1),
            destination: target.0.address().saturating_add(target.1),
            len,
        };
        // One copy fits a list of one place.
        let places = 0..list.store(0, [span]).unwrap_or(0);
        let memories = vec![Arc::clone(source.0), Arc::clone(target.0)];
        Self::new(list, places, memories, hold)
    }

    /// The list, for the next batch, and what was held.
    #[must_use]
    pub fn into_parts(self) -> (CopyList, Box<dyn Any + Send>) {
        (self.list, self.hold)
    }

    fn sources(&self) -> &[u64] {
        &self.list.sources()[self.places.clone()]
    }

    fn targets(&self) -> &[u64] {
        &self.list.destinations()[self.places.clone()]
    }

    fn lens(&self) -> &[u64] {
        &self.list.lengths()[self.places.clone()]
    }

    /// Whether every copy stays inside of the memories, which are the device's. O(copies × memories).
    fn check(&self, device: &Device) -> Result<(), CudaError> {
        if self.places.start > self.places.end || self.places.end > self.list.capacity() {
            return Err(CudaError::Descriptor(DescriptorError::OutOfPlaces {
                first: self.places.start,
                count: self.places.len(),
                capacity: self.list.capacity(),
            }));
        }
        for memory in &self.memories {
            device.check_same(memory.device())?;
        }
        let (sources, targets) = (self.sources(), self.targets());
        for ((&source, &target), &len) in sources.iter().zip(targets).zip(self.lens()) {
            let kinds = [self.kind_of(source, len)?, self.kind_of(target, len)?];
            // The driver would wait for the stream before it begins, and let the caller wait.
            if kinds == [MemoryKind::Host; 2] && len > 0 {
                return Err(CudaError::BothOnHost {
                    from: source,
                    to: target,
                });
            }
        }
        Ok(())
    }

    /// Of which kind the memory is that has all of a range. O(memories).
    fn kind_of(&self, address: u64, len: u64) -> Result<MemoryKind, CudaError> {
        let inside = |memory: &&Arc<dyn CudaMemory>| {
            let offset = address.checked_sub(memory.address());
            let end = offset.and_then(|offset| offset.checked_add(len));
            end.is_some_and(|end| end <= memory.len())
        };
        match self.memories.iter().find(inside) {
            Some(memory) => Ok(memory.kind()),
            None => Err(CudaError::OutsideMemory { address, len }),
        }
    }
}

impl fmt::Debug for CopyBatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CopyBatch")
            .field("copies", &self.places.len())
            .finish_non_exhaustive()
    }
}

/// Runs copies on one stream. Cloning gives another handle.
///
/// Batches end in the order in which they were submitted. When the last handle goes it waits for them, up to ten
/// seconds; what they hold is then kept for ever, which is logged.
#[derive(Clone)]
pub struct Copier {
    inner: Arc<Inner>,
}

type Held = Arc<Mutex<CopyBatch>>;

struct Inner {
    stream: Stream,
    track: Mutex<Track<Event, Held>>,
}

impl Copier {
    /// Copies on a stream of the caller's, in the order of everything else there.
    #[must_use]
    pub fn new(stream: &Stream) -> Self {
        Self {
            inner: Arc::new(Inner {
                stream: stream.clone(),
                track: Mutex::new(Track::new()),
            }),
        }
    }

    /// Copies on the side stream of the calling thread, beside whatever the device does otherwise; copiers that one
    /// thread makes share it. A device has eight such streams, which more threads share.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn side(device: &Device) -> Result<Self, CudaError> {
        Ok(Self::new(&Stream::side(device, Side::Copies)?))
    }

    /// The stream.
    #[must_use]
    pub fn stream(&self) -> &Stream {
        &self.inner.stream
    }

    /// Starts the copies of a batch and returns at once. Those of zero bytes are left out.
    ///
    /// The sources are read when the stream gets there: what earlier work of the stream writes is seen. Work of other
    /// streams has to be waited for first ([`Stream::wait_for`]).
    ///
    /// # Errors
    /// The batch, of which nothing was started, with [`CudaError::OutsideMemory`], [`CudaError::OtherDevice`],
    /// [`CudaError::BothOnHost`],
    /// [`CudaError::Descriptor`] if the list has not these places,
    /// [`CudaError::TooManyPending`] at 1,024 batches, [`CudaError::StreamCapturing`], [`CudaError::StreamFailed`] or
    /// [`CudaError::Driver`]. What goes wrong later is told by [`Copying::poll`], when nothing touches the memories any
    /// more.
    ///
    /// # Complexity
    /// O(copies × memories) for the check, then one call of the driver, or O(copies) of them.
    #[allow(clippy::result_large_err, reason = "the batch goes in by value, too")]
    pub fn submit(&self, batch: CopyBatch) -> Result<Copying, Refused<CopyBatch>> {
        let device = self.stream().device();
        let mut ended = Vec::new();
        let checked = batch.check(device).and_then(|()| Event::take(device));
        let submitted = match checked {
            Ok(event) => self.submit_checked(batch, event, &mut ended),
            Err(cause) => Err(Refused {
                value: batch,
                cause,
            }),
        };
        // What is dropped may be the program's, so no lock is held.
        let_go(ended);
        submitted
    }

    #[allow(clippy::result_large_err, reason = "the batch goes in by value, too")]
    fn submit_checked(
        &self,
        batch: CopyBatch,
        mut event: Event,
        ended: &mut Vec<Point<Event, Held>>,
    ) -> Result<Copying, Refused<CopyBatch>> {
        let mut track = lock(&self.inner.track);
        if track.pending() >= PENDING_MAX {
            track.poll(ended);
        }
        let refusal = match track.error() {
            Some(error) => Some(failed_before(error)),
            None if track.pending() >= PENDING_MAX => Some(CudaError::TooManyPending {
                pending_max: PENDING_MAX,
            }),
            None => None,
        };
        if let Some(cause) = refusal {
            return Err(Refused {
                value: batch,
                cause,
            });
        }
        let entered = self.stream().device().enter().and_then(|current| {
            self.stream().check_runs(&current)?;
            Ok(current)
        });
        let current = match entered {
            Ok(current) => current,
            Err(cause) => {
                return Err(Refused {
                    value: batch,
                    cause,
                });
            }
        };
        // From here on the driver may have begun.
        let started = start(self.stream(), &batch);
        drop(current);
        let recorded = event.record(self.stream()).map(|()| event);
        let batch = Arc::new(Mutex::new(batch));
        let value = track.push(recorded, Arc::clone(&batch));
        drop(track);
        Ok(Copying {
            copier: self.clone(),
            value,
            batch,
            refused: started.err(),
        })
    }

    /// Looks how far the copies have come, and lets go of what those held that have ended. Returns how many batches are
    /// under way.
    ///
    /// # Errors
    /// [`CudaError::StreamFailed`]: nobody will know how the rest has ended.
    pub fn poll(&self) -> Result<usize, CudaError> {
        let mut ended = Vec::new();
        let mut track = lock(&self.inner.track);
        track.poll(&mut ended);
        let answer = match track.failed() {
            Some(error) => Err(failed_before(error)),
            None => Ok(track.pending()),
        };
        drop(track);
        // The program's own destructors, so no lock is held.
        let_go(ended);
        answer
    }
}

impl fmt::Debug for Copier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Copier").field(&self.inner.stream).finish()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let mut track = std::mem::replace(&mut *lock(&self.track), Track::new());
        let deadline = Instant::now() + QUIET_LIMIT;
        let mut backoff = Backoff::default();
        loop {
            let mut ended = Vec::new();
            track.poll(&mut ended);
            let_go(ended);
            if track.pending() == 0 || Instant::now() >= deadline {
                break;
            }
            backoff.pause();
        }
        for held in track.into_held() {
            std::mem::forget(held);
            let cause = "copies between them may still be under way";
            let device = self.stream.device();
            device.note_lost("memories of a batch", 0, &cause);
        }
    }
}

/// Starts the copies of a checked batch. After an error some of them may have been started.
fn start(stream: &Stream, batch: &CopyBatch) -> Result<(), CudaError> {
    let functions = stream.device().functions();
    let (sources, targets, lens) = (batch.sources(), batch.targets(), batch.lens());
    let are_all_whole = lens.iter().all(|len| *len > 0);
    // One copy gains nothing from it, and one of no bytes is refused by it.
    let call_of_many = functions
        .copy_batch
        .filter(|_| lens.len() > 1 && are_all_whole);
    let Some(call_of_many) = call_of_many else {
        for ((source, target), len) in sources.iter().zip(targets).zip(lens) {
            if *len == 0 {
                continue;
            }
            // SAFETY: both ranges lie inside of memories that the batch holds, which `check` has seen to, and that
            // stay until the event behind this is passed, or for ever.
            unsafe {
                call!(
                    functions,
                    cuMemcpyAsync(*target, *source, *len as usize, stream.raw())
                )?;
            }
        }
        return Ok(());
    };
    // In the order of the stream: sources may be what earlier work of it writes. No hints, no flags.
    let nowhere = sys::CUmemLocation {
        type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID,
        id: 0,
    };
    let mut attributes = sys::CUmemcpyAttributes {
        srcAccessOrder: sys::CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
        srcLocHint: nowhere,
        dstLocHint: nowhere,
        flags: 0,
    };
    let mut first = 0;
    let mut failed = usize::MAX;
    let count = lens.len();
    // The driver reads the arrays, though its header does not say const.
    let targets = targets.as_ptr().cast_mut();
    let sources = sources.as_ptr().cast_mut();
    let lens = lens.as_ptr().cast_mut().cast::<usize>();
    match call_of_many {
        BatchCall::V1(function) => {
            // SAFETY: three arrays of `count` places, which the batch keeps; one attribute, for the copies from the
            // first on; all ranges are checked and held, see above. `usize` has 64 bits, which is checked.
            let code = unsafe {
                function(
                    targets,
                    sources,
                    lens,
                    count,
                    &mut attributes,
                    &mut first,
                    1,
                    &mut failed,
                    stream.raw(),
                )
            };
            functions.check("cuMemcpyBatchAsync", code)
        }
        BatchCall::V2(function) => {
            // SAFETY: as above.
            let code = unsafe {
                function(
                    targets,
                    sources,
                    lens,
                    count,
                    &mut attributes,
                    &mut first,
                    1,
                    stream.raw(),
                )
            };
            functions.check("cuMemcpyBatchAsync_v2", code)
        }
    }
}

/// A batch under way. Dropping it changes nothing but that nobody hears how it ends.
#[must_use = "how the copies end is told here"]
pub struct Copying {
    copier: Copier,
    value: u64,
    batch: Held,
    /// The driver refused some of it, or all.
    refused: Option<CudaError>,
}

impl Copying {
    /// Looks whether all copies have ended.
    ///
    /// # Errors
    /// The driver's, if it refused a copy: those that it took have ended, too. [`CudaError::StreamFailed`] if nobody
    /// will know: the memories and what is held are kept for ever.
    pub fn poll(&mut self) -> Result<bool, CudaError> {
        let polled = self.copier.poll();
        if lock(&self.copier.inner.track).reached() >= self.value {
            return self.refused.clone().map_or(Ok(true), Err);
        }
        polled.map(|_| false)
    }

    /// Polls until all copies have ended, at most until `deadline`.
    ///
    /// # Errors
    /// As [`poll`](Self::poll); [`CudaError::TimedOut`].
    pub fn wait(&mut self, deadline: Instant) -> Result<(), CudaError> {
        let mut backoff = Backoff::default();
        loop {
            let late = Instant::now() >= deadline;
            if self.poll()? {
                return Ok(());
            }
            if late {
                return Err(CudaError::TimedOut);
            }
            backoff.pause();
        }
    }

    /// The batch, once its copies have ended, with or without an error.
    ///
    /// # Errors
    /// This value, while they have not.
    pub fn into_batch(self) -> Result<CopyBatch, Self> {
        // An error is for `poll` to tell.
        let _ = self.copier.poll();
        let Self {
            copier,
            value,
            batch,
            refused,
        } = self;
        match Arc::try_unwrap(batch) {
            // Only this value is left to hold it: the copier has let go.
            Ok(batch) => Ok(batch.into_inner().unwrap_or_else(|e| e.into_inner())),
            Err(batch) => Err(Self {
                copier,
                value,
                batch,
                refused,
            }),
        }
    }
}

impl fmt::Debug for Copying {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Copying")
            .field("copier", &self.copier)
            .field("value", &self.value)
            .finish_non_exhaustive()
    }
}
