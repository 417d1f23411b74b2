//! Engines of ours that find each other in a store.
#![cfg(feature = "tcp")]

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use mooncake_transport::metadata::{MetadataStore, StoreConfig, StoreEngine, StoreError};
use mooncake_transport::tcp::TcpConfig;
use mooncake_transport::{Access, Engine, EngineError, Op, Task};
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
}

fn start(shelf: &Arc<Shelf>, name: &str) -> Result<StoreEngine, EngineError> {
    let mut named = StoreConfig::default();
    named.name = Some(name.to_owned());
    named.cluster = "test".to_owned();
    StoreEngine::start(TcpConfig::default(), shelf.clone(), named)
}

fn write(engine: &StoreEngine, peer: &str, remote: u64, text: &[u8]) -> bool {
    let memory = Arc::new(HostSlab::new(64).unwrap());
    memory.copy_in(0, text).unwrap();
    let task = Task {
        op: Op::Write,
        segment: engine.open_segment(peer).unwrap(),
        remote,
        memory,
        range: 0..text.len() as u64,
        hold: Box::new(()),
    };
    let batch = engine.submit(vec![task]).map_err(|r| r.cause).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    batch.wait(Some(deadline)).unwrap().is_applied()
}

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
    let second = StoreEngine::start(config, shelf.clone(), named).unwrap();
    second.close().unwrap();
    assert!(shelf.0.lock().unwrap().is_empty());
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
