//! Whatever arrives at our listeners is served, answered or closed in time, and the engine goes on.
#![cfg(feature = "tcp")]

mod support;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use mooncake_transport::tcp::TcpEngine;
use mooncake_transport::wire::control::{
    CONNECTION_EMPTY, FrameKind, NOTIFY_TAKEN, PROBE_ALIVE, encode_frame,
};
use mooncake_transport::wire::data::{DataVersion, Header, Op, Status};
use mooncake_transport::{Access, Engine};
use slab_memory::HostSlab;
use support::{
    LONG, ask, assert_serves, bytes, dial, engine, engine_with, fill, hasty_engine, header,
    pattern, read_status, read_to_close, register, slab,
};

const MIB: u64 = 1 << 20;

fn check_control(request: &[u8], reply: Option<&[u8]>) {
    let target = engine();
    let slab = slab(4096);
    let _registration = register(&target, &slab);
    let found = ask(target.control_address(), request);
    assert_eq!(
        found,
        reply.unwrap_or_default(),
        "{:?}",
        &request[..request.len().min(40)]
    );
    assert_serves(&target, &slab);
}

// row: W3.2b
#[test]
fn control_frames_of_no_bytes_or_too_many_are_closed_without_a_reply() {
    check_control(&0u64.to_le_bytes(), None);
    check_control(&u64::MAX.to_le_bytes(), None);
    check_control(&((128 << 20) + 1u64).to_le_bytes(), None);
    let mut notify = (MIB + 1).to_le_bytes().to_vec();
    notify.push(2);
    check_control(&notify, None);
}

// row: W3.2b
#[test]
fn control_frames_up_to_exactly_the_limit_are_served() {
    let mut text = br#"{"name":"n","notify_msg":"m"}"#.to_vec();
    text.resize(MIB as usize - 1, b' ');
    let request = encode_frame(FrameKind::Notify, &text);
    assert_eq!(request[..8], MIB.to_le_bytes());
    check_control(
        &request,
        Some(&encode_frame(FrameKind::Notify, NOTIFY_TAKEN)),
    );
}

#[test]
fn long_metadata_requests_are_drained_and_answered() {
    let target = engine();
    let text = vec![b' '; 5 << 20];
    let reply = ask(
        target.control_address(),
        &encode_frame(FrameKind::Metadata, &text),
    );
    assert!(reply.starts_with(&((reply.len() - 8) as u64).to_le_bytes()));
    assert_eq!(reply.last(), Some(&b'\n'));
}

// row: W3.3a, W3.3b
#[test]
fn unknown_frame_types_are_closed_and_the_old_protocol_is_answered() {
    for byte in [4u8, 9, 0x20, 0x5B, 0x7A, 0x7C, 0x7F, 0x80, 0xFF] {
        let mut request = encode_frame(FrameKind::Probe, b"{}");
        request[8] = byte;
        check_control(&request, None);
    }
    check_control(
        &encode_frame(
            FrameKind::Untyped,
            br#"{"local_nic_path":"a","qp_num":[1]}"#,
        ),
        Some(&encode_frame(FrameKind::Untyped, CONNECTION_EMPTY)),
    );
    check_control(
        &encode_frame(FrameKind::Connection, b"{}"),
        Some(&encode_frame(FrameKind::Connection, CONNECTION_EMPTY)),
    );
}

// row: W3.5b, W13.1369
#[test]
fn malformed_control_text_is_closed_without_a_reply() {
    for text in [
        "",
        "{",
        "{'a':1}",
        "{\"a\":1,}",
        "\u{feff}{}",
        "not json",
        "\"open",
    ] {
        check_control(&encode_frame(FrameKind::Notify, text.as_bytes()), None);
        check_control(&encode_frame(FrameKind::Probe, text.as_bytes()), None);
        check_control(&encode_frame(FrameKind::Connection, text.as_bytes()), None);
    }
    for text in ["/* c */{} trailing garbage", "{\"a\":1,\"a\":2}"] {
        check_control(
            &encode_frame(FrameKind::Probe, text.as_bytes()),
            Some(&encode_frame(FrameKind::Probe, PROBE_ALIVE)),
        );
    }
}

// row: W3.5b, W13.1369
#[test]
fn control_requests_that_kill_a_real_peer_are_dropped() {
    for text in [
        "[]",
        "\"x\"",
        r#"{"name":[],"notify_msg":""}"#,
        r#"{"name":"","notify_msg":{}}"#,
    ] {
        check_control(&encode_frame(FrameKind::Notify, text.as_bytes()), None);
    }
    check_control(&encode_frame(FrameKind::Connection, b"[]"), None);
    check_control(
        &encode_frame(FrameKind::Connection, br#"{"qp_num":["x"]}"#),
        Some(&encode_frame(FrameKind::Connection, CONNECTION_EMPTY)),
    );
    for deep in [
        "[".repeat(1_001),
        "{\"a\":".repeat(100_000),
        "[".repeat((1 << 20) - 1),
    ] {
        for kind in [FrameKind::Notify, FrameKind::Probe, FrameKind::Connection] {
            check_control(&encode_frame(kind, deep.as_bytes()), None);
        }
    }
}

// row: W9b
#[test]
fn lenient_notifications_are_taken_as_real_peers_take_them() {
    let target = engine();
    for text in [
        &br#"{"name":5,"notify_msg":true}"#[..],
        br#"{"name":1e2,"notify_msg":null}"#,
        br#"{}"#,
        b"{\"name\":\"bad \xFF utf8\",\"notify_msg\":\"\"}",
    ] {
        let reply = ask(
            target.control_address(),
            &encode_frame(FrameKind::Notify, text),
        );
        assert_eq!(reply, encode_frame(FrameKind::Notify, NOTIFY_TAKEN));
    }
    let taken = target.take_notices().unwrap().notices;
    let texts: Vec<_> = taken
        .iter()
        .map(|notice| (&*notice.name, &*notice.message))
        .collect();
    assert_eq!(
        texts,
        [
            ("5", "true"),
            ("100.0", ""),
            ("", ""),
            ("bad \u{fffd} utf8", "")
        ]
    );
}

#[test]
fn any_metadata_request_gets_the_whole_descriptor() {
    let target = engine();
    let slab = slab(4096);
    let _registration = register(&target, &slab);
    for text in ["{}", "null", "[]", "5", ""] {
        let reply = ask(
            target.control_address(),
            &encode_frame(FrameKind::Metadata, text.as_bytes()),
        );
        let descriptor =
            mooncake_transport::wire::descriptor::Descriptor::decode(&reply[9..]).unwrap();
        assert_eq!(descriptor.buffers.len(), 1, "{text}");
    }
}

// row: W3.4e
#[test]
fn a_second_request_on_a_control_connection_is_never_read() {
    let probe = encode_frame(FrameKind::Probe, b"{}");
    check_control(
        &[probe.clone(), probe].concat(),
        Some(&encode_frame(FrameKind::Probe, PROBE_ALIVE)),
    );
}

// row: W3.4e
#[test]
fn a_control_client_may_half_close_and_the_server_does_so_after_its_reply() {
    let target = engine();
    let mut stream = dial(target.control_address());
    stream
        .write_all(&encode_frame(FrameKind::Probe, b"{}"))
        .unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    assert_eq!(
        read_to_close(&mut stream),
        encode_frame(FrameKind::Probe, PROBE_ALIVE)
    );
    // Without a half-close of ours: the end of the stream comes before we close.
    let mut stream = dial(target.control_address());
    stream
        .write_all(&encode_frame(FrameKind::Probe, b"{}"))
        .unwrap();
    assert_eq!(
        read_to_close(&mut stream),
        encode_frame(FrameKind::Probe, PROBE_ALIVE)
    );
}

// row: W3.4e
#[test]
fn a_control_frame_that_trickles_in_is_served() {
    let target = engine();
    let mut stream = dial(target.control_address());
    for byte in encode_frame(FrameKind::Probe, b"{}") {
        stream.write_all(&[byte]).unwrap();
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(
        read_to_close(&mut stream),
        encode_frame(FrameKind::Probe, PROBE_ALIVE)
    );
}

// row: W3.4d
#[test]
fn stalled_control_clients_delay_nobody_and_are_closed_in_time() {
    let target = hasty_engine();
    let mut stalled = dial(target.control_address());
    stalled.write_all(&[3, 0, 0]).unwrap();
    let mut lingering = dial(target.control_address());
    lingering
        .write_all(&encode_frame(FrameKind::Probe, b"{}"))
        .unwrap();
    let start = Instant::now();
    let reply = ask(
        target.control_address(),
        &encode_frame(FrameKind::Probe, b"{}"),
    );
    assert_eq!(reply, encode_frame(FrameKind::Probe, PROBE_ALIVE));
    assert!(
        start.elapsed() < Duration::from_millis(500),
        "a control client had to wait"
    );
    assert!(read_to_close(&mut stalled).is_empty());
    assert!(start.elapsed() < Duration::from_secs(2));
}

#[test]
fn a_control_client_that_trickles_for_ever_is_closed_in_time() {
    let target = hasty_engine();
    let mut stream = dial(target.control_address());
    let start = Instant::now();
    stream.write_all(&(1_000u64).to_le_bytes()).unwrap();
    let mut closed = false;
    while start.elapsed() < Duration::from_secs(5) {
        if stream.write_all(b"\x03").is_err() {
            closed = true;
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(closed && start.elapsed() < Duration::from_secs(3));
}

#[test]
fn control_connections_beyond_the_limit_are_closed_at_once() {
    let target = engine_with(|config| config.limits.inbound_control_max = 3);
    let held: Vec<_> = (0..3)
        .map(|_| {
            let mut stream = dial(target.control_address());
            stream.write_all(&[3]).unwrap();
            stream
        })
        .collect();
    // Accepted in order, so the fourth finds the three.
    assert!(
        ask(
            target.control_address(),
            &encode_frame(FrameKind::Probe, b"{}")
        )
        .is_empty()
    );
    drop(held);
    let start = Instant::now();
    while ask(
        target.control_address(),
        &encode_frame(FrameKind::Probe, b"{}"),
    )
    .is_empty()
    {
        assert!(start.elapsed() < LONG);
    }
}

/// What a target does with a request that it must not serve.
fn check_rejected(target: &TcpEngine, request: [u8; 24]) {
    let mut stream = dial(target.data_address());
    stream.write_all(&request).unwrap();
    assert_eq!(read_status(&mut stream), Status::Rejected, "{request:?}");
    assert!(read_to_close(&mut stream).is_empty());
}

// row: W7.4a, W13.2313
#[test]
fn every_range_that_is_not_inside_one_registration_is_rejected() {
    let target = engine();
    let whole = slab(12_288);
    // Two neighbouring registrations, carved from one mapping by way of two slabs is not possible,
    // so the second range is whatever lies next to the first.
    let _registration = register(&target, &whole);
    let (start, len) = (whole.address(), whole.len());
    for op in [Op::Read, Op::Write] {
        for (address, size) in [
            (16, 8),
            (start - 1, 8),
            (start - 1, 1),
            (start + len - 7, 8),
            (start + len, 1),
            (start, len + 1),
            (u64::MAX, 8),
            (u64::MAX, u64::MAX),
            (start, u64::MAX),
            (start, 0),
            (0, 0),
            (start + len, 0),
        ] {
            check_rejected(&target, header(op, address, size));
        }
    }
    fill(&whole, 0, 1, 12_288);
    assert_serves(&target, &whole);
}

// row: W7.1b
#[test]
fn unknown_operations_are_rejected_and_never_answered_with_data() {
    let target = engine();
    let slab = slab(4096);
    let _registration = register(&target, &slab);
    for opcode in [0x82, 0x83, 0xFE, 0xFF] {
        let mut request = header(Op::Read, slab.address(), 16);
        request[16] = opcode;
        check_rejected(&target, request);
    }
    for opcode in [0x02, 0x03, 0x7F] {
        let mut request = header(Op::Read, slab.address(), 16);
        request[16] = opcode;
        let mut stream = dial(target.data_address());
        stream.write_all(&request).unwrap();
        assert!(read_to_close(&mut stream).is_empty());
    }
    assert_serves(&target, &slab);
}

// row: W7.3b
#[test]
fn a_write_to_read_only_memory_is_rejected_and_stores_nothing() {
    let target = engine();
    let slab = slab(4096);
    let _registration = target.register(slab.clone(), Access::RemoteRead).unwrap();
    let mut stream = dial(target.data_address());
    stream
        .write_all(&header(Op::Write, slab.address(), 4))
        .unwrap();
    // Rejected before the payload is read, so writing it may fail.
    let _ = stream.write_all(b"abcd");
    assert_eq!(read_status(&mut stream), Status::Rejected);
    assert_eq!(bytes(&slab, 0, 4), [0; 4]);
}

// row: W7.4c
#[test]
fn a_rejection_can_be_read_although_the_payload_was_sent_anyway() {
    let target = engine();
    for _ in 0..5 {
        let mut stream = dial(target.data_address());
        stream.write_all(&header(Op::Write, 16, 8 * MIB)).unwrap();
        // All of it is taken, thrown away.
        stream.write_all(&vec![7; 8 << 20]).unwrap();
        assert_eq!(read_status(&mut stream), Status::Rejected);
        assert!(read_to_close(&mut stream).is_empty());
    }
}

// row: W7.4c
#[test]
fn a_rejected_peer_that_does_not_close_is_closed_in_time() {
    let target = hasty_engine();
    let mut stream = dial(target.data_address());
    stream
        .write_all(&header(Op::Write, 16, u64::MAX / 2))
        .unwrap();
    assert_eq!(read_status(&mut stream), Status::Rejected);
    let start = Instant::now();
    let chunk = [0; 1000];
    while stream.write_all(&chunk).is_ok() {
        assert!(start.elapsed() < Duration::from_secs(5), "drained for ever");
        std::thread::sleep(Duration::from_millis(5));
    }
}

// row: W7.4c
#[test]
fn a_rejected_flood_is_drained_only_up_to_the_bound() {
    let target = engine_with(|config| {
        config.limits.reject_drain_bytes_max = 1 << 20;
        config.timeouts.reject_drain = Duration::from_secs(60);
    });
    let mut stream = dial(target.data_address());
    stream
        .write_all(&header(Op::Write, 16, u64::MAX / 2))
        .unwrap();
    let start = Instant::now();
    let chunk = vec![0; 1 << 20];
    while stream.write_all(&chunk).is_ok() {
        assert!(
            start.elapsed() < Duration::from_secs(10),
            "drained without a bound"
        );
    }
}

#[test]
fn version_1_requests_are_served_and_may_be_mixed_with_version_2() {
    let target = engine();
    let slab = slab(4096);
    let _registration = register(&target, &slab);
    let v1 = |op, size| {
        Header {
            size,
            address: slab.address(),
            op,
            version: DataVersion::V1,
        }
        .encode()
    };
    let mut stream = dial(target.data_address());
    stream.write_all(&v1(Op::Write, 5)).unwrap();
    stream.write_all(b"hello").unwrap();
    stream.write_all(&v1(Op::Read, 5)).unwrap();
    let mut read = [0; 5];
    stream.read_exact(&mut read).unwrap();
    assert_eq!(&read, b"hello");
    stream
        .write_all(&header(Op::Read, slab.address(), 4))
        .unwrap();
    assert_eq!(read_status(&mut stream), Status::Ok);
    stream.read_exact(&mut read[..4]).unwrap();
    assert_eq!(&read[..4], b"hell");
    let rejected = Header {
        size: 0,
        address: 1,
        op: Op::Write,
        version: DataVersion::V1,
    };
    stream.write_all(&rejected.encode()).unwrap();
    assert!(read_to_close(&mut stream).is_empty());
}

#[test]
fn pipelined_requests_are_answered_in_order() {
    let target = engine();
    let slab = slab(4096);
    let _registration = register(&target, &slab);
    let mut all = Vec::new();
    all.extend_from_slice(&header(Op::Write, slab.address(), 3));
    all.extend_from_slice(b"abc");
    all.extend_from_slice(&header(Op::Read, slab.address() + 1, 2));
    all.extend_from_slice(&header(Op::Write, slab.address() + 1, 2));
    all.extend_from_slice(b"xy");
    all.extend_from_slice(&header(Op::Read, slab.address(), 3));
    let ok = Status::Ok.encode();
    let expected = [&ok[..], &ok, b"bc", &ok, &ok, b"axy"].concat();
    // In one piece, and a byte at a time.
    for step in [all.len(), 1] {
        let mut stream = dial(target.data_address());
        for piece in all.chunks(step) {
            stream.write_all(piece).unwrap();
        }
        let mut replies = vec![0; expected.len()];
        stream.read_exact(&mut replies).unwrap();
        assert_eq!(replies, expected);
    }
}

#[test]
fn a_write_that_is_cut_short_stores_what_arrived_and_nothing_else() {
    let target = engine();
    let slab = slab(4096);
    let _registration = register(&target, &slab);
    let mut stream = dial(target.data_address());
    stream
        .write_all(&header(Op::Write, slab.address(), 100))
        .unwrap();
    stream.write_all(&[9; 40]).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    assert!(read_to_close(&mut stream).is_empty());
    assert_eq!(bytes(&slab, 0, 40), [9; 40]);
    assert_eq!(bytes(&slab, 40, 60), [0; 60]);
    assert_serves(&target, &slab);
}

// row: W7.6a
#[test]
fn a_peer_may_half_close_after_a_write_and_still_gets_its_acknowledgement() {
    let target = engine();
    let slab = slab(4096);
    let _registration = register(&target, &slab);
    let mut stream = dial(target.data_address());
    stream
        .write_all(&header(Op::Write, slab.address(), 4))
        .unwrap();
    stream.write_all(b"abcd").unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    assert_eq!(read_to_close(&mut stream), Status::Ok.encode());
}

// row: W7.3a, W13.2086
#[test]
fn an_acknowledgement_means_that_every_byte_is_in_memory() {
    let target = engine();
    let slab = slab(4 * MIB);
    let _registration = register(&target, &slab);
    let mut stream = dial(target.data_address());
    for round in 0..20u64 {
        let size = 1 + round * 190_001;
        let payload = pattern(round, size as usize);
        stream
            .write_all(&header(Op::Write, slab.address(), size))
            .unwrap();
        stream.write_all(&payload).unwrap();
        assert_eq!(read_status(&mut stream), Status::Ok);
        assert!(bytes(&slab, 0, size as usize) == payload, "round {round}");
    }
}

#[test]
fn a_truncated_header_is_closed_on_half_close_and_after_the_deadline() {
    let target = hasty_engine();
    let slab = slab(4096);
    let _registration = register(&target, &slab);
    let mut stream = dial(target.data_address());
    stream.write_all(&[1; 23]).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    assert!(read_to_close(&mut stream).is_empty());

    let mut stream = dial(target.data_address());
    stream.write_all(&[1; 23]).unwrap();
    let start = Instant::now();
    assert!(read_to_close(&mut stream).is_empty());
    let waited = start.elapsed();
    assert!(
        waited > Duration::from_millis(200) && waited < Duration::from_secs(3),
        "{waited:?}"
    );
    assert_serves(&target, &slab);
}

// row: W8.2a
#[test]
fn a_slow_loris_lives_while_it_moves_and_dies_when_it_stops() {
    let target = hasty_engine();
    let slab = slab(4096);
    let _registration = register(&target, &slab);
    let mut stream = dial(target.data_address());
    stream
        .write_all(&header(Op::Write, slab.address(), 8))
        .unwrap();
    // Together longer than the deadline, each pause shorter.
    for _ in 0..7 {
        std::thread::sleep(Duration::from_millis(150));
        stream.write_all(&[5]).unwrap();
    }
    let start = Instant::now();
    assert!(read_to_close(&mut stream).is_empty());
    assert!(start.elapsed() < Duration::from_secs(3));
    assert_eq!(bytes(&slab, 0, 8), [5, 5, 5, 5, 5, 5, 5, 0]);
    assert_serves(&target, &slab);
}

// row: W8.2a
#[test]
fn a_peer_that_never_reads_is_closed_after_the_deadline() {
    let target = hasty_engine();
    let slab = slab(64 * MIB);
    let registration = register(&target, &slab);
    let mut stream = dial(target.data_address());
    stream
        .write_all(&header(Op::Read, slab.address(), 64 * MIB))
        .unwrap();
    std::thread::sleep(Duration::from_millis(2_000));
    // The engine has given up, so nothing holds the memory for the request any more.
    drop(registration);
    assert_eq!(std::sync::Arc::strong_count(&slab), 1);
    let received = read_to_close(&mut stream);
    assert!(received.len() < 64 << 20);
}

// row: W8.3a
#[test]
fn idle_data_connections_are_never_closed() {
    let target = hasty_engine();
    let slab = slab(4096);
    let _registration = register(&target, &slab);
    let mut fresh = dial(target.data_address());
    let mut used = dial(target.data_address());
    used.write_all(&header(Op::Read, slab.address(), 4))
        .unwrap();
    let mut reply = [0; 12];
    used.read_exact(&mut reply).unwrap();
    // Several times every deadline that this engine has.
    std::thread::sleep(Duration::from_millis(2_500));
    for stream in [&mut fresh, &mut used] {
        stream
            .write_all(&header(Op::Read, slab.address(), 4))
            .unwrap();
        assert_eq!(read_status(stream), Status::Ok);
    }
}

// row: W8.3a
#[test]
fn a_thousand_idle_and_half_sent_connections_slow_nobody_down() {
    let target = engine();
    let slab = slab(4096);
    let _registration = register(&target, &slab);
    // Both ends live in this process; half of the usual limit of descriptors is for the tests that
    // run beside this one.
    let limit = std::fs::read_to_string("/proc/self/limits").unwrap();
    let limit: usize = limit
        .lines()
        .find_map(|line| line.strip_prefix("Max open files"))
        .and_then(|rest| rest.split_whitespace().next()?.parse().ok())
        .unwrap();
    let count = 1_000.min(limit / 4);
    let held: Vec<_> = (0..count)
        .map(|index| {
            let mut stream = dial(target.data_address());
            if index % 2 == 0 {
                stream
                    .write_all(&header(Op::Write, slab.address(), 100))
                    .unwrap();
                stream.write_all(&[1; 10]).unwrap();
            }
            stream
        })
        .collect();
    let start = Instant::now();
    for _ in 0..10 {
        assert_serves(&target, &slab);
    }
    assert!(start.elapsed() < Duration::from_secs(3));
    drop(held);
    assert_serves(&target, &slab);
}

/// Sends a small request and checks that it is served.
fn assert_answers(stream: &mut TcpStream, slab: &HostSlab) {
    stream
        .write_all(&header(Op::Read, slab.address(), 4))
        .unwrap();
    assert_eq!(read_status(stream), Status::Ok);
    stream.read_exact(&mut [0; 4]).unwrap();
}

#[test]
fn connections_in_the_middle_of_a_request_are_not_closed_for_new_ones() {
    let target = engine_with(|config| config.limits.inbound_data_max = 2);
    let slab = slab(4096);
    let _registration = register(&target, &slab);
    let mut held: Vec<_> = (0..2)
        .map(|_| {
            let mut stream = dial(target.data_address());
            stream
                .write_all(&header(Op::Write, slab.address(), 2))
                .unwrap();
            stream.write_all(&[1]).unwrap();
            stream
        })
        .collect();
    // Longer than an idle connection would have to be idle.
    std::thread::sleep(Duration::from_millis(1_500));
    let mut refused = dial(target.data_address());
    assert!(read_to_close(&mut refused).is_empty());
    for stream in &mut held {
        stream.write_all(&[2]).unwrap();
        assert_eq!(read_status(stream), Status::Ok);
    }
    drop(held);
    let start = Instant::now();
    loop {
        let mut stream = dial(target.data_address());
        // A connection that is refused may already be reset.
        let _ = stream.write_all(&header(Op::Read, slab.address(), 4));
        let mut reply = [0; 12];
        if stream.read_exact(&mut reply).is_ok() {
            break;
        }
        assert!(start.elapsed() < LONG);
    }
}

#[test]
fn at_the_limit_the_connection_that_is_idle_longest_makes_way_for_a_new_one() {
    let target = engine_with(|config| config.limits.inbound_data_max = 3);
    let slab = slab(4096);
    let _registration = register(&target, &slab);
    let pause = || std::thread::sleep(Duration::from_millis(50));
    // In the order in which they were used last: the one that never was goes first all the same.
    let mut old = dial(target.data_address());
    assert_answers(&mut old, &slab);
    pause();
    let mut newer = dial(target.data_address());
    assert_answers(&mut newer, &slab);
    pause();
    let mut silent = dial(target.data_address());
    std::thread::sleep(Duration::from_millis(1_500));

    let mut first = dial(target.data_address());
    assert_answers(&mut first, &slab);
    assert!(read_to_close(&mut silent).is_empty());
    let mut second = dial(target.data_address());
    assert_answers(&mut second, &slab);
    assert!(read_to_close(&mut old).is_empty());
    for stream in [&mut newer, &mut first, &mut second] {
        assert_answers(stream, &slab);
    }
}

// row: W8.2a
#[test]
fn a_request_that_trickles_in_is_closed_in_time_although_it_moves() {
    let target = engine_with(|config| {
        config.timeouts.progress = Duration::from_millis(400);
        config.timeouts.status = Duration::from_millis(400);
        config.timeouts.min_bytes_per_s = 1_000;
    });
    let slab = slab(4096);
    let _registration = register(&target, &slab);
    let mut stream = dial(target.data_address());
    // Several in a row have a time each.
    for _ in 0..3 {
        stream
            .write_all(&header(Op::Write, slab.address(), 5))
            .unwrap();
        for byte in b"hello" {
            stream.write_all(&[*byte]).unwrap();
            std::thread::sleep(Duration::from_millis(80));
        }
        assert_eq!(read_status(&mut stream), Status::Ok);
    }
    stream
        .write_all(&header(Op::Write, slab.address(), 200))
        .unwrap();
    let start = Instant::now();
    // A second is what its length may take, and ten is what it would take; the connection fails after
    // the first.
    while stream.write_all(&[1]).is_ok() {
        assert!(
            start.elapsed() < Duration::from_secs(6),
            "it may trickle for ever"
        );
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(start.elapsed() > Duration::from_millis(900));
    assert_serves(&target, &slab);
}

#[test]
fn a_header_that_trickles_in_is_closed_in_time() {
    let target = engine_with(|config| config.timeouts.header = Duration::from_millis(600));
    let slab = slab(4096);
    let _registration = register(&target, &slab);
    let mut stream = dial(target.data_address());
    assert_answers(&mut stream, &slab);
    let start = Instant::now();
    for byte in header(Op::Read, slab.address(), 4) {
        // Fails once it has been closed.
        let _ = stream.write_all(&[byte]);
        std::thread::sleep(Duration::from_millis(100));
        if start.elapsed() > Duration::from_millis(1_500) {
            break;
        }
    }
    assert!(read_to_close(&mut stream).is_empty());
    assert!(start.elapsed() < Duration::from_secs(5));
    assert_serves(&target, &slab);
}

#[test]
fn a_peer_that_vanishes_while_it_is_sent_to_leaves_nothing_behind() {
    let target = engine();
    let slab = slab(64 * MIB);
    let registration = register(&target, &slab);
    for _ in 0..5 {
        let mut stream = dial(target.data_address());
        stream
            .write_all(&header(Op::Read, slab.address(), 64 * MIB))
            .unwrap();
        assert_eq!(read_status(&mut stream), Status::Ok);
        drop(stream);
    }
    assert_serves(&target, &slab);
    drop(registration);
    assert_eq!(std::sync::Arc::strong_count(&slab), 1);
}

// row: W13.1369
#[test]
fn random_bytes_on_either_listener_end_in_a_close_and_harm_nobody() {
    let target = hasty_engine();
    let slab = slab(4096);
    let _registration = register(&target, &slab);
    for seed in 0..40 {
        for address in [target.control_address(), target.data_address()] {
            let mut stream = dial(address);
            // It may be closed before all of it is written.
            let _ = stream.write_all(&pattern(seed, 200 + seed as usize * 13));
            let _ = stream.shutdown(Shutdown::Write);
            read_to_close(&mut stream);
        }
    }
    assert_serves(&target, &slab);
}
