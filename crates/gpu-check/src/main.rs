//! Tests slab-cuda and the connector on a GPU, measures them there, and prints a report in Markdown.
//!
//! One program that needs nothing but the driver and the system's C and C++ libraries: build it anywhere (`cargo xtask
//! gpu --bundle`) and run it where the GPU is. It ends with 0 if every check held; 1 if one did not or could not be
//! shown, something was lost, or the driver or the device does not work; 2 for wrong usage; 3 if there is no GPU: no
//! driver is installed, or it finds no device.
#![forbid(unsafe_code)]

mod bytes;
mod checks;
mod measure;
mod pool;

use std::process::ExitCode;
use std::time::Instant;

use anyhow::Context;
use checks::NotShown;
use clap::Parser;
use slab_cuda::{CudaError, Device, Driver, Unavailable};

/// Tests and measures on a GPU of this machine, and prints a report
#[derive(Parser)]
struct Args {
    /// Number of the device
    #[arg(long, default_value_t = 0)]
    device: u32,
    /// Small sizes and few rounds: a look whether it works, no figures
    #[arg(long)]
    quick: bool,
}

/// How much is done.
#[derive(Clone, Copy)]
pub(crate) struct Effort {
    /// Largest transfer, in bytes.
    pub(crate) largest: u64,
    /// Rounds of each random check.
    pub(crate) rounds: u64,
    /// Repetitions of each measurement.
    pub(crate) repeat: usize,
}

impl Effort {
    const FULL: Self = Self {
        largest: 64 << 20,
        rounds: 2_000,
        repeat: 200,
    };
    const QUICK: Self = Self {
        largest: 2 << 20,
        rounds: 60,
        repeat: 5,
    };
}

fn main() -> ExitCode {
    let args = Args::parse();
    let device = match open(args.device) {
        Ok(device) => device,
        Err(error) => {
            eprintln!("gpu-check: {error:#}");
            let is_missing = error.downcast_ref().is_some_and(has_no_gpu);
            return ExitCode::from(if is_missing { NO_GPU } else { 1 });
        }
    };
    let effort = if args.quick {
        Effort::QUICK
    } else {
        Effort::FULL
    };
    let failed = check(&device, effort);
    match measure::run(&device, effort) {
        Ok(()) if failed == 0 => ExitCode::SUCCESS,
        Ok(()) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("gpu-check: measuring failed: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// What the program ends with where there is nothing to test. Not 2, which wrong usage ends with.
const NO_GPU: u8 = 3;

/// Whether the machine has no GPU. One with a driver that does not work has.
fn has_no_gpu(error: &CudaError) -> bool {
    /// `CUDA_ERROR_NO_DEVICE`.
    const NO_DEVICE: u32 = 100;
    match error {
        CudaError::Unavailable(Unavailable::NoLibrary { .. }) => true,
        CudaError::Unavailable(Unavailable::InitFailed { code, .. }) => code.number() == NO_DEVICE,
        CudaError::NoSuchDevice { count, .. } => *count == 0,
        _ => false,
    }
}

/// Opens the device, and says what it is.
fn open(ordinal: u32) -> anyhow::Result<Device> {
    let driver = Driver::load()?;
    let devices = driver.devices().context("cannot list the devices")?;
    let device = driver.device(ordinal)?;
    println!("# slab-cuda on a GPU\n");
    let info = devices.iter().find(|info| info.ordinal == ordinal);
    let info = info.context("the device is not among those that the driver lists")?;
    println!(
        "- device {ordinal}: {}, {} MiB",
        info.name,
        info.memory_bytes >> 20
    );
    println!(
        "- driver: CUDA {}.{}, found as {}, many copies with one call: {}",
        driver.version() / 1000,
        driver.version() % 1000 / 10,
        driver.library(),
        if driver.has_batched_copies() {
            "yes"
        } else {
            "no"
        }
    );
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    println!("- host: {cores} processors");
    Ok(device)
}

/// Runs every check, and returns how many did not hold.
fn check(device: &Device, effort: Effort) -> usize {
    println!("\n## Checks\n\n| check | result | seconds |\n| --- | --- | --- |");
    let (mut failed, mut not_shown) = (0, 0);
    for (name, check) in checks::ALL {
        let begin = Instant::now();
        let result = match check(device, effort) {
            Ok(()) => "held".to_owned(),
            Err(error) if error.is::<NotShown>() => {
                not_shown += 1;
                format!("not shown: {error}")
            }
            Err(error) => {
                failed += 1;
                format!("FAILED: {error:#}")
                    .replace('|', "/")
                    .replace('\n', " ")
            }
        };
        println!(
            "| {name} | {result} | {:.2} |",
            begin.elapsed().as_secs_f64()
        );
    }
    let lost = device.lost();
    println!(
        "\n{} of {} checks held, {failed} failed, {not_shown} not shown; {} memories, events or streams lost.",
        checks::ALL.len() - failed - not_shown,
        checks::ALL.len(),
        lost.count
    );
    failed + not_shown + usize::from(lost.count > 0)
}
