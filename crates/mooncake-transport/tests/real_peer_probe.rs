//! A real engine answers a probe, byte for byte as documented.

#[path = "peer/harness.rs"]
mod harness;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use harness::Peer;

#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn a_real_engine_answers_a_probe_frame() {
    let peer = Peer::start();
    let mut stream = TcpStream::connect(peer.session()).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    stream.write_all(b"\x03\0\0\0\0\0\0\0\x03{}").unwrap();
    // The server half-closes after its reply.
    let mut reply = Vec::new();
    stream.read_to_end(&mut reply).unwrap();
    assert_eq!(reply, b"\x16\0\0\0\0\0\0\0\x03{\"status\":\"success\"}\n");
}
