//! What a command prints: objects for programs or lines for people on standard output, progress beside it.

use std::cell::Cell;
use std::io::{self, IsTerminal, Stdout, Write};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use serde::Serialize;

use super::signals::Stop;
use super::slab_map::MapStyle;
use super::terminal::{columns, printable, wants_colours};

/// Standard output in the form that was asked for, and a progress bar if a person looks on.
pub(crate) struct Output {
    json: bool,
    stdout: Stdout,
    bar: ProgressBar,
    patience: Option<Patience>,
}

impl Output {
    pub(crate) fn new(json: bool) -> Self {
        Self {
            json,
            stdout: io::stdout(),
            bar: ProgressBar::hidden(),
            patience: None,
        }
    }

    /// As [`new`](Self::new), but once `stop` is asked for, a reader who takes nothing is waited for no longer than
    /// `drain`.
    pub(crate) fn interruptible(json: bool, stop: Stop, drain: Duration) -> Self {
        Self {
            patience: Some(Patience {
                stop,
                drain,
                stopped: Cell::new(None),
            }),
            ..Self::new(json)
        }
    }

    /// Shows a bar on standard error until [`finish_bar`](Self::finish_bar), if that is a terminal.
    pub(crate) fn start_bar(&mut self, len: u64, template: &str) {
        if !io::stderr().is_terminal() {
            return;
        }
        let style = ProgressStyle::with_template(template)
            .unwrap_or_else(|_| ProgressStyle::default_bar())
            .progress_chars("=> ");
        self.bar = ProgressBar::with_draw_target(Some(len), ProgressDrawTarget::stderr())
            .with_style(style);
    }

    pub(crate) fn bar(&self) -> &ProgressBar {
        &self.bar
    }

    pub(crate) fn finish_bar(&mut self) {
        self.bar.finish_and_clear();
        self.bar = ProgressBar::hidden();
    }

    /// Prints one object on a line of its own, or `line` for a person.
    pub(crate) fn row(
        &self,
        object: &impl Serialize,
        line: impl FnOnce() -> String,
    ) -> io::Result<()> {
        if self.json {
            self.line(&serde_json::to_string(object)?)
        } else {
            self.line(&printable(&line()))
        }
    }

    /// Prints one object on a line of its own; a person does not see it.
    pub(crate) fn object(&self, object: &impl Serialize) -> io::Result<()> {
        if self.json {
            self.line(&serde_json::to_string(object)?)
        } else {
            Ok(())
        }
    }

    /// Prints `text` for a person; programs do not see it. It may have lines and colours.
    pub(crate) fn say(&self, text: &str) -> io::Result<()> {
        if self.json {
            Ok(())
        } else {
            self.line(text.trim_end_matches('\n'))
        }
    }

    fn line(&self, text: &str) -> io::Result<()> {
        self.bar.suspend(|| {
            let mut stdout = self.stdout.lock();
            let line = format!("{text}\n");
            for chunk in line.as_bytes().chunks(CHUNK) {
                if let Some(patience) = &self.patience {
                    patience.wait_writable(&self.stdout)?;
                }
                stdout.write_all(chunk)?;
                stdout.flush()?;
            }
            Ok(())
        })
    }

    /// Columns a line for a person has.
    pub(crate) fn columns(&self) -> usize {
        columns(&self.stdout)
    }

    pub(crate) fn map_style(&self) -> MapStyle {
        MapStyle {
            columns: columns(&self.stdout),
            rows: 8,
            colours: wants_colours(self.stdout.is_terminal()),
        }
    }
}

/// Bytes that a pipe takes without blocking when it says that it is writable: `PIPE_BUF` of Linux.
const CHUNK: usize = 4096;

/// How long to wait for a reader of standard output.
struct Patience {
    stop: Stop,
    drain: Duration,
    /// When the stop was first seen.
    stopped: Cell<Option<Instant>>,
}

impl Patience {
    fn wait_writable(&self, stdout: &Stdout) -> io::Result<()> {
        loop {
            let mut polled = [PollFd::new(stdout, PollFlags::OUT)];
            match poll(&mut polled, Some(&LOOK_AROUND)) {
                Ok(0) => {}
                // An error condition is for the write to report.
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            }
            if !self.stop.is_asked() {
                continue;
            }
            let stopped = self.stopped.get().unwrap_or_else(Instant::now);
            self.stopped.set(Some(stopped));
            if stopped.elapsed() >= self.drain {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "nobody reads the standard output, so rows of items that have arrived could not be printed",
                ));
            }
        }
    }
}

/// How often a blocked write looks whether the process is to stop.
const LOOK_AROUND: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 100_000_000,
};
