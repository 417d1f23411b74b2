//! Request headers and status frames, back to back: nothing is lost between decoding and encoding, and what is
//! refused is refused for the reason that the bytes show.
#![no_main]

use libfuzzer_sys::fuzz_target;
use mooncake_transport::wire::data::{
    BadStatus, DataVersion, HEADER_LEN, Header, Op, STATUS_LEN, Status,
};

/// What the upper half of a status frame holds.
const MAGIC: u64 = 0x4D43_5456;

fuzz_target!(|bytes: &[u8]| {
    for header in bytes.as_chunks::<HEADER_LEN>().0 {
        check_header(header);
    }
    for status in bytes.as_chunks::<STATUS_LEN>().0 {
        check_status(*status);
    }
});

fn check_header(bytes: &[u8; HEADER_LEN]) {
    let opcode = bytes[16];
    let version = match opcode & 0x80 {
        0 => DataVersion::V1,
        _ => DataVersion::V2,
    };
    match Header::decode(bytes) {
        Ok(header) => {
            let again = header.encode();
            assert_eq!(again[..17], bytes[..17], "all but the padding");
            assert_eq!(again[17..], [0; 7]);
            assert_eq!(Header::decode(&again), Ok(header));
            assert_eq!(header.version, version);
            assert_eq!(header.op == Op::Write, opcode & 1 != 0);
        }
        Err(error) => {
            assert!(opcode & 0x7F > 1, "operation {opcode:#04x} exists");
            assert_eq!((error.opcode, error.version), (opcode, version));
        }
    }
}

fn check_status(bytes: [u8; STATUS_LEN]) {
    let word = u64::from_le_bytes(bytes);
    match Status::decode(bytes) {
        Ok(status) => {
            assert_eq!(status.encode(), bytes);
            assert!(!matches!(status, Status::Other(0 | 1)));
        }
        Err(BadStatus { word: named, .. }) => {
            assert_eq!(named, word);
            assert_ne!(word >> 32, MAGIC);
        }
    }
}
