//! Real engines and ours find each other in Mooncake's own HTTP metadata server.
#![cfg(feature = "http")]

#[path = "peer/harness.rs"]
mod harness;
#[path = "peer/ours.rs"]
#[allow(unused_imports, reason = "every test target uses its own part")]
mod ours;
#[path = "peer/stream.rs"]
mod stream;

use std::net::TcpListener;
use std::sync::Arc;

use harness::Peer;
use harness::process::Process;
use mooncake_transport::metadata::{
    HttpStore, MetadataStore, RpcMeta, StoreConfig, StoreEngine, StoreError,
};
use mooncake_transport::tcp::TcpConfig;
use mooncake_transport::wire::descriptor::Descriptor;
use mooncake_transport::{Access, Engine, EngineError, Op, Task};
use ours::{assert_applied, eventually, settled};
use serde_json::json;
use slab_memory::HostSlab;

const LEN: u64 = (1 << 20) + 13;
const SEED: u64 = 0xBEEF_0000_0000_0003;

/// Mooncake's server, in a process of its own.
struct Server {
    process: Process,
    port: u16,
}

impl Server {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        drop(listener);
        let process = Self::run(port);
        Self { process, port }
    }

    fn run(port: u16) -> Process {
        let mut process = Process::start("metadata_server.py", []);
        process.call(json!({ "port": port }));
        process
    }

    fn url(&self) -> String {
        format!("http://127.0.0.1:{}/metadata", self.port)
    }

    fn store(&self) -> Arc<HttpStore> {
        Arc::new(HttpStore::new(&self.url()).unwrap())
    }

    fn engine(&self, name: &str) -> Result<StoreEngine, EngineError> {
        let mut named = StoreConfig::default();
        named.name = Some(name.to_owned());
        StoreEngine::start(TcpConfig::default(), self.store(), named)
    }
}

fn slab(seed: u64) -> Arc<HostSlab> {
    let slab = Arc::new(HostSlab::new(LEN).unwrap());
    slab.copy_in(0, &stream::bytes(seed, 0, LEN as usize))
        .unwrap();
    slab
}

fn holds(slab: &HostSlab, seed: u64) -> bool {
    let mut found = vec![0; LEN as usize];
    slab.copy_out(0, &mut found).unwrap();
    found == stream::bytes(seed, 0, LEN as usize)
}

fn transfer(engine: &StoreEngine, op: Op, peer: &str, remote: u64, memory: &Arc<HostSlab>) {
    let segment = engine.open_segment(peer).unwrap();
    let task = Task {
        op,
        segment,
        remote,
        memory: memory.clone(),
        range: 0..LEN,
        hold: Box::new(()),
    };
    let batch = engine.submit(vec![task]).map_err(|r| r.cause).unwrap();
    assert_applied(&settled(&batch).tasks()[0].remote);
}

#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn our_engine_finds_a_real_one_writes_reads_notifies_and_probes_it() {
    let server = Server::start();
    let mut peer = Peer::start_named(&server.url(), "real");
    let memory = peer.allocate(LEN, 1);
    assert_eq!(peer.register(memory), 0);
    let engine = server.engine("ours").unwrap();
    transfer(&engine, Op::Write, "real", memory.address, &slab(SEED));
    peer.assert_holds(memory, 0, LEN, SEED, 0);
    let sink = slab(2);
    transfer(&engine, Op::Read, "real", memory.address, &sink);
    assert!(holds(&sink, SEED));
    engine.probe("real").unwrap();
    let segment = engine.open_segment("real").unwrap();
    engine.notify(&segment, "ours", "written").unwrap();
    eventually("the notification", || {
        peer.call(json!({"do": "notifies"}))["notifies"] == json!([["ours", "written"]])
    });
}

#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn a_real_engine_finds_ours_writes_reads_and_notifies_it() {
    let server = Server::start();
    let engine = server.engine("ours").unwrap();
    let ours = slab(1);
    let _registration = engine.register(ours.clone(), Access::RemoteWrite).unwrap();
    let mut peer = Peer::start_named(&server.url(), "real");
    let source = peer.allocate(LEN, SEED);
    let sink = peer.allocate(LEN, 2);
    assert_eq!(peer.register(source), 0);
    assert_eq!(peer.register(sink), 0);
    let there = [(0, ours.address(), LEN)];
    assert_eq!(peer.transfer("write", "ours", source, &there), 0);
    assert!(holds(&ours, SEED));
    assert_eq!(peer.transfer("read", "ours", sink, &there), 0);
    peer.assert_holds(sink, 0, LEN, SEED, 0);
    let first = peer.call(json!({"do": "first_buffer", "session": "ours"}));
    assert_eq!(first["address"], ours.address());
    assert_eq!(
        peer.call(
            json!({"do": "transfer", "op": "write", "session": "ours", "memory": source.index,
            "items": there, "notify": ["real", "written"]})
        )["code"],
        0
    );
    eventually("the notification", || {
        let notices = engine.take_notices().unwrap().notices;
        notices.iter().any(|notice| notice.message == "written")
    });
}

#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn a_live_name_is_refused_to_either_side_and_a_crashed_one_is_replaced() {
    let server = Server::start();
    let store = server.store();
    let mut peer = Peer::start_named(&server.url(), "name");
    let memory = peer.allocate(LEN, 1);
    assert_eq!(peer.register(memory), 0);
    assert!(matches!(
        server.engine("name"),
        Err(EngineError::Store(StoreError::NameTaken {
            answers: true,
            ..
        }))
    ));
    peer.kill();
    let engine = server.engine("name").unwrap();
    // Nothing of what the dead engine had registered is offered.
    let text = store.get("mooncake/ram/name", 1 << 20).unwrap().unwrap();
    assert!(Descriptor::decode(&text).unwrap().buffers.is_empty());
    assert!(Peer::try_start_named(&server.url(), "name").is_err());
    engine.close().unwrap();
    assert_eq!(store.get("mooncake/ram/name", 1 << 20), Ok(None));
    assert_eq!(store.get("mooncake/rpc_meta/name", 1 << 20), Ok(None));
    // A real engine can have it then.
    let _peer = Peer::start_named(&server.url(), "name");
    let text = store.get("mooncake/rpc_meta/name", 1 << 20).unwrap();
    assert_eq!(RpcMeta::decode(&text.unwrap()).unwrap().host, "127.0.0.1");
}

#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn a_real_engine_that_was_restarted_elsewhere_is_found_again() {
    let server = Server::start();
    let engine = server.engine("ours").unwrap();
    let mut peer = Peer::start_named(&server.url(), "real");
    let memory = peer.allocate(LEN, 1);
    assert_eq!(peer.register(memory), 0);
    transfer(&engine, Op::Write, "real", memory.address, &slab(SEED));
    // Kept open over the restart.
    let _segment = engine.open_segment("real").unwrap();
    peer.kill();
    server.store().delete("mooncake/rpc_meta/real").unwrap();
    server.store().delete("mooncake/ram/real").unwrap();
    let mut peer = Peer::start_named(&server.url(), "real");
    let memory = peer.allocate(LEN, 1);
    assert_eq!(peer.register(memory), 0);
    transfer(&engine, Op::Write, "real", memory.address, &slab(SEED));
    peer.assert_holds(memory, 0, LEN, SEED, 0);
}

#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn a_store_that_is_down_is_an_error_and_one_that_comes_back_empty_is_filled_again() {
    let mut server = Server::start();
    let engine = server.engine("ours").unwrap();
    let ours = slab(1);
    let registration = engine.register(ours.clone(), Access::RemoteWrite).unwrap();
    server.process.kill();
    let down = |result: Result<(), EngineError>| {
        assert!(
            matches!(
                result,
                Err(EngineError::Store(StoreError::Unreachable { .. }))
            ),
            "{result:?}"
        );
    };
    down(engine.open_segment("real").map(drop));
    down(engine.republish().map_err(EngineError::from));
    down(engine.register(slab(2), Access::RemoteRead).map(drop));
    server.process = Server::run(server.port);
    engine.republish().unwrap();
    let mut peer = Peer::start_named(&server.url(), "real");
    let source = peer.allocate(LEN, SEED);
    let there = [(0, ours.address(), LEN)];
    assert_eq!(peer.transfer("write", "ours", source, &there), 0);
    assert!(holds(&ours, SEED));
    registration.unregister().unwrap();
    assert_ne!(peer.transfer("write", "ours", source, &there), 0);
}
