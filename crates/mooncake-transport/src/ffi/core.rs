//! What the threads of one engine share.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::config::{FfiConfig, FfiLimits, FfiTimeouts};
use super::job::{Job, Promise};
use super::library::{Handle, LibraryBatch};
use super::memory::MemoryBook;
use super::queue::{PeerKey, Queue};
use crate::segment::EngineId;

/// Lock order: `memory`, then the handle's, which a thread holds while it calls the library. Otherwise none
/// of the locks is taken while another one is held, and nothing of the user's is dropped or woken under any.
pub(super) struct Core {
    pub(super) id: EngineId,
    pub(super) handle: Handle,
    pub(super) limits: FfiLimits,
    pub(super) timeouts: FfiTimeouts,
    /// Tasks that wait to be handed to the library; `work` tells the threads that do it.
    pub(super) queue: Mutex<Queue<Job>>,
    pub(super) work: Condvar,
    /// Tasks that were handed to it; `news` wakes the thread that watches them.
    pub(super) inbox: Mutex<Vec<Flight>>,
    pub(super) news: Condvar,
    /// Tasks that the library may have begun although it did not take them: kept until it has been destroyed. At
    /// most `FfiLimits::tasks_open_max`, for they stay counted.
    pub(super) stranded: Mutex<Vec<Job>>,
    /// What each submitting thread is handing over, so that its tasks settle in time although the call
    /// does not return.
    pub(super) desks: Vec<Mutex<Vec<Promise>>>,
    /// Registered memory. Held over the library's registration calls, which may wait for a store.
    pub(super) memory: Mutex<MemoryBook>,
    /// Tasks submitted and not let go of.
    pub(super) tasks_open: AtomicUsize,
    /// Calls on threads of their own.
    pub(super) calls_running: AtomicUsize,
    pub(super) submitters_running: AtomicUsize,
    pub(super) is_closing: AtomicBool,
    has_ended: Mutex<bool>,
    end: Condvar,
    /// Where a test wants the next panic.
    #[cfg(test)]
    pub(super) tripwire: Mutex<Option<&'static str>>,
}

/// Tasks in the library, as one of its batches. They go together with it.
pub(super) struct Flight {
    pub(super) batch: LibraryBatch,
    pub(super) peer: PeerKey,
    /// A job is taken out when the library has said how it ended, and not asked about any more.
    pub(super) jobs: Vec<Option<Job>>,
    /// Whether it was said that the library does not tell about a job.
    pub(super) has_complained: bool,
}

/// A peer as the library knows it.
pub(super) struct Peer {
    /// The library's number of the segment.
    pub(super) id: i32,
    pub(super) key: PeerKey,
    /// A task failed: the library knows a descriptor that may be out of date, and fetches none by itself.
    pub(super) is_stale: AtomicBool,
}

pub(super) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing under these locks can leave the data half changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Core {
    pub(super) fn new(handle: Handle, config: &FfiConfig, memory: MemoryBook) -> Self {
        Self {
            id: EngineId::new(),
            handle,
            limits: config.limits.clone(),
            timeouts: config.timeouts.clone(),
            queue: Mutex::new(Queue::new(config.limits.in_flight_per_peer)),
            work: Condvar::new(),
            inbox: Mutex::default(),
            news: Condvar::new(),
            stranded: Mutex::default(),
            desks: (0..config.limits.submit_threads)
                .map(|_| Mutex::default())
                .collect(),
            memory: Mutex::new(memory),
            tasks_open: AtomicUsize::new(0),
            calls_running: AtomicUsize::new(0),
            submitters_running: AtomicUsize::new(0),
            is_closing: AtomicBool::new(false),
            has_ended: Mutex::new(false),
            end: Condvar::new(),
            #[cfg(test)]
            tripwire: Mutex::default(),
        }
    }

    /// Panics, once, if a test wants that here.
    #[cfg(test)]
    pub(super) fn trip(&self, place: &'static str) {
        let is_meant = locked(&self.tripwire)
            .take_if(|wanted| *wanted == place)
            .is_some();
        assert!(!is_meant, "a panic of the test in {place}");
    }

    /// Wakes the thread that watches.
    pub(super) fn wake_watcher(&self) {
        // Under the lock, so that it cannot be just about to wait.
        let _inbox = locked(&self.inbox);
        self.news.notify_one();
    }

    /// Tells every thread to end.
    pub(super) fn close(&self) {
        self.is_closing.store(true, Ordering::SeqCst);
        // Those who wait look at the flag under the lock.
        drop(locked(&self.queue));
        self.work.notify_all();
        self.wake_watcher();
    }

    pub(super) fn is_closing(&self) -> bool {
        self.is_closing.load(Ordering::SeqCst)
    }

    pub(super) fn note_ended(&self) {
        *locked(&self.has_ended) = true;
        self.end.notify_all();
    }

    /// Waits until the library's engine has been destroyed.
    pub(super) fn wait_ended(&self, deadline: Option<Instant>) -> bool {
        let mut has_ended = locked(&self.has_ended);
        while !*has_ended {
            has_ended = match deadline {
                None => self
                    .end
                    .wait(has_ended)
                    .unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return false;
                    }
                    self.end
                        .wait_timeout(has_ended, left)
                        .unwrap_or_else(PoisonError::into_inner)
                        .0
                }
            };
        }
        true
    }
}
