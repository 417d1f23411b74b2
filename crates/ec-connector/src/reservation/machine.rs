//! The operations.

use std::collections::{BTreeMap, HashMap, VecDeque};

use super::book::Book;
use super::record::{Held, Progress, Record, Stage};
use super::tombstone::{End, Tombstones};
use super::types::{
    CancelKind, CancelMatch, Completion, Effect, ItemStatus, OwnedSpan, PendingReserve,
    ReservationConfig, ReservationState, ReservationStats, Reserve, ReserveError, ReserveRequest,
    Stuck, StuckReleased, TakeError, TakePolicy, Taken,
};
use crate::content::{Content, Room, Span};
use crate::moment::Moment;
use crate::name::{MmHash, ReservationId, TransferId};

/// The reservations of one consumer shard.
///
/// Every call that may give memory back, wake somebody or make an item ready takes the pool and
/// the time. Time that goes back is read as standing still.
///
/// # Complexity
/// Each call is O(log records) plus, once per record, the work of expiring it, and for a
/// completed or lost writer the number of its followers. Nothing scans all records except
/// [`begin_shutdown`](Self::begin_shutdown), [`release_stuck`](Self::release_stuck) of all, and
/// [`owned_spans`](Self::owned_spans).
pub struct Reservations<C: Content> {
    config: ReservationConfig,
    book: Book<C>,
    /// The latest record of each hash that was told to write, while it is active.
    writers: HashMap<MmHash, TransferId>,
    tombstones: Tombstones,
    taken: VecDeque<Taken<C>>,
    shutting_down: bool,
    /// Orders followers by joining and ready items by becoming ready.
    sequence: u64,
    latest: Moment,
    totals: ReservationStats,
}

impl<C: Content> Reservations<C> {
    /// Starts without any reservation.
    pub fn new(config: ReservationConfig) -> Self {
        Self {
            tombstones: Tombstones::new(config.tombstone_ttl_ms, config.tombstones_max),
            config,
            book: Book::new(),
            writers: HashMap::new(),
            taken: VecDeque::new(),
            shutting_down: false,
            sequence: 0,
            latest: Moment::default(),
            totals: ReservationStats::default(),
        }
    }

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

    /// The writer says that all bytes are in place.
    ///
    /// `reservation` is nothing for a text that names no reservation; it matches no record.
    /// Followers that become ready are announced before the writer.
    pub fn complete(
        &mut self,
        memory: &mut C,
        now: Moment,
        id: &TransferId,
        reservation: Option<ReservationId>,
        effects: &mut Vec<Effect>,
    ) -> Completion {
        let now = self.clock(now);
        let refused = Completion::default();
        let Some(record) = self.book.get(id) else {
            return refused;
        };
        if Some(record.reservation_id) != reservation {
            return refused;
        }
        match &record.stage {
            Stage::Follower { .. } => return refused,
            Stage::Ready { .. } => {
                return Completion {
                    completed: true,
                    became_ready: false,
                };
            }
            Stage::Writer { .. } => {}
        }
        let Some(record) = self.book.lift(id) else {
            return refused;
        };
        let became_ready = self.finish_writer(memory, now, id, record, effects);
        self.take_ready(memory);
        Completion {
            completed: true,
            became_ready,
        }
    }

    /// Somebody does not want the item any more, or the writer is done with its memory.
    ///
    /// Answers whether the id is now as the caller wants it. Without
    /// [`abandon`](CancelKind::abandon) memory a writer owns is never given back.
    pub fn cancel(
        &mut self,
        memory: &mut C,
        now: Moment,
        id: &TransferId,
        matching: CancelMatch,
        kind: CancelKind,
        effects: &mut Vec<Effect>,
    ) -> bool {
        let now = self.clock(now);
        let matches = |reservation: Option<ReservationId>| match matching {
            CancelMatch::Any => true,
            CancelMatch::Only(wanted) => wanted.is_some() && wanted == reservation,
        };
        if let Some(tombstone) = self.tombstones.get(id) {
            if !matches(tombstone.reservation_id) {
                return false;
            }
            // An expired id that is cancelled stays cancelled (row V9); one that is about to be
            // reserved again is left as it is.
            if tombstone.end == End::Expired && kind.refresh() {
                return false;
            }
            self.tombstones
                .touch(now, id.clone(), End::Cancelled, tombstone.reservation_id);
            return true;
        }
        let Some(record) = self.book.get(id) else {
            // An id nobody knows is free to be reserved, which is what a refresh asks for; a
            // tombstone would refuse the reserve that follows (rows V8, D6).
            if !kind.refresh() {
                self.tombstones.touch(now, id.clone(), End::Cancelled, None);
            }
            return true;
        };
        if !matches(Some(record.reservation_id)) {
            return false;
        }
        enum Verdict {
            Answer(bool),
            Defer(Progress),
            Finish(End),
        }
        let verdict = match (&record.stage, kind) {
            (_, CancelKind::RefreshOnly) => Verdict::Answer(false),
            (Stage::Follower { .. }, CancelKind::Refresh) => Verdict::Finish(End::Expired),
            (Stage::Follower { .. }, _) => Verdict::Finish(End::Cancelled),
            (Stage::Ready { .. }, CancelKind::Refresh) => Verdict::Answer(false),
            (Stage::Ready { .. }, _) => Verdict::Finish(End::Cancelled),
            (Stage::Writer { progress, .. }, kind) => match (*progress, kind) {
                (Progress::Writing, CancelKind::Plain) => Verdict::Defer(Progress::CancelPending),
                (Progress::CancelPending, CancelKind::Plain) => Verdict::Answer(true),
                (Progress::ExpirePending { .. }, CancelKind::Plain) => {
                    Verdict::Defer(Progress::ExpirePending { cancelled: true })
                }
                (
                    Progress::CancelPending | Progress::ExpirePending { cancelled: true },
                    CancelKind::Refresh,
                ) => Verdict::Answer(false),
                (_, CancelKind::Refresh) => Verdict::Finish(End::Expired),
                (_, _) => Verdict::Finish(End::Cancelled),
            },
        };
        match verdict {
            Verdict::Answer(answer) => answer,
            Verdict::Defer(progress) => {
                self.defer(id, progress);
                true
            }
            Verdict::Finish(end) => {
                self.finish(memory, now, id, end, effects);
                self.tombstones.reap(now);
                true
            }
        }
    }

    /// The active record of an id; nothing when it is unknown or finished.
    pub fn status(&self, id: &TransferId) -> Option<ItemStatus> {
        self.book.get(id).map(|record| record.status(id))
    }

    /// Turns a ready record into the caller's owner lease and forgets the id.
    ///
    /// # Errors
    /// [`TakeError`]; the record is as it was.
    pub fn take(
        &mut self,
        memory: &mut C,
        id: &TransferId,
        mm_hash: &MmHash,
    ) -> Result<Taken<C>, TakeError> {
        match self.book.get(id) {
            Some(record)
                if record.state() == ReservationState::Ready && record.mm_hash == *mm_hash => {}
            _ => return Err(TakeError::NotReady),
        }
        self.take_record(memory, id)
    }

    /// Fetches the next item that [`TakePolicy::OnReady`] took, and takes those that had to wait
    /// for a place in the list.
    pub fn next_taken(&mut self, memory: &mut C) -> Option<Taken<C>> {
        let taken = self.taken.pop_front();
        self.take_ready(memory);
        // An item the pool refused before may have entered an empty list only now.
        taken.or_else(|| self.taken.pop_front())
    }

    /// The next ready record that was not reported yet, in the order of becoming ready.
    ///
    /// Derived from the records, so an event that was lost on the wire hides nothing.
    pub fn poll_ready(&mut self) -> Option<ItemStatus> {
        let id = self.book.first_unreported()?;
        self.book.report(&id);
        self.status(&id)
    }

    /// Expires what is overdue at `now`; answers how many ready items that ended.
    ///
    /// A writer that is overdue keeps its memory: it may still be writing.
    pub fn expire(&mut self, memory: &mut C, now: Moment, effects: &mut Vec<Effect>) -> usize {
        let now = self.clock(now);
        let mut ended = 0;
        while let Some(id) = self.book.overdue(now) {
            let Some(record) = self.book.get(&id) else {
                break;
            };
            match &record.stage {
                Stage::Ready { .. } => {
                    self.totals.ready_expired += 1;
                    ended += 1;
                    self.finish(memory, now, &id, End::Expired, effects);
                }
                Stage::Follower { .. } => {
                    self.finish(memory, now, &id, End::Cancelled, effects);
                }
                Stage::Writer { .. } => {
                    self.totals.writers_expired += 1;
                    self.defer(&id, Progress::ExpirePending { cancelled: false });
                }
            }
        }
        self.tombstones.reap(now);
        ended
    }

    /// Refuses new reserves, ends followers and ready records, and cancels writers.
    ///
    /// Serve on until [`writers_outstanding`](Self::writers_outstanding) is zero or patience
    /// ends; in the latter case the slab has to stay registered. A second call does nothing.
    pub fn begin_shutdown(&mut self, memory: &mut C, now: Moment, effects: &mut Vec<Effect>) {
        let now = self.clock(now);
        if self.shutting_down {
            return;
        }
        self.shutting_down = true;
        let ids: Vec<TransferId> = self.book.iter().map(|(id, _)| id.clone()).collect();
        for id in ids {
            match self.book.get(&id).map(|record| &record.stage) {
                Some(Stage::Ready { .. } | Stage::Follower { .. }) => {
                    self.finish(memory, now, &id, End::Cancelled, effects);
                }
                Some(Stage::Writer {
                    progress: Progress::Writing,
                    ..
                }) => self.defer(&id, Progress::CancelPending),
                Some(Stage::Writer { .. }) | None => {}
            }
        }
    }

    /// Whether [`begin_shutdown`](Self::begin_shutdown) was called.
    pub fn is_shutting_down(&self) -> bool {
        self.shutting_down
    }

    /// Number of records whose writer may still write; followers are none (row V17).
    pub fn writers_outstanding(&self) -> usize {
        let counts = self.book.counts();
        counts.writing + counts.cancel_pending + counts.expire_pending
    }

    /// Gives back the memory of cancelled or expired writers that never said they were done.
    ///
    /// Only call it when the peer cannot write any more, for instance because its process or its
    /// engine is known to be gone: a write that still arrives lands in memory that belongs to
    /// somebody else by then. There is no such operation on the wire (row V7).
    pub fn release_stuck(
        &mut self,
        memory: &mut C,
        now: Moment,
        which: Stuck<'_>,
        effects: &mut Vec<Effect>,
    ) -> StuckReleased {
        let now = self.clock(now);
        let ids: Vec<TransferId> = match which {
            Stuck::One(id) => vec![id.clone()],
            Stuck::All => self.book.iter().map(|(id, _)| id.clone()).collect(),
        };
        let mut released = StuckReleased::default();
        for id in ids {
            let Some(record) = self.book.get(&id) else {
                continue;
            };
            if matches!(
                record.state(),
                ReservationState::CancelPending | ReservationState::ExpirePending
            ) {
                released.records += 1;
                released.bytes += record.span.len_bytes;
                self.finish(memory, now, &id, End::Cancelled, effects);
            }
        }
        released
    }

    /// Counts now, and totals since the start. O(1).
    pub fn stats(&self) -> ReservationStats {
        let counts = self.book.counts();
        ReservationStats {
            taken_waiting: self.taken.len(),
            tombstones: self.tombstones.len(),
            tombstones_dropped: self.tombstones.dropped_early(),
            ready_expired: self.totals.ready_expired,
            writers_expired: self.totals.writers_expired,
            followers_lost: self.totals.followers_lost,
            publishes_refused: self.totals.publishes_refused,
            ..counts
        }
    }

    /// The memory that records own alone, in no order; for drawing the slab map.
    pub fn owned_spans(&self) -> impl Iterator<Item = OwnedSpan> {
        self.book.iter().filter_map(|(_, record)| record.owned())
    }

    /// What every reserve does first.
    fn begin(&mut self, memory: &mut C, now: Moment, effects: &mut Vec<Effect>) -> Moment {
        self.expire(memory, now, effects);
        self.latest
    }

    fn clock(&mut self, now: Moment) -> Moment {
        self.latest = self.latest.max(now);
        self.latest
    }

    fn next_sequence(&mut self) -> u64 {
        self.sequence += 1;
        self.sequence
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
        if self.shutting_down {
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
            deadline: Some(now.after_millis(self.config.ttl_ms)),
            stage,
        };
        let grant = record.grant(write);
        self.book.place(request.transfer_id.clone(), record);
        Reserve::Granted(grant)
    }

    fn ready_stage(&mut self, held: Held<C>) -> Stage<C> {
        Stage::Ready {
            held,
            unreported: Some(self.next_sequence()),
        }
    }

    /// Ends the writing of a lifted writer: ready if it was wanted, else gone. Says which.
    fn finish_writer(
        &mut self,
        memory: &mut C,
        now: Moment,
        id: &TransferId,
        mut record: Record<C>,
        effects: &mut Vec<Effect>,
    ) -> bool {
        let (allocation, progress, followers) = match record.stage {
            Stage::Writer {
                allocation,
                progress,
                followers,
            } => (allocation, progress, followers),
            stage => {
                record.stage = stage;
                self.book.place(id.clone(), record);
                return false;
            }
        };
        self.forget_writer(&record.mm_hash, id);
        let held = if followers.is_empty() {
            Held::Allocation(allocation)
        } else {
            match memory.publish(&record.mm_hash, allocation, &record.tensor) {
                Ok(lease) => {
                    record.span = C::lease_span(&lease);
                    self.share(memory, now, id, &record.mm_hash, followers, effects);
                    Held::Lease(lease)
                }
                Err(allocation) => {
                    self.totals.publishes_refused += 1;
                    effects.push(Effect::PublishRefused {
                        transfer_id: id.clone(),
                    });
                    self.lose(now, id, followers, effects);
                    Held::Allocation(allocation)
                }
            }
        };
        let end = match progress {
            Progress::Writing => {
                record.deadline = Some(now.after_millis(self.config.ttl_ms));
                record.stage = self.ready_stage(held);
                effects.push(Effect::Ready(record.status(id)));
                self.book.place(id.clone(), record);
                return true;
            }
            Progress::CancelPending | Progress::ExpirePending { cancelled: true } => End::Cancelled,
            Progress::ExpirePending { cancelled: false } => End::Expired,
        };
        give_back(memory, held);
        self.tombstones
            .touch(now, id.clone(), end, Some(record.reservation_id));
        false
    }

    /// Makes followers ready, each with a lease of its own on what their writer published.
    fn share(
        &mut self,
        memory: &mut C,
        now: Moment,
        writer: &TransferId,
        mm_hash: &MmHash,
        followers: BTreeMap<u64, TransferId>,
        effects: &mut Vec<Effect>,
    ) {
        let mut lost = BTreeMap::new();
        for (joined, id) in followers {
            let Some(lease) = memory.acquire(mm_hash) else {
                lost.insert(joined, id);
                continue;
            };
            let Some(mut record) = self.book.lift(&id) else {
                memory.release(lease);
                continue;
            };
            record.span = C::lease_span(&lease);
            record.deadline = Some(now.after_millis(self.config.ttl_ms));
            record.stage = self.ready_stage(Held::Lease(lease));
            effects.push(Effect::Ready(record.status(&id)));
            self.book.place(id, record);
        }
        self.lose(now, writer, lost, effects);
    }

    /// Ends followers whose writer went away; their ids may be reserved again (rows V5, V16).
    fn lose(
        &mut self,
        now: Moment,
        writer: &TransferId,
        followers: BTreeMap<u64, TransferId>,
        effects: &mut Vec<Effect>,
    ) {
        let mut count = 0;
        for id in followers.into_values() {
            if let Some(record) = self.book.lift(&id) {
                count += 1;
                self.tombstones
                    .touch(now, id, End::Expired, Some(record.reservation_id));
            }
        }
        if count > 0 {
            self.totals.followers_lost += count as u64;
            effects.push(Effect::FollowersLost {
                writer: writer.clone(),
                count,
            });
        }
    }

    /// Ends a record and gives back what it owns.
    fn finish(
        &mut self,
        memory: &mut C,
        now: Moment,
        id: &TransferId,
        end: End,
        effects: &mut Vec<Effect>,
    ) {
        let Some(record) = self.book.lift(id) else {
            return;
        };
        match record.stage {
            Stage::Follower { writer, joined } => self.book.leave(&writer, joined),
            Stage::Ready { held, .. } => give_back(memory, held),
            Stage::Writer {
                allocation,
                followers,
                ..
            } => {
                self.forget_writer(&record.mm_hash, id);
                memory.free(allocation);
                self.lose(now, id, followers, effects);
            }
        }
        self.tombstones
            .touch(now, id.clone(), end, Some(record.reservation_id));
    }

    /// Keeps a writer's memory until the writer says that it is done.
    fn defer(&mut self, id: &TransferId, deferred: Progress) {
        let Some(mut record) = self.book.lift(id) else {
            return;
        };
        if let Stage::Writer { progress, .. } = &mut record.stage {
            *progress = deferred;
            record.deadline = None;
        }
        self.book.place(id.clone(), record);
    }

    /// `id` writes `mm_hash` no more; a later writer of the hash stays the current one.
    fn forget_writer(&mut self, mm_hash: &MmHash, id: &TransferId) {
        if self.writers.get(mm_hash) == Some(id) {
            self.writers.remove(mm_hash);
        }
    }

    /// With [`TakePolicy::OnReady`], takes ready records while the list has room.
    fn take_ready(&mut self, memory: &mut C) {
        let TakePolicy::OnReady { taken_max } = self.config.take else {
            return;
        };
        while self.taken.len() < taken_max.max(1) {
            let Some(id) = self.book.first_unreported() else {
                return;
            };
            // A refusal is counted, and tried again in the next call that can make items ready.
            match self.take_record(memory, &id) {
                Ok(taken) => self.taken.push_back(taken),
                Err(_) => return,
            }
        }
    }

    /// Takes a ready record; its allocation becomes a resident if it is none yet.
    fn take_record(&mut self, memory: &mut C, id: &TransferId) -> Result<Taken<C>, TakeError> {
        let Some(mut record) = self.book.lift(id) else {
            return Err(TakeError::NotReady);
        };
        let (held, unreported) = match record.stage {
            Stage::Ready { held, unreported } => (held, unreported),
            stage => {
                record.stage = stage;
                self.book.place(id.clone(), record);
                return Err(TakeError::NotReady);
            }
        };
        let lease = match held {
            Held::Lease(lease) => lease,
            Held::Allocation(allocation) => {
                match memory.publish(&record.mm_hash, allocation, &record.tensor) {
                    Ok(lease) => lease,
                    Err(allocation) => {
                        self.totals.publishes_refused += 1;
                        record.stage = Stage::Ready {
                            held: Held::Allocation(allocation),
                            unreported,
                        };
                        self.book.place(id.clone(), record);
                        return Err(TakeError::PublishRefused);
                    }
                }
            }
        };
        Ok(Taken {
            transfer_id: id.clone(),
            mm_hash: record.mm_hash,
            tensor: record.tensor,
            reservation_id: record.reservation_id,
            cached: !record.written,
            lease,
        })
    }
}

fn give_back<C: Content>(memory: &mut C, held: Held<C>) {
    match held {
        Held::Allocation(allocation) => memory.free(allocation),
        Held::Lease(lease) => memory.release(lease),
    }
}
