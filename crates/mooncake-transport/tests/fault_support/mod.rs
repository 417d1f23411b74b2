//! What the tests with faults share: seeds, random numbers, what a process has open, and proxies that
//! break connections.
//!
//! Everything a proxy does follows from a seed, which is printed when a test fails. How bytes fall into
//! packets and threads into turns does not, so a failing seed may have to be run more than once:
//! `MOONCAKE_FAULT_SEEDS=17..18 cargo test …` runs these seeds in the place of the usual ones.
#![allow(dead_code, reason = "each test target uses its own part")]

pub(crate) mod entry;
pub(crate) mod plan;
pub(crate) mod proxy;

use std::collections::BTreeMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Names the seeds to run, `FROM..TO`.
const SEEDS_VARIABLE: &str = "MOONCAKE_FAULT_SEEDS";

/// How long what was closed may take to be gone.
const GONE_LIMIT: Duration = Duration::from_secs(20);

/// A xorshift generator: good enough to pick faults, and the same everywhere.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        let mut random = Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0xD1B5_4A32_D192_ED03);
        random.0 |= 1;
        // The first numbers of neighbouring seeds are alike.
        for _ in 0..8 {
            random.next();
        }
        random
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    pub(crate) fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    pub(crate) fn pick<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.below(values.len() as u64) as usize]
    }

    /// A number below `2^bits`; each length in bits is as likely as another.
    pub(crate) fn of_any_size(&mut self, bits: u64) -> u64 {
        let bits = self.below(bits + 1);
        self.below(1 << bits)
    }
}

/// The seeds to run: `usual`, unless the environment names others.
pub(crate) fn seeds(usual: Range<u64>) -> Range<u64> {
    let Ok(named) = std::env::var(SEEDS_VARIABLE) else {
        return usual;
    };
    let bounds = named.split_once("..").and_then(|(from, to)| {
        let number = |text: &str| text.trim().parse().ok();
        Some(number(from)?..number(to)?)
    });
    bounds.unwrap_or_else(|| panic!("{SEEDS_VARIABLE} is {named:?}, not FROM..TO"))
}

/// Says whether other seeds than the usual ones are run.
pub(crate) fn are_usual_seeds() -> bool {
    std::env::var_os(SEEDS_VARIABLE).is_none()
}

/// Runs `run` for each seed, `at_once` of them at a time, and fails with the numbers of those that failed.
pub(crate) fn run_seeds(seeds: Range<u64>, at_once: u64, run: impl Fn(u64) + Sync) {
    for first in seeds.clone().step_by(at_once as usize) {
        let group = first..(first + at_once).min(seeds.end);
        let open = Open::at_rest();
        let failed: Vec<u64> = std::thread::scope(|scope| {
            let runs: Vec<_> = group
                .clone()
                .map(|seed| {
                    let run = &run;
                    (
                        seed,
                        scope.spawn(move || catch_unwind(AssertUnwindSafe(|| run(seed)))),
                    )
                })
                .collect();
            runs.into_iter()
                .filter_map(|(seed, run)| match run.join() {
                    Ok(Ok(())) => None,
                    _ => Some(seed),
                })
                .collect()
        });
        assert!(
            failed.is_empty(),
            "seeds {failed:?} failed; run one again with {SEEDS_VARIABLE}={0}..{1}",
            failed[0],
            failed[0] + 1
        );
        open.assert_back(&format!("seeds {group:?}"));
    }
}

/// Lets one test run at a time: what a process has open cannot be told apart by test.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    // A test that failed has nothing to do with the next one.
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the process has open: file descriptors, by what they lead to, and threads that are ours, by name.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Open {
    files: BTreeMap<String, usize>,
    threads: BTreeMap<String, usize>,
}

impl Open {
    pub(crate) fn now() -> Self {
        let mut files = BTreeMap::new();
        for entry in std::fs::read_dir("/proc/self/fd").unwrap().flatten() {
            // The descriptor of this look is gone by the time its link is read.
            if let Ok(target) = std::fs::read_link(entry.path()) {
                let target = target.to_string_lossy().into_owned();
                let kind = target.split(':').next().unwrap_or_default();
                if !kind.starts_with("/proc/") {
                    *files.entry(kind.to_owned()).or_default() += 1;
                }
            }
        }
        let mut threads = BTreeMap::new();
        for entry in std::fs::read_dir("/proc/self/task").unwrap().flatten() {
            let name = std::fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
            let name = name.trim();
            if ["mooncake", "fault-", "ZMQbg"]
                .iter()
                .any(|ours| name.starts_with(ours))
            {
                *threads.entry(name.to_owned()).or_default() += 1;
            }
        }
        Self { files, threads }
    }

    /// With nothing that is about to go: a thread is listed for a moment after it was joined.
    fn at_rest() -> Self {
        let begin = Instant::now();
        let mut before = Self::now();
        loop {
            std::thread::sleep(Duration::from_millis(20));
            let now = Self::now();
            if now == before {
                return now;
            }
            assert!(begin.elapsed() < GONE_LIMIT, "it goes on: {now:?}");
            before = now;
        }
    }

    /// With an engine that was just started: its thread has its name only once it runs.
    pub(crate) fn beside_an_engine() -> Self {
        let begin = Instant::now();
        loop {
            let now = Self::now();
            if now.threads.contains_key("mooncake-tcp") {
                return now;
            }
            assert!(begin.elapsed() < GONE_LIMIT, "no engine runs: {now:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Fails unless no more is open than was, in a while.
    #[track_caller]
    pub(crate) fn assert_back(&self, what: &str) {
        let begin = Instant::now();
        loop {
            let now = Self::now();
            if now == *self {
                return;
            }
            assert!(
                begin.elapsed() < GONE_LIMIT,
                "{what}: something stays open:\n{now:?}, before\n{self:?}"
            );
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Bytes that differ from seed to seed and from offset to offset.
pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut random = Random::new(seed);
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        bytes.extend_from_slice(&random.next().to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// Says how many bytes of `new` lie in the place of `old`, if they are the first ones and nothing else lies there.
pub(crate) fn written_part(found: &[u8], new: &[u8], old: &[u8]) -> Option<usize> {
    let written = found.iter().zip(new).take_while(|(a, b)| a == b).count();
    // Bytes that are the same in both count as written.
    (found[written..] == old[written..]).then_some(written)
}
