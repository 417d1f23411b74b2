//! `model`: explores the models of the lock, one row each, and tries the twins of the state machines.

mod twins;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::process::{Captured, Streams, capture};
use crate::runner::{Runner, display};

/// Explores every interleaving of the loom models, and tries the broken twins that they and the property tests notice
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only models whose name contains TEXT
    #[arg(long, value_name = "TEXT", default_value = "")]
    filter: String,
    /// Most preemptions of one interleaving; each more multiplies their number
    #[arg(long, value_name = "N", default_value_t = PREEMPTIONS)]
    preemptions: u32,
    /// Seconds after which a model is stopped and counts as failed
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    limit: u64,
}

/// The models of two threads are explored whole from 5 on; most mistakes show with 2.
const PREEMPTIONS: u32 = 3;

impl Default for Args {
    fn default() -> Self {
        Self {
            filter: String::new(),
            preemptions: PREEMPTIONS,
            limit: 600,
        }
    }
}

impl Args {
    pub(crate) fn run(self, runner: &Runner) -> Result<()> {
        let program = MODELS.build(runner)?;
        let mut harnesses = Vec::new();
        for twins in twins::HARNESSES.iter().filter(|_| self.filter.is_empty()) {
            harnesses.extend(twins.build(runner)?);
        }
        let Some(program) = program else {
            return Ok(());
        };
        let names = self.names(&program)?;
        println!("at most {} preemptions\n", self.preemptions);
        println!(
            "{:<76} {:>13} {:>8}  result",
            "model", "interleavings", "time"
        );
        let mut failed = 0;
        for name in &names {
            let row = self.explore(&program, name)?;
            failed += u32::from(!row.passed);
            row.print(name);
        }
        println!("\n{} models, {failed} failed", names.len());
        let tried = match self.filter.is_empty() {
            true => twins::try_all(&harnesses, Duration::from_secs(self.limit)),
            false => Ok(()),
        };
        if failed > 0 {
            bail!("{failed} of {} models failed", names.len());
        }
        tried
    }

    fn names(&self, program: &PathBuf) -> Result<Vec<String>> {
        let output = Command::new(program)
            .args(["--list", "--format", "terse"])
            .output()
            .context("cannot start the models")?;
        let names: Vec<String> = String::from_utf8_lossy(&output.stdout)
            .lines()
            .filter_map(|line| line.strip_suffix(": test"))
            .filter(|name| name.contains(&self.filter))
            .map(str::to_owned)
            .collect();
        if names.is_empty() {
            bail!("no model's name contains {:?}", self.filter);
        }
        Ok(names)
    }

    /// Explores one model and its twins in a process of their own: a twin may hang or abort.
    fn explore(&self, program: &PathBuf, name: &str) -> Result<Row> {
        let mut command = Command::new(program);
        command
            .args(["--exact", name, "--nocapture"])
            .env("LOOM_MAX_PREEMPTIONS", self.preemptions.to_string())
            .env("RUST_BACKTRACE", "0");
        let begin = Instant::now();
        let captured = capture(
            &mut command,
            Streams::Apart,
            Duration::from_secs(self.limit),
        )?;
        Ok(Row::read(&captured, begin.elapsed()))
    }
}

/// What a model's process said.
struct Row {
    passed: bool,
    explores: String,
    interleavings: String,
    /// Twin, and how it failed.
    twins: BTreeMap<String, String>,
    elapsed: Duration,
    trouble: Option<String>,
}

impl Row {
    fn read(captured: &Captured, elapsed: Duration) -> Self {
        let mut row = Self {
            passed: captured.is_success(),
            explores: String::new(),
            interleavings: String::new(),
            twins: BTreeMap::new(),
            elapsed,
            trouble: None,
        };
        for line in captured.stdout.lines() {
            if let Some(text) = line.strip_prefix("explores: ") {
                text.clone_into(&mut row.explores);
            } else if let Some(text) = line.strip_prefix("interleavings: ") {
                text.clone_into(&mut row.interleavings);
            } else if let Some((twin, how)) = line
                .strip_prefix("without ")
                .and_then(|line| line.split_once(": "))
            {
                row.twins.insert(twin.to_owned(), how.to_owned());
            }
        }
        // A process that explored nothing has shown nothing.
        row.passed &= !row.interleavings.is_empty() && !row.twins.is_empty();
        if !row.passed {
            row.trouble = Some(format!("{}: {}", captured.ending(), captured.stderr));
        }
        row
    }

    fn print(&self, name: &str) {
        println!(
            "{name:<76} {:>13} {:>6.1} s  {}",
            self.interleavings,
            self.elapsed.as_secs_f64(),
            if self.passed { "holds" } else { "FAILED" },
        );
        println!("  {}", self.explores);
        for (twin, how) in &self.twins {
            let how: String = how.chars().take(60).collect();
            println!("  noticed without {twin}: {how}");
        }
        if let Some(trouble) = &self.trouble {
            println!("{trouble}");
        }
    }
}

/// A test program that is built with a flag of its own, which would build everything else anew: so it has a folder of
/// its own.
struct Program {
    package: &'static str,
    test: &'static str,
    flag: &'static str,
    folder: &'static str,
}

const MODELS: Program = Program {
    package: "slab-loom",
    test: "shared",
    flag: "--cfg slab_loom",
    folder: "target/loom",
};

impl Program {
    /// Nothing in a dry run.
    fn build(&self, runner: &Runner) -> Result<Option<PathBuf>> {
        let mut command = runner.cargo(&["test", "--locked", "--package", self.package]);
        command
            .args(["--no-run", "--target-dir", self.folder])
            .env("RUSTFLAGS", self.flag);
        println!("+ {}", display(&command));
        if runner.is_dry_run() {
            return Ok(None);
        }
        let output = command
            .args(["--test", self.test, "--quiet"])
            .args(["--message-format", "json-render-diagnostics"])
            .stderr(Stdio::inherit())
            .output()
            .context("cannot start cargo")?;
        if !output.status.success() {
            bail!("{} does not build", self.test);
        }
        let program = String::from_utf8_lossy(&output.stdout)
            .lines()
            .filter_map(|line| serde_json::from_str::<Artifact>(line).ok())
            .find_map(|artifact| artifact.executable)
            .context("cargo built no program")?;
        Ok(Some(program))
    }
}

/// A line of cargo's JSON output, as far as it is used here.
#[derive(Deserialize)]
struct Artifact {
    executable: Option<PathBuf>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn captured(stdout: &str) -> Captured {
        Captured {
            status: Some(std::process::ExitStatus::default()),
            stdout: stdout.to_owned(),
            stderr: String::new(),
            elapsed: Duration::ZERO,
        }
    }

    #[test]
    fn a_row_tells_what_was_explored_and_which_twins_were_noticed() {
        let text =
            "test a ... \nexplores: two threads\ninterleavings: 17\nwithout X: deadlock; y\nok\n";
        let row = Row::read(&captured(text), Duration::ZERO);
        assert!(row.passed);
        assert_eq!(
            (row.explores.as_str(), row.interleavings.as_str()),
            ("two threads", "17")
        );
        assert_eq!(row.twins["X"], "deadlock; y");
    }

    #[test]
    fn a_model_that_explored_nothing_or_has_no_twin_has_failed() {
        for text in ["test a ... ok\n", "interleavings: 17\n"] {
            assert!(!Row::read(&captured(text), Duration::ZERO).passed);
        }
    }
}
