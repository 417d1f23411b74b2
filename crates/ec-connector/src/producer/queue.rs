//! Pushes that wait: for a thread, for a moment, or for another push of the same content.

use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::push::Ticket;
use super::{Item, Push, PushError, PushId, PushReport};
use crate::code::ErrorCode;
use crate::control::ControlAddress;
use crate::moment::Moment;
use crate::name::{MmHash, TransferId};
use crate::push::{
    ContentLanes, Delivery, IdPolicy, PushConfig, PushFailure, PushMachine, PushStep,
};
use crate::random_ids::IdSource;
use crate::reservation::ReserveRequest;
use crate::staging::{Source, Staged};
use crate::tensor::TensorSpec;

/// One push, owned by whoever works on it.
pub(super) struct Record {
    pub(super) to: ControlAddress,
    pub(super) mm_hash: MmHash,
    pub(super) tensor: TensorSpec,
    /// Taken when it is staged.
    pub(super) source: Option<Source>,
    pub(super) staged: Option<Staged>,
    /// Present once a thread has begun to work on the push.
    pub(super) machine: Option<PushMachine>,
    /// When the first reserve was sent.
    pub(super) first_reserve: Option<Instant>,
    pub(super) wire_bytes: u64,
    /// What went wrong on this side, for the report.
    pub(super) error: Option<PushError>,
    first_id: TransferId,
    policy: IdPolicy,
    ending: Ticket,
}

impl Record {
    pub(super) fn new(item: Item, ids: &IdSource) -> (Self, Push) {
        let (first_id, policy) = match item.id {
            PushId::Given(id) => (id, IdPolicy::Given),
            PushId::Fresh => (ids.transfer_id(), IdPolicy::Fresh),
        };
        let (push, ending) = Push::with_ticket(first_id.clone());
        let record = Self {
            to: item.to,
            mm_hash: item.mm_hash,
            tensor: item.tensor,
            source: Some(item.source),
            staged: None,
            machine: None,
            first_reserve: None,
            wire_bytes: 0,
            error: None,
            first_id,
            policy,
            ending,
        };
        (record, push)
    }

    /// What can be said against the item before the consumer is asked.
    fn fault(&self) -> Option<PushError> {
        let source_bytes = self.source.as_ref().and_then(Source::len_bytes);
        let tensor_bytes = self.tensor.len_bytes();
        (source_bytes != Some(tensor_bytes)).then_some(PushError::Length {
            source_bytes: source_bytes.unwrap_or(0),
            tensor_bytes,
        })
    }

    pub(super) fn request(&self, transfer_id: TransferId) -> ReserveRequest {
        ReserveRequest {
            transfer_id,
            mm_hash: self.mm_hash.clone(),
            tensor: self.tensor.clone(),
        }
    }

    pub(super) fn lane(&self) -> Lane {
        (self.to.clone(), self.mm_hash.clone())
    }
}

pub(super) type Lane = (ControlAddress, MmHash);

/// All pushes that no thread works on, and the count of those that have not ended.
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

#[derive(Default)]
struct State {
    runnable: VecDeque<Record>,
    /// By moment, then by order of arrival.
    timed: BTreeMap<(Moment, u64), Record>,
    lanes: ContentLanes<Lane, Record>,
    serial: u64,
    open: usize,
    closing: bool,
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

    /// The instant of a moment on this queue's clock.
    fn instant(&self, at: Moment) -> Instant {
        self.epoch + Duration::from_millis(at.as_millis())
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
            self.report_all(vec![(record, Err(error))]);
        } else if let Some(record) = state.lanes.enter(record.lane(), record) {
            state.runnable.push_back(record);
            self.work.notify_one();
        }
    }

    /// Starts the push's record, and its time, unless it has begun.
    pub(super) fn machine(&self, record: &mut Record) -> PushMachine {
        record.machine.take().unwrap_or_else(|| {
            PushMachine::new(
                record.first_id.clone(),
                record.policy,
                record.tensor.len_bytes(),
                self.config,
                self.now(),
            )
        })
    }

    /// The next push to work on; nothing once the producer has closed and all pushes have ended or are being
    /// worked on.
    pub(super) fn next(&self) -> Option<Record> {
        let mut state = self.lock();
        loop {
            if let Some(record) = state.runnable.pop_front() {
                return Some(record);
            }
            if state.closing && state.timed.is_empty() {
                return None;
            }
            let Some((&(at, _), _)) = state.timed.first_key_value() else {
                state = self
                    .work
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let due = self.instant(at);
            let now = Instant::now();
            if due <= now {
                return state.timed.pop_first().map(|(_, record)| record);
            }
            state = self
                .work
                .wait_timeout(state, due - now)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Puts a push away until `at`.
    pub(super) fn wait_until(&self, at: Moment, mut record: Record) {
        let mut state = self.lock();
        if state.closing {
            if let Some(machine) = &mut record.machine {
                let now = self.now();
                machine.give_up(now, PushFailure::Closed);
                debug_assert!(
                    !matches!(
                        machine.clone().poll(now, || record.first_id.clone()),
                        PushStep::WaitUntil(_) | PushStep::WaitForRoom(_)
                    ),
                    "a push that was given up waits, and would be polled again and again"
                );
            }
            state.runnable.push_back(record);
        } else {
            let serial = state.serial;
            state.serial += 1;
            state.timed.insert((at, serial), record);
        }
        // A thread that sleeps towards a later moment has to look again.
        self.work.notify_one();
    }

    /// Reports how a push ended, and lets the next one of its content start.
    ///
    /// If the consumer did not answer, or is shutting down, whatever else waits for it ends as well.
    pub(super) fn end(&self, record: Record, result: Result<Delivery, PushError>) {
        let gone = match &result {
            Err(error @ PushError::Failed(failure)) if error.is_unreachable() => {
                Some(failure.clone())
            }
            Err(PushError::Failed(
                failure @ PushFailure::Refused {
                    code: Some(ErrorCode::ShuttingDown),
                    ..
                },
            )) => Some(failure.clone()),
            _ => None,
        };
        let mut ended = vec![(record, result)];
        {
            let mut state = self.lock();
            let (record, _) = &ended[0];
            state.leave(&record.lane());
            if let Some(failure) = gone {
                let to = record.to.clone();
                let given_up = state.give_up(self.now(), &failure, |record| record.to == to);
                ended.extend(
                    given_up
                        .into_iter()
                        .map(|record| (record, Err(failure.clone().into()))),
                );
            }
        }
        self.work.notify_all();
        self.report_all(ended);
    }

    /// Reports pushes that have ended, then gives their room back: whoever gets it finds them ended.
    fn report_all(&self, ended: Vec<(Record, Result<Delivery, PushError>)>) {
        let count = ended.len();
        for (record, result) in ended {
            if catch_unwind(AssertUnwindSafe(|| report(record, result))).is_err() {
                tracing::error!(
                    "whoever waited for a push panicked when it was told that it has ended"
                );
            }
        }
        self.lock().open -= count;
        self.room.notify_all();
    }

    /// The thread that worked on the push in this lane has panicked: the push has ended, unreported.
    pub(super) fn lose(&self, lane: &Lane) {
        let mut state = self.lock();
        state.leave(lane);
        state.open -= 1;
        drop(state);
        self.work.notify_all();
        self.room.notify_all();
    }

    /// Ends what only waits, and makes the threads stop when nothing is left.
    pub(super) fn close(&self) {
        let ended = {
            let mut state = self.lock();
            state.closing = true;
            state.give_up(self.now(), &PushFailure::Closed, |_| true)
        };
        self.work.notify_all();
        self.report_all(
            ended
                .into_iter()
                .map(|record| (record, Err(PushFailure::Closed.into())))
                .collect(),
        );
    }
}

impl State {
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
            if let Some(record) = self.lanes.enter(record.lane(), record) {
                self.runnable.push_back(record);
            }
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
        for (at, mut record) in std::mem::take(&mut self.timed) {
            if !which(&record) {
                self.timed.insert(at, record);
                continue;
            }
            if let Some(machine) = &mut record.machine {
                machine.give_up(now, failure.clone());
            }
            self.runnable.push_back(record);
        }
        ended
    }
}

fn report(record: Record, result: Result<Delivery, PushError>) {
    let transfer_id = match &record.machine {
        Some(machine) => machine.transfer_id().clone(),
        None => record.first_id,
    };
    let report = PushReport {
        transfer_id,
        result: result.map_err(|failure| record.error.unwrap_or(failure)),
        elapsed: record
            .first_reserve
            .map_or(Duration::ZERO, |first| first.elapsed()),
        wire_bytes: record.wire_bytes,
    };
    // Whoever is told that the push has ended may rely on its bytes being let go. What keeps them is the caller's,
    // whose defects must not make a push that has arrived a lost one.
    let let_go = || drop((record.source, record.staged));
    if catch_unwind(AssertUnwindSafe(let_go)).is_err() {
        tracing::error!("what kept the bytes of a push panicked when it was dropped");
    }
    record.ending.end(report);
}
