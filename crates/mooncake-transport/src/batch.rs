//! Requests submitted together, and what became of each.
//!
//! A batch settles all its tasks before it reports. Dropping a [`Batch`] detaches the waiter and
//! changes nothing for the tasks: their memory and their holds stay until the engine is done.

use std::any::Any;
use std::fmt;
use std::future::Future;
use std::net::SocketAddr;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use slab_memory::Memory;

use crate::error::{IoFailure, seconds};
use crate::segment::Segment;
use crate::wire::data::Op;

/// One transfer between local memory and a peer's.
#[expect(
    clippy::exhaustive_structs,
    reason = "callers make it, and a further member is theirs to think about"
)]
pub struct Task {
    /// Direction: [`Op::Write`] moves bytes to the peer, [`Op::Read`] from it.
    pub op: Op,
    /// The peer.
    pub segment: Segment,
    /// First byte at the peer, as an absolute address.
    pub remote: u64,
    /// The local memory.
    pub memory: Arc<dyn Memory>,
    /// The bytes of `memory`, counted from its start.
    pub range: Range<u64>,
    /// Whatever keeps `range` reserved for this task: a lease guard, an allocation, or `()`. The
    /// engine drops it, before it reports the task, once nothing of the task touches the range. It
    /// does so on its own thread or inside `submit`, so dropping must not wait for a batch. It drops the hold
    /// of a task that it reports as [`Local::Held`] later, once nothing touches the range, or never if nobody learns when
    /// that is.
    pub hold: Box<dyn Any + Send>,
}

impl fmt::Debug for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Task")
            .field("op", &self.op)
            .field("segment", &self.segment)
            .field("remote", &format_args!("{:#x}", self.remote))
            .field("range", &self.range)
            .finish_non_exhaustive()
    }
}

/// Why a task did not succeed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Reason {
    /// The peer refused the remote range: not registered, not inside one registration, or not open
    /// to this operation.
    #[error("the peer refused the remote range")]
    Rejected,
    /// The peer answered with a failure code that is not defined.
    #[error("the peer failed the request with code {code}")]
    Failed {
        /// The peer's code.
        code: u32,
    },
    /// The peer answered with something that is no status frame.
    #[error("the peer answered {word:#018x}, which is no status")]
    BadStatus {
        /// The eight bytes as a little-endian number.
        word: u64,
    },
    /// The peer sent a byte before it was asked for one, in version 1 of the protocol, so that nothing that it
    /// sends can be told from an answer.
    #[error("the peer sent a byte that nobody had asked for")]
    Unasked,
    /// The peer closed or reset the connection before the request was done. In version 1 of the protocol it
    /// refuses a range in this way, too.
    #[error("the peer closed the connection")]
    Closed,
    /// The connection failed in another way.
    #[error("the connection failed")]
    Connection {
        /// The system's answer.
        source: IoFailure,
    },
    /// No connection could be made; nothing was sent.
    #[error("no connection to {endpoint}")]
    Connect {
        /// The address tried last.
        endpoint: SocketAddr,
        /// The system's answer.
        source: IoFailure,
    },
    /// No connection was made in time; nothing was sent.
    #[error("no connection to {endpoint} within {}", seconds(*timeout_ms))]
    ConnectTimeout {
        /// The address tried last.
        endpoint: SocketAddr,
        /// The time allowed.
        timeout_ms: u64,
    },
    /// No byte moved for as long as is allowed inside a request.
    #[error("no progress for {}", seconds(*timeout_ms))]
    Stalled {
        /// The time allowed.
        timeout_ms: u64,
    },
    /// The request was sent in full and the peer's answer did not come in time.
    #[error("no answer within {}", seconds(*timeout_ms))]
    NoStatus {
        /// The time allowed.
        timeout_ms: u64,
    },
    /// Bytes moved, but the request was not done in the time that one of its length may take.
    #[error("not done within {}, the longest that a task of this length may take", seconds(*timeout_ms))]
    TooSlow {
        /// The time allowed.
        timeout_ms: u64,
    },
    /// The peer moved to a host whose name has to be resolved: open the segment again.
    #[error("the peer's data host {host:?} is not resolved; open the segment again")]
    Unresolved {
        /// The host in the peer's new descriptor.
        host: String,
    },
    /// The local memory could not be read or written.
    #[error("copying to or from the local memory failed")]
    Memory {
        /// The memory's error.
        source: slab_memory::CopyError,
    },
    /// The engine shut down.
    #[error("the engine has shut down")]
    ShutDown,
    /// The Mooncake library did not take the call that the request was in, with this code, or would not have. With
    /// [`Remote::Ended`] nothing was started; with [`Remote::Unknown`] the code does not exclude that part of the
    /// call was, the request perhaps included.
    #[error("the Mooncake library did not take the request (code {code})")]
    NotTaken {
        /// The library's code.
        code: i32,
    },
    /// The Mooncake library failed the request. It does not say why; its log may.
    #[error("the Mooncake library failed the request (state {state})")]
    Undisclosed {
        /// The state that the library reported.
        state: i32,
    },
    /// The engine gave the task up without saying why, which is a defect of the engine.
    #[error("the engine lost the task")]
    Lost,
}

/// What is known about the local side of a settled task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Local {
    /// Nothing of the task touches the local range any more.
    Quiet,
    /// The engine gave the task up and cannot stop what still may touch the local range. It keeps the
    /// memory, and the task's hold, until that has ended; for ever, if nobody learns when.
    Held,
}

/// What is known about the remote side of a settled task.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(
    clippy::exhaustive_enums,
    reason = "a caller has to tell all three apart, and there is no fourth"
)]
pub enum Remote {
    /// The task succeeded: all bytes are stored.
    Applied,
    /// The task failed, and nothing more will be stored. The range may be partly written.
    Ended(Reason),
    /// The task failed, and the peer may still be storing bytes of it.
    Unknown(Reason),
}

impl Remote {
    /// Says whether the task succeeded.
    pub fn is_applied(&self) -> bool {
        matches!(self, Self::Applied)
    }

    /// Returns why the task did not succeed, if it did not.
    pub fn reason(&self) -> Option<&Reason> {
        match self {
            Self::Applied => None,
            Self::Ended(reason) | Self::Unknown(reason) => Some(reason),
        }
    }
}

/// What became of one task.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Settled {
    /// The local side.
    pub local: Local,
    /// The remote side.
    pub remote: Remote,
}

/// What became of every task of a batch, in the order of submission.
#[derive(Clone, Debug)]
pub struct BatchReport(Arc<[Settled]>);

impl BatchReport {
    /// Returns one entry per task.
    pub fn tasks(&self) -> &[Settled] {
        &self.0
    }

    /// Says whether every task succeeded.
    pub fn is_applied(&self) -> bool {
        self.0.iter().all(|task| task.remote.is_applied())
    }

    /// Returns index and outcome of the first task that did not succeed.
    pub fn first_failure(&self) -> Option<(usize, &Remote)> {
        self.0
            .iter()
            .enumerate()
            .find(|(_, task)| !task.remote.is_applied())
            .map(|(index, task)| (index, &task.remote))
    }
}

/// Tasks submitted together.
///
/// It can be polled, waited for, or awaited (it is a plain [`Future`] and needs no runtime). All
/// give the same report, any number of times.
#[must_use = "dropping a batch gives up the only way to learn what became of it"]
pub struct Batch(Arc<Completion>);

struct Completion {
    state: Mutex<State>,
    done: Condvar,
}

struct State {
    settled: Vec<Option<Settled>>,
    open: usize,
    report: Option<BatchReport>,
    waker: Option<Waker>,
}

impl Completion {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing under the lock can leave the state half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn settle(&self, index: usize, local: Local, remote: Remote) {
        let waker = {
            let mut state = self.lock();
            if state.settled[index].is_some() {
                return;
            }
            state.settled[index] = Some(Settled { local, remote });
            state.open -= 1;
            if state.open > 0 {
                return;
            }
            state.finish();
            state.waker.take()
        };
        self.done.notify_all();
        if let Some(waker) = waker {
            // The waker is the user's, and a panic in it must not take along who settles.
            if catch_unwind(AssertUnwindSafe(|| waker.wake())).is_err() {
                tracing::error!("the waker of a batch panicked");
            }
        }
    }
}

impl State {
    fn finish(&mut self) {
        let settled = std::mem::take(&mut self.settled);
        self.report = Some(BatchReport(settled.into_iter().flatten().collect()));
    }
}

impl Batch {
    /// Creates a batch of `count` open tasks and one ticket to settle each; for implementors of
    /// [`Engine`](crate::Engine).
    pub fn with_tickets(count: usize) -> (Self, Vec<Ticket>) {
        let mut state = State {
            settled: vec![None; count],
            open: count,
            report: None,
            waker: None,
        };
        if count == 0 {
            state.finish();
        }
        let completion = Arc::new(Completion {
            state: Mutex::new(state),
            done: Condvar::new(),
        });
        let tickets = (0..count)
            .map(|index| Ticket {
                completion: Some(Arc::clone(&completion)),
                index,
            })
            .collect();
        (Self(completion), tickets)
    }

    /// Returns the report if every task has settled.
    pub fn poll(&self) -> Option<BatchReport> {
        self.0.lock().report.clone()
    }

    /// Waits until every task has settled, or until `deadline`; `None` waits without a limit.
    ///
    /// Every task settles by itself, however its peer behaves, because an engine bounds each of its
    /// steps. How long that may take is the engine's to say: over TCP a task that has a connection ends
    /// within `TcpTimeouts::task_max` of its length, or twice that if it is sent again, and one that
    /// has none waits for those before it that go to the same peer. With many of them and a slow peer
    /// that adds up, so a caller who has something else to do passes a deadline.
    ///
    /// `None` as the answer means that the deadline came first; the batch goes on and can be waited
    /// for again.
    pub fn wait(&self, deadline: Option<Instant>) -> Option<BatchReport> {
        let mut state = self.0.lock();
        loop {
            if let Some(report) = &state.report {
                return Some(report.clone());
            }
            state = match deadline {
                None => self
                    .0
                    .done
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return None;
                    }
                    self.0
                        .done
                        .wait_timeout(state, left)
                        .unwrap_or_else(PoisonError::into_inner)
                        .0
                }
            };
        }
    }
}

impl Future for Batch {
    type Output = BatchReport;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<BatchReport> {
        let mut state = self.0.lock();
        if let Some(report) = &state.report {
            return Poll::Ready(report.clone());
        }
        match &mut state.waker {
            Some(waker) => waker.clone_from(context.waker()),
            none => *none = Some(context.waker().clone()),
        }
        Poll::Pending
    }
}

impl fmt::Debug for Batch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batch")
            .field("open", &self.0.lock().open)
            .finish_non_exhaustive()
    }
}

/// The duty to settle one task of a batch; for implementors of [`Engine`](crate::Engine).
///
/// Drop the task's memory and hold first, then settle. A ticket that is dropped settles its task
/// as [`Remote::Unknown`] with [`Reason::Lost`], so that no waiter waits for ever.
#[must_use = "a dropped ticket reports its task as lost"]
pub struct Ticket {
    completion: Option<Arc<Completion>>,
    index: usize,
}

impl Ticket {
    /// Settles the task.
    pub fn settle(mut self, remote: Remote) {
        if let Some(completion) = self.completion.take() {
            completion.settle(self.index, Local::Quiet, remote);
        }
    }

    /// Settles the task as one that the engine gave up and cannot stop: [`Local::Held`]. Memory and hold stay with the
    /// engine.
    #[cfg(any(feature = "ffi", feature = "tcp"))]
    pub(crate) fn settle_held(mut self, remote: Remote) {
        if let Some(completion) = self.completion.take() {
            completion.settle(self.index, Local::Held, remote);
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if let Some(completion) = self.completion.take() {
            completion.settle(self.index, Local::Quiet, Remote::Unknown(Reason::Lost));
        }
    }
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ticket")
            .field("index", &self.index)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;
    use std::time::Duration;

    use super::*;

    #[derive(Default)]
    struct Counter(AtomicUsize);

    impl Wake for Counter {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn a_batch_reports_only_when_every_task_has_settled() {
        let (batch, mut tickets) = Batch::with_tickets(3);
        tickets.remove(1).settle(Remote::Ended(Reason::Rejected));
        assert!(batch.poll().is_none());
        tickets.remove(1).settle(Remote::Applied);
        assert!(
            batch
                .wait(Some(Instant::now() + Duration::from_millis(5)))
                .is_none()
        );
        tickets.remove(0).settle(Remote::Applied);
        let report = batch.poll().unwrap();
        assert!(!report.is_applied());
        assert_eq!(
            report.first_failure(),
            Some((1, &Remote::Ended(Reason::Rejected)))
        );
        assert_eq!(report.tasks().len(), 3);
        assert!(batch.wait(None).is_some());
    }

    #[test]
    fn an_empty_batch_is_done() {
        let (batch, _) = Batch::with_tickets(0);
        assert!(batch.poll().unwrap().is_applied());
    }

    #[test]
    fn a_waiter_is_woken_from_another_thread() {
        let (batch, tickets) = Batch::with_tickets(1);
        let settler = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(20));
            for ticket in tickets {
                ticket.settle(Remote::Applied);
            }
        });
        assert!(batch.wait(None).unwrap().is_applied());
        settler.join().unwrap();
    }

    #[test]
    fn awaiting_wakes_the_last_waker_once() {
        let (mut batch, mut tickets) = Batch::with_tickets(1);
        let first = Arc::new(Counter::default());
        let second = Arc::new(Counter::default());
        for counter in [&first, &second] {
            let waker = Waker::from(Arc::clone(counter));
            let mut context = Context::from_waker(&waker);
            assert!(Future::poll(Pin::new(&mut batch), &mut context).is_pending());
        }
        tickets.remove(0).settle(Remote::Applied);
        assert_eq!(first.0.load(Ordering::SeqCst), 0);
        assert_eq!(second.0.load(Ordering::SeqCst), 1);
        let waker = Waker::noop();
        let mut context = Context::from_waker(waker);
        assert!(Future::poll(Pin::new(&mut batch), &mut context).is_ready());
    }

    #[test]
    fn a_waker_that_panics_leaves_the_settler_alone() {
        struct Panicking;
        impl Wake for Panicking {
            fn wake(self: Arc<Self>) {
                panic!("a waker of the test");
            }
        }
        let (mut batch, mut tickets) = Batch::with_tickets(1);
        let waker = Waker::from(Arc::new(Panicking));
        let mut context = Context::from_waker(&waker);
        assert!(Future::poll(Pin::new(&mut batch), &mut context).is_pending());
        tickets.remove(0).settle(Remote::Applied);
        assert!(batch.poll().unwrap().is_applied());
    }

    #[test]
    fn dropping_the_batch_leaves_tickets_usable() {
        let (batch, mut tickets) = Batch::with_tickets(1);
        drop(batch);
        tickets.remove(0).settle(Remote::Applied);
    }

    #[test]
    fn a_lost_ticket_settles_its_task_as_unknown() {
        let (batch, tickets) = Batch::with_tickets(2);
        drop(tickets);
        let report = batch.poll().unwrap();
        assert_eq!(report.tasks()[1].remote, Remote::Unknown(Reason::Lost));
    }
}
