//! Any order of reserves, loans, copies, progress of the streams and errors of the driver: no byte is handed out while
//! the device has still to touch it.

mod fake;
mod pool_harness;

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use pool_harness::{Harness, Step, steps};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, TestRunner};

const CASES: u32 = 1500;

fn run(steps: Vec<Step>, prepare: impl FnOnce(&Harness)) -> u64 {
    let mut harness = Harness::new();
    prepare(&harness);
    for step in steps {
        harness.apply(step);
    }
    harness.finish()
}

/// Returns how many errors were met.
fn check(with_errors: bool) -> u64 {
    let errors = Cell::new(0);
    let mut runner = TestRunner::new(Config {
        cases: CASES,
        failure_persistence: None,
        ..Config::default()
    });
    let result = runner.run(&steps(with_errors), |steps| {
        errors.set(errors.get() + run(steps, |_| {}));
        Ok(())
    });
    result.unwrap_or_else(|error| panic!("{error}"));
    println!("{CASES} lists of steps, {} errors met", errors.get());
    errors.get()
}

#[test]
fn property_no_byte_is_handed_out_while_the_device_has_to_touch_it() {
    check(false);
}

#[test]
fn property_errors_of_the_driver_let_no_byte_be_reused_early() {
    assert!(check(true) > u64::from(CASES), "most lists make some");
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
    println!("noticed by list {count}: {said}");
    assert!(said.contains("the device has not done with"), "{said}");
}
