//! `bench`: programs that measure this project beside its peers.

use anyhow::Result;

use crate::fixture;
use crate::runner::Runner;

/// Measures beside the peers, in one run; ratios first
#[derive(clap::Args)]
pub(crate) struct Args {
    /// What to measure
    what: What,
    /// Print one JSON object a row
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum What {
    /// One transfer at a time: this engine, the real engine, bare TCP
    Transfer,
    /// One push at a time: beside bare ZeroMQ echoes and a bare transfer
    Push,
}

impl What {
    /// The program that measures: package and example.
    fn program(self) -> (&'static str, &'static str) {
        match self {
            Self::Transfer => ("mooncake-transport", "bench_transfer"),
            Self::Push => ("ec-connector", "bench_push"),
        }
    }
}

impl Args {
    pub(crate) fn run(self, runner: &Runner) -> Result<()> {
        let (package, example) = self.what.program();
        let mut command = runner.cargo(&["run", "--release", "--quiet", "--locked"]);
        command.args(["--package", package, "--example", example]);
        if self.json {
            command.args(["--", "--json"]);
        }
        if let What::Transfer = self.what {
            let fixture = fixture::prepare(runner.root());
            command.envs(fixture.environment());
            fixture.into_result()?;
        }
        runner.run(&mut command)
    }
}
