//! Time as the pure machines see it: a number the caller passes in.

/// A point in monotonic time, in milliseconds since an epoch the caller chose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Moment(u64);

impl Moment {
    /// Milliseconds since the caller's epoch.
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis)
    }

    /// Milliseconds since the caller's epoch.
    pub const fn as_millis(self) -> u64 {
        self.0
    }

    /// The moment `millis` later; the end of time when that is beyond 64 bits.
    #[must_use]
    pub const fn after_millis(self, millis: u64) -> Self {
        Self(self.0.saturating_add(millis))
    }
}
