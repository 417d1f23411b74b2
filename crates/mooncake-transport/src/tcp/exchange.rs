//! One request to a peer over a data connection, as a pure state machine.
//!
//! Status bytes are read while the payload is still being sent, so that a rejection ends the
//! request at once. The machine sees header and status bytes; payload it only counts.
//!
//! Version 1 answers a read with nothing but its bytes, and a write not at all. So a read of one byte follows
//! each write on the same connection: targets serve one request after the other, and the byte says that all
//! of the write has been stored.

use std::io;

use crate::batch::{Reason, Remote};
use crate::error::IoFailure;
use crate::wire::data::{DataVersion, HEADER_LEN, Header, Op, STATUS_LEN, Status};

/// What became of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Outcome {
    pub(super) remote: Remote,
    /// The connection is between requests again; otherwise it must be closed.
    pub(super) reusable: bool,
    /// The peer closed before the first byte of its reply: on a connection that had served earlier
    /// requests this says nothing about this one, which may be sent again.
    pub(super) unanswered: bool,
}

/// Why a request has taken too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Overdue {
    /// No byte moved.
    Progress { timeout_ms: u64 },
    /// Everything was sent and no answer came.
    Status { timeout_ms: u64 },
    /// Bytes moved, and too few.
    Total { timeout_ms: u64 },
}

#[derive(Debug)]
pub(super) struct Exchange {
    op: Op,
    version: DataVersion,
    size: u64,
    header: [u8; HEADER_LEN],
    /// What follows the payload of a write in version 1: the read of one byte.
    barrier: Option<[u8; HEADER_LEN]>,
    /// Bytes of header, payload and barrier sent.
    sent: u64,
    status: [u8; STATUS_LEN],
    status_have: usize,
    /// How many bytes of status there are: a frame, the byte of the barrier, or none.
    status_len: usize,
    /// A complete status said that the request is or will be served, or there is none.
    accepted: bool,
    /// Bytes of payload received.
    received: u64,
    /// Sending failed; what the peer had to say may still be readable.
    broken: Option<Outcome>,
    outcome: Option<Outcome>,
}

impl Exchange {
    /// Starts a request of at least one byte.
    pub(super) fn new(op: Op, version: DataVersion, address: u64, size: u64) -> Self {
        let request = |op, size| {
            Header {
                size,
                address,
                op,
                version,
            }
            .encode()
        };
        let is_v1 = version < DataVersion::V2;
        let status_len = match (is_v1, op) {
            (false, _) => STATUS_LEN,
            (true, Op::Write) => 1,
            (true, Op::Read) => 0,
        };
        Self {
            op,
            version,
            size,
            header: request(op, size),
            // A byte of what is written: no other is known to be one that can be read.
            barrier: (is_v1 && op == Op::Write).then(|| request(Op::Read, 1)),
            sent: 0,
            status: [0; STATUS_LEN],
            status_have: 0,
            status_len,
            accepted: status_len == 0,
            received: 0,
            broken: None,
            outcome: None,
        }
    }

    /// Bytes of header and payload.
    fn request_len(&self) -> u64 {
        let payload = if self.op == Op::Write { self.size } else { 0 };
        // No range of memory comes close to the end of what can be counted.
        (HEADER_LEN as u64).saturating_add(payload)
    }

    fn send_total(&self) -> u64 {
        let barrier = self.barrier.map_or(0, |barrier| barrier.len() as u64);
        self.request_len().saturating_add(barrier)
    }

    /// Returns the header bytes to send now and how much payload follows them, if anything is left.
    pub(super) fn sending(&self) -> Option<(&[u8], u64)> {
        if self.outcome.is_some() || self.broken.is_some() || self.sent == self.send_total() {
            return None;
        }
        let request_len = self.request_len();
        if self.sent < request_len {
            let head = rest(&self.header, self.sent);
            return Some((head, request_len - self.sent - head.len() as u64));
        }
        let barrier = self.barrier.as_ref()?;
        Some((rest(barrier, self.sent - request_len), 0))
    }

    /// Returns how many status bytes and how much payload are missing, in this order.
    pub(super) fn receiving(&self) -> Option<(usize, u64)> {
        let payload = if self.op == Op::Read {
            self.size - self.received
        } else {
            0
        };
        let status = self.status_len - self.status_have;
        (self.outcome.is_none() && (status > 0 || payload > 0)).then_some((status, payload))
    }

    /// Says whether everything was sent and the peer has not begun to answer.
    pub(super) fn awaits_status(&self) -> bool {
        let is_answered = match self.status_len {
            0 => self.received > 0,
            _ => self.accepted,
        };
        self.sent == self.send_total() && !is_answered
    }

    /// Says whether sending has failed and only the peer's reason is of interest.
    pub(super) fn is_broken(&self) -> bool {
        self.broken.is_some()
    }

    /// Says whether the peer has sent anything.
    pub(super) fn has_heard(&self) -> bool {
        self.status_have > 0 || self.received > 0
    }

    pub(super) fn outcome(&self) -> Option<&Outcome> {
        self.outcome.as_ref()
    }

    /// `count` bytes have been sent.
    pub(super) fn handle_sent(&mut self, count: u64) {
        self.sent = (self.sent + count).min(self.send_total());
        self.finish_if_done();
    }

    /// These status bytes, at most as many as were missing, and then `payload` bytes have been
    /// received.
    pub(super) fn handle_received(&mut self, status: &[u8], payload: u64) {
        if self.outcome.is_some() {
            return;
        }
        let is_early = self.sent < self.send_total() && (!status.is_empty() || payload > 0);
        if self.version < DataVersion::V2 && is_early {
            // Nothing marks an answer as one: what comes before it was asked for is none.
            return self.end(Remote::Unknown(Reason::Unasked));
        }
        self.status[self.status_have..self.status_have + status.len()].copy_from_slice(status);
        self.status_have += status.len();
        self.received += payload;
        if self.status_have == self.status_len && !self.accepted {
            if self.version < DataVersion::V2 {
                // The byte itself may be another by now.
                self.accepted = true;
                return self.finish_if_done();
            }
            match Status::decode(self.status) {
                Ok(Status::Ok) => self.accepted = true,
                // Said before anything is stored, and the peer closes then.
                Ok(Status::Rejected) => return self.end(Remote::Ended(Reason::Rejected)),
                Ok(Status::Other(code)) => {
                    return self.end(Remote::Unknown(Reason::Failed { code }));
                }
                Err(bad) => {
                    return self.end(Remote::Unknown(Reason::BadStatus { word: bad.word }));
                }
            }
        }
        self.finish_if_done();
    }

    fn finish_if_done(&mut self) {
        let payload_done = self.op == Op::Write || self.received == self.size;
        if self.outcome.is_none() && self.accepted && payload_done && self.sent == self.send_total()
        {
            self.outcome = Some(Outcome {
                remote: Remote::Applied,
                reusable: true,
                unanswered: false,
            });
        }
    }

    fn end(&mut self, remote: Remote) {
        if self.outcome.is_none() {
            self.outcome = Some(Outcome {
                remote,
                reusable: false,
                unanswered: false,
            });
        }
    }

    fn closed(&self) -> Outcome {
        Outcome {
            remote: Remote::Ended(Reason::Closed),
            reusable: false,
            unanswered: !self.has_heard(),
        }
    }

    fn failed(&self, error: &io::Error) -> Outcome {
        match error.kind() {
            io::ErrorKind::ConnectionReset
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::NotConnected => self.closed(),
            _ => {
                let reason = Reason::Connection {
                    source: IoFailure::from(error),
                };
                // With nothing sent there is nothing that could still be stored.
                let remote = if self.sent == 0 {
                    Remote::Ended(reason)
                } else {
                    Remote::Unknown(reason)
                };
                Outcome {
                    remote,
                    reusable: false,
                    unanswered: false,
                }
            }
        }
    }

    /// The peer will send nothing more.
    pub(super) fn handle_eof(&mut self) {
        let outcome = self.closed();
        self.end_or_broken(outcome);
    }

    /// Receiving failed.
    pub(super) fn handle_receive_error(&mut self, error: &io::Error) {
        let outcome = self.failed(error);
        self.end_or_broken(outcome);
    }

    /// Ends with the failure of sending, if that came first, else with `outcome`.
    fn end_or_broken(&mut self, outcome: Outcome) {
        let mut outcome = self.broken.take().unwrap_or(outcome);
        outcome.unanswered &= !self.has_heard();
        self.outcome.get_or_insert(outcome);
    }

    /// Sending failed; receiving goes on for a moment, because a rejection may be under way.
    pub(super) fn handle_send_error(&mut self, error: &io::Error) {
        if self.broken.is_none() {
            self.broken = Some(self.failed(error));
        }
    }

    /// Time is up.
    pub(super) fn handle_overdue(&mut self, overdue: Overdue) {
        if self.broken.is_some() {
            let outcome = self.closed();
            return self.end_or_broken(outcome);
        }
        let reason = match overdue {
            Overdue::Progress { timeout_ms } => Reason::Stalled { timeout_ms },
            Overdue::Status { timeout_ms } => Reason::NoStatus { timeout_ms },
            Overdue::Total { timeout_ms } => Reason::TooSlow { timeout_ms },
        };
        self.end(if self.sent == 0 {
            Remote::Ended(reason)
        } else {
            Remote::Unknown(reason)
        });
    }

    /// The local memory failed, or the engine shuts down.
    pub(super) fn handle_given_up(&mut self, reason: Reason) {
        self.end(if self.sent == 0 {
            Remote::Ended(reason)
        } else {
            Remote::Unknown(reason)
        });
    }
}

/// What is left of `bytes` after `sent` of them.
fn rest(bytes: &[u8; HEADER_LEN], sent: u64) -> &[u8] {
    &bytes[usize::try_from(sent).unwrap_or(HEADER_LEN).min(HEADER_LEN)..]
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: u64 = 10;

    fn exchange(op: Op) -> Exchange {
        Exchange::new(op, DataVersion::V2, 64, SIZE)
    }

    fn old_exchange(op: Op) -> Exchange {
        Exchange::new(op, DataVersion::V1, 64, SIZE)
    }

    fn send_all(exchange: &mut Exchange) {
        while let Some((head, payload)) = exchange.sending() {
            let count = head.len() as u64 + payload;
            exchange.handle_sent(count);
        }
    }

    fn outcome(exchange: &Exchange) -> (Remote, bool, bool) {
        let outcome = exchange.outcome().unwrap().clone();
        (outcome.remote, outcome.reusable, outcome.unanswered)
    }

    #[test]
    fn a_write_sends_header_and_payload_split_anywhere() {
        let mut expected = exchange(Op::Write).header.to_vec();
        expected.extend_from_slice(b"PPPPPPPPPP");
        for step in 1..=expected.len() as u64 {
            let mut exchange = exchange(Op::Write);
            let mut bytes = Vec::new();
            while let Some((head, payload)) = exchange.sending() {
                let count = step.min(head.len() as u64 + payload);
                let of_head = (count as usize).min(head.len());
                bytes.extend_from_slice(&head[..of_head]);
                bytes.extend(std::iter::repeat_n(b'P', count as usize - of_head));
                exchange.handle_sent(count);
            }
            assert_eq!(bytes, expected);
            assert!(exchange.awaits_status());
        }
    }

    #[test]
    fn a_status_is_taken_however_it_is_split() {
        let ok = Status::Ok.encode();
        for cut in 0..=STATUS_LEN {
            let mut exchange = exchange(Op::Write);
            send_all(&mut exchange);
            exchange.handle_received(&ok[..cut], 0);
            if cut < STATUS_LEN {
                assert_eq!(exchange.receiving(), Some((STATUS_LEN - cut, 0)));
                exchange.handle_received(&ok[cut..], 0);
            }
            assert_eq!(outcome(&exchange), (Remote::Applied, true, false));
            assert_eq!(exchange.receiving(), None);
        }
    }

    #[test]
    fn a_read_takes_status_and_payload_in_one_or_many_pieces() {
        for first in 0..=SIZE {
            let mut exchange = exchange(Op::Read);
            send_all(&mut exchange);
            assert_eq!(exchange.receiving(), Some((8, SIZE)));
            exchange.handle_received(&Status::Ok.encode(), first);
            if first < SIZE {
                assert!(exchange.outcome().is_none());
                assert_eq!(exchange.receiving(), Some((0, SIZE - first)));
                exchange.handle_received(&[], SIZE - first);
            }
            assert_eq!(outcome(&exchange), (Remote::Applied, true, false));
        }
    }

    // row: W7.7b
    #[test]
    fn an_early_ok_is_remembered_until_the_body_has_been_sent() {
        let mut exchange = exchange(Op::Write);
        exchange.handle_sent(24);
        exchange.handle_received(&Status::Ok.encode(), 0);
        assert!(exchange.outcome().is_none());
        assert_eq!(exchange.sending(), Some((&[][..], SIZE)));
        send_all(&mut exchange);
        assert_eq!(outcome(&exchange), (Remote::Applied, true, false));
    }

    // row: W7.2a, W7.2b, W7.7a
    #[test]
    fn an_early_rejection_or_garbage_ends_the_request() {
        for (bytes, remote) in [
            (Status::Rejected.encode(), Remote::Ended(Reason::Rejected)),
            (
                Status::Other(2).encode(),
                Remote::Unknown(Reason::Failed { code: 2 }),
            ),
            (
                *b"HTTP/1.1",
                Remote::Unknown(Reason::BadStatus {
                    word: u64::from_le_bytes(*b"HTTP/1.1"),
                }),
            ),
        ] {
            let mut exchange = exchange(Op::Write);
            exchange.handle_sent(26);
            exchange.handle_received(&bytes, 0);
            assert_eq!(outcome(&exchange), (remote, false, false));
            assert_eq!(exchange.sending(), None);
        }
    }

    // row: W7.4b
    #[test]
    fn a_rejection_is_found_behind_a_failed_send() {
        let mut exchange = exchange(Op::Write);
        exchange.handle_sent(26);
        exchange.handle_send_error(&io::ErrorKind::BrokenPipe.into());
        assert!(exchange.outcome().is_none() && exchange.is_broken());
        assert_eq!(exchange.sending(), None);
        exchange.handle_received(&Status::Rejected.encode(), 0);
        assert_eq!(
            outcome(&exchange),
            (Remote::Ended(Reason::Rejected), false, false)
        );
    }

    #[test]
    fn a_failed_send_without_an_explanation_is_a_closed_connection() {
        for end in [
            Exchange::handle_eof as fn(&mut Exchange),
            |e| e.handle_receive_error(&io::ErrorKind::ConnectionReset.into()),
            |e| e.handle_overdue(Overdue::Progress { timeout_ms: 5 }),
        ] {
            let mut exchange = exchange(Op::Write);
            exchange.handle_sent(26);
            exchange.handle_send_error(&io::ErrorKind::ConnectionReset.into());
            end(&mut exchange);
            assert_eq!(
                outcome(&exchange),
                (Remote::Ended(Reason::Closed), false, true)
            );
        }
    }

    #[test]
    fn only_a_close_before_any_reply_byte_counts_as_unanswered() {
        let mut exchange = exchange(Op::Write);
        send_all(&mut exchange);
        exchange.handle_eof();
        assert_eq!(
            outcome(&exchange),
            (Remote::Ended(Reason::Closed), false, true)
        );

        let mut exchange = self::exchange(Op::Read);
        send_all(&mut exchange);
        exchange.handle_received(&Status::Ok.encode()[..1], 0);
        exchange.handle_eof();
        assert_eq!(
            outcome(&exchange),
            (Remote::Ended(Reason::Closed), false, false)
        );
    }

    #[test]
    fn our_own_deadline_leaves_the_peer_unknown_and_is_never_unanswered() {
        let mut exchange = exchange(Op::Write);
        send_all(&mut exchange);
        assert!(exchange.awaits_status());
        exchange.handle_overdue(Overdue::Status { timeout_ms: 30 });
        assert_eq!(
            outcome(&exchange),
            (
                Remote::Unknown(Reason::NoStatus { timeout_ms: 30 }),
                false,
                false
            )
        );
        let mut exchange = self::exchange(Op::Write);
        exchange.handle_overdue(Overdue::Progress { timeout_ms: 30 });
        assert_eq!(
            outcome(&exchange).0,
            Remote::Ended(Reason::Stalled { timeout_ms: 30 })
        );
    }

    #[test]
    fn a_connection_lost_on_the_way_leaves_the_peer_unknown() {
        let mut exchange = exchange(Op::Write);
        send_all(&mut exchange);
        exchange.handle_receive_error(&io::ErrorKind::TimedOut.into());
        let (remote, _, unanswered) = outcome(&exchange);
        assert!(matches!(remote, Remote::Unknown(Reason::Connection { .. })) && !unanswered);
    }

    // row: W7.3e
    #[test]
    fn a_version_1_write_is_followed_by_a_read_of_one_byte_split_anywhere() {
        let request = |op, size| {
            Header {
                size,
                address: 64,
                op,
                version: DataVersion::V1,
            }
            .encode()
        };
        let mut expected = request(Op::Write, SIZE).to_vec();
        expected.extend_from_slice(b"PPPPPPPPPP");
        expected.extend_from_slice(&request(Op::Read, 1));
        for step in 1..=expected.len() as u64 {
            let mut exchange = old_exchange(Op::Write);
            let mut bytes = Vec::new();
            while let Some((head, payload)) = exchange.sending() {
                assert!(!exchange.awaits_status());
                let count = step.min(head.len() as u64 + payload);
                let of_head = (count as usize).min(head.len());
                bytes.extend_from_slice(&head[..of_head]);
                bytes.extend(std::iter::repeat_n(b'P', count as usize - of_head));
                exchange.handle_sent(count);
            }
            assert_eq!(bytes, expected);
            assert!(exchange.awaits_status() && exchange.outcome().is_none());
            assert_eq!(exchange.receiving(), Some((1, 0)));
            // Whatever the byte is: whoever owns the memory may have changed it.
            exchange.handle_received(b"x", 0);
            assert_eq!(outcome(&exchange), (Remote::Applied, true, false));
        }
    }

    // row: W7.3e
    #[test]
    fn a_version_1_write_is_not_applied_before_its_barrier_is_answered() {
        let mut exchange = old_exchange(Op::Write);
        send_all(&mut exchange);
        exchange.handle_overdue(Overdue::Status { timeout_ms: 30 });
        assert_eq!(
            outcome(&exchange),
            (
                Remote::Unknown(Reason::NoStatus { timeout_ms: 30 }),
                false,
                false
            )
        );
        let mut exchange = old_exchange(Op::Write);
        send_all(&mut exchange);
        exchange.handle_eof();
        assert_eq!(
            outcome(&exchange),
            (Remote::Ended(Reason::Closed), false, true)
        );
        // A byte that nobody asked for says nothing.
        for sent in [24, 24 + SIZE, 24 + SIZE + 23] {
            let mut exchange = old_exchange(Op::Write);
            exchange.handle_sent(sent);
            exchange.handle_received(b"x", 0);
            assert_eq!(
                outcome(&exchange),
                (Remote::Unknown(Reason::Unasked), false, false)
            );
        }
    }

    // row: W7.3e
    #[test]
    fn a_version_1_read_takes_its_bytes_and_no_status() {
        let mut exchange = old_exchange(Op::Read);
        assert_eq!(exchange.receiving(), Some((0, SIZE)));
        send_all(&mut exchange);
        assert!(exchange.awaits_status());
        exchange.handle_received(&[], 4);
        assert!(!exchange.awaits_status() && exchange.outcome().is_none());
        let mut cut = old_exchange(Op::Read);
        send_all(&mut cut);
        cut.handle_received(&[], 4);
        cut.handle_eof();
        assert_eq!(outcome(&cut), (Remote::Ended(Reason::Closed), false, false));
        exchange.handle_received(&[], SIZE - 4);
        assert_eq!(outcome(&exchange), (Remote::Applied, true, false));
    }

    #[test]
    fn bytes_that_come_before_a_version_1_read_was_asked_for_are_none_of_it() {
        for sent in [0, 23] {
            let mut exchange = old_exchange(Op::Read);
            exchange.handle_sent(sent);
            exchange.handle_received(&[], SIZE);
            let unasked = Remote::Unknown(Reason::Unasked);
            assert_eq!(outcome(&exchange), (unasked, false, false), "{sent}");
        }
    }

    proptest::proptest! {
        #[test]
        fn property_every_order_of_events_settles_once_and_never_wants_more_than_is_missing(
            write: bool,
            old: bool,
            events in proptest::collection::vec((0..7u8, 1..40u64, proptest::prelude::any::<u8>()), 0..40),
        ) {
            let op = if write { Op::Write } else { Op::Read };
            let mut exchange = if old { old_exchange(op) } else { exchange(op) };
            let ok = Status::Ok.encode();
            let mut first: Option<Outcome> = None;
            let mut was_early = false;
            for (event, count, byte) in events {
                match event {
                    0 | 1 => {
                        if let Some((head, payload)) = exchange.sending() {
                            let max = head.len() as u64 + payload;
                            proptest::prop_assert!((1..=24 + SIZE).contains(&max));
                            proptest::prop_assert!(exchange.sent + max <= exchange.send_total());
                            exchange.handle_sent(count.min(max));
                        }
                    }
                    2 | 3 => {
                        if let Some((status, payload)) = exchange.receiving() {
                            proptest::prop_assert!(status as u64 + payload > 0);
                            let of_status = status.min(count as usize);
                            let have = exchange.status_have;
                            let mut bytes = ok[have..have + of_status].to_vec();
                            if byte < 8 {
                                bytes.iter_mut().for_each(|b| *b ^= byte);
                            }
                            let left = count - of_status as u64;
                            let payload = payload.min(left);
                            was_early |= exchange.sent < exchange.send_total()
                                && (!bytes.is_empty() || payload > 0);
                            exchange.handle_received(&bytes, payload);
                        }
                    }
                    4 => exchange.handle_send_error(&io::ErrorKind::BrokenPipe.into()),
                    5 if byte < 32 => exchange.handle_eof(),
                    6 if byte < 32 => exchange.handle_overdue(Overdue::Progress { timeout_ms: 1 }),
                    _ => {}
                }
                match (&first, exchange.outcome()) {
                    (None, now) => first = now.cloned(),
                    (Some(first), now) => proptest::prop_assert_eq!(Some(first), now),
                }
            }
            if let Some(outcome) = first {
                // Only a complete exchange is a success, and only a success leaves a connection.
                proptest::prop_assert_eq!(outcome.reusable, outcome.remote == Remote::Applied);
                if outcome.reusable {
                    proptest::prop_assert_eq!(exchange.sent, exchange.send_total());
                    proptest::prop_assert!(!(old && was_early), "an answer that nobody had asked for");
                    proptest::prop_assert!(old || exchange.status == ok);
                    proptest::prop_assert_eq!(exchange.status_have, exchange.status_len);
                    proptest::prop_assert!(write || exchange.received == SIZE);
                }
                proptest::prop_assert!(exchange.sending().is_none() && exchange.receiving().is_none());
            } else {
                exchange.handle_eof();
                proptest::prop_assert!(exchange.outcome().is_some());
            }
        }
    }
}
