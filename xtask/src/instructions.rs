//! Instructions of `slab-core`'s hot calls, counted by callgrind against a budget.
//!
//! A count says nothing about caches or mispredicted branches, but it is the same on every machine with
//! the same compiler, however busy. So the budget file names the compiler it was recorded with: there it
//! is enforced, with another compiler the counts are printed only.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use crate::runner::{Runner, display};

/// The budget file.
const FILE: &str = "crates/slab-bench/instructions.json";
/// What a count may exceed the recorded one by, in per cent: libraries of the system differ a little.
const SLACK_PER_CENT: u64 = 4;
const CALLS: u64 = 20_000;

/// The calls counted. The second of a pair is counted without the first.
const COUNTED: [(&str, &str, Option<&str>); 6] = [
    ("allocate (best fit)", "best-fit-allocate", None),
    (
        "free (best fit)",
        "best-fit-allocate-free",
        Some("best-fit-allocate"),
    ),
    ("free + allocate (best fit)", "best-fit-pair", None),
    ("free + allocate (first fit)", "first-fit-pair", None),
    ("acquire + release", "acquire-release", None),
    (
        "reserve with eviction + publish + release",
        "evict-insert-release",
        None,
    ),
];

#[derive(Deserialize, Serialize)]
struct Budget {
    /// Output of `rustc -V` when the counts were recorded.
    rustc: String,
    /// Instructions of one call.
    calls: BTreeMap<String, u64>,
}

/// Counts and compares. `program` is what cargo builds: package and binary.
pub(crate) fn run(runner: &Runner, program: &[&str; 4], json: bool, record: bool) -> Result<()> {
    let mut build = runner.cargo(&["build", "--release", "--quiet", "--locked"]);
    runner.run(build.args(program))?;
    if runner.is_dry_run() {
        return Ok(());
    }
    if Command::new("valgrind").arg("--version").output().is_err() {
        println!("SKIPPED: valgrind is not installed, so no instructions were counted");
        return Ok(());
    }
    let executable = target_directory(runner).join("release").join(program[3]);
    let mut totals = BTreeMap::new();
    for (_, call, _) in COUNTED {
        totals.insert(call, count(runner, &executable, call)?);
    }
    let calls: BTreeMap<String, u64> = COUNTED
        .iter()
        .map(|(name, call, without)| {
            let without = without.map_or(0, |call| totals[call]);
            let instructions = totals[call].saturating_sub(without) / CALLS;
            ((*name).to_owned(), instructions)
        })
        .collect();
    let rustc = compiler_version()?;
    let file = runner.root().join(FILE);
    if record {
        let budget = Budget { rustc, calls };
        let text = serde_json::to_string_pretty(&budget)? + "\n";
        std::fs::write(&file, text)?;
        println!("recorded in {FILE}");
        return Ok(());
    }
    let text = std::fs::read_to_string(&file).with_context(|| format!("cannot read {FILE}"))?;
    let budget: Budget = serde_json::from_str(&text).with_context(|| format!("in {FILE}"))?;
    let enforced = budget.rustc == rustc;
    let over = print(&budget, &calls, enforced, json);
    if !enforced {
        println!(
            "not enforced: recorded with {}, this is {rustc}",
            budget.rustc
        );
    } else if !over.is_empty() {
        bail!(
            "more instructions than the budget allows: {}",
            over.join(", ")
        );
    }
    Ok(())
}

/// Prints a row a call, ratio first, and returns the calls that are over budget.
fn print(
    budget: &Budget,
    calls: &BTreeMap<String, u64>,
    enforced: bool,
    json: bool,
) -> Vec<String> {
    let mut over = Vec::new();
    if !json {
        println!("\n| call | counted / recorded | counted | recorded |");
        println!("| --- | ---: | ---: | ---: |");
    }
    for (name, _, _) in COUNTED {
        let counted = calls[name];
        let recorded = budget.calls.get(name).copied();
        if recorded.is_none_or(|recorded| counted * 100 > recorded * (100 + SLACK_PER_CENT)) {
            over.push(name.to_owned());
        }
        let ratio = recorded.map(|recorded| counted as f64 / recorded.max(1) as f64);
        if json {
            let row = serde_json::json!({
                "what": name, "ratio": ratio, "counted": counted, "recorded": recorded,
                "enforced": enforced,
            });
            println!("{row}");
        } else {
            let ratio = ratio.map_or("none".to_owned(), |ratio| format!("{ratio:.2}"));
            let recorded = recorded.map_or("none".to_owned(), |recorded| recorded.to_string());
            println!("| {name} | {ratio} | {counted} | {recorded} |");
        }
    }
    over
}

/// Instructions of [`CALLS`] calls.
fn count(runner: &Runner, executable: &Path, call: &str) -> Result<u64> {
    let run = |calls: u64| -> Result<u64> {
        let mut command = Command::new("valgrind");
        command
            .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
            .arg(executable)
            .arg(call)
            .arg(calls.to_string())
            .current_dir(runner.root());
        let output = command.output().context("cannot start valgrind")?;
        let report = String::from_utf8_lossy(&output.stderr);
        if !output.status.success() {
            bail!("`{}` failed:\n{report}", display(&command));
        }
        collected(&report).with_context(|| format!("no count in the report:\n{report}"))
    };
    Ok(run(CALLS)?.saturating_sub(run(0)?))
}

/// The number in the line `==1== Collected : 123`.
fn collected(report: &str) -> Option<u64> {
    let (_, rest) = report.split_once("Collected : ")?;
    rest.split_whitespace().next()?.parse().ok()
}

fn compiler_version() -> Result<String> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = Command::new(rustc).arg("-V").output()?;
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}

fn target_directory(runner: &Runner) -> std::path::PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(
        || runner.root().join("target"),
        |directory| runner.root().join(directory),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_count_is_read_from_callgrinds_report() {
        let report = "==7== Events    : Ir\n==7== Collected : 1234567\n==7== \n";
        assert_eq!(collected(report), Some(1_234_567));
        assert_eq!(collected("==7== \n"), None);
    }

    #[test]
    fn a_call_over_budget_or_without_one_is_named() {
        let counts = |count| {
            COUNTED
                .iter()
                .map(|(name, _, _)| ((*name).to_owned(), count))
                .collect::<BTreeMap<_, _>>()
        };
        let mut budget = Budget {
            rustc: String::new(),
            calls: counts(100),
        };
        assert_eq!(
            print(&budget, &counts(104), true, false),
            Vec::<String>::new()
        );
        assert_eq!(
            print(&budget, &counts(105), true, false).len(),
            COUNTED.len()
        );
        budget.calls.remove("acquire + release");
        assert_eq!(
            print(&budget, &counts(100), true, false),
            ["acquire + release"]
        );
    }
}
