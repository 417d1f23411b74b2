//! Destructors of the program's own, which may panic: what stands behind them has to be seen to all the same.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs what may run a destructor of the program's. A panic is logged, and goes no further. `None` after one.
pub(crate) fn caught<T>(run: impl FnOnce() -> T) -> Option<T> {
    let answer = catch_unwind(AssertUnwindSafe(run));
    answer
        .inspect_err(|_| tracing::error!("a destructor of something that was held has panicked"))
        .ok()
}

/// Drops each of the values, whichever of them panics.
pub(crate) fn let_go<T>(values: Vec<T>) {
    for value in values {
        caught(|| drop(value));
    }
}
