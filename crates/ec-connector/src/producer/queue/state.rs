//! The pushes that no thread works on, without a lock, a clock or a thread.

use std::collections::{BTreeMap, VecDeque};

use crate::code::ErrorCode;
use crate::moment::Moment;
use crate::producer::PushError;
use crate::producer::record::{Lane, Record};
use crate::push::{ContentLanes, Delivery, PushFailure, PushStep};

/// Records are never dropped in here: that runs code of the caller's, and may come back for room.
#[derive(Default)]
pub(super) struct State {
    runnable: VecDeque<Record>,
    /// By moment, then by order of arrival.
    timed: BTreeMap<(Moment, u64), Record>,
    /// Which of `timed` wait for room in the staging slab, by their place in line.
    for_room: BTreeMap<u64, (Moment, u64)>,
    lanes: ContentLanes<Lane, Record>,
    serial: u64,
    /// How often there was said to be room.
    room_count: u64,
    /// Pushes that have not ended.
    pub(super) open: usize,
    pub(super) closing: bool,
}

/// What a thread does next.
#[expect(
    clippy::large_enum_variant,
    reason = "matched where it is returned, never kept"
)]
pub(super) enum Next {
    Work(Record),
    /// There is nothing to do before that moment, if ever.
    Wait(Option<Moment>),
    /// The producer has closed, and all pushes have ended or are being worked on.
    Over,
}

/// How a push ended.
pub(super) type Ended = (Record, Result<Delivery, PushError>);

impl State {
    /// Lets a push start, or wait for another one of the same content to the same consumer.
    pub(super) fn enter(&mut self, record: Record) {
        if let Some(record) = self.lanes.enter(record.lane(), record) {
            self.runnable.push_back(record);
        }
    }

    pub(super) fn next(&mut self, now: Moment) -> Next {
        if let Some(record) = self.runnable.pop_front() {
            return Next::Work(record);
        }
        match self.timed.first_entry() {
            Some(first) if first.key().0 <= now => {
                let record = first.remove();
                self.leave_line(&record);
                Next::Work(record)
            }
            Some(first) => Next::Wait(Some(first.key().0)),
            None if self.closing => Next::Over,
            None => Next::Wait(None),
        }
    }

    /// Puts a push away until `at`, or until there is room if it has a place in that line.
    pub(super) fn wait(&mut self, now: Moment, at: Moment, mut record: Record) {
        if self.closing {
            if let Some(machine) = &mut record.machine {
                machine.give_up(now, PushFailure::Closed);
                debug_assert!(
                    !matches!(
                        machine.clone().poll(now, || machine.transfer_id().clone()),
                        PushStep::WaitUntil(_) | PushStep::WaitForRoom(_)
                    ),
                    "a push that was given up waits, and would be looked at again and again"
                );
            }
            self.runnable.push_back(record);
            return;
        }
        if record.turn.is_some() && record.room_seen != self.room_count {
            // There was room between the look and now.
            return self.look_for_room(record);
        }
        let key = (at, self.serial);
        self.serial += 1;
        if let Some(turn) = &record.turn {
            self.for_room.insert(turn.number(), key);
        }
        self.timed.insert(key, record);
    }

    /// To be noted in a record before it looks for room.
    pub(super) fn room_count(&self) -> u64 {
        self.room_count
    }

    /// There may be room for whoever is first in line.
    pub(super) fn room_came(&mut self) {
        self.room_count += 1;
        let first = self.for_room.pop_first();
        if let Some(record) = first.and_then(|(_, key)| self.timed.remove(&key)) {
            self.look_for_room(record);
        }
    }

    fn look_for_room(&mut self, mut record: Record) {
        if let Some(machine) = &mut record.machine {
            machine.handle_room();
        }
        self.runnable.push_back(record);
    }

    /// It no longer waits for room.
    fn leave_line(&mut self, record: &Record) {
        if let Some(turn) = &record.turn {
            self.for_room.remove(&turn.number());
        }
    }

    /// A push has ended: the next one of its content may start. If the consumer did not answer, or takes nothing any
    /// more, whatever else waits for it ends as well. Returns all that have ended.
    pub(super) fn end(
        &mut self,
        now: Moment,
        record: Record,
        result: Result<Delivery, PushError>,
    ) -> Vec<Ended> {
        self.leave(&record.lane());
        let gone = match &result {
            Err(error @ PushError::Failed(failure)) if error.is_unreachable() => {
                Some(failure.clone())
            }
            Err(PushError::Failed(
                failure @ PushFailure::Refused {
                    code: Some(ErrorCode::ShuttingDown | ErrorCode::NoMoreItems),
                    ..
                },
            )) => Some(failure.clone()),
            _ => None,
        };
        let to = record.to.clone();
        let mut ended = vec![(record, result)];
        if let Some(failure) = gone {
            let given_up = self.give_up(now, &failure, |record| record.to == to);
            ended.extend(
                given_up
                    .into_iter()
                    .map(|record| (record, Err(failure.clone().into()))),
            );
        }
        ended
    }

    /// The push that was worked on in this lane is gone without having ended.
    pub(super) fn lose(&mut self, lane: &Lane) {
        self.leave(lane);
        self.open -= 1;
    }

    /// Nothing waits any more. Returns what has ended.
    pub(super) fn close(&mut self, now: Moment) -> Vec<Ended> {
        self.closing = true;
        self.give_up(now, &PushFailure::Closed, |_| true)
            .into_iter()
            .map(|record| (record, Err(PushFailure::Closed.into())))
            .collect()
    }

    /// The lane of a push that has ended goes to the next one in it.
    fn leave(&mut self, lane: &Lane) {
        if let Some(next) = self.lanes.leave(lane) {
            self.runnable.push_back(next);
        }
    }

    /// Takes out the pushes of `which` that have not begun, and gives up those that have and only wait.
    fn give_up(
        &mut self,
        now: Moment,
        failure: &PushFailure,
        which: impl Fn(&Record) -> bool,
    ) -> Vec<Record> {
        let (mut ended, kept): (Vec<_>, Vec<_>) =
            self.lanes.drain_waiting().into_iter().partition(&which);
        for record in kept {
            // Its lane is still taken, so it waits again.
            self.enter(record);
        }
        let mut left = Vec::new();
        for mut record in std::mem::take(&mut self.runnable) {
            if !which(&record) {
                self.runnable.push_back(record);
                continue;
            }
            match &mut record.machine {
                Some(machine) => {
                    machine.give_up(now, failure.clone());
                    self.runnable.push_back(record);
                }
                None => {
                    left.push(record.lane());
                    ended.push(record);
                }
            }
        }
        for lane in left {
            self.leave(&lane);
        }
        for (key, mut record) in std::mem::take(&mut self.timed) {
            if !which(&record) {
                self.timed.insert(key, record);
                continue;
            }
            self.leave_line(&record);
            if let Some(machine) = &mut record.machine {
                machine.give_up(now, failure.clone());
            }
            self.runnable.push_back(record);
        }
        ended
    }

    /// The lanes of all pushes that have left the line of their lane, and are not being worked on.
    #[cfg(test)]
    pub(super) fn started_lanes(&self) -> Vec<Lane> {
        self.runnable
            .iter()
            .chain(self.timed.values())
            .map(Record::lane)
            .collect()
    }

    /// Whether any push waits for a moment.
    #[cfg(test)]
    pub(super) fn waits(&self) -> bool {
        !self.timed.is_empty()
    }

    /// Whether something waits, and all that waits does so for room in the staging slab.
    #[cfg(test)]
    pub(super) fn waits_for_room_only(&self) -> bool {
        self.runnable.is_empty() && self.waits() && self.for_room.len() == self.timed.len()
    }
}
