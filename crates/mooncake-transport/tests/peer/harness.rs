//! Runs `peer.py`, a process with the real engine, and talks to it.
//!
//! Every wait has a deadline, and a peer is killed when its handle is dropped.
#![allow(dead_code, reason = "every test target uses its own part")]

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use serde_json::{Value, json};

/// No single command takes a tenth of this on a loaded machine.
const ANSWER_LIMIT: Duration = Duration::from_secs(120);

/// Memory of the peer process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Memory {
    /// The peer's own number for it.
    pub(crate) index: u64,
    /// Where it lies in the peer's address space, which is its remote address.
    pub(crate) address: u64,
}

/// A real engine in a process of its own.
pub(crate) struct Peer {
    child: Child,
    input: ChildStdin,
    answers: Receiver<String>,
    session: String,
}

impl Peer {
    /// Starts an engine on loopback.
    pub(crate) fn start() -> Self {
        Self::start_with(&[])
    }

    /// Starts an engine with environment variables of its own.
    pub(crate) fn start_with(variables: &[(&str, &str)]) -> Self {
        let python = std::env::var_os("EC_FIXTURE_PYTHON")
            .expect("EC_FIXTURE_PYTHON is not set: run this test with `cargo xtask test`");
        // Tests of other crates use this file too.
        let script =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../mooncake-transport/tests/peer/peer.py");
        let mut child = Command::new(python)
            .arg(script)
            .env("MC_TCP_BIND_ADDRESS", "127.0.0.1")
            .env("MC_FORCE_TCP", "1")
            .envs(variables.iter().copied())
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
        let mut peer = Self {
            child,
            input,
            answers,
            session: String::new(),
        };
        let started = peer.call(json!({"do": "start"}));
        assert_eq!(
            started["code"], 0,
            "the real engine does not initialise: {started}"
        );
        peer.session = started["session"].as_str().expect("a session").to_owned();
        peer
    }

    /// The name under which other engines reach this one, `host:port`.
    pub(crate) fn session(&self) -> &str {
        &self.session
    }

    /// Sends a command and returns the answer.
    pub(crate) fn call(&mut self, command: Value) -> Value {
        self.try_call(&command)
            .unwrap_or_else(|why| panic!("{command}: {why}"))
    }

    /// Like `call`; an error where the process is gone or answers with one.
    pub(crate) fn try_call(&mut self, command: &Value) -> Result<Value, String> {
        writeln!(self.input, "{command}").map_err(|error| error.to_string())?;
        match self.answers.recv_timeout(ANSWER_LIMIT) {
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

    /// Memory of `len` bytes, filled from `seed`, not registered.
    pub(crate) fn allocate(&mut self, len: u64, seed: u64) -> Memory {
        let answer = self.call(json!({"do": "allocate", "length": len, "seed": seed}));
        Memory {
            index: answer["memory"].as_u64().expect("an index"),
            address: answer["address"].as_u64().expect("an address"),
        }
    }

    /// Registers memory; 0 is success.
    pub(crate) fn register(&mut self, memory: Memory) -> i64 {
        code(&self.call(json!({"do": "register", "memory": memory.index})))
    }

    /// Unregisters memory; 0 is success.
    pub(crate) fn unregister(&mut self, memory: Memory) -> i64 {
        code(&self.call(json!({"do": "unregister", "memory": memory.index})))
    }

    /// Writes bytes of a seed's stream, from `start`, into a range.
    pub(crate) fn fill(&mut self, memory: Memory, offset: u64, len: u64, seed: u64, start: u64) {
        self.call(json!({
            "do": "fill", "memory": memory.index, "offset": offset, "length": len,
            "seed": seed, "start": start,
        }));
    }

    /// Lets the peer compare its own bytes with those of a seed's stream.
    #[track_caller]
    pub(crate) fn assert_holds(
        &mut self,
        memory: Memory,
        offset: u64,
        len: u64,
        seed: u64,
        start: u64,
    ) {
        let answer = self.call(json!({
            "do": "check", "memory": memory.index, "offset": offset, "length": len,
            "seed": seed, "start": start,
        }));
        assert_eq!(answer["checked"], len);
        assert_eq!(
            answer["equal"], true,
            "the peer's bytes differ at {}",
            answer["differs_at"]
        );
    }

    /// One batch of the real engine, to its end; 0 is success. An item is
    /// (offset in `memory`, absolute address at `session`, length).
    pub(crate) fn transfer(
        &mut self,
        op: &str,
        session: &str,
        memory: Memory,
        items: &[(u64, u64, u64)],
    ) -> i64 {
        code(&self.call(json!({
            "do": "transfer", "op": op, "session": session, "memory": memory.index,
            "items": items,
        })))
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

fn code(answer: &Value) -> i64 {
    answer["code"].as_i64().expect("a code")
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.kill();
    }
}
