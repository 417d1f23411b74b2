//! A data connection that a peer opened, as a pure state machine.
//!
//! The driver asks [`Target::want`] what to do next, does it, and reports with a `handle_*` call.
//! The machine sees header and status bytes; payload it only counts.

use crate::wire::data::{DataVersion, HEADER_LEN, Header, Op, STATUS_LEN, Status};

/// What a target connection wants done next.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Want<'a> {
    /// Receive up to this many header bytes.
    Header(usize),
    /// Look up the range of this request, then `admit` or `reject`.
    Decide(Header),
    /// Receive payload, up to this many bytes.
    Payload(u64),
    /// Wait until the memory has all received bytes in place.
    Settle,
    /// Send these bytes, then this much payload.
    Send(&'a [u8], u64),
    /// Stop sending, then receive and throw away up to this many bytes.
    Drain(u64),
    /// Close the connection.
    Close,
}

/// How long a target connection may stay as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Patience {
    /// For ever: no request has begun.
    Unlimited,
    /// For a fixed time, however it trickles in: inside a header.
    Header,
    /// While bytes move: inside a request.
    Progress,
    /// For a fixed time: rejected, waiting for the peer to close.
    Drain,
}

#[derive(Debug)]
pub(super) struct Target {
    state: State,
    drain_bytes_max: u64,
}

#[derive(Debug)]
enum State {
    Header {
        bytes: [u8; HEADER_LEN],
        have: usize,
    },
    Deciding(Header),
    Storing {
        missing: u64,
        version: DataVersion,
    },
    Settling {
        version: DataVersion,
    },
    /// Sends `head` from `sent` on, then `payload` bytes.
    Replying {
        head: [u8; STATUS_LEN],
        sent: usize,
        payload: u64,
    },
    Rejecting {
        head: [u8; STATUS_LEN],
        sent: usize,
    },
    Draining {
        left: u64,
    },
    Closed,
}

const IDLE: State = State::Header {
    bytes: [0; HEADER_LEN],
    have: 0,
};

impl Target {
    /// Starts between requests. After a rejection at most `drain_bytes_max` bytes are read on.
    pub(super) fn new(drain_bytes_max: u64) -> Self {
        Self {
            state: IDLE,
            drain_bytes_max,
        }
    }

    pub(super) fn want(&self) -> Want<'_> {
        match &self.state {
            State::Header { have, .. } => Want::Header(HEADER_LEN - have),
            State::Deciding(header) => Want::Decide(*header),
            State::Storing { missing, .. } => Want::Payload(*missing),
            State::Settling { .. } => Want::Settle,
            State::Replying {
                head,
                sent,
                payload,
            } => Want::Send(&head[*sent..], *payload),
            State::Rejecting { head, sent } => Want::Send(&head[*sent..], 0),
            State::Draining { left } => Want::Drain(*left),
            State::Closed => Want::Close,
        }
    }

    pub(super) fn patience(&self) -> Patience {
        match self.state {
            State::Header { have: 0, .. } | State::Closed => Patience::Unlimited,
            State::Header { .. } => Patience::Header,
            State::Draining { .. } => Patience::Drain,
            _ => Patience::Progress,
        }
    }

    /// Says whether no request is under way.
    pub(super) fn is_between_requests(&self) -> bool {
        matches!(self.state, State::Header { have: 0, .. })
    }

    /// Takes header bytes, at most as many as were wanted.
    pub(super) fn handle_header(&mut self, received: &[u8]) {
        let State::Header { bytes, have } = &mut self.state else {
            return self.close();
        };
        bytes[*have..*have + received.len()].copy_from_slice(received);
        *have += received.len();
        if *have < HEADER_LEN {
            return;
        }
        match Header::decode(bytes) {
            Ok(header) => self.state = State::Deciding(header),
            Err(unknown) => self.refuse(unknown.version),
        }
    }

    /// The range of the request is registered for it.
    pub(super) fn admit(&mut self) {
        let State::Deciding(header) = self.state else {
            return self.close();
        };
        self.state = match (header.op, header.version) {
            (Op::Write, version) => State::Storing {
                missing: header.size,
                version,
            },
            (Op::Read, DataVersion::V2) => State::Replying {
                head: Status::Ok.encode(),
                sent: 0,
                payload: header.size,
            },
            // Version 1 has no status: as if it had been sent.
            (Op::Read, DataVersion::V1) => State::Replying {
                head: Status::Ok.encode(),
                sent: STATUS_LEN,
                payload: header.size,
            },
        };
    }

    /// The range of the request is not registered for it.
    pub(super) fn reject(&mut self) {
        let State::Deciding(header) = self.state else {
            return self.close();
        };
        self.refuse(header.version);
    }

    fn refuse(&mut self, version: DataVersion) {
        self.state = match version {
            DataVersion::V1 => State::Closed,
            DataVersion::V2 => State::Rejecting {
                head: Status::Rejected.encode(),
                sent: 0,
            },
        };
    }

    /// `count` bytes of payload have been received.
    pub(super) fn handle_payload(&mut self, count: u64) {
        let State::Storing { missing, version } = &mut self.state else {
            return self.close();
        };
        *missing = missing.saturating_sub(count);
        if *missing == 0 {
            self.state = State::Settling { version: *version };
        }
    }

    /// All received bytes are in place.
    pub(super) fn handle_in_place(&mut self) {
        let State::Settling { version } = self.state else {
            return self.close();
        };
        self.state = match version {
            DataVersion::V1 => IDLE,
            DataVersion::V2 => State::Replying {
                head: Status::Ok.encode(),
                sent: 0,
                payload: 0,
            },
        };
    }

    /// `count` bytes have been sent.
    pub(super) fn handle_sent(&mut self, count: u64) {
        match &mut self.state {
            State::Replying { sent, payload, .. } => {
                let of_head = count.min((STATUS_LEN - *sent) as u64);
                *sent += of_head as usize;
                *payload = payload.saturating_sub(count - of_head);
                if *sent == STATUS_LEN && *payload == 0 {
                    self.state = IDLE;
                }
            }
            State::Rejecting { sent, .. } => {
                *sent += count as usize;
                if *sent >= STATUS_LEN {
                    self.state = State::Draining {
                        left: self.drain_bytes_max,
                    };
                }
            }
            _ => self.close(),
        }
    }

    /// `count` bytes have been thrown away.
    pub(super) fn handle_drained(&mut self, count: u64) {
        let State::Draining { left } = &mut self.state else {
            return self.close();
        };
        *left = left.saturating_sub(count);
        if *left == 0 {
            self.close();
        }
    }

    /// The peer will send nothing more, the connection failed, or its time is up.
    pub(super) fn close(&mut self) {
        self.state = State::Closed;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DRAIN: u64 = 100;

    fn header(op: Op, version: DataVersion) -> Header {
        Header {
            size: 10,
            address: 64,
            op,
            version,
        }
    }

    /// Feeds `bytes` as one connection in pieces that end at `cuts`, stores writes, and returns
    /// what was sent (payload as `P`), with every send accepting at most `send_max` bytes.
    fn run(bytes: &[u8], cut: usize, send_max: u64, admit: bool) -> (Vec<u8>, Target) {
        let mut target = Target::new(DRAIN);
        let mut sent = Vec::new();
        for mut piece in [&bytes[..cut], &bytes[cut..]] {
            loop {
                match target.want() {
                    Want::Header(0) | Want::Payload(0) => panic!("wants nothing"),
                    Want::Header(max) => {
                        let (head, rest) = piece.split_at(max.min(piece.len()));
                        if head.is_empty() {
                            break;
                        }
                        target.handle_header(head);
                        piece = rest;
                    }
                    // The registry admits no empty range, and none larger than what there is.
                    Want::Decide(header) if admit && (1..=100).contains(&header.size) => {
                        target.admit();
                    }
                    Want::Decide(_) => target.reject(),
                    Want::Payload(max) => {
                        let count = max.min(piece.len() as u64);
                        if count == 0 {
                            break;
                        }
                        piece = &piece[count as usize..];
                        target.handle_payload(count);
                    }
                    Want::Settle => target.handle_in_place(),
                    Want::Send(head, payload) => {
                        let count = (head.len() as u64 + payload).min(send_max);
                        let of_head = count.min(head.len() as u64);
                        sent.extend_from_slice(&head[..of_head as usize]);
                        sent.extend(std::iter::repeat_n(b'P', (count - of_head) as usize));
                        target.handle_sent(count);
                    }
                    Want::Drain(max) => {
                        let count = max.min(piece.len() as u64);
                        if count == 0 {
                            break;
                        }
                        piece = &piece[count as usize..];
                        target.handle_drained(count);
                    }
                    Want::Close => return (sent, target),
                }
            }
        }
        (sent, target)
    }

    fn check(bytes: &[u8], admit: bool, expected: &[u8]) -> Target {
        let mut last = None;
        for cut in 0..=bytes.len() {
            for send_max in [1, 5, u64::MAX] {
                let (sent, target) = run(bytes, cut, send_max, admit);
                assert_eq!(sent, expected, "cut {cut}, send {send_max}");
                last = Some(target);
            }
        }
        last.unwrap()
    }

    #[test]
    fn requests_of_either_version_follow_one_another_split_anywhere() {
        let ok = Status::Ok.encode();
        let mut bytes = Vec::new();
        let mut expected = Vec::new();
        for (op, version) in [
            (Op::Write, DataVersion::V2),
            (Op::Read, DataVersion::V1),
            (Op::Write, DataVersion::V1),
            (Op::Read, DataVersion::V2),
        ] {
            bytes.extend_from_slice(&header(op, version).encode());
            if op == Op::Write {
                bytes.extend_from_slice(b"0123456789");
            }
            if version == DataVersion::V2 {
                expected.extend_from_slice(&ok);
            }
            if op == Op::Read {
                expected.extend_from_slice(b"PPPPPPPPPP");
            }
        }
        let target = check(&bytes, true, &expected);
        assert!(target.is_between_requests());
        assert_eq!(target.patience(), Patience::Unlimited);
    }

    // row: W7.3a
    #[test]
    fn an_acknowledgement_waits_until_the_bytes_are_in_place() {
        let mut target = Target::new(DRAIN);
        target.handle_header(&header(Op::Write, DataVersion::V2).encode());
        target.admit();
        target.handle_payload(9);
        assert_eq!(target.want(), Want::Payload(1));
        target.handle_payload(1);
        assert_eq!(target.want(), Want::Settle);
        assert_eq!(target.patience(), Patience::Progress);
        target.handle_in_place();
        assert_eq!(target.want(), Want::Send(&Status::Ok.encode(), 0));
    }

    // row: W7.3b, W7.4c
    #[test]
    fn a_rejected_request_is_answered_and_drained_within_bounds() {
        let mut bytes = header(Op::Write, DataVersion::V2).encode().to_vec();
        bytes.extend_from_slice(&[7; 60]);
        let target = check(&bytes, false, &Status::Rejected.encode());
        assert_eq!(target.want(), Want::Drain(DRAIN - 60));
        assert_eq!(target.patience(), Patience::Drain);
        bytes.extend_from_slice(&[7; 60]);
        let target = check(&bytes, false, &Status::Rejected.encode());
        assert_eq!(target.want(), Want::Close);
    }

    #[test]
    fn a_rejected_version_1_request_is_closed_without_a_byte() {
        for op in [Op::Read, Op::Write] {
            let target = check(&header(op, DataVersion::V1).encode(), false, b"");
            assert_eq!(target.want(), Want::Close);
        }
    }

    // row: W7.1b
    #[test]
    fn unknown_operations_are_rejected_and_never_served() {
        for opcode in [0x82, 0xFF, 0x8F] {
            let mut bytes = header(Op::Read, DataVersion::V2).encode();
            bytes[16] = opcode;
            let target = check(&bytes, true, &Status::Rejected.encode());
            assert_eq!(target.want(), Want::Drain(DRAIN));
        }
        for opcode in [0x02, 0x7F] {
            let mut bytes = header(Op::Read, DataVersion::V1).encode();
            bytes[16] = opcode;
            let target = check(&bytes, true, b"");
            assert_eq!(target.want(), Want::Close);
        }
    }

    #[test]
    fn a_header_that_has_begun_is_inside_a_request() {
        let mut target = Target::new(DRAIN);
        assert_eq!(target.patience(), Patience::Unlimited);
        target.handle_header(&[1]);
        assert_eq!(target.patience(), Patience::Header);
        assert!(!target.is_between_requests());
        assert_eq!(target.want(), Want::Header(23));
        target.close();
        assert_eq!(target.want(), Want::Close);
    }

    proptest::proptest! {
        #[test]
        fn property_any_bytes_in_any_pieces_are_served_or_refused(
            headers in proptest::collection::vec(
                (proptest::prelude::any::<[u8; HEADER_LEN]>(), 0..40u64, 0..6u8),
                1..6,
            ),
            cut in 0..200usize,
            send_max in 1..20u64,
            admit: bool,
        ) {
            let mut bytes = Vec::new();
            for (mut header, size, opcode) in headers {
                // Sizes that end, and operations that exist as often as not.
                header[..8].copy_from_slice(&size.to_le_bytes());
                header[16] = [0x00, 0x01, 0x80, 0x81, 0x82, 0x02][usize::from(opcode)];
                bytes.extend_from_slice(&header);
                bytes.extend(std::iter::repeat_n(7, size as usize));
            }
            let (_, target) = run(&bytes, cut.min(bytes.len()), send_max, admit);
            // Whatever came, it waits for more bytes or is done; it never wants nothing.
            let settled = matches!(
                target.want(),
                Want::Header(1..) | Want::Payload(1..) | Want::Drain(1..) | Want::Close
            );
            proptest::prop_assert!(settled, "{:?}", target.want());
        }
    }
}
