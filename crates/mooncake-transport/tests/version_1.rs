//! Our initiator against peers that offer version 1 of the data protocol alone, in which nothing is
//! acknowledged.
#![cfg(feature = "tcp")]

mod support;

use std::io::Write;
use std::net::TcpStream;

use mooncake_transport::tcp::TcpEngine;
use mooncake_transport::wire::data::{DataVersion, Header};
use mooncake_transport::{Engine, Op, Reason, Remote, Segment};
use support::{
    FakePeer, assert_pattern, bytes, fill, finish, hasty_engine, pattern, read_exactly,
    read_header, read_to_close, run_one, slab, task,
};

const THERE: u64 = 0x7000_0000;

fn request(op: Op, size: u64) -> Header {
    Header {
        size,
        address: THERE,
        op,
        version: DataVersion::V1,
    }
}

/// Opens the peer, whose descriptor says that it speaks no more than version 1.
fn open(peer: &FakePeer, engine: &TcpEngine) -> Segment {
    let mut descriptor = peer.descriptor();
    descriptor.version = DataVersion::V1;
    std::thread::scope(|scope| {
        scope.spawn(|| peer.answer_metadata(&descriptor));
        engine.open_segment(&peer.name()).unwrap()
    })
}

/// Takes a write and the read behind it, and returns what was written.
fn take_write(stream: &mut TcpStream, len: u64) -> Vec<u8> {
    assert_eq!(read_header(stream), request(Op::Write, len));
    let payload = read_exactly(stream, len);
    assert_eq!(read_header(stream), request(Op::Read, 1));
    payload
}

// row: W7.3e, W13.2086
#[test]
fn a_write_is_applied_once_a_read_behind_it_is_answered() {
    let (peer, engine) = (FakePeer::new(), hasty_engine());
    let segment = open(&peer, &engine);
    let local = slab(1 << 20);
    fill(&local, 0, 5, 70_001);
    let batch = engine
        .submit(vec![task(Op::Write, &segment, THERE, &local, 0..70_001)])
        .unwrap();
    let mut stream = peer.accept_data();
    assert!(take_write(&mut stream, 70_001) == pattern(5, 70_001));
    assert!(batch.poll().is_none(), "nothing has been answered");
    stream.write_all(b"?").unwrap();
    assert!(finish(&batch).is_applied());

    // The connection serves the next request.
    let batch = engine
        .submit(vec![task(Op::Write, &segment, THERE, &local, 0..1)])
        .unwrap();
    take_write(&mut stream, 1);
    stream.write_all(b"?").unwrap();
    assert!(finish(&batch).is_applied());
}

// row: W7.3e
#[test]
fn a_write_without_an_answer_leaves_the_peer_unknown() {
    let (peer, engine) = (FakePeer::new(), hasty_engine());
    let segment = open(&peer, &engine);
    let local = slab(4096);
    let batch = engine
        .submit(vec![task(Op::Write, &segment, THERE, &local, 0..100)])
        .unwrap();
    let mut stream = peer.accept_data();
    take_write(&mut stream, 100);
    let report = finish(&batch);
    assert_eq!(
        report.tasks()[0].remote,
        Remote::Unknown(Reason::NoStatus { timeout_ms: 800 })
    );
    assert!(read_to_close(&mut stream).is_empty());
}

// row: W7.3e
#[test]
fn a_refused_write_is_a_closed_connection() {
    let (peer, engine) = (FakePeer::new(), hasty_engine());
    let segment = open(&peer, &engine);
    let local = slab(4096);
    let batch = engine
        .submit(vec![task(Op::Write, &segment, THERE, &local, 0..100)])
        .unwrap();
    // A real target closes right after the header; what was sent behind it makes that a reset.
    let mut stream = peer.accept_data();
    read_header(&mut stream);
    drop(stream);
    let report = finish(&batch);
    assert_eq!(report.tasks()[0].remote, Remote::Ended(Reason::Closed));
}

// row: W7.3e
#[test]
fn a_byte_before_the_read_was_sent_is_no_answer_to_it() {
    let (peer, engine) = (FakePeer::new(), hasty_engine());
    let segment = open(&peer, &engine);
    // More than the buffers of both ends hold, so that the read cannot have been sent.
    let local = slab(64 << 20);
    let batch = engine
        .submit(vec![task(Op::Write, &segment, THERE, &local, 0..64 << 20)])
        .unwrap();
    let mut stream = peer.accept_data();
    read_header(&mut stream);
    stream.write_all(b"?").unwrap();
    let report = finish(&batch);
    assert_eq!(report.tasks()[0].remote, Remote::Unknown(Reason::Unasked));
}

// row: W7.3e
#[test]
fn a_read_brings_its_bytes_without_a_status() {
    let (peer, engine) = (FakePeer::new(), hasty_engine());
    let segment = open(&peer, &engine);
    let local = slab(1 << 20);
    let batch = engine
        .submit(vec![task(Op::Read, &segment, THERE, &local, 100..70_101)])
        .unwrap();
    let mut stream = peer.accept_data();
    assert_eq!(read_header(&mut stream), request(Op::Read, 70_001));
    let content = pattern(6, 70_001);
    for piece in [&content[..1], &content[1..]] {
        assert!(batch.poll().is_none());
        stream.write_all(piece).unwrap();
    }
    assert!(finish(&batch).is_applied());
    assert_pattern(&local, 100, 6, 70_001);
    assert_eq!(bytes(&local, 0, 100), [0; 100]);
    assert_eq!(bytes(&local, 70_101, 100), [0; 100]);
}

// row: W7.3e, W8.3c
#[test]
fn a_request_that_a_used_connection_leaves_unanswered_is_sent_again() {
    for op in [Op::Read, Op::Write] {
        let (peer, engine) = (FakePeer::new(), hasty_engine());
        let segment = open(&peer, &engine);
        let local = slab(4096);
        let serve = |stream: &mut TcpStream| {
            match op {
                Op::Read => assert_eq!(read_header(stream), request(op, 1)),
                Op::Write => drop(take_write(stream, 1)),
            }
            stream.write_all(b"?").unwrap();
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut first = peer.accept_data();
                serve(&mut first);
                read_header(&mut first);
                drop(first);
                serve(&mut peer.accept_data());
            });
            for _ in 0..2 {
                let remote = run_one(&engine, task(op, &segment, THERE, &local, 0..1));
                assert!(remote.is_applied(), "{op:?}: {remote:?}");
            }
        });
    }
}
