//! One push against a consumer that loses messages, runs full, takes, cancels, expires, forgets and restarts.
//!
//! The consumer is a toy with the reservation table's rules for one content; whatever it and the network do, the
//! push must keep the rules that protect the consumer's memory, end within its time, and not claim what is not so.

use std::collections::{HashMap, HashSet};

use ec_connector::{
    CancelKind, ClientError, Completion, ControlAddress, Delivery, ErrorCode, IdPolicy, Moment,
    PushAction, PushAnswer, PushConfig, PushFailure, PushMachine, PushStep, Reserved, StageEnd,
    TransferId, WriteEnd, WriteError,
};
use mooncake_transport::Reason;
use proptest::prelude::*;

/// What the push may do to one reservation.
#[derive(Default)]
struct Ledger {
    granted_to_us: bool,
    given_up: bool,
    applied: bool,
    write_unknown: bool,
}

#[derive(Clone, PartialEq)]
enum State {
    Writing,
    Following,
    Ready,
    CancelPending,
    ExpirePending,
    Cancelled,
}

struct Record {
    reservation_id: String,
    state: State,
}

/// The consumer, seen from one content.
struct Consumer {
    len: u64,
    records: HashMap<TransferId, Record>,
    /// Another producer is writing the content.
    other_writes: bool,
    resident: bool,
    /// The content has been completed here at some time, perhaps before a restart.
    arrived: bool,
    serial: u32,
}

impl Consumer {
    fn new(len: u64) -> Self {
        Self {
            len,
            records: HashMap::new(),
            other_writes: false,
            resident: false,
            arrived: false,
            serial: 0,
        }
    }

    fn writer_is_active(&self) -> bool {
        self.other_writes
            || self
                .records
                .values()
                .any(|record| record.state == State::Writing)
    }

    fn reserve(&mut self, id: &TransferId, ledgers: &mut HashMap<String, Ledger>) -> Reserved {
        let granted = |reservation_id: &str, write, ready| Reserved::Granted {
            reservation_id: reservation_id.to_owned(),
            session: "h:1".to_owned(),
            address: 256,
            len_bytes: self.len,
            write,
            ready,
        };
        if let Some(record) = self.records.get(id) {
            return match record.state {
                State::Cancelled | State::CancelPending => Reserved::Cancelled,
                State::Ready => granted(&record.reservation_id, false, true),
                _ => granted(&record.reservation_id, false, false),
            };
        }
        self.serial += 1;
        let reservation_id = format!("r{}", self.serial);
        let (state, write) = if self.resident {
            (State::Ready, false)
        } else if self.writer_is_active() {
            (State::Following, false)
        } else {
            (State::Writing, true)
        };
        let reply = granted(&reservation_id, write, state == State::Ready);
        ledgers
            .entry(reservation_id.clone())
            .or_default()
            .granted_to_us = write;
        self.records.insert(
            id.clone(),
            Record {
                reservation_id,
                state,
            },
        );
        reply
    }

    fn complete(&mut self, id: &TransferId, reservation_id: &str) -> Completion {
        let answer = |completed, became_ready| Completion {
            completed,
            became_ready,
        };
        let Some(record) = self.records.get_mut(id) else {
            return answer(false, false);
        };
        if record.reservation_id != reservation_id {
            return answer(false, false);
        }
        match record.state {
            State::Writing => {
                record.state = State::Ready;
                self.arrived = true;
                self.followers_become_ready();
                answer(true, true)
            }
            State::Ready => answer(true, false),
            // The bytes are dropped unless somebody else waits for them.
            State::CancelPending => {
                record.state = State::Cancelled;
                self.followers_become_ready();
                answer(true, false)
            }
            State::ExpirePending => {
                self.records.remove(id);
                self.followers_become_ready();
                answer(true, false)
            }
            State::Following | State::Cancelled => answer(false, false),
        }
    }

    fn followers_become_ready(&mut self) {
        for record in self.records.values_mut() {
            if record.state == State::Following {
                record.state = State::Ready;
                self.arrived = true;
            }
        }
    }

    fn cancel(&mut self, id: &TransferId, reservation_id: Option<&str>, kind: CancelKind) -> bool {
        let Some(record) = self.records.get_mut(id) else {
            if !kind.refresh() {
                let record = Record {
                    reservation_id: String::new(),
                    state: State::Cancelled,
                };
                self.records.insert(id.clone(), record);
            }
            return true;
        };
        if reservation_id.is_some_and(|wanted| wanted != record.reservation_id) {
            return false;
        }
        match (record.state.clone(), kind) {
            (State::Cancelled, _) => true,
            (State::Ready | State::CancelPending, CancelKind::Refresh) => false,
            (State::Writing, CancelKind::Plain) => {
                record.state = State::CancelPending;
                true
            }
            (State::CancelPending | State::ExpirePending, CancelKind::Plain) => true,
            (_, CancelKind::Refresh) => {
                self.records.remove(id);
                true
            }
            _ => {
                record.state = State::Cancelled;
                true
            }
        }
    }

    fn status(&self, id: &TransferId) -> Option<bool> {
        let record = self.records.get(id)?;
        (record.state != State::Cancelled).then_some(record.state == State::Ready)
    }

    /// Something that happens at the consumer by itself.
    fn drift(&mut self, kind: u8) {
        match kind % 12 {
            0 if !self.writer_is_active() => self.other_writes = true,
            1 if self.other_writes => {
                self.other_writes = false;
                self.arrived = true;
                self.resident = true;
                self.followers_become_ready();
            }
            2 if self.other_writes => {
                // Its producer abandoned: the followers expire (row V5).
                self.other_writes = false;
                self.records
                    .retain(|_, record| record.state != State::Following);
            }
            3 => {
                if self.records.values().any(|r| r.state == State::Ready) {
                    self.resident = true;
                }
                self.records
                    .retain(|_, record| record.state != State::Ready);
            }
            4 => {
                for record in self.records.values_mut() {
                    record.state = match record.state {
                        State::Writing => State::CancelPending,
                        State::CancelPending => State::CancelPending,
                        _ => State::Cancelled,
                    };
                }
            }
            5 => {
                self.records.retain(|_, record| {
                    if record.state == State::Writing {
                        record.state = State::ExpirePending;
                    }
                    !matches!(record.state, State::Ready | State::Following)
                });
            }
            6 => self.resident = false,
            7 => {
                // A restart.
                self.records.clear();
                self.other_writes = false;
                self.resident = false;
            }
            _ => {}
        }
    }
}

/// A byte at a time decides what goes wrong; when the tape ends, nothing does any more.
struct Tape<'a> {
    bytes: std::slice::Iter<'a, u8>,
}

impl Tape<'_> {
    fn next(&mut self) -> Option<u8> {
        self.bytes.next().copied()
    }
}

enum Fate<T> {
    /// The request does not reach the consumer.
    LostRequest {
        sent: bool,
    },
    /// It does, and the reply is lost.
    LostReply,
    /// It does, and what comes back is no reply.
    Nonsense,
    Refused(Option<ErrorCode>),
    Fine(std::marker::PhantomData<T>),
}

fn fate<T>(tape: &mut Tape<'_>) -> Fate<T> {
    match tape.next().unwrap_or(255) {
        0..=20 => Fate::LostRequest { sent: true },
        21..=25 => Fate::LostRequest { sent: false },
        26..=55 => Fate::LostReply,
        56..=75 => Fate::Refused(Some(ErrorCode::PoolFull)),
        76..=85 => Fate::Refused(None),
        86..=88 => Fate::Refused(Some(ErrorCode::ActiveWriter)),
        89 => Fate::Refused(Some(ErrorCode::TooLarge)),
        90 => Fate::Nonsense,
        _ => Fate::Fine(std::marker::PhantomData),
    }
}

fn check(policy: IdPolicy, len: u64, timeout_ms: u64, tape: &[u8]) -> Result<(), TestCaseError> {
    let mut config = PushConfig::default();
    config.timeout_ms = timeout_ms;
    let start = Moment::from_millis(1_000);
    let given = TransferId::new("given").unwrap();
    let mut machine = PushMachine::new(given.clone(), policy, len, config, start);
    let mut tape = Tape { bytes: tape.iter() };
    let mut consumer = Consumer::new(len);
    let mut ledgers: HashMap<String, Ledger> = HashMap::new();
    // The reservation last granted under an id, for cancels that match any.
    let mut under_id: HashMap<TransferId, String> = HashMap::new();
    let mut reserved_ids = HashSet::new();
    let mut drawn = 0;
    let mut now = start;
    let mut writing_ms = 0;
    let mut lossless = true;
    let mut staged = false;
    let mut given_up = false;

    let outcome = 'run: {
        // Far more steps than any push needs: every wait has a least length.
        for _ in 0..20_000 {
            if let Some(kind) = tape.next() {
                consumer.drift(kind);
            }
            if tape.next().is_some_and(|what| what == 7) {
                machine.give_up(now, PushFailure::Closed);
                given_up = true;
            }
            let step = machine.poll(now, || {
                drawn += 1;
                TransferId::new(format!("fresh{drawn}")).unwrap()
            });
            let action = match step {
                PushStep::Do(action) => action,
                PushStep::WaitUntil(at) => {
                    prop_assert!(!given_up, "waits, though it was given up");
                    prop_assert!(at > now);
                    now = at;
                    continue;
                }
                PushStep::WaitForRoom(at) => {
                    prop_assert!(!given_up, "waits, though it was given up");
                    prop_assert!(at > now);
                    match tape.next().unwrap_or(255) {
                        0..=20 => now = at,
                        _ => machine.handle_room(),
                    }
                    continue;
                }
                PushStep::Done(outcome) => break 'run outcome,
                PushStep::InProgress => {
                    return Err(TestCaseError::fail("an action was forgotten"));
                }
            };
            match action {
                PushAction::Reserve {
                    transfer_id,
                    timeout_ms,
                } => {
                    if policy == IdPolicy::Given {
                        prop_assert_eq!(&transfer_id, &given);
                    }
                    let mut reply = |consumer: &mut Consumer| {
                        let reply = consumer.reserve(&transfer_id, &mut ledgers);
                        if let Reserved::Granted { reservation_id, .. } = &reply {
                            under_id.insert(transfer_id.clone(), reservation_id.clone());
                        }
                        reply
                    };
                    let first_time = reserved_ids.insert(transfer_id.clone());
                    let (answer, left) = match fate::<Reserved>(&mut tape) {
                        Fate::LostRequest { sent } => (lost(sent), sent),
                        Fate::LostReply => {
                            reply(&mut consumer);
                            (lost(true), true)
                        }
                        Fate::Nonsense => {
                            lossless = false;
                            reply(&mut consumer);
                            (nonsense(), true)
                        }
                        Fate::Refused(code) => (refusal(code), true),
                        Fate::Fine(_) => (PushAnswer::Reply(reply(&mut consumer)), true),
                    };
                    if policy == IdPolicy::Fresh {
                        prop_assert!(first_time, "a fresh id was used twice");
                        if !left {
                            // Nothing was sent: the same id may be used again.
                            reserved_ids.remove(&transfer_id);
                        }
                    }
                    if matches!(answer, PushAnswer::Lost { .. }) {
                        lossless = false;
                        now = now.after_millis(timeout_ms);
                    }
                    machine.handle_reserve(now, answer);
                }
                PushAction::Stage => {
                    prop_assert!(!staged, "the source is staged once");
                    let end = match tape.next().unwrap_or(255) {
                        0..=10 => StageEnd::Failed,
                        11..=60 => StageEnd::Later,
                        _ => StageEnd::Ready,
                    };
                    staged = end == StageEnd::Ready;
                    machine.handle_staged(end);
                }
                PushAction::Write { .. } => {
                    let reservation = under_id[machine.transfer_id()].clone();
                    let ledger = ledgers.get_mut(&reservation).unwrap();
                    prop_assert!(ledger.granted_to_us, "wrote without a grant");
                    prop_assert!(!ledger.given_up, "wrote to memory that was given up");
                    prop_assert!(!ledger.write_unknown);
                    now = now.after_millis(3);
                    writing_ms += 3;
                    let cause = WriteError::Task(Reason::Closed).into();
                    let end = match tape.next().unwrap_or(255) {
                        0..=12 => WriteEnd::Closed { cause },
                        13..=25 => WriteEnd::Ended { cause },
                        26..=50 => {
                            ledger.write_unknown = true;
                            WriteEnd::Unknown { cause }
                        }
                        _ => {
                            ledger.applied = true;
                            WriteEnd::Applied
                        }
                    };
                    machine.handle_write(now, end);
                }
                PushAction::Complete {
                    transfer_id,
                    reservation_id,
                    timeout_ms,
                } => {
                    let ledger = &ledgers[&reservation_id];
                    prop_assert!(ledger.applied || len == 0, "completed what was not written");
                    prop_assert!(!ledger.given_up, "completed what was given up");
                    let mut reply = || consumer.complete(&transfer_id, &reservation_id);
                    let answer = match fate::<Completion>(&mut tape) {
                        Fate::LostRequest { sent } => lost(sent),
                        Fate::LostReply => {
                            reply();
                            lost(true)
                        }
                        Fate::Nonsense => {
                            lossless = false;
                            reply();
                            nonsense()
                        }
                        Fate::Refused(code) => refusal(code),
                        Fate::Fine(_) => PushAnswer::Reply(reply()),
                    };
                    if matches!(answer, PushAnswer::Lost { .. }) {
                        lossless = false;
                        now = now.after_millis(timeout_ms);
                    }
                    machine.handle_complete(now, answer);
                }
                PushAction::Status {
                    transfer_id,
                    timeout_ms,
                } => {
                    let answer = match fate::<Option<bool>>(&mut tape) {
                        Fate::LostRequest { sent } => lost(sent),
                        Fate::LostReply => lost(true),
                        Fate::Nonsense => {
                            lossless = false;
                            nonsense()
                        }
                        Fate::Refused(code) => refusal(code),
                        Fate::Fine(_) => PushAnswer::Reply(consumer.status(&transfer_id)),
                    };
                    if matches!(answer, PushAnswer::Lost { .. }) {
                        lossless = false;
                        now = now.after_millis(timeout_ms);
                    }
                    machine.handle_status(now, answer);
                }
                PushAction::Cancel {
                    transfer_id,
                    reservation_id,
                    kind,
                    timeout_ms,
                } => {
                    let meant = reservation_id
                        .clone()
                        .or_else(|| under_id.get(&transfer_id).cloned());
                    if kind.abandon()
                        && let Some(ledger) = meant.and_then(|meant| ledgers.get_mut(&meant))
                    {
                        prop_assert!(!ledger.write_unknown, "abandoned under an open write");
                        ledger.given_up = true;
                    }
                    let mut reply =
                        || consumer.cancel(&transfer_id, reservation_id.as_deref(), kind);
                    let answer = match fate::<bool>(&mut tape) {
                        Fate::LostRequest { sent } => lost(sent),
                        Fate::LostReply => {
                            reply();
                            lost(true)
                        }
                        Fate::Nonsense => {
                            lossless = false;
                            reply();
                            nonsense()
                        }
                        Fate::Refused(code) => {
                            lossless = false;
                            refusal(code)
                        }
                        Fate::Fine(_) => PushAnswer::Reply(reply()),
                    };
                    if matches!(answer, PushAnswer::Lost { .. }) {
                        lossless = false;
                        now = now.after_millis(timeout_ms);
                    }
                    machine.handle_cancel(now, answer);
                }
            }
        }
        return Err(TestCaseError::fail("the push did not end"));
    };

    if let Ok(delivery) = outcome.result {
        prop_assert!(consumer.arrived, "claims {delivery:?}, and nothing arrived");
        if delivery == Delivery::Written {
            prop_assert!(len == 0 || ledgers.values().any(|ledger| ledger.applied));
        }
    }
    // Waiting ends at the timeout. Beyond it there may be a write, the grace its completion has, and the
    // shortest request times.
    let grace_ms = if writing_ms > 0 || len == 0 {
        30_000
    } else {
        0
    };
    let took_ms = now.as_millis() - start.as_millis();
    prop_assert!(
        took_ms <= timeout_ms + writing_ms + grace_ms + 2_500,
        "took {} ms",
        took_ms
    );
    if lossless && !matches!(outcome.result, Err(PushFailure::WriteUnknown { .. })) {
        let stuck = consumer
            .records
            .values()
            .any(|record| record.state == State::Writing);
        prop_assert!(
            !stuck,
            "a writer's memory was left behind after {:?}",
            outcome
        );
    }
    Ok(())
}

fn lost<T>(sent: bool) -> PushAnswer<T> {
    PushAnswer::Lost {
        sent,
        cause: ClientError::Disconnected { address: nowhere() }.into(),
    }
}

fn nonsense<T>() -> PushAnswer<T> {
    PushAnswer::BadReply {
        cause: ClientError::BadReply {
            address: nowhere(),
            op: "any",
            what: "it is made up",
            source: None,
        }
        .into(),
    }
}

fn nowhere() -> ControlAddress {
    ControlAddress::new(std::net::Ipv4Addr::LOCALHOST.into(), 1)
}

fn refusal<T>(code: Option<ErrorCode>) -> PushAnswer<T> {
    PushAnswer::Refused {
        code,
        text: "no".to_owned(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]

    // row: C3.4, C3.7b, D16
    #[test]
    fn property_a_push_keeps_its_rules_whatever_the_consumer_and_the_network_do(
        given in any::<bool>(),
        zero in any::<bool>(),
        timeout_ms in prop_oneof![Just(60_000u64), Just(500), Just(0)],
        tape in proptest::collection::vec(any::<u8>(), 0..120),
    ) {
        let policy = if given { IdPolicy::Given } else { IdPolicy::Fresh };
        check(policy, if zero { 0 } else { 1024 }, timeout_ms, &tape)?;
    }
}
