//! Drives a pool and its oracle through the same calls and compares them after each.

use std::collections::BTreeSet;
use std::hash::RandomState;

use slab_core::{
    Allocation, Claim, Credit, Error, Evict, Fence, Heap, Inline, Lease, Placement, Pool,
    PoolConfig, PoolId, Reclaimed, Refused, Region, Reserve, RunState, Store, TimelineId,
};
use slab_model::{
    Answer, FencePick, NaivePool, Polled, PoolOp, Published, Run, RunKind, ShadowMemory,
};

pub(crate) const ALIGNMENT: u64 = 256;

/// A token of the pool under its number in the oracle.
struct Held<T> {
    number: u64,
    token: T,
}

pub(crate) struct Harness<St: Store = Heap, E: Evict = Credit<St>> {
    pool: Pool<u32, u32, RandomState, St, E>,
    oracle: NaivePool,
    shadow: ShadowMemory,
    config: PoolConfig,
    allocations: Vec<Held<Allocation>>,
    leases: Vec<Held<Lease>>,
    claims: Vec<Held<Claim>>,
    timelines: Vec<TimelineId>,
    next: u64,
    /// Whether the policy is least recently used.
    is_lru: bool,
}

/// Room for more than a slab of the tests can be cut into, times three timelines.
pub(crate) type InlineStore = Inline<640, 384>;

impl Harness {
    /// With the default policy.
    pub(crate) fn new(
        granules: u64,
        placement: Placement,
        adjust: impl FnOnce(&mut PoolConfig),
    ) -> Self {
        Self::with_policy(granules, placement, adjust, Credit::new(16), false)
    }
}

impl Harness<InlineStore> {
    /// With the default policy and no heap.
    pub(crate) fn new_inline(
        granules: u64,
        placement: Placement,
        adjust: impl FnOnce(&mut PoolConfig),
    ) -> Self {
        let config = config(granules, placement, adjust);
        let pool = Pool::new_inline(config.clone(), RandomState::new());
        Self::of(granules, config, pool, false)
    }
}

impl<E: Evict> Harness<Heap, E> {
    pub(crate) fn with_policy(
        granules: u64,
        placement: Placement,
        adjust: impl FnOnce(&mut PoolConfig),
        policy: E,
        is_lru: bool,
    ) -> Self {
        let config = config(granules, placement, adjust);
        let pool = Pool::with_policy(config.clone(), RandomState::new(), policy)
            .expect("valid configuration");
        Self::of(granules, config, pool, is_lru)
    }
}

fn config(granules: u64, placement: Placement, adjust: impl FnOnce(&mut PoolConfig)) -> PoolConfig {
    // A tail that is not a whole granule.
    let mut config = PoolConfig::new(PoolId::new(), granules * ALIGNMENT + 100);
    config.alignment = ALIGNMENT;
    config.placement = placement;
    config.timelines_max = 3;
    config.runs_reserved = 0;
    config.residents_reserved = 0;
    adjust(&mut config);
    config
}

impl<St: Store, E: Evict> Harness<St, E> {
    fn of(
        granules: u64,
        config: PoolConfig,
        pool: Pool<u32, u32, RandomState, St, E>,
        is_lru: bool,
    ) -> Self {
        Self {
            pool,
            oracle: NaivePool::new(
                granules,
                config.residents_max as usize,
                config.claims_max as usize,
                config.timelines_max as usize,
            ),
            shadow: ShadowMemory::new(granules),
            config,
            allocations: Vec::new(),
            leases: Vec::new(),
            claims: Vec::new(),
            timelines: Vec::new(),
            next: 1,
            is_lru,
        }
    }

    pub(crate) fn apply(&mut self, op: &PoolOp) {
        match op {
            PoolOp::Reserve { len } => self.reserve(*len),
            PoolOp::Publish { held, key, meta } => self.publish(*held, *key, *meta),
            PoolOp::Acquire { key } => self.acquire(*key),
            PoolOp::Release { lease, fences } => self.release(*lease, fences),
            PoolOp::Free { held, fences } => self.free(*held, fences),
            PoolOp::Quarantine { held } => {
                if let Some(Held { number, token }) = take(&mut self.allocations, *held) {
                    self.pool.quarantine(token).expect("own token");
                    self.oracle.quarantine(number);
                }
            }
            PoolOp::Evict { key } => {
                assert_eq!(self.pool.evict(key), self.oracle.evict(*key));
            }
            PoolOp::AddTimeline => self.add_timeline(),
            PoolOp::Reach { timeline, by } => {
                if !self.timelines.is_empty() {
                    let index = timeline % self.timelines.len();
                    self.reach(index, self.oracle.reached(index) + by);
                }
            }
            PoolOp::Fail { timeline } => {
                if !self.timelines.is_empty() {
                    let index = timeline % self.timelines.len();
                    self.pool
                        .handle_failed(self.timelines[index])
                        .expect("own timeline");
                    self.oracle.fail(index);
                }
            }
            PoolOp::Poll { claim } => self.poll(*claim),
            PoolOp::DropClaim { claim } => {
                if let Some(Held { number, token }) = take(&mut self.claims, *claim) {
                    self.pool.drop_claim(token).expect("own token");
                    self.oracle.drop_claim(number);
                }
            }
            PoolOp::Drain => self.drain(),
        }
        self.check();
    }

    /// Ends every token and every wait: all bytes but the quarantined ones are free or idle.
    pub(crate) fn give_everything_back(mut self) {
        while !self.claims.is_empty() {
            self.apply(&PoolOp::DropClaim { claim: 0 });
        }
        while !self.leases.is_empty() {
            self.apply(&PoolOp::Release {
                lease: 0,
                fences: Vec::new(),
            });
        }
        while !self.allocations.is_empty() {
            self.apply(&PoolOp::Free {
                held: 0,
                fences: Vec::new(),
            });
        }
        for index in 0..self.timelines.len() {
            self.reach(index, 1_000_000);
            self.check();
        }
        for key in self.oracle.keys() {
            self.apply(&PoolOp::Evict { key });
        }
        let stats = self.pool.stats();
        assert_eq!(stats.free + stats.quarantined, stats.usable, "{stats}");
        assert_eq!((stats.leases, stats.claims, stats.displaced), (0, 0, 0));
    }

    fn fresh(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn reserve(&mut self, len: u64) {
        let before = self.keys();
        let reserve = self.pool.reserve(len);
        let evicted = self.evicted_since(&before);
        let number = self.fresh();
        let answer = match &reserve {
            Reserve::Ready(allocation) => {
                assert_eq!(allocation.len(), len);
                Answer::Ready {
                    start: allocation.offset() / ALIGNMENT,
                }
            }
            Reserve::Later(claim) => {
                assert_eq!(claim.len(), len);
                let (start, len) = granules(
                    self.pool
                        .claim_window(claim)
                        .expect("a fresh claim has one"),
                );
                Answer::Later {
                    claim: number,
                    start,
                    len,
                }
            }
            Reserve::Full => Answer::Full,
            Reserve::TooLarge => Answer::TooLarge,
        };
        self.oracle
            .reserve(number, len.div_ceil(ALIGNMENT), &evicted, answer);
        match reserve {
            Reserve::Ready(token) => self.hold(number, token),
            Reserve::Later(token) => self.claims.push(Held { number, token }),
            Reserve::Full | Reserve::TooLarge => {}
        }
    }

    /// The owner of a new allocation writes to it at once.
    fn hold(&mut self, number: u64, token: Allocation) {
        let (start, len) = granules(token.region());
        self.shadow.write(start, len, number);
        self.allocations.push(Held { number, token });
    }

    fn publish(&mut self, pick: usize, key: u32, meta: u32) {
        let Some(Held { number, token }) = take(&mut self.allocations, pick) else {
            return;
        };
        let (region, len) = (token.region(), token.len());
        let before = self.keys();
        let published = self.pool.publish(key, token, meta);
        let evicted = self.evicted_since(&before);
        if self.is_lru && !evicted.is_empty() {
            assert_eq!(evicted, self.oracle.idle_keys()[..1]);
        }
        let expected = self.oracle.publish(number, len, key, meta, &evicted);
        match (expected, published) {
            (Published::Existing(resident), Ok(token)) => {
                assert_eq!(self.keys(), before);
                self.leases.push(Held {
                    number: resident,
                    token,
                });
            }
            (Published::New(resident), Ok(token)) => {
                assert_eq!((token.region(), token.len()), (region, len));
                // From now on the content counts, not who wrote it.
                let (start, len) = granules(region);
                self.shadow.verify(start, len, number);
                self.shadow.write(start, len, content(resident));
                self.leases.push(Held {
                    number: resident,
                    token,
                });
            }
            (
                Published::Refused,
                Err(Refused {
                    value: (same_key, token, same_meta),
                    cause,
                }),
            ) => {
                assert_eq!((same_key, same_meta), (key, meta));
                let residents_max = self.config.residents_max;
                assert_eq!(cause, Error::TooManyResidents { residents_max });
                self.allocations.push(Held { number, token });
            }
            (expected, got) => panic!("{got:?} instead of {expected:?}"),
        }
    }

    fn acquire(&mut self, key: u32) {
        match (self.oracle.acquire(key), self.pool.acquire(&key)) {
            (Some(number), Some(token)) => {
                self.leases.push(Held { number, token });
            }
            (None, None) => {}
            (expected, got) => panic!("{got:?} instead of {expected:?}"),
        }
    }

    fn release(&mut self, pick: usize, picks: &[FencePick]) {
        let Some(Held { number, token }) = take(&mut self.leases, pick) else {
            return;
        };
        let (fences, plain) = self.fences(picks);
        let (start, len) = granules(token.region());
        self.shadow.verify(start, len, content(number));
        self.shadow.leave(start, len, content(number), &plain);
        self.pool.release(token, &fences).expect("own token");
        self.oracle.release(number, &plain);
    }

    fn free(&mut self, pick: usize, picks: &[FencePick]) {
        let Some(Held { number, token }) = take(&mut self.allocations, pick) else {
            return;
        };
        let (fences, plain) = self.fences(picks);
        let (start, len) = granules(token.region());
        self.shadow.verify(start, len, number);
        self.shadow.leave(start, len, number, &plain);
        self.pool.free(token, &fences).expect("own token");
        self.oracle.free(number, &plain);
    }

    fn add_timeline(&mut self) {
        match (self.oracle.add_timeline(), self.pool.add_timeline()) {
            (true, Ok(timeline)) => self.timelines.push(timeline),
            (false, Err(cause)) => {
                let timelines_max = self.config.timelines_max;
                assert_eq!(cause, Error::TooManyTimelines { timelines_max });
            }
            (expected, got) => panic!("{got:?} instead of {expected:?}"),
        }
    }

    fn reach(&mut self, index: usize, value: u64) {
        let timeline = self.timelines[index];
        let reached = self.pool.handle_reached(timeline, value);
        if self.oracle.reach(index, value) {
            assert_eq!(reached, Ok(()));
            self.shadow.reach(index, value);
        } else {
            assert_eq!(
                reached,
                Err(Error::TimelineFailed {
                    timeline: timeline.index()
                })
            );
        }
    }

    fn poll(&mut self, pick: usize) {
        let Some(Held { number, token }) = take(&mut self.claims, pick) else {
            return;
        };
        let before = self.keys();
        let polled = self.pool.poll_claim(token);
        let evicted = self.evicted_since(&before);
        match polled {
            Ok(token) => {
                let start = token.offset() / ALIGNMENT;
                let fresh = self.fresh();
                self.oracle.poll(
                    number,
                    &evicted,
                    Polled::Ready {
                        token: fresh,
                        start,
                    },
                );
                self.hold(fresh, token);
            }
            Err(token) => {
                let window = self.pool.claim_window(&token).map(granules);
                self.oracle.poll(number, &evicted, Polled::Pending(window));
                self.claims.push(Held { number, token });
            }
        }
    }

    fn drain(&mut self) {
        let expected = self.oracle.drain();
        match self.pool.drain_reclaimed() {
            Reclaimed::Keys(keys) => {
                assert_eq!(keys.len(), keys.iter().collect::<BTreeSet<_>>().len());
                assert_eq!(keys.into_iter().collect::<BTreeSet<_>>(), expected);
            }
            // Keys that became resident again do not count, but they did when the bound was passed.
            Reclaimed::All => assert!(self.config.reclaimed_max < 40, "more than all keys"),
        }
    }

    fn fences(&self, picks: &[FencePick]) -> (Vec<Fence>, Vec<(usize, u64)>) {
        if self.timelines.is_empty() {
            return (Vec::new(), Vec::new());
        }
        picks
            .iter()
            .map(|pick| {
                let index = pick.timeline % self.timelines.len();
                let value = self.oracle.reached(index) + pick.ahead;
                (self.timelines[index].fence(value), (index, value))
            })
            .unzip()
    }

    fn keys(&self) -> BTreeSet<u32> {
        self.pool.residents().map(|(key, _, _)| *key).collect()
    }

    fn evicted_since(&self, before: &BTreeSet<u32>) -> Vec<u32> {
        before.difference(&self.keys()).copied().collect()
    }

    /// The named invariants, through what the pool reports.
    fn check(&mut self) {
        let runs: Vec<Run> = self
            .pool
            .runs()
            .map(|run| {
                let (start, len) = granules(run.region);
                let kind = match run.state {
                    RunState::Free => RunKind::Free,
                    RunState::Caller => RunKind::Caller,
                    RunState::Resident { leases } => RunKind::Resident(leases),
                    RunState::Waiting => RunKind::Waiting,
                    RunState::Claimed => RunKind::Claimed,
                    RunState::Quarantined => RunKind::Quarantined,
                    other => panic!("{other:?}"),
                };
                Run { start, len, kind }
            })
            .collect();
        assert_eq!(runs, self.oracle.runs());

        let bytes = |passes: &dyn Fn(RunKind) -> bool| -> u64 {
            runs.iter()
                .filter(|run| passes(run.kind))
                .map(|run| run.len * ALIGNMENT)
                .sum()
        };
        let stats = self.pool.stats();
        assert_eq!(stats.free, bytes(&|kind| kind == RunKind::Free));
        assert_eq!(stats.owned, bytes(&|kind| kind == RunKind::Caller));
        assert_eq!(
            stats.resident_idle,
            bytes(&|kind| kind == RunKind::Resident(0))
        );
        assert_eq!(
            stats.resident_leased,
            bytes(&|kind| matches!(kind, RunKind::Resident(1..)))
        );
        assert_eq!(stats.waiting, bytes(&|kind| kind == RunKind::Waiting));
        assert_eq!(stats.claimed, bytes(&|kind| kind == RunKind::Claimed));
        assert_eq!(
            stats.quarantined,
            bytes(&|kind| kind == RunKind::Quarantined)
        );
        assert_eq!(bytes(&|_| true), stats.usable);
        assert_eq!(stats.leases, self.oracle.leases());
        assert_eq!(stats.displaced, self.oracle.displaced() as u64);
        assert_eq!(self.keys(), self.oracle.keys());
        assert!(stats.residents + stats.displaced <= u64::from(self.config.residents_max));
        for (key, _, leases) in self.pool.residents() {
            assert_eq!(Some(leases), self.oracle.lease_count(*key));
        }

        // Whoever may still write does, and nobody who owns bytes notices.
        self.shadow.write_late();
        for Held { number, token } in &self.allocations {
            let (start, len) = granules(token.region());
            self.shadow.verify(start, len, *number);
        }
        for Held { number, token } in &self.leases {
            let (start, len) = granules(token.region());
            self.shadow.verify(start, len, content(*number));
        }
    }
}

fn granules(region: Region) -> (u64, u64) {
    (region.offset() / ALIGNMENT, region.len() / ALIGNMENT)
}

/// What the bytes of a resident hold: not the number of any allocation.
fn content(resident: u64) -> u64 {
    (1 << 32) + resident
}

fn take<T>(values: &mut Vec<T>, pick: usize) -> Option<T> {
    (!values.is_empty()).then(|| values.swap_remove(pick % values.len()))
}
