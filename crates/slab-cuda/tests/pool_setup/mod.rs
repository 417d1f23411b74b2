//! A small pool over a device slab, with timelines.
#![allow(dead_code, reason = "each test target uses its own part")]

use std::sync::Arc;

use slab_core::{
    AllocationGuard, LeaseGuard, Pool, PoolConfig, PoolId, PoolStats, Reserve, SharedPool,
};
use slab_cuda::{Device, DeviceSlab, Stream, Timeline, Timelines, TimelinesConfig};
use slab_memory::Memory;

use super::fake::Fake;

pub(crate) const G: u64 = 256;
pub(crate) const GRANULES: u64 = 8;

pub(crate) struct Setup {
    pub(crate) timelines: Timelines,
    pub(crate) pool: SharedPool<u32, ()>,
    pub(crate) device: Device,
    pub(crate) base: u64,
}

pub(crate) fn setup_with(fake: &Fake, change: impl FnOnce(&mut TimelinesConfig)) -> Setup {
    let device = fake.device();
    let slab = Arc::new(DeviceSlab::new(&device, GRANULES * G).unwrap());
    let base = slab.address();
    let config = PoolConfig::new(PoolId::new(), slab.len());
    let pool = SharedPool::new(Pool::new(config).unwrap(), ());
    let mut config = TimelinesConfig::default();
    change(&mut config);
    Setup {
        timelines: Timelines::new(&pool, slab, config).unwrap(),
        pool,
        device,
        base,
    }
}

pub(crate) fn setup(fake: &Fake) -> Setup {
    setup_with(fake, |_| {})
}

impl Setup {
    pub(crate) fn attach(&self) -> Timeline {
        let stream = Stream::new(&self.device).unwrap();
        self.timelines.attach(&stream).unwrap()
    }

    pub(crate) fn allocate(&self, granules: u64) -> AllocationGuard {
        match self.pool.with(|pool, ()| pool.reserve(granules * G)) {
            Reserve::Ready(bytes) => self.pool.allocation_guard(bytes).unwrap(),
            other => panic!("no room: {other:?}"),
        }
    }

    pub(crate) fn publish(&self, key: u32, granules: u64) -> LeaseGuard {
        let bytes = self.allocate(granules).into_allocation();
        let lease = self.pool.with(|pool, ()| pool.publish(key, bytes, ()));
        self.pool.lease_guard(lease.unwrap()).unwrap()
    }

    pub(crate) fn stats(&self) -> PoolStats {
        self.pool.with(|pool, ()| pool.stats())
    }
}
