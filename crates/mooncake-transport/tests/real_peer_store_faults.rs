//! etcd and Redis, real servers, over connections that a proxy breaks at random.
//!
//! Every call ends within its deadline with an error of the network, or with what is there: the last value that is known, or one of
//! a call that failed half way, whole. Of
//! engines that claim one name at most one comes up; afterwards the same stores work.
#![cfg(all(feature = "http", feature = "etcd", feature = "redis"))]

mod fault_support;
#[path = "peer/harness.rs"]
mod harness;
#[path = "peer/servers.rs"]
mod servers;

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fault_support::entry::Entry;
use fault_support::plan::{Happened, Profile};
use fault_support::proxy::Proxy;
use fault_support::{Random, alone, are_usual_seeds, pattern, run_seeds, seeds};
use mooncake_transport::EngineError;
use mooncake_transport::metadata::{
    MetadataStore, StoreConfig, StoreEngine, StoreError, StoreTimeouts, open_store,
};
use mooncake_transport::tcp::TcpConfig;
use servers::{Kind, Server};

/// For a call as a whole.
const TOTAL: Duration = Duration::from_millis(300);

/// What a busy machine may add to a call.
const SLACK: Duration = Duration::from_secs(4);

const LEN_MAX: u64 = 1 << 20;

const LENS: [usize; 6] = [1, 2, 100, 1_499, 16_385, 70_001];

/// Whatever a network does to short exchanges.
const NETWORK: Profile = Profile {
    percent: 50,
    bytes_bits: 12,
    ..Profile::NETWORK
};

fn store(kind: Kind, at: SocketAddr) -> Arc<dyn MetadataStore> {
    let scheme = match kind {
        Kind::Http => unreachable!("its faults are those of another test"),
        Kind::Etcd => "etcd",
        Kind::Redis => "redis",
    };
    let mut timeouts = StoreTimeouts::default();
    timeouts.connect = TOTAL;
    timeouts.total = TOTAL;
    open_store(&format!("{scheme}://{at}"), timeouts).unwrap()
}

fn address(server: &Server) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, server.port()).into()
}

/// Makes a call over a connection that nobody breaks: only the machine may take longer than a call may.
#[track_caller]
fn patiently<T>(mut call: impl FnMut() -> Result<T, StoreError>) -> T {
    for _ in 0..20 {
        match call() {
            Err(StoreError::Timeout { .. }) => {}
            result => return result.unwrap(),
        }
    }
    panic!("the store does not answer although nothing is broken any more");
}

fn is_of_the_network(error: &StoreError) -> bool {
    matches!(
        error,
        StoreError::Unreachable { .. }
            | StoreError::Timeout { .. }
            | StoreError::Connection { .. }
            // What etcd answers to a request that was cut.
            | StoreError::Refused { status: 400, .. }
    )
}

/// What many seeds have come to.
#[derive(Default)]
struct Sum {
    happened: Happened,
    done: u64,
    failed: u64,
}

impl Sum {
    fn add(&mut self, proxy: &Proxy, done: u64, failed: u64) {
        for (fault, count) in proxy.happened() {
            *self.happened.entry(fault).or_default() += count;
        }
        self.done += done;
        self.failed += failed;
    }

    fn check(self) {
        println!(
            "counted: {} done, {} failed, {:?}",
            self.done, self.failed, self.happened
        );
        if are_usual_seeds() {
            assert!(
                self.done > 0 && self.failed > 0,
                "no seed has come to both ends"
            );
        }
    }
}

fn run_calls(kind: Kind, at: SocketAddr, seed: u64, sum: &Mutex<Sum>) {
    let proxy = Proxy::start(at, seed, NETWORK);
    let (broken, direct) = (store(kind, proxy.address()), store(kind, at));
    let mut random = Random::new(seed ^ 0x5705_2E5E);
    let key = format!("mooncake/ram/{seed}");
    let mut entry = Entry::default();
    let (mut done, mut failed) = (0, 0);
    for step in 0..8 {
        let drawn = random.below(4);
        let value = pattern(seed << 8 | step, random.pick(&LENS));
        let begin = Instant::now();
        let result = match drawn {
            0 => broken.get(&key, LEN_MAX).map(|found| entry.read(found)),
            1 => {
                let put = broken.put(&key, &value);
                entry.put(value, put)
            }
            2 => entry.delete(broken.delete(&key)),
            _ => {
                let other = Some(pattern(seed, 9));
                let expected = random.pick(&[entry.known(), &other]).clone();
                let swapped = broken.swap(&key, expected.as_deref(), Some(&value));
                entry.swap(&expected, value, swapped)
            }
        };
        let took = begin.elapsed();
        assert!(took < TOTAL * 2 + SLACK, "it took {took:?}");
        match result {
            Ok(()) => done += 1,
            Err(error) => {
                assert!(is_of_the_network(&error), "{error:?}");
                failed += 1;
            }
        }
        entry.read(patiently(|| direct.get(&key, LEN_MAX)));
    }
    proxy.heal();
    // A key that no late call can meet, whether one of before or of an earlier try.
    let mut tries = 0..;
    patiently(|| {
        let key = format!("mooncake/ram/after-{seed}-{}", tries.next().unwrap_or(0));
        broken.put(&key, b"value")?;
        assert_eq!(broken.get(&key, 100)?, Some(b"value".to_vec()));
        assert!(broken.delete(&key)?);
        assert_eq!(direct.get(&key, 100)?, None);
        Ok(())
    });
    sum.lock().unwrap().add(&proxy, done, failed);
}

fn start(store: &Arc<dyn MetadataStore>, name: &str) -> Result<StoreEngine, EngineError> {
    let mut named = StoreConfig::default();
    named.name = Some(name.to_owned());
    named.look_every = None;
    let mut config = TcpConfig::default();
    config.timeouts.control_reply = Duration::from_secs(10);
    StoreEngine::start(config, store.clone(), named)
}

fn run_claims(kind: Kind, at: SocketAddr, seed: u64, sum: &Mutex<Sum>) {
    // Each start is several calls to the store.
    let rarely = Profile {
        percent: 25,
        ..NETWORK
    };
    let proxy = Proxy::start(at, seed, rarely);
    let broken = store(kind, proxy.address());
    let name = format!("engine-{seed}");
    let started: Vec<_> = std::thread::scope(|scope| {
        let starts: Vec<_> = (0..3)
            .map(|_| scope.spawn(|| start(&broken, &name)))
            .collect();
        starts
            .into_iter()
            .map(|start| start.join().unwrap())
            .collect()
    });
    let (up, down): (Vec<_>, Vec<_>) = started.into_iter().partition(Result::is_ok);
    assert!(up.len() <= 1, "{} engines have the name", up.len());
    let (done, failed) = (up.len() as u64, down.len() as u64);
    for error in down {
        let is_expected = match &error {
            Err(EngineError::Store(
                StoreError::NameTaken { .. } | StoreError::Contended { .. },
            )) => true,
            Err(EngineError::Store(error)) => is_of_the_network(error),
            _ => false,
        };
        assert!(is_expected, "{error:?}");
    }
    proxy.heal();
    drop(up);
    // Whatever a claim that failed half way has left is nobody's.
    let engine = patiently(|| match start(&broken, &name) {
        Err(EngineError::Store(error)) => Err(error),
        result => Ok(result.unwrap()),
    });
    drop(engine);
    sum.lock().unwrap().add(&proxy, done, failed);
}

fn with_server(kind: Kind, run: impl Fn(SocketAddr, u64, &Mutex<Sum>) + Sync, usual: u64) {
    let _alone = alone();
    let server = Server::start(kind);
    let at = address(&server);
    let sum = Mutex::new(Sum::default());
    run_seeds(seeds(0..usual), 8, |seed| run(at, seed, &sum));
    sum.into_inner().unwrap().check();
}

// row: W10.8d
#[test]
#[ignore = "needs-debian: etcd"]
fn property_etcd_survives_random_faults() {
    let run = |at, seed, sum: &_| run_calls(Kind::Etcd, at, seed, sum);
    with_server(Kind::Etcd, run, 32);
}

// row: W10.8d
#[test]
#[ignore = "needs-debian: Redis"]
fn property_redis_survives_random_faults() {
    let run = |at, seed, sum: &_| run_calls(Kind::Redis, at, seed, sum);
    with_server(Kind::Redis, run, 32);
}

// row: W10.4b
#[test]
#[ignore = "needs-debian: etcd"]
fn property_at_most_one_engine_has_a_name_in_etcd_whatever_breaks() {
    let run = |at, seed, sum: &_| run_claims(Kind::Etcd, at, seed, sum);
    with_server(Kind::Etcd, run, 16);
}

// row: W10.4b
#[test]
#[ignore = "needs-debian: Redis"]
fn property_at_most_one_engine_has_a_name_in_redis_whatever_breaks() {
    let run = |at, seed, sum: &_| run_claims(Kind::Redis, at, seed, sum);
    with_server(Kind::Redis, run, 16);
}
