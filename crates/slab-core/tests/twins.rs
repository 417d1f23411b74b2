//! Each harness notices when a line of the product's own code is left out.
//!
//! `cargo xtask model` builds this with `--cfg slab_twin` and runs it; without, there is nothing here. One test, so
//! that twins, which are chosen for the whole process, come one after the other.

#![cfg(slab_twin)]

#[allow(dead_code, reason = "the property tests use all of it")]
mod free_list_harness;
#[allow(dead_code, reason = "the property tests use all of it")]
mod pool_harness;

use std::cell::RefCell;
use std::panic::{self, AssertUnwindSafe, catch_unwind};

use free_list_harness::Checked;
use pool_harness::{ALIGNMENT, Harness};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;
use slab_core::Placement;
use slab_core::twin::{Twin, leave_out};
use slab_model::{free_ops, pool_ops};

/// Lists of calls that a twin may take to be noticed, and that the whole has to pass. The rarest is noticed within
/// some three hundred.
const LISTS: usize = 2000;
const LISTS_WHOLE: usize = 300;
const GRANULES: u64 = 48;
const FREE_LIST_CAPACITY: u64 = 300 * ALIGNMENT;

thread_local! {
    /// Where the last panic was, and what it said.
    static PANIC: RefCell<(String, String)> = const { RefCell::new((String::new(), String::new())) };
}

/// Runs lists of calls until one fails. Returns how many it took, in which file, and what was said.
fn tries<T>(
    count: usize,
    lists: impl Strategy<Value = T>,
    run: impl Fn(T),
) -> Option<(usize, String, String)> {
    let mut runner = TestRunner::deterministic();
    (1..=count).find_map(|count| {
        let list = lists.new_tree(&mut runner).expect("no filters").current();
        catch_unwind(AssertUnwindSafe(|| run(list))).err()?;
        let (file, said) = PANIC.with_borrow(Clone::clone);
        Some((count, file, said))
    })
}

fn try_free_list(count: usize, placement: Placement) -> Option<(usize, String, String)> {
    tries(count, free_ops(FREE_LIST_CAPACITY, 120), |ops| {
        let mut checked = Checked::new(placement, FREE_LIST_CAPACITY, ALIGNMENT);
        for op in &ops {
            checked.apply(op, |_, _, _, _| {});
        }
        checked.free_all();
    })
}

fn try_pool(count: usize) -> Option<(usize, String, String)> {
    tries(count, pool_ops(GRANULES * ALIGNMENT, 7, 150), |ops| {
        let mut harness = Harness::new(GRANULES, Placement::BestFit, |_| {});
        for op in &ops {
            harness.apply(op);
        }
        harness.give_everything_back();
    })
}

#[test]
fn every_twin_is_noticed_by_its_harness() {
    panic::set_hook(Box::new(|info| {
        let file = info.location().map_or("", |location| location.file());
        let payload = info.payload();
        let said = payload.downcast_ref::<&str>().copied();
        let said = said.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
        let said = said.unwrap_or("").replace('\n', " ");
        PANIC.set((file.to_owned(), said));
    }));
    let (best, first) = (Placement::BestFit, Placement::FirstFit);
    let mut unnoticed = Vec::new();
    for twin in [None].into_iter().chain(Twin::OF_STATE_MACHINES.map(Some)) {
        leave_out(twin);
        let count = twin.map_or(LISTS_WHOLE, |_| LISTS);
        let mut found = vec![("pool", try_pool(count))];
        if matches!(twin, None | Some(Twin::MergeAbove)) {
            found.push(("free list, best fit", try_free_list(count, best)));
            found.push(("free list, first fit", try_free_list(count, first)));
        }
        leave_out(None);
        for (harness, found) in found {
            match (twin, found) {
                (None, None) => println!("whole, {harness}: {LISTS_WHOLE} lists of calls hold"),
                (Some(twin), Some((count, file, said))) => {
                    println!("without {twin:?}, {harness}: list {count}, {file}: {said}");
                    // A twin that trips over itself has not been noticed by what the harness asserts.
                    if !file.contains("_harness") && !file.contains("slab-model") {
                        unnoticed.push(format!(
                            "{twin:?}, {harness}: failed elsewhere, in {file}: {said}"
                        ));
                    }
                }
                (None, Some((_, file, said))) => {
                    unnoticed.push(format!("the whole fails in {harness}: {file}: {said}"));
                }
                (Some(twin), None) => unnoticed.push(format!("{twin:?}, {harness}: unnoticed")),
            }
        }
    }
    let _ = panic::take_hook();
    assert!(unnoticed.is_empty(), "{}", unnoticed.join("\n"));
}
