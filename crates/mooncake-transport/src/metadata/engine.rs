//! The native engine under a name of its own in a metadata store.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use slab_memory::Memory;

use super::MetadataStore;
use super::error::{StoreError, ValueError};
use super::keeper::Keeper;
use super::key::Keys;
use super::publisher::{Holder, Publisher};
use super::value::RpcMeta;
use crate::batch::{Batch, Task};
use crate::engine::{Engine, Notices};
use crate::error::{ControlError, EngineError, Refused};
use crate::registration::{Access, Registration};
use crate::segment::Segment;
use crate::tcp::{Found, TcpConfig, TcpEngine, Waits};
use crate::wire::name::is_wildcard;

/// Shortest time between two looks at an entry.
const LOOK_EVERY_MIN: Duration = Duration::from_millis(10);

/// Under which name an engine is in a metadata store.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct StoreConfig {
    /// Name of the engine, by which peers open it; where it listens if `None`. Any text of up to 512
    /// bytes without control characters and slashes.
    pub name: Option<String>,
    /// Cluster id, which for real engines is `MC_METADATA_CLUSTER_ID`; empty for none. Engines find only
    /// those of their own cluster.
    pub cluster: String,
    /// How often the engine looks whether its entry is still in the store, and puts it back if not:
    /// after the store was restarted without its contents, or while it could not be reached. Each look is two short
    /// requests. Default 10 s; less than 10 ms counts as 10 ms; `None` for never, and then what could not be
    /// written is tried again only at the next registration or its end.
    pub look_every: Option<Duration>,
}

impl Default for StoreConfig {
    fn default() -> Self {
        Self {
            name: None,
            cluster: String::new(),
            look_every: Some(Duration::from_secs(10)),
        }
    }
}

/// A [`TcpEngine`] that publishes itself in a metadata store and finds its peers there.
///
/// Every call that needs the store asks it anew, so that after a store was unreachable the next call
/// succeeds. A store that has lost its contents gets the entry back at the next look of the engine's keeper, a
/// thread of its own ([`StoreConfig::look_every`]), at the next registration, or by
/// [`republish`](StoreEngine::republish). Dropping the engine withdraws the entry, as
/// [`close`](StoreEngine::close) does; that waits for a few calls to the store, each within its bounds.
pub struct StoreEngine {
    name: String,
    publisher: Arc<Publisher>,
    keeper: Keeper,
    engine: Arc<TcpEngine>,
}

impl StoreEngine {
    /// Starts an engine and publishes it.
    ///
    /// An entry that is there under the name is replaced if nobody listens where it points, or if that
    /// is here. Nothing of its descriptor is taken over. Blocks for some calls to the store, and to find out who is
    /// there, for as long as one control exchange may take ([`TcpTimeouts::connect`](crate::tcp::TcpTimeouts::connect)
    /// and [`control_reply`](crate::tcp::TcpTimeouts::control_reply)), however many addresses the host of the entry
    /// has. The system's name resolution comes on top.
    ///
    /// # Errors
    /// [`StoreError::NameTaken`] if an engine answers where the entry points, or if it cannot be told;
    /// [`StoreError::Contended`]; [`EngineError::NotListening`]; those of [`TcpEngine::start`] and of the store.
    pub fn start(
        config: TcpConfig,
        store: Arc<dyn MetadataStore>,
        named: StoreConfig,
    ) -> Result<Self, EngineError> {
        if !config.listen {
            return Err(EngineError::NotListening);
        }
        let keys = Keys::new(&named.cluster)?;
        if let Some(name) = &named.name {
            // Before anything is started.
            keys.descriptor(name)?;
        }
        let engine = Arc::new(TcpEngine::start_named(config, named.name.clone())?);
        let name = named.name.unwrap_or_else(|| engine.session().to_owned());
        let control = engine.control_address();
        let rpc_meta = RpcMeta::new(&engine.advertised_host(), control.port())
            .map_err(|source| unusable(&name, source))?;
        let ours = rpc_meta.clone();
        let mut left = engine.control_waits().total();
        let publisher = Publisher::claim(store, keys, &name, rpc_meta, |found| {
            look_for(&engine, found, &ours, &mut left)
        })?;
        let publisher = Arc::new(publisher);
        let every = named.look_every.map(|every| every.max(LOOK_EVERY_MIN));
        let of = Arc::downgrade(&engine);
        let descriptor = move || of.upgrade().map(|engine| engine.descriptor_text());
        let keeper = Keeper::start(Arc::clone(&publisher), every, descriptor).map_err(|error| {
            publisher.withdraw_or_say();
            EngineError::Start {
                source: error.into(),
            }
        })?;
        let engine = Self {
            name,
            publisher,
            keeper,
            engine,
        };
        engine.republish()?;
        Ok(engine)
    }

    /// Writes the entry again at once, where the keeper would do it at its next look.
    ///
    /// # Errors
    /// [`StoreError::NameTaken`] if another engine has taken the name meanwhile;
    /// [`StoreError::OnEngineThread`]; those of the store.
    pub fn republish(&self) -> Result<(), StoreError> {
        self.may_wait()?;
        let descriptor = || Some(self.engine.descriptor_text());
        self.publisher.publish(descriptor)
    }

    /// Withdraws the entry, unless another engine has taken the name, and ends the engine.
    ///
    /// # Errors
    /// Those of the store; the entry may be there still, and points to where nobody listens.
    /// [`StoreError::OnEngineThread`]; the entry is withdrawn by the keeper then.
    pub fn close(self) -> Result<(), StoreError> {
        self.may_wait()?;
        self.publisher.withdraw()
    }

    /// Returns the address of the control listener.
    pub fn control_address(&self) -> SocketAddr {
        self.engine.control_address()
    }

    /// Returns the address of the data listener.
    pub fn data_address(&self) -> SocketAddr {
        self.engine.data_address()
    }

    /// Refuses to have the engine's own thread wait for the store.
    fn may_wait(&self) -> Result<(), StoreError> {
        if self.engine.is_own_thread() {
            return Err(StoreError::OnEngineThread);
        }
        Ok(())
    }

    fn rpc_meta(&self, name: &str) -> Result<RpcMeta, EngineError> {
        self.may_wait()?;
        let key = self.publisher.keys().rpc_meta(name)?;
        let found = self.publisher.rpc_meta_of(&key)?;
        Ok(found.ok_or(StoreError::NotPublished { key })?)
    }
}

/// Looks whether the engine at `found` is there, within what is `left` for all looks of a start; resolving its host
/// does not count.
fn look_for(engine: &TcpEngine, found: &RpcMeta, ours: &RpcMeta, left: &mut Duration) -> Holder {
    if found == ours {
        return Holder::Gone;
    }
    // Where we have that port, whoever had it before is gone.
    match engine.not_ours_at(&found.host, found.port) {
        Ok(addresses) => holder_at(addresses, engine.control_waits(), left, |address, waits| {
            engine.probe_addresses(vec![address], &found.holder(), waits)
        }),
        Err(_) => Holder::Unknown,
    }
}

/// What is known of an engine that is at one of `addresses`: it is gone only if nobody listens at any of them, and that
/// is found out within what is `left`, from which the time that it takes is subtracted.
fn holder_at(
    addresses: Vec<SocketAddr>,
    waits: Waits,
    left: &mut Duration,
    probe: impl Fn(SocketAddr, Waits) -> Result<(), EngineError>,
) -> Holder {
    let mut holder = Holder::Gone;
    let count = addresses.len();
    for (index, address) in addresses.into_iter().enumerate() {
        if left.is_zero() {
            return Holder::Unknown;
        }
        let begin = Instant::now();
        let answer = probe(address, waits.within(*left, count - index));
        *left = left.saturating_sub(begin.elapsed());
        match answer {
            Ok(()) => return Holder::Answers,
            Err(EngineError::Control {
                source: ControlError::Connect { source, .. },
                ..
            }) if source.kind() == ErrorKind::ConnectionRefused => {}
            Err(EngineError::Control {
                source: ControlError::Connect { .. } | ControlError::ConnectTimeout { .. },
                ..
            }) => holder = Holder::Unknown,
            // Something is there; what else the host has does not make it gone.
            Err(_) => return Holder::Unknown,
        }
    }
    holder
}

/// What of a name real engines look up: that without the slashes it begins with.
fn looked_up(name: &str) -> &str {
    name.trim_start_matches('/')
}

fn unusable(name: &str, source: ValueError) -> StoreError {
    StoreError::Value {
        key: name.to_owned(),
        source,
    }
}

impl Engine for StoreEngine {
    /// Returns the name in the store.
    fn session(&self) -> &str {
        &self.name
    }

    /// Makes memory known and publishes it. Blocks for calls to the store. The end of the registration does
    /// not: once peers are cut off, the keeper takes the memory off the entry, at once.
    fn register(
        &self,
        memory: Arc<dyn Memory>,
        access: Access,
    ) -> Result<Registration, EngineError> {
        if access == Access::Local {
            return self.engine.register(memory, access);
        }
        self.may_wait()?;
        let inner = self.engine.register(Arc::clone(&memory), access)?;
        if let Err(error) = self.republish() {
            let unregistered = inner.unregister();
            // Whoever published meanwhile had it in the descriptor.
            self.publisher.mark_stale();
            self.keeper.waker()();
            unregistered?;
            return Err(error.into());
        }
        let look = self.keeper.waker();
        let publisher = Arc::clone(&self.publisher);
        let deregister = move || {
            inner.unregister()?;
            // The thread that gives memory back may be an engine's, of this one or of another, and must not
            // wait for the store.
            publisher.mark_stale();
            look();
            Ok(())
        };
        Ok(Registration::new(memory, access, Box::new(deregister)))
    }

    /// Opens the peer that is in the store as `name`, without the slashes it may begin with. Asks the store every
    /// time; a segment that is open already is then used at the place that the store says.
    fn open_segment(&self, name: &str) -> Result<Segment, EngineError> {
        self.may_wait()?;
        let name = looked_up(name);
        let key = self.publisher.keys().descriptor(name)?;
        let len_max = self.engine.peer_descriptor_bytes_max();
        self.engine.open_found(name, || {
            let text = self.publisher.descriptor_of(&key, len_max)?;
            let mut descriptor = self.engine.check_descriptor(name, &text)?;
            let host = descriptor
                .data_host
                .take()
                .filter(|host| !is_wildcard(host));
            let host = match host {
                // With a host, real engines ask for nothing else either.
                Some(host) => host,
                None => self.rpc_meta(name)?.host,
            };
            Ok(Found { host, descriptor })
        })
    }

    fn submit(&self, tasks: Vec<Task>) -> Result<Batch, Refused<Vec<Task>>> {
        self.engine.submit(tasks)
    }

    /// Sends a notification to where the store says that the peer is.
    fn notify(&self, segment: &Segment, name: &str, message: &str) -> Result<(), EngineError> {
        self.engine.check_segment(segment)?;
        let at = self.rpc_meta(segment.name())?;
        self.engine
            .notify_at(&at.host, at.port, segment.name(), name, message)
    }

    fn take_notices(&self) -> Result<Notices, EngineError> {
        self.engine.take_notices()
    }

    fn probe(&self, name: &str) -> Result<(), EngineError> {
        let name = looked_up(name);
        let at = self.rpc_meta(name)?;
        self.engine.probe_at(&at.host, at.port, name)
    }
}

impl Drop for StoreEngine {
    fn drop(&mut self) {
        if self.engine.is_own_thread() {
            self.keeper.end_and_withdraw();
            return;
        }
        // After `close` there is nothing left to withdraw.
        self.publisher.withdraw_or_say();
        self.keeper.end();
    }
}

impl std::fmt::Debug for StoreEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StoreEngine")
            .field("name", &self.name)
            .field("engine", &self.engine)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    const WAITS: Waits = Waits {
        connect: Duration::from_secs(5),
        reply: Duration::from_secs(60),
    };

    fn name(holder: &Holder) -> &'static str {
        match holder {
            Holder::Answers => "answers",
            Holder::Gone => "gone",
            Holder::Unknown => "unknown",
        }
    }

    #[test]
    fn however_many_addresses_do_not_answer_they_take_the_time_of_one_exchange() {
        let waits = Waits {
            connect: Duration::from_millis(50),
            reply: Duration::from_millis(30),
        };
        let addresses = || vec![SocketAddr::from(([127, 0, 0, 1], 1)); 16];
        let asked = RefCell::new(Vec::new());
        let probe = |endpoint, waits: Waits| {
            asked.borrow_mut().push(waits);
            // Which takes a moment longer.
            std::thread::sleep(waits.connect);
            Err(EngineError::Control {
                peer: String::new(),
                source: ControlError::ConnectTimeout {
                    endpoint,
                    timeout_ms: 1,
                },
            })
        };
        let mut left = waits.total();
        for _ in 0..4 {
            let holder = holder_at(addresses(), waits, &mut left, probe);
            assert_eq!(name(&holder), "unknown");
        }
        // Nor is anybody taken for gone whom there was no time to ask.
        let holder = holder_at(addresses(), waits, &mut Duration::from_secs(0), |_, _| {
            Ok(())
        });
        assert_eq!(name(&holder), "unknown");
        let asked = asked.into_inner();
        let connecting: Duration = asked.iter().map(|waits| waits.connect).sum();
        assert!(connecting <= waits.total(), "{connecting:?}: {asked:?}");
        assert!(asked.iter().all(|asked| asked.reply <= waits.reply));
    }

    #[test]
    fn the_only_address_of_a_host_has_the_time_of_one_exchange_and_others_share_it() {
        let check = |left_ms: u64, count: usize, connect_ms: u64, reply_ms: u64| {
            let expected = Waits {
                connect: Duration::from_millis(connect_ms),
                reply: Duration::from_millis(reply_ms),
            };
            let found = WAITS.within(Duration::from_millis(left_ms), count);
            assert_eq!(found, expected, "{left_ms} ms for {count}");
        };
        check(65_000, 1, 5_000, 60_000);
        check(65_000, 13, 5_000, 60_000);
        check(64_000, 16, 4_000, 60_000);
        check(16_000, 4, 4_000, 12_000);
        check(3_000, 1, 3_000, 0);
        check(0, 0, 0, 0);
    }

    #[test]
    fn an_engine_is_gone_only_if_nobody_listens_at_any_address_of_its_host() {
        let endpoint = |port| SocketAddr::from(([127, 0, 0, 1], port));
        let failed = |source| {
            let peer = String::new();
            Err(EngineError::Control { peer, source })
        };
        let connect = |kind: ErrorKind| {
            failed(ControlError::Connect {
                endpoint: endpoint(0),
                source: std::io::Error::from(kind).into(),
            })
        };
        // What comes of a probe, by the port.
        let probe = |address: SocketAddr, _| match address.port() {
            1 => connect(ErrorKind::ConnectionRefused),
            2 => connect(ErrorKind::HostUnreachable),
            3 => failed(ControlError::ConnectTimeout {
                endpoint: address,
                timeout_ms: 1,
            }),
            4 => failed(ControlError::Closed),
            5 => Ok(()),
            port => panic!("nobody asked for {port}"),
        };
        let check = |ports: &[u16], expected: &str| {
            let addresses = ports.iter().map(|port| endpoint(*port)).collect();
            let holder = holder_at(addresses, WAITS, &mut WAITS.total(), probe);
            assert_eq!(name(&holder), expected, "{ports:?}");
        };
        // All are our own.
        check(&[], "gone");
        check(&[1], "gone");
        check(&[1, 1], "gone");
        for unknown in [2, 3, 4] {
            check(&[unknown], "unknown");
            check(&[unknown, 1], "unknown");
            check(&[1, unknown], "unknown");
        }
        check(&[1, 5], "answers");
        check(&[2, 3, 5], "answers");
        check(&[5, 9], "answers");
        check(&[4, 9], "unknown");
    }
}
