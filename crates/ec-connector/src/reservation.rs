//! Consumer reservations: who may write where, and who gets the bytes afterwards.
//!
//! [`Reservations`] is a pure state machine. It has no clock, no random numbers, no sockets and no
//! memory of its own: time, fresh ids and the pool are arguments of each call, and what has to be
//! done outside the lock comes back as [`Effect`]s. One lock has to be held around the machine
//! and the pool together.
//!
//! # States
//! A *writer* owns an allocation and is writing, cancelled with a write possibly under way
//! (*cancel pending*) or expired likewise (*expire pending*). A *follower* waits for a writer of
//! the same content and owns nothing. A *ready* record owns its unpublished allocation or leases
//! the resident. A finished id leaves a tombstone: *cancelled*, so that a late reserve is told
//! so, or *expired*, so that it may start afresh.
//!
//! # Invariants
//! - Memory of a writer is given back only when the writer said that it is done: by completing,
//!   by an abandoning cancel, or through [`Reservations::release_stuck`].
//! - Every allocation and lease belongs to exactly one record or taken item, and is given back
//!   exactly once.
//! - A follower's writer is active.
//! - Records, tombstones and taken items are bounded by [`ReservationConfig`].
//!
//! # Not here
//! Addresses and sessions (the control server adds them), JSON, waiting.

mod book;
mod end;
mod machine;
mod quota;
mod record;
mod reserve;
mod tombstone;
mod types;

pub use machine::Reservations;
pub use types::{
    CancelKind, CancelMatch, Completion, Effect, Grant, ItemStatus, OwnedSpan, PendingReserve,
    ReservationConfig, ReservationState, ReservationStats, Reserve, ReserveError, ReserveRequest,
    Shutdown, Stuck, StuckReleased, TakeError, TakePolicy, Taken,
};
