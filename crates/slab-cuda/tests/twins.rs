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
        let said = panic.downcast_ref::<String>().cloned();
        Some((count, said.unwrap_or_default().replace('\n', " ")))
    })
}

#[test]
fn the_twin_that_records_no_event_is_noticed() {
    std::panic::set_hook(Box::new(|_| {}));
    let whole = tries(LISTS_WHOLE);
    leave_out(Some(Twin::RecordEvent));
    let twin = tries(LISTS);
    leave_out(None);
    let _ = std::panic::take_hook();
    assert_eq!(whole, None, "the whole fails");
    println!("whole, device pool: {LISTS_WHOLE} lists of steps hold");
    let (count, said) = twin.expect("the twin goes unnoticed");
    println!("without RecordEvent, device pool: list {count}: {said}");
    assert!(said.contains("the device has not done with"), "{said}");
}
