//! What the demo's processes say to each other, one JSON object a line.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::cli::generate::EncoderOutput;

/// Where the bytes of an item come from, on both sides.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Origin {
    Generated { output: EncoderOutput },
    File { path: PathBuf, index: usize },
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Generated { output } => {
                write!(f, "encoder output [{}, {}]", output.tokens, output.hidden)
            }
            Self::File { path, index } => write!(f, "tensor {index} of {}", path.display()),
        }
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Planned {
    pub(super) nbytes: u64,
    pub(super) origin: Origin,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ToProducer {
    pub(super) push: Vec<Planned>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum FromProducer {
    /// All items of the round are hashed; the clock of the push phase starts.
    Hashed,
    Pushed {
        index: usize,
        transfer_id: String,
        mm_hash: String,
        cached: bool,
        elapsed_us: u64,
        wire_bytes: u64,
    },
    Failed {
        index: usize,
        error: String,
    },
    /// The round's push phase is over.
    Round {
        seconds: f64,
    },
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Verify {
    pub(super) transfer_id: String,
    pub(super) mm_hash: String,
    pub(super) origin: Origin,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ToConsumer {
    pub(super) verify: Vec<Verify>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum FromConsumer {
    Ready {
        control: String,
    },
    Verified {
        index: usize,
        error: Option<String>,
    },
    /// The consumer cannot go on.
    Error {
        error: String,
    },
}
