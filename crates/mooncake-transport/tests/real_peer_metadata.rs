//! Real engines and ours find each other in the stores that both know: Mooncake's own HTTP metadata server,
//! and etcd.
#![cfg(all(feature = "http", feature = "etcd", feature = "redis"))]

#[path = "peer/harness.rs"]
mod harness;
#[path = "peer/ours.rs"]
mod ours;
#[path = "peer/servers.rs"]
mod servers;
#[path = "peer/stream.rs"]
mod stream;

use harness::Peer;
use mooncake_transport::metadata::{RpcMeta, StoreError};
use mooncake_transport::wire::descriptor::Descriptor;
use mooncake_transport::{Access, Engine, EngineError, Op};
use ours::{eventually, filled, holds, transfer};
use serde_json::json;
use servers::{Kind, Server, is_unreachable};

const LEN: u64 = (1 << 20) + 13;
const SEED: u64 = 0xBEEF_0000_0000_0003;

/// Makes a test of each of these for either store. The tests with etcd need both kinds of fixture.
macro_rules! with_each_store {
    ($($name:ident)*) => {
        mod http {
            $(
                #[test]
                #[ignore = "needs-network: the Mooncake wheel"]
                fn $name() {
                    super::$name(super::Kind::Http);
                }
            )*
        }

        mod etcd {
            $(
                #[test]
                #[ignore = "needs-debian: etcd, and the Mooncake wheel"]
                fn $name() {
                    super::$name(super::Kind::Etcd);
                }
            )*
        }
    };
}

with_each_store! {
    our_engine_finds_a_real_one_writes_reads_notifies_and_probes_it
    a_real_engine_finds_ours_writes_reads_and_notifies_it
    a_live_name_is_refused_and_a_crashed_one_is_replaced
    a_real_engine_that_was_restarted_elsewhere_is_found_again
    a_store_that_was_killed_is_an_error_while_open_segments_go_on_and_is_filled_again
}

// row: W10.5
fn our_engine_finds_a_real_one_writes_reads_notifies_and_probes_it(kind: Kind) {
    let server = Server::start(kind);
    let mut peer = Peer::start_named(&server.address(), "real");
    let memory = peer.allocate(LEN, 1);
    assert_eq!(peer.register(memory), 0);
    let engine = server.engine("ours").unwrap();
    let segment = engine.open_segment("real").unwrap();
    transfer(
        &engine,
        Op::Write,
        &segment,
        memory.address,
        &filled(LEN, SEED),
    );
    peer.assert_holds(memory, 0, LEN, SEED, 0);
    let sink = filled(LEN, 2);
    transfer(&engine, Op::Read, &segment, memory.address, &sink);
    assert!(holds(&sink, SEED));
    engine.probe("real").unwrap();
    engine.notify(&segment, "ours", "written").unwrap();
    eventually("the notification", || {
        peer.call(json!({"do": "notifies"}))["notifies"] == json!([["ours", "written"]])
    });
}

// row: W10.5
fn a_real_engine_finds_ours_writes_reads_and_notifies_it(kind: Kind) {
    let server = Server::start(kind);
    let engine = server.engine("ours").unwrap();
    let ours = filled(LEN, 1);
    let _registration = engine.register(ours.clone(), Access::RemoteWrite).unwrap();
    let mut peer = Peer::start_named(&server.address(), "real");
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

// row: W10.4a
fn a_live_name_is_refused_and_a_crashed_one_is_replaced(kind: Kind) {
    let server = Server::start(kind);
    let store = server.store();
    let mut peer = Peer::start_named(&server.address(), "name");
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
    let host = || {
        let text = store.get("mooncake/rpc_meta/name", 1 << 20).unwrap();
        RpcMeta::decode(&text.unwrap()).unwrap().host
    };
    if kind == Kind::Http {
        // Mooncake's server protects the name of ours as well.
        assert!(Peer::try_start_named(&server.address(), "name").is_err());
        engine.close().unwrap();
        assert_eq!(store.get("mooncake/ram/name", 1 << 20), Ok(None));
        assert_eq!(store.get("mooncake/rpc_meta/name", 1 << 20), Ok(None));
        let _peer = Peer::start_named(&server.address(), "name");
        assert_eq!(host(), "127.0.0.1");
    } else {
        // etcd does not, and a real engine does not look: ours says so and leaves it the name.
        let _peer = Peer::start_named(&server.address(), "name");
        assert!(matches!(
            engine.republish(),
            Err(StoreError::NameTaken { .. })
        ));
        engine.close().unwrap();
        assert_eq!(host(), "127.0.0.1");
        assert!(store.exists("mooncake/ram/name").unwrap());
    }
}

fn a_real_engine_that_was_restarted_elsewhere_is_found_again(kind: Kind) {
    let server = Server::start(kind);
    let engine = server.engine("ours").unwrap();
    let mut peer = Peer::start_named(&server.address(), "real");
    let memory = peer.allocate(LEN, 1);
    assert_eq!(peer.register(memory), 0);
    // Kept open over the restart.
    let open = engine.open_segment("real").unwrap();
    transfer(
        &engine,
        Op::Write,
        &open,
        memory.address,
        &filled(LEN, SEED),
    );
    let _open = engine.open_segment("real").unwrap();
    peer.kill();
    if kind == Kind::Http {
        // A real engine cannot take its own name back there.
        server.store().delete("mooncake/rpc_meta/real").unwrap();
    }
    server.store().delete("mooncake/ram/real").unwrap();
    let mut peer = Peer::start_named(&server.address(), "real");
    let memory = peer.allocate(LEN, 1);
    assert_eq!(peer.register(memory), 0);
    let segment = engine.open_segment("real").unwrap();
    transfer(
        &engine,
        Op::Write,
        &segment,
        memory.address,
        &filled(LEN, SEED),
    );
    peer.assert_holds(memory, 0, LEN, SEED, 0);
}

// row: W10.8c
fn a_store_that_was_killed_is_an_error_while_open_segments_go_on_and_is_filled_again(kind: Kind) {
    let mut server = Server::start(kind);
    let engine = server.engine("ours").unwrap();
    let ours = filled(LEN, 1);
    let registration = engine.register(ours.clone(), Access::RemoteWrite).unwrap();
    let mut peer = Peer::start_named(&server.address(), "real");
    let source = peer.allocate(LEN, SEED);
    assert_eq!(peer.register(source), 0);
    let open = engine.open_segment("real").unwrap();
    let there = [(0, ours.address(), LEN)];
    assert_eq!(peer.transfer("write", "ours", source, &there), 0);
    server.kill();
    for result in [
        engine.open_segment("real").map(drop),
        engine.republish().map_err(EngineError::from),
        engine
            .register(filled(LEN, 2), Access::RemoteRead)
            .map(drop),
    ] {
        assert!(is_unreachable(&result.unwrap_err()));
    }
    // Whatever was open goes on, in both directions.
    let sink = filled(LEN, 3);
    transfer(&engine, Op::Read, &open, source.address, &sink);
    assert!(holds(&sink, SEED));
    ours.copy_in(0, &vec![0; LEN as usize]).unwrap();
    assert_eq!(peer.transfer("write", "ours", source, &there), 0);
    assert!(holds(&ours, SEED));
    // What the store has lost is put back without a call.
    server.run_empty();
    let store = server.store();
    eventually("the entry", || {
        store.exists("mooncake/ram/ours").unwrap_or(false)
    });
    let mut late = Peer::start_named(&server.address(), "late");
    let source = late.allocate(LEN, SEED + 1);
    assert_eq!(late.transfer("write", "ours", source, &there), 0);
    assert!(holds(&ours, SEED + 1));
    registration.unregister().unwrap();
    assert_ne!(late.transfer("write", "ours", source, &there), 0);
}
