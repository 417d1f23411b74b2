//! How a command ends: 0 all well, 1 something failed while running, 2 wrong usage or configuration.

use std::process::ExitCode;

/// A command that could not do what it was asked.
#[derive(Debug)]
pub(crate) struct Failure {
    code: u8,
    error: anyhow::Error,
}

impl Failure {
    /// Wrong usage or configuration: the same call will never work here.
    pub(crate) fn usage(error: impl Into<anyhow::Error>) -> Self {
        Self {
            code: 2,
            error: error.into(),
        }
    }

    /// Writes the error and its causes to standard error, unless nobody reads it.
    pub(crate) fn report(&self) -> ExitCode {
        if !is_closed_pipe(&self.error) {
            let text = super::terminal::printable(&format!("{:#}", self.error));
            eprintln!("ec-connector: {text}");
        }
        ExitCode::from(self.code)
    }
}

impl<E: Into<anyhow::Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self {
            code: 1,
            error: error.into(),
        }
    }
}

/// Whoever closed the pipe has seen enough and needs no message.
fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        cause
            .downcast_ref::<std::io::Error>()
            .is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
    })
}

/// Whether everything the command was asked for was done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    Done,
    /// Some items failed; each has said so.
    SomeFailed,
}

impl From<Outcome> for ExitCode {
    fn from(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Done => Self::SUCCESS,
            Outcome::SomeFailed => Self::from(1),
        }
    }
}
