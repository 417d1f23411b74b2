//! The program, on the fake driver: that it runs, that every check holds there, and that a check can fail.

use std::process::{Command, Output};

use cuda_fake::library_path;

/// Runs it with a few rounds, the fake being the driver.
fn run(variables: &[(&str, &str)]) -> (Output, String) {
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(library_path(), folder.path().join("libcuda.so")).unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_gpu-check"))
        .arg("--quick")
        .env("LD_LIBRARY_PATH", folder.path())
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
            report.contains("7 of 7 checks held; 0 memories, events or streams lost."),
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
    assert!(report.contains("6 of 7 checks held"), "{report}");
}

#[test]
fn a_driver_that_loses_events_is_found_out() {
    let (output, report) = run(&[("CUDA_FAKE_SCHEDULE", "3"), ("CUDA_FAKE_LOSE_RECORDS", "1")]);
    assert_eq!(output.status.code(), Some(1), "{report}");
    assert!(report.contains("differs |"), "{report}");
}

#[test]
fn without_a_device_it_says_what_is_missing_and_ends_with_code_2() {
    let (output, report) = run(&[("CUDA_FAKE_INIT", "100")]);
    assert_eq!(output.status.code(), Some(2), "{report}");
    assert_eq!(report, "");
    assert!(
        errors(&output).contains("CUDA_ERROR_NO_DEVICE (100)"),
        "{}",
        errors(&output)
    );
}
