//! `bench`: programs that measure this project beside its peers.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::fixture;
use crate::instructions;
use crate::runner::Runner;

/// Measures beside the peers, in one run; ratios first
#[derive(clap::Args)]
pub(crate) struct Args {
    /// What to measure
    what: What,
    /// Print one JSON object a row
    #[arg(long)]
    json: bool,
    /// Write what `instructions` counts as the new budget
    #[arg(long)]
    record: bool,
    /// The trace that `trace` and `held-out` replay; a sample that comes with the project by default
    file: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum What {
    /// Offset allocators: time of a pair of calls, and how full a slab stays
    Alloc,
    /// Instructions of slab-core's hot calls against their budget
    Instructions,
    /// Residents: leases beside a hash table's lookup, evictions beside vLLM's
    Resident,
    /// Lists of copies between a tensor and blocks, beside one copy a block
    Descriptors,
    /// Eviction policies on a trace, beside vLLM's and bounds
    Trace,
    /// Eviction policies on workloads that nothing was chosen on
    HeldOut,
    /// One transfer at a time: this engine, the real engine, bare TCP
    Transfer,
    /// One push at a time: beside bare ZeroMQ echoes and a bare transfer
    Push,
    /// Tensors through the pipe: beside the old kind of pipe with the real engine
    Pipe,
}

impl What {
    /// The program that measures, as cargo's arguments.
    fn program(self) -> [&'static str; 4] {
        match self {
            Self::Alloc => ["--package", "slab-bench", "--bin", "bench_alloc"],
            Self::Instructions => ["--package", "slab-bench", "--bin", "hot_calls"],
            Self::Resident => ["--package", "slab-bench", "--bin", "bench_resident"],
            Self::Descriptors => ["--package", "slab-bench", "--bin", "bench_descriptors"],
            Self::Trace => ["--package", "slab-bench", "--bin", "bench_trace"],
            Self::HeldOut => ["--package", "slab-bench", "--bin", "bench_held_out"],
            Self::Transfer => [
                "--package",
                "mooncake-transport",
                "--example",
                "bench_transfer",
            ],
            Self::Push => ["--package", "ec-connector", "--example", "bench_push"],
            Self::Pipe => ["--package", "mooncake-transport", "--example", "bench_pipe"],
        }
    }

    /// The features that the program needs besides its package's own choice.
    fn features(self) -> &'static [&'static str] {
        match self {
            Self::Pipe => &["--features", "pipe"],
            _ => &[],
        }
    }
}

impl Args {
    pub(crate) fn run(self, runner: &Runner) -> Result<()> {
        if self.what == What::Instructions {
            return instructions::run(runner, &self.what.program(), self.json, self.record);
        }
        if self.record {
            bail!("only `bench instructions` has a budget to record");
        }
        if self.file.is_some() && !matches!(self.what, What::Trace | What::HeldOut) {
            bail!("only `bench trace` and `bench held-out` take a file");
        }
        let mut command = runner.cargo(&["run", "--release", "--quiet", "--locked"]);
        command
            .args(self.what.program())
            .args(self.what.features())
            .arg("--");
        if self.json {
            command.arg("--json");
        }
        if let Some(file) = &self.file {
            // The program runs in the workspace root, wherever the command was typed.
            command.arg(absolute(file)?);
        }
        if let What::Transfer | What::Pipe = self.what {
            let fixture = fixture::prepare(runner.root());
            command.envs(fixture.environment());
            fixture.into_result()?;
        }
        runner.run(&mut command)
    }
}

fn absolute(file: &Path) -> Result<PathBuf> {
    std::path::absolute(file).with_context(|| format!("{}", file.display()))
}

/// The budgets, as a step of `ci`.
pub(crate) fn check_instructions(runner: &Runner) -> Result<()> {
    instructions::run(runner, &What::Instructions.program(), false, false)
}
