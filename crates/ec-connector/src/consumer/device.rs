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
    /// reused before the stream has passed that point.
    ///
    /// The consumer does not look at the streams by itself: the caller has to call [`Timelines::poll`], every few
    /// milliseconds while anything is lent or released, from any thread. It is what tells the pool, and whom a stream's
    /// failure is told to. A reserve that needs such bytes waits for a poll that gives them back, for at most
    /// [`claim_wait`](ConsumerConfig::claim_wait), and is answered `pool_full` then; a producer asks again until its own
    /// patience ends. Without a poll every such reserve ends like that, however long ago the stream has passed.
    ///
    /// ```no_run
    /// # use std::sync::Arc;
    /// # use std::time::{Duration, Instant};
    /// # use ec_connector::{Consumer, ConsumerConfig};
    /// # use mooncake_transport::Engine;
    /// # use slab_cuda::{CudaMemory, DeviceSlab, Driver, Stream, TimelinesConfig};
    /// # fn serve(engine: Arc<dyn Engine>, config: ConsumerConfig) -> Result<(), Box<dyn std::error::Error>> {
    /// let device = Driver::load()?.device(0)?;
    /// let memory: Arc<dyn CudaMemory> = Arc::new(DeviceSlab::new(&device, 1 << 30)?);
    /// let (consumer, timelines) = Consumer::start_on_device(engine, memory, config, TimelinesConfig::default())?;
    /// let stream = Stream::new(&device)?;
    /// let timeline = timelines.attach(&stream)?;
    /// loop {
    ///     // Whether or not anything has arrived.
    ///     timelines.poll()?;
    ///     let Some(item) = consumer.next_taken(Some(Instant::now() + Duration::from_millis(1))) else {
    ///         continue;
    ///     };
    ///     let loan = timeline.lend(item.into_lease()).map_err(|refused| refused.cause)?;
    ///     // Submit kernels that read `loan.len()` bytes from `loan.address()` on to the stream; then:
    ///     loan.release()?;
    /// }
    /// # }
    /// ```
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
