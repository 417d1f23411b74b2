//! `licences`: brings the list in `THIRD-PARTY.md` up to date.

use anyhow::Result;

use crate::runner::Runner;
use crate::tidy::licences;
use crate::workspace::Metadata;

/// Writes the licences of all dependencies into THIRD-PARTY.md
#[derive(clap::Args)]
pub(crate) struct Args {}

impl Args {
    pub(crate) fn run(self, runner: &Runner) -> Result<()> {
        let count = licences::update(runner.root(), &Metadata::load(runner)?)?;
        println!("licences: {count} crates listed");
        Ok(())
    }
}
