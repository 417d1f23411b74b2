//! What the threads of the user share with the reactor.

use std::any::Any;
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::ThreadId;

use slab_memory::Memory;

use super::caught::Caught;
use super::config::{TcpConfig, Waits};
use super::notices::NoticeQueue;
use super::peer::{PeerId, PeerLink};
use super::registry::{RegistrationId, Registry};
use crate::batch::{Remote, Ticket};
use crate::error::{ControlError, EngineError};
use crate::segment::Segment;
use crate::wire::control::FrameKind;
use crate::wire::data::Op;

/// Text of a control reply, or why there is none.
pub(super) type ControlResult = Result<Vec<u8>, ControlError>;

/// What the reactor is asked to do.
pub(super) enum Command {
    /// Run these jobs.
    Submit(Vec<Job>),
    /// Make one control exchange with whichever address answers first.
    Exchange {
        addresses: Vec<SocketAddr>,
        kind: FrameKind,
        text: Vec<u8>,
        waits: Waits,
        result: SyncSender<ControlResult>,
    },
    /// Cut off the peers' requests that touch this registration, then answer.
    CutOff(RegistrationId, SyncSender<()>),
    /// This peer is elsewhere now.
    Moved(PeerId),
    /// Nobody uses this peer any more.
    Forget(PeerId),
}

/// One task on its way through the engine.
pub(super) struct Job {
    pub(super) op: Op,
    pub(super) remote: u64,
    pub(super) range: Range<u64>,
    pub(super) memory: Caught<Arc<dyn Memory>>,
    pub(super) link: Arc<PeerLink>,
    /// It has been sent a second time already.
    pub(super) retried: bool,
    hold: Caught<Box<dyn Any + Send>>,
    /// Keeps the peer's connections.
    segment: Segment,
    permit: Permit,
    ticket: Ticket,
}

/// One of the tasks that may be under way.
struct Permit(Arc<Shared>);

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.tasks_open.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Job {
    /// Makes a job of a task that has been counted in `tasks_open`.
    pub(super) fn new(
        task: crate::batch::Task,
        link: Arc<PeerLink>,
        shared: &Arc<Shared>,
        ticket: Ticket,
    ) -> Self {
        Self {
            op: task.op,
            remote: task.remote,
            range: task.range,
            memory: Caught::new(task.memory),
            link,
            retried: false,
            hold: Caught::new(task.hold),
            segment: task.segment,
            permit: Permit(Arc::clone(shared)),
            ticket,
        }
    }

    pub(super) fn len(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// Ends the job. Nothing may touch its local range any more.
    pub(super) fn finish(self, remote: Remote) {
        let Self {
            hold,
            memory,
            segment,
            permit,
            ticket,
            ..
        } = self;
        drop(memory);
        drop(hold);
        drop(segment);
        drop(permit);
        ticket.settle(remote);
    }

    /// Ends the job, whose local range may be touched at any later time: memory and hold are never dropped.
    pub(super) fn finish_held(self, remote: Remote) {
        let Self {
            hold,
            memory,
            segment,
            permit,
            ticket,
            ..
        } = self;
        std::mem::forget((memory, hold));
        drop(segment);
        drop(permit);
        ticket.settle_held(remote);
    }
}

struct Commands {
    queue: VecDeque<Command>,
    closed: bool,
}

/// What the threads of the user share with the reactor.
pub(super) struct Shared {
    pub(super) config: TcpConfig,
    registry: Mutex<Registry<Arc<dyn Memory>>>,
    notices: Mutex<NoticeQueue>,
    commands: Mutex<Commands>,
    waker: mio::Waker,
    pub(super) tasks_open: AtomicUsize,
    pub(super) reactor_thread: OnceLock<ThreadId>,
    ended: Mutex<bool>,
    has_ended: Condvar,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code under these locks panics half way through a change.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub(super) fn new(
        config: TcpConfig,
        registry: Registry<Arc<dyn Memory>>,
        waker: mio::Waker,
    ) -> Self {
        let limits = &config.limits;
        let notices = NoticeQueue::new(limits.notices_max, limits.notices_bytes_max);
        Self {
            config,
            registry: Mutex::new(registry),
            notices: Mutex::new(notices),
            commands: Mutex::new(Commands {
                queue: VecDeque::new(),
                closed: false,
            }),
            waker,
            tasks_open: AtomicUsize::new(0),
            reactor_thread: OnceLock::new(),
            ended: Mutex::new(false),
            has_ended: Condvar::new(),
        }
    }

    /// Notes that the reactor touches nothing any more.
    pub(super) fn note_ended(&self) {
        *lock(&self.ended) = true;
        self.has_ended.notify_all();
    }

    fn wait_until_ended(&self) {
        let mut ended = lock(&self.ended);
        while !*ended {
            ended = self
                .has_ended
                .wait(ended)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    pub(super) fn registry(&self) -> MutexGuard<'_, Registry<Arc<dyn Memory>>> {
        lock(&self.registry)
    }

    pub(super) fn notices(&self) -> MutexGuard<'_, NoticeQueue> {
        lock(&self.notices)
    }

    /// Hands `command` to the reactor, or back if it has shut down.
    pub(super) fn command(&self, command: Command) -> Result<(), Command> {
        {
            let mut commands = lock(&self.commands);
            if commands.closed {
                return Err(command);
            }
            commands.queue.push_back(command);
            if commands.queue.len() > 1 {
                // Whoever put the first one in has woken the reactor.
                return Ok(());
            }
        }
        self.wake();
        Ok(())
    }

    fn wake(&self) {
        if let Err(error) = self.waker.wake() {
            // The event counter of the waker saturates only if the reactor is awake anyway.
            tracing::error!(%error, "cannot wake the reactor");
        }
    }

    /// Takes the commands that have come, and says whether none can come any more.
    pub(super) fn take_commands(&self) -> (VecDeque<Command>, bool) {
        let mut commands = lock(&self.commands);
        (std::mem::take(&mut commands.queue), commands.closed)
    }

    /// Refuses further commands and lets the reactor end once it has taken those that have come.
    pub(super) fn close(&self) {
        lock(&self.commands).closed = true;
        self.wake();
    }

    /// Says whether the calling thread is the reactor, which must not wait for itself.
    pub(super) fn on_reactor_thread(&self) -> bool {
        self.reactor_thread.get() == Some(&std::thread::current().id())
    }

    /// Makes a control exchange and waits for it.
    pub(super) fn exchange(
        &self,
        addresses: Vec<SocketAddr>,
        kind: FrameKind,
        text: Vec<u8>,
    ) -> ControlResult {
        self.exchange_within(addresses, kind, text, self.config.timeouts.waits())
    }

    /// As `exchange`, with waits other than the configured ones.
    pub(super) fn exchange_within(
        &self,
        addresses: Vec<SocketAddr>,
        kind: FrameKind,
        text: Vec<u8>,
        waits: Waits,
    ) -> ControlResult {
        if self.on_reactor_thread() {
            return Err(ControlError::OnEngineThread);
        }
        let (result, reply) = std::sync::mpsc::sync_channel(1);
        self.command(Command::Exchange {
            addresses,
            kind,
            text,
            waits,
            result,
        })
        .map_err(|_| ControlError::ShutDown)?;
        // The reactor answers within the waits, or drops the sender when it ends.
        reply.recv().unwrap_or(Err(ControlError::ShutDown))
    }

    /// Makes the engine forget a registration.
    pub(super) fn deregister(&self, address: u64, id: RegistrationId) -> Result<(), EngineError> {
        self.registry().remove(address, id);
        let (done, wait) = std::sync::mpsc::sync_channel(1);
        let asked = self.command(Command::CutOff(id, done));
        // The reactor itself must not wait for the reactor. Requests that it cuts off in a moment
        // hold the memory until then.
        if !self.on_reactor_thread() && (asked.is_err() || wait.recv().is_err()) {
            self.wait_until_ended();
        }
        Ok(())
    }
}
