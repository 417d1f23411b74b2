//! `package`: builds the published crates from their packages alone.

use anyhow::Result;

use crate::runner::Runner;
use crate::workspace::Metadata;

/// Packages the published crates and builds them from the packages
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Accept changes that are not committed
    #[arg(long)]
    pub(crate) allow_dirty: bool,
}

impl Args {
    pub(crate) fn run(self, runner: &Runner) -> Result<()> {
        let metadata = Metadata::load(runner)?;
        let mut command = runner.cargo(&["package", "--locked", "--quiet", "--workspace"]);
        for package in metadata.members().filter(|package| !package.is_published()) {
            command.args(["--exclude", &package.name]);
        }
        if self.allow_dirty {
            command.arg("--allow-dirty");
        }
        runner.run(&mut command)
    }
}
