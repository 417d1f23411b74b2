//! One HTTP/1.1 exchange over a connection of its own, so that a server that was restarted is reached
//! again by the next call.

mod answer;

use std::fmt::Write as _;
use std::io::Write as _;

pub(super) use self::answer::Answer;
use self::answer::{AnswerFailure, read_answer};
use super::dial::{Dialer, Share};
use super::error::StoreError;

/// A request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request<'a> {
    pub(super) method: &'static str,
    /// Path and query, escaped.
    pub(super) target: &'a str,
    /// JSON, if the request has a body.
    pub(super) body: Option<&'a [u8]>,
    /// The key that it is about, for errors.
    pub(super) key: &'a str,
    /// Bytes of the answer's body that are read.
    pub(super) len_max: u64,
}

impl Request<'_> {
    fn encode(&self, authority: &str) -> Vec<u8> {
        let mut head = format!(
            "{} {} HTTP/1.1\r\nHost: {authority}\r\nAccept: */*\r\nConnection: close\r\n",
            self.method, self.target
        );
        if let Some(body) = self.body {
            // Writing to a string never fails.
            let _ = write!(
                head,
                "Content-Type: application/json\r\nContent-Length: {}\r\n",
                body.len()
            );
        }
        head.push_str("\r\n");
        let mut bytes = head.into_bytes();
        bytes.extend_from_slice(self.body.unwrap_or_default());
        bytes
    }
}

/// Sends a request and reads the answer, whose body is read only for status 200.
pub(super) fn ask(
    dialer: &Dialer,
    share: Share,
    request: &Request<'_>,
) -> Result<Answer, StoreError> {
    let mut stream = dialer.connect(share)?;
    // A store may answer, and close, before it has read all of a body that it refuses.
    let sent = stream.write_all(&request.encode(dialer.authority()));
    match read_answer(&mut stream, request.len_max) {
        Ok(answer) => Ok(answer),
        Err(AnswerFailure::Io(error)) => Err(dialer.broken(sent.as_ref().err().unwrap_or(&error))),
        Err(AnswerFailure::TooLong) => Err(StoreError::TooLong {
            key: request.key.to_owned(),
            max: request.len_max,
        }),
        Err(AnswerFailure::Malformed(source)) => Err(StoreError::Answer {
            store: dialer.store(),
            source,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_has_a_length_only_with_a_body() {
        let mut request = Request {
            method: "GET",
            target: "/m?key=k",
            body: None,
            key: "k",
            len_max: 0,
        };
        assert_eq!(
            request.encode("h:1"),
            b"GET /m?key=k HTTP/1.1\r\nHost: h:1\r\nAccept: */*\r\nConnection: close\r\n\r\n"
        );
        request.method = "PUT";
        request.body = Some(b"{}");
        let text = String::from_utf8(request.encode("h:1")).unwrap();
        assert!(text.starts_with("PUT /m?key=k HTTP/1.1\r\n"));
        assert!(
            text.ends_with("\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
        );
    }
}
