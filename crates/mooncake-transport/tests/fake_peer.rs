//! Our initiator against peers that reject, lie, stall, close and come back.
#![cfg(feature = "tcp")]

mod support;

use std::io::Write;
use std::net::Shutdown;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use mooncake_transport::wire::control::{FrameKind, NOTIFY_TAKEN, encode_frame};
use mooncake_transport::wire::data::{DataVersion, Status};
use mooncake_transport::wire::descriptor::{Descriptor, DescriptorError};
use mooncake_transport::{
    Batch, ControlError, Engine, EngineError, Op, Reason, Remote, Segment, Task,
};
use slab_memory::HostSlab;
use support::{
    FakePeer, assert_pattern, engine, fill, finish, hasty_engine, pattern, read_exactly,
    read_header, run_one, slab, task,
};

const MIB: u64 = 1 << 20;

struct Fixture {
    peer: FakePeer,
    engine: mooncake_transport::tcp::TcpEngine,
    segment: Segment,
    local: Arc<HostSlab>,
}

fn fixture_with(engine: mooncake_transport::tcp::TcpEngine, local_len: u64) -> Fixture {
    let peer = FakePeer::new();
    let segment = peer.open(&engine);
    Fixture {
        peer,
        engine,
        segment,
        local: slab(local_len),
    }
}

fn fixture() -> Fixture {
    fixture_with(hasty_engine(), 64 * MIB)
}

impl Fixture {
    fn task(&self, op: Op, len: u64) -> Task {
        task(op, &self.segment, 0x7000_0000, &self.local, 0..len)
    }

    fn submit(&self, op: Op, len: u64) -> Batch {
        self.engine.submit(vec![self.task(op, len)]).unwrap()
    }
}

fn remote(batch: &Batch) -> Remote {
    finish(batch).tasks()[0].remote.clone()
}

/// Serves one write on `stream` like a real target.
fn serve_write(stream: &mut std::net::TcpStream) -> Vec<u8> {
    let header = read_header(stream);
    assert_eq!((header.op, header.version), (Op::Write, DataVersion::V2));
    let payload = read_exactly(stream, header.size);
    stream.write_all(&Status::Ok.encode()).unwrap();
    payload
}

// row: W7.1a, W7.3c
#[test]
fn a_write_is_one_header_and_its_payload_as_documented() {
    let f = fixture();
    f.local.copy_in(0, b"abcd").unwrap();
    let batch = f
        .engine
        .submit(vec![task(
            Op::Write,
            &f.segment,
            0x0000_7000_0000_0000,
            &f.local,
            0..4,
        )])
        .unwrap();
    let mut stream = f.peer.accept_data();
    let request = read_exactly(&mut stream, 28);
    let mut expected = vec![4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x70, 0, 0, 0x81];
    expected.extend_from_slice(&[0; 7]);
    expected.extend_from_slice(b"abcd");
    assert_eq!(request, expected);
    assert!(batch.poll().is_none());
    // The acknowledgement may come in pieces.
    for byte in Status::Ok.encode() {
        stream.write_all(&[byte]).unwrap();
        std::thread::sleep(Duration::from_millis(2));
    }
    assert_eq!(remote(&batch), Remote::Applied);
}

#[test]
fn a_read_takes_status_and_payload_however_they_come() {
    let f = fixture();
    let payload = pattern(4, 100_003);
    for split in [0, 1, 7, 8, 9, 50_000] {
        let batch = f.submit(Op::Read, payload.len() as u64);
        // Every second round runs on the connection of the one before.
        let mut stream = f.peer.accept_data();
        for _ in 0..2 {
            let header = read_header(&mut stream);
            assert_eq!(header.op, Op::Read);
            let reply = [&Status::Ok.encode()[..], &payload].concat();
            stream.write_all(&reply[..split]).unwrap();
            std::thread::sleep(Duration::from_millis(10));
            stream.write_all(&reply[split..]).unwrap();
            if batch
                .wait(Some(Instant::now() + Duration::from_secs(5)))
                .is_some()
            {
                break;
            }
        }
        assert_eq!(remote(&batch), Remote::Applied);
        assert_pattern(&f.local, 0, 4, payload.len());
        f.local.copy_in(0, &vec![0; payload.len()]).unwrap();
    }
}

// row: W7.4b, W7.7a
#[test]
fn an_early_rejection_aborts_the_send_and_is_what_is_reported() {
    let f = fixture();
    for keep_open in [true, false] {
        let batch = f.submit(Op::Write, 64 * MIB);
        let mut stream = f.peer.accept_data();
        read_header(&mut stream);
        stream.write_all(&Status::Rejected.encode()).unwrap();
        if !keep_open {
            // As a real target does: closes although payload is on its way.
            drop(stream);
            assert_eq!(remote(&batch), Remote::Ended(Reason::Rejected));
        } else {
            assert_eq!(remote(&batch), Remote::Ended(Reason::Rejected));
        }
    }
}

// row: W7.2a, W7.2b, W7.7d
#[test]
fn garbage_and_unknown_codes_are_failures_and_end_the_connection() {
    let f = fixture();
    for (frame, reason) in [
        (
            *b"HTTP/1.1",
            Reason::BadStatus {
                word: u64::from_le_bytes(*b"HTTP/1.1"),
            },
        ),
        (Status::Other(2).encode(), Reason::Failed { code: 2 }),
    ] {
        for len in [16, 32 * MIB] {
            let batch = f.submit(Op::Write, len);
            let mut stream = f.peer.accept_data();
            read_header(&mut stream);
            stream.write_all(&frame).unwrap();
            assert_eq!(remote(&batch), Remote::Unknown(reason.clone()));
            support::read_to_close(&mut stream);
        }
    }
}

// row: W7.7b
#[test]
fn an_ok_before_the_body_is_remembered_and_the_body_is_sent_in_full() {
    let f = fixture();
    fill(&f.local, 0, 3, 8 << 20);
    let batch = f.submit(Op::Write, 8 * MIB);
    let mut stream = f.peer.accept_data();
    let header = read_header(&mut stream);
    stream.write_all(&Status::Ok.encode()).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    assert!(batch.poll().is_none(), "reported before the body was sent");
    assert!(read_exactly(&mut stream, header.size) == pattern(3, 8 << 20));
    assert_eq!(remote(&batch), Remote::Applied);
}

#[test]
fn a_peer_that_closes_on_the_way_ends_the_task() {
    let f = fixture();
    for (op, sent, replied) in [
        (Op::Write, 1_000, 0),
        (Op::Write, 0, 0),
        (Op::Read, 0, 8),
        (Op::Read, 0, 1_000),
    ] {
        let batch = f.submit(op, MIB);
        let mut stream = f.peer.accept_data();
        read_header(&mut stream);
        read_exactly(&mut stream, sent);
        let reply = [&Status::Ok.encode()[..], &[1; 992]].concat();
        stream.write_all(&reply[..replied]).unwrap();
        drop(stream);
        assert_eq!(
            remote(&batch),
            Remote::Ended(Reason::Closed),
            "{op:?} {sent} {replied}"
        );
    }
}

// row: W8.2a, W13.2086, W13.3542
#[test]
fn a_missing_status_leaves_the_peer_unknown_after_its_deadline() {
    let f = fixture();
    let batch = f.submit(Op::Write, 100);
    let start = Instant::now();
    let mut stream = f.peer.accept_data();
    read_header(&mut stream);
    read_exactly(&mut stream, 100);
    assert_eq!(
        remote(&batch),
        Remote::Unknown(Reason::NoStatus { timeout_ms: 800 })
    );
    assert!(
        start.elapsed() > Duration::from_millis(300) && start.elapsed() < Duration::from_secs(3)
    );
    // Our side is closed, so a peer that wakes up finds the end of the stream.
    assert!(support::read_to_close(&mut stream).is_empty());
}

// row: W8.2a, W13.3542
#[test]
fn a_peer_that_never_reads_stalls_the_task_and_those_behind_it_only_once() {
    let f = fixture();
    let tasks: Vec<Task> = (0..40).map(|_| f.task(Op::Write, 32 * MIB)).collect();
    let batch = f.engine.submit(tasks).unwrap();
    let start = Instant::now();
    let _stalled: Vec<_> = (0..4).map(|_| f.peer.accept_data()).collect();
    let report = finish(&batch);
    assert!(
        start.elapsed() < Duration::from_secs(4),
        "{:?}",
        start.elapsed()
    );
    let stalled = Reason::Stalled { timeout_ms: 800 };
    let unknown = report
        .tasks()
        .iter()
        .filter(|task| task.remote == Remote::Unknown(stalled.clone()));
    assert_eq!(unknown.count(), 4);
    let ended = report
        .tasks()
        .iter()
        .filter(|task| task.remote == Remote::Ended(stalled.clone()));
    assert_eq!(ended.count(), 36);
}

// row: W7.7c, W13.4247
#[test]
fn a_read_that_stops_half_way_is_unknown_after_the_deadline_and_stores_nothing_later() {
    let f = fixture();
    let batch = f.submit(Op::Read, 100);
    let mut stream = f.peer.accept_data();
    read_header(&mut stream);
    stream.write_all(&Status::Ok.encode()).unwrap();
    stream.write_all(&[1; 50]).unwrap();
    assert_eq!(
        remote(&batch),
        Remote::Unknown(Reason::Stalled { timeout_ms: 800 })
    );
    f.local.copy_in(0, &[9; 100]).unwrap();
    // The connection may be gone already, which is as good.
    let _ = stream.write_all(&[1; 50]);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(support::bytes(&f.local, 0, 100), [9; 100]);
}

struct CountedDrop(Arc<AtomicUsize>);

impl Drop for CountedDrop {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

// row: W7.7c, W13.1267, W13.4247
#[test]
fn a_task_that_timed_out_is_reported_only_once_its_bytes_are_not_read_any_more() {
    let f = fixture();
    fill(&f.local, 0, 6, 32 << 20);
    let dropped = Arc::new(AtomicUsize::new(0));
    let hold = Box::new(CountedDrop(Arc::clone(&dropped)));
    let held = Task {
        hold,
        ..f.task(Op::Write, 32 * MIB)
    };
    let batch = f.engine.submit(vec![held]).unwrap();
    let mut stream = f.peer.accept_data();
    read_header(&mut stream);
    std::thread::sleep(Duration::from_millis(150));
    assert_eq!(
        dropped.load(Ordering::SeqCst),
        0,
        "given up while bytes were on their way"
    );
    assert!(batch.poll().is_none());
    assert_eq!(
        remote(&batch),
        Remote::Unknown(Reason::Stalled { timeout_ms: 800 })
    );
    assert_eq!(dropped.load(Ordering::SeqCst), 1);
    // Whoever owned the range may use it again, and the peer sees nothing of that.
    f.local.copy_in(0, &vec![0xFF; 32 << 20]).unwrap();
    let received = support::read_to_close(&mut stream);
    assert!(received.len() < 32 << 20);
    assert!(received[..] == pattern(6, 32 << 20)[..received.len()]);
}

#[test]
fn slow_progress_is_progress() {
    let f = fixture();
    let batch = f.submit(Op::Read, 10);
    let mut stream = f.peer.accept_data();
    read_header(&mut stream);
    stream.write_all(&Status::Ok.encode()).unwrap();
    for _ in 0..10 {
        std::thread::sleep(Duration::from_millis(100));
        stream.write_all(&[7]).unwrap();
    }
    assert_eq!(remote(&batch), Remote::Applied);
}

// row: W13.3542
#[test]
fn a_peer_that_sends_a_byte_now_and_then_does_not_hold_its_tasks_for_ever() {
    let engine = support::engine_with(|config| {
        config.timeouts.progress = Duration::from_millis(300);
        config.timeouts.status = Duration::from_millis(300);
        config.timeouts.min_bytes_per_s = 1_000;
    });
    let f = fixture_with(engine, MIB);
    // 600 ms, and 100 for the bytes.
    let tasks = (0..12).map(|_| f.task(Op::Read, 100)).collect();
    let start = Instant::now();
    let batch = f.engine.submit(tasks).unwrap();
    let mut lanes: Vec<_> = (0..4).map(|_| f.peer.accept_data()).collect();
    for stream in &mut lanes {
        read_header(stream);
        stream.write_all(&Status::Ok.encode()).unwrap();
    }
    let mut report = None;
    while report.is_none() && start.elapsed() < Duration::from_secs(5) {
        for stream in &mut lanes {
            // Fails once the engine has had enough.
            let _ = stream.write_all(&[7]);
        }
        report = batch.wait(Some(Instant::now() + Duration::from_millis(100)));
    }
    let report = report.expect("bytes moved, so the tasks went on for ever");
    assert!(start.elapsed() > Duration::from_millis(600));
    let reason = Reason::TooSlow { timeout_ms: 700 };
    let count = |wanted: Remote| {
        let tasks = report.tasks().iter();
        tasks.filter(|task| task.remote == wanted).count()
    };
    assert_eq!(count(Remote::Unknown(reason.clone())), 4);
    assert_eq!(count(Remote::Ended(reason)), 8);
}

// row: W8.3b, W8.3c
#[test]
fn a_peer_that_closes_after_each_request_never_fails_a_task() {
    let f = fixture();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..20 {
                let mut stream = f.peer.accept_data();
                serve_write(&mut stream);
            }
        });
        for round in 0..20 {
            fill(&f.local, 0, round, 1_000);
            assert_eq!(
                run_one(&f.engine, f.task(Op::Write, 1_000)),
                Remote::Applied,
                "{round}"
            );
        }
    });
}

// row: W8.3b
#[test]
fn an_idle_lane_that_the_peer_closed_is_noticed_before_it_is_used() {
    let f = fixture();
    let batch = f.submit(Op::Write, 100);
    let mut stream = f.peer.accept_data();
    serve_write(&mut stream);
    assert_eq!(remote(&batch), Remote::Applied);
    drop(stream);
    std::thread::sleep(Duration::from_millis(50));
    let batch = f.submit(Op::Write, 100);
    let mut stream = f.peer.accept_data();
    serve_write(&mut stream);
    assert_eq!(remote(&batch), Remote::Applied);
}

// row: W8.3b, W7.7d
#[test]
fn an_idle_lane_with_unexpected_bytes_is_not_used_again() {
    let f = fixture();
    let batch = f.submit(Op::Write, 100);
    let mut first = f.peer.accept_data();
    serve_write(&mut first);
    assert_eq!(remote(&batch), Remote::Applied);
    first.write_all(b"?").unwrap();
    std::thread::sleep(Duration::from_millis(50));
    let batch = f.submit(Op::Write, 100);
    let mut second = f.peer.accept_data();
    serve_write(&mut second);
    assert_eq!(remote(&batch), Remote::Applied);
    assert!(support::read_to_close(&mut first).is_empty());
}

// row: W8.3c
#[test]
fn a_reused_connection_that_dies_before_any_reply_is_retried_once_on_a_fresh_one() {
    let f = fixture();
    let batch = f.submit(Op::Write, 100);
    let mut first = f.peer.accept_data();
    serve_write(&mut first);
    assert_eq!(remote(&batch), Remote::Applied);

    // The peer takes the next request and dies without a word.
    let batch = f.submit(Op::Write, 100);
    read_header(&mut first);
    read_exactly(&mut first, 100);
    drop(first);
    let mut second = f.peer.accept_data();
    serve_write(&mut second);
    assert_eq!(remote(&batch), Remote::Applied);

    // Again, and the fresh connection dies as well: that is the end.
    let batch = f.submit(Op::Write, 100);
    read_header(&mut second);
    drop(second);
    let mut third = f.peer.accept_data();
    read_header(&mut third);
    drop(third);
    assert_eq!(remote(&batch), Remote::Ended(Reason::Closed));
}

// row: W8.3c
#[test]
fn a_first_connection_that_dies_is_not_retried() {
    let f = fixture();
    let batch = f.submit(Op::Write, 100);
    let mut stream = f.peer.accept_data();
    read_header(&mut stream);
    drop(stream);
    assert_eq!(remote(&batch), Remote::Ended(Reason::Closed));
    f.peer.data.set_nonblocking(true).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    assert!(f.peer.data.accept().is_err());
}

// row: W8.3c
#[test]
fn a_reused_connection_with_a_reply_byte_is_not_retried() {
    let f = fixture();
    let batch = f.submit(Op::Write, 100);
    let mut stream = f.peer.accept_data();
    serve_write(&mut stream);
    assert_eq!(remote(&batch), Remote::Applied);
    let batch = f.submit(Op::Write, 100);
    read_header(&mut stream);
    read_exactly(&mut stream, 100);
    stream.write_all(&Status::Ok.encode()[..3]).unwrap();
    drop(stream);
    assert_eq!(remote(&batch), Remote::Ended(Reason::Closed));
}

// row: W8.3c
#[test]
fn our_own_deadline_is_never_followed_by_a_retry() {
    let f = fixture();
    let batch = f.submit(Op::Write, 100);
    let mut stream = f.peer.accept_data();
    serve_write(&mut stream);
    assert_eq!(remote(&batch), Remote::Applied);
    let batch = f.submit(Op::Write, 100);
    read_header(&mut stream);
    assert_eq!(
        remote(&batch),
        Remote::Unknown(Reason::NoStatus { timeout_ms: 800 })
    );
    f.peer.data.set_nonblocking(true).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    assert!(f.peer.data.accept().is_err());
}

// row: W13.995
#[test]
fn many_tasks_share_at_most_four_lanes() {
    let f = fixture_with(engine(), MIB);
    let accepted = AtomicUsize::new(0);
    let tasks: Vec<Task> = (0..200).map(|_| f.task(Op::Write, 5_000)).collect();
    std::thread::scope(|scope| {
        let batch = f.engine.submit(tasks).unwrap();
        f.peer.data.set_nonblocking(true).unwrap();
        let start = Instant::now();
        while batch.poll().is_none() && start.elapsed() < support::LONG {
            match f.peer.data.accept() {
                Ok((mut stream, _)) => {
                    accepted.fetch_add(1, Ordering::SeqCst);
                    stream.set_nonblocking(false).unwrap();
                    support::limit(&stream);
                    scope.spawn(move || {
                        use std::io::Read;
                        let mut header = [0; 24];
                        while stream.read_exact(&mut header).is_ok() {
                            read_exactly(&mut stream, 5_000);
                            stream.write_all(&Status::Ok.encode()).unwrap();
                        }
                    });
                }
                Err(_) => std::thread::sleep(Duration::from_millis(1)),
            }
        }
        let report = finish(&batch);
        drop(f.segment);
        drop(f.engine);
        assert!(report.is_applied());
    });
    let accepted = accepted.load(Ordering::SeqCst);
    assert!((1..=4).contains(&accepted), "{accepted} lanes");
}

#[test]
fn giving_a_segment_up_closes_its_lanes() {
    let f = fixture();
    let batch = f.submit(Op::Write, 100);
    let mut stream = f.peer.accept_data();
    serve_write(&mut stream);
    assert_eq!(remote(&batch), Remote::Applied);
    drop(f.segment);
    assert!(support::read_to_close(&mut stream).is_empty());
}

// row: W6c
#[test]
fn a_refused_data_port_leads_to_one_fetch_of_the_descriptor_per_second() {
    let mut f = fixture();
    // Nothing listens on the old port any more.
    let moved = support::listener();
    let old = std::mem::replace(&mut f.peer.data, moved);
    drop(old);
    let batch = f.submit(Op::Write, 100);
    // What the descriptor says now is where the peer really is.
    f.peer.answer_metadata(&f.peer.descriptor());
    let mut stream = f.peer.accept_data();
    serve_write(&mut stream);
    assert_eq!(remote(&batch), Remote::Applied);
    // It moves again at once: no second fetch within the second, so the task fails.
    let moved = support::listener();
    drop(std::mem::replace(&mut f.peer.data, moved));
    drop(stream);
    let batch = f.submit(Op::Write, 100);
    assert!(matches!(
        remote(&batch),
        Remote::Ended(Reason::Connect { .. })
    ));
    f.peer.control.set_nonblocking(true).unwrap();
    assert!(
        f.peer.control.accept().is_err(),
        "fetched again within the second"
    );
    f.peer.control.set_nonblocking(false).unwrap();
    std::thread::sleep(Duration::from_millis(1_100));
    let batch = f.submit(Op::Write, 100);
    f.peer.answer_metadata(&f.peer.descriptor());
    serve_write(&mut f.peer.accept_data());
    assert_eq!(remote(&batch), Remote::Applied);
}

#[test]
fn a_peer_that_does_not_accept_fails_the_task_in_time() {
    let f = fixture();
    // A listener whose backlog is full drops further attempts to connect.
    let full = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    full.bind(
        &"127.0.0.1:0"
            .parse::<std::net::SocketAddr>()
            .unwrap()
            .into(),
    )
    .unwrap();
    full.listen(0).unwrap();
    let address = full.local_addr().unwrap().as_socket().unwrap();
    let mut fillers = Vec::new();
    for _ in 0..8 {
        match std::net::TcpStream::connect_timeout(&address, Duration::from_millis(100)) {
            Ok(stream) => fillers.push(stream),
            Err(_) => break,
        }
    }
    let peer = FakePeer::new();
    let mut descriptor = peer.descriptor();
    descriptor.data_port = address.port();
    let segment = std::thread::scope(|scope| {
        scope.spawn(|| peer.answer_metadata(&descriptor));
        f.engine.open_segment(&peer.name()).unwrap()
    });
    let start = Instant::now();
    let batch = f
        .engine
        .submit(vec![task(Op::Write, &segment, 8, &f.local, 0..100)])
        .unwrap();
    peer.answer_metadata(&descriptor);
    let found = remote(&batch);
    assert!(
        matches!(
            found,
            Remote::Ended(Reason::ConnectTimeout {
                timeout_ms: 500,
                ..
            })
        ),
        "{found:?}"
    );
    assert!(start.elapsed() < Duration::from_secs(3));
}

// row: W13.682
#[test]
fn an_unreachable_data_host_falls_back_to_the_host_that_answered_for_control() {
    let engine = hasty_engine();
    let peer = FakePeer::new();
    // 127.9.9.9 is loopback as well, but nothing listens there.
    for host in ["127.9.9.9", "host.invalid"] {
        let mut descriptor = peer.descriptor();
        descriptor.data_host = Some(host.into());
        let segment = std::thread::scope(|scope| {
            scope.spawn(|| peer.answer_metadata(&descriptor));
            engine.open_segment(&peer.name()).unwrap()
        });
        let local = slab(4096);
        let batch = engine
            .submit(vec![task(Op::Write, &segment, 8, &local, 0..100)])
            .unwrap();
        serve_write(&mut peer.accept_data());
        assert_eq!(remote(&batch), Remote::Applied, "{host}");
    }
}

// row: W5.4, W3.2b
#[test]
fn unusable_descriptors_are_typed_errors() {
    let engine = hasty_engine();
    let peer = FakePeer::new();
    let open_with = |reply: Vec<u8>| {
        std::thread::scope(|scope| {
            scope.spawn(|| peer.answer_control(&reply));
            engine.open_segment(&peer.name()).unwrap_err()
        })
    };
    let metadata = |text: &str| encode_frame(FrameKind::Metadata, text.as_bytes());
    for text in ["{}", "null"] {
        let error = open_with(metadata(text));
        assert!(
            matches!(
                error,
                EngineError::Descriptor {
                    source: DescriptorError::Null,
                    ..
                }
            ),
            "{error:?}"
        );
    }
    for text in [
        "[]",
        "\"x\"",
        "{",
        "",
        r#"{"protocol":"tcp","tcp_data_port":"9"}"#,
        r#"{"protocol":"rdma","tcp_data_port":9}"#,
        r#"{"protocol":"tcp"}"#,
        r#"{"protocol":"tcp","tcp_data_port":9,"buffers":[{"addr":1,"length":1}]}"#,
        &"[".repeat(5_000),
    ] {
        let error = open_with(metadata(text));
        assert!(
            matches!(error, EngineError::Descriptor { .. }),
            "{text}: {error:?}"
        );
    }
    let control = |error: EngineError| match error {
        EngineError::Control { source, .. } => source,
        other => panic!("{other:?}"),
    };
    assert_eq!(control(open_with(Vec::new())), ControlError::Closed);
    assert_eq!(control(open_with(vec![5, 0])), ControlError::Closed);
    assert_eq!(
        control(open_with(encode_frame(FrameKind::Probe, b"{}"))),
        ControlError::WrongType
    );
    assert!(matches!(
        control(open_with(0u64.to_le_bytes().into())),
        ControlError::Frame(_)
    ));
    assert!(matches!(
        control(open_with(u64::MAX.to_le_bytes().into())),
        ControlError::Frame(_)
    ));
    assert!(matches!(
        engine.open_segment(""),
        Err(EngineError::PeerName { .. })
    ));
}

// row: W3.2b
#[test]
fn a_descriptor_longer_than_real_peers_read_is_accepted() {
    let engine = engine();
    let peer = FakePeer::new();
    let mut descriptor = peer.descriptor();
    descriptor.buffers = (1..=20_000)
        .map(|index| mooncake_transport::wire::descriptor::BufferRange {
            address: index << 32,
            len: 4096,
        })
        .collect();
    assert!(descriptor.encode().len() > 1 << 20);
    std::thread::scope(|scope| {
        scope.spawn(|| peer.answer_metadata(&descriptor));
        engine.open_segment(&peer.name()).unwrap();
    });
}

// row: W3.2c, W3.5a, W13.1523
#[test]
fn our_metadata_request_is_a_small_descriptor_of_ours() {
    let engine = hasty_engine();
    let memory = slab(4096);
    let _registration = support::register(&engine, &memory);
    let peer = FakePeer::new();
    let payload = std::thread::scope(|scope| {
        let answer = scope.spawn(|| peer.answer_metadata(&peer.descriptor()));
        engine.open_segment(&peer.name()).unwrap();
        answer.join().unwrap()
    });
    assert_eq!(payload[0], 1);
    let sent = Descriptor::decode(&payload[1..]).unwrap();
    assert_eq!(sent.name, engine.session());
    assert_eq!(sent.data_port, engine.data_address().port());
    assert!(sent.buffers.is_empty());
}

// row: W3.4b
#[test]
fn a_control_request_arrives_in_one_piece() {
    let engine = engine();
    let peer = FakePeer::new();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            use std::io::Read;
            let (mut stream, _) = peer.control.accept().unwrap();
            support::limit(&stream);
            let mut first = vec![0; 4096];
            let count = stream.read(&mut first).unwrap();
            let len = u64::from_le_bytes(first[..8].try_into().unwrap());
            assert_eq!(count as u64, 8 + len);
            let reply = peer.descriptor().encode();
            stream
                .write_all(&encode_frame(FrameKind::Metadata, reply.as_bytes()))
                .unwrap();
        });
        engine.open_segment(&peer.name()).unwrap();
    });
}

// row: W3.4c
#[test]
fn a_control_reply_that_never_comes_is_a_typed_error_after_its_deadline() {
    let engine = hasty_engine();
    let peer = FakePeer::new();
    let start = Instant::now();
    let error = std::thread::scope(|scope| {
        let silent = scope.spawn(|| {
            let (mut stream, _) = peer.control.accept().unwrap();
            support::limit(&stream);
            support::read_to_close(&mut stream).len()
        });
        let error = engine.open_segment(&peer.name()).unwrap_err();
        assert!(silent.join().unwrap() > 9);
        error
    });
    assert!(matches!(
        error,
        EngineError::Control {
            source: ControlError::ReplyTimeout { timeout_ms: 1_000 },
            ..
        }
    ));
    assert!(start.elapsed() < Duration::from_secs(3));
    assert_eq!(
        mooncake_transport::tcp::TcpTimeouts::default().control_reply,
        Duration::from_secs(60)
    );
}

// row: W3.4a
#[test]
fn a_control_connection_is_closed_as_soon_as_the_reply_is_there() {
    let engine = engine();
    let peer = FakePeer::new();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut stream, _) = peer.control.accept().unwrap();
            support::limit(&stream);
            read_exactly(&mut stream, 11);
            stream
                .write_all(&encode_frame(
                    FrameKind::Probe,
                    b"{\"status\":\"anything\"}",
                ))
                .unwrap();
            let start = Instant::now();
            assert!(support::read_to_close(&mut stream).is_empty());
            assert!(start.elapsed() < Duration::from_secs(1));
        });
        // The status text does not matter, as with real peers.
        engine.probe(&peer.name()).unwrap();
    });
}

// row: W3.5a
#[test]
fn notifications_go_to_the_name_in_the_descriptor_and_an_empty_answer_refuses_them() {
    let engine = hasty_engine();
    let peer = FakePeer::new();
    let other = FakePeer::new();
    let mut descriptor = peer.descriptor();
    descriptor.name = other.name();
    let segment = std::thread::scope(|scope| {
        scope.spawn(|| peer.answer_metadata(&descriptor));
        engine.open_segment(&peer.name()).unwrap()
    });
    let notify = |reply: Vec<u8>| {
        std::thread::scope(|scope| {
            let answer = scope.spawn(|| other.answer_control(&reply));
            let result = engine.notify(&segment, "n1", "payload");
            (answer.join().unwrap(), result)
        })
    };
    let (payload, result) = notify(encode_frame(FrameKind::Notify, NOTIFY_TAKEN));
    assert_eq!(result, Ok(()));
    assert_eq!(payload[0], 2);
    assert_eq!(&payload[1..], br#"{"name":"n1","notify_msg":"payload"}"#);
    let refused = encode_frame(FrameKind::Notify, br#"{"name":"","notify_msg":""}"#);
    assert!(matches!(
        notify(refused).1,
        Err(EngineError::Control {
            source: ControlError::NotifyRefused,
            ..
        })
    ));
    let broken = encode_frame(FrameKind::Notify, b"nonsense");
    assert!(matches!(
        notify(broken).1,
        Err(EngineError::Control {
            source: ControlError::Json(_),
            ..
        })
    ));
}

#[test]
fn a_peer_that_resets_in_the_middle_of_everything_fails_tasks_and_nothing_else() {
    let f = fixture_with(hasty_engine(), 4 * MIB);
    /// Ends the peer's thread even if an assertion fails.
    struct Stop<'a>(&'a AtomicUsize);
    impl Drop for Stop<'_> {
        fn drop(&mut self) {
            self.0.store(1, Ordering::SeqCst);
        }
    }
    let stop = AtomicUsize::new(0);
    let seen = &stop;
    std::thread::scope(|scope| {
        let _stop = Stop(&stop);
        f.peer.data.set_nonblocking(true).unwrap();
        f.peer.control.set_nonblocking(true).unwrap();
        let peer = &f.peer;
        scope.spawn(move || {
            let mut round = 0u64;
            while seen.load(Ordering::SeqCst) == 0 {
                // Refreshes are refused.
                drop(peer.control.accept());
                let Ok((stream, _)) = peer.data.accept() else {
                    std::thread::sleep(Duration::from_millis(1));
                    continue;
                };
                let mut stream = stream;
                stream.set_nonblocking(false).unwrap();
                stream
                    .set_read_timeout(Some(Duration::from_millis(20)))
                    .unwrap();
                round += 1;
                use std::io::Read;
                let mut buffer = vec![0; (round * 7_919 % 200_000) as usize];
                // Whatever has come by then.
                let _ = stream.read_exact(&mut buffer);
                let _ = stream.write_all(&Status::Ok.encode()[..(round % 8) as usize]);
                if round.is_multiple_of(3) {
                    let _ = stream.shutdown(Shutdown::Write);
                }
            }
        });
        let batches: Vec<Batch> = (0..10)
            .map(|index| {
                let tasks = (0..10)
                    .map(|_| f.task(if index % 2 == 0 { Op::Write } else { Op::Read }, MIB))
                    .collect();
                f.engine.submit(tasks).unwrap()
            })
            .collect();
        for batch in &batches {
            for settled in finish(batch).tasks() {
                assert!(settled.remote.reason().is_some());
            }
        }
    });
    assert_eq!(Arc::strong_count(&f.local), 1);
}
