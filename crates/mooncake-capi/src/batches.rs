//! Batches by their ids, and what is known about each of their tasks.
//!
//! A batch belongs to the process, as in the header's first implementation: any live engine may poll and
//! free it. Only its own engine may submit into it, for the batch is gone when that one is.

use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use mooncake_sys as sys;
use mooncake_transport::Segment;

use crate::engines::EngineKey;

/// Batches allocated at a time.
const BATCHES_MAX: usize = 1 << 20;
/// Requests that a batch may be allocated for.
const CAPACITY_MAX: usize = 1 << 26;

/// A message to send when all of a batch is done.
pub(crate) struct Message {
    pub(crate) segment: Segment,
    pub(crate) name: String,
    pub(crate) text: String,
}

/// A batch in the table. What has to be known without waiting for a call on the batch is outside its lock.
struct Entry {
    owner: EngineKey,
    batch: Mutex<Batch>,
}

pub(crate) struct Batch {
    capacity: usize,
    tasks: Vec<Task>,
    /// Tasks not seen in a final state.
    unseen: usize,
    /// Tasks before this one were seen done.
    done_until: usize,
    message: Option<Message>,
    is_freed: bool,
}

struct Task {
    state: State,
    is_seen: bool,
    len: u64,
}

/// What a submitted task is.
pub(crate) enum State {
    Running(mooncake_transport::Batch),
    Completed,
    Failed,
}

type Table = Mutex<HashMap<u64, Arc<Entry>>>;

/// The process's batches. None of them is locked meanwhile: a call on one may wait for a peer.
fn table() -> MutexGuard<'static, HashMap<u64, Arc<Entry>>> {
    static TABLE: OnceLock<Table> = OnceLock::new();
    TABLE
        .get_or_init(Table::default)
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
}

/// Makes a batch of an engine.
pub(crate) fn allocate(owner: EngineKey, capacity: usize) -> sys::BatchId {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let mut table = table();
    if capacity > CAPACITY_MAX || table.len() >= BATCHES_MAX {
        return sys::INVALID_BATCH;
    }
    let id = 1 + COUNT.fetch_add(1, Ordering::Relaxed);
    let batch = Batch {
        capacity,
        tasks: Vec::new(),
        unseen: 0,
        done_until: 0,
        message: None,
        is_freed: false,
    };
    let batch = Mutex::new(batch);
    table.insert(id, Arc::new(Entry { owner, batch }));
    id
}

/// Calls `act` with the batch, alone; none if the id is of no batch.
pub(crate) fn with<T>(id: sys::BatchId, act: impl FnOnce(&mut Batch) -> T) -> Option<T> {
    let entry = Arc::clone(table().get(&id)?);
    act_on(&entry, act)
}

/// As [`with`], and none if the batch is of another engine than `owner`.
pub(crate) fn with_own<T>(
    owner: EngineKey,
    id: sys::BatchId,
    act: impl FnOnce(&mut Batch) -> T,
) -> Option<T> {
    let entry = Arc::clone(table().get(&id)?);
    if entry.owner != owner {
        return None;
    }
    act_on(&entry, act)
}

fn act_on<T>(entry: &Entry, act: impl FnOnce(&mut Batch) -> T) -> Option<T> {
    let mut batch = entry.batch.lock().unwrap_or_else(PoisonError::into_inner);
    (!batch.is_freed).then(|| act(&mut batch))
}

/// Frees a batch all of whose tasks were seen in a final state.
pub(crate) fn free(id: sys::BatchId) -> c_int {
    let freed = with(id, |batch| {
        if batch.unseen > 0 {
            return sys::STATUS_BATCH_BUSY;
        }
        batch.is_freed = true;
        sys::STATUS_OK
    });
    match freed {
        None => sys::STATUS_INVALID_ARGUMENT,
        Some(code) => {
            if code == sys::STATUS_OK {
                table().remove(&id);
            }
            code
        }
    }
}

/// Drops the batches of an engine that is gone.
pub(crate) fn drop_of(owner: EngineKey) {
    let gone: Vec<_> = {
        let mut table = table();
        let ids: Vec<u64> = table
            .iter()
            .filter(|(_, entry)| entry.owner == owner)
            .map(|(id, _)| *id)
            .collect();
        ids.iter().filter_map(|id| table.remove(id)).collect()
    };
    drop(gone);
}

impl Batch {
    /// Says whether there is room for `count` more tasks.
    pub(crate) fn has_room(&self, count: usize) -> bool {
        count <= self.capacity - self.tasks.len()
    }

    /// Adds a task; there was room.
    pub(crate) fn push(&mut self, state: State, len: u64) {
        self.tasks.push(Task {
            state,
            is_seen: false,
            len,
        });
        self.unseen += 1;
    }

    /// Sets the message to send when all tasks are done; it takes the place of one that is waiting.
    pub(crate) fn set_message(&mut self, message: Message) {
        self.message = Some(message);
    }

    /// Looks at a task; none if there is no such task. Hands out the message once every task is done.
    ///
    /// A look that finds the task done looks at the others too, in order, up to the first that failed or is
    /// not done: programs rely on it when they poll the last task only.
    pub(crate) fn look(&mut self, index: usize) -> Option<(sys::TransferStatus, Option<Message>)> {
        let state = self.see(index)?;
        if state == sys::STATE_COMPLETED {
            while self.done_until < self.tasks.len()
                && self.see(self.done_until) == Some(sys::STATE_COMPLETED)
            {
                self.done_until += 1;
            }
        }
        if state == sys::STATE_FAILED {
            self.message = None;
        }
        let all_done = self.done_until == self.tasks.len();
        let message = all_done.then(|| self.message.take()).flatten();
        let moved = match state {
            sys::STATE_COMPLETED => self.tasks[index].len,
            _ => 0,
        };
        let status = sys::TransferStatus {
            status: state,
            transferred_bytes: moved,
        };
        Some((status, message))
    }

    /// The state of a task, which counts as seen if it is a final one.
    fn see(&mut self, index: usize) -> Option<c_int> {
        let task = self.tasks.get_mut(index)?;
        if let State::Running(batch) = &task.state {
            let report = batch.poll();
            match report.map(|report| report.is_applied()) {
                None => return Some(sys::STATE_WAITING),
                Some(true) => task.state = State::Completed,
                Some(false) => task.state = State::Failed,
            }
        }
        if !task.is_seen {
            task.is_seen = true;
            self.unseen -= 1;
        }
        Some(match task.state {
            State::Completed => sys::STATE_COMPLETED,
            _ => sys::STATE_FAILED,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(states: Vec<State>) -> sys::BatchId {
        let id = allocate(EngineKey::next(), states.len());
        for state in states {
            with(id, |batch| batch.push(state, 7)).unwrap();
        }
        id
    }

    fn look(id: sys::BatchId, index: usize) -> Option<c_int> {
        with(id, |batch| {
            batch.look(index).map(|(status, _)| status.status)
        })
        .unwrap()
    }

    #[test]
    fn a_batch_is_busy_until_every_task_was_seen_in_a_final_state() {
        let id = batch(vec![State::Failed, State::Failed]);
        assert_eq!(free(id), sys::STATUS_BATCH_BUSY);
        assert_eq!(look(id, 1), Some(sys::STATE_FAILED));
        assert_eq!(free(id), sys::STATUS_BATCH_BUSY);
        assert_eq!(look(id, 0), Some(sys::STATE_FAILED));
        assert_eq!(look(id, 2), None);
        assert_eq!(free(id), sys::STATUS_OK);
        assert_eq!(free(id), sys::STATUS_INVALID_ARGUMENT);
        assert!(with(id, |_| ()).is_none());
    }

    #[test]
    fn a_look_at_a_done_task_sees_the_others_up_to_the_first_that_failed() {
        let id = batch(vec![State::Completed, State::Completed, State::Completed]);
        assert_eq!(look(id, 2), Some(sys::STATE_COMPLETED));
        assert_eq!(free(id), sys::STATUS_OK);

        let id = batch(vec![State::Failed, State::Completed, State::Completed]);
        assert_eq!(look(id, 2), Some(sys::STATE_COMPLETED));
        assert_eq!(free(id), sys::STATUS_BATCH_BUSY);
        assert_eq!(look(id, 1), Some(sys::STATE_COMPLETED));
        assert_eq!(free(id), sys::STATUS_OK);
    }

    #[test]
    fn a_running_task_is_waiting_and_settles_once() {
        let (running, mut tickets) = mooncake_transport::Batch::with_tickets(1);
        let id = batch(vec![State::Running(running)]);
        assert_eq!(look(id, 0), Some(sys::STATE_WAITING));
        assert_eq!(free(id), sys::STATUS_BATCH_BUSY);
        tickets
            .remove(0)
            .settle(mooncake_transport::Remote::Applied);
        let (status, _) = with(id, |batch| batch.look(0)).unwrap().unwrap();
        assert_eq!(
            (status.status, status.transferred_bytes),
            (sys::STATE_COMPLETED, 7)
        );
        assert_eq!(look(id, 0), Some(sys::STATE_COMPLETED));
        assert_eq!(free(id), sys::STATUS_OK);
    }

    #[test]
    fn capacities_are_bounded_and_kept() {
        let owner = EngineKey::next();
        assert_eq!(allocate(owner, usize::MAX), sys::INVALID_BATCH);
        let id = allocate(owner, 2);
        with(id, |batch| {
            assert!(batch.has_room(2) && !batch.has_room(3));
            batch.push(State::Completed, 0);
            assert!(batch.has_room(1) && !batch.has_room(2));
            assert!(!batch.has_room(usize::MAX));
        })
        .unwrap();
        drop_of(owner);
        assert!(with(id, |_| ()).is_none());
    }

    #[test]
    fn a_call_that_waits_on_one_batch_holds_up_neither_others_nor_the_end_of_an_engine() {
        let (owner, other) = (EngineKey::next(), EngineKey::next());
        let (busy, idle) = (allocate(owner, 1), allocate(other, 1));
        let (entered, has_entered) = std::sync::mpsc::channel();
        let (release, is_released) = std::sync::mpsc::channel::<()>();
        let stalled = std::thread::spawn(move || {
            with(busy, |_| {
                entered.send(()).unwrap();
                // Ends with the sender, whichever way the test goes.
                let _ = is_released.recv();
            })
        });
        has_entered.recv().unwrap();
        let (done, is_done) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            drop_of(other);
            let gone = with(idle, |_| ()).is_none();
            let next = allocate(other, 1);
            let is_there = with(next, |_| ()).is_some();
            drop_of(owner);
            let _ = done.send(gone && is_there);
        });
        let outcome = is_done.recv_timeout(std::time::Duration::from_secs(20));
        drop(release);
        assert_eq!(outcome, Ok(true));
        assert!(stalled.join().unwrap().is_some());
        assert!(with(busy, |_| ()).is_none());
    }

    #[test]
    fn only_its_own_engine_submits_into_a_batch() {
        let (owner, other) = (EngineKey::next(), EngineKey::next());
        let id = allocate(owner, 1);
        assert!(with_own(other, id, |_| ()).is_none());
        assert!(with_own(owner, id, |_| ()).is_some());
        assert_eq!(free(id), sys::STATUS_OK);
        assert!(with_own(owner, id, |_| ()).is_none());
    }
}
