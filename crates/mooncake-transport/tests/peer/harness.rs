//! Runs `peer.py`, a process with the real engine, and talks to it.
//!
//! Every wait has a deadline, and a peer is killed when its handle is dropped.
#![allow(dead_code, reason = "every test target uses its own part")]

pub(crate) mod process;

use std::ffi::OsStr;

use serde_json::{Value, json};

use process::Process;

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
    process: Process,
    session: String,
}

impl Peer {
    /// Starts an engine on loopback.
    pub(crate) fn start() -> Self {
        Self::start_with(&[])
    }

    /// Starts an engine under a name in a metadata store.
    pub(crate) fn start_named(store: &str, name: &str) -> Self {
        Self::try_start_named(store, name).unwrap_or_else(|code| {
            panic!("the real engine does not initialise: {code}");
        })
    }

    /// Like `start_named`; the engine's code where it does not start.
    pub(crate) fn try_start_named(store: &str, name: &str) -> Result<Self, i64> {
        let mut process = Process::start("peer.py", []);
        let started = process.call(json!({"do": "start", "store": store, "name": name}));
        match code(&started) {
            0 => Ok(Self {
                process,
                session: name.to_owned(),
            }),
            code => Err(code),
        }
    }

    /// Starts an engine with environment variables of its own.
    pub(crate) fn start_with(variables: &[(&str, &str)]) -> Self {
        let variables = variables
            .iter()
            .map(|(name, value)| (*name, OsStr::new(*value)));
        let mut peer = Self {
            process: Process::start("peer.py", variables),
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
        self.process.call(command)
    }

    /// Like `call`; an error where the process is gone or answers with one.
    pub(crate) fn try_call(&mut self, command: &Value) -> Result<Value, String> {
        self.process.try_call(command)
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
        self.process.id()
    }

    /// Ends the process at once, as a crash would.
    pub(crate) fn kill(&mut self) {
        self.process.kill();
    }
}

fn code(answer: &Value) -> i64 {
    answer["code"].as_i64().expect("a code")
}
