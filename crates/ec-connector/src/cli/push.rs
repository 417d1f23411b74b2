//! `push`: sends every tensor of safetensors files to a consumer.

mod desk;

use std::collections::{HashMap, VecDeque};
use std::net::ToSocketAddrs;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use ec_connector::{
    ContentDigest, ControlAddress, Delivery, FileTensor, Item, MmHash, Producer, ProducerConfig,
    Push, PushError, PushFailure, PushId, PushReport, Source, TensorFile, TensorFileError,
    UnsupportedTensor,
};
use mooncake_transport::Engine;
use mooncake_transport::tcp::{TcpConfig, TcpEngine};
use serde::Serialize;

use desk::{Desk, Spot};

use super::exit::{Failure, Outcome};
use super::output::Output;
use super::signals::Stop;
use super::size::show_size;
use super::terminal::{printable, shorten};

/// Send the tensors of safetensors files to a consumer
///
/// Files are read tensor by tensor. A tensor that the consumer has already is not sent again.
#[derive(Debug, Args)]
pub(crate) struct PushArgs {
    /// Control address of the consumer, as its `ready` line gives it
    #[arg(long, value_name = "tcp://HOST:PORT", value_parser = parse_address)]
    pub(crate) to: ControlAddress,
    /// Safetensors files
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Use HEX as the content's name for the tensor NAME, instead of its hash; only with one FILE
    #[arg(long, value_name = "NAME=HEX", value_parser = parse_named_hash)]
    mm_hash: Vec<(String, MmHash)>,
    /// Seconds to wait for room and for answers, for each tensor; one whose consumer stops answering fails within twice
    /// as many
    #[arg(long, value_name = "S", default_value = "60", value_parser = parse_seconds)]
    timeout: Duration,
    /// Print one JSON object a line
    #[arg(long)]
    json: bool,
}

pub(crate) fn parse_address(text: &str) -> Result<ControlAddress, String> {
    ControlAddress::parse(text)
        .map_err(|error| format!("{error}; write for example tcp://127.0.0.1:14579"))
}

fn parse_named_hash(text: &str) -> Result<(String, MmHash), String> {
    // A name may hold an equals sign, a hash cannot.
    let (name, hash) = text
        .rsplit_once('=')
        .ok_or("write NAME=HEX, for example --mm-hash vision.0=9f2c")?;
    if hash.is_empty() || !hash.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return Err(format!("{hash:?} is not a hexadecimal number"));
    }
    let hash = MmHash::new(hash).map_err(|error| error.to_string())?;
    Ok((name.to_owned(), hash))
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(seconds) if seconds > 0.0 => Duration::try_from_secs_f64(seconds)
            .map_err(|_| "more seconds than can be waited".to_owned()),
        _ => Err("write a positive number of seconds".to_owned()),
    }
}

/// Code and text of what a signal kept from being sent.
const INTERRUPTED: (&str, &str) = ("interrupted", "interrupted before it was sent");

/// How often a wait looks whether it was interrupted.
const TICK: Duration = Duration::from_millis(50);

/// Pushes under way; hashing runs ahead of the transfers by as many.
const PUSHES_MAX: usize = 16;

/// Most bytes kept in memory between hashing and sending: a push each of eight megabytes, which is a large encoder output.
const DESK_BYTES_MAX: u64 = 128 << 20;

/// What is too large for the desk gets memory of its own, and nothing else needs any.
const STAGING_BYTES: u64 = 1 << 20;

pub(crate) fn run(args: &PushArgs) -> Result<Outcome, Failure> {
    if args.files.len() > 1 && !args.mm_hash.is_empty() {
        return Err(Failure::usage(anyhow::anyhow!(
            "--mm-hash names a tensor of one file; push one FILE at a time with it"
        )));
    }
    check_host(&args.to)?;
    let stop = Stop::install()?;
    let producer = start_producer(args.timeout, Some(STAGING_BYTES))?;
    let mut output = Output::new(args.json);
    output.start_bar(
        0,
        "{wide_bar} {bytes}/{total_bytes} {bytes_per_sec} eta {eta}",
    );
    let mut session = Session {
        args,
        output,
        producer: Some(producer),
        names: args.mm_hash.iter().cloned().collect(),
        under_way: VecDeque::new(),
        desk: desk_for(&args.files),
        totals: Totals::default(),
        down: None,
        stop,
    };
    for path in &args.files {
        session.push_file(path)?;
    }
    while session.report_next()? {}
    session.finish()
}

/// Fails at once if nobody knows the host: waiting does not help, and would look as if the consumer were gone.
pub(crate) fn check_host(address: &ControlAddress) -> Result<(), Failure> {
    let host = address.host();
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    (bare, address.port())
        .to_socket_addrs()
        .map(|_| ())
        .with_context(|| {
            format!("the host {host:?} of {address} is not known; check how it is written")
        })
        .map_err(Failure::usage)
}

/// Room for the tensors of `files`, within bounds. Without it every tensor is read twice, which is slower and no less
/// sound.
fn desk_for(files: &[PathBuf]) -> Option<Desk> {
    let bytes = files
        .iter()
        .filter_map(|path| std::fs::metadata(path).ok())
        .fold(0u64, |sum, file| sum.saturating_add(file.len()));
    // Small tensors take whole granules each.
    Desk::new(bytes.saturating_mul(2).clamp(64 << 10, DESK_BYTES_MAX)).ok()
}

/// Starts a producer; `staging_bytes` of `None` is the usual size.
pub(crate) fn start_producer(
    timeout: Duration,
    staging_bytes: Option<u64>,
) -> Result<Producer, Failure> {
    let mut engine_config = TcpConfig::default();
    // Nobody has business connecting to a producer.
    engine_config.listen = false;
    // Of these a consumer that stops answering can make a push wait for one or two, after it has waited for up to the
    // timeout: together less than twice that.
    let at_most = |wait: &mut Duration, limit: Duration| {
        *wait = (*wait).min(limit.max(Duration::from_millis(1)));
    };
    let timeouts = &mut engine_config.timeouts;
    at_most(&mut timeouts.connect, timeout / 4);
    at_most(&mut timeouts.control_reply, timeout / 2);
    at_most(&mut timeouts.progress, timeout / 2);
    at_most(&mut timeouts.status, timeout / 2);
    let engine = TcpEngine::start(engine_config).context("cannot start the transfer engine")?;
    let mut config = ProducerConfig::default();
    config.push.timeout_ms = u64::try_from(timeout.as_millis())
        .unwrap_or(u64::MAX)
        .max(1);
    // After a write this is how long its completion is asked for, whatever is left of the timeout.
    config.push.control_timeout_ms = config.push.control_timeout_ms.min(config.push.timeout_ms);
    if let Some(bytes) = staging_bytes {
        config.staging_bytes = bytes;
    }
    if let Some(max) = NonZeroUsize::new(PUSHES_MAX) {
        config.pushes_max = max;
    }
    Ok(Producer::start(
        Arc::new(engine) as Arc<dyn Engine>,
        config,
    )?)
}

/// One run of the command.
struct Session<'a> {
    args: &'a PushArgs,
    output: Output,
    /// Nothing once the command was interrupted.
    producer: Option<Producer>,
    /// Content names given for tensors, by tensor name.
    names: HashMap<String, MmHash>,
    /// In file order, which is the order of the rows.
    under_way: VecDeque<UnderWay>,
    /// Where tensors are hashed.
    desk: Option<Desk>,
    totals: Totals,
    /// Why nothing more is sent: the consumer does not answer.
    down: Option<(&'static str, String)>,
    stop: Stop,
}

struct UnderWay {
    tensor: TensorName,
    digest: ContentDigest,
    push: Push,
}

/// Which tensor a row is about.
#[derive(Clone)]
struct TensorName {
    file: String,
    name: Option<String>,
    nbytes: u64,
}

#[derive(Default)]
struct Totals {
    written: u64,
    cached: u64,
    failed: u64,
    bytes: u64,
    started: Option<Instant>,
}

impl Session<'_> {
    fn push_file(&mut self, path: &PathBuf) -> Result<(), Failure> {
        let whole_file = TensorName {
            file: path.to_string_lossy().into_owned(),
            name: None,
            nbytes: 0,
        };
        let file = match TensorFile::open(path) {
            Ok(file) => file,
            Err(error) => {
                self.catch_up()?;
                return self.fail(&whole_file, None, "file", &chain(error));
            }
        };
        for name in self.names.keys() {
            if !file.tensors().iter().any(|tensor| tensor.name() == name) {
                return Err(Failure::usage(anyhow::anyhow!(
                    "--mm-hash names the tensor {name:?}, which {path:?} does not have"
                )));
            }
        }
        if file.tensors().is_empty() {
            self.output.say(&printable(&format!(
                "{}: it holds no tensors, so there is nothing to push",
                whole_file.file
            )))?;
        }
        let bytes: u64 = file.tensors().iter().map(FileTensor::len).sum();
        self.output.bar().inc_length(bytes);
        for tensor in file.tensors() {
            let named = TensorName {
                file: whole_file.file.clone(),
                name: Some(tensor.name().to_owned()),
                nbytes: tensor.len(),
            };
            self.push_tensor(&file, tensor, named)?;
        }
        Ok(())
    }

    fn push_tensor(
        &mut self,
        file: &TensorFile,
        tensor: &FileTensor,
        named: TensorName,
    ) -> Result<(), Failure> {
        // Rows of pushes that have ended come out while later tensors are hashed.
        while self
            .under_way
            .front()
            .is_some_and(|front| front.push.poll().is_some())
        {
            self.report_next()?;
        }
        // So that handing the next one over blocks for nobody, and a signal is heard.
        while self.under_way.len() >= PUSHES_MAX {
            self.report_next()?;
        }
        self.heed_signals();
        if let Some((code, error)) = self.down.clone() {
            self.catch_up()?;
            return self.fail(&named, None, code, &error);
        }
        let spot = self.spot(tensor.len())?;
        let (source, mut digest) = match Self::hash(file, tensor, spot) {
            Ok(hashed) => hashed,
            Err(error) => {
                let code = match error {
                    TensorFileError::Unsupported {
                        source: UnsupportedTensor::Dtype { .. },
                        ..
                    } => "unsupported_dtype",
                    TensorFileError::Unsupported { .. } => "unsupported_shape",
                    _ => "file",
                };
                self.catch_up()?;
                return self.fail(&named, None, code, &chain(error));
            }
        };
        if let Some(given) = self.names.get(tensor.name()) {
            digest.mm_hash = given.as_str().to_owned();
        }
        let item = Item {
            to: self.args.to.clone(),
            mm_hash: MmHash::new(digest.mm_hash.as_str())?,
            tensor: file.spec(tensor)?.clone(),
            source,
            id: PushId::Fresh,
        };
        let Some(producer) = &self.producer else {
            // While room on the desk was waited for.
            self.catch_up()?;
            return self.fail(&named, Some(&digest), INTERRUPTED.0, INTERRUPTED.1);
        };
        self.totals.started.get_or_insert_with(Instant::now);
        let push = producer.push(item);
        self.under_way.push_back(UnderWay {
            tensor: named,
            digest,
            push,
        });
        Ok(())
    }

    /// Room on the desk, once pushes under way have given it back; nothing for what is larger than the desk.
    fn spot(&mut self, len: u64) -> Result<Option<Spot>, Failure> {
        loop {
            let spot = self.desk.as_ref().and_then(|desk| desk.spot(len));
            let may_come = self
                .desk
                .as_ref()
                .is_some_and(|desk| 0 < len && len <= desk.len());
            if spot.is_some() || !may_come || !self.report_next()? {
                return Ok(spot);
            }
        }
    }

    /// Hashes a tensor, and says where its bytes are to be taken from.
    ///
    /// What is sent is what was hashed, whatever happens to the file meanwhile: either the bytes stay in memory, or
    /// their digest is compared when they are read again.
    fn hash(
        file: &TensorFile,
        tensor: &FileTensor,
        spot: Option<Spot>,
    ) -> Result<(Source, ContentDigest), TensorFileError> {
        if let Some(spot) = spot {
            let digest = file.load(tensor, spot.slab(), spot.range().start)?;
            return Ok((spot.into_source(), digest));
        }
        let digest = file.digest(tensor)?;
        let source = Source::File {
            file: Arc::clone(file.file()),
            range: tensor.range(),
            sha256: Some(digest.sha256.clone()),
        };
        Ok((source, digest))
    }

    /// Reports everything under way, so that a row that is known at once comes in its place.
    fn catch_up(&mut self) -> Result<(), Failure> {
        while self.report_next()? {}
        Ok(())
    }

    /// On the first signal: ends the pushes that only wait. Waits for the requests and writes under way.
    fn heed_signals(&mut self) {
        if !self.stop.is_asked() {
            return;
        }
        if let Some(producer) = self.producer.take() {
            producer.close();
        }
        if self.down.is_none() {
            self.down = Some((INTERRUPTED.0, INTERRUPTED.1.to_owned()));
        }
    }

    /// Waits for the oldest push and prints its row. False if there was none.
    fn report_next(&mut self) -> Result<bool, Failure> {
        let Some(next) = self.under_way.pop_front() else {
            return Ok(false);
        };
        let report = loop {
            self.heed_signals();
            // Each push ends by itself.
            if let Some(report) = next.push.wait(Some(Instant::now() + TICK)) {
                break report;
            }
        };
        self.output.bar().inc(next.tensor.nbytes);
        let (state, failure) = self.count(&report, next.tensor.nbytes);
        let row = Pushed {
            event: "pushed",
            file: &next.tensor.file,
            name: next.tensor.name.as_deref(),
            transfer_id: Some(report.transfer_id.as_str()),
            mm_hash: Some(&next.digest.mm_hash),
            nbytes: next.tensor.nbytes,
            sha256: Some(&next.digest.sha256),
            state,
            code: failure.as_ref().map(|(code, _)| *code),
            error: failure.as_ref().map(|(_, error)| error.as_str()),
        };
        self.output.row(&row, || row.line(self.output.columns()))?;
        Ok(true)
    }

    fn count(
        &mut self,
        report: &PushReport,
        nbytes: u64,
    ) -> (&'static str, Option<(&'static str, String)>) {
        match &report.result {
            Ok(delivery) => {
                self.totals.bytes += nbytes;
                if *delivery == Delivery::Written {
                    self.totals.written += 1;
                    ("written", None)
                } else {
                    self.totals.cached += 1;
                    ("cached", None)
                }
            }
            Err(error) => {
                self.totals.failed += 1;
                // Only a signal closes the producer before its pushes have ended.
                let code = match error {
                    PushError::Failed(PushFailure::Closed) => INTERRUPTED.0,
                    error => error.code(),
                };
                let failure = (code, chain(error.clone()));
                if error.is_unreachable() && self.down.is_none() {
                    self.down = Some((
                        "unreachable",
                        "not sent, because the consumer stopped answering".to_owned(),
                    ));
                }
                ("failed", Some(failure))
            }
        }
    }

    fn fail(
        &mut self,
        tensor: &TensorName,
        digest: Option<&ContentDigest>,
        code: &str,
        error: &str,
    ) -> Result<(), Failure> {
        self.totals.failed += 1;
        self.output.bar().inc(tensor.nbytes);
        let row = Pushed {
            event: "pushed",
            file: &tensor.file,
            name: tensor.name.as_deref(),
            transfer_id: None,
            mm_hash: digest.map(|digest| digest.mm_hash.as_str()),
            nbytes: tensor.nbytes,
            sha256: digest.map(|digest| digest.sha256.as_str()),
            state: "failed",
            code: Some(code),
            error: Some(error),
        };
        self.output.row(&row, || row.line(self.output.columns()))?;
        Ok(())
    }

    fn finish(mut self) -> Result<Outcome, Failure> {
        self.output.finish_bar();
        drop(self.producer);
        let seconds = self
            .totals
            .started
            .map_or(0.0, |started| started.elapsed().as_secs_f64());
        let Totals {
            written,
            cached,
            failed,
            bytes,
            ..
        } = self.totals;
        self.output.say(&format!(
            "{written} written, {cached} cached, {failed} failed; {} in {seconds:.2} s",
            show_size(bytes)
        ))?;
        Ok(if failed == 0 {
            Outcome::Done
        } else {
            Outcome::SomeFailed
        })
    }
}

#[derive(Serialize)]
struct Pushed<'a> {
    event: &'static str,
    file: &'a str,
    name: Option<&'a str>,
    transfer_id: Option<&'a str>,
    mm_hash: Option<&'a str>,
    nbytes: u64,
    sha256: Option<&'a str>,
    state: &'static str,
    code: Option<&'a str>,
    error: Option<&'a str>,
}

/// Fewest columns that a name may have, however narrow the terminal.
const NAME_COLUMNS_MIN: usize = 20;

/// Errors repeat names; this is enough for what else they say.
const ERROR_COLUMNS_MAX: usize = 400;

impl Pushed<'_> {
    /// The row for a person, whose terminal has so many columns.
    fn line(&self, columns: usize) -> String {
        let mut line = format!(
            "{:<7}  {:>10}  {}  ",
            self.state,
            show_size(self.nbytes),
            self.sha256
                .map_or("-".repeat(16), |hash| hash[..16].to_owned()),
        );
        let what = printable(self.name.unwrap_or(self.file));
        let room = columns.saturating_sub(line.len()).max(NAME_COLUMNS_MIN);
        line.push_str(&shorten(&what, room));
        if let (Some(code), Some(error)) = (self.code, self.error) {
            let error = shorten(&printable(error), ERROR_COLUMNS_MAX);
            line.push_str(&format!("  {code}: {error}"));
        }
        line
    }
}

/// An error with its causes on one line.
fn chain(error: impl std::error::Error + Send + Sync + 'static) -> String {
    format!("{:#}", anyhow::Error::new(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_named_hash_is_split_at_the_last_equals_sign_and_must_be_hexadecimal() {
        let (name, hash) = parse_named_hash("a=b=0F2c").unwrap();
        assert_eq!((name.as_str(), hash.as_str()), ("a=b", "0F2c"));
        for wrong in ["", "a", "a=", "a=xyz"] {
            assert!(parse_named_hash(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn long_and_hostile_names_fit_the_terminal_and_keep_both_ends() {
        let row = |name, error| Pushed {
            event: "pushed",
            file: "file",
            name: Some(name),
            transfer_id: None,
            mm_hash: None,
            nbytes: 1 << 20,
            sha256: None,
            state: "failed",
            code: Some("file"),
            error: Some(error),
        };
        let name = format!("model.{}.weight", "größe\u{1b}[2J".repeat(1000));
        let line = row(&name, &name).line(80);
        let (first, error) = line.split_once("  file: ").unwrap();
        assert_eq!(first.chars().count(), 80, "{first}");
        assert!(
            first.contains("  model.größe") && first.ends_with(".weight"),
            "{first}"
        );
        assert!(error.chars().count() <= ERROR_COLUMNS_MAX);
        assert!(!line.contains('\u{1b}'));
        assert!(row("short", "").line(80).contains("  short  file"));
        assert!(
            row("a name of twenty six chars", "")
                .line(1)
                .contains("a name of \u{2026}six chars")
        );
    }

    #[test]
    fn a_timeout_is_a_positive_number_of_seconds() {
        assert_eq!(parse_seconds("1.5"), Ok(Duration::from_millis(1500)));
        for wrong in ["0", "-1", "nan", "inf", "1e400", "x", ""] {
            assert!(parse_seconds(wrong).is_err(), "{wrong:?}");
        }
    }
}
