//! The harness notices when a line of the product's own code is left out.
//!
//! `cargo xtask model` builds this with `--cfg slab_twin` and runs it; without, there is nothing here.

#![cfg(slab_twin)]

mod fake;
mod pool_harness;

use std::panic::{AssertUnwindSafe, catch_unwind};

use pool_harness::{Harness, steps};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;
use slab_cuda::twin::{Twin, leave_out};

const LISTS: usize = 2000;
const LISTS_WHOLE: usize = 300;

/// Runs lists of steps until one fails. Returns how many it took, and what was said.
fn tries(count: usize) -> Option<(usize, String)> {
    let mut runner = TestRunner::deterministic();
    let lists = steps(false);
    (1..=count).find_map(|count| {
        let steps = lists.new_tree(&mut runner).expect("no filters").current();
        let run = || {
            let mut harness = Harness::new();
            for step in steps {
                harness.apply(step);
            }
            harness.finish();
        };
        let panic = catch_unwind(AssertUnwindSafe(run)).err()?;
        let said = match panic.downcast_ref::<&str>() {
            Some(said) => (*said).to_owned(),
            None => panic.downcast_ref::<String>().cloned().unwrap_or_default(),
        };
        Some((count, said.replace('\n', " ")))
    })
}

/// What the harness says first of each.
const TWINS: [(Twin, &str); 2] = [
    (Twin::RecordEvent, "the device has not done with"),
    (Twin::AwaitCopies, "the device has not done with"),
];

#[test]
fn every_twin_is_noticed_and_the_whole_is_not() {
    std::panic::set_hook(Box::new(|_| {}));
    let whole = tries(LISTS_WHOLE);
    let tried = TWINS.map(|(twin, expected)| {
        leave_out(Some(twin));
        let found = tries(LISTS);
        leave_out(None);
        (twin, expected, found)
    });
    let _ = std::panic::take_hook();
    assert_eq!(whole, None, "the whole fails");
    println!("whole, device pool: {LISTS_WHOLE} lists of steps hold");
    for (twin, expected, found) in tried {
        let (count, said) = found.unwrap_or_else(|| panic!("{twin:?} goes unnoticed"));
        println!("without {twin:?}, device pool: list {count}: {said}");
        assert!(said.contains(expected), "{twin:?}: {said}");
    }
}
