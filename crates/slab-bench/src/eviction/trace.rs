//! The trace: requests for content, in order.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};

use serde::Deserialize;

/// A sixteenth of the ids of the trace that the study uses, over its whole hour.
pub const SAMPLE: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/data/conversation_trace_sample.jsonl"
);

/// Keys that left and that the default pool remembers.
pub const GHOSTS: u32 = 65_536;
/// Bytes of the mean content.
pub const LEN_MEAN: u64 = 10_000_000;

/// What the programs that replay a trace are told.
pub struct Arguments {
    /// Whether each row is printed as one JSON object.
    pub as_json: bool,
    /// The trace; [`SAMPLE`] if none was named.
    pub file: PathBuf,
}

impl Arguments {
    /// Those of this process.
    ///
    /// # Errors
    /// What to give instead, if an option is not known.
    pub fn read() -> Result<Self, String> {
        let mut arguments = Self {
            as_json: false,
            file: PathBuf::from(SAMPLE),
        };
        for argument in std::env::args_os().skip(1) {
            let text = argument.to_string_lossy();
            if text == "--json" {
                arguments.as_json = true;
            } else if text.starts_with('-') {
                return Err(format!("unknown argument {text}; give --json and one file"));
            } else {
                arguments.file = PathBuf::from(argument);
            }
        }
        Ok(arguments)
    }
}

/// One request: the ids of what it reads, in order.
#[derive(Clone, Debug, Deserialize)]
pub struct Request {
    /// Equal ids are equal content.
    pub hash_ids: Vec<u32>,
}

/// The requests of a file with one JSON object a line.
///
/// # Errors
/// If it cannot be read, or a line is something else.
pub fn load(path: &Path) -> io::Result<Vec<Request>> {
    BufReader::new(File::open(path)?)
        .lines()
        .map(|line| Ok(serde_json::from_str(&line?)?))
        .collect()
}

/// Bytes of the content of an id: a stand-in for the output of a vision encoder, not part of the trace.
#[must_use]
pub fn size(id: u32) -> u64 {
    const TOKENS: [u64; 7] = [256, 576, 729, 1024, 1369, 2304, 4096];
    const HIDDEN: [u64; 4] = [1152, 3584, 4096, 5120];
    TOKENS[id as usize % 7] * HIDDEN[id as usize / 7 % 4] * 2
}

/// Bytes of all distinct ids.
#[must_use]
pub fn footprint(requests: &[Request]) -> u64 {
    let ids: HashSet<u32> = references(requests).collect();
    ids.into_iter().map(size).sum()
}

/// All ids that are referenced, in order.
pub fn references(requests: &[Request]) -> impl Iterator<Item = u32> + '_ {
    requests
        .iter()
        .flat_map(|request| request.hash_ids.iter().copied())
}
