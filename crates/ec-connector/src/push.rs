//! One push as a pure state machine: what to ask the consumer next, and what its answers mean.
//!
//! The machine does no I/O and knows no clock: [`poll`](PushMachine::poll) says what to do, the `handle_*`
//! methods take in what came of it, and time and fresh ids are arguments. One action is outstanding at a time.
//!
//! Rules it keeps:
//! - `abandon` ("I will not touch that memory any more") is sent only while no write to the reservation can still
//!   be under way: before a write began, or after the engine said that it was applied or ended. After an unknown
//!   end the cancel is plain, and the consumer keeps the memory.
//! - A reserve whose reply was lost is never simply repeated: the repeat would answer `write: false` and nobody
//!   would write. With a fresh id the old one is abandoned and another id tried; with a given id it is cancelled
//!   with `abandon` and `refresh` first.
//! - A follower (another producer writes the same content) asks for the status. Only `ready` decides: an id that
//!   is gone may have been taken, cancelled or expired. The same holds for a complete that was answered
//!   `completed: false` after its first reply was lost.
//! - `completed` without `became_ready` is no success by itself: a consumer says so of bytes it has given up. If a
//!   reply was lost before, the status decides; otherwise a fresh id is tried once.
//! - A write whose connection was closed without an answer is tried again, into a new reservation, until the timeout.
//! - Everything ends: at the timeout, or after a bounded number of errors that carry no code.
//!
//! Not here: which pushes run at the same time ([`ContentLanes`] keeps two of the same content apart), staging,
//! and the transfer itself.

mod lanes;
mod types;

use crate::code::ErrorCode;
use crate::moment::Moment;
use crate::name::TransferId;
use crate::reservation::{CancelKind, Completion};

pub use lanes::ContentLanes;
pub use types::{
    Delivery, IdPolicy, PushAction, PushAnswer, PushConfig, PushFailure, PushOutcome, PushStep,
    Reserved, WriteEnd,
};

/// The record of one push to a consumer with one shard.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PushMachine {
    policy: IdPolicy,
    len_bytes: u64,
    config: PushConfig,
    started: Moment,
    /// When waiting for the consumer ends.
    deadline: Moment,
    /// After a write: until when its completion may be asked for, however late the write ended.
    grace: Moment,
    id: TransferId,
    /// The next reserve needs another id.
    id_is_spent: bool,
    state: State,
    asks: Asks,
    /// The source is in place and can be written.
    staged: bool,
    /// Delay before the next repeat, in milliseconds.
    backoff_ms: u64,
    uncoded_errors: u32,
    given_up_before: bool,
    completes_undecided: u32,
    /// Writes whose connection was closed without an answer.
    writes_closed: u32,
}

/// Why the next reserve is sent, which decides what `ready` means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Asks {
    /// For memory, or a hit.
    Memory,
    /// Whether the content a follower waited for has arrived.
    Followed,
    /// Whether the content this push wrote has arrived.
    Wrote,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum State {
    Reserve { at: Moment },
    Reserving,
    Granted(Held),
    Staging(Held),
    Writing(Held),
    Complete { at: Moment, held: Held, lost: bool },
    Completing { held: Held, lost: bool },
    Follow { at: Moment },
    Following,
    Cancel(Cancel),
    Cancelling(Cancel),
    Done(PushOutcome),
}

/// A reservation whose writer this push is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Held {
    reservation_id: String,
    session: String,
    address: u64,
    since: Moment,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Cancel {
    kind: CancelKind,
    reservation_id: Option<String>,
    tries_left: u32,
    then: Then,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Then {
    /// Reserve again under the same id.
    SameId,
    /// Reserve again under a fresh id.
    FreshId,
    End(Result<Delivery, PushFailure>),
}

/// Tries of a cancel whose reply is lost.
const CANCEL_TRIES: u32 = 2;
const CANCEL_TIMEOUT_MS: u64 = 10_000;
const BACKOFF_FIRST_MS: u64 = 5;
const BACKOFF_LAST_MS: u64 = 500;
/// A follower's first question; a write of a few megabytes takes about this long.
const FOLLOW_FIRST_MS: u64 = 2;
const FOLLOW_LAST_MS: u64 = 100;
/// How often a write that the consumer neither confirms nor denies is written again under a fresh id.
const COMPLETES_UNDECIDED_MAX: u32 = 2;

impl PushMachine {
    /// Starts the push of `len_bytes` bytes at `now`, which is when its timeout starts to run.
    pub fn new(
        id: TransferId,
        policy: IdPolicy,
        len_bytes: u64,
        config: PushConfig,
        now: Moment,
    ) -> Self {
        Self {
            policy,
            len_bytes,
            started: now,
            deadline: now.after_millis(config.timeout_ms),
            grace: now,
            config,
            id,
            id_is_spent: false,
            state: State::Reserve { at: now },
            asks: Asks::Memory,
            staged: false,
            backoff_ms: BACKOFF_FIRST_MS,
            uncoded_errors: 0,
            given_up_before: false,
            completes_undecided: 0,
            writes_closed: 0,
        }
    }

    /// The id in use towards the consumer.
    pub fn transfer_id(&self) -> &TransferId {
        &self.id
    }

    /// How the push ended, if it has.
    pub fn outcome(&self) -> Option<&PushOutcome> {
        match &self.state {
            State::Done(outcome) => Some(outcome),
            _ => None,
        }
    }

    /// Says what to do now. `fresh_id` is called when the push needs another id and may draw one.
    ///
    /// An action is handed out once; its result belongs into the `handle_*` method the action names.
    pub fn poll(&mut self, now: Moment, fresh_id: impl FnOnce() -> TransferId) -> PushStep {
        match &self.state {
            State::Reserve { at } | State::Follow { at } | State::Complete { at, .. }
                if *at > now =>
            {
                return PushStep::WaitUntil(*at);
            }
            State::Granted(held) if self.is_stale(held, now) => {
                // Nothing was written yet, so giving the old memory up is allowed.
                let reservation_id = Some(held.reservation_id.clone());
                self.start_again(reservation_id);
            }
            _ => {}
        }
        let (state, step) = match self.take_state() {
            State::Reserve { .. } => {
                if std::mem::take(&mut self.id_is_spent) {
                    self.id = fresh_id();
                }
                let action = PushAction::Reserve {
                    transfer_id: self.id.clone(),
                    timeout_ms: self.request_timeout_ms(now),
                };
                (State::Reserving, PushStep::Do(action))
            }
            State::Granted(held) if !self.staged && self.len_bytes > 0 => {
                (State::Staging(held), PushStep::Do(PushAction::Stage))
            }
            // Zero bytes need no write (row V18).
            State::Granted(held) if self.len_bytes == 0 => return self.complete(now, held, false),
            State::Granted(held) => {
                let action = PushAction::Write {
                    session: held.session.clone(),
                    address: held.address,
                };
                (State::Writing(held), PushStep::Do(action))
            }
            State::Complete { held, lost, .. } => return self.complete(now, held, lost),
            State::Follow { .. } => {
                let action = PushAction::Status {
                    transfer_id: self.id.clone(),
                    timeout_ms: self.request_timeout_ms(now),
                };
                (State::Following, PushStep::Do(action))
            }
            State::Cancel(cancel) => {
                let action = PushAction::Cancel {
                    transfer_id: self.id.clone(),
                    reservation_id: cancel.reservation_id.clone(),
                    kind: cancel.kind,
                    timeout_ms: self.cancel_timeout_ms(now),
                };
                (State::Cancelling(cancel), PushStep::Do(action))
            }
            State::Done(outcome) => (State::Done(outcome.clone()), PushStep::Done(outcome)),
            busy @ (State::Reserving
            | State::Staging(_)
            | State::Writing(_)
            | State::Completing { .. }
            | State::Following
            | State::Cancelling(_)) => (busy, PushStep::InProgress),
        };
        self.state = state;
        step
    }

    /// Takes the answer to [`PushAction::Reserve`].
    pub fn handle_reserve(&mut self, now: Moment, answer: PushAnswer<Reserved>) {
        match self.take_state() {
            State::Reserving => {}
            other => return self.unexpected(other),
        }
        match answer {
            PushAnswer::Reply(Reserved::Cancelled) => self.once_more(now, PushFailure::Cancelled),
            PushAnswer::Reply(Reserved::Granted {
                reservation_id,
                session,
                address,
                len_bytes,
                write,
                ready,
            }) => {
                self.backoff_ms = BACKOFF_FIRST_MS;
                if ready {
                    self.ready(reservation_id);
                } else if len_bytes != self.len_bytes {
                    let failure = PushFailure::WrongLength {
                        asked: self.len_bytes,
                        granted: len_bytes,
                    };
                    self.abandon(Some(reservation_id), Err(failure));
                } else if write {
                    self.state = State::Granted(Held {
                        reservation_id,
                        session,
                        address,
                        since: now,
                    });
                } else {
                    self.backoff_ms = FOLLOW_FIRST_MS;
                    self.state = State::Follow {
                        at: now.after_millis(FOLLOW_FIRST_MS),
                    };
                }
            }
            PushAnswer::Refused { code, text } => self.reserve_refused(now, code, text),
            PushAnswer::Lost { sent } if self.is_over(now) => {
                let failure = self.unreachable(now);
                if sent {
                    self.abandon_once(None, Err(failure));
                } else {
                    self.end(Err(failure));
                }
            }
            PushAnswer::Lost { sent: true } => self.start_again(None),
            PushAnswer::Lost { sent: false } => self.reserve_after_backoff(now),
        }
    }

    /// Takes the end of [`PushAction::Stage`]: whether the source is in place.
    pub fn handle_staged(&mut self, staged: bool) {
        let held = match self.take_state() {
            State::Staging(held) => held,
            other => return self.unexpected(other),
        };
        if staged {
            self.staged = true;
            self.state = State::Granted(held);
        } else {
            self.abandon(Some(held.reservation_id), Err(PushFailure::Source));
        }
    }

    /// Takes the end of [`PushAction::Write`].
    pub fn handle_write(&mut self, now: Moment, end: WriteEnd) {
        let held = match self.take_state() {
            State::Writing(held) => held,
            other => return self.unexpected(other),
        };
        match end {
            WriteEnd::Applied => {
                // A long write must not leave its own completion without time.
                self.grace = now.after_millis(self.config.control_timeout_ms);
                self.backoff_ms = BACKOFF_FIRST_MS;
                self.state = State::Complete {
                    at: now,
                    held,
                    lost: false,
                };
            }
            // The consumer has too many connections, or is gone; a new reservation tells, and is the only one that
            // surely leads to memory which is still meant for this push.
            WriteEnd::Closed { .. } if !self.is_over(now) => {
                self.start_again(Some(held.reservation_id));
                self.writes_closed = self.writes_closed.saturating_add(1);
                self.backoff_ms =
                    (BACKOFF_FIRST_MS << self.writes_closed.min(7)).min(BACKOFF_LAST_MS);
            }
            WriteEnd::Closed { reason } | WriteEnd::Ended { reason } => {
                let failure = PushFailure::WriteEnded { reason };
                self.abandon(Some(held.reservation_id), Err(failure));
            }
            WriteEnd::Unknown { reason } => {
                // A late write may still arrive: the memory stays with the reservation.
                self.state = State::Cancel(Cancel {
                    kind: CancelKind::Plain,
                    reservation_id: Some(held.reservation_id),
                    tries_left: CANCEL_TRIES,
                    then: Then::End(Err(PushFailure::WriteUnknown { reason })),
                });
            }
        }
    }

    /// Takes the answer to [`PushAction::Complete`].
    pub fn handle_complete(&mut self, now: Moment, answer: PushAnswer<Completion>) {
        let (held, lost) = match self.take_state() {
            State::Completing { held, lost } => (held, lost),
            other => return self.unexpected(other),
        };
        match answer {
            PushAnswer::Reply(Completion {
                became_ready: true, ..
            }) => self.end(Ok(Delivery::Written)),
            // Acknowledged, but not made ready by this complete: an earlier one did that, or the consumer had given
            // the reservation up while the bytes were written, and nobody gets them.
            PushAnswer::Reply(Completion {
                completed: true, ..
            }) => {
                self.grace = now;
                if lost {
                    self.asks = Asks::Wrote;
                    self.backoff_ms = FOLLOW_FIRST_MS;
                    self.state = State::Follow { at: now };
                } else {
                    self.once_more(now, PushFailure::NotCompleted);
                }
            }
            // The record is gone. Unless a reply was lost, no complete of ours can have ended it.
            PushAnswer::Reply(_) => self.undecided(now, Some(held.reservation_id), lost),
            PushAnswer::Refused { code, text } => {
                self.uncoded_errors += 1;
                if self.uncoded_errors >= self.config.uncoded_errors_max || self.is_over(now) {
                    let failure = PushFailure::Refused { code, text };
                    self.abandon(Some(held.reservation_id), Err(failure));
                } else {
                    self.state = State::Complete {
                        at: self.next_backoff(now),
                        held,
                        lost,
                    };
                }
            }
            PushAnswer::Lost { sent } => {
                if self.is_over(now) {
                    let failure = self.unreachable(now);
                    self.end(Err(failure));
                } else {
                    self.state = State::Complete {
                        at: self.next_backoff(now),
                        held,
                        lost: lost || sent,
                    };
                }
            }
        }
    }

    /// Takes the answer to [`PushAction::Status`]: the reply's `ready`, nothing for an id that is gone.
    pub fn handle_status(&mut self, now: Moment, answer: PushAnswer<Option<bool>>) {
        match self.take_state() {
            State::Following => {}
            other => return self.unexpected(other),
        }
        match answer {
            PushAnswer::Reply(Some(true)) => {
                let delivery = match self.asks {
                    Asks::Wrote => Delivery::Written,
                    Asks::Memory | Asks::Followed => Delivery::Cached,
                };
                self.end(Ok(delivery));
            }
            PushAnswer::Reply(None) => match self.policy {
                IdPolicy::Fresh => {
                    if self.asks == Asks::Memory {
                        self.asks = Asks::Followed;
                    }
                    self.id_is_spent = true;
                    if self.is_over(now) {
                        let failure = self.timed_out(now);
                        self.end(Err(failure));
                    } else {
                        // The content may vanish each time; only the timeout bounds this.
                        self.reserve_after_backoff(now);
                    }
                }
                IdPolicy::Given => self.end(Err(PushFailure::Unconfirmed)),
            },
            PushAnswer::Reply(Some(false)) if self.is_over(now) => {
                let failure = self.timed_out(now);
                self.abandon(None, Err(failure));
            }
            PushAnswer::Refused { code, text } => {
                self.uncoded_errors += 1;
                if self.uncoded_errors >= self.config.uncoded_errors_max || self.is_over(now) {
                    self.abandon(None, Err(PushFailure::Refused { code, text }));
                } else {
                    self.follow_after_backoff(now);
                }
            }
            PushAnswer::Lost { .. } if self.is_over(now) => {
                let failure = self.unreachable(now);
                self.abandon_once(None, Err(failure));
            }
            PushAnswer::Reply(Some(false)) | PushAnswer::Lost { .. } => {
                self.follow_after_backoff(now)
            }
        }
    }

    /// Takes the answer to [`PushAction::Cancel`]. Whether the id was cancelled changes nothing: a reserve that
    /// follows finds out what became of it.
    pub fn handle_cancel(&mut self, now: Moment, answer: PushAnswer<bool>) {
        let mut cancel = match self.take_state() {
            State::Cancelling(cancel) => cancel,
            other => return self.unexpected(other),
        };
        if matches!(answer, PushAnswer::Lost { .. }) {
            cancel.tries_left = cancel.tries_left.saturating_sub(1);
            if cancel.tries_left > 0 && !self.is_over(now) {
                self.state = State::Cancel(cancel);
                return;
            }
        }
        match cancel.then {
            Then::End(result) => self.end(result),
            _ if self.is_over(now) => {
                let failure = if matches!(answer, PushAnswer::Lost { .. }) {
                    self.unreachable(now)
                } else {
                    self.timed_out(now)
                };
                self.end(Err(failure));
            }
            Then::SameId => self.reserve_after_backoff(now),
            Then::FreshId => {
                self.id_is_spent = true;
                self.reserve_after_backoff(now);
            }
        }
    }

    /// Ends a push that is only waiting, and stops one that is not from waiting any longer.
    ///
    /// A push that waits for its turn, for room or for another producer ends with `failure` at once. One with a
    /// request or a write under way takes that in first; it then ends instead of trying again.
    pub fn give_up(&mut self, now: Moment, failure: PushFailure) {
        self.deadline = self.deadline.min(now);
        self.grace = self.grace.min(now);
        match &self.state {
            State::Reserve { .. } => self.end(Err(failure)),
            State::Follow { .. } => self.abandon_once(None, Err(failure)),
            State::Granted(held) => {
                let reservation_id = Some(held.reservation_id.clone());
                self.abandon_once(reservation_id, Err(failure));
            }
            _ => {}
        }
    }

    fn ready(&mut self, reservation_id: String) {
        match self.asks {
            Asks::Memory => self.end(Ok(Delivery::Cached)),
            // The record of this question is one too many: the content arrived under the earlier id.
            Asks::Followed => self.cancel_extra(reservation_id, Delivery::Cached),
            Asks::Wrote => self.cancel_extra(reservation_id, Delivery::Written),
        }
    }

    fn cancel_extra(&mut self, reservation_id: String, delivery: Delivery) {
        self.state = State::Cancel(Cancel {
            kind: CancelKind::Plain,
            reservation_id: Some(reservation_id),
            tries_left: 1,
            then: Then::End(Ok(delivery)),
        });
    }

    /// The consumer gave the item up: one more try under a fresh id, then `failure`.
    fn once_more(&mut self, now: Moment, failure: PushFailure) {
        if self.policy == IdPolicy::Fresh && !self.given_up_before && !self.is_over(now) {
            self.given_up_before = true;
            self.id_is_spent = true;
            self.state = State::Reserve { at: now };
        } else {
            self.end(Err(failure));
        }
    }

    fn reserve_refused(&mut self, now: Moment, code: Option<ErrorCode>, text: String) {
        let waits = match code {
            Some(ErrorCode::PoolFull | ErrorCode::TooManyReservations) => true,
            // The consumer waits for the end of an earlier push with this id; a fresh id is not affected.
            Some(ErrorCode::ActiveWriter) => true,
            None | Some(ErrorCode::Internal) => {
                self.uncoded_errors += 1;
                self.uncoded_errors < self.config.uncoded_errors_max
            }
            Some(_) => false,
        };
        if waits && !self.is_over(now) {
            if self.policy == IdPolicy::Fresh {
                // A refusal of another shard may have left the id cancelled (row V13).
                self.id_is_spent = true;
            }
            self.reserve_after_backoff(now);
            return;
        }
        self.end(Err(match code {
            Some(ErrorCode::PoolFull) => PushFailure::PoolFull {
                waited_ms: self.waited_ms(now),
            },
            _ => PushFailure::Refused { code, text },
        }));
    }

    /// The consumer has no record to complete: it was completed and taken, or it was given up.
    fn undecided(&mut self, now: Moment, reservation_id: Option<String>, lost: bool) {
        self.completes_undecided += 1;
        self.grace = now;
        if self.policy == IdPolicy::Fresh
            && self.completes_undecided <= COMPLETES_UNDECIDED_MAX
            && !self.is_over(now)
        {
            self.asks = Asks::Wrote;
            self.start_again(reservation_id);
        } else if lost {
            self.end(Err(PushFailure::Unconfirmed));
        } else {
            self.end(Err(PushFailure::NotCompleted));
        }
    }

    /// Gives a reservation up, or whatever the id may have, and reserves again.
    ///
    /// Only called while no write can be under way.
    fn start_again(&mut self, reservation_id: Option<String>) {
        let (kind, then) = match self.policy {
            IdPolicy::Fresh => (CancelKind::Abandon, Then::FreshId),
            IdPolicy::Given => (CancelKind::Refresh, Then::SameId),
        };
        self.state = State::Cancel(Cancel {
            kind,
            reservation_id,
            tries_left: CANCEL_TRIES,
            then,
        });
    }

    fn abandon(&mut self, reservation_id: Option<String>, result: Result<Delivery, PushFailure>) {
        self.state = State::Cancel(Cancel {
            kind: CancelKind::Abandon,
            reservation_id,
            tries_left: CANCEL_TRIES,
            then: Then::End(result),
        });
    }

    /// As [`abandon`](Self::abandon), to a consumer that may not answer.
    fn abandon_once(
        &mut self,
        reservation_id: Option<String>,
        result: Result<Delivery, PushFailure>,
    ) {
        self.state = State::Cancel(Cancel {
            kind: CancelKind::Abandon,
            reservation_id,
            tries_left: 1,
            then: Then::End(result),
        });
    }

    fn complete(&mut self, now: Moment, held: Held, lost: bool) -> PushStep {
        let action = PushAction::Complete {
            transfer_id: self.id.clone(),
            reservation_id: held.reservation_id.clone(),
            timeout_ms: self.request_timeout_ms(now),
        };
        self.state = State::Completing { held, lost };
        PushStep::Do(action)
    }

    fn end(&mut self, result: Result<Delivery, PushFailure>) {
        self.state = State::Done(PushOutcome {
            transfer_id: self.id.clone(),
            result,
        });
    }

    fn reserve_after_backoff(&mut self, now: Moment) {
        self.state = State::Reserve {
            at: self.next_backoff(now),
        };
    }

    fn follow_after_backoff(&mut self, now: Moment) {
        let at = now.after_millis(self.backoff_ms).min(self.deadline);
        self.backoff_ms = (self.backoff_ms * 2).min(FOLLOW_LAST_MS);
        self.state = State::Follow { at };
    }

    /// The moment of the next try; the last one is made when the timeout is reached, not before it.
    fn next_backoff(&mut self, now: Moment) -> Moment {
        let until = self.deadline.max(self.grace);
        let at = now.after_millis(self.backoff_ms).min(until);
        self.backoff_ms = (self.backoff_ms * 2).min(BACKOFF_LAST_MS);
        at
    }

    fn is_stale(&self, held: &Held, now: Moment) -> bool {
        now >= held.since.after_millis(self.config.refresh_age_ms)
    }

    /// Whether the time for waiting is used up, less what a last cancel needs.
    fn is_over(&self, now: Moment) -> bool {
        now.after_millis(self.farewell_ms()) >= self.deadline.max(self.grace)
    }

    /// Time kept back for a last cancel, so that a push ends within its timeout even then.
    fn farewell_ms(&self) -> u64 {
        (self.config.timeout_ms / 8).min(1000)
    }

    fn request_timeout_ms(&self, now: Moment) -> u64 {
        let until = self.deadline.max(self.grace);
        let left = until.as_millis().saturating_sub(now.as_millis());
        // Never so short that a consumer on the same machine could not answer.
        left.saturating_sub(self.farewell_ms())
            .clamp(20, self.config.control_timeout_ms.max(20))
    }

    /// A cancel is worth less waiting than what it follows, and is sent to consumers that may be gone.
    fn cancel_timeout_ms(&self, now: Moment) -> u64 {
        self.request_timeout_ms(now)
            .min(CANCEL_TIMEOUT_MS)
            .max(self.farewell_ms())
    }

    fn waited_ms(&self, now: Moment) -> u64 {
        now.as_millis().saturating_sub(self.started.as_millis())
    }

    fn unreachable(&self, now: Moment) -> PushFailure {
        PushFailure::Unreachable {
            waited_ms: self.waited_ms(now),
        }
    }

    fn timed_out(&self, now: Moment) -> PushFailure {
        PushFailure::TimedOut {
            waited_ms: self.waited_ms(now),
        }
    }

    /// Takes the state out; the caller decides it anew.
    fn take_state(&mut self) -> State {
        std::mem::replace(&mut self.state, State::Reserving)
    }

    /// A result came for an action that is not outstanding: the driver's bug, and nothing changes.
    fn unexpected(&mut self, state: State) {
        debug_assert!(false, "result for another action in {state:?}");
        self.state = state;
    }
}

#[cfg(test)]
mod tests;
