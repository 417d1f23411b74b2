//! Device, pinned and registered memory: what they answer, when they are freed, and how engines reach them.

mod fake;

use std::ops::Range;
use std::sync::Arc;

use fake::{Fake, Live, pattern};
use slab_core::{Pool, PoolConfig, PoolId, Reserve, SharedPool};
use slab_cuda::{
    Copier, CopyBatch, CudaError, CudaMemory, DeviceSlab, PinnedSlab, RegisteredHost, Stream,
    Timelines, TimelinesConfig,
};
use slab_memory::{Bounce, BounceDirection, CopyError, HostSlab, Memory, MemoryKind};

const MIB: u64 = 1 << 20;

fn device_slab(fake: &Fake, len: u64) -> Arc<DeviceSlab> {
    Arc::new(DeviceSlab::new(&fake.device(), len).unwrap())
}

#[test]
fn a_device_slab_says_where_it_is_and_has_no_host_address() {
    let fake = Fake::manual();
    let slab = DeviceSlab::new(&fake.driver().device(1).unwrap(), MIB).unwrap();
    assert_eq!((slab.len(), slab.kind()), (MIB, MemoryKind::Device(1)));
    assert_eq!(slab.location(), "cuda:1");
    assert_eq!(slab.host_ptr(), None);
    assert_ne!(slab.address(), 0);
    assert_eq!(slab.device().ordinal(), 1);
}

#[test]
fn lengths_that_no_memory_has_are_refused() {
    let fake = Fake::manual();
    let device = fake.device();
    for len in [0, u64::MAX, 1 << 63] {
        let error = CudaError::InvalidLength { len };
        assert_eq!(DeviceSlab::new(&device, len).unwrap_err(), error);
        assert_eq!(PinnedSlab::new(&device, len).unwrap_err(), error);
    }
    let error = DeviceSlab::new(&device, 1 << 40).unwrap_err();
    assert_eq!(
        error.to_string(),
        "cuMemAlloc_v2 failed: CUDA_ERROR_OUT_OF_MEMORY (2)"
    );
}

#[test]
fn blocking_copies_go_both_ways_whatever_the_device_takes_its_time() {
    let fake = Fake::seeded(7);
    let slab = device_slab(&fake, 2 * MIB);
    for (seed, len) in [0, 1, 4095, 262_143, 262_144, 262_145, 1_000_003]
        .into_iter()
        .enumerate()
    {
        let bytes = pattern(seed as u64, len);
        slab.copy_in(33, &bytes).unwrap();
        assert!(fake.peek(slab.address() + 33, len) == bytes, "{len} in");
        let mut found = vec![0; len];
        slab.copy_out(33, &mut found).unwrap();
        assert!(found == bytes, "{len} out");
    }
    let error = slab.copy_in(2 * MIB - 1, &[0; 2]).unwrap_err();
    assert_eq!(
        error,
        CopyError::OutOfBounds {
            offset: 2 * MIB - 1,
            len: 2,
            memory_len: 2 * MIB
        }
    );
    assert!(slab.copy_out(u64::MAX, &mut [0; 2]).is_err());
}

#[test]
fn pinned_memory_is_host_memory_that_the_host_reads_and_writes() {
    let fake = Fake::manual();
    let slab = PinnedSlab::new(&fake.device(), 4096).unwrap();
    assert_eq!(
        (slab.kind(), slab.location().as_str()),
        (MemoryKind::Host, "cpu:0")
    );
    assert_eq!(
        slab.host_ptr()
            .map(|pointer| pointer.as_ptr().addr() as u64),
        Some(slab.address())
    );
    let bytes = pattern(1, 4000);
    slab.copy_in(96, &bytes).unwrap();
    assert_eq!(fake.peek(slab.address() + 96, 4000), bytes);
    assert!(slab.copy_in(97, &bytes).is_err());
    assert_eq!(fake.live(Live::PinnedBlocks), 1);
}

#[test]
fn host_memory_is_registered_for_as_long_as_it_is_wrapped() {
    let fake = Fake::manual();
    let device = fake.device();
    let host: Arc<dyn Memory> = Arc::new(HostSlab::new(MIB).unwrap());
    let registered = RegisteredHost::new(&device, Arc::clone(&host)).unwrap();
    assert_eq!(fake.live(Live::RegisteredBlocks), 1);
    assert_eq!(registered.address(), host.address());
    assert_eq!(
        (registered.len(), registered.location().as_str()),
        (MIB, "cpu:0")
    );
    registered.copy_in(5, b"bytes").unwrap();
    let mut found = [0; 5];
    host.copy_out(5, &mut found).unwrap();
    assert_eq!(&found, b"bytes");
    // Twice is refused, and the memory comes back.
    let refused = RegisteredHost::new(&device, Arc::clone(&host)).unwrap_err();
    assert_eq!(refused.value.address(), host.address());
    assert!(matches!(refused.cause, CudaError::Driver { code, .. } if code.number() == 712));
    drop(registered);
    assert_eq!(fake.live(Live::RegisteredBlocks), 0);
    assert_eq!(Arc::strong_count(&host), 2, "here and in what was refused");
}

#[test]
fn kernels_find_registered_memory_where_the_device_has_it() {
    let fake = Fake::manual();
    let device = fake.device();
    let host: Arc<dyn Memory> = Arc::new(HostSlab::new(4096).unwrap());
    let registered = Arc::new(RegisteredHost::new(&device, Arc::clone(&host)).unwrap());
    assert_ne!(registered.device_address(), registered.address());
    let pool = Pool::<u32, ()>::new(PoolConfig::new(PoolId::new(), 4096)).unwrap();
    let pool = SharedPool::new(pool, ());
    let timelines = Timelines::new(&pool, registered.clone(), TimelinesConfig::default()).unwrap();
    let timeline = timelines.attach(&Stream::new(&device).unwrap()).unwrap();
    let Reserve::Ready(first) = pool.with(|pool, ()| pool.reserve(256)) else {
        panic!("the pool is empty");
    };
    let Reserve::Ready(second) = pool.with(|pool, ()| pool.reserve(256)) else {
        panic!("the pool has more");
    };
    let offset = second.offset();
    let loan = timeline
        .lend(pool.allocation_guard(second).unwrap())
        .unwrap();
    assert_eq!(loan.address(), registered.device_address() + offset);
    fake.launch(loan.stream(), loan.address(), loan.len(), Some(0x77));
    assert_eq!(fake.touching(loan.address(), 1), 1);
    fake.advance_all();
    let mut found = [0; 256];
    host.copy_out(offset, &mut found).unwrap();
    assert_eq!(found, [0x77; 256]);
    drop((loan, pool.allocation_guard(first)));
    fake.advance_all();
    assert_eq!(timelines.poll(), Ok(0));
}

/// Host memory that goes by another number on the wire.
struct Renamed(HostSlab);

// SAFETY: everything but the address is as the slab has it, and that does not change.
unsafe impl Memory for Renamed {
    fn len(&self) -> u64 {
        self.0.len()
    }

    fn kind(&self) -> MemoryKind {
        self.0.kind()
    }

    fn address(&self) -> u64 {
        0x1000_0000
    }

    fn host_ptr(&self) -> Option<std::ptr::NonNull<u8>> {
        self.0.host_ptr()
    }

    fn copy_in(&self, offset: u64, source: &[u8]) -> Result<(), CopyError> {
        self.0.copy_in(offset, source)
    }

    fn copy_out(&self, offset: u64, target: &mut [u8]) -> Result<(), CopyError> {
        self.0.copy_out(offset, target)
    }
}

#[test]
fn registered_memory_is_copied_from_where_its_bytes_are() {
    let fake = Fake::immediate();
    let slab: Arc<dyn CudaMemory> = device_slab(&fake, 4096);
    let host = Arc::new(Renamed(HostSlab::new(4096).unwrap()));
    host.copy_in(0, &[7; 4096]).unwrap();
    let host: Arc<dyn CudaMemory> = Arc::new(RegisteredHost::new(&fake.device(), host).unwrap());
    let copier = Copier::side(slab.device()).unwrap();
    let batch = CopyBatch::one((&host, 0), (&slab, 0), 4096, ());
    let mut copying = copier.submit(batch).unwrap();
    assert_eq!(copying.poll(), Ok(true));
    assert_eq!(fake.peek(slab.address(), 4096), [7; 4096]);
}

#[test]
fn memory_that_the_device_does_not_map_is_not_registered() {
    let fake = Fake::manual();
    let host: Arc<dyn Memory> = Arc::new(HostSlab::new(4096).unwrap());
    fake.inject(c"cuMemHostGetDevicePointer_v2", 1, 801);
    let refused = RegisteredHost::new(&fake.device(), host).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "cuMemHostGetDevicePointer_v2 failed: unknown code (801)"
    );
    assert_eq!(fake.live(Live::RegisteredBlocks), 0);
}

#[test]
fn only_host_memory_can_be_registered() {
    let fake = Fake::manual();
    let slab = device_slab(&fake, 4096);
    let refused = RegisteredHost::new(&fake.device(), slab).unwrap_err();
    assert_eq!(refused.cause, CudaError::NotHostMemory);
}

#[test]
fn memory_that_the_driver_does_not_take_back_is_lost_and_counted() {
    let mut fake = Fake::manual();
    fake.expect_lost();
    let device = fake.device();
    let host: Arc<dyn Memory> = Arc::new(HostSlab::new(4096).unwrap());
    let slab = DeviceSlab::new(&device, MIB).unwrap();
    let pinned = PinnedSlab::new(&device, 4096).unwrap();
    let registered = RegisteredHost::new(&device, Arc::clone(&host)).unwrap();
    for symbol in [c"cuMemFree_v2", c"cuMemFreeHost", c"cuMemHostUnregister"] {
        fake.inject(symbol, 1, 700);
    }
    drop((slab, pinned, registered));
    let lost = device.lost();
    assert_eq!((lost.count, lost.bytes), (3, MIB + 2 * 4096));
    assert_eq!(
        Arc::strong_count(&host),
        2,
        "pages that are registered stay mapped"
    );
    assert_eq!(fake.injected(), 3);
}

/// Receives `bytes` through a bounce, a few at a time.
fn receive(bounce: &mut dyn Bounce, bytes: &[u8], most: usize) -> Result<(), CopyError> {
    let mut rest = bytes;
    while !bounce.poll_finished()? {
        let buffer = bounce.buffer()?;
        let count = buffer.len().min(rest.len()).min(most);
        buffer[..count].copy_from_slice(&rest[..count]);
        bounce.commit(count)?;
        rest = &rest[count..];
    }
    assert!(rest.is_empty(), "finished before everything was received");
    Ok(())
}

/// Sends what a bounce has.
fn send(bounce: &mut dyn Bounce, most: usize) -> Result<Vec<u8>, CopyError> {
    let mut sent = Vec::new();
    while !bounce.poll_finished()? {
        let buffer = bounce.buffer()?;
        let count = buffer.len().min(most);
        sent.extend_from_slice(&buffer[..count]);
        bounce.commit(count)?;
    }
    Ok(sent)
}

fn bounce(
    slab: &Arc<DeviceSlab>,
    direction: BounceDirection,
    range: Range<u64>,
) -> Box<dyn Bounce> {
    Arc::clone(slab).bounce(direction, range).unwrap()
}

#[test]
fn bounces_of_every_length_pass_in_pieces_of_every_size() {
    let fake = Fake::seeded(3);
    let slab = device_slab(&fake, 2 * MIB);
    let lengths = [0, 1, 262_143, 262_144, 262_145, 524_288, 524_289, 1_300_007];
    for (seed, len) in lengths.into_iter().enumerate() {
        for most in [7_777, 65_536, usize::MAX] {
            let bytes = pattern(seed as u64, len);
            let range = 9..9 + len as u64;
            let mut inward = bounce(&slab, BounceDirection::In, range.clone());
            receive(&mut *inward, &bytes, most).unwrap();
            assert!(fake.peek(slab.address() + 9, len) == bytes, "{len} in");
            let mut outward = bounce(&slab, BounceDirection::Out, range);
            assert!(send(&mut *outward, most).unwrap() == bytes, "{len} out");
        }
    }
}

#[test]
fn a_bounce_lends_nothing_while_the_device_has_both_buffers() {
    let fake = Fake::manual();
    let slab = device_slab(&fake, MIB);
    let mut inward = bounce(&slab, BounceDirection::In, 0..MIB);
    for _ in 0..2 {
        let count = inward.buffer().unwrap().len();
        assert_eq!(count, 262_144);
        inward.commit(count).unwrap();
    }
    assert!(inward.buffer().unwrap().is_empty());
    assert!(!inward.poll_finished().unwrap());
    // The copy, and the event behind it.
    fake.advance_all();
    assert_eq!(inward.buffer().unwrap().len(), 262_144);
    fake.run_seeded(1);
    drop(inward);
}

#[test]
fn a_bounce_that_receives_is_finished_only_when_the_device_has_the_bytes() {
    let fake = Fake::manual();
    let slab = device_slab(&fake, 4096);
    let mut inward = bounce(&slab, BounceDirection::In, 0..5);
    inward.buffer().unwrap().copy_from_slice(b"hello");
    inward.commit(5).unwrap();
    assert!(!inward.poll_finished().unwrap());
    assert_eq!(fake.peek(slab.address(), 5), [0; 5]);
    fake.advance_all();
    assert!(inward.poll_finished().unwrap());
    assert_eq!(fake.peek(slab.address(), 5), b"hello");
}

#[test]
fn a_bounce_that_is_dropped_waits_until_its_copies_have_ended() {
    let fake = Fake::manual();
    let slab = device_slab(&fake, MIB);
    let outward = bounce(&slab, BounceDirection::Out, 0..MIB);
    assert_eq!(fake.touching(slab.address(), MIB), 2);
    // The schedule goes on when the bounce asks how far its copies are.
    fake.run_seeded(5);
    drop(outward);
    assert_eq!(fake.touching(slab.address(), MIB), 0);
    assert_eq!(slab.device().lost().count, 0);
}

#[test]
fn a_copy_whose_end_nobody_will_know_keeps_buffer_and_slab_for_ever() {
    let mut fake = Fake::manual();
    fake.expect_lost();
    let slab = device_slab(&fake, MIB);
    let device = slab.device().clone();
    let mut inward = bounce(&slab, BounceDirection::In, 0..100);
    inward.commit(100).unwrap();
    fake.inject(c"cuEventQuery", 1, 719);
    assert_eq!(inward.poll_finished(), Err(CopyError::Driver { code: 719 }));
    // An error is for good.
    fake.advance_all();
    assert!(inward.buffer().is_err() && inward.commit(0).is_err());
    drop(inward);
    drop(slab);
    assert_eq!(fake.live(Live::DeviceBlocks), 1);
    assert_eq!(device.lost().bytes, MIB + 262_144);
}

#[test]
fn a_blocking_copy_that_may_still_run_says_so() {
    let mut fake = Fake::manual();
    fake.expect_lost();
    let slab = device_slab(&fake, 4096);
    // Nobody will know how the copy ends.
    fake.inject(c"cuEventQuery", 1, 719);
    assert_eq!(
        slab.copy_in(0, &[1; 100]),
        Err(CopyError::Unsettled { code: 719 })
    );
    fake.inject_many(c"cuEventRecord", 1, 2, 2);
    assert_eq!(
        slab.copy_in(200, &[1; 100]),
        Err(CopyError::Unsettled { code: 2 })
    );
    assert_eq!(fake.touching(slab.address(), 4096), 2);
    // One that the driver refused is over once the event behind it is passed, and one that reads writes nothing.
    fake.run_immediately();
    fake.inject(c"cuMemcpyAsync", 1, 2);
    assert_eq!(
        slab.copy_in(0, &[1; 100]),
        Err(CopyError::Driver { code: 2 })
    );
    fake.inject(c"cuEventQuery", 1, 719);
    assert_eq!(
        slab.copy_out(0, &mut [0; 100]),
        Err(CopyError::Driver { code: 719 })
    );
}

#[test]
fn a_copy_that_the_driver_refuses_fails_the_request_and_loses_nothing() {
    let fake = Fake::seeded(11);
    let calls = [
        c"cuMemcpyAsync",
        c"cuMemHostAlloc",
        c"cuEventCreate",
        c"cuStreamCreate",
    ];
    for symbol in calls {
        // A device of its own, which has nothing to use again.
        let slab = device_slab(&fake, MIB);
        for nth in 1..=if symbol == c"cuStreamCreate" { 1 } else { 2 } {
            let slab = Arc::clone(&slab);
            fake.inject(symbol, nth, 2);
            let failed = match slab.bounce(BounceDirection::Out, 0..MIB) {
                Ok(mut bounce) => send(&mut *bounce, usize::MAX).err(),
                Err(error) => Some(error),
            };
            assert_eq!(failed, Some(CopyError::Driver { code: 2 }), "{symbol:?}");
            if symbol != c"cuMemcpyAsync" {
                break;
            }
        }
        assert_eq!(slab.device().lost().count, 0);
    }
    assert_eq!(fake.injected(), 5);
}

#[test]
fn buffers_and_events_are_used_again() {
    let fake = Fake::seeded(2);
    let slab = device_slab(&fake, MIB);
    let bytes = pattern(4, MIB as usize);
    for _ in 0..10 {
        slab.copy_in(0, &bytes).unwrap();
    }
    assert_eq!(fake.calls(c"cuMemHostAlloc"), 2);
    assert_eq!(fake.calls(c"cuEventCreate"), 2);
    assert_eq!(fake.calls(c"cuStreamCreate"), 1);
}

#[test]
fn a_slab_outlives_whoever_drops_it_while_a_bounce_is_there() {
    let fake = Fake::seeded(13);
    let slab = device_slab(&fake, MIB);
    let address = slab.address();
    let bytes = pattern(9, 300_000);
    let mut inward = bounce(&slab, BounceDirection::In, 0..300_000);
    drop(slab);
    receive(&mut *inward, &bytes, 10_000).unwrap();
    assert!(fake.peek(address, 300_000) == bytes);
    drop(inward);
    assert_eq!(fake.live(Live::DeviceBlocks), 0);
}

#[test]
fn memory_of_somebody_else_is_held_and_not_freed() {
    let fake = Fake::seeded(17);
    let owner = device_slab(&fake, MIB);
    let device = owner.device().clone();
    let address = owner.address();
    let wrap = |address, len| fake::foreign_slab(&device, address, len, Arc::clone(&owner));
    for (address, len) in [(address, 0), (u64::MAX - 10, 20), (0, u64::MAX)] {
        assert!(matches!(
            wrap(address, len),
            Err(CudaError::InvalidLength { .. })
        ));
    }
    let tensor: Arc<dyn CudaMemory> = Arc::new(wrap(address + 512, 5000).unwrap());
    let staging: Arc<dyn CudaMemory> = device_slab(&fake, MIB);
    let bytes = pattern(6, 5000);
    tensor.copy_in(0, &bytes).unwrap();
    drop(owner);
    let copier = Copier::side(&device).unwrap();
    let batch = CopyBatch::one((&tensor, 0), (&staging, 100), 5000, ());
    let copying = copier.submit(batch).unwrap();
    drop(tensor);
    fake.advance_all();
    drop(copying);
    copier.poll().unwrap();
    assert!(fake.peek(staging.address() + 100, 5000) == bytes);
    assert_eq!(fake.live(Live::DeviceBlocks), 1, "the staging slab is left");
    assert_eq!(fake.calls(c"cuMemFree_v2"), 1);
}

#[test]
#[should_panic(expected = "more bytes committed than were lent")]
fn committing_more_than_was_lent_is_a_bug_of_the_caller() {
    let fake = Fake::seeded(1);
    let slab = device_slab(&fake, 4096);
    let mut inward = bounce(&slab, BounceDirection::In, 0..10);
    let _ = inward.commit(11);
}
