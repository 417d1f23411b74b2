//! What a real engine and ours refuse each other, and what they tell each
//! other besides bytes.
#![cfg(feature = "tcp")]

#[path = "peer/harness.rs"]
mod harness;
#[path = "peer/ours.rs"]
mod ours;
#[path = "peer/stream.rs"]
mod stream;

use harness::{Memory, Peer};
use mooncake_transport::wire::control::Notice;
use mooncake_transport::{Access, Engine, Op};
use ours::{Ours, assert_applied, assert_rejected, eventually};
use serde_json::json;

const LEN: u64 = 10_000;
const OLD: u64 = 21;
const NEW: u64 = 22;

fn peer_memory(peer: &mut Peer) -> Memory {
    let memory = peer.allocate(LEN, OLD);
    assert_eq!(peer.register(memory), 0);
    memory
}

fn ours_filled(seed: u64) -> Ours {
    let ours = Ours::new(LEN);
    ours.fill(0..LEN, seed);
    ours
}

#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn probes_are_answered_both_ways_and_fail_once_the_peer_is_gone() {
    let mut peer = Peer::start();
    let ours = Ours::new(LEN);
    ours.engine.probe(peer.session()).unwrap();
    let session = ours.engine.session().to_owned();
    assert_eq!(
        peer.call(json!({"do": "probe", "session": session}))["code"],
        0
    );
    drop(ours);
    // -102: no connection.
    assert_eq!(
        peer.call(json!({"do": "probe", "session": session}))["code"],
        -102
    );

    let ours = Ours::new(LEN);
    let name = peer.session().to_owned();
    peer.kill();
    ours.engine.probe(&name).unwrap_err();
}

#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn our_notifications_reach_a_real_engine_unchanged() {
    let mut peer = Peer::start();
    let ours = Ours::new(LEN);
    let segment = ours.engine.open_segment(peer.session()).unwrap();
    let sent = [
        ("n1", "payload"),
        ("", "an empty name"),
        ("ü \u{1F600}", "\"quoted\"\n\\\u{1}"),
    ];
    for (name, message) in sent {
        ours.engine.notify(&segment, name, message).unwrap();
    }
    let received = peer.call(json!({"do": "notifies"}));
    assert_eq!(received["notifies"], json!(sent));
}

#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn a_real_notification_follows_the_bytes_it_speaks_of() {
    let mut peer = Peer::start();
    let memory = peer.allocate(LEN, NEW);
    let ours = ours_filled(OLD);
    let _registration = ours.register(Access::RemoteWrite);
    for message in ["done", "ü \u{1F600} \"q\""] {
        let answer = peer.call(json!({
            "do": "transfer", "op": "write", "session": ours.engine.session(),
            "memory": memory.index, "items": [[0, ours.slab.address(), LEN]],
            "notify": ["the name", message],
        }));
        assert_eq!(answer["code"], 0);
        let mut notices = Vec::new();
        eventually("the notification", || {
            notices = ours.engine.take_notices().unwrap().notices;
            !notices.is_empty()
        });
        ours.assert_holds(0..LEN, NEW, 0);
        let expected = Notice {
            name: "the name".to_owned(),
            message: message.to_owned(),
        };
        assert_eq!(notices, [expected]);
    }
}

// row: W6b
#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn a_real_engine_refuses_our_transfers_once_it_has_unregistered() {
    let mut peer = Peer::start();
    let memory = peer_memory(&mut peer);
    let ours = ours_filled(NEW);
    let segment = ours.engine.open_segment(peer.session()).unwrap();
    assert_applied(&ours.transfer(Op::Write, &segment, memory.address, 0..LEN));
    assert_eq!(peer.unregister(memory), 0);
    peer.fill(memory, 0, LEN, OLD, 0);
    for op in [Op::Write, Op::Read] {
        assert_rejected(&ours.transfer(op, &segment, memory.address, 0..LEN));
    }
    peer.assert_holds(memory, 0, LEN, OLD, 0);
    ours.assert_holds(0..LEN, NEW, 0);

    assert_eq!(peer.register(memory), 0);
    assert_applied(&ours.transfer(Op::Write, &segment, memory.address, 0..LEN));
    peer.assert_holds(memory, 0, LEN, NEW, 0);
}

// row: W6b, W13.2313
#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn our_engine_refuses_real_transfers_once_we_have_unregistered() {
    let mut peer = Peer::start();
    let memory = peer.allocate(LEN, NEW);
    let ours = ours_filled(OLD);
    let item = [(0, ours.slab.address(), LEN)];
    let session = ours.engine.session().to_owned();
    let registration = ours.register(Access::RemoteWrite);
    assert_eq!(peer.transfer("write", &session, memory, &item), 0);
    ours.assert_holds(0..LEN, NEW, 0);

    registration.unregister().unwrap();
    ours.fill(0..LEN, OLD);
    assert_eq!(peer.transfer("write", &session, memory, &item), -1);
    assert_eq!(peer.transfer("read", &session, memory, &item), -1);
    ours.assert_holds(0..LEN, OLD, 0);
    peer.assert_holds(memory, 0, LEN, NEW, 0);

    let _registration = ours.register(Access::RemoteWrite);
    assert_eq!(peer.transfer("write", &session, memory, &item), 0);
    ours.assert_holds(0..LEN, NEW, 0);
}

// row: W6a
#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn memory_registered_after_the_descriptor_was_read_is_usable_both_ways() {
    let mut peer = Peer::start();
    let ours = Ours::new(LEN);
    ours.fill(0..LEN, NEW);
    let segment = ours.engine.open_segment(peer.session()).unwrap();
    let memory = peer_memory(&mut peer);
    assert_applied(&ours.transfer(Op::Write, &segment, memory.address, 0..LEN));
    peer.assert_holds(memory, 0, LEN, NEW, 0);

    // The peer's first call fetches our descriptor, with nothing in it.
    let session = ours.engine.session().to_owned();
    let item = [(0, ours.slab.address(), LEN)];
    assert_eq!(peer.transfer("read", &session, memory, &item), -1);
    let _registration = ours.register(Access::RemoteRead);
    peer.fill(memory, 0, LEN, OLD, 0);
    assert_eq!(peer.transfer("read", &session, memory, &item), 0);
    peer.assert_holds(memory, 0, LEN, NEW, 0);
}

// row: W7.4a, F6
#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn ranges_outside_one_registration_are_refused_both_ways() {
    let mut peer = Peer::start();
    let memory = peer_memory(&mut peer);
    let ours = ours_filled(NEW);
    let segment = ours.engine.open_segment(peer.session()).unwrap();
    let outside = |base: u64| [base - 1, base + 1, base + LEN, 1, u64::MAX - LEN + 1];
    for remote in outside(memory.address) {
        assert_rejected(&ours.transfer(Op::Write, &segment, remote, 0..LEN));
    }
    peer.assert_holds(memory, 0, LEN, OLD, 0);

    let _registration = ours.register(Access::RemoteWrite);
    let session = ours.engine.session().to_owned();
    for remote in outside(ours.slab.address()) {
        for op in ["write", "read"] {
            let code = peer.transfer(op, &session, memory, &[(0, remote, LEN)]);
            assert_eq!(code, -1, "{op} at {remote:#x}");
        }
    }
    ours.assert_holds(0..LEN, NEW, 0);
    peer.assert_holds(memory, 0, LEN, OLD, 0);
    // Nothing of this has harmed either engine.
    assert_eq!(
        peer.transfer("write", &session, memory, &[(0, ours.slab.address(), LEN)]),
        0
    );
    ours.assert_holds(0..LEN, OLD, 0);
}

#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn a_real_engine_gets_only_the_access_that_was_granted() {
    let mut peer = Peer::start();
    let memory = peer_memory(&mut peer);
    let ours = ours_filled(NEW);
    let session = ours.engine.session().to_owned();
    let item = [(0, ours.slab.address(), LEN)];

    let registration = ours.register(Access::Local);
    assert_eq!(peer.transfer("read", &session, memory, &item), -1);
    assert_eq!(peer.transfer("write", &session, memory, &item), -1);
    registration.unregister().unwrap();

    let _registration = ours.register(Access::RemoteRead);
    assert_eq!(peer.transfer("write", &session, memory, &item), -1);
    ours.assert_holds(0..LEN, NEW, 0);
    assert_eq!(peer.transfer("read", &session, memory, &item), 0);
    peer.assert_holds(memory, 0, LEN, NEW, 0);
}

#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn one_refused_task_of_a_real_batch_leaves_the_others_to_their_fate_and_us_alive() {
    let mut peer = Peer::start();
    let memory = peer_memory(&mut peer);
    let ours = ours_filled(NEW);
    let _registration = ours.register(Access::RemoteWrite);
    let base = ours.slab.address();
    let items = [
        (0, base, 100),
        (100, base + LEN, 100),
        (200, base + 200, 100),
    ];
    let session = ours.engine.session().to_owned();
    assert_eq!(peer.transfer("write", &session, memory, &items), -1);
    assert_eq!(
        peer.transfer("write", &session, memory, &[(0, base, LEN)]),
        0
    );
    ours.assert_holds(0..LEN, OLD, 0);
}

// row: W13.2086
#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn every_task_of_our_batch_settles_by_itself_when_one_is_refused() {
    let mut peer = Peer::start();
    let memory = peer_memory(&mut peer);
    let ours = ours_filled(NEW);
    let segment = ours.engine.open_segment(peer.session()).unwrap();
    let mut tasks = Vec::new();
    for index in 0..10 {
        // The fifth lies past the end of the peer's memory.
        let remote = memory.address + if index == 4 { LEN } else { index * 1000 };
        tasks.push(ours.task(
            Op::Write,
            &segment,
            remote,
            index * 1000..index * 1000 + 1000,
        ));
    }
    let report = ours::settled(&ours.submit(tasks));
    for (index, task) in report.tasks().iter().enumerate() {
        match index {
            4 => assert_rejected(&task.remote),
            _ => assert_applied(&task.remote),
        }
    }
    assert_eq!(report.first_failure().map(|(index, _)| index), Some(4));
    for index in (0..10).filter(|index| *index != 4) {
        peer.assert_holds(memory, index * 1000, 1000, NEW, index * 1000);
    }
    peer.assert_holds(memory, 4000, 1000, OLD, 4000);
}

// row: W5.2a, W5.3
#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn a_real_engine_finds_our_buffer_in_our_descriptor() {
    let mut peer = Peer::start();
    let ours = Ours::new(LEN);
    let _registration = ours.register(Access::RemoteWrite);
    let found = peer.call(json!({"do": "first_buffer", "session": ours.engine.session()}));
    assert_eq!(found["address"], ours.slab.address());
}
