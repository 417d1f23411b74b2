//! One push, owned by whoever works on it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::push::Ticket;
use super::{Item, Push, PushError, PushId, PushReport};
use crate::control::ControlAddress;
use crate::moment::Moment;
use crate::name::{MmHash, TransferId};
use crate::push::{Delivery, IdPolicy, PushConfig, PushMachine, StageEnd};
use crate::random_ids::IdSource;
use crate::reservation::ReserveRequest;
use crate::staging::{Source, Stage, Staged, Staging, Turn};
use crate::tensor::TensorSpec;

/// Pushes of one content to one consumer take turns in a lane.
pub(super) type Lane = (ControlAddress, MmHash);

/// One push.
pub(super) struct Record {
    pub(super) to: ControlAddress,
    pub(super) mm_hash: MmHash,
    pub(super) tensor: TensorSpec,
    pub(super) bytes: Bytes,
    /// The place in line for room in the staging slab, while it waits for that.
    pub(super) turn: Option<Turn>,
    /// What the queue's count of room was before room was last looked for.
    pub(super) room_seen: u64,
    /// Present once a thread has begun to work on the push.
    pub(super) machine: Option<PushMachine>,
    /// When the first reserve was sent.
    pub(super) first_reserve: Option<Instant>,
    pub(super) wire_bytes: u64,
    /// What went wrong on this side, for the report.
    pub(super) error: Option<PushError>,
    first_id: TransferId,
    policy: IdPolicy,
    ending: Ticket,
}

/// Where the bytes of a push are.
pub(super) enum Bytes {
    Source(Source),
    Staged(Staged),
    /// Staging them has failed, or is being done.
    Gone,
}

impl Record {
    pub(super) fn new(item: Item, ids: &IdSource) -> (Self, Push) {
        let (first_id, policy) = match item.id {
            PushId::Given(id) => (id, IdPolicy::Given),
            PushId::Fresh => (ids.transfer_id(), IdPolicy::Fresh),
        };
        let (push, ending) = Push::with_ticket(first_id.clone());
        let record = Self {
            to: item.to,
            mm_hash: item.mm_hash,
            tensor: item.tensor,
            bytes: Bytes::Source(item.source),
            turn: None,
            room_seen: 0,
            machine: None,
            first_reserve: None,
            wire_bytes: 0,
            error: None,
            first_id,
            policy,
            ending,
        };
        (record, push)
    }

    /// What can be said against the item before the consumer is asked.
    pub(super) fn fault(&self) -> Option<PushError> {
        let source_bytes = match &self.bytes {
            Bytes::Source(source) => source.len_bytes(),
            Bytes::Staged(_) | Bytes::Gone => return None,
        };
        let tensor_bytes = self.tensor.len_bytes();
        (source_bytes != Some(tensor_bytes)).then_some(PushError::Length {
            source_bytes: source_bytes.unwrap_or(0),
            tensor_bytes,
        })
    }

    /// Takes the machine out, starting it, and the push's time, unless it has begun.
    pub(super) fn take_machine(&mut self, config: PushConfig, now: Moment) -> PushMachine {
        self.machine.take().unwrap_or_else(|| {
            PushMachine::new(
                self.first_id.clone(),
                self.policy,
                self.tensor.len_bytes(),
                config,
                now,
            )
        })
    }

    /// Puts the source where the engine reads it; without room it stays, with the place in the line.
    pub(super) fn stage(&mut self, staging: &Staging) -> StageEnd {
        let Bytes::Source(source) = std::mem::replace(&mut self.bytes, Bytes::Gone) else {
            unreachable!("a source that is staged, or cannot be, is not staged again");
        };
        match staging.stage(source, self.turn.take()) {
            Ok(Stage::Ready(staged)) => {
                self.bytes = Bytes::Staged(staged);
                StageEnd::Ready
            }
            Ok(Stage::Later(source, turn)) => {
                self.bytes = Bytes::Source(source);
                self.turn = Some(turn);
                StageEnd::Later
            }
            Err(error) => {
                self.error = Some(PushError::Stage(Arc::new(error)));
                StageEnd::Failed
            }
        }
    }

    pub(super) fn request(&self, transfer_id: TransferId) -> ReserveRequest {
        ReserveRequest {
            transfer_id,
            mm_hash: self.mm_hash.clone(),
            tensor: self.tensor.clone(),
        }
    }

    pub(super) fn lane(&self) -> Lane {
        (self.to.clone(), self.mm_hash.clone())
    }

    /// Reports how the push ended, having let go of its bytes. Called under no lock: it runs code of the caller's.
    pub(super) fn report(self, result: Result<Delivery, PushError>) {
        let transfer_id = match &self.machine {
            Some(machine) => machine.transfer_id().clone(),
            None => self.first_id,
        };
        let report = PushReport {
            transfer_id,
            result: result.map_err(|failure| self.error.unwrap_or(failure)),
            elapsed: self
                .first_reserve
                .map_or(Duration::ZERO, |first| first.elapsed()),
            wire_bytes: self.wire_bytes,
        };
        // Whoever is told that the push has ended may rely on its bytes being let go. What keeps them is the
        // caller's, whose defects must not make a push that has arrived a lost one.
        let let_go = || drop((self.bytes, self.turn));
        if catch_unwind(AssertUnwindSafe(let_go)).is_err() {
            tracing::error!("what kept the bytes of a push panicked when it was dropped");
        }
        if catch_unwind(AssertUnwindSafe(|| self.ending.end(report))).is_err() {
            tracing::error!("whoever waited for a push panicked when it was woken");
        }
    }
}
