//! Memory with a writer per region, to see whether anybody writes into somebody else's bytes.

/// One value per granule, and writes that are still under way.
///
/// A user that gives a region back with fences may go on writing until each of them is reached. The shadow
/// makes it do its worst: it writes once more at the last moment. If the region was handed out early, the
/// new owner's value is destroyed, which [`verify`](Self::verify) sees.
#[derive(Clone, Debug)]
pub struct ShadowMemory {
    granules: Vec<u64>,
    late: Vec<LateWriter>,
    reached: Vec<u64>,
}

#[derive(Clone, Debug)]
struct LateWriter {
    start: u64,
    len: u64,
    value: u64,
    fences: Vec<(usize, u64)>,
}

impl ShadowMemory {
    /// Memory of `len` granules that nobody has written.
    #[must_use]
    pub fn new(len: u64) -> Self {
        let len = usize::try_from(len).expect("small test slabs");
        Self {
            granules: vec![0; len],
            late: Vec::new(),
            reached: Vec::new(),
        }
    }

    /// The owner of a region fills it with its value.
    pub fn write(&mut self, start: u64, len: u64, value: u64) {
        for granule in self.range(start, len) {
            self.granules[granule] = value;
        }
    }

    /// Checks that a region holds what its owner wrote.
    ///
    /// # Panics
    /// If somebody else wrote there.
    pub fn verify(&self, start: u64, len: u64, value: u64) {
        for granule in self.range(start, len) {
            assert_eq!(
                self.granules[granule], value,
                "granule {granule} of the region {start}+{len} was overwritten"
            );
        }
    }

    /// The user of a region leaves it but may write until all `fences` (timeline, value) are reached.
    pub fn leave(&mut self, start: u64, len: u64, value: u64, fences: &[(usize, u64)]) {
        let fences: Vec<_> = fences
            .iter()
            .copied()
            .filter(|(timeline, value)| self.reached_value(*timeline) < *value)
            .collect();
        if !fences.is_empty() {
            self.late.push(LateWriter {
                start,
                len,
                value,
                fences,
            });
        }
    }

    /// A timeline comes to `value`. Whoever waited for this writes for the last time just before.
    pub fn reach(&mut self, timeline: usize, value: u64) {
        let late = std::mem::take(&mut self.late);
        for writer in late {
            if writer
                .fences
                .iter()
                .any(|(line, at)| *line == timeline && *at <= value)
            {
                self.write(writer.start, writer.len, writer.value);
            }
            let fences: Vec<_> = writer
                .fences
                .iter()
                .copied()
                .filter(|(line, at)| *line != timeline || *at > value)
                .collect();
            if !fences.is_empty() {
                self.late.push(LateWriter { fences, ..writer });
            }
        }
        if self.reached.len() <= timeline {
            self.reached.resize(timeline + 1, 0);
        }
        self.reached[timeline] = self.reached[timeline].max(value);
    }

    /// Everybody who may still write does so.
    pub fn write_late(&mut self) {
        for writer in self.late.clone() {
            self.write(writer.start, writer.len, writer.value);
        }
    }

    fn reached_value(&self, timeline: usize) -> u64 {
        self.reached.get(timeline).copied().unwrap_or(0)
    }

    fn range(&self, start: u64, len: u64) -> std::ops::Range<usize> {
        let start = usize::try_from(start).expect("small test slabs");
        start..start + usize::try_from(len).expect("small test slabs")
    }
}
