//! Two engines in one process move bytes to each other.
#![cfg(feature = "tcp")]

mod support;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use mooncake_transport::tcp::{TcpConfig, TcpEngine};
use mooncake_transport::wire::control::{FrameKind, encode_frame};
use mooncake_transport::wire::descriptor::Descriptor;
use mooncake_transport::{Access, Engine, EngineError, Listener, Op, Reason, Remote, Task};
use slab_memory::HostSlab;
use support::{
    ask, assert_pattern, bytes, engine, engine_with, fill, finish, register, run_one, slab, task,
};

const MIB: u64 = 1 << 20;

#[test]
fn writes_and_reads_of_every_size_arrive_byte_for_byte() {
    let (source, target) = (engine(), engine());
    let remote = slab(65 * MIB);
    let local = slab(65 * MIB);
    let _registration = register(&target, &remote);
    let segment = source.open_segment(target.session()).unwrap();
    let random = support::pattern(1, 65 << 20);
    let background = support::pattern(2, 65 << 20);
    let sizes = [
        0,
        1,
        2,
        7,
        8,
        9,
        4_095,
        4_096,
        65_535,
        65_536,
        65_537,
        200_001,
        MIB,
        MIB + 1,
        8 * MIB,
        64 * MIB - 1,
        64 * MIB,
    ];
    for (round, size) in sizes.into_iter().enumerate() {
        // Odd offsets on both sides, and neighbours that must stay as they are.
        let (there, here, len) = (3, 5, size as usize);
        let sent = &random[round * 31..round * 31 + len];
        remote.copy_in(0, &background[..len + 16]).unwrap();
        local.copy_in(here, sent).unwrap();
        let address = remote.address() + there;
        let write = task(Op::Write, &segment, address, &local, here..here + size);
        assert_eq!(run_one(&source, write), Remote::Applied, "write of {size}");
        let found = bytes(&remote, 0, len + 16);
        assert!(found[3..3 + len] == *sent, "write of {size}");
        assert_eq!(found[..3], background[..3]);
        assert_eq!(found[3 + len..], background[3 + len..len + 16]);

        local.copy_in(0, &background[..len + 16]).unwrap();
        let read = task(Op::Read, &segment, address, &local, here..here + size);
        assert_eq!(run_one(&source, read), Remote::Applied, "read of {size}");
        let found = bytes(&local, 0, len + 16);
        assert!(found[5..5 + len] == *sent, "read of {size}");
        assert_eq!(found[..5], background[..5]);
        assert_eq!(found[5 + len..], background[5 + len..len + 16]);
    }
}

// row: W13.4209
#[test]
fn thousands_of_tasks_in_one_batch_all_arrive() {
    let (source, target) = (engine(), engine());
    let remote = slab(4 * MIB);
    let local = slab(4 * MIB);
    let _registration = register(&target, &remote);
    let segment = source.open_segment(target.session()).unwrap();
    fill(&local, 0, 1, 4 << 20);
    let count = 20_000;
    let size = 200;
    let tasks = (0..count)
        .map(|index| {
            let at = index * size;
            task(
                Op::Write,
                &segment,
                remote.address() + at,
                &local,
                at..at + size,
            )
        })
        .collect();
    assert!(finish(&source.submit(tasks).unwrap()).is_applied());
    assert_eq!(
        bytes(&remote, 0, (count * size) as usize),
        bytes(&local, 0, (count * size) as usize)
    );
}

#[test]
fn batches_of_many_threads_in_both_directions_do_not_disturb_each_other() {
    let (left, right) = (engine(), engine());
    let (left_slab, right_slab) = (slab(16 * MIB), slab(16 * MIB));
    let _left = register(&left, &left_slab);
    let _right = register(&right, &right_slab);
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            for (source, own, target, other) in [
                (&left, &left_slab, &right, &right_slab),
                (&right, &right_slab, &left, &left_slab),
            ] {
                scope.spawn(move || {
                    // A quarter for every thread: the lower half of it is written by us, the upper
                    // half by the other engine.
                    let quarter = thread * 4 * MIB;
                    let segment = source.open_segment(target.session()).unwrap();
                    for round in 0..20u64 {
                        let seed = round * 100 + thread;
                        let size = 100_001 + round * 777;
                        fill(own, quarter, seed, size as usize);
                        let there = other.address() + quarter + 2 * MIB;
                        let tasks = (0..3)
                            .map(|part| {
                                let (start, end) = (size * part / 3, size * (part + 1) / 3);
                                let range = quarter + start..quarter + end;
                                task(Op::Write, &segment, there + start, own, range)
                            })
                            .collect();
                        assert!(finish(&source.submit(tasks).unwrap()).is_applied());
                        assert_pattern(other, quarter + 2 * MIB, seed, size as usize);
                    }
                });
            }
        }
    });
}

// row: W7.4d
#[test]
fn a_zero_length_task_needs_no_peer() {
    let source = engine();
    let peer = support::FakePeer::new();
    let segment = peer.open(&source);
    let local = slab(4096);
    peer.data.set_nonblocking(true).unwrap();
    let zero = task(Op::Write, &segment, 0xDEAD, &local, 7..7);
    assert_eq!(run_one(&source, zero), Remote::Applied);
    std::thread::sleep(Duration::from_millis(50));
    assert!(
        peer.data.accept().is_err(),
        "a connection was opened for nothing"
    );
}

// row: W6a, W6b
#[test]
fn memory_registered_after_the_segment_was_opened_is_reachable_at_once() {
    let (source, target) = (engine(), engine());
    let segment = source.open_segment(target.session()).unwrap();
    let remote = slab(4096);
    let local = slab(4096);
    let write = || task(Op::Write, &segment, remote.address(), &local, 0..100);
    assert_eq!(run_one(&source, write()), Remote::Ended(Reason::Rejected));
    let registration = register(&target, &remote);
    fill(&local, 0, 5, 100);
    assert_eq!(run_one(&source, write()), Remote::Applied);
    assert_pattern(&remote, 0, 5, 100);
    registration.unregister().unwrap();
    assert_eq!(run_one(&source, write()), Remote::Ended(Reason::Rejected));
}

#[test]
fn read_only_memory_can_be_read_and_not_written() {
    let (source, target) = (engine(), engine());
    let (remote, local) = (slab(4096), slab(4096));
    fill(&remote, 0, 3, 4096);
    let _registration = target.register(remote.clone(), Access::RemoteRead).unwrap();
    let segment = source.open_segment(target.session()).unwrap();
    let read = task(Op::Read, &segment, remote.address(), &local, 0..4096);
    assert_eq!(run_one(&source, read), Remote::Applied);
    assert_pattern(&local, 0, 3, 4096);
    let write = task(Op::Write, &segment, remote.address(), &local, 0..4096);
    assert_eq!(run_one(&source, write), Remote::Ended(Reason::Rejected));
}

#[test]
fn local_registrations_are_not_reachable() {
    let (source, target) = (engine(), engine());
    let (remote, local) = (slab(4096), slab(4096));
    let _registration = target.register(remote.clone(), Access::Local).unwrap();
    let segment = source.open_segment(target.session()).unwrap();
    let read = task(Op::Read, &segment, remote.address(), &local, 0..1);
    assert_eq!(run_one(&source, read), Remote::Ended(Reason::Rejected));
}

#[test]
fn one_rejected_task_does_not_take_the_others_of_its_batch_along() {
    let (source, target) = (engine(), engine());
    let (remote, local) = (slab(MIB), slab(MIB));
    let _registration = register(&target, &remote);
    let segment = source.open_segment(target.session()).unwrap();
    let tasks = (0..50u64)
        .map(|index| {
            let address = if index % 10 == 3 {
                16
            } else {
                remote.address() + index * 1_000
            };
            task(
                Op::Write,
                &segment,
                address,
                &local,
                index * 1_000..(index + 1) * 1_000,
            )
        })
        .collect();
    let report = finish(&source.submit(tasks).unwrap());
    for (index, settled) in report.tasks().iter().enumerate() {
        let expected = if index % 10 == 3 {
            Remote::Ended(Reason::Rejected)
        } else {
            Remote::Applied
        };
        assert_eq!(settled.remote, expected, "task {index}");
    }
}

struct CountedDrop(Arc<AtomicUsize>);

impl Drop for CountedDrop {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

// row: W7.7c, W13.1267
#[test]
fn holds_are_dropped_before_the_batch_reports_and_exactly_once() {
    let (source, target) = (engine(), engine());
    let (remote, local) = (slab(MIB), slab(MIB));
    let _registration = register(&target, &remote);
    let segment = source.open_segment(target.session()).unwrap();
    let dropped = Arc::new(AtomicUsize::new(0));
    let tasks = (0..20u64)
        .map(|index| Task {
            hold: Box::new(CountedDrop(Arc::clone(&dropped))),
            // Some succeed, some are empty, some are rejected.
            ..task(
                Op::Write,
                &segment,
                if index % 5 == 4 { 8 } else { remote.address() },
                &local,
                0..(index % 3) * 1_000,
            )
        })
        .collect();
    finish(&source.submit(tasks).unwrap());
    assert_eq!(dropped.load(Ordering::SeqCst), 20);
    assert_eq!(Arc::strong_count(&local), 1);
}

struct Panics;

impl Drop for Panics {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            panic!("a hold that panics");
        }
    }
}

#[test]
fn a_hold_that_panics_does_not_stop_the_engine() {
    let (source, target) = (engine(), engine());
    let (remote, local) = (slab(4096), slab(4096));
    let _registration = register(&target, &remote);
    let segment = source.open_segment(target.session()).unwrap();
    let first = Task {
        hold: Box::new(Panics),
        ..task(Op::Write, &segment, remote.address(), &local, 0..10)
    };
    assert_eq!(run_one(&source, first), Remote::Applied);
    let second = task(Op::Write, &segment, remote.address(), &local, 0..10);
    assert_eq!(run_one(&source, second), Remote::Applied);
}

// row: W13.769
#[test]
fn a_dropped_batch_runs_to_its_end() {
    let (source, target) = (engine(), engine());
    let (remote, local) = (slab(32 * MIB), slab(32 * MIB));
    let _registration = register(&target, &remote);
    let segment = source.open_segment(target.session()).unwrap();
    fill(&local, 0, 9, 32 << 20);
    let dropped = Arc::new(AtomicUsize::new(0));
    let held = Task {
        hold: Box::new(CountedDrop(Arc::clone(&dropped))),
        ..task(Op::Write, &segment, remote.address(), &local, 0..32 * MIB)
    };
    drop(source.submit(vec![held]).unwrap());
    let start = Instant::now();
    while dropped.load(Ordering::SeqCst) == 0 {
        assert!(start.elapsed() < support::LONG);
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_pattern(&remote, 0, 9, 32 << 20);
}

struct Unpark(std::thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

#[test]
fn a_batch_can_be_awaited_without_a_runtime() {
    let (source, target) = (engine(), engine());
    let (remote, local) = (slab(MIB), slab(MIB));
    let _registration = register(&target, &remote);
    let segment = source.open_segment(target.session()).unwrap();
    let mut batch = source
        .submit(vec![task(
            Op::Read,
            &segment,
            remote.address(),
            &local,
            0..MIB,
        )])
        .unwrap();
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    let report = loop {
        match Future::poll(Pin::new(&mut batch), &mut context) {
            Poll::Ready(report) => break report,
            Poll::Pending => std::thread::park_timeout(support::LONG),
        }
    };
    assert!(report.is_applied());
}

#[test]
fn batches_that_are_too_long_or_out_of_bounds_come_back_untouched() {
    let (source, target) = (
        engine_with(|config| {
            config.limits.batch_tasks_max = 3;
            config.limits.tasks_open_max = 3;
        }),
        engine(),
    );
    let local = slab(4096);
    let segment = source.open_segment(target.session()).unwrap();
    let zero = || task(Op::Write, &segment, 1, &local, 0..0);
    let refused = source.submit((0..4).map(|_| zero()).collect()).unwrap_err();
    assert_eq!(
        refused.cause,
        EngineError::TooManyTasks { count: 4, max: 3 }
    );
    assert_eq!(refused.value.len(), 4);
    let refused = source
        .submit(vec![zero(), task(Op::Read, &segment, 1, &local, 1..4097)])
        .unwrap_err();
    assert_eq!(
        refused.cause,
        EngineError::OutOfBounds {
            task: 1,
            start: 1,
            end: 4097,
            len: 4096
        }
    );
    let foreign = target.open_segment(source.session()).unwrap();
    let refused = source
        .submit(vec![task(Op::Read, &foreign, 1, &local, 0..1)])
        .unwrap_err();
    assert_eq!(
        refused.cause,
        EngineError::ForeignSegment {
            name: source.session().into()
        }
    );
    assert!(finish(&source.submit(vec![zero(), zero(), zero()]).unwrap()).is_applied());
    assert!(finish(&source.submit(Vec::new()).unwrap()).is_applied());
}

#[test]
fn tasks_under_way_are_bounded_and_the_bound_is_given_back() {
    let source = engine_with(|config| {
        config.limits.batch_tasks_max = 2;
        config.limits.tasks_open_max = 2;
    });
    let peer = support::FakePeer::new();
    let segment = peer.open(&source);
    let local = slab(4096);
    let one = || task(Op::Write, &segment, 1, &local, 0..10);
    let stuck = source.submit(vec![one(), one()]).unwrap();
    let refused = source.submit(vec![one()]).unwrap_err();
    assert_eq!(
        refused.cause,
        EngineError::Full {
            queued: 2,
            count: 1,
            max: 2
        }
    );
    for _ in 0..2 {
        let mut stream = peer.accept_data();
        support::read_header(&mut stream);
        support::read_exactly(&mut stream, 10);
        std::io::Write::write_all(
            &mut stream,
            &mooncake_transport::wire::data::Status::Ok.encode(),
        )
        .unwrap();
        // Both jobs may have taken the same lane; then the second connection never carries one.
        if stuck
            .wait(Some(Instant::now() + Duration::from_millis(200)))
            .is_some()
        {
            break;
        }
    }
    finish(&stuck);
    assert!(
        source
            .submit(vec![task(Op::Write, &segment, 1, &local, 0..0)])
            .is_ok()
    );
}

#[test]
fn a_segment_is_opened_once_and_spelled_with_or_without_slashes() {
    let (source, target) = (engine(), engine());
    let first = source.open_segment(target.session()).unwrap();
    let session = target.session().to_owned();
    drop(target);
    // The peer is gone, so this can only come from what is known already.
    let second = source.open_segment(&format!("//{session}")).unwrap();
    assert_eq!(second.name(), first.name());
    drop((first, second));
    assert!(matches!(
        source.open_segment(&session),
        Err(EngineError::Control { .. })
    ));
}

// row: W6c, W13.3072
#[test]
fn a_peer_that_restarts_on_another_data_port_is_found_again() {
    let source = engine();
    let (remote, local) = (slab(4096), slab(4096));
    let target = engine();
    let control_port = target.control_address().port();
    let registration = register(&target, &remote);
    let segment = source.open_segment(target.session()).unwrap();
    let write = || task(Op::Write, &segment, remote.address(), &local, 0..100);
    assert_eq!(run_one(&source, write()), Remote::Applied);
    drop(registration);
    let old_data_port = target.data_address().port();
    drop(target);
    let target = engine_with(|config| config.control_port = Some(control_port));
    assert_ne!(target.data_address().port(), old_data_port);
    let _registration = register(&target, &remote);
    fill(&local, 0, 77, 100);
    assert_eq!(run_one(&source, write()), Remote::Applied);
    assert_pattern(&remote, 0, 77, 100);
}

#[test]
fn engines_that_take_each_others_idle_connections_lose_no_transfer() {
    let target = engine_with(|config| config.limits.inbound_data_max = 1);
    let sources = [engine(), engine()];
    let (remote, local) = (slab(4096), slab(4096));
    let _registration = register(&target, &remote);
    let segments = sources
        .each_ref()
        .map(|source| source.open_segment(target.session()).unwrap());
    for round in 0..4 {
        let from = round % 2;
        fill(&local, 0, round as u64, 4096);
        let write = task(
            Op::Write,
            &segments[from],
            remote.address(),
            &local,
            0..4096,
        );
        assert_eq!(run_one(&sources[from], write), Remote::Applied, "{round}");
        assert_pattern(&remote, 0, round as u64, 4096);
        // Idle long enough to make way.
        std::thread::sleep(Duration::from_millis(1_300));
    }
}

#[test]
fn a_peer_that_is_gone_fails_the_task_with_the_connect_error() {
    let source = engine();
    let local = slab(4096);
    let target = engine();
    let segment = source.open_segment(target.session()).unwrap();
    drop(target);
    let start = Instant::now();
    let tasks = (0..100)
        .map(|_| task(Op::Write, &segment, 8, &local, 0..100))
        .collect();
    let report = finish(&source.submit(tasks).unwrap());
    for settled in report.tasks() {
        assert!(
            matches!(settled.remote, Remote::Ended(Reason::Connect { .. })),
            "{:?}",
            settled.remote
        );
    }
    assert!(start.elapsed() < Duration::from_secs(3));
}

#[test]
fn shutting_down_settles_what_is_under_way_and_returns() {
    let source = engine();
    let peer = support::FakePeer::new();
    let segment = peer.open(&source);
    let local = slab(64 * MIB);
    let dropped = Arc::new(AtomicUsize::new(0));
    let tasks = (0..10)
        .map(|_| Task {
            hold: Box::new(CountedDrop(Arc::clone(&dropped))),
            ..task(Op::Write, &segment, 8, &local, 0..64 * MIB)
        })
        .collect();
    let batch = source.submit(tasks).unwrap();
    let _stalled: Vec<_> = (0..4).map(|_| peer.accept_data()).collect();
    std::thread::sleep(Duration::from_millis(50));
    let start = Instant::now();
    drop(source);
    assert!(start.elapsed() < Duration::from_secs(2));
    let report = batch.poll().expect("a task was not settled");
    let (mut running, mut queued) = (0, 0);
    for settled in report.tasks() {
        match settled.remote {
            Remote::Unknown(Reason::ShutDown) => running += 1,
            Remote::Ended(Reason::ShutDown) => queued += 1,
            ref other => panic!("{other:?}"),
        }
    }
    assert_eq!((running, queued), (4, 6));
    assert_eq!(dropped.load(Ordering::SeqCst), 10);
}

#[test]
fn registrations_and_segments_may_outlive_their_engine() {
    let (source, target) = (engine(), engine());
    let remote = slab(4096);
    let registration = register(&target, &remote);
    let segment = source.open_segment(target.session()).unwrap();
    drop((source, target));
    registration.unregister().unwrap();
    assert_eq!(Arc::strong_count(&remote), 1);
    drop(segment);
}

#[test]
fn an_engine_that_a_hold_keeps_alive_can_be_dropped_by_its_own_thread() {
    let source = Arc::new(engine());
    let target = engine();
    let (remote, local) = (slab(4096), slab(4096));
    let registration = register(&target, &remote);
    let segment = source.open_segment(target.session()).unwrap();
    let held = Task {
        hold: Box::new((Arc::clone(&source), register(&source, &local))),
        ..task(Op::Write, &segment, remote.address(), &local, 0..4096)
    };
    let batch = source.submit(vec![held]).unwrap();
    drop((source, segment));
    assert!(finish(&batch).is_applied());
    drop(registration);
}

// row: W13.2313
#[test]
fn unregistering_during_inbound_writes_cuts_them_off_and_frees_the_memory() {
    let (source, target) = (engine(), engine());
    let (remote, local) = (slab(16 * MIB), slab(16 * MIB));
    let segment = source.open_segment(target.session()).unwrap();
    for round in 0..8u64 {
        let registration = register(&target, &remote);
        let tasks = (0..4u64)
            .map(|part| {
                let range = part * 4 * MIB..(part + 1) * 4 * MIB;
                task(
                    Op::Write,
                    &segment,
                    remote.address() + range.start,
                    &local,
                    range,
                )
            })
            .collect();
        let batch = source.submit(tasks).unwrap();
        std::thread::sleep(Duration::from_millis(round));
        registration.unregister().unwrap();
        // Nothing of a request that was cut off holds the memory any more.
        assert_eq!(Arc::strong_count(&remote), 1);
        let before = bytes(&remote, 0, 16 << 20);
        for settled in finish(&batch).tasks() {
            assert!(
                matches!(
                    settled.remote,
                    Remote::Applied | Remote::Ended(Reason::Rejected | Reason::Closed)
                ),
                "{:?}",
                settled.remote
            );
        }
        assert!(
            before == bytes(&remote, 0, 16 << 20),
            "bytes were stored after unregistering"
        );
        fill(&local, 0, round, 16 << 20);
    }
}

#[test]
fn overlapping_registrations_are_refused() {
    let target = engine();
    let remote = slab(4096);
    let registration = register(&target, &remote);
    assert!(matches!(
        target.register(remote.clone(), Access::RemoteRead),
        Err(EngineError::Overlap { .. })
    ));
    drop(registration);
    drop(register(&target, &remote));
}

// row: W9b
#[test]
fn notifications_arrive_in_order_and_are_taken_once() {
    let (source, target) = (engine(), engine());
    let segment = source.open_segment(target.session()).unwrap();
    source.notify(&segment, "first", "one").unwrap();
    source
        .notify(&segment, "snow \u{2603}", "grin \u{1f600} \"quoted\"\n")
        .unwrap();
    let taken = target.take_notices().unwrap();
    assert_eq!(taken.dropped, 0);
    let texts: Vec<_> = taken
        .notices
        .iter()
        .map(|notice| (&*notice.name, &*notice.message))
        .collect();
    assert_eq!(
        texts,
        [
            ("first", "one"),
            ("snow \u{2603}", "grin \u{1f600} \"quoted\"\n")
        ]
    );
    assert!(target.take_notices().unwrap().notices.is_empty());
    let long = "x".repeat(1 << 20);
    assert!(matches!(
        source.notify(&segment, "long", &long),
        Err(EngineError::Control { .. })
    ));
}

// row: W9a
#[test]
fn notifications_that_nobody_takes_are_dropped_oldest_first() {
    let source = engine();
    let target = engine_with(|config| config.limits.notices_max = 3);
    let segment = source.open_segment(target.session()).unwrap();
    for index in 0..5 {
        source.notify(&segment, &index.to_string(), "").unwrap();
    }
    let taken = target.take_notices().unwrap();
    let names: Vec<_> = taken.notices.iter().map(|notice| &*notice.name).collect();
    assert_eq!(names, ["2", "3", "4"]);
    assert_eq!(taken.dropped, 2);
}

#[test]
fn probes_tell_the_living_from_the_dead() {
    let (source, target) = (engine(), engine());
    source.probe(target.session()).unwrap();
    let session = target.session().to_owned();
    drop(target);
    let error = source.probe(&session).unwrap_err();
    assert!(matches!(error, EngineError::Control { .. }), "{error:?}");
    assert!(matches!(
        source.probe(""),
        Err(EngineError::PeerName { .. })
    ));
    assert!(matches!(
        source.probe("host.invalid:5"),
        Err(EngineError::Resolve { .. })
    ));
}

#[test]
fn an_engine_can_transfer_to_itself() {
    let only = engine();
    let (remote, local) = (slab(MIB), slab(MIB));
    let _registration = register(&only, &remote);
    let segment = only.open_segment(only.session()).unwrap();
    fill(&local, 0, 4, 1 << 20);
    let write = task(Op::Write, &segment, remote.address(), &local, 0..MIB);
    assert_eq!(run_one(&only, write), Remote::Applied);
    assert_pattern(&remote, 0, 4, 1 << 20);
}

// row: W5.2a, W5.2b, W5.3, W13.682
#[test]
fn the_descriptor_names_what_peers_can_dial() {
    let target = engine_with(|config| config.advertise = Some("localhost".into()));
    let remote = slab(8192);
    let _registration = register(&target, &remote);
    assert_eq!(
        target.session(),
        format!("localhost:{}", target.control_address().port())
    );
    let reply = ask(
        target.control_address(),
        &encode_frame(FrameKind::Metadata, b"{}"),
    );
    let descriptor = Descriptor::decode(&reply[9..]).unwrap();
    assert_eq!(descriptor.name, target.session());
    assert_eq!(descriptor.data_host.as_deref(), Some("localhost"));
    assert_eq!(descriptor.data_port, target.data_address().port());
    assert_eq!(descriptor.buffers.len(), 1);
    assert_eq!(descriptor.buffers[0].address, remote.address());
    assert_eq!(
        descriptor.timestamp.len(),
        "2026-11-29 15:01:31.659971".len()
    );
    let text = std::str::from_utf8(&reply[9..]).unwrap();
    assert!(text.contains(r#""protocol":"tcp""#) && text.contains(r#""rdma_server_name":"""#));
    let source = engine();
    assert!(source.open_segment(target.session()).is_ok());
}

#[test]
fn ipv6_names_are_bracketed_and_reachable() {
    let target = match TcpEngine::start({
        let mut config = TcpConfig::default();
        config.bind = "::1".parse().unwrap();
        config
    }) {
        Ok(target) => target,
        // A machine without IPv6 has no such address.
        Err(EngineError::Bind { .. }) => {
            assert!(std::net::TcpListener::bind("[::1]:0").is_err());
            return;
        }
        Err(error) => panic!("{error}"),
    };
    assert_eq!(
        target.session(),
        format!("[::1]:{}", target.control_address().port())
    );
    let source = engine();
    let (remote, local) = (slab(4096), slab(4096));
    let _registration = register(&target, &remote);
    let segment = source.open_segment(target.session()).unwrap();
    let write = task(Op::Write, &segment, remote.address(), &local, 0..4096);
    assert_eq!(run_one(&source, write), Remote::Applied);
}

// row: W5.2b, W13.736
#[test]
fn ports_in_use_and_wildcards_are_typed_errors() {
    let first = engine();
    let mut config = TcpConfig::default();
    config.control_port = Some(first.control_address().port());
    let error = TcpEngine::start(config).unwrap_err();
    assert!(
        matches!(
            error,
            EngineError::Bind {
                listener: Listener::Control,
                ..
            }
        ),
        "{error:?}"
    );
    let mut config = TcpConfig::default();
    config.bind = "0.0.0.0".parse().unwrap();
    assert!(matches!(
        TcpEngine::start(config),
        Err(EngineError::WildcardBind { .. })
    ));
}

#[test]
fn only_allowed_addresses_are_served() {
    let target = engine_with(|config| config.allow_from = vec!["10.9.8.0/24".parse().unwrap()]);
    assert!(
        ask(
            target.control_address(),
            &encode_frame(FrameKind::Probe, b"{}")
        )
        .is_empty()
    );
    let mut stream = support::dial(target.data_address());
    assert!(support::read_to_close(&mut stream).is_empty());
    let target = engine_with(|config| config.allow_from = vec!["127.0.0.0/8".parse().unwrap()]);
    assert!(
        !ask(
            target.control_address(),
            &encode_frame(FrameKind::Probe, b"{}")
        )
        .is_empty()
    );
}

#[test]
fn engines_start_and_stop_without_leaving_threads_or_descriptors() {
    let count = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let memory = slab(4096);
    let cycle = |memory: &Arc<HostSlab>| {
        let (source, target) = (engine(), engine());
        let _registration = register(&target, memory);
        let segment = source.open_segment(target.session()).unwrap();
        let write = task(Op::Write, &segment, memory.address(), memory, 0..100);
        assert_eq!(run_one(&source, write), Remote::Applied);
    };
    cycle(&memory);
    let before = count();
    for _ in 0..20 {
        cycle(&memory);
    }
    // Other tests of this process open and close descriptors at the same time.
    assert!(count() < before + 60, "{} then {}", before, count());
}

// row: W13.736
#[test]
fn engines_that_start_at_once_all_get_ports_of_their_own() {
    let engines: Vec<_> = std::thread::scope(|scope| {
        let starting: Vec<_> = (0..16).map(|_| scope.spawn(engine)).collect();
        starting
            .into_iter()
            .map(|engine| engine.join().unwrap())
            .collect()
    });
    for pair in 0..engines.len() {
        let next = &engines[(pair + 1) % engines.len()];
        engines[pair].probe(next.session()).unwrap();
    }
    let mut ports: Vec<_> = engines
        .iter()
        .flat_map(|engine| {
            [
                engine.control_address().port(),
                engine.data_address().port(),
            ]
        })
        .collect();
    ports.sort();
    ports.dedup();
    assert_eq!(ports.len(), 32);
}
