//! Names for content: the sha256 of raw bytes, and the `mm_hash` under which a pool finds them again.

use std::fmt::Write;
use std::fs::File;
use std::ops::Range;

use sha2::{Digest, Sha256};
use slab_memory::{HostSlab, SlabError};

use crate::tensor::TensorSpec;

/// Hashes a tensor in pieces, both as raw bytes and as typed content.
///
/// The `mm_hash` is the lower-case hexadecimal sha256 of the canonical torch dtype, a newline, the dimensions in
/// decimal joined by commas, a newline, and the raw bytes. Equal bytes of different shape or type therefore have
/// different names.
#[derive(Debug, Clone)]
pub struct ContentHasher {
    raw: Sha256,
    typed: Sha256,
}

impl ContentHasher {
    /// Starts the hash of a tensor.
    pub fn new(tensor: &TensorSpec) -> Self {
        let mut prefix = tensor.dtype().name().to_owned();
        prefix.push('\n');
        for (index, dim) in tensor.shape().iter().enumerate() {
            if index > 0 {
                prefix.push(',');
            }
            // Writing to a string cannot fail.
            let _ = write!(prefix, "{dim}");
        }
        prefix.push('\n');
        Self {
            raw: Sha256::new(),
            typed: Sha256::new_with_prefix(prefix),
        }
    }

    /// Adds the next bytes of the tensor.
    pub fn update(&mut self, bytes: &[u8]) {
        self.raw.update(bytes);
        self.typed.update(bytes);
    }

    /// Ends the hash.
    pub fn finish(self) -> ContentDigest {
        ContentDigest {
            sha256: hex(&self.raw.finalize()),
            mm_hash: hex(&self.typed.finalize()),
        }
    }
}

/// The two names of a tensor's content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContentDigest {
    /// Lower-case hexadecimal sha256 of the raw bytes.
    pub sha256: String,
    /// Lower-case hexadecimal sha256 of dtype, shape and bytes; see [`ContentHasher`].
    pub mm_hash: String,
}

/// Reads bytes of `file`, from `offset` on, into `range` of `slab`, and shows what has arrived there to `hash`, in order.
///
/// What is hashed is the copy in the slab: whatever happens to the file afterwards, that is what was hashed, if
/// nobody else writes to the range.
pub(crate) fn fill_hashed(
    slab: &HostSlab,
    range: Range<u64>,
    file: &File,
    offset: u64,
    mut hash: impl FnMut(&[u8]),
) -> Result<(), SlabError> {
    let len = range.end.saturating_sub(range.start);
    let mut buffer = vec![0; PIECE.min(len) as usize];
    let mut done = 0;
    while done < len {
        let count = PIECE.min(len - done);
        let start = range.start + done;
        slab.read_at(start..start + count, file, offset + done)?;
        let piece = &mut buffer[..count as usize];
        slab.copy_out(start, piece)?;
        hash(piece);
        done += count;
    }
    Ok(())
}

/// Small enough to stay in cache between reading and hashing.
const PIECE: u64 = 256 << 10;

/// Lower-case hexadecimal digits of `bytes`.
pub(crate) fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    bytes
        .iter()
        .flat_map(|byte| [byte >> 4, byte & 15])
        .map(|nibble| char::from(DIGITS[usize::from(nibble)]))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Dtype;

    fn spec(dtype: Dtype, shape: &[u64]) -> TensorSpec {
        TensorSpec::new(dtype, shape).unwrap()
    }

    #[test]
    fn raw_hash_is_the_published_sha256_of_the_bytes() {
        let mut hasher = ContentHasher::new(&spec(Dtype::UINT8, &[3]));
        hasher.update(b"a");
        hasher.update(b"bc");
        // The test vector of FIPS 180-4.
        assert_eq!(
            hasher.finish().sha256,
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }

    #[test]
    fn mm_hash_covers_dtype_and_dims_in_the_documented_text() {
        let check = |dtype: Dtype, shape: &[u64], text: &[u8]| {
            let mut hasher = ContentHasher::new(&spec(dtype, shape));
            hasher.update(b"xyz");
            assert_eq!(hasher.finish().mm_hash, hex(&Sha256::digest(text)));
        };
        check(Dtype::BFLOAT16, &[2, 30, 4], b"bfloat16\n2,30,4\nxyz");
        check(Dtype::BOOL, &[], b"bool\n\nxyz");
        check(Dtype::INT8, &[0], b"int8\n0\nxyz");
    }

    #[test]
    fn hex_keeps_leading_zeros() {
        assert_eq!(hex(&[0x00, 0x0f, 0xa0]), "000fa0");
    }
}
