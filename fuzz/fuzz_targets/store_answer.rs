//! Answers of an HTTP metadata store, and the values in them: split anywhere they are the same, a cut one is never a
//! whole one, and none makes more of itself than its bytes allow.
#![no_main]

use std::io::{self, Read};

use libfuzzer_sys::fuzz_target;
use mooncake_transport::metadata::RpcMeta;
use slab_fuzz::within_reach_of;

/// The reader itself, which the crate keeps to itself, where it expects to be.
#[path = "."]
mod metadata {
    pub(crate) mod error {
        pub(crate) use mooncake_transport::metadata::AnswerError;
    }

    #[path = "."]
    pub(crate) mod web {
        use super::error::AnswerError;

        #[path = "../../crates/mooncake-transport/src/metadata/web/answer.rs"]
        #[rustfmt::skip]
        mod answer;

        /// Why there is no answer, comparable.
        #[derive(Debug, PartialEq)]
        pub(crate) enum End {
            Cut,
            Malformed(AnswerError),
            TooLong,
        }

        pub(crate) fn read_answer(
            from: &mut impl std::io::Read,
            len_max: u64,
        ) -> Result<(u16, Vec<u8>), End> {
            match answer::read_answer(from, len_max) {
                Ok(answer) => Ok((answer.status, answer.body)),
                Err(answer::AnswerFailure::Io(error)) => {
                    // Bytes in memory come to no other.
                    assert_eq!(error.kind(), std::io::ErrorKind::UnexpectedEof);
                    Err(End::Cut)
                }
                Err(answer::AnswerFailure::Malformed(error)) => Err(End::Malformed(error)),
                Err(answer::AnswerFailure::TooLong) => Err(End::TooLong),
            }
        }
    }
}

use metadata::error::AnswerError;
use metadata::web::{End, read_answer};

/// The reader's one block and a line, in units of what the heap may be asked for a byte that came.
const BLOCK_SHARE: usize = 100;

fuzz_target!(|bytes: &[u8]| {
    let Some((&first, wire)) = bytes.split_first() else {
        return;
    };
    let len_max = [0, 5, 64, 1 << 20][usize::from(first >> 6)];
    let found = within_reach_of(wire.len() + BLOCK_SHARE, || {
        read(wire, usize::MAX, len_max).0
    });
    let (in_pieces, _) = read(wire, usize::from(first % 16) + 1, len_max);
    assert_eq!(in_pieces, found);
    let (byte_by_byte, used) = read(wire, 1, len_max);
    assert_eq!(byte_by_byte, found);

    match &found {
        Ok((status, body)) => {
            assert!(body.len() as u64 <= len_max, "{} bytes", body.len());
            assert!((200..600).contains(status) && (*status == 200 || body.is_empty()));
            // Nothing but the whole of it will do, and nothing beyond it counts.
            assert_eq!(read(&wire[..used - 1], 7, len_max).0, Err(End::Cut));
            let followed = [&wire[..used], b"\r\nHTTP/1.1 200 OK\r\n\r\n\0"].concat();
            assert_eq!(read(&followed, 7, len_max).0, found);
            if *status == 200 {
                check_again(body, len_max);
                check_value(body);
            }
        }
        Err(_) => {}
    }
    // Answers of the kind "more will follow" change nothing, unless there are too many of them.
    let preceded = [b"HTTP/1.1 103 Early Hints\r\nA: b\r\n\r\n", wire].concat();
    let (again, _) = read(&preceded, 7, len_max);
    assert!(again == found || again == Err(End::Malformed(AnswerError::HeadTooLong)));
});

/// Gives the bytes in pieces of at most `piece_max`, and counts them.
struct Pieces<'a> {
    rest: &'a [u8],
    piece_max: usize,
}

impl Read for Pieces<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.piece_max.min(buffer.len()).min(self.rest.len());
        let (piece, rest) = self.rest.split_at(count);
        buffer[..count].copy_from_slice(piece);
        self.rest = rest;
        Ok(count)
    }
}

/// What is read, and how many bytes of it were taken.
fn read(wire: &[u8], piece_max: usize, len_max: u64) -> (Result<(u16, Vec<u8>), End>, usize) {
    let mut pieces = Pieces {
        rest: wire,
        piece_max,
    };
    let answer = read_answer(&mut pieces, len_max);
    (answer, wire.len() - pieces.rest.len())
}

/// The body is the same however it is framed.
fn check_again(body: &[u8], len_max: u64) {
    let expected = Ok((200, body.to_vec()));
    let len = body.len();
    let mut whole = format!("HTTP/1.0 200\r\nContent-Length: {len}\r\n\r\n").into_bytes();
    whole.extend_from_slice(body);
    assert_eq!(read(&whole, 7, len_max).0, expected);
    let mut chunks = b"HTTP/1.1 200 OK\r\ntransfer-encoding:  Chunked \r\n\r\n".to_vec();
    for chunk in body.chunks(9) {
        chunks.extend_from_slice(format!("{:X};a=b\r\n", chunk.len()).as_bytes());
        chunks.extend_from_slice(chunk);
        chunks.extend_from_slice(b"\r\n");
    }
    chunks.extend_from_slice(b"0\r\nA: b\r\n\r\n");
    assert_eq!(read(&chunks, 7, len_max).0, expected);
}

/// What a store says of where an engine is can be dialled, and is written as it was read.
fn check_value(body: &[u8]) {
    let Ok(value) = within_reach_of(body.len(), || RpcMeta::decode(body)) else {
        return;
    };
    assert_ne!(value.port, 0);
    let bad = |c: char| c.is_whitespace() || c.is_control() || c == '/';
    assert!(!value.host.is_empty() && !value.host.contains(bad));
    assert_eq!(RpcMeta::new(&value.host, value.port).as_ref(), Ok(&value));
    assert_eq!(RpcMeta::decode(value.encode().as_bytes()), Ok(value));
}
