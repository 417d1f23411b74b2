//! A child process that is this program again.

use std::io::{BufRead, BufReader, Write};
use std::process::{ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// A running child; it is killed when dropped, and ends by itself when this process does, because its input ends.
pub(super) struct Child {
    name: &'static str,
    process: std::process::Child,
    /// Taken when nothing more will be said.
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

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
        Ok(Self {
            name,
            process,
            input: Some(input),
            output: BufReader::new(output),
        })
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

    pub(super) fn receive<T: DeserializeOwned>(&mut self) -> Result<T> {
        let mut line = String::new();
        match self.output.read_line(&mut line) {
            Ok(0) => Err(self.ended(anyhow::anyhow!("it said nothing more"))),
            Ok(_) => {
                serde_json::from_str(&line).with_context(|| format!("{} said {line:?}", self.name))
            }
            Err(error) => Err(self.ended(error.into())),
        }
    }

    /// Closes the child's input and waits until it has ended well.
    pub(super) fn finish(mut self) -> Result<()> {
        drop(self.input.take());
        let status = self.process.wait()?;
        if !status.success() {
            bail!("{} ended with {status}", self.name);
        }
        Ok(())
    }

    /// Explains an error by how the child ended.
    fn ended(&mut self, error: anyhow::Error) -> anyhow::Error {
        drop(self.input.take());
        match self.process.wait() {
            Ok(status) => error.context(format!("{} ended with {status}", self.name)),
            Err(_) => error.context(format!("{} is gone", self.name)),
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
