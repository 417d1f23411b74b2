//! How long a push waits, and for what.

use super::cause::Cause;
use super::types::PushFailure;
use super::{BACKOFF_LAST_MS, CANCEL_TIMEOUT_MS, FOLLOW_LAST_MS, Held, PushMachine, State};
use crate::control::ClientError;
use crate::moment::Moment;

impl PushMachine {
    pub(super) fn reserve_after_backoff(&mut self, now: Moment) {
        self.state = State::Reserve {
            at: self.next_backoff(now),
        };
    }

    pub(super) fn follow_after_backoff(&mut self, now: Moment) {
        let at = now.after_millis(self.backoff_ms).min(self.deadline);
        self.backoff_ms = (self.backoff_ms * 2).min(FOLLOW_LAST_MS);
        self.state = State::Follow { at };
    }

    /// The moment of the next try; the last one is made when the timeout is reached, not before it.
    pub(super) fn next_backoff(&mut self, now: Moment) -> Moment {
        let until = self.deadline.max(self.grace);
        let at = now.after_millis(self.backoff_ms).min(until);
        self.backoff_ms = (self.backoff_ms * 2).min(BACKOFF_LAST_MS);
        at
    }

    pub(super) fn is_stale(&self, held: &Held, now: Moment) -> bool {
        now >= self.stale_at(held)
    }

    /// Whether nothing is waited for any more: the time is used up, less what a last cancel needs.
    pub(super) fn is_over(&self, now: Moment) -> bool {
        self.stopped.is_some() || now >= self.over_at()
    }

    fn over_at(&self) -> Moment {
        let until = self.deadline.max(self.grace).as_millis();
        Moment::from_millis(until.saturating_sub(self.farewell_ms()))
    }

    /// Until when a push with the reservation `held` waits for room to stage its source.
    pub(super) fn room_until(&self, held: &Held) -> Moment {
        self.over_at().min(self.stale_at(held))
    }

    fn stale_at(&self, held: &Held) -> Moment {
        held.since.after_millis(self.config.refresh_age_ms)
    }

    /// Time kept back for a last cancel, so that a push ends within its timeout even then.
    pub(super) fn farewell_ms(&self) -> u64 {
        (self.config.timeout_ms / 8).min(1000)
    }

    pub(super) fn request_timeout_ms(&self, now: Moment) -> u64 {
        let until = self.deadline.max(self.grace);
        let left = until.as_millis().saturating_sub(now.as_millis());
        // Never so short that a consumer on the same machine could not answer.
        left.saturating_sub(self.farewell_ms())
            .clamp(20, self.config.control_timeout_ms.max(20))
    }

    /// A cancel is worth less waiting than what it follows, and is sent to consumers that may be gone.
    pub(super) fn cancel_timeout_ms(&self, now: Moment) -> u64 {
        self.request_timeout_ms(now)
            .min(CANCEL_TIMEOUT_MS)
            .max(self.farewell_ms())
    }

    /// How long the push has taken. One that has used up its time, but for what a last cancel may need, is said to
    /// have waited for all of it.
    pub(super) fn waited_ms(&self, now: Moment) -> u64 {
        let elapsed_ms = now.as_millis().saturating_sub(self.started.as_millis());
        let timeout_ms = self.config.timeout_ms;
        if elapsed_ms.saturating_add(self.farewell_ms()) >= timeout_ms {
            elapsed_ms.max(timeout_ms)
        } else {
            elapsed_ms
        }
    }

    pub(super) fn unreachable(&self, now: Moment, cause: Cause<ClientError>) -> PushFailure {
        self.or_stopped(PushFailure::Unreachable {
            waited_ms: self.waited_ms(now),
            cause,
        })
    }

    pub(super) fn timed_out(&self, now: Moment) -> PushFailure {
        self.or_stopped(PushFailure::TimedOut {
            waited_ms: self.waited_ms(now),
        })
    }

    /// The failure of a push that would have gone on if there had been time: why there was none, if somebody said.
    pub(super) fn or_stopped(&self, failure: PushFailure) -> PushFailure {
        self.stopped.clone().unwrap_or(failure)
    }
}
