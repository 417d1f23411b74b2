//! A descriptor of a peer that means harm takes no more memory than its text.
//!
//! The only test of its process, because it looks at how much memory that has ever had.
#![cfg(feature = "tcp")]

mod support;

use std::time::{Duration, Instant};

use mooncake_transport::wire::control::{FrameKind, encode_frame};
use mooncake_transport::wire::descriptor::{Descriptor, DescriptorError};
use mooncake_transport::{Engine, EngineError};
use support::{FakePeer, engine};

const MIB: usize = 1 << 20;

/// Most bytes of memory that the process has had at a time.
fn memory_peak() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))
        .unwrap();
    let kib: usize = line.trim().trim_end_matches(" kB").parse().unwrap();
    kib * 1024
}

/// A descriptor of `len` bytes whose list of buffers has `entry` as often as there is room.
fn descriptor(entry: &str, len: usize) -> String {
    let head = r#"{"protocol":"tcp","tcp_data_port":9,"tcp_proto_version":2,"buffers":["#;
    let mut text = String::with_capacity(len);
    text.push_str(head);
    while text.len() + 2 * entry.len() + 3 < len {
        text.push_str(entry);
        text.push(',');
    }
    text.push_str(entry);
    text.push_str("]}");
    text
}

#[test]
fn a_long_list_of_buffers_takes_no_more_memory_than_its_text() {
    const BUFFER: &str = r#"{"name":"n","addr":1,"length":1}"#;
    const MARKED: &str = r#"{"name":"n","addr":1,"length":1,"protocol":"tcp"}"#;
    let engine = engine();
    let peer = FakePeer::new();
    for entry in ["0", "{}", "[]", BUFFER, MARKED] {
        let text = descriptor(entry, 15 * MIB);
        let frame = encode_frame(FrameKind::Metadata, text.as_bytes());
        let before = memory_peak();
        let start = Instant::now();
        let decoded = Descriptor::decode(text.as_bytes());
        match decoded {
            Ok(decoded) => assert!(decoded.buffers.len() > 300_000, "{entry}"),
            Err(error) => assert!(
                matches!(
                    error,
                    DescriptorError::Buffer { index: 0 } | DescriptorError::Json(_)
                ),
                "{entry}: {error}"
            ),
        }
        // The text itself is not copied, and a growing list may be there twice.
        let grown = memory_peak() - before;
        assert!(grown <= 40 * MIB, "{entry}: {} MiB", grown / MIB);

        // The engine keeps nothing of the list, only the text as it comes in.
        let before = memory_peak();
        let opened = std::thread::scope(|scope| {
            scope.spawn(|| peer.answer_control(&frame));
            engine.open_segment(&peer.name())
        });
        let is_good = entry.contains("name");
        match opened {
            Ok(_) => assert!(is_good, "{entry}"),
            Err(EngineError::Descriptor { .. }) => assert!(!is_good, "{entry}"),
            Err(error) => panic!("{entry}: {error}"),
        }
        let grown = memory_peak() - before;
        assert!(grown <= 50 * MIB, "{entry}: {} MiB", grown / MIB);
        assert!(start.elapsed() < Duration::from_secs(10), "{entry}");
    }
    // What is longer than the limit is not even read.
    let frame = encode_frame(FrameKind::Metadata, &vec![b' '; 16 * MIB]);
    let error = std::thread::scope(|scope| {
        scope.spawn(|| {
            use std::io::{Read, Write};
            let (mut stream, _) = peer.control.accept().unwrap();
            support::limit(&stream);
            stream.write_all(&frame[..9]).unwrap();
            let mut request = Vec::new();
            stream.read_to_end(&mut request).unwrap();
        });
        engine.open_segment(&peer.name()).unwrap_err()
    });
    assert!(matches!(error, EngineError::Control { .. }), "{error}");
}
