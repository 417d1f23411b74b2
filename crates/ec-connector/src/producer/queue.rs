//! Pushes that wait: for a thread, for a moment, for room, or for another push of the same content.

mod state;
#[cfg(test)]
mod tests;

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use self::state::{Ended, Next, State};
use super::PushError;
use super::record::{Lane, Record};
use crate::moment::Moment;
use crate::push::{Delivery, PushConfig, PushFailure, PushMachine};
use crate::random_ids::IdSource;

/// All pushes that no thread works on, and the count of those that have not ended.
///
/// Nothing is dropped, reported or called under its lock, which may be taken from any thread, the engine's included.
pub(super) struct Queue {
    config: PushConfig,
    pushes_max: usize,
    ids: IdSource,
    epoch: Instant,
    state: Mutex<State>,
    /// Work for the threads.
    work: Condvar,
    /// Room for another push.
    room: Condvar,
}

impl Queue {
    pub(super) fn new(pushes_max: usize, config: PushConfig, ids: IdSource) -> Self {
        Self {
            config,
            pushes_max,
            ids,
            epoch: Instant::now(),
            state: Mutex::default(),
            work: Condvar::new(),
            room: Condvar::new(),
        }
    }

    pub(super) fn ids(&self) -> &IdSource {
        &self.ids
    }

    pub(super) fn now(&self) -> Moment {
        Moment::from_millis(u64::try_from(self.epoch.elapsed().as_millis()).unwrap_or(u64::MAX))
    }

    /// The instant of a moment on this queue's clock; nothing if the clock does not reach it.
    fn instant(&self, at: Moment) -> Option<Instant> {
        self.epoch
            .checked_add(Duration::from_millis(at.as_millis()))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing under the lock can leave the state half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes room for one push, waiting until there is some.
    pub(super) fn wait_for_room(&self) {
        let mut state = self.lock();
        while state.open >= self.pushes_max {
            state = self
                .room
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        state.open += 1;
    }

    /// Takes room for one push, if there is some.
    pub(super) fn try_room(&self) -> bool {
        let mut state = self.lock();
        let room = state.open < self.pushes_max;
        if room {
            state.open += 1;
        }
        room
    }

    /// Lets a push start, or wait for another one of the same content to the same consumer.
    pub(super) fn enter(&self, record: Record) {
        let fault = record.fault();
        let mut state = self.lock();
        if fault.is_some() || state.closing {
            drop(state);
            let error = fault.unwrap_or(PushFailure::Closed.into());
            return self.report_all(vec![(record, Err(error))]);
        }
        state.enter(record);
        drop(state);
        self.work.notify_one();
    }

    /// The push's machine, which starts now unless it has begun.
    pub(super) fn machine(&self, record: &mut Record) -> PushMachine {
        record.take_machine(self.config, self.now())
    }

    /// The next push to work on; nothing once the producer has closed and all pushes have ended or are being
    /// worked on.
    pub(super) fn next(&self) -> Option<Record> {
        let mut state = self.lock();
        loop {
            let at = match state.next(self.now()) {
                Next::Work(record) => return Some(record),
                Next::Over => return None,
                Next::Wait(at) => at.and_then(|at| self.instant(at)),
            };
            state = match at {
                None => self
                    .work
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner),
                Some(at) => {
                    self.work
                        .wait_timeout(state, at.saturating_duration_since(Instant::now()))
                        .unwrap_or_else(PoisonError::into_inner)
                        .0
                }
            };
        }
    }

    /// Puts a push away until `at`, or until there is room if it has a place in that line.
    pub(super) fn wait(&self, at: Moment, record: Record) {
        self.lock().wait(self.now(), at, record);
        // A thread that sleeps towards a later moment has to look again.
        self.work.notify_one();
    }

    /// To be noted in a record before it looks for room, so that room that comes meanwhile is not missed.
    pub(super) fn room_count(&self) -> u64 {
        self.lock().room_count()
    }

    /// There may be room in the staging slab for whoever is first in line.
    pub(super) fn room_came(&self) {
        self.lock().room_came();
        self.work.notify_one();
    }

    /// Reports how a push ended, and lets the next one of its content start.
    ///
    /// If the consumer did not answer, or takes nothing any more, whatever else waits for it ends as well.
    pub(super) fn end(&self, record: Record, result: Result<Delivery, PushError>) {
        let ended = self.lock().end(self.now(), record, result);
        self.work.notify_all();
        self.report_all(ended);
    }

    /// Reports pushes that have ended, then gives their room back: whoever gets it finds them ended.
    fn report_all(&self, ended: Vec<Ended>) {
        let count = ended.len();
        for (record, result) in ended {
            record.report(result);
        }
        self.lock().open -= count;
        self.room.notify_all();
    }

    /// The thread that worked on the push in this lane has panicked: the push has ended, and was reported as lost.
    pub(super) fn lose(&self, lane: &Lane) {
        self.lock().lose(lane);
        self.work.notify_all();
        self.room.notify_all();
    }

    /// Ends what only waits, and makes the threads stop when nothing is left.
    pub(super) fn close(&self) {
        let ended = self.lock().close(self.now());
        self.work.notify_all();
        self.report_all(ended);
    }
}
