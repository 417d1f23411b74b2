//! `status`: what the memory of a consumer is used for.

use std::time::Duration;

use anyhow::Context;
use clap::Args;
use ec_connector::{ControlAddress, ControlClient, ControlContext, PoolSnapshot};

use super::exit::{Failure, Outcome};
use super::output::Output;
use super::push::{check_host, parse_address};
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
    check_host(&args.of)?;
    let snapshot = fetch(&args.of)?;
    let output = Output::new(args.json);
    output.row(&snapshot, || {
        format!("{}: pool of {}", args.of, show_size(snapshot.capacity))
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
        "contents:     {} with {} leases; {} taken and waiting\n\
         in use:       {}, largest free piece {}\n\
         reservations: {} writing, {} following, {} ready\n",
        snapshot.residents,
        snapshot.leases,
        snapshot.taken_waiting,
        show_size(snapshot.usable - snapshot.bytes.free),
        show_size(snapshot.largest_free),
        counts.writing,
        counts.following,
        counts.ready,
    );
    if counts.cancel_pending + counts.expire_pending > 0 {
        text.push_str(&format!(
            "unfinished:   {} writers of cancelled, {} of expired reservations\n",
            counts.cancel_pending, counts.expire_pending
        ));
    }
    if snapshot.bytes.stuck > 0 {
        text.push_str(&format!(
            "stuck:        {}, reserved by producers that never came back\n",
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
