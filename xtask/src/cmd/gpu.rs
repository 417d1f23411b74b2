//! `gpu`: tests and measures on a real GPU, with one program.

use std::fs;
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

/// What the program ends with where no driver works.
const NO_DRIVER: i32 = 2;

impl Args {
    pub(crate) fn run(self, runner: &Runner) -> Result<()> {
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
        let dir = runner.root().join("target/gpu");
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
            fs::write(dir.join("report.md"), &*report)?;
            println!("\nwritten to target/gpu/report.md");
        }
        match output.status.code() {
            Some(NO_DRIVER) => {
                let not_run = NotRun {
                    what: "gpu".to_owned(),
                    class: Class::NeedsGpu,
                    why: "there is no GPU that works here; `cargo xtask gpu --bundle` makes the program for \
                          another machine"
                        .to_owned(),
                };
                println!("{not_run}");
                Ok(())
            }
            Some(0) => Ok(()),
            _ => bail!("`{}` failed ({})", display(&command), output.status),
        }
    }
}
