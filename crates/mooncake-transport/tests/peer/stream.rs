//! The bytes of a seed, as `peer.py` makes them.

/// splitmix64's increment.
const GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;

fn word(seed: u64, index: u64) -> [u8; 8] {
    let z = seed.wrapping_add((index + 1).wrapping_mul(GAMMA));
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    (z ^ (z >> 31)).to_le_bytes()
}

/// Bytes `start .. start + len` of the stream of `seed`.
pub(crate) fn bytes(seed: u64, start: u64, len: usize) -> Vec<u8> {
    let first = start / 8;
    let skip = (start % 8) as usize;
    let words = (skip + len).div_ceil(8) as u64;
    let mut bytes: Vec<u8> = (first..first + words)
        .flat_map(|index| word(seed, index))
        .collect();
    bytes.drain(..skip);
    bytes.truncate(len);
    bytes
}
