//! Eviction policies on a trace of real requests, beside vLLM's rule and bounds, in one run.
//!
//! Run it with `cargo xtask bench trace [--json] [FILE]`. FILE has one JSON object a line with the ids that a
//! request reads as `hash_ids`; without one, a sample of a sixteenth that comes with the project is read. Ratios
//! to vLLM's rule come first. What each contender is stands in `docs/EVICTION.md`.

use std::collections::HashMap;

use serde_json::json;
use slab_bench::eviction::{
    Arguments, Cache, GHOSTS, Known, LEN_MEAN, Ours, Outcome, Ranked, Request, S3Fifo, Sieve,
    Unfragmented, Vllm, WTinyLfu, bound, footprint, load, references, replay,
};
use slab_core::{Credit, Evict, Lru};

/// Pools as parts per thousand of the footprint.
const POOLS: [u64; 5] = [2, 10, 50, 100, 200];

type Failure = Box<dyn std::error::Error>;
type Contender = (&'static str, Box<dyn Fn(u64) -> Option<Box<dyn Cache>>>);

fn main() -> Result<(), Failure> {
    let Arguments { as_json, file } = Arguments::read()?;
    let requests = load(&file).map_err(|error| format!("{}: {error}", file.display()))?;
    let footprint = footprint(&requests);
    if !as_json {
        println!(
            "{} requests, {} references, footprint {:.3} TB; sizes are a function of the id, not of the trace",
            requests.len(),
            references(&requests).count(),
            footprint as f64 / 1e12
        );
    }
    for permille in POOLS {
        let capacity = (u128::from(footprint) * u128::from(permille) / 1000) as u64;
        table(&requests, permille, capacity, as_json);
    }
    Ok(())
}

/// One pool size: every contender.
fn table(requests: &[Request], permille: u64, capacity: u64, as_json: bool) {
    let percent = permille as f64 / 10.0;
    if !as_json {
        println!(
            "\npool {percent} % of the footprint\n{:<28} {:>9} {:>9} | {:>9} {:>9} {:>11} {:>8} {:>11}",
            "policy",
            "objects x",
            "bytes x",
            "objects %",
            "bytes %",
            "evicted TB",
            "failed",
            "ns/eviction"
        );
    }
    let mut vllm: Option<(f64, f64)> = None;
    for (name, make) in contenders(requests) {
        let Some(mut cache) = make(capacity) else {
            continue;
        };
        let outcome = replay(requests, &mut *cache);
        let rates = (outcome.objects(), outcome.bytes());
        row(
            name,
            percent,
            rates,
            *vllm.get_or_insert(rates),
            Some(&outcome),
            as_json,
        );
    }
    if let Some(vllm) = vllm {
        row(
            "upper bound",
            percent,
            bound(requests, capacity),
            vllm,
            None,
            as_json,
        );
    }
}

fn row(
    name: &str,
    percent: f64,
    (objects, bytes): (f64, f64),
    (vllm_objects, vllm_bytes): (f64, f64),
    outcome: Option<&Outcome>,
    as_json: bool,
) {
    let (objects_ratio, bytes_ratio) = (objects / vllm_objects, bytes / vllm_bytes);
    if as_json {
        let row = json!({
            "bench": "trace", "pool_percent": percent, "policy": name,
            "objects_over_vllm": objects_ratio, "bytes_over_vllm": bytes_ratio,
            "objects_percent": objects, "bytes_percent": bytes,
            "evicted_bytes": outcome.map(|outcome| outcome.evicted_bytes),
            "evictions": outcome.map(|outcome| outcome.evictions),
            "failed_reserves": outcome.map(|outcome| outcome.failures),
            "eviction_ns": outcome.map(Outcome::eviction_ns),
        });
        println!("{row}");
        return;
    }
    print!("{name:<28} {objects_ratio:>9.3} {bytes_ratio:>9.3} | {objects:>9.2} {bytes:>9.2}");
    if let Some(outcome) = outcome {
        print!(
            " {:>11.3} {:>8} {:>11.0}",
            outcome.evicted_bytes as f64 / 1e12,
            outcome.failures,
            outcome.eviction_ns()
        );
    }
    println!();
}

/// The first is what the others are compared with.
fn contenders(requests: &[Request]) -> Vec<Contender> {
    let mut next: HashMap<u32, Vec<u64>> = HashMap::new();
    for (count, id) in references(requests).enumerate() {
        next.entry(id).or_default().push(count as u64 + 1);
    }
    let references = next.values().map(|uses| uses.len() as u64).sum::<u64>() as f64;
    let next = std::rc::Rc::new(next);
    // References until the next one to an id, or none.
    let wait = move |id: u32, known: &Known| {
        let uses = next.get(&id)?;
        let at = uses.partition_point(|at| *at <= known.now);
        uses.get(at).map(|at| (at - known.now) as f64)
    };
    vec![
        (
            "vLLM (first fit, LRU)",
            Box::new(|capacity| Some(Box::new(Vllm::new(capacity)))),
        ),
        pooled("pool, Credit (default)", |_| Credit::new(GHOSTS)),
        pooled("pool, Lru", |_| Lru::new()),
        pooled("pool, S3-FIFO", S3Fifo::new),
        pooled("pool, SIEVE", |_| Sieve::new()),
        pooled("pool, W-TinyLFU", w_tiny_lfu),
        alone("unfragmented Credit", |_| Credit::new(GHOSTS)),
        alone("unfragmented S3-FIFO", S3Fifo::new),
        alone("unfragmented SIEVE", |_| Sieve::new()),
        alone("unfragmented W-TinyLFU", w_tiny_lfu),
        ranked("unfragmented LRU", |_, known, _| known.now as f64),
        ranked("unfragmented LFU", |_, known, _| {
            known.uses as f64 + known.now as f64 / 1e9
        }),
        ranked("unfragmented GDSF", |_, known, floor| {
            floor + known.uses as f64 * 1e7 / known.len as f64
        }),
        ranked("unfragmented GDSF, len^1/4", |_, known, floor| {
            floor + known.uses as f64 * (1e7 / known.len as f64).powf(0.25)
        }),
        ranked("same, uses remembered", |_, known, floor| {
            floor + known.uses_ever as f64 * (1e7 / known.len as f64).powf(0.25)
        }),
        ranked("unfragmented Credit, 5,000", |_, known, _| {
            let credit = known.uses_ever.min(8) as f64 + (1e12 / known.len as f64).log2() / 4.0;
            known.now as f64 + 5_000.0 * credit
        }),
        (
            "Belady",
            Box::new(move |capacity| {
                let wait = wait.clone();
                let rank = move |id: u32, known: &Known, _: f64| {
                    wait(id, known).map_or(0.0, |wait| references + 1.0 - known.now as f64 - wait)
                };
                Some(Box::new(Ranked::new(capacity, rank)))
            }),
        ),
    ]
}

/// A policy in the pool.
fn pooled<E: Evict + 'static>(name: &'static str, policy: fn(u64) -> E) -> Contender {
    (
        name,
        Box::new(move |capacity| Some(Box::new(Ours::new(capacity, policy(capacity))?))),
    )
}

/// A policy without fragmentation.
fn alone<E: Evict + 'static>(name: &'static str, policy: fn(u64) -> E) -> Contender {
    (
        name,
        Box::new(move |capacity| Some(Box::new(Unfragmented::new(capacity, policy(capacity))))),
    )
}

fn w_tiny_lfu(capacity: u64) -> WTinyLfu {
    WTinyLfu::new(capacity, (capacity / LEN_MEAN) as usize)
}

fn ranked(name: &'static str, rank: fn(u32, &Known, f64) -> f64) -> Contender {
    (
        name,
        Box::new(move |capacity| Some(Box::new(Ranked::new(capacity, rank)))),
    )
}
