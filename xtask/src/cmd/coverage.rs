//! `coverage`: brings `docs/COVERAGE.md` up to date with the row comments.

use anyhow::{Result, bail};

use crate::report::Run;
use crate::runner::Runner;
use crate::tidy::coverage;

/// Writes the tests that carry `// row: ID` comments into docs/COVERAGE.md
#[derive(clap::Args)]
pub(crate) struct Args {}

impl Args {
    pub(crate) fn run(self, runner: &Runner) -> Result<()> {
        let run = Run::load(runner.root())?;
        if !run.complete {
            // It would take the tests that did not run out of the table.
            bail!("the last run left tests out; run `cargo xtask test` without a filter first");
        }
        let added = coverage::update(runner.root(), &run)?;
        println!("coverage: {added} test(s) added to the table");
        Ok(())
    }
}
