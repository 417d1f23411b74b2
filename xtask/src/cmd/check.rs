//! `check`: formatting, lints and documentation, warnings being errors.

use anyhow::Result;

use crate::runner::Runner;
use crate::workspace::FEATURE_SETS;

/// Formatting, clippy for every documented feature combination, rustdoc
#[derive(clap::Args)]
pub(crate) struct Args {}

impl Args {
    pub(crate) fn run(self, runner: &Runner) -> Result<()> {
        runner.run(&mut runner.cargo(&["fmt", "--all", "--check"]))?;
        let clippy = ["clippy", "--locked", "--quiet", "--all-targets"];
        let lints = ["--", "-D", "warnings"];
        runner.run(runner.cargo(&clippy).arg("--workspace").args(lints))?;
        for features in FEATURE_SETS {
            runner.run(runner.cargo(&clippy).arg("-p").args(*features).args(lints))?;
        }
        let mut doc = runner.cargo(&["doc", "--locked", "--quiet", "--workspace", "--no-deps"]);
        doc.arg("--all-features");
        runner.run(doc.env("RUSTDOCFLAGS", "-D warnings"))
    }
}
