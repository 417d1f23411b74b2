//! A device that does not get on: whoever waits for it gives up, and all of them after ten seconds together.

mod fake;

use std::sync::Arc;
use std::time::{Duration, Instant};

use fake::Fake;
use slab_cuda::{CudaMemory, DeviceSlab};
use slab_memory::{BounceDirection, CopyError, Memory};

/// The limit that is waited for in earnest, once.
const LIMIT: Duration = Duration::from_secs(10);

#[test]
fn copies_that_do_not_end_are_given_up_together() {
    let mut fake = Fake::manual();
    fake.expect_lost();
    let slab = Arc::new(DeviceSlab::new(&fake.device(), 1 << 20).unwrap());
    let begin = |_| {
        let memory: Arc<dyn Memory> = slab.clone();
        memory.bounce(BounceDirection::Out, 0..600_000).unwrap()
    };
    let mut bounces: Vec<_> = (0..20).map(begin).collect();
    let start = Instant::now();
    // CUDA_ERROR_TIMEOUT, and the copy may still come.
    let copied = slab.copy_in(0, b"bytes");
    assert_eq!(copied, Err(CopyError::Unsettled { code: 909 }));
    assert!(start.elapsed() >= LIMIT);
    let start = Instant::now();
    for bounce in &mut bounces {
        assert!(!bounce.quiesce());
    }
    let waited = start.elapsed();
    assert!(waited < LIMIT, "{waited:?} for twenty more");
    println!("counted: twenty bounces more were given up in {waited:?}");

    // The device gets on after all: what stands behind the lost copies ends, and nothing of them is reused.
    fake.run_immediately();
    slab.copy_in(700_000, b"bytes").unwrap();
    assert_eq!(fake.peek(slab.address() + 700_000, 5), b"bytes");
    let device = slab.device().clone();
    drop((bounces, slab));
    assert!(device.lost().count > 20, "{:?}", device.lost());
}
