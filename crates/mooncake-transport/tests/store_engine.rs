//! Engines of ours that find each other in a store.
#![cfg(feature = "tcp")]

use std::collections::HashMap;
use std::net::{Ipv4Addr, TcpListener};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use mooncake_transport::metadata::{MetadataStore, StoreConfig, StoreEngine, StoreError};
use mooncake_transport::tcp::TcpConfig;
use mooncake_transport::wire::descriptor::Descriptor;
use mooncake_transport::{Access, Engine, EngineError, Op, Segment, Task};
use slab_memory::HostSlab;

/// A store in memory.
#[derive(Default)]
struct Shelf(Mutex<HashMap<String, Vec<u8>>>);

impl MetadataStore for Shelf {
    fn get(&self, key: &str, len_max: u64) -> Result<Option<Vec<u8>>, StoreError> {
        let value = self.0.lock().unwrap().get(key).cloned();
        match value {
            Some(value) if value.len() as u64 > len_max => Err(StoreError::TooLong {
                key: key.into(),
                max: len_max,
            }),
            value => Ok(value),
        }
    }

    fn put(&self, key: &str, value: &[u8]) -> Result<(), StoreError> {
        self.0.lock().unwrap().insert(key.into(), value.into());
        Ok(())
    }

    fn delete(&self, key: &str) -> Result<bool, StoreError> {
        Ok(self.0.lock().unwrap().remove(key).is_some())
    }

    fn swap(
        &self,
        key: &str,
        expected: Option<&[u8]>,
        new: Option<&[u8]>,
    ) -> Result<bool, StoreError> {
        let mut entries = self.0.lock().unwrap();
        if entries.get(key).map(Vec::as_slice) != expected {
            return Ok(false);
        }
        match new {
            Some(new) => drop(entries.insert(key.into(), new.into())),
            None => drop(entries.remove(key)),
        }
        Ok(true)
    }
}

fn start(shelf: &Arc<Shelf>, name: &str) -> Result<StoreEngine, EngineError> {
    let mut named = StoreConfig::default();
    named.name = Some(name.to_owned());
    named.cluster = "test".to_owned();
    StoreEngine::start(TcpConfig::default(), shelf.clone(), named)
}

fn write(engine: &StoreEngine, peer: &str, remote: u64, text: &[u8]) -> bool {
    let segment = engine.open_segment(peer).unwrap();
    write_to(engine, segment, remote, text)
}

fn write_to(engine: &StoreEngine, segment: Segment, remote: u64, text: &[u8]) -> bool {
    let memory = Arc::new(HostSlab::new(64).unwrap());
    memory.copy_in(0, text).unwrap();
    let task = Task {
        op: Op::Write,
        segment,
        remote,
        memory,
        range: 0..text.len() as u64,
        hold: Box::new(()),
    };
    let batch = engine.submit(vec![task]).map_err(|r| r.cause).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    batch.wait(Some(deadline)).unwrap().is_applied()
}

/// Longer than anything takes on a busy machine.
const LONG: Duration = Duration::from_secs(60);

/// Asks `check` until it says yes.
#[track_caller]
fn until(mut check: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !check() {
        assert!(Instant::now() < deadline, "in vain");
        std::thread::sleep(Duration::from_millis(1));
    }
}

// row: W10.4c
#[test]
fn engines_transfer_notify_and_probe_by_name_and_leave_nothing() {
    let shelf = Arc::new(Shelf::default());
    let target = start(&shelf, "target").unwrap();
    let source = start(&shelf, "source").unwrap();
    assert_eq!(target.session(), "target");
    let slab = Arc::new(HostSlab::new(64).unwrap());
    let registration = target.register(slab.clone(), Access::RemoteWrite).unwrap();
    assert!(write(&source, "target", slab.address(), b"bytes"));
    let mut found = [0; 5];
    slab.copy_out(0, &mut found).unwrap();
    assert_eq!(&found, b"bytes");
    source.probe("target").unwrap();
    let segment = source.open_segment("target").unwrap();
    source.notify(&segment, "source", "done").unwrap();
    assert_eq!(target.take_notices().unwrap().notices[0].message, "done");
    registration.unregister().unwrap();
    assert!(!write(&source, "target", slab.address(), b"bytes"));
    target.close().unwrap();
    drop(source);
    assert!(shelf.0.lock().unwrap().is_empty());
}

// row: W10.4b
#[test]
fn names_that_nobody_has_and_names_that_somebody_has_are_typed_errors() {
    let shelf = Arc::new(Shelf::default());
    let engine = start(&shelf, "a").unwrap();
    assert!(matches!(
        engine.open_segment("b"),
        Err(EngineError::Store(StoreError::NotPublished { key })) if key == "mooncake/test/ram/b"
    ));
    assert!(matches!(
        start(&shelf, "a"),
        Err(EngineError::Store(StoreError::NameTaken {
            answers: true,
            ..
        }))
    ));
    assert!(matches!(
        start(&shelf, "a/b"),
        Err(EngineError::Store(StoreError::Name { .. }))
    ));
    let mut config = TcpConfig::default();
    config.listen = false;
    assert_eq!(
        StoreEngine::start(config, shelf, StoreConfig::default()).err(),
        Some(EngineError::NotListening)
    );
}

#[test]
fn an_engine_that_comes_back_on_the_port_of_its_own_stale_entry_takes_its_name() {
    let (shelf, second) = on_a_port_that_stays_free(|| {
        let shelf = Arc::new(Shelf::default());
        let key = "mooncake/test/rpc_meta/a";
        let first = start(&shelf, "a").unwrap();
        let port = first.control_address().port();
        let left = shelf.get(key, 1_000).unwrap().unwrap();
        drop(first);
        // As a crash would have left it.
        shelf.put(key, &left).unwrap();
        let mut config = TcpConfig::default();
        config.control_port = Some(port);
        let mut named = StoreConfig::default();
        named.name = Some("a".to_owned());
        named.cluster = "test".to_owned();
        Ok((shelf.clone(), StoreEngine::start(config, shelf, named)?))
    })
    .unwrap();
    second.close().unwrap();
    assert!(shelf.0.lock().unwrap().is_empty());
}

/// Has `start` bind to a port that was free, until no other process has taken it meanwhile.
fn on_a_port_that_stays_free<T>(
    start: impl Fn() -> Result<T, EngineError>,
) -> Result<T, EngineError> {
    for _ in 0..20 {
        match start() {
            Err(EngineError::Bind { .. }) => {}
            started => return started,
        }
    }
    panic!("no port stays free for a moment");
}

/// What is in a store of an engine at `host`.
fn entry(host: &str, port: u16) -> String {
    format!(r#"{{"ip_or_host_name":"{host}","rpc_port":{port}}}"#)
}

/// Starts an engine on every address, at a fixed control port, with the entry that `left` makes of the port in the
/// store.
fn start_on_every_address(
    name: &str,
    left: impl Fn(u16) -> String,
) -> Result<StoreEngine, EngineError> {
    on_a_port_that_stays_free(|| {
        let free = TcpListener::bind("0.0.0.0:0").and_then(|listener| listener.local_addr());
        let port = free.unwrap().port();
        let shelf = Arc::new(Shelf::default());
        let key = format!("mooncake/rpc_meta/{name}");
        shelf.put(&key, left(port).as_bytes()).unwrap();
        let mut named = StoreConfig::default();
        named.name = Some(name.to_owned());
        let mut config = TcpConfig::default();
        config.bind = Ipv4Addr::UNSPECIFIED.into();
        config.advertise = Some("127.0.0.1".to_owned());
        config.control_port = Some(port);
        StoreEngine::start(config, shelf, named)
    })
}

#[test]
fn an_engine_on_every_address_knows_the_entry_that_it_left_under_another_of_them() {
    for host in ["127.0.0.1", "127.0.0.2", "localhost"] {
        start_on_every_address("a", |port| entry(host, port)).unwrap();
    }
    // Another port of this machine is another engine's.
    let other = start(&Arc::new(Shelf::default()), "other").unwrap();
    let at = other.control_address().port();
    assert!(matches!(
        start_on_every_address("a", |_| entry("127.0.0.1", at)),
        Err(EngineError::Store(StoreError::NameTaken {
            answers: true,
            ..
        }))
    ));
}

#[test]
fn a_peer_whose_data_host_is_a_wildcard_is_where_the_other_key_says() {
    let shelf = Arc::new(Shelf::default());
    let source = start(&shelf, "source").unwrap();
    let target = start(&shelf, "target").unwrap();
    let slab = Arc::new(HostSlab::new(64).unwrap());
    let _registration = target.register(slab.clone(), Access::RemoteWrite).unwrap();
    let key = "mooncake/test/ram/target";
    let mut descriptor = Descriptor::decode(&shelf.get(key, 1 << 20).unwrap().unwrap()).unwrap();
    for host in [None, Some("0.0.0.0"), Some("::"), Some("[::]")] {
        descriptor.data_host = host.map(str::to_owned);
        shelf.put(key, descriptor.encode().as_bytes()).unwrap();
        assert!(
            write(&source, "target", slab.address(), b"bytes"),
            "{host:?}"
        );
    }
}

#[test]
fn names_may_have_spaces_and_are_looked_up_without_leading_slashes() {
    let shelf = Arc::new(Shelf::default());
    let source = start(&shelf, "source").unwrap();
    let target = start(&shelf, " the target ").unwrap();
    let slab = Arc::new(HostSlab::new(64).unwrap());
    let _registration = target.register(slab.clone(), Access::RemoteWrite).unwrap();
    for name in [" the target ", "/ the target ", "/// the target "] {
        assert!(write(&source, name, slab.address(), b"bytes"), "{name}");
        source.probe(name).unwrap();
        let segment = source.open_segment(name).unwrap();
        assert_eq!(segment.name(), " the target ");
        source.notify(&segment, "source", name).unwrap();
    }
    assert_eq!(target.take_notices().unwrap().notices.len(), 3);
    for name in ["", "/", "///", "the/target", "the\ttarget"] {
        let error = source.open_segment(name).unwrap_err();
        let is_of_name = matches!(error, EngineError::Store(StoreError::Name { .. }));
        assert!(is_of_name, "{name:?}: {error:?}");
    }
    // White space is a part of a name, as with real engines.
    assert!(matches!(
        source.open_segment("the target"),
        Err(EngineError::Store(StoreError::NotPublished { .. }))
    ));
}

/// Where a call to a store waits.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Stop {
    BeforeItLooks,
    BeforeItAnswers,
}

/// Has a call wait: it says so, and goes on when it is told.
struct Order {
    stop: Stop,
    waits: Sender<()>,
    go_on: Receiver<()>,
}

/// A store of which one call waits, once it has an order.
struct Slow {
    shelf: Arc<Shelf>,
    next: Mutex<Option<Order>>,
}

impl MetadataStore for Slow {
    fn get(&self, key: &str, len_max: u64) -> Result<Option<Vec<u8>>, StoreError> {
        let next = self.next.lock().unwrap().take();
        let wait = |at| {
            if let Some(order) = next.as_ref().filter(|order| order.stop == at) {
                order.waits.send(()).unwrap();
                order.go_on.recv_timeout(LONG).unwrap();
            }
        };
        wait(Stop::BeforeItLooks);
        let found = self.shelf.get(key, len_max);
        wait(Stop::BeforeItAnswers);
        found
    }

    fn put(&self, key: &str, value: &[u8]) -> Result<(), StoreError> {
        self.shelf.put(key, value)
    }

    fn delete(&self, key: &str) -> Result<bool, StoreError> {
        self.shelf.delete(key)
    }

    fn swap(
        &self,
        key: &str,
        expected: Option<&[u8]>,
        new: Option<&[u8]>,
    ) -> Result<bool, StoreError> {
        self.shelf.swap(key, expected, new)
    }
}

#[test]
fn two_threads_that_open_a_peer_at_once_lead_it_to_the_newer_of_two_places() {
    let cases = [Stop::BeforeItLooks, Stop::BeforeItAnswers]
        .map(|stop| [true, false].map(|is_open| (stop, is_open)));
    for (stop, is_open) in cases.into_iter().flatten() {
        let shelf = Arc::new(Shelf::default());
        let slow = Arc::new(Slow {
            shelf: shelf.clone(),
            next: Mutex::new(None),
        });
        let mut named = StoreConfig::default();
        named.name = Some("source".to_owned());
        named.cluster = "test".to_owned();
        named.look_every = None;
        let source = StoreEngine::start(TcpConfig::default(), slow.clone(), named).unwrap();
        let target = start(&shelf, "target").unwrap();
        let slab = Arc::new(HostSlab::new(64).unwrap());
        let open = || source.open_segment("target").unwrap();
        let known = is_open.then(open);
        std::thread::scope(|scope| {
            let (sender, waits) = channel();
            // In here, so that the slower ends as well where this thread panics.
            let (go_on, receiver) = channel();
            *slow.next.lock().unwrap() = Some(Order {
                stop,
                waits: sender,
                go_on: receiver,
            });
            let slower = scope.spawn(open);
            waits.recv_timeout(LONG).unwrap();
            // Either the slower hears where the peer was, and the faster where it is, or the other way round.
            let before = (stop == Stop::BeforeItLooks).then(open);
            drop(target);
            let target = start(&shelf, "target").unwrap();
            let _registration = target.register(slab.clone(), Access::RemoteWrite).unwrap();
            let faster = before.unwrap_or_else(open);
            go_on.send(()).unwrap();
            for segment in [slower.join().unwrap(), faster] {
                let is_there = write_to(&source, segment, slab.address(), b"bytes");
                assert!(is_there, "{stop:?}, open before: {is_open}");
            }
        });
        drop(known);
    }
}

#[test]
fn an_open_segment_is_led_to_where_the_peer_was_restarted() {
    let shelf = Arc::new(Shelf::default());
    let source = start(&shelf, "source").unwrap();
    let slab = Arc::new(HostSlab::new(64).unwrap());
    let target = start(&shelf, "target").unwrap();
    let registration = target.register(slab.clone(), Access::RemoteWrite).unwrap();
    assert!(write(&source, "target", slab.address(), b"one"));
    let _open = source.open_segment("target").unwrap();
    drop(target);
    drop(registration);
    let target = start(&shelf, "target").unwrap();
    let _registration = target.register(slab.clone(), Access::RemoteWrite).unwrap();
    assert!(write(&source, "target", slab.address(), b"two"));
    let mut found = [0; 3];
    slab.copy_out(0, &mut found).unwrap();
    assert_eq!(&found, b"two");
}

// row: W10.8c
#[test]
fn what_the_store_loses_is_put_back_without_a_call() {
    let shelf = Arc::new(Shelf::default());
    let mut named = StoreConfig::default();
    named.name = Some("target".to_owned());
    named.cluster = "test".to_owned();
    named.look_every = Some(Duration::from_millis(20));
    let target = StoreEngine::start(TcpConfig::default(), shelf.clone(), named).unwrap();
    let slab = Arc::new(HostSlab::new(64).unwrap());
    let _registration = target.register(slab.clone(), Access::RemoteWrite).unwrap();
    let before = shelf.0.lock().unwrap().clone();
    shelf.0.lock().unwrap().clear();
    until(|| shelf.0.lock().unwrap().len() == before.len());
    let source = start(&shelf, "source").unwrap();
    assert!(write(&source, "target", slab.address(), b"bytes"));
}

#[test]
fn memory_unregistered_on_the_engines_thread_is_taken_off_the_entry_all_the_same() {
    let shelf = Arc::new(Shelf::default());
    let target = start(&shelf, "target").unwrap();
    let source = start(&shelf, "source").unwrap();
    let slab = Arc::new(HostSlab::new(64).unwrap());
    let _target = target.register(slab.clone(), Access::RemoteWrite).unwrap();
    let listed = Arc::new(HostSlab::new(64).unwrap());
    let registration = source.register(listed.clone(), Access::RemoteRead).unwrap();
    let lists = |address: u64| {
        let value = shelf
            .get("mooncake/test/ram/source", 1 << 20)
            .unwrap()
            .unwrap();
        Descriptor::decode(&value)
            .unwrap()
            .buffers
            .iter()
            .any(|b| b.address == address)
    };
    assert!(lists(listed.address()));
    // Its drop is on the engine's own thread.
    let task = Task {
        op: Op::Write,
        segment: source.open_segment("target").unwrap(),
        remote: slab.address(),
        memory: Arc::new(HostSlab::new(64).unwrap()),
        range: 0..8,
        hold: Box::new(registration),
    };
    let batch = source.submit(vec![task]).map_err(|r| r.cause).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    assert!(batch.wait(Some(deadline)).unwrap().is_applied());
    until(|| !lists(listed.address()));
}

#[test]
fn an_engine_dropped_on_its_own_thread_withdraws_its_entry() {
    let shelf = Arc::new(Shelf::default());
    let target = start(&shelf, "target").unwrap();
    let slab = Arc::new(HostSlab::new(64).unwrap());
    let _target = target.register(slab.clone(), Access::RemoteWrite).unwrap();
    let source = Arc::new(start(&shelf, "source").unwrap());
    let task = Task {
        op: Op::Write,
        segment: source.open_segment("target").unwrap(),
        remote: slab.address(),
        memory: Arc::new(HostSlab::new(64).unwrap()),
        range: 0..8,
        hold: Box::new(source.clone()),
    };
    let batch = source.submit(vec![task]).map_err(|r| r.cause).unwrap();
    drop(source);
    let deadline = Instant::now() + Duration::from_secs(60);
    assert!(batch.wait(Some(deadline)).unwrap().is_applied());
    until(|| {
        shelf
            .get("mooncake/test/rpc_meta/source", 1 << 20)
            .unwrap()
            .is_none()
    });
    assert_eq!(shelf.get("mooncake/test/ram/source", 1 << 20), Ok(None));
}

// row: W10.5, W10.8d
#[test]
fn values_that_no_engine_writes_are_typed_errors() {
    let shelf = Arc::new(Shelf::default());
    let engine = start(&shelf, "ours").unwrap();
    let good =
        r#"{"protocol":"tcp","tcp_data_port":1,"tcp_proto_version":2,"name":"p","buffers":[]"#;
    let set = |kind: &str, value: &str| {
        shelf
            .put(&format!("mooncake/test/{kind}/p"), value.as_bytes())
            .unwrap();
    };
    for text in [
        "",
        "no JSON",
        "[]",
        "\"text\"",
        "7",
        r#"{"protocol":"tcp","tcp_data_port":"1"}"#,
    ] {
        set("ram", text);
        let error = engine.open_segment("p").unwrap_err();
        assert!(
            matches!(error, EngineError::Descriptor { .. }),
            "{text}: {error:?}"
        );
    }
    set("ram", &"x".repeat(17 << 20));
    assert!(matches!(
        engine.open_segment("p"),
        Err(EngineError::Store(StoreError::TooLong { .. }))
    ));
    // Without a data host that can be dialled the other key says where the peer is.
    let without_host = [
        format!("{good}}}"),
        format!(r#"{good},"tcp_data_host":"0.0.0.0"}}"#),
        format!(r#"{good},"tcp_data_host":"[::]"}}"#),
    ];
    for text in &without_host {
        set("ram", text);
        assert!(matches!(
            engine.open_segment("p"),
            Err(EngineError::Store(StoreError::NotPublished { key })) if key.contains("rpc_meta")
        ));
    }
    for text in [
        "no JSON",
        "[]",
        "{}",
        r#"{"ip_or_host_name":"0.0.0.0","rpc_port":1}"#,
        r#"{"ip_or_host_name":"::","rpc_port":1}"#,
        r#"{"ip_or_host_name":7,"rpc_port":"x"}"#,
        r#"{"ip_or_host_name":"a","rpc_port":0}"#,
    ] {
        set("rpc_meta", text);
        let mut errors = vec![engine.probe("p").unwrap_err()];
        for text in &without_host {
            set("ram", text);
            errors.push(engine.open_segment("p").unwrap_err());
        }
        for error in errors {
            let is_value = matches!(error, EngineError::Store(StoreError::Value { .. }));
            assert!(is_value, "{text}: {error:?}");
        }
        // Nor is the name taken over: who wrote that is not known.
        assert!(matches!(
            start(&shelf, "p"),
            Err(EngineError::Store(StoreError::Value { .. }))
        ));
    }
}

/// Asks an engine for everything that waits for its store, where it is dropped.
struct Asks(Arc<StoreEngine>, std::sync::mpsc::Sender<Vec<EngineError>>);

impl Drop for Asks {
    fn drop(&mut self) {
        let segment = self.0.open_segment("target").err();
        let slab = Arc::new(HostSlab::new(64).unwrap());
        let errors = [
            segment,
            self.0.probe("target").err(),
            self.0.republish().map_err(EngineError::from).err(),
            self.0.register(slab, Access::RemoteRead).err(),
        ];
        self.1.send(errors.into_iter().flatten().collect()).unwrap();
    }
}

#[test]
fn the_engines_own_thread_never_waits_for_the_store() {
    let shelf = Arc::new(Shelf::default());
    let target = start(&shelf, "target").unwrap();
    let slab = Arc::new(HostSlab::new(64).unwrap());
    let _target = target.register(slab.clone(), Access::RemoteWrite).unwrap();
    let source = Arc::new(start(&shelf, "source").unwrap());
    let (sender, answers) = std::sync::mpsc::channel();
    let task = Task {
        op: Op::Write,
        segment: source.open_segment("target").unwrap(),
        remote: slab.address(),
        memory: Arc::new(HostSlab::new(64).unwrap()),
        range: 0..8,
        hold: Box::new(Asks(source.clone(), sender)),
    };
    let batch = source.submit(vec![task]).map_err(|r| r.cause).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    assert!(batch.wait(Some(deadline)).unwrap().is_applied());
    let errors = answers.recv_timeout(LONG).unwrap();
    assert_eq!(
        errors,
        vec![EngineError::Store(StoreError::OnEngineThread); 4]
    );
}
