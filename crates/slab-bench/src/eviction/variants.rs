//! Workloads that nothing was chosen on.

use std::collections::HashMap;

use crate::random::Random;

use super::trace::{Request, references};

/// A workload and what it is called.
#[derive(Debug)]
pub struct Variant {
    /// What differs from the trace.
    pub name: String,
    /// The requests.
    pub requests: Vec<Request>,
}

/// Requests of a block whose order is changed: about five minutes of the trace.
const BLOCK: usize = 1_000;

/// What is made of a trace, and two workloads that are made up.
#[must_use]
pub fn variants(trace: &[Request]) -> Vec<Variant> {
    let variant = |name: &str, requests: Vec<Request>| Variant {
        name: name.to_owned(),
        requests,
    };
    let half = trace.len() / 2;
    vec![
        variant("the trace itself", trace.to_vec()),
        variant("other sizes, 1", renumbered(trace, 1)),
        variant("other sizes, 2", renumbered(trace, 2)),
        variant("other sizes, 3", renumbered(trace, 3)),
        variant("first half", trace[..half].to_vec()),
        variant("second half", trace[half..].to_vec()),
        variant("shuffled in 1,000s", shuffled(trace, BLOCK)),
        variant("shuffled whole", shuffled(trace, trace.len())),
        variant("Zipf 0.9, drifting", zipf(0.9, trace)),
        variant("Zipf 0.7, drifting", zipf(0.7, trace)),
    ]
}

/// The same trace with other ids, and so with another size for each content.
fn renumbered(trace: &[Request], seed: u64) -> Vec<Request> {
    let mut random = Random::stream(0xA076_1D64_78BD_642F, seed);
    let mut ids: HashMap<u32, u32> = HashMap::new();
    for id in references(trace) {
        // Kept apart by the upper part, so that only the size is drawn.
        let next = ids.len() as u32;
        ids.entry(id)
            .or_insert_with(|| next * 28 + random.below(28) as u32);
    }
    let renumber = |request: &Request| Request {
        hash_ids: request.hash_ids.iter().map(|id| ids[id]).collect(),
    };
    trace.iter().map(renumber).collect()
}

/// Requests in random order inside each block.
fn shuffled(trace: &[Request], block: usize) -> Vec<Request> {
    let mut random = Random::stream(0xE703_7ED1_A0B4_28DB, 0);
    let mut requests = trace.to_vec();
    for block in requests.chunks_mut(block.max(1)) {
        for at in (1..block.len()).rev() {
            block.swap(at, random.below(at as u64 + 1) as usize);
        }
    }
    requests
}

/// Contents that are popular by Zipf's law, and do not stay so.
const CONTENTS: usize = 60_000;
/// References after which one more content is replaced by a new one, at a random rank.
const DRIFT: u64 = 8;

/// As many requests of as many ids as a trace has, independent of one another: content of rank `r` with a
/// weight of `r^-exponent`, and at each eighth reference new content in the place of old.
fn zipf(exponent: f64, trace: &[Request]) -> Vec<Request> {
    let mut random = Random::stream(0x8EBC_6AF0_9C88_C6E3, 0);
    let mut ids: Vec<u32> = (0..CONTENTS as u32).collect();
    let mut fresh = CONTENTS as u32;
    let mut sum = 0.0;
    let weights: Vec<f64> = (1..=CONTENTS)
        .map(|rank| {
            sum += (rank as f64).powf(-exponent);
            sum
        })
        .collect();
    let mut count = 0_u64;
    let mut draw = |_: &u32| {
        count += 1;
        if count.is_multiple_of(DRIFT) {
            ids[random.below(CONTENTS as u64) as usize] = fresh;
            fresh += 1;
        }
        let at = random.below(1 << 31) as f64 / (1_u64 << 31) as f64 * sum;
        ids[weights
            .partition_point(|weight| *weight < at)
            .min(CONTENTS - 1)]
    };
    let request = |request: &Request| Request {
        hash_ids: request.hash_ids.iter().map(&mut draw).collect(),
    };
    trace.iter().map(request).collect()
}
