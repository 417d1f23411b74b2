//! Finished ids, remembered for a while.

use std::collections::{BTreeMap, HashMap};

use crate::moment::Moment;
use crate::name::{ReservationId, TransferId};

/// How an id ended; the only difference is what a later reserve of it gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// A later reserve is told that the id was cancelled.
    Cancelled,
    /// A later reserve starts afresh.
    Expired,
}

/// Finished ids by order of last touch, bounded in number and time.
pub(super) struct Tombstones {
    by_id: HashMap<TransferId, Tombstone>,
    /// Key: order of last touch, which is also the order of deadlines because time never goes
    /// back and all live equally long.
    order: BTreeMap<u64, (Moment, TransferId)>,
    next: u64,
    ttl_ms: u64,
    limit: usize,
    dropped_early: u64,
}

#[derive(Clone, Copy)]
pub(super) struct Tombstone {
    pub(super) end: End,
    /// Nothing when the id was cancelled before it was ever reserved.
    pub(super) reservation_id: Option<ReservationId>,
    touched: u64,
}

impl Tombstones {
    pub(super) fn new(ttl_ms: u64, limit: usize) -> Self {
        Self {
            by_id: HashMap::new(),
            order: BTreeMap::new(),
            next: 0,
            ttl_ms,
            limit,
            dropped_early: 0,
        }
    }

    /// Remembers or re-remembers how `id` ended, for a full lifetime from `now`.
    pub(super) fn touch(
        &mut self,
        now: Moment,
        id: TransferId,
        end: End,
        reservation_id: Option<ReservationId>,
    ) {
        self.remove(&id);
        let touched = self.next;
        self.next += 1;
        self.order
            .insert(touched, (now.after_millis(self.ttl_ms), id.clone()));
        let tombstone = Tombstone {
            end,
            reservation_id,
            touched,
        };
        self.by_id.insert(id, tombstone);
        self.reap(now);
    }

    pub(super) fn get(&self, id: &TransferId) -> Option<Tombstone> {
        self.by_id.get(id).copied()
    }

    pub(super) fn remove(&mut self, id: &TransferId) {
        if let Some(tombstone) = self.by_id.remove(id) {
            self.order.remove(&tombstone.touched);
        }
    }

    /// Forgets what is past its time, and the ones untouched longest beyond the limit.
    pub(super) fn reap(&mut self, now: Moment) {
        while let Some(head) = self.order.first_entry() {
            let overdue = head.get().0 <= now;
            if !overdue && self.by_id.len() <= self.limit {
                break;
            }
            let (_, id) = head.remove();
            self.by_id.remove(&id);
            self.dropped_early += u64::from(!overdue);
        }
    }

    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }

    pub(super) fn dropped_early(&self) -> u64 {
        self.dropped_early
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(text: &str) -> TransferId {
        TransferId::new(text).unwrap()
    }

    fn at(millis: u64) -> Moment {
        Moment::from_millis(millis)
    }

    #[test]
    fn a_touch_renews_the_time_and_the_place_in_the_order() {
        let mut tombstones = Tombstones::new(100, 10);
        tombstones.touch(at(0), id("a"), End::Cancelled, None);
        tombstones.touch(at(50), id("b"), End::Expired, None);
        tombstones.touch(at(60), id("a"), End::Cancelled, None);
        tombstones.reap(at(155));
        assert!(tombstones.get(&id("b")).is_none());
        assert_eq!(tombstones.get(&id("a")).unwrap().end, End::Cancelled);
        tombstones.reap(at(160));
        assert_eq!(tombstones.len(), 0);
        assert!(tombstones.order.is_empty());
        assert_eq!(tombstones.dropped_early(), 0);
    }

    // row: V15
    #[test]
    fn under_pressure_the_one_untouched_longest_goes_and_is_counted() {
        let mut tombstones = Tombstones::new(100, 2);
        for name in ["a", "b", "a", "c"] {
            tombstones.touch(at(0), id(name), End::Cancelled, None);
        }
        assert!(tombstones.get(&id("b")).is_none());
        assert!(tombstones.get(&id("a")).is_some());
        assert!(tombstones.get(&id("c")).is_some());
        assert_eq!(tombstones.dropped_early(), 1);
    }
}
