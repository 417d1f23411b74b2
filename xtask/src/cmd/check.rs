//! `check`: formatting, lints and documentation, warnings being errors.

use anyhow::Result;

use crate::runner::Runner;

/// Formatting, clippy for every documented feature combination, rustdoc
#[derive(clap::Args)]
pub(crate) struct Args {}

/// Feature combinations that the workspace build does not cover: building the
/// workspace joins the features that its members ask of one another.
const FEATURE_SETS: &[&[&str]] = &[
    &["slab-core", "--no-default-features"],
    &["slab-core", "--no-default-features", "--features", "alloc"],
    &["slab-core", "--no-default-features", "--features", "std"],
    &["slab-memory", "--no-default-features"],
    &["slab-memory", "--no-default-features", "--features", "std"],
    &["mooncake-transport", "--no-default-features"],
    &[
        "mooncake-transport",
        "--no-default-features",
        "--features",
        "tcp",
    ],
    &[
        "mooncake-transport",
        "--no-default-features",
        "--features",
        "pipe",
    ],
    &[
        "mooncake-transport",
        "--no-default-features",
        "--features",
        "ffi",
    ],
    &["mooncake-transport", "--all-features"],
];

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
