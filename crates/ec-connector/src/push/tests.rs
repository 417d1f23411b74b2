//! One push at a time, step by step.

use std::error::Error;

use mooncake_transport::Reason;

use super::*;
use crate::code::ErrorCode;
use crate::control::{ClientError, ControlAddress};
use crate::reservation::Completion;

const LEN: u64 = 4096;

/// This complete made the item ready.
const DONE: Completion = Completion {
    completed: true,
    became_ready: true,
};
/// Acknowledged, and not made ready by this complete.
const DONE_BEFORE: Completion = Completion {
    completed: true,
    became_ready: false,
};
const REFUSED: Completion = Completion {
    completed: false,
    became_ready: false,
};

/// A push, its clock and its supply of ids `f1`, `f2`, …
struct Driven {
    machine: PushMachine,
    now: Moment,
    drawn: u32,
}

impl Driven {
    fn new(policy: IdPolicy, len: u64) -> Self {
        let now = Moment::from_millis(1_000_000);
        Self {
            machine: PushMachine::new(id("t"), policy, len, PushConfig::default(), now),
            now,
            drawn: 0,
        }
    }

    fn fresh() -> Self {
        Self::new(IdPolicy::Fresh, LEN)
    }

    fn given() -> Self {
        Self::new(IdPolicy::Given, LEN)
    }

    /// The next action, passing the time until it is due.
    fn act(&mut self) -> PushAction {
        loop {
            let drawn = &mut self.drawn;
            match self.machine.poll(self.now, || {
                *drawn += 1;
                id(&format!("f{drawn}"))
            }) {
                PushStep::Do(action) => return action,
                PushStep::WaitUntil(at) => {
                    assert!(at > self.now, "a wait ends later than now");
                    self.now = at;
                }
                other => panic!("expected an action, got {other:?}"),
            }
        }
    }

    fn pass(&mut self, millis: u64) {
        self.now = self.now.after_millis(millis);
    }

    fn reserve(&mut self, answer: PushAnswer<Reserved>) -> TransferId {
        match self.act() {
            PushAction::Reserve { transfer_id, .. } => {
                self.machine.handle_reserve(self.now, answer);
                transfer_id
            }
            other => panic!("expected a reserve, got {other:?}"),
        }
    }

    /// Reserves memory as a writer and stages the source.
    fn begin_write(&mut self) {
        self.reserve(granted(true, false));
        assert_eq!(self.act(), PushAction::Stage);
        self.machine.handle_staged(StageEnd::Ready);
    }

    fn write(&mut self, end: WriteEnd) {
        assert!(matches!(self.act(), PushAction::Write { .. }));
        self.machine.handle_write(self.now, end);
    }

    fn complete(&mut self, answer: PushAnswer<Completion>) {
        match self.act() {
            PushAction::Complete { reservation_id, .. } => {
                assert_eq!(reservation_id, "r");
                self.machine.handle_complete(self.now, answer);
            }
            other => panic!("expected a complete, got {other:?}"),
        }
    }

    fn status(&mut self, answer: PushAnswer<Option<bool>>) -> TransferId {
        match self.act() {
            PushAction::Status { transfer_id, .. } => {
                self.machine.handle_status(self.now, answer);
                transfer_id
            }
            other => panic!("expected a status, got {other:?}"),
        }
    }

    fn cancel(&mut self, kind: CancelKind, answer: PushAnswer<bool>) -> TransferId {
        match self.act() {
            PushAction::Cancel {
                transfer_id,
                kind: sent,
                ..
            } => {
                assert_eq!(sent, kind);
                self.machine.handle_cancel(self.now, answer);
                transfer_id
            }
            other => panic!("expected a cancel, got {other:?}"),
        }
    }

    fn result(&mut self) -> Result<Delivery, PushFailure> {
        match self.machine.poll(self.now, || panic!("no id is needed")) {
            PushStep::Done(outcome) => {
                assert_eq!(self.machine.outcome(), Some(&outcome));
                outcome.result
            }
            other => panic!("expected the end, got {other:?}"),
        }
    }

    fn ended_under(&self) -> &str {
        self.machine.transfer_id().as_str()
    }
}

fn id(text: &str) -> TransferId {
    TransferId::new(text).unwrap()
}

fn granted(write: bool, ready: bool) -> PushAnswer<Reserved> {
    PushAnswer::Reply(Reserved::Granted {
        reservation_id: "r".to_owned(),
        session: "h:1".to_owned(),
        address: 64,
        len_bytes: LEN,
        write,
        ready,
    })
}

fn refused<T>(code: Option<ErrorCode>) -> PushAnswer<T> {
    PushAnswer::Refused {
        code,
        text: "no".to_owned(),
    }
}

const LOST_REPLY: bool = true;

fn lost<T>() -> PushAnswer<T> {
    lost_when(LOST_REPLY)
}

fn lost_when<T>(sent: bool) -> PushAnswer<T> {
    let address = ControlAddress::parse("tcp://127.0.0.1:1").unwrap();
    PushAnswer::Lost {
        sent,
        cause: ClientError::Disconnected { address }.into(),
    }
}

fn bad<T>() -> PushAnswer<T> {
    PushAnswer::BadReply {
        cause: nonsense().into(),
    }
}

fn nonsense() -> ClientError {
    ClientError::BadReply {
        address: ControlAddress::parse("tcp://127.0.0.1:1").unwrap(),
        op: "reserve",
        what: "it is nonsense",
        source: None,
    }
}

fn closed() -> Cause<WriteError> {
    WriteError::Task(Reason::Closed).into()
}

#[test]
fn a_granted_push_stages_writes_and_completes() {
    let mut push = Driven::fresh();
    push.begin_write();
    push.write(WriteEnd::Applied);
    push.complete(PushAnswer::Reply(DONE));
    assert_eq!(push.result(), Ok(Delivery::Written));
    assert_eq!(push.ended_under(), "t");
}

#[test]
fn content_that_is_there_is_cached_without_another_message() {
    let mut push = Driven::fresh();
    push.reserve(granted(false, true));
    assert_eq!(push.result(), Ok(Delivery::Cached));
}

// row: V18
#[test]
fn zero_bytes_are_completed_without_a_write() {
    let mut push = Driven::new(IdPolicy::Fresh, 0);
    push.reserve(PushAnswer::Reply(Reserved::Granted {
        reservation_id: "r".to_owned(),
        session: "h:1".to_owned(),
        address: 0,
        len_bytes: 0,
        write: true,
        ready: false,
    }));
    push.complete(PushAnswer::Reply(DONE));
    assert_eq!(push.result(), Ok(Delivery::Written));
}

#[test]
fn one_action_is_outstanding_at_a_time() {
    let mut push = Driven::fresh();
    push.act();
    assert_eq!(
        push.machine.poll(push.now, || panic!("no id is needed")),
        PushStep::InProgress
    );
}

// row: C3.4, V6
#[test]
fn a_lost_reserve_reply_is_answered_by_abandoning_the_id_never_by_repeating_it() {
    let mut push = Driven::fresh();
    assert_eq!(push.reserve(lost()).as_str(), "t");
    assert_eq!(
        push.cancel(CancelKind::Abandon, PushAnswer::Reply(true))
            .as_str(),
        "t"
    );
    assert_eq!(push.reserve(granted(false, true)).as_str(), "f1");
    assert_eq!(push.result(), Ok(Delivery::Cached));
}

// row: C3.4, V6
#[test]
fn a_given_id_is_refreshed_after_a_lost_reserve_reply() {
    let mut push = Driven::given();
    push.reserve(lost());
    push.cancel(CancelKind::Refresh, PushAnswer::Reply(false));
    assert_eq!(push.reserve(granted(true, false)).as_str(), "t");
    assert_eq!(push.act(), PushAction::Stage);
}

#[test]
fn a_request_that_never_left_is_repeated_plainly() {
    let mut push = Driven::given();
    push.reserve(lost_when(false));
    assert_eq!(push.reserve(granted(false, true)).as_str(), "t");
}

// row: V13
#[test]
fn a_full_pool_is_asked_again_under_a_fresh_id_until_the_timeout() {
    let mut push = Driven::fresh();
    let started = push.now;
    let mut ids = std::collections::HashSet::new();
    while push.machine.outcome().is_none() {
        let fresh = push.reserve(refused(Some(ErrorCode::PoolFull)));
        assert!(ids.insert(fresh), "each try has its own id");
    }
    let waited_ms = push.now.as_millis() - started.as_millis();
    assert!((58_000..=60_000).contains(&waited_ms), "{waited_ms}");
    let waited_ms = PushConfig::default().timeout_ms;
    assert!(ids.len() < 200, "{} tries", ids.len());
    assert_eq!(push.result(), Err(PushFailure::PoolFull { waited_ms }));
}

#[test]
fn a_given_id_asks_a_full_pool_plainly() {
    let mut push = Driven::given();
    for _ in 0..20 {
        assert_eq!(
            push.reserve(refused(Some(ErrorCode::PoolFull))).as_str(),
            "t"
        );
    }
    push.reserve(granted(true, false));
    assert_eq!(push.act(), PushAction::Stage);
}

#[test]
fn an_item_larger_than_the_pool_fails_at_once() {
    let mut push = Driven::fresh();
    push.reserve(refused(Some(ErrorCode::TooLarge)));
    let failure = push.result().unwrap_err();
    assert_eq!(failure.code(), "too_large");
    assert!(failure.to_string().contains("larger"), "{failure}");
}

#[test]
fn errors_without_a_code_end_the_push_after_five() {
    let mut push = Driven::fresh();
    for _ in 0..5 {
        push.reserve(refused(None));
    }
    assert_eq!(push.result().unwrap_err().code(), "refused");
}

#[test]
fn a_cancelled_item_is_tried_once_more_under_a_fresh_id_only() {
    let mut push = Driven::fresh();
    push.reserve(PushAnswer::Reply(Reserved::Cancelled));
    assert_eq!(
        push.reserve(PushAnswer::Reply(Reserved::Cancelled))
            .as_str(),
        "f1"
    );
    assert_eq!(push.result(), Err(PushFailure::Cancelled));

    let mut push = Driven::given();
    push.reserve(PushAnswer::Reply(Reserved::Cancelled));
    assert_eq!(push.result(), Err(PushFailure::Cancelled));
}

#[test]
fn a_follower_asks_until_the_other_producer_is_done() {
    let mut push = Driven::given();
    push.reserve(granted(false, false));
    for _ in 0..10 {
        push.status(PushAnswer::Reply(Some(false)));
    }
    push.status(PushAnswer::Reply(Some(true)));
    assert_eq!(push.result(), Ok(Delivery::Cached));
}

#[test]
fn a_follower_whose_id_is_gone_asks_under_a_fresh_one_and_drops_the_extra_record() {
    let mut push = Driven::fresh();
    push.reserve(granted(false, false));
    push.status(PushAnswer::Reply(None));
    assert_eq!(push.reserve(granted(false, true)).as_str(), "f1");
    assert_eq!(
        push.cancel(CancelKind::Plain, PushAnswer::Reply(true))
            .as_str(),
        "f1"
    );
    assert_eq!(push.result(), Ok(Delivery::Cached));
}

// row: V5
#[test]
fn a_follower_whose_writer_was_lost_becomes_the_writer() {
    let mut push = Driven::fresh();
    push.reserve(granted(false, false));
    push.status(PushAnswer::Reply(None));
    push.begin_write();
    push.write(WriteEnd::Applied);
    push.complete(PushAnswer::Reply(DONE));
    assert_eq!(push.result(), Ok(Delivery::Written));
}

#[test]
fn a_follower_with_a_given_id_that_is_gone_cannot_say_what_happened() {
    let mut push = Driven::given();
    push.reserve(granted(false, false));
    push.status(PushAnswer::Reply(None));
    assert_eq!(push.result(), Err(PushFailure::Unconfirmed));
}

#[test]
fn a_follower_gives_up_at_the_timeout_and_tells_the_consumer() {
    let mut push = Driven::given();
    push.reserve(granted(false, false));
    while !matches!(push.machine.state, State::Cancel(_)) {
        push.status(PushAnswer::Reply(Some(false)));
    }
    push.cancel(CancelKind::Abandon, PushAnswer::Reply(true));
    assert!(matches!(
        push.result(),
        Err(PushFailure::StillWriting { .. })
    ));
}

// row: C3.7b, D16
#[test]
fn a_write_that_ended_is_abandoned_and_one_with_unknown_end_only_cancelled() {
    for (end, kind, code) in [
        (
            WriteEnd::Ended { cause: closed() },
            CancelKind::Abandon,
            "write_failed",
        ),
        (
            WriteEnd::Unknown { cause: closed() },
            CancelKind::Plain,
            "write_unknown",
        ),
    ] {
        let mut push = Driven::fresh();
        push.begin_write();
        push.write(end);
        push.cancel(kind, PushAnswer::Reply(true));
        assert_eq!(push.result().unwrap_err().code(), code);
    }
}

#[test]
fn a_write_whose_connection_was_closed_is_tried_again_in_a_new_reservation_until_the_timeout() {
    let closed = || WriteEnd::Closed { cause: closed() };
    let mut push = Driven::fresh();
    push.begin_write();
    push.write(closed());
    push.cancel(CancelKind::Abandon, PushAnswer::Reply(true));
    push.reserve(granted(true, false));
    push.write(WriteEnd::Applied);
    push.complete(PushAnswer::Reply(DONE));
    assert_eq!(push.result(), Ok(Delivery::Written));

    let mut push = Driven::fresh();
    push.begin_write();
    let mut tries = 1;
    loop {
        push.write(closed());
        push.cancel(CancelKind::Abandon, PushAnswer::Reply(true));
        if push.machine.outcome().is_some() {
            break;
        }
        push.reserve(granted(true, false));
        tries += 1;
    }
    assert_eq!(push.result().unwrap_err().code(), "write_failed");
    let timeout_ms = PushConfig::default().timeout_ms;
    // Half a second apart in the end.
    assert!(
        (timeout_ms / 600..timeout_ms / 400).contains(&tries),
        "{tries}"
    );
}

#[test]
fn a_source_that_cannot_be_staged_gives_the_memory_back() {
    let mut push = Driven::fresh();
    push.reserve(granted(true, false));
    assert_eq!(push.act(), PushAction::Stage);
    push.machine.handle_staged(StageEnd::Failed);
    push.cancel(CancelKind::Abandon, PushAnswer::Reply(true));
    assert_eq!(push.result(), Err(PushFailure::Source));
}

#[test]
fn a_reservation_that_grew_old_before_the_write_is_renewed_first() {
    for (mut push, kind, next) in [
        (Driven::fresh(), CancelKind::Abandon, "f1"),
        (Driven::given(), CancelKind::Refresh, "t"),
    ] {
        push.begin_write();
        push.pass(150_000);
        // Its time for waiting is long over; a new push of the same age would have more.
        push.machine.deadline = push.now.after_millis(60_000);
        push.cancel(kind, PushAnswer::Reply(true));
        assert_eq!(push.reserve(granted(true, false)).as_str(), next);
        push.write(WriteEnd::Applied);
        push.complete(PushAnswer::Reply(DONE));
        assert_eq!(push.result(), Ok(Delivery::Written));
    }
}

#[test]
fn a_lost_complete_reply_is_asked_again_and_ready_decides() {
    let mut push = Driven::given();
    push.begin_write();
    push.write(WriteEnd::Applied);
    push.complete(lost());
    push.complete(PushAnswer::Reply(DONE));
    assert_eq!(push.result(), Ok(Delivery::Written));
}

#[test]
fn completed_but_not_ready_after_a_lost_reply_is_decided_by_the_status() {
    let mut push = Driven::given();
    push.begin_write();
    push.write(WriteEnd::Applied);
    push.complete(lost());
    push.complete(PushAnswer::Reply(DONE_BEFORE));
    push.status(PushAnswer::Reply(Some(true)));
    assert_eq!(push.result(), Ok(Delivery::Written));

    let mut push = Driven::given();
    push.begin_write();
    push.write(WriteEnd::Applied);
    push.complete(lost());
    push.complete(PushAnswer::Reply(DONE_BEFORE));
    push.status(PushAnswer::Reply(None));
    assert_eq!(push.result(), Err(PushFailure::Unconfirmed));
}

#[test]
fn bytes_the_consumer_gave_up_while_they_were_written_are_not_called_written() {
    let mut push = Driven::given();
    push.begin_write();
    push.write(WriteEnd::Applied);
    push.complete(PushAnswer::Reply(DONE_BEFORE));
    assert_eq!(push.result(), Err(PushFailure::NotCompleted));

    let mut push = Driven::fresh();
    push.begin_write();
    push.write(WriteEnd::Applied);
    push.complete(PushAnswer::Reply(DONE_BEFORE));
    assert_eq!(push.reserve(granted(true, false)).as_str(), "f1");
    push.write(WriteEnd::Applied);
    push.complete(PushAnswer::Reply(DONE));
    assert_eq!(push.result(), Ok(Delivery::Written));

    let mut push = Driven::fresh();
    push.begin_write();
    push.write(WriteEnd::Applied);
    push.complete(PushAnswer::Reply(DONE_BEFORE));
    push.reserve(granted(true, false));
    push.write(WriteEnd::Applied);
    push.complete(PushAnswer::Reply(DONE_BEFORE));
    assert_eq!(
        push.result(),
        Err(PushFailure::NotCompleted),
        "tried once more, not for ever"
    );
}

#[test]
fn completed_false_after_a_lost_reply_decides_nothing() {
    let mut push = Driven::given();
    push.begin_write();
    push.write(WriteEnd::Applied);
    push.complete(lost());
    push.complete(PushAnswer::Reply(REFUSED));
    assert_eq!(push.result(), Err(PushFailure::Unconfirmed));

    let mut push = Driven::fresh();
    push.begin_write();
    push.write(WriteEnd::Applied);
    push.complete(lost());
    push.complete(PushAnswer::Reply(REFUSED));
    push.cancel(CancelKind::Abandon, PushAnswer::Reply(true));
    assert_eq!(push.reserve(granted(false, true)).as_str(), "f1");
    push.cancel(CancelKind::Plain, PushAnswer::Reply(true));
    assert_eq!(push.result(), Ok(Delivery::Written));
}

#[test]
fn a_write_the_consumer_forgot_is_written_again_a_bounded_number_of_times() {
    let mut push = Driven::fresh();
    push.begin_write();
    for _ in 0..2 {
        push.write(WriteEnd::Applied);
        push.complete(PushAnswer::Reply(REFUSED));
        push.cancel(CancelKind::Abandon, PushAnswer::Reply(true));
        push.reserve(granted(true, false));
    }
    push.write(WriteEnd::Applied);
    push.complete(PushAnswer::Reply(REFUSED));
    assert_eq!(push.result(), Err(PushFailure::NotCompleted));
}

#[test]
fn a_silent_consumer_ends_the_push_within_its_timeout() {
    let mut push = Driven::fresh();
    let started = push.now;
    while push.machine.outcome().is_none() {
        match push.act() {
            PushAction::Reserve { timeout_ms, .. } => {
                push.pass(timeout_ms);
                push.machine.handle_reserve(push.now, lost());
            }
            PushAction::Cancel { timeout_ms, .. } => {
                push.pass(timeout_ms);
                push.machine.handle_cancel(push.now, lost());
            }
            other => panic!("unexpected {other:?}"),
        }
    }
    let waited = push.now.as_millis() - started.as_millis();
    assert!(waited <= 60_000, "{waited}");
    assert!(matches!(
        push.result(),
        Err(PushFailure::Unreachable { .. })
    ));
}

#[test]
fn giving_up_ends_what_only_waits_and_lets_a_write_finish() {
    let failure = PushFailure::Closed;
    let mut push = Driven::fresh();
    push.machine.give_up(push.now, failure.clone());
    assert_eq!(push.result(), Err(failure.clone()));

    let mut push = Driven::fresh();
    push.begin_write();
    push.act();
    push.machine.give_up(push.now, failure.clone());
    push.machine.handle_write(push.now, WriteEnd::Applied);
    push.complete(PushAnswer::Reply(DONE));
    assert_eq!(push.result(), Ok(Delivery::Written));

    let mut push = Driven::fresh();
    push.begin_write();
    push.machine.give_up(push.now, failure.clone());
    push.cancel(CancelKind::Abandon, lost());
    assert_eq!(push.result(), Err(failure));
}

#[test]
fn a_push_that_was_given_up_never_waits_again() {
    // A complete that waits to be repeated is sent once more, now, and that is the end.
    let mut push = Driven::fresh();
    push.begin_write();
    push.write(WriteEnd::Applied);
    push.complete(lost());
    push.machine.give_up(push.now, PushFailure::Closed);
    let before = push.now;
    push.complete(lost());
    assert_eq!(push.now, before, "without a wait");
    assert_eq!(push.result(), Err(PushFailure::Closed));

    // A write under way: its complete is tried once.
    let mut push = Driven::fresh();
    push.begin_write();
    push.act();
    push.machine.give_up(push.now, PushFailure::Closed);
    push.machine.handle_write(push.now, WriteEnd::Applied);
    push.complete(lost());
    assert_eq!(push.result(), Err(PushFailure::Closed));

    // A reserve under way: what it grants is given back, as a writer or as a follower.
    for write in [true, false] {
        let mut push = Driven::fresh();
        push.act();
        push.machine.give_up(push.now, PushFailure::Closed);
        push.machine.handle_reserve(push.now, granted(write, false));
        push.cancel(CancelKind::Abandon, PushAnswer::Reply(true));
        assert_eq!(push.result(), Err(PushFailure::Closed));
    }
}

#[test]
fn a_push_that_was_given_up_says_why_and_not_that_its_time_was_over() {
    let given_up = |answer| {
        let mut push = Driven::fresh();
        push.act();
        push.machine.give_up(push.now, PushFailure::Closed);
        // A second reason changes nothing.
        push.machine.give_up(push.now, PushFailure::Cancelled);
        push.machine.handle_reserve(push.now, answer);
        push.result()
    };
    let full = given_up(refused(Some(ErrorCode::PoolFull)));
    assert_eq!(full, Err(PushFailure::Closed));
    assert_eq!(given_up(lost_when(false)), Err(PushFailure::Closed));
    let large = given_up(refused(Some(ErrorCode::TooLarge)));
    assert_eq!(large.unwrap_err().code(), "too_large", "that is known");

    let mut push = Driven::given();
    push.reserve(granted(false, false));
    push.act();
    push.machine.give_up(push.now, PushFailure::Closed);
    push.machine
        .handle_status(push.now, PushAnswer::Reply(Some(false)));
    push.cancel(CancelKind::Abandon, PushAnswer::Reply(true));
    assert_eq!(push.result(), Err(PushFailure::Closed));
}

#[test]
fn content_that_vanishes_until_the_time_is_over_is_not_called_another_producers() {
    let mut push = Driven::fresh();
    while push.machine.outcome().is_none() {
        push.reserve(granted(false, false));
        push.status(PushAnswer::Reply(None));
    }
    assert!(matches!(push.result(), Err(PushFailure::TimedOut { .. })));
}

#[test]
fn an_answer_that_makes_no_sense_ends_the_push_at_once_and_is_told_as_the_cause() {
    let started = Driven::fresh().now;
    let mut pushes = Vec::new();
    let mut push = Driven::fresh();
    push.reserve(bad());
    push.cancel(CancelKind::Abandon, bad());
    pushes.push(push);
    let mut push = Driven::fresh();
    push.begin_write();
    push.write(WriteEnd::Applied);
    push.complete(bad());
    push.cancel(CancelKind::Abandon, bad());
    pushes.push(push);
    let mut push = Driven::fresh();
    push.reserve(granted(false, false));
    push.status(bad());
    push.cancel(CancelKind::Abandon, bad());
    pushes.push(push);
    for mut push in pushes {
        assert!(push.now.as_millis() - started.as_millis() < 10);
        let failure = push.result().unwrap_err();
        assert_eq!(failure.code(), "bad_reply");
        let cause = failure.source().unwrap();
        assert!(cause.to_string().contains("it is nonsense"), "{cause}");
    }
}

#[test]
fn the_cause_of_a_failed_write_and_of_a_lost_reply_can_be_told_apart() {
    let mut push = Driven::fresh();
    push.begin_write();
    push.write(WriteEnd::Ended { cause: closed() });
    push.cancel(CancelKind::Abandon, PushAnswer::Reply(true));
    let Err(PushFailure::WriteEnded { cause }) = push.result() else {
        panic!("{:?}", push.result())
    };
    assert_eq!(*cause, WriteError::Task(Reason::Closed));

    let mut push = Driven::given();
    while push.machine.outcome().is_none() {
        push.reserve(lost_when(false));
    }
    let Err(PushFailure::Unreachable { cause, .. }) = push.result() else {
        panic!("{:?}", push.result())
    };
    assert!(matches!(*cause, ClientError::Disconnected { .. }));
}

#[test]
fn a_push_waits_for_room_to_stage_until_its_time_is_over() {
    let mut push = Driven::fresh();
    push.reserve(granted(true, false));
    for _ in 0..3 {
        assert_eq!(push.act(), PushAction::Stage);
        push.machine.handle_staged(StageEnd::Later);
        let step = push.machine.poll(push.now, || panic!("no id is needed"));
        assert!(matches!(step, PushStep::WaitForRoom(at) if at > push.now));
        push.pass(10);
        push.machine.handle_room();
    }
    push.act();
    push.machine.handle_staged(StageEnd::Later);
    let PushStep::WaitForRoom(at) = push.machine.poll(push.now, || panic!("no id is needed"))
    else {
        panic!("it waits")
    };
    push.now = at;
    push.cancel(CancelKind::Abandon, PushAnswer::Reply(true));
    let failure = push.result().unwrap_err();
    assert!(
        matches!(failure, PushFailure::StagingFull { waited_ms } if (58_000..=60_000).contains(&waited_ms)),
        "{failure:?}"
    );

    let mut push = Driven::fresh();
    push.reserve(granted(true, false));
    push.act();
    push.machine.handle_staged(StageEnd::Later);
    push.machine.give_up(push.now, PushFailure::Closed);
    push.cancel(CancelKind::Abandon, PushAnswer::Reply(true));
    assert_eq!(push.result(), Err(PushFailure::Closed));
}

#[test]
fn a_reservation_of_another_length_is_given_back() {
    let mut push = Driven::new(IdPolicy::Fresh, LEN + 1);
    push.reserve(granted(true, false));
    push.cancel(CancelKind::Abandon, PushAnswer::Reply(true));
    assert_eq!(
        push.result(),
        Err(PushFailure::WrongLength {
            asked: LEN + 1,
            granted: LEN
        })
    );
}

#[test]
fn failures_have_codes_and_texts_that_say_what_to_do() {
    let unreachable = PushFailure::Unreachable {
        waited_ms: 7,
        cause: nonsense().into(),
    };
    assert_eq!(unreachable.code(), "unreachable");
    assert!(unreachable.to_string().contains("check that it runs"));
    let full = PushFailure::PoolFull { waited_ms: 7 };
    assert_eq!(full.code(), "pool_full");
    assert!(full.to_string().contains("larger pool"));
    assert!(full.to_string().contains("--keep"), "{full}");
    let full = PushFailure::PoolFull { waited_ms: 2_000 };
    assert!(full.to_string().contains("full for 2 s:"), "{full}");
}
