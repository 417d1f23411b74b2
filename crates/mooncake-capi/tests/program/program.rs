//! Compiles C programs against the header and the library, and runs them.
#![allow(dead_code, reason = "every test target uses its own part")]

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// No single answer takes a tenth of this on a loaded machine.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// The folder of the library: cargo builds it beside the tests.
pub(crate) fn library_dir() -> PathBuf {
    let test = std::env::current_exe().expect("a test knows its file");
    let dir = test.parent().expect("a file lies in a folder").to_owned();
    assert!(
        dir.join("libtransfer_engine.so").is_file(),
        "cargo has not built the library in {}",
        dir.display()
    );
    dir
}

/// A C program of `tests/c`, compiled.
pub(crate) struct Program {
    file: PathBuf,
    _dir: tempfile::TempDir,
}

impl Program {
    /// Compiles `name` with the system's compiler, every warning being an error.
    pub(crate) fn compile(name: &str) -> Self {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join(name);
        let library = library_dir();
        let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
        let output = Command::new(compiler)
            .args([
                "-std=c11",
                "-D_GNU_SOURCE",
                "-O1",
                "-g",
                "-Wall",
                "-Wextra",
                "-Werror",
                "-o",
            ])
            .arg(&file)
            .arg(root.join(format!("tests/c/{name}.c")))
            .arg("-I")
            .arg(root.join("include"))
            .arg("-L")
            .arg(&library)
            .arg("-ltransfer_engine")
            .arg(format!("-Wl,-rpath,{}", library.display()))
            .arg("-pthread")
            .output()
            .expect("a C compiler starts");
        assert!(
            output.status.success(),
            "{name}.c does not compile:\n{}",
            String::from_utf8_lossy(&output.stderr)
        );
        Self { file, _dir: dir }
    }

    pub(crate) fn command(&self) -> Command {
        Command::new(&self.file)
    }

    /// Starts the program and talks to it by lines.
    pub(crate) fn start(&self) -> Talk {
        let mut child = self
            .command()
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the program starts");
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
        Talk {
            child,
            input,
            answers,
        }
    }
}

/// A running program that answers each line with one.
pub(crate) struct Talk {
    child: Child,
    input: ChildStdin,
    answers: Receiver<String>,
}

impl Talk {
    pub(crate) fn answer(&mut self) -> String {
        self.answers
            .recv_timeout(ANSWER_LIMIT)
            .expect("the program answers in time")
    }

    pub(crate) fn ask(&mut self, line: &str) -> String {
        writeln!(self.input, "{line}").expect("the program reads");
        self.answer()
    }

    /// Waits for its end; the code it ended with, none if it was a signal.
    pub(crate) fn end(mut self) -> Option<i32> {
        writeln!(self.input, "quit").expect("the program reads");
        exit_code(&mut self.child)
    }
}

impl Drop for Talk {
    fn drop(&mut self) {
        // It may have ended by itself, which is what is wanted.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits for a process, within a limit.
pub(crate) fn exit_code(child: &mut Child) -> Option<i32> {
    let begin = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        if begin.elapsed() > ANSWER_LIMIT {
            let _ = child.kill();
            let _ = child.wait();
            panic!("the program does not end");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}
