//! How records end: completed, cancelled, expired, shut down, or given up on.

use std::collections::BTreeMap;

use super::machine::Reservations;
use super::record::{Held, Progress, Record, Stage};
use super::tombstone::End;
use super::types::{
    CancelKind, CancelMatch, Completion, Effect, ReservationState, Shutdown, Stuck, StuckReleased,
};
use crate::content::Content;
use crate::moment::Moment;
use crate::name::{MmHash, ReservationId, TransferId};

impl<C: Content> Reservations<C> {
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

    /// Refuses new reserves from now on, and lets what is under way finish or cancels it.
    ///
    /// Serve on until [`is_exhausted`](Self::is_exhausted) and then until
    /// [`writers_outstanding`](Self::writers_outstanding) is zero, or patience ends; in the latter case the slab has
    /// to stay registered. A second call may go from [`Shutdown::Finish`] to [`Shutdown::Cancel`]; any other does
    /// nothing.
    pub fn begin_shutdown(
        &mut self,
        memory: &mut C,
        now: Moment,
        how: Shutdown,
        effects: &mut Vec<Effect>,
    ) {
        let now = self.clock(now);
        if self.shutdown >= Some(how) {
            return;
        }
        self.shutdown = Some(how);
        if how == Shutdown::Finish {
            return;
        }
        for id in self.book.sorted_ids() {
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
            Stuck::All => self.book.sorted_ids(),
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
                record.deadline = self.ready_deadline(now);
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
            record.deadline = self.ready_deadline(now);
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
}

fn give_back<C: Content>(memory: &mut C, held: Held<C>) {
    match held {
        Held::Allocation(allocation) => memory.free(allocation),
        Held::Lease(lease) => memory.release(lease),
    }
}
