//! An engine with nothing to do does nothing. One test in a process of its own, for it measures
//! the processor time of the engines' threads.
#![cfg(feature = "tcp")]

mod support;

use std::io::Write;
use std::time::Duration;

use mooncake_transport::{Engine, Op, Remote};
use support::{dial, engine, register, run_one, slab, task};

/// Processor time of all threads of this process, in clock ticks of 10 ms.
fn ticks() -> u64 {
    std::fs::read_dir("/proc/self/task")
        .unwrap()
        .filter_map(|entry| std::fs::read_to_string(entry.ok()?.path().join("stat")).ok())
        .map(|stat| {
            // The name may contain anything, so fields are counted from its closing parenthesis.
            let fields: Vec<&str> = stat[stat.rfind(')').unwrap() + 2..].split(' ').collect();
            fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
        })
        .sum()
}

#[test]
fn idle_connections_of_every_kind_cost_no_processor_time() {
    let (source, target) = (engine(), engine());
    let (remote, local) = (slab(1 << 20), slab(1 << 20));
    let _registration = register(&target, &remote);
    let segment = source.open_segment(target.session()).unwrap();
    // Lanes that have served, timers that were armed, a rejection that was drained.
    for address in [remote.address(), 8, remote.address()] {
        let write = task(Op::Write, &segment, address, &local, 0..100_000);
        let outcome = run_one(&source, write);
        assert_eq!(outcome == Remote::Applied, address != 8);
    }
    let mut held = Vec::new();
    for index in 0..200 {
        let mut stream = dial(target.data_address());
        if index % 2 == 0 {
            // Half a header: a deadline is running.
            stream.write_all(&[0; 12]).unwrap();
        }
        held.push(stream);
    }
    std::thread::sleep(Duration::from_millis(500));
    let before = ticks();
    std::thread::sleep(Duration::from_secs(2));
    let spent = ticks() - before;
    assert!(spent <= 2, "{spent} ticks of 10 ms in 2 s");
    drop(held);
}
