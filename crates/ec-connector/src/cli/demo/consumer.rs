//! The demo's consumer process.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Error, Result, bail};
use clap::Args;
use ec_connector::{Consumer, ConsumerConfig, ConsumerError, TakePolicy, TakenItem, TensorFile};
use mooncake_transport::Engine;
use mooncake_transport::tcp::{TcpConfig, TcpEngine};

use super::message::{FromConsumer, Origin, ToConsumer, Verify};
use super::{ROUND_ITEMS_MAX, next_message};
use crate::cli::device::{DeviceName, POOL_ADVICE, memory, parse_device};
use crate::cli::exit::{Failure, Outcome};
use crate::cli::output::Output;
use crate::cli::size::parse_size;

/// The consumer of a demo.
#[derive(Debug, Args)]
pub(crate) struct DemoConsumerArgs {
    #[arg(long, value_parser = parse_size)]
    pool: u64,
    #[arg(long, value_parser = parse_device)]
    device: Option<DeviceName>,
}

/// An item that was pushed is taken before the push is answered; this is for scheduling.
const ARRIVAL_WAIT: Duration = Duration::from_secs(5);
const DRAIN_WAIT: Duration = Duration::from_secs(5);
/// Compared at a time; a multiple of the generator's eight bytes.
const CHUNK: u64 = 1 << 20;

pub(super) fn run(args: &DemoConsumerArgs) -> Result<Outcome, Failure> {
    let output = Output::new(true);
    let say = |message: &FromConsumer| output.row(message, String::new);
    let consumer = match start(args) {
        Ok(consumer) => consumer,
        Err(error) => {
            let error = format!("{error:#}");
            say(&FromConsumer::Error { error })?;
            return Ok(Outcome::SomeFailed);
        }
    };
    say(&FromConsumer::Ready {
        control: consumer.address().to_string(),
    })?;
    while let Some(ToConsumer { verify }) = next_message()? {
        let mut arrived = HashMap::new();
        let mut files = HashMap::new();
        for (index, wanted) in verify.iter().enumerate() {
            let error = check(&consumer, &mut arrived, &mut files, wanted).err();
            say(&FromConsumer::Verified {
                index,
                error: error.map(|error| format!("{error:#}")),
            })?;
        }
        // The round's leases go here: its items stay resident until room is needed.
    }
    consumer.shutdown(Instant::now() + DRAIN_WAIT)?;
    Ok(Outcome::Done)
}

/// Starts the consumer, or says why not and what to do about it.
fn start(args: &DemoConsumerArgs) -> Result<Consumer> {
    let on_device = args.device.map(|device| memory(device, args.pool));
    let on_device = on_device.transpose()?;
    let loopback = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let engine = Arc::new(TcpEngine::start(TcpConfig::default())?) as Arc<dyn Engine>;
    let mut config = ConsumerConfig::new(loopback, 0, args.pool);
    config.reservations.take = TakePolicy::OnReady {
        taken_max: ROUND_ITEMS_MAX,
    };
    let started = match on_device {
        Some(on_device) => Consumer::start_in(engine, on_device.memory, config),
        None => Consumer::start(engine, config),
    };
    started.map_err(|error| match &error {
        ConsumerError::Slab { .. } | ConsumerError::Pool { .. } => {
            Error::new(error).context(POOL_ADVICE)
        }
        _ => error.into(),
    })
}

/// Finds an item among what was taken and compares it with its origin.
fn check(
    consumer: &Consumer,
    arrived: &mut HashMap<String, TakenItem>,
    files: &mut HashMap<std::path::PathBuf, TensorFile>,
    wanted: &Verify,
) -> Result<()> {
    let deadline = Instant::now() + ARRIVAL_WAIT;
    while !arrived.contains_key(&wanted.transfer_id) {
        let item = consumer
            .next_taken(Some(deadline))
            .context("it was not taken")?;
        arrived.insert(item.transfer_id().as_str().to_owned(), item);
    }
    let item = &arrived[&wanted.transfer_id];
    if item.mm_hash().as_str() != wanted.mm_hash {
        bail!("it arrived as other content, {}", item.mm_hash());
    }
    match &wanted.origin {
        Origin::Generated { output } => {
            if item.tensor().shape() != output.shape() {
                bail!("it arrived with the shape {:?}", item.tensor().shape());
            }
            compare(item, |offset, expected| {
                output.fill(offset, expected);
                Ok(())
            })
        }
        Origin::File { path, index } => {
            if !files.contains_key(path) {
                // One file at a time: tensors come in file order.
                files.clear();
                files.insert(path.clone(), TensorFile::open(path)?);
            }
            let file = &files[path];
            let tensor = file.tensors().get(*index).context("the file has changed")?;
            if item.tensor() != file.spec(tensor)? {
                bail!("it arrived with another shape or type");
            }
            let start = tensor.range().start;
            compare(item, |offset, expected| {
                std::os::unix::fs::FileExt::read_exact_at(&**file.file(), expected, start + offset)
                    .context("cannot read the file again")
            })
        }
    }
}

/// Compares all bytes of `item` with what `expect` puts in place.
fn compare(item: &TakenItem, expect: impl Fn(u64, &mut [u8]) -> Result<()>) -> Result<()> {
    let buffer_len = CHUNK.min(item.len_bytes()) as usize;
    let (mut got, mut expected) = (vec![0; buffer_len], vec![0; buffer_len]);
    let mut offset = 0;
    while offset < item.len_bytes() {
        let len = CHUNK.min(item.len_bytes() - offset) as usize;
        let (got, expected) = (&mut got[..len], &mut expected[..len]);
        item.copy_out(offset, got)?;
        expect(offset, expected)?;
        if let Some(at) = got.iter().zip(&*expected).position(|(a, b)| a != b) {
            bail!("byte {} differs", offset + at as u64);
        }
        offset += len as u64;
    }
    Ok(())
}
