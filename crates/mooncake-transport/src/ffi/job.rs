//! One task on its way through the library.
//!
//! Invariant: the memory and the hold of a job are dropped by [`Job::finish`] alone. A job that is lost leaks
//! them: the library may still touch the bytes.

use std::any::Any;
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use slab_memory::Memory;

use super::core::Peer;
use super::library::{Request, Source};
use super::queue::Queued;
use crate::batch::{Reason, Remote, Task, Ticket};
use crate::wire::data::Op;

pub(super) struct Job {
    request: Request,
    keep: Option<ManuallyDrop<Keep>>,
    promise: Promise,
    peer: Arc<Peer>,
}

/// Hold and memory, dropped in this order.
type Keep = (Box<dyn Any + Send>, Arc<dyn Memory>);

/// The duty to settle the task, in the hands of whoever is first.
#[derive(Clone)]
pub(super) struct Promise {
    ticket: Arc<Mutex<Option<HeldTicket>>>,
    deadline: Instant,
    allowed: Duration,
}

/// A ticket that settles its task as held when it is dropped: what is lost may be in the library.
struct HeldTicket(Option<Ticket>);

impl HeldTicket {
    fn into_inner(mut self) -> Option<Ticket> {
        self.0.take()
    }
}

impl Drop for HeldTicket {
    fn drop(&mut self) {
        if let Some(ticket) = self.0.take() {
            ticket.settle_held(Remote::Unknown(Reason::Lost));
        }
    }
}

impl Job {
    pub(super) fn new(task: Task, peer: Arc<Peer>, ticket: Ticket, allowed: Duration) -> Self {
        let len = task.range.end - task.range.start;
        Self {
            request: Request {
                is_write: task.op == Op::Write,
                source: Source::new(&*task.memory, task.range.start),
                segment: peer.id,
                remote: task.remote,
                len,
            },
            keep: Some(ManuallyDrop::new((task.hold, task.memory))),
            promise: Promise {
                ticket: Arc::new(Mutex::new(Some(HeldTicket(Some(ticket))))),
                // At most a day and what a length of 2^64 takes: later than any clock.
                deadline: Instant::now()
                    .checked_add(allowed)
                    .unwrap_or_else(|| Instant::now() + FAR),
                allowed,
            },
            peer,
        }
    }

    pub(super) fn peer(&self) -> &Peer {
        &self.peer
    }

    pub(super) fn request(&self) -> Request {
        self.request
    }

    pub(super) fn promise(&self) -> &Promise {
        &self.promise
    }

    /// Lets go of memory and hold, and settles the task unless that was done before. Nothing touches the
    /// local range any more.
    pub(super) fn finish(mut self, remote: Remote) {
        if let Some(keep) = self.keep.take() {
            drop_caught(ManuallyDrop::into_inner(keep));
        }
        if let Some(ticket) = self.promise.take() {
            ticket.settle(remote);
        }
    }

    /// Settles the task as one that the library may have, and may go on with, and keeps memory and hold.
    pub(super) fn hold(&self, reason: Reason) {
        if let Some(ticket) = self.promise.take() {
            ticket.settle_held(Remote::Unknown(reason));
        }
    }

    /// Settles the task as late and never begun.
    pub(super) fn finish_late(self) {
        let reason = self.promise.too_slow();
        self.finish(Remote::Ended(reason));
    }
}

impl Promise {
    pub(super) fn is_late(&self, now: Instant) -> bool {
        self.deadline <= now
    }

    fn take(&self) -> Option<Ticket> {
        self.ticket
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
            .and_then(HeldTicket::into_inner)
    }

    fn too_slow(&self) -> Reason {
        Reason::TooSlow {
            timeout_ms: u64::try_from(self.allowed.as_millis()).unwrap_or(u64::MAX),
        }
    }

    /// Settles the task as one that the library has and does not end. Says whether it was open.
    pub(super) fn give_up(&self) -> bool {
        let ticket = self.take();
        let was_open = ticket.is_some();
        if let Some(ticket) = ticket {
            ticket.settle_held(Remote::Unknown(self.too_slow()));
        }
        was_open
    }
}

impl Queued for Job {
    fn segment(&self) -> i32 {
        self.request.segment
    }

    fn deadline(&self) -> Instant {
        self.promise.deadline
    }
}

/// Longer than anybody waits.
const FAR: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);

/// Drops what belongs to the user: a panic in it must not end a thread of the engine.
pub(super) fn drop_caught<T>(value: T) {
    if catch_unwind(AssertUnwindSafe(|| drop(value))).is_err() {
        tracing::error!("a memory or a hold panicked when it was dropped");
    }
}
