//! The machine's state, and what becomes of ready records.

use std::collections::{HashMap, VecDeque};

use super::book::Book;
use super::quota::Quota;
use super::record::{Held, Stage};
use super::tombstone::Tombstones;
use super::types::{
    Effect, ItemStatus, OwnedSpan, ReservationConfig, ReservationState, ReservationStats, Shutdown,
    TakeError, TakePolicy, Taken,
};
use crate::content::Content;
use crate::moment::Moment;
use crate::name::{MmHash, TransferId};

/// The reservations of one consumer shard.
///
/// Every call that may give memory back, wake somebody or make an item ready takes the pool and
/// the time. Time that goes back is read as standing still.
///
/// # Complexity
/// Each call is O(log records) plus, once per record, the work of expiring it, and for a
/// completed or lost writer the number of its followers. Nothing scans all records except
/// [`begin_shutdown`](Self::begin_shutdown), [`release_stuck`](Self::release_stuck) of all, and
/// [`owned_spans`](Self::owned_spans).
///
/// # Examples
/// One push, from the reservation to the owner lease:
/// ```
/// use ec_connector::{
///     Dtype, MmHash, Moment, ReservationConfig, ReservationId, Reservations, Reserve,
///     ReserveRequest, TensorSpec, TransferId,
/// };
/// use slab_core::{Pool, PoolConfig, PoolId};
///
/// let mut pool: Pool<MmHash, TensorSpec> = Pool::new(PoolConfig::new(PoolId::new(), 1 << 20))?;
/// let mut machine = Reservations::new(ReservationConfig::default());
/// let mut effects = Vec::new();
/// let now = Moment::from_millis(0);
/// let request = ReserveRequest {
///     transfer_id: TransferId::new("push-1")?,
///     mm_hash: MmHash::new("image-1")?,
///     tensor: TensorSpec::new(Dtype::BFLOAT16, [256, 1152])?,
/// };
///
/// let fresh = ReservationId::from_random(1);
/// let answer = machine.reserve(&mut pool, now, fresh, &request, &mut effects)?;
/// let Reserve::Granted(grant) = answer else {
///     panic!("nothing was cancelled and the pool is empty");
/// };
/// assert!(grant.write);
/// // The peer writes its bytes at `grant.offset`, then completes.
/// let id = &request.transfer_id;
/// let named = Some(grant.reservation_id);
/// assert!(machine.complete(&mut pool, now, id, named, &mut effects).became_ready);
/// let taken = machine.take(&mut pool, id, &request.mm_hash)?;
/// // Dropping the owner lease makes the content evictable; until then it stays.
/// pool.release(taken.lease, &[]).map_err(|refused| refused.cause)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Reservations<C: Content> {
    pub(super) config: ReservationConfig,
    pub(super) book: Book<C>,
    /// The latest record of each hash that was told to write, while it is active.
    pub(super) writers: HashMap<MmHash, TransferId>,
    pub(super) tombstones: Tombstones,
    pub(super) taken: VecDeque<Taken<C>>,
    pub(super) shutdown: Option<Shutdown>,
    pub(super) quota: Quota,
    /// Orders followers by joining and ready items by becoming ready.
    pub(super) sequence: u64,
    pub(super) latest: Moment,
    pub(super) totals: ReservationStats,
}

impl<C: Content> Reservations<C> {
    /// Starts without any reservation.
    pub fn new(config: ReservationConfig) -> Self {
        Self {
            tombstones: Tombstones::new(config.tombstone_ttl_ms, config.tombstones_max),
            book: Book::new(),
            writers: HashMap::new(),
            taken: VecDeque::new(),
            shutdown: None,
            quota: Quota::new(config.items_max),
            config,
            sequence: 0,
            latest: Moment::default(),
            totals: ReservationStats::default(),
        }
    }

    /// The active record of an id; nothing when it is unknown or finished.
    pub fn status(&self, id: &TransferId) -> Option<ItemStatus> {
        self.book.get(id).map(|record| record.status(id))
    }

    /// Turns a ready record into the caller's owner lease and forgets the id.
    ///
    /// # Errors
    /// [`TakeError`]; the record is as it was.
    pub fn take(
        &mut self,
        memory: &mut C,
        id: &TransferId,
        mm_hash: &MmHash,
    ) -> Result<Taken<C>, TakeError> {
        match self.book.get(id) {
            Some(record)
                if record.state() == ReservationState::Ready && record.mm_hash == *mm_hash => {}
            _ => return Err(TakeError::NotReady),
        }
        self.take_record(memory, id)
    }

    /// Fetches the next item that [`TakePolicy::OnReady`] took, and takes those that had to wait
    /// for a place in the list.
    pub fn next_taken(&mut self, memory: &mut C) -> Option<Taken<C>> {
        let taken = self.taken.pop_front();
        self.take_ready(memory);
        // An item the pool refused before may have entered an empty list only now.
        taken.or_else(|| self.taken.pop_front())
    }

    /// The next ready record that was not reported yet, in the order of becoming ready.
    ///
    /// Derived from the records, so an event that was lost on the wire hides nothing.
    pub fn poll_ready(&mut self) -> Option<ItemStatus> {
        let id = self.book.first_unreported()?;
        self.book.report(&id);
        self.quota.count(&id);
        self.status(&id)
    }

    /// Whether [`begin_shutdown`](Self::begin_shutdown) was called.
    pub fn is_shutting_down(&self) -> bool {
        self.shutdown.is_some()
    }

    /// Whether a shutdown has left nothing to come: nobody writes what could become ready, and all that is ready
    /// was reported or taken.
    ///
    /// Writers that were cancelled or expired may be outstanding all the same: they hold memory, but nobody gets
    /// what they write.
    pub fn is_exhausted(&self) -> bool {
        let counts = self.book.counts();
        self.is_shutting_down()
            && self.taken.is_empty()
            && counts.writing + counts.following == 0
            && self.book.first_unreported().is_none()
    }

    /// Number of records whose writer may still write; followers are none (row V17).
    pub fn writers_outstanding(&self) -> usize {
        let counts = self.book.counts();
        counts.writing + counts.cancel_pending + counts.expire_pending
    }

    /// Counts now, and totals since the start. O(1).
    pub fn stats(&self) -> ReservationStats {
        let counts = self.book.counts();
        ReservationStats {
            taken_waiting: self.taken.len(),
            tombstones: self.tombstones.len(),
            tombstones_dropped: self.tombstones.dropped_early(),
            ready_expired: self.totals.ready_expired,
            writers_expired: self.totals.writers_expired,
            followers_lost: self.totals.followers_lost,
            publishes_refused: self.totals.publishes_refused,
            ..counts
        }
    }

    /// The memory that records own alone, in no order; for drawing the slab map.
    pub fn owned_spans(&self) -> impl Iterator<Item = OwnedSpan> {
        self.book.iter().filter_map(|(_, record)| record.owned())
    }

    /// What every reserve does first.
    pub(super) fn begin(
        &mut self,
        memory: &mut C,
        now: Moment,
        effects: &mut Vec<Effect>,
    ) -> Moment {
        self.expire(memory, now, effects);
        self.latest
    }

    pub(super) fn clock(&mut self, now: Moment) -> Moment {
        self.latest = self.latest.max(now);
        self.latest
    }

    pub(super) fn next_sequence(&mut self) -> u64 {
        self.sequence += 1;
        self.sequence
    }

    pub(super) fn ready_stage(&mut self, held: Held<C>) -> Stage<C> {
        Stage::Ready {
            held,
            unreported: Some(self.next_sequence()),
        }
    }

    /// When an item that is ready from `now` on expires.
    ///
    /// One that the machine itself will take only waits for a place in the list: it was acknowledged, and an owner who
    /// is behind still gets it. It holds its memory meanwhile, which holds up whoever asks for more.
    pub(super) fn ready_deadline(&self, now: Moment) -> Option<Moment> {
        match self.config.take {
            TakePolicy::Caller => Some(now.after_millis(self.config.ttl_ms)),
            TakePolicy::OnReady { .. } => None,
        }
    }

    /// With [`TakePolicy::OnReady`], takes ready records while the list has room.
    pub(super) fn take_ready(&mut self, memory: &mut C) {
        let TakePolicy::OnReady { taken_max } = self.config.take else {
            return;
        };
        while self.taken.len() < taken_max.max(1) {
            let Some(id) = self.book.first_unreported() else {
                return;
            };
            // A refusal is counted, and tried again in the next call that can make items ready.
            match self.take_record(memory, &id) {
                Ok(taken) => self.taken.push_back(taken),
                Err(_) => return,
            }
        }
    }

    /// Takes a ready record; its allocation becomes a resident if it is none yet.
    fn take_record(&mut self, memory: &mut C, id: &TransferId) -> Result<Taken<C>, TakeError> {
        let Some(mut record) = self.book.lift(id) else {
            return Err(TakeError::NotReady);
        };
        let (held, unreported) = match record.stage {
            Stage::Ready { held, unreported } => (held, unreported),
            stage => {
                record.stage = stage;
                self.book.place(id.clone(), record);
                return Err(TakeError::NotReady);
            }
        };
        let lease = match held {
            Held::Lease(lease) => lease,
            Held::Allocation(allocation) => {
                match memory.publish(&record.mm_hash, allocation, &record.tensor) {
                    Ok(lease) => lease,
                    Err(allocation) => {
                        self.totals.publishes_refused += 1;
                        record.stage = Stage::Ready {
                            held: Held::Allocation(allocation),
                            unreported,
                        };
                        self.book.place(id.clone(), record);
                        return Err(TakeError::PublishRefused);
                    }
                }
            }
        };
        self.quota.count(id);
        Ok(Taken {
            transfer_id: id.clone(),
            mm_hash: record.mm_hash,
            tensor: record.tensor,
            reservation_id: record.reservation_id,
            cached: !record.written,
            lease,
        })
    }
}
