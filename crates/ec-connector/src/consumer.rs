//! The consuming side: one shard with its slab, reservations, engine registration and control server.
//!
//! Producers reserve memory over the control plane, write into the slab through the engine, and complete. The
//! owner takes what is ready as [`TakenItem`]s: while one exists its bytes stay where they are; once it is dropped
//! the content is a resident that later pushes of the same content hit, and that makes room when room is needed.

#[cfg(feature = "cuda")]
mod device;
mod item;
mod memory;
mod shard;

use std::fmt;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mooncake_transport::{Access, Engine, EngineError, Registration};
use slab_core::{Error as PoolError, Pool, PoolConfig, PoolId, SharedPool};
use slab_memory::{Memory, SlabError};

use crate::control::{
    ControlAddress, ControlServer, PoolSnapshot, ServerConfig, ServerCounters, ServerError,
};
use crate::name::{MmHash, TransferId};
use crate::random_ids::IdSource;
use crate::reservation::{
    ItemStatus, ReservationConfig, Reservations, Shutdown, Stuck, StuckReleased, TakeError,
};

use memory::PoolMemory;
use shard::ConsumerShard;

pub use item::{ItemError, TakenItem};

/// Settings of a [`Consumer`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ConsumerConfig {
    /// Address the control and event sockets bind to.
    pub host: IpAddr,
    /// Control port; zero picks a free one.
    pub port: u16,
    /// Size of the slab in bytes. Not looked at by [`Consumer::start_in`].
    pub pool_bytes: u64,
    /// Most different contents kept.
    pub residents_max: u32,
    /// Times, limits, and who takes items.
    pub reservations: ReservationConfig,
    /// Longest wait of a reserve for bytes that are on their way back. Host slabs never wait; with
    /// `Consumer::start_on_device` it is the caller's polls that bring them back.
    pub claim_wait: Duration,
}

impl ConsumerConfig {
    /// A consumer with the protocol's times and limits.
    pub fn new(host: IpAddr, port: u16, pool_bytes: u64) -> Self {
        Self {
            host,
            port,
            pool_bytes,
            residents_max: 65_536,
            reservations: ReservationConfig::default(),
            claim_wait: Duration::from_millis(20),
        }
    }
}

/// Why a consumer could not start; nothing is left running.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConsumerError {
    /// The slab could not be had: it is empty, or larger than machine and control group allow.
    #[error("cannot make a pool of {bytes} bytes")]
    Slab {
        /// Bytes asked for.
        bytes: u64,
        /// Why.
        source: SlabError,
    },
    /// The slab is too small to be managed.
    #[error("cannot manage a pool of {bytes} bytes")]
    Pool {
        /// Bytes asked for.
        bytes: u64,
        /// Why.
        source: PoolError,
    },
    /// The pool could not be connected with the streams of its device.
    #[cfg(feature = "cuda")]
    #[error("cannot connect the pool with the device's streams")]
    Device(#[source] slab_cuda::CudaError),
    /// The engine did not take the slab.
    #[error("the engine did not take the pool")]
    Register(#[source] EngineError),
    /// The control server could not start; the port may be in use.
    #[error("cannot start the control server")]
    Server(#[source] ServerError),
    /// The system gave no random numbers.
    #[error("no random numbers for reservation ids")]
    Random(#[source] io::Error),
}

/// Producers did not finish in time: their reservations are still open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "{writers} producers did not finish in time; the {bytes} bytes they hold, and the whole pool, stay registered \
     until this process ends"
)]
pub struct DrainTimedOut {
    /// Reservations whose writer has not finished.
    pub writers: usize,
    /// Bytes they occupy.
    pub bytes: u64,
}

/// A consumer shard that serves producers until it is shut down or dropped.
///
/// Dropping it stops the control server and unregisters the slab at once; [`shutdown`](Self::shutdown) lets
/// producers finish first.
pub struct Consumer {
    // Fields are dropped in this order: no new reservation, then no more writes, then the memory.
    server: ControlServer,
    registration: Registration,
    shard: Arc<ConsumerShard>,
    memory: PoolMemory,
    engine: Arc<dyn Engine>,
}

impl Consumer {
    /// Makes the slab, registers it with `engine`, and serves the control plane.
    ///
    /// # Errors
    /// [`ConsumerError`].
    ///
    /// # Complexity
    /// Faults in the whole slab: about a third of a second for 1 GiB.
    pub fn start(engine: Arc<dyn Engine>, config: ConsumerConfig) -> Result<Self, ConsumerError> {
        let bytes = config.pool_bytes;
        let memory =
            PoolMemory::host(bytes).map_err(|source| ConsumerError::Slab { bytes, source })?;
        Self::start_over(engine, memory, config)
    }

    /// Serves a pool that divides `memory`, all of it, wherever that is: memory of a device is written and read through
    /// its bounces.
    ///
    /// # Errors
    /// [`ConsumerError`].
    pub fn start_in(
        engine: Arc<dyn Engine>,
        memory: Arc<dyn Memory>,
        config: ConsumerConfig,
    ) -> Result<Self, ConsumerError> {
        Self::start_over(engine, PoolMemory::Other(memory), config)
    }

    fn start_over(
        engine: Arc<dyn Engine>,
        memory: PoolMemory,
        config: ConsumerConfig,
    ) -> Result<Self, ConsumerError> {
        let bytes = memory.shared().len();
        let ids = IdSource::new().map_err(ConsumerError::Random)?;
        let mut pool_config = PoolConfig::new(PoolId::new(), bytes);
        pool_config.residents_max = config.residents_max;
        let pool =
            Pool::new(pool_config).map_err(|source| ConsumerError::Pool { bytes, source })?;
        let shared = SharedPool::new(pool, Reservations::new(config.reservations));
        let shard = Arc::new(ConsumerShard::new(shared, ids, config.claim_wait));
        let registration = engine
            .register(memory.shared(), Access::RemoteWrite)
            .map_err(ConsumerError::Register)?;
        let address = memory.shared().address();
        let server_config = ServerConfig::new(config.host, config.port, engine.session(), address);
        let server = ControlServer::start(server_config, Arc::clone(&shard) as _)
            .map_err(ConsumerError::Server)?;
        Ok(Self {
            server,
            registration,
            shard,
            memory,
            engine,
        })
    }

    /// Where the control server listens.
    pub fn address(&self) -> &ControlAddress {
        self.server.address()
    }

    /// The engine's name towards producers.
    pub fn session(&self) -> &str {
        self.engine.session()
    }

    /// Takes the item pushed as `transfer_id`, for [`TakePolicy::Caller`](crate::TakePolicy::Caller).
    ///
    /// # Errors
    /// [`TakeError`]; nothing changed.
    pub fn take(&self, transfer_id: &TransferId, mm_hash: &MmHash) -> Result<TakenItem, TakeError> {
        let taken = self.shard.take(transfer_id, mm_hash)?;
        Ok(self.item(taken))
    }

    /// The next item the machine has taken, for [`TakePolicy::OnReady`](crate::TakePolicy::OnReady).
    ///
    /// Waits until `deadline`, or until a shutdown has left [nothing to come](Self::is_exhausted); `None` as the
    /// deadline waits as long as it takes.
    pub fn next_taken(&self, deadline: Option<Instant>) -> Option<TakenItem> {
        self.shard
            .next_taken(deadline)
            .map(|taken| self.item(taken))
    }

    /// The next item that became ready and was not reported yet. Waits as [`next_taken`](Self::next_taken) does.
    pub fn next_ready(&self, deadline: Option<Instant>) -> Option<ItemStatus> {
        self.shard.next_ready(deadline)
    }

    /// How the slab is used now.
    pub fn snapshot(&self) -> PoolSnapshot {
        self.shard.pool_snapshot()
    }

    /// Totals of the control server.
    pub fn counters(&self) -> ServerCounters {
        self.server.counters()
    }

    /// Whether the control server still serves; false only after a fault of the message library.
    pub fn is_serving(&self) -> bool {
        self.server.is_serving()
    }

    /// Gives back memory whose writer never came back.
    ///
    /// Only for somebody who knows that the writer is gone: a late write would hit whatever is there next.
    pub fn release_stuck(&self, which: Stuck<'_>) -> StuckReleased {
        self.shard.release_stuck(which)
    }

    /// Refuses new reservations from now on; items that are under way may finish or are cancelled.
    ///
    /// To lose nothing that a producer was told has arrived, finish, fetch items until there is
    /// [nothing to come](Self::is_exhausted), then call [`shutdown`](Self::shutdown). Cancelling after finishing cuts
    /// that short.
    pub fn begin_shutdown(&self, how: Shutdown) {
        self.shard.begin_shutdown(how);
    }

    /// Whether a shutdown has left nothing to come: no producer writes what could still be taken, and all that is
    /// ready was fetched.
    pub fn is_exhausted(&self) -> bool {
        self.shard.is_exhausted()
    }

    /// Cancels what was not taken, waits until producers have finished and have been told, at most until `deadline`;
    /// then stops serving and unregisters the slab.
    ///
    /// A producer whose item is cancelled while it writes learns it when it completes.
    ///
    /// # Errors
    /// [`DrainTimedOut`]: some producers did not finish. The server is stopped, and the slab stays registered and
    /// mapped for the rest of the process, so that a late write lands in memory that still belongs to the pool.
    pub fn shutdown(self, deadline: Instant) -> Result<(), DrainTimedOut> {
        self.begin_shutdown(Shutdown::Cancel);
        let drained = self.shard.wait_drained(deadline);
        self.shard.wait_quiet(deadline);
        self.server.stop();
        if drained.is_err() {
            std::mem::forget(self.registration);
            std::mem::forget(self.engine);
        }
        drained
    }

    fn item(&self, taken: shard::Taken) -> TakenItem {
        TakenItem::new(taken, self.memory.clone())
    }
}

impl fmt::Debug for Consumer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Consumer")
            .field("address", self.address())
            .field("session", &self.session())
            .finish_non_exhaustive()
    }
}
