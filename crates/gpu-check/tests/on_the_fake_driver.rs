//! The program, on the fake driver: that it runs, that every check holds there, and that a check can fail.

use std::path::Path;
use std::process::{Command, Output};

use cuda_fake::library_path;

/// Runs it with a few rounds, the fake being the driver.
fn run(variables: &[(&str, &str)]) -> (Output, String) {
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(library_path(), folder.path().join("libcuda.so")).unwrap();
    run_in(folder.path(), &["--quick"], variables)
}

/// Runs it where the loader looks for the driver in a folder.
fn run_in(folder: &Path, args: &[&str], variables: &[(&str, &str)]) -> (Output, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_gpu-check"))
        .args(args)
        .env("LD_LIBRARY_PATH", folder)
        .env("CUDA_FAKE_SAY", "1")
        .envs(variables.iter().copied())
        .output()
        .expect("the program starts");
    let report = String::from_utf8(output.stdout.clone()).unwrap();
    (output, report)
}

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn every_check_holds_and_everything_is_measured() {
    for schedule in ["3", "20261130"] {
        let (output, report) = run(&[("CUDA_FAKE_SCHEDULE", schedule)]);
        assert_eq!(errors(&output), "", "{report}");
        assert_eq!(output.status.code(), Some(0), "{report}");
        assert!(report.contains("- device 0: fake device 0"), "{report}");
        assert!(
            report.contains(
                "7 of 7 checks held, 0 failed, 0 not shown; 0 memories, events or streams lost."
            ),
            "{report}"
        );
        for table in [
            "| pinned to device | 65536 |",
            "| as one list |",
            "| lend a lease and release it behind an event |",
            "Reclaim under load: 100 items",
            "| write | 1048576 |",
            "| push | 1048576 |",
        ] {
            assert!(report.contains(table), "{table} is missing in\n{report}");
        }
    }
}

#[test]
fn a_check_that_does_not_hold_is_said_and_ends_with_code_1() {
    let (output, report) = run(&[
        ("CUDA_FAKE_SCHEDULE", "3"),
        ("CUDA_FAKE_FAIL", "cuMemHostRegister_v2:1:1:2"),
    ]);
    assert_eq!(output.status.code(), Some(1), "{report}");
    assert!(
        report.contains("| pinned and registered host memory are reached by the device | FAILED: cuMemHostRegister_v2 failed: CUDA_ERROR_OUT_OF_MEMORY (2) |"),
        "{report}"
    );
    assert!(
        report.contains("6 of 7 checks held, 1 failed, 0 not shown"),
        "{report}"
    );
}

#[test]
fn what_a_device_is_too_fast_for_does_not_count_as_held() {
    let (output, report) = run(&[("CUDA_FAKE_SCHEDULE", "immediate")]);
    assert_eq!(output.status.code(), Some(1), "{report}");
    assert!(
        report.contains(
            "| bytes that a stream reads are handed out only behind it | not shown: the device"
        ),
        "{report}"
    );
    assert!(
        report.contains("6 of 7 checks held, 0 failed, 1 not shown"),
        "{report}"
    );
}

#[test]
fn a_driver_that_loses_events_is_found_out() {
    let (output, report) = run(&[("CUDA_FAKE_SCHEDULE", "3"), ("CUDA_FAKE_LOSE_RECORDS", "1")]);
    assert_eq!(output.status.code(), Some(1), "{report}");
    assert!(report.contains("differs |"), "{report}");
}

/// It has to say no more than why there is nothing to report.
fn refused((output, report): &(Output, String), code: i32, why: &str) {
    let errors = errors(output);
    assert!(errors.starts_with("gpu-check: "), "{errors}");
    assert!(errors.contains(why), "{errors}");
    assert_eq!(output.status.code(), Some(code), "{errors}");
    assert_eq!(report, "");
}

#[test]
fn without_a_gpu_it_says_what_is_missing_and_ends_with_code_3() {
    let no_device = run(&[("CUDA_FAKE_INIT", "100")]);
    refused(&no_device, 3, "CUDA_ERROR_NO_DEVICE (100)");
    // The loader takes the first file of a name, whatever it is: so there is none even on a machine with a driver.
    let folder = tempfile::tempdir().unwrap();
    for name in ["libcuda.so", "libcuda.so.1"] {
        std::fs::write(folder.path().join(name), "no library").unwrap();
    }
    let no_library = run_in(folder.path(), &["--quick"], &[]);
    refused(&no_library, 3, "no CUDA driver");
}

#[test]
fn a_driver_that_is_there_and_does_not_work_is_a_failure() {
    for (variable, value, why) in [
        ("CUDA_FAKE_INIT", "803", "restart after an update"),
        ("CUDA_FAKE_INIT", "802", "is not up yet"),
        ("CUDA_FAKE_INIT", "34", "stub of CUDA's toolkit"),
        ("CUDA_FAKE_INIT", "999", "kernel module"),
        ("CUDA_FAKE_DRIVER_VERSION", "11030", "update the driver"),
        (
            "CUDA_FAKE_FAIL",
            "cuDevicePrimaryCtxRetain:1:1:46",
            "cuDevicePrimaryCtxRetain failed",
        ),
    ] {
        refused(&run(&[(variable, value)]), 1, why);
    }
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(library_path(), folder.path().join("libcuda.so")).unwrap();
    let other_number = run_in(folder.path(), &["--device", "7"], &[]);
    refused(&other_number, 1, "there is no device 7");
    let (wrong_usage, _) = run_in(folder.path(), &["--devices", "7"], &[]);
    assert_eq!(wrong_usage.status.code(), Some(2));
}
