//! How long a store may take.

use std::time::Duration;

/// Bounds of the waits for a metadata store. Values below 1 ms count as 1 ms, those above a day as a
/// day.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreTimeouts {
    /// For a connection, per address. Default 1.5 s.
    pub connect: Duration,
    /// For a call as a whole, name resolution apart. Default 3 s. Where a store has several servers,
    /// each gets an equal part of it.
    pub total: Duration,
}

impl Default for StoreTimeouts {
    fn default() -> Self {
        Self {
            connect: Duration::from_millis(1_500),
            total: Duration::from_secs(3),
        }
    }
}

#[cfg(any(feature = "http", feature = "etcd", feature = "redis"))]
impl StoreTimeouts {
    /// With waits that can be added to any moment.
    pub(super) fn bounded(self) -> Self {
        let bounded =
            |wait: Duration| wait.clamp(Duration::from_millis(1), Duration::from_secs(86_400));
        Self {
            connect: bounded(self.connect),
            total: bounded(self.total),
        }
    }
}
