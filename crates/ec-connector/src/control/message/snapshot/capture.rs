//! A snapshot of a pool and the reservations on it.

use std::collections::HashMap;
use std::hash::BuildHasher;

use slab_core::{Pool, RunState};

use super::{MapState, PoolSnapshot, ReservationCounts, SlabMap, StateBytes, Totals};
use crate::content::Span;
use crate::name::MmHash;
use crate::reservation::{ReservationState, Reservations};
use crate::tensor::TensorSpec;

impl PoolSnapshot {
    /// Looks at a pool and the reservations on it, inside the lock around both.
    ///
    /// # Complexity
    /// O(runs of the slab + records), for people and tests; not for every request.
    pub fn capture<S: BuildHasher>(
        pool: &Pool<MmHash, TensorSpec, S>,
        reservations: &Reservations<Pool<MmHash, TensorSpec, S>>,
    ) -> Self {
        let stats = pool.stats();
        let records = reservations.stats();
        let owned: HashMap<u64, MapState> = reservations
            .owned_spans()
            .map(|owned| {
                let state = match owned.state {
                    ReservationState::Writing => MapState::Writing,
                    ReservationState::Ready => MapState::Ready,
                    ReservationState::CancelPending | ReservationState::ExpirePending => {
                        MapState::Stuck
                    }
                };
                (owned.span.offset, state)
            })
            .collect();
        let mut bytes = StateBytes::default();
        let runs: Vec<(Span, MapState)> = pool
            .runs()
            .map(|run| {
                let state = match run.state {
                    RunState::Free => MapState::Free,
                    RunState::Caller => owned
                        .get(&run.region.offset())
                        .copied()
                        .unwrap_or(MapState::Owned),
                    RunState::Resident { leases: 0 } => MapState::Resident,
                    RunState::Resident { .. } => MapState::Leased,
                    RunState::Waiting => MapState::Waiting,
                    RunState::Claimed => MapState::Claimed,
                    RunState::Quarantined => MapState::Quarantined,
                    // A state this crate does not know is not free, whatever else it is.
                    _ => MapState::Owned,
                };
                bytes.add(state, run.region.len());
                (Span::from(run.region), state)
            })
            .collect();
        Self {
            capacity: stats.capacity,
            usable: stats.usable,
            bytes,
            largest_free: stats.largest_free,
            residents: stats.residents,
            leases: stats.leases,
            taken_waiting: records.taken_waiting as u64,
            reservations: ReservationCounts {
                writing: records.writing as u64,
                following: records.following as u64,
                ready: records.ready as u64,
                cancel_pending: records.cancel_pending as u64,
                expire_pending: records.expire_pending as u64,
            },
            tombstones: records.tombstones as u64,
            totals: Totals {
                ready_expired: records.ready_expired,
                writers_expired: records.writers_expired,
                followers_lost: records.followers_lost,
                tombstones_dropped: records.tombstones_dropped,
                publishes_refused: records.publishes_refused,
                events_dropped: 0,
                evictions: stats.evictions,
                evicted_bytes: stats.evicted_bytes,
            },
            map: SlabMap::draw(&runs, pool.alignment()),
        }
    }
}

#[cfg(test)]
mod tests {
    use slab_core::{PoolConfig, PoolId};

    use super::*;
    use crate::dtype::Dtype;
    use crate::moment::Moment;
    use crate::name::{ReservationId, TransferId};
    use crate::reservation::{CancelKind, CancelMatch, ReservationConfig, Reserve, ReserveRequest};

    type SlabPool = Pool<MmHash, TensorSpec>;

    struct Rig {
        pool: SlabPool,
        machine: Reservations<SlabPool>,
    }

    impl Rig {
        fn reserve(&mut self, name: &str, len: u64) -> ReservationId {
            let request = ReserveRequest {
                transfer_id: TransferId::new(name).unwrap(),
                mm_hash: MmHash::new(name).unwrap(),
                tensor: TensorSpec::new(Dtype::UINT8, [len]).unwrap(),
            };
            let fresh = ReservationId::from_random(len.into());
            let now = Moment::default();
            let answer =
                self.machine
                    .reserve(&mut self.pool, now, fresh, &request, &mut Vec::new());
            match answer {
                Ok(Reserve::Granted(grant)) => grant.reservation_id,
                other => panic!("{other:?}"),
            }
        }

        fn complete(&mut self, name: &str, reservation: ReservationId) {
            let id = TransferId::new(name).unwrap();
            let now = Moment::default();
            let done =
                self.machine
                    .complete(&mut self.pool, now, &id, Some(reservation), &mut Vec::new());
            assert!(done.became_ready);
        }
    }

    #[test]
    fn every_byte_is_counted_in_the_state_it_is_in() {
        let pool = SlabPool::new(PoolConfig::new(PoolId::new(), 8192 + 100)).unwrap();
        let machine = Reservations::new(ReservationConfig::default());
        let mut rig = Rig { pool, machine };
        let reservation = rig.reserve("leased", 256);
        rig.complete("leased", reservation);
        let id = TransferId::new("leased").unwrap();
        let hash = MmHash::new("leased").unwrap();
        let taken = rig.machine.take(&mut rig.pool, &id, &hash).unwrap();
        let reservation = rig.reserve("resident", 512);
        rig.complete("resident", reservation);
        let id = TransferId::new("resident").unwrap();
        let hash = MmHash::new("resident").unwrap();
        let idle = rig.machine.take(&mut rig.pool, &id, &hash).unwrap();
        rig.pool.release(idle.lease, &[]).unwrap();
        let reservation = rig.reserve("ready", 1024);
        rig.complete("ready", reservation);
        rig.reserve("writing", 300);
        rig.reserve("stuck", 1280);
        let stuck = TransferId::new("stuck").unwrap();
        assert!(rig.machine.cancel(
            &mut rig.pool,
            Moment::default(),
            &stuck,
            CancelMatch::Any,
            CancelKind::Plain,
            &mut Vec::new(),
        ));
        let slab_core::Reserve::Ready(own) = rig.pool.reserve(256) else {
            panic!("no room");
        };

        let snapshot = PoolSnapshot::capture(&rig.pool, &rig.machine);
        assert_eq!((snapshot.capacity, snapshot.usable), (8292, 8192));
        let bytes = snapshot.bytes;
        assert_eq!(bytes.total(), 8192);
        assert_eq!(
            (bytes.leased, bytes.resident, bytes.ready),
            (256, 512, 1024)
        );
        assert_eq!((bytes.writing, bytes.stuck, bytes.owned), (512, 1280, 256));
        assert_eq!(snapshot.leases, 1);
        assert_eq!(snapshot.reservations.ready, 1);
        assert_eq!(snapshot.reservations.cancel_pending, 1);
        let drawn: u64 = snapshot.map.runs.iter().map(|run| run.len).sum();
        assert_eq!(drawn, 8192);
        for state in [MapState::Leased, MapState::Stuck, MapState::Owned] {
            let of_state = snapshot.map.runs.iter().filter(|run| run.state == state);
            let sum: u64 = of_state.map(|run| run.len).sum();
            assert_eq!(sum, bytes.of(state), "{state:?}");
        }

        // It travels and comes back whole.
        let text = serde_json::to_string(&snapshot).unwrap();
        let back: PoolSnapshot = serde_json::from_str(&text).unwrap();
        assert_eq!(back, snapshot);
        assert!(text.contains(r#""state":"leased""#));
        rig.pool.free(own, &[]).unwrap();
        rig.pool.release(taken.lease, &[]).unwrap();
    }
}
