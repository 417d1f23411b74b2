//! A device that has failed for good, as after a fault of a kernel: every call fails with the same code from then on.

mod fake;
mod pool_setup;

use std::sync::Arc;

use fake::{Fake, soon};
use pool_setup::{G, GRANULES, setup};
use slab_core::Reserve;
use slab_cuda::{Copier, CopyBatch, CudaError, DeviceSlab, PinnedSlab, Stream};
use slab_memory::{BounceDirection, CopyError, Memory};

/// `CUDA_ERROR_ILLEGAL_ADDRESS`.
const CODE: u32 = 700;

fn is_told(error: &CudaError) -> bool {
    match error {
        CudaError::Driver { code, .. } | CudaError::StreamFailed { code, .. } => {
            code.number() == CODE
        }
        _ => false,
    }
}

#[test]
fn every_call_says_so_and_what_was_in_use_is_never_reused() {
    let mut fake = Fake::manual();
    fake.expect_lost();
    let setup = setup(&fake);
    let timeline = setup.attach();
    let memory = Arc::clone(setup.timelines.memory());

    // Bytes in every state in which the device has them: released, settled, lent, under a copy.
    let released = timeline.lend(setup.allocate(1)).unwrap();
    fake.launch(released.stream(), released.address(), G, Some(1));
    released.release().unwrap();
    let settling = timeline.lend(setup.allocate(1)).unwrap().settle().unwrap();
    let lent = timeline.lend(setup.allocate(1)).unwrap();
    let copier = Copier::side(&setup.device).unwrap();
    let (from, to) = (setup.allocate(1), setup.allocate(1));
    let offsets = (from.offset(), to.offset());
    let batch = CopyBatch::one(
        (&memory, offsets.0),
        (&memory, offsets.1),
        G,
        Box::new((from, to)),
    );
    let mut copying = copier.submit(batch).unwrap();
    let slab = Arc::new(DeviceSlab::new(&setup.device, 4096).unwrap());
    let mut bounce = slab.clone().bounce(BounceDirection::Out, 0..4096).unwrap();

    fake.break_device(&setup.device, CODE);

    assert!(is_told(&setup.timelines.poll().unwrap_err()));
    assert!(is_told(&settling.wait(soon()).unwrap_err().cause));
    assert!(is_told(&lent.release().unwrap_err()));
    assert!(is_told(&copying.poll().unwrap_err()));
    let failed = CopyError::Driver { code: CODE as i32 };
    assert_eq!(bounce.buffer().unwrap_err(), failed);
    assert!(!bounce.quiesce(), "nobody knows whether it has ended");
    drop(bounce);
    assert_eq!(slab.copy_in(0, b"bytes").unwrap_err(), failed);
    assert!(is_told(&DeviceSlab::new(&setup.device, 4096).unwrap_err()));
    assert!(is_told(&PinnedSlab::new(&setup.device, 4096).unwrap_err()));
    assert!(is_told(&Stream::new(&setup.device).unwrap_err()));
    assert!(is_told(&setup.device.memory_use().unwrap_err()));
    assert!(is_told(
        &timeline.lend(setup.allocate(1)).unwrap_err().cause
    ));

    // Five granules are the device's for ever.
    let reserved = setup.pool.with(|pool, ()| pool.reserve(3 * G));
    let Reserve::Ready(free) = reserved else {
        panic!("what the device did not have is free: {reserved:?}");
    };
    let more = setup.pool.with(|pool, ()| pool.reserve(G));
    assert!(matches!(more, Reserve::Full), "{more:?}");
    drop(setup.pool.allocation_guard(free));
    let stats = setup.stats();
    assert_eq!(stats.free, (GRANULES - 5) * G, "{stats}");

    let device = setup.device.clone();
    drop((copying, copier, timeline, slab, memory, setup));
    assert!(device.lost().count > 0 && device.lost().bytes >= GRANULES * G);
    assert_eq!(fake.misuse(), [""; 0]);
}

#[test]
fn another_device_goes_on() {
    let mut fake = Fake::immediate();
    fake.expect_lost();
    let driver = fake.driver();
    let (broken, whole) = (driver.device(0).unwrap(), driver.device(1).unwrap());
    let lost = DeviceSlab::new(&broken, 4096).unwrap();
    let slab = DeviceSlab::new(&whole, 4096).unwrap();
    fake.break_device(&broken, CODE);
    slab.copy_in(0, b"bytes").unwrap();
    assert_eq!(fake.peek(slab.address(), 5), b"bytes");
    drop((lost, slab));
    assert_eq!((broken.lost().bytes, whole.lost().bytes), (4096, 0));
}
