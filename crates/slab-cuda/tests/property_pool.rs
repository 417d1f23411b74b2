//! Any order of reserves, loans, copies, progress of the streams and errors of the driver: no byte is handed out while
//! the device has still to touch it.

mod fake;
mod pool_harness;

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use pool_harness::{Harness, Met, Step, steps};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, TestRunner};

const CASES: u32 = 1500;

fn run(steps: Vec<Step>, prepare: impl FnOnce(&Harness)) -> Met {
    let mut harness = Harness::new();
    prepare(&harness);
    for step in steps {
        harness.apply(step);
    }
    harness.finish()
}

fn check(with_errors: bool) -> Met {
    let (sum, count) = (Cell::new(Met::default()), Cell::new(0));
    let mut runner = TestRunner::new(Config {
        cases: CASES,
        failure_persistence: None,
        ..Config::default()
    });
    let result = runner.run(&steps(with_errors), |steps| {
        count.set(count.get() + steps.len());
        sum.set(sum.get() + run(steps, |_| {}));
        Ok(())
    });
    result.unwrap_or_else(|error| panic!("{error}"));
    let met = sum.get();
    println!(
        "counted: {CASES} lists with {} steps, {} injected errors, {} errors told; {} lists of copies and {} bounces \
         compared",
        count.get(),
        met.injected,
        met.errors,
        met.copied,
        met.bounced
    );
    // Most lists make some.
    let least = u64::from(CASES) / 4;
    assert!(met.copied > least && met.bounced > least, "{met:?}");
    sum.get()
}

#[test]
fn property_no_byte_is_handed_out_while_the_device_has_to_touch_it() {
    assert_eq!(check(false).injected, 0);
}

#[test]
fn property_errors_of_the_driver_let_no_byte_be_reused_early() {
    let met = check(true);
    assert!(met.injected > u64::from(CASES), "most lists make some");
}

#[test]
fn property_a_driver_that_loses_records_is_noticed() {
    let mut runner = TestRunner::deterministic();
    let lists = steps(false);
    let found = (1..=200).find_map(|count| {
        let steps = lists.new_tree(&mut runner).expect("no filters").current();
        let lost = |harness: &Harness| harness.fake.lose_records(true);
        let panic = catch_unwind(AssertUnwindSafe(|| run(steps, lost))).err()?;
        let said = panic.downcast_ref::<String>().cloned().unwrap_or_default();
        Some((count, said))
    });
    let (count, said) = found.expect("the harness does not look at what it should");
    println!("counted: noticed by list {count}: {said}");
    assert!(said.contains("the device has not done with"), "{said}");
}
