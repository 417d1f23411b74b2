//! `tidy`: the rules about the tree itself.

use anyhow::{Result, bail};

use crate::report::Run;
use crate::runner::Runner;
use crate::tidy;
use crate::workspace::Metadata;

/// Layers, licences, source headers, unsafe code, documents against tests
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Leave out the rules that need the result of `cargo xtask test`
    #[arg(long)]
    pub(crate) without_run: bool,
}

impl Args {
    pub(crate) fn run(self, runner: &Runner) -> Result<()> {
        let metadata = Metadata::load(runner)?;
        let run = if self.without_run {
            None
        } else {
            Some(Run::load(runner.root())?)
        };
        let problems = tidy::check(runner.root(), &metadata, run.as_ref())?;
        if !problems.is_empty() {
            bail!(
                "{} problem(s):\n  {}",
                problems.len(),
                problems.join("\n  ")
            );
        }
        println!("tidy: no problem found");
        Ok(())
    }
}
