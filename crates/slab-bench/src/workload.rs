//! Steady states whose calls are timed. Each keeps its allocator, so that contenders can take turns.

use std::hint::black_box;
use std::time::Duration;

use crate::clock::cpu_time;
use crate::contender::{Contender, GRANULE};
use crate::random::{Random, Sizes};

/// Something that can be run for a while.
pub trait Workload {
    /// Runs `pairs` pairs of a take and a give and returns the time of all.
    fn run(&mut self, pairs: u64) -> Duration;
}

const GIB: u64 = 1 << 30;

/// Regions come and go at random while a fixed share of the slab is taken.
pub struct Steady<C: Contender> {
    contender: C,
    live: Vec<C::Region>,
    used: u64,
    used_max: u64,
    sizes: Sizes,
    random: Random,
    failed: u64,
}

impl<C: Contender> Steady<C> {
    /// A slab of `capacity` bytes, 85 % of it taken, after as many calls as it takes to become steady.
    #[must_use]
    pub fn new(capacity: u64, sizes: Sizes) -> Self {
        let live_max = sizes.live_max(capacity);
        let mut steady = Self {
            contender: C::new(capacity, 2 * live_max),
            live: Vec::with_capacity(2 * live_max),
            used: 0,
            used_max: (capacity as f64 * 0.85) as u64,
            sizes,
            random: Random::new(0x9E37_79B9_7F4A_7C15 ^ 0xD1B5_4A32_D192_ED03),
            failed: 0,
        };
        for _ in 0..100_000 + 3 * live_max {
            steady.step();
        }
        steady
    }

    /// Requests that found no room, so far.
    #[must_use]
    pub const fn failed(&self) -> u64 {
        self.failed
    }

    /// Gives random regions back until the next request stays below the bound, then takes it.
    #[inline]
    fn step(&mut self) {
        let len = self.sizes.draw(&mut self.random);
        let rounded = len.next_multiple_of(GRANULE);
        while self.used + rounded > self.used_max {
            self.give_any();
        }
        if let Some(region) = self.contender.take(len) {
            self.live.push(region);
            self.used += rounded;
        } else {
            self.failed += 1;
            if !self.live.is_empty() {
                self.give_any();
            }
        }
    }

    #[inline]
    fn give_any(&mut self) {
        let index = self.random.below(self.live.len() as u64) as usize;
        let region = self.live.swap_remove(index);
        self.used -= C::len(&region).next_multiple_of(GRANULE);
        self.contender.give(region);
    }
}

impl<C: Contender> Workload for Steady<C> {
    fn run(&mut self, pairs: u64) -> Duration {
        let begin = cpu_time();
        for _ in 0..pairs {
            self.step();
        }
        cpu_time() - begin
    }
}

/// A slab of 8 GiB with isolated holes of 4 KiB at its low end, in random order of making.
fn holed<C: Contender>(holes: usize) -> (C, Vec<C::Region>, Random) {
    let mut contender = C::new(8 * GIB, 3 * holes + 64);
    let mut random = Random::new(77);
    let (mut kept, mut gone) = (Vec::with_capacity(holes), Vec::with_capacity(holes));
    for index in 0..2 * holes {
        let region = contender.take(4096).expect("the slab is larger");
        if index % 2 == 0 {
            gone.push(region);
        } else {
            kept.push(region);
        }
    }
    while !gone.is_empty() {
        let index = random.below(gone.len() as u64) as usize;
        contender.give(gone.swap_remove(index));
    }
    (contender, kept, random)
}

/// One region of 1 MiB that fits only behind all holes comes and goes.
pub struct Tail<C: Contender> {
    contender: C,
    _kept: Vec<C::Region>,
}

impl<C: Contender> Tail<C> {
    /// With this many holes.
    #[must_use]
    pub fn new(holes: usize) -> Self {
        let (contender, kept, _) = holed(holes);
        Self {
            contender,
            _kept: kept,
        }
    }
}

impl<C: Contender> Workload for Tail<C> {
    fn run(&mut self, pairs: u64) -> Duration {
        let begin = cpu_time();
        for _ in 0..pairs {
            let region = self.contender.take(1 << 20).expect("room behind the holes");
            black_box(self.contender.offset(&region));
            self.contender.give(region);
        }
        cpu_time() - begin
    }
}

/// A random region between two holes is given back and another of its size taken.
pub struct Churn<C: Contender> {
    contender: C,
    kept: Vec<C::Region>,
    random: Random,
}

impl<C: Contender> Churn<C> {
    /// With this many holes.
    #[must_use]
    pub fn new(holes: usize) -> Self {
        let (contender, kept, random) = holed(holes);
        Self {
            contender,
            kept,
            random,
        }
    }
}

impl<C: Contender> Workload for Churn<C> {
    fn run(&mut self, pairs: u64) -> Duration {
        let begin = cpu_time();
        for _ in 0..pairs {
            let index = self.random.below(self.kept.len() as u64) as usize;
            let region = self.kept.swap_remove(index);
            self.contender.give(region);
            self.kept
                .push(self.contender.take(4096).expect("what was given back"));
        }
        cpu_time() - begin
    }
}
