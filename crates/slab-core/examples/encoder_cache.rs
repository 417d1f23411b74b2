//! A consumer's cache of encoder outputs on one device slab, in miniature.
//!
//! `cargo run -p slab-core --example encoder_cache`
//!
//! A writer thread fills regions, the main thread reads them on a "stream" (a timeline that it advances
//! itself) and gives them back after a fence. The slab map shows who owns what after each step.

use std::error::Error;
use std::thread;
use std::time::{Duration, Instant};

use slab_core::{Pool, PoolConfig, PoolId, Reserve, RunState, SharedPool};

/// What the bytes of an image must agree with.
#[derive(Debug, PartialEq, Eq)]
struct Shape {
    tokens: u32,
    hidden: u32,
}

type Cache = SharedPool<String, Shape>;

const ELEMENT: u64 = 2; // bf16

fn main() -> Result<(), Box<dyn Error>> {
    let pool = Pool::new(PoolConfig::new(PoolId::new(), 16 << 20))?;
    let cache = Cache::new(pool, ());
    let stream = cache.with(|pool, ()| pool.add_timeline())?;

    for (name, tokens) in [("cat", 1024), ("dog", 576), ("owl", 256)] {
        store(
            &cache,
            name,
            Shape {
                tokens,
                hidden: 3584,
            },
        )?;
    }
    show(&cache, "three images are resident, nobody reads them");

    // A kernel reads "cat" on the stream; its work ends at 1.
    let cat = cache.acquire("cat").ok_or("just stored")?;
    show(&cache, "one is leased");
    cat.release_after(&[stream.fence(1)])?;
    show(&cache, "its lease has ended, the kernel may still read");

    // Larger than what is free: the coldest go, and the bytes of "cat" must wait for the kernel.
    let large = 1500 * 3584 * ELEMENT;
    let Reserve::Later(claim) = cache.with(|pool, ()| pool.reserve(large)) else {
        return Err("the kernel still reads".into());
    };
    show(&cache, "neighbours gave way, their window is withheld");

    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(20));
            cache.with(|pool, ()| pool.handle_reached(stream, 1))
        });
        let deadline = Instant::now() + Duration::from_secs(5);
        let mut claim = Some(claim);
        let bytes = cache
            .wait_until(Some(deadline), |pool, ()| {
                match pool.poll_claim(claim.take()?) {
                    Ok(bytes) => Some(bytes),
                    Err(pending) => {
                        claim = Some(pending);
                        None
                    }
                }
            })
            .ok_or("the kernel never ended")?;
        show(&cache, "the kernel is done, the bytes are ours");
        println!(
            "reclaimed: {:?}",
            cache.with(|pool, ()| pool.drain_reclaimed())
        );
        drop(cache.allocation_guard(bytes)?);
        Ok::<(), Box<dyn Error>>(())
    })?;
    println!("{}", cache.with(|pool, ()| pool.stats()));
    Ok(())
}

/// Reserves, "writes" and publishes an image, and retires it at once: resident, evictable.
fn store(cache: &Cache, name: &str, shape: Shape) -> Result<(), Box<dyn Error>> {
    let len = u64::from(shape.tokens) * u64::from(shape.hidden) * ELEMENT;
    let Reserve::Ready(bytes) = cache.with(|pool, ()| pool.reserve(len)) else {
        return Err(format!("no room for {len} bytes").into());
    };
    // If the write failed here, dropping the guard would give the bytes back.
    let guard = cache.allocation_guard(bytes)?;
    println!("writing {name} to {:?}", guard.region());
    let lease = cache
        .with(|pool, ()| pool.publish(name.to_owned(), guard.into_allocation(), shape))
        .map_err(|refused| refused.cause)?;
    drop(cache.lease_guard(lease)?);
    Ok(())
}

fn show(cache: &Cache, what: &str) {
    let map: Vec<String> = cache.with(|pool, ()| {
        pool.runs()
            .map(|run| {
                let state = match run.state {
                    RunState::Free => "free",
                    RunState::Caller => "owned",
                    RunState::Resident { leases: 0 } => "idle",
                    RunState::Resident { .. } => "leased",
                    RunState::Waiting => "waiting",
                    RunState::Claimed => "claimed",
                    _ => "quarantined",
                };
                format!("{state} {} KiB", run.region.len() >> 10)
            })
            .collect()
    });
    println!("{what}\n    [{}]", map.join(" | "));
}
