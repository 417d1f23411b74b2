//! Checks another allocator's placements, whatever its policy.

/// Follows the placements of an allocator and checks each.
#[derive(Clone, Debug)]
pub struct NaiveHoles {
    len: u64,
    /// Start and length of live regions, by start.
    live: Vec<(u64, u64)>,
}

impl NaiveHoles {
    /// A slab of `len` granules, all free.
    #[must_use]
    pub fn new(len: u64) -> Self {
        Self {
            len,
            live: Vec::new(),
        }
    }

    /// The holes by start.
    #[must_use]
    pub fn holes(&self) -> Vec<(u64, u64)> {
        let mut holes = Vec::new();
        let mut end = 0;
        for (start, len) in self.live.iter().copied().chain([(self.len, 0)]) {
            if start > end {
                holes.push((end, start - end));
            }
            end = start + len;
        }
        holes
    }

    /// Length of the longest hole.
    #[must_use]
    pub fn longest(&self) -> u64 {
        self.holes().iter().map(|(_, len)| *len).max().unwrap_or(0)
    }

    /// Takes note of a placement and returns the length of the hole it was cut from and of the shortest
    /// hole that would have done.
    ///
    /// # Panics
    /// If the region is not at the low end of a hole that is long enough.
    pub fn placed(&mut self, start: u64, len: u64) -> (u64, u64) {
        let holes = self.holes();
        let hole = holes.iter().find(|(hole, _)| *hole == start);
        let Some((_, chosen)) = hole.filter(|(_, hole)| *hole >= len) else {
            panic!("{len} granules placed at {start}, holes are {holes:?}");
        };
        let tightest = holes
            .iter()
            .map(|(_, hole)| *hole)
            .filter(|hole| *hole >= len)
            .min();
        self.live.push((start, len));
        self.live.sort_unstable();
        (*chosen, tightest.unwrap_or(*chosen))
    }

    /// Takes note that an allocation of `len` granules failed.
    ///
    /// # Panics
    /// If a hole was long enough.
    pub fn refused(&self, len: u64) {
        assert!(
            self.longest() < len,
            "{len} granules refused, holes are {:?}",
            self.holes()
        );
    }

    /// Takes note that a region came back.
    ///
    /// # Panics
    /// If it is not live.
    pub fn freed(&mut self, start: u64, len: u64) {
        let index = self.live.iter().position(|live| *live == (start, len));
        self.live.remove(index.expect("the freed region is live"));
    }

    /// The map as (start, length, free) by start.
    #[must_use]
    pub fn runs(&self) -> Vec<(u64, u64, bool)> {
        let mut runs: Vec<_> = self
            .live
            .iter()
            .map(|(start, len)| (*start, *len, false))
            .chain(
                self.holes()
                    .into_iter()
                    .map(|(start, len)| (start, len, true)),
            )
            .collect();
        runs.sort_unstable();
        runs
    }
}
