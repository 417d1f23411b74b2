//! A real engine that stalls, dies or comes back, and ours that comes back.
#![cfg(feature = "tcp")]

#[path = "peer/harness.rs"]
mod harness;
#[path = "peer/ours.rs"]
mod ours;
#[path = "peer/relay.rs"]
mod relay;
#[path = "peer/stream.rs"]
mod stream;

use std::net::TcpListener;
use std::time::{Duration, Instant};

use harness::Peer;
use mooncake_transport::tcp::TcpConfig;
use mooncake_transport::{Access, Engine, Op, Remote};
use ours::{Ours, assert_applied, eventually, settled};
use relay::Relay;
use serde_json::json;

const OLD: u64 = 31;
const NEW: u64 = 32;
/// Far more than the socket buffers of both ends hold.
const LARGE: u64 = 64 << 20;

/// Stops or continues a process. The shell's own `kill` needs no package.
fn signal(peer: &Peer, name: &str) {
    let status = std::process::Command::new("sh")
        .args(["-c", &format!("kill -{name} {}", peer.id())])
        .status()
        .unwrap();
    assert!(status.success());
}

/// Our engine still moves bytes, with a fresh peer, in both roles.
fn assert_alive(ours: &Ours) {
    let mut peer = Peer::start();
    let memory = peer.allocate(1000, OLD);
    assert_eq!(peer.register(memory), 0);
    ours.fill(0..1000, NEW);
    let segment = ours.engine.open_segment(peer.session()).unwrap();
    assert_applied(&ours.transfer(Op::Write, &segment, memory.address, 0..1000));
    peer.assert_holds(memory, 0, 1000, NEW, 0);
    let there = ours.slab.address();
    peer.fill(memory, 0, 1000, OLD, 0);
    assert_eq!(
        peer.transfer("write", ours.engine.session(), memory, &[(0, there, 1000)]),
        0
    );
    ours.assert_holds(0..1000, OLD, 0);
}

#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn a_peer_killed_in_the_middle_of_our_write_ends_it_and_nothing_else() {
    let mut peer = Peer::start();
    let memory = peer.allocate(LARGE, OLD);
    assert_eq!(peer.register(memory), 0);
    let ours = Ours::new(LARGE);
    let _registration = ours.register(Access::RemoteWrite);
    let segment = ours.engine.open_segment(peer.session()).unwrap();
    assert_applied(&ours.transfer(Op::Write, &segment, memory.address, 0..8));

    // A stopped process reads nothing, so most of the bytes are still here
    // when it dies.
    signal(&peer, "STOP");
    let hold = std::sync::Arc::new(());
    let mut task = ours.task(Op::Write, &segment, memory.address, 0..LARGE);
    task.hold = Box::new(hold.clone());
    let batch = ours.submit(vec![task]);
    assert!(
        batch
            .wait(Some(Instant::now() + Duration::from_millis(300)))
            .is_none()
    );
    assert_eq!(
        std::sync::Arc::strong_count(&hold),
        2,
        "the range is held while it is sent"
    );
    peer.kill();
    let report = settled(&batch);
    let remote = &report.tasks()[0].remote;
    assert!(
        matches!(remote, Remote::Ended(_)),
        "a reset says that nothing more comes: {remote:?}"
    );
    assert_eq!(
        std::sync::Arc::strong_count(&hold),
        1,
        "the range is given back"
    );
    assert_alive(&ours);
}

#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn a_peer_killed_in_the_middle_of_our_read_ends_it_and_nothing_else() {
    let mut peer = Peer::start();
    let memory = peer.allocate(LARGE, NEW);
    assert_eq!(peer.register(memory), 0);
    let ours = Ours::new(LARGE);
    let _registration = ours.register(Access::RemoteWrite);
    let segment = ours.engine.open_segment(peer.session()).unwrap();
    assert_applied(&ours.transfer(Op::Read, &segment, memory.address, 0..8));
    signal(&peer, "STOP");
    let batch = ours.submit(vec![ours.task(
        Op::Read,
        &segment,
        memory.address,
        0..LARGE,
    )]);
    assert!(
        batch
            .wait(Some(Instant::now() + Duration::from_millis(300)))
            .is_none()
    );
    peer.kill();
    let report = settled(&batch);
    assert!(
        matches!(report.tasks()[0].remote, Remote::Ended(_)),
        "{report:?}"
    );
    assert_alive(&ours);
}

// row: F9
#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn a_peer_killed_in_the_middle_of_its_own_write_leaves_us_serving() {
    let mut peer = Peer::start();
    let len = 256 << 20;
    let memory = peer.allocate(len, NEW);
    let ours = Ours::new(len);
    let registration = ours.register(Access::RemoteWrite);
    peer.call(json!({
        "do": "begin_transfer", "op": "write", "session": ours.engine.session(),
        "memory": memory.index, "items": [[0, ours.slab.address(), len]],
    }));
    let first = stream::bytes(NEW, 0, 8);
    eventually("the first bytes", || {
        let mut found = [0; 8];
        ours.slab.copy_out(0, &mut found).unwrap();
        found == first[..]
    });
    peer.kill();
    // What had arrived is right, up to some byte.
    let mut arrived = vec![0; 4096];
    ours.slab.copy_out(0, &mut arrived).unwrap();
    assert_eq!(arrived[..8], first[..]);
    assert_alive(&ours);
    registration.unregister().unwrap();
}

// row: W8.2a, W13.3542, W13.4247
#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn a_peer_that_stops_reading_is_given_up_at_the_deadline_and_nothing_is_claimed() {
    let mut peer = Peer::start();
    let memory = peer.allocate(LARGE, OLD);
    assert_eq!(peer.register(memory), 0);
    let mut config = TcpConfig::default();
    config.timeouts.progress = Duration::from_secs(1);
    config.timeouts.status = Duration::from_secs(1);
    let ours = Ours::with_config(LARGE, config);
    let _registration = ours.register(Access::RemoteWrite);
    let segment = ours.engine.open_segment(peer.session()).unwrap();
    assert_applied(&ours.transfer(Op::Write, &segment, memory.address, 0..8));
    signal(&peer, "STOP");
    let begin = Instant::now();
    let remote = ours.transfer(Op::Write, &segment, memory.address, 0..LARGE);
    assert!(matches!(remote, Remote::Unknown(_)), "{remote:?}");
    let waited = begin.elapsed();
    assert!(
        waited >= Duration::from_secs(1) && waited < Duration::from_secs(20),
        "{waited:?}"
    );
    signal(&peer, "CONT");
    // The same peer, awake again, is reached over a new connection.
    eventually("the peer is usable again", || {
        ours.transfer(Op::Write, &segment, memory.address, 0..1000)
            .is_applied()
    });
}

/// A run of `count` free ports.
fn free_ports(count: u16) -> u16 {
    for _ in 0..200 {
        let mut random = [0; 2];
        getrandom::fill(&mut random).unwrap();
        // Above the range of real engines and below the ephemeral one.
        let first = 17_100 + u16::from_le_bytes(random) % 15_000;
        let is_free = |port| TcpListener::bind(("127.0.0.1", port)).is_ok();
        if (first..first + count).all(is_free) {
            return first;
        }
    }
    panic!("no free ports");
}

/// Writes, replaces the real engine, writes again through the same segment.
fn write_across_a_restart(keeps_data_port: bool) {
    let mut peer = Peer::start();
    let relay = Relay::new(peer.session(), keeps_data_port);
    let memory = peer.allocate(1000, OLD);
    assert_eq!(peer.register(memory), 0);
    let ours = Ours::new(1000);
    ours.fill(0..1000, NEW);
    let segment = ours.engine.open_segment(&relay.session()).unwrap();
    assert_applied(&ours.transfer(Op::Write, &segment, memory.address, 0..1000));
    peer.kill();

    let mut peer = Peer::start();
    relay.replace(peer.session());
    let memory = peer.allocate(1000, OLD);
    assert_eq!(peer.register(memory), 0);
    assert_applied(&ours.transfer(Op::Write, &segment, memory.address, 0..1000));
    peer.assert_holds(memory, 0, 1000, NEW, 0);
}

// row: W8.3b, W8.3c
#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn a_real_engine_restarted_on_its_old_ports_is_reached_at_once() {
    write_across_a_restart(true);
}

// row: W6c, W13.3072
#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn a_real_engine_restarted_on_another_data_port_is_found_again() {
    write_across_a_restart(false);
}

#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn our_restarted_engine_is_reached_by_a_real_one_at_its_second_try() {
    let first = free_ports(2);
    let config = || {
        let mut config = TcpConfig::default();
        config.control_port = Some(first);
        config.data_port = Some(first + 1);
        config
    };
    let mut peer = Peer::start();
    let memory = peer.allocate(1000, NEW);
    let ours = Ours::with_config(1000, config());
    let session = ours.engine.session().to_owned();
    let registration = ours.register(Access::RemoteWrite);
    let item = [(0, ours.slab.address(), 1000)];
    assert_eq!(peer.transfer("write", &session, memory, &item), 0);
    drop(registration);
    drop(ours);

    let ours = Ours::with_config(1000, config());
    assert_eq!(ours.engine.session(), session);
    let _registration = ours.register(Access::RemoteWrite);
    let item = [(0, ours.slab.address(), 1000)];
    // A real engine does not notice that its idle connection has ended until
    // it uses it, and does not try again by itself.
    assert_eq!(peer.transfer("write", &session, memory, &item), -1);
    assert_eq!(peer.transfer("write", &session, memory, &item), 0);
    ours.assert_holds(0..1000, NEW, 0);
}

// row: W8.3a
#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn a_real_engines_connection_survives_a_pause_longer_than_any_of_our_deadlines() {
    let mut peer = Peer::start();
    let memory = peer.allocate(1000, NEW);
    let mut config = TcpConfig::default();
    config.timeouts.progress = Duration::from_millis(500);
    config.timeouts.status = Duration::from_millis(500);
    config.timeouts.control_idle = Duration::from_millis(500);
    let ours = Ours::with_config(1000, config);
    let _registration = ours.register(Access::RemoteWrite);
    let item = [(0, ours.slab.address(), 1000)];
    let session = ours.engine.session().to_owned();
    for _ in 0..2 {
        // Had we closed the connection, the second write would give -1.
        assert_eq!(peer.transfer("write", &session, memory, &item), 0);
        std::thread::sleep(Duration::from_secs(3));
    }
    assert_eq!(peer.transfer("write", &session, memory, &item), 0);
}
