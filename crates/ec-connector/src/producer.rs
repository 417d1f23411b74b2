//! The producing side: pushes items into the pools of consumers.
//!
//! [`Producer::push`] hands an item over and returns a [`Push`], which can be polled, waited for or awaited. A
//! fixed number of threads carries out what the pure push records ask for; a record that only waits (for room, for
//! another producer, for its turn) occupies none of them.
//!
//! Bounds: [`ProducerConfig::pushes_max`] pushes at a time, [`ProducerConfig::threads`] threads, one staging slab,
//! and each push ends by its own timeout.

mod clients;
mod push;
mod queue;
mod record;
mod worker;

use std::fmt;
use std::io;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use mooncake_transport::Engine;

use crate::control::{ClientError, ControlAddress};
use crate::name::{MmHash, TransferId};
use crate::push::{Delivery, PushConfig, PushFailure};
use crate::random_ids::IdSource;
use crate::staging::{Source, StageError, Staging};
use crate::tensor::TensorSpec;

use clients::THREADS_MAX;
use queue::Queue;
use record::Record;

pub use push::Push;

/// Limits of a [`Producer`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ProducerConfig {
    /// Limits of each push.
    pub push: PushConfig,
    /// Size of the staging slab in bytes. Items larger than it get memory of their own for as long as they need it.
    pub staging_bytes: u64,
    /// Most pushes under way or waiting; [`Producer::push`] blocks beyond it.
    pub pushes_max: NonZeroUsize,
    /// Threads that talk to consumers, at most 128; as many requests and writes are under way at a time. Together
    /// they keep 64 connections to consumers, and at least one each.
    pub threads: NonZeroUsize,
}

impl Default for ProducerConfig {
    /// 64 MiB of staging, 64 pushes, four threads (the number a vLLM producer transfers with).
    fn default() -> Self {
        Self {
            push: PushConfig::default(),
            staging_bytes: 64 << 20,
            pushes_max: NonZeroUsize::MIN.saturating_add(63),
            threads: NonZeroUsize::MIN.saturating_add(3),
        }
    }
}

/// Under which transfer id an item is pushed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PushId {
    /// A random one, and another one whenever that is needed to get through.
    Fresh,
    /// One that somebody else chose and will look for. Where only another id could settle what became of a lost
    /// message, the push ends as [`PushFailure::Unconfirmed`].
    Given(TransferId),
}

/// One thing to push.
#[derive(Debug)]
pub struct Item {
    /// The consumer's control address.
    pub to: ControlAddress,
    /// Names the content.
    pub mm_hash: MmHash,
    /// Shape and type.
    pub tensor: TensorSpec,
    /// The bytes, as many as shape and type say.
    pub source: Source,
    /// Names the push.
    pub id: PushId,
}

/// How a push ended.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct PushReport {
    /// The id last used, or that would have been used.
    pub transfer_id: TransferId,
    /// What happened.
    pub result: Result<Delivery, PushError>,
    /// From the first reserve to the last answer; zero if nothing was sent.
    pub elapsed: Duration,
    /// Bytes that were written to the consumer's memory.
    pub wire_bytes: u64,
}

/// Why a push failed.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum PushError {
    /// The push was refused, lost or given up.
    #[error(transparent)]
    Failed(#[from] PushFailure),
    /// The source could not be made ready for the transfer.
    #[error("the source could not be made ready for the transfer")]
    Stage(#[source] Arc<StageError>),
    /// The source has another number of bytes than shape and type say.
    #[error("the source has {source_bytes} bytes, but shape and type say {tensor_bytes}")]
    Length {
        /// Bytes of the source.
        source_bytes: u64,
        /// Bytes of the tensor.
        tensor_bytes: u64,
    },
    /// The push was lost to a defect of the producer, which the log describes; the consumer may keep its memory
    /// reserved.
    #[error("the push was lost to a defect of the producer; see its log")]
    Lost,
    /// The consumer has more shards than are supported; nothing was written to any of them.
    #[error("the consumer has {count} shards, and only consumers with one are supported")]
    Shards {
        /// Number of shards.
        count: usize,
    },
}

impl PushError {
    /// The failure as programs read it.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Failed(failure) => failure.code(),
            Self::Stage(error) if matches!(**error, StageError::Changed) => "source_changed",
            Self::Stage(_) => "source",
            Self::Length { .. } => "size_mismatch",
            Self::Shards { .. } => "shards",
            Self::Lost => "lost",
        }
    }

    /// Whether the consumer did not answer, so that other pushes to it would fail as well.
    pub fn is_unreachable(&self) -> bool {
        match self {
            // A socket that cannot be made says nothing about the consumer.
            Self::Failed(PushFailure::Unreachable { cause, .. }) => {
                !matches!(**cause, ClientError::Setup { .. })
            }
            Self::Failed(PushFailure::BadReply { .. }) => true,
            _ => false,
        }
    }
}

/// Why a producer could not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProducerError {
    /// The staging slab could not be made or registered.
    #[error("cannot make the staging slab")]
    Staging(#[from] StageError),
    /// More threads than the message library has sockets for.
    #[error("{threads} threads are more than the {max} that a producer may have")]
    TooManyThreads {
        /// Threads asked for.
        threads: usize,
        /// Most threads.
        max: usize,
    },
    /// A thread could not be started.
    #[error("cannot start a thread")]
    Thread(#[source] io::Error),
    /// The system gave no random numbers.
    #[error("no random numbers for transfer ids")]
    Random(#[source] io::Error),
}

/// Pushes items into the pools of consumers; see the module's text in the README.
///
/// Dropping it does what [`close`](Self::close) does.
pub struct Producer {
    queue: Arc<Queue>,
    threads: Vec<JoinHandle<()>>,
}

impl Producer {
    /// Makes the staging slab, registers it with `engine`, and starts the threads.
    ///
    /// # Errors
    /// [`ProducerError`].
    pub fn start(engine: Arc<dyn Engine>, config: ProducerConfig) -> Result<Self, ProducerError> {
        let threads = config.threads.get();
        if threads > THREADS_MAX {
            return Err(ProducerError::TooManyThreads {
                threads,
                max: THREADS_MAX,
            });
        }
        let ids = IdSource::new().map_err(ProducerError::Random)?;
        let queue = Arc::new(Queue::new(config.pushes_max.get(), config.push, ids));
        // Regions outlive the producer where a task still reads one.
        let told = Arc::downgrade(&queue);
        let room = move || {
            if let Some(queue) = told.upgrade() {
                queue.room_came();
            }
        };
        let staging = Staging::new(Arc::clone(&engine), config.staging_bytes, room)?;
        let site = Arc::new(worker::Site::new(engine, staging, threads));
        let mut producer = Self {
            queue,
            threads: Vec::with_capacity(threads),
        };
        for index in 0..threads {
            let queue = Arc::clone(&producer.queue);
            let site = Arc::clone(&site);
            let thread = std::thread::Builder::new()
                .name(format!("ec-push-{index}"))
                .spawn(move || worker::run(&queue, &site))
                .map_err(ProducerError::Thread)?;
            producer.threads.push(thread);
        }
        Ok(producer)
    }

    /// Hands `item` over. Blocks while [`ProducerConfig::pushes_max`] pushes have not ended.
    ///
    /// Every push ends by itself within its timeout and the engine's deadlines, so the call does not block for
    /// ever. Whatever goes wrong is reported by the returned [`Push`], never here.
    pub fn push(&self, item: Item) -> Push {
        self.queue.wait_for_room();
        self.enqueue(item)
    }

    /// As [`push`](Self::push), but hands `item` back instead of blocking.
    ///
    /// # Errors
    /// The item, if [`ProducerConfig::pushes_max`] pushes have not ended.
    pub fn try_push(&self, item: Item) -> Result<Push, Box<Item>> {
        if self.queue.try_room() {
            Ok(self.enqueue(item))
        } else {
            Err(Box::new(item))
        }
    }

    /// Ends pushes that only wait as [`PushFailure::Closed`], lets writes that are under way finish, and stops the
    /// threads.
    ///
    /// Blocks for at most the requests and writes that are under way, and then for one request of each push: the
    /// complete of what was written, or the cancel of what was not.
    pub fn close(self) {
        drop(self);
    }

    /// Starts a push whose room has been taken.
    fn enqueue(&self, item: Item) -> Push {
        let (record, push) = Record::new(item, self.queue.ids());
        self.queue.enter(record);
        push
    }
}

impl Drop for Producer {
    fn drop(&mut self) {
        self.queue.close();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a thread of the producer panicked");
            }
        }
    }
}

impl fmt::Debug for Producer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Producer")
            .field("threads", &self.threads.len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
