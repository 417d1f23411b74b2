//! `fixture`: fetches what the real-input and real-peer tests use.

use anyhow::Result;

use crate::fixture;
use crate::runner::Runner;

/// Fetches what the real-input and real-peer tests use into target/fixture
#[derive(clap::Args)]
pub(crate) struct Args {}

impl Args {
    pub(crate) fn run(self, runner: &Runner) -> Result<()> {
        let fixture = fixture::prepare(runner.root());
        for (key, value) in fixture.environment() {
            println!("{key}={}", value.display());
        }
        fixture.into_result()
    }
}
