//! Copies between ordinary slices and memory that others may write at the same time.
//!
//! A plain `memcpy` that meets a concurrent write to the same byte is undefined behaviour. Here
//! every access to the shared side is a relaxed atomic access of one aligned 8-byte word, always of
//! that size (racing accesses of different sizes are not defined either). A copy that races then
//! yields some mixture of old and new bytes, and nothing worse.
#![allow(unsafe_code)]

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering};

const WORD: usize = size_of::<u64>();

/// The aligned words of one mapping.
#[derive(Clone, Copy)]
pub(crate) struct Words {
    base: NonNull<u64>,
    /// Bytes, a multiple of the word size.
    len_bytes: usize,
}

impl Words {
    /// Describes the `len_bytes` bytes from `base`.
    ///
    /// # Safety
    /// `base` is 8-byte aligned, `len_bytes` is a multiple of 8, and all these bytes stay mapped,
    /// readable and writable for as long as the value or a copy of it is used. No Rust reference
    /// to them exists, and threads of this process access them only through `Words`.
    pub(crate) unsafe fn new(base: NonNull<u8>, len_bytes: usize) -> Self {
        debug_assert!(base.as_ptr().addr().is_multiple_of(WORD) && len_bytes.is_multiple_of(WORD));
        Self {
            base: base.cast(),
            len_bytes,
        }
    }

    fn words(&self) -> &[AtomicU64] {
        // SAFETY: `new`'s caller promises `len_bytes` mapped, aligned bytes that are only accessed
        // through atomics or from outside the program, which a shared slice of atomics allows.
        unsafe { core::slice::from_raw_parts(self.base.as_ptr().cast(), self.len_bytes / WORD) }
    }

    /// Stores `source` from byte `offset` on.
    ///
    /// # Panics
    /// If the range does not lie inside the words; callers check first.
    pub(crate) fn store(&self, offset: usize, source: &[u8]) {
        assert!(
            offset
                .checked_add(source.len())
                .is_some_and(|end| end <= self.len_bytes)
        );
        let head = source.len().min((WORD - offset % WORD) % WORD);
        let (head_bytes, rest) = source.split_at(head);
        self.store_part(offset, head_bytes);
        let first = (offset + head) / WORD;
        let chunks = rest.chunks_exact(WORD);
        let tail = chunks.remainder();
        let count = chunks.len();
        for (word, chunk) in self.words()[first..first + count].iter().zip(chunks) {
            let mut bytes = [0; WORD];
            bytes.copy_from_slice(chunk);
            word.store(u64::from_ne_bytes(bytes), Ordering::Relaxed);
        }
        self.store_part((first + count) * WORD, tail);
    }

    /// Stores fewer bytes than a word, all inside one word, and leaves its other bytes alone.
    fn store_part(&self, offset: usize, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        let start = offset % WORD;
        let merge = |old: u64| {
            let mut word = old.to_ne_bytes();
            word[start..start + bytes.len()].copy_from_slice(bytes);
            Some(u64::from_ne_bytes(word))
        };
        // A compare-exchange, so that a neighbour's bytes in the same word are never lost.
        let word = &self.words()[offset / WORD];
        let merged = word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, merge);
        debug_assert!(merged.is_ok());
    }

    /// Loads into `target` from byte `offset` on.
    ///
    /// # Panics
    /// As [`store`](Words::store).
    pub(crate) fn load(&self, offset: usize, target: &mut [u8]) {
        assert!(
            offset
                .checked_add(target.len())
                .is_some_and(|end| end <= self.len_bytes)
        );
        let head = target.len().min((WORD - offset % WORD) % WORD);
        let (head_bytes, rest) = target.split_at_mut(head);
        self.load_part(offset, head_bytes);
        let first = (offset + head) / WORD;
        let mut chunks = rest.chunks_exact_mut(WORD);
        let count = chunks.len();
        for (word, chunk) in self.words()[first..first + count].iter().zip(&mut chunks) {
            chunk.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
        }
        self.load_part((first + count) * WORD, chunks.into_remainder());
    }

    fn load_part(&self, offset: usize, bytes: &mut [u8]) {
        if bytes.is_empty() {
            return;
        }
        let start = offset % WORD;
        let word = self.words()[offset / WORD]
            .load(Ordering::Relaxed)
            .to_ne_bytes();
        bytes.copy_from_slice(&word[start..start + bytes.len()]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_offset_and_length_round_trips_and_leaves_neighbours_alone() {
        for offset in 0..20 {
            for len in 0..40 {
                let backing: Box<[AtomicU64]> = (0..8)
                    .map(|_| AtomicU64::new(u64::from_ne_bytes([0xEE; 8])))
                    .collect();
                let base = NonNull::from(&backing[0]).cast::<u8>();
                // SAFETY: eight aligned words, alive to the end of the block, atomics only.
                let words = unsafe { Words::new(base, 64) };
                let bytes: Vec<u8> = (1..=len as u8).collect();
                words.store(offset, &bytes);
                let mut all = [0; 64];
                words.load(0, &mut all);
                let mut expected = [0xEE; 64];
                expected[offset..offset + len].copy_from_slice(&bytes);
                assert_eq!(all, expected, "offset {offset} len {len}");
                let mut part = vec![0; len];
                words.load(offset, &mut part);
                assert_eq!(part, bytes);
            }
        }
    }

    #[test]
    #[should_panic(expected = "assertion failed")]
    fn a_store_past_the_end_panics() {
        let backing = [AtomicU64::new(0)];
        // SAFETY: one aligned word, alive to the end of the test, atomics only.
        let words = unsafe { Words::new(NonNull::from(&backing[0]).cast(), 8) };
        words.store(1, &[0; 8]);
    }
}
