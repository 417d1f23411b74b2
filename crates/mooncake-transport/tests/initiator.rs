//! An engine that only initiates: nobody can connect to it, and it transfers all the same.
#![cfg(feature = "tcp")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use mooncake_transport::tcp::{TcpConfig, TcpEngine};
use mooncake_transport::{Access, Engine, EngineError, Op, Task};
use slab_memory::{HostSlab, Memory};

#[test]
fn an_engine_without_listeners_writes_to_a_peer_and_lets_nobody_in() {
    let target = TcpEngine::start(TcpConfig::default()).unwrap();
    let memory: Arc<dyn Memory> = Arc::new(HostSlab::new(4096).unwrap());
    let registration = target
        .register(Arc::clone(&memory), Access::RemoteWrite)
        .unwrap();

    let mut config = TcpConfig::default();
    config.listen = false;
    let engine = TcpEngine::start(config).unwrap();
    assert_eq!(engine.control_address().port(), 0);
    assert_eq!(engine.data_address().port(), 0);
    assert_eq!(engine.session(), "127.0.0.1:0");

    let source: Arc<dyn Memory> = Arc::new(HostSlab::new(4096).unwrap());
    source.copy_in(0, b"written by an initiator").unwrap();
    let local = engine.register(Arc::clone(&source), Access::Local).unwrap();
    let task = Task {
        op: Op::Write,
        segment: engine.open_segment(target.session()).unwrap(),
        remote: memory.address() + 100,
        memory: Arc::clone(&source),
        range: 0..23,
        hold: Box::new(()),
    };
    let batch = engine.submit(vec![task]).unwrap();
    let report = batch
        .wait(Some(Instant::now() + Duration::from_secs(10)))
        .unwrap();
    assert!(report.is_applied(), "{report:?}");
    let mut got = [0; 23];
    memory.copy_out(100, &mut got).unwrap();
    assert_eq!(&got, b"written by an initiator");
    drop((local, registration));
}

#[test]
fn an_engine_without_listeners_refuses_memory_that_peers_could_not_reach() {
    let mut config = TcpConfig::default();
    config.listen = false;
    // A wildcard address means nothing to an engine that does not listen.
    config.bind = "0.0.0.0".parse().unwrap();
    let engine = TcpEngine::start(config).unwrap();
    let memory: Arc<dyn Memory> = Arc::new(HostSlab::new(4096).unwrap());
    for access in [Access::RemoteRead, Access::RemoteWrite] {
        assert!(matches!(
            engine.register(Arc::clone(&memory), access),
            Err(EngineError::NotListening)
        ));
    }
}
