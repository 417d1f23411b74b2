//! One transfer at a time over loopback: this engine, the real engine and bare TCP, in one run.
//!
//! Run it with `cargo xtask bench transfer`, which provides the real engine. Each row is the
//! median of single transfers between two processes, taken in turns so that all see the same
//! machine; ratios come first, absolute microseconds are for orientation.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mooncake_transport::tcp::{TcpConfig, TcpEngine};
use mooncake_transport::{Access, Engine, Op, Segment, Task};
use serde_json::{Value, json};
use slab_memory::{HostSlab, Memory};

#[path = "../tests/peer/harness.rs"]
mod harness;

const SIZES: [usize; 5] = [4 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20];
const SLAB_BYTES: u64 = 64 << 20;
/// A size is measured for about this long per contender.
const BUDGET: Duration = Duration::from_secs(3);
const TURNS: usize = 5;

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.first().map(String::as_str) {
        Some("serve") => serve(),
        Some("sink") => sink(),
        Some("--json") => measure(true),
        None => measure(false),
        Some(other) => {
            Err(format!("unknown argument {other}; run it with --json or nothing").into())
        }
    }
}

/// A target of this engine: prints its session and address and ends with its input.
fn serve() -> Result<(), Failure> {
    let engine = TcpEngine::start(TcpConfig::default())?;
    let memory: Arc<dyn Memory> = Arc::new(HostSlab::new(SLAB_BYTES)?);
    let address = memory.address();
    let registration = engine.register(memory, Access::RemoteWrite)?;
    println!("{} {address}", engine.session());
    io::copy(&mut io::stdin(), &mut io::sink())?;
    drop(registration);
    Ok(())
}

/// The least a transfer can cost: two lengths and the bytes one way, bytes back.
fn sink() -> Result<(), Failure> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    println!("{}", listener.local_addr()?);
    let (mut stream, _) = listener.accept()?;
    stream.set_nodelay(true)?;
    let mut memory = vec![1_u8; SLAB_BYTES as usize];
    let mut header = [0; 16];
    while stream.read_exact(&mut header).is_ok() {
        let [there, back] = [&header[..8], &header[8..]]
            .map(|half| u64::from_le_bytes(half.try_into().expect("eight bytes")) as usize);
        stream.read_exact(&mut memory[..there])?;
        stream.write_all(&memory[..back])?;
    }
    Ok(())
}

struct Target {
    child: Child,
    line: String,
}

impl Target {
    fn start(role: &str) -> Result<Self, Failure> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg(role)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let output = child.stdout.take().ok_or("no standard output")?;
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line)?;
        Ok(Self {
            child,
            line: line.trim().to_owned(),
        })
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        // The sink waits on its socket, not on its input: end both the same way.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Way {
    Write,
    Read,
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Self::Write => "write",
            Self::Read => "read",
        }
    }
}

/// Something that moves bytes between two processes.
trait Contender {
    /// Moves `len` bytes `count` times, one after the other, and returns the seconds of each.
    fn run(&mut self, way: Way, len: usize, count: usize) -> Result<Vec<f64>, Failure>;
}

struct Ours {
    engine: TcpEngine,
    memory: Arc<dyn Memory>,
    segment: Segment,
    address: u64,
    _target: Target,
}

impl Ours {
    fn start() -> Result<Self, Failure> {
        let target = Target::start("serve")?;
        let (session, address) = target.line.split_once(' ').ok_or("no session line")?;
        let engine = TcpEngine::start(TcpConfig::default())?;
        Ok(Self {
            segment: engine.open_segment(session)?,
            memory: Arc::new(HostSlab::new(SLAB_BYTES)?),
            address: address.parse()?,
            engine,
            _target: target,
        })
    }
}

impl Contender for Ours {
    fn run(&mut self, way: Way, len: usize, count: usize) -> Result<Vec<f64>, Failure> {
        let op = match way {
            Way::Write => Op::Write,
            Way::Read => Op::Read,
        };
        (0..count)
            .map(|_| {
                let begin = Instant::now();
                let batch = self
                    .engine
                    .submit(vec![Task {
                        op,
                        segment: self.segment.clone(),
                        remote: self.address,
                        memory: Arc::clone(&self.memory),
                        range: 0..len as u64,
                        hold: Box::new(()),
                    }])
                    .map_err(|refused| refused.cause.to_string())?;
                let report = batch.wait(None).ok_or("no report")?;
                if let Some((_, failure)) = report.first_failure() {
                    return Err(format!("{failure:?}").into());
                }
                Ok(begin.elapsed().as_secs_f64())
            })
            .collect()
    }
}

struct Real {
    initiator: harness::Peer,
    session: String,
    address: u64,
    _target: harness::Peer,
}

impl Real {
    fn start() -> Result<Self, Failure> {
        let quiet = [("MC_LOG_LEVEL", "ERROR")];
        let mut target = harness::Peer::start_with(&quiet);
        let mut initiator = harness::Peer::start_with(&quiet);
        let allocate = json!({"do": "allocate", "length": SLAB_BYTES, "seed": 1});
        let address = target.call(allocate.clone())["address"]
            .as_u64()
            .ok_or("no address")?;
        target.call(json!({"do": "register", "memory": 0}));
        initiator.call(allocate);
        Ok(Self {
            session: target.session().to_owned(),
            address,
            initiator,
            _target: target,
        })
    }
}

impl Contender for Real {
    fn run(&mut self, way: Way, len: usize, count: usize) -> Result<Vec<f64>, Failure> {
        let answer = self.initiator.call(json!({
            "do": "time_transfers", "op": way.name(), "session": self.session, "offset": 0,
            "address": self.address, "length": len, "count": count,
        }));
        if answer["code"] != 0 {
            return Err(format!("the real engine failed: {answer}").into());
        }
        let seconds = answer["seconds"].as_array().ok_or("no seconds")?;
        Ok(seconds.iter().filter_map(Value::as_f64).collect())
    }
}

struct Bare {
    stream: TcpStream,
    memory: Vec<u8>,
    _target: Target,
}

impl Bare {
    fn start() -> Result<Self, Failure> {
        let target = Target::start("sink")?;
        let stream = TcpStream::connect(target.line.as_str())?;
        stream.set_nodelay(true)?;
        Ok(Self {
            stream,
            memory: vec![2; SLAB_BYTES as usize],
            _target: target,
        })
    }
}

impl Contender for Bare {
    fn run(&mut self, way: Way, len: usize, count: usize) -> Result<Vec<f64>, Failure> {
        let (there, back) = match way {
            Way::Write => (len, 8),
            Way::Read => (0, len),
        };
        (0..count)
            .map(|_| {
                let begin = Instant::now();
                let mut header = [0; 16];
                header[..8].copy_from_slice(&(there as u64).to_le_bytes());
                header[8..].copy_from_slice(&(back as u64).to_le_bytes());
                self.stream.write_all(&header)?;
                self.stream.write_all(&self.memory[..there])?;
                self.stream.read_exact(&mut self.memory[..back])?;
                Ok(begin.elapsed().as_secs_f64())
            })
            .collect()
    }
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

/// Medians in microseconds, in the order of `contenders`, which take turns.
fn row(
    contenders: &mut [Box<dyn Contender>; 3],
    way: Way,
    len: usize,
) -> Result<[f64; 3], Failure> {
    let mut seconds: [Vec<f64>; 3] = Default::default();
    let mut counts = [0; 3];
    for (count, contender) in counts.iter_mut().zip(contenders.iter_mut()) {
        let once = median(contender.run(way, len, 5)?);
        let turn = BUDGET.as_secs_f64() / TURNS as f64;
        *count = ((turn / once) as usize).clamp(5, 2_000);
    }
    for _ in 0..TURNS {
        for ((taken, contender), count) in seconds.iter_mut().zip(contenders.iter_mut()).zip(counts)
        {
            taken.extend(contender.run(way, len, count)?);
        }
    }
    Ok(seconds.map(|taken| median(taken) * 1e6))
}

fn measure(as_json: bool) -> Result<(), Failure> {
    let mut contenders: [Box<dyn Contender>; 3] = [
        Box::new(Ours::start()?),
        Box::new(Real::start()?),
        Box::new(Bare::start()?),
    ];
    if !as_json {
        println!("one transfer at a time between two processes over loopback, medians");
        println!(
            "{:<6} {:>9} {:>13} {:>12} | {:>10} {:>10} {:>10}",
            "way", "bytes", "real / ours", "ours / bare", "ours us", "real us", "bare us"
        );
    }
    for way in [Way::Write, Way::Read] {
        for len in SIZES {
            let [ours, real, bare] = row(&mut contenders, way, len)?;
            let name = way.name();
            if as_json {
                println!(
                    "{}",
                    json!({
                        "bench": "transfer", "way": name, "bytes": len,
                        "real_over_ours": real / ours, "ours_over_bare": ours / bare,
                        "ours_us": ours, "real_us": real, "bare_us": bare,
                    })
                );
            } else {
                println!(
                    "{name:<6} {len:>9} {:>13.2} {:>12.2} | {ours:>10.1} {real:>10.1} {bare:>10.1}",
                    real / ours,
                    ours / bare
                );
            }
        }
    }
    Ok(())
}
