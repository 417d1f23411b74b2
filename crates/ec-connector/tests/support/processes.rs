//! Runs the program as processes: started on free ports, read line by line, killed by their guard.

#![allow(dead_code, reason = "each test target uses a part of it")]

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value;

/// Long enough for a loaded machine; nothing waits for it unless something is broken.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A running process of the program.
pub(crate) struct Process {
    child: Child,
    lines: Receiver<String>,
    stderr: File,
}

impl Process {
    pub(crate) fn start<S: AsRef<std::ffi::OsStr>>(args: &[S]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ec-connector"));
        command.args(args);
        Self::spawn(command)
    }

    pub(crate) fn spawn(mut command: Command) -> Self {
        let stderr = tempfile::tempfile().unwrap();
        let mut child = command
            .env_remove("RUST_LOG")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(stderr.try_clone().unwrap())
            .spawn()
            .unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in stdout.lines() {
                if line.map(|line| sender.send(line)).is_err() {
                    break;
                }
            }
        });
        Self {
            child,
            lines,
            stderr,
        }
    }

    /// The next line of standard output; none when it has ended.
    pub(crate) fn text(&mut self) -> Option<String> {
        match self.lines.recv_timeout(PATIENCE) {
            Ok(line) => Some(line),
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => {
                panic!("no output for {PATIENCE:?}; errors: {}", self.errors())
            }
        }
    }

    /// The next line as JSON.
    pub(crate) fn row(&mut self) -> Value {
        match self.text() {
            Some(line) => serde_json::from_str(&line)
                .unwrap_or_else(|error| panic!("{error} in line {line:?}")),
            None => panic!("output has ended; errors: {}", self.errors()),
        }
    }

    /// All further rows until the output ends.
    pub(crate) fn rows(&mut self) -> Vec<Value> {
        std::iter::from_fn(|| self.text())
            .map(|line| {
                serde_json::from_str(&line)
                    .unwrap_or_else(|error| panic!("{error} in line {line:?}"))
            })
            .collect()
    }

    pub(crate) fn wait(&mut self) -> ExitStatus {
        self.wait_within(PATIENCE)
    }

    pub(crate) fn wait_within(&mut self, limit: Duration) -> ExitStatus {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(
                Instant::now() < deadline,
                "still running after {limit:?}; errors: {}",
                self.errors()
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub(crate) fn code(&mut self) -> i32 {
        self.wait().code().expect("ended by itself")
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).unwrap();
    }

    /// Ends it as `kill -9` does.
    pub(crate) fn kill(&mut self) {
        self.signal(Signal::KILL);
        self.child.wait().unwrap();
    }

    /// What it has written to standard error.
    pub(crate) fn errors(&mut self) -> String {
        let mut text = String::new();
        self.stderr.rewind().unwrap();
        self.stderr.read_to_string(&mut text).unwrap();
        text
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Fails only if it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A consumer and its control address.
pub(crate) struct Consumer {
    pub(crate) process: Process,
    pub(crate) control: String,
    pub(crate) session: String,
}

impl Consumer {
    pub(crate) fn start(pool: &str, extra: &[&str]) -> Self {
        Self::start_at("127.0.0.1:0", pool, extra)
    }

    pub(crate) fn start_at(listen: &str, pool: &str, extra: &[&str]) -> Self {
        let mut args = vec!["consume", "--json", "--listen", listen, "--pool", pool];
        args.extend(extra);
        Self::of(Process::start(&args))
    }

    pub(crate) fn of(mut process: Process) -> Self {
        let ready = process.row();
        assert_eq!(ready["event"], "ready", "{ready}");
        let session = ready["session"].as_str().unwrap().to_owned();
        assert!(session.contains(':'));
        let control = ready["control"].as_str().unwrap().to_owned();
        Self {
            process,
            control,
            session,
        }
    }

    pub(crate) fn status(&self) -> Value {
        let (code, rows, errors) = run(&["status", "--json", "--of", &self.control]);
        assert_eq!(code, 0, "{errors}");
        rows.into_iter().next().unwrap()
    }

    /// The status, after checking that every byte of the pool is accounted for once.
    pub(crate) fn checked_status(&self) -> Value {
        let status = self.status();
        let states = status["bytes"].as_object().unwrap();
        let sum: u64 = states.values().map(|bytes| bytes.as_u64().unwrap()).sum();
        assert_eq!(sum, status["usable"].as_u64().unwrap(), "{status}");
        let runs = status["map"]["runs"].as_array().unwrap();
        let mapped: u64 = runs.iter().map(|run| run["len"].as_u64().unwrap()).sum();
        assert_eq!(mapped, status["usable"].as_u64().unwrap(), "{status}");
        status
    }

    /// The checked status once the consumer has looked at all it took: it lets an item go a moment
    /// after it reported it, and after its producer was told that the push is complete.
    pub(crate) fn settled_status(&self) -> Value {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let status = self.checked_status();
            if status["bytes"]["leased"] == 0 && status["leases"] == 0 {
                return status;
            }
            assert!(Instant::now() < deadline, "still leased: {status}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub(crate) fn stop(mut self) -> i32 {
        self.process.signal(Signal::TERM);
        self.process.code()
    }
}

/// Runs a command to its end: exit code, rows, errors.
pub(crate) fn run<S: AsRef<std::ffi::OsStr>>(args: &[S]) -> (i32, Vec<Value>, String) {
    let mut process = Process::start(args);
    let rows = process.rows();
    (process.code(), rows, process.errors())
}

/// Pushes files and returns exit code and rows.
pub(crate) fn push(control: &str, files: &[&Path], extra: &[&str]) -> (i32, Vec<Value>) {
    let (code, rows, errors) = push_with_errors(control, files, extra);
    assert!(!errors.contains("panicked"), "{errors}");
    (code, rows)
}

pub(crate) fn push_with_errors(
    control: &str,
    files: &[&Path],
    extra: &[&str],
) -> (i32, Vec<Value>, String) {
    let mut args: Vec<&std::ffi::OsStr> = vec![
        "push".as_ref(),
        "--json".as_ref(),
        "--to".as_ref(),
        control.as_ref(),
    ];
    args.extend(extra.iter().map(|arg| std::ffi::OsStr::new(*arg)));
    args.extend(files.iter().map(|file| file.as_os_str()));
    run(&args)
}

/// A tensor of a file made for a test.
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

impl Tensor {
    /// Bytes that follow from the name, so that tensors differ.
    pub(crate) fn u8(name: &str, len: usize) -> Self {
        let seed = name.bytes().fold(7u64, |seed, byte| {
            seed.wrapping_mul(1_099_511_628_211) ^ u64::from(byte)
        });
        let bytes = (0..len as u64)
            .map(|index| (index.wrapping_mul(seed | 1).wrapping_add(seed) >> 24) as u8)
            .collect();
        Self {
            name: name.to_owned(),
            dtype: Dtype::U8,
            shape: vec![len],
            bytes,
        }
    }
}

pub(crate) fn write_safetensors(path: &Path, tensors: &[Tensor]) {
    let views: Vec<_> = tensors
        .iter()
        .map(|tensor| {
            let view = TensorView::new(tensor.dtype, tensor.shape.clone(), &tensor.bytes).unwrap();
            (tensor.name.as_str(), view)
        })
        .collect();
    safetensors::serialize_to_file(views, None, path).unwrap();
}

/// A file of `count` tensors of `len` bytes each.
pub(crate) fn file_of(dir: &Path, name: &str, count: usize, len: usize) -> std::path::PathBuf {
    let path = dir.join(name);
    let tensors: Vec<_> = (0..count)
        .map(|index| Tensor::u8(&format!("{name}.{index}"), len + index))
        .collect();
    write_safetensors(&path, &tensors);
    path
}

/// The rows whose `key` is `value`.
pub(crate) fn with<'a>(rows: &'a [Value], key: &str, value: &str) -> Vec<&'a Value> {
    rows.iter().filter(|row| row[key] == value).collect()
}
