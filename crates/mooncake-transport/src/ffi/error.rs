//! What can go wrong between us and the library.

use std::path::PathBuf;

use mooncake_sys::LoadError;

use crate::error::{EngineError, seconds};

/// Why the Mooncake library could not be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LibraryError {
    /// There is no such file: set `MOONCAKE_LIBRARY` to the path of the library.
    #[error("there is no {}; set MOONCAKE_LIBRARY to the path of Mooncake's library", file.display())]
    Missing {
        /// The file, or the name that the system's loader looked for in vain.
        file: PathBuf,
    },
    /// The file is there and cannot be loaded: it is no shared library, or none for this machine, or one
    /// that it needs itself is missing.
    #[error("{} cannot be loaded: {reason}", file.display())]
    NotALibrary {
        /// The file.
        file: PathBuf,
        /// What the system's loader says.
        reason: String,
    },
    /// The library lacks a function that the call needs.
    #[error("{} has no function {symbol}", file.display())]
    MissingSymbol {
        /// The file.
        file: PathBuf,
        /// The function.
        symbol: &'static str,
    },
    /// A function returned null: the library's log, on standard error, says why.
    #[error("{call} failed")]
    Null {
        /// The function.
        call: &'static str,
    },
    /// A function returned an error.
    #[error("{call} failed with code {code}")]
    Code {
        /// The function.
        call: &'static str,
        /// Its code; the library's log, on standard error, may say more.
        code: i32,
    },
    /// A function did not return in time. It is still running, on a thread of its own, and what it
    /// comes to is dropped.
    #[error("{call} did not return within {}", seconds(*timeout_ms))]
    CallTimeout {
        /// The function.
        call: &'static str,
        /// The time allowed.
        timeout_ms: u64,
    },
    /// As many calls as are allowed are still running: try again later.
    #[error("{max} calls are running already")]
    TooManyCalls {
        /// Calls allowed at a time.
        max: usize,
    },
    /// As many segments as are allowed are open; the library forgets none.
    #[error("{max} segments are open already")]
    TooManySegments {
        /// Segments allowed.
        max: usize,
    },
    /// A text cannot be passed to the library.
    #[error("{what} {problem}")]
    Text {
        /// Which text.
        what: &'static str,
        /// What is wrong with it.
        problem: TextProblem,
    },
    /// Of the metadata schemes only `http` and `https` are accepted without
    /// [`Metadata::Unchecked`](super::Metadata::Unchecked): the library ends the process on one that it was not built with.
    #[error("the metadata address {address:?} does not begin with http:// or https://")]
    MetadataScheme {
        /// The address given.
        address: String,
    },
    /// The matrix of network devices is no JSON object of locations, each with two arrays of names.
    #[error("the matrix of network devices is not {expected}")]
    Matrix {
        /// What was expected.
        expected: &'static str,
    },
    /// The memory has no host address, and the configuration does not say that the library can reach
    /// device memory.
    #[error("memory of a device at {address:#x}, which the library was not said to reach")]
    DeviceMemory {
        /// The memory's address.
        address: u64,
    },
    /// The process was forked after the engine was made: an engine works in the process that made it.
    #[error("the engine was made before this process was forked; make engines after forking")]
    Forked,
}

/// What is wrong with a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TextProblem {
    /// It is empty.
    #[error("is empty")]
    Empty,
    /// It contains a NUL byte, where the library would see its end.
    #[error("contains a NUL byte")]
    Nul,
    /// It is longer than is accepted.
    #[error("has {len} bytes, more than {max}")]
    TooLong {
        /// Its length in bytes.
        len: usize,
        /// Bytes accepted.
        max: usize,
    },
}

impl From<LoadError> for LibraryError {
    fn from(error: LoadError) -> Self {
        match error {
            LoadError::Missing { file } => Self::Missing { file },
            LoadError::MissingSymbol { file, symbol } => Self::MissingSymbol { file, symbol },
            LoadError::NotALibrary { file, reason } => Self::NotALibrary { file, reason },
            // A kind that this crate does not know yet.
            other => Self::NotALibrary {
                file: PathBuf::new(),
                reason: other.to_string(),
            },
        }
    }
}

impl From<LibraryError> for EngineError {
    fn from(source: LibraryError) -> Self {
        Self::Library { source }
    }
}
