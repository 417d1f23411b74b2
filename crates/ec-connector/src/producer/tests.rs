//! A producer and consumers in one process; the engine between them moves bytes in memory.

use std::future::Future;
use std::net::{IpAddr, Ipv4Addr};
use std::os::unix::fs::FileExt;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Instant;

use mooncake_transport::Reason;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use slab_memory::Memory;

use super::*;
use crate::consumer::{Consumer, ConsumerConfig, TakenItem};
use crate::content_hash::ContentHasher;
use crate::dtype::Dtype;
use crate::fake_engine::{FakeEngine, Fate};
use crate::push::WriteError;
use crate::reservation::TakePolicy;

const POOL: u64 = 1 << 20;
const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

fn soon() -> Option<Instant> {
    Some(Instant::now() + Duration::from_secs(10))
}

fn consumer(engine: &Arc<FakeEngine>, take: TakePolicy) -> Consumer {
    let mut config = ConsumerConfig::new(LOOPBACK, 0, POOL);
    config.reservations.take = take;
    Consumer::start(engine.clone(), config).unwrap()
}

fn taking(engine: &Arc<FakeEngine>) -> Consumer {
    consumer(engine, TakePolicy::OnReady { taken_max: 64 })
}

fn producer(engine: &Arc<FakeEngine>, timeout_ms: u64) -> Producer {
    let mut config = ProducerConfig {
        staging_bytes: 64 << 10,
        ..ProducerConfig::default()
    };
    config.push.timeout_ms = timeout_ms;
    Producer::start(engine.clone(), config).unwrap()
}

fn bytes(len: usize, seed: u8) -> Vec<u8> {
    (0..len)
        .map(|index| (index as u8).wrapping_mul(31) ^ seed)
        .collect()
}

fn item(to: &ControlAddress, content: &[u8]) -> Item {
    let tensor = TensorSpec::new(Dtype::UINT8, [content.len() as u64]).unwrap();
    let mut hasher = ContentHasher::new(&tensor);
    hasher.update(content);
    Item {
        to: to.clone(),
        mm_hash: MmHash::new(hasher.finish().mm_hash).unwrap(),
        tensor,
        source: Source::Bytes(content.to_vec()),
        id: PushId::Fresh,
    }
}

fn done(push: &Push) -> PushReport {
    push.wait(soon()).expect("the push ends in time")
}

fn content_of(item: &TakenItem) -> Vec<u8> {
    let mut content = vec![0; item.len_bytes() as usize];
    item.copy_out(0, &mut content).unwrap();
    content
}

#[test]
fn what_is_pushed_arrives_and_is_cached_the_next_time() {
    let engine = FakeEngine::new();
    let consumer = taking(&engine);
    let producer = producer(&engine, 10_000);
    let content = bytes(70_000, 1);

    let report = done(&producer.push(item(consumer.address(), &content)));
    assert_eq!(report.result.unwrap(), Delivery::Written);
    assert_eq!(report.wire_bytes, 70_000);
    assert!(report.elapsed > Duration::ZERO);
    let taken = consumer.next_taken(soon()).unwrap();
    assert_eq!(taken.transfer_id(), &report.transfer_id);
    assert!(!taken.is_cached());
    assert_eq!(content_of(&taken), content);
    assert_eq!(taken.digest().unwrap().mm_hash, taken.mm_hash().as_str());
    drop(taken);

    let report = done(&producer.push(item(consumer.address(), &content)));
    assert_eq!(report.result.unwrap(), Delivery::Cached);
    assert_eq!(report.wire_bytes, 0);
    let taken = consumer.next_taken(soon()).unwrap();
    assert!(taken.is_cached());
    assert_eq!(content_of(&taken), content);
    assert_eq!(engine.writes.load(Ordering::SeqCst), 1);
    assert_eq!(consumer.snapshot().bytes.leased, 70_144);
}

#[test]
fn many_pushes_run_side_by_side_and_equal_content_is_written_once() {
    let engine = FakeEngine::new();
    let consumer = taking(&engine);
    let producer = producer(&engine, 10_000);
    let pushes: Vec<_> = (0..48)
        .map(|index| producer.push(item(consumer.address(), &bytes(3_000, index % 12))))
        .collect();
    let reports: Vec<_> = pushes.iter().map(done).collect();
    let written = reports
        .iter()
        .filter(|report| *report.result.as_ref().unwrap() == Delivery::Written)
        .count();
    assert_eq!(written, 12, "a producer never follows itself");
    assert_eq!(engine.writes.load(Ordering::SeqCst), 12);
    for _ in 0..48 {
        let taken = consumer.next_taken(soon()).unwrap();
        assert_eq!(taken.digest().unwrap().mm_hash, taken.mm_hash().as_str());
    }
}

// row: V18
#[test]
fn zero_bytes_arrive_without_a_write() {
    let engine = FakeEngine::new();
    let consumer = taking(&engine);
    let producer = producer(&engine, 10_000);
    let report = done(&producer.push(item(consumer.address(), &[])));
    assert_eq!(report.result.unwrap(), Delivery::Written);
    assert_eq!(engine.writes.load(Ordering::SeqCst), 0);
    let taken = consumer.next_taken(soon()).unwrap();
    assert_eq!(content_of(&taken), b"");
}

#[test]
fn bytes_of_a_taken_item_are_pushed_on_where_they_lie() {
    let engine = FakeEngine::new();
    let (first, second) = (taking(&engine), taking(&engine));
    let producer = producer(&engine, 10_000);
    let content = bytes(5_000, 9);
    assert!(
        done(&producer.push(item(first.address(), &content)))
            .result
            .is_ok()
    );
    let taken = first.next_taken(soon()).unwrap();
    let onward = Item {
        to: second.address().clone(),
        mm_hash: taken.mm_hash().clone(),
        tensor: taken.tensor().clone(),
        source: taken.into_source(),
        id: PushId::Given(TransferId::new("chosen").unwrap()),
    };
    let report = done(&producer.push(onward));
    assert_eq!(report.result.unwrap(), Delivery::Written);
    let arrived = second.next_taken(soon()).unwrap();
    assert_eq!(arrived.transfer_id().as_str(), "chosen");
    assert_eq!(content_of(&arrived), content);
    assert_eq!(first.snapshot().leases, 0, "the hold was given back");
}

// row: D9
#[test]
fn one_bad_push_harms_no_other() {
    let engine = FakeEngine::new();
    let consumer = taking(&engine);
    let producer = producer(&engine, 10_000);
    let good = producer.push(item(consumer.address(), &bytes(1_000, 1)));
    let too_large = producer.push(item(consumer.address(), &bytes(POOL as usize + 1, 2)));
    let mut wrong = item(consumer.address(), &bytes(1_000, 3));
    wrong.source = Source::Bytes(vec![0; 999]);
    let wrong = producer.push(wrong);
    let mut unreadable = item(consumer.address(), &bytes(1_000, 4));
    unreadable.source = Source::File {
        file: Arc::new(tempfile::tempfile().unwrap()),
        range: 0..1_000,
        sha256: None,
    };
    let unreadable = producer.push(unreadable);
    let also_good = producer.push(item(consumer.address(), &bytes(1_000, 5)));

    assert!(done(&good).result.is_ok());
    assert_eq!(done(&too_large).result.unwrap_err().code(), "too_large");
    assert_eq!(done(&wrong).result.unwrap_err().code(), "size_mismatch");
    assert_eq!(done(&unreadable).result.unwrap_err().code(), "source");
    assert!(done(&also_good).result.is_ok());
    let snapshot = consumer.snapshot();
    assert_eq!(snapshot.bytes.writing + snapshot.bytes.stuck, 0);
}

#[test]
fn a_file_that_changes_after_it_was_hashed_reaches_nobody_under_its_old_name() {
    let engine = FakeEngine::new();
    let consumer = taking(&engine);
    let producer = producer(&engine, 10_000);
    let (old, new) = (bytes(1_000, 1), bytes(1_000, 2));
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(&new, 0).unwrap();
    let file = Arc::new(file);
    let from_file = |content: &[u8]| {
        let mut item = item(consumer.address(), content);
        item.source = Source::File {
            file: Arc::clone(&file),
            range: 0..1_000,
            sha256: Some(crate::content_hash::hex(&Sha256::digest(content))),
        };
        item
    };
    let error = done(&producer.push(from_file(&old))).result.unwrap_err();
    assert_eq!(error.code(), "source_changed", "{error}");
    assert!(consumer.next_taken(Some(Instant::now())).is_none());
    let snapshot = consumer.snapshot();
    assert_eq!((snapshot.bytes.free, snapshot.residents), (POOL, 0));

    // Under its own name it arrives, and the old name is free for the old content.
    for content in [&new, &old] {
        file.write_all_at(content, 0).unwrap();
        let report = done(&producer.push(from_file(content)));
        assert_eq!(report.result.unwrap(), Delivery::Written);
        assert_eq!(content_of(&consumer.next_taken(soon()).unwrap()), *content);
    }
}

#[test]
fn a_write_whose_connection_is_closed_without_an_answer_is_tried_again() {
    let engine = FakeEngine::new();
    let consumer = taking(&engine);
    let producer = producer(&engine, 10_000);
    let content = bytes(1_000, 1);
    engine.next_writes(&[Fate::Closed, Fate::Closed, Fate::Closed]);
    let report = done(&producer.push(item(consumer.address(), &content)));
    assert_eq!(report.result.unwrap(), Delivery::Written);
    assert_eq!(engine.writes.load(Ordering::SeqCst), 4);
    assert_eq!(content_of(&consumer.next_taken(soon()).unwrap()), content);
    let snapshot = consumer.snapshot();
    assert_eq!(snapshot.bytes.writing + snapshot.bytes.stuck, 0);
}

// row: C3.7b, D16
#[test]
fn memory_of_a_failed_write_is_given_back_and_of_an_unknown_one_kept() {
    let engine = FakeEngine::new();
    let consumer = taking(&engine);
    let producer = producer(&engine, 10_000);
    let content = bytes(1_000, 1);
    engine.next_writes(&[Fate::Ended]);
    let report = done(&producer.push(item(consumer.address(), &content)));
    assert_eq!(report.result.unwrap_err().code(), "write_failed");
    assert_eq!(consumer.snapshot().bytes.free, POOL);

    engine.next_writes(&[Fate::Unknown]);
    let report = done(&producer.push(item(consumer.address(), &content)));
    assert_eq!(report.result.unwrap_err().code(), "write_unknown");
    assert_eq!(consumer.snapshot().bytes.stuck, 1_024);

    // The next push of the content starts a writer of its own.
    let report = done(&producer.push(item(consumer.address(), &content)));
    assert_eq!(report.result.unwrap(), Delivery::Written);
}

#[test]
fn a_full_pool_is_waited_for_until_room_comes() {
    let engine = FakeEngine::new();
    let consumer = taking(&engine);
    let producer = producer(&engine, 10_000);
    let big = bytes(POOL as usize, 1);
    assert!(
        done(&producer.push(item(consumer.address(), &big)))
            .result
            .is_ok()
    );
    let held = consumer.next_taken(soon()).unwrap();
    let waiting = producer.push(item(consumer.address(), &bytes(1_000, 2)));
    std::thread::sleep(Duration::from_millis(50));
    assert!(waiting.poll().is_none());
    drop(held);
    assert_eq!(done(&waiting).result.unwrap(), Delivery::Written);
}

#[test]
fn a_pool_that_stays_full_fails_the_push_at_its_timeout() {
    let engine = FakeEngine::new();
    let consumer = taking(&engine);
    let producer = producer(&engine, 300);
    let big = bytes(POOL as usize, 1);
    assert!(
        done(&producer.push(item(consumer.address(), &big)))
            .result
            .is_ok()
    );
    let _held = consumer.next_taken(soon()).unwrap();
    let started = Instant::now();
    let report = done(&producer.push(item(consumer.address(), &bytes(1_000, 2))));
    assert_eq!(report.result.unwrap_err().code(), "pool_full");
    assert!(started.elapsed() < Duration::from_secs(2));
}

#[test]
fn a_consumer_that_is_not_there_fails_one_push_in_time_and_the_waiting_ones_with_it() {
    let engine = FakeEngine::new();
    // A port that was free a moment ago.
    let gone = taking(&engine);
    let address = gone.address().clone();
    drop(gone);
    let mut config = ProducerConfig {
        threads: NonZeroUsize::MIN,
        staging_bytes: 4096,
        ..ProducerConfig::default()
    };
    config.push.timeout_ms = 400;
    let producer = Producer::start(engine.clone(), config).unwrap();
    let started = Instant::now();
    let pushes: Vec<_> = (0..10)
        .map(|index| producer.push(item(&address, &bytes(100, index))))
        .collect();
    for push in &pushes {
        let error = done(push).result.unwrap_err();
        assert!(error.is_unreachable(), "{error}");
    }
    assert!(
        started.elapsed() < Duration::from_secs(3),
        "{:?}",
        started.elapsed()
    );
}

// row: D7
#[test]
fn a_restarted_consumer_is_found_again() {
    let engine = FakeEngine::new();
    let first = taking(&engine);
    let address = first.address().clone();
    let producer = producer(&engine, 10_000);
    assert!(
        done(&producer.push(item(&address, &bytes(100, 1))))
            .result
            .is_ok()
    );
    drop(first);
    let waiting = producer.push(item(&address, &bytes(100, 2)));
    std::thread::sleep(Duration::from_millis(50));
    let mut config = ConsumerConfig::new(LOOPBACK, address.port(), POOL);
    config.reservations.take = TakePolicy::OnReady { taken_max: 8 };
    let second = Consumer::start(engine.clone(), config).unwrap();
    assert_eq!(done(&waiting).result.unwrap(), Delivery::Written);
    assert_eq!(
        content_of(&second.next_taken(soon()).unwrap()),
        bytes(100, 2)
    );
}

// row: D14
#[test]
fn closing_ends_waiting_pushes_and_says_so() {
    let engine = FakeEngine::new();
    let consumer = taking(&engine);
    let producer = producer(&engine, 60_000);
    let big = bytes(POOL as usize, 1);
    assert!(
        done(&producer.push(item(consumer.address(), &big)))
            .result
            .is_ok()
    );
    let _held = consumer.next_taken(soon()).unwrap();
    let waiting = producer.push(item(consumer.address(), &bytes(1_000, 2)));
    std::thread::sleep(Duration::from_millis(30));
    let started = Instant::now();
    producer.close();
    assert!(started.elapsed() < Duration::from_secs(5));
    assert_eq!(done(&waiting).result.unwrap_err().code(), "closed");
    assert_eq!(engine.registered(), 1, "only the consumer's slab is left");
}

#[test]
fn pushes_are_bounded_and_a_refused_item_comes_back() {
    let engine = FakeEngine::new();
    let consumer = taking(&engine);
    let mut config = ProducerConfig {
        pushes_max: NonZeroUsize::MIN,
        staging_bytes: 4096,
        ..ProducerConfig::default()
    };
    config.push.timeout_ms = 300;
    let producer = Producer::start(engine.clone(), config).unwrap();
    assert!(
        done(&producer.push(item(consumer.address(), &bytes(POOL as usize, 1))))
            .result
            .is_ok()
    );
    let _held = consumer.next_taken(soon()).unwrap();
    let waiting = producer.push(item(consumer.address(), &bytes(1_000, 2)));
    let back = producer.try_push(item(consumer.address(), &bytes(1_000, 3)));
    assert_eq!(back.unwrap_err().tensor.len_bytes(), 1_000);
    // Blocks until the first has ended by its timeout.
    let next = producer.push(item(consumer.address(), &bytes(1_000, 3)));
    assert!(waiting.poll().is_some());
    assert!(done(&next).result.is_err());
}

#[test]
fn a_push_can_be_awaited() {
    struct Unpark(std::thread::Thread, AtomicUsize);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.1.fetch_add(1, Ordering::SeqCst);
            self.0.unpark();
        }
    }
    let engine = FakeEngine::new();
    let consumer = taking(&engine);
    let producer = producer(&engine, 10_000);
    let mut push = producer.push(item(consumer.address(), &bytes(1_000, 1)));
    let unpark = Arc::new(Unpark(std::thread::current(), AtomicUsize::new(0)));
    let waker = Waker::from(Arc::clone(&unpark));
    let report = loop {
        match Pin::new(&mut push).poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(report) => break report,
            Poll::Pending => std::thread::park_timeout(Duration::from_secs(10)),
        }
    };
    assert_eq!(report.result.unwrap(), Delivery::Written);
    assert!(unpark.1.load(Ordering::SeqCst) <= 1);
}

#[test]
fn an_item_taken_by_the_owner_is_leased_until_it_is_dropped() {
    let engine = FakeEngine::new();
    let consumer = consumer(&engine, TakePolicy::Caller);
    let producer = producer(&engine, 10_000);
    let content = bytes(1_000, 1);
    let report = done(&producer.push(item(consumer.address(), &content)));
    let ready = consumer.next_ready(soon()).unwrap();
    assert_eq!(ready.transfer_id, report.transfer_id);
    assert!(!ready.cached);
    let taken = consumer.take(&ready.transfer_id, &ready.mm_hash).unwrap();
    assert_eq!(content_of(&taken), content);
    assert!(consumer.take(&ready.transfer_id, &ready.mm_hash).is_err());
    assert!(taken.copy_out(1, &mut [0; 1_000]).is_err());
    assert_eq!(consumer.snapshot().bytes.leased, 1_024);
    drop(taken);
    let snapshot = consumer.snapshot();
    assert_eq!((snapshot.bytes.leased, snapshot.bytes.resident), (0, 1_024));
}

#[test]
fn shutting_down_waits_for_writers_and_names_those_that_do_not_finish() {
    let engine = FakeEngine::new();
    let idle = taking(&engine);
    assert_eq!(idle.shutdown(Instant::now()), Ok(()));
    assert_eq!(engine.registered(), 0);

    let busy = taking(&engine);
    let producer = producer(&engine, 10_000);
    engine.next_writes(&[Fate::Unknown]);
    let report = done(&producer.push(item(busy.address(), &bytes(1_000, 1))));
    assert!(report.result.is_err());
    let timed_out = busy.shutdown(Instant::now()).unwrap_err();
    assert_eq!(
        timed_out,
        crate::DrainTimedOut {
            writers: 1,
            bytes: 1_024
        }
    );
    drop(producer);
    assert_eq!(engine.registered(), 1, "a late write still finds the pool");
}

// row: M8
#[test]
fn an_item_outlives_its_consumer() {
    let engine = FakeEngine::new();
    let consumer = taking(&engine);
    let producer = producer(&engine, 10_000);
    let content = bytes(1_000, 1);
    assert!(
        done(&producer.push(item(consumer.address(), &content)))
            .result
            .is_ok()
    );
    let taken = consumer.next_taken(soon()).unwrap();
    assert_eq!(consumer.shutdown(Instant::now()), Ok(()));
    assert_eq!(content_of(&taken), content);
}

#[test]
fn a_push_lost_to_a_panic_is_reported_and_costs_no_other() {
    let engine = FakeEngine::new();
    let consumer = taking(&engine);
    let mut config = ProducerConfig {
        threads: NonZeroUsize::MIN,
        pushes_max: NonZeroUsize::MIN,
        staging_bytes: 4096,
        ..ProducerConfig::default()
    };
    config.push.timeout_ms = 10_000;
    let producer = Producer::start(engine.clone(), config).unwrap();
    engine.next_writes(&[Fate::Panic]);
    let content = bytes(1_000, 1);
    let report = done(&producer.push(item(consumer.address(), &content)));
    assert_eq!(report.result.unwrap_err().code(), "lost");
    // Room, thread and staging are there for the next one.
    for seed in 2..6 {
        let push = producer.push(item(consumer.address(), &bytes(4_096, seed)));
        assert_eq!(done(&push).result.unwrap(), Delivery::Written);
    }
}

/// Answers every request with `reply`, as long as anybody asks.
fn answering(reply: &'static str) -> ControlAddress {
    let context = zmq::Context::new();
    let server = context.socket(zmq::REP).unwrap();
    server.bind("tcp://127.0.0.1:*").unwrap();
    let endpoint = server.get_last_endpoint().unwrap().unwrap();
    // Ends with the test process.
    std::thread::spawn(
        move || {
            while server.recv_bytes(0).is_ok() && server.send(reply, 0).is_ok() {}
        },
    );
    ControlAddress::parse(&endpoint).unwrap()
}

#[test]
fn a_consumer_of_several_shards_is_refused_before_anything_is_written() {
    let engine = FakeEngine::new();
    let producer = producer(&engine, 10_000);
    let address = answering(r#"{"ok": true, "result": {"ports": [1, 2]}}"#);
    let report = done(&producer.push(item(&address, &bytes(10, 1))));
    let error = report.result.unwrap_err();
    assert!(matches!(error, PushError::Shards { count: 2 }), "{error}");
    assert_eq!(engine.writes.load(Ordering::SeqCst), 0);
}

#[test]
fn a_consumer_that_refuses_without_a_code_is_asked_a_few_times() {
    let engine = FakeEngine::new();
    let producer = producer(&engine, 10_000);
    let address = answering(r#"{"ok": false, "error": "no such thing"}"#);
    let report = done(&producer.push(item(&address, &bytes(10, 1))));
    let error = report.result.unwrap_err();
    assert_eq!(error.code(), "refused");
    assert!(error.to_string().contains("no such thing"), "{error}");
}

#[test]
fn an_answer_that_is_no_control_reply_ends_a_push_at_once_and_is_named() {
    let engine = FakeEngine::new();
    let producer = producer(&engine, 60_000);
    for reply in [
        "SSH-2.0-OpenSSH_9.2",
        // As if every operation answered `peers`: the reserve is granted another length.
        r#"{"ok": true, "result": {"ports": "none", "nbytes": 3}}"#,
    ] {
        let address = answering(reply);
        let started = Instant::now();
        let report = done(&producer.push(item(&address, &bytes(10, 1))));
        assert!(started.elapsed() < Duration::from_secs(5));
        let error = report.result.unwrap_err();
        assert_eq!(error.code(), "bad_reply");
        let PushError::Failed(PushFailure::BadReply { cause }) = &error else {
            panic!("{error:?}")
        };
        assert!(matches!(**cause, ClientError::BadReply { .. }));
        assert!(
            std::error::Error::source(&error).is_some(),
            "a chain of causes names it"
        );
    }
}

#[test]
fn the_engines_reason_reaches_whoever_waits_for_the_push() {
    let engine = FakeEngine::new();
    let consumer = taking(&engine);
    let producer = producer(&engine, 10_000);
    engine.next_writes(&[Fate::Unknown]);
    let report = done(&producer.push(item(consumer.address(), &bytes(1_000, 1))));
    let Err(PushError::Failed(PushFailure::WriteUnknown { cause })) = report.result else {
        panic!("{report:?}")
    };
    assert_eq!(*cause, WriteError::Task(Reason::Stalled { timeout_ms: 1 }));
}

#[test]
fn a_panic_of_whoever_is_told_of_a_push_harms_neither_its_report_nor_others() {
    struct Panics;
    impl Wake for Panics {
        fn wake(self: Arc<Self>) {
            panic!("told to");
        }
    }
    struct PanicsWhenDropped;
    impl Drop for PanicsWhenDropped {
        fn drop(&mut self) {
            panic!("told to");
        }
    }
    let engine = FakeEngine::new();
    let consumer = consumer(&engine, TakePolicy::Caller);
    let mut config = ProducerConfig {
        threads: NonZeroUsize::MIN,
        pushes_max: NonZeroUsize::MIN,
        staging_bytes: 4096,
        ..ProducerConfig::default()
    };
    config.push.timeout_ms = 10_000;
    let producer = Producer::start(engine.clone(), config).unwrap();
    let waker = Waker::from(Arc::new(Panics));
    for seed in 0..3 {
        let mut push = producer.push(item(consumer.address(), &bytes(100, seed)));
        let polled = Pin::new(&mut push).poll(&mut Context::from_waker(&waker));
        drop(polled);
        assert_eq!(done(&push).result.unwrap(), Delivery::Written);

        let mut held = item(consumer.address(), &bytes(100, 100 + seed));
        let memory = slab_memory::HostSlab::new(100).unwrap();
        memory.copy_in(0, &bytes(100, 100 + seed)).unwrap();
        held.source = Source::Memory {
            memory: Arc::new(memory),
            range: 0..100,
            hold: Arc::new(PanicsWhenDropped),
        };
        let report = done(&producer.push(held));
        assert_eq!(report.result.unwrap(), Delivery::Written);
    }
    assert_eq!(engine.registered(), 2, "the two slabs");
}

#[test]
fn threads_beyond_what_the_message_library_serves_are_refused() {
    let config = ProducerConfig {
        threads: NonZeroUsize::MIN.saturating_add(THREADS_MAX),
        ..ProducerConfig::default()
    };
    assert!(matches!(
        Producer::start(FakeEngine::new(), config),
        Err(ProducerError::TooManyThreads {
            threads: 129,
            max: 128
        })
    ));
}

/// Answers every request with what `reply` makes of it, as long as anybody asks.
fn scripted(mut reply: impl FnMut(&Value) -> Value + Send + 'static) -> ControlAddress {
    let context = zmq::Context::new();
    let server = context.socket(zmq::REP).unwrap();
    server.bind("tcp://127.0.0.1:*").unwrap();
    let endpoint = server.get_last_endpoint().unwrap().unwrap();
    let address = ControlAddress::parse(&endpoint).unwrap();
    let port = address.port();
    // Ends with the test process.
    std::thread::spawn(move || {
        while let Ok(request) = server.recv_bytes(0) {
            let request: Value = serde_json::from_slice(&request).unwrap();
            let reply = match request["op"].as_str() {
                Some("peers") => json!({"ok": true, "result": {"ports": [port]}}),
                _ => reply(&request),
            };
            server.send(reply.to_string().as_bytes(), 0).unwrap();
        }
    });
    address
}

/// A consumer that grants every reserve, into `memory`, and refuses the first `refused` completes.
fn busy_consumer(memory: &Arc<dyn Memory>, mut refused: usize) -> ControlAddress {
    let pointer = memory.address();
    scripted(move |request| match request["op"].as_str() {
        Some("reserve") => json!({"ok": true, "result": {
            "reservation_id": "r", "dst_session": "fake:1", "dst_ptr": pointer,
            "nbytes": request["nbytes"], "write": true,
        }}),
        Some("complete") if refused > 0 => {
            refused -= 1;
            json!({"ok": false, "error": "busy"})
        }
        Some("complete") => {
            json!({"ok": true, "result": {"completed": true, "became_ready": true}})
        }
        _ => json!({"ok": true, "result": {"cancelled": true}}),
    })
}

/// A producer whose staging slab has room for one item of 4,096 bytes at a time.
fn narrow_producer(engine: &Arc<FakeEngine>, threads: usize, timeout_ms: u64) -> Producer {
    let mut config = ProducerConfig {
        threads: NonZeroUsize::new(threads).unwrap(),
        staging_bytes: 4096,
        ..ProducerConfig::default()
    };
    config.push.timeout_ms = timeout_ms;
    config.push.uncoded_errors_max = 1_000;
    Producer::start(engine.clone(), config).unwrap()
}

fn target(engine: &Arc<FakeEngine>) -> (Arc<dyn Memory>, mooncake_transport::Registration) {
    let memory: Arc<dyn Memory> = Arc::new(slab_memory::HostSlab::new(4096).unwrap());
    let registration = engine
        .register(Arc::clone(&memory), mooncake_transport::Access::RemoteWrite)
        .unwrap();
    (memory, registration)
}

#[test]
fn pushes_that_wait_for_staging_room_keep_no_thread_from_the_one_that_has_it() {
    let engine = FakeEngine::new();
    let (memory, _registration) = target(&engine);
    for threads in [1, 4] {
        // The first to write backs off three times before it is complete, with its region.
        let address = busy_consumer(&memory, 3);
        let producer = narrow_producer(&engine, threads, 60_000);
        let started = Instant::now();
        let pushes: Vec<_> = (0..6)
            .map(|seed| producer.push(item(&address, &bytes(4_096, seed))))
            .collect();
        for push in &pushes {
            assert_eq!(done(push).result.unwrap(), Delivery::Written);
        }
        assert!(
            started.elapsed() < Duration::from_secs(5),
            "{:?}",
            started.elapsed()
        );
    }
}

#[test]
fn a_push_waits_for_staging_room_no_longer_than_its_own_timeout() {
    let engine = FakeEngine::new();
    let (memory, _registration) = target(&engine);
    let address = busy_consumer(&memory, usize::MAX);
    let producer = narrow_producer(&engine, 2, 400);
    let _first = producer.push(item(&address, &bytes(4_096, 1)));
    std::thread::sleep(Duration::from_millis(50));
    let started = Instant::now();
    let report = done(&producer.push(item(&address, &bytes(4_096, 2))));
    assert!(started.elapsed() < Duration::from_secs(5));
    assert_eq!(report.result.unwrap_err().code(), "staging_full");
    let started = Instant::now();
    producer.close();
    assert!(started.elapsed() < Duration::from_secs(5));
}

#[test]
fn closing_ends_pushes_that_wait_for_staging_room() {
    let engine = FakeEngine::new();
    let (memory, _registration) = target(&engine);
    let address = busy_consumer(&memory, usize::MAX);
    let producer = narrow_producer(&engine, 2, 60_000);
    let pushes: Vec<_> = (0..4)
        .map(|seed| producer.push(item(&address, &bytes(4_096, seed))))
        .collect();
    std::thread::sleep(Duration::from_millis(300));
    let started = Instant::now();
    producer.close();
    assert!(
        started.elapsed() < Duration::from_secs(5),
        "{:?}",
        started.elapsed()
    );
    for push in &pushes {
        let report = push.poll().expect("all have ended");
        assert_eq!(report.result.unwrap_err().code(), "closed");
    }
}

#[test]
fn a_consumer_that_has_got_all_it_wants_ends_a_push_at_once() {
    let engine = FakeEngine::new();
    let mut config = ConsumerConfig::new(LOOPBACK, 0, POOL);
    config.reservations.take = TakePolicy::OnReady { taken_max: 8 };
    config.reservations.items_max = Some(1);
    let consumer = Consumer::start(engine.clone(), config).unwrap();
    let producer = producer(&engine, 60_000);
    let first = done(&producer.push(item(consumer.address(), &bytes(100, 1))));
    assert_eq!(first.result.unwrap(), Delivery::Written);
    let started = Instant::now();
    let second = done(&producer.push(item(consumer.address(), &bytes(100, 2))));
    assert_eq!(second.result.unwrap_err().code(), "no_more_items");
    assert!(started.elapsed() < Duration::from_secs(5));
}
