//! An HTTP metadata store, and engines that find each other in it, over connections that a proxy breaks
//! at random.
//!
//! Every call ends within its deadline with a typed error or with what is there: the last value that is known, or one
//! of a call that failed half way, whole. What is reported as put, deleted or swapped is; afterwards the same store
//! and the same engines work.
#![cfg(feature = "http")]

mod fault_support;
mod support;

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fault_support::entry::Entry;
use fault_support::plan::{Fault, Happened, Profile};
use fault_support::proxy::Proxy;
use fault_support::{Random, alone, are_usual_seeds, pattern, run_seeds, seeds};
use mooncake_transport::metadata::{
    HttpStore, MetadataStore, StoreConfig, StoreEngine, StoreError, StoreTimeouts,
};
use mooncake_transport::tcp::TcpConfig;
use mooncake_transport::wire::descriptor::{BufferRange, Descriptor};
use mooncake_transport::{Access, Engine, EngineError, Op, Segment, Task};
use slab_memory::HostSlab;
use support::{bytes, finish, slab};

/// For a call as a whole.
const TOTAL: Duration = Duration::from_millis(400);

/// What a busy machine may add to a call.
const SLACK: Duration = Duration::from_secs(4);

const LEN_MAX: u64 = 1 << 20;

const LENS: [usize; 7] = [1, 2, 100, 1_499, 16_384, 16_385, 70_001];

type Values = Arc<Mutex<HashMap<String, Vec<u8>>>>;

/// A metadata service after the one of the Mooncake package: it does not replace a value that claims a name.
struct Service {
    address: SocketAddr,
    values: Values,
    /// Requests that it has accepted and not carried out.
    open: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
    acceptor: Option<JoinHandle<()>>,
}

impl Service {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let values = Values::default();
        let stop = Arc::new(AtomicBool::new(false));
        let (serving, stopping) = (Arc::clone(&values), Arc::clone(&stop));
        let open = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&open);
        let accept = move || {
            let mut workers: Vec<JoinHandle<()>> = Vec::new();
            for (index, stream) in listener.incoming().map_while(Result::ok).enumerate() {
                if stopping.load(Ordering::SeqCst) {
                    break;
                }
                // Longer than any client waits.
                stream
                    .set_read_timeout(Some(Duration::from_secs(2)))
                    .unwrap();
                stream
                    .set_write_timeout(Some(Duration::from_secs(2)))
                    .unwrap();
                let values = Arc::clone(&serving);
                let open = Arc::clone(&counter);
                open.fetch_add(1, Ordering::SeqCst);
                let serve = move || {
                    drop(serve(&stream, &values, index % 2 == 0));
                    open.fetch_sub(1, Ordering::SeqCst);
                };
                let named = std::thread::Builder::new().name("fault-http".into());
                workers.push(named.spawn(serve).unwrap());
            }
            for worker in workers {
                let _ = worker.join();
            }
        };
        let named = std::thread::Builder::new().name("fault-http".into());
        Self {
            address,
            values,
            open,
            stop,
            acceptor: Some(named.spawn(accept).unwrap()),
        }
    }
}

impl Service {
    /// Waits until what has reached the service is carried out, so that nothing of before comes later.
    fn settle(&self) {
        // Connections are accepted in their order: what came before is, once this is answered.
        let _ = patiently(|| store(self.address).get("settled", LEN_MAX));
        let deadline = Instant::now() + Duration::from_secs(30);
        while self.open.load(Ordering::SeqCst) > 0 {
            assert!(Instant::now() < deadline, "a request is not carried out");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.address);
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
    }
}

/// One request and its answer, whose body has a length or comes in chunks.
fn serve(stream: &TcpStream, values: &Values, chunked: bool) -> std::io::Result<()> {
    let mut input = BufReader::new(stream);
    let mut line = String::new();
    input.read_line(&mut line)?;
    let mut words = line.split(' ');
    let method = words.next().unwrap_or_default().to_owned();
    let target = words.next().unwrap_or_default().to_owned();
    let mut len = 0;
    loop {
        let mut header = String::new();
        if input.read_line(&mut header)? == 0 || !header.ends_with("\r\n") {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        if header == "\r\n" {
            break;
        }
        if let Some(value) = header.strip_prefix("Content-Length: ") {
            len = value.trim().parse().unwrap();
        }
    }
    let mut body = vec![0; len];
    input.read_exact(&mut body)?;
    let key = target.split_once("?key=").map(|(_, key)| key.to_owned());
    let key = key.ok_or(std::io::ErrorKind::InvalidData)?;
    let found = {
        let mut values = values.lock().unwrap();
        match method.as_str() {
            "GET" => values.get(&key).cloned().ok_or("404 Not Found"),
            "DELETE" => values
                .remove(&key)
                .map(|_| Vec::new())
                .ok_or("404 Not Found"),
            _ if is_protected(&key) && values.contains_key(&key) => Err("400 Bad Request"),
            _ => {
                values.insert(key, body);
                Ok(Vec::new())
            }
        }
    };
    let mut answer = Vec::new();
    match found {
        Err(status) => write!(answer, "HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n")?,
        Ok(value) if chunked => {
            answer.extend_from_slice(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n");
            for chunk in value.chunks(1_000) {
                write!(answer, "{:x}\r\n", chunk.len())?;
                answer.extend_from_slice(chunk);
                answer.extend_from_slice(b"\r\n");
            }
            answer.extend_from_slice(b"0\r\n\r\n");
        }
        Ok(value) => {
            let len = value.len();
            write!(answer, "HTTP/1.1 200 OK\r\nContent-Length: {len}\r\n\r\n")?;
            answer.extend_from_slice(&value);
        }
    }
    let mut output = stream;
    output.write_all(&answer)
}

/// Says whether a key claims a name.
fn is_protected(key: &str) -> bool {
    key.contains("rpc_meta")
}

/// A key as it is in a request's target.
fn escaped(key: &str) -> String {
    key.replace('/', "%2F").replace(':', "%3A")
}

/// Whatever a network does to short exchanges.
const NETWORK: Profile = Profile {
    percent: 60,
    bytes_bits: 14,
    ..Profile::NETWORK
};

fn store(address: SocketAddr) -> HttpStore {
    let mut timeouts = StoreTimeouts::default();
    timeouts.connect = TOTAL;
    timeouts.total = TOTAL;
    HttpStore::with_timeouts(&format!("http://{address}/metadata"), timeouts).unwrap()
}

/// Runs `call`, which has to end within the time of `count` calls to the store.
#[track_caller]
fn timed<T>(count: u32, call: impl FnOnce() -> T) -> T {
    let begin = Instant::now();
    let result = call();
    let took = begin.elapsed();
    assert!(took < TOTAL * count + SLACK, "it took {took:?}");
    result
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

/// Errors that a broken connection may lead to; any other is a mistake.
#[track_caller]
fn assert_is_of_the_network(error: &StoreError) {
    assert!(
        matches!(
            error,
            StoreError::Unreachable { .. }
                | StoreError::Timeout { .. }
                | StoreError::Connection { .. }
        ),
        "{error:?}"
    );
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
        let Self {
            happened,
            done,
            failed,
        } = self;
        println!("counted: {done} done, {failed} failed, {happened:?}");
        if are_usual_seeds() {
            assert!(done > 0 && failed > 0, "no seed has come to both ends");
            assert!(happened.len() > 3, "{happened:?}");
        }
    }
}

fn run_calls(seed: u64, profile: Profile, sum: &Mutex<Sum>) {
    let service = Service::start();
    let proxy = Proxy::start(service.address, seed, profile);
    let store = store(proxy.address());
    let mut random = Random::new(seed ^ 0x0057_0BED);
    let keys = ["mooncake/ram/a:1", "mooncake/rpc_meta/a:1"];
    let mut entries: HashMap<&str, Entry> = keys.map(|key| (key, Entry::default())).into();
    let (mut done, mut failed) = (0, 0);
    for step in 0..10 {
        let key = random.pick(&keys);
        let entry = entries.get_mut(key).unwrap();
        let drawn = random.below(4);
        let value = pattern(seed << 8 | step, random.pick(&LENS));
        let result = match drawn {
            0 => timed(1, || store.get(key, LEN_MAX)).map(|found| entry.read(found)),
            1 => match timed(1, || store.put(key, &value)) {
                Err(StoreError::Refused { status: 400, .. }) if is_protected(key) => {
                    entry.kept();
                    Ok(())
                }
                put => entry.put(value, put),
            },
            2 => entry.delete(timed(1, || store.delete(key))),
            _ => {
                let other = Some(pattern(seed, 9));
                let expected = random.pick(&[entry.known(), &other]).clone();
                let swap = || store.swap(key, expected.as_deref(), Some(&value));
                // It is several requests, and the first of them removes what is there.
                let swapped = timed(4, swap).inspect_err(|_| entry.may_become(None));
                entry.swap(&expected, value, swapped)
            }
        };
        match result {
            Ok(()) => done += 1,
            Err(error) => {
                assert_is_of_the_network(&error);
                failed += 1;
            }
        }
        let there = service.values.lock().unwrap().get(&escaped(key)).cloned();
        assert!(entry.may_be(&there), "what is there is not what is known");
    }
    proxy.heal();
    for key in keys {
        let entry = entries.get_mut(key).unwrap();
        entry.read(patiently(|| store.get(key, LEN_MAX)));
        // A key that no late call can meet, whether one of before or of an earlier try.
        let mut tries = 0..;
        patiently(|| {
            let key = format!("{key}-after-{}", tries.next().unwrap_or(0));
            store.put(&key, b"value")?;
            assert_eq!(store.get(&key, LEN_MAX)?, Some(b"value".to_vec()));
            assert!(store.delete(&key)?);
            assert_eq!(store.get(&key, LEN_MAX)?, None);
            Ok(())
        });
    }
    sum.lock().unwrap().add(&proxy, done, failed);
}

#[test]
fn property_an_http_store_survives_random_faults() {
    let _alone = alone();
    let sum = Mutex::new(Sum::default());
    run_seeds(seeds(0..32), 8, |seed| run_calls(seed, NETWORK, &sum));
    sum.into_inner().unwrap().check();
}

fn start(store: &HttpStore, name: &str) -> Result<StoreEngine, EngineError> {
    let mut named = StoreConfig::default();
    named.name = Some(name.to_owned());
    let mut config = TcpConfig::default();
    config.timeouts.control_reply = TOTAL;
    StoreEngine::start(config, Arc::new(store.clone()), named)
}

/// The error, which has to be one of the store.
#[track_caller]
fn of_the_store(error: EngineError) -> StoreError {
    match error {
        EngineError::Store(error) => error,
        error => panic!("{error:?}"),
    }
}

fn write(engine: &StoreEngine, segment: Segment, remote: u64, local: &Arc<HostSlab>, len: u64) {
    let task = Task {
        op: Op::Write,
        segment,
        remote,
        memory: local.clone(),
        range: 0..len,
        hold: Box::new(()),
    };
    assert!(finish(&engine.submit(vec![task]).unwrap()).is_applied());
}

fn run_engines(seed: u64, sum: &Mutex<Sum>) {
    let service = Service::start();
    // Each call of an engine is several calls to the store.
    let rarely = Profile {
        percent: 25,
        bytes_bits: 10,
        ..NETWORK
    };
    let proxy = Proxy::start(service.address, seed, rarely);
    // The target has a store that works, so that there is something to be found.
    let working = store(service.address);
    let target = patiently(|| start(&working, "target").map_err(of_the_store));
    let there = slab(4_096);
    let register = || target.register(there.clone(), Access::RemoteWrite);
    let registration = patiently(|| register().map_err(of_the_store));
    let broken = store(proxy.address());
    let local = slab(4_096);
    local.copy_in(0, &pattern(seed, 4_096)).unwrap();
    let (mut done, mut failed) = (0, 0);
    let mut count = |result: Result<(), EngineError>| match result {
        Ok(()) => done += 1,
        Err(error) => {
            assert_is_of_the_network(&of_the_store(error));
            failed += 1;
        }
    };
    // Some calls for the claim, one for the entry, and a look at who has the name if an earlier try has it.
    let mut engine = None;
    for _ in 0..3 {
        match timed(10, || start(&broken, "source")) {
            Ok(started) => {
                engine = Some(started);
                count(Ok(()));
                break;
            }
            Err(error) => count(Err(error)),
        }
    }
    if let Some(engine) = &engine {
        let memory = slab(4_096);
        for _ in 0..2 {
            match timed(4, || engine.register(memory.clone(), Access::RemoteRead)) {
                Ok(registration) => {
                    // What the store says of it is another matter.
                    timed(4, || registration.unregister()).unwrap();
                    count(Ok(()));
                }
                Err(error) => count(Err(error)),
            }
            match timed(3, || engine.open_segment("target")) {
                Ok(segment) => {
                    write(engine, segment, there.address(), &local, 100);
                    count(Ok(()));
                }
                Err(error) => count(Err(error)),
            }
            count(timed(3, || engine.probe("target")));
            count(timed(4, || engine.republish()).map_err(EngineError::from));
        }
    }
    proxy.heal();
    service.settle();
    let engine = match engine {
        Some(engine) => engine,
        None => patiently(|| start(&broken, "source").map_err(of_the_store)),
    };
    patiently(|| engine.republish());
    patiently(|| engine.probe("target").map_err(of_the_store));
    let segment = patiently(|| engine.open_segment("target").map_err(of_the_store));
    write(&engine, segment, there.address(), &local, 4_096);
    assert_eq!(bytes(&there, 0, 4_096), pattern(seed, 4_096));
    // And it is found as well.
    let memory = slab(4_096);
    let register = || engine.register(memory.clone(), Access::RemoteWrite);
    let other = patiently(|| register().map_err(of_the_store));
    let published = service.values.lock().unwrap()[&escaped("mooncake/ram/source")].clone();
    let published = Descriptor::decode(&published).unwrap();
    let expected = BufferRange {
        address: memory.address(),
        len: memory.len(),
    };
    assert_eq!(published.buffers, [expected]);
    let segment = patiently(|| target.open_segment("source").map_err(of_the_store));
    write(&target, segment, memory.address(), &local, 4_096);
    other.unregister().unwrap();
    registration.unregister().unwrap();
    let mut is_withdrawn = true;
    for engine in [engine, target] {
        match timed(4, || engine.close()) {
            Ok(()) => {}
            // On a busy machine.
            Err(StoreError::Timeout { .. }) => is_withdrawn = false,
            Err(error) => panic!("{error:?}"),
        }
    }
    let left: Vec<String> = service.values.lock().unwrap().keys().cloned().collect();
    assert!(
        left.is_empty() || !is_withdrawn,
        "{left:?} is left in the store"
    );
    sum.lock().unwrap().add(&proxy, done, failed);
}

#[test]
fn property_engines_in_an_http_store_survive_random_faults() {
    let _alone = alone();
    let sum = Mutex::new(Sum::default());
    run_seeds(seeds(2_000..2_024), 8, |seed| run_engines(seed, &sum));
    sum.into_inner().unwrap().check();
}

#[test]
fn a_proxy_that_changes_a_bit_of_a_value_is_noticed() {
    const FLIPS: Profile = Profile {
        percent: 100,
        bytes_bits: 14,
        faults: &[Fault::Flip],
        pause: Duration::ZERO,
    };
    let _alone = alone();
    let sum = Mutex::new(Sum::default());
    let is_noticed = (0..40).any(|seed| {
        let run = || run_calls(seed, FLIPS, &sum);
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).err();
        let complaint = panic
            .as_ref()
            .and_then(|panic| panic.downcast_ref::<String>());
        complaint.is_some_and(|complaint| complaint.contains("nobody has put these"))
    });
    assert!(is_noticed, "the comparison does not look at the bytes");
}
