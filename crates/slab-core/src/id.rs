//! Identity of a pool: what makes a token of one pool useless in another.

use core::fmt;

/// Identity of a `FreeList` or `Pool`, carried by every token it makes.
///
/// A token is accepted only where its id matches, so two pools of one program must not share an id.
/// With the feature `std`, `PoolId::new` draws a fresh one; without, the caller numbers its pools.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PoolId(u64);

/// Ids at and above this value come from the counter behind `PoolId::new`.
const DRAWN: u64 = 1 << 63;

impl PoolId {
    /// Makes an id from a number that the caller keeps unique among its pools.
    ///
    /// # Panics
    /// If `raw` is 2^63 or more: that half belongs to `PoolId::new`. In a `const` this is a compile error.
    #[must_use]
    pub const fn from_raw(raw: u64) -> Self {
        assert!(raw < DRAWN, "ids from 2^63 on are drawn by PoolId::new");
        Self(raw)
    }

    /// Draws an id that no other call in this process returns.
    #[cfg(feature = "std")]
    #[must_use]
    #[allow(
        clippy::new_without_default,
        reason = "each call returns another value, which Default would hide"
    )]
    pub fn new() -> Self {
        use core::sync::atomic::{AtomicU64, Ordering};
        // Relaxed: only the uniqueness of the number matters. 2^63 draws are out of reach.
        static NEXT: AtomicU64 = AtomicU64::new(DRAWN);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

impl fmt::Debug for PoolId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for PoolId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 >= DRAWN {
            write!(f, "pool #{}", self.0 - DRAWN)
        } else {
            write!(f, "pool {}", self.0)
        }
    }
}
