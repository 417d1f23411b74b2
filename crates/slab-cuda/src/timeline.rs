//! A pool over device memory: streams as timelines, and addresses that are lent for the time until an event.

use std::fmt;
use std::hash::{BuildHasher, Hash};
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::Instant;

use slab_core::{
    AllocationGuard, Evict, Fence, LeaseGuard, PoolId, Region, SharedPool, TimelineId,
};

use crate::caught::caught;
use crate::error::{CudaError, Refused};
use crate::keeper::{Bounds, GiveBack, Keeper, Ledger, News, Standing};
use crate::slab::CudaMemory;
use crate::stage::QUIET_LIMIT;
use crate::stream::{Backoff, Event, Stream};

/// Bounds of [`Timelines`].
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimelinesConfig {
    /// Most streams attached at a time, those that have failed and those that are gone and not drained included. 8 by
    /// default; a pool has 16 timelines by default, for all that it is used with.
    pub streams_max: u32,
    /// Most loans that have not ended and events that are not passed, together. 1,024 by default.
    pub pending_max: usize,
}

impl Default for TimelinesConfig {
    fn default() -> Self {
        Self {
            streams_max: 8,
            pending_max: 1024,
        }
    }
}

/// The streams that touch a pool of device memory, and what the pool has to wait for on them. Cloning gives another
/// handle.
///
/// Keep it as long as the pool, and call [`poll`](Self::poll) now and then, from any thread: before a reserve, or when
/// one was answered `Later` or `Full`. Bytes behind an event that nobody looks for stay where they are.
///
/// When the last handle goes, with every [`Timeline`], [`Loan`] and [`Settling`], it waits up to ten seconds for the
/// events that are left, and tells the pool how they ended; inside the pool's lock it does neither. Memory that is then
/// still in use is never given back, which is logged and counted ([`Device::lost`](crate::Device::lost)).
///
/// None of these may be used or dropped in a host function of a stream (`cuLaunchHostFunc`), where the driver refuses
/// to be called: the stream would count as failed.
#[derive(Clone)]
pub struct Timelines {
    core: Arc<Core>,
}

struct Core {
    keeper: Keeper<Event>,
    pool: PoolId,
    /// Taken out by dropping, unless work may still touch it.
    memory: ManuallyDrop<Arc<dyn CudaMemory>>,
}

impl Timelines {
    /// Connects a pool with the memory that it divides.
    ///
    /// # Errors
    /// [`CudaError::PoolTooLarge`].
    ///
    /// # Panics
    /// If the calling thread is inside the pool's lock.
    pub fn new<K, M, X, S, E>(
        pool: &SharedPool<K, M, X, S, E>,
        memory: Arc<dyn CudaMemory>,
        config: TimelinesConfig,
    ) -> Result<Self, CudaError>
    where
        K: Eq + Hash + Send + 'static,
        M: Send + 'static,
        X: Send + 'static,
        S: BuildHasher + Send + 'static,
        E: Evict<Rank: Send> + Send + 'static,
    {
        let capacity = pool.with(|pool, _| pool.stats().capacity);
        if capacity > memory.len() {
            return Err(CudaError::PoolTooLarge {
                pool: capacity,
                memory: memory.len(),
            });
        }
        let bounds = Bounds {
            streams_max: config.streams_max,
            pending_max: config.pending_max,
        };
        Ok(Self {
            core: Arc::new(Core {
                keeper: Keeper::new(Box::new(pool.clone()), bounds),
                pool: pool.id(),
                memory: ManuallyDrop::new(memory),
            }),
        })
    }

    /// The memory that is lent.
    #[must_use]
    pub fn memory(&self) -> &Arc<dyn CudaMemory> {
        &self.core.memory
    }

    /// Gives a stream a timeline of the pool, for as long as the answer or a loan of it is held. Streams may come and
    /// go: one that goes leaves its timeline to the next, once everything recorded on it is passed.
    ///
    /// # Errors
    /// [`CudaError::TooManyStreams`] at the bound; [`CudaError::OtherDevice`]; [`CudaError::Pool`] if the pool has no
    /// timeline left.
    ///
    /// # Panics
    /// If the calling thread is inside the pool's lock.
    pub fn attach(&self, stream: &Stream) -> Result<Timeline, CudaError> {
        let device = self.core.memory.device();
        device.check_same(stream.device())?;
        let slot = self.core.keeper.attach()?;
        Ok(Timeline {
            inner: Arc::new(Attached {
                core: Arc::clone(&self.core),
                slot,
                stream: stream.clone(),
            }),
        })
    }

    /// Looks how far the streams have come, and tells the pool: bytes whose last event was passed are free, those on a
    /// stream that has failed are quarantined. Gives back the loans that were dropped. Returns how many loans and
    /// events are pending.
    ///
    /// # Errors
    /// Why a stream has failed, once for each stream; call again for the rest. Everything else was done all the same.
    ///
    /// # Complexity
    /// A query of the driver for each stream and for each event passed since the last look, outside of the pool's
    /// lock; inside it what `handle_reached` costs.
    ///
    /// # Panics
    /// If the calling thread is inside the pool's lock.
    pub fn poll(&self) -> Result<usize, CudaError> {
        self.core.keeper.poll()
    }

    /// Polls until nothing is pending or `deadline` has passed. Returns what is then pending. Loans that are held do
    /// not end by this.
    ///
    /// # Errors
    /// As [`poll`](Self::poll), at once.
    ///
    /// # Panics
    /// As [`poll`](Self::poll).
    pub fn drain(&self, deadline: Instant) -> Result<usize, CudaError> {
        let mut backoff = Backoff::default();
        loop {
            let pending = self.poll()?;
            if pending == 0 || Instant::now() >= deadline {
                return Ok(pending);
            }
            backoff.pause();
        }
    }
}

impl fmt::Debug for Timelines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Timelines")
            .field("pool", &self.core.pool)
            .finish_non_exhaustive()
    }
}

impl<K, M, X, S, E> Ledger for SharedPool<K, M, X, S, E>
where
    K: Eq + Hash + Send,
    M: Send,
    X: Send,
    S: BuildHasher + Send,
    E: Evict<Rank: Send> + Send,
{
    fn add_timeline(&self) -> Result<TimelineId, slab_core::Error> {
        self.with(|pool, _| pool.add_timeline())
    }

    fn is_inside(&self) -> bool {
        Self::is_inside(self)
    }

    fn feed(&self, news: &[News]) {
        self.with(|pool, _| {
            for news in news {
                let fed = match *news {
                    News::Reached(timeline, value) => pool.handle_reached(timeline, value),
                    News::Failed(timeline) => pool.handle_failed(timeline),
                };
                // The pool itself made the timeline. What it does not hear is not reused.
                if let Err(error) = fed {
                    tracing::error!(cause = %error, "the pool does not know its timeline");
                }
            }
        });
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        let deadline = Instant::now() + QUIET_LIMIT;
        let mut backoff = Backoff::default();
        let (is_drained, is_whole) = loop {
            let (is_drained, is_whole) = self.keeper.look_alone();
            // Nobody waits for the device under the pool's lock.
            if is_drained || self.keeper.is_inside() || Instant::now() >= deadline {
                break (is_drained, is_whole);
            }
            backoff.pause();
        };
        self.keeper.finish();
        self.keeper.let_go();
        if is_drained && is_whole {
            caught(|| drop_memory(&mut self.memory));
        } else {
            let cause = "work on a stream may still touch it";
            let len = self.memory.len();
            self.memory
                .device()
                .note_lost("memory of a pool", len, &cause);
        }
    }
}

/// The one place where the memory of a pool is let go.
#[allow(unsafe_code)]
fn drop_memory(memory: &mut ManuallyDrop<Arc<dyn CudaMemory>>) {
    // SAFETY: called once, by the drop of its owner, after which nobody looks at it.
    unsafe { ManuallyDrop::drop(memory) };
}

/// What can be lent: the right to bytes of a pool.
pub trait Lendable: sealed::Lendable {}

mod sealed {
    use slab_core::{Error, Fence, PoolId, Region};

    #[allow(unnameable_types, reason = "the private half of a sealed trait")]
    pub trait Lendable: Send + Sized + 'static {
        fn pool(&self) -> PoolId;
        fn region(&self) -> Region;
        fn len(&self) -> u64;
        /// Behind the fence. What the pool refuses is kept for ever.
        fn give(self, fence: Fence) -> Result<(), Error>;
    }
}

impl Lendable for LeaseGuard {}

impl sealed::Lendable for LeaseGuard {
    fn pool(&self) -> PoolId {
        self.pool()
    }

    fn region(&self) -> Region {
        self.region()
    }

    fn len(&self) -> u64 {
        self.len()
    }

    fn give(self, fence: Fence) -> Result<(), slab_core::Error> {
        self.release_after(&[fence]).map_err(|refused| {
            std::mem::forget(refused.value);
            refused.cause
        })
    }
}

impl Lendable for AllocationGuard {}

impl sealed::Lendable for AllocationGuard {
    fn pool(&self) -> PoolId {
        self.pool()
    }

    fn region(&self) -> Region {
        self.region()
    }

    fn len(&self) -> u64 {
        self.len()
    }

    fn give(self, fence: Fence) -> Result<(), slab_core::Error> {
        self.free_after(&[fence]).map_err(|refused| {
            std::mem::forget(refused.value);
            refused.cause
        })
    }
}

/// A stream that is attached to a pool. Cloning gives another handle.
#[derive(Clone)]
pub struct Timeline {
    inner: Arc<Attached>,
}

struct Attached {
    core: Arc<Core>,
    slot: usize,
    stream: Stream,
}

impl Drop for Attached {
    fn drop(&mut self) {
        self.core.keeper.detach(self.slot);
    }
}

impl Timeline {
    /// The stream.
    #[must_use]
    pub fn stream(&self) -> &Stream {
        &self.inner.stream
    }

    /// Lends the bytes of a lease or of an allocation to work on this stream. How the loan ends records the event
    /// behind that work.
    ///
    /// Bytes that several streams touch are lent on each, by a lease each.
    ///
    /// # Errors
    /// The token, with [`CudaError::TooManyPending`] at the bound, [`CudaError::StreamFailed`],
    /// [`CudaError::StreamCapturing`], [`CudaError::Driver`], or [`CudaError::Pool`] if another pool made it.
    ///
    /// # Complexity
    /// O(1); at the bound that of [`Timelines::poll`].
    ///
    /// # Panics
    /// At the bound, if the calling thread is inside the pool's lock.
    pub fn lend<T: Lendable>(&self, token: T) -> Result<Loan<T>, Refused<T>> {
        // The event is there before the address is, so that the loan's end does not fail for want of one.
        match self.begin(&token) {
            Ok(event) => Ok(Loan {
                timeline: self.clone(),
                open: Some((token, event)),
            }),
            Err(cause) => Err(Refused {
                value: token,
                cause,
            }),
        }
    }

    fn begin<T: Lendable>(&self, token: &T) -> Result<Event, CudaError> {
        let core = &self.inner.core;
        if token.pool() != core.pool {
            return Err(CudaError::Pool(slab_core::Error::ForeignToken {
                token: token.pool(),
                pool: core.pool,
            }));
        }
        core.keeper.begin(self.inner.slot)?;
        let device = self.stream().device();
        let ready = device.enter().and_then(|current| {
            self.stream().check_runs(&current)?;
            Event::take(device)
        });
        ready.inspect_err(|_| core.keeper.cancel())
    }

    /// Ends a loan in the book.
    fn record(&self, mut event: Event) -> (Fence, Result<(), CudaError>) {
        let stream = &self.inner.stream;
        self.inner.core.keeper.record(self.inner.slot, || {
            event.record(stream)?;
            Ok(event)
        })
    }
}

impl fmt::Debug for Timeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Timeline")
            .field("slot", &self.inner.slot)
            .field("stream", &self.inner.stream)
            .finish()
    }
}

/// Bytes of a pool, lent to work on a stream: submit the work while the loan is held, and end it afterwards.
///
/// Its end records an event on the stream, and the bytes are not reused before that is passed.
/// [`release`](Self::release) gives them back at once, behind the event; [`settle`](Self::settle) keeps them, to be
/// used by the host or published once it is passed. A loan that is dropped is given back by the next
/// [`Timelines::poll`], so that it may be dropped inside the pool's lock; one that is forgotten keeps its bytes, and
/// the whole memory, for ever.
#[must_use = "the bytes are given back behind whatever was submitted until the loan is dropped"]
pub struct Loan<T: Lendable> {
    timeline: Timeline,
    /// Empty only once it has ended.
    open: Option<(T, Event)>,
}

impl<T: Lendable> Loan<T> {
    /// The address of the first byte, for the device. No byte of it is behind a reference, and none may be used
    /// once the loan has ended, but by what was submitted to [`stream`](Self::stream) before.
    #[must_use]
    pub fn address(&self) -> u64 {
        let offset = self
            .open
            .as_ref()
            .map_or(0, |(token, _)| token.region().offset());
        self.timeline.inner.core.memory.device_address() + offset
    }

    /// Bytes that were asked for.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.open.as_ref().map_or(0, |(token, _)| token.len())
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The stream that the bytes are lent to.
    #[must_use]
    pub fn stream(&self) -> &Stream {
        self.timeline.stream()
    }

    /// Records the event and gives the bytes back behind it.
    ///
    /// # Errors
    /// The driver's, or [`CudaError::StreamCapturing`], if the event could not be recorded: the stream counts as failed,
    /// and the bytes are quarantined once they would be reused. [`CudaError::Pool`], if the pool refused; it keeps the
    /// bytes.
    ///
    /// # Panics
    /// If the calling thread is inside the pool's lock: drop the loan there.
    pub fn release(mut self) -> Result<(), CudaError> {
        let Some((token, event)) = self.open.take() else {
            return Ok(());
        };
        let (fence, recorded) = self.timeline.record(event);
        token.give(fence)?;
        recorded
    }

    /// Records the event and keeps the bytes until it is passed.
    ///
    /// # Errors
    /// The driver's, or [`CudaError::StreamCapturing`], if the event could not be recorded: the bytes are quarantined.
    pub fn settle(mut self) -> Result<Settling<T>, CudaError> {
        let (token, event) = self.open.take().expect("a loan is open until it ends");
        let (fence, recorded) = self.timeline.record(event);
        let settling = Settling {
            timeline: self.timeline.clone(),
            fence,
            token: Some(token),
        };
        // Dropped on an error, it is given back behind a fence that is never reached.
        recorded.map(|()| settling)
    }
}

impl<T: Lendable> Drop for Loan<T> {
    fn drop(&mut self) {
        if let Some((token, event)) = self.open.take() {
            // A record that failed is told by the next poll.
            let (fence, _) = self.timeline.record(event);
            leave(&self.timeline, token, fence);
        }
    }
}

impl<T: Lendable> fmt::Debug for Loan<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loan")
            .field("address", &format_args!("{:#x}", self.address()))
            .field("len", &self.len())
            .field("timeline", &self.timeline)
            .finish()
    }
}

/// Has the next poll give a token back.
fn leave<T: Lendable>(timeline: &Timeline, token: T, fence: Fence) {
    let give = GiveBack::new(move |fence| token.give(fence));
    timeline.inner.core.keeper.leave(give, fence);
}

/// Bytes of a pool, on which work of a stream has not ended.
///
/// Dropped before it has, they are given back behind its event by the next [`Timelines::poll`].
#[must_use = "the bytes are given back once the work on them has ended"]
pub struct Settling<T: Lendable> {
    timeline: Timeline,
    fence: Fence,
    /// Empty only once it was given back.
    token: Option<T>,
}

impl<T: Lendable> Settling<T> {
    /// Looks whether the work has ended; this polls the timelines.
    ///
    /// # Errors
    /// [`CudaError::StreamFailed`]: it will never be known. What is dropped then is quarantined once it would be reused.
    ///
    /// # Complexity
    /// As [`Timelines::poll`].
    ///
    /// # Panics
    /// If the calling thread is inside the pool's lock.
    pub fn poll(&mut self) -> Result<bool, CudaError> {
        let core = &self.timeline.inner.core;
        core.keeper.poll_quietly();
        match core.keeper.standing(self.timeline.inner.slot, self.fence) {
            Standing::Pending => Ok(false),
            Standing::Reached => Ok(true),
            Standing::Failed(error) => Err(error),
        }
    }

    /// Polls until the work has ended, and returns the token.
    ///
    /// # Errors
    /// This value: with the stream's error, or [`CudaError::TimedOut`].
    ///
    /// # Panics
    /// If the calling thread is inside the pool's lock.
    pub fn wait(mut self, deadline: Instant) -> Result<T, Refused<Self>> {
        let mut backoff = Backoff::default();
        loop {
            let late = Instant::now() >= deadline;
            let cause = match self.poll() {
                Ok(true) => {
                    let token = self.token.take();
                    return Ok(token.expect("it is there until this value is consumed"));
                }
                Ok(false) if late => CudaError::TimedOut,
                Ok(false) => {
                    backoff.pause();
                    continue;
                }
                Err(error) => error,
            };
            return Err(Refused { value: self, cause });
        }
    }
}

impl<T: Lendable> Drop for Settling<T> {
    fn drop(&mut self) {
        if let Some(token) = self.token.take() {
            leave(&self.timeline, token, self.fence);
        }
    }
}

impl<T: Lendable> fmt::Debug for Settling<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settling")
            .field("fence", &self.fence)
            .field("timeline", &self.timeline)
            .finish()
    }
}
