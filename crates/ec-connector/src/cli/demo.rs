//! `demo`: a consumer and a producer process on this machine, and every byte compared.
//!
//! The two child processes are this program again, with subcommands that are not in the help. They are told what to
//! do on standard input and answer on standard output, one JSON object a line. Work goes in rounds that fit the
//! pool: the producer hashes and pushes one round, then the consumer, which kept everything it took, compares it
//! with what it generates itself or reads from the file, and lets it go.

mod child;
mod consumer;
mod message;
mod producer;
mod summary;

use std::path::PathBuf;

use anyhow::{Context, bail};
use clap::Args;
use ec_connector::{ControlAddress, TensorFile};
use indicatif::ProgressBar;

use super::device::{DeviceName, parse_device};
use super::exit::{Failure, Outcome};
use super::generate::plan;
use super::output::Output;
use super::signals::Stop;
use super::size::{parse_size, show_size};
use super::slab_map::draw;
use super::status;
use child::Child;
use message::{FromConsumer, FromProducer, Origin, Planned, ToConsumer, ToProducer, Verify};
use summary::Tally;

pub(crate) use consumer::DemoConsumerArgs;
pub(crate) use producer::DemoProducerArgs;

/// See it work: push data between two processes of this machine and compare every byte
///
/// Without FILE, encoder outputs of realistic shapes are generated; a quarter of them repeat, so that some pushes find their
/// content cached. Ends with a map of the consumer's pool and a summary.
#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// Number of encoder outputs to generate; a quarter of them repeat earlier ones
    #[arg(long, value_name = "N", default_value = "64", conflicts_with = "files",
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    items: u32,
    /// Push the tensors of these safetensors files instead
    #[arg(value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Size of the consumer's pool
    #[arg(long, value_name = "SIZE", default_value = "512MiB", value_parser = parse_size)]
    pool: u64,
    /// Keep the tensors on both sides in the memory of a GPU, such as cuda:0, instead of the host's
    ///
    /// Needs a build with the feature cuda and an NVIDIA driver.
    #[arg(long, value_name = "DEVICE", value_parser = parse_device)]
    device: Option<DeviceName>,
    /// Seed of the generated outputs
    #[arg(long, value_name = "N", default_value = "1")]
    seed: u64,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Most pushes of one round: the consumer's list of taken items holds them all.
const ROUND_ITEMS_MAX: usize = 1024;

pub(crate) fn run(args: &DemoArgs) -> Result<Outcome, Failure> {
    let stop = Stop::install()?;
    let items = planned(args)?;
    let mut output = Output::new(args.json);
    let total: u64 = items.iter().map(|item| item.nbytes).sum();

    let device = args.device.map(|device| device.to_string());
    let on_device: Vec<&str> = match &device {
        Some(device) => vec!["--device", device],
        None => Vec::new(),
    };
    let pool = args.pool.to_string();
    let mut consumer = Child::start("demo-consumer", &[&["--pool", &pool], &*on_device].concat())?;
    let control = match consumer.receive(|| check_stop(&stop))? {
        FromConsumer::Ready { control } => control,
        FromConsumer::Error { error } => return Err(Failure::usage(anyhow::anyhow!(error))),
        other => return Err(anyhow::anyhow!("unexpected answer {other:?}").into()),
    };
    let address = ControlAddress::parse(&control)?;
    let mut producer = Child::start(
        "demo-producer",
        &[&["--to", &control], &*on_device].concat(),
    )?;
    let place = args
        .device
        .map_or(String::new(), |device| format!(" on {device}"));
    output.say(&format!(
        "consumer: process {} with a pool of {}{place} at {control}\nproducer: process {} with {} tensors of {}{place}",
        consumer.id(),
        show_size(args.pool),
        producer.id(),
        items.len(),
        show_size(total)
    ))?;
    output.start_bar(total, "{msg:9} {wide_bar} {bytes}/{total_bytes}");

    let mut tally = Tally::default();
    let mut map = None;
    let mut rest = items.as_slice();
    while !rest.is_empty() {
        let (round, later) = rest.split_at(round_len(rest, args.pool));
        rest = later;
        let verify = push_round(&mut producer, round, &mut tally, output.bar(), || {
            check_stop(&stop)?;
            // Without it the producer would wait for its timeout.
            consumer.check_running()
        })?;
        if rest.is_empty() {
            // Before anything is let go: the map shows what the last pushes left.
            map = Some(status::fetch(&address)?);
        }
        verify_round(&mut consumer, verify, &mut tally, &output, &stop)?;
    }
    output.finish_bar();
    // A consumer that cannot stop cleanly, because a write was lost, takes nothing from what was found before.
    let ended = producer.finish().and_then(|()| consumer.finish());

    let summary = tally.summary(items.len(), total);
    if let Some(snapshot) = map {
        output.say(&format!(
            "\nthe consumer's pool after the last push, before the last items were let go:\n{}",
            draw(snapshot.capacity, &snapshot.map.runs, output.map_style())
        ))?;
    }
    output.say(&format!("\n{}", summary.text()))?;
    output.object(&summary)?;
    ended?;
    Ok(if summary.is_clean() {
        Outcome::Done
    } else {
        Outcome::SomeFailed
    })
}

/// The pushes of the run, in order.
fn planned(args: &DemoArgs) -> Result<Vec<Planned>, Failure> {
    if args.files.is_empty() {
        // Within a quarter of the pool, of which a round takes at most half: the original is still there.
        let reach = args.pool / 4;
        return Ok(plan(args.items as usize, args.seed, reach)
            .into_iter()
            .map(|item| Planned {
                nbytes: item.output.len_bytes(),
                origin: Origin::Generated {
                    output: item.output,
                },
            })
            .collect());
    }
    let mut items = Vec::new();
    for path in &args.files {
        let file = TensorFile::open(path).map_err(Failure::usage)?;
        let path = path
            .canonicalize()
            .with_context(|| format!("cannot find {path:?} again"))?;
        for (index, tensor) in file.tensors().iter().enumerate() {
            items.push(Planned {
                nbytes: tensor.len(),
                origin: Origin::File {
                    path: path.clone(),
                    index,
                },
            });
        }
    }
    if items.is_empty() {
        return Err(Failure::usage(anyhow::anyhow!(
            "the files hold no tensors; give others, or none to generate some"
        )));
    }
    Ok(items)
}

/// How many of `items` fit half of the pool, which leaves room for gaps between them; at least one.
fn round_len(items: &[Planned], pool: u64) -> usize {
    let mut bytes: u64 = 0;
    items
        .iter()
        .take(ROUND_ITEMS_MAX)
        .take_while(|item| {
            bytes = bytes.saturating_add(item.nbytes);
            bytes <= pool / 2
        })
        .count()
        .max(1)
}

/// Has one round pushed; returns what arrived.
fn push_round(
    producer: &mut Child,
    round: &[Planned],
    tally: &mut Tally,
    bar: &ProgressBar,
    mut look: impl FnMut() -> anyhow::Result<()>,
) -> Result<Vec<Verify>, Failure> {
    bar.set_message("hashing");
    producer.send(&ToProducer {
        push: round.to_vec(),
    })?;
    let mut arrived = Vec::new();
    loop {
        match producer.receive(&mut look)? {
            FromProducer::Hashed => bar.set_message("pushing"),
            FromProducer::Pushed {
                index,
                transfer_id,
                mm_hash,
                cached,
                elapsed_us,
                wire_bytes,
            } => {
                let planned = round.get(index).context("the producer made an item up")?;
                bar.inc(planned.nbytes);
                tally.pushed(cached, elapsed_us, wire_bytes);
                arrived.push(Verify {
                    transfer_id,
                    mm_hash,
                    origin: planned.origin.clone(),
                });
            }
            FromProducer::Failed { index, error } => {
                let planned = round.get(index).context("the producer made an item up")?;
                bar.inc(planned.nbytes);
                bar.suspend(|| {
                    let text = format!("{}: {error}", planned.origin);
                    eprintln!("push failed: {}", super::terminal::printable(&text));
                });
            }
            FromProducer::Round { seconds } => {
                tally.round(seconds);
                return Ok(arrived);
            }
        }
    }
}

/// Has what arrived compared, and let go.
fn verify_round(
    consumer: &mut Child,
    verify: Vec<Verify>,
    tally: &mut Tally,
    output: &Output,
    stop: &Stop,
) -> Result<(), Failure> {
    output.bar().set_message("verifying");
    let mut missing = verify.len();
    let names: Vec<String> = verify.iter().map(|item| item.origin.to_string()).collect();
    consumer.send(&ToConsumer { verify })?;
    while missing > 0 {
        match consumer.receive(|| check_stop(stop))? {
            FromConsumer::Verified { index, error } => {
                missing -= 1;
                match error {
                    None => tally.verified(),
                    Some(error) => output.bar().suspend(|| {
                        let name = names.get(index).map_or("?", String::as_str);
                        let text = format!("{name}: {error}");
                        eprintln!("verification failed: {}", super::terminal::printable(&text));
                    }),
                }
            }
            other => return Err(unexpected(&other).into()),
        }
    }
    Ok(())
}

fn check_stop(stop: &Stop) -> anyhow::Result<()> {
    if stop.is_asked() {
        bail!("interrupted");
    }
    Ok(())
}

fn unexpected(answer: &FromConsumer) -> anyhow::Error {
    match answer {
        FromConsumer::Error { error } => anyhow::anyhow!("the consumer failed: {error}"),
        other => anyhow::anyhow!("unexpected answer {other:?}"),
    }
}

/// Runs the hidden consumer process.
pub(crate) fn run_consumer(args: &DemoConsumerArgs) -> Result<Outcome, Failure> {
    consumer::run(args)
}

/// Runs the hidden producer process.
pub(crate) fn run_producer(args: &DemoProducerArgs) -> Result<Outcome, Failure> {
    producer::run(args)
}

/// Reads the next message of the parent process; `None` when it has closed its end.
fn next_message<T: serde::de::DeserializeOwned>() -> anyhow::Result<Option<T>> {
    let mut line = String::new();
    if std::io::stdin().read_line(&mut line)? == 0 {
        return Ok(None);
    }
    match serde_json::from_str(&line) {
        Ok(message) => Ok(Some(message)),
        Err(error) => bail!("this command is run by `ec-connector demo` only: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn item(nbytes: u64) -> Planned {
        Planned {
            nbytes,
            origin: Origin::File {
                path: PathBuf::from("x"),
                index: 0,
            },
        }
    }

    #[test]
    fn a_round_fits_half_the_pool_and_has_at_least_one_item() {
        let items: Vec<_> = [100, 100, 100, 900, 1].map(item).into();
        assert_eq!(round_len(&items, 600), 3);
        assert_eq!(round_len(&items, 599), 2);
        assert_eq!(round_len(&items[3..], 600), 1, "larger than the round");
        assert_eq!(round_len(&vec![item(0); 5000], 600), ROUND_ITEMS_MAX);
    }
}
