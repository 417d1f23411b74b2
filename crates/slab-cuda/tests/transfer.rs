//! From one device slab over the wire into another: an engine that knows nothing of CUDA moves bytes between devices.

mod fake;

use std::ops::Range;
use std::sync::Arc;

use fake::{Fake, Live, pattern, soon};
use mooncake_transport::tcp::{TcpConfig, TcpEngine};
use mooncake_transport::wire::data::Op;
use mooncake_transport::{Access, Engine, Local, Reason, Remote, Segment, Task};
use slab_core::{Pool, PoolConfig, PoolId, Reserve, SharedPool};
use slab_cuda::{
    Copier, CopyBatch, CudaMemory, DeviceSlab, PinnedSlab, Stream, Timelines, TimelinesConfig,
};
use slab_memory::{CopyError, Memory};

const LEN: u64 = 4 << 20;

fn engine() -> TcpEngine {
    TcpEngine::start(TcpConfig::default()).unwrap()
}

fn task(
    op: Op,
    segment: &Segment,
    remote: u64,
    memory: Arc<dyn Memory>,
    range: Range<u64>,
) -> Task {
    Task {
        op,
        segment: segment.clone(),
        remote,
        memory,
        range,
        hold: Box::new(()),
    }
}

fn run(engine: &TcpEngine, tasks: Vec<Task>) -> Vec<Remote> {
    let batch = engine.submit(tasks).unwrap();
    let report = batch.wait(Some(soon())).expect("in time");
    report
        .tasks()
        .iter()
        .map(|task| task.remote.clone())
        .collect()
}

fn check_both_ways(fake: &Fake) {
    let driver = fake.driver();
    let here = Arc::new(DeviceSlab::new(&driver.device(0).unwrap(), LEN).unwrap());
    let there = Arc::new(DeviceSlab::new(&driver.device(1).unwrap(), LEN).unwrap());
    let (source, target) = (engine(), engine());
    let registration = target.register(there.clone(), Access::RemoteWrite).unwrap();
    let segment = source.open_segment(target.session()).unwrap();
    let lengths = [1, 4096, 262_144, 262_145, 3_000_001];
    for (seed, len) in lengths.into_iter().enumerate() {
        let bytes = pattern(seed as u64, len);
        fake.poke(here.address() + 17, &bytes);
        let range = 17..17 + len as u64;
        let write = task(
            Op::Write,
            &segment,
            there.address() + 33,
            here.clone(),
            range,
        );
        assert_eq!(
            run(&source, vec![write]),
            [Remote::Applied],
            "write of {len}"
        );
        assert!(
            fake.peek(there.address() + 33, len) == bytes,
            "write of {len}"
        );

        let range = LEN - len as u64..LEN;
        let read = task(
            Op::Read,
            &segment,
            there.address() + 33,
            here.clone(),
            range,
        );
        assert_eq!(run(&source, vec![read]), [Remote::Applied], "read of {len}");
        let end = here.address() + LEN - len as u64;
        assert!(fake.peek(end, len) == bytes, "read of {len}");
    }
    // Many at once.
    let bytes = pattern(77, LEN as usize);
    fake.poke(here.address(), &bytes);
    let part = LEN / 32;
    let tasks = (0..32).map(|at| {
        let range = at * part..(at + 1) * part;
        let remote = there.address() + range.start;
        task(Op::Write, &segment, remote, here.clone(), range)
    });
    let remotes = run(&source, tasks.collect());
    assert!(remotes.iter().all(|remote| *remote == Remote::Applied));
    assert!(fake.peek(there.address(), LEN as usize) == bytes);
    registration.unregister().unwrap();
}

#[test]
fn bytes_go_from_device_to_device_whose_copies_take_their_time() {
    check_both_ways(&Fake::seeded(21));
}

#[test]
fn bytes_go_from_device_to_device_whose_copies_end_at_once() {
    check_both_ways(&Fake::immediate());
}

#[test]
fn pinned_memory_goes_over_the_wire_without_a_copy_of_the_drivers() {
    let fake = Fake::manual();
    let slab = Arc::new(PinnedSlab::new(&fake.device(), LEN).unwrap());
    let (source, target) = (engine(), engine());
    let _registration = target.register(slab.clone(), Access::RemoteWrite).unwrap();
    let segment = source.open_segment(target.session()).unwrap();
    let bytes = pattern(5, 1 << 20);
    slab.copy_in(0, &bytes).unwrap();
    let remote = slab.address() + LEN / 2;
    let write = task(Op::Write, &segment, remote, slab.clone(), 0..1 << 20);
    assert_eq!(run(&source, vec![write]), [Remote::Applied]);
    assert!(fake.peek(remote, 1 << 20) == bytes);
    assert_eq!(fake.calls(c"cuMemcpyAsync"), 0);
}

#[test]
fn a_copy_that_fails_at_either_end_fails_its_request_alone() {
    let fake = Fake::seeded(22);
    let device = fake.device();
    let here = Arc::new(DeviceSlab::new(&device, LEN).unwrap());
    let there = Arc::new(DeviceSlab::new(&device, LEN).unwrap());
    let host = Arc::new(slab_memory::HostSlab::new(LEN).unwrap());
    let (source, target) = (engine(), engine());
    let _registration = target.register(there.clone(), Access::RemoteWrite).unwrap();
    let segment = source.open_segment(target.session()).unwrap();
    let write = |memory: Arc<dyn Memory>| {
        let write = task(Op::Write, &segment, there.address(), memory, 0..100_000);
        run(&source, vec![write]).remove(0)
    };
    // The first copy is the initiator's.
    fake.inject(c"cuMemcpyAsync", 1, 719);
    let failed = write(here.clone());
    let reason = Reason::Memory {
        source: CopyError::Driver { code: 719 },
    };
    assert_eq!(failed.reason(), Some(&reason));
    // Only the target copies.
    fake.inject(c"cuMemcpyAsync", 1, 719);
    assert_eq!(write(host), Remote::Ended(Reason::Closed));
    assert_eq!(write(here.clone()), Remote::Applied);
    assert_eq!(fake.injected(), 2);
}

/// Reads into device memory whose copy is begun, and whose event the driver refuses so many times. Returns the engine's
/// answer and whether the hold is still there, and lets the copy run after that.
fn read_with_refused_records(fake: &Fake, refused: u64) -> (Local, Option<Reason>, bool) {
    let here = Arc::new(DeviceSlab::new(&fake.device(), LEN).unwrap());
    let host = Arc::new(slab_memory::HostSlab::new(LEN).unwrap());
    let bytes = pattern(9, 1000);
    host.copy_in(0, &bytes).unwrap();
    let (source, target) = (engine(), engine());
    let remote = host.host_ptr().unwrap().as_ptr().expose_provenance() as u64;
    let _registration = target.register(host, Access::RemoteRead).unwrap();
    let segment = source.open_segment(target.session()).unwrap();
    let address = here.address();
    let mut read = task(Op::Read, &segment, remote, here, 0..1000);
    let hold = Arc::new(());
    let is_held = Arc::downgrade(&hold);
    read.hold = Box::new(hold);
    fake.inject_many(c"cuEventRecord", 1, refused, 2);
    let report = source.submit(vec![read]).unwrap().wait(Some(soon()));
    let settled = report.expect("in time").tasks()[0].clone();
    let is_held = is_held.upgrade().is_some();
    drop((source, target));
    fake.advance_all();
    if is_held {
        assert!(fake.peek(address, 1000) == bytes, "the stale copy has run");
    }
    (settled.local, settled.remote.reason().cloned(), is_held)
}

#[test]
fn a_range_whose_copy_nobody_hears_of_stays_reserved() {
    let mut fake = Fake::manual();
    fake.expect_lost();
    let reason = Reason::Memory {
        source: CopyError::Driver { code: 2 },
    };
    let answer = read_with_refused_records(&fake, 2);
    assert_eq!(answer, (Local::Held, Some(reason), true));
    assert_eq!(fake.injected(), 2);
}

#[test]
fn a_range_whose_event_is_recorded_by_the_second_try_is_quiet() {
    let fake = Fake::immediate();
    let answer = read_with_refused_records(&fake, 1);
    assert_eq!(answer, (Local::Quiet, None, false));
    assert_eq!(fake.injected(), 1);
}

#[test]
fn memory_goes_after_the_last_registration_and_batch() {
    let fake = Fake::seeded(23);
    let device = fake.device();
    let here = Arc::new(DeviceSlab::new(&device, LEN).unwrap());
    let there = Arc::new(DeviceSlab::new(&device, LEN).unwrap());
    let (source, target) = (engine(), engine());
    let registration = target.register(there.clone(), Access::RemoteWrite).unwrap();
    let segment = source.open_segment(target.session()).unwrap();
    let (remote, address) = (there.address(), here.address());
    let bytes = pattern(8, LEN as usize);
    fake.poke(address, &bytes);
    let write = task(Op::Write, &segment, remote, here, 0..LEN);
    let batch = source.submit(vec![write]).unwrap();
    drop(there);
    batch.wait(Some(soon())).expect("in time");
    assert!(fake.peek(remote, LEN as usize) == bytes);
    drop(batch);
    registration.unregister().unwrap();
    drop((source, target, segment));
    assert_eq!(fake.live(Live::DeviceBlocks), 0);
}

/// A whole path: a kernel writes a tensor, which is staged into a registered slab beside other work, sent, received into
/// a region of a pool, published, read by a kernel of the receiver's, and its bytes reused after that.
#[test]
fn a_tensor_goes_from_kernel_to_kernel() {
    let fake = Fake::seeded(24);
    let driver = fake.driver();
    let (sender, receiver) = (driver.device(0).unwrap(), driver.device(1).unwrap());
    let (source, target) = (engine(), engine());
    let len = 1_000_000;

    let tensor: Arc<dyn CudaMemory> = Arc::new(DeviceSlab::new(&sender, len).unwrap());
    let staging: Arc<dyn CudaMemory> = Arc::new(DeviceSlab::new(&sender, LEN).unwrap());
    let encoder = Stream::new(&sender).unwrap();
    fake.launch(&encoder, tensor.address(), len, Some(0x5A));
    let copier = Copier::side(&sender).unwrap();
    copier.stream().wait_for(&encoder).unwrap();
    let batch = CopyBatch::one((&tensor, 0), (&staging, 256), len, ());
    let mut copying = copier.submit(batch).unwrap();
    copying.wait(soon()).unwrap();

    let slab: Arc<dyn CudaMemory> = Arc::new(DeviceSlab::new(&receiver, LEN).unwrap());
    let pool = Pool::<u32, ()>::new(PoolConfig::new(PoolId::new(), LEN)).unwrap();
    let pool = SharedPool::new(pool, ());
    let timelines = Timelines::new(&pool, slab.clone(), TimelinesConfig::default()).unwrap();
    let registration = target.register(slab.clone(), Access::RemoteWrite).unwrap();
    let Reserve::Ready(bytes) = pool.with(|pool, ()| pool.reserve(len)) else {
        panic!("the pool is empty");
    };
    let remote = slab.address() + bytes.offset();
    let segment = source.open_segment(target.session()).unwrap();
    let write = task(Op::Write, &segment, remote, staging, 256..256 + len);
    assert_eq!(run(&source, vec![write]), [Remote::Applied]);

    let lease = pool.with(|pool, ()| pool.publish(1, bytes, ())).unwrap();
    let lease = pool.lease_guard(lease).unwrap();
    let stream = Stream::new(&receiver).unwrap();
    let timeline = timelines.attach(&stream).unwrap();
    let loan = timeline.lend(lease).unwrap();
    assert_eq!(loan.address(), remote);
    let found = fake.peek(loan.address(), loan.len() as usize);
    assert!(found.iter().all(|byte| *byte == 0x5A));
    fake.launch(loan.stream(), loan.address(), loan.len(), None);
    loan.release().unwrap();
    assert_eq!(timelines.drain(soon()), Ok(0));
    let reserved = pool.with(|pool, ()| pool.reserve(LEN));
    let Reserve::Ready(bytes) = reserved else {
        panic!("everything is back: {reserved:?}");
    };
    assert_eq!(fake.touching(slab.address(), LEN), 0);
    drop(pool.allocation_guard(bytes));
    registration.unregister().unwrap();
}
