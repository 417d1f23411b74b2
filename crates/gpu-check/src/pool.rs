//! A pool over device memory, as a server would use it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail, ensure};
use slab_core::{
    Allocation, LeaseGuard, Pool, PoolConfig, PoolId, PoolStats, Refused, Reserve, SharedPool,
};
use slab_cuda::{Copier, CopyBatch, Copying, CudaMemory, Timelines, TimelinesConfig};

/// Longer than anything takes that works.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

pub(crate) fn soon() -> Instant {
    Instant::now() + LIMIT
}

/// The reason alone: what was handed back is dropped.
pub(crate) fn cause<T>(refused: Refused<T>) -> anyhow::Error {
    anyhow!("{}", refused.cause)
}

/// Starts the copies of a batch.
pub(crate) fn submit(copier: &Copier, batch: CopyBatch) -> Result<Copying> {
    Ok(copier.submit(batch).map_err(|refused| refused.cause)?)
}

/// Items by number.
pub(crate) struct Items {
    pub(crate) pool: SharedPool<u64, ()>,
    pub(crate) timelines: Timelines,
    /// Answers of the pool that there is no room yet.
    pub(crate) refused: usize,
    /// Polls after such answers that found loans or events still pending: there was something to wait for.
    pub(crate) waited: usize,
}

impl Items {
    pub(crate) fn over(memory: &Arc<dyn CudaMemory>) -> Result<Self> {
        let pool = SharedPool::new(Pool::new(PoolConfig::new(PoolId::new(), memory.len()))?, ());
        let timelines = Timelines::new(&pool, Arc::clone(memory), TimelinesConfig::default())?;
        Ok(Self {
            pool,
            timelines,
            refused: 0,
            waited: 0,
        })
    }

    /// Takes bytes, and polls the timelines until there are some.
    pub(crate) fn reserve(&mut self, len: u64) -> Result<Allocation> {
        let deadline = soon();
        loop {
            match self.pool.with(|pool, _| pool.reserve(len)) {
                Reserve::Ready(allocation) => return Ok(allocation),
                Reserve::Later(claim) => self
                    .pool
                    .with(|pool, _| pool.drop_claim(claim))
                    .map_err(cause)?,
                Reserve::Full => {}
                Reserve::TooLarge => bail!("{len} bytes are too many for the pool"),
            }
            self.refused += 1;
            self.waited += usize::from(self.timelines.poll()? > 0);
            ensure!(
                Instant::now() < deadline,
                "no room although everything that was lent has come back"
            );
        }
    }

    pub(crate) fn publish(&self, key: u64, allocation: Allocation) -> Result<LeaseGuard> {
        let lease = self.pool.with(|pool, _| pool.publish(key, allocation, ()));
        self.pool.lease_guard(lease.map_err(cause)?).map_err(cause)
    }

    pub(crate) fn free(&self, allocation: Allocation) -> Result<()> {
        self.pool
            .with(|pool, _| pool.free(allocation, &[]))
            .map_err(cause)
    }

    pub(crate) fn stats(&self) -> PoolStats {
        self.pool.with(|pool, _| pool.stats())
    }
}
