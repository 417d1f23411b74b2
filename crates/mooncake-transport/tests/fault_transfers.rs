//! Transfers between two engines of ours over connections that a proxy breaks at random.
//!
//! Whatever happens, every batch settles within the deadlines of its tasks; what is reported as applied has
//! the right bytes, what is not has a first part of them and nothing else, and nothing around either is
//! touched; afterwards the same engines transfer again, and nothing stays open.
#![cfg(feature = "tcp")]

mod fault_support;
mod support;

use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fault_support::plan::{Fault, Happened, Profile};
use fault_support::proxy::EngineProxy;
use fault_support::{Random, alone, are_usual_seeds, pattern, run_seeds, seeds, written_part};
use mooncake_transport::tcp::{TcpConfig, TcpEngine};
use mooncake_transport::wire::data::DataVersion;
use mooncake_transport::{Access, BatchReport, Engine, EngineError, Local, Op, Segment, Task};
use slab_memory::HostSlab;
use support::{bytes, engine_with, slab, task};

/// Around every boundary that an implementation may have, and most of them odd.
const SIZES: [u64; 14] = [
    1, 2, 7, 8, 9, 23, 24, 25, 255, 4_095, 4_097, 65_535, 65_537, 200_001,
];

/// Bytes that nothing may touch, before each range.
const GUARD: u64 = 13;

const SLAB_LEN: u64 = 2 << 20;

const TASKS_MAX: u64 = 5;

/// The shortest wait that ends a call.
const SHORTEST: Duration = Duration::from_millis(300);

/// Waits short enough to be waited for, and long enough for a machine that has other things to do.
fn set_waits(config: &mut TcpConfig) {
    let timeouts = &mut config.timeouts;
    timeouts.connect = Duration::from_millis(500);
    timeouts.control_reply = Duration::from_millis(500);
    timeouts.control_idle = SHORTEST;
    timeouts.control_total = Duration::from_millis(900);
    timeouts.progress = SHORTEST;
    timeouts.status = SHORTEST;
    timeouts.header = SHORTEST;
    timeouts.reject_drain = Duration::from_millis(200);
    timeouts.refresh_interval = Duration::from_millis(100);
    timeouts.min_bytes_per_s = 1 << 20;
}

/// The longest that a batch of `tasks` may take by what `Batch::wait` says: each of them twice, one after
/// the other, and for each the tries to connect and to find the peer again.
fn batch_limit(tasks: u64) -> Duration {
    let mut config = TcpConfig::default();
    set_waits(&mut config);
    let timeouts = config.timeouts;
    let longest = timeouts.task_max(SIZES[SIZES.len() - 1]);
    let connecting = 2 * (timeouts.connect + timeouts.control_reply);
    (2 * longest + connecting) * u32::try_from(tasks).unwrap()
}

/// One range here, one there, and which way the bytes go.
struct Piece {
    op: Op,
    here: Range<u64>,
    /// Offset in the target's slab.
    there: u64,
    /// What the side that is written to held before.
    old: Vec<u8>,
    new: Vec<u8>,
}

/// Two engines with a slab each, and a proxy between them.
struct World {
    initiator: TcpEngine,
    target: TcpEngine,
    proxy: EngineProxy,
    here: Arc<HostSlab>,
    there: Arc<HostSlab>,
    /// What both slabs hold as far as is known, or may: ranges of failed tasks are looked at apart.
    here_holds: Vec<u8>,
    there_holds: Vec<u8>,
    used: u64,
    random: Random,
}

impl World {
    fn new(seed: u64, profiles: [Profile; 2], version: Option<u64>) -> Self {
        let mut random = Random::new(seed ^ 0x5EED);
        let initiator = engine_with(|config| {
            set_waits(config);
            config.limits.lanes_per_peer = random.pick(&[1, 2, 4]);
        });
        let target = engine_with(set_waits);
        let proxy = EngineProxy::start(
            target.control_address(),
            target.data_address(),
            seed,
            profiles,
            version,
        );
        let slabs = [slab(SLAB_LEN), slab(SLAB_LEN)];
        let holds = [
            pattern(seed ^ 1, SLAB_LEN as usize),
            pattern(seed ^ 2, SLAB_LEN as usize),
        ];
        for (slab, holds) in slabs.iter().zip(&holds) {
            slab.copy_in(0, holds).unwrap();
        }
        let [here, there] = slabs;
        let [here_holds, there_holds] = holds;
        Self {
            initiator,
            target,
            proxy,
            here,
            there,
            here_holds,
            there_holds,
            used: 0,
            random,
        }
    }

    /// Some tasks over ranges that nothing has used yet.
    fn pieces(&mut self) -> Vec<Piece> {
        let count = 1 + self.random.below(TASKS_MAX);
        (0..count)
            .map(|_| {
                // Small ones where the slab has no room for others.
                let drawn = self.random.pick(&SIZES);
                let is_room = self.used + drawn + (64 << 10) <= SLAB_LEN;
                let len = if is_room { drawn } else { drawn % 255 + 1 };
                let at = self.used + GUARD;
                self.used = at + len;
                let span = at as usize..(at + len) as usize;
                let op = self.random.pick(&[Op::Read, Op::Write]);
                let (from, into) = match op {
                    Op::Read => (&self.there_holds, &self.here_holds),
                    Op::Write => (&self.here_holds, &self.there_holds),
                };
                Piece {
                    op,
                    here: at..at + len,
                    there: at,
                    old: into[span.clone()].to_vec(),
                    new: from[span].to_vec(),
                }
            })
            .collect()
    }

    fn tasks(&self, pieces: &[Piece], segment: &Segment) -> Vec<Task> {
        pieces
            .iter()
            .map(|piece| {
                let remote = self.there.address() + piece.there;
                task(piece.op, segment, remote, &self.here, piece.here.clone())
            })
            .collect()
    }

    /// Notes what a batch has come to, and compares the bytes that are known.
    fn check(&mut self, pieces: &[Piece], report: &BatchReport) {
        assert_eq!(report.tasks().len(), pieces.len());
        for (piece, settled) in pieces.iter().zip(report.tasks()) {
            assert_eq!(settled.local, Local::Quiet);
            let (slab, holds, at) = match piece.op {
                Op::Read => (&self.here, &mut self.here_holds, piece.here.start),
                Op::Write => (&self.there, &mut self.there_holds, piece.there),
            };
            let len = piece.new.len();
            let found = bytes(slab, at, len);
            let remote = &settled.remote;
            if remote.is_applied() {
                let differs = found.iter().zip(&piece.new).position(|(a, b)| a != b);
                assert_eq!(differs, None, "{:?} of {len} bytes is applied", piece.op);
            } else {
                let part = written_part(&found, &piece.new, &piece.old);
                assert!(part.is_some(), "{:?} of {len} bytes: {remote:?}", piece.op);
            }
            // A failed read has ended here; a failed write may go on there until its connection is gone.
            let is_final = remote.is_applied() || piece.op == Op::Read;
            let known = if is_final { &found } else { &piece.new };
            holds[at as usize..at as usize + len].copy_from_slice(known);
        }
    }

    /// Compares everything once no connection can carry bytes any more. `failed` are writes that failed.
    fn check_all(&self, failed: &[Piece]) {
        let here = bytes(&self.here, 0, SLAB_LEN as usize);
        assert!(here == self.here_holds, "something here was touched");
        let mut there = bytes(&self.there, 0, SLAB_LEN as usize);
        for piece in failed {
            let range = piece.there as usize..piece.there as usize + piece.new.len();
            let found = &there[range.clone()];
            assert!(written_part(found, &piece.new, &piece.old).is_some());
            there[range].copy_from_slice(&piece.new);
        }
        assert!(there == self.there_holds, "something there was touched");
    }
}

/// What many seeds have come to.
#[derive(Default)]
struct Sum {
    happened: Happened,
    applied: u64,
    failed: u64,
    slowest: Duration,
}

/// Opens the proxy as a segment, which may take some tries while connections are broken.
fn open(world: &World) -> Option<Segment> {
    for _ in 0..3 {
        let begin = Instant::now();
        match world.initiator.open_segment(&world.proxy.session()) {
            Ok(segment) => return Some(segment),
            Err(EngineError::Control { .. } | EngineError::Descriptor { .. }) => {}
            Err(error) => panic!("{error:?}"),
        }
        assert!(
            begin.elapsed() < Duration::from_secs(5),
            "{:?}",
            begin.elapsed()
        );
    }
    None
}

/// Probes and notifies; both end in time, and what is reported as delivered has been.
fn ask(world: &World, segment: &Segment, message: &str) {
    let begin = Instant::now();
    let is_control = |error: EngineError| match error {
        EngineError::Control { .. } => (),
        error => panic!("{error:?}"),
    };
    let _ = world
        .initiator
        .probe(&world.proxy.session())
        .map_err(is_control);
    let sent = world.initiator.notify(segment, "fault", message);
    assert!(
        begin.elapsed() < Duration::from_secs(8),
        "{:?}",
        begin.elapsed()
    );
    if sent.map_err(is_control).is_ok() {
        let notices = world.target.take_notices().unwrap();
        let arrived = notices
            .notices
            .iter()
            .any(|notice| notice.message == message);
        assert!(arrived, "{message} is reported as delivered");
    }
}

/// Does what has to succeed because nothing is broken any more. The waits are short, so a machine that has other
/// things to do may let one run out; but then the call took at least that long, and may be made again.
#[track_caller]
fn at_once_or_late<T, E: std::fmt::Debug>(mut call: impl FnMut() -> Result<T, E>) -> T {
    for _ in 0..10 {
        let begin = Instant::now();
        match call() {
            Ok(result) => return result,
            Err(error) => assert!(begin.elapsed() >= SHORTEST, "{error:?}"),
        }
    }
    panic!("ten times in a row");
}

fn run(seed: u64, profiles: [Profile; 2], version: Option<u64>, sum: &Mutex<Sum>) {
    let mut world = World::new(seed, profiles, version);
    let registration = world
        .target
        .register(world.there.clone(), Access::RemoteWrite)
        .unwrap();
    let mut failed = Vec::new();
    let mut slowest = Duration::ZERO;
    let (mut applied_count, mut failed_count) = (0, 0);
    let mut settle = |world: &mut World, rounds: Vec<Vec<Piece>>, segment: &Segment| {
        let begin = Instant::now();
        let batches: Vec<_> = rounds
            .iter()
            .map(|pieces| {
                world
                    .initiator
                    .submit(world.tasks(pieces, segment))
                    .unwrap()
            })
            .collect();
        let limit = batch_limit(rounds.iter().map(|pieces| pieces.len() as u64).sum());
        let mut is_applied = true;
        for (pieces, batch) in rounds.into_iter().zip(batches) {
            let report = batch
                .wait(Some(begin + limit))
                .unwrap_or_else(|| panic!("a batch has not settled in {limit:?}"));
            slowest = slowest.max(begin.elapsed());
            world.check(&pieces, &report);
            for (piece, settled) in pieces.into_iter().zip(report.tasks()) {
                if settled.remote.is_applied() {
                    applied_count += 1;
                } else {
                    is_applied = false;
                    failed_count += 1;
                    if piece.op == Op::Write {
                        failed.push(piece);
                    }
                }
            }
        }
        is_applied
    };

    if let Some(segment) = open(&world) {
        for round in 0..2 {
            let batches = 1 + world.random.below(2);
            let rounds = (0..batches).map(|_| world.pieces()).collect();
            settle(&mut world, rounds, &segment);
            if world.random.chance(20) {
                ask(&world, &segment, &format!("{seed}-{round}"));
            }
        }
    }
    world.proxy.heal();
    // The same engines, and the same segment if there was one.
    let open = || world.initiator.open_segment(&world.proxy.session());
    let segment = at_once_or_late(open);
    at_once_or_late(|| world.initiator.notify(&segment, "fault", "healed"));
    at_once_or_late(|| world.initiator.probe(&world.proxy.session()));
    at_once_or_late(|| {
        let pieces = world.pieces();
        match settle(&mut world, vec![pieces], &segment) {
            true => Ok(()),
            false => Err("transfers fail after the faults have ended"),
        }
    });
    drop(segment);

    // Everything that was on its way through the target has ended once this returns.
    registration.unregister().unwrap();
    world.check_all(&failed);
    let spoken = match version {
        Some(1) => DataVersion::V1,
        _ => DataVersion::V2,
    };
    let connections = world.proxy.assert_version(spoken);
    assert!(connections > 0, "no header has gone through the proxy");
    let mut sum = sum.lock().unwrap();
    for (fault, count) in world.proxy.happened() {
        *sum.happened.entry(fault).or_default() += count;
    }
    sum.applied += applied_count;
    sum.failed += failed_count;
    sum.slowest = sum.slowest.max(slowest);
}

fn run_all(usual: Range<u64>, profiles: [Profile; 2], version: Option<u64>) {
    let _alone = alone();
    let sum = Mutex::new(Sum::default());
    run_seeds(seeds(usual), 8, |seed| run(seed, profiles, version, &sum));
    let Sum {
        happened,
        applied,
        failed,
        slowest,
    } = sum.into_inner().unwrap();
    println!(
        "counted: {applied} applied, {failed} failed, slowest batch {slowest:?}, {happened:?}"
    );
    if are_usual_seeds() {
        assert!(applied > 0 && failed > 0, "no seed has come to both ends");
        for fault in profiles[1].faults {
            assert!(happened.contains_key(fault), "{fault:?} never happened");
        }
    }
}

const CONTROL_RARELY: Profile = Profile {
    percent: 10,
    bytes_bits: 9,
    ..Profile::NETWORK
};

#[test]
fn property_transfers_survive_random_faults() {
    run_all(0..32, [CONTROL_RARELY, Profile::NETWORK], None);
}

// row: W7.3e
#[test]
fn property_transfers_in_version_1_survive_random_faults() {
    run_all(1_000..1_032, [CONTROL_RARELY, Profile::NETWORK], Some(1));
}

/// Every connection has one wrong bit somewhere, most of them in what is transferred.
const FLIPS: Profile = Profile {
    percent: 100,
    bytes_bits: 17,
    faults: &[Fault::Flip],
    pause: Duration::ZERO,
};

const CLEAN: Profile = Profile {
    percent: 0,
    ..Profile::NETWORK
};

#[test]
fn a_proxy_that_changes_a_bit_of_the_bytes_is_noticed() {
    let _alone = alone();
    let sum = Mutex::new(Sum::default());
    let complaints: Vec<String> = (0..16)
        .filter_map(|seed| {
            let run = || run(seed, [CLEAN, FLIPS], None, &sum);
            let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).err()?;
            panic.downcast_ref::<String>().cloned()
        })
        .collect();
    let is_of_bytes = |complaint: &&String| complaint.contains("bytes is applied");
    assert!(
        complaints.iter().filter(is_of_bytes).count() > 3,
        "the comparison does not look at the bytes: {complaints:?}"
    );
}
