//! What things take on a device: medians, for orientation, beside the same on the host where there is one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use mooncake_transport::{Access, Engine, Op};
use slab_cuda::{Copier, CopyBatch, CudaMemory, Device, PinnedSlab, RegisteredHost, Stream};
use slab_memory::{HostSlab, Memory};

use crate::Effort;
use crate::checks::{copy, device_slab, engine, pair, push, transfer};
use crate::pool::{Items, soon, submit};

pub(crate) fn run(device: &Device, effort: Effort) -> Result<()> {
    println!(
        "\n## Figures\n\nMedians of {} each. Who waits for the device looks without a pause at first and every 50 us later.",
        effort.repeat
    );
    copies(device, effort)?;
    lists(device, effort)?;
    events(device, effort)?;
    reclaim(device, effort)?;
    transfers(device, effort)?;
    pushes(device, effort)
}

/// Median of the times of `count` calls, after one that is not counted.
fn median(count: usize, mut call: impl FnMut() -> Result<()>) -> Result<Duration> {
    call()?;
    let mut times = Vec::with_capacity(count);
    for _ in 0..count {
        let begin = Instant::now();
        call()?;
        times.push(begin.elapsed());
    }
    times.sort_unstable();
    times
        .get(count / 2)
        .copied()
        .context("nothing was measured")
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

fn rate(len: u64, time: Duration) -> f64 {
    len as f64 / time.as_secs_f64().max(1e-9) / 1e9
}

/// Sizes up to the largest, each 16 times the one before.
fn sizes(effort: Effort) -> impl Iterator<Item = u64> {
    [4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20]
        .into_iter()
        .filter(move |len| *len <= effort.largest)
}

fn copies(device: &Device, effort: Effort) -> Result<()> {
    println!(
        "\n| one copy, submitted and waited for | bytes | us | GB/s |\n| --- | ---: | ---: | ---: |"
    );
    let len = effort.largest;
    let there = device_slab(device, len)?;
    let other = device_slab(device, len)?;
    let pinned: Arc<dyn CudaMemory> = Arc::new(PinnedSlab::new(device, len)?);
    let host = Arc::new(HostSlab::new(len)?) as Arc<dyn Memory>;
    let registered: Arc<dyn CudaMemory> =
        Arc::new(RegisteredHost::new(device, host).map_err(|refused| refused.cause)?);
    let copier = Copier::side(device)?;
    let rows = [
        ("pinned to device", &pinned, &there),
        ("device to pinned", &there, &pinned),
        ("registered to device", &registered, &there),
        ("device to registered", &there, &registered),
        ("device to device", &there, &other),
    ];
    for (what, from, to) in rows {
        for len in sizes(effort) {
            let time = median(effort.repeat, || copy(&copier, from, to, len))?;
            println!(
                "| {what} | {len} | {:.1} | {:.2} |",
                micros(time),
                rate(len, time)
            );
        }
    }
    Ok(())
}

fn lists(device: &Device, effort: Effort) -> Result<()> {
    const COUNT: u64 = 512;
    const LEN: u64 = 4 << 10;
    println!(
        "\n| {COUNT} copies of {LEN} bytes, device to device | us | a copy, us |\n| --- | ---: | ---: |"
    );
    let from = device_slab(device, COUNT * LEN)?;
    let to = device_slab(device, COUNT * LEN)?;
    let copier = Copier::side(device)?;
    let wait = |mut copying: slab_cuda::Copying| -> Result<()> { Ok(copying.wait(soon())?) };
    let one_call = median(effort.repeat, || {
        let mut list = slab_core::CopyList::new(COUNT as usize);
        // In the opposite order at the target, so that no two are neighbours on both sides.
        let spans = (0..COUNT).map(|at| slab_core::CopySpan {
            source: from.address() + at * LEN,
            destination: to.address() + (COUNT - 1 - at) * LEN,
            len: LEN,
        });
        let places = list.store(0, spans)?;
        let memories = vec![Arc::clone(&from), Arc::clone(&to)];
        wait(submit(
            &copier,
            CopyBatch::new(list, 0..places, memories, ()),
        )?)
    })?;
    let many_calls = median(effort.repeat, || {
        let mut last = None;
        for at in 0..COUNT {
            let batch = CopyBatch::one((&from, at * LEN), (&to, (COUNT - 1 - at) * LEN), LEN, ());
            last = Some(submit(&copier, batch)?);
        }
        last.map_or(Ok(()), wait)
    })?;
    for (what, time) in [
        ("as one list", one_call),
        ("as as many batches", many_calls),
    ] {
        println!(
            "| {what} | {:.1} | {:.2} |",
            micros(time),
            micros(time) / COUNT as f64
        );
    }
    Ok(())
}

fn events(device: &Device, effort: Effort) -> Result<()> {
    println!("\n| timelines | us |\n| --- | ---: |");
    let memory = device_slab(device, 1 << 20)?;
    let mut items = Items::over(&memory)?;
    let stream = Stream::new(device)?;
    let timeline = items.timelines.attach(&stream)?;
    let allocation = items.reserve(4096)?;
    let _owner = items.publish(1, allocation)?;
    let acquire = || items.pool.acquire(&1).context("it is resident");
    let lend = median(effort.repeat, || {
        let loan = timeline.lend(acquire()?).map_err(|refused| refused.cause)?;
        Ok(loan.release()?)
    })?;
    items.timelines.drain(soon())?;
    let idle = median(effort.repeat, || {
        items.timelines.poll()?;
        Ok(())
    })?;
    let round = median(effort.repeat, || {
        let loan = timeline.lend(acquire()?).map_err(|refused| refused.cause)?;
        loan.release()?;
        while items.timelines.poll()? > 0 {}
        Ok(())
    })?;
    let rows = [
        ("lend a lease and release it behind an event", lend),
        ("poll with nothing pending", idle),
        ("lend, release, and poll until the event is passed", round),
    ];
    for (what, time) in rows {
        println!("| {what} | {:.2} |", micros(time));
    }
    Ok(())
}

/// Items through a full pool, each read by a stream: what a reserve takes, and how many go through.
fn reclaim(device: &Device, effort: Effort) -> Result<()> {
    const ITEM: u64 = 256 << 10;
    let memory = device_slab(device, 16 << 20)?;
    let scratch = device_slab(device, ITEM)?;
    let mut items = Items::over(&memory)?;
    let stream = Stream::new(device)?;
    let timeline = items.timelines.attach(&stream)?;
    let copier = Copier::new(&stream);
    let count = (effort.repeat * 20) as u64;
    let mut reserves = Vec::new();
    let mut last = None;
    let begin = Instant::now();
    for key in 0..count {
        let asked = Instant::now();
        let allocation = items.reserve(ITEM)?;
        reserves.push(asked.elapsed());
        let offset = allocation.offset();
        let lease = items.publish(key, allocation)?;
        let loan = timeline.lend(lease).map_err(|refused| refused.cause)?;
        let batch = CopyBatch::one((&memory, offset), (&scratch, 0), ITEM, ());
        last = Some(submit(&copier, batch)?);
        loan.release()?;
    }
    // The copies of one stream end in order.
    last.map_or(Ok(()), |mut last| last.wait(soon()))?;
    let seconds = begin.elapsed().as_secs_f64();
    items.timelines.drain(soon())?;
    reserves.sort_unstable();
    let at = |share: f64| reserves[((reserves.len() - 1) as f64 * share) as usize];
    println!(
        "\nReclaim under load: {count} items of 256 KiB through a pool of 64, each read by a stream and released behind it: {:.0} a second; \
         a reserve takes {:.2} us (median), {:.2} us (99 %); {} answers were \"later\" or \"full\".",
        count as f64 / seconds,
        micros(at(0.5)),
        micros(at(0.99)),
        items.refused,
    );
    Ok(())
}

fn transfers(device: &Device, effort: Effort) -> Result<()> {
    println!(
        "\n| one write over TCP on this host | bytes | device to device, us | GB/s | host to host, us | device / host |\n\
         | --- | ---: | ---: | ---: | ---: | ---: |"
    );
    let (initiator, target) = (engine()?, engine()?);
    for len in sizes(effort) {
        let measure = |remote: Arc<dyn Memory>, local: Arc<dyn Memory>| {
            let registration = target.register(Arc::clone(&remote), Access::RemoteWrite)?;
            let peer = (target.session(), remote.address());
            let time = median(effort.repeat, || {
                transfer(&*initiator, Op::Write, peer, &local, len)
            })?;
            registration.unregister()?;
            anyhow::Ok(time)
        };
        let on_device = measure(device_slab(device, len)?, device_slab(device, len)?)?;
        let on_host = measure(Arc::new(HostSlab::new(len)?), Arc::new(HostSlab::new(len)?))?;
        println!(
            "| write | {len} | {:.1} | {:.2} | {:.1} | {:.2} |",
            micros(on_device),
            rate(len, on_device),
            micros(on_host),
            on_device.as_secs_f64() / on_host.as_secs_f64()
        );
    }
    Ok(())
}

fn pushes(device: &Device, effort: Effort) -> Result<()> {
    println!(
        "\n| one push on this host | bytes | device to device, us | GB/s | host to host, us | device / host |\n\
         | --- | ---: | ---: | ---: | ---: | ---: |"
    );
    let pool = 4 * effort.largest;
    for len in sizes(effort) {
        let mut serial = 0;
        let mut measure = |memory: Arc<dyn Memory>, source: Arc<dyn Memory>| {
            let (consumer, producer) = pair(memory, 4)?;
            let time = median(effort.repeat, || {
                serial += 1;
                push(
                    &producer,
                    &consumer,
                    &format!("{len}-{serial}"),
                    &source,
                    len,
                )?;
                // Dropped at once: its bytes are for the next ones.
                consumer
                    .next_taken(Some(soon()))
                    .context("nothing arrived")?;
                Ok(())
            })?;
            producer.close();
            consumer.shutdown(soon())?;
            anyhow::Ok(time)
        };
        let on_device = measure(device_slab(device, pool)?, device_slab(device, len)?)?;
        let on_host = measure(
            Arc::new(HostSlab::new(pool)?),
            Arc::new(HostSlab::new(len)?),
        )?;
        println!(
            "| push | {len} | {:.1} | {:.2} | {:.1} | {:.2} |",
            micros(on_device),
            rate(len, on_device),
            micros(on_host),
            on_device.as_secs_f64() / on_host.as_secs_f64()
        );
    }
    Ok(())
}
