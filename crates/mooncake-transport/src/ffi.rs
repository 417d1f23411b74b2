//! The real Mooncake engine, through its C interface, loaded at run time: for RDMA and GPU memory.
//!
//! The library ends the process on much that it is given wrongly, and leaves the rest to its caller. What the
//! wrapper does about it:
//!
//! - A task's memory and hold stay until the library has said that the task ended, or until its engine has
//!   been destroyed. A task that is late settles all the same, as [`Local::Held`](crate::Local::Held).
//! - Registered memory is kept until the engine has been destroyed: unregistering stops no request of a peer
//!   that is running. Memory that was unregistered may so be written for a while; do not use it for something
//!   else before [`FfiEngine::shut_down`] has returned.
//! - The library does not tell peers that may read from peers that may write: [`Access::RemoteRead`] is
//!   [`EngineError::Unsupported`], unless [`FfiConfig::danger_remote_read_lets_write`] says otherwise. Over RDMA local memory has to be registered as well.
//! - If the library refuses a call in a way that does not exclude that it has begun part of it (over TCP every code
//!   but 1, 2 and 8, over RDMA every code), the tasks of the call settle as [`Local::Held`](crate::Local::Held), and
//!   their memory and holds stay until the engine has been destroyed. They stay counted in the limits as well.
//!   Over RDMA a task whose local range does not lie inside one registered memory is not handed over.
//! - No call overlaps the one that destroys the engine, which takes up to 5 s and waits for calls that are
//!   running: it happens on a thread of the engine. Dropping an [`FfiEngine`] waits for nothing.
//! - Texts, addresses and lengths are checked before the library sees them, and so is a peer's descriptor, by asking
//!   for it first ([`FfiConfig::vet_peers`]).
//! - At most [`FfiLimits::in_flight_per_peer`] tasks of a peer are in the library at a time.
//! - Opening a segment, submitting and notifying, which may block, are done on threads of the engine. Registering and
//!   unregistering are not: they run on the caller's thread, one at a time, and wait as long as the library does,
//!   which with a store is without a bound of ours. Over RDMA submitting waits for them.
//!
//! What it cannot do: the library listens on every address of the machine, and any host that reaches its control
//! port can end the process with a malformed message, as can one that it dials and that says something else when it is
//! asked again, or anybody with access to the store. A failed task says neither why nor how
//! far it came ([`Reason::Undisclosed`]). There is no probe. An engine has to be made after the process forks.
//!
//! ```no_run
//! use mooncake_transport::Engine;
//! use mooncake_transport::ffi::{FfiConfig, FfiEngine, FfiLibrary};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // SAFETY: what MOONCAKE_LIBRARY names is Mooncake's library.
//! let library = unsafe { FfiLibrary::load() }?;
//! let engine = FfiEngine::start(&library, FfiConfig::new("10.0.0.1"))?;
//! println!("peers dial {}", engine.session());
//! # Ok(())
//! # }
//! ```

mod calls;
mod config;
mod core;
mod error;
#[cfg(test)]
mod fake;
mod job;
mod library;
mod memory;
mod queue;
mod submitter;
#[cfg(test)]
mod tests;
mod vet;
mod watcher;

use std::collections::HashMap;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use slab_memory::Memory;

use self::calls::call;
use self::config::text;
pub use self::config::{FfiConfig, FfiLimits, FfiTimeouts, Metadata, Transport};
use self::core::{Core, Peer, locked};
pub use self::error::{LibraryError, TextProblem};
use self::job::Job;
pub use self::library::FfiLibrary;
use self::library::Handle;
use self::memory::MemoryBook;
use self::queue::PeerKey;
use crate::batch::{Batch, Reason, Remote, Task};
use crate::engine::{Engine, Notices};
use crate::error::{EngineError, Refused};
use crate::registration::{Access, Registration};
use crate::segment::Segment;
use crate::wire::name::PeerName;

/// Segments open at a time: the library forgets none.
const SEGMENTS_MAX: usize = 65_536;
/// Longest name of a segment, in bytes.
const NAME_BYTES_MAX: usize = 1_024;
/// Longest text of a notification, in bytes: with JSON around it and escapes in it, the frame stays below what
/// peers read.
const MESSAGE_BYTES_MAX: usize = 128 << 10;

/// An engine of the Mooncake library.
///
/// Dropping it lets its threads end the library's engine and let go of memory, and waits for neither; see
/// [`shut_down`](FfiEngine::shut_down).
pub struct FfiEngine {
    core: Arc<Core>,
    session: String,
    is_p2p: bool,
    vet_peers: bool,
    transport: Transport,
    device_memory: bool,
    read_lets_write: bool,
    segments: Mutex<Segments>,
}

#[derive(Default)]
struct Segments {
    open: HashMap<String, Segment>,
    /// Names that lead to the same address share the bound on tasks in the library.
    keys: HashMap<Place, PeerKey>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Place {
    Address(SocketAddr),
    Name(String),
}

impl FfiEngine {
    /// Makes an engine of the library and installs its transport.
    ///
    /// Blocks for as long as the library takes, with a store for its timeouts. The library raises the process's limit
    /// of open files, writes a log to standard error and reads its own environment variables (`MC_…`).
    ///
    /// # Errors
    /// [`EngineError::Setting`] and [`EngineError::Library`] for a configuration that cannot work, and for what the
    /// library refuses; [`EngineError::Start`].
    pub fn start(library: &FfiLibrary, config: FfiConfig) -> Result<Self, EngineError> {
        let texts = config.check()?;
        let handle = Handle::create(library, &texts, &config.transport)?;
        let is_p2p = config.metadata == Metadata::P2p;
        let session = if is_p2p {
            let said = match handle.enter() {
                Ok(Some(entered)) => entered.host_and_port(),
                Ok(None) => return Err(EngineError::ShutDown),
                Err(error) => Err(error),
            };
            match said {
                Ok(said) => with_brackets(&said),
                Err(error) => {
                    handle.destroy();
                    return Err(error.into());
                }
            }
        } else {
            config.local_name.clone()
        };
        let book = MemoryBook::new(texts.host_location, config.device_memory());
        let core = Arc::new(Core::new(handle, &config, book));
        if let Err(error) = spawn_threads(&core) {
            // The watcher is spawned last, so that nobody else would end the engine.
            core.close();
            core.handle.destroy();
            return Err(EngineError::Start {
                source: error.into(),
            });
        }
        tracing::info!(session, library = %library.file().display(), "engine started");
        Ok(Self {
            core,
            session,
            is_p2p,
            vet_peers: config.vet_peers,
            device_memory: config.device_memory(),
            read_lets_write: config.danger_remote_read_lets_write,
            transport: config.transport,
            segments: Mutex::default(),
        })
    }

    /// Ends the engine and waits until that is done: every task has settled, memory and holds have been let go
    /// of, and nothing touches them any more. Takes about a second, up to five while a peer stalls, and as long as
    /// calls of the library that are running.
    ///
    /// False if `deadline` came first; the engine ends all the same. `None` waits without a limit.
    pub fn shut_down(self, deadline: Option<Instant>) -> bool {
        let core = Arc::clone(&self.core);
        drop(self);
        if core.handle.check_process().is_err() {
            return false;
        }
        core.wait_ended(deadline)
    }

    /// Checks a batch without changing anything.
    fn check_tasks(&self, tasks: &[Task]) -> Result<(), EngineError> {
        let max = self.core.limits.batch_tasks_max;
        if tasks.len() > max {
            return Err(EngineError::TooManyTasks {
                count: tasks.len(),
                max,
            });
        }
        for (index, task) in tasks.iter().enumerate() {
            let len = task.memory.len();
            let std::ops::Range { start, end } = task.range;
            if start > end || end > len {
                return Err(EngineError::OutOfBounds {
                    task: index,
                    start,
                    end,
                    len,
                });
            }
            if task.segment.engine() != self.core.id || task.segment.peer::<Arc<Peer>>().is_none() {
                let name = task.segment.name().to_owned();
                return Err(EngineError::ForeignSegment { name });
            }
            MemoryBook::check_reach(&*task.memory, self.device_memory)?;
        }
        self.check_open()
    }

    /// Checks that the engine has not ended, and that this is the process that made it.
    fn check_open(&self) -> Result<(), EngineError> {
        match self.core.handle.enter()? {
            Some(_) => Ok(()),
            None => Err(EngineError::ShutDown),
        }
    }

    /// Counts `count` more tasks as under way, if there is room.
    fn admit_tasks(&self, count: usize) -> Result<(), EngineError> {
        let max = self.core.limits.tasks_open_max;
        self.core
            .tasks_open
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |open| {
                open.checked_add(count).filter(|sum| *sum <= max)
            })
            .map(drop)
            .map_err(|queued| EngineError::Full { queued, count, max })
    }
}

impl Segments {
    /// Says whether a segment of that name may be added: the library forgets none.
    fn check_room(&self, name: &str) -> Result<(), LibraryError> {
        match self.open.contains_key(name) || self.open.len() < SEGMENTS_MAX {
            true => Ok(()),
            false => Err(LibraryError::TooManySegments { max: SEGMENTS_MAX }),
        }
    }

    /// The key of the peer at `place`. None is ever given back, so that their number is bounded as that of the
    /// segments is, and with it that of the queue's lines.
    fn key_of(&mut self, place: Place) -> Result<PeerKey, LibraryError> {
        if let Some(key) = self.keys.get(&place) {
            return Ok(*key);
        }
        if self.keys.len() >= SEGMENTS_MAX {
            return Err(LibraryError::TooManySegments { max: SEGMENTS_MAX });
        }
        let key = PeerKey(self.keys.len() as u64);
        self.keys.insert(place, key);
        Ok(key)
    }
}

/// Starts the threads that submit, then the one that watches and ends the engine.
fn spawn_threads(core: &Arc<Core>) -> std::io::Result<()> {
    for desk in 0..core.limits.submit_threads {
        let thread_core = Arc::clone(core);
        core.submitters_running.fetch_add(1, Ordering::SeqCst);
        let spawned = std::thread::Builder::new()
            .name("mooncake-submit".to_owned())
            .spawn(move || submitter::run(&thread_core, desk));
        if let Err(error) = spawned {
            core.submitters_running.fetch_sub(1, Ordering::SeqCst);
            return Err(error);
        }
    }
    let thread_core = Arc::clone(core);
    std::thread::Builder::new()
        .name("mooncake-watch".to_owned())
        .spawn(move || watcher::run(&thread_core))
        .map(drop)
}

/// The library says IPv6 addresses without brackets, and dials them with.
fn with_brackets(host_and_port: &str) -> String {
    match host_and_port.rsplit_once(':') {
        Some((host, port)) if host.contains(':') && !host.starts_with('[') => {
            format!("[{host}]:{port}")
        }
        _ => host_and_port.to_owned(),
    }
}

/// Where the peer is: the first address of its host.
fn place_of(name: &str) -> Place {
    let address = PeerName::parse(name)
        .ok()
        .and_then(|name| (name.host(), name.port()).to_socket_addrs().ok()?.next());
    address.map_or_else(|| Place::Name(name.to_owned()), Place::Address)
}

impl Engine for FfiEngine {
    fn session(&self) -> &str {
        &self.session
    }

    /// Registers memory. With [`Access::RemoteWrite`], and with [`Access::RemoteRead`] if that is allowed at all, peers may
    /// read and write it; over RDMA they may reach what is
    /// registered with [`Access::Local`] too, if the library does not heed what it is told.
    ///
    /// Blocks on the caller's thread for as long as the library takes, with a store for its timeouts and without a
    /// bound of ours: a call that was given up could not be undone. So does unregistering.
    fn register(
        &self,
        memory: Arc<dyn Memory>,
        access: Access,
    ) -> Result<Registration, EngineError> {
        let (address, len) = (memory.address(), memory.len());
        match access {
            Access::RemoteRead if !self.read_lets_write => {
                return Err(EngineError::Unsupported {
                    call: "registering with Access::RemoteRead",
                });
            }
            // The library moves any local memory over TCP.
            Access::Local if self.transport == Transport::Tcp => {
                if len == 0 {
                    return Err(EngineError::UnusableMemory { address, len });
                }
                MemoryBook::check_reach(&*memory, self.device_memory)?;
                return Ok(Registration::new(memory, access, Box::new(|| Ok(()))));
            }
            _ => {}
        }
        self.core.handle.check_process()?;
        {
            let mut book = locked(&self.core.memory);
            let entered = self.core.handle.enter()?.ok_or(EngineError::ShutDown)?;
            book.register(&entered, &memory, access)?;
        }
        let core = Arc::clone(&self.core);
        let deregister = Box::new(move || {
            core.handle.check_process()?;
            let mut book = locked(&core.memory);
            match core.handle.enter()? {
                Some(entered) => Ok(book.unregister(&entered, address)?),
                // The engine is being destroyed, and lets go of the memory afterwards.
                None => Ok(()),
            }
        });
        Ok(Registration::new(memory, access, deregister))
    }

    /// Opens a segment, once for each name. With P2P the peer's descriptor is looked at first, and one that would end the
    /// process is [`EngineError::Descriptor`]; a peer that does not answer is [`EngineError::Control`]. After a failed task the library fetches the peer's descriptor again,
    /// unless the name is not the one that the descriptor has.
    fn open_segment(&self, name: &str) -> Result<Segment, EngineError> {
        let name = name.trim_start_matches('/');
        let c_name = text("the name of the segment", name, NAME_BYTES_MAX)?;
        if self.is_p2p {
            PeerName::parse(name).map_err(|source| EngineError::PeerName {
                name: name.to_owned(),
                source,
            })?;
        }
        self.check_open()?;
        let known = {
            let segments = locked(&self.segments);
            let known = segments.open.get(name).cloned();
            segments.check_room(name)?;
            known
        };
        if let Some(segment) = &known
            && let Some(peer) = segment.peer::<Arc<Peer>>()
            && !peer.is_stale.load(Ordering::Relaxed)
        {
            return Ok(segment.clone());
        }
        let again = known.is_some();
        let is_p2p = self.is_p2p;
        let vet_peers = self.vet_peers && is_p2p;
        let rules = vet::Rules::of(&self.transport);
        let owned = name.to_owned();
        let (id, place) = call(&self.core, "openSegment", move |core| {
            if vet_peers {
                vet::vet(&owned, rules, core.timeouts.vet)?;
            }
            let place = match is_p2p {
                true => place_of(&owned),
                false => Place::Name(owned),
            };
            let entered = core.handle.enter()?.ok_or(EngineError::ShutDown)?;
            Ok((entered.open(&c_name, again)?, place))
        })?;
        let mut segments = locked(&self.segments);
        // It is the same number as before, unless the library was made to forget it.
        if let Some(segment) = segments.open.get(name)
            && let Some(peer) = segment.peer::<Arc<Peer>>()
            && peer.id == id
        {
            peer.is_stale.store(false, Ordering::Relaxed);
            return Ok(segment.clone());
        }
        // Other threads may have filled it meanwhile.
        segments.check_room(name)?;
        let peer = Peer {
            id,
            key: segments.key_of(place)?,
            is_stale: AtomicBool::new(false),
        };
        let segment = Segment::new(self.core.id, name.to_owned(), Box::new(Arc::new(peer)));
        let replaced = segments.open.insert(name.to_owned(), segment.clone());
        drop(segments);
        drop(replaced);
        Ok(segment)
    }

    fn submit(&self, tasks: Vec<Task>) -> Result<Batch, Refused<Vec<Task>>> {
        let count = tasks.len();
        if let Err(cause) = self
            .check_tasks(&tasks)
            .and_then(|()| self.admit_tasks(count))
        {
            return Err(Refused {
                value: tasks,
                cause,
            });
        }
        let (batch, tickets) = Batch::with_tickets(count);
        let mut over = Vec::new();
        let mut jobs = Vec::with_capacity(count);
        for (task, ticket) in tasks.into_iter().zip(tickets) {
            // Checked above: the segment is ours.
            let Some(peer) = task.segment.peer::<Arc<Peer>>().map(Arc::clone) else {
                continue;
            };
            let allowed = self
                .core
                .timeouts
                .task_max(task.range.end - task.range.start);
            let job = Job::new(task, Arc::clone(&peer), ticket, allowed);
            match job.request().len {
                0 => over.push((job, Remote::Applied)),
                _ => jobs.push((peer.key, job)),
            }
        }
        {
            let mut queue = locked(&self.core.queue);
            for (key, job) in jobs {
                if let Err(job) = queue.push(key, job) {
                    over.push((job, Remote::Ended(Reason::ShutDown)));
                }
            }
        }
        self.core.tasks_open.fetch_sub(over.len(), Ordering::SeqCst);
        self.core.work.notify_all();
        // It looks for tasks that are late from now on.
        self.core.wake_watcher();
        for (job, remote) in over {
            job.finish(remote);
        }
        Ok(batch)
    }

    fn notify(&self, segment: &Segment, name: &str, message: &str) -> Result<(), EngineError> {
        let peer = match segment.peer::<Arc<Peer>>() {
            Some(peer) if segment.engine() == self.core.id => peer,
            _ => {
                return Err(EngineError::ForeignSegment {
                    name: segment.name().to_owned(),
                });
            }
        };
        let id = peer.id;
        // Empty texts are fine here.
        let name = message_text("the name of the notification", name)?;
        let message = message_text("the notification", message)?;
        self.check_open()?;
        call(&self.core, "genNotifyInEngine", move |core| {
            let entered = core.handle.enter()?.ok_or(EngineError::ShutDown)?;
            Ok(entered.notify(id, &name, &message)?)
        })
    }

    /// Takes the notifications that have arrived. The library keeps any number of them until then.
    fn take_notices(&self) -> Result<Notices, EngineError> {
        let entered = self.core.handle.enter()?.ok_or(EngineError::ShutDown)?;
        Ok(Notices {
            notices: entered.take_notices()?,
            dropped: 0,
        })
    }

    /// Not there: the C interface has no such call.
    fn probe(&self, _name: &str) -> Result<(), EngineError> {
        Err(EngineError::Unsupported { call: "probe" })
    }
}

/// A text of a notification, which may be empty.
fn message_text(what: &'static str, message: &str) -> Result<std::ffi::CString, EngineError> {
    if message.is_empty() {
        return Ok(std::ffi::CString::default());
    }
    Ok(text(what, message, MESSAGE_BYTES_MAX)?)
}

impl Drop for FfiEngine {
    fn drop(&mut self) {
        // In a forked process there is nothing to end.
        if self.core.handle.check_process().is_ok() {
            self.core.close();
        }
    }
}

impl std::fmt::Debug for FfiEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FfiEngine")
            .field("session", &self.session)
            .field("transport", &self.transport)
            .finish_non_exhaustive()
    }
}
