//! The twins of the state machines, of the pool and of the pool over a device: each line left out is noticed by the
//! harness of the property tests.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, bail};

use super::Program;
use crate::process::{Captured, Streams, capture};

pub(super) const HARNESSES: [Program; 2] = [
    Program {
        package: "slab-core",
        test: "twins",
        flag: "--cfg slab_twin",
        folder: "target/twins",
    },
    Program {
        package: "slab-cuda",
        test: "twins",
        flag: "--cfg slab_twin",
        folder: "target/twins",
    },
];

pub(super) fn try_all(programs: &[PathBuf], limit: Duration) -> Result<()> {
    println!("\ntwins of the state machines, and which list of calls was noticed first");
    // All of them, so that one that fails hides no other.
    let tried: Vec<_> = programs
        .iter()
        .map(|program| try_one(program, limit))
        .collect();
    tried.into_iter().collect()
}

fn try_one(program: &Path, limit: Duration) -> Result<()> {
    let mut command = Command::new(program);
    command.arg("--nocapture").env("RUST_BACKTRACE", "0");
    let captured = capture(&mut command, Streams::Apart, limit)?;
    let rows = rows(&captured.stdout);
    for row in &rows {
        // Two maps that differ are long.
        println!("  {}", row.chars().take(150).collect::<String>());
    }
    check(&captured, rows.len())
}

fn rows(stdout: &str) -> Vec<&str> {
    let is_row = |line: &&str| line.starts_with("without ") || line.starts_with("whole, ");
    stdout.lines().filter(is_row).collect()
}

/// A process that tried nothing has shown nothing.
fn check(captured: &Captured, rows: usize) -> Result<()> {
    if !captured.is_success() || rows == 0 {
        bail!(
            "a twin went unnoticed: {}\n{}",
            captured.ending(),
            captured.stderr
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_without_rows_or_with_a_failure_is_one() {
        let ended = |code: i32| {
            use std::os::unix::process::ExitStatusExt;
            Captured {
                status: Some(std::process::ExitStatus::from_raw(code << 8)),
                stdout: String::new(),
                stderr: String::new(),
                elapsed: Duration::ZERO,
            }
        };
        assert!(check(&ended(0), 3).is_ok());
        assert!(check(&ended(101), 3).is_err());
        assert!(check(&ended(0), 0).is_err());
    }

    #[test]
    fn rows_are_the_lines_about_twins() {
        let stdout = "running 1 test\nwhole, pool: 3\nwithout X, pool: list 1\ntest a ... ok\n";
        assert_eq!(rows(stdout), ["whole, pool: 3", "without X, pool: list 1"]);
    }
}
