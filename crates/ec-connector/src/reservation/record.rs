//! One active record.

use std::collections::BTreeMap;

use super::types::{Grant, ItemStatus, OwnedSpan, ReservationState};
use crate::content::{Content, Span};
use crate::moment::Moment;
use crate::name::{MmHash, ReservationId, TransferId};
use crate::tensor::TensorSpec;

/// An active record; its id is the key it is stored under.
pub(super) struct Record<C: Content> {
    pub(super) reservation_id: ReservationId,
    pub(super) mm_hash: MmHash,
    pub(super) tensor: TensorSpec,
    /// Where the bytes lie; a follower has its writer's place.
    pub(super) span: Span,
    /// The record began as a writer, so bytes were sent for it.
    pub(super) written: bool,
    /// Nothing while a writer that was given up on may still be writing, and for a ready item that the machine takes.
    pub(super) deadline: Option<Moment>,
    pub(super) stage: Stage<C>,
}

/// How far a record is, with what it owns in that state.
pub(super) enum Stage<C: Content> {
    Writer {
        allocation: C::Allocation,
        progress: Progress,
        /// By order of joining.
        followers: BTreeMap<u64, TransferId>,
    },
    /// Owns nothing; `joined` is its key among the writer's followers.
    Follower { writer: TransferId, joined: u64 },
    /// `unreported` is its key in the order of becoming ready, until somebody was told.
    Ready {
        held: Held<C>,
        unreported: Option<u64>,
    },
}

/// What a ready record owns.
pub(super) enum Held<C: Content> {
    Allocation(C::Allocation),
    Lease(C::Lease),
}

/// What became of a writer that has not finished.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    Writing,
    CancelPending,
    /// `cancelled`: a plain cancel came after the expiry (row V12).
    ExpirePending {
        cancelled: bool,
    },
}

impl<C: Content> Record<C> {
    pub(super) fn state(&self) -> ReservationState {
        match &self.stage {
            Stage::Writer { progress, .. } => match progress {
                Progress::Writing => ReservationState::Writing,
                Progress::CancelPending => ReservationState::CancelPending,
                Progress::ExpirePending { .. } => ReservationState::ExpirePending,
            },
            Stage::Follower { .. } => ReservationState::Writing,
            Stage::Ready { .. } => ReservationState::Ready,
        }
    }

    /// The memory that belongs to this record alone.
    pub(super) fn owned(&self) -> Option<OwnedSpan> {
        let owns = match &self.stage {
            Stage::Writer { .. } => true,
            Stage::Ready { held, .. } => matches!(held, Held::Allocation(_)),
            Stage::Follower { .. } => false,
        };
        owns.then(|| OwnedSpan {
            span: self.span,
            state: self.state(),
        })
    }

    pub(super) fn status(&self, transfer_id: &TransferId) -> ItemStatus {
        ItemStatus {
            transfer_id: transfer_id.clone(),
            mm_hash: self.mm_hash.clone(),
            tensor: self.tensor.clone(),
            reservation_id: self.reservation_id,
            state: self.state(),
            cached: !self.written,
        }
    }

    pub(super) fn grant(&self, write: bool) -> Grant {
        let (ready, cached) = match &self.stage {
            Stage::Ready { held, .. } => (true, matches!(held, Held::Lease(_))),
            Stage::Writer { .. } | Stage::Follower { .. } => (false, false),
        };
        Grant {
            reservation_id: self.reservation_id,
            offset: self.span.offset,
            len_bytes: self.tensor.len_bytes(),
            write,
            ready,
            cached,
        }
    }
}
