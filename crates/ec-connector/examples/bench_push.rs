//! One push at a time over loopback, beside what it is made of: a bare echo and a bare transfer.
//!
//! Run it with `cargo xtask bench push`. Consumer, echo and transfer target live in a second
//! process; the three take turns, so that all see the same machine. A push is a reserve, a
//! transfer and a complete, so two echoes and a transfer are what it cannot be faster than.

use std::io::{self, BufRead, BufReader};
use std::net::{IpAddr, Ipv4Addr};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ec_connector::{
    Consumer, ConsumerConfig, ControlAddress, Delivery, Dtype, Item, MmHash, Producer,
    ProducerConfig, PushId, Source, TakePolicy, TensorSpec,
};
use mooncake_transport::tcp::{TcpConfig, TcpEngine};
use mooncake_transport::{Access, Engine, Op, Segment, Task};
use slab_memory::{HostSlab, Memory};

const SIZES: [u64; 5] = [4 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20];
const LARGEST: u64 = 64 << 20;
const POOL_BYTES: u64 = 512 << 20;
/// A size is measured for about this long per contender.
const BUDGET: Duration = Duration::from_secs(3);
const TURNS: usize = 5;

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.first().map(String::as_str) {
        Some("serve") => serve(),
        Some("--json") => measure(true),
        None => measure(false),
        Some(other) => {
            Err(format!("unknown argument {other}; run it with --json or nothing").into())
        }
    }
}

/// The other process: prints where everything is, and ends with its input.
fn serve() -> Result<(), Failure> {
    let engine: Arc<dyn Engine> = Arc::new(TcpEngine::start(TcpConfig::default())?);
    let mut config = ConsumerConfig::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0, POOL_BYTES);
    config.reservations.take = TakePolicy::OnReady { taken_max: 16 };
    let consumer = Consumer::start(Arc::clone(&engine), config)?;

    let target: Arc<dyn Memory> = Arc::new(HostSlab::new(LARGEST)?);
    let address = target.address();
    let registration = engine.register(target, Access::RemoteWrite)?;

    let context = zmq::Context::new();
    let echo = context.socket(zmq::REP)?;
    echo.bind("tcp://127.0.0.1:*")?;
    let endpoint = echo
        .get_last_endpoint()?
        .map_err(|_| "the echo's endpoint is no text")?;
    println!(
        "{} {} {address} {endpoint}",
        consumer.address(),
        engine.session()
    );
    // Both end with the process.
    std::thread::spawn(move || {
        while let Ok(message) = echo.recv_bytes(0) {
            if echo.send(message, 0).is_err() {
                return;
            }
        }
    });
    std::thread::spawn(move || {
        let _kept = registration;
        while consumer.next_taken(None).is_some() {}
    });
    io::copy(&mut io::stdin(), &mut io::sink())?;
    Ok(())
}

struct Server {
    child: Child,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct Bench {
    producer: Producer,
    engine: Arc<dyn Engine>,
    memory: Arc<dyn Memory>,
    consumer: ControlAddress,
    segment: Segment,
    address: u64,
    echo: zmq::Socket,
    pushed: u64,
    _server: Server,
}

impl Bench {
    fn start() -> Result<Self, Failure> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg("serve")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let output = child.stdout.take().ok_or("no standard output")?;
        let server = Server { child };
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line)?;
        let [consumer, session, address, endpoint] = line
            .split_whitespace()
            .collect::<Vec<_>>()
            .try_into()
            .map_err(|_| format!("the second process said {line:?}"))?;

        let engine: Arc<dyn Engine> = Arc::new(TcpEngine::start(TcpConfig::default())?);
        let echo = zmq::Context::new().socket(zmq::REQ)?;
        echo.connect(endpoint)?;
        Ok(Self {
            producer: Producer::start(Arc::clone(&engine), ProducerConfig::default())?,
            segment: engine.open_segment(session)?,
            memory: Arc::new(HostSlab::new(LARGEST)?),
            consumer: ControlAddress::parse(consumer)?,
            address: address.parse()?,
            engine,
            echo,
            pushed: 0,
            _server: server,
        })
    }

    /// A request of the size of a reserve, there and back.
    fn echo(&mut self, _: u64) -> Result<(), Failure> {
        self.echo.send(&[b'x'; 200][..], 0)?;
        self.echo.recv_bytes(0)?;
        Ok(())
    }

    fn transfer(&mut self, len: u64) -> Result<(), Failure> {
        let batch = self
            .engine
            .submit(vec![Task {
                op: Op::Write,
                segment: self.segment.clone(),
                remote: self.address,
                memory: Arc::clone(&self.memory),
                range: 0..len,
                hold: Box::new(()),
            }])
            .map_err(|refused| refused.cause.to_string())?;
        let report = batch.wait(None).ok_or("no report")?;
        match report.first_failure() {
            Some((_, failure)) => Err(format!("{failure:?}").into()),
            None => Ok(()),
        }
    }

    fn push(&mut self, len: u64) -> Result<(), Failure> {
        self.pushed += 1;
        let push = self.producer.push(Item {
            to: self.consumer.clone(),
            mm_hash: MmHash::new(format!("{:064x}", self.pushed))?,
            tensor: TensorSpec::new(Dtype::BFLOAT16, vec![len / 2])?,
            source: Source::Memory {
                memory: Arc::clone(&self.memory),
                range: 0..len,
                hold: Arc::new(()),
            },
            id: PushId::Fresh,
        });
        match push.wait(None).ok_or("no report")?.result? {
            Delivery::Written => Ok(()),
            other => Err(format!("the push was {other:?}, not written").into()),
        }
    }

    /// Medians in seconds of an echo, a transfer and a push, which take turns.
    fn row(&mut self, len: u64) -> Result<[f64; 3], Failure> {
        let actions = [Self::echo, Self::transfer, Self::push];
        let mut counts = [0; 3];
        for (count, action) in counts.iter_mut().zip(actions) {
            let once = median(self.times(action, len, 5)?);
            let turn = BUDGET.as_secs_f64() / TURNS as f64;
            *count = ((turn / once) as usize).clamp(5, 1_000);
        }
        let mut seconds: [Vec<f64>; 3] = Default::default();
        for _ in 0..TURNS {
            for ((taken, action), count) in seconds.iter_mut().zip(actions).zip(counts) {
                taken.extend(self.times(action, len, count)?);
            }
        }
        Ok(seconds.map(median))
    }

    fn times(
        &mut self,
        action: fn(&mut Self, u64) -> Result<(), Failure>,
        len: u64,
        count: usize,
    ) -> Result<Vec<f64>, Failure> {
        (0..count)
            .map(|_| {
                let begin = Instant::now();
                action(self, len)?;
                Ok(begin.elapsed().as_secs_f64())
            })
            .collect()
    }
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

fn measure(as_json: bool) -> Result<(), Failure> {
    let mut bench = Bench::start()?;
    if !as_json {
        println!("one push at a time between two processes over loopback, medians");
        println!(
            "{:>9} {:>32} | {:>10} {:>10} {:>12} {:>8}",
            "bytes", "push / (2 echoes + 1 transfer)", "push us", "echo us", "transfer us", "GB/s"
        );
    }
    for len in SIZES {
        let [echo, transfer, push] = bench.row(len)?.map(|seconds| seconds * 1e6);
        let ratio = push / (2.0 * echo + transfer);
        let gb_per_s = len as f64 / push / 1e3;
        if as_json {
            println!(
                "{}",
                serde_json::json!({
                    "bench": "push", "bytes": len, "push_over_parts": ratio, "push_us": push,
                    "echo_us": echo, "transfer_us": transfer, "gb_per_s": gb_per_s,
                })
            );
        } else {
            println!(
                "{len:>9} {ratio:>32.2} | {push:>10.1} {echo:>10.1} {transfer:>12.1} {gb_per_s:>8.2}"
            );
        }
    }
    Ok(())
}
