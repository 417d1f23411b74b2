//! Copies by descriptors: with one call, with many, with errors, and what they hold.

mod fake;

use std::num::NonZeroU64;
use std::sync::Arc;

use fake::{Fake, Live, pattern, soon};
use slab_core::{Blocks, CopyListPool, CopySpan};
use slab_cuda::{
    Copier, CopyBatch, CudaError, CudaMemory, Device, DeviceSlab, PinnedSlab, RegisteredHost,
    Stream,
};
use slab_memory::HostSlab;

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 4096;

fn device_slab(device: &Device) -> Arc<dyn CudaMemory> {
    Arc::new(DeviceSlab::new(device, MIB).unwrap())
}

/// Saves a tensor of the device into scattered blocks of the host, with a list of a pool, and loads it again.
fn check_round_trip(fake: &Fake, version: i32, calls: [u64; 3]) {
    fake.set_version(version);
    let device = fake.device();
    let tensor = device_slab(&device);
    let blocks: Arc<dyn CudaMemory> = Arc::new(PinnedSlab::new(&device, MIB).unwrap());
    let copier = Copier::side(&device).unwrap();
    let region = Blocks::new(blocks.address(), NonZeroU64::new(BLOCK).unwrap(), 256).unwrap();
    let ids = [7, 8, 9, 3, 200, 201, 0];
    let bytes = pattern(1, (7 * BLOCK - 100) as usize);
    fake.poke(tensor.address(), &bytes);

    let mut lists = CopyListPool::new(4);
    let mut list = lists.acquire(16);
    let save = region.save(&ids, tensor.address(), bytes.len() as u64);
    let end = list.store(0, save.unwrap()).unwrap();
    assert_eq!(end, 4, "runs of blocks");
    let memories = vec![Arc::clone(&tensor), Arc::clone(&blocks)];
    let batch = CopyBatch::new(list, 0..end, memories.clone(), ());
    let mut copying = copier.submit(batch).unwrap();
    copying.wait(soon()).unwrap();
    let (list, _) = copying.into_batch().expect("ended").into_parts();
    lists.release(list);
    let first = fake.peek(blocks.address() + 7 * BLOCK, BLOCK as usize);
    assert!(first == bytes[..BLOCK as usize], "{version}");

    let mut list = lists.acquire(16);
    assert_eq!(lists.idle(), 0, "the list of before");
    let there = tensor.address() + MIB / 2;
    let end = list.store(0, region.load(&ids, there).unwrap()).unwrap();
    let mut copying = copier
        .submit(CopyBatch::new(list, 0..end, memories, ()))
        .unwrap();
    copying.wait(soon()).unwrap();
    assert!(fake.peek(there, bytes.len()) == bytes, "{version}");

    let symbols = [
        c"cuMemcpyBatchAsync",
        c"cuMemcpyBatchAsync_v2",
        c"cuMemcpyAsync",
    ];
    assert_eq!(symbols.map(|symbol| fake.calls(symbol)), calls, "{version}");
}

#[test]
fn lists_of_copies_go_with_the_call_that_the_driver_has() {
    check_round_trip(&Fake::seeded(1), 13_000, [0, 2, 0]);
    check_round_trip(&Fake::seeded(2), 12_090, [2, 0, 0]);
    check_round_trip(&Fake::seeded(3), 12_080, [2, 0, 0]);
    check_round_trip(&Fake::seeded(4), 12_070, [0, 0, 8]);
    check_round_trip(&Fake::immediate(), 13_000, [0, 2, 0]);
}

#[test]
fn bytes_go_between_two_slabs_of_a_device_beside_everything_else() {
    let fake = Fake::manual();
    let device = fake.device();
    let (from, to) = (device_slab(&device), device_slab(&device));
    let busy = Stream::new(&device).unwrap();
    fake.launch(&busy, from.address(), 10, None);
    let bytes = pattern(2, 100_000);
    fake.poke(from.address() + 5, &bytes);
    let copier = Copier::side(&device).unwrap();
    let batch = CopyBatch::one((&from, 5), (&to, 77), 100_000, ());
    let mut copying = copier.submit(batch).unwrap();
    assert_eq!(copying.poll(), Ok(false));
    fake.advance(copier.stream(), 9);
    assert_eq!(copying.poll(), Ok(true));
    assert!(fake.peek(to.address() + 77, 100_000) == bytes);
    assert_eq!(fake.queued(), 1, "the other stream did not move");
    fake.advance_all();
}

#[test]
fn threads_have_side_streams_of_their_own_up_to_a_bound() {
    let fake = Fake::manual();
    let device = fake.device();
    let mine = Copier::side(&device).unwrap().stream().as_raw().addr();
    assert_eq!(
        Copier::side(&device).unwrap().stream().as_raw().addr(),
        mine
    );
    let of_another = || {
        let device = device.clone();
        let ask = move || Copier::side(&device).unwrap().stream().as_raw().addr();
        std::thread::spawn(ask).join().unwrap()
    };
    assert_ne!(of_another(), mine);
    for _ in 0..20 {
        of_another();
    }
    assert_eq!(fake.live(Live::Streams), 8);
}

#[test]
fn everything_is_held_until_the_copies_have_ended_whoever_asks() {
    let fake = Fake::manual();
    let device = fake.device();
    let (from, to) = (device_slab(&device), device_slab(&device));
    let hold = Arc::new(());
    let copier = Copier::side(&device).unwrap();
    let batch = CopyBatch::one((&from, 0), (&to, 0), MIB, Arc::clone(&hold));
    let copying = copier.submit(batch).unwrap();
    let copying = copying.into_batch().expect_err("under way");
    // Nobody asks for its end any more.
    drop(copying);
    drop((from, to));
    assert_eq!(fake.live(Live::DeviceBlocks), 2);
    assert_eq!(copier.poll(), Ok(1));
    assert_eq!(Arc::strong_count(&hold), 2);
    fake.advance_all();
    assert_eq!(copier.poll(), Ok(0));
    assert_eq!(Arc::strong_count(&hold), 1);
    assert_eq!(fake.live(Live::DeviceBlocks), 0);
}

#[test]
fn the_last_copier_waits_for_its_copies() {
    let fake = Fake::manual();
    let device = fake.device();
    let (from, to) = (device_slab(&device), device_slab(&device));
    let copier = Copier::new(&Stream::new(&device).unwrap());
    let copying = copier.submit(CopyBatch::one((&from, 0), (&to, 0), MIB, ()));
    fake.run_seeded(6);
    drop((copying, copier, from, to));
    assert_eq!(device.lost().count, 0);
}

#[test]
fn copies_outside_of_the_memories_are_refused_before_the_first_is_made() {
    let fake = Fake::manual();
    let device = fake.device();
    let (from, to) = (device_slab(&device), device_slab(&device));
    let copier = Copier::side(&device).unwrap();
    let spans = |span: CopySpan| {
        let mut list = slab_core::CopyList::new(2);
        let good = CopySpan {
            source: from.address(),
            destination: to.address(),
            len: 8,
        };
        let end = list.store(0, [good, span]).unwrap();
        CopyBatch::new(list, 0..end, vec![Arc::clone(&from), Arc::clone(&to)], ())
    };
    let (a, b) = (from.address(), to.address());
    for (source, destination, len) in [
        (a + MIB - 1, b, 2),
        (a, b + MIB, 1),
        (a - 1, b, 1),
        (a, 0, 1),
        (a, b, u64::MAX),
        (u64::MAX, b, 2),
    ] {
        let span = CopySpan {
            source,
            destination,
            len,
        };
        let refused = copier.submit(spans(span)).unwrap_err();
        assert!(
            matches!(refused.cause, CudaError::OutsideMemory { len: at, .. } if at == len),
            "{span:?}: {}",
            refused.cause
        );
    }
    let list = slab_core::CopyList::new(2);
    let refused = copier
        .submit(CopyBatch::new(list, 1..3, Vec::new(), ()))
        .unwrap_err();
    assert!(matches!(refused.cause, CudaError::Descriptor(_)));
    assert_eq!(fake.queued(), 0);
    // Memory of another device is not for this one.
    let second = device_slab(&fake.driver().device(1).unwrap());
    let refused = copier
        .submit(CopyBatch::one((&from, 0), (&second, 0), 1, ()))
        .unwrap_err();
    assert!(matches!(refused.cause, CudaError::OtherDevice { .. }));
}

#[test]
fn copies_of_no_bytes_are_left_out() {
    let fake = Fake::immediate();
    let device = fake.device();
    let slab = device_slab(&device);
    fake.poke(slab.address(), b"abc");
    let span = |target: u64, len| CopySpan {
        source: slab.address(),
        destination: slab.address() + target,
        len,
    };
    let mut list = slab_core::CopyList::new(3);
    let end = list
        .store(0, [span(10, 3), span(20, 0), span(30, 2)])
        .unwrap();
    let copier = Copier::side(&device).unwrap();
    let mut copying = copier
        .submit(CopyBatch::new(list, 0..end, vec![Arc::clone(&slab)], ()))
        .unwrap();
    assert_eq!(copying.poll(), Ok(true));
    assert_eq!(fake.peek(slab.address() + 10, 3), b"abc");
    assert_eq!(fake.peek(slab.address() + 30, 3), b"ab\0");
    let empty = CopyBatch::new(slab_core::CopyList::new(0), 0..0, Vec::new(), ());
    assert_eq!(copier.submit(empty).unwrap().poll(), Ok(true));
}

#[test]
fn a_copy_that_is_refused_half_way_is_told_when_the_others_have_ended() {
    for (version, symbol) in [
        (12_070, c"cuMemcpyAsync"),
        (12_080, c"cuMemcpyBatchAsync"),
        (13_000, c"cuMemcpyBatchAsync_v2"),
    ] {
        let fake = Fake::manual();
        fake.set_version(version);
        let device = fake.device();
        let (from, to) = (device_slab(&device), device_slab(&device));
        let mut list = slab_core::CopyList::new(3);
        let spans = (0..3).map(|at| CopySpan {
            source: from.address() + at * 100,
            destination: to.address() + at * 100,
            len: 10,
        });
        let end = list.store(0, spans).unwrap();
        let hold = Arc::new(());
        let memories = vec![Arc::clone(&from), Arc::clone(&to)];
        let batch = CopyBatch::new(list, 0..end, memories, Arc::clone(&hold));
        let copier = Copier::side(&device).unwrap();
        fake.inject(symbol, if version == 12_070 { 3 } else { 1 }, 2);
        let mut copying = copier.submit(batch).unwrap();
        assert_eq!(copying.poll(), Ok(false), "{version}");
        assert_eq!(Arc::strong_count(&hold), 2);
        fake.advance_all();
        let error = copying.poll().unwrap_err();
        assert!(matches!(error, CudaError::Driver { code, .. } if code.number() == 2));
        drop(copying.into_batch().expect("ended"));
        assert_eq!(Arc::strong_count(&hold), 1);
        // The stream goes on.
        let batch = CopyBatch::one((&from, 0), (&to, 0), 1, ());
        let mut next = copier.submit(batch).unwrap();
        fake.advance_all();
        assert_eq!(next.poll(), Ok(true));
    }
}

#[test]
fn a_stream_that_fails_keeps_what_its_copies_touch_for_ever() {
    let mut fake = Fake::manual();
    fake.expect_lost();
    let device = fake.device();
    let (from, to) = (device_slab(&device), device_slab(&device));
    let copier = Copier::new(&Stream::new(&device).unwrap());
    let mut copying = copier
        .submit(CopyBatch::one((&from, 0), (&to, 0), MIB, ()))
        .unwrap();
    fake.fail_stream(copier.stream(), 719);
    assert!(matches!(
        copying.poll(),
        Err(CudaError::StreamFailed { .. })
    ));
    let refused = copier
        .submit(CopyBatch::one((&from, 0), (&to, 0), 1, ()))
        .unwrap_err();
    assert!(matches!(refused.cause, CudaError::StreamFailed { .. }));
    drop((refused, copying, copier, from, to));
    assert_eq!(fake.live(Live::DeviceBlocks), 2);
    assert_eq!(device.lost().count, 1);
}

#[test]
fn batches_under_way_are_bounded() {
    let fake = Fake::manual();
    let device = fake.device();
    let slab = device_slab(&device);
    let copier = Copier::side(&device).unwrap();
    let batch = || CopyBatch::one((&slab, 0), (&slab, 512), 16, ());
    for _ in 0..1024 {
        drop(copier.submit(batch()).unwrap());
    }
    let refused = copier.submit(batch()).unwrap_err();
    let pending_max = 1024;
    assert_eq!(refused.cause, CudaError::TooManyPending { pending_max });
    fake.advance_all();
    drop(copier.submit(refused.value).unwrap());
    fake.advance_all();
    assert_eq!(copier.poll(), Ok(0));
}

#[test]
fn registered_host_memory_is_copied_like_any_other() {
    let fake = Fake::seeded(5);
    let device = fake.device();
    let host = Arc::new(HostSlab::new(MIB).unwrap());
    let bytes = pattern(3, 5000);
    host.copy_in(100, &bytes).unwrap();
    let host: Arc<dyn CudaMemory> = Arc::new(RegisteredHost::new(&device, host).unwrap());
    let slab = device_slab(&device);
    let copier = Copier::side(&device).unwrap();
    let batch = CopyBatch::one((&host, 100), (&slab, 0), 5000, ());
    copier.submit(batch).unwrap().wait(soon()).unwrap();
    assert!(fake.peek(slab.address(), 5000) == bytes);
}

#[test]
fn copies_within_host_memory_are_refused_for_the_driver_would_wait_for_the_stream() {
    let fake = Fake::manual();
    let device = fake.device();
    let slab = device_slab(&device);
    let pinned: Arc<dyn CudaMemory> = Arc::new(PinnedSlab::new(&device, 4096).unwrap());
    let copier = Copier::side(&device).unwrap();
    let refused = copier
        .submit(CopyBatch::one((&pinned, 0), (&pinned, 256), 100, ()))
        .unwrap_err();
    let address = pinned.address();
    let cause = CudaError::BothOnHost {
        from: address,
        to: address + 256,
    };
    assert_eq!(refused.into_cause(), cause);
    for (from, to) in [(&slab, &pinned), (&pinned, &slab)] {
        let batch = CopyBatch::one((from, 0), (to, 0), 100, ());
        drop(copier.submit(batch).unwrap());
    }
    fake.advance_all();
    assert_eq!(copier.poll(), Ok(0));
}
