//! Peers' exposed memory, as handles.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Identity of one engine in this process, so that a segment is not used with another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EngineId(u64);

impl EngineId {
    /// Draws an identity that no other engine of this process has.
    #[expect(
        clippy::new_without_default,
        reason = "two defaults would not be equal"
    )]
    pub fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// A peer's exposed memory, opened for transfers. Clones are the same segment.
///
/// The engine keeps its connections to the peer for as long as a clone exists.
#[derive(Clone)]
pub struct Segment(Arc<Inner>);

struct Inner {
    name: String,
    engine: EngineId,
    peer: Box<dyn Any + Send + Sync>,
}

impl Segment {
    /// Creates a handle; for implementors of [`Engine`](crate::Engine).
    ///
    /// `peer` is what the engine wants to remember about the peer.
    pub fn new(engine: EngineId, name: String, peer: Box<dyn Any + Send + Sync>) -> Self {
        Self(Arc::new(Inner { name, engine, peer }))
    }

    /// Returns the name the segment was opened by.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Returns the engine that opened the segment.
    pub fn engine(&self) -> EngineId {
        self.0.engine
    }

    /// Returns what the engine remembers, if it is of type `T`; for implementors of
    /// [`Engine`](crate::Engine).
    pub fn peer<T: 'static>(&self) -> Option<&T> {
        self.0.peer.downcast_ref()
    }

    #[cfg(feature = "tcp")]
    pub(crate) fn downgrade(&self) -> WeakSegment {
        WeakSegment(Arc::downgrade(&self.0))
    }
}

impl fmt::Debug for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Segment").field(&self.0.name).finish()
    }
}

/// A segment that may have been given up by all its users.
#[cfg(feature = "tcp")]
pub(crate) struct WeakSegment(std::sync::Weak<Inner>);

#[cfg(feature = "tcp")]
impl WeakSegment {
    pub(crate) fn upgrade(&self) -> Option<Segment> {
        self.0.upgrade().map(Segment)
    }
}
