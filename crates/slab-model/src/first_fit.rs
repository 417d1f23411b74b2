//! First fit over a sorted list of holes, as simple as it gets.

/// The reference for lowest-address placement.
#[derive(Clone, Debug)]
pub struct NaiveFirstFit {
    /// Start and length, by start.
    holes: Vec<(u64, u64)>,
}

impl NaiveFirstFit {
    /// One hole of `len` granules.
    #[must_use]
    pub fn new(len: u64) -> Self {
        Self {
            holes: vec![(0, len)],
        }
    }

    /// The start of the lowest hole that is long enough, cut from its low end.
    pub fn allocate(&mut self, len: u64) -> Option<u64> {
        let index = self.holes.iter().position(|(_, hole)| *hole >= len)?;
        let (start, hole) = self.holes[index];
        if hole == len {
            self.holes.remove(index);
        } else {
            self.holes[index] = (start + len, hole - len);
        }
        Some(start)
    }

    /// Puts a region back and merges everything that touches.
    pub fn free(&mut self, start: u64, len: u64) {
        self.holes.push((start, len));
        self.holes.sort_unstable();
        let mut merged: Vec<(u64, u64)> = Vec::new();
        for (start, len) in self.holes.drain(..) {
            match merged.last_mut() {
                Some((last, last_len)) if *last + *last_len == start => *last_len += len,
                _ => merged.push((start, len)),
            }
        }
        self.holes = merged;
    }

    /// The holes by start.
    #[must_use]
    pub fn holes(&self) -> &[(u64, u64)] {
        &self.holes
    }
}
