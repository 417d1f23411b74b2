//! Moves bytes between two engines and says how fast.
//!
//! `cargo run --release -p mooncake-transport --example transfer`

use std::error::Error;
use std::sync::Arc;
use std::time::Instant;

use mooncake_transport::tcp::{TcpConfig, TcpEngine};
use mooncake_transport::{Access, Engine, Op, Task};
use slab_memory::{HostSlab, Memory};

fn main() -> Result<(), Box<dyn Error>> {
    const SLAB_LEN: u64 = 64 << 20;
    // In real life the target is another process; all the source needs is its session name and,
    // by whatever channel, the address of the memory.
    let target = TcpEngine::start(TcpConfig::default())?;
    let remote = Arc::new(HostSlab::new(SLAB_LEN)?);
    let _registration = target.register(remote.clone(), Access::RemoteWrite)?;

    let source = TcpEngine::start(TcpConfig::default())?;
    let local: Arc<dyn Memory> = Arc::new(HostSlab::new(SLAB_LEN)?);
    local.copy_in(0, b"hello, segment")?;
    let segment = source.open_segment(target.session())?;

    println!("{:>10}  {:>10}  {:>10}", "bytes", "write us", "read us");
    for len in [4 << 10, 64 << 10, 1 << 20, 8 << 20, SLAB_LEN] {
        let mut medians = Vec::new();
        for op in [Op::Write, Op::Read] {
            let mut times = Vec::new();
            for _ in 0..if len > 1 << 20 { 20 } else { 200 } {
                let task = Task {
                    op,
                    segment: segment.clone(),
                    remote: remote.address(),
                    memory: Arc::clone(&local),
                    range: 0..len,
                    hold: Box::new(()),
                };
                let start = Instant::now();
                let batch = source.submit(vec![task])?;
                let report = batch.wait(None).ok_or("a wait without deadline ended")?;
                times.push(start.elapsed());
                if let Some((_, failure)) = report.first_failure() {
                    return Err(format!("{op:?} of {len} bytes failed: {failure:?}").into());
                }
            }
            times.sort();
            medians.push(times[times.len() / 2].as_secs_f64() * 1e6);
        }
        println!("{len:>10}  {:>10.1}  {:>10.1}", medians[0], medians[1]);
    }

    let mut greeting = [0; 14];
    remote.copy_out(0, &mut greeting)?;
    println!(
        "the target now holds {:?}",
        String::from_utf8_lossy(&greeting)
    );
    Ok(())
}
