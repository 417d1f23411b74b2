//! The active records and everything derived from them.
//!
//! A record is changed by lifting it out and placing it again, so the deadline index, the order of
//! ready items and the counts cannot fall behind what the records say.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::record::{Progress, Record, Stage};
use super::types::{ReservationState, ReservationStats};
use crate::content::Content;
use crate::moment::Moment;
use crate::name::TransferId;

pub(super) struct Book<C: Content> {
    records: HashMap<TransferId, Record<C>>,
    deadlines: BTreeSet<(Moment, TransferId)>,
    /// Ready records nobody was told about, by order of becoming ready.
    unreported: BTreeMap<u64, TransferId>,
    counts: ReservationStats,
}

impl<C: Content> Book<C> {
    pub(super) fn new() -> Self {
        Self {
            records: HashMap::new(),
            deadlines: BTreeSet::new(),
            unreported: BTreeMap::new(),
            counts: ReservationStats::default(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.records.len()
    }

    pub(super) fn get(&self, id: &TransferId) -> Option<&Record<C>> {
        self.records.get(id)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&TransferId, &Record<C>)> {
        self.records.iter()
    }

    /// All ids in an order that does not depend on the hasher, so that the same calls always have
    /// the same effects.
    pub(super) fn sorted_ids(&self) -> Vec<TransferId> {
        let mut ids: Vec<TransferId> = self.records.keys().cloned().collect();
        ids.sort_unstable();
        ids
    }

    /// Takes a record out, and with it all that the indexes know of it.
    pub(super) fn lift(&mut self, id: &TransferId) -> Option<Record<C>> {
        let (id, record) = self.records.remove_entry(id)?;
        if let Stage::Ready {
            unreported: Some(order),
            ..
        } = &record.stage
        {
            self.unreported.remove(order);
        }
        self.count(&record, |count| count - 1, |sum, bytes| sum - bytes);
        if let Some(deadline) = record.deadline {
            self.deadlines.remove(&(deadline, id));
        }
        Some(record)
    }

    /// Puts a record in; the id must not be in use.
    pub(super) fn place(&mut self, id: TransferId, record: Record<C>) {
        if let Some(deadline) = record.deadline {
            self.deadlines.insert((deadline, id.clone()));
        }
        if let Stage::Ready {
            unreported: Some(order),
            ..
        } = &record.stage
        {
            self.unreported.insert(*order, id.clone());
        }
        self.count(&record, |count| count + 1, |sum, bytes| sum + bytes);
        let replaced = self.records.insert(id, record);
        debug_assert!(replaced.is_none(), "a record was placed over another");
    }

    /// Moves a record's deadline.
    pub(super) fn renew(&mut self, id: &TransferId, deadline: Moment) {
        let Some(record) = self.records.get_mut(id) else {
            return;
        };
        if let Some(earlier) = record.deadline.replace(deadline) {
            self.deadlines.remove(&(earlier, id.clone()));
        }
        self.deadlines.insert((deadline, id.clone()));
    }

    /// Adds a follower to a writer that is writing; nothing for any other record.
    pub(super) fn join(&mut self, writer: &TransferId, order: u64, follower: TransferId) -> bool {
        match self.records.get_mut(writer).map(|record| &mut record.stage) {
            Some(Stage::Writer {
                progress: Progress::Writing,
                followers,
                ..
            }) => {
                followers.insert(order, follower);
                true
            }
            _ => false,
        }
    }

    /// Removes a follower from its writer.
    pub(super) fn leave(&mut self, writer: &TransferId, order: u64) {
        if let Some(Stage::Writer { followers, .. }) =
            self.records.get_mut(writer).map(|record| &mut record.stage)
        {
            followers.remove(&order);
        }
    }

    /// The record whose deadline is first, if it is not after `now`.
    pub(super) fn overdue(&self, now: Moment) -> Option<TransferId> {
        self.deadlines
            .first()
            .filter(|(deadline, _)| *deadline <= now)
            .map(|(_, id)| id.clone())
    }

    /// The ready record that has waited longest for somebody to be told.
    pub(super) fn first_unreported(&self) -> Option<TransferId> {
        self.unreported.first_key_value().map(|(_, id)| id.clone())
    }

    /// Notes that somebody was told about a ready record.
    pub(super) fn report(&mut self, id: &TransferId) {
        if let Some(Stage::Ready { unreported, .. }) =
            self.records.get_mut(id).map(|record| &mut record.stage)
            && let Some(order) = unreported.take()
        {
            self.unreported.remove(&order);
        }
    }

    /// Counts by state; the totals in it are zero.
    pub(super) fn counts(&self) -> ReservationStats {
        self.counts
    }

    fn count(
        &mut self,
        record: &Record<C>,
        step: impl Fn(usize) -> usize,
        sum: impl Fn(u64, u64) -> u64,
    ) {
        let counts = &mut self.counts;
        let count = match (record.state(), &record.stage) {
            (ReservationState::Writing, Stage::Follower { .. }) => &mut counts.following,
            (ReservationState::Writing, _) => &mut counts.writing,
            (ReservationState::Ready, _) => &mut counts.ready,
            (ReservationState::CancelPending, _) => &mut counts.cancel_pending,
            (ReservationState::ExpirePending, _) => &mut counts.expire_pending,
        };
        *count = step(*count);
        if let Some(owned) = record.owned() {
            let bytes = match owned.state {
                ReservationState::Writing => &mut counts.writing_bytes,
                ReservationState::Ready => &mut counts.ready_bytes,
                ReservationState::CancelPending | ReservationState::ExpirePending => {
                    &mut counts.stuck_bytes
                }
            };
            *bytes = sum(*bytes, owned.span.len_bytes);
        }
    }
}
