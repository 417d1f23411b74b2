//! The project's own commands, run as `cargo xtask <command>`.
//!
//! `main` only parses and dispatches. A command is a file under `cmd/`; what
//! several commands share lies beside this file: running programs (`runner`,
//! `process`), the workspace as cargo sees it (`workspace`), the result of a
//! test run (`libtest`, `report`), what the tests need from outside
//! (`fixture`) and the rules about the tree itself (`tidy`).
#![forbid(unsafe_code)]

mod cmd;
mod fixture;
mod instructions;
mod libtest;
mod process;
mod report;
mod runner;
mod tidy;
mod workspace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::runner::Runner;

/// Checks, tests and packages this workspace.
#[derive(Parser)]
#[command(name = "cargo xtask", disable_help_subcommand = true)]
struct Cli {
    /// Print the commands instead of running them (where a command runs any)
    #[arg(long, global = true)]
    dry_run: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Check(cmd::check::Args),
    Test(cmd::test::Args),
    Tidy(cmd::tidy::Args),
    Coverage(cmd::coverage::Args),
    Licences(cmd::licences::Args),
    Package(cmd::package::Args),
    Fixture(cmd::fixture::Args),
    Bench(cmd::bench::Args),
    Model(cmd::model::Args),
    Miri(cmd::miri::Args),
    Nostd(cmd::nostd::Args),
    Fuzz(cmd::fuzz::Args),
    Gpu(cmd::gpu::Args),
    Ci(cmd::ci::Args),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = Runner::new(cli.dry_run).and_then(|runner| match cli.command {
        Command::Check(args) => args.run(&runner),
        Command::Test(args) => args.run(&runner),
        Command::Tidy(args) => args.run(&runner),
        Command::Coverage(args) => args.run(&runner),
        Command::Licences(args) => args.run(&runner),
        Command::Package(args) => args.run(&runner),
        Command::Fixture(args) => args.run(&runner),
        Command::Bench(args) => args.run(&runner),
        Command::Model(args) => args.run(&runner),
        Command::Miri(args) => args.run(&runner),
        Command::Nostd(args) => args.run(&runner),
        Command::Fuzz(args) => args.run(&runner),
        Command::Gpu(args) => args.run(&runner),
        Command::Ci(args) => args.run(&runner),
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
