//! Control connections, accepted and opened, as pure state machines.

use crate::error::ControlError;
use crate::wire::control::{
    CONNECTION_EMPTY, Frame, FrameDecoder, FrameKind, FrameLimits, NOTIFY_TAKEN, Notice,
    PROBE_ALIVE, check_connection, check_json, encode_frame,
};

/// A request of a peer that needs something from the engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Request {
    /// The peer wants our descriptor.
    Metadata,
    /// The peer sent a notification.
    Notify(Notice),
}

/// What an accepted control connection wants done next.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ServerWant<'a> {
    /// Receive bytes of the request.
    Receive,
    /// Answer the request with [`ControlServer::reply_descriptor`] or
    /// [`ControlServer::reply_taken`].
    Answer(&'a Request),
    /// Send these bytes of the reply.
    Send(&'a [u8]),
    /// Stop sending, then receive and throw away bytes until the peer closes.
    AwaitClose,
    /// Close the connection.
    Close,
}

/// An accepted control connection: one request, one reply.
#[derive(Debug)]
pub(super) struct ControlServer {
    state: ServerState,
}

#[derive(Debug)]
enum ServerState {
    Receiving(FrameDecoder),
    Answering(Request),
    Sending { reply: Vec<u8>, sent: usize },
    AwaitingClose,
    Closed,
}

impl ControlServer {
    pub(super) fn new() -> Self {
        Self {
            state: ServerState::Receiving(FrameDecoder::new(FrameLimits::SERVER)),
        }
    }

    pub(super) fn want(&self) -> ServerWant<'_> {
        match &self.state {
            ServerState::Receiving(_) => ServerWant::Receive,
            ServerState::Answering(request) => ServerWant::Answer(request),
            ServerState::Sending { reply, sent } => ServerWant::Send(&reply[*sent..]),
            ServerState::AwaitingClose => ServerWant::AwaitClose,
            ServerState::Closed => ServerWant::Close,
        }
    }

    /// Takes bytes of the request. Whatever is wrong with it ends in a silent close, as with real
    /// peers.
    pub(super) fn handle_received(&mut self, bytes: &[u8]) {
        let ServerState::Receiving(decoder) = &mut self.state else {
            return;
        };
        match decoder.push(bytes) {
            Ok(None) => {}
            Ok(Some(frame)) => self.handle_frame(&frame),
            Err(_) => self.close(),
        }
    }

    fn handle_frame(&mut self, frame: &Frame) {
        match frame.kind {
            FrameKind::Metadata => self.state = ServerState::Answering(Request::Metadata),
            FrameKind::Notify => match Notice::decode(&frame.body) {
                Ok(notice) => self.state = ServerState::Answering(Request::Notify(notice)),
                Err(_) => self.close(),
            },
            FrameKind::Probe if check_json(&frame.body).is_ok() => {
                self.send(FrameKind::Probe, PROBE_ALIVE);
            }
            FrameKind::Connection | FrameKind::Untyped if check_connection(&frame.body).is_ok() => {
                self.send(frame.kind, CONNECTION_EMPTY);
            }
            _ => self.close(),
        }
    }

    /// Answers a metadata request.
    pub(super) fn reply_descriptor(&mut self, descriptor: &str) {
        let mut text = Vec::with_capacity(descriptor.len() + 1);
        text.extend_from_slice(descriptor.as_bytes());
        text.push(b'\n');
        self.send(FrameKind::Metadata, &text);
    }

    /// Answers a notification.
    pub(super) fn reply_taken(&mut self) {
        self.send(FrameKind::Notify, NOTIFY_TAKEN);
    }

    fn send(&mut self, kind: FrameKind, text: &[u8]) {
        self.state = ServerState::Sending {
            reply: encode_frame(kind, text),
            sent: 0,
        };
    }

    /// `count` bytes of the reply have been sent.
    pub(super) fn handle_sent(&mut self, count: usize) {
        if let ServerState::Sending { reply, sent } = &mut self.state {
            *sent = (*sent + count).min(reply.len());
            if *sent == reply.len() {
                self.state = ServerState::AwaitingClose;
            }
        }
    }

    /// The peer will send nothing more. A reply that is under way is still sent.
    pub(super) fn handle_eof(&mut self) {
        if matches!(
            self.state,
            ServerState::Receiving(_) | ServerState::AwaitingClose
        ) {
            self.close();
        }
    }

    pub(super) fn close(&mut self) {
        self.state = ServerState::Closed;
    }
}

/// What a control connection that we opened wants done next.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ClientWant<'a> {
    /// Send these bytes of the request.
    Send(&'a [u8]),
    /// Receive bytes of the reply.
    Receive,
    /// Close the connection and take the result.
    Done,
}

/// A control connection that we opened: one request, one reply.
#[derive(Debug)]
pub(super) struct ControlClient {
    kind: FrameKind,
    request: Vec<u8>,
    sent: usize,
    decoder: FrameDecoder,
    result: Option<Result<Vec<u8>, ControlError>>,
}

impl ControlClient {
    /// Asks with a frame of `kind` around `text`, and reads a descriptor in the reply only if that has
    /// at most `descriptor_bytes_max` bytes.
    pub(super) fn new(kind: FrameKind, text: &[u8], descriptor_bytes_max: u64) -> Self {
        let mut limits = FrameLimits::CLIENT;
        limits.metadata_bytes_max = descriptor_bytes_max;
        Self {
            kind,
            request: encode_frame(kind, text),
            sent: 0,
            decoder: FrameDecoder::new(limits),
            result: None,
        }
    }

    pub(super) fn want(&self) -> ClientWant<'_> {
        if self.result.is_some() {
            ClientWant::Done
        } else if self.sent < self.request.len() {
            ClientWant::Send(&self.request[self.sent..])
        } else {
            ClientWant::Receive
        }
    }

    pub(super) fn handle_sent(&mut self, count: usize) {
        self.sent = (self.sent + count).min(self.request.len());
    }

    pub(super) fn handle_received(&mut self, bytes: &[u8]) {
        match self.decoder.push(bytes) {
            Ok(None) => {}
            Ok(Some(frame)) if frame.kind == self.kind => self.finish(Ok(frame.body)),
            Ok(Some(_)) => self.finish(Err(ControlError::WrongType)),
            Err(error) => self.finish(Err(error.into())),
        }
    }

    /// The connection has ended or failed, or its time is up.
    pub(super) fn handle_failure(&mut self, error: ControlError) {
        self.finish(Err(error));
    }

    fn finish(&mut self, result: Result<Vec<u8>, ControlError>) {
        self.result.get_or_insert(result);
    }

    pub(super) fn take_result(&mut self) -> Option<Result<Vec<u8>, ControlError>> {
        self.result.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::control::{FrameError, PROBE_REQUEST};

    fn serve(bytes: &[u8], cut: usize) -> (Vec<u8>, ControlServer) {
        let mut server = ControlServer::new();
        let mut sent = Vec::new();
        for piece in [&bytes[..cut], &bytes[cut..]] {
            server.handle_received(piece);
            loop {
                match server.want() {
                    ServerWant::Answer(Request::Metadata) => server.reply_descriptor("{}"),
                    ServerWant::Answer(Request::Notify(_)) => server.reply_taken(),
                    ServerWant::Send(bytes) => {
                        let count = bytes.len().min(5);
                        sent.extend_from_slice(&bytes[..count]);
                        server.handle_sent(count);
                    }
                    _ => break,
                }
            }
        }
        (sent, server)
    }

    fn check(request: &[u8], reply: Option<&[u8]>) {
        for cut in 0..=request.len() {
            let (sent, server) = serve(request, cut);
            match reply {
                Some(reply) => {
                    assert_eq!(sent, reply, "cut {cut}");
                    assert_eq!(server.want(), ServerWant::AwaitClose);
                }
                None => {
                    assert!(sent.is_empty(), "cut {cut}");
                    assert_eq!(server.want(), ServerWant::Close);
                }
            }
        }
    }

    // row: W3.3a
    #[test]
    fn every_request_gets_the_reply_of_its_type() {
        check(
            &encode_frame(FrameKind::Metadata, b"null"),
            Some(&encode_frame(FrameKind::Metadata, b"{}\n")),
        );
        check(
            &encode_frame(FrameKind::Notify, b"{}"),
            Some(&encode_frame(FrameKind::Notify, NOTIFY_TAKEN)),
        );
        check(
            &encode_frame(FrameKind::Probe, b"[]"),
            Some(&encode_frame(FrameKind::Probe, PROBE_ALIVE)),
        );
        check(
            &encode_frame(FrameKind::Connection, b"{}"),
            Some(&encode_frame(FrameKind::Connection, CONNECTION_EMPTY)),
        );
        let untyped = encode_frame(FrameKind::Untyped, b"{\"qp_num\":[]}");
        let reply = encode_frame(FrameKind::Untyped, CONNECTION_EMPTY);
        assert_eq!(reply[8], b'{');
        check(&untyped, Some(&reply));
    }

    #[test]
    fn malformed_requests_are_closed_without_a_reply() {
        for (kind, text) in [
            (FrameKind::Notify, &b"[]"[..]),
            (FrameKind::Notify, b"\"x\""),
            (FrameKind::Notify, b""),
            (FrameKind::Notify, br#"{"name":{}}"#),
            (FrameKind::Connection, b"[]"),
            (FrameKind::Probe, b"{'a':1}"),
            (FrameKind::Probe, "\u{feff}{}".as_bytes()),
            (FrameKind::Untyped, b"{,}"),
        ] {
            check(&encode_frame(kind, text), None);
        }
        let deep = "[".repeat(1_001);
        let (sent, server) = serve(&encode_frame(FrameKind::Probe, deep.as_bytes()), 20);
        assert!(sent.is_empty());
        assert_eq!(server.want(), ServerWant::Close);
    }

    // row: W3.4e
    #[test]
    fn a_second_request_is_never_read() {
        let mut bytes = encode_frame(FrameKind::Probe, b"{}");
        bytes.extend_from_slice(&encode_frame(FrameKind::Probe, b"{}"));
        let (sent, _) = serve(&bytes, bytes.len());
        assert_eq!(sent, encode_frame(FrameKind::Probe, PROBE_ALIVE));
    }

    #[test]
    fn a_client_that_half_closes_still_gets_its_reply() {
        let mut server = ControlServer::new();
        server.handle_received(&encode_frame(FrameKind::Probe, b"{}"));
        server.handle_eof();
        assert!(matches!(server.want(), ServerWant::Send(_)));
        server.handle_sent(1_000);
        assert_eq!(server.want(), ServerWant::AwaitClose);
        server.handle_eof();
        assert_eq!(server.want(), ServerWant::Close);
        let mut server = ControlServer::new();
        server.handle_received(&[3, 0]);
        server.handle_eof();
        assert_eq!(server.want(), ServerWant::Close);
    }

    #[test]
    fn a_client_sends_its_request_and_takes_a_reply_split_anywhere() {
        let reply = encode_frame(FrameKind::Probe, PROBE_ALIVE);
        for cut in 0..reply.len() {
            let mut client = ControlClient::new(FrameKind::Probe, PROBE_REQUEST, 100);
            let mut sent = Vec::new();
            while let ClientWant::Send(bytes) = client.want() {
                sent.push(bytes[0]);
                client.handle_sent(1);
            }
            assert_eq!(sent, [3, 0, 0, 0, 0, 0, 0, 0, 3, 0x7B, 0x7D]);
            client.handle_received(&reply[..cut]);
            assert_eq!(client.want(), ClientWant::Receive);
            client.handle_received(&reply[cut..]);
            assert_eq!(client.take_result(), Some(Ok(PROBE_ALIVE.to_vec())));
        }
    }

    #[test]
    fn bad_replies_are_typed_errors() {
        let check = |bytes: &[u8], expected: ControlError| {
            let mut client = ControlClient::new(FrameKind::Probe, PROBE_REQUEST, 100);
            client.handle_sent(11);
            client.handle_received(bytes);
            client.handle_failure(ControlError::Closed);
            assert_eq!(client.want(), ClientWant::Done);
            assert_eq!(client.take_result(), Some(Err(expected)));
        };
        check(
            &encode_frame(FrameKind::Notify, b"{}"),
            ControlError::WrongType,
        );
        check(
            &encode_frame(FrameKind::Untyped, b"{}"),
            ControlError::WrongType,
        );
        check(&0u64.to_le_bytes(), ControlError::Frame(FrameError::Empty));
        check(b"\x02\0\0\0", ControlError::Closed);
        check(b"", ControlError::Closed);
        assert!(matches!(
            {
                let mut client = ControlClient::new(FrameKind::Metadata, b"{}", 100);
                client.handle_received(&u64::MAX.to_le_bytes());
                client.take_result()
            },
            Some(Err(ControlError::Frame(FrameError::TooLong { .. })))
        ));
    }

    // row: W3.2b
    #[test]
    fn a_descriptor_is_read_up_to_the_limit_of_whoever_asks() {
        let ask = |len: usize| {
            let mut client = ControlClient::new(FrameKind::Metadata, b"{}", 100);
            client.handle_sent(1_000);
            client.handle_received(&encode_frame(FrameKind::Metadata, &vec![b' '; len - 1]));
            client.take_result()
        };
        assert_eq!(ask(100), Some(Ok(vec![b' '; 99])));
        assert_eq!(
            ask(101),
            Some(Err(ControlError::Frame(FrameError::TooLong {
                len: 101,
                max: 100
            })))
        );
    }

    proptest::proptest! {
        #[test]
        fn property_any_request_ends_in_a_reply_or_a_close(
            kind in 0..6u8,
            text in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..60),
            json in "[\\[\\]{}\",:0-9a-z ]{0,60}",
            announced in proptest::option::of(proptest::prelude::any::<u64>()),
            cut in 0..80usize,
        ) {
            let text = if kind % 2 == 0 { text } else { json.into_bytes() };
            let mut bytes = encode_frame(FrameKind::Probe, &text);
            bytes[8] = kind;
            if let Some(announced) = announced {
                bytes[..8].copy_from_slice(&announced.to_le_bytes());
            }
            let (sent, mut server) = serve(&bytes, cut.min(bytes.len()));
            server.handle_eof();
            proptest::prop_assert_eq!(server.want(), ServerWant::Close);
            if let Some(first) = sent.get(8) {
                let answered = *first < 4 || *first == 0x7B;
                proptest::prop_assert!(answered);
            }
        }
    }
}
