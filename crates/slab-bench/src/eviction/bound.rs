//! What no cache can beat.

use std::collections::HashMap;

use super::trace::{Request, references, size};

/// Highest percentages of objects and of bytes that can hit.
///
/// A hit needs its content to stay from the reference before, which takes its length times the references in
/// between out of capacity times all references. The intervals that cost least for what they give are
/// counted until that is used up: the relaxation PFOO-U of Berger, Beckmann and Harchol-Balter, "Practical
/// bounds on optimal caching with variable object sizes" (2018).
#[must_use]
pub fn bound(requests: &[Request], capacity: u64) -> (f64, f64) {
    let mut last: HashMap<u32, u64> = HashMap::new();
    let mut intervals: Vec<(u64, u64)> = Vec::new();
    let (mut count, mut bytes) = (0_u64, 0_u64);
    for id in references(requests) {
        if let Some(before) = last.insert(id, count) {
            intervals.push((count - before, size(id)));
        }
        count += 1;
        bytes += size(id);
    }
    let room = u128::from(capacity) * u128::from(count);
    let cost = |(steps, len): &(u64, u64)| u128::from(*steps) * u128::from(*len);
    intervals.sort_unstable_by_key(cost);
    // The interval that does not fit any more counts whole, so that the bound stays one.
    let take = |intervals: &[(u64, u64)]| {
        let mut used = 0;
        intervals
            .iter()
            .take_while(|interval| {
                used += cost(interval);
                used <= room
            })
            .count()
            .saturating_add(1)
            .min(intervals.len())
    };
    let objects = take(&intervals);
    intervals.sort_unstable();
    let saved: u64 = intervals[..take(&intervals)]
        .iter()
        .map(|(_, len)| len)
        .sum();
    (
        100.0 * objects as f64 / count.max(1) as f64,
        100.0 * saved as f64 / bytes.max(1) as f64,
    )
}
