//! What the consumer's answers, and the ends of staging and writing, mean.

use super::types::{
    Delivery, IdPolicy, PushAction, PushAnswer, PushFailure, PushStep, Reserved, StageEnd, WriteEnd,
};
use super::{
    Asks, BACKOFF_FIRST_MS, BACKOFF_LAST_MS, CANCEL_TRIES, COMPLETES_UNDECIDED_MAX, Cancel,
    FOLLOW_FIRST_MS, Held, PushMachine, State, Then,
};
use crate::code::ErrorCode;
use crate::moment::Moment;
use crate::reservation::{CancelKind, Completion};

impl PushMachine {
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
                } else if let Some(failure) = self.stopped.clone() {
                    self.abandon_once(Some(reservation_id), Err(failure));
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
            PushAnswer::Lost { sent, cause } if self.is_over(now) => {
                let failure = self.unreachable(now, cause);
                if sent {
                    self.abandon_once(None, Err(failure));
                } else {
                    self.end(Err(failure));
                }
            }
            PushAnswer::Lost { sent: true, .. } => self.start_again(None),
            PushAnswer::Lost { sent: false, .. } => self.reserve_after_backoff(now),
            PushAnswer::BadReply { cause } => {
                self.abandon_once(None, Err(PushFailure::BadReply { cause }));
            }
        }
    }

    /// Takes the end of [`PushAction::Stage`].
    pub fn handle_staged(&mut self, end: StageEnd) {
        let held = match self.take_state() {
            State::Staging(held) => held,
            other => return self.unexpected(other),
        };
        match (end, self.stopped.clone()) {
            (StageEnd::Failed, _) => {
                self.abandon(Some(held.reservation_id), Err(PushFailure::Source));
            }
            (_, Some(failure)) => self.abandon_once(Some(held.reservation_id), Err(failure)),
            (StageEnd::Ready, None) => {
                self.staged = true;
                self.state = State::Granted(held);
            }
            (StageEnd::Later, None) => {
                let at = self.room_until(&held);
                self.state = State::Room { at, held };
            }
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
            WriteEnd::Closed { cause } | WriteEnd::Ended { cause } => {
                let failure = PushFailure::WriteEnded { cause };
                self.abandon(Some(held.reservation_id), Err(failure));
            }
            WriteEnd::Unknown { cause } => {
                // A late write may still arrive: the memory stays with the reservation.
                self.state = State::Cancel(Cancel {
                    kind: CancelKind::Plain,
                    reservation_id: Some(held.reservation_id),
                    tries_left: CANCEL_TRIES,
                    then: Then::End(Err(PushFailure::WriteUnknown { cause })),
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
                if let Some(failure) = self.refused_finally(now, code, text) {
                    self.abandon(Some(held.reservation_id), Err(failure));
                } else {
                    self.state = State::Complete {
                        at: self.next_backoff(now),
                        held,
                        lost,
                    };
                }
            }
            // Whether it was acted upon or not, the bytes are not wanted once the push has failed.
            PushAnswer::BadReply { cause } => {
                let failure = PushFailure::BadReply { cause };
                self.abandon_once(Some(held.reservation_id), Err(failure));
            }
            PushAnswer::Lost { sent, cause } => {
                if self.is_over(now) {
                    let failure = self.unreachable(now, cause);
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
                let failure = self.or_stopped(PushFailure::StillWriting {
                    waited_ms: self.waited_ms(now),
                });
                self.abandon(None, Err(failure));
            }
            PushAnswer::Refused { code, text } => {
                if let Some(failure) = self.refused_finally(now, code, text) {
                    self.abandon(None, Err(failure));
                } else {
                    self.follow_after_backoff(now);
                }
            }
            PushAnswer::Lost { cause, .. } if self.is_over(now) => {
                let failure = self.unreachable(now, cause);
                self.abandon_once(None, Err(failure));
            }
            PushAnswer::BadReply { cause } => {
                self.abandon_once(None, Err(PushFailure::BadReply { cause }));
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
            Then::SameId | Then::FreshId if self.is_over(now) => {
                let failure = match answer {
                    PushAnswer::Lost { cause, .. } => self.unreachable(now, cause),
                    PushAnswer::BadReply { cause } => PushFailure::BadReply { cause },
                    PushAnswer::Reply(_) | PushAnswer::Refused { .. } => self.timed_out(now),
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

    pub(super) fn ready(&mut self, reservation_id: String) {
        match self.asks {
            Asks::Memory => self.end(Ok(Delivery::Cached)),
            // The record of this question is one too many: the content arrived under the earlier id.
            Asks::Followed => self.cancel_extra(reservation_id, Delivery::Cached),
            Asks::Wrote => self.cancel_extra(reservation_id, Delivery::Written),
        }
    }

    pub(super) fn cancel_extra(&mut self, reservation_id: String, delivery: Delivery) {
        self.state = State::Cancel(Cancel {
            kind: CancelKind::Plain,
            reservation_id: Some(reservation_id),
            tries_left: 1,
            then: Then::End(Ok(delivery)),
        });
    }

    /// The consumer gave the item up: one more try under a fresh id, then `failure`.
    pub(super) fn once_more(&mut self, now: Moment, failure: PushFailure) {
        if self.policy == IdPolicy::Fresh && !self.given_up_before && !self.is_over(now) {
            self.given_up_before = true;
            self.id_is_spent = true;
            self.state = State::Reserve { at: now };
        } else {
            self.end(Err(failure));
        }
    }

    pub(super) fn reserve_refused(&mut self, now: Moment, code: Option<ErrorCode>, text: String) {
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
        let failure = match code {
            Some(ErrorCode::PoolFull) => PushFailure::PoolFull {
                waited_ms: self.waited_ms(now),
            },
            _ => PushFailure::Refused { code, text },
        };
        self.end(Err(if waits {
            self.or_stopped(failure)
        } else {
            failure
        }));
    }

    /// Counts a refusal that cannot be told from a passing fault; the failure to end with, if it was the last.
    fn refused_finally(
        &mut self,
        now: Moment,
        code: Option<ErrorCode>,
        text: String,
    ) -> Option<PushFailure> {
        self.uncoded_errors += 1;
        let failure = PushFailure::Refused { code, text };
        if self.uncoded_errors >= self.config.uncoded_errors_max {
            Some(failure)
        } else {
            self.is_over(now).then(|| self.or_stopped(failure))
        }
    }

    /// The consumer has no record to complete: it was completed and taken, or it was given up.
    pub(super) fn undecided(&mut self, now: Moment, reservation_id: Option<String>, lost: bool) {
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
    pub(super) fn start_again(&mut self, reservation_id: Option<String>) {
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

    pub(super) fn abandon(
        &mut self,
        reservation_id: Option<String>,
        result: Result<Delivery, PushFailure>,
    ) {
        self.state = State::Cancel(Cancel {
            kind: CancelKind::Abandon,
            reservation_id,
            tries_left: CANCEL_TRIES,
            then: Then::End(result),
        });
    }

    /// As [`abandon`](Self::abandon), to a consumer that may not answer.
    pub(super) fn abandon_once(
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

    pub(super) fn complete(&mut self, now: Moment, held: Held, lost: bool) -> PushStep {
        let action = PushAction::Complete {
            transfer_id: self.id.clone(),
            reservation_id: held.reservation_id.clone(),
            timeout_ms: self.request_timeout_ms(now),
        };
        self.state = State::Completing { held, lost };
        PushStep::Do(action)
    }
}
