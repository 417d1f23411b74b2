//! Deadlines of connections, cheap to move.
//!
//! A connection's deadline moves with every byte; the heap holds at most one entry per connection
//! and is corrected only when that entry comes due.

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
}

impl Timers {
    /// Makes sure that the heap comes due no later than the deadline.
    pub(super) fn arm(&mut self, key: Key, deadline: &mut Deadline) {
        let Some(at) = deadline.at else { return };
        if deadline.armed.is_none_or(|armed| at < armed) {
            self.heap.push(Reverse((at, key)));
            deadline.armed = Some(at);
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
            self.arm(key, deadline);
        }
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
}
