//! `consume`: a consumer that takes what arrives, hashes it, and writes it to files if asked to.

use std::collections::{HashMap, HashSet};
use std::net::{SocketAddr, ToSocketAddrs};
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::{Args, value_parser};
use ec_connector::{
    Consumer, ConsumerConfig, ConsumerError, ItemError, ItemStatus, MmHash, OutputError, Shutdown,
    TakePolicy, TakenItem, TransferId, write_tensor_file,
};
use mooncake_transport::tcp::{TcpConfig, TcpEngine};
use mooncake_transport::{Engine, EngineError};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::Serialize;

use super::device::{DeviceName, POOL_ADVICE, Watch, memory, parse_device};
use super::exit::{Failure, Outcome};
use super::output::Output;
use super::signals::Stop;
use super::size::{parse_size, show_size};
use super::terminal::printable;

/// Receive tensors: run a pool that producers write into
///
/// Each tensor is hashed when it has arrived, and stays cached until its memory is needed for others.
#[derive(Debug, Args)]
pub(crate) struct ConsumeArgs {
    /// Address and port to serve on; port 0 picks a free one
    #[arg(long, value_name = "HOST:PORT")]
    listen: String,
    /// Size of the pool, for example 512MiB or 4GiB
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pool: u64,
    /// Keep the pool in the memory of a GPU, such as cuda:0, instead of the host's
    ///
    /// Needs a build with the feature cuda and an NVIDIA driver.
    #[arg(long, value_name = "DEVICE", value_parser = parse_device)]
    device: Option<DeviceName>,
    /// Host that producers are told to dial; needed when listening on 0.0.0.0 or [::]
    #[arg(long, value_name = "HOST")]
    advertise: Option<String>,
    /// Seconds after which an unfinished or untaken transfer expires
    ///
    /// Transfer ids that were cancelled stay refused for 300 s, whatever this says.
    #[arg(long, value_name = "S", default_value = "300")]
    ttl: NonZeroU64,
    /// Write each tensor to DIR/<sha256>.safetensors; DIR must exist
    ///
    /// The name is the digest of the raw bytes. If a tensor of equal bytes and another
    /// shape or type has it already, the file is DIR/<sha256>.<dtype>-<shape>.safetensors.
    #[arg(
        long,
        value_name = "DIR",
        conflicts_with = "no_take",
        verbatim_doc_comment
    )]
    out: Option<PathBuf>,
    /// Accept this many transfers, then stop
    #[arg(long, value_name = "N")]
    max_items: Option<NonZeroU64>,
    /// Keep every tensor in use, so that the pool never reuses its memory
    #[arg(long, conflicts_with = "no_take")]
    keep: bool,
    /// Only report what is ready; take nothing
    #[arg(long)]
    no_take: bool,
    /// Seconds to wait for producers that are still writing when asked to stop
    #[arg(long, value_name = "S", default_value_t = 30, value_parser = value_parser!(u64).range(..=DRAIN_MAX_S))]
    drain: u64,
    /// Print one JSON object a line
    #[arg(long)]
    json: bool,
}

/// A day; whoever wants to wait longer does not want to stop.
const DRAIN_MAX_S: u64 = 86_400;

/// Owner leases that wait to be looked at. The item looked at longest is a file being written.
const TAKEN_MAX: usize = 256;

/// How often the loop looks whether it is to stop.
const TICK: Duration = Duration::from_millis(100);

pub(crate) fn run(args: &ConsumeArgs) -> Result<Outcome, Failure> {
    let stop = Stop::install()?;
    let drain = Duration::from_secs(args.drain);
    let output = Output::interruptible(args.json, stop.clone(), drain);
    if let Some(dir) = &args.out {
        check_directory(dir)?;
    }
    let listen = resolve(&args.listen)?;
    raise_descriptor_limit();
    let (consumer, mut watch) = start(args, listen)?;
    let control = match &args.advertise {
        Some(host) if host.contains(':') && !host.starts_with('[') => {
            format!("tcp://[{host}]:{}", consumer.address().port())
        }
        Some(host) => format!("tcp://{host}:{}", consumer.address().port()),
        None => consumer.address().to_string(),
    };
    let ready = Ready {
        event: "ready",
        control: &control,
        session: consumer.session(),
    };
    output.row(&ready, || {
        let place = args
            .device
            .map_or(String::new(), |device| format!(" on {device}"));
        format!(
            "ready: pool of {}{place} at {control}",
            show_size(args.pool)
        )
    })?;
    output.say(&printable(&format!(
        "push with: ec-connector push --to {control} FILE"
    )))?;

    let mut intake = Intake {
        args,
        output: &output,
        seen: HashSet::new(),
        kept: HashMap::new(),
        failed: false,
    };
    while !stop.is_asked() && !intake.is_full() {
        if !consumer.is_serving() {
            return Err(anyhow::anyhow!("the control server has failed; see the log").into());
        }
        look_at(&mut watch)?;
        intake.next(&consumer, Instant::now() + TICK)?;
    }

    // What a producer was told has arrived is owed to whoever reads the output.
    consumer.begin_shutdown(Shutdown::Finish);
    let deadline = Instant::now() + drain;
    while !consumer.is_exhausted() && Instant::now() < deadline {
        look_at(&mut watch)?;
        intake.next(&consumer, deadline.min(Instant::now() + TICK))?;
    }
    // From here on producers are told that nobody gets what they complete.
    consumer.begin_shutdown(Shutdown::Cancel);
    while intake.next(&consumer, Instant::now())? {}
    let failed = intake.failed;
    drop(intake);
    consumer
        .shutdown(deadline)
        .context("could not stop cleanly")?;
    Ok(if failed {
        Outcome::SomeFailed
    } else {
        Outcome::Done
    })
}

/// Ends the consumer if the device with its pool has failed: nothing that it holds can be read, and nothing more
/// arrives.
fn look_at(watch: &mut Option<Watch>) -> Result<(), Failure> {
    match watch {
        Some(watch) => Ok(watch.look(Instant::now())?),
        None => Ok(()),
    }
}

/// Lets the process open as many descriptors as it is allowed to: each producer needs a few.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    // The engine gets along with what there is.
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::debug!(%error, "the limit of file descriptors stays as it is");
    }
}

/// The consumer, and what looks after the device of its pool, if it is on one.
fn start(args: &ConsumeArgs, listen: SocketAddr) -> Result<(Consumer, Option<Watch>), Failure> {
    // First: what is missing should be said before anything listens.
    let device_memory = args
        .device
        .map(|device| memory(device, args.pool))
        .transpose()
        .map_err(Failure::usage)?;
    let mut engine_config = TcpConfig::default();
    engine_config.bind = listen.ip();
    engine_config.advertise.clone_from(&args.advertise);
    let engine = TcpEngine::start(engine_config).map_err(explain_engine)?;
    let mut config = ConsumerConfig::new(listen.ip(), listen.port(), args.pool);
    // As many as memory can name are no limit.
    config.reservations.items_max = args
        .max_items
        .and_then(|max| usize::try_from(max.get()).ok());
    config.reservations.ttl_ms = args.ttl.get().saturating_mul(1000);
    config.reservations.take = if args.no_take {
        TakePolicy::Caller
    } else {
        TakePolicy::OnReady {
            taken_max: TAKEN_MAX,
        }
    };
    let engine = Arc::new(engine) as Arc<dyn Engine>;
    let (started, watch) = match device_memory {
        Some(on_device) => (
            Consumer::start_in(engine, on_device.memory, config),
            Some(on_device.watch),
        ),
        None => (Consumer::start(engine, config), None),
    };
    Ok((started.map_err(explain_start)?, watch))
}

/// Adds what to do about an engine that does not start.
fn explain_engine(error: EngineError) -> Failure {
    let advice = match &error {
        EngineError::WildcardBind { .. }
        | EngineError::WildcardAdvertised { .. }
        | EngineError::AdvertisedHost { .. } => {
            "say with --advertise HOST by which name or address producers reach this machine"
        }
        _ => "cannot start the transfer engine",
    };
    Failure::usage(anyhow::Error::new(error).context(advice))
}

/// Adds what to do about a consumer that does not start.
fn explain_start(error: ConsumerError) -> Failure {
    let advice = match &error {
        ConsumerError::Slab { .. } | ConsumerError::Pool { .. } => POOL_ADVICE,
        ConsumerError::Server(_) => "choose another --listen address or port",
        _ => return error.into(),
    };
    Failure::usage(anyhow::Error::new(error).context(advice))
}

fn check_directory(dir: &Path) -> Result<(), Failure> {
    match std::fs::metadata(dir) {
        Ok(found) if found.is_dir() => Ok(()),
        Ok(_) => Err(Failure::usage(anyhow::anyhow!(
            "--out {dir:?} is not a directory"
        ))),
        Err(error) => Err(Failure::usage(anyhow::Error::new(error).context(format!(
            "--out {dir:?} cannot be used; create the directory first"
        )))),
    }
}

/// The first address a `HOST:PORT` stands for.
fn resolve(text: &str) -> Result<SocketAddr, Failure> {
    let advice = || format!("--listen {text:?} is no HOST:PORT this machine can listen on");
    text.to_socket_addrs()
        .with_context(advice)
        .and_then(|mut found| found.next().with_context(advice))
        .map_err(Failure::usage)
}

/// What is done with each item.
struct Intake<'a> {
    args: &'a ConsumeArgs,
    output: &'a Output,
    /// Distinct transfers, counted only up to `--max-items`.
    seen: HashSet<TransferId>,
    /// With `--keep`: one lease for each content, which is as many as the pool holds.
    kept: HashMap<MmHash, TakenItem>,
    failed: bool,
}

impl Intake<'_> {
    fn is_full(&self) -> bool {
        self.args
            .max_items
            .is_some_and(|max| self.seen.len() as u64 >= max.get())
    }

    /// Waits for an item until `deadline` and deals with it; says whether there was one.
    fn next(&mut self, consumer: &Consumer, deadline: Instant) -> Result<bool, Failure> {
        if self.args.no_take {
            let Some(item) = consumer.next_ready(Some(deadline)) else {
                return Ok(false);
            };
            self.report_ready(&item)?;
        } else {
            let Some(item) = consumer.next_taken(Some(deadline)) else {
                return Ok(false);
            };
            self.receive(item)?;
        }
        Ok(true)
    }

    fn count(&mut self, transfer_id: &TransferId) {
        if self.args.max_items.is_some() {
            self.seen.insert(transfer_id.clone());
        }
    }

    fn receive(&mut self, item: TakenItem) -> Result<(), Failure> {
        self.count(item.transfer_id());
        let digest = item.digest().map_err(|error| self.unreadable(error))?;
        let (path, error) = match &self.args.out {
            Some(dir) => match write_item(dir, &digest.sha256, &item) {
                Ok(path) => (Some(path), None),
                Err(error) => (None, Some(format!("{:#}", anyhow::Error::new(error)))),
            },
            None => (None, None),
        };
        let file = path
            .as_deref()
            .and_then(|path| other_name(path, &digest.sha256));
        self.failed |= error.is_some();
        let tensor = item.tensor();
        let row = Received {
            event: "received",
            transfer_id: item.transfer_id().as_str(),
            mm_hash: item.mm_hash().as_str(),
            shape: tensor.shape(),
            dtype: tensor.dtype().name(),
            nbytes: tensor.len_bytes(),
            sha256: &digest.sha256,
            cached: item.is_cached(),
            file,
            error: error.as_deref(),
        };
        self.output.row(&row, || {
            let how = if row.cached { "cached  " } else { "received" };
            let mut line = format!(
                "{how}  {}  {:>10}  {} {:?}",
                &row.sha256[..16],
                show_size(row.nbytes),
                row.dtype,
                row.shape
            );
            if let Some(file) = row.file {
                line.push_str("  in ");
                line.push_str(file);
            }
            if let Some(error) = row.error {
                line.push_str("  FAILED: ");
                line.push_str(error);
            }
            line
        })?;
        if self.args.keep {
            self.kept.insert(item.mm_hash().clone(), item);
        }
        Ok(())
    }

    /// Items of a pool in host memory can always be read.
    fn unreadable(&self, error: ItemError) -> anyhow::Error {
        let error = anyhow::Error::new(error);
        match self.args.device {
            Some(device) => error.context(format!("{device} has failed")),
            None => error,
        }
    }

    fn report_ready(&mut self, item: &ItemStatus) -> Result<(), Failure> {
        self.count(&item.transfer_id);
        let row = ItemReady {
            event: "item_ready",
            transfer_id: item.transfer_id.as_str(),
            mm_hash: item.mm_hash.as_str(),
            shape: item.tensor.shape(),
            dtype: item.tensor.dtype().name(),
            nbytes: item.tensor.len_bytes(),
            cached: item.cached,
        };
        self.output.row(&row, || {
            format!(
                "ready     {}  {:>10}  {} {:?}",
                row.transfer_id,
                show_size(row.nbytes),
                row.dtype,
                row.shape
            )
        })?;
        Ok(())
    }
}

fn write_item(dir: &Path, sha256: &str, item: &TakenItem) -> Result<PathBuf, OutputError> {
    let metadata = [
        ("mm_hash", item.mm_hash().as_str()),
        ("transfer_id", item.transfer_id().as_str()),
    ];
    write_tensor_file(dir, sha256, item.tensor(), &metadata, |file, offset| {
        item.write_to(file, offset)
    })
}

/// The name of the file at `path`, unless it is the usual one.
fn other_name<'a>(path: &'a Path, sha256: &str) -> Option<&'a str> {
    let name = path.file_name()?.to_str()?;
    (name.strip_suffix(".safetensors")? != sha256).then_some(name)
}

#[derive(Serialize)]
struct Ready<'a> {
    event: &'static str,
    control: &'a str,
    session: &'a str,
}

#[derive(Serialize)]
struct Received<'a> {
    event: &'static str,
    transfer_id: &'a str,
    mm_hash: &'a str,
    shape: &'a [u64],
    dtype: &'static str,
    nbytes: u64,
    sha256: &'a str,
    cached: bool,
    /// Only with `--out`, and if it is not `<sha256>.safetensors`.
    #[serde(skip_serializing_if = "Option::is_none")]
    file: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'a str>,
}

#[derive(Serialize)]
struct ItemReady<'a> {
    event: &'static str,
    transfer_id: &'a str,
    mm_hash: &'a str,
    shape: &'a [u64],
    dtype: &'static str,
    nbytes: u64,
    cached: bool,
}
