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

mod answers;
mod cause;
mod lanes;
mod time;
mod types;

use crate::moment::Moment;
use crate::name::TransferId;
use crate::reservation::CancelKind;

pub use cause::Cause;
pub use lanes::ContentLanes;
pub use types::{
    Delivery, IdPolicy, PushAction, PushAnswer, PushConfig, PushFailure, PushOutcome, PushStep,
    Reserved, StageEnd, WriteEnd, WriteError,
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
    /// Why nothing is waited for any more, once that is so.
    stopped: Option<PushFailure>,
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
    Room { at: Moment, held: Held },
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
            stopped: None,
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
            State::Room { at, .. } if *at > now => return PushStep::WaitForRoom(*at),
            State::Room { held, .. } if self.is_over(now) => {
                let reservation_id = Some(held.reservation_id.clone());
                let failure = PushFailure::StagingFull {
                    waited_ms: self.waited_ms(now),
                };
                self.abandon(reservation_id, Err(failure));
            }
            State::Granted(held) | State::Room { held, .. } if self.is_stale(held, now) => {
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
            // Zero bytes need no write (row V18).
            State::Granted(held) if self.len_bytes == 0 => return self.complete(now, held, false),
            State::Granted(held) | State::Room { held, .. } if !self.staged => {
                (State::Staging(held), PushStep::Do(PushAction::Stage))
            }
            State::Granted(held) | State::Room { held, .. } => {
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

    /// There may be room to stage the source now. Nothing changes for a push that does not wait for any.
    pub fn handle_room(&mut self) {
        if matches!(self.state, State::Room { .. })
            && let State::Room { held, .. } = self.take_state()
        {
            self.state = State::Granted(held);
        }
    }

    /// Ends a push that is only waiting, and stops one that is not from waiting any longer.
    ///
    /// A push that waits for its turn, for room or for another producer ends with `failure` at once. One that waits
    /// to complete what it has written tries once more, now. One with a request or a write under way takes that in
    /// first, and ends instead of trying again: with `failure`, unless it has done better or knows worse. After this
    /// call [`poll`](Self::poll) asks for no more waiting. Only the first call's `failure` counts.
    pub fn give_up(&mut self, now: Moment, failure: PushFailure) {
        let failure = self.stopped.get_or_insert(failure).clone();
        self.deadline = self.deadline.min(now);
        self.grace = self.grace.min(now);
        match &mut self.state {
            State::Reserve { .. } => self.end(Err(failure)),
            State::Follow { .. } => self.abandon_once(None, Err(failure)),
            State::Granted(held) | State::Room { held, .. } => {
                let reservation_id = Some(held.reservation_id.clone());
                self.abandon_once(reservation_id, Err(failure));
            }
            State::Complete { at, .. } => {
                *at = now.min(*at);
                // As much time for it as a last cancel has.
                self.grace = now.after_millis(2 * self.farewell_ms());
            }
            _ => {}
        }
    }

    fn end(&mut self, result: Result<Delivery, PushFailure>) {
        self.state = State::Done(PushOutcome {
            transfer_id: self.id.clone(),
            result,
        });
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
