//! Destructors of the program's own that panic: what stands behind them still waits for the device.

mod fake;
mod pool_setup;

use std::sync::Arc;

use fake::{Fake, foreign_stream};
use pool_setup::{G, Setup, setup};
use slab_core::{AllocationGuard, Pool, PoolConfig, PoolId, Reserve, SharedPool};
use slab_cuda::{
    Copier, CopyBatch, CudaError, CudaMemory, DeviceSlab, Stream, Timelines, TimelinesConfig,
};

/// Panics when it is dropped.
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("on purpose");
    }
}

#[test]
fn a_batch_behind_one_whose_hold_panics_keeps_what_it_holds() {
    let mut fake = Fake::manual();
    fake.expect_lost();
    let setup = setup(&fake);
    let other: Arc<dyn CudaMemory> = Arc::new(DeviceSlab::new(&setup.device, 8 * G).unwrap());
    let stream = Stream::new(&setup.device).unwrap();
    let copier = Copier::new(&stream);
    drop(
        copier
            .submit(CopyBatch::one((&other, 0), (&other, G), 16, Bomb))
            .unwrap(),
    );
    let guard = setup.allocate(8);
    let memory = setup.timelines.memory();
    drop(
        copier
            .submit(CopyBatch::one((&other, 0), (memory, 0), 8 * G, guard))
            .unwrap(),
    );
    fake.advance(&stream, 2);
    // The second will never end.
    fake.fail_stream(&stream, 700);
    drop(copier);
    assert_eq!(fake.touching(setup.base, 8 * G), 1);
    assert_eq!(setup.stats().free, 0);
    drop(other);
}

#[test]
fn a_hold_that_panics_ends_no_poll_of_a_copier() {
    let fake = Fake::immediate();
    let setup = setup(&fake);
    let memory = setup.timelines.memory();
    let copier = Copier::side(&setup.device).unwrap();
    let batch = CopyBatch::one((memory, 0), (memory, G), G, Bomb);
    drop(copier.submit(batch).unwrap());
    assert_eq!(copier.poll(), Ok(0));
}

/// What a resident is published with.
#[derive(PartialEq, Eq)]
struct Meta(u8);

impl Drop for Meta {
    fn drop(&mut self) {
        assert!(self.0 != 1, "on purpose");
    }
}

#[test]
fn a_loan_behind_one_whose_metadata_panics_comes_back_behind_its_event() {
    let fake = Fake::manual();
    let device = fake.device();
    let slab: Arc<dyn CudaMemory> = Arc::new(DeviceSlab::new(&device, 8 * G).unwrap());
    let base = slab.address();
    let config = PoolConfig::new(PoolId::new(), 8 * G);
    let pool = SharedPool::new(Pool::<u32, Meta>::new(config).unwrap(), ());
    let allocate = |granules: u64| -> AllocationGuard {
        match pool.with(|pool, ()| pool.reserve(granules * G)) {
            Reserve::Ready(bytes) => pool.allocation_guard(bytes).unwrap(),
            other => panic!("no room: {other:?}"),
        }
    };
    let publish = |meta| {
        let bytes = allocate(1).into_allocation();
        let lease = pool.with(|pool, ()| pool.publish(1, bytes, meta));
        let lease = lease.map_err(|refused| refused.cause).unwrap();
        pool.lease_guard(lease).unwrap()
    };
    let timelines = Timelines::new(&pool, slab, TimelinesConfig::default()).unwrap();
    let timeline = timelines.attach(&Stream::new(&device).unwrap()).unwrap();
    // The key is bound anew, so that the first resident goes with its last lease.
    let (first, second) = (publish(Meta(1)), publish(Meta(2)));
    let going = timeline.lend(first).unwrap();
    let loan = timeline.lend(allocate(4)).unwrap();
    let address = loan.address();
    fake.launch(timeline.stream(), address, 4 * G, Some(7));
    drop((going, loan));
    let _ = timelines.poll();
    assert_eq!(fake.touching(address, 4 * G), 1);
    let free = |pool: &SharedPool<u32, Meta>| {
        let mut free = Vec::new();
        pool.with(|pool, ()| {
            for run in pool.runs() {
                if run.state == slab_core::RunState::Free {
                    free.push(run.region);
                }
            }
        });
        free
    };
    for region in free(&pool) {
        assert_eq!(fake.touching(base + region.offset(), region.len()), 0);
    }
    fake.advance_all();
    assert_eq!(timelines.poll(), Ok(0));
    drop(allocate(4));
    drop(second);
}

/// Lends on a stream whose event will be the last to keep it, and who keeps it panics then. Returns the stream that it
/// really is.
fn lend_on_one_that_panics(setup: &Setup) -> Stream {
    let own = Stream::new(&setup.device).unwrap();
    let foreign = foreign_stream(&setup.device, own.as_raw(), Bomb).unwrap();
    let timeline = setup.timelines.attach(&foreign).unwrap();
    drop(foreign);
    timeline.lend(setup.allocate(1)).unwrap().release().unwrap();
    own
}

#[test]
fn loans_come_back_behind_their_events_though_what_keeps_a_stream_panics() {
    let mut fake = Fake::manual();
    fake.expect_lost();
    let setup = setup(&fake);
    let own = lend_on_one_that_panics(&setup);
    let busy = setup.attach();
    let loan = busy.lend(setup.allocate(4)).unwrap();
    let (address, len) = (loan.address(), loan.len());
    fake.launch(busy.stream(), address, len, Some(7));
    drop(loan);
    let stream = busy.stream().clone();
    drop(busy);
    fake.advance(&own, 1);
    fake.fail_stream(&stream, 700);
    let pool = setup.pool.clone();
    drop(setup);
    assert_eq!(fake.touching(address, len), 1);
    let stats = pool.with(|pool, ()| pool.stats());
    assert_eq!((stats.free, stats.quarantined), (4 * G, 4 * G), "{stats}");
}

#[test]
fn a_poll_goes_on_when_what_keeps_a_stream_panics() {
    let fake = Fake::immediate();
    let setup = setup(&fake);
    let _own = lend_on_one_that_panics(&setup);
    assert_eq!(setup.timelines.poll(), Ok::<usize, CudaError>(0));
    assert_eq!(setup.stats().free, 8 * G);
}
