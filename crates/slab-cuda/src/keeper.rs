//! The timelines of one pool: which stream has which, what was recorded on it, and what the pool is told.
//!
//! A pool's timelines are never removed, so a stream that goes leaves its timeline to the next one, once everything
//! recorded on it is passed; values go on growing. Pure but for its locks, of which the pool's is the inner one and is
//! never held over a driver's call: `polling`, then `book`, or `polling`, then the pool's.

use slab_core::{Error, Fence, TimelineId};

use crate::error::CudaError;
use crate::sync::{Mutex, MutexGuard, lock};
use crate::track::{Mark, Point, Track, failed_before};

/// What a pool is told of a timeline.
#[derive(Clone, Copy, Debug)]
pub enum News {
    /// It has come this far.
    Reached(TimelineId, u64),
    /// It comes no further.
    Failed(TimelineId),
}

/// The pool, whatever its types.
pub trait Ledger: Send + Sync {
    /// Adds a timeline.
    fn add_timeline(&self) -> Result<TimelineId, Error>;
    /// Takes news in, in this order.
    fn feed(&self, news: &[News]);
    /// Whether the calling thread is inside the pool's lock, so that neither may be called.
    fn is_inside(&self) -> bool;
}

/// Something lent that comes back by itself: given to the pool, or kept for ever if the pool refuses it.
pub(crate) type GiveBack = Box<dyn FnOnce(Fence) -> Result<(), Error> + Send>;

/// Bounds.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Most timelines.
    pub streams_max: u32,
    /// Most loans and recorded points together.
    pub pending_max: usize,
}

struct Slot<E> {
    id: TimelineId,
    track: Track<E, ()>,
    attached: bool,
    /// The pool and a caller of `poll` know that it has failed.
    told: bool,
}

struct Book<E> {
    slots: Vec<Slot<E>>,
    /// What was dropped and not given back yet: the pool's lock may have been held then.
    returned: Vec<(GiveBack, Fence)>,
    /// Loans that have not ended.
    out: usize,
}

impl<E: Mark> Book<E> {
    fn pending(&self) -> usize {
        self.out + self.slots.iter().map(|s| s.track.pending()).sum::<usize>()
    }
}

/// Where a value stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    Pending,
    Reached,
    Failed(CudaError),
}

/// See the module.
pub struct Keeper<E> {
    ledger: Box<dyn Ledger>,
    bounds: Bounds,
    /// One look at a time, so that the pool hears what was reached before it hears what failed.
    polling: Mutex<()>,
    book: Mutex<Book<E>>,
}

impl<E: Mark> Keeper<E> {
    /// No timelines yet.
    #[must_use]
    pub fn new(ledger: Box<dyn Ledger>, bounds: Bounds) -> Self {
        Self {
            ledger,
            bounds,
            polling: Mutex::new(()),
            book: Mutex::new(Book {
                slots: Vec::new(),
                returned: Vec::new(),
                out: 0,
            }),
        }
    }

    /// Gives a stream its timeline: one that another has left, or a new one.
    ///
    /// # Errors
    /// [`CudaError::TooManyStreams`] at the bound, or the pool's error.
    pub fn attach(&self) -> Result<usize, CudaError> {
        let mut ended = Vec::new();
        let _polling = self.lock_polling();
        // What fails here is told to the next caller of `poll`.
        self.look(&mut ended);
        let slots = {
            let mut book = lock(&self.book);
            let mut slots = book.slots.iter_mut();
            if let Some(at) = slots.position(|s| !s.attached && s.track.is_drained()) {
                book.slots[at].attached = true;
                return Ok(at);
            }
            book.slots.len()
        };
        let streams_max = self.bounds.streams_max;
        if slots >= streams_max as usize {
            return Err(CudaError::TooManyStreams { streams_max });
        }
        let id = self.ledger.add_timeline()?;
        // Nobody else adds one: `polling` is held.
        lock(&self.book).slots.push(Slot {
            id,
            track: Track::new(),
            attached: true,
            told: false,
        });
        Ok(slots)
    }

    /// The stream goes; its timeline stays until it is drained.
    pub fn detach(&self, slot: usize) {
        if let Some(slot) = lock(&self.book).slots.get_mut(slot) {
            slot.attached = false;
        }
    }

    /// Takes room for one loan, which [`record`](Self::record) or [`cancel`](Self::cancel) ends.
    ///
    /// # Errors
    /// [`CudaError::TooManyPending`] at the bound, [`CudaError::StreamFailed`].
    pub fn begin(&self, slot: usize) -> Result<(), CudaError> {
        let pending_max = self.bounds.pending_max;
        if lock(&self.book).pending() >= pending_max {
            self.poll_quietly();
        }
        let mut book = lock(&self.book);
        if let Some(error) = book.slots.get(slot).and_then(|slot| slot.track.error()) {
            return Err(failed_before(error));
        }
        if book.pending() >= pending_max {
            return Err(CudaError::TooManyPending { pending_max });
        }
        book.out += 1;
        Ok(())
    }

    /// Ends a loan of which nobody has seen the address.
    pub fn cancel(&self) {
        let mut book = lock(&self.book);
        book.out = book.out.saturating_sub(1);
    }

    /// Ends a loan: records the point behind it with `mark`, and returns the fence that what was lent waits for. With
    /// an error, that is a fence which is never reached.
    ///
    /// # Panics
    /// If there is no such slot.
    pub fn record(
        &self,
        slot: usize,
        mark: impl FnOnce() -> Result<E, CudaError>,
    ) -> (Fence, Result<(), CudaError>) {
        // The lock is held over `mark`, so that points are numbered in the order in which they are recorded.
        let mut book = lock(&self.book);
        book.out = book.out.saturating_sub(1);
        let slot = &mut book.slots[slot];
        let mark = match slot.track.error() {
            Some(error) => Err(failed_before(error)),
            None => mark(),
        };
        let result = mark
            .as_ref()
            .map_or_else(|error| Err(error.clone()), |_| Ok(()));
        let value = slot.track.push(mark, ());
        (slot.id.fence(value), result)
    }

    /// Leaves something for the next look to give back behind its fence.
    pub(crate) fn leave(&self, give: GiveBack, fence: Fence) {
        lock(&self.book).returned.push((give, fence));
    }

    /// Where the point of a fence stands, as of the last look.
    pub(crate) fn standing(&self, slot: usize, fence: Fence) -> Standing {
        let book = lock(&self.book);
        match book.slots.get(slot) {
            Some(slot) if slot.track.reached() >= fence.value() => Standing::Reached,
            Some(slot) => match slot.track.failed() {
                Some(error) => Standing::Failed(failed_before(error)),
                None => Standing::Pending,
            },
            None => Standing::Pending,
        }
    }

    /// Looks how far the streams have come, tells the pool, and gives back what was left. Returns how many loans and
    /// points are pending.
    ///
    /// # Errors
    /// Why a stream has failed since the last look; each is told once. Everything else was done all the same.
    ///
    /// # Panics
    /// If the calling thread is inside the pool's lock.
    pub fn poll(&self) -> Result<usize, CudaError> {
        let mut ended = Vec::new();
        let _polling = self.lock_polling();
        self.look(&mut ended);
        let mut book = lock(&self.book);
        let mut untold = book.slots.iter_mut().filter(|slot| !slot.told);
        let failed = untold.find_map(|slot| {
            let error = slot.track.failed()?.clone();
            slot.told = true;
            Some(error)
        });
        match failed {
            Some(error) => Err(error),
            None => Ok(book.pending()),
        }
    }

    /// As [`poll`](Self::poll), and leaves what has failed for a caller of that to be told.
    pub(crate) fn poll_quietly(&self) {
        let mut ended = Vec::new();
        let _polling = self.lock_polling();
        self.look(&mut ended);
    }

    /// Whoever polls takes the pool's lock: a thread that has it would wait for itself, or for another that polls.
    fn lock_polling(&self) -> MutexGuard<'_, ()> {
        assert!(
            !self.ledger.is_inside(),
            "the timelines of a pool were polled by the thread that is inside its lock"
        );
        lock(&self.polling)
    }

    /// One look. `polling` is held, and `book` is not. What was passed goes to `ended`, which its callers make before
    /// they take the lock, so that it is dropped after that: a mark keeps a stream, whose owner's destructor may drop
    /// what comes back here.
    fn look(&self, ended: &mut Vec<Point<E, ()>>) {
        let mut news = Vec::new();
        let returned = {
            let mut book = lock(&self.book);
            for slot in &mut book.slots {
                let (reached, failed) = (slot.track.reached(), slot.track.failed().is_some());
                slot.track.poll(ended);
                if slot.track.reached() > reached {
                    news.push(News::Reached(slot.id, slot.track.reached()));
                }
                if slot.track.failed().is_some() && !failed {
                    news.push(News::Failed(slot.id));
                }
            }
            std::mem::take(&mut book.returned)
        };
        give_back(returned);
        if !news.is_empty() {
            self.ledger.feed(&news);
        }
    }

    /// Looks, and tells the pool nothing. Says whether nothing is pending, and whether nothing has failed.
    pub(crate) fn look_alone(&mut self) -> (bool, bool) {
        // Before the lock, so that it is dropped after it.
        let mut ended = Vec::new();
        let mut book = lock(&self.book);
        for slot in &mut book.slots {
            slot.track.poll(&mut ended);
        }
        let has_failed = book.slots.iter().any(|slot| slot.track.error().is_some());
        (book.pending() == 0, !has_failed)
    }

    /// Tells the pool how it ended, and gives back what was left: behind what is reached, else for the quarantine.
    ///
    /// Inside the pool's lock it hears nothing, and its bytes wait for ever, but for those that have nothing to wait for.
    pub(crate) fn finish(&mut self) {
        let mut book = lock(&self.book);
        let returned = std::mem::take(&mut book.returned);
        if self.ledger.is_inside() {
            for (give, fence) in returned {
                let slot = book.slots.iter().find(|slot| slot.id == fence.timeline());
                if slot.is_some_and(|slot| slot.track.reached() >= fence.value()) {
                    // Guards that are dropped know where they are.
                    drop(give);
                } else {
                    std::mem::forget(give);
                }
            }
            return;
        }
        let mut news = Vec::new();
        for slot in &book.slots {
            // A timeline that the pool knows to have failed takes no more.
            if slot.track.failed().is_none() {
                news.push(News::Reached(slot.id, slot.track.reached()));
            }
            if !slot.track.is_drained() {
                news.push(News::Failed(slot.id));
            }
        }
        drop(book);
        give_back(returned);
        self.ledger.feed(&news);
    }
}

/// Gives everything back behind its fence.
fn give_back(returned: Vec<(GiveBack, Fence)>) {
    for (give, fence) in returned {
        if let Err(error) = give(fence) {
            tracing::error!(cause = %error, "the pool refused what was lent from it; its bytes are not reused");
        }
    }
}
