//! The demo's producer process.

use std::borrow::Cow;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Args;
use ec_connector::{
    ContentHasher, ControlAddress, Delivery, Dtype, Item, MmHash, Producer, PushId, Source,
    TensorFile, TensorSpec,
};

use super::message::{FromProducer, Origin, ToProducer};
use super::next_message;
use crate::cli::device::{DeviceName, memory, parse_device};
use crate::cli::exit::{Failure, Outcome};
use crate::cli::generate::EncoderOutput;
use crate::cli::output::Output;
use crate::cli::push::{parse_address, start_producer};

/// The producer of a demo.
#[derive(Debug, Args)]
pub(crate) struct DemoProducerArgs {
    #[arg(long, value_parser = parse_address)]
    to: ControlAddress,
    #[arg(long, value_parser = parse_device)]
    device: Option<DeviceName>,
}

const TIMEOUT: Duration = Duration::from_secs(60);

pub(super) fn run(args: &DemoProducerArgs) -> Result<Outcome, Failure> {
    let output = Output::new(true);
    let say = |message: &FromProducer| output.row(message, String::new);
    let producer = start_producer(TIMEOUT, None)?;
    let mut opened = None;
    while let Some(ToProducer { push }) = next_message()? {
        let mut items = Vec::with_capacity(push.len());
        for (index, planned) in push.into_iter().enumerate() {
            match item(args, &planned.origin, &mut opened) {
                Ok(item) => items.push((index, item)),
                Err(error) => say(&FromProducer::Failed {
                    index,
                    error: format!("{error:#}"),
                })?,
            }
        }
        if let Some(device) = args.device {
            move_to_device(device, &mut items)?;
        }
        say(&FromProducer::Hashed)?;
        push_round(&producer, items, say)?;
    }
    producer.close();
    Ok(Outcome::Done)
}

/// Pushes the items of a round and says how each ended, in order.
fn push_round(
    producer: &Producer,
    items: Vec<(usize, Item)>,
    say: impl Fn(&FromProducer) -> std::io::Result<()>,
) -> Result<()> {
    let started = Instant::now();
    let mut under_way = Vec::with_capacity(items.len());
    for (index, item) in items {
        let mm_hash = item.mm_hash.as_str().to_owned();
        under_way.push((index, mm_hash, producer.push(item)));
    }
    let mut ended = Vec::with_capacity(under_way.len());
    for (index, mm_hash, push) in under_way {
        // Each push ends by itself.
        ended.push((index, mm_hash, push.wait(None).context("a push was lost")?));
    }
    let seconds = started.elapsed().as_secs_f64();
    for (index, mm_hash, report) in ended {
        let message = match report.result {
            Ok(delivery) => FromProducer::Pushed {
                index,
                transfer_id: report.transfer_id.as_str().to_owned(),
                mm_hash,
                cached: delivery == Delivery::Cached,
                elapsed_us: u64::try_from(report.elapsed.as_micros()).unwrap_or(u64::MAX),
                wire_bytes: report.wire_bytes,
            },
            Err(error) => FromProducer::Failed {
                index,
                error: format!("{:#}", anyhow::Error::new(error)),
            },
        };
        say(&message)?;
    }
    say(&FromProducer::Round { seconds })?;
    Ok(())
}

/// Hashes an item and makes it ready to be pushed.
fn item(
    args: &DemoProducerArgs,
    origin: &Origin,
    opened: &mut Option<(PathBuf, TensorFile)>,
) -> Result<Item> {
    let (tensor, mm_hash, source) = match origin {
        Origin::Generated { output } => generated(output)?,
        Origin::File { path, index } => {
            if opened.as_ref().is_none_or(|(open, _)| open != path) {
                *opened = Some((path.clone(), TensorFile::open(path)?));
            }
            let (_, file) = opened.as_ref().context("no file is open")?;
            let tensor = file.tensors().get(*index).context("the file has changed")?;
            let digest = file.digest(tensor)?;
            let source = Source::File {
                file: Arc::clone(file.file()),
                range: tensor.range(),
                sha256: Some(digest.sha256),
            };
            (file.spec(tensor)?.clone(), digest.mm_hash, source)
        }
    };
    Ok(Item {
        to: args.to.clone(),
        mm_hash: MmHash::new(mm_hash)?,
        tensor,
        source,
        id: PushId::Fresh,
    })
}

/// Moves the bytes of a round into one memory of the device, from which they are sent.
fn move_to_device(device: DeviceName, items: &mut [(usize, Item)]) -> Result<(), Failure> {
    let lens: Vec<u64> = items
        .iter()
        .map(|(_, item)| item.source.len_bytes().unwrap_or(0))
        .collect();
    let total: u64 = lens.iter().sum();
    if total == 0 {
        return Ok(());
    }
    let memory = memory(device, total).map_err(Failure::usage)?.memory;
    let mut offset = 0;
    for ((_, item), len) in items.iter_mut().zip(lens) {
        let bytes = match &item.source {
            Source::Bytes(bytes) => Cow::Borrowed(bytes.as_slice()),
            Source::File { file, range, .. } => {
                let mut bytes =
                    vec![0; usize::try_from(len).context("larger than the address space")?];
                file.read_exact_at(&mut bytes, range.start)
                    .context("cannot read the file again")?;
                Cow::Owned(bytes)
            }
            _ => continue,
        };
        memory
            .copy_in(offset, &bytes)
            .with_context(|| format!("cannot copy to {device}"))?;
        item.source = Source::Memory {
            memory: Arc::clone(&memory),
            range: offset..offset + len,
            // The memory itself is all that has to stay.
            hold: Arc::new(()),
        };
        offset += len;
    }
    Ok(())
}

fn generated(output: &EncoderOutput) -> Result<(TensorSpec, String, Source)> {
    let tensor = TensorSpec::new(Dtype::BFLOAT16, output.shape())?;
    let len = usize::try_from(output.len_bytes()).context("larger than the address space")?;
    let mut bytes = vec![0; len];
    output.fill(0, &mut bytes);
    let mut hasher = ContentHasher::new(&tensor);
    hasher.update(&bytes);
    Ok((tensor, hasher.finish().mm_hash, Source::Bytes(bytes)))
}
