//! `ci`: the list that continuous integration runs.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::cmd;
use crate::report::Run;
use crate::runner::Runner;

/// What continuous integration runs: check, nostd, test, instructions, model, tidy, package
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Accept changes that are not committed (when packaging)
    #[arg(long)]
    allow_dirty: bool,
}

impl Args {
    pub(crate) fn run(self, runner: &Runner) -> Result<()> {
        let allow_dirty = self.allow_dirty;
        let mut run = None;
        let mut times = Vec::new();
        let mut not_run = None;
        let steps: [(&str, &mut dyn FnMut() -> Result<()>); 7] = [
            ("check", &mut || cmd::check::Args {}.run(runner)),
            ("nostd", &mut || {
                not_run = cmd::nostd::Args {}.run_or_say(runner)?;
                Ok(())
            }),
            ("test", &mut || {
                cmd::test::Args::default().run_all(runner, &mut run)
            }),
            ("instructions", &mut || {
                cmd::bench::check_instructions(runner)
            }),
            ("model", &mut || cmd::model::Args::default().run(runner)),
            ("tidy", &mut || {
                cmd::tidy::Args { without_run: false }.run(runner)
            }),
            ("package", &mut || {
                cmd::package::Args { allow_dirty }.run(runner)
            }),
        ];
        let mut result = Ok(());
        for (name, step) in steps {
            println!("\n== {name}");
            let begin = Instant::now();
            result = step().with_context(|| format!("`{name}` failed"));
            times.push((name, begin.elapsed()));
            if result.is_err() {
                break;
            }
        }
        println!("\n== time");
        for (name, time) in &times {
            println!("{name:<10} {:>7.1} s", time.as_secs_f64());
        }
        let total: Duration = times.iter().map(|(_, time)| *time).sum();
        println!("{:<10} {:>7.1} s", "total", total.as_secs_f64());
        if let Some(not_run) = &not_run {
            println!("\n{not_run}");
        }
        if let Err(error) = &result {
            println!("\nfailed: {error:#}");
        }
        if let Some(run) = run.as_ref().map(Run::closing_line) {
            println!("{run}");
        }
        result
    }
}
