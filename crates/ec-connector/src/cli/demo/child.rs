//! A child process that is this program again.

use std::io::{BufRead, BufReader, Write};
use std::process::{ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// A running child; it is killed when dropped, and ends by itself when this process does, because its input ends.
pub(super) struct Child {
    name: &'static str,
    process: std::process::Child,
    /// Taken when nothing more will be said.
    input: Option<ChildStdin>,
    /// Lines of its output, read by a thread that ends with the child.
    lines: Receiver<String>,
}

/// How often a wait for a child looks at what else may have happened.
const LOOK: Duration = Duration::from_millis(200);
/// Longest wait for a child to end by itself; its own waits for the other one are shorter. Then it is killed.
const END_WAIT: Duration = Duration::from_secs(60);
/// How often that wait looks.
const END_LOOK: Duration = Duration::from_millis(5);
/// Lines read ahead; a child that says more waits.
const LINES_MAX: usize = 64;

impl Child {
    pub(super) fn start(name: &'static str, args: &[&str]) -> Result<Self> {
        let program = std::env::current_exe().context("cannot find this program again")?;
        let mut process = Command::new(program)
            .arg(name)
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start the process {name}"))?;
        let (Some(input), Some(output)) = (process.stdin.take(), process.stdout.take()) else {
            bail!("{name} was started without pipes");
        };
        let (sender, lines) = sync_channel(LINES_MAX);
        let child = Self {
            name,
            process,
            input: Some(input),
            lines,
        };
        std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                // Ends with the child's output, or when nobody wants it any more.
                for line in BufReader::new(output).lines() {
                    if line.is_ok_and(|line| sender.send(line).is_ok()) {
                        continue;
                    }
                    break;
                }
            })
            .context("cannot start a thread")?;
        Ok(child)
    }

    pub(super) fn id(&self) -> u32 {
        self.process.id()
    }

    pub(super) fn send(&mut self, message: &impl Serialize) -> Result<()> {
        let mut line = serde_json::to_vec(message)?;
        line.push(b'\n');
        let input = self.input.as_mut().context("input was closed")?;
        if let Err(error) = input.write_all(&line).and_then(|()| input.flush()) {
            return Err(self.ended(error.into()));
        }
        Ok(())
    }

    /// The child's next message. `look` is called from time to time and may end the wait with an error.
    pub(super) fn receive<T: DeserializeOwned>(
        &mut self,
        mut look: impl FnMut() -> Result<()>,
    ) -> Result<T> {
        loop {
            match self.lines.recv_timeout(LOOK) {
                Ok(line) => {
                    return serde_json::from_str(&line)
                        .with_context(|| format!("{} said {line:?}", self.name));
                }
                Err(RecvTimeoutError::Timeout) => look()?,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(self.ended(anyhow::anyhow!("it said nothing more")));
                }
            }
        }
    }

    /// Fails if the child has ended.
    pub(super) fn check_running(&mut self) -> Result<()> {
        match self.process.try_wait()? {
            None => Ok(()),
            Some(status) => bail!("{} ended with {status}", self.name),
        }
    }

    /// Closes the child's input and waits until it has ended well, at most [`END_WAIT`].
    pub(super) fn finish(mut self) -> Result<()> {
        let status = self.wait_for_end()?;
        if !status.success() {
            bail!("{} ended with {status}", self.name);
        }
        Ok(())
    }

    fn wait_for_end(&mut self) -> Result<ExitStatus> {
        drop(self.input.take());
        let deadline = Instant::now() + END_WAIT;
        loop {
            if let Some(status) = self.process.try_wait()? {
                return Ok(status);
            }
            if Instant::now() >= deadline {
                bail!("{} did not end within {} s", self.name, END_WAIT.as_secs());
            }
            std::thread::sleep(END_LOOK);
        }
    }

    /// Explains an error by how the child ended.
    fn ended(&mut self, error: anyhow::Error) -> anyhow::Error {
        match self.wait_for_end() {
            Ok(status) => error.context(format!("{} ended with {status}", self.name)),
            Err(wait) => error.context(format!("{wait:#}")),
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // Both fail only if the child has been waited for.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
