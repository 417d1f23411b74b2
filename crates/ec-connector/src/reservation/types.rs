//! What goes into the machine and what comes out of it.

use std::fmt;

use crate::code::ErrorCode;
use crate::content::{Content, Span};
use crate::control::python;
use crate::name::{MmHash, ReservationId, TransferId};
use crate::tensor::TensorSpec;

/// Limits and policy of a [`Reservations`](crate::Reservations).
///
/// The defaults are the constants a vLLM peer expects.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ReservationConfig {
    /// How long a writer, a follower or a ready item may sit untouched, in milliseconds. With
    /// [`TakePolicy::OnReady`] ready items do not expire: the machine takes each as soon as it can.
    pub ttl_ms: u64,
    /// How long a finished id is remembered after its last touch, in milliseconds.
    pub tombstone_ttl_ms: u64,
    /// Most finished ids remembered; beyond it the one untouched longest is forgotten early.
    pub tombstones_max: usize,
    /// Most active records; beyond it a new id is refused.
    pub reservations_max: usize,
    /// Who turns ready items into owner leases.
    pub take: TakePolicy,
    /// Most distinct transfers handed to the owner in all; nothing for no limit.
    ///
    /// A reserve is refused when it could lead to one more, so none beyond the limit is ever acknowledged. The ids
    /// of that many transfers are remembered.
    pub items_max: Option<usize>,
}

impl Default for ReservationConfig {
    fn default() -> Self {
        Self {
            ttl_ms: 300_000,
            tombstone_ttl_ms: 300_000,
            tombstones_max: 65_536,
            reservations_max: 16_384,
            take: TakePolicy::Caller,
            items_max: None,
        }
    }
}

/// Who turns ready items into owner leases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TakePolicy {
    /// The owner calls [`take`](crate::Reservations::take) for each item it wants.
    Caller,
    /// The machine takes each item in the call that makes it ready.
    OnReady {
        /// Most owner leases that wait for
        /// [`next_taken`](crate::Reservations::next_taken), at least one. When the list is full
        /// an item stays ready, and is taken when the list drains.
        taken_max: usize,
    },
}

/// What a shutdown does with items that are under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Shutdown {
    /// Writers and their followers may finish; what becomes ready is taken as before.
    Finish,
    /// Nobody takes anything any more: writers, followers and ready items are cancelled.
    Cancel,
}

/// Asks for memory for one item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReserveRequest {
    /// Names the push.
    pub transfer_id: TransferId,
    /// Names the content.
    pub mm_hash: MmHash,
    /// Shape and type; the byte count follows.
    pub tensor: TensorSpec,
}

/// The answer to a reserve.
pub enum Reserve<C: Content> {
    /// The id has a reservation now.
    Granted(Grant),
    /// The id was cancelled: write nothing.
    Cancelled,
    /// Bytes are on their way back. Pass it to [`resume`](crate::Reservations::resume) when
    /// something changed, and to [`give_up`](crate::Reservations::give_up) when waiting is over.
    Later(PendingReserve<C>),
}

impl<C: Content> fmt::Debug for Reserve<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Granted(grant) => f.debug_tuple("Granted").field(grant).finish(),
            Self::Cancelled => f.write_str("Cancelled"),
            Self::Later(_) => f.write_str("Later"),
        }
    }
}

/// A reservation as its holder sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Names the reservation.
    pub reservation_id: ReservationId,
    /// Where in the slab the item lies or will lie. Means nothing for zero bytes.
    pub offset: u64,
    /// Bytes of the tensor, not of what it occupies.
    pub len_bytes: u64,
    /// The asker is the writer and must write, then complete.
    pub write: bool,
    /// The bytes are there.
    pub ready: bool,
    /// The record borrows a resident.
    pub cached: bool,
}

/// A reserve that waits for bytes; holds a claim on them.
#[must_use = "dropping it leaks the claim; call `resume` or `give_up`"]
pub struct PendingReserve<C: Content> {
    pub(super) claim: C::Claim,
    pub(super) fresh: ReservationId,
    pub(super) request: ReserveRequest,
}

impl<C: Content> PendingReserve<C> {
    /// What was asked for.
    pub fn request(&self) -> &ReserveRequest {
        &self.request
    }
}

/// Why a reserve was refused; no record was made.
///
/// Each text is the one a vLLM consumer sends in the same situation, where it has one.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReserveError {
    /// No room, and nothing on its way back.
    PoolFull,
    /// Larger than the whole pool.
    TooLarge,
    /// [`ReservationConfig::reservations_max`] records are active.
    TooManyReservations {
        /// That limit.
        limit: usize,
    },
    /// With the active ones, [`ReservationConfig::items_max`] transfers are reached. One of those may still fail, and
    /// make room for another.
    ItemsUnderWay {
        /// That limit.
        limit: usize,
    },
    /// [`ReservationConfig::items_max`] transfers have been handed out.
    NoMoreItems {
        /// That limit.
        limit: usize,
    },
    /// The id is active with another hash, shape or type.
    ConflictingReservation,
    /// The hash is being written with another shape or type.
    ConflictingInFlight,
    /// The hash is resident with another shape or type, and in use.
    ConflictingCached,
    /// The id's earlier writer expired and has not said that it is done.
    ActiveWriter {
        /// The id.
        transfer_id: TransferId,
    },
    /// [`begin_shutdown`](crate::Reservations::begin_shutdown) was called.
    ShuttingDown,
}

impl ReserveError {
    /// The code of the error reply.
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::PoolFull => ErrorCode::PoolFull,
            Self::TooLarge => ErrorCode::TooLarge,
            Self::TooManyReservations { .. } | Self::ItemsUnderWay { .. } => {
                ErrorCode::TooManyReservations
            }
            Self::NoMoreItems { .. } => ErrorCode::NoMoreItems,
            Self::ConflictingReservation | Self::ConflictingInFlight | Self::ConflictingCached => {
                ErrorCode::Conflict
            }
            Self::ActiveWriter { .. } => ErrorCode::ActiveWriter,
            Self::ShuttingDown => ErrorCode::ShuttingDown,
        }
    }
}

impl fmt::Display for ReserveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PoolFull | Self::TooLarge => f.write_str("EC consumer buffer pool is full"),
            Self::TooManyReservations { limit } => {
                write!(f, "EC consumer already has {limit} active reservations")
            }
            Self::ItemsUnderWay { limit } | Self::NoMoreItems { limit } => {
                write!(f, "EC consumer takes no more than {limit} items")
            }
            Self::ConflictingReservation => f.write_str("conflicting reservation for transfer_id"),
            Self::ConflictingInFlight => f.write_str("conflicting in-flight tensor for mm_hash"),
            Self::ConflictingCached => f.write_str("conflicting cached tensor for mm_hash"),
            Self::ActiveWriter { transfer_id } => write!(
                f,
                "Transfer {} still has an active writer",
                python::repr(transfer_id.as_str())
            ),
            Self::ShuttingDown => f.write_str("Consumer reservation manager is shutting down"),
        }
    }
}

impl std::error::Error for ReserveError {}

/// The answer to a complete.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Completion {
    /// The bytes were accepted; also true when the item was ready already, or unwanted.
    pub completed: bool,
    /// This call made the item ready.
    pub became_ready: bool,
}

/// How a cancel is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CancelKind {
    /// Nobody wants the item any more. A writer may still be writing, so its memory stays.
    Plain,
    /// The writer will not touch the memory any more: it may be reused at once.
    Abandon,
    /// As [`Abandon`](Self::Abandon), and the same id is about to be reserved again.
    Refresh,
    /// `refresh` without `abandon`: no caller means it, a vLLM consumer refuses it for active ids.
    RefreshOnly,
}

impl CancelKind {
    /// From the two flags of a request.
    pub const fn from_flags(abandon: bool, refresh: bool) -> Self {
        match (abandon, refresh) {
            (false, false) => Self::Plain,
            (true, false) => Self::Abandon,
            (true, true) => Self::Refresh,
            (false, true) => Self::RefreshOnly,
        }
    }

    /// Whether the writer says that it is done with the memory.
    pub const fn abandon(self) -> bool {
        matches!(self, Self::Abandon | Self::Refresh)
    }

    /// Whether the id is to be reservable again.
    pub const fn refresh(self) -> bool {
        matches!(self, Self::Refresh | Self::RefreshOnly)
    }
}

/// Which reservation of an id is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CancelMatch {
    /// Whatever reservation the id has.
    Any,
    /// Only this one. `None` stands for a text that can name no reservation.
    Only(Option<ReservationId>),
}

/// State of an active record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ReservationState {
    /// A writer owns the memory, or the record follows such a writer.
    Writing,
    /// The bytes are there.
    Ready,
    /// Cancelled, but a writer may still be writing.
    CancelPending,
    /// Expired, but a writer may still be writing.
    ExpirePending,
}

/// An active item as `status` and the ready events tell it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ItemStatus {
    /// Names the push.
    pub transfer_id: TransferId,
    /// Names the content.
    pub mm_hash: MmHash,
    /// Shape and type.
    pub tensor: TensorSpec,
    /// Names the reservation.
    pub reservation_id: ReservationId,
    /// How far it is.
    pub state: ReservationState,
    /// No bytes were or are written for this push: it follows another or hit a resident.
    pub cached: bool,
}

impl ItemStatus {
    /// Whether the bytes are there.
    pub fn is_ready(&self) -> bool {
        self.state == ReservationState::Ready
    }
}

/// What the driver has to do or say after it left the lock.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Effect {
    /// Tell the subscriber that this item is ready.
    Ready(ItemStatus),
    /// A writer went away; the pushes that relied on it have to be reserved again, and nothing on
    /// the wire can tell them so (row V5).
    FollowersLost {
        /// The writer.
        writer: TransferId,
        /// Number of records lost.
        count: usize,
    },
    /// The pool holds as many residents as it may, so an item could not be shared or taken.
    PublishRefused {
        /// The item.
        transfer_id: TransferId,
    },
}

/// An item that was taken: the caller owns the lease.
#[must_use = "dropping it leaks the lease"]
pub struct Taken<C: Content> {
    /// Names the push.
    pub transfer_id: TransferId,
    /// Names the content.
    pub mm_hash: MmHash,
    /// Shape and type.
    pub tensor: TensorSpec,
    /// Names the reservation.
    pub reservation_id: ReservationId,
    /// No bytes were written for this push: it followed another or hit a resident.
    pub cached: bool,
    /// The owner lease.
    pub lease: C::Lease,
}

impl<C: Content> fmt::Debug for Taken<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Taken")
            .field("transfer_id", &self.transfer_id)
            .field("mm_hash", &self.mm_hash)
            .field("cached", &self.cached)
            .finish_non_exhaustive()
    }
}

/// Why an item could not be taken; nothing changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TakeError {
    /// No ready record has that id and hash.
    #[error("transfer is not ready")]
    NotReady,
    /// The pool holds as many residents as it may; give leases back and try again.
    #[error("pool holds as many residents as it may")]
    PublishRefused,
}

/// Which records whose writer never came back to release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stuck<'a> {
    /// The record of this id.
    One(&'a TransferId),
    /// All of them.
    All,
}

/// What [`release_stuck`](crate::Reservations::release_stuck) gave back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StuckReleased {
    /// Records ended.
    pub records: usize,
    /// Bytes they occupied.
    pub bytes: u64,
}

/// What the memory of an unpublished record is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnedSpan {
    /// Where it lies.
    pub span: Span,
    /// State of the record that owns it.
    pub state: ReservationState,
}

/// Counts at one moment, and totals since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReservationStats {
    /// Writers that are writing.
    pub writing: usize,
    /// Records that follow a writer.
    pub following: usize,
    /// Ready records.
    pub ready: usize,
    /// Cancelled records whose writer has not finished.
    pub cancel_pending: usize,
    /// Expired records whose writer has not finished.
    pub expire_pending: usize,
    /// Bytes occupied by writers that are writing.
    pub writing_bytes: u64,
    /// Bytes occupied by ready records that nobody shares yet.
    pub ready_bytes: u64,
    /// Bytes occupied by cancelled and expired records whose writer has not finished (row V7).
    pub stuck_bytes: u64,
    /// Owner leases that wait to be fetched.
    pub taken_waiting: usize,
    /// Finished ids remembered.
    pub tombstones: usize,
    /// Finished ids forgotten before their time, in total (row V15).
    pub tombstones_dropped: u64,
    /// Ready items nobody took in time, in total.
    pub ready_expired: u64,
    /// Writers that did not finish in time, in total.
    pub writers_expired: u64,
    /// Followers whose writer went away, in total (row V5).
    pub followers_lost: u64,
    /// Times the pool held too many residents to share or take an item, in total.
    pub publishes_refused: u64,
}
