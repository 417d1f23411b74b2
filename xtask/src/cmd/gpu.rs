//! `gpu`: tests and measures on a real GPU, with one program.

use std::fs;
use std::io;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::report::{Class, NotRun};
use crate::runner::{Runner, display};

/// Tests and measures on a GPU of this machine, or makes the program that does so elsewhere
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only make the program, and say how to run it where a GPU is
    #[arg(long, conflicts_with_all = ["device", "quick"])]
    bundle: bool,
    /// Number of the device
    #[arg(long, default_value_t = 0)]
    device: u32,
    /// Small sizes and few rounds: a look whether it works, no figures
    #[arg(long)]
    quick: bool,
}

/// What the program ends with where no driver is installed, or where it finds no device.
const NO_GPU: i32 = 3;

impl Args {
    pub(crate) fn run(self, runner: &Runner) -> Result<()> {
        let dir = runner.root().join("target/gpu");
        let report_file = dir.join("report.md");
        if !self.bundle && !runner.is_dry_run() {
            // Whatever becomes of this run, the report of another one is none of it.
            remove_if_there(&report_file)?;
        }
        let release = [
            "build",
            "--locked",
            "--release",
            "--quiet",
            "-p",
            "gpu-check",
        ];
        runner.run(&mut runner.cargo(&release))?;
        if runner.is_dry_run() {
            return Ok(());
        }
        fs::create_dir_all(&dir)?;
        let program = dir.join("gpu-check");
        fs::copy(runner.root().join("target/release/gpu-check"), &program)
            .context("cannot copy the program")?;
        if self.bundle {
            println!(
                "target/gpu/gpu-check needs the NVIDIA driver, glibc not older than here, and libstdc++; where the GPU is, run\n  \
                 ./gpu-check > report.md"
            );
            return Ok(());
        }
        let mut command = Command::new(&program);
        command.args(["--device", &self.device.to_string()]);
        if self.quick {
            command.arg("--quick");
        }
        println!("+ {}", display(&command));
        let output = command
            .stderr(std::process::Stdio::inherit())
            .output()
            .context("cannot start the program")?;
        let report = String::from_utf8_lossy(&output.stdout);
        print!("{report}");
        if !report.is_empty() {
            fs::write(&report_file, &*report)?;
            println!("\nwritten to target/gpu/report.md");
        }
        match end(output.status.code()) {
            End::Held => Ok(()),
            End::NotRun(not_run) => {
                println!("{not_run}");
                Ok(())
            }
            End::Failed => bail!("`{}` failed ({})", display(&command), output.status),
        }
    }
}

/// How a run of the program has ended.
#[derive(Debug)]
enum End {
    Held,
    NotRun(NotRun),
    Failed,
}

/// Only a machine without a GPU is excused: one whose driver does not work has one that nobody has tested.
fn end(code: Option<i32>) -> End {
    match code {
        Some(0) => End::Held,
        Some(NO_GPU) => End::NotRun(NotRun {
            what: "gpu".to_owned(),
            class: Class::NeedsGpu,
            why: "there is no GPU here; `cargo xtask gpu --bundle` makes the program for another machine"
                .to_owned(),
        }),
        _ => End::Failed,
    }
}

fn remove_if_there(file: &Path) -> Result<()> {
    match fs::remove_file(file) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", file.display()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_machine_without_a_gpu_is_excused() {
        assert!(matches!(end(Some(0)), End::Held));
        let End::NotRun(not_run) = end(Some(3)) else {
            panic!("not excused")
        };
        assert!(
            not_run
                .to_string()
                .starts_with("ignored (needs-gpu): gpu: there is no GPU here"),
            "{not_run}"
        );
        // A failure, wrong usage, a panic, a signal.
        for code in [Some(1), Some(2), Some(101), None] {
            assert!(matches!(end(code), End::Failed), "{code:?}");
        }
    }

    #[test]
    fn an_older_report_is_removed_if_there_is_one() {
        let dir = std::env::temp_dir().join(format!("xtask-gpu-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let file = dir.join("report.md");
        remove_if_there(&file).unwrap();
        fs::write(&file, "older").unwrap();
        remove_if_there(&file).unwrap();
        assert!(!file.exists());
        assert!(remove_if_there(&dir).is_err(), "a folder is no report");
        fs::remove_dir(&dir).unwrap();
    }
}
