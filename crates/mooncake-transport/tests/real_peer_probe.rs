//! A real engine answers control frames as documented and as our codecs read
//! them. No engine of ours takes part.

#[path = "peer/harness.rs"]
mod harness;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use harness::Peer;
use mooncake_transport::wire::control::{
    FrameDecoder, FrameKind, FrameLimits, PROBE_REQUEST, encode_frame,
};
use mooncake_transport::wire::descriptor::Descriptor;
use serde_json::json;

/// Sends one frame and returns everything until the server half-closes.
fn ask(peer: &Peer, frame: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(peer.session()).unwrap();
    // The real control server is serial and may be held up for 5 s.
    stream
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    stream.write_all(frame).unwrap();
    let mut reply = Vec::new();
    stream.read_to_end(&mut reply).unwrap();
    reply
}

#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn a_real_engine_answers_a_probe_byte_for_byte_as_documented() {
    let peer = Peer::start();
    let request = encode_frame(FrameKind::Probe, PROBE_REQUEST);
    assert_eq!(request, b"\x03\0\0\0\0\0\0\0\x03{}");
    let reply = ask(&peer, &request);
    assert_eq!(reply, b"\x16\0\0\0\0\0\0\0\x03{\"status\":\"success\"}\n");
    let frame = FrameDecoder::new(FrameLimits::CLIENT)
        .push(&reply)
        .unwrap()
        .unwrap();
    assert_eq!(frame.kind, FrameKind::Probe);
}

#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn a_real_descriptor_is_read_with_the_buffer_it_lists() {
    let mut peer = Peer::start();
    let allocated = peer.call(json!({"do": "allocate", "length": 65_537}));
    let registered = peer.call(json!({"do": "register", "memory": allocated["memory"]}));
    assert_eq!(registered["code"], 0);
    let reply = ask(&peer, &encode_frame(FrameKind::Metadata, b"{}"));
    let frame = FrameDecoder::new(FrameLimits::CLIENT)
        .push(&reply)
        .unwrap()
        .unwrap();
    assert_eq!(frame.kind, FrameKind::Metadata);
    let descriptor = Descriptor::decode(&frame.body).unwrap();
    assert_eq!(descriptor.name, peer.session());
    let buffers: Vec<_> = descriptor
        .buffers
        .iter()
        .map(|b| (b.address, b.len))
        .collect();
    assert_eq!(buffers, [(allocated["address"].as_u64().unwrap(), 65_537)]);
}
