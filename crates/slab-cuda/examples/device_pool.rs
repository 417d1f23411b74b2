//! The example of the README: a pool over the memory of a device, and a loan of some of it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use slab_core::{Pool, PoolConfig, PoolId, Reserve, SharedPool};
use slab_cuda::{CudaMemory, DeviceSlab, Driver, Stream, Timelines, TimelinesConfig};

pub(crate) fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = match Driver::load().and_then(|driver| driver.device(0)) {
        Ok(device) => device,
        Err(error) => {
            println!("{error}"); // what is missing, and what to do about it
            return Ok(());
        }
    };
    let slab: Arc<dyn CudaMemory> = Arc::new(DeviceSlab::new(&device, 64 << 20)?);
    let pool = Pool::<&str, ()>::new(PoolConfig::new(PoolId::new(), slab.len()))?;
    let pool = SharedPool::new(pool, ());
    let timelines = Timelines::new(&pool, slab.clone(), TimelinesConfig::default())?;
    let stream = Stream::new(&device)?; // or `Stream::from_raw`, for the stream of a framework
    let timeline = timelines.attach(&stream)?;

    // An engine, or a copy, fills a region, which is then published.
    let Reserve::Ready(bytes) = pool.with(|pool, _| pool.reserve(1 << 20)) else {
        panic!("the pool is full")
    };
    slab.copy_in(bytes.offset(), &[7; 1 << 20])?; // a token that is dropped frees nothing: the device may still write
    let lease = pool
        .with(|pool, _| pool.publish("image", bytes, ()))
        .expect("own token");

    // A kernel reads it: the address is lent, and the end of the loan records an event.
    let loan = timeline.lend(pool.lease_guard(lease).expect("own token"))?;
    println!(
        "launch a kernel over {} bytes at {:#x}",
        loan.len(),
        loan.address()
    );
    loan.release()?;

    // Whoever needs the bytes gets them once that event is passed.
    timelines.drain(Instant::now() + Duration::from_secs(1))?;
    let Reserve::Ready(all) = pool.with(|pool, _| pool.reserve(64 << 20)) else {
        panic!("the kernel still reads")
    };
    drop(pool.allocation_guard(all));
    Ok(())
}
