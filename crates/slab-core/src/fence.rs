//! Timelines, and the points on them that bytes wait for.
//!
//! A timeline is anything that completes work in order and can say how far it has come: a CUDA stream,
//! an engine's batch counter. It is a number that only grows. Nothing here knows what the number means.

mod wait;

pub(crate) use wait::{Marks, Standing, Timelines};

use crate::id::PoolId;

/// Names one timeline of one pool. Made by `Pool::add_timeline`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TimelineId {
    pub(crate) pool: PoolId,
    pub(crate) index: u32,
}

impl TimelineId {
    /// The fence at `value` on this timeline.
    #[must_use]
    pub const fn fence(self, value: u64) -> Fence {
        Fence {
            timeline: self,
            value,
        }
    }

    /// The pool it belongs to.
    #[must_use]
    pub const fn pool(self) -> PoolId {
        self.pool
    }

    /// Number of the timeline in its pool, from 0 in the order of adding.
    #[must_use]
    pub const fn index(self) -> u32 {
        self.index
    }
}

/// A point on a timeline: bytes may be reused once the timeline has reached `value`.
///
/// Timelines start at 0, so a fence at 0 is always reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fence {
    timeline: TimelineId,
    value: u64,
}

impl Fence {
    /// The fence at `value` on `timeline`.
    #[must_use]
    pub const fn new(timeline: TimelineId, value: u64) -> Self {
        Self { timeline, value }
    }

    /// The timeline.
    #[must_use]
    pub const fn timeline(self) -> TimelineId {
        self.timeline
    }

    /// The point on it.
    #[must_use]
    pub const fn value(self) -> u64 {
        self.value
    }
}
