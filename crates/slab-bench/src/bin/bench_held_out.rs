//! Eviction policies on workloads that nothing was chosen on.
//!
//! Run it with `cargo xtask bench held-out [--json] [FILE]`, with a trace as `bench trace` takes it. First every
//! policy of the pool on variants of the trace and on workloads that are made up, over vLLM's rule; then the
//! constants of the default policy, chosen on the first half of the trace and tried on the second.

use serde_json::json;
use slab_bench::eviction::{
    Arguments, Cache, GHOSTS, LEN_MEAN, Ours, Request, S3Fifo, Sieve, Tuned, Tuning, Unfragmented,
    Vllm, WTinyLfu, footprint, load, replay, variants,
};
use slab_core::{Credit, Evict, Lru};

/// Pools as parts per thousand of the footprint.
const POOLS: [u64; 3] = [10, 50, 200];
/// Those that constants are chosen at.
const TUNED_AT: [u64; 2] = [10, 50];

type Failure = Box<dyn std::error::Error>;
/// Percent of objects and of bytes that hit.
type Rates = (f64, f64);
type Make = fn(u64) -> Option<Box<dyn Cache>>;

/// The first is what the others are compared with.
const CONTENDERS: [(&str, Make); 6] = [
    ("vLLM's rule", |capacity| {
        Some(Box::new(Vllm::new(capacity)))
    }),
    ("Credit", |capacity| pooled(capacity, Credit::new(GHOSTS))),
    ("Lru", |capacity| pooled(capacity, Lru::new())),
    ("S3-FIFO", |capacity| {
        pooled(capacity, S3Fifo::new(capacity))
    }),
    ("SIEVE", |capacity| pooled(capacity, Sieve::new())),
    ("W-TinyLFU", |capacity| {
        let entries = (capacity / LEN_MEAN) as usize;
        pooled(capacity, WTinyLfu::new(capacity, entries))
    }),
];

fn pooled<E: Evict + 'static>(capacity: u64, policy: E) -> Option<Box<dyn Cache>> {
    Some(Box::new(Ours::new(capacity, policy)?))
}

fn main() -> Result<(), Failure> {
    let Arguments { as_json, file } = Arguments::read()?;
    let trace = load(&file).map_err(|error| format!("{}: {error}", file.display()))?;
    compare(&trace, as_json);
    choose(&trace, as_json);
    Ok(())
}

fn capacity(requests: &[Request], permille: u64) -> u64 {
    (u128::from(footprint(requests)) * u128::from(permille) / 1000) as u64
}

fn rates(requests: &[Request], cache: &mut dyn Cache) -> Rates {
    let outcome = replay(requests, cache);
    (outcome.objects(), outcome.bytes())
}

fn compare(trace: &[Request], as_json: bool) {
    if !as_json {
        println!("Objects / bytes over vLLM's rule, whose own percentages come first.\n");
        print!("| workload | pool, % |");
        for (name, _) in CONTENDERS {
            print!(" {name} |");
        }
        println!("\n| --- |{}", " ---: |".repeat(CONTENDERS.len() + 1));
    }
    for variant in variants(trace) {
        for permille in POOLS {
            let capacity = capacity(&variant.requests, permille);
            let found =
                CONTENDERS.map(|(_, make)| Some(rates(&variant.requests, &mut *make(capacity)?)));
            row(&variant.name, permille, &found, as_json);
        }
    }
}

fn row(workload: &str, permille: u64, found: &[Option<Rates>; CONTENDERS.len()], as_json: bool) {
    let percent = permille as f64 / 10.0;
    let (objects, bytes) = found[0].unwrap_or_default();
    if as_json {
        for ((name, _), rates) in CONTENDERS.iter().zip(found) {
            let row = json!({
                "bench": "held-out", "workload": workload, "pool_percent": percent, "policy": name,
                "objects_over_vllm": rates.map(|rates| rates.0 / objects),
                "bytes_over_vllm": rates.map(|rates| rates.1 / bytes),
                "objects_percent": rates.map(|rates| rates.0), "bytes_percent": rates.map(|rates| rates.1),
            });
            println!("{row}");
        }
        return;
    }
    print!("| {workload} | {percent} | {objects:.2} / {bytes:.2} |");
    for rates in &found[1..] {
        match rates {
            Some(rates) => print!(" {:.3} / {:.3} |", rates.0 / objects, rates.1 / bytes),
            None => print!(" the pool is too small |"),
        }
    }
    println!();
}

/// Which constants the first half of the trace would have chosen, and what they give in the second.
fn choose(trace: &[Request], as_json: bool) {
    let (first, second) = trace.split_at(trace.len() / 2);
    let mut tried: Vec<(f64, Tuning)> = Tuning::all()
        .map(|tuning| (gain(first, tuning), tuning))
        .collect();
    tried.sort_by(|a, b| b.0.total_cmp(&a.0));
    let mut later: Vec<(f64, Tuning)> = Tuning::all()
        .map(|tuning| (gain(second, tuning), tuning))
        .collect();
    later.sort_by(|a, b| b.0.total_cmp(&a.0));
    let rank = |sorted: &[(f64, Tuning)], tuning| {
        sorted
            .iter()
            .position(|(_, other)| *other == tuning)
            .map_or(0, |at| at + 1)
    };
    let worst = tried[tried.len() - 1].1;
    let rows = [
        ("as shipped", Tuning::SHIPPED),
        ("best in the first half", tried[0].1),
        ("best in the second half", later[0].1),
        ("worst in the first half", worst),
    ];
    if !as_json {
        println!(
            "\nConstants, without fragmentation: mean of the objects' and of the bytes' ratio to LRU at {} and {} %; \
             rank of {}.\n",
            TUNED_AT[0] as f64 / 10.0,
            TUNED_AT[1] as f64 / 10.0,
            tried.len()
        );
        println!(
            "| constants | uses, at most | a use, gaps | half the length, gaps | first half | rank | second half | rank |"
        );
        println!("| --- |{}", " ---: |".repeat(7));
    }
    for (name, tuning) in rows {
        let value = |sorted: &[(f64, Tuning)]| {
            let found = sorted.iter().find(|(_, other)| *other == tuning);
            found.map_or(f64::NAN, |(value, _)| *value)
        };
        let (use_gaps, half_gaps) = (
            tuning.use_eighths as f64 / 8.0,
            tuning.half_sixteenths as f64 / 16.0,
        );
        if as_json {
            let row = json!({
                "bench": "held-out", "constants": name, "uses_max": tuning.uses_max, "use_gaps": use_gaps,
                "half_length_gaps": half_gaps, "tried": tried.len(),
                "first_half": value(&tried), "first_half_rank": rank(&tried, tuning),
                "second_half": value(&later), "second_half_rank": rank(&later, tuning),
            });
            println!("{row}");
            continue;
        }
        println!(
            "| {name} | {} | {use_gaps} | {half_gaps} | {:.3} | {} | {:.3} | {} |",
            tuning.uses_max,
            value(&tried),
            rank(&tried, tuning),
            value(&later),
            rank(&later, tuning)
        );
    }
    confirm(trace, &rows, as_json);
}

/// What constants give in the pool, over vLLM's rule, on the whole trace.
fn confirm(trace: &[Request], rows: &[(&str, Tuning)], as_json: bool) {
    if !as_json {
        println!(
            "\nThe same in the pool, on the whole trace, over vLLM's rule, objects / bytes.\n"
        );
        print!("| constants |");
        for permille in POOLS {
            print!(" {} % |", permille as f64 / 10.0);
        }
        println!("\n| --- |{}", " ---: |".repeat(POOLS.len()));
    }
    let capacities = POOLS.map(|permille| (permille, capacity(trace, permille)));
    let vllm = capacities.map(|(_, capacity)| rates(trace, &mut Vllm::new(capacity)));
    for (name, tuning) in rows {
        let found = capacities.map(|(_, capacity)| {
            pooled(capacity, Tuned::new(*tuning)).map(|mut cache| rates(trace, &mut *cache))
        });
        if !as_json {
            print!("| {name} |");
        }
        for ((found, vllm), (permille, _)) in found.iter().zip(vllm).zip(capacities) {
            let ratios = found.map(|found| (found.0 / vllm.0, found.1 / vllm.1));
            if as_json {
                let row = json!({
                    "bench": "held-out", "constants": name, "pool_percent": permille as f64 / 10.0,
                    "objects_over_vllm": ratios.map(|ratios| ratios.0),
                    "bytes_over_vllm": ratios.map(|ratios| ratios.1),
                });
                println!("{row}");
            } else if let Some((objects, bytes)) = ratios {
                print!(" {objects:.3} / {bytes:.3} |");
            } else {
                print!(" the pool is too small |");
            }
        }
        if !as_json {
            println!();
        }
    }
}

/// Mean ratio to least recently used, of objects and of bytes, over the pools that constants are chosen at.
fn gain(requests: &[Request], tuning: Tuning) -> f64 {
    let ratios = TUNED_AT.map(|permille| {
        let capacity = capacity(requests, permille);
        let plain = Unfragmented::new(capacity, Lru::new());
        let (objects, bytes) = rates(requests, &mut { plain });
        let tuned = Unfragmented::new(capacity, Tuned::new(tuning));
        let found = rates(requests, &mut { tuned });
        (found.0 / objects + found.1 / bytes) / 2.0
    });
    ratios.iter().sum::<f64>() / ratios.len() as f64
}
