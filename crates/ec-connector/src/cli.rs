//! The command line: arguments, and which command runs.

mod consume;
mod demo;
mod device;
mod exit;
mod generate;
mod output;
mod push;
mod signals;
mod size;
mod slab_map;
mod status;
mod terminal;

use std::io::{self, IsTerminal};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use terminal::wants_colours;

/// Push tensors from one process into another process's memory pool, over Mooncake's wire protocol.
#[derive(Debug, Parser)]
#[command(version, after_help = AFTER_HELP, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const AFTER_HELP: &str = "\
Try it:
  ec-connector demo                                            both sides on this machine
  ec-connector consume --listen 127.0.0.1:14579 --pool 1GiB    in one terminal
  ec-connector push --to tcp://127.0.0.1:14579 FILE            in another
  ec-connector status --of tcp://127.0.0.1:14579

Exit codes: 0 all done and verified, 1 some item failed, 2 wrong usage or configuration.
Log messages go to standard error; RUST_LOG=debug shows more of them.";

#[derive(Debug, Subcommand)]
enum Command {
    Demo(demo::DemoArgs),
    Consume(consume::ConsumeArgs),
    Push(push::PushArgs),
    Status(status::StatusArgs),
    #[command(hide = true)]
    DemoConsumer(demo::DemoConsumerArgs),
    #[command(hide = true)]
    DemoProducer(demo::DemoProducerArgs),
}

/// Runs the command that was asked for. Wrong arguments end the process with code 2.
pub(crate) fn run() -> ExitCode {
    let cli = Cli::parse();
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(io::stderr)
        .with_ansi(wants_colours(io::stderr().is_terminal()));
    tracing_subscriber::registry()
        .with(lines)
        .with(log_filter())
        .init();
    let result = match &cli.command {
        Command::Demo(args) => demo::run(args),
        Command::Consume(args) => consume::run(args),
        Command::Push(args) => push::run(args),
        Command::Status(args) => status::run(args),
        Command::DemoConsumer(args) => demo::run_consumer(args),
        Command::DemoProducer(args) => demo::run_producer(args),
    };
    match result {
        Ok(outcome) => outcome.into(),
        Err(failure) => failure.report(),
    }
}

/// What `RUST_LOG` asks for (`debug`, or `target=level` separated by commas), else warnings and errors.
fn log_filter() -> Targets {
    std::env::var("RUST_LOG")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or_else(|| Targets::new().with_default(LevelFilter::WARN))
}
