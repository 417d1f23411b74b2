//! Offset allocators side by side: time of a pair of calls, and how full a slab stays.
//!
//! Run it with `cargo xtask bench alloc`. The contenders of a row keep their slabs and take turns, so
//! that all see the same machine, and a row is the median of its rounds; the ratio is the median of the
//! ratios within a round. Times are of the processor, not of the day, and include drawing sizes and
//! choosing regions, which the contender without an allocator shows alone.

use std::time::Duration;

use serde_json::json;
use slab_bench::{
    BestFit, Churn, FirstFit, Nothing, OffsetAllocator, RangeAlloc, Rlsf, Sizes, Steady, Tail,
    Workload, sustained,
};

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;
const ROUNDS: usize = 41;
/// A turn lasts about this long.
const TURN: Duration = Duration::from_millis(8);
/// Pairs of a turn that are not timed: the others have emptied the caches.
const WARM_UP_SHARE: u64 = 4;

const CONTENDERS: [&str; 6] = [
    "slab-core best fit",
    "slab-core first fit",
    "offset-allocator",
    "range-alloc",
    "rlsf",
    "(no allocator)",
];
const OURS: usize = 0;
const PEER: usize = 2;

struct Timed {
    what: &'static str,
    goal: Option<f64>,
    /// Of best fit to the peer.
    ratio: f64,
    ns: Vec<f64>,
}

struct Packed {
    what: &'static str,
    goal: f64,
    per_cent: Vec<f64>,
}

fn main() {
    let mut json = false;
    for argument in std::env::args().skip(1) {
        if argument != "--json" {
            eprintln!("unknown argument {argument}; run it with --json or nothing");
            std::process::exit(2);
        }
        json = true;
    }
    let timed = timed();
    print_timed(&timed, json);
    let packed = packed();
    print_packed(&packed, json);
}

fn timed() -> Vec<Timed> {
    macro_rules! all {
        ($workload:ident ( $($argument:expr),* )) => {
            vec![
                Box::new($workload::<BestFit>::new($($argument),*)) as Box<dyn Workload>,
                Box::new($workload::<FirstFit>::new($($argument),*)),
                Box::new($workload::<OffsetAllocator>::new($($argument),*)),
                Box::new($workload::<RangeAlloc>::new($($argument),*)),
                Box::new($workload::<Rlsf>::new($($argument),*)),
                Box::new($workload::<Nothing>::new($($argument),*)),
            ]
        };
    }
    vec![
        row(
            "encoder sizes, 8 GiB, 85 % full",
            Some(0.85),
            all!(Steady(8 * GIB, Sizes::Encoder)),
        ),
        row(
            "small images prevailing, 8 GiB, 85 % full",
            None,
            all!(Steady(8 * GIB, Sizes::EncoderLog)),
        ),
        row(
            "1 byte to 4 KiB, 128 MiB, 52,000 live",
            Some(0.9),
            all!(Steady(128 * MIB, Sizes::Small)),
        ),
        row(
            "4 KiB each, 128 MiB, 28,000 live",
            None,
            all!(Steady(128 * MIB, Sizes::Equal)),
        ),
        row("1 MiB behind 10 holes", None, all!(Tail(10))),
        row("1 MiB behind 1,000 holes", None, all!(Tail(1000))),
        row("1 MiB behind 100,000 holes", Some(1.0), all!(Tail(100_000))),
        row("4 KiB between 100,000 holes", None, all!(Churn(100_000))),
    ]
}

fn row(what: &'static str, goal: Option<f64>, mut contenders: Vec<Box<dyn Workload>>) -> Timed {
    let pairs: Vec<u64> = contenders
        .iter_mut()
        .map(|contender| pairs_in_a_turn(contender.as_mut()))
        .collect();
    let mut rounds: Vec<Vec<f64>> = Vec::new();
    for round in 0..ROUNDS {
        let mut times = vec![0.0; contenders.len()];
        for turn in 0..contenders.len() {
            // Nobody always follows the same neighbour's cache contents from the same place.
            let index = (turn + round) % contenders.len();
            contenders[index].run(pairs[index] / WARM_UP_SHARE);
            let time = contenders[index].run(pairs[index]);
            times[index] = time.as_nanos() as f64 / pairs[index] as f64;
        }
        rounds.push(times);
    }
    let ns = (0..contenders.len())
        .map(|index| median(rounds.iter().map(|times| times[index]).collect()))
        .collect();
    let ratio = median(
        rounds
            .iter()
            .map(|times| times[OURS] / times[PEER])
            .collect(),
    );
    Timed {
        what,
        goal,
        ratio,
        ns,
    }
}

fn pairs_in_a_turn(contender: &mut dyn Workload) -> u64 {
    const TRIED: u64 = 64;
    contender.run(TRIED);
    let time = contender.run(TRIED).max(Duration::from_nanos(1));
    let pairs = TURN.as_nanos() as u64 * TRIED / time.as_nanos() as u64;
    pairs.clamp(TRIED, 100_000)
}

fn packed() -> Vec<Packed> {
    let row = |what, goal, capacity, sizes| Packed {
        what,
        goal,
        per_cent: vec![
            sustained::<BestFit>(capacity, sizes),
            sustained::<FirstFit>(capacity, sizes),
            sustained::<OffsetAllocator>(capacity, sizes),
            sustained::<RangeAlloc>(capacity, sizes),
            sustained::<Rlsf>(capacity, sizes),
        ],
    };
    vec![
        row("encoder sizes, 8 GiB", 89.7, 8 * GIB, Sizes::Encoder),
        row(
            "small images prevailing, 8 GiB",
            88.0,
            8 * GIB,
            Sizes::EncoderLog,
        ),
        row("1 byte to 4 KiB, 16 MiB", 98.1, 16 * MIB, Sizes::Small),
    ]
}

fn print_timed(rows: &[Timed], json: bool) {
    if json {
        for Timed {
            what,
            goal,
            ratio,
            ns,
        } in rows
        {
            let ns: serde_json::Map<_, _> = CONTENDERS
                .iter()
                .zip(ns)
                .map(|(name, ns)| ((*name).to_owned(), json!(ns)))
                .collect();
            let row = json!({"what": what, "ratio": ratio, "ratio_max": goal, "ns": ns});
            println!("{row}");
        }
        return;
    }
    println!("A pair of calls: best fit / offset-allocator first, then ns of each.\n");
    print!("| what | ratio | goal |");
    for name in CONTENDERS {
        print!(" {name} |");
    }
    println!("\n| --- |{}", " ---: |".repeat(CONTENDERS.len() + 2));
    for Timed {
        what,
        goal,
        ratio,
        ns,
    } in rows
    {
        let goal = goal.map_or(String::new(), |goal| format!("≤ {goal:.2}"));
        print!("| {what} | {ratio:.2} | {goal} |");
        for ns in ns {
            print!(" {ns:.1} |");
        }
        println!();
    }
}

fn print_packed(rows: &[Packed], json: bool) {
    if json {
        for Packed {
            what,
            goal,
            per_cent,
        } in rows
        {
            let shares: serde_json::Map<_, _> = CONTENDERS
                .iter()
                .zip(per_cent)
                .map(|(name, share)| ((*name).to_owned(), json!(share)))
                .collect();
            let row = json!({"what": what, "per_cent_min": goal, "per_cent": shares});
            println!("{row}");
        }
        return;
    }
    println!("\nPer cent of the slab in use when each failure evicts at random.\n");
    print!("| what | goal |");
    for name in &CONTENDERS[..5] {
        print!(" {name} |");
    }
    println!("\n| --- |{}", " ---: |".repeat(6));
    for Packed {
        what,
        goal,
        per_cent,
    } in rows
    {
        print!("| {what} | ≥ {goal:.1} |");
        for share in per_cent {
            print!(" {share:.2} |");
        }
        println!();
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
