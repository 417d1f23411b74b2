//! A Python process of the fixture that answers lines of JSON with lines of JSON.
//!
//! Every wait has a deadline, and the process is killed when its handle is dropped.
#![allow(dead_code, reason = "every test target uses its own part")]

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use serde_json::Value;

/// No single command takes a tenth of this on a loaded machine.
const ANSWER_LIMIT: Duration = Duration::from_secs(120);

/// The process.
pub(crate) struct Process {
    child: Child,
    input: ChildStdin,
    answers: Receiver<String>,
}

impl Process {
    /// Starts a script beside this file, with engines on loopback and environment variables of its own.
    pub(crate) fn start<'a>(
        script: &str,
        variables: impl IntoIterator<Item = (&'a str, &'a OsStr)>,
    ) -> Self {
        let python = std::env::var_os("EC_FIXTURE_PYTHON")
            .expect("EC_FIXTURE_PYTHON is not set: run this test with `cargo xtask test`");
        // Tests of other crates use this file too.
        let script = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../mooncake-transport/tests/peer")
            .join(script);
        let mut child = Command::new(python)
            .arg(script)
            .env("MC_TCP_BIND_ADDRESS", "127.0.0.1")
            .env("MC_FORCE_TCP", "1")
            .envs(variables)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the peer process does not start");
        let input = child.stdin.take().expect("standard input is piped");
        let output = child.stdout.take().expect("standard output is piped");
        let (sender, answers) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Self {
            child,
            input,
            answers,
        }
    }

    /// Sends a command and returns the answer.
    pub(crate) fn call(&mut self, command: Value) -> Value {
        self.try_call(&command)
            .unwrap_or_else(|why| panic!("{command}: {why}"))
    }

    /// Like `call`; an error where the process is gone or answers with one.
    pub(crate) fn try_call(&mut self, command: &Value) -> Result<Value, String> {
        self.begin(command)?;
        self.finish()
    }

    /// Sends a command whose answer is taken later by `finish`.
    pub(crate) fn begin(&mut self, command: &Value) -> Result<(), String> {
        writeln!(self.input, "{command}").map_err(|error| error.to_string())
    }

    /// Takes the answer to the oldest command that has none.
    pub(crate) fn finish(&mut self) -> Result<Value, String> {
        self.finish_within(ANSWER_LIMIT)
    }

    /// Like `finish`, for a command that may never be answered.
    pub(crate) fn finish_within(&mut self, limit: Duration) -> Result<Value, String> {
        match self.answers.recv_timeout(limit) {
            Ok(line) => {
                let answer: Value = serde_json::from_str(&line).map_err(|e| e.to_string())?;
                match answer.get("error") {
                    Some(error) => Err(error.to_string()),
                    None => Ok(answer),
                }
            }
            Err(RecvTimeoutError::Timeout) => Err("no answer in time".to_owned()),
            Err(RecvTimeoutError::Disconnected) => Err("the peer process has ended".to_owned()),
        }
    }

    /// The process id.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Ends the process at once, as a crash would.
    pub(crate) fn kill(&mut self) {
        // It may have ended by itself, which is what is wanted.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}
