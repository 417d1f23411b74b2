//! The engine over the C interface, over our own library: bytes both ways, with the native engine as the
//! peer and with itself.
//!
//! `EC_TEST_MOONCAKE_LIBRARY` names another library to be tried instead.

#[path = "program/program.rs"]
mod program;
#[path = "program/silent.rs"]
mod silent;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use mooncake_transport::ffi::{FfiConfig, FfiEngine, FfiLibrary, LibraryError, Transport};
use mooncake_transport::tcp::{TcpConfig, TcpEngine};
use mooncake_transport::{
    Access, Batch, BatchReport, Engine, EngineError, Local, Op, Reason, Remote, Task,
};
use silent::SilentPeer;
use slab_memory::HostSlab;

const LIMIT: Duration = Duration::from_secs(60);

fn library() -> FfiLibrary {
    let file = std::env::var_os("EC_TEST_MOONCAKE_LIBRARY").map_or_else(
        || program::library_dir().join("libtransfer_engine.so"),
        Into::into,
    );
    // SAFETY: our own library, or one that whoever runs the test vouches for.
    unsafe { FfiLibrary::open(file) }.expect("the library loads")
}

fn start() -> FfiEngine {
    FfiEngine::start(&library(), FfiConfig::new("127.0.0.1")).expect("an engine")
}

fn end(engine: FfiEngine) {
    assert!(engine.shut_down(Some(Instant::now() + LIMIT)));
}

fn slab(len: u64) -> Arc<HostSlab> {
    Arc::new(HostSlab::new(len).unwrap())
}

fn bytes(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64)
        .map(|at| (at.wrapping_mul(seed) >> 7) as u8 ^ seed as u8)
        .collect()
}

fn assert_holds(slab: &HostSlab, at: u64, expected: &[u8]) {
    let mut found = vec![0; expected.len()];
    slab.copy_out(at, &mut found).unwrap();
    // Printing megabytes would help nobody.
    assert!(found == expected, "the bytes differ");
}

fn settled(batch: &Batch) -> BatchReport {
    batch.wait(Some(Instant::now() + LIMIT)).expect("in time")
}

/// One transfer, to its end.
fn transfer(
    engine: &dyn Engine,
    op: Op,
    peer: &str,
    remote: u64,
    memory: &Arc<HostSlab>,
    range: std::ops::Range<u64>,
) -> Remote {
    let task = Task {
        op,
        segment: engine.open_segment(peer).unwrap(),
        remote,
        memory: memory.clone(),
        range,
        hold: Box::new(()),
    };
    let batch = engine.submit(vec![task]).unwrap();
    settled(&batch).tasks()[0].remote.clone()
}

/// `initiator` writes to and reads from `target`.
fn both_ways(initiator: &dyn Engine, target: &dyn Engine) {
    for len in [1, 7, 4_096, 65_537, (1 << 20) + 1] {
        let (source, there, back) = (slab(len + 64), slab(len + 64), slab(len + 64));
        let content = bytes(len + 3, len as usize);
        source.copy_in(13, &content).unwrap();
        let registration = target.register(there.clone(), Access::RemoteWrite).unwrap();
        let remote = there.address() + 29;
        let peer = target.session();
        let written = transfer(initiator, Op::Write, peer, remote, &source, 13..13 + len);
        assert!(written.is_applied(), "{len}: {written:?}");
        assert_holds(&there, 29, &content);
        assert_holds(&there, 0, &[0; 29]);
        let read = transfer(initiator, Op::Read, peer, remote, &back, 5..5 + len);
        assert!(read.is_applied(), "{len}: {read:?}");
        assert_holds(&back, 5, &content);
        assert_holds(&back, 5 + len, &[0; 59]);
        registration.unregister().unwrap();
        let refused = transfer(initiator, Op::Write, peer, remote, &source, 13..14);
        assert!(!refused.is_applied());
    }
}

#[test]
fn bytes_go_to_and_from_the_native_engine() {
    let (engine, native) = (start(), TcpEngine::start(TcpConfig::default()).unwrap());
    both_ways(&engine, &native);
    end(engine);
}

#[test]
fn the_native_engine_reaches_memory_behind_the_c_interface() {
    let (engine, native) = (start(), TcpEngine::start(TcpConfig::default()).unwrap());
    both_ways(&native, &engine);
    end(engine);
}

#[test]
fn two_engines_behind_the_c_interface_reach_each_other_and_themselves() {
    let (one, other) = (start(), start());
    both_ways(&one, &other);
    both_ways(&one, &one);
    end(one);
    end(other);
}

#[test]
fn batches_of_thousands_arrive_from_several_threads() {
    const COUNT: u64 = 3_000;
    const PIECE: u64 = 257;
    let (engine, native) = (start(), TcpEngine::start(TcpConfig::default()).unwrap());
    let (source, target) = (slab(2 * COUNT * PIECE), slab(2 * COUNT * PIECE));
    let content = bytes(99, (2 * COUNT * PIECE) as usize);
    source.copy_in(0, &content).unwrap();
    let _registration = native
        .register(target.clone(), Access::RemoteWrite)
        .unwrap();
    let segment = engine.open_segment(native.session()).unwrap();
    std::thread::scope(|scope| {
        for half in 0..2 {
            let (engine, source, target, segment) = (&engine, &source, &target, &segment);
            scope.spawn(move || {
                let tasks = (half * COUNT..(half + 1) * COUNT).map(|index| Task {
                    op: Op::Write,
                    segment: segment.clone(),
                    remote: target.address() + index * PIECE,
                    memory: source.clone(),
                    range: index * PIECE..(index + 1) * PIECE,
                    hold: Box::new(()),
                });
                let report = settled(&engine.submit(tasks.collect()).unwrap());
                assert!(report.is_applied(), "{:?}", report.first_failure());
            });
        }
    });
    assert_holds(&target, 0, &content);
    end(engine);
}

#[test]
fn a_refused_task_fails_and_says_no_more_than_the_library() {
    let (engine, native) = (start(), TcpEngine::start(TcpConfig::default()).unwrap());
    let memory = slab(4096);
    let remote = transfer(&engine, Op::Write, native.session(), 4096, &memory, 0..64);
    assert_eq!(remote, Remote::Unknown(Reason::Undisclosed { state: 6 }));
    // The handle stays good for what it is: tasks fail, and opening anew says why.
    let segment = engine.open_segment(native.session()).unwrap();
    let gone = native.session().to_owned();
    drop(native);
    let task = Task {
        op: Op::Read,
        segment,
        remote: 4096,
        memory,
        range: 0..64,
        hold: Box::new(()),
    };
    let report = settled(&engine.submit(vec![task]).unwrap());
    assert_eq!(
        report.tasks()[0].remote,
        Remote::Unknown(Reason::Undisclosed { state: 6 })
    );
    let error = engine.open_segment(&gone).unwrap_err();
    assert!(matches!(error, EngineError::Control { .. }), "{error:?}");
    end(engine);
}

#[test]
fn a_peer_that_stalls_leaves_the_memory_held_until_the_engine_is_gone() {
    struct Hold(Arc<AtomicBool>);
    impl Drop for Hold {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }
    let mut config = FfiConfig::new("127.0.0.1");
    config.timeouts.task = Duration::from_millis(500);
    // 64 MiB at this rate take no time.
    config.timeouts.min_bytes_per_s = 1 << 30;
    let engine = FfiEngine::start(&library(), config).unwrap();
    let peer = SilentPeer::start();
    let memory = slab(64 << 20);
    let weak = Arc::downgrade(&memory);
    let is_dropped = Arc::new(AtomicBool::new(false));
    let task = Task {
        op: Op::Write,
        segment: engine.open_segment(peer.session()).unwrap(),
        remote: 4096,
        memory,
        range: 0..64 << 20,
        hold: Box::new(Hold(Arc::clone(&is_dropped))),
    };
    let report = settled(&engine.submit(vec![task]).unwrap());
    assert_eq!(report.tasks()[0].local, Local::Held);
    assert_eq!(
        report.tasks()[0].remote,
        Remote::Unknown(Reason::TooSlow { timeout_ms: 500 })
    );
    assert!(!is_dropped.load(Ordering::SeqCst) && weak.upgrade().is_some());
    end(engine);
    assert!(is_dropped.load(Ordering::SeqCst) && weak.upgrade().is_none());
}

#[test]
fn notifications_go_both_ways() {
    let (engine, native) = (start(), TcpEngine::start(TcpConfig::default()).unwrap());
    let to_native = engine.open_segment(native.session()).unwrap();
    engine.notify(&to_native, "from C", "größer").unwrap();
    let notices = native.take_notices().unwrap().notices;
    assert_eq!(
        (&*notices[0].name, &*notices[0].message),
        ("from C", "größer")
    );
    let to_engine = native.open_segment(engine.session()).unwrap();
    native.notify(&to_engine, "to C", "").unwrap();
    native.notify(&to_engine, "", "two").unwrap();
    let notices = engine.take_notices().unwrap().notices;
    let texts: Vec<_> = notices.iter().map(|n| (&*n.name, &*n.message)).collect();
    assert_eq!(texts, [("to C", ""), ("", "two")]);
    end(engine);
}

#[test]
fn names_that_lead_nowhere_and_devices_that_are_not_there_are_typed_errors() {
    let engine = start();
    let error = engine.open_segment("127.0.0.1:1").unwrap_err();
    assert!(
        matches!(&error, EngineError::Control { peer, .. } if peer == "127.0.0.1:1"),
        "{error:?}"
    );
    end(engine);
    let mut config = FfiConfig::new("127.0.0.1");
    config.vet_peers = false;
    let engine = FfiEngine::start(&library(), config).unwrap();
    let error = engine.open_segment("127.0.0.1:1").unwrap_err();
    let expected = LibraryError::Code {
        call: "openSegment",
        code: -1,
    };
    assert_eq!(error, EngineError::Library { source: expected });
    end(engine);
    let mut config = FfiConfig::new("127.0.0.1");
    config.transport = Transport::RdmaOver(r#"{"cpu:0":[["no_such_device"],[]]}"#.to_owned());
    let error = FfiEngine::start(&library(), config).unwrap_err();
    let expected = LibraryError::Null {
        call: "installTransport",
    };
    assert_eq!(error, EngineError::Library { source: expected });
}

#[test]
fn a_file_that_is_no_such_library_is_a_typed_error() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("libtransfer_engine.so");
    // SAFETY: neither is a library whose initialisers could do harm.
    let open = |file: &std::path::Path| unsafe { FfiLibrary::open(file) }.unwrap_err();
    assert_eq!(open(&file), LibraryError::Missing { file: file.clone() });
    std::fs::write(&file, "x").unwrap();
    assert!(matches!(open(&file), LibraryError::NotALibrary { .. }));
    assert!(matches!(
        open("libc.so.6".as_ref()),
        LibraryError::MissingSymbol {
            symbol: "createTransferEngine",
            ..
        }
    ));
}

/// Set in the process that the test below starts.
const INNER: &str = "MOONCAKE_CAPI_TEST_INNER";

#[test]
fn an_engine_is_unusable_after_a_fork_and_says_so() {
    if std::env::var_os(INNER).is_none() {
        // In a process of its own: a fork of the test harness would be one of all its threads.
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--test-threads", "1", "--nocapture"])
            .arg("an_engine_is_unusable_after_a_fork_and_says_so")
            .env(INNER, "1")
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{text}");
        assert!(text.contains("the child saw what it should"), "{text}");
        return;
    }
    let engine = start();
    let native = TcpEngine::start(TcpConfig::default()).unwrap();
    let segment = engine.open_segment(native.session()).unwrap();
    let memory = slab(4096);
    let registration = engine
        .register(memory.clone(), Access::RemoteWrite)
        .unwrap();
    // SAFETY: the child calls what is refused before any lock that another thread may hold, and then leaves
    // without unwinding.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let forked = EngineError::Library {
            source: LibraryError::Forked,
        };
        let is_told = engine.open_segment("127.0.0.1:5").err() == Some(forked.clone())
            && engine.notify(&segment, "a", "b").err() == Some(forked.clone())
            && engine.take_notices().err() == Some(forked.clone())
            && engine.register(memory, Access::RemoteWrite).err() == Some(forked.clone())
            && engine.submit(Vec::new()).err().map(|refused| refused.cause) == Some(forked.clone())
            && registration.unregister().err() == Some(forked)
            && !engine.shut_down(None);
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(if is_told { 5 } else { 6 }) };
    }
    let mut status = 0;
    // SAFETY: waits for our own child.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 5);
    registration.unregister().unwrap();
    end(engine);
    println!("the child saw what it should");
}
