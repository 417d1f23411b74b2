//! The native engine over TCP: initiator and target, descriptors exchanged peer to peer.
//!
//! Peers that offer version 2 of the data protocol are spoken to in that, others in version 1. A write is
//! applied in either once the peer has stored it: version 2 says so, in version 1 the answer to a read
//! of one byte, sent behind the write on the same connection, does.
//!
//! One thread drives every connection. Memory is read and written by the kernel in place.

mod caught;
mod config;
mod control;
mod exchange;
mod local;
mod named;
mod notices;
mod peer;
mod queue;
mod reactor;
mod registry;
mod shared;
mod socket;
mod table;
mod target;
mod timer;

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use slab_memory::Memory;

pub(crate) use self::config::Waits;
pub use self::config::{Subnet, SubnetError, TcpConfig, TcpLimits, TcpTimeouts};
pub(crate) use self::named::Found;
use self::peer::PeerHandle;
use self::reactor::{Reactor, WAKER};
use self::registry::Registry;
use self::shared::{Command, Job, Shared};
use crate::batch::{Batch, Remote, Task};
use crate::engine::{Engine, Notices};
use crate::error::{EngineError, IoFailure, Listener, Refused};
use crate::registration::{Access, Registration};
use crate::segment::{EngineId, Segment, WeakSegment};
use crate::wire::control::FrameKind;
use crate::wire::descriptor::Descriptor;
use crate::wire::name::PeerName;

/// Addresses of one host that are tried in turn.
const ADDRESSES_MAX: usize = 16;

/// Connections that the kernel keeps until they are accepted.
const BACKLOG: i32 = 1_024;

/// A transfer engine over TCP.
///
/// It listens on loopback unless configured otherwise. Dropping it settles every task that is
/// under way, closes every connection and joins its thread; registrations and batches may outlive
/// it.
pub struct TcpEngine {
    id: EngineId,
    session: String,
    control_address: SocketAddr,
    data_address: SocketAddr,
    shared: Arc<Shared>,
    segments: Mutex<Segments>,
    next_peer: AtomicU64,
    thread: Option<JoinHandle<()>>,
}

/// Says that the engine's thread has ended, whichever way it does: others wait for that.
struct Ending(Arc<Shared>);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.note_ended();
    }
}

/// Segments in use, by the name they were opened by.
struct Segments {
    open: HashMap<String, WeakSegment>,
    /// Entries of given-up segments are swept once there are this many.
    sweep_at: usize,
}

impl TcpEngine {
    /// Binds both listeners, unless told not to listen, and starts the engine.
    ///
    /// # Errors
    /// [`EngineError::WildcardBind`], [`EngineError::WildcardAdvertised`],
    /// [`EngineError::AdvertisedHost`] and [`EngineError::Setting`] for a configuration that cannot work; [`EngineError::Bind`] if a port is in use or an
    /// address not this machine's; [`EngineError::Start`].
    pub fn start(config: TcpConfig) -> Result<Self, EngineError> {
        Self::start_named(config, None)
    }

    /// As [`start`](Self::start), with a descriptor of that name instead of the session's.
    pub(crate) fn start_named(
        config: TcpConfig,
        name: Option<String>,
    ) -> Result<Self, EngineError> {
        let host = config.check()?;
        let open = |listener, port| {
            config
                .listen
                .then(|| listen(listener, config.bind, port))
                .transpose()
        };
        let data = open(Listener::Data, config.data_port)?;
        let control = open(Listener::Control, config.control_port)?;
        let started = |error: std::io::Error| EngineError::Start {
            source: error.into(),
        };
        let address = |listener: &Option<mio::net::TcpListener>| match listener {
            Some(listener) => listener.local_addr().map_err(started),
            None => Ok(SocketAddr::new(config.bind, 0)),
        };
        let data_address = address(&data)?;
        let control_address = address(&control)?;
        let session = PeerName::new(&host, control_address.port())
            .map_err(|source| EngineError::AdvertisedHost {
                host: host.clone(),
                source,
            })?
            .to_string();
        let registry = Registry::new(
            name.unwrap_or_else(|| session.clone()),
            host,
            data_address.port(),
            config.limits.descriptor_bytes_max,
        );
        let poll = mio::Poll::new().map_err(started)?;
        let waker = mio::Waker::new(poll.registry(), WAKER).map_err(started)?;
        let shared = Arc::new(Shared::new(config, registry, waker));
        let mut reactor =
            Reactor::new(poll, Arc::clone(&shared), data, control).map_err(started)?;
        let thread_shared = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("mooncake-tcp".to_owned())
            .spawn(move || {
                let ending = Ending(thread_shared);
                let shared = &ending.0;
                // Set before anything could ask for it.
                let _ = shared.reactor_thread.set(std::thread::current().id());
                if catch_unwind(AssertUnwindSafe(|| reactor.run())).is_err() {
                    tracing::error!("the engine's thread panicked; the engine stops");
                    shared.close();
                }
                if catch_unwind(AssertUnwindSafe(|| drop(reactor))).is_err() {
                    tracing::error!("the engine's thread panicked while it stopped");
                }
                // What came in after the last look; dropping settles it as lost.
                drop(shared.take_commands());
            })
            .map_err(started)?;
        tracing::info!(session, %control_address, %data_address, "engine started");
        Ok(Self {
            id: EngineId::new(),
            session,
            control_address,
            data_address,
            shared,
            segments: Mutex::new(Segments {
                open: HashMap::new(),
                sweep_at: 64,
            }),
            next_peer: AtomicU64::new(0),
            thread: Some(thread),
        })
    }

    /// Returns the address of the control listener; port 0 if there is none.
    pub fn control_address(&self) -> SocketAddr {
        self.control_address
    }

    /// Returns the address of the data listener; port 0 if there is none.
    pub fn data_address(&self) -> SocketAddr {
        self.data_address
    }

    fn fetch_descriptor(
        &self,
        name: &str,
        control: &[SocketAddr],
    ) -> Result<Descriptor, EngineError> {
        let request = self.shared.registry().request_descriptor().encode();
        let text = self
            .shared
            .exchange(control.to_vec(), FrameKind::Metadata, request.into_bytes())
            .map_err(|source| EngineError::Control {
                peer: name.to_owned(),
                source,
            })?;
        self.check_descriptor(name, &text)
    }

    /// Checks a batch without changing anything.
    fn check_tasks(&self, tasks: &[Task]) -> Result<(), EngineError> {
        let max = self.shared.config.limits.batch_tasks_max;
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
            if task.segment.engine() != self.id || task.segment.peer::<PeerHandle>().is_none() {
                let name = task.segment.name().to_owned();
                return Err(EngineError::ForeignSegment { name });
            }
        }
        Ok(())
    }

    /// Counts `count` more tasks as under way, if there is room.
    fn admit_tasks(&self, count: usize) -> Result<(), EngineError> {
        let max = self.shared.config.limits.tasks_open_max;
        self.shared
            .tasks_open
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |open| {
                open.checked_add(count).filter(|sum| *sum <= max)
            })
            .map(drop)
            .map_err(|queued| EngineError::Full { queued, count, max })
    }

    fn segments(&self) -> std::sync::MutexGuard<'_, Segments> {
        self.segments.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the segment if it is open, and whether what is known about it is out of date.
    fn open_already(&self, name: &str) -> Option<(Segment, bool)> {
        let segment = self.segments().open.get(name)?.upgrade()?;
        let stale = segment
            .peer::<PeerHandle>()
            .is_some_and(|handle| handle.link.is_stale());
        Some((segment, stale))
    }
}

impl Engine for TcpEngine {
    fn session(&self) -> &str {
        &self.session
    }

    fn register(
        &self,
        memory: Arc<dyn Memory>,
        access: Access,
    ) -> Result<Registration, EngineError> {
        let (address, len) = (memory.address(), memory.len());
        if access == Access::Local {
            if len == 0 {
                return Err(EngineError::UnusableMemory { address, len });
            }
            return Ok(Registration::new(memory, access, Box::new(|| Ok(()))));
        }
        if !self.shared.config.listen {
            return Err(EngineError::NotListening);
        }
        let id = self
            .shared
            .registry()
            .insert(address, len, access, Arc::clone(&memory))?;
        let shared = Arc::clone(&self.shared);
        let deregister = Box::new(move || shared.deregister(address, id));
        Ok(Registration::new(memory, access, deregister))
    }

    fn open_segment(&self, name: &str) -> Result<Segment, EngineError> {
        let name = name.trim_start_matches('/');
        let known = match self.open_already(name) {
            Some((segment, false)) => return Ok(segment),
            Some((segment, true)) => Some(segment),
            None => None,
        };
        let control = resolve(&parse(name)?)?;
        let descriptor = self.fetch_descriptor(name, &control)?;
        Ok(self.open_at(name, known, control, descriptor))
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
        let mut jobs = Vec::with_capacity(count);
        for (task, ticket) in tasks.into_iter().zip(tickets) {
            // Checked above: the segment is ours.
            let link = task
                .segment
                .peer::<PeerHandle>()
                .map(|handle| Arc::clone(&handle.link));
            let Some(link) = link else { continue };
            let job = Job::new(task, link, &self.shared, ticket);
            if job.len() == 0 {
                // Real targets refuse empty requests, so these never reach the wire.
                job.finish(Remote::Applied);
            } else {
                jobs.push(job);
            }
        }
        if !jobs.is_empty()
            && let Err(Command::Submit(jobs)) = self.shared.command(Command::Submit(jobs))
        {
            // Only when the reactor died by itself: the engine cannot be dropped meanwhile.
            let reason = crate::batch::Reason::ShutDown;
            for job in jobs {
                job.finish(Remote::Ended(reason.clone()));
            }
        }
        Ok(batch)
    }

    fn notify(&self, segment: &Segment, name: &str, message: &str) -> Result<(), EngineError> {
        let link = match segment.peer::<PeerHandle>() {
            Some(handle) if segment.engine() == self.id => &handle.link,
            _ => {
                return Err(EngineError::ForeignSegment {
                    name: segment.name().to_owned(),
                });
            }
        };
        // Real peers send to the name in the descriptor; some descriptors have none.
        let addresses = if link.notify_name.is_empty() {
            link.control.clone()
        } else {
            resolve(&parse(&link.notify_name)?)?
        };
        self.notify_addresses(addresses, &link.name, name, message)
    }

    fn take_notices(&self) -> Result<Notices, EngineError> {
        Ok(self.shared.notices().take())
    }

    fn probe(&self, name: &str) -> Result<(), EngineError> {
        self.probe_addresses(resolve(&parse(name)?)?, name, self.control_waits())
    }
}

impl Drop for TcpEngine {
    fn drop(&mut self) {
        self.shared.close();
        if let Some(thread) = self.thread.take()
            && !self.shared.on_reactor_thread()
            && thread.join().is_err()
        {
            tracing::error!("the engine's thread panicked");
        }
    }
}

impl std::fmt::Debug for TcpEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TcpEngine")
            .field("session", &self.session)
            .field("data_address", &self.data_address)
            .finish_non_exhaustive()
    }
}

fn listen(
    listener: Listener,
    bind: IpAddr,
    port: Option<u16>,
) -> Result<mio::net::TcpListener, EngineError> {
    let address = SocketAddr::new(bind, port.unwrap_or(0));
    let open = || -> std::io::Result<mio::net::TcpListener> {
        let domain = socket2::Domain::for_address(address);
        let socket = socket2::Socket::new(domain, socket2::Type::STREAM, None)?;
        if address.is_ipv6() {
            // So that a wildcard address serves IPv4 peers too.
            socket.set_only_v6(false)?;
        }
        // The port must be usable again right after a restart, which takes the option on both the
        // old and the new socket. With it set, the kernel would pick a free port less strictly.
        socket.set_reuse_address(port.is_some())?;
        socket.set_nonblocking(true)?;
        socket.bind(&address.into())?;
        socket.set_reuse_address(true)?;
        socket.listen(BACKLOG)?;
        Ok(mio::net::TcpListener::from_std(socket.into()))
    };
    open().map_err(|error| EngineError::Bind {
        listener,
        address,
        source: error.into(),
    })
}

fn parse(name: &str) -> Result<PeerName, EngineError> {
    PeerName::parse(name).map_err(|source| EngineError::PeerName {
        name: name.to_owned(),
        source,
    })
}

fn resolve(name: &PeerName) -> Result<Vec<SocketAddr>, EngineError> {
    resolve_host(name.host(), name.port()).map_err(|source| EngineError::Resolve {
        host: name.host().to_owned(),
        source,
    })
}

/// Resolves a host, on the calling thread.
fn resolve_host(host: &str, port: u16) -> Result<Vec<SocketAddr>, IoFailure> {
    let bare = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'))
        .unwrap_or(host);
    let addresses: Vec<SocketAddr> = (bare, port).to_socket_addrs()?.collect();
    if addresses.is_empty() {
        return Err(std::io::Error::from(std::io::ErrorKind::NotFound).into());
    }
    Ok(at_most(ADDRESSES_MAX, addresses))
}

/// Keeps `max` of the addresses, the same ones in whichever order a resolver lists them.
fn at_most(max: usize, mut addresses: Vec<SocketAddr>) -> Vec<SocketAddr> {
    if addresses.len() > max {
        let mut kept = addresses.clone();
        kept.sort_unstable();
        kept.truncate(max);
        addresses.retain(|address| kept.contains(address));
    }
    addresses
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_many_addresses_the_same_are_kept_in_the_order_of_the_resolver() {
        let of = |ports: [u16; 4]| ports.map(|port| SocketAddr::from(([10, 0, 0, 1], port)));
        let kept = |ports| at_most(2, of(ports).to_vec());
        assert_eq!(kept([4, 2, 3, 1]), of([2, 1, 0, 0])[..2]);
        assert_eq!(kept([1, 3, 2, 4]), of([1, 2, 0, 0])[..2]);
        assert_eq!(at_most(4, of([4, 2, 3, 1]).to_vec()), of([4, 2, 3, 1]));
    }
}
