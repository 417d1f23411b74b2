//! The servers of the metadata stores: real ones, each a process of its own on loopback with its files in a
//! temporary folder, which ends with its handle.
#![allow(dead_code, reason = "every test target uses its own part")]

use std::ffi::OsString;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mooncake_transport::EngineError;
use mooncake_transport::metadata::{
    MetadataStore, StoreConfig, StoreEngine, StoreError, StoreTimeouts, open_store,
};
use mooncake_transport::tcp::TcpConfig;
use serde_json::json;
use tempfile::TempDir;

use crate::harness::process::Process;

/// No server needs a tenth of this to come up on a loaded machine.
const START_LIMIT: Duration = Duration::from_secs(60);

/// Which server.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kind {
    /// Mooncake's own, in Python.
    Http,
    Etcd,
    Redis,
}

enum Running {
    Python(Process),
    Program(Child),
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Self::Program(child) = self {
            // It may have ended by itself.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// A server.
pub(crate) struct Server {
    kind: Kind,
    port: u16,
    /// Of etcd's members among themselves.
    second_port: u16,
    dir: TempDir,
    password: Option<&'static str>,
    running: Option<Running>,
}

impl Server {
    pub(crate) fn start(kind: Kind) -> Self {
        Self::start_with(kind, None)
    }

    /// A Redis server that wants a password.
    pub(crate) fn start_with(kind: Kind, password: Option<&'static str>) -> Self {
        let mut server = Self {
            kind,
            port: free_port(),
            second_port: free_port(),
            dir: tempfile::tempdir().unwrap(),
            password,
            running: None,
        };
        server.run();
        server
    }

    /// The connection string, as real engines take it.
    pub(crate) fn address(&self) -> String {
        let port = self.port;
        match (self.kind, self.password) {
            (Kind::Http, _) => format!("http://127.0.0.1:{port}/metadata"),
            (Kind::Etcd, _) => format!("etcd://127.0.0.1:{port}"),
            (Kind::Redis, None) => format!("redis://127.0.0.1:{port}"),
            (Kind::Redis, Some(word)) => format!("redis://:{word}@127.0.0.1:{port}"),
        }
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn store(&self) -> Arc<dyn MetadataStore> {
        open_store(&self.address(), StoreTimeouts::default()).unwrap()
    }

    /// Our engine under a name in this store.
    pub(crate) fn engine(&self, name: &str) -> Result<StoreEngine, EngineError> {
        engine_in(self.store(), name)
    }

    /// Ends the server at once, as a crash would.
    pub(crate) fn kill(&mut self) {
        self.running = None;
    }

    /// Starts the server again where it was, with what it has on disk; Mooncake's has nothing there.
    pub(crate) fn run(&mut self) {
        let port = self.port.to_string();
        let running = match self.kind {
            Kind::Http => {
                let mut process = Process::start("metadata_server.py", []);
                process.call(json!({ "port": self.port }));
                Running::Python(process)
            }
            Kind::Etcd => {
                let client = format!("http://127.0.0.1:{port}");
                let peer = format!("http://127.0.0.1:{}", self.second_port);
                let data = self.dir.path().join("etcd");
                let mut etcd = program("EC_FIXTURE_ETCD", self.dir.path());
                etcd.arg("--data-dir")
                    .arg(data)
                    .args(["--listen-client-urls", &client])
                    .args(["--advertise-client-urls", &client])
                    .args(["--listen-peer-urls", &peer])
                    .args(["--initial-advertise-peer-urls", &peer])
                    .args(["--initial-cluster", &format!("default={peer}")])
                    // A cluster of one has nobody to wait for.
                    .args(["--heartbeat-interval", "10", "--election-timeout", "100"]);
                Running::Program(etcd.spawn().unwrap())
            }
            Kind::Redis => {
                let mut redis = program("EC_FIXTURE_REDIS", self.dir.path());
                redis.args(["--bind", "127.0.0.1", "--port", &port]).args([
                    "--appendonly",
                    "yes",
                    "--appendfsync",
                    "always",
                ]);
                if let Some(word) = self.password {
                    redis.args(["--requirepass", word]);
                }
                Running::Program(redis.spawn().unwrap())
            }
        };
        self.running = Some(running);
        self.await_answer();
    }

    /// Starts the server again without what it had.
    pub(crate) fn run_empty(&mut self) {
        self.kill();
        for entry in std::fs::read_dir(self.dir.path()).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                std::fs::remove_dir_all(path).unwrap();
            } else {
                std::fs::remove_file(path).unwrap();
            }
        }
        self.run();
    }

    fn await_answer(&mut self) {
        let store = self.store();
        let deadline = Instant::now() + START_LIMIT;
        loop {
            let error = match store.get("none", 0) {
                Ok(_) => return,
                Err(error) => error,
            };
            if let Some(Running::Program(child)) = &mut self.running
                && let Some(status) = child.try_wait().unwrap()
            {
                panic!("the server has ended: {status}");
            }
            assert!(
                Instant::now() < deadline,
                "the server does not come up: {error}"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Our engine under a name.
pub(crate) fn engine_in(
    store: Arc<dyn MetadataStore>,
    name: &str,
) -> Result<StoreEngine, EngineError> {
    let mut named = StoreConfig::default();
    named.name = Some(name.to_owned());
    // Where a test waits for a look, it should not wait long.
    named.look_every = Some(Duration::from_millis(50));
    StoreEngine::start(TcpConfig::default(), store, named)
}

/// A program of the fixture, which leaves nothing outside `dir` and says nothing.
fn program(variable: &str, dir: &Path) -> Command {
    let program: OsString = std::env::var_os(variable)
        .unwrap_or_else(|| panic!("{variable} is not set: run this test with `cargo xtask test`"));
    let mut command = Command::new(program);
    command
        .current_dir(dir)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

/// Whether a call failed because no store answered.
pub(crate) fn is_unreachable(error: &EngineError) -> bool {
    matches!(
        error,
        EngineError::Store(
            StoreError::Unreachable { .. }
                | StoreError::Timeout { .. }
                | StoreError::Connection { .. }
        )
    )
}
