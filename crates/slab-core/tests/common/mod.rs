//! Shorthand of the row tests: pools counted in granules, first fit so that offsets can be told.

use slab_core::{Allocation, Lease, Placement, Pool, PoolConfig, PoolId, Reserve};

pub(crate) type TestPool = Pool<u32, u32>;

/// One granule in bytes.
pub(crate) const G: u64 = 256;

pub(crate) fn pool(granules: u64) -> TestPool {
    pool_with(granules, |_| {})
}

pub(crate) fn pool_with(granules: u64, adjust: impl FnOnce(&mut PoolConfig)) -> TestPool {
    let mut config = PoolConfig::new(PoolId::new(), granules * G);
    config.placement = Placement::FirstFit;
    adjust(&mut config);
    Pool::new(config).expect("valid configuration")
}

pub(crate) fn ready(pool: &mut TestPool, granules: u64) -> Allocation {
    match pool.reserve(granules * G) {
        Reserve::Ready(allocation) => allocation,
        other => panic!("{granules} granules: {other:?} in {}", pool.stats()),
    }
}

/// Reserves and publishes content of this many granules.
pub(crate) fn publish(pool: &mut TestPool, key: u32, granules: u64, meta: u32) -> Lease {
    let allocation = ready(pool, granules);
    pool.publish(key, allocation, meta).expect("own token")
}

pub(crate) fn release(pool: &mut TestPool, lease: Lease) {
    pool.release(lease, &[]).expect("own token");
}
