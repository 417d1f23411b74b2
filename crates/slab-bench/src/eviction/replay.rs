//! The replay rule, over any cache.

use std::time::{Duration, Instant};

use super::trace::{Request, size};

/// Something that keeps content between requests.
pub trait Cache {
    /// Leases `id` until the end of the request. False if it is not there.
    fn hit(&mut self, id: u32) -> bool;
    /// Makes room for `id` and leases it until the end of the request. False if there is none to make.
    fn insert(&mut self, id: u32, len: u64) -> bool;
    /// Ends the leases of the request.
    fn end_request(&mut self);
    /// Residents evicted so far, and their bytes.
    fn evicted(&self) -> (u64, u64);
}

/// What a replay came to.
#[derive(Clone, Copy, Debug, Default)]
pub struct Outcome {
    references: u64,
    hits: u64,
    bytes: u64,
    hit_bytes: u64,
    /// Reserves that failed.
    pub failures: u64,
    /// Residents evicted.
    pub evictions: u64,
    /// And their bytes.
    pub evicted_bytes: u64,
    /// In calls that evicted.
    evicting: Duration,
}

impl Outcome {
    /// Percent of references that hit.
    #[must_use]
    pub fn objects(&self) -> f64 {
        100.0 * self.hits as f64 / self.references.max(1) as f64
    }

    /// Percent of bytes referenced that hit.
    #[must_use]
    pub fn bytes(&self) -> f64 {
        100.0 * self.hit_bytes as f64 / self.bytes.max(1) as f64
    }

    /// Nanoseconds of a call that evicted, for each eviction.
    #[must_use]
    pub fn eviction_ns(&self) -> f64 {
        self.evicting.as_nanos() as f64 / self.evictions.max(1) as f64
    }
}

/// Requests run one after another; what is there is leased, what is not is inserted; what finds no room is
/// skipped; leases end with the request.
pub fn replay(requests: &[Request], cache: &mut dyn Cache) -> Outcome {
    let mut outcome = Outcome::default();
    for request in requests {
        for id in &request.hash_ids {
            let len = size(*id);
            outcome.references += 1;
            outcome.bytes += len;
            if cache.hit(*id) {
                outcome.hits += 1;
                outcome.hit_bytes += len;
                continue;
            }
            let before = cache.evicted().0;
            let begin = Instant::now();
            let inserted = cache.insert(*id, len);
            let elapsed = begin.elapsed();
            if cache.evicted().0 > before {
                outcome.evicting += elapsed;
            }
            outcome.failures += u64::from(!inserted);
        }
        cache.end_request();
    }
    (outcome.evictions, outcome.evicted_bytes) = cache.evicted();
    outcome
}
