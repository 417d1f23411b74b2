//! Managed buffers: regions of one slab that is registered once.

use std::sync::Arc;
use std::time::Instant;

use slab_core::{AllocationGuard, Pool, PoolConfig, PoolId, Reserve, SharedPool};
use slab_memory::HostSlab;

use super::error::StartError;

/// Regions of one slab, for one direction of a pipe.
pub(super) struct Buffers {
    slab: Arc<HostSlab>,
    pool: SharedPool<u64, ()>,
    usable: u64,
}

/// A region of the slab; dropping it gives the bytes back.
#[derive(Debug)]
pub(super) struct Buffer {
    guard: AllocationGuard,
    slab: Arc<HostSlab>,
}

impl Buffer {
    /// First byte, counted from the start of the slab.
    pub(super) fn offset(&self) -> u64 {
        self.guard.offset()
    }

    pub(super) fn len(&self) -> u64 {
        self.guard.len()
    }

    /// The first byte as a peer names it.
    pub(super) fn address(&self) -> u64 {
        self.slab.address() + self.offset()
    }

    pub(super) fn slab(&self) -> &Arc<HostSlab> {
        &self.slab
    }
}

impl Buffers {
    /// `setting` is the option that says how many bytes.
    pub(super) fn new(setting: &'static str, len: u64) -> Result<Self, StartError> {
        let slab = Arc::new(HostSlab::new(len).map_err(StartError::Memory)?);
        let config = PoolConfig::new(PoolId::new(), len);
        // Less than one granule is all that could be wrong.
        let (min, max) = (config.alignment, u64::MAX);
        let pool = Pool::new(config).map_err(|_| StartError::Setting {
            setting,
            value: len,
            min,
            max,
        })?;
        let usable = pool.stats().usable;
        Ok(Self {
            slab,
            pool: SharedPool::new(pool, ()),
            usable,
        })
    }

    pub(super) fn slab(&self) -> &Arc<HostSlab> {
        &self.slab
    }

    /// Bytes of the largest buffer there can be.
    pub(super) fn usable(&self) -> u64 {
        self.usable
    }

    /// Bytes of buffers that are in use.
    pub(super) fn in_use(&self) -> u64 {
        self.pool.with(|pool, ()| pool.stats().owned)
    }

    /// Takes a region of `len` bytes, of at most `usable`, if there is one now.
    pub(super) fn reserve(&self, len: u64) -> Option<Buffer> {
        self.reserve_until(len, Some(Instant::now()))
    }

    /// Takes a region, waiting until others have been dropped.
    pub(super) fn reserve_until(&self, len: u64, deadline: Option<Instant>) -> Option<Buffer> {
        let allocation = self
            .pool
            .wait_until(deadline, |pool, ()| match pool.reserve(len) {
                Reserve::Ready(allocation) => Some(allocation),
                Reserve::Later(claim) => {
                    // No fence is ever recorded here, so nothing can be on its way; give it back anyway.
                    let _ = pool.drop_claim(claim);
                    None
                }
                Reserve::Full | Reserve::TooLarge => None,
            })?;
        let guard = self.pool.allocation_guard(allocation).ok()?;
        Some(Buffer {
            guard,
            slab: Arc::clone(&self.slab),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    // row: P7.10
    #[test]
    fn a_region_that_is_dropped_elsewhere_makes_room() {
        let buffers = Buffers::new("send_bytes", 64 << 10).unwrap();
        assert_eq!(buffers.usable(), 64 << 10);
        let buffer = buffers.reserve(40 << 10).unwrap();
        assert_eq!(buffer.address(), buffers.slab().address() + buffer.offset());
        assert_eq!(buffers.in_use(), 40 << 10);
        assert!(buffers.reserve(40 << 10).is_none());
        let soon = Instant::now() + Duration::from_millis(10);
        assert!(buffers.reserve_until(40 << 10, Some(soon)).is_none());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(20));
                drop(buffer);
            });
            let late = Instant::now() + Duration::from_secs(20);
            assert!(buffers.reserve_until(40 << 10, Some(late)).is_some());
        });
        assert_eq!(buffers.in_use(), 0);
    }
}
