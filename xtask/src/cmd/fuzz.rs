//! `fuzz`: runs the fuzz targets for a while and says what came of it.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::process::{Captured, Streams, capture};
use crate::runner::{Runner, display};

/// Fuzzes slab-core and the wire formats (needs a nightly toolchain); each target's broken twin has to be found first
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only this target
    target: Option<String>,
    /// How long each target runs
    #[arg(long, value_name = "N", default_value_t = 60)]
    seconds: u64,
}

#[derive(Clone, Copy)]
struct Target {
    name: &'static str,
    /// The line of the product that its twin leaves out.
    left_out: &'static str,
    /// What of `fuzz/Cargo.toml` it needs, so that no other target's libraries are built.
    feature: Option<&'static str>,
}

const fn target(
    name: &'static str,
    left_out: &'static str,
    feature: Option<&'static str>,
) -> Target {
    Target {
        name,
        left_out,
        feature,
    }
}

const TARGETS: &[Target] = &[
    target("free_list", "MergeAbove", None),
    target("pool", "RecordMark", None),
    target("control_frame", "limit of a kind", Some("wire")),
    target("data_frame", "magic number", Some("wire")),
    target("descriptor", "address of a buffer", Some("wire")),
    target("store_answer", "length of a chunk", Some("stores")),
    target("store_call", "length of a value", Some("stores")),
    target("pipe_frame", "end of a range", Some("pipe")),
    target("pipe_config", "metadata server", Some("pipe")),
    target("connector_message", "bytes of a shape", Some("control")),
];

/// Time for a twin to be found; each is found within a few.
const TWIN_SECONDS: u64 = 120;

/// Version of the program that builds and runs the targets.
const CARGO_FUZZ: &str = "0.13.2";

/// What building may take on top of the running time.
const BUILD_LIMIT: Duration = Duration::from_secs(1800);

impl Args {
    pub(crate) fn run(self, runner: &Runner) -> Result<()> {
        let targets: Vec<_> = match &self.target {
            None => TARGETS.to_vec(),
            Some(name) => match TARGETS.iter().find(|target| target.name == name) {
                Some(target) => vec![*target],
                None => {
                    let names: Vec<_> = TARGETS.iter().map(|target| target.name).collect();
                    bail!("no target {name:?}; there are {}", names.join(", "))
                }
            },
        };
        let tools = tools(runner)?;
        println!(
            "{:<17} {:>12} {:>10} {:>9}  result",
            "target", "executions", "a second", "coverage"
        );
        for target in targets {
            if runner.is_dry_run() {
                for twin in [true, false] {
                    println!("+ {}", display(&self.command(runner, &tools, target, twin)));
                }
                continue;
            }
            self.fuzz(runner, &tools, target)?;
        }
        Ok(())
    }

    fn fuzz(&self, runner: &Runner, tools: &Path, target: Target) -> Result<()> {
        let Target { name, left_out, .. } = target;
        let twin = self.execute(runner, tools, target, true)?;
        if twin.is_success() || !twin.stdout.contains("panicked at") {
            bail!(
                "{name} did not notice that {left_out} is left out:\n{}",
                twin.stdout
            );
        }
        let captured = self.execute(runner, tools, target, false)?;
        let summary = Summary::read(&captured.stdout);
        let result = if captured.is_success() {
            "no find; the twin was found"
        } else {
            "FOUND"
        };
        println!(
            "{name:<17} {:>12} {:>10} {:>9}  {result}",
            summary.executions, summary.per_second, summary.coverage
        );
        if !captured.is_success() {
            let file = artifact(&captured.stdout).unwrap_or("no file was written");
            bail!("{name}: {}\n{file}\n{}", captured.ending(), captured.stdout);
        }
        if summary.executions == 0 {
            bail!("{name} executed nothing:\n{}", captured.stdout);
        }
        Ok(())
    }

    fn execute(
        &self,
        runner: &Runner,
        tools: &Path,
        target: Target,
        twin: bool,
    ) -> Result<Captured> {
        for folder in ["corpus", "artifacts", "twins", "twins-corpus"] {
            let folder = runner
                .root()
                .join("target/fuzz")
                .join(folder)
                .join(target.name);
            std::fs::create_dir_all(&folder)
                .with_context(|| format!("cannot make {}", folder.display()))?;
        }
        let mut command = self.command(runner, tools, target, twin);
        let limit = BUILD_LIMIT + Duration::from_secs(self.seconds + TWIN_SECONDS);
        capture(&mut command, Streams::Joined, limit)
    }

    fn command(&self, runner: &Runner, tools: &Path, target: Target, twin: bool) -> Command {
        let name = target.name;
        // What is learnt stays in `target`; the seeds are checked in.
        let learnt = format!("target/fuzz/corpus/{name}");
        let seeds = format!("fuzz/corpus/{name}");
        let (artifacts, seconds) = if twin {
            (format!("target/fuzz/twins/{name}/"), TWIN_SECONDS)
        } else {
            (format!("target/fuzz/artifacts/{name}/"), self.seconds)
        };
        // Other flags would build everything anew each time.
        let built = if twin {
            "target/fuzz-twin"
        } else {
            "target/fuzz"
        };
        let mut command = Command::new("rustup");
        command
            .current_dir(runner.root())
            .args(["run", "nightly"])
            .arg(tools.join("bin/cargo-fuzz"))
            .args(["run", "--target-dir", built]);
        if let Some(feature) = target.feature {
            command.args(["--features", feature]);
        }
        command.arg(name);
        if twin {
            // Without what was learnt, and what it learns and finds apart.
            command
                .arg(format!("target/fuzz/twins-corpus/{name}"))
                .arg(seeds)
                .env("SLAB_TWIN", target.left_out)
                .env("RUSTFLAGS", "--cfg slab_twin");
        } else {
            command.arg(learnt).arg(seeds);
        }
        command
            .arg("--")
            .arg(format!("-max_total_time={seconds}"))
            .arg(format!("-artifact_prefix={artifacts}"))
            .args(["-max_len=600", "-print_final_stats=1"]);
        command
    }
}

/// Installs what builds and runs the targets into `target/tools`, unless it is there.
fn tools(runner: &Runner) -> Result<PathBuf> {
    let tools = runner.root().join("target/tools");
    if tools.join("bin/cargo-fuzz").exists() || runner.is_dry_run() {
        return Ok(tools);
    }
    let nightly = Command::new("rustup")
        .args(["run", "nightly", "rustc", "-V"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    if !nightly.is_ok_and(|status| status.success()) {
        bail!("fuzzing needs a nightly toolchain: rustup toolchain install nightly");
    }
    let mut install = runner.cargo(&["install", "--locked", "--quiet", "cargo-fuzz"]);
    install
        .args(["--version", CARGO_FUZZ, "--root"])
        .arg(&tools);
    runner.run(&mut install)?;
    Ok(tools)
}

/// What libFuzzer says at the end.
#[derive(Debug, Default, PartialEq, Eq)]
struct Summary {
    executions: u64,
    per_second: u64,
    /// Edges reached.
    coverage: u64,
}

impl Summary {
    fn read(output: &str) -> Self {
        let stat = |name: &str| {
            output
                .lines()
                .rev()
                .find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
                .unwrap_or(0)
        };
        let coverage = output.lines().rev().find_map(|line| {
            let (_, rest) = line.split_once(" cov: ")?;
            rest.split_whitespace().next()?.parse().ok()
        });
        Self {
            executions: stat("stat::number_of_executed_units:"),
            per_second: stat("stat::average_exec_per_sec:"),
            coverage: coverage.unwrap_or(0),
        }
    }
}

/// The line that names the file of a find.
fn artifact(output: &str) -> Option<&str> {
    output
        .lines()
        .find(|line| line.contains("Test unit written to"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "\
#2\tINITED cov: 300 ft: 301 corp: 1/1b exec/s: 0 rss: 30Mb
#65536\tpulse  cov: 812 ft: 4000 corp: 100/10Kb lim: 600 exec/s: 21845 rss: 90Mb
Done 70000 runs in 4 second(s)
stat::number_of_executed_units: 70000
stat::average_exec_per_sec:     17500
";

    #[test]
    fn the_summary_is_what_was_said_last() {
        assert_eq!(
            Summary::read(OUTPUT),
            Summary {
                executions: 70_000,
                per_second: 17_500,
                coverage: 812
            }
        );
        assert_eq!(Summary::read("error: no such target"), Summary::default());
    }

    #[test]
    fn a_find_names_its_file() {
        let find = "x\nartifact_prefix='a/'; Test unit written to a/crash-1\ny";
        assert!(artifact(find).unwrap().ends_with("a/crash-1"));
        assert_eq!(artifact(OUTPUT), None);
    }
}
