//! The crate's one error type, and the wrapper that hands a refused token back.

use core::error;
use core::fmt;

use crate::id::PoolId;

/// Why a call was refused. All sizes are bytes.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Error {
    /// The alignment is zero or not a power of two.
    InvalidAlignment {
        /// What was asked for.
        alignment: u64,
    },
    /// The capacity does not hold one region of the alignment's size.
    CapacityTooSmall {
        /// What was asked for.
        capacity: u64,
        /// The granule that does not fit.
        alignment: u64,
    },
    /// The request is larger than the whole pool: it fails now and always.
    TooLarge {
        /// Bytes asked for.
        requested: u64,
        /// Bytes that can be handed out at all.
        usable: u64,
    },
    /// No free run is large enough now.
    Exhausted {
        /// Bytes asked for.
        requested: u64,
        /// Bytes free in all runs together.
        free: u64,
        /// Length of the largest free run.
        largest_free: u64,
    },
    /// The map holds as many runs as its storage can number.
    TooManyRuns {
        /// The limit.
        runs_max: u32,
    },
    /// The token belongs to another pool.
    ForeignToken {
        /// The pool that made the token.
        token: PoolId,
        /// The pool that was asked.
        pool: PoolId,
    },
    /// The token carries this pool's id but names nothing of this pool: two pools share one id.
    UnknownToken {
        /// The id that is not unique.
        pool: PoolId,
    },
    /// The timeline was made by another pool, or by none.
    UnknownTimeline {
        /// Its number.
        timeline: u32,
    },
    /// The timeline has failed: nothing on it will be reached any more.
    TimelineFailed {
        /// Its number.
        timeline: u32,
    },
    /// The pool has as many timelines as it was configured for.
    TooManyTimelines {
        /// The limit.
        timelines_max: u32,
    },
    /// The store has no room for more marks of fences that are not reached yet. Only inline stores have that
    /// bound.
    TooManyFences {
        /// The limit.
        fences_max: u32,
    },
    /// The pool has as many residents as it was configured for, and each of them is leased.
    TooManyResidents {
        /// The limit.
        residents_max: u32,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::InvalidAlignment { alignment } => {
                write!(f, "alignment {alignment} is not a power of two")
            }
            Self::CapacityTooSmall {
                capacity,
                alignment,
            } => write!(
                f,
                "capacity of {capacity} bytes holds no region of {alignment} bytes"
            ),
            Self::TooLarge { requested, usable } => write!(
                f,
                "{requested} bytes requested, the whole pool has {usable}"
            ),
            Self::Exhausted {
                requested,
                free,
                largest_free,
            } => write!(
                f,
                "{requested} bytes requested, the largest free run has {largest_free} of {free} free"
            ),
            Self::TooManyRuns { runs_max } => {
                write!(f, "the map holds its limit of {runs_max} runs")
            }
            Self::ForeignToken { token, pool } => {
                write!(f, "a token of {token} was given to {pool}")
            }
            Self::UnknownToken { pool } => write!(f, "two pools share the id {pool}"),
            Self::UnknownTimeline { timeline } => {
                write!(f, "timeline {timeline} was not added to this pool")
            }
            Self::TimelineFailed { timeline } => write!(f, "timeline {timeline} has failed"),
            Self::TooManyTimelines { timelines_max } => {
                write!(f, "the pool has its limit of {timelines_max} timelines")
            }
            Self::TooManyFences { fences_max } => write!(
                f,
                "the pool remembers its limit of {fences_max} fences; release again once some are reached"
            ),
            Self::TooManyResidents { residents_max } => write!(
                f,
                "the pool has its limit of {residents_max} residents, all leased"
            ),
        }
    }
}

impl error::Error for Error {}

/// A value that a call did not consume, with the reason: the caller still owns it.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "the refused value is handed back and would leak"]
pub struct Refused<T> {
    /// What was given to the call.
    pub value: T,
    /// Why the call did not take it.
    pub cause: Error,
}

impl<T> fmt::Display for Refused<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.cause, f)
    }
}

impl<T: fmt::Debug> error::Error for Refused<T> {}
