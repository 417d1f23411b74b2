//! A C program over our library and the real engine move bytes both ways, each of both starting it; and so does the
//! wrapper over our library.

#[path = "../../mooncake-transport/tests/peer/harness.rs"]
mod harness;
#[path = "program/program.rs"]
mod program;

use std::sync::Arc;
use std::time::{Duration, Instant};

use harness::Peer;
use mooncake_transport::ffi::{FfiConfig, FfiEngine, FfiLibrary};
use mooncake_transport::{Engine, Op, Task};
use program::{Program, Talk, library_dir};
use serde_json::json;
use slab_memory::{HostSlab, Memory};

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

// row: W12.11.4
#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn the_wrapper_looks_at_a_real_engines_descriptor_and_reaches_it() {
    const LEN: u64 = 65_537;
    // SAFETY: our own library.
    let library = unsafe { FfiLibrary::open(library_dir().join("libtransfer_engine.so")) }.unwrap();
    let config = FfiConfig::new("127.0.0.1");
    assert!(config.vet_peers);
    let engine = FfiEngine::start(&library, config).unwrap();
    let mut peer = Peer::start();
    // The second time the segment is known.
    for _ in 0..2 {
        let source = peer.allocate(LEN, SEED);
        assert_eq!(peer.register(source), 0);
        let segment = engine.open_segment(peer.session()).unwrap();
        let sink = Arc::new(HostSlab::new(LEN).unwrap());
        let memory: Arc<dyn Memory> = sink.clone();
        let task = Task {
            op: Op::Read,
            segment: segment.clone(),
            remote: source.address,
            memory: Arc::clone(&memory),
            range: 0..LEN,
            hold: Box::new(()),
        };
        let back = peer.allocate(LEN, BACKGROUND);
        assert_eq!(peer.register(back), 0);
        let deadline = Some(Instant::now() + Duration::from_secs(60));
        let read = engine.submit(vec![task]).unwrap().wait(deadline);
        assert!(read.expect("in time").is_applied());
        let task = Task {
            op: Op::Write,
            segment,
            remote: back.address,
            memory,
            range: 0..LEN,
            hold: Box::new(()),
        };
        let written = engine.submit(vec![task]).unwrap().wait(deadline);
        assert!(written.expect("in time").is_applied());
        peer.assert_holds(back, 0, LEN, SEED, 0);
    }
    assert!(engine.shut_down(Some(Instant::now() + Duration::from_secs(60))));
}
