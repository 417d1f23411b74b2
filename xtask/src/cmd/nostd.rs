//! `nostd`: builds the pure crates where there is no operating system.

use std::process::{Command, Stdio};

use anyhow::Result;

use crate::report::{Class, NotRun};
use crate::runner::Runner;

/// Builds slab-core and slab-memory for a bare-metal target, with and without an allocator
#[derive(clap::Args)]
pub(crate) struct Args {}

/// Has no operating system, no allocator and no 64-bit atomics.
const TARGET: &str = "thumbv7em-none-eabi";

/// Packages and features that promise to need neither `std` nor, without `alloc`, a heap.
const BUILDS: &[&[&str]] = &[
    &["slab-core", "--no-default-features"],
    &["slab-core", "--no-default-features", "--features", "alloc"],
    &["slab-memory", "--no-default-features"],
    // A program, so that it shows that no allocator is missed.
    &["slab-static"],
];

impl Args {
    pub(crate) fn run(self, runner: &Runner) -> Result<()> {
        self.run_or_say(runner).map(|_| ())
    }

    /// Like `run`, and says what did not run.
    pub(crate) fn run_or_say(&self, runner: &Runner) -> Result<Option<NotRun>> {
        if !runner.is_dry_run() && !has_target() {
            let not_run = NotRun {
                what: "nostd".to_owned(),
                class: Class::NeedsComponent,
                why: format!(
                    "target {TARGET} is not installed and cannot be added; \
                     the same builds run for this machine in `cargo xtask check`"
                ),
            };
            println!("{not_run}");
            return Ok(Some(not_run));
        }
        for build in BUILDS {
            let mut command = runner.cargo(&["build", "--locked", "--quiet", "--target", TARGET]);
            command.arg("-p").args(*build);
            runner.run(&mut command)?;
        }
        Ok(None)
    }
}

/// Adds the target if it is not there. False where it cannot be added.
fn has_target() -> bool {
    Command::new("rustup")
        .args(["target", "add", TARGET])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}
