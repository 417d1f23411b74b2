//! A reservation machine over a toy pool with a clock one can turn.

#![allow(dead_code, reason = "each test target uses its own part")]

use ec_connector::{
    CancelKind, CancelMatch, Completion, Dtype, Effect, Grant, ItemStatus, MmHash, Moment,
    ReservationConfig, ReservationId, Reservations, Reserve, ReserveError, ReserveRequest, Taken,
    TensorSpec, TransferId,
};

use super::toy_pool::ToyPool;

pub(crate) struct Rig {
    pub(crate) pool: ToyPool,
    pub(crate) machine: Reservations<ToyPool>,
    pub(crate) now_ms: u64,
    pub(crate) effects: Vec<Effect>,
    fresh: u128,
}

pub(crate) fn id(text: &str) -> TransferId {
    TransferId::new(text).unwrap()
}

pub(crate) fn hash(text: &str) -> MmHash {
    MmHash::new(text).unwrap()
}

/// A tensor of `len` bytes.
pub(crate) fn bytes(len: u64) -> TensorSpec {
    TensorSpec::new(Dtype::UINT8, [len]).unwrap()
}

impl Rig {
    pub(crate) fn new(capacity: u64) -> Self {
        Self::with(ToyPool::new(capacity, 256), ReservationConfig::default())
    }

    pub(crate) fn with(pool: ToyPool, config: ReservationConfig) -> Self {
        Self {
            pool,
            machine: Reservations::new(config),
            now_ms: 1_000_000,
            effects: Vec::new(),
            fresh: 0,
        }
    }

    pub(crate) fn now(&self) -> Moment {
        Moment::from_millis(self.now_ms)
    }

    pub(crate) fn ask(
        &mut self,
        transfer: &str,
        mm_hash: &str,
        tensor: TensorSpec,
    ) -> Result<Reserve<ToyPool>, ReserveError> {
        self.fresh += 1;
        let request = ReserveRequest {
            transfer_id: id(transfer),
            mm_hash: hash(mm_hash),
            tensor,
        };
        let fresh = ReservationId::from_random(self.fresh);
        let now = self.now();
        self.machine
            .reserve(&mut self.pool, now, fresh, &request, &mut self.effects)
    }

    /// Reserves `len` bytes and expects a grant.
    #[track_caller]
    pub(crate) fn reserve(&mut self, transfer: &str, mm_hash: &str, len: u64) -> Grant {
        match self.ask(transfer, mm_hash, bytes(len)) {
            Ok(Reserve::Granted(grant)) => grant,
            other => panic!("{transfer} was not granted: {other:?}"),
        }
    }

    /// Reserves `len` bytes and expects to be told that the id was cancelled.
    #[track_caller]
    pub(crate) fn reserve_cancelled(&mut self, transfer: &str, mm_hash: &str, len: u64) {
        match self.ask(transfer, mm_hash, bytes(len)) {
            Ok(Reserve::Cancelled) => {}
            other => panic!("{transfer} was not cancelled: {other:?}"),
        }
    }

    /// Reserves `len` bytes and expects a refusal.
    #[track_caller]
    pub(crate) fn reserve_refused(
        &mut self,
        transfer: &str,
        mm_hash: &str,
        len: u64,
    ) -> ReserveError {
        self.ask(transfer, mm_hash, bytes(len)).unwrap_err()
    }

    pub(crate) fn complete(&mut self, transfer: &str, grant: &Grant) -> Completion {
        self.complete_as(transfer, Some(grant.reservation_id))
    }

    pub(crate) fn complete_as(
        &mut self,
        transfer: &str,
        reservation: Option<ReservationId>,
    ) -> Completion {
        let now = self.now();
        self.machine.complete(
            &mut self.pool,
            now,
            &id(transfer),
            reservation,
            &mut self.effects,
        )
    }

    /// Reserves and completes, then takes the item.
    #[track_caller]
    pub(crate) fn push_and_take(
        &mut self,
        transfer: &str,
        mm_hash: &str,
        len: u64,
    ) -> Taken<ToyPool> {
        let grant = self.reserve(transfer, mm_hash, len);
        if grant.write {
            assert!(self.complete(transfer, &grant).became_ready);
        }
        self.take(transfer, mm_hash)
    }

    /// Makes `mm_hash` a resident nobody leases.
    #[track_caller]
    pub(crate) fn make_resident(&mut self, mm_hash: &str, len: u64) {
        let taken = self.push_and_take(&format!("resident-{mm_hash}"), mm_hash, len);
        self.release(taken);
    }

    #[track_caller]
    pub(crate) fn take(&mut self, transfer: &str, mm_hash: &str) -> Taken<ToyPool> {
        self.machine
            .take(&mut self.pool, &id(transfer), &hash(mm_hash))
            .unwrap_or_else(|error| panic!("{transfer} was not taken: {error}"))
    }

    pub(crate) fn release(&mut self, taken: Taken<ToyPool>) {
        use ec_connector::Content;
        self.pool.release(taken.lease);
    }

    pub(crate) fn cancel(&mut self, transfer: &str, kind: CancelKind) -> bool {
        self.cancel_as(transfer, CancelMatch::Any, kind)
    }

    pub(crate) fn cancel_as(
        &mut self,
        transfer: &str,
        matching: CancelMatch,
        kind: CancelKind,
    ) -> bool {
        let now = self.now();
        self.machine.cancel(
            &mut self.pool,
            now,
            &id(transfer),
            matching,
            kind,
            &mut self.effects,
        )
    }

    pub(crate) fn status(&self, transfer: &str) -> Option<ItemStatus> {
        self.machine.status(&id(transfer))
    }

    pub(crate) fn expire(&mut self) -> usize {
        let now = self.now();
        self.machine.expire(&mut self.pool, now, &mut self.effects)
    }

    /// Lets time pass and expires what is overdue.
    pub(crate) fn pass(&mut self, millis: u64) -> usize {
        self.now_ms += millis;
        self.expire()
    }

    /// The ids of the ready effects since the last call, in order.
    pub(crate) fn drain_ready(&mut self) -> Vec<String> {
        let mut ready = Vec::new();
        self.effects.retain(|effect| match effect {
            Effect::Ready(status) => {
                assert!(status.is_ready());
                ready.push(status.transfer_id.to_string());
                false
            }
            _ => true,
        });
        ready
    }

    /// How many bytes are neither free nor in an idle resident.
    pub(crate) fn bytes_in_use(&mut self) -> u64 {
        let before = self.pool.free_bytes();
        let capacity = before
            + self
                .pool
                .live_spans()
                .iter()
                .map(|s| s.len_bytes)
                .sum::<u64>();
        self.pool.evict_all();
        capacity - self.pool.free_bytes()
    }
}
