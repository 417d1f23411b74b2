//! The pool and its reservations behind their lock, as the control server and the owner use them.
//!
//! Every call holds the lock once and briefly; what has to be said or done afterwards happens outside.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use slab_core::{LeaseGuard, Pool, SharedPool};

use super::DrainTimedOut;
use crate::control::{PoolSnapshot, ReserveReply, Shard};
use crate::moment::Moment;
use crate::name::{MmHash, ReservationId, TransferId};
use crate::random_ids::IdSource;
use crate::reservation::{
    CancelKind, CancelMatch, Completion, Effect, ItemStatus, Reservations, Reserve, ReserveError,
    ReserveRequest, Shutdown, Stuck, StuckReleased, TakeError, Taken as RawTaken,
};
use crate::tensor::TensorSpec;

type ShardPool = Pool<MmHash, TensorSpec>;
type Shared = SharedPool<MmHash, TensorSpec, Reservations<ShardPool>>;

pub(super) struct ConsumerShard {
    shared: Shared,
    ids: IdSource,
    epoch: Instant,
    claim_wait: Duration,
    /// When a producer last asked for something, in milliseconds since the epoch.
    asked_ms: AtomicU64,
}

/// An item that was taken, with its lease under guard.
pub(super) struct Taken {
    pub(super) transfer_id: TransferId,
    pub(super) mm_hash: MmHash,
    pub(super) tensor: TensorSpec,
    pub(super) reservation_id: ReservationId,
    pub(super) cached: bool,
    pub(super) lease: LeaseGuard,
}

impl ConsumerShard {
    pub(super) fn new(shared: Shared, ids: IdSource, claim_wait: Duration) -> Self {
        Self {
            shared,
            ids,
            epoch: Instant::now(),
            claim_wait,
            asked_ms: AtomicU64::new(0),
        }
    }

    /// Connects the pool with the streams that touch its memory.
    #[cfg(feature = "cuda")]
    pub(super) fn timelines(
        &self,
        memory: std::sync::Arc<dyn slab_cuda::CudaMemory>,
        config: slab_cuda::TimelinesConfig,
    ) -> Result<slab_cuda::Timelines, slab_cuda::CudaError> {
        slab_cuda::Timelines::new(&self.shared, memory, config)
    }

    fn now(&self) -> Moment {
        Moment::from_millis(u64::try_from(self.epoch.elapsed().as_millis()).unwrap_or(u64::MAX))
    }

    pub(super) fn take(&self, id: &TransferId, mm_hash: &MmHash) -> Result<Taken, TakeError> {
        let taken = self
            .shared
            .with(|pool, reservations| reservations.take(pool, id, mm_hash))?;
        self.guard(taken).ok_or(TakeError::NotReady)
    }

    pub(super) fn next_taken(&self, deadline: Option<Instant>) -> Option<Taken> {
        let taken = self.shared.wait_until(deadline, |pool, reservations| {
            or_exhausted(reservations.next_taken(pool), reservations)
        })??;
        self.guard(taken)
    }

    /// Puts the lease that left the lock under guard.
    fn guard(&self, taken: RawTaken<ShardPool>) -> Option<Taken> {
        match self.shared.lease_guard(taken.lease) {
            Ok(lease) => Some(Taken {
                transfer_id: taken.transfer_id,
                mm_hash: taken.mm_hash,
                tensor: taken.tensor,
                reservation_id: taken.reservation_id,
                cached: taken.cached,
                lease,
            }),
            // The machine only knows leases of this pool.
            Err(refused) => {
                tracing::error!(error = %refused.cause, "lease of a foreign pool");
                None
            }
        }
    }

    pub(super) fn next_ready(&self, deadline: Option<Instant>) -> Option<ItemStatus> {
        self.shared.wait_until(deadline, |_, reservations| {
            or_exhausted(reservations.poll_ready(), reservations)
        })?
    }

    pub(super) fn is_exhausted(&self) -> bool {
        self.shared
            .with(|_, reservations| reservations.is_exhausted())
    }

    pub(super) fn pool_snapshot(&self) -> PoolSnapshot {
        self.shared
            .with(|pool, reservations| PoolSnapshot::capture(pool, reservations))
    }

    pub(super) fn release_stuck(&self, which: Stuck<'_>) -> StuckReleased {
        let now = self.now();
        let mut effects = Vec::new();
        let released = self
            .shared
            .with(|pool, reservations| reservations.release_stuck(pool, now, which, &mut effects));
        log_effects(&effects);
        released
    }

    pub(super) fn begin_shutdown(&self, how: Shutdown) {
        let now = self.now();
        let mut effects = Vec::new();
        self.shared.with(|pool, reservations| {
            reservations.begin_shutdown(pool, now, how, &mut effects);
        });
        log_effects(&effects);
    }

    pub(super) fn wait_drained(&self, deadline: Instant) -> Result<(), DrainTimedOut> {
        let drained = self.shared.wait_until(Some(deadline), |_, reservations| {
            (reservations.writers_outstanding() == 0).then_some(())
        });
        match drained {
            Some(()) => Ok(()),
            None => Err(self.shared.with(|_, reservations| {
                let stats = reservations.stats();
                DrainTimedOut {
                    writers: reservations.writers_outstanding(),
                    bytes: stats.writing_bytes + stats.stuck_bytes,
                }
            })),
        }
    }

    /// Waits until producers have stopped asking, so that each is told of the shutdown; at most [`QUIET_MAX`], and at
    /// most until `deadline`.
    pub(super) fn wait_quiet(&self, deadline: Instant) {
        let deadline = deadline.min(Instant::now() + QUIET_MAX);
        loop {
            let asked = self.epoch + Duration::from_millis(self.asked_ms.load(Ordering::Relaxed));
            let now = Instant::now();
            let until = deadline.min(asked + QUIET);
            if until <= now {
                return;
            }
            std::thread::sleep(until - now);
        }
    }

    /// A producer is about: it reserves, completes, cancels, or waits for another's write.
    fn note_asked(&self, now: Moment) {
        self.asked_ms.store(now.as_millis(), Ordering::Relaxed);
    }
}

/// Longer than the longest pause between two tries of a producer that waits.
const QUIET: Duration = Duration::from_millis(750);
/// However busy producers are, a shutdown waits no longer for them to hear of it.
const QUIET_MAX: Duration = Duration::from_secs(3);

/// What was found, or that nothing will be; without either, waiting goes on.
fn or_exhausted<T>(found: Option<T>, reservations: &Reservations<ShardPool>) -> Option<Option<T>> {
    match found {
        Some(found) => Some(Some(found)),
        None => reservations.is_exhausted().then_some(None),
    }
}

impl Shard for ConsumerShard {
    fn claim_wait(&self) -> Duration {
        self.claim_wait
    }

    fn reserve(
        &self,
        request: &ReserveRequest,
        deadline: Instant,
        effects: &mut Vec<Effect>,
    ) -> Result<ReserveReply, ReserveError> {
        let now = self.now();
        self.note_asked(now);
        let fresh = self.ids.reservation_id();
        let answer = self
            .shared
            .with(|pool, reservations| reservations.reserve(pool, now, fresh, request, effects))?;
        let mut pending = match answer {
            Reserve::Later(pending) => Some(pending),
            answer => return Ok(settled(answer)),
        };
        let answer = self
            .shared
            .wait_until(Some(deadline), |pool, reservations| {
                let now = self.now();
                match reservations.resume(pool, now, pending.take()?, effects) {
                    Ok(Reserve::Later(later)) => {
                        pending = Some(later);
                        None
                    }
                    answer => Some(answer),
                }
            });
        match (answer, pending) {
            (Some(answer), _) => answer.map(settled),
            (None, Some(pending)) => Err(self
                .shared
                .with(|pool, reservations| reservations.give_up(pool, pending))),
            (None, None) => Err(ReserveError::PoolFull),
        }
    }

    fn complete(
        &self,
        id: &TransferId,
        reservation: Option<ReservationId>,
        effects: &mut Vec<Effect>,
    ) -> Completion {
        let now = self.now();
        self.note_asked(now);
        self.shared
            .with(|pool, reservations| reservations.complete(pool, now, id, reservation, effects))
    }

    fn cancel(
        &self,
        id: &TransferId,
        matching: CancelMatch,
        kind: CancelKind,
        effects: &mut Vec<Effect>,
    ) -> bool {
        let now = self.now();
        self.note_asked(now);
        self.shared
            .with(|pool, reservations| reservations.cancel(pool, now, id, matching, kind, effects))
    }

    fn status(&self, id: &TransferId) -> Option<ItemStatus> {
        self.note_asked(self.now());
        self.shared.with(|_, reservations| reservations.status(id))
    }

    fn expire(&self, effects: &mut Vec<Effect>) {
        let now = self.now();
        self.shared
            .with(|pool, reservations| reservations.expire(pool, now, effects));
    }

    fn snapshot(&self) -> PoolSnapshot {
        self.pool_snapshot()
    }
}

fn settled(answer: Reserve<ShardPool>) -> ReserveReply {
    match answer {
        Reserve::Granted(grant) => ReserveReply::Granted(grant),
        Reserve::Cancelled => ReserveReply::Cancelled,
        Reserve::Later(_) => unreachable!("waiting is handled by the caller"),
    }
}

/// Effects of the owner's own calls: there is no reply they could follow.
fn log_effects(effects: &[Effect]) {
    for effect in effects {
        match effect {
            Effect::FollowersLost { writer, count } => {
                tracing::warn!(%writer, count, "followers lost their writer");
            }
            Effect::PublishRefused { transfer_id } => {
                tracing::warn!(%transfer_id, "too many residents to share the item");
            }
            other => tracing::debug!(?other, "effect"),
        }
    }
}
