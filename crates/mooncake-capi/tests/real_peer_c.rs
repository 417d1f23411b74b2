//! A C program over our library and the real engine move bytes both ways, each of both starting it.

#[path = "../../mooncake-transport/tests/peer/harness.rs"]
mod harness;
#[path = "program/program.rs"]
mod program;

use harness::Peer;
use program::{Program, Talk};
use serde_json::json;

const SEED: u64 = 0xC0FF_EE00_0000_0009;
const BACKGROUND: u64 = 3;
const SIZES: [u64; 5] = [1, 4_097, 65_537, (1 << 20) + 1, (8 << 20) - 5];

/// The C program, its session and the address of its memory.
fn start(program: &Program) -> (Talk, String, u64) {
    let mut talk = program.start();
    let line = talk.answer();
    let (session, address) = line.split_once(' ').expect("a session and an address");
    let (session, address) = (session.to_owned(), address.parse().unwrap());
    (talk, session, address)
}

#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn a_c_program_writes_to_and_reads_from_a_real_engine() {
    let program = Program::compile("peer");
    let (mut c, _, _) = start(&program);
    let mut peer = Peer::start();
    for len in SIZES {
        for pieces in [1, 7] {
            let target = peer.allocate(len, BACKGROUND);
            assert_eq!(peer.register(target), 0);
            assert_eq!(c.ask(&format!("fill {len} {SEED}")), "filled");
            let request =
                |op: &str| format!("{op} {} {} {len} {pieces}", peer.session(), target.address);
            // Pieces of no bytes are done without traffic.
            assert_eq!(c.ask(&request("write")), "0", "{len}");
            assert_eq!(c.ask(&format!("fill {len} {BACKGROUND}")), "filled");
            assert_eq!(c.ask(&request("read")), "0", "{len}");
            assert_eq!(c.ask(&format!("check {len} {SEED}")), "equal");
            peer.assert_holds(target, 0, len, SEED, 0);
            assert_eq!(peer.unregister(target), 0);
        }
    }
    assert_eq!(c.end(), Some(0));
}

#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn a_real_engine_writes_to_and_reads_from_a_c_program() {
    let program = Program::compile("peer");
    let (mut c, session, address) = start(&program);
    let mut peer = Peer::start();
    for len in SIZES {
        let source = peer.allocate(len, SEED);
        let sink = peer.allocate(len, BACKGROUND);
        assert_eq!(c.ask(&format!("fill {len} {BACKGROUND}")), "filled");
        assert_eq!(
            peer.transfer("write", &session, source, &[(0, address, len)]),
            0
        );
        assert_eq!(c.ask(&format!("check {len} {SEED}")), "equal");
        assert_eq!(
            peer.transfer("read", &session, sink, &[(0, address, len)]),
            0
        );
        peer.assert_holds(sink, 0, len, SEED, 0);
    }
    // Past the end of what is registered.
    let past = address + (8 << 20);
    let source = peer.allocate(16, SEED);
    assert_eq!(
        peer.transfer("write", &session, source, &[(0, past, 16)]),
        -1
    );
    assert_eq!(c.end(), Some(0));
}

#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn a_real_engine_refuses_a_c_program_an_address_that_is_not_registered() {
    let program = Program::compile("peer");
    let (mut c, _, _) = start(&program);
    let mut peer = Peer::start();
    let memory = peer.allocate(4096, BACKGROUND);
    let request = format!("write {} {} 4096 1", peer.session(), memory.address);
    assert_eq!(c.ask(&request), "1");
    assert_eq!(peer.register(memory), 0);
    assert_eq!(c.ask(&request), "0");
    assert_eq!(c.end(), Some(0));
}

#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn a_c_program_and_a_real_engine_notify_each_other() {
    let program = Program::compile("peer");
    let (mut c, session, address) = start(&program);
    let mut peer = Peer::start();
    let request = format!("notify {} hello", peer.session());
    assert_eq!(c.ask(&request), "0");
    assert_eq!(
        peer.call(json!({"do": "notifies"}))["notifies"],
        json!([["from C", "hello"]])
    );
    let memory = peer.allocate(4096, SEED);
    let answer = peer.call(json!({
        "do": "transfer", "op": "write", "session": session, "memory": memory.index,
        "items": [[0, address, 4096]], "notify": ["from Python", "written"],
    }));
    assert_eq!(answer["code"], 0);
    assert_eq!(c.ask("notices"), "from Python=written;0");
    assert_eq!(c.ask(&format!("check 4096 {SEED}")), "equal");
    assert_eq!(
        peer.call(json!({"do": "probe", "session": session}))["code"],
        0
    );
    assert_eq!(c.end(), Some(0));
}
