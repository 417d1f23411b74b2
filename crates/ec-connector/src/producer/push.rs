//! The handle of a push under way.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use super::{PushError, PushReport};
use crate::name::TransferId;

/// A push under way. It can be polled, waited for, or awaited (it is a plain [`Future`] and needs no runtime).
///
/// Dropping it detaches the waiter; the push goes on.
#[must_use = "dropping it gives up the only way to learn what became of the push"]
pub struct Push(Arc<Ending>);

/// The duty to report how a push ended. Dropped without a report, it reports the push as lost, so that nobody
/// waits for ever.
pub(super) struct Ticket {
    ending: Option<Arc<Ending>>,
    transfer_id: TransferId,
}

impl Ticket {
    /// Publishes the report and wakes whoever waits for it.
    pub(super) fn end(mut self, report: PushReport) {
        if let Some(ending) = self.ending.take() {
            ending.end(report);
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if let Some(ending) = self.ending.take() {
            ending.end(PushReport {
                transfer_id: self.transfer_id.clone(),
                result: Err(PushError::Lost),
                elapsed: Duration::ZERO,
                wire_bytes: 0,
            });
        }
    }
}

#[derive(Default)]
struct Ending {
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Default)]
struct State {
    report: Option<PushReport>,
    waker: Option<Waker>,
}

impl Ending {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing under the lock can leave the state half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self, report: PushReport) {
        let waker = {
            let mut state = self.lock();
            state.report = Some(report);
            state.waker.take()
        };
        self.ended.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl Push {
    /// A push under way, and the duty to end it.
    pub(super) fn with_ticket(transfer_id: TransferId) -> (Self, Ticket) {
        let ending = Arc::<Ending>::default();
        let ticket = Ticket {
            ending: Some(Arc::clone(&ending)),
            transfer_id,
        };
        (Self(ending), ticket)
    }

    /// Returns the report if the push has ended.
    pub fn poll(&self) -> Option<PushReport> {
        self.0.lock().report.clone()
    }

    /// Waits until the push has ended, or until `deadline`; `None` waits for as long as the push takes.
    ///
    /// `None` as the answer means that the deadline came first; the push goes on and can be waited for again.
    pub fn wait(&self, deadline: Option<Instant>) -> Option<PushReport> {
        let mut state = self.0.lock();
        loop {
            if let Some(report) = &state.report {
                return Some(report.clone());
            }
            state = match deadline {
                None => self
                    .0
                    .ended
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return None;
                    }
                    self.0
                        .ended
                        .wait_timeout(state, left)
                        .unwrap_or_else(PoisonError::into_inner)
                        .0
                }
            };
        }
    }
}

impl Future for Push {
    type Output = PushReport;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<PushReport> {
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

impl std::fmt::Debug for Push {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Push")
            .field("ended", &self.0.lock().report.is_some())
            .finish_non_exhaustive()
    }
}
