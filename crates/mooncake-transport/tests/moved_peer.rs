//! A peer that is found elsewhere is written to there, and nobody is written to where it was.
#![cfg(feature = "tcp")]

mod support;

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use mooncake_transport::tcp::TcpEngine;
use mooncake_transport::wire::control::{FrameKind, encode_frame};
use mooncake_transport::wire::data::Status;
use mooncake_transport::wire::descriptor::Descriptor;
use mooncake_transport::{Batch, Engine, Op, Reason, Remote, Segment};
use support::{
    FakePeer, engine, engine_with, finish, listener, read_exactly, read_header, read_to_close,
    slab, task,
};

const LEN: u64 = 100;

fn submit(engine: &TcpEngine, segment: &Segment) -> Batch {
    let local = slab(4096);
    let write = task(Op::Write, segment, 0x7000_0000, &local, 0..LEN);
    engine.submit(vec![write]).unwrap()
}

fn remote(batch: &Batch) -> Remote {
    finish(batch).tasks()[0].remote.clone()
}

fn read_request(stream: &mut TcpStream) {
    let header = read_header(stream);
    read_exactly(stream, header.size);
}

fn serve(stream: &mut TcpStream) {
    read_request(stream);
    stream.write_all(&Status::Ok.encode()).unwrap();
}

/// Two lanes: one idle, one that has taken a request and not answered it.
fn idle_and_busy(
    engine: &TcpEngine,
    segment: &Segment,
    peer: &FakePeer,
) -> (TcpStream, TcpStream, Batch) {
    let first = submit(engine, segment);
    let mut idle = peer.accept_data();
    read_request(&mut idle);
    let second = submit(engine, segment);
    let mut busy = peer.accept_data();
    read_request(&mut busy);
    idle.write_all(&Status::Ok.encode()).unwrap();
    assert_eq!(remote(&first), Remote::Applied);
    (idle, busy, second)
}

fn reopen(engine: &TcpEngine, peer: &FakePeer, descriptor: &Descriptor) -> Segment {
    std::thread::scope(|scope| {
        scope.spawn(|| peer.answer_metadata(descriptor));
        engine.open_segment(&peer.name()).unwrap()
    })
}

fn assert_nobody_connected(listener: &TcpListener) {
    listener.set_nonblocking(true).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    let error = listener.accept().map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WouldBlock);
    listener.set_nonblocking(false).unwrap();
}

/// A listener with a full backlog, and what fills it.
fn full_listener() -> (TcpListener, SocketAddr) {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    let any: SocketAddr = "127.0.0.1:0".parse().unwrap();
    socket.bind(&any.into()).unwrap();
    socket.listen(0).unwrap();
    let listener: TcpListener = socket.into();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

fn fill_backlog(address: SocketAddr) -> Vec<TcpStream> {
    let attempt = || TcpStream::connect_timeout(&address, Duration::from_millis(100));
    std::iter::from_fn(|| attempt().ok()).take(8).collect()
}

#[test]
fn a_lane_that_is_still_connecting_to_where_the_peer_was_gets_no_task() {
    let engine = engine();
    let mut peer = FakePeer::new();
    let (old, address) = full_listener();
    let new = std::mem::replace(&mut peer.data, old);
    let segment = peer.open(&engine);
    let first = submit(&engine, &segment);
    let mut stream = peer.accept_data();
    read_request(&mut stream);
    let fillers = fill_backlog(address);
    let second = submit(&engine, &segment);
    std::thread::sleep(Duration::from_millis(100));
    // The first lane ends, the descriptor is fetched, and says that the peer is elsewhere.
    drop(stream);
    assert!(first.wait(None).is_some());
    let old = std::mem::replace(&mut peer.data, new);
    peer.answer_metadata(&peer.descriptor());
    serve(&mut peer.accept_data());
    assert_eq!(remote(&second), Remote::Applied);
    // Whoever is at the old address now can accept as much as it likes.
    drop(fillers);
    old.set_nonblocking(true).unwrap();
    for _ in 0..30 {
        if let Ok((mut accepted, _)) = old.accept() {
            accepted.set_nonblocking(false).unwrap();
            support::limit(&accepted);
            assert!(read_to_close(&mut accepted).is_empty());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_peer_at_a_host_that_has_to_be_resolved_is_reached_once_its_segment_is_opened_again() {
    let engine = engine();
    let mut peer = FakePeer::new();
    let segment = peer.open(&engine);
    let (mut idle, busy, batch) = idle_and_busy(&engine, &segment, &peer);
    drop(busy);
    assert_eq!(remote(&batch), Remote::Ended(Reason::Closed));

    let old = std::mem::replace(&mut peer.data, listener());
    let mut descriptor = peer.descriptor();
    descriptor.data_host = Some("localhost".into());
    peer.answer_metadata(&descriptor);
    // The idle lane led to where the peer was.
    assert!(read_to_close(&mut idle).is_empty());
    let unresolved = Reason::Unresolved {
        host: "localhost".into(),
    };
    for _ in 0..2 {
        let batch = submit(&engine, &segment);
        assert_eq!(remote(&batch), Remote::Ended(unresolved.clone()));
    }
    assert_nobody_connected(&old);

    let again = reopen(&engine, &peer, &descriptor);
    let mut stream = None;
    for segment in [&segment, &again] {
        let batch = submit(&engine, segment);
        serve(stream.get_or_insert_with(|| peer.accept_data()));
        assert_eq!(remote(&batch), Remote::Applied);
    }
    assert_nobody_connected(&old);
}

#[test]
fn a_segment_whose_descriptor_was_too_long_to_fetch_again_is_found_by_opening_it() {
    let engine = engine();
    let mut peer = FakePeer::new();
    let segment = peer.open(&engine);
    let (mut idle, busy, batch) = idle_and_busy(&engine, &segment, &peer);
    drop(busy);
    assert_eq!(remote(&batch), Remote::Ended(Reason::Closed));

    let mut long = peer.descriptor();
    long.timestamp = "x".repeat(1 << 20);
    let (mut control, _) = peer.control.accept().unwrap();
    support::limit(&control);
    // It is refused by its length alone.
    let reply = encode_frame(FrameKind::Metadata, long.encode().as_bytes());
    control.write_all(&reply[..9]).unwrap();
    let mut request = Vec::new();
    control.read_to_end(&mut request).unwrap();

    // The peer may well be where it was, so tasks go on.
    let batch = submit(&engine, &segment);
    serve(&mut idle);
    assert_eq!(remote(&batch), Remote::Applied);
    // Opening the segment reads on, and finds that the peer has moved.
    let old = std::mem::replace(&mut peer.data, listener());
    long.data_port = peer.descriptor().data_port;
    let again = reopen(&engine, &peer, &long);
    assert!(read_to_close(&mut idle).is_empty());
    let batch = submit(&engine, &again);
    serve(&mut peer.accept_data());
    assert_eq!(remote(&batch), Remote::Applied);
    assert_nobody_connected(&old);
}

#[test]
fn replies_that_many_peers_send_by_halves_are_held_up_to_a_limit_only() {
    let engine = engine_with(|config| config.timeouts.refresh_interval = Duration::from_millis(1));
    // One frame is as long as is read, and all of it but a byte is sent.
    let frame = encode_frame(FrameKind::Metadata, &vec![b' '; (1 << 20) - 1]);
    let part = &frame[..frame.len() - 1];
    let mut peers = Vec::new();
    for _ in 0..70 {
        let peer = FakePeer::new();
        let segment = peer.open(&engine);
        let batch = submit(&engine, &segment);
        drop(peer.accept_data());
        assert!(batch.wait(None).is_some());
        let (mut control, _) = peer.control.accept().unwrap();
        support::limit(&control);
        // Fails for those that are refused.
        let _ = control.write_all(part);
        peers.push((peer, segment, control));
    }
    let mut refused = 0;
    for (_, _, control) in &mut peers {
        control
            .set_read_timeout(Some(Duration::from_millis(20)))
            .unwrap();
        let mut request = Vec::new();
        let result = control.read_to_end(&mut request);
        refused += usize::from(!result.is_err_and(|error| error.kind() == ErrorKind::WouldBlock));
    }
    assert!((6..=8).contains(&refused), "{refused} refused");
    // Once they are gone there is room again.
    let (peer, segment, _) = peers.pop().unwrap();
    drop(peers);
    std::thread::sleep(Duration::from_millis(100));
    let batch = submit(&engine, &segment);
    drop(peer.accept_data());
    assert!(batch.wait(None).is_some());
    peer.answer_metadata(&peer.descriptor());
    let batch = submit(&engine, &segment);
    serve(&mut peer.accept_data());
    assert_eq!(remote(&batch), Remote::Applied);
}
