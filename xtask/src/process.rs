//! A child process with a deadline, in a process group of its own.
//!
//! Invariants: the child's whole group is gone when [`capture`] returns, on
//! success, failure and timeout alike, and when this process is interrupted.

use std::io::Read;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Once, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process_group};

/// What a finished or stopped child said.
pub(crate) struct Captured {
    /// `None`: the deadline passed and the group was killed.
    pub(crate) status: Option<ExitStatus>,
    pub(crate) stdout: String,
    /// Empty where the two streams were joined.
    pub(crate) stderr: String,
    pub(crate) elapsed: Duration,
}

impl Captured {
    pub(crate) fn is_success(&self) -> bool {
        self.status.is_some_and(|status| status.success())
    }

    /// How it ended, for a person.
    pub(crate) fn ending(&self) -> String {
        match self.status {
            None => format!("stopped after {:.0} s", self.elapsed.as_secs_f64()),
            Some(status) => match status.signal() {
                Some(signal) => format!("killed by signal {signal}"),
                None => format!("exit status {}", status.code().unwrap_or(-1)),
            },
        }
    }
}

/// How the two output streams are collected.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Streams {
    /// Standard output and standard error apart.
    Apart,
    /// Both in `stdout`, in the order they were written.
    Joined,
}

/// Runs `command` to its end, or to the deadline.
pub(crate) fn capture(
    command: &mut Command,
    streams: Streams,
    limit: Duration,
) -> Result<Captured> {
    forward_interrupts();
    let (out_reader, out_writer) = std::io::pipe()?;
    command.stdin(Stdio::null()).process_group(0);
    let err_reader = if streams == Streams::Joined {
        command.stderr(out_writer.try_clone()?);
        None
    } else {
        let (reader, writer) = std::io::pipe()?;
        command.stderr(writer);
        Some(reader)
    };
    command.stdout(out_writer);

    let started = Instant::now();
    let mut child = command
        .spawn()
        .with_context(|| format!("cannot start `{}`", command.get_program().display()))?;
    // Drops our copies of the write ends, else the readers never see the end.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let group = Pid::from_child(&child);
    CURRENT_GROUP.store(group.as_raw_nonzero().get(), Ordering::SeqCst);

    let stdout = collect(out_reader);
    let stderr = err_reader.map(collect);
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break Some(status);
        }
        if started.elapsed() >= limit {
            break None;
        }
        thread::sleep(Duration::from_millis(10));
    };
    let elapsed = started.elapsed();
    // Whatever the child left behind holds the pipes open and would outlive
    // us. An error here means that the group is already empty.
    let _ = kill_process_group(group, Signal::KILL);
    if status.is_none() {
        child.wait()?;
    }
    CURRENT_GROUP.store(0, Ordering::SeqCst);
    Ok(Captured {
        status,
        stdout: finish(&stdout),
        stderr: stderr.map(|stderr| finish(&stderr)).unwrap_or_default(),
        elapsed,
    })
}

/// Reads a stream to its end on a thread of its own.
fn collect(mut reader: impl Read + Send + 'static) -> mpsc::Receiver<Vec<u8>> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        let mut chunk = vec![0; 64 * 1024];
        while let Ok(count @ 1..) = reader.read(&mut chunk) {
            if sender.send(chunk[..count].to_vec()).is_err() {
                return;
            }
        }
    });
    receiver
}

/// Joins what a stream carried. A process that left the group may keep the
/// stream open; after two silent seconds it is no longer waited for.
fn finish(receiver: &mpsc::Receiver<Vec<u8>>) -> String {
    let mut bytes = Vec::new();
    while let Ok(chunk) = receiver.recv_timeout(Duration::from_secs(2)) {
        bytes.extend(chunk);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The group to end when we are interrupted; 0 = none.
static CURRENT_GROUP: AtomicI32 = AtomicI32::new(0);

/// Ctrl-C reaches only our own group, so it is passed on to the child's.
fn forward_interrupts() {
    static INSTALL: Once = Once::new();
    INSTALL.call_once(|| {
        use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
        // Without the handler an interrupt leaves the child running, which is
        // no reason to refuse to run it.
        let Ok(mut signals) = signal_hook::iterator::Signals::new([SIGINT, SIGTERM, SIGHUP]) else {
            return;
        };
        thread::spawn(move || {
            if let Some(signal) = signals.forever().next() {
                if let Some(group) = Pid::from_raw(CURRENT_GROUP.load(Ordering::SeqCst)) {
                    let _ = kill_process_group(group, Signal::KILL);
                }
                std::process::exit(128 + signal);
            }
        });
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, streams: Streams, limit: Duration) -> Captured {
        capture(Command::new("sh").args(["-c", script]), streams, limit).unwrap()
    }

    #[test]
    fn keeps_the_streams_apart_or_joins_them_in_order() {
        let apart = shell(
            "echo a; echo b >&2; echo c",
            Streams::Apart,
            Duration::from_secs(10),
        );
        assert_eq!(
            (apart.stdout.as_str(), apart.stderr.as_str()),
            ("a\nc\n", "b\n")
        );
        let joined = shell(
            "echo a; echo b >&2; echo c",
            Streams::Joined,
            Duration::from_secs(10),
        );
        assert_eq!(joined.stdout, "a\nb\nc\n");
    }

    #[test]
    fn reports_the_exit_status() {
        let failed = shell("exit 3", Streams::Apart, Duration::from_secs(10));
        assert!(!failed.is_success());
        assert_eq!(failed.ending(), "exit status 3");
        let killed = shell("kill -9 $$", Streams::Apart, Duration::from_secs(10));
        assert_eq!(killed.ending(), "killed by signal 9");
    }

    #[test]
    fn a_child_that_hangs_is_stopped_with_its_own_children() {
        let begin = Instant::now();
        let hung = shell(
            "echo begun; sleep 60 & sleep 60",
            Streams::Apart,
            Duration::from_millis(300),
        );
        assert!(hung.status.is_none());
        assert_eq!(hung.stdout, "begun\n");
        assert!(begin.elapsed() < Duration::from_secs(20));
    }

    #[test]
    fn what_a_child_leaves_behind_does_not_hold_us_up() {
        let begin = Instant::now();
        let left = shell(
            "sleep 60 & echo done",
            Streams::Apart,
            Duration::from_secs(30),
        );
        assert!(left.is_success());
        assert_eq!(left.stdout, "done\n");
        assert!(begin.elapsed() < Duration::from_secs(20));
    }
}
