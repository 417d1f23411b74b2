//! The figures a demo ends with.

use serde::Serialize;

use crate::cli::size::show_size;

/// What has been counted so far.
#[derive(Default)]
pub(super) struct Tally {
    verified: usize,
    cached: usize,
    wire_bytes: u64,
    seconds: f64,
    /// From reserve to complete, of items that were written.
    written_us: Vec<u64>,
}

impl Tally {
    pub(super) fn pushed(&mut self, cached: bool, elapsed_us: u64, wire_bytes: u64) {
        self.wire_bytes += wire_bytes;
        if cached {
            self.cached += 1;
        } else {
            self.written_us.push(elapsed_us);
        }
    }

    pub(super) fn verified(&mut self) {
        self.verified += 1;
    }

    pub(super) fn round(&mut self, seconds: f64) {
        self.seconds += seconds;
    }

    pub(super) fn summary(mut self, items: usize, bytes: u64) -> Summary {
        self.written_us.sort_unstable();
        Summary {
            items,
            verified: self.verified,
            cached: self.cached,
            bytes,
            seconds: self.seconds,
            gb_per_s: if self.seconds > 0.0 {
                self.wire_bytes as f64 / 1e9 / self.seconds
            } else {
                0.0
            },
            p50_us: percentile(&self.written_us, 50),
            p99_us: percentile(&self.written_us, 99),
            wire_bytes: self.wire_bytes,
        }
    }
}

/// The last line of a demo.
#[derive(Debug, Serialize)]
pub(super) struct Summary {
    items: usize,
    verified: usize,
    cached: usize,
    bytes: u64,
    seconds: f64,
    gb_per_s: f64,
    p50_us: Option<u64>,
    p99_us: Option<u64>,
    #[serde(skip)]
    wire_bytes: u64,
}

impl Summary {
    pub(super) fn is_clean(&self) -> bool {
        self.verified == self.items
    }

    /// The figures for a person.
    pub(super) fn text(&self) -> String {
        let time =
            |us: Option<u64>| us.map_or("-".to_owned(), |us| format!("{:.1} ms", us as f64 / 1e3));
        format!(
            "{} pushed, {} verified, {} cached\n\
             {} over the wire in {:.3} s: {:.2} GB/s\n\
             reserve to complete: median {}, 99 % within {}",
            self.items,
            self.verified,
            self.cached,
            show_size(self.wire_bytes),
            self.seconds,
            self.gb_per_s,
            time(self.p50_us),
            time(self.p99_us),
        )
    }
}

/// The smallest of the sorted values that at least `percent` of them do not exceed.
fn percentile(sorted: &[u64], percent: usize) -> Option<u64> {
    let rank = (sorted.len() * percent).div_ceil(100);
    sorted.get(rank.checked_sub(1)?).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_occurred() {
        assert_eq!(percentile(&[], 50), None);
        assert_eq!(percentile(&[7], 50), Some(7));
        assert_eq!(percentile(&[7], 99), Some(7));
        let hundred: Vec<u64> = (1..=100).collect();
        assert_eq!(percentile(&hundred, 50), Some(50));
        assert_eq!(percentile(&hundred, 99), Some(99));
        assert_eq!(percentile(&[1, 2, 3], 50), Some(2));
        assert_eq!(percentile(&[1, 2, 3], 99), Some(3));
    }

    #[test]
    fn the_summary_has_the_keys_and_number_types_of_its_contract() {
        let mut tally = Tally::default();
        tally.pushed(false, 30, 2_000_000_000);
        tally.pushed(true, 5, 0);
        tally.verified();
        tally.round(0.5);
        let summary = tally.summary(2, 2_500_000_000);
        assert!(!summary.is_clean());
        assert_eq!(
            serde_json::to_string(&summary).unwrap(),
            r#"{"items":2,"verified":1,"cached":1,"bytes":2500000000,"seconds":0.5,"gb_per_s":4.0,"p50_us":30,"p99_us":30}"#
        );
    }
}
