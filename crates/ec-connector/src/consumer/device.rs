//! Pools in GPU memory whose items kernels read.

use std::sync::Arc;

use mooncake_transport::Engine;
use slab_cuda::{CudaMemory, Timelines, TimelinesConfig};
use slab_memory::Memory;

use super::{Consumer, ConsumerConfig, ConsumerError};

impl Consumer {
    /// Serves a pool in memory of a device, as [`start_in`](Self::start_in) does, and connects it with the streams whose
    /// kernels read its items.
    ///
    /// Attach a stream ([`Timelines::attach`]), lend it the lease of a taken item ([`TakenItem::into_lease`] and
    /// [`Timeline::lend`](slab_cuda::Timeline::lend)), submit the kernels, and release the loan: the bytes are not
    /// reused before the stream has passed that point. Call [`Timelines::poll`] in every step of the server: it is what
    /// tells the pool. A reserve that needs such bytes waits for it for at most
    /// [`claim_wait`](ConsumerConfig::claim_wait), and is answered `pool_full` then.
    ///
    /// # Errors
    /// [`ConsumerError`]; nothing is left running.
    ///
    /// [`TakenItem::into_lease`]: crate::TakenItem::into_lease
    pub fn start_on_device(
        engine: Arc<dyn Engine>,
        memory: Arc<dyn CudaMemory>,
        config: ConsumerConfig,
        timelines: TimelinesConfig,
    ) -> Result<(Self, Timelines), ConsumerError> {
        let shared: Arc<dyn Memory> = memory.clone();
        let consumer = Self::start_in(engine, shared, config)?;
        let timelines = consumer
            .shard
            .timelines(memory, timelines)
            .map_err(ConsumerError::Device)?;
        Ok((consumer, timelines))
    }
}
