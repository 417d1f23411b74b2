//! Any order of reservation operations agrees with a naive oracle, over the toy pool and over
//! slab-core's: the same answers, the same records, the same counts. Beside it runs a slab of
//! tags. Every writer scribbles over its region until it completes or abandons, so a region that
//! two owners share shows as a tag that changed. At the end all bytes are free.

#[path = "support/oracle.rs"]
mod oracle;
#[path = "support/toy_pool.rs"]
mod toy_pool;

use std::collections::BTreeMap;

use ec_connector::{
    CancelKind, CancelMatch, Content, Dtype, Effect, Grant, MmHash, Moment, ReservationConfig,
    ReservationId, ReservationState, Reservations, Reserve, ReserveError, ReserveRequest, Shutdown,
    Span, Stuck, TakeError, TakePolicy, Taken, TensorSpec, TransferId,
};
use oracle::{Expected, Oracle, Place, Role, TTL};
use proptest::prelude::{Strategy, any, prop_oneof};
use proptest::test_runner::Config;
use slab_core::{Pool, PoolConfig, PoolId};
use toy_pool::ToyPool;

const GRANULE: u64 = 256;
const GRANULES: u64 = 12;
const RESERVATIONS_MAX: usize = 6;
const TOMBSTONES_MAX: usize = 5;

#[derive(Clone, Debug)]
enum Op {
    Reserve {
        id: u8,
        hash: u8,
        len: u64,
    },
    Complete {
        id: u8,
        named: Named,
    },
    Cancel {
        id: u8,
        named: Named,
        kind: CancelKind,
    },
    Take {
        id: u8,
        hash: u8,
    },
    Retire {
        index: usize,
    },
    NextTaken,
    PollReady,
    Pass {
        millis: u64,
    },
    Expire,
    ReleaseStuck {
        id: Option<u8>,
    },
    Scribble,
    Shutdown {
        how: Shutdown,
    },
}

/// Which reservation an operation names.
#[derive(Clone, Copy, Debug)]
enum Named {
    /// The one granted last for the id.
    Last,
    /// The one granted first for the id.
    First,
    Any,
    Nameless,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let id = 0..8_u8;
    let hash = 0..3_u8;
    // Lengths in granules; more than the pool now and then.
    let len = prop_oneof![6 => 1..4_u64, 2 => 4..9_u64, 1 => 10..15_u64];
    let named = prop_oneof![
        6 => proptest::strategy::Just(Named::Last),
        1 => proptest::strategy::Just(Named::First),
        3 => proptest::strategy::Just(Named::Any),
        1 => proptest::strategy::Just(Named::Nameless),
    ];
    let kind = prop_oneof![
        4 => proptest::strategy::Just(CancelKind::Plain),
        3 => proptest::strategy::Just(CancelKind::Abandon),
        3 => proptest::strategy::Just(CancelKind::Refresh),
        1 => proptest::strategy::Just(CancelKind::RefreshOnly),
    ];
    let op = prop_oneof![
        30 => (id.clone(), hash.clone(), len)
            .prop_map(|(id, hash, len)| Op::Reserve { id, hash, len }),
        20 => (id.clone(), named.clone()).prop_map(|(id, named)| Op::Complete { id, named }),
        12 => (id.clone(), named, kind)
            .prop_map(|(id, named, kind)| Op::Cancel { id, named, kind }),
        10 => (id.clone(), hash).prop_map(|(id, hash)| Op::Take { id, hash }),
        8 => any::<usize>().prop_map(|index| Op::Retire { index }),
        4 => proptest::strategy::Just(Op::NextTaken),
        3 => proptest::strategy::Just(Op::PollReady),
        6 => (1..TTL).prop_map(|millis| Op::Pass { millis }),
        3 => proptest::strategy::Just(Op::Expire),
        2 => proptest::option::of(id).prop_map(|id| Op::ReleaseStuck { id }),
        8 => proptest::strategy::Just(Op::Scribble),
        1 => any::<u8>().prop_map(|n| match n {
            0..8 => Op::Shutdown { how: Shutdown::Finish },
            8..16 => Op::Shutdown { how: Shutdown::Cancel },
            _ => Op::Expire,
        }),
    ];
    proptest::collection::vec(op, 1..120)
}

/// A pool the property can look into.
trait Watched: Content {
    fn make() -> Self;
    fn free_bytes(&self) -> u64;
}

impl Watched for ToyPool {
    fn make() -> Self {
        Self::new(GRANULES * GRANULE, GRANULE)
    }

    fn free_bytes(&self) -> u64 {
        Self::free_bytes(self)
    }
}

impl Watched for Pool<MmHash, TensorSpec> {
    fn make() -> Self {
        let mut config = PoolConfig::new(PoolId::new(), GRANULES * GRANULE);
        config.alignment = GRANULE;
        Self::new(config).unwrap()
    }

    fn free_bytes(&self) -> u64 {
        let stats = self.stats();
        assert_eq!(
            stats.free
                + stats.owned
                + stats.resident_leased
                + stats.resident_idle
                + stats.waiting
                + stats.claimed
                + stats.quarantined,
            stats.usable
        );
        stats.free
    }
}

struct Run<C: Content> {
    pool: C,
    machine: Reservations<C>,
    oracle: Oracle,
    effects: Vec<Effect>,
    /// Owner leases in the test's hands, and the oracle's entry of each.
    leases: Vec<(C::Lease, usize)>,
    /// One tag per granule of the slab.
    slab: Vec<u64>,
    granted: BTreeMap<u8, Vec<ReservationId>>,
    fresh: u128,
}

fn id(number: u8) -> TransferId {
    TransferId::new(name(number)).unwrap()
}

fn name(number: u8) -> String {
    format!("t{number}")
}

fn hash(number: u8) -> MmHash {
    MmHash::new(format!("h{number}")).unwrap()
}

fn tensor(len: u64) -> TensorSpec {
    // Not a multiple of the granule, so what a tensor occupies is more than its bytes.
    TensorSpec::new(Dtype::UINT8, [len * GRANULE - 3]).unwrap()
}

/// What every granule of complete content holds.
fn content_tag(hash: u8, len: u64) -> u64 {
    1_000 + u64::from(hash) * 100 + len
}

/// What a writer puts into its granules while it writes; no two writers share a tag.
fn writer_tag(reservation: ReservationId) -> u64 {
    let text = reservation.to_string();
    let low = u64::from_str_radix(&text[16..], 16).unwrap();
    (low & 0xffff_ffff) + 1_000_000
}

impl<C: Watched> Run<C> {
    fn new(taken_max: Option<usize>, items_max: Option<usize>) -> Self {
        let mut config = ReservationConfig::default();
        config.ttl_ms = TTL;
        config.tombstone_ttl_ms = TTL;
        config.tombstones_max = TOMBSTONES_MAX;
        config.reservations_max = RESERVATIONS_MAX;
        config.items_max = items_max;
        if let Some(taken_max) = taken_max {
            config.take = TakePolicy::OnReady { taken_max };
        }
        let mut oracle = Oracle::new(RESERVATIONS_MAX, TOMBSTONES_MAX, taken_max);
        oracle.items_max = items_max;
        Self {
            pool: C::make(),
            machine: Reservations::new(config),
            oracle,
            effects: Vec::new(),
            leases: Vec::new(),
            slab: vec![0; GRANULES as usize],
            granted: BTreeMap::new(),
            fresh: 0,
        }
    }

    fn now(&self) -> Moment {
        Moment::from_millis(self.oracle.now)
    }

    fn apply(&mut self, op: &Op) {
        let residents = self.residents();
        match *op {
            Op::Reserve { id, hash, len } => self.reserve(id, hash, len, &residents),
            Op::Complete { id, named } => self.complete(id, named),
            Op::Cancel {
                id: number,
                named,
                kind,
            } => {
                let matching = match self.named(number, named) {
                    None => CancelMatch::Any,
                    Some(only) => CancelMatch::Only(only),
                };
                let now = self.now();
                let answer = self.machine.cancel(
                    &mut self.pool,
                    now,
                    &id(number),
                    matching,
                    kind,
                    &mut self.effects,
                );
                let expected = self
                    .oracle
                    .cancel(&name(number), self.named(number, named), kind);
                assert_eq!(answer, expected, "{op:?}");
            }
            Op::Take {
                id: number,
                hash: of,
            } => {
                if self.oracle.taken_max.is_some() {
                    return;
                }
                let taken = self.machine.take(&mut self.pool, &id(number), &hash(of));
                let expected = self.oracle.take(&name(number), of);
                match (taken, expected) {
                    (Ok(taken), Some(_)) => {
                        let item = self.oracle.taken.pop().unwrap();
                        self.keep(taken, item);
                    }
                    (Err(TakeError::NotReady), None) => {}
                    (got, expected) => panic!("{op:?}: {got:?}, not {expected:?}"),
                }
            }
            Op::NextTaken => {
                let taken = self.machine.next_taken(&mut self.pool);
                match (taken, self.oracle.next_taken()) {
                    (Some(taken), Some(item)) => self.keep(taken, item),
                    (None, None) => {}
                    (got, expected) => panic!("{got:?}, not {expected:?}"),
                }
            }
            Op::Retire { index } => {
                if !self.leases.is_empty() {
                    let (lease, entry) = self.leases.swap_remove(index % self.leases.len());
                    self.check_content(entry);
                    self.pool.release(lease);
                    self.oracle.unlease(entry);
                }
            }
            Op::PollReady => {
                if self.oracle.taken_max.is_none() {
                    let polled = self.machine.poll_ready();
                    let polled = polled.map(|status| status.transfer_id.to_string());
                    assert_eq!(polled, self.oracle.poll_ready());
                }
            }
            Op::Pass { millis } => self.oracle.now += millis,
            Op::Expire => {
                let now = self.now();
                let ended = self.machine.expire(&mut self.pool, now, &mut self.effects);
                assert_eq!(ended, self.oracle.expire());
            }
            Op::ReleaseStuck { id: number } => {
                let now = self.now();
                let id = number.map(id);
                let which = id.as_ref().map_or(Stuck::All, Stuck::One);
                let released =
                    self.machine
                        .release_stuck(&mut self.pool, now, which, &mut self.effects);
                let granules = self.oracle.release_stuck(number.map(name).as_deref());
                assert_eq!(released.bytes, granules * GRANULE);
            }
            Op::Scribble => self.scribble(),
            Op::Shutdown { how } => {
                let now = self.now();
                self.machine
                    .begin_shutdown(&mut self.pool, now, how, &mut self.effects);
                self.oracle.begin_shutdown(how);
            }
        }
        self.check(op);
    }

    fn reserve(&mut self, number: u8, of: u8, len: u64, residents: &BTreeMap<u8, u64>) {
        self.fresh += 1;
        let fresh = ReservationId::from_random(self.fresh);
        let request = ReserveRequest {
            transfer_id: id(number),
            mm_hash: hash(of),
            tensor: tensor(len),
        };
        let now = self.now();
        let answer = self
            .machine
            .reserve(&mut self.pool, now, fresh, &request, &mut self.effects);
        let id = name(number);
        let expected = self.oracle.expect_reserve(&id, of, len);
        match (expected, answer) {
            (Expected::ShuttingDown, Err(ReserveError::ShuttingDown))
            | (Expected::Cancelled, Ok(Reserve::Cancelled))
            | (Expected::ActiveWriter, Err(ReserveError::ActiveWriter { .. }))
            | (Expected::ConflictingReservation, Err(ReserveError::ConflictingReservation))
            | (Expected::ConflictingCached, Err(ReserveError::ConflictingCached))
            | (Expected::ConflictingInFlight, Err(ReserveError::ConflictingInFlight))
            | (Expected::TooMany, Err(ReserveError::TooManyReservations { .. }))
            | (Expected::ItemsUnderWay, Err(ReserveError::ItemsUnderWay { .. }))
            | (Expected::NoMoreItems, Err(ReserveError::NoMoreItems { .. })) => {}
            (Expected::Known, Ok(Reserve::Granted(grant))) => {
                let record = &self.oracle.records[&id];
                assert_eq!(grant.reservation_id, record.reservation);
                assert!(!grant.write);
                assert_eq!(grant.ready, record.state == ReservationState::Ready);
                assert_eq!(grant.cached, matches!(record.role, Role::Lessee { .. }));
                assert_eq!(place(&grant, len), record.place);
                self.oracle.touch_known(&id);
            }
            (Expected::Cached { entry }, Ok(Reserve::Granted(grant))) => {
                check_new(&grant, fresh, false, true, true);
                assert_eq!(place(&grant, len), self.oracle.entries[entry].place);
                self.grant(number, fresh);
                self.oracle.admit_cached(&id, fresh, entry);
            }
            (Expected::Follower { writer }, Ok(Reserve::Granted(grant))) => {
                check_new(&grant, fresh, false, false, false);
                assert_eq!(place(&grant, len), self.oracle.records[&writer].place);
                self.grant(number, fresh);
                self.oracle.admit_follower(&id, fresh, &writer);
            }
            (Expected::Room, Ok(Reserve::Granted(grant))) => {
                check_new(&grant, fresh, true, false, false);
                self.note_evictions();
                self.grant(number, fresh);
                let place = place(&grant, len);
                self.oracle.admit_writer(&id, fresh, of, len, place);
                self.scribble();
            }
            (Expected::Room, Err(error @ (ReserveError::PoolFull | ReserveError::TooLarge))) => {
                assert_eq!(error == ReserveError::TooLarge, len > GRANULES);
                // A reserve that fails evicts nothing.
                let after_expiry: BTreeMap<u8, u64> = residents.clone();
                assert_eq!(self.residents(), after_expiry);
            }
            (expected, answer) => panic!("{request:?}: {answer:?}, not {expected:?}"),
        }
    }

    fn complete(&mut self, number: u8, named: Named) {
        let reservation = self.named(number, named).flatten();
        let writer = self
            .oracle
            .records
            .get(&name(number))
            .filter(|record| {
                matches!(record.role, Role::Writer) && Some(record.reservation) == reservation
            })
            .cloned();
        if let Some(writer) = &writer {
            // The writer's last bytes land just before it says that it is done.
            self.check_tag(writer.place, writer_tag(writer.reservation));
            self.fill(writer.place, content_tag(writer.hash, writer.len));
        }
        let now = self.now();
        let done = self.machine.complete(
            &mut self.pool,
            now,
            &id(number),
            reservation,
            &mut self.effects,
        );
        let expected = self.oracle.complete(&name(number), reservation);
        assert_eq!((done.completed, done.became_ready), expected);
    }

    /// Nothing for any reservation, else the one meant.
    fn named(&self, number: u8, named: Named) -> Option<Option<ReservationId>> {
        let granted = self.granted.get(&number);
        match named {
            Named::Any => None,
            Named::Nameless => Some(None),
            Named::First => Some(granted.and_then(|ids| ids.first().copied())),
            Named::Last => Some(granted.and_then(|ids| ids.last().copied())),
        }
    }

    fn grant(&mut self, number: u8, reservation: ReservationId) {
        self.granted.entry(number).or_default().push(reservation);
    }

    fn keep(&mut self, taken: Taken<C>, item: oracle::TakenItem) {
        assert_eq!(taken.transfer_id.as_str(), item.id);
        assert_eq!(taken.cached, item.cached);
        let entry = &self.oracle.entries[item.entry];
        assert_eq!(taken.tensor, tensor(entry.len));
        let span = C::lease_span(&taken.lease);
        assert_eq!(granules(span), entry.place);
        self.check_content(item.entry);
        self.leases.push((taken.lease, item.entry));
    }

    /// Every writer writes: those that were cancelled or expired as well.
    fn scribble(&mut self) {
        let writers: Vec<(Place, u64)> = self
            .oracle
            .records
            .values()
            .filter(|record| matches!(record.role, Role::Writer))
            .map(|record| (record.place, writer_tag(record.reservation)))
            .collect();
        for (place, tag) in writers {
            self.fill(place, tag);
        }
    }

    fn fill(&mut self, place: Place, tag: u64) {
        for granule in place.offset..place.offset + place.len {
            self.slab[granule as usize] = tag;
        }
    }

    fn check_tag(&self, place: Place, tag: u64) {
        for granule in place.offset..place.offset + place.len {
            assert_eq!(self.slab[granule as usize], tag, "somebody else wrote here");
        }
    }

    fn check_content(&self, entry: usize) {
        let entry = &self.oracle.entries[entry];
        assert!(entry.alive);
        self.check_tag(entry.place, content_tag(entry.hash, entry.len));
    }

    /// The hashes that are resident, and the length of each.
    fn residents(&self) -> BTreeMap<u8, u64> {
        (0..3)
            .filter_map(|number| {
                let tensor = self.pool.tensor(&hash(number))?;
                Some((number, tensor.len_bytes().div_ceil(GRANULE)))
            })
            .collect()
    }

    /// Takes over what the pool evicted; only idle residents may go.
    fn note_evictions(&mut self) {
        for number in 0..3 {
            if let Some(entry) = self.oracle.current(number)
                && self.pool.tensor(&hash(number)).is_none()
            {
                let entry = &mut self.oracle.entries[entry];
                assert_eq!(entry.leases, 0, "a leased resident was evicted");
                entry.alive = false;
            }
        }
    }

    fn check(&mut self, op: &Op) {
        let announced: Vec<String> = self
            .effects
            .drain(..)
            .filter_map(|effect| match effect {
                Effect::Ready(status) => Some(status.transfer_id.to_string()),
                Effect::PublishRefused { .. } => panic!("the pool has room for all residents"),
                _ => None,
            })
            .collect();
        assert_eq!(
            announced,
            std::mem::take(&mut self.oracle.announced),
            "{op:?}"
        );

        for number in 0..8 {
            let status = self.machine.status(&id(number));
            let record = self.oracle.records.get(&name(number));
            assert_eq!(status.is_some(), record.is_some(), "{op:?}: t{number}");
            if let (Some(status), Some(record)) = (status, record) {
                assert_eq!(status.state, record.state, "{op:?}: t{number}");
                assert_eq!(status.reservation_id, record.reservation);
                assert_eq!(status.mm_hash, hash(record.hash));
                assert_eq!(status.tensor, tensor(record.len));
                assert_eq!(status.cached, !record.written);
            }
        }
        for number in 0..3 {
            let leases = self.pool.lease_count(&hash(number));
            let entry = self.oracle.current(number);
            let expected = entry.map(|entry| self.oracle.entries[entry].leases as u64);
            assert_eq!(leases, expected, "{op:?}: leases on h{number}");
        }
        self.check_counts(op);

        let mut places = self.oracle.places();
        let used: u64 = places.iter().map(|place| place.len).sum();
        assert_eq!(
            self.pool.free_bytes(),
            (GRANULES - used) * GRANULE,
            "{op:?}: bytes lost or found"
        );
        places.sort_by_key(|place| place.offset);
        for pair in places.windows(2) {
            assert!(pair[0].offset + pair[0].len <= pair[1].offset, "{op:?}");
        }
        for record in self.oracle.records.values() {
            if record.state == ReservationState::Ready {
                self.check_tag(record.place, content_tag(record.hash, record.len));
            }
        }
        for entry in 0..self.oracle.entries.len() {
            if self.oracle.entries[entry].alive {
                self.check_content(entry);
            }
        }
    }

    fn check_counts(&self, op: &Op) {
        let stats = self.machine.stats();
        let count = |state: ReservationState, follower: bool| {
            self.oracle
                .records
                .values()
                .filter(|record| {
                    record.state == state
                        && matches!(record.role, Role::Follower { .. }) == follower
                })
                .count()
        };
        let deferred = count(ReservationState::CancelPending, false)
            + count(ReservationState::ExpirePending, false);
        assert_eq!(
            (stats.writing, stats.following, stats.ready),
            (
                count(ReservationState::Writing, false),
                count(ReservationState::Writing, true),
                count(ReservationState::Ready, false),
            ),
            "{op:?}"
        );
        assert_eq!(stats.cancel_pending + stats.expire_pending, deferred);
        assert_eq!(self.machine.writers_outstanding(), deferred + stats.writing);
        let stuck: u64 = self
            .oracle
            .records
            .values()
            .filter(|record| {
                matches!(
                    record.state,
                    ReservationState::CancelPending | ReservationState::ExpirePending
                )
            })
            .map(|record| record.place.len * GRANULE)
            .sum();
        assert_eq!(stats.stuck_bytes, stuck, "{op:?}");
        assert_eq!(stats.tombstones, self.oracle.tombstones.len(), "{op:?}");
        assert_eq!(stats.taken_waiting, self.oracle.taken.len(), "{op:?}");
        let exhausted = self.oracle.shutdown.is_some()
            && self.oracle.taken.is_empty()
            && !self.oracle.records.values().any(|record| {
                record.state == ReservationState::Writing || record.unreported.is_some()
            });
        assert_eq!(self.machine.is_exhausted(), exhausted, "{op:?}");
        if let Some(max) = self.oracle.items_max {
            assert!(self.oracle.handed.len() <= max, "{op:?}: too many items");
        }
    }

    /// Completes or abandons every writer, lets the rest expire, gives every lease back and drops
    /// every resident: all bytes are free.
    fn wind_up(mut self) {
        for number in 0..8 {
            if number % 2 == 0 {
                self.apply(&Op::Complete {
                    id: number,
                    named: Named::Last,
                });
            } else {
                self.apply(&Op::Cancel {
                    id: number,
                    named: Named::Any,
                    kind: CancelKind::Abandon,
                });
            }
        }
        self.apply(&Op::Pass { millis: 10 * TTL });
        self.apply(&Op::Expire);
        while !self.oracle.taken.is_empty() {
            self.apply(&Op::NextTaken);
        }
        while !self.leases.is_empty() {
            self.apply(&Op::Retire { index: 0 });
        }
        assert_eq!(self.machine.writers_outstanding(), 0);
        for number in 0..3 {
            self.pool.evict(&hash(number));
        }
        assert_eq!(self.pool.free_bytes(), GRANULES * GRANULE);
    }
}

fn granules(span: Span) -> Place {
    assert_eq!(span.offset % GRANULE, 0);
    assert_eq!(span.len_bytes % GRANULE, 0);
    Place {
        offset: span.offset / GRANULE,
        len: span.len_bytes / GRANULE,
    }
}

fn place(grant: &Grant, len: u64) -> Place {
    assert_eq!(grant.len_bytes, len * GRANULE - 3);
    assert_eq!(grant.offset % GRANULE, 0);
    Place {
        offset: grant.offset / GRANULE,
        len,
    }
}

fn check_new(grant: &Grant, fresh: ReservationId, write: bool, ready: bool, cached: bool) {
    assert_eq!(grant.reservation_id, fresh);
    assert_eq!(
        (grant.write, grant.ready, grant.cached),
        (write, ready, cached)
    );
}

fn check<C: Watched>(taken_max: Option<usize>, items_max: Option<usize>, ops: &[Op]) {
    let mut run = Run::<C>::new(taken_max, items_max);
    for op in ops {
        run.apply(op);
    }
    run.wind_up();
}

fn config() -> Config {
    Config {
        cases: 1024,
        // A failing case becomes a test of its own rather than a file of seeds.
        failure_persistence: None,
        ..Config::default()
    }
}

proptest::proptest! {
    #![proptest_config(config())]

    // row: C3.7a, M14, V5, V8, V9, V12
    #[test]
    fn property_reservations_agree_with_the_oracle_over_the_toy_pool(ops in ops()) {
        check::<ToyPool>(None, None, &ops);
    }

    // row: C3.7a, M14, V4b
    #[test]
    fn property_reservations_agree_with_the_oracle_over_the_real_pool(ops in ops()) {
        check::<Pool<MmHash, TensorSpec>>(None, None, &ops);
    }

    #[test]
    fn property_taking_on_ready_agrees_with_the_oracle(ops in ops()) {
        check::<Pool<MmHash, TensorSpec>>(Some(2), None, &ops);
    }

    #[test]
    fn property_no_more_items_than_wanted_are_ever_handed_out(
        ops in ops(),
        on_ready in any::<bool>(),
        items_max in 1..5_usize,
    ) {
        check::<ToyPool>(on_ready.then_some(2), Some(items_max), &ops);
    }
}
