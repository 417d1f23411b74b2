//! `test`: runs every test target of the workspace and says what ran.
//!
//! Everything is built once; each test binary is then run by itself, with a
//! deadline, and its report is read. Ignored tests whose needs the fixture
//! meets are run in a second call of the same binary.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::fixture::{self, Fixture};
use crate::libtest;
use crate::process::{Captured, Streams, capture};
use crate::report::{Class, DOC_TARGET, Entry, Kind, LIB_TARGET, Outcome, Run};
use crate::runner::{Runner, display};
use crate::workspace::{Metadata, Package};

/// Runs all tests: unit, property, real input, real peer, documentation
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only this package (may be repeated)
    #[arg(short, long, value_name = "NAME")]
    package: Vec<String>,
    /// Only targets whose name contains TEXT (`lib`, `doc`, or an integration test)
    #[arg(long, value_name = "TEXT")]
    target: Option<String>,
    /// Print the output of passing targets as well
    #[arg(short, long)]
    verbose: bool,
    /// Seconds after which a test target is stopped and counts as failed
    #[arg(long, value_name = "SECONDS", default_value_t = TARGET_LIMIT_S)]
    limit: u64,
}

/// No target needs a tenth of this on two cores; it only ends a hang.
const TARGET_LIMIT_S: u64 = 900;

impl Default for Args {
    fn default() -> Self {
        Self {
            package: Vec::new(),
            target: None,
            verbose: false,
            limit: TARGET_LIMIT_S,
        }
    }
}

/// A built test binary.
struct Binary {
    package: String,
    target: String,
    executable: PathBuf,
}

impl Args {
    pub(crate) fn run(self, runner: &Runner) -> Result<()> {
        let mut run = None;
        let result = self.run_all(runner, &mut run);
        if let Some(run) = run {
            println!("{}", run.closing_line());
        }
        result
    }

    /// Like `run`, but leaves the run to the caller instead of printing its
    /// closing line.
    pub(crate) fn run_all(&self, runner: &Runner, result: &mut Option<Run>) -> Result<()> {
        let metadata = Metadata::load(runner)?;
        if let Some(unknown) = self
            .package
            .iter()
            .find(|name| !metadata.members().any(|p| p.name == **name))
        {
            bail!("no package `{unknown}` in this workspace");
        }
        let strict = std::env::var_os("CI").is_some_and(|value| value == "true");
        let (binaries, programs) = self.build(runner, &metadata)?;
        if runner.is_dry_run() {
            return Ok(());
        }
        let fixture = fixture::prepare(runner.root());

        let mut run = Run {
            complete: self.package.is_empty() && self.target.is_none(),
            tests: Vec::new(),
        };
        for binary in binaries
            .iter()
            .filter(|b| self.wants(&b.package, &b.target))
        {
            let package = metadata
                .members()
                .find(|package| package.name == binary.package)
                .context("a test binary of an unknown package")?;
            run.tests
                .extend(self.run_binary(binary, package, &programs, &fixture)?);
        }
        if self
            .target
            .as_ref()
            .is_none_or(|text| DOC_TARGET.contains(text.as_str()))
        {
            run.tests
                .extend(self.run_doc_tests(runner, &metadata, &fixture)?);
        }
        run.save(runner.root())?;

        println!("\n{}", run.table());
        let problems = run.problems(strict);
        let message = problems.join("\n  ");
        *result = Some(run);
        if let Err(error) = fixture.into_result() {
            println!("the fixture is incomplete: {error:#}\n");
        }
        if !problems.is_empty() {
            bail!("the test run is not good:\n  {message}");
        }
        Ok(())
    }

    fn wants(&self, package: &str, target: &str) -> bool {
        (self.package.is_empty() || self.package.iter().any(|name| name == package))
            && self
                .target
                .as_ref()
                .is_none_or(|text| target.contains(text.as_str()))
    }

    /// Builds all test binaries, examples and programs; returns the test
    /// binaries in a fixed order and the programs by name.
    fn build(
        &self,
        runner: &Runner,
        metadata: &Metadata,
    ) -> Result<(Vec<Binary>, BTreeMap<String, PathBuf>)> {
        // Every feature has tests; what the crates are without them is `check`'s matter.
        let mut command = runner.cargo(&["test", "--locked", "--workspace", "--no-run"]);
        command.arg("--all-features");
        println!("+ {}", display(&command));
        if runner.is_dry_run() {
            return Ok(Default::default());
        }
        let output = command
            .args(["--quiet", "--message-format", "json-render-diagnostics"])
            .stderr(Stdio::inherit())
            .output()
            .context("cannot start cargo")?;
        if !output.status.success() {
            bail!("the tests do not build");
        }
        let mut binaries = Vec::new();
        let mut programs = BTreeMap::new();
        for line in String::from_utf8_lossy(&output.stdout).lines() {
            let message: Message = serde_json::from_str(line)
                .with_context(|| format!("unexpected output of cargo: {line}"))?;
            let (Some(target), Some(executable)) = (message.target, message.executable) else {
                continue;
            };
            let package = metadata
                .package(&message.package_id)
                .with_context(|| format!("unknown package {}", message.package_id))?;
            if message.profile.is_some_and(|profile| profile.test) {
                let is_lib = target.kind.iter().any(|kind| kind == "lib");
                let name = if is_lib {
                    LIB_TARGET.to_owned()
                } else {
                    target.name
                };
                binaries.push(Binary {
                    package: package.name.clone(),
                    target: name,
                    executable,
                });
            } else if target.kind.iter().any(|kind| kind == "bin") {
                programs.insert(target.name, executable);
            }
        }
        binaries.sort_by(|a, b| (&a.package, &a.target).cmp(&(&b.package, &b.target)));
        Ok((binaries, programs))
    }

    fn run_binary(
        &self,
        binary: &Binary,
        package: &Package,
        programs: &BTreeMap<String, PathBuf>,
        fixture: &Fixture,
    ) -> Result<Vec<Entry>> {
        let directory = package
            .manifest_path
            .parent()
            .context("a manifest without a directory")?;
        // The variables that cargo sets for a test it runs.
        let command = || {
            let mut command = Command::new(&binary.executable);
            command
                .current_dir(directory)
                .env(
                    "CARGO",
                    std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()),
                )
                .env("CARGO_MANIFEST_DIR", directory)
                .env("CARGO_MANIFEST_PATH", &package.manifest_path)
                .env("CARGO_PKG_NAME", &package.name)
                .env("CARGO_PKG_VERSION", &package.version)
                .envs(fixture.environment());
            for (name, path) in programs {
                command.env(format!("CARGO_BIN_EXE_{name}"), path);
            }
            command
        };
        let (mut tests, mut elapsed, mut counts) = self.run_once(&mut command(), binary)?;

        // A second call for what the fixture makes possible.
        let runnable: Vec<String> = tests
            .iter()
            .filter(|test| test.class.is_some_and(|class| fixture.provides(class)))
            .map(|test| test.name.clone())
            .collect();
        if !runnable.is_empty() {
            let mut second = command();
            second.args(["--ignored", "--exact"]).args(&runnable);
            let (ran, more, counted) = self.run_once(&mut second, binary)?;
            elapsed += more;
            counts.extend(counted);
            let is_covered = |name: &str| {
                runnable.iter().any(|n| n == name) && ran.iter().any(|test| test.name == name)
            };
            tests.retain(|test| !is_covered(&test.name));
            tests.extend(ran);
        }
        announce(&binary.package, &binary.target, &tests, elapsed);
        for line in counts {
            println!("  {line}");
        }
        Ok(tests)
    }

    /// The tests, how long they took, and a line for each thing that they have counted.
    fn run_once(
        &self,
        command: &mut Command,
        binary: &Binary,
    ) -> Result<(Vec<Entry>, Duration, Vec<String>)> {
        command.arg("--show-output");
        let captured = capture(command, Streams::Apart, Duration::from_secs(self.limit))?;
        let ended_well = captured.is_success();
        let tests = self.read(&binary.package, &binary.target, &captured, ended_well);
        let counts = libtest::counts(&captured.stdout);
        let counts = counts
            .into_iter()
            .map(|(test, text)| format!("{test}: {text}"));
        Ok((tests, captured.elapsed, counts.collect()))
    }

    /// One call for all packages: asked for one package alone, cargo would
    /// build it with other features than the rest of the run.
    fn run_doc_tests(
        &self,
        runner: &Runner,
        metadata: &Metadata,
        fixture: &Fixture,
    ) -> Result<Vec<Entry>> {
        let arguments = ["test", "--locked", "--workspace", "--doc", "--no-fail-fast"];
        let mut command = runner.cargo(&arguments);
        command
            .args(["--all-features", "--color", "never"])
            .envs(fixture.environment());
        let captured = capture(
            &mut command,
            Streams::Joined,
            Duration::from_secs(self.limit),
        )?;

        let mut entries = Vec::new();
        for (library, text) in doc_sections(&captured.stdout) {
            let package = metadata
                .members()
                .find(|p| p.targets.iter().any(|t| t.doctest && t.name == library))
                .with_context(|| format!("doc tests of an unknown library `{library}`"))?;
            if !self.wants(&package.name, DOC_TARGET) {
                continue;
            }
            // Cargo does not say how each library's share ended; a share that
            // broke off has no result line.
            let section = Captured {
                status: None,
                stdout: text,
                stderr: String::new(),
                elapsed: captured.elapsed,
            };
            let tests = self.read(&package.name, DOC_TARGET, &section, true);
            announce(&package.name, DOC_TARGET, &tests, captured.elapsed);
            entries.extend(tests);
        }
        let failed = entries
            .iter()
            .any(|entry: &Entry| entry.outcome == Outcome::Failed);
        if !captured.is_success() && !failed {
            let trouble = self.read("workspace", DOC_TARGET, &captured, false);
            announce("workspace", DOC_TARGET, &trouble, captured.elapsed);
            entries.extend(trouble);
        }
        Ok(entries)
    }

    /// Turns the output of one call into entries; prints it where that helps.
    fn read(
        &self,
        package: &str,
        target: &str,
        captured: &Captured,
        ended_well: bool,
    ) -> Vec<Entry> {
        let mut entries = Vec::new();
        let mut trouble = None;
        match libtest::parse(&captured.stdout) {
            Ok(tests) => entries.extend(tests.into_iter().map(|test| {
                let (outcome, class) = match test.outcome {
                    libtest::Outcome::Passed => (Outcome::Passed, None),
                    libtest::Outcome::Failed => (Outcome::Failed, None),
                    libtest::Outcome::Ignored(reason) => {
                        (Outcome::Ignored, Some(Class::of(&reason)))
                    }
                };
                Entry {
                    package: package.to_owned(),
                    target: target.to_owned(),
                    kind: Kind::of(target, &test.name),
                    name: test.name,
                    outcome,
                    class,
                }
            })),
            Err(error) => trouble = Some(error.to_string()),
        }
        let failed = entries
            .iter()
            .filter(|entry| entry.outcome == Outcome::Failed)
            .count();
        if !ended_well && failed == 0 {
            trouble = Some(captured.ending());
        }
        if let Some(trouble) = &trouble {
            entries.push(Entry {
                package: package.to_owned(),
                target: target.to_owned(),
                name: format!("(the process: {trouble})"),
                kind: Kind::of(target, ""),
                outcome: Outcome::Failed,
                class: None,
            });
        }
        if self.verbose {
            println!("{}\n{}", captured.stdout, captured.stderr);
        } else if entries.iter().any(|entry| entry.outcome == Outcome::Failed) {
            let stdout = libtest::without_successes(&captured.stdout);
            println!("{stdout}\n{}", captured.stderr);
        }
        entries
    }
}

/// Prints a line about a target.
fn announce(package: &str, target: &str, tests: &[Entry], elapsed: Duration) {
    let count = |outcome| tests.iter().filter(|test| test.outcome == outcome).count();
    println!(
        "{:<40} {:>4} passed {:>3} failed {:>3} ignored {:>8.2} s",
        format!("{package}/{target}"),
        count(Outcome::Passed),
        count(Outcome::Failed),
        count(Outcome::Ignored),
        elapsed.as_secs_f64()
    );
}

/// Splits cargo's output at its `Doc-tests <library>` headings.
fn doc_sections(output: &str) -> Vec<(String, String)> {
    let mut sections: Vec<(String, String)> = Vec::new();
    for line in output.lines() {
        if let Some(library) = line.trim_start().strip_prefix("Doc-tests ") {
            sections.push((library.trim().to_owned(), String::new()));
        } else if let Some((_, text)) = sections.last_mut() {
            text.push_str(line);
            text.push('\n');
        }
    }
    sections
}

/// A line of cargo's JSON output, as far as it is used here.
#[derive(Deserialize)]
struct Message {
    #[serde(default)]
    package_id: String,
    target: Option<crate::workspace::Target>,
    profile: Option<Profile>,
    executable: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Profile {
    test: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doc_test_output_is_split_by_library() {
        let sections = doc_sections(
            "   Compiling a\n   Doc-tests one\n\nrunning 0 tests\n   Doc-tests two_b\nx\n",
        );
        let names: Vec<_> = sections.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["one", "two_b"]);
        assert_eq!(sections[0].1, "\nrunning 0 tests\n");
        assert_eq!(sections[1].1, "x\n");
    }

    #[test]
    fn a_target_that_died_without_a_failing_test_is_a_failure() {
        let captured = |stdout: &str| Captured {
            status: None,
            stdout: stdout.to_owned(),
            stderr: String::new(),
            elapsed: Duration::from_secs(1),
        };
        let args = Args::default();
        let all_ok = "test a ... ok\ntest result: ok. 1 passed; 0 failed; 0 ignored\n";
        let outcomes = |text: &str, ended_well| -> Vec<Outcome> {
            let entries = args.read("p", "t", &captured(text), ended_well);
            entries.iter().map(|entry| entry.outcome).collect()
        };
        assert_eq!(outcomes(all_ok, true), [Outcome::Passed]);
        assert_eq!(outcomes(all_ok, false), [Outcome::Passed, Outcome::Failed]);
        assert_eq!(outcomes("test a ... ok\n", true), [Outcome::Failed]);
    }
}
