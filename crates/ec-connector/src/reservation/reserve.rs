//! Reserving: every answer a reserve can get.

use std::collections::BTreeMap;

use super::machine::Reservations;
use super::record::{Held, Progress, Record, Stage};
use super::tombstone::End;
use super::types::{
    Effect, PendingReserve, ReservationState, Reserve, ReserveError, ReserveRequest,
};
use crate::content::{Content, Room, Span};
use crate::moment::Moment;
use crate::name::ReservationId;

impl<C: Content> Reservations<C> {
    /// Asks for memory for one item; `fresh` names the reservation if a new one is made.
    ///
    /// Repeating a reserve is safe, but only the first answer says `write: true`.
    ///
    /// # Errors
    /// See [`ReserveError`]; nothing was evicted and no record was made.
    pub fn reserve(
        &mut self,
        memory: &mut C,
        now: Moment,
        fresh: ReservationId,
        request: &ReserveRequest,
        effects: &mut Vec<Effect>,
    ) -> Result<Reserve<C>, ReserveError> {
        let now = self.begin(memory, now, effects);
        if let Some(answer) = self.answer_without_room(memory, now, fresh, request, effects) {
            self.take_ready(memory);
            return answer;
        }
        match memory.reserve(request.tensor.len_bytes()) {
            Room::Ready(allocation) => {
                Ok(self.admit_writer(memory, now, fresh, request, allocation))
            }
            Room::Later(claim) => Ok(Reserve::Later(PendingReserve {
                claim,
                fresh,
                request: request.clone(),
            })),
            Room::Full => Err(ReserveError::PoolFull),
            Room::TooLarge => Err(ReserveError::TooLarge),
        }
    }

    /// Goes on with a reserve that had to wait, as if it had just been asked.
    ///
    /// # Errors
    /// As [`reserve`](Self::reserve); the claim is gone then.
    pub fn resume(
        &mut self,
        memory: &mut C,
        now: Moment,
        pending: PendingReserve<C>,
        effects: &mut Vec<Effect>,
    ) -> Result<Reserve<C>, ReserveError> {
        let now = self.begin(memory, now, effects);
        let PendingReserve {
            claim,
            fresh,
            request,
        } = pending;
        if let Some(answer) = self.answer_without_room(memory, now, fresh, &request, effects) {
            memory.drop_claim(claim);
            self.take_ready(memory);
            return answer;
        }
        match memory.poll_claim(claim) {
            Ok(allocation) => Ok(self.admit_writer(memory, now, fresh, &request, allocation)),
            Err(claim) => Ok(Reserve::Later(PendingReserve {
                claim,
                fresh,
                request,
            })),
        }
    }

    /// Ends a reserve that waited long enough; its answer is [`ReserveError::PoolFull`].
    pub fn give_up(&mut self, memory: &mut C, pending: PendingReserve<C>) -> ReserveError {
        memory.drop_claim(pending.claim);
        ReserveError::PoolFull
    }

    /// Everything a reserve can be answered with before memory is needed.
    fn answer_without_room(
        &mut self,
        memory: &mut C,
        now: Moment,
        fresh: ReservationId,
        request: &ReserveRequest,
        effects: &mut Vec<Effect>,
    ) -> Option<Result<Reserve<C>, ReserveError>> {
        let id = &request.transfer_id;
        if self.is_shutting_down() {
            return Some(Err(ReserveError::ShuttingDown));
        }
        match self.tombstones.get(id).map(|tombstone| tombstone.end) {
            Some(End::Cancelled) => return Some(Ok(Reserve::Cancelled)),
            Some(End::Expired) => self.tombstones.remove(id),
            None => {}
        }
        if let Some(answer) = self.answer_known(now, request, effects) {
            return Some(answer);
        }
        if self.book.len() >= self.config.reservations_max {
            return Some(Err(ReserveError::TooManyReservations {
                limit: self.config.reservations_max,
            }));
        }
        if let Some(refusal) = self.quota.refusal(id, &self.book) {
            return Some(Err(refusal));
        }
        let resident = memory
            .tensor(&request.mm_hash)
            .map(|tensor| *tensor == request.tensor);
        match resident {
            Some(true) => {
                if let Some(lease) = memory.acquire(&request.mm_hash) {
                    return Some(Ok(self.admit_cached(now, fresh, request, lease, effects)));
                }
            }
            // In use with another shape or type. Unused, it is no obstacle (row M13).
            Some(false) if memory.lease_count(&request.mm_hash) != Some(0) => {
                return Some(Err(ReserveError::ConflictingCached));
            }
            Some(false) | None => {}
        }
        self.answer_in_flight(now, fresh, request)
    }

    /// The answer for an id that has an active record.
    fn answer_known(
        &mut self,
        now: Moment,
        request: &ReserveRequest,
        effects: &mut Vec<Effect>,
    ) -> Option<Result<Reserve<C>, ReserveError>> {
        let id = &request.transfer_id;
        let record = self.book.get(id)?;
        let state = record.state();
        if state == ReservationState::ExpirePending {
            return Some(Err(ReserveError::ActiveWriter {
                transfer_id: id.clone(),
            }));
        }
        if record.mm_hash != request.mm_hash || record.tensor != request.tensor {
            return Some(Err(ReserveError::ConflictingReservation));
        }
        let grant = record.grant(false);
        match state {
            ReservationState::CancelPending | ReservationState::ExpirePending => {
                return Some(Ok(Reserve::Cancelled));
            }
            ReservationState::Writing => {
                self.book.renew(id, now.after_millis(self.config.ttl_ms));
            }
            ReservationState::Ready => effects.push(Effect::Ready(record.status(id))),
        }
        Some(Ok(Reserve::Granted(grant)))
    }

    /// The answer for content that somebody is writing.
    fn answer_in_flight(
        &mut self,
        now: Moment,
        fresh: ReservationId,
        request: &ReserveRequest,
    ) -> Option<Result<Reserve<C>, ReserveError>> {
        let writer = self.writers.get(&request.mm_hash)?.clone();
        let record = self.book.get(&writer)?;
        // A cancelled or expired writer keeps its memory but gets no new followers.
        if record.state() != ReservationState::Writing {
            return None;
        }
        if record.tensor != request.tensor {
            return Some(Err(ReserveError::ConflictingInFlight));
        }
        let span = record.span;
        let joined = self.next_sequence();
        if !self.book.join(&writer, joined, request.transfer_id.clone()) {
            return None;
        }
        let stage = Stage::Follower { writer, joined };
        Some(Ok(self.admit(now, fresh, request, span, false, stage)))
    }

    fn admit_writer(
        &mut self,
        memory: &mut C,
        now: Moment,
        fresh: ReservationId,
        request: &ReserveRequest,
        allocation: C::Allocation,
    ) -> Reserve<C> {
        let span = C::allocation_span(&allocation);
        // A resident of another shape or type that nobody uses makes way, but only now that the
        // reserve has succeeded: one that fails evicts nothing (rows M13, D4).
        if memory
            .tensor(&request.mm_hash)
            .is_some_and(|tensor| *tensor != request.tensor)
        {
            memory.evict(&request.mm_hash);
        }
        self.writers
            .insert(request.mm_hash.clone(), request.transfer_id.clone());
        let stage = Stage::Writer {
            allocation,
            progress: Progress::Writing,
            followers: BTreeMap::new(),
        };
        self.admit(now, fresh, request, span, true, stage)
    }

    fn admit_cached(
        &mut self,
        now: Moment,
        fresh: ReservationId,
        request: &ReserveRequest,
        lease: C::Lease,
        effects: &mut Vec<Effect>,
    ) -> Reserve<C> {
        let span = C::lease_span(&lease);
        let stage = self.ready_stage(Held::Lease(lease));
        let answer = self.admit(now, fresh, request, span, false, stage);
        effects.extend(self.status(&request.transfer_id).map(Effect::Ready));
        answer
    }

    /// Places a new record and answers with it.
    fn admit(
        &mut self,
        now: Moment,
        fresh: ReservationId,
        request: &ReserveRequest,
        span: Span,
        write: bool,
        stage: Stage<C>,
    ) -> Reserve<C> {
        let record = Record {
            reservation_id: fresh,
            mm_hash: request.mm_hash.clone(),
            tensor: request.tensor.clone(),
            span,
            written: write,
            deadline: match &stage {
                Stage::Ready { .. } => self.ready_deadline(now),
                Stage::Writer { .. } | Stage::Follower { .. } => {
                    Some(now.after_millis(self.config.ttl_ms))
                }
            },
            stage,
        };
        let grant = record.grant(write);
        self.book.place(request.transfer_id.clone(), record);
        Reserve::Granted(grant)
    }
}
