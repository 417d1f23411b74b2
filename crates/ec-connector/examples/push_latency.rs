//! How long a push takes, beside what it is made of, in the same run.
//!
//! For each size: one push at a time from a producer to a consumer, a bare request and reply over ZeroMQ, and one
//! bare transfer over the same engine; medians, in microseconds. A push needs two requests and one transfer, so
//! the last column is `push / (2 echoes + transfer)`. Both sides run in this process, with engines of their own.
//!
//! `cargo run --release -p ec-connector --example push_latency`

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ec_connector::{
    Consumer, ConsumerConfig, Delivery, Dtype, Item, MmHash, Producer, ProducerConfig, PushId,
    Source, TakePolicy, TensorSpec,
};
use mooncake_transport::tcp::{TcpConfig, TcpEngine};
use mooncake_transport::{Access, Engine, Op, Task};
use slab_memory::{HostSlab, Memory};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const SIZES: [u64; 5] = [4 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20];
/// About as long as a reserve of vLLM's.
const ECHO_BYTES: usize = 220;

fn main() -> Result<()> {
    let echo = median(2_000, echo()?)?;
    println!("bare echo of {ECHO_BYTES} bytes: {:.0} us\n", micros(echo));
    println!("| size | transfer | push | push / (2 echoes + transfer) |");
    println!("| ---: | ---: | ---: | ---: |");
    for size in SIZES {
        // Enough to be steady, and at most about a gigabyte each.
        let runs = ((1 << 30) / size).clamp(8, 500) as usize;
        let transfer = median(runs, transfer(size)?)?;
        let push = median(runs, push(size)?)?;
        let parts = 2 * echo + transfer;
        println!(
            "| {} KiB | {:.0} | {:.0} | {:.2} |",
            size >> 10,
            micros(transfer),
            micros(push),
            push.as_secs_f64() / parts.as_secs_f64()
        );
    }
    Ok(())
}

/// The median time of `runs` calls, after a few that warm up.
fn median(runs: usize, mut call: impl FnMut() -> Result<Duration>) -> Result<Duration> {
    for _ in 0..runs / 10 + 2 {
        call()?;
    }
    let mut times = (0..runs).map(|_| call()).collect::<Result<Vec<_>>>()?;
    times.sort_unstable();
    Ok(times[runs / 2])
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

fn engine() -> Result<Arc<dyn Engine>> {
    Ok(Arc::new(TcpEngine::start(TcpConfig::default())?))
}

/// One request and its reply between two threads, over loopback TCP.
fn echo() -> Result<impl FnMut() -> Result<Duration>> {
    let context = zmq::Context::new();
    let server = context.socket(zmq::REP)?;
    server.bind("tcp://127.0.0.1:*")?;
    let endpoint = server.get_last_endpoint()?.map_err(|_| "no endpoint")?;
    // Ends with the process.
    std::thread::spawn(move || {
        while let Ok(message) = server.recv_bytes(0) {
            if server.send(message, 0).is_err() {
                break;
            }
        }
    });
    let client = context.socket(zmq::REQ)?;
    client.connect(&endpoint)?;
    Ok(move || {
        let started = Instant::now();
        client.send(vec![b'x'; ECHO_BYTES], 0)?;
        client.recv_bytes(0)?;
        Ok(started.elapsed())
    })
}

/// One write from one engine to another.
fn transfer(size: u64) -> Result<impl FnMut() -> Result<Duration>> {
    let (source, target) = (engine()?, engine()?);
    let local: Arc<dyn Memory> = Arc::new(HostSlab::new(size)?);
    let remote: Arc<dyn Memory> = Arc::new(HostSlab::new(size)?);
    let registration = target.register(Arc::clone(&remote), Access::RemoteWrite)?;
    let segment = source.open_segment(target.session())?;
    Ok(move || {
        let _keep = (&registration, &target);
        let task = Task {
            op: Op::Write,
            segment: segment.clone(),
            remote: remote.address(),
            memory: Arc::clone(&local),
            range: 0..size,
            hold: Box::new(()),
        };
        let started = Instant::now();
        let batch = source.submit(vec![task]).map_err(|refused| refused.cause)?;
        let report = batch.wait(None).ok_or("no report")?;
        let time = started.elapsed();
        if !report.is_applied() {
            return Err(format!("{report:?}").into());
        }
        Ok(time)
    })
}

/// One push of new content, read where it lies.
fn push(size: u64) -> Result<impl FnMut() -> Result<Duration>> {
    let mut config = ConsumerConfig::new(Ipv4Addr::LOCALHOST.into(), 0, 3 * size);
    config.reservations.take = TakePolicy::OnReady { taken_max: 4 };
    let consumer = Consumer::start(engine()?, config)?;
    let mut config = ProducerConfig::default();
    config.staging_bytes = 1 << 20;
    let producer = Producer::start(engine()?, config)?;
    let memory: Arc<dyn Memory> = Arc::new(HostSlab::new(size)?);
    let tensor = TensorSpec::new(Dtype::UINT8, [size])?;
    let mut serial = 0u64;
    Ok(move || {
        serial += 1;
        let item = Item {
            to: consumer.address().clone(),
            mm_hash: MmHash::new(format!("content {serial}"))?,
            tensor: tensor.clone(),
            source: Source::Memory {
                memory: Arc::clone(&memory),
                range: 0..size,
                hold: Arc::new(()),
            },
            id: PushId::Fresh,
        };
        let started = Instant::now();
        let push = producer.push(item);
        let report = push.wait(None).ok_or("no report")?;
        let time = started.elapsed();
        if report.result? != Delivery::Written {
            return Err("not written".into());
        }
        // Retired at once, so that its memory can be used again.
        drop(consumer.next_taken(None));
        Ok(time)
    })
}
