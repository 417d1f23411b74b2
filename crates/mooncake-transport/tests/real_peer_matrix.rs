//! Bytes between our engine and a real one: both roles of both, reads and
//! writes, sizes around every boundary of either implementation.
//!
//! Each range lies at an odd offset between guards. What arrives at the real
//! engine is compared there, with bytes it makes from the seed; the guards and
//! the source are compared too.
#![cfg(feature = "tcp")]

#[path = "peer/harness.rs"]
mod harness;
#[path = "peer/ours.rs"]
mod ours;
#[path = "peer/stream.rs"]
mod stream;

use harness::Peer;
use mooncake_transport::{Access, Engine, Op};
use ours::{
    CONTENT, GUARD, Ours, assert_applied, assert_peer_holds_content, assert_we_hold_content,
    our_memory, peer_memory, settled,
};
use serde_json::json;

fn we_write(len: u64) {
    let mut peer = Peer::start();
    let memory = peer_memory(&mut peer, len, false);
    let ours = our_memory(len, true);
    let segment = ours.engine.open_segment(peer.session()).unwrap();
    let remote = ours.transfer(
        Op::Write,
        &segment,
        memory.address + GUARD,
        GUARD..GUARD + len,
    );
    assert_applied(&remote);
    assert_peer_holds_content(&mut peer, memory, len);
    assert_we_hold_content(&ours, len);
}

fn we_read(len: u64) {
    let mut peer = Peer::start();
    let memory = peer_memory(&mut peer, len, true);
    let ours = our_memory(len, false);
    let segment = ours.engine.open_segment(peer.session()).unwrap();
    let remote = ours.transfer(
        Op::Read,
        &segment,
        memory.address + GUARD,
        GUARD..GUARD + len,
    );
    assert_applied(&remote);
    assert_we_hold_content(&ours, len);
    assert_peer_holds_content(&mut peer, memory, len);
}

fn the_peer_writes(len: u64) {
    let mut peer = Peer::start();
    let memory = peer_memory(&mut peer, len, true);
    let ours = our_memory(len, false);
    let _registration = ours.register(Access::RemoteWrite);
    let there = ours.slab.address() + GUARD;
    assert_eq!(
        peer.transfer(
            "write",
            ours.engine.session(),
            memory,
            &[(GUARD, there, len)]
        ),
        0
    );
    assert_we_hold_content(&ours, len);
    assert_peer_holds_content(&mut peer, memory, len);
}

fn the_peer_reads(len: u64) {
    let mut peer = Peer::start();
    let memory = peer_memory(&mut peer, len, false);
    let ours = our_memory(len, true);
    let _registration = ours.register(Access::RemoteRead);
    let there = ours.slab.address() + GUARD;
    assert_eq!(
        peer.transfer(
            "read",
            ours.engine.session(),
            memory,
            &[(GUARD, there, len)]
        ),
        0
    );
    assert_peer_holds_content(&mut peer, memory, len);
    assert_we_hold_content(&ours, len);
}

macro_rules! sizes {
    ($($name:ident: $len:expr,)+) => {
        mod our_writes_arrive_in_real_memory {
            $(#[test]
            #[ignore = "needs-network: the Mooncake wheel"]
            fn $name() { super::we_write($len); })+
        }
        mod our_reads_bring_real_memory {
            $(#[test]
            #[ignore = "needs-network: the Mooncake wheel"]
            fn $name() { super::we_read($len); })+
        }
        mod real_writes_arrive_in_our_memory {
            $(#[test]
            #[ignore = "needs-network: the Mooncake wheel"]
            fn $name() { super::the_peer_writes($len); })+
        }
        mod real_reads_bring_our_memory {
            $(#[test]
            #[ignore = "needs-network: the Mooncake wheel"]
            fn $name() { super::the_peer_reads($len); })+
        }
    };
}

sizes! {
    bytes_1: 1,
    bytes_2: 2,
    bytes_7: 7,
    bytes_8: 8,
    bytes_9: 9,
    bytes_255: 255,
    bytes_256: 256,
    bytes_257: 257,
    bytes_4095: 4_095,
    bytes_4096: 4_096,
    bytes_4097: 4_097,
    bytes_65535: 65_535,
    bytes_65536: 65_536,
    bytes_65537: 65_537,
    mib_1_less_1: (1 << 20) - 1,
    mib_1: 1 << 20,
    mib_1_and_1: (1 << 20) + 1,
    mib_8_and_3: (8 << 20) + 3,
    mib_64: 64 << 20,
}

/// Cuts `len` bytes into pieces of uneven sizes.
fn pieces(len: u64, count: u64) -> Vec<(u64, u64)> {
    let mut cuts: Vec<u64> = (1..count).map(|i| i * len / count + i % 7).collect();
    cuts.insert(0, 0);
    cuts.push(len);
    cuts.windows(2)
        .map(|pair| (pair[0], pair[1] - pair[0]))
        .collect()
}

#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn a_batch_of_1000_uneven_writes_fills_real_memory_without_a_gap() {
    let len = (4 << 20) + 13;
    let mut peer = Peer::start();
    let memory = peer_memory(&mut peer, len, false);
    let ours = our_memory(len, true);
    let segment = ours.engine.open_segment(peer.session()).unwrap();
    let tasks = pieces(len, 1000)
        .into_iter()
        .map(|(at, len)| {
            let range = GUARD + at..GUARD + at + len;
            ours.task(Op::Write, &segment, memory.address + GUARD + at, range)
        })
        .collect();
    let report = settled(&ours.submit(tasks));
    assert!(report.is_applied(), "{:?}", report.first_failure());
    assert_eq!(report.tasks().len(), 1000);
    assert_peer_holds_content(&mut peer, memory, len);
}

#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn a_batch_of_1000_uneven_reads_brings_real_memory_without_a_gap() {
    let len = (4 << 20) + 13;
    let mut peer = Peer::start();
    let memory = peer_memory(&mut peer, len, true);
    let ours = our_memory(len, false);
    let segment = ours.engine.open_segment(peer.session()).unwrap();
    let tasks = pieces(len, 1000)
        .into_iter()
        .map(|(at, len)| {
            let range = GUARD + at..GUARD + at + len;
            ours.task(Op::Read, &segment, memory.address + GUARD + at, range)
        })
        .collect();
    let report = settled(&ours.submit(tasks));
    assert!(report.is_applied(), "{:?}", report.first_failure());
    assert_we_hold_content(&ours, len);
}

#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn real_batches_of_1000_writes_and_1000_reads_go_through_our_memory() {
    let len = (4 << 20) + 13;
    let mut peer = Peer::start();
    let source = peer_memory(&mut peer, len, true);
    let sink = peer_memory(&mut peer, len, false);
    let ours = our_memory(len, false);
    let _registration = ours.register(Access::RemoteWrite);
    let base = ours.slab.address() + GUARD;
    let items: Vec<_> = pieces(len, 1000)
        .into_iter()
        .map(|(at, len)| (GUARD + at, base + at, len))
        .collect();
    assert_eq!(
        peer.transfer("write", ours.engine.session(), source, &items),
        0
    );
    assert_we_hold_content(&ours, len);
    assert_eq!(
        peer.transfer("read", ours.engine.session(), sink, &items),
        0
    );
    assert_peer_holds_content(&mut peer, sink, len);
}

#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn eight_batches_at_once_from_four_threads_arrive_each_in_its_place() {
    const BATCH: u64 = (512 << 10) + 1;
    let mut peer = Peer::start();
    let len = 8 * BATCH;
    let memory = peer_memory(&mut peer, len, false);
    let ours = our_memory(len, true);
    let segment = ours.engine.open_segment(peer.session()).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (ours, segment) = (&ours, &segment);
            scope.spawn(move || {
                let batches: Vec<_> = [2 * thread, 2 * thread + 1]
                    .map(|index| {
                        let tasks = pieces(BATCH, 20).into_iter().map(|(at, len)| {
                            let at = GUARD + index * BATCH + at;
                            ours.task(Op::Write, segment, memory.address + at, at..at + len)
                        });
                        ours.submit(tasks.collect())
                    })
                    .into();
                for batch in &batches {
                    assert!(settled(batch).is_applied());
                }
            });
        }
    });
    assert_peer_holds_content(&mut peer, memory, len);
}

#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn both_sides_write_into_each_other_at_once() {
    let len = (16 << 20) + 5;
    let mut peer = Peer::start();
    let source = peer_memory(&mut peer, len, true);
    let sink = peer_memory(&mut peer, len, false);
    let ours = Ours::new(2 * (len + 2 * GUARD));
    ours.fill(0..len, CONTENT);
    let _registration = ours.register(Access::RemoteWrite);
    let there = ours.slab.address() + len + GUARD;
    peer.call(json!({
        "do": "begin_transfer", "op": "write", "session": ours.engine.session(),
        "memory": source.index, "items": [[GUARD, there, len]],
    }));
    let segment = ours.engine.open_segment(peer.session()).unwrap();
    assert_applied(&ours.transfer(Op::Write, &segment, sink.address + GUARD, 0..len));
    assert_eq!(
        peer.call(json!({"do": "join_transfers"}))["codes"],
        json!([0])
    );
    ours.assert_holds(len + GUARD..2 * len + GUARD, CONTENT, 0);
    assert_peer_holds_content(&mut peer, sink, len);
}

// row: W7.4d
#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn a_transfer_of_no_bytes_succeeds_on_both_sides() {
    let mut peer = Peer::start();
    let memory = peer_memory(&mut peer, 64, false);
    let ours = our_memory(64, true);
    let _registration = ours.register(Access::RemoteWrite);
    let segment = ours.engine.open_segment(peer.session()).unwrap();
    // A real target rejects size 0, so this only passes if nothing is sent.
    for op in [Op::Write, Op::Read] {
        assert_applied(&ours.transfer(op, &segment, memory.address, GUARD..GUARD));
    }
    let there = ours.slab.address();
    assert_eq!(
        peer.transfer("write", ours.engine.session(), memory, &[(0, there, 0)]),
        0
    );
    assert_applied(&ours.transfer(
        Op::Write,
        &segment,
        memory.address + GUARD,
        GUARD..GUARD + 64,
    ));
    assert_peer_holds_content(&mut peer, memory, 64);
}
