//! What `docs/CHECKING.md` shows, compiled and run. The last test holds that the page quotes this file.

use std::hash::{BuildHasherDefault, DefaultHasher};
use std::panic::{AssertUnwindSafe, catch_unwind};

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use slab_core::{
    Lease, Pool, PoolConfig, PoolId, Region, Reserve, RunState, SharedPool, TimelineId,
};

/// What holds between any two calls, by the names of slab-core's README.
fn check(pool: &Pool<u8, ()>) {
    let stats = pool.stats();
    let in_hands = stats.owned + stats.resident_leased + stats.claimed;
    let on_its_way = stats.waiting + stats.quarantined;
    let sum = stats.free + stats.resident_idle + in_hands + on_its_way;
    assert_eq!(sum, stats.usable, "conserved");
    let (mut end, mut was_free) = (0, false);
    for run in pool.runs() {
        assert_eq!(run.region.offset(), end, "disjoint");
        end = run.region.end();
        let is_free = matches!(run.state, RunState::Free);
        assert!(!(is_free && was_free), "coalesced");
        was_free = is_free;
    }
    assert_eq!(end, stats.usable, "one owner");
}

const G: u64 = 256;

/// A server that shows images to a device, and a stand-in for the slab's bytes: who wrote each granule
/// last, and up to which value of the stream the device may still read it.
struct Server {
    pool: Pool<u8, ()>,
    stream: TimelineId,
    submitted: u64,
    reached: u64,
    shown: Vec<(u8, Lease)>,
    written_by: [u8; 24],
    read_until: [u64; 24],
    forgets_fences: bool,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Show(u8),
    Launch(u8),
    Hide(u8),
    Advance(u8),
}

fn granules(region: Region) -> std::ops::Range<usize> {
    (region.offset() / G) as usize..(region.end() / G) as usize
}

impl Server {
    fn new() -> Self {
        let config = PoolConfig::new(PoolId::new(), 24 * G);
        let mut pool = Pool::new(config).expect("valid configuration");
        let stream = pool.add_timeline().expect("the first one");
        Self {
            pool,
            stream,
            submitted: 0,
            reached: 0,
            shown: Vec::new(),
            written_by: [0; 24],
            read_until: [0; 24],
            forgets_fences: false,
        }
    }

    fn apply(&mut self, step: Step) {
        match step {
            Step::Show(image) => self.show(image),
            Step::Launch(pick) if !self.shown.is_empty() => {
                let (_, lease) = self.shown.swap_remove(usize::from(pick) % self.shown.len());
                self.submitted += 1;
                self.read_until[granules(lease.region())].fill(self.submitted);
                let fence = self.stream.fence(self.submitted);
                let fences = if self.forgets_fences {
                    &[][..]
                } else {
                    &[fence]
                };
                self.pool.release(lease, fences).expect("own lease");
            }
            Step::Hide(pick) if !self.shown.is_empty() => {
                let (_, lease) = self.shown.swap_remove(usize::from(pick) % self.shown.len());
                self.pool.release(lease, &[]).expect("own lease");
            }
            Step::Advance(by) => {
                self.reached = self.submitted.min(self.reached + u64::from(by));
                self.pool
                    .handle_reached(self.stream, self.reached)
                    .expect("own timeline");
            }
            Step::Launch(_) | Step::Hide(_) => {}
        }
        check(&self.pool);
        for (image, lease) in &self.shown {
            let written_by = &self.written_by[granules(lease.region())];
            assert!(written_by.iter().all(|by| by == image), "leased stays");
        }
    }

    fn show(&mut self, image: u8) {
        if let Some(lease) = self.pool.acquire(&image) {
            return self.shown.push((image, lease));
        }
        let len = G * (1 + u64::from(image % 7));
        let residents = self.pool.stats().residents;
        match self.pool.reserve(len) {
            Reserve::Ready(bytes) => {
                let granules = granules(bytes.region());
                let read_until = &self.read_until[granules.clone()];
                assert!(
                    read_until.iter().all(|value| *value <= self.reached),
                    "fenced"
                );
                self.written_by[granules].fill(image);
                let lease = self.pool.publish(image, bytes, ()).expect("own allocation");
                self.shown.push((image, lease));
            }
            // This server does not wait: the image is not shown.
            Reserve::Later(claim) => self.pool.drop_claim(claim).expect("own claim"),
            Reserve::Full | Reserve::TooLarge => {
                let stats = self.pool.stats();
                assert!(stats.largest_free < len, "complete");
                assert_eq!(stats.residents, residents, "not in vain");
            }
        }
    }
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..12u8).prop_map(Step::Show),
        3 => any::<u8>().prop_map(Step::Launch),
        2 => any::<u8>().prop_map(Step::Hide),
        2 => (0..3u8).prop_map(Step::Advance),
    ]
}

proptest! {
    #[test]
    fn any_order_of_steps_keeps_the_invariants(steps in prop::collection::vec(step(), 1..120)) {
        let mut server = Server::new();
        for step in steps {
            server.apply(step);
        }
    }
}

#[test]
fn property_a_server_that_forgets_its_fences_is_noticed() {
    let mut runner = TestRunner::deterministic();
    let steps = prop::collection::vec(step(), 1..120);
    let is_noticed = (0..100).any(|_| {
        let steps = steps.new_tree(&mut runner).expect("no filters").current();
        let mut server = Server::new();
        server.forgets_fences = true;
        let run = AssertUnwindSafe(|| steps.into_iter().for_each(|step| server.apply(step)));
        catch_unwind(run).is_err()
    });
    assert!(is_noticed, "the harness does not look at what it should");
}

/// What the fuzzer's macro does with the function it is given, here with a few inputs.
macro_rules! fuzz_target {
    (|$bytes:ident: &[u8]| $body:block) => {
        #[test]
        fn property_bytes_are_steps() {
            let run = |$bytes: &[u8]| $body;
            let mut state = 1_u32;
            for len in 0..400 {
                let next = |_| {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    (state >> 24) as u8
                };
                let bytes: Vec<u8> = (0..len).map(next).collect();
                run(&bytes);
            }
        }
    };
}

fuzz_target!(|bytes: &[u8]| {
    let mut server = Server::new();
    for pair in bytes.chunks_exact(2) {
        server.apply(match pair[0] % 4 {
            0 => Step::Launch(pair[1]),
            1 => Step::Hide(pair[1]),
            2 => Step::Advance(pair[1] % 3),
            _ => Step::Show(pair[1] % 12),
        });
    }
});

/// Stands in for loom here: one interleaving instead of all.
mod loom {
    pub(crate) mod thread {
        pub(crate) use std::thread::spawn;
    }

    pub(crate) fn model(run: impl Fn()) {
        run();
    }
}

#[test]
fn a_frame_that_waits_gets_the_bytes_of_one_that_ends() {
    loom::model(|| {
        let config = PoolConfig::new(PoolId::from_raw(1), 2 * G);
        // No random numbers: a run has to be repeatable.
        let hasher = BuildHasherDefault::<DefaultHasher>::default();
        let pool: Pool<u8, (), _> = Pool::with_hasher(config, hasher).expect("valid configuration");
        let pool = SharedPool::new(pool, ());
        let Reserve::Ready(bytes) = pool.with(|pool, ()| pool.reserve(2 * G)) else {
            panic!("the pool is empty");
        };
        let frame = pool.allocation_guard(bytes).expect("own allocation");
        let waiting = pool.clone();
        let waiter = loom::thread::spawn(move || {
            let bytes = waiting.wait_until(None, |pool, ()| match pool.reserve(G) {
                Reserve::Ready(bytes) => Some(bytes),
                _ => None,
            });
            drop(waiting.allocation_guard(bytes.expect("no deadline")));
        });
        drop(frame);
        waiter.join().expect("no panic");
        assert_eq!(pool.with(|pool, ()| pool.stats().free), 2 * G, "conserved");
    });
}

#[test]
fn the_page_quotes_this_file() {
    let page = include_str!("../../../docs/CHECKING.md");
    let squeeze = |text: &str| -> String { text.split_whitespace().collect() };
    let file = squeeze(include_str!("property_own_use.rs"));
    let blocks: Vec<&str> = page
        .split("```rust\n")
        .skip(1)
        .filter_map(|rest| rest.split("```").next())
        .collect();
    assert!(blocks.len() >= 5, "the page shows its blocks");
    for block in blocks {
        // A line that says "…" stands for what the page leaves out.
        for part in block.split("// …\n") {
            assert!(file.contains(&squeeze(part)), "not in this file:\n{part}");
        }
    }
}
