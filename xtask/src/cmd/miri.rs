//! `miri`: runs the tests of slab-core in an interpreter that notices undefined behaviour.

use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Result, bail};

use crate::libtest::{self, Outcome};
use crate::process::{Captured, Streams, capture};
use crate::report::{Class, LIB_TARGET, NotRun};
use crate::runner::{Runner, display};
use crate::workspace::{Metadata, Target};

/// Interprets the tests of slab-core with Miri (needs a nightly toolchain with its components)
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only targets whose name contains TEXT (`lib`, or an integration test)
    #[arg(long, value_name = "TEXT", default_value = "")]
    target: String,
    /// Cases of each property test; each takes seconds
    #[arg(long, value_name = "N", default_value_t = CASES)]
    cases: u32,
    /// Seconds after which a target is stopped and counts as failed
    #[arg(long, value_name = "SECONDS", default_value_t = LIMIT_S)]
    limit: u64,
}

const PACKAGE: &str = "slab-core";
const CASES: u32 = 2;
/// No target needs a tenth of this; it only ends a hang.
const LIMIT_S: u64 = 1800;

impl Args {
    pub(crate) fn run(self, runner: &Runner) -> Result<()> {
        if !runner.is_dry_run() && !has_miri() {
            let not_run = NotRun {
                what: "miri".to_owned(),
                class: Class::NeedsComponent,
                why: "no nightly toolchain with the components miri and rust-src: \
                      rustup toolchain install nightly -c miri -c rust-src"
                    .to_owned(),
            };
            println!("{not_run}");
            return Ok(());
        }
        let targets = targets(&Metadata::load(runner)?);
        let targets: Vec<_> = targets
            .iter()
            .filter(|target| target.contains(&self.target))
            .collect();
        if targets.is_empty() {
            bail!(
                "{PACKAGE} has no target whose name contains {:?}",
                self.target
            );
        }
        let (mut failed, mut passed) = (Vec::new(), 0);
        for target in targets {
            let mut command = self.command(runner, target);
            if runner.is_dry_run() {
                println!("+ {}", display(&command));
                continue;
            }
            let limit = Duration::from_secs(self.limit);
            let captured = capture(&mut command, Streams::Apart, limit)?;
            match report(target, &captured) {
                Ok(count) => passed += count,
                Err(trouble) => {
                    println!("{}\n{}", captured.stdout, captured.stderr);
                    println!("{target}: {trouble:#}");
                    failed.push(target.as_str());
                }
            }
        }
        if !failed.is_empty() {
            bail!("failed under Miri: {}", failed.join(", "));
        }
        // A target may be empty without the flag that it is for; a run may not.
        if passed == 0 && !runner.is_dry_run() {
            bail!("nothing ran under Miri");
        }
        Ok(())
    }

    fn command(&self, runner: &Runner, target: &str) -> Command {
        let mut command = Command::new("rustup");
        command
            .current_dir(runner.root())
            .args(["run", "nightly", "cargo", "miri", "test", "--locked"])
            .args(["--quiet", "--target-dir", "target/miri"])
            .args(["--package", PACKAGE, "--features", "std"]);
        if target == LIB_TARGET {
            command.arg("--lib");
        } else {
            command.args(["--test", target]);
        }
        command
            .args(["--", "--format", "pretty"])
            // Where Miri keeps the standard library that it builds for itself.
            .env("XDG_CACHE_HOME", runner.root().join("target/miri/cache"))
            .env("PROPTEST_CASES", self.cases.to_string())
            // The tests see nothing else of this machine.
            .env("MIRIFLAGS", "-Zmiri-env-forward=PROPTEST_CASES");
        command
    }
}

/// Whether Miri is there, and the source of the standard library that it builds for itself.
fn has_miri() -> bool {
    let listed = Command::new("rustup")
        .args(["component", "list", "--installed", "--toolchain", "nightly"])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output();
    listed.is_ok_and(|output| has_components(&String::from_utf8_lossy(&output.stdout)))
}

fn has_components(listed: &str) -> bool {
    ["miri", "rust-src"]
        .iter()
        .all(|component| listed.lines().any(|line| line.starts_with(component)))
}

/// The library and the integration tests.
fn targets(metadata: &Metadata) -> Vec<String> {
    let package = metadata.members().find(|package| package.name == PACKAGE);
    let targets: &[Target] = package.map_or(&[], |package| &package.targets);
    let has_kind = |target: &Target, kind: &str| target.kind.iter().any(|k| k == kind);
    targets
        .iter()
        .filter_map(|target| {
            if has_kind(target, "lib") {
                Some(LIB_TARGET.to_owned())
            } else {
                has_kind(target, "test").then(|| target.name.clone())
            }
        })
        .collect()
}

/// Prints a line about a target, and returns how many tests passed; an error if it is not whole and good.
fn report(target: &str, captured: &Captured) -> Result<usize> {
    let tests = match libtest::parse(&captured.stdout) {
        Ok(tests) => tests,
        Err(error) => bail!("{}: {error:#}", captured.ending()),
    };
    let count = |wanted: fn(&Outcome) -> bool| tests.iter().filter(|t| wanted(&t.outcome)).count();
    let passed = count(|outcome| matches!(outcome, Outcome::Passed));
    println!(
        "{:<40} {passed:>4} passed {:>3} failed {:>3} ignored {:>8.2} s",
        format!("{PACKAGE}/{target}"),
        count(|outcome| matches!(outcome, Outcome::Failed)),
        count(|outcome| matches!(outcome, Outcome::Ignored(_))),
        captured.elapsed.as_secs_f64()
    );
    if !captured.is_success() {
        bail!("{}", captured.ending());
    }
    Ok(passed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn captured(stdout: &str, code: i32) -> Captured {
        use std::os::unix::process::ExitStatusExt;
        Captured {
            status: Some(std::process::ExitStatus::from_raw(code << 8)),
            stdout: stdout.to_owned(),
            stderr: String::new(),
            elapsed: Duration::ZERO,
        }
    }

    #[test]
    fn both_components_are_needed() {
        assert!(has_components("miri-x86_64-unknown-linux-gnu\nrust-src\n"));
        assert!(!has_components("miri-x86_64-unknown-linux-gnu\nrustc-x\n"));
        assert!(!has_components(""));
    }

    #[test]
    fn only_a_target_that_ran_to_its_end_is_good() {
        let good = "test a ... ok\ntest result: ok. 1 passed; 0 failed; 0 ignored\n";
        assert_eq!(report("t", &captured(good, 0)).ok(), Some(1));
        assert!(report("t", &captured(good, 1)).is_err());
        assert!(report("t", &captured("test a ... error: Undefined Behavior\n", 1)).is_err());
        assert!(report("t", &captured("", 0)).is_err());
    }
}
