//! The wrapper over a library that does what the tests say.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use mooncake_sys as sys;
use slab_memory::{HostSlab, Memory};

use super::fake::{self, Fake};
use super::*;
use crate::batch::{BatchReport, Local};
use crate::wire::data::Op;

const LIMIT: Duration = Duration::from_secs(20);

struct Fixture {
    engine: FfiEngine,
    fake: Arc<Fake>,
    slab: Arc<HostSlab>,
    segment: Segment,
}

fn config() -> FfiConfig {
    static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let mut config = FfiConfig::new(format!("fake-{}", NEXT.fetch_add(1, Ordering::SeqCst)));
    // Nobody listens behind the names that the tests open.
    config.vet_peers = false;
    config
}

fn start_with(change: impl FnOnce(&mut FfiConfig)) -> Fixture {
    let mut config = config();
    change(&mut config);
    let name = config.local_name.clone();
    let engine = FfiEngine::start(&fake::library(fake::functions()), config).unwrap();
    let segment = engine.open_segment("127.0.0.1:7").unwrap();
    Fixture {
        engine,
        fake: Fake::of(&name),
        slab: Arc::new(HostSlab::new(1 << 20).unwrap()),
        segment,
    }
}

fn start() -> Fixture {
    start_with(|_| {})
}

/// Says when it is dropped.
struct Hold(Arc<AtomicBool>);

impl Drop for Hold {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

impl Fixture {
    fn task(&self, op: Op, at: u64, len: u64) -> (Task, Arc<AtomicBool>) {
        let dropped = Arc::new(AtomicBool::new(false));
        let task = Task {
            op,
            segment: self.segment.clone(),
            remote: 0x7000_0000 + at,
            memory: self.slab.clone(),
            range: at..at + len,
            hold: Box::new(Hold(Arc::clone(&dropped))),
        };
        (task, dropped)
    }

    fn submit_one(&self) -> (Batch, Arc<AtomicBool>) {
        let (task, dropped) = self.task(Op::Write, 64, 100);
        (self.engine.submit(vec![task]).unwrap(), dropped)
    }

    fn set_initial(&self, state: i32) {
        self.fake.state.lock().unwrap().initial = state;
    }

    /// Ends the engine, after which the library must have been used as it bears.
    fn end(self) {
        assert!(self.engine.shut_down(Some(Instant::now() + LIMIT)));
        self.fake.assert_no_violations();
        assert_eq!(self.fake.state.lock().unwrap().destroyed, 1);
    }
}

fn settled(batch: &Batch) -> BatchReport {
    batch.wait(Some(Instant::now() + LIMIT)).expect("in time")
}

fn library_error(error: EngineError) -> LibraryError {
    match error {
        EngineError::Library { source } => source,
        other => panic!("{other:?}"),
    }
}

#[test]
fn requests_are_passed_as_they_are_and_each_settles_as_the_library_says() {
    let f = start();
    let (write, write_dropped) = f.task(Op::Write, 64, 100);
    let (read, read_dropped) = f.task(Op::Read, 5_000, 7);
    let (empty, empty_dropped) = f.task(Op::Read, 9, 0);
    let batch = f.engine.submit(vec![write, read, empty]).unwrap();
    assert!(empty_dropped.load(Ordering::SeqCst));
    f.fake
        .until("both are submitted", |state| state.submitted.len() == 2);
    {
        let state = f.fake.state.lock().unwrap();
        let [write, read] = &state.submitted[..] else {
            panic!("two requests");
        };
        let base = f.slab.address();
        assert_eq!((write.opcode, read.opcode), (1, 0));
        assert_eq!((write.source, read.source), (base + 64, base + 5_000));
        assert_eq!((write.segment, read.segment), (7, 7));
        assert_eq!((write.remote, read.remote), (0x7000_0040, 0x7000_1388));
        assert_eq!((write.len, read.len), (100, 7));
    }
    f.fake.set_task(1, 6);
    f.fake
        .until("the first batch is freed", |state| state.freed == 1);
    assert!(batch.poll().is_none());
    f.fake.set_task(0, 4);
    let report = settled(&batch);
    assert!(report.tasks()[0].remote.is_applied());
    assert_eq!(
        report.tasks()[1].remote,
        Remote::Unknown(Reason::Undisclosed { state: 6 })
    );
    assert!(report.tasks()[2].remote.is_applied());
    assert!(report.tasks().iter().all(|task| task.local == Local::Quiet));
    assert!(write_dropped.load(Ordering::SeqCst) && read_dropped.load(Ordering::SeqCst));
    f.fake
        .until("both batches are freed", |state| state.freed == 2);
    f.end();
}

// row: W12.11.4
#[test]
fn a_descriptor_that_would_end_the_process_is_refused_before_the_library_asks() {
    let mut config = config();
    config.vet_peers = true;
    let name = config.local_name.clone();
    let engine = FfiEngine::start(&fake::library(fake::functions()), config).unwrap();
    let fake = Fake::of(&name);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let peer = listener.local_addr().unwrap().to_string();
    let answers = [r#"{"tcp_data_port":"1"}"#, "{}"];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            use std::io::{Read, Write};
            for answer in answers {
                let (mut stream, _) = listener.accept().unwrap();
                let mut request = vec![0; 8 + 1 + "null".len()];
                stream.read_exact(&mut request).unwrap();
                let reply = crate::wire::control::encode_frame(
                    crate::wire::control::FrameKind::Metadata,
                    answer.as_bytes(),
                );
                stream.write_all(&reply).unwrap();
                // Until the other side closes.
                let _ = stream.read(&mut [0]);
            }
        });
        let error = engine.open_segment(&peer).unwrap_err();
        assert!(
            matches!(&error, EngineError::Descriptor { peer: named, .. } if *named == peer),
            "{error:?}"
        );
        assert!(fake.state.lock().unwrap().opened.is_empty());
        engine.open_segment(&peer).unwrap();
        assert_eq!(fake.state.lock().unwrap().opened, [(peer.clone(), false)]);
    });
    drop(listener);
    let error = engine.open_segment("127.0.0.1:1").unwrap_err();
    assert!(matches!(error, EngineError::Control { .. }), "{error:?}");
    assert!(engine.shut_down(Some(Instant::now() + LIMIT)));
    fake.assert_no_violations();
}

#[test]
fn a_positive_code_of_submit_is_a_failure_and_nothing_stays() {
    let f = start();
    f.fake.submit_code.store(8, Ordering::SeqCst);
    let (batch, dropped) = f.submit_one();
    let report = settled(&batch);
    assert_eq!(
        report.tasks()[0].remote,
        Remote::Ended(Reason::NotTaken { code: 8 })
    );
    assert!(dropped.load(Ordering::SeqCst));
    f.fake
        .until("the empty batch is freed", |state| state.freed == 1);
    // The segment may be out of date, and is fetched again.
    f.fake.submit_code.store(0, Ordering::SeqCst);
    f.set_initial(4);
    f.engine.open_segment("//127.0.0.1:7").unwrap();
    f.engine.open_segment("127.0.0.1:7").unwrap();
    let opened = f.fake.state.lock().unwrap().opened.clone();
    let name = "127.0.0.1:7".to_owned();
    assert_eq!(opened, [(name.clone(), false), (name, true)]);
    assert!(settled(&f.submit_one().0).is_applied());
    f.end();
}

#[test]
fn a_state_that_is_no_end_settles_at_the_deadline_and_the_hold_stays_until_the_end() {
    const STATES: [i32; 6] = [0, 1, 2, 3, 5, 77];
    let f = start_with(|config| config.timeouts.task = Duration::from_millis(700));
    let (tasks, dropped): (Vec<_>, Vec<_>) = (0..6).map(|at| f.task(Op::Write, at, 1)).unzip();
    let batches: Vec<_> = tasks
        .into_iter()
        .map(|task| f.engine.submit(vec![task]).unwrap())
        .collect();
    f.fake
        .until("they are submitted", |state| state.submitted.len() == 6);
    for (index, state) in STATES.into_iter().enumerate() {
        f.fake.set_task(index, state);
    }
    for (state, batch) in STATES.iter().zip(&batches) {
        let report = settled(batch);
        assert_eq!(report.tasks()[0].local, Local::Held, "{state}");
        assert_eq!(
            report.tasks()[0].remote,
            Remote::Unknown(Reason::TooSlow { timeout_ms: 700 })
        );
    }
    for (index, dropped) in dropped.iter().enumerate() {
        assert!(!dropped.load(Ordering::SeqCst), "{index}");
        f.fake.set_task(index, 4);
    }
    f.fake
        .until("the batches are freed", |state| state.freed == 6);
    f.end();
    assert!(dropped.iter().all(|dropped| dropped.load(Ordering::SeqCst)));
}

#[test]
fn shutting_down_destroys_first_and_lets_go_of_memory_afterwards() {
    let f = start();
    let (batch, dropped) = f.submit_one();
    f.fake
        .until("it is submitted", |state| state.submitted.len() == 1);
    let weak = Arc::downgrade(&f.slab);
    let Fixture {
        engine,
        fake,
        slab,
        segment,
    } = f;
    drop((slab, segment));
    assert!(weak.upgrade().is_some());
    // A call that is running holds it up.
    fake.block("genNotifyInEngine");
    let engine = Arc::new(engine);
    let caller = {
        let engine = Arc::clone(&engine);
        let segment = engine.open_segment("127.0.0.1:7").unwrap();
        std::thread::spawn(move || engine.notify(&segment, "a", "b"))
    };
    fake.until("it is in the library", |state| state.stuck == 1);
    let core = Arc::clone(&engine.core);
    core.close();
    std::thread::sleep(Duration::from_millis(60));
    assert_eq!(fake.state.lock().unwrap().destroyed, 0);
    assert!(batch.poll().is_none() && !dropped.load(Ordering::SeqCst));
    fake.unblock("genNotifyInEngine");
    caller.join().unwrap().unwrap();
    assert!(core.wait_ended(Some(Instant::now() + LIMIT)));
    assert_eq!(fake.state.lock().unwrap().destroyed, 1);
    let report = settled(&batch);
    assert_eq!(report.tasks()[0].remote, Remote::Unknown(Reason::ShutDown));
    assert!(dropped.load(Ordering::SeqCst) && weak.upgrade().is_none());
    assert_eq!(
        engine.open_segment("127.0.0.1:8").unwrap_err(),
        EngineError::ShutDown
    );
    assert!(engine.take_notices().is_err());
    fake.assert_no_violations();
}

#[test]
fn a_call_that_blocks_holds_up_neither_its_caller_nor_other_peers() {
    let f = start_with(|config| {
        config.timeouts.task = Duration::from_millis(700);
        config.timeouts.call = Duration::from_millis(300);
        config.limits.calls_max = 1;
    });
    f.fake.block("submitTransfer");
    // These return although the call does not.
    let (batch, dropped) = f.submit_one();
    f.fake
        .until("it is in the library", |state| state.stuck == 1);
    let (waiting, waiting_dropped) = f.submit_one();
    let report = settled(&batch);
    assert_eq!(report.tasks()[0].local, Local::Held);
    assert!(!dropped.load(Ordering::SeqCst));
    // The second one was never handed over.
    let report = settled(&waiting);
    assert_eq!(report.tasks()[0].local, Local::Quiet);
    assert_eq!(
        report.tasks()[0].remote,
        Remote::Ended(Reason::TooSlow { timeout_ms: 700 })
    );
    assert!(waiting_dropped.load(Ordering::SeqCst));

    f.fake.block("openSegment");
    let error = library_error(f.engine.open_segment("127.0.0.1:9").unwrap_err());
    assert!(
        matches!(
            error,
            LibraryError::CallTimeout {
                timeout_ms: 300,
                ..
            }
        ),
        "{error:?}"
    );
    let error = library_error(f.engine.open_segment("127.0.0.1:10").unwrap_err());
    assert_eq!(error, LibraryError::TooManyCalls { max: 1 });
    f.fake.unblock("openSegment");
    f.set_initial(4);
    f.fake.unblock("submitTransfer");
    f.fake
        .until("the late task has ended", |state| state.freed == 1);
    f.end();
    assert!(dropped.load(Ordering::SeqCst));
}

#[test]
fn peers_that_do_not_answer_leave_threads_for_others() {
    let f = start_with(|config| config.limits.submit_threads = 2);
    f.set_initial(4);
    f.fake.block("submitTransfer");
    let (stuck, _) = f.submit_one();
    f.fake
        .until("it is in the library", |state| state.stuck == 1);
    // One call for a peer at a time: more tasks for it do not occupy the second thread.
    let others: Vec<_> = (0..50).map(|_| f.submit_one().0).collect();
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(
        locked(&f.engine.core.desks[0]).len() + locked(&f.engine.core.desks[1]).len(),
        1
    );
    f.fake.unblock("submitTransfer");
    assert!(settled(&stuck).is_applied());
    assert!(others.iter().all(|batch| settled(batch).is_applied()));
    f.end();
}

#[test]
fn the_library_never_has_more_tasks_of_a_peer_than_allowed() {
    let f = start_with(|config| config.limits.in_flight_per_peer = 300);
    // Another spelling of the same peer counts with it.
    let alias = f.engine.open_segment("localhost:7").unwrap();
    let batches: Vec<_> = (0..10)
        .map(|_| {
            let tasks = (0..500).map(|index| {
                let (mut task, _) = f.task(Op::Write, index, 1);
                if index % 5 == 0 {
                    task.segment = alias.clone();
                }
                task
            });
            f.engine.submit(tasks.collect()).unwrap()
        })
        .collect();
    let fake = Arc::clone(&f.fake);
    let finisher = std::thread::spawn(move || {
        let mut ended = 0;
        while ended < 5_000 {
            let submitted = fake.state.lock().unwrap().submitted.len();
            for index in ended..submitted {
                fake.set_task(index, 4);
            }
            ended = submitted;
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    for batch in &batches {
        assert!(settled(batch).is_applied());
    }
    finisher.join().unwrap();
    let state = f.fake.state.lock().unwrap();
    assert!(state.in_flight_max <= 300, "{}", state.in_flight_max);
    assert!(state.largest_call <= 128 && state.largest_call > 1);
    drop(state);
    f.end();
}

#[test]
fn registered_memory_is_kept_until_the_engine_is_gone() {
    let f = start();
    let memory: Arc<dyn Memory> = Arc::new(HostSlab::new(8192).unwrap());
    let weak = Arc::downgrade(&memory);
    let (address, len) = (memory.address(), memory.len());
    let registration = f
        .engine
        .register(Arc::clone(&memory), Access::RemoteWrite)
        .unwrap();
    assert_eq!(
        f.fake.state.lock().unwrap().registered,
        [(address, 8192, "*".to_owned(), 1)]
    );
    let overlap = f
        .engine
        .register(Arc::clone(&memory), Access::RemoteWrite)
        .unwrap_err();
    assert!(matches!(overlap, EngineError::Overlap { .. }));
    registration.unregister().unwrap();
    assert!(f.fake.state.lock().unwrap().registered.is_empty());
    // Again, as often as one likes.
    drop(
        f.engine
            .register(Arc::clone(&memory), Access::RemoteWrite)
            .unwrap(),
    );
    drop(memory);
    assert!(weak.upgrade().is_some(), "{len} bytes may still be written");
    f.end();
    assert!(weak.upgrade().is_none());
}

#[test]
fn memory_that_the_library_does_not_forget_is_leaked_and_its_place_is_lost() {
    let f = start();
    let memory: Arc<dyn Memory> = Arc::new(HostSlab::new(8192).unwrap());
    let weak = Arc::downgrade(&memory);
    f.fake.unregister_code.store(-200, Ordering::SeqCst);
    let registration = f
        .engine
        .register(Arc::clone(&memory), Access::RemoteWrite)
        .unwrap();
    let error = library_error(registration.unregister().unwrap_err());
    let expected = LibraryError::Code {
        call: "unregisterLocalMemory",
        code: -200,
    };
    assert_eq!(error, expected);
    let again = f.engine.register(Arc::clone(&memory), Access::RemoteWrite);
    assert!(matches!(again, Err(EngineError::Overlap { .. })));
    drop(memory);
    f.end();
    assert!(weak.upgrade().is_some());
}

#[test]
fn registering_is_checked_before_the_library_sees_it() {
    let f = start();
    let memory: Arc<dyn Memory> = Arc::new(HostSlab::new(8192).unwrap());
    let error = f
        .engine
        .register(Arc::clone(&memory), Access::RemoteRead)
        .unwrap_err();
    assert!(matches!(error, EngineError::Unsupported { .. }));
    let careless = start_with(|config| config.danger_remote_read_lets_write = true);
    let registration = careless
        .engine
        .register(Arc::clone(&memory), Access::RemoteRead)
        .unwrap();
    assert_eq!(careless.fake.state.lock().unwrap().registered[0].3, 1);
    drop(registration);
    careless.end();
    let local = f
        .engine
        .register(Arc::clone(&memory), Access::Local)
        .unwrap();
    drop(local);
    assert!(f.fake.state.lock().unwrap().registered.is_empty());
    f.fake.register_code.store(-7, Ordering::SeqCst);
    let error = f
        .engine
        .register(Arc::clone(&memory), Access::RemoteWrite)
        .unwrap_err();
    assert!(matches!(
        library_error(error),
        LibraryError::Code { code: -7, .. }
    ));
    f.fake.register_code.store(0, Ordering::SeqCst);
    drop(f.engine.register(memory, Access::RemoteWrite).unwrap());
    f.end();
}

#[test]
fn rdma_registers_local_memory_too_and_installs_what_was_asked_for() {
    let f = start_with(|config| config.transport = Transport::Rdma);
    let memory: Arc<dyn Memory> = Arc::new(HostSlab::new(4096).unwrap());
    let _registration = f
        .engine
        .register(Arc::clone(&memory), Access::Local)
        .unwrap();
    {
        let state = f.fake.state.lock().unwrap();
        assert_eq!(state.registered[0].3, 0);
        let expected = [("discover".to_owned(), None), ("rdma".to_owned(), None)];
        assert_eq!(state.installed, expected);
    }
    drop(_registration);
    f.end();

    let matrix = r#"{"cpu:0":[["nic_a"],[]]}"#;
    let f = start_with(|config| config.transport = Transport::RdmaOver(matrix.into()));
    assert_eq!(
        f.fake.state.lock().unwrap().installed,
        [("rdma".to_owned(), Some(matrix.to_owned()))]
    );
    f.end();
    let f = start();
    assert_eq!(
        f.fake.state.lock().unwrap().installed,
        [("tcp".to_owned(), None)]
    );
    f.end();
}

#[test]
fn an_engine_that_cannot_be_made_is_destroyed_and_says_which_call_failed() {
    let library = fake::library(fake::functions());
    let error = FfiEngine::start(&library, FfiConfig::new("refused")).unwrap_err();
    let null = |call| LibraryError::Null { call };
    assert_eq!(library_error(error), null("createTransferEngine"));

    let mut config = config();
    let name = config.local_name.clone();
    config.transport = Transport::RdmaOver(r#"{"cpu:0":[["no_such"],[]]}"#.into());
    let error = FfiEngine::start(&library, config.clone()).unwrap_err();
    assert_eq!(library_error(error), null("installTransport"));
    assert_eq!(Fake::of(&name).state.lock().unwrap().destroyed, 1);

    let mut functions = fake::functions();
    functions.discoverTopology = None;
    config.transport = Transport::Rdma;
    let error = FfiEngine::start(&fake::library(functions), config).unwrap_err();
    assert_eq!(
        library_error(error),
        LibraryError::MissingSymbol {
            file: "fake".into(),
            symbol: "discoverTopology"
        }
    );
    Fake::of(&name).assert_no_violations();
}

#[test]
fn names_are_checked_before_the_library_sees_them() {
    let f = start();
    for name in ["", "/", "a\0b:1", &"x".repeat(2_000)] {
        let error = library_error(f.engine.open_segment(name).unwrap_err());
        assert!(matches!(error, LibraryError::Text { .. }), "{name:?}");
    }
    let error = f.engine.open_segment("a b:1").unwrap_err();
    assert!(matches!(error, EngineError::PeerName { .. }));
    let error = library_error(f.engine.open_segment("127.0.0.1:404").unwrap_err());
    let expected = LibraryError::Code {
        call: "openSegment",
        code: -1,
    };
    assert_eq!(error, expected);
    assert_eq!(f.engine.session(), "[::1]:15992");
    f.end();
}

#[test]
fn notifications_go_out_and_come_in() {
    let f = start();
    f.engine.notify(&f.segment, "name", "").unwrap();
    let error = library_error(f.engine.notify(&f.segment, "name", "refuse").unwrap_err());
    assert!(matches!(error, LibraryError::Code { code: -102, .. }));
    let error = library_error(f.engine.notify(&f.segment, "a\0", "b").unwrap_err());
    assert!(matches!(error, LibraryError::Text { .. }));
    assert_eq!(
        f.fake.state.lock().unwrap().notified[0],
        (7, "name".to_owned(), String::new())
    );
    f.fake.state.lock().unwrap().arrived = vec![("a".into(), "1".into()), ("b".into(), "2".into())];
    let notices = f.engine.take_notices().unwrap().notices;
    assert_eq!(notices.len(), 2);
    assert_eq!((&*notices[1].name, &*notices[1].message), ("b", "2"));
    assert!(f.engine.take_notices().unwrap().notices.is_empty());
    assert!(matches!(
        f.engine.probe("a:1"),
        Err(EngineError::Unsupported { .. })
    ));
    f.end();
}

#[test]
fn a_function_that_an_old_library_lacks_is_named() {
    let mut functions = fake::functions();
    functions.genNotifyInEngine = None;
    functions.freeNotifsMsgBuf = None;
    let engine = FfiEngine::start(&fake::library(functions), config()).unwrap();
    let segment = engine.open_segment("127.0.0.1:7").unwrap();
    for (error, name) in [
        (
            engine.notify(&segment, "a", "b").unwrap_err(),
            "genNotifyInEngine",
        ),
        (engine.take_notices().unwrap_err(), "freeNotifsMsgBuf"),
    ] {
        let error = library_error(error);
        assert!(
            matches!(&error, LibraryError::MissingSymbol { symbol, .. } if *symbol == name),
            "{error:?}"
        );
    }
    assert!(engine.shut_down(Some(Instant::now() + LIMIT)));
}

#[test]
fn tasks_that_cannot_be_handed_over_come_back() {
    let f = start_with(|config| {
        config.limits.batch_tasks_max = 3;
        config.limits.tasks_open_max = 4;
    });
    let tasks = |count: u64| (0..count).map(|at| f.task(Op::Write, at, 1).0).collect();
    let refused = f.engine.submit(tasks(4)).unwrap_err();
    assert_eq!(refused.value.len(), 4);
    assert!(matches!(
        refused.cause,
        EngineError::TooManyTasks { count: 4, max: 3 }
    ));
    let first = f.engine.submit(tasks(3)).unwrap();
    let refused = f.engine.submit(tasks(2)).unwrap_err();
    assert!(matches!(
        refused.cause,
        EngineError::Full {
            queued: 3,
            count: 2,
            max: 4
        }
    ));
    f.fake
        .until("they are submitted", |state| state.submitted.len() == 3);
    for index in 0..3 {
        f.fake.set_task(index, 4);
    }
    assert!(settled(&first).is_applied());
    f.set_initial(4);
    assert!(settled(&f.engine.submit(tasks(3)).unwrap()).is_applied());

    let mut outside = f.task(Op::Write, 0, 1).0;
    outside.range = 5..(1 << 20) + 1;
    let refused = f.engine.submit(vec![outside]).unwrap_err();
    assert!(matches!(
        refused.cause,
        EngineError::OutOfBounds { task: 0, .. }
    ));
    let other = start();
    let foreign = other.task(Op::Write, 0, 1).0;
    let refused = f.engine.submit(vec![foreign]).unwrap_err();
    assert!(matches!(refused.cause, EngineError::ForeignSegment { .. }));
    drop(refused);
    other.end();
    f.end();
}

#[test]
fn a_batch_that_the_library_does_not_free_is_never_touched_again() {
    let f = start();
    f.set_initial(4);
    f.fake.free_code.store(4, Ordering::SeqCst);
    assert!(settled(&f.submit_one().0).is_applied());
    f.fake.until("it was tried", |state| state.freed == 1);
    f.fake.free_code.store(0, Ordering::SeqCst);
    assert!(settled(&f.submit_one().0).is_applied());
    // The fake notes a second try, and a poll.
    f.end();
}

#[test]
fn a_hold_that_panics_or_submits_does_no_harm() {
    struct Panics;
    impl Drop for Panics {
        fn drop(&mut self) {
            panic!("a hold of the test");
        }
    }
    let f = start();
    f.set_initial(4);
    let mut task = f.task(Op::Write, 0, 1).0;
    task.hold = Box::new(Panics);
    assert!(settled(&f.engine.submit(vec![task]).unwrap()).is_applied());
    assert!(settled(&f.submit_one().0).is_applied());
    f.end();
}

#[test]
fn dropping_the_engine_waits_for_nothing_and_ends_everything() {
    let f = start();
    let (batch, dropped) = f.submit_one();
    f.fake
        .until("it is submitted", |state| state.submitted.len() == 1);
    let Fixture { engine, fake, .. } = f;
    drop(engine);
    let report = settled(&batch);
    assert_eq!(report.tasks()[0].remote, Remote::Unknown(Reason::ShutDown));
    assert!(dropped.load(Ordering::SeqCst));
    fake.assert_no_violations();
    assert_eq!(fake.state.lock().unwrap().destroyed, 1);
}

/// Notes how often the library's engine had been destroyed when it is dropped.
struct Witness {
    fake: Arc<Fake>,
    seen: Arc<Mutex<Option<usize>>>,
}

impl Drop for Witness {
    fn drop(&mut self) {
        *locked(&self.seen) = Some(self.fake.state.lock().unwrap().destroyed);
    }
}

impl Fixture {
    /// A task, and how often the library had been destroyed when its hold was dropped.
    fn witnessed(&self, at: u64) -> (Task, Arc<Mutex<Option<usize>>>) {
        let (mut task, _) = self.task(Op::Write, at, 1);
        let seen = Arc::default();
        task.hold = Box::new(Witness {
            fake: Arc::clone(&self.fake),
            seen: Arc::clone(&seen),
        });
        (task, seen)
    }
}

#[test]
fn a_panic_of_the_thread_that_watches_settles_everything_and_lets_go_only_after_the_end() {
    let f = start_with(|config| config.limits.in_flight_per_peer = 1);
    let (first, first_seen) = f.witnessed(0);
    let (second, second_seen) = f.witnessed(1);
    let flying = f.engine.submit(vec![first]).unwrap();
    f.fake
        .until("it is submitted", |state| state.submitted.len() == 1);
    let waiting = f.engine.submit(vec![second]).unwrap();
    *locked(&f.engine.core.tripwire) = Some("poll");
    let report = settled(&flying);
    // Destroyed before, so that nothing touches it.
    assert_eq!(report.tasks()[0].local, Local::Quiet);
    assert_eq!(report.tasks()[0].remote, Remote::Unknown(Reason::ShutDown));
    assert_eq!(*locked(&first_seen), Some(1));
    let report = settled(&waiting);
    assert_eq!(report.tasks()[0].remote, Remote::Ended(Reason::ShutDown));
    assert!(locked(&second_seen).is_some());
    let refused = f.engine.submit(vec![f.task(Op::Write, 0, 1).0]);
    assert!(matches!(
        refused,
        Err(Refused {
            cause: EngineError::ShutDown,
            ..
        })
    ));
    f.end();
}

#[test]
fn a_panic_of_a_thread_that_submits_leaves_its_task_held_and_the_peer_usable() {
    let f = start_with(|config| config.limits.submit_threads = 1);
    f.set_initial(4);
    *locked(&f.engine.core.tripwire) = Some("hand_over");
    let (task, seen) = f.witnessed(0);
    let report = settled(&f.engine.submit(vec![task]).unwrap());
    assert_eq!(report.tasks()[0].local, Local::Held);
    assert_eq!(report.tasks()[0].remote, Remote::Unknown(Reason::Lost));
    assert!(settled(&f.submit_one().0).is_applied());
    f.end();
    assert_eq!(*locked(&seen), None, "what is lost leaks");
}

#[test]
fn tasks_of_a_call_that_failed_after_it_had_begun_are_held_until_the_end() {
    for (transport, code) in [
        (Transport::Tcp, 3),
        (Transport::Rdma, 3),
        (Transport::Rdma, 8),
    ] {
        let is_tcp = transport == Transport::Tcp;
        let f = start_with(|config| config.transport = transport);
        let registration = f.engine.register(f.slab.clone(), Access::Local).unwrap();
        f.set_initial(4);
        assert!(settled(&f.submit_one().0).is_applied());
        f.set_initial(0);
        f.fake.until("it is freed", |state| state.freed == 1);
        f.fake.submit_code.store(code, Ordering::SeqCst);
        f.fake.begun_all_the_same.store(1, Ordering::SeqCst);
        let (tasks, seen): (Vec<_>, Vec<_>) = (0..2).map(|at| f.witnessed(at)).unzip();
        let report = settled(&f.engine.submit(tasks).unwrap());
        for task in report.tasks() {
            assert_eq!(task.local, Local::Held, "{is_tcp} {code}");
            assert_eq!(task.remote, Remote::Unknown(Reason::NotTaken { code }));
        }
        assert_eq!(f.fake.state.lock().unwrap().freed, 1, "its batch leaks");
        f.fake.submit_code.store(0, Ordering::SeqCst);
        f.set_initial(4);
        assert!(settled(&f.submit_one().0).is_applied());
        assert!(seen.iter().all(|seen| locked(seen).is_none()));
        drop(registration);
        f.end();
        assert!(seen.iter().all(|seen| *locked(seen) == Some(1)));
    }
}

#[test]
fn over_rdma_memory_that_is_not_registered_is_not_handed_over() {
    let f = start_with(|config| config.transport = Transport::Rdma);
    f.set_initial(4);
    let code = sys::STATUS_ADDRESS_NOT_REGISTERED;
    let (batch, dropped) = f.submit_one();
    let report = settled(&batch);
    assert_eq!(report.tasks()[0].local, Local::Quiet);
    assert_eq!(
        report.tasks()[0].remote,
        Remote::Ended(Reason::NotTaken { code })
    );
    assert!(dropped.load(Ordering::SeqCst));
    assert!(f.fake.state.lock().unwrap().submitted.is_empty());
    let registration = f.engine.register(f.slab.clone(), Access::Local).unwrap();
    let other = HostSlab::new(4096).unwrap();
    let mut outside = f.task(Op::Write, 0, 1).0;
    outside.memory = Arc::new(other);
    let inside = f.task(Op::Write, (1 << 20) - 1, 1).0;
    let report = settled(&f.engine.submit(vec![outside, inside]).unwrap());
    assert!(!report.tasks()[0].remote.is_applied());
    assert!(report.tasks()[1].remote.is_applied());
    drop(registration);
    f.end();
}

#[test]
fn peers_are_bounded_and_known_ones_are_found_when_it_is_full() {
    let mut segments = Segments::default();
    let place = |number: usize| Place::Name(number.to_string());
    for number in 0..SEGMENTS_MAX {
        assert_eq!(segments.key_of(place(number)), Ok(PeerKey(number as u64)));
    }
    let full = LibraryError::TooManySegments { max: SEGMENTS_MAX };
    assert_eq!(segments.key_of(place(SEGMENTS_MAX)), Err(full));
    assert_eq!(segments.key_of(place(7)), Ok(PeerKey(7)));
    assert_eq!(segments.keys.len(), SEGMENTS_MAX);
}
