//! Version 1 of the data protocol between our engine and a real one: both roles of both.
//!
//! A real engine offers version 2 and serves version 1 as well. As initiator it is told to speak version 1 by
//! `MC_TCP_PROTO`; as target it is made to look like one of the engines before version 2 by a proxy that
//! changes its descriptor.
#![cfg(feature = "tcp")]

mod fault_support;
#[path = "peer/harness.rs"]
mod harness;
#[path = "peer/ours.rs"]
mod ours;
#[path = "peer/stream.rs"]
mod stream;

use std::time::Duration;

use fault_support::plan::{Fault, Profile};
use fault_support::proxy::{EngineProxy, listeners};
use fault_support::{Random, written_part};
use harness::Peer;
use mooncake_transport::tcp::TcpConfig;
use mooncake_transport::wire::data::DataVersion;
use mooncake_transport::{Access, Engine, Op, Reason, Remote};
use ours::{
    BACKGROUND, CONTENT, GUARD, Ours, assert_applied, assert_peer_holds_content,
    assert_we_hold_content, eventually, our_memory, peer_memory, settled,
};
use serde_json::json;

const SIZES: [u64; 9] = [
    1,
    7,
    8,
    255,
    4_097,
    65_535,
    65_537,
    (1 << 20) + 1,
    (8 << 20) + 3,
];

const CLEAN: Profile = Profile {
    percent: 0,
    ..Profile::NETWORK
};

/// A real engine that speaks version 1 wherever it is the one to choose.
fn old_peer() -> Peer {
    Peer::start_with(&[("MC_TCP_PROTO", "1"), ("MC_TCP_PROGRESS_TIMEOUT_SEC", "2")])
}

/// The peer as an engine that knows no version 2.
fn without_version_2(peer: &Peer, seed: u64, data: Profile) -> EngineProxy {
    let (control_at, data_at, descriptor) = listeners(peer.session());
    assert_eq!(descriptor.version, DataVersion::V2);
    EngineProxy::start(control_at, data_at, seed, [CLEAN, data], Some(1))
}

/// Every connection began with a request of version 1.
fn assert_version_1(proxy: &EngineProxy) {
    let connections = proxy.data.heads().len();
    assert!(connections > 0, "nothing went through the proxy");
    assert_eq!(proxy.assert_version(DataVersion::V1), connections);
}

// row: W7.3e
#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn our_version_1_writes_are_in_real_memory_once_they_are_applied() {
    let mut peer = old_peer();
    let proxy = without_version_2(&peer, 1, CLEAN);
    for len in SIZES {
        let memory = peer_memory(&mut peer, len, false);
        let ours = our_memory(len, true);
        let segment = ours.engine.open_segment(&proxy.session()).unwrap();
        let there = memory.address + GUARD;
        assert_applied(&ours.transfer(Op::Write, &segment, there, GUARD..GUARD + len));
        assert_peer_holds_content(&mut peer, memory, len);
        assert_we_hold_content(&ours, len);
    }
    assert_version_1(&proxy);
}

// row: W7.3e
#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn our_version_1_reads_bring_real_memory() {
    let mut peer = old_peer();
    let proxy = without_version_2(&peer, 2, CLEAN);
    for len in SIZES {
        let memory = peer_memory(&mut peer, len, true);
        let ours = our_memory(len, false);
        let segment = ours.engine.open_segment(&proxy.session()).unwrap();
        let there = memory.address + GUARD;
        assert_applied(&ours.transfer(Op::Read, &segment, there, GUARD..GUARD + len));
        assert_we_hold_content(&ours, len);
        assert_peer_holds_content(&mut peer, memory, len);
    }
    assert_version_1(&proxy);
}

// row: W7.3e
#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn a_batch_of_version_1_tasks_goes_through_a_few_connections_and_leaves_no_gap() {
    let len = (1 << 20) + 13;
    let mut peer = old_peer();
    let proxy = without_version_2(&peer, 3, CLEAN);
    let sink = peer_memory(&mut peer, len, false);
    let ours = our_memory(len, true);
    let segment = ours.engine.open_segment(&proxy.session()).unwrap();
    let cuts: Vec<u64> = (0..=100).map(|i| i * len / 100).collect();
    for op in [Op::Write, Op::Read] {
        let tasks = cuts
            .windows(2)
            .map(|cut| {
                let range = GUARD + cut[0]..GUARD + cut[1];
                ours.task(op, &segment, sink.address + GUARD + cut[0], range)
            })
            .collect();
        let report = settled(&ours.submit(tasks));
        assert!(report.is_applied(), "{:?}", report.first_failure());
    }
    assert_peer_holds_content(&mut peer, sink, len);
    assert_we_hold_content(&ours, len);
    assert_version_1(&proxy);
    assert!(proxy.data.heads().len() <= 4, "a connection serves many");
}

// row: W7.3e
#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn a_version_1_range_that_a_real_engine_refuses_is_a_closed_connection() {
    let mut peer = old_peer();
    let proxy = without_version_2(&peer, 4, CLEAN);
    let memory = peer_memory(&mut peer, 100, true);
    let ours = our_memory(100, false);
    let segment = ours.engine.open_segment(&proxy.session()).unwrap();
    for op in [Op::Write, Op::Read] {
        let beyond = memory.address + 2 * GUARD;
        let remote = ours.transfer(op, &segment, beyond, 0..101);
        assert_eq!(remote, Remote::Ended(Reason::Closed));
        assert_applied(&ours.transfer(op, &segment, beyond, 0..100));
    }
}

// row: W7.3d
#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn a_real_engine_writes_and_reads_in_version_1() {
    let mut peer = old_peer();
    for len in SIZES {
        let source = peer_memory(&mut peer, len, true);
        let sink = peer_memory(&mut peer, len, false);
        let ours = our_memory(len, false);
        let _registration = ours.register(Access::RemoteWrite);
        let item = [(GUARD, ours.slab.address() + GUARD, len)];
        // In between only to see that version 1 is what is spoken.
        let (control_at, data_at, _) = listeners(ours.engine.session());
        let proxy = EngineProxy::start(control_at, data_at, 0, [CLEAN; 2], None);
        let session = &proxy.session();
        assert_eq!(peer.transfer("write", session, source, &item), 0);
        // What a version 1 initiator calls complete is only on its way.
        let last = stream::bytes(CONTENT, len - 1, 1);
        let mut found = [0];
        eventually("the last byte", || {
            ours.slab.copy_out(GUARD + len - 1, &mut found).unwrap();
            found == last[..]
        });
        assert_we_hold_content(&ours, len);
        assert_eq!(peer.transfer("read", session, sink, &item), 0);
        assert_peer_holds_content(&mut peer, sink, len);
        assert_version_1(&proxy);
    }
}

// row: W7.3d
#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn a_real_engine_is_refused_in_version_1_and_served_again() {
    let mut peer = old_peer();
    let source = peer_memory(&mut peer, 100, true);
    let ours = our_memory(100, true);
    let _registration = ours.register(Access::RemoteRead);
    let session = ours.engine.session().to_owned();
    let beyond = ours.slab.address() + ours.slab.len() - 99;
    assert_eq!(
        peer.transfer("read", &session, source, &[(0, beyond, 100)]),
        -1
    );
    let item = [(GUARD, ours.slab.address() + GUARD, 100)];
    // A write to memory that is only to be read is refused, too; in version 1 its initiator does not learn that.
    peer.transfer("write", &session, source, &item);
    eventually("a connection of its own", || {
        peer.transfer("read", &session, source, &item) == 0
    });
    peer.assert_holds(source, GUARD, 100, CONTENT, 0);
    assert_we_hold_content(&ours, 100);
}

/// The connection ends in the middle of every transfer, and now and then before or after it.
const CUT: Profile = Profile {
    percent: 80,
    bytes_bits: 19,
    faults: &[
        Fault::Truncate,
        Fault::Reset,
        Fault::HalfClose,
        Fault::Stall,
    ],
    pause: Duration::ZERO,
};

// row: W7.3e
#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn version_1_transfers_cut_on_their_way_to_a_real_engine_claim_nothing() {
    const LEN: u64 = 200_001;
    let mut peer = old_peer();
    let mut config = TcpConfig::default();
    config.timeouts.progress = Duration::from_millis(400);
    config.timeouts.status = Duration::from_millis(400);
    config.timeouts.refresh_interval = Duration::from_millis(50);
    let ours = Ours::with_config(2 * LEN, config);
    ours.fill(0..LEN, CONTENT);
    let (mut applied, mut failed) = (0, 0);
    for seed in 0..12 {
        let proxy = without_version_2(&peer, seed, CUT);
        let segment = ours.engine.open_segment(&proxy.session()).unwrap();
        let len = Random::new(seed).pick(&[1, 25, 4_097, 65_537, LEN]);
        let sink = peer.allocate(LEN, BACKGROUND);
        assert_eq!(peer.register(sink), 0);
        let remote = ours.transfer(Op::Write, &segment, sink.address, 0..len);
        if remote.is_applied() {
            applied += 1;
            peer.assert_holds(sink, 0, len, CONTENT, 0);
        } else {
            failed += 1;
        }
        peer.assert_holds(sink, len, LEN - len, BACKGROUND, len);
        let source = peer.allocate(LEN, CONTENT);
        assert_eq!(peer.register(source), 0);
        ours.fill(LEN..2 * LEN, BACKGROUND);
        let remote = ours.transfer(Op::Read, &segment, source.address, LEN..LEN + len);
        if remote.is_applied() {
            applied += 1;
            ours.assert_holds(LEN..LEN + len, CONTENT, 0);
        } else {
            failed += 1;
        }
        ours.assert_holds(LEN + len..2 * LEN, BACKGROUND, len);
        proxy.heal();
        assert_applied(&ours.transfer(Op::Write, &segment, sink.address, 0..len));
        peer.assert_holds(sink, 0, len, CONTENT, 0);
    }
    assert!(
        applied > 0 && failed > 0,
        "{applied} applied, {failed} failed"
    );
}

// row: W7.3d
#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn version_1_transfers_of_a_real_engine_cut_on_their_way_touch_nothing_else() {
    const LEN: u64 = 200_001;
    let mut peer = old_peer();
    let mut config = TcpConfig::default();
    config.timeouts.progress = Duration::from_millis(400);
    config.timeouts.header = Duration::from_millis(400);
    let ours = Ours::with_config(2 * LEN, config);
    let _registration = ours.register(Access::RemoteWrite);
    let (mut whole, mut cut) = (0, 0);
    for seed in 0..10 {
        let (control_at, data_at, _) = listeners(ours.engine.session());
        let proxy = EngineProxy::start(control_at, data_at, seed, [CLEAN, CUT], None);
        let session = proxy.session();
        let len = Random::new(seed).pick(&[1, 25, 4_097, 65_537, LEN]);
        // Written is the first half, read the second.
        ours.fill(0..2 * LEN, BACKGROUND);
        let source = peer.allocate(LEN, CONTENT);
        let item = |at| [(0, ours.slab.address() + at, len)];
        // Whatever it is told, the real engine does not know whether a write of version 1 has arrived.
        peer.transfer("write", &session, source, &item(0));
        let sink = peer.allocate(LEN, CONTENT);
        if peer.transfer("read", &session, sink, &item(LEN)) == 0 {
            peer.assert_holds(sink, 0, len, BACKGROUND, LEN);
        }
        peer.assert_holds(sink, len, LEN - len, CONTENT, len);
        proxy.heal();
        eventually("the real engine reads again", || {
            peer.transfer("read", &session, sink, &item(LEN)) == 0
        });
        peer.assert_holds(sink, 0, len, BACKGROUND, LEN);
        // Nothing is on its way any more: either it has come or its connection has ended.
        let mut found = vec![0; len as usize];
        let mut part = None;
        eventually("the write has come or has ended", || {
            ours.slab.copy_out(0, &mut found).unwrap();
            let new = stream::bytes(CONTENT, 0, len as usize);
            let now = written_part(&found, &new, &stream::bytes(BACKGROUND, 0, len as usize));
            assert!(now.is_some(), "other bytes than those that were written");
            part.replace(now) == Some(now)
        });
        if part.flatten() == Some(len as usize) {
            whole += 1;
        } else {
            cut += 1;
        }
        ours.assert_holds(len..2 * LEN, BACKGROUND, len);
        proxy.assert_version(DataVersion::V1);
    }
    assert!(whole > 0 && cut > 0, "{whole} whole, {cut} cut");
}

#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn notifications_and_probes_do_not_depend_on_the_version() {
    let mut peer = old_peer();
    let proxy = without_version_2(&peer, 5, CLEAN);
    let ours = our_memory(1, false);
    let segment = ours.engine.open_segment(&proxy.session()).unwrap();
    ours.engine
        .notify(&segment, "ours", "to the real engine")
        .unwrap();
    ours.engine.probe(&proxy.session()).unwrap();
    let mut arrived = json!([]);
    eventually("our notification", || {
        arrived = peer.call(json!({"do": "notifies"}))["notifies"].clone();
        arrived != json!([])
    });
    assert_eq!(arrived, json!([["ours", "to the real engine"]]));
    let session = ours.engine.session();
    let probed = peer.call(json!({"do": "probe", "session": session}));
    assert_eq!(probed["code"], 0);
}
