//! Tensors through the pipe over loopback: two processes of ours, and two of the old kind.
//!
//! Run it with `cargo xtask bench pipe`, which provides the real engine for the old kind. The
//! contenders take turns within one run; ratios come first, absolute numbers are for orientation.
//!
//! The old pipe hands its caller an array, which is a copy of what the engine read. Ours leaves a tensor
//! in the slab that it was read to; *copied* is ours with the same copy made by the caller.

use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use mooncake_transport::pipe::{Dtype, Message, Pipe, PipeConfig, PipeOptions, Role, Tensor};
use serde_json::{Value, json};

#[path = "../tests/pipe_support/mod.rs"]
mod pipe_support;
#[path = "../tests/peer/process.rs"]
mod process;

use process::Process;

const ROUND_TRIPS: [usize; 3] = [4 << 10, 64 << 10, 1 << 20];
const STREAMS: [usize; 2] = [1 << 20, 64 << 20];
/// A row is measured for about this long per contender.
const BUDGET: Duration = Duration::from_secs(4);
const TURNS: usize = 5;
const WAIT: Duration = Duration::from_secs(60);

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["serve", path] => serve(Path::new(path)),
        ["--json"] => measure(true),
        [] => measure(false),
        _ => Err("run it with --json or nothing".into()),
    }
}

/// The far side of ours: obeys lines `echo COUNT`, `take COUNT` and `copy COUNT`.
fn serve(path: &Path) -> Result<(), Failure> {
    let config = PipeConfig::from_file(path)?;
    let mut pipe = Pipe::start(&config, Role::Decode, 0, options())?;
    println!("ready");
    let mut bytes = Vec::new();
    for line in io::stdin().lines() {
        let line = line?;
        let (what, count) = line.split_once(' ').ok_or("no count")?;
        for _ in 0..count.parse::<usize>()? {
            let Message::Tensor(tensor) = pipe.receiver().recv(WAIT)? else {
                return Err("no tensor".into());
            };
            if what == "take" {
                continue;
            }
            bytes.resize(usize::try_from(tensor.len())?, 0);
            tensor.copy_out(0, &mut bytes)?;
            let shape = tensor.shape().to_vec();
            drop(tensor);
            if what == "echo" {
                pipe.sender().send(tensor_of(&shape, &bytes), WAIT)?;
            }
        }
        pipe.sender().flush(WAIT)?;
        println!("done");
    }
    Ok(())
}

fn options() -> PipeOptions {
    PipeOptions::default()
}

fn tensor_of<'a>(shape: &'a [u64], bytes: &'a [u8]) -> Tensor<'a> {
    Tensor {
        dtype: Dtype::U8,
        shape,
        bytes,
    }
}

/// Two ends of one kind of pipe.
trait Contender {
    /// Sends a tensor there and back `count` times, and returns the seconds of each.
    fn round_trips(&mut self, len: usize, count: usize) -> Result<Vec<f64>, Failure>;

    /// Sends `count` tensors one way, and returns the seconds until the last was answered.
    fn stream(&mut self, len: usize, count: usize) -> Result<f64, Failure>;
}

struct Ours {
    pipe: Pipe,
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    /// What the far side does with a stream.
    taking: &'static str,
    _directory: tempfile::TempDir,
}

impl Ours {
    fn start(taking: &'static str) -> Result<Self, Failure> {
        let (directory, path) = configuration()?;
        let mut child = Command::new(std::env::current_exe()?)
            .arg("serve")
            .arg(&path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut ours = Self {
            input: child.stdin.take().ok_or("no standard input")?,
            output: BufReader::new(child.stdout.take().ok_or("no standard output")?),
            child,
            pipe: Pipe::start(&PipeConfig::from_file(&path)?, Role::Prefill, 0, options())?,
            taking,
            _directory: directory,
        };
        ours.expect("ready")?;
        Ok(ours)
    }

    fn tell(&mut self, what: &str, count: usize) -> Result<(), Failure> {
        writeln!(self.input, "{what} {count}")?;
        Ok(())
    }

    fn expect(&mut self, expected: &str) -> Result<(), Failure> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        if line.trim() == expected {
            Ok(())
        } else {
            Err(format!("the far side says {line:?}").into())
        }
    }
}

impl Drop for Ours {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Contender for Ours {
    fn round_trips(&mut self, len: usize, count: usize) -> Result<Vec<f64>, Failure> {
        self.tell("echo", count)?;
        let (shape, sent) = ([len as u64], vec![1; len]);
        let mut received = vec![0; len];
        let mut seconds = Vec::with_capacity(count);
        for _ in 0..count {
            let begin = Instant::now();
            self.pipe.sender().send(tensor_of(&shape, &sent), WAIT)?;
            let Message::Tensor(tensor) = self.pipe.receiver().recv(WAIT)? else {
                return Err("no tensor".into());
            };
            tensor.copy_out(0, &mut received)?;
            seconds.push(begin.elapsed().as_secs_f64());
        }
        self.pipe.sender().flush(WAIT)?;
        self.expect("done")?;
        Ok(seconds)
    }

    fn stream(&mut self, len: usize, count: usize) -> Result<f64, Failure> {
        self.tell(self.taking, count)?;
        let (shape, sent) = ([len as u64], vec![1; len]);
        let begin = Instant::now();
        for _ in 0..count {
            self.pipe.sender().send(tensor_of(&shape, &sent), WAIT)?;
        }
        self.pipe.sender().flush(WAIT)?;
        let seconds = begin.elapsed().as_secs_f64();
        self.expect("done")?;
        Ok(seconds)
    }
}

struct Old {
    near: Process,
    far: Process,
    _directory: tempfile::TempDir,
}

impl Old {
    fn start() -> Result<Self, Failure> {
        let (directory, path) = configuration()?;
        let variables = [
            ("MOONCAKE_CONFIG_PATH", path.as_os_str()),
            ("MC_LOG_LEVEL", "ERROR".as_ref()),
        ];
        let mut sides = [0, 1].map(|kv_rank| {
            let mut side = Process::start("pipe_peer.py", variables);
            let started = side.call(json!({"do": "start", "kv_rank": kv_rank}));
            (side, started["session"].clone())
        });
        let sessions = [sides[0].1.clone(), sides[1].1.clone()];
        sides[0]
            .0
            .call(json!({"do": "dial", "session": sessions[1]}));
        sides[1]
            .0
            .call(json!({"do": "dial", "session": sessions[0]}));
        let [(near, _), (far, _)] = sides;
        Ok(Self {
            near,
            far,
            _directory: directory,
        })
    }

    fn run(&mut self, echo: bool, what: &str, len: usize, count: usize) -> Result<Value, Failure> {
        self.far
            .begin(&json!({"do": "serve", "count": count, "echo": echo}))?;
        let answer = self
            .near
            .try_call(&json!({"do": what, "length": len, "count": count}))?;
        self.far.finish()?;
        Ok(answer["seconds"].clone())
    }
}

impl Contender for Old {
    fn round_trips(&mut self, len: usize, count: usize) -> Result<Vec<f64>, Failure> {
        let seconds = self.run(true, "time_round_trips", len, count)?;
        let seconds = seconds.as_array().ok_or("no seconds")?;
        Ok(seconds.iter().filter_map(Value::as_f64).collect())
    }

    fn stream(&mut self, len: usize, count: usize) -> Result<f64, Failure> {
        let seconds = self.run(false, "time_stream", len, count)?;
        Ok(seconds.as_f64().ok_or("no seconds")?)
    }
}

/// A configuration file in a folder of its own.
fn configuration() -> Result<(tempfile::TempDir, std::path::PathBuf), Failure> {
    let (prefill, decode) = pipe_support::free_bases();
    let directory = tempfile::tempdir()?;
    let path = directory.path().join("pipe.json");
    let text = json!({
        "prefill_url": format!("127.0.0.1:{prefill}"),
        "decode_url": format!("127.0.0.1:{decode}"),
        "metadata_server": "P2PHANDSHAKE",
    });
    std::fs::write(&path, text.to_string())?;
    Ok((directory, path))
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

/// Median microseconds of a round trip, in the order of `contenders`, which take turns.
fn round_trips(contenders: &mut [Box<dyn Contender>], len: usize) -> Result<Vec<f64>, Failure> {
    let mut taken = vec![Vec::new(); contenders.len()];
    let mut counts = Vec::new();
    for contender in contenders.iter_mut() {
        let once = median(contender.round_trips(len, 10)?);
        let turn = BUDGET.as_secs_f64() / TURNS as f64;
        counts.push(((turn / once) as usize).clamp(5, 1_000));
    }
    for _ in 0..TURNS {
        for (index, contender) in contenders.iter_mut().enumerate() {
            taken[index].extend(contender.round_trips(len, counts[index])?);
        }
    }
    Ok(taken.into_iter().map(|all| median(all) * 1e6).collect())
}

/// Median bytes per second of a stream.
fn streams(contenders: &mut [Box<dyn Contender>], len: usize) -> Result<Vec<f64>, Failure> {
    // The old pipe has no flow control: what is sent at once must fit its pool of 2 GiB.
    let count = ((256 << 20) / len).min(128);
    let mut taken = vec![Vec::new(); contenders.len()];
    for _ in 0..TURNS {
        for (index, contender) in contenders.iter_mut().enumerate() {
            taken[index].push(contender.stream(len, count)?);
        }
    }
    let bytes = (len * count) as f64;
    Ok(taken.into_iter().map(|all| bytes / median(all)).collect())
}

fn measure(as_json: bool) -> Result<(), Failure> {
    let mut contenders: Vec<Box<dyn Contender>> = vec![
        Box::new(Ours::start("take")?),
        Box::new(Ours::start("copy")?),
        Box::new(Old::start()?),
    ];
    if !as_json {
        println!("tensors between two processes over loopback, medians");
        println!(
            "{:<11} {:>9} {:>10} {:>13} | {:>10} {:>11} {:>10}",
            "what", "bytes", "old / ours", "old / copied", "ours us", "copied us", "old us"
        );
    }
    // A round trip copies out in any case, so one of ours is enough.
    let mut both: Vec<Box<dyn Contender>> = vec![contenders.remove(0), contenders.remove(1)];
    for len in ROUND_TRIPS {
        let taken = round_trips(&mut both, len)?;
        let (ours, old) = (taken[0], taken[1]);
        if as_json {
            let row = json!({
                "bench": "pipe", "what": "round_trip", "bytes": len,
                "old_over_ours": old / ours, "ours_us": ours, "old_us": old,
            });
            println!("{row}");
        } else {
            println!(
                "{:<11} {len:>9} {:>10.2} {:>13} | {ours:>10.1} {:>11} {old:>10.1}",
                "round trip",
                old / ours,
                "",
                ""
            );
        }
    }
    let old = both.remove(1);
    contenders.insert(0, both.remove(0));
    contenders.push(old);
    if !as_json {
        println!(
            "{:<11} {:>9} {:>10} {:>13} | {:>10} {:>11} {:>10}",
            "what", "bytes", "ours / old", "copied / old", "ours GB/s", "copied GB/s", "old GB/s"
        );
    }
    for len in STREAMS {
        let taken = streams(&mut contenders, len)?;
        let [ours, copied, old] = taken[..] else {
            return Err("three contenders".into());
        };
        if as_json {
            let row = json!({
                "bench": "pipe", "what": "stream", "bytes": len,
                "ours_over_old": ours / old, "copied_over_old": copied / old,
                "ours_gb_per_s": ours / 1e9, "copied_gb_per_s": copied / 1e9, "old_gb_per_s": old / 1e9,
            });
            println!("{row}");
        } else {
            println!(
                "{:<11} {len:>9} {:>10.2} {:>13.2} | {:>10.2} {:>11.2} {:>10.2}",
                "stream",
                ours / old,
                copied / old,
                ours / 1e9,
                copied / 1e9,
                old / 1e9
            );
        }
    }
    Ok(())
}
