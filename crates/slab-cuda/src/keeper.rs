//! The timelines of one pool: which stream has which, what was recorded on it, and what the pool is told.
//!
//! A pool's timelines are never removed, so a stream that goes leaves its timeline to the next one, once everything
//! recorded on it is passed; values go on growing. Pure but for its locks, in this order: `polling`; then that of one
//! line, which is held over calls of the driver for its stream; then `book`, which is held over nothing. The pool's
//! lock is taken inside `polling`, or with none of these. A call of the driver may take its time where a stream's queue
//! is full, so that whoever looks at all lines passes over one that is in use.

use std::sync::Arc;

use slab_core::{Error, Fence, TimelineId};

use crate::caught::{caught, let_go};
use crate::error::CudaError;
use crate::sync::{Mutex, MutexGuard, lock, try_lock};
use crate::track::{Mark, Point, Track, failed_before};
use crate::twin::{Twin, is_left_out};

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

/// Something lent that comes back by itself: given to the pool, or kept for ever if the pool refuses it, or if nobody
/// gets to give it back.
pub struct GiveBack(Option<Give>);

type Give = Box<dyn FnOnce(Fence) -> Result<(), Error> + Send>;

impl GiveBack {
    /// `give` is called at most once, with the fence that it waits for.
    pub fn new(give: impl FnOnce(Fence) -> Result<(), Error> + Send + 'static) -> Self {
        Self(Some(Box::new(give)))
    }

    /// Gives it back behind its fence.
    fn give(mut self, fence: Fence) {
        let give = self.0.take();
        let Some(Some(result)) = caught(|| give.map(|give| give(fence))) else {
            return;
        };
        if let Err(error) = result {
            tracing::error!(cause = %error, "the pool refused what was lent from it; its bytes are not reused");
        }
    }

    /// Drops it as it is, where nothing has to be waited for.
    fn drop_now(mut self) {
        let give = self.0.take();
        caught(|| drop(give));
    }
}

impl Drop for GiveBack {
    fn drop(&mut self) {
        // A guard that is dropped gives its bytes back behind nothing.
        std::mem::forget(self.0.take());
    }
}

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
    line: Mutex<Line<E>>,
}

struct Line<E> {
    track: Track<E, ()>,
    attached: bool,
    /// The pool and a caller of `poll` know that it has failed.
    told: bool,
}

struct Book<E> {
    slots: Vec<Arc<Slot<E>>>,
    /// What was dropped and not given back yet: the pool's lock may have been held then.
    returned: Vec<(GiveBack, Fence)>,
    /// Loans that have not ended.
    out: usize,
    /// What somebody is about to give back.
    giving: usize,
    /// Points of all lines that may still be passed.
    points: usize,
}

impl<E> Book<E> {
    fn pending(&self) -> usize {
        self.out + self.points + self.giving
    }

    /// A line has had `before` points, and has `after`.
    fn count(&mut self, before: usize, after: usize) {
        self.points = (self.points + after).saturating_sub(before);
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
                giving: 0,
                points: 0,
            }),
        }
    }

    /// Gives a stream its timeline: one that another has left, or a new one.
    ///
    /// # Errors
    /// [`CudaError::TooManyStreams`] at the bound, or the pool's error.
    pub fn attach(&self) -> Result<usize, CudaError> {
        // What fails here is told to the next caller of `poll`.
        self.look(|slots| self.attach_to_any(slots))
    }

    /// `polling` is held, so that nobody else does the same.
    fn attach_to_any(&self, slots: &[Arc<Slot<E>>]) -> Result<usize, CudaError> {
        for (at, slot) in slots.iter().enumerate() {
            // One that is in use is attached.
            if let Some(mut line) = try_lock(&slot.line)
                && !line.attached
                && (line.track.is_drained() || is_left_out(Twin::AwaitDrain))
            {
                line.attached = true;
                return Ok(at);
            }
        }
        let streams_max = self.bounds.streams_max;
        if slots.len() >= streams_max as usize {
            return Err(CudaError::TooManyStreams { streams_max });
        }
        let id = self.ledger.add_timeline()?;
        let line = Line {
            track: Track::new(),
            attached: true,
            told: false,
        };
        lock(&self.book).slots.push(Arc::new(Slot {
            id,
            line: Mutex::new(line),
        }));
        Ok(slots.len())
    }

    fn slots(&self) -> Vec<Arc<Slot<E>>> {
        lock(&self.book).slots.clone()
    }

    fn slot(&self, slot: usize) -> Arc<Slot<E>> {
        Arc::clone(&lock(&self.book).slots[slot])
    }

    /// The stream goes; its timeline stays until it is drained.
    ///
    /// # Panics
    /// If there is no such slot.
    pub fn detach(&self, slot: usize) {
        lock(&self.slot(slot).line).attached = false;
    }

    /// Takes room for one loan, which [`record`](Self::record) or [`cancel`](Self::cancel) ends.
    ///
    /// # Errors
    /// [`CudaError::TooManyPending`] at the bound, [`CudaError::StreamFailed`].
    ///
    /// # Panics
    /// If there is no such slot; at the bound, if the calling thread is inside the pool's lock.
    pub fn begin(&self, slot: usize) -> Result<(), CudaError> {
        let pending_max = self.bounds.pending_max;
        if lock(&self.book).pending() >= pending_max {
            self.poll_quietly();
        }
        if let Some(error) = lock(&self.slot(slot).line).track.error() {
            return Err(failed_before(error));
        }
        let mut book = lock(&self.book);
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
        let slot = self.slot(slot);
        // Held over `mark`, so that points are numbered in the order in which they are recorded.
        let mut line = lock(&slot.line);
        let mark = match line.track.error() {
            Some(error) => Err(failed_before(error)),
            None => mark(),
        };
        let result = mark
            .as_ref()
            .map_or_else(|error| Err(error.clone()), |_| Ok(()));
        let before = line.track.pending();
        let value = line.track.push(mark, ());
        let mut book = lock(&self.book);
        book.out = book.out.saturating_sub(1);
        book.count(before, line.track.pending());
        (slot.id.fence(value), result)
    }

    /// Leaves something for the next look to give back behind its fence.
    pub fn leave(&self, give: GiveBack, fence: Fence) {
        lock(&self.book).returned.push((give, fence));
    }

    /// Where the point of a fence stands, as of the last look.
    pub(crate) fn standing(&self, slot: usize, fence: Fence) -> Standing {
        let slot = self.slot(slot);
        let Some(line) = try_lock(&slot.line) else {
            return Standing::Pending;
        };
        if line.track.reached() >= fence.value() {
            return Standing::Reached;
        }
        match line.track.failed() {
            Some(error) => Standing::Failed(failed_before(error)),
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
        self.look(|slots| {
            let failed = slots.iter().find_map(|slot| {
                let mut line = try_lock(&slot.line).filter(|line| !line.told)?;
                let error = line.track.failed()?.clone();
                line.told = !is_left_out(Twin::TellOnce);
                Some(error)
            });
            failed.map_or_else(|| Ok(lock(&self.book).pending()), Err)
        })
    }

    /// As [`poll`](Self::poll), and leaves what has failed for a caller of that to be told.
    pub(crate) fn poll_quietly(&self) {
        self.look(|_| ());
    }

    /// Whether the calling thread is inside the pool's lock.
    pub(crate) fn is_inside(&self) -> bool {
        self.ledger.is_inside()
    }

    /// Gives back what was left, and has the calling thread be the one that looks.
    ///
    /// Whoever polls takes the pool's lock: a thread that has it would wait for itself, or for another that polls.
    fn begin_look(&self) -> MutexGuard<'_, ()> {
        assert!(
            !self.ledger.is_inside(),
            "the timelines of a pool were polled by the thread that is inside its lock"
        );
        // With no lock held: what the pool drops then, such as the metadata of a resident, may be anything.
        let returned = {
            let mut book = lock(&self.book);
            if !is_left_out(Twin::CountGiving) {
                book.giving += book.returned.len();
            }
            std::mem::take(&mut book.returned)
        };
        for (give, fence) in returned {
            give.give(fence);
            let mut book = lock(&self.book);
            book.giving = book.giving.saturating_sub(1);
        }
        lock(&self.polling)
    }

    /// One look, and what its caller has to do before anybody else looks. What was passed is dropped where no lock is
    /// held: a mark keeps a stream, whose owner's destructor may drop what comes back here.
    fn look<T>(&self, then: impl FnOnce(&[Arc<Slot<E>>]) -> T) -> T {
        let mut ended = Vec::new();
        let polling = self.begin_look();
        let slots = self.slots();
        self.look_at(&slots, &mut ended);
        let answer = then(&slots);
        drop(polling);
        let_go(ended);
        answer
    }

    /// Looks how far the lines have come, and tells the pool. `polling` is held.
    fn look_at(&self, slots: &[Arc<Slot<E>>], ended: &mut Vec<Point<E, ()>>) {
        let mut news = Vec::new();
        for slot in slots {
            let Some(mut line) = try_lock(&slot.line) else {
                continue;
            };
            let (reached, failed) = (line.track.reached(), line.track.failed().is_some());
            let before = line.track.pending();
            line.track.poll(ended);
            lock(&self.book).count(before, line.track.pending());
            if line.track.reached() > reached {
                news.push(News::Reached(slot.id, line.track.reached()));
            }
            if line.track.failed().is_some() && !failed {
                news.push(News::Failed(slot.id));
            }
        }
        if !news.is_empty() {
            self.ledger.feed(&news);
        }
    }

    /// Looks, and tells the pool nothing. Says whether nothing is pending, and whether nothing has failed.
    pub(crate) fn look_alone(&mut self) -> (bool, bool) {
        let mut ended = Vec::new();
        let mut has_failed = false;
        for slot in self.slots() {
            let mut line = lock(&slot.line);
            let before = line.track.pending();
            line.track.poll(&mut ended);
            lock(&self.book).count(before, line.track.pending());
            has_failed |= line.track.error().is_some();
        }
        let_go(ended);
        (lock(&self.book).pending() == 0, !has_failed)
    }

    /// Tells the pool how it ended, and gives back what was left: behind what is reached, else for the quarantine.
    ///
    /// Inside the pool's lock it hears nothing, and its bytes wait for ever, but for those that have nothing to wait for.
    pub(crate) fn finish(&mut self) {
        let (slots, returned) = {
            let mut book = lock(&self.book);
            (book.slots.clone(), std::mem::take(&mut book.returned))
        };
        if self.ledger.is_inside() {
            for (give, fence) in returned {
                let slot = slots.iter().find(|slot| slot.id == fence.timeline());
                if slot.is_some_and(|slot| lock(&slot.line).track.reached() >= fence.value()) {
                    // Guards that are dropped know where they are.
                    give.drop_now();
                }
            }
            return;
        }
        let mut news = Vec::new();
        for slot in &slots {
            let line = lock(&slot.line);
            // A timeline that the pool knows to have failed takes no more.
            if line.track.failed().is_none() {
                news.push(News::Reached(slot.id, line.track.reached()));
            }
            if !line.track.is_drained() {
                news.push(News::Failed(slot.id));
            }
        }
        for (give, fence) in returned {
            give.give(fence);
        }
        self.ledger.feed(&news);
    }

    /// Lets go of the points that are left, once the pool has heard of everything.
    pub(crate) fn let_go(&mut self) {
        for slot in self.slots() {
            let points = lock(&slot.line).track.take_points();
            let_go(points);
        }
    }
}

#[cfg(all(test, not(slab_loom)))]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use slab_core::{Pool, PoolConfig, PoolId, SharedPool};

    use super::*;

    struct Passed;

    impl Mark for Passed {
        fn poll(&mut self) -> Result<bool, CudaError> {
            Ok(true)
        }
    }

    #[test]
    fn a_stream_whose_queue_is_full_stops_nobody_else() {
        let pool = Pool::<u32, ()>::new(PoolConfig::new(PoolId::new(), 4096)).unwrap();
        let pool = SharedPool::new(pool, ());
        let bounds = Bounds {
            streams_max: 3,
            pending_max: 10,
        };
        let keeper = Arc::new(Keeper::new(Box::new(pool), bounds));
        let (full, other) = (keeper.attach().unwrap(), keeper.attach().unwrap());
        let (entered, wait_entered) = channel();
        let (let_on, wait_let_on) = channel::<()>();
        keeper.begin(full).unwrap();
        let submitting = {
            let keeper = Arc::clone(&keeper);
            std::thread::spawn(move || {
                keeper.record(full, || {
                    entered.send(()).unwrap();
                    wait_let_on.recv().unwrap();
                    Ok(Passed)
                })
            })
        };
        wait_entered.recv().unwrap();
        let (done, wait_done) = channel();
        {
            let keeper = Arc::clone(&keeper);
            std::thread::spawn(move || {
                keeper.begin(other).unwrap();
                let (fence, recorded) = keeper.record(other, || Ok(Passed));
                recorded.unwrap();
                // The loan of the full one is still out.
                assert_eq!(keeper.poll(), Ok(1));
                assert_eq!(keeper.standing(other, fence), Standing::Reached);
                let third = keeper.attach().unwrap();
                keeper.detach(third);
                done.send(()).unwrap();
            });
        }
        let others = wait_done.recv_timeout(Duration::from_secs(20));
        let_on.send(()).unwrap();
        let (fence, recorded) = submitting.join().unwrap();
        others.expect("the others go on meanwhile");
        recorded.unwrap();
        assert_eq!(keeper.poll(), Ok(0));
        assert_eq!(keeper.standing(full, fence), Standing::Reached);
    }
}
