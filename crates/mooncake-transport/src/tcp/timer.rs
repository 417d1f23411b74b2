//! Deadlines of connections, cheap to move.
//!
//! A connection's deadline moves with every byte; the heap is corrected only when an entry comes due.
//! Entries of deadlines that came forward or of connections that were closed stay behind, at most about
//! as many as there are connections with a deadline.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Instant;

use super::table::Key;

/// One connection's deadline and what the heap knows of it.
#[derive(Debug, Default)]
pub(super) struct Deadline {
    at: Option<Instant>,
    armed: Option<Instant>,
}

impl Deadline {
    pub(super) fn set(&mut self, at: Option<Instant>) {
        self.at = at;
    }

    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.at.is_some_and(|at| at <= now)
    }
}

#[derive(Debug, Default)]
pub(super) struct Timers {
    heap: BinaryHeap<Reverse<(Instant, Key)>>,
    /// Deadlines that are armed. Each has one entry; what else is in the heap is left over.
    armed: usize,
}

/// Entries left over that are not worth a sweep.
const LEFT_OVER_MIN: usize = 64;

impl Timers {
    /// Makes sure that the heap comes due no later than the deadline.
    pub(super) fn arm(&mut self, key: Key, deadline: &mut Deadline) {
        let Some(at) = deadline.at else { return };
        if deadline.armed.is_none_or(|armed| at < armed) {
            self.heap.push(Reverse((at, key)));
            if deadline.armed.replace(at).is_none() {
                self.armed += 1;
            }
        }
    }

    /// The deadline is no more, or its connection.
    pub(super) fn disarm(&mut self, deadline: &mut Deadline) {
        deadline.at = None;
        if deadline.armed.take().is_some() {
            self.armed -= 1;
        }
    }

    /// Returns the next moment at which `pop_due` may return something.
    pub(super) fn next(&self) -> Option<Instant> {
        self.heap.peek().map(|Reverse((at, _))| *at)
    }

    /// Returns the next key whose entry came due; the caller looks at the deadline itself and
    /// calls [`fired`](Timers::fired).
    pub(super) fn pop_due(&mut self, now: Instant) -> Option<(Instant, Key)> {
        let Reverse((at, _)) = self.heap.peek()?;
        if *at > now {
            return None;
        }
        self.heap.pop().map(|Reverse(entry)| entry)
    }

    /// Notes that the entry for `at` is gone, and arms again if the deadline has moved on.
    pub(super) fn fired(&mut self, key: Key, at: Instant, deadline: &mut Deadline) {
        if deadline.armed == Some(at) {
            deadline.armed = None;
            self.armed -= 1;
            self.arm(key, deadline);
        }
    }

    /// Removes what is left over once it is more than the rest. `deadline_of` finds the deadline of a
    /// connection, if there is one.
    ///
    /// # Complexity
    /// O(1) for each entry that was ever added, over all calls.
    pub(super) fn sweep<'a>(&mut self, mut deadline_of: impl FnMut(Key) -> Option<&'a Deadline>) {
        if self.heap.len() <= 2 * self.armed + LEFT_OVER_MIN {
            return;
        }
        self.heap.retain(|Reverse((at, key))| {
            deadline_of(*key).is_some_and(|deadline| deadline.armed == Some(*at))
        });
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::table::Table;
    use super::*;

    #[test]
    fn a_deadline_that_moves_on_leaves_one_entry() {
        let mut table = Table::new();
        let key = table.insert(());
        let mut timers = Timers::default();
        let mut deadline = Deadline::default();
        let start = Instant::now();
        for step in 0..1_000 {
            deadline.set(Some(start + Duration::from_secs(30 + step)));
            timers.arm(key, &mut deadline);
        }
        assert_eq!(timers.heap.len(), 1);
        let due = start + Duration::from_secs(30);
        let (at, popped) = timers.pop_due(due).unwrap();
        assert_eq!((at, popped), (due, key));
        assert!(!deadline.is_due(due));
        timers.fired(key, at, &mut deadline);
        assert_eq!(timers.next(), deadline.at);
        assert!(timers.pop_due(due).is_none());
    }

    #[test]
    fn a_deadline_that_moves_forward_fires_early_enough() {
        let mut table = Table::new();
        let key = table.insert(());
        let mut timers = Timers::default();
        let mut deadline = Deadline::default();
        let start = Instant::now();
        deadline.set(Some(start + Duration::from_secs(30)));
        timers.arm(key, &mut deadline);
        deadline.set(Some(start + Duration::from_secs(2)));
        timers.arm(key, &mut deadline);
        let (at, _) = timers.pop_due(start + Duration::from_secs(2)).unwrap();
        timers.fired(key, at, &mut deadline);
        assert!(deadline.is_due(start + Duration::from_secs(2)));
        deadline.set(None);
        let (at, _) = timers.pop_due(start + Duration::from_secs(60)).unwrap();
        timers.fired(key, at, &mut deadline);
        assert!(timers.next().is_none() || !deadline.is_due(start + Duration::from_secs(60)));
    }

    /// Sweeps as the reactor does, and returns how many entries there are.
    fn swept(timers: &mut Timers, table: &Table<Deadline>) -> usize {
        timers.sweep(|key| table.get(key));
        timers.heap.len()
    }

    #[test]
    fn connections_that_were_closed_before_their_deadline_leave_nothing_behind_for_long() {
        let mut table = Table::new();
        let mut timers = Timers::default();
        let day = Instant::now() + Duration::from_secs(86_400);
        let stays = table.insert(Deadline::default());
        for index in 0..100_000 {
            let key = table.insert(Deadline::default());
            let deadline = table.get_mut(key).unwrap();
            deadline.set(Some(day + Duration::from_millis(index)));
            timers.arm(key, deadline);
            let mut deadline = table.remove(key).unwrap();
            timers.disarm(&mut deadline);
            assert!(swept(&mut timers, &table) <= 2 + LEFT_OVER_MIN, "{index}");
            if index == 50 {
                let deadline = table.get_mut(stays).unwrap();
                deadline.set(Some(day));
                timers.arm(stays, deadline);
            }
        }
        // What counts is still there.
        assert_eq!(timers.pop_due(day), Some((day, stays)));
    }

    #[test]
    fn a_deadline_that_comes_forward_time_and_again_leaves_little_behind() {
        let mut table = Table::new();
        let mut timers = Timers::default();
        let mut now = Instant::now();
        let key = table.insert(Deadline::default());
        for _ in 0..10_000 {
            for wait in [86_400, 1] {
                let deadline = table.get_mut(key).unwrap();
                deadline.set(Some(now + Duration::from_secs(wait)));
                timers.arm(key, deadline);
            }
            now += Duration::from_millis(1_100);
            let deadline = table.get_mut(key).unwrap();
            deadline.set(Some(now + Duration::from_secs(86_400)));
            while let Some((at, key)) = timers.pop_due(now) {
                timers.fired(key, at, deadline);
            }
            assert!(swept(&mut timers, &table) <= 3 + LEFT_OVER_MIN);
        }
        assert_eq!(timers.armed, 1);
    }
}
