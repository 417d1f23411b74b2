//! An engine for unit tests: it moves no bytes over a network, and settles each write as it was told to.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use mooncake_transport::{
    Access, Batch, Engine, EngineError, EngineId, Notices, Reason, Refused, Registration, Remote,
    Segment, Task,
};
use slab_memory::Memory;

/// What becomes of a write that does not succeed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    Ended,
    /// The connection is closed without an answer.
    Closed,
    Unknown,
    /// The engine panics.
    Panic,
}

pub(crate) struct FakeEngine {
    id: EngineId,
    /// Memory that writes go to, found by address.
    peers: Mutex<Vec<Arc<dyn Memory>>>,
    fates: Mutex<VecDeque<Fate>>,
    registered: Arc<AtomicUsize>,
    refuse: AtomicBool,
    registering: Mutex<Option<Arc<dyn Fn() + Send + Sync>>>,
    pub(crate) writes: AtomicUsize,
}

impl FakeEngine {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            id: EngineId::new(),
            peers: Mutex::default(),
            fates: Mutex::default(),
            registered: Arc::default(),
            refuse: AtomicBool::new(false),
            registering: Mutex::default(),
            writes: AtomicUsize::new(0),
        })
    }

    /// Registrations that exist.
    pub(crate) fn registered(&self) -> usize {
        self.registered.load(Ordering::SeqCst)
    }

    pub(crate) fn refuse_registrations(&self, refuse: bool) {
        self.refuse.store(refuse, Ordering::SeqCst);
    }

    /// What happens while memory is being registered.
    pub(crate) fn when_registering(&self, what: impl Fn() + Send + Sync + 'static) {
        *self.registering.lock().unwrap() = Some(Arc::new(what));
    }

    /// What becomes of the next writes; afterwards they succeed.
    pub(crate) fn next_writes(&self, fates: &[Fate]) {
        self.fates.lock().unwrap().extend(fates);
    }

    fn write(&self, task: &Task) -> Remote {
        self.writes.fetch_add(1, Ordering::SeqCst);
        // Taken out first: a panic must not poison the list.
        let fate = self.fates.lock().unwrap().pop_front();
        match fate {
            None => {}
            Some(Fate::Ended) => return Remote::Ended(Reason::Rejected),
            Some(Fate::Closed) => return Remote::Ended(Reason::Closed),
            Some(Fate::Panic) => panic!("told to"),
            Some(Fate::Unknown) => return Remote::Unknown(Reason::Stalled { timeout_ms: 1 }),
        }
        let mut bytes = vec![0; (task.range.end - task.range.start) as usize];
        task.memory.copy_out(task.range.start, &mut bytes).unwrap();
        let peers = self.peers.lock().unwrap();
        let target = peers.iter().find_map(|memory| {
            let offset = task.remote.checked_sub(memory.address())?;
            (offset + bytes.len() as u64 <= memory.len()).then_some((memory, offset))
        });
        match target {
            Some((memory, offset)) => {
                memory.copy_in(offset, &bytes).unwrap();
                Remote::Applied
            }
            None => Remote::Ended(Reason::Rejected),
        }
    }
}

impl Engine for FakeEngine {
    fn session(&self) -> &str {
        "fake:1"
    }

    fn register(
        &self,
        memory: Arc<dyn Memory>,
        access: Access,
    ) -> Result<Registration, EngineError> {
        let what = self.registering.lock().unwrap().clone();
        if let Some(what) = what {
            what();
        }
        if self.refuse.load(Ordering::SeqCst) {
            return Err(EngineError::ShutDown);
        }
        if access == Access::RemoteWrite {
            self.peers.lock().unwrap().push(Arc::clone(&memory));
        }
        self.registered.fetch_add(1, Ordering::SeqCst);
        let registered = Arc::clone(&self.registered);
        Ok(Registration::new(
            memory,
            access,
            Box::new(move || {
                registered.fetch_sub(1, Ordering::SeqCst);
                Ok(())
            }),
        ))
    }

    fn open_segment(&self, name: &str) -> Result<Segment, EngineError> {
        Ok(Segment::new(self.id, name.to_owned(), Box::new(())))
    }

    fn submit(&self, tasks: Vec<Task>) -> Result<Batch, Refused<Vec<Task>>> {
        let (batch, tickets) = Batch::with_tickets(tasks.len());
        for (task, ticket) in tasks.into_iter().zip(tickets) {
            let remote = self.write(&task);
            drop(task);
            ticket.settle(remote);
        }
        Ok(batch)
    }

    fn notify(&self, _: &Segment, _: &str, _: &str) -> Result<(), EngineError> {
        Err(EngineError::ShutDown)
    }

    fn take_notices(&self) -> Result<Notices, EngineError> {
        Ok(Notices::default())
    }

    fn probe(&self, _: &str) -> Result<(), EngineError> {
        Ok(())
    }
}
