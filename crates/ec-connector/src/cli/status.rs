//! `status`: what the memory of a consumer is used for.

use std::time::Duration;

use anyhow::Context;
use clap::Args;
use ec_connector::{ControlAddress, ControlClient, ControlContext, PoolSnapshot};

use super::exit::{Failure, Outcome};
use super::output::Output;
use super::push::parse_address;
use super::size::show_size;
use super::slab_map::draw;

/// Show what a consumer's pool is used for
#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    /// Control address of the consumer
    #[arg(long, value_name = "tcp://HOST:PORT", value_parser = parse_address)]
    of: ControlAddress,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// A consumer answers in milliseconds; this is for one that is gone.
const TIMEOUT: Duration = Duration::from_secs(5);

pub(crate) fn run(args: &StatusArgs) -> Result<Outcome, Failure> {
    let snapshot = fetch(&args.of)?;
    let output = Output::new(args.json);
    output.row(&snapshot, || {
        format!(
            "{}: pool of {}, {} in {} contents, {} leases, largest free piece {}",
            args.of,
            show_size(snapshot.capacity),
            show_size(snapshot.usable - snapshot.bytes.free),
            snapshot.residents,
            snapshot.leases,
            show_size(snapshot.largest_free),
        )
    })?;
    output.say(&report(&snapshot, &output))?;
    Ok(Outcome::Done)
}

/// Asks a consumer for its snapshot.
pub(crate) fn fetch(of: &ControlAddress) -> Result<PoolSnapshot, Failure> {
    let mut client = ControlClient::new(&ControlContext::new(), of.clone(), TIMEOUT);
    client.set_fail_fast(true);
    Ok(client.pool().with_context(|| {
        format!("cannot ask {of} for its pool; check that an ec-connector consumer runs there")
    })?)
}

fn report(snapshot: &PoolSnapshot, output: &Output) -> String {
    let counts = &snapshot.reservations;
    let mut text = format!(
        "reservations: {} writing, {} following, {} ready, {} cancelled and {} expired with an unfinished writer; {} taken \
         and waiting\n",
        counts.writing,
        counts.following,
        counts.ready,
        counts.cancel_pending,
        counts.expire_pending,
        snapshot.taken_waiting,
    );
    if snapshot.bytes.stuck > 0 {
        text.push_str(&format!(
            "{} are stuck: their producers reserved them and never came back\n",
            show_size(snapshot.bytes.stuck)
        ));
    }
    text.push('\n');
    text.push_str(&draw(
        snapshot.capacity,
        &snapshot.map.runs,
        output.map_style(),
    ));
    text
}
