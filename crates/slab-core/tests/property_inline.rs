//! A store so small that its bounds are reached all the time: the invariants hold, and what is refused had to be.

mod cases;

use std::hash::RandomState;
use std::ops::Range;

use proptest::prelude::*;
use slab_core::{
    Allocation, Claim, Error, Fence, FreeList, FreeListConfig, Inline, Lease, Placement, Pool,
    PoolConfig, PoolId, Refused, Region, Reserve, RunState, TimelineId,
};

const G: u64 = 256;
const GRANULES: usize = 24;
const SLOTS: usize = 10;
const RUNS: u64 = SLOTS as u64 - 2;
/// An interpreter has time for a few only.
const STEPS: usize = if cfg!(miri) { 30 } else { 150 };
type Store = Inline<SLOTS, 256>;
type TestPool = Pool<u8, (), RandomState, Store>;

#[derive(Clone, Debug)]
enum Step {
    Reserve(u64),
    Publish(usize, u8),
    Acquire(u8),
    /// How far beyond what each timeline has reached; zero is no fence.
    Release(usize, [u64; 2]),
    Free(usize, [u64; 2]),
    Advance(usize, u64),
    PollClaim(usize),
    DropClaim(usize),
    Evict(u8),
}

fn step() -> impl Strategy<Value = Step> {
    let ahead = prop_oneof![Just([0, 0]), [0..3u64, 0..3u64]];
    prop_oneof![
        8 => (1..7u64).prop_map(Step::Reserve),
        7 => (any::<usize>(), 0..9u8).prop_map(|(pick, key)| Step::Publish(pick, key)),
        3 => (0..9u8).prop_map(Step::Acquire),
        7 => (any::<usize>(), ahead.clone()).prop_map(|(pick, ahead)| Step::Release(pick, ahead)),
        1 => (any::<usize>(), ahead).prop_map(|(pick, ahead)| Step::Free(pick, ahead)),
        3 => (0..2usize, 1..3u64).prop_map(|(line, by)| Step::Advance(line, by)),
        2 => any::<usize>().prop_map(Step::PollClaim),
        1 => any::<usize>().prop_map(Step::DropClaim),
        1 => (0..9u8).prop_map(Step::Evict),
    ]
}

/// A pool, and a stand-in for the bytes of its slab.
struct Harness {
    pool: TestPool,
    lines: [TimelineId; 2],
    reached: [u64; 2],
    /// Who wrote a granule last, and up to where on each timeline it is read.
    written_by: [u32; GRANULES],
    read_until: [[u64; 2]; GRANULES],
    writes: u32,
    owned: Vec<(u32, Allocation)>,
    leases: Vec<(u32, Lease)>,
    claims: Vec<Claim>,
}

fn granules(region: Region) -> Range<usize> {
    (region.offset() / G) as usize..(region.end() / G) as usize
}

fn take<T>(from: &mut Vec<T>, pick: usize) -> Option<T> {
    (!from.is_empty()).then(|| from.swap_remove(pick % from.len()))
}

impl Harness {
    fn new() -> Self {
        let config = PoolConfig::new(PoolId::new(), GRANULES as u64 * G);
        let mut pool = TestPool::new_inline(config, RandomState::new());
        let lines = [(); 2].map(|()| pool.add_timeline().expect("two of ten"));
        Self {
            pool,
            lines,
            reached: [0; 2],
            written_by: [0; GRANULES],
            read_until: [[0; 2]; GRANULES],
            writes: 0,
            owned: Vec::new(),
            leases: Vec::new(),
            claims: Vec::new(),
        }
    }

    fn apply(&mut self, step: &Step) {
        match *step {
            Step::Reserve(need) => self.reserve(need),
            Step::Publish(pick, key) => self.publish(pick, key),
            Step::Acquire(key) => {
                if let Some(lease) = self.pool.acquire(&key) {
                    let written_by = self.written_by[granules(lease.region())][0];
                    self.leases.push((written_by, lease));
                }
            }
            Step::Release(pick, ahead) => {
                if let Some((written_by, lease)) = take(&mut self.leases, pick) {
                    let (region, fences) = (lease.region(), self.fences(ahead));
                    if let Some(lease) =
                        self.given(region, &fences, |pool, fences| pool.release(lease, fences))
                    {
                        self.leases.push((written_by, lease));
                    }
                }
            }
            Step::Free(pick, ahead) => {
                if let Some((written_by, bytes)) = take(&mut self.owned, pick) {
                    let (region, fences) = (bytes.region(), self.fences(ahead));
                    if let Some(bytes) =
                        self.given(region, &fences, |pool, fences| pool.free(bytes, fences))
                    {
                        self.owned.push((written_by, bytes));
                    }
                }
            }
            Step::Advance(line, by) => {
                self.reached[line] += by;
                self.pool
                    .handle_reached(self.lines[line], self.reached[line])
                    .expect("own timeline");
            }
            Step::PollClaim(pick) => {
                if let Some(claim) = take(&mut self.claims, pick) {
                    match self.pool.poll_claim(claim) {
                        Ok(bytes) => self.own(bytes),
                        Err(claim) => self.claims.push(claim),
                    }
                }
            }
            Step::DropClaim(pick) => {
                if let Some(claim) = take(&mut self.claims, pick) {
                    self.pool.drop_claim(claim).expect("own claim");
                }
            }
            Step::Evict(key) => drop(self.pool.evict(&key)),
        }
        self.check();
    }

    fn fences(&self, ahead: [u64; 2]) -> Vec<Fence> {
        (0..2)
            .filter(|line| ahead[*line] > 0)
            .map(|line| self.lines[line].fence(self.reached[line] + ahead[line]))
            .collect()
    }

    /// Gives a token back. Refused, it comes back, and there must have been no room for its fences.
    fn given<T>(
        &mut self,
        region: Region,
        fences: &[Fence],
        give: impl FnOnce(&mut TestPool, &[Fence]) -> Result<(), Refused<T>>,
    ) -> Option<T> {
        let unreached = self.unreached();
        match give(&mut self.pool, fences) {
            Ok(()) => {
                for fence in fences {
                    let line = fence.timeline().index() as usize;
                    for read_until in &mut self.read_until[granules(region)] {
                        read_until[line] = read_until[line].max(fence.value());
                    }
                }
                None
            }
            Err(refused) => {
                let fences_max = SLOTS as u32;
                assert_eq!(refused.cause, Error::TooManyFences { fences_max });
                assert!(unreached + fences.len() > SLOTS, "there was room");
                Some(refused.value)
            }
        }
    }

    /// Pairs of a run and a timeline that it waits for.
    fn unreached(&self) -> usize {
        let waits = |run: Region, line: usize| {
            let mut read_until = self.read_until[granules(run)].iter();
            read_until.any(|until| until[line] > self.reached[line])
        };
        self.pool
            .runs()
            .map(|run| (0..2).filter(|line| waits(run.region, *line)).count())
            .sum()
    }

    fn own(&mut self, bytes: Allocation) {
        self.writes += 1;
        for granule in granules(bytes.region()) {
            let until = self.read_until[granule];
            assert!(
                until[0] <= self.reached[0] && until[1] <= self.reached[1],
                "fenced"
            );
            self.written_by[granule] = self.writes;
        }
        self.owned.push((self.writes, bytes));
    }

    fn reserve(&mut self, need: u64) {
        let residents = self.pool.stats().residents;
        match self.pool.reserve(need * G) {
            Reserve::Ready(bytes) => self.own(bytes),
            Reserve::Later(claim) => self.claims.push(claim),
            Reserve::Full => {
                assert_eq!(self.pool.stats().residents, residents, "not in vain");
                assert!(!self.has_window(need * G), "complete");
            }
            Reserve::TooLarge => panic!("all are smaller than the slab"),
        }
    }

    /// Whether neighbours that may go at once make a region that the map can number.
    fn has_window(&self, need: u64) -> bool {
        let (mut len, mut runs) = (0, 0);
        let mut longest = Vec::new();
        for run in self.pool.runs() {
            let may_go = match run.state {
                RunState::Free => true,
                RunState::Resident { leases: 0 } => self.read_until[granules(run.region)]
                    .iter()
                    .all(|until| until[0] <= self.reached[0] && until[1] <= self.reached[1]),
                _ => false,
            };
            if may_go {
                (len, runs) = (len + run.region.len(), runs + 1);
                longest.push((len, runs, run.region.len()));
            } else {
                (len, runs) = (0, 0);
            }
        }
        let has_room = self.pool.stats().runs < RUNS;
        longest
            .iter()
            .any(|(len, runs, own)| (*len >= need && (has_room || *runs > 1)) || *own == need)
    }

    fn publish(&mut self, pick: usize, key: u8) {
        let Some((written_by, bytes)) = take(&mut self.owned, pick) else {
            return;
        };
        match self.pool.publish(key, bytes, ()) {
            Ok(lease) => {
                // An equal resident may have stayed in its place.
                let written_by = match self.written_by[granules(lease.region())][0] {
                    other if other == written_by => written_by,
                    other => other,
                };
                self.leases.push((written_by, lease));
            }
            Err(refused) => {
                let residents_max = SLOTS as u32;
                assert_eq!(refused.cause, Error::TooManyResidents { residents_max });
                self.owned.push((written_by, refused.value.1));
            }
        }
    }

    /// Conserved, disjoint, coalesced; nobody's bytes were written by another.
    fn check(&self) {
        let stats = self.pool.stats();
        let used = stats.owned + stats.resident_leased + stats.resident_idle;
        let waiting = stats.waiting + stats.claimed + stats.quarantined;
        assert_eq!(stats.free + used + waiting, stats.usable, "conserved");
        assert!(stats.runs <= RUNS);
        let (mut end, mut was_free) = (0, false);
        for run in self.pool.runs() {
            assert_eq!(run.region.offset(), end, "disjoint");
            end = run.region.end();
            let is_free = run.state == RunState::Free;
            assert!(!(is_free && was_free), "coalesced");
            was_free = is_free;
        }
        let owned = self.owned.iter().map(|(by, bytes)| (*by, bytes.region()));
        let leased = self.leases.iter().map(|(by, lease)| (*by, lease.region()));
        for (by, region) in owned.chain(leased) {
            let written_by = &self.written_by[granules(region)];
            assert!(written_by.iter().all(|other| *other == by), "one owner");
        }
    }

    fn give_everything_back(mut self) {
        for (_, lease) in self.leases.drain(..) {
            self.pool.release(lease, &[]).expect("own lease");
        }
        for (_, bytes) in self.owned.drain(..) {
            self.pool.free(bytes, &[]).expect("own allocation");
        }
        for claim in self.claims.drain(..) {
            self.pool.drop_claim(claim).expect("own claim");
        }
        for line in self.lines {
            self.pool
                .handle_reached(line, u64::MAX)
                .expect("own timeline");
        }
        for key in 0..9 {
            self.pool.evict(&key);
        }
        assert_eq!(self.pool.stats().free, self.pool.stats().usable);
    }
}

proptest! {
    #![proptest_config(cases::config(600))]

    #[test]
    fn a_pool_at_its_bounds_keeps_every_invariant_and_refuses_nothing_that_is_possible(
        steps in prop::collection::vec(step(), 1..STEPS),
    ) {
        let mut harness = Harness::new();
        for step in &steps {
            harness.apply(step);
        }
        harness.give_everything_back();
    }

    #[test]
    fn a_list_at_its_bounds_refuses_only_what_cannot_be_cut(
        placement in prop_oneof![Just(Placement::BestFit), Just(Placement::FirstFit)],
        // Long ones share a size class.
        steps in prop::collection::vec((0..3u8, prop_oneof![1..9u64, 150..156u64], any::<usize>()), 1..STEPS),
    ) {
        let mut config = FreeListConfig::new(PoolId::new(), 900 * G);
        config.placement = placement;
        let mut list = FreeList::<Inline<SLOTS, 384>>::new_inline(config);
        let mut live: Vec<Allocation> = Vec::new();
        for (kind, need, pick) in steps {
            if kind == 0 {
                if let Some(bytes) = take(&mut live, pick) {
                    list.free(bytes).expect("own token");
                }
                continue;
            }
            let largest = list.largest_free();
            let has_exact = list.runs().any(|run| run.is_free && run.region.len() == need * G);
            match list.allocate(need * G) {
                Ok(bytes) => live.push(bytes),
                Err(Error::TooManyRuns { runs_max }) => {
                    prop_assert_eq!(list.run_count(), runs_max);
                    prop_assert!(!has_exact && largest >= need * G);
                }
                Err(error) => {
                    prop_assert!(matches!(error, Error::Exhausted { .. }), "{}", error);
                    prop_assert!(largest < need * G);
                }
            }
        }
        for bytes in live {
            list.free(bytes).expect("own token");
        }
        prop_assert_eq!((list.run_count(), list.free_bytes()), (1, 900 * G));
    }
}
