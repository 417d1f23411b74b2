//! Answers as servers give them, and as no server should.

use proptest::strategy::Strategy as _;

use super::*;

/// Gives bytes out in pieces of one size.
struct Pieces<'a>(&'a [u8], usize);

impl Read for Pieces<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.1.min(self.0.len()).min(buffer.len());
        let (now, later) = self.0.split_at(count);
        buffer[..count].copy_from_slice(now);
        self.0 = later;
        Ok(count)
    }
}

/// Why there is no answer, comparable.
#[derive(Debug, PartialEq)]
enum Refusal {
    CutOff,
    TooLong,
    Malformed(AnswerError),
}

/// What an answer comes to, however it is cut.
fn read(text: &[u8], len_max: u64) -> Result<(u16, Vec<u8>), Refusal> {
    let mut results = [1, 2, 3, 7, usize::MAX].map(|piece| {
        let answer = read_answer(&mut Pieces(text, piece), len_max);
        let answer = answer.map(|answer| (answer.status, answer.body));
        answer.map_err(|failure| match failure {
            AnswerFailure::Malformed(error) => Refusal::Malformed(error),
            AnswerFailure::TooLong => Refusal::TooLong,
            AnswerFailure::Io(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                Refusal::CutOff
            }
            AnswerFailure::Io(error) => panic!("memory does not fail: {error}"),
        })
    });
    for result in &results[1..] {
        assert_eq!(*result, results[0]);
    }
    std::mem::replace(&mut results[0], Err(Refusal::CutOff))
}

#[track_caller]
fn ok(text: &str, status: u16, body: &str) {
    assert_eq!(
        read(text.as_bytes(), 100),
        Ok((status, body.into())),
        "{text}"
    );
}

#[track_caller]
fn refused(text: &str, error: AnswerError) {
    assert_eq!(
        read(text.as_bytes(), 100),
        Err(Refusal::Malformed(error)),
        "{text}"
    );
}

#[test]
fn bodies_end_where_length_or_chunks_say() {
    ok(
        "HTTP/1.1 200 OK\r\nServer: x\r\nContent-Length: 3\r\n\r\nabcdef",
        200,
        "abc",
    );
    ok("HTTP/1.0 200\ncontent-length:0\n\n", 200, "");
    ok(
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n0A\r\n0123456789\r\n0\r\nT: r\r\n\r\n",
        200,
        "abc0123456789",
    );
    ok(
        "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx",
        200,
        "x",
    );
}

#[test]
fn of_other_answers_only_the_status_is_used() {
    ok(
        "HTTP/1.1 404 Not Found\r\nContent-Length: 999999999\r\n\r\n",
        404,
        "",
    );
    ok("HTTP/1.1 400 Bad\r\n\r\n", 400, "");
    ok(
        "HTTP/1.1 302 Found\r\nLocation: http://elsewhere/\r\n\r\n",
        302,
        "",
    );
}

#[test]
fn an_answer_cut_anywhere_is_never_taken_for_a_whole_one() {
    for text in [
        "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n0123456789",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n01234\r\n5\r\n56789\r\n0\r\n\r\n",
    ] {
        for cut in 0..text.len() {
            assert_eq!(read(&text.as_bytes()[..cut], 100), Err(Refusal::CutOff));
        }
        ok(text, 200, "0123456789");
    }
    refused("HTTP/1.1 200 OK\r\n\r\nabc", AnswerError::NoLength);
}

#[test]
fn bodies_longer_than_asked_for_are_not_read() {
    let head = "HTTP/1.1 200 OK\r\n";
    let long = format!("{head}Content-Length: 101\r\n\r\n");
    assert_eq!(read(long.as_bytes(), 100), Err(Refusal::TooLong));
    let chunks = format!("{head}Transfer-Encoding: chunked\r\n\r\n");
    let many = format!("{chunks}{}", "1\r\nx\r\n".repeat(101));
    assert_eq!(read(many.as_bytes(), 100), Err(Refusal::TooLong));
    let huge = format!("{chunks}ffffffffffffffff\r\n");
    assert_eq!(read(huge.as_bytes(), 100), Err(Refusal::TooLong));
}

#[test]
fn malformed_answers_are_refused_each_for_its_reason() {
    use AnswerError::*;
    refused("\x03\0\0\0", NotHttp);
    refused("HTTP/2 200 OK\r\n\r\n", NotHttp);
    refused("HTTP/1.1 20 OK\r\n\r\n", NotHttp);
    refused("HTTP/1.1 2000\r\n\r\n", NotHttp);
    refused("HTTP/1.1 999 x\r\n\r\n", NotHttp);
    let head = "HTTP/1.1 200 OK\r\n";
    refused(&format!("{head}nocolon\r\n"), Header);
    for length in ["", "-1", "+1", "1x", "0x1", "18446744073709551616", "1, 1"] {
        refused(&format!("{head}Content-Length: {length}\r\n\r\n"), Header);
    }
    refused(
        &format!("{head}Content-Length: 1\r\nContent-Length: 2\r\n\r\n"),
        Header,
    );
    refused(
        &format!("{head}Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n"),
        Header,
    );
    refused(
        &format!("{head}Transfer-Encoding: gzip, chunked\r\n\r\n"),
        Encoding,
    );
    refused(&format!("{head}Content-Encoding: gzip\r\n\r\n"), Encoding);
    let chunks = format!("{head}Transfer-Encoding: chunked\r\n\r\n");
    for chunk in [
        "\r\n",
        "x\r\n",
        "-1\r\n",
        "10000000000000000\r\n",
        "1\r\nxy\r\n",
    ] {
        refused(&format!("{chunks}{chunk}"), Chunk);
    }
}

#[test]
fn heads_without_an_end_are_given_up() {
    struct Endless(Vec<u8>, usize);
    impl Read for Endless {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            for byte in &mut *buffer {
                *byte = self.0[self.1 % self.0.len()];
                self.1 += 1;
            }
            Ok(buffer.len())
        }
    }
    let start = &b"HTTP/1.1 200 OK\r\n"[..];
    let chunked = &b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"[..];
    let check = |start: &[u8], rest: &[u8], expected| {
        let failure = read_answer(&mut start.chain(Endless(rest.to_vec(), 0)), 100).unwrap_err();
        assert!(
            matches!(failure, AnswerFailure::Malformed(error) if error == expected),
            "{failure:?}"
        );
    };
    check(b"HTTP/1.1 ", b"2", AnswerError::HeadTooLong);
    check(start, b"x", AnswerError::HeadTooLong);
    check(start, b"A: b\r\n", AnswerError::HeadTooLong);
    check(b"", b"HTTP/1.1 100 C\r\n\r\n", AnswerError::HeadTooLong);
    check(chunked, b"0", AnswerError::HeadTooLong);
    let wordy = format!("1;{}\r\nx\r\n", "x".repeat(8_000));
    check(chunked, wordy.as_bytes(), AnswerError::Chunk);
}

proptest::proptest! {
    #[test]
    fn property_no_answer_panics_or_brings_more_than_was_asked_for(
        status in 199..202u16,
        pieces in proptest::collection::vec(
            proptest::prop_oneof![
                proptest::prelude::any::<Vec<u8>>(),
                "(\r\n|[0-9a-f]{1,3}\r\n|Content-Length: [0-9]{1,3}\r\n|Transfer-Encoding: chunked\r\n)"
                    .prop_map(String::into_bytes),
            ],
            0..12,
        ),
        piece in 1..40usize,
        len_max in 0..64u64,
    ) {
        let mut text = format!("HTTP/1.1 {status} x\r\n").into_bytes();
        text.extend(pieces.concat());
        if let Ok(answer) = read_answer(&mut Pieces(&text, piece), len_max) {
            proptest::prop_assert!(answer.status >= 200 && answer.body.len() as u64 <= len_max);
        }
    }
}
