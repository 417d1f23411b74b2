//! What a command prints: objects for programs or lines for people on standard output, progress beside it.

use std::io::{self, IsTerminal, Stdout, Write};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

use super::slab_map::MapStyle;
use super::terminal::{columns, printable, wants_colours};

/// Standard output in the form that was asked for, and a progress bar if a person looks on.
pub(crate) struct Output {
    json: bool,
    stdout: Stdout,
    bar: ProgressBar,
}

impl Output {
    pub(crate) fn new(json: bool) -> Self {
        Self {
            json,
            stdout: io::stdout(),
            bar: ProgressBar::hidden(),
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
            stdout.write_all(text.as_bytes())?;
            stdout.write_all(b"\n")?;
            stdout.flush()
        })
    }

    pub(crate) fn map_style(&self) -> MapStyle {
        MapStyle {
            columns: columns(&self.stdout),
            rows: 8,
            colours: wants_colours(self.stdout.is_terminal()),
        }
    }
}
