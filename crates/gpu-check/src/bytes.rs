//! Bytes that differ from seed to seed and from offset to offset.

use anyhow::{Result, bail};
use slab_memory::Memory;

/// A generator of random numbers, small and good enough (xorshift64*).
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// A number below `bound`, which is not zero.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

pub(crate) fn pattern(seed: u64, len: u64) -> Vec<u8> {
    let len = len as usize;
    let mut random = Random::new(seed);
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        bytes.extend_from_slice(&random.next().to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// Compares bytes of a memory with the pattern of a seed.
pub(crate) fn expect(memory: &dyn Memory, offset: u64, seed: u64, len: u64) -> Result<()> {
    let mut found = vec![0; len as usize];
    memory.copy_out(offset, &mut found)?;
    expect_bytes(&found, &pattern(seed, len))
}

pub(crate) fn expect_bytes(found: &[u8], expected: &[u8]) -> Result<()> {
    match found.iter().zip(expected).position(|(a, b)| a != b) {
        None if found.len() == expected.len() => Ok(()),
        None => bail!("{} bytes instead of {}", found.len(), expected.len()),
        Some(at) => bail!("byte {at} of {} differs", expected.len()),
    }
}
