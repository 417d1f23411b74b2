//! Any order of what threads, clock, room and callers do to a queue.

use std::collections::HashSet;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use mooncake_transport::Reason;
use proptest::prelude::*;

use super::state::{Next, State};
use crate::code::ErrorCode;
use crate::control::{ClientError, ControlAddress};
use crate::dtype::Dtype;
use crate::fake_engine::FakeEngine;
use crate::moment::Moment;
use crate::name::MmHash;
use crate::producer::record::{Bytes, Record};
use crate::producer::{Item, Push, PushError, PushId};
use crate::push::{
    Delivery, PushAction, PushAnswer, PushConfig, PushMachine, PushStep, Reserved, StageEnd,
    WriteEnd, WriteError,
};
use crate::random_ids::IdSource;
use crate::reservation::Completion;
use crate::staging::{Source, Staging};
use crate::tensor::TensorSpec;

const SLAB: u64 = 4096;
/// Some fit beside others, one fills the slab, one is larger.
const LENGTHS: [u64; 5] = [2048, 4096, 256, 0, 5000];
const THREADS: usize = 3;

#[derive(Debug, Clone)]
enum Op {
    Push {
        consumer: u8,
        content: u8,
        len: u8,
    },
    /// A thread takes the next push.
    Take,
    /// A thread is done with what it did.
    Go {
        which: u8,
        how: u8,
    },
    /// A thread panics.
    Panic {
        which: u8,
    },
    Pass {
        ms: u16,
    },
    Close,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (0..2u8, 0..4u8, 0..5u8)
            .prop_map(|(consumer, content, len)| Op::Push { consumer, content, len }),
        8 => Just(Op::Take),
        20 => (any::<u8>(), any::<u8>()).prop_map(|(which, how)| Op::Go { which, how }),
        1 => any::<u8>().prop_map(|which| Op::Panic { which }),
        3 => (0..1000u16).prop_map(|ms| Op::Pass { ms }),
        1 => Just(Op::Close),
    ]
}

/// What a thread is doing with a push.
enum Doing {
    Act(PushAction),
    /// It is about to put the push away.
    Park(Moment),
}

struct Rig {
    state: State,
    engine: Arc<FakeEngine>,
    staging: Staging,
    room: Arc<AtomicUsize>,
    room_told: usize,
    ids: IdSource,
    now: Moment,
    at_work: Vec<(Record, PushMachine, Doing)>,
    pushes: Vec<Push>,
}

impl Rig {
    fn new() -> Self {
        let engine = FakeEngine::new();
        let room = Arc::new(AtomicUsize::new(0));
        let told = Arc::clone(&room);
        let staging = Staging::new(engine.clone(), SLAB, move || {
            told.fetch_add(1, Ordering::SeqCst);
        })
        .unwrap();
        Self {
            state: State::default(),
            engine,
            staging,
            room,
            room_told: 0,
            ids: IdSource::new().unwrap(),
            now: Moment::from_millis(7),
            at_work: Vec::new(),
            pushes: Vec::new(),
        }
    }

    fn push(&mut self, consumer: u8, content: u8, len: u8) {
        let len = LENGTHS[usize::from(len)];
        let item = Item {
            to: ControlAddress::new(Ipv4Addr::new(127, 0, 0, 1 + consumer).into(), 9),
            mm_hash: MmHash::new(content.to_string()).unwrap(),
            tensor: TensorSpec::new(Dtype::UINT8, [len]).unwrap(),
            source: Source::Bytes(vec![content; len as usize]),
            id: PushId::Fresh,
        };
        let (record, push) = Record::new(item, &self.ids);
        self.pushes.push(push);
        self.state.open += 1;
        if self.state.closing {
            record.report(Err(crate::push::PushFailure::Closed.into()));
            self.state.open -= 1;
        } else {
            self.state.enter(record);
        }
    }

    /// As a thread does: carries the push on until there is something to do or to wait for.
    fn carry_on(&mut self, mut record: Record, mut machine: PushMachine) {
        let step = machine.poll(self.now, || self.ids.transfer_id());
        if !matches!(
            step,
            PushStep::WaitForRoom(_) | PushStep::Do(PushAction::Stage)
        ) {
            record.turn = None;
        }
        match step {
            PushStep::Do(action) => self.at_work.push((record, machine, Doing::Act(action))),
            PushStep::WaitUntil(at) | PushStep::WaitForRoom(at) => {
                self.at_work.push((record, machine, Doing::Park(at)));
            }
            PushStep::Done(outcome) => {
                record.machine = Some(machine);
                self.end(record, outcome.result.map_err(PushError::Failed));
            }
            PushStep::InProgress => panic!("an action was forgotten"),
        }
    }

    fn end(&mut self, record: Record, result: Result<Delivery, PushError>) {
        for (record, result) in self.state.end(self.now, record, result) {
            record.report(result);
            self.state.open -= 1;
        }
    }

    fn take(&mut self) -> Next {
        match self.state.next(self.now) {
            Next::Work(mut record) => {
                let machine = record.take_machine(PushConfig::default(), self.now);
                self.carry_on(record, machine);
                Next::Wait(None)
            }
            other => other,
        }
    }

    fn go(&mut self, which: u8, how: u8) {
        if self.at_work.is_empty() {
            return;
        }
        let index = usize::from(which) % self.at_work.len();
        let (mut record, mut machine, doing) = self.at_work.swap_remove(index);
        let now = self.now;
        let action = match doing {
            Doing::Park(at) => {
                record.machine = Some(machine);
                return self.state.wait(now, at, record);
            }
            Doing::Act(action) => action,
        };
        match action {
            PushAction::Reserve { .. } => {
                let len_bytes = record.tensor.len_bytes();
                machine.handle_reserve(now, reserve_answer(how, len_bytes));
            }
            PushAction::Stage => {
                record.room_seen = self.state.room_count();
                let end = record.stage(&self.staging);
                assert_ne!(end, StageEnd::Failed);
                machine.handle_staged(end);
            }
            PushAction::Write { .. } => {
                assert!(matches!(record.bytes, Bytes::Staged(_)));
                let cause = WriteError::Task(Reason::Closed).into();
                machine.handle_write(
                    now,
                    match how {
                        0..220 => WriteEnd::Applied,
                        220..235 => WriteEnd::Closed { cause },
                        235..245 => WriteEnd::Ended { cause },
                        _ => WriteEnd::Unknown { cause },
                    },
                );
            }
            PushAction::Complete { .. } => {
                let completion = |completed| Completion {
                    completed,
                    became_ready: completed,
                };
                machine.handle_complete(
                    now,
                    match how {
                        0..150 => PushAnswer::Reply(completion(true)),
                        150..170 => PushAnswer::Reply(completion(false)),
                        170..220 => lost(true),
                        _ => refused(None),
                    },
                );
            }
            PushAction::Status { .. } => machine.handle_status(
                now,
                match how {
                    0..100 => PushAnswer::Reply(Some(true)),
                    100..200 => PushAnswer::Reply(Some(false)),
                    200..240 => PushAnswer::Reply(None),
                    _ => lost(false),
                },
            ),
            PushAction::Cancel { .. } => machine.handle_cancel(
                now,
                match how {
                    0..220 => PushAnswer::Reply(true),
                    _ => lost(true),
                },
            ),
        }
        self.carry_on(record, machine);
    }

    fn run(&mut self, op: &Op) {
        match *op {
            Op::Push {
                consumer,
                content,
                len,
            } => self.push(consumer, content, len),
            Op::Take if self.at_work.len() < THREADS => {
                self.take();
            }
            Op::Take => {}
            Op::Go { which, how } => self.go(which, how),
            Op::Panic { which } => {
                if !self.at_work.is_empty() {
                    let index = usize::from(which) % self.at_work.len();
                    let (record, ..) = self.at_work.swap_remove(index);
                    let lane = record.lane();
                    drop(record);
                    self.state.lose(&lane);
                }
            }
            Op::Pass { ms } => self.now = self.now.after_millis(ms.into()),
            Op::Close => {
                for (record, result) in self.state.close(self.now) {
                    record.report(result);
                    self.state.open -= 1;
                }
            }
        }
        self.tell_of_room();
    }

    fn tell_of_room(&mut self) {
        while self.room_told < self.room.load(Ordering::SeqCst) {
            self.room_told += 1;
            self.state.room_came();
        }
    }

    fn check(&self) -> Result<(), TestCaseError> {
        let under_way = self
            .pushes
            .iter()
            .filter(|push| push.poll().is_none())
            .count();
        prop_assert_eq!(self.state.open, under_way);
        let mut lanes = self.state.started_lanes();
        lanes.extend(self.at_work.iter().map(|(record, ..)| record.lane()));
        let distinct: HashSet<_> = lanes.iter().collect();
        prop_assert_eq!(distinct.len(), lanes.len(), "two of one content at a time");
        prop_assert!(!(self.state.closing && self.state.waits()));
        Ok(())
    }

    /// Everything goes well from here on. Every push ends, and nothing is left.
    fn finish(mut self) -> Result<(), TestCaseError> {
        for _ in 0..20_000 {
            self.tell_of_room();
            self.check()?;
            if let Some(last) = self.at_work.len().checked_sub(1) {
                self.go(last as u8, 0);
                continue;
            }
            prop_assert!(
                !self.state.waits_for_room_only(),
                "nobody is left who could make room"
            );
            match self.state.next(self.now) {
                Next::Work(mut record) => {
                    let machine = record.take_machine(PushConfig::default(), self.now);
                    self.carry_on(record, machine);
                }
                Next::Wait(Some(at)) => self.now = at,
                Next::Wait(None) | Next::Over => {
                    prop_assert_eq!(self.state.open, 0, "a push was forgotten");
                    prop_assert_eq!(self.staging.free_bytes(), SLAB);
                    prop_assert_eq!(self.engine.registered(), 1);
                    return Ok(());
                }
            }
        }
        Err(TestCaseError::fail("the pushes do not end"))
    }
}

fn reserve_answer(how: u8, len_bytes: u64) -> PushAnswer<Reserved> {
    let granted = |write, ready| {
        PushAnswer::Reply(Reserved::Granted {
            reservation_id: "r".to_owned(),
            session: "h:1".to_owned(),
            address: 64,
            len_bytes,
            write,
            ready,
        })
    };
    match how {
        0..150 => granted(true, false),
        150..170 => granted(false, true),
        170..200 => granted(false, false),
        200..220 => refused(Some(ErrorCode::PoolFull)),
        220..235 => lost(false),
        235..245 => lost(true),
        245 => refused(Some(ErrorCode::ShuttingDown)),
        246 => PushAnswer::BadReply {
            cause: disconnected().into(),
        },
        _ => refused(None),
    }
}

fn refused<T>(code: Option<ErrorCode>) -> PushAnswer<T> {
    PushAnswer::Refused {
        code,
        text: "no".to_owned(),
    }
}

fn lost<T>(sent: bool) -> PushAnswer<T> {
    PushAnswer::Lost {
        sent,
        cause: disconnected().into(),
    }
}

fn disconnected() -> ClientError {
    ClientError::Disconnected {
        address: ControlAddress::new(Ipv4Addr::LOCALHOST.into(), 1),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    #[test]
    fn property_every_push_ends_once_and_alone_in_its_lane_whatever_happens_around_it(
        ops in proptest::collection::vec(op(), 0..150),
    ) {
        let mut rig = Rig::new();
        for op in &ops {
            rig.run(op);
            rig.check()?;
        }
        rig.finish()?;
    }
}

#[test]
fn closing_with_a_complete_in_back_off_asks_once_more_and_does_not_spin() {
    let mut rig = Rig::new();
    rig.push(0, 0, 2);
    rig.take();
    for how in [0, 0, 0] {
        rig.go(0, how);
    }
    for _ in 0..8 {
        // The reply to the complete is lost; it waits up to half a second to ask again.
        rig.go(0, 200);
        rig.go(0, 0);
        let Next::Wait(Some(at)) = rig.state.next(rig.now) else {
            panic!("it waits")
        };
        rig.now = at;
        rig.take();
    }
    rig.go(0, 200);
    rig.go(0, 0);
    rig.run(&Op::Close);
    // Looked at once: it asks again at once, and ends with what it learns.
    rig.take();
    assert!(matches!(
        rig.at_work[0].2,
        Doing::Act(PushAction::Complete { .. })
    ));
    rig.go(0, 200);
    assert!(matches!(rig.take(), Next::Over));
    assert_eq!(
        rig.pushes[0].poll().unwrap().result.unwrap_err().code(),
        "closed"
    );
    rig.finish().unwrap();
}
