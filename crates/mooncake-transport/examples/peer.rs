//! Serves a slab to whoever asks, and moves bytes from and to other peers, on command.
//!
//! `cargo run -p mooncake-transport --example peer -- [BYTES]` prints one line
//! `SESSION ADDRESS BYTES`, then reads commands from standard input, one a line, and answers each
//! with one line that starts with `ok` or `error`:
//!
//! - `fill SEED OFFSET LEN` writes a pattern into the slab; `sum OFFSET LEN` answers its checksum
//! - `write SESSION ADDRESS OFFSET LEN` and `read SESSION ADDRESS OFFSET LEN` transfer
//! - `notify SESSION NAME MESSAGE`, `notices`, `probe SESSION`
//!
//! It ends with standard input.

use std::error::Error;
use std::io::{BufRead, Write};
use std::sync::Arc;

use mooncake_transport::tcp::{TcpConfig, TcpEngine};
use mooncake_transport::{Access, Engine, Op, Task};
use slab_memory::{HostSlab, Memory};

struct Peer {
    engine: TcpEngine,
    slab: Arc<HostSlab>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let len = match std::env::args().nth(1) {
        Some(len) => len.parse()?,
        None => 64 << 20,
    };
    let engine = TcpEngine::start(TcpConfig::default())?;
    let slab = Arc::new(HostSlab::new(len)?);
    let _registration = engine.register(slab.clone(), Access::RemoteWrite)?;
    let mut stdout = std::io::stdout().lock();
    writeln!(
        stdout,
        "{} {} {}",
        engine.session(),
        slab.address(),
        slab.len()
    )?;
    stdout.flush()?;
    let peer = Peer { engine, slab };
    for line in std::io::stdin().lock().lines() {
        match peer.obey(&line?) {
            Ok(answer) => writeln!(stdout, "ok {answer}")?,
            Err(error) => writeln!(stdout, "error {error}")?,
        }
        stdout.flush()?;
    }
    Ok(())
}

impl Peer {
    fn obey(&self, line: &str) -> Result<String, Box<dyn Error>> {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["fill", seed, offset, len] => {
                let bytes = pattern(seed.parse()?, len.parse()?);
                self.slab.copy_in(offset.parse()?, &bytes)?;
                Ok(String::new())
            }
            ["sum", offset, len] => {
                let mut bytes = vec![0; len.parse()?];
                self.slab.copy_out(offset.parse()?, &mut bytes)?;
                Ok(format!("{:016x}", checksum(&bytes)))
            }
            ["write", session, address, offset, len] => self.transfer(
                Op::Write,
                session,
                address.parse()?,
                offset.parse()?,
                len.parse()?,
            ),
            ["read", session, address, offset, len] => self.transfer(
                Op::Read,
                session,
                address.parse()?,
                offset.parse()?,
                len.parse()?,
            ),
            ["notify", session, name, message] => {
                let segment = self.engine.open_segment(session)?;
                self.engine.notify(&segment, name, message)?;
                Ok(String::new())
            }
            ["notices"] => Ok(format!("{:?}", self.engine.take_notices()?.notices)),
            ["probe", session] => {
                self.engine.probe(session)?;
                Ok(String::new())
            }
            _ => Err("unknown command".into()),
        }
    }

    fn transfer(
        &self,
        op: Op,
        session: &str,
        remote: u64,
        offset: u64,
        len: u64,
    ) -> Result<String, Box<dyn Error>> {
        let segment = self.engine.open_segment(session)?;
        let memory: Arc<dyn Memory> = self.slab.clone();
        let end = offset.checked_add(len).ok_or("the range wraps")?;
        let hold = Box::new(());
        let task = Task {
            op,
            segment,
            remote,
            memory,
            range: offset..end,
            hold,
        };
        let batch = self.engine.submit(vec![task])?;
        let report = batch.wait(None).ok_or("a wait without deadline ended")?;
        match report.first_failure() {
            None => Ok(String::new()),
            Some((_, failure)) => Err(format!("{failure:?}").into()),
        }
    }
}

/// Bytes of a 64-bit xorshift generator, little-endian word after word.
fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// FNV-1a with 64 bits.
fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xCBF2_9CE4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01B3)
    })
}
