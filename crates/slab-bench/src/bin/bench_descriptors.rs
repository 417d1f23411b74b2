//! Copies between a tensor and scattered blocks: runs coalesced by `slab-core` beside one copy a block.
//!
//! Run it with `cargo xtask bench descriptors [--json]`. Both fill the same three arrays (sources,
//! destinations, lengths); then the copies are carried out with `memcpy` between two host buffers. The two take
//! turns; each figure is the median over the rounds, of processor time.

use std::hint::black_box;
use std::num::NonZeroU64;
use std::time::Duration;

use serde_json::json;
use slab_bench::{Random, cpu_time};
use slab_core::{Blocks, CopyList};

const ROUNDS: usize = 21;
/// Time of a turn, about.
const TURN: Duration = Duration::from_millis(8);
/// The region holds this many times the blocks of the tensor.
const SPARE: u64 = 4;

/// How the blocks of a tensor lie: where one does not follow the one before it, of this many steps.
#[derive(Clone, Copy)]
enum Table {
    Contiguous,
    BreakIn(u64),
    Random,
}

const TABLES: [(&str, Table); 4] = [
    ("contiguous", Table::Contiguous),
    ("a break in 16 blocks", Table::BreakIn(16)),
    ("half fragmented", Table::BreakIn(2)),
    ("random", Table::Random),
];

/// Blocks are tokens: the output of a small and of a large image, in the hidden sizes of two models.
const TENSORS: [(u64, u64); 2] = [(576, 2_304), (4_096, 8_192)];

fn main() -> Result<(), String> {
    let as_json = match std::env::args().nth(1).as_deref() {
        None => false,
        Some("--json") => true,
        Some(other) => return Err(format!("unknown argument {other}; give --json or nothing")),
    };
    if !as_json {
        println!(
            "Loop over ours (copies, building, building and copying), and what a copy has to cost for runs to pay.\n\n\
             | tensor | blocks lie | fewer copies | build | all | pays from, ns a copy | copies | build, µs | \
             loop's, µs | copy, µs | loop's, µs |\n| --- | --- |{}",
            " ---: |".repeat(9)
        );
    }
    for (blocks, block_bytes) in TENSORS {
        for (what, table) in TABLES {
            let row = row(blocks, block_bytes, table);
            print(&format!("{blocks} × {block_bytes} B"), what, &row, as_json);
        }
    }
    Ok(())
}

/// Of ours, and of the loop.
struct Row {
    copies: [usize; 2],
    build_ns: [f64; 2],
    copy_ns: [f64; 2],
}

fn print(tensor: &str, what: &str, row: &Row, as_json: bool) {
    let Row {
        copies,
        build_ns: build,
        copy_ns: copy,
    } = row;
    let fewer = copies[1] as f64 / copies[0] as f64;
    let build_ratio = build[1] / build[0];
    // What building runs costs more, shared out among the copies that they save.
    let pays_from = (build[0] - build[1]) / (copies[1] - copies[0]) as f64;
    let pays_from = (copies[1] > copies[0]).then_some(pays_from.max(0.0));
    let all_ratio = (build[1] + copy[1]) / (build[0] + copy[0]);
    if as_json {
        let row = json!({
            "bench": "descriptors", "tensor": tensor, "blocks_lie": what,
            "loop_over_ours_copies": fewer, "loop_over_ours_build": build_ratio, "loop_over_ours": all_ratio,
            "pays_from_ns": pays_from, "copies": copies[0], "loop_copies": copies[1], "build_ns": build[0], "loop_build_ns": build[1],
            "copy_ns": copy[0], "loop_copy_ns": copy[1],
        });
        println!("{row}");
        return;
    }
    let pays_from = pays_from.map_or("-".to_owned(), |ns| format!("{ns:.1}"));
    println!(
        "| {tensor} | {what} | {fewer:.1} | {build_ratio:.2} | {all_ratio:.2} | {pays_from} | {} | {:.2} | {:.2} | {:.0} | {:.0} |",
        copies[0],
        build[0] / 1e3,
        build[1] / 1e3,
        copy[0] / 1e3,
        copy[1] / 1e3
    );
}

fn row(blocks: u64, block_bytes: u64, table: Table) -> Row {
    let ids = ids(blocks, table);
    // The last block is not full, as with most tensors.
    let bytes = blocks * block_bytes - block_bytes / 2;
    let size = NonZeroU64::new(block_bytes).expect("not zero");
    let region = Blocks::new(0, size, blocks * SPARE).expect("far below the end of the numbers");
    let tensor: Vec<u8> = (0..bytes).map(|at| at as u8).collect();
    let mut slab = vec![0; (blocks * block_bytes * SPARE) as usize];
    let mut list = CopyList::new(blocks as usize);
    let mut looped = Arrays::new(blocks as usize);

    let mut copies = [0; 2];
    let mut times: [Vec<f64>; 4] = Default::default();
    for round in 0..ROUNDS {
        // Nobody always comes after the same other one; in the first round copies are listed first.
        for turn in (0..4).map(|turn| (turn + round) % 4) {
            let time = match turn {
                0 => time(|| {
                    let saved = region.save(black_box(&ids), 0, bytes);
                    copies[0] = saved
                        .and_then(|saved| list.store(0, saved))
                        .expect("valid ids, and as many places as blocks");
                }),
                1 => time(|| copies[1] = looped.fill(black_box(&ids), block_bytes, bytes)),
                2 => time(|| {
                    let arrays = (list.sources(), list.destinations(), list.lengths());
                    carry_out(arrays, copies[0], &tensor, &mut slab);
                }),
                _ => time(|| {
                    let arrays = (&*looped.sources, &*looped.destinations, &*looped.lengths);
                    carry_out(arrays, copies[1], &tensor, &mut slab);
                }),
            };
            times[turn].push(time);
        }
    }
    let [build, loop_build, copy, loop_copy] = times.map(median);
    Row {
        copies,
        build_ns: [build, loop_build],
        copy_ns: [copy, loop_copy],
    }
}

/// Ids of the blocks of a tensor, none twice.
fn ids(blocks: u64, table: Table) -> Vec<u64> {
    let mut random = Random::new(11);
    let mut ids: Vec<u64> = (0..blocks * SPARE).collect();
    match table {
        Table::Contiguous => {}
        Table::BreakIn(steps) => {
            let mut pieces: Vec<Vec<u64>> = Vec::new();
            for id in ids.drain(..) {
                match pieces.last_mut() {
                    Some(piece) if random.below(steps) > 0 => piece.push(id),
                    _ => pieces.push(vec![id]),
                }
            }
            shuffle(&mut pieces, &mut random);
            ids = pieces.concat();
        }
        Table::Random => shuffle(&mut ids, &mut random),
    }
    ids.truncate(blocks as usize);
    ids
}

fn shuffle<T>(values: &mut [T], random: &mut Random) {
    for at in (1..values.len()).rev() {
        values.swap(at, random.below(at as u64 + 1) as usize);
    }
}

/// What the loop fills: one copy a block.
struct Arrays {
    sources: Vec<u64>,
    destinations: Vec<u64>,
    lengths: Vec<u64>,
}

impl Arrays {
    fn new(places: usize) -> Self {
        Self {
            sources: vec![0; places],
            destinations: vec![0; places],
            lengths: vec![0; places],
        }
    }

    /// Without any check of the ids, which `slab-core` does.
    fn fill(&mut self, ids: &[u64], block_bytes: u64, bytes: u64) -> usize {
        let places = self.sources.iter_mut().zip(&mut self.destinations);
        let places = places.zip(&mut self.lengths).zip(ids);
        let mut done = 0;
        for (((source, destination), length), id) in places {
            *source = done;
            *destination = id * block_bytes;
            *length = block_bytes.min(bytes - done);
            done += *length;
        }
        ids.len()
    }
}

fn carry_out(
    (sources, destinations, lengths): (&[u64], &[u64], &[u64]),
    copies: usize,
    tensor: &[u8],
    slab: &mut [u8],
) {
    for copy in 0..copies {
        let len = lengths[copy] as usize;
        let (from, to) = (sources[copy] as usize, destinations[copy] as usize);
        slab[to..to + len].copy_from_slice(&tensor[from..from + len]);
    }
    black_box(slab);
}

/// Nanoseconds of a call, over as many as make a turn.
fn time(mut call: impl FnMut()) -> f64 {
    let begin = cpu_time();
    let mut calls = 0;
    loop {
        call();
        calls += 1;
        // A look at the clock costs more than a short call.
        if calls % 16 == 0 || calls < 4 {
            let time = cpu_time() - begin;
            if time >= TURN {
                return time.as_nanos() as f64 / f64::from(calls);
            }
        }
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
