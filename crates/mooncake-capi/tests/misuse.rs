//! A C program that does everything wrongly gets errors and no crash.

#[path = "program/program.rs"]
mod program;
#[path = "program/silent.rs"]
mod silent;

use std::process::Stdio;

use program::Program;
use silent::SilentPeer;

#[test]
fn misuse_from_c_is_answered_with_errors() {
    run_misuse(Stdio::inherit());
}

#[cfg(target_os = "linux")]
#[test]
fn a_standard_error_that_takes_nothing_changes_no_answer() {
    let full = std::fs::File::options()
        .write(true)
        .open("/dev/full")
        .unwrap();
    run_misuse(full.into());
}

fn run_misuse(stderr: Stdio) {
    let peer = SilentPeer::start();
    let program = Program::compile("misuse");
    let mut child = program
        .command()
        .arg(peer.session())
        .env_remove("MC_FORCE_TCP")
        .stdout(Stdio::piped())
        .stderr(stderr)
        .spawn()
        .unwrap();
    let code = program::exit_code(&mut child);
    let output = child.wait_with_output().unwrap();
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        "all as expected\n",
        "{code:?}"
    );
    // SIGTERM was told to end the process with this.
    assert_eq!(code, Some(143));
}
