//! Transfers between our engine and a real one, in either role, over connections that a proxy breaks at random.
//!
//! What either side reports as done has the right bytes at the other; nothing around it is touched; afterwards the
//! same engines transfer again, and ours keeps no connection.
#![cfg(feature = "tcp")]

mod fault_support;
#[path = "peer/harness.rs"]
mod harness;
#[path = "peer/ours.rs"]
mod ours;
#[path = "peer/stream.rs"]
mod stream;

use std::time::{Duration, Instant};

use fault_support::plan::{Happened, Profile};
use fault_support::proxy::{EngineProxy, listeners};
use fault_support::{Open, Random, alone, are_usual_seeds, seeds};
use harness::{Memory, Peer};
use mooncake_transport::tcp::TcpConfig;
use mooncake_transport::{Access, Engine, Op};
use ours::{Ours, assert_applied, eventually, settled};

const SIZES: [u64; 7] = [1, 9, 25, 4_097, 65_535, 65_537, 200_001];

/// The slab of either side, in the middle of which a range is transferred.
const LEN: u64 = 250_007;

const GUARD: u64 = 4_099;
const BACKGROUND: u64 = 51;
const CONTENT: u64 = 52;

/// The real engine serves control connections one at a time, and a stalled one holds it up for 5 s.
const CONTROL: Profile = Profile {
    percent: 0,
    ..Profile::NETWORK
};

fn proxy(session: &str, seed: u64) -> EngineProxy {
    let (control_at, data_at, _) = listeners(session);
    EngineProxy::start(control_at, data_at, seed, [CONTROL, Profile::NETWORK], None)
}

fn our_engine() -> Ours {
    let mut config = TcpConfig::default();
    config.timeouts.progress = Duration::from_millis(400);
    config.timeouts.status = Duration::from_millis(400);
    config.timeouts.header = Duration::from_millis(400);
    config.timeouts.refresh_interval = Duration::from_millis(50);
    Ours::with_config(LEN, config)
}

/// The peer's memory of `LEN` bytes as it was, with the content in the middle if it is there.
fn assert_peer_holds(peer: &mut Peer, memory: Memory, content: Option<u64>) {
    let len = content.unwrap_or(0);
    let end = GUARD + len;
    peer.assert_holds(memory, 0, GUARD, BACKGROUND, 0);
    if len > 0 {
        peer.assert_holds(memory, GUARD, len, CONTENT, 0);
    }
    peer.assert_holds(memory, end, LEN - end, BACKGROUND, end);
}

fn assert_we_hold(ours: &Ours, len: u64) {
    let end = GUARD + len;
    ours.assert_holds(0..GUARD, BACKGROUND, 0);
    ours.assert_holds(GUARD..end, CONTENT, 0);
    ours.assert_holds(end..LEN, BACKGROUND, end);
}

#[derive(Default)]
struct Sum {
    done: u32,
    failed: u32,
    happened: Happened,
}

impl Sum {
    fn count(&mut self, is_done: bool) {
        if is_done {
            self.done += 1;
        } else {
            self.failed += 1;
        }
    }

    fn add(&mut self, proxy: &EngineProxy) {
        for (fault, count) in proxy.happened() {
            *self.happened.entry(fault).or_default() += count;
        }
    }

    fn check(self) {
        let Self {
            done,
            failed,
            happened,
        } = self;
        println!("counted: {done} done, {failed} failed, {happened:?}");
        if are_usual_seeds() {
            assert!(done > 0 && failed > 0, "no seed has come to both ends");
            assert!(happened.len() > 2, "{happened:?}");
        }
    }
}

#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn property_our_transfers_with_a_real_engine_survive_random_faults() {
    let _alone = alone();
    let mut peer = Peer::start();
    let ours = our_engine();
    let open = Open::beside_an_engine();
    let mut sum = Sum::default();
    for seed in seeds(0..16) {
        println!("seed {seed}");
        let mut random = Random::new(seed);
        let proxy = proxy(peer.session(), seed);
        let segment = ours.engine.open_segment(&proxy.session()).unwrap();
        for op in [Op::Write, Op::Read] {
            let len = random.pick(&SIZES);
            let memory = peer.allocate(LEN, BACKGROUND);
            ours.fill(0..LEN, BACKGROUND);
            match op {
                Op::Write => ours.fill(GUARD..GUARD + len, CONTENT),
                Op::Read => peer.fill(memory, GUARD, len, CONTENT, 0),
            }
            assert_eq!(peer.register(memory), 0);
            let there = memory.address + GUARD;
            // Each byte once, in up to four tasks.
            let mut cuts: Vec<u64> = (0..random.below(4)).map(|_| random.below(len)).collect();
            cuts.extend([0, len]);
            cuts.sort_unstable();
            cuts.dedup();
            let tasks = cuts.windows(2).map(|cut| {
                let range = GUARD + cut[0]..GUARD + cut[1];
                ours.task(op, &segment, there + cut[0], range)
            });
            let begin = Instant::now();
            let report = settled(&ours.submit(tasks.collect()));
            assert!(
                begin.elapsed() < Duration::from_secs(15),
                "{:?}",
                begin.elapsed()
            );
            sum.count(report.is_applied());
            if report.is_applied() {
                assert_we_hold(&ours, len);
                assert_peer_holds(&mut peer, memory, Some(len));
            }
        }
        proxy.heal();
        let memory = peer.allocate(LEN, BACKGROUND);
        assert_eq!(peer.register(memory), 0);
        ours.fill(0..LEN, BACKGROUND);
        ours.fill(GUARD..GUARD + 1_000, CONTENT);
        let range = GUARD..GUARD + 1_000;
        assert_applied(&ours.transfer(Op::Write, &segment, memory.address + GUARD, range));
        assert_peer_holds(&mut peer, memory, Some(1_000));
        sum.add(&proxy);
    }
    // Segments and proxies are given up, and so are their connections.
    open.assert_back("our engine as initiator");
    sum.check();
}

#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn property_a_real_engines_transfers_with_ours_survive_random_faults() {
    let _alone = alone();
    let mut peer = Peer::start_with(&[
        ("MC_TCP_PROGRESS_TIMEOUT_SEC", "1"),
        ("MC_TCP_STATUS_TIMEOUT_SEC", "1"),
    ]);
    let ours = our_engine();
    let _registration = ours.register(Access::RemoteWrite);
    let open = Open::beside_an_engine();
    let mut sum = Sum::default();
    for seed in seeds(100..112) {
        println!("seed {seed}");
        let mut random = Random::new(seed);
        let proxy = proxy(ours.engine.session(), seed);
        let session = proxy.session();
        for op in ["write", "read"] {
            let len = random.pick(&SIZES);
            let item = [(GUARD, ours.slab.address() + GUARD, len)];
            let memory = peer.allocate(LEN, BACKGROUND);
            ours.fill(0..LEN, BACKGROUND);
            if op == "write" {
                peer.fill(memory, GUARD, len, CONTENT, 0);
            } else {
                ours.fill(GUARD..GUARD + len, CONTENT);
            }
            let is_done = peer.transfer(op, &session, memory, &item) == 0;
            sum.count(is_done);
            if is_done {
                assert_we_hold(&ours, len);
                assert_peer_holds(&mut peer, memory, Some(len));
            }
        }
        proxy.heal();
        let memory = peer.allocate(LEN, BACKGROUND);
        peer.fill(memory, GUARD, 1_000, CONTENT, 0);
        let item = [(GUARD, ours.slab.address() + GUARD, 1_000)];
        // A real engine notices that a connection has ended when it uses it, and after a failure to connect it waits
        // a second before it does so again.
        eventually("the real engine transfers again", || {
            ours.fill(0..LEN, BACKGROUND);
            let code = peer.transfer("write", &session, memory, &item);
            if code != 0 {
                std::thread::sleep(Duration::from_millis(100));
            }
            code == 0
        });
        assert_we_hold(&ours, 1_000);
        sum.add(&proxy);
    }
    open.assert_back("our engine as target");
    sum.check();
}
