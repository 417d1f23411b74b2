//! Explores every interleaving of a few threads at one `SharedPool`, up to a bound of preemptions.
//!
//! The models are in `tests/shared.rs`; `cargo xtask model` builds them with `--cfg slab_loom` and runs them one by
//! one. Without that there is nothing here. A model is explored as it is and once more for each line of the lock that
//! it has to miss (a *broken twin*). A twin may hang or abort, so each gets a process of its own.

#![cfg(slab_loom)]
#![forbid(unsafe_code)]

use std::fmt::Debug;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Names the twin that a process is to explore.
const TWIN: &str = "SLAB_LOOM_TWIN";

/// A line of the product's that can be left out.
pub trait Twin: Copy + Debug {
    /// Leaves it out from now on.
    fn leave_out(self);
}

impl Twin for slab_core::twin::Twin {
    fn leave_out(self) {
        slab_core::twin::leave_out(Some(self));
    }
}

impl Twin for slab_cuda::twin::Twin {
    fn leave_out(self) {
        slab_cuda::twin::leave_out(Some(self));
    }
}

/// Explores `model`, which is about `what`; then has each of `twins` explored, and checks that none goes unnoticed.
///
/// Call it once from a test whose name the model's type carries: a closure written in the test does.
///
/// # Panics
/// If the model fails, or a twin does not.
pub fn explore<M>(what: &str, model: M, twins: &[impl Twin])
where
    M: Fn() + Copy + Send + Sync + 'static,
{
    if let Ok(name) = std::env::var(TWIN) {
        let twin = twins.iter().find(|twin| format!("{twin:?}") == name);
        twin.expect("a twin of this model").leave_out();
        run(model);
        return;
    }
    println!("\nexplores: {what}");
    println!("interleavings: {}", run(model));
    for twin in twins {
        println!("without {twin:?}: {}", noticed(test_of::<M>(), twin));
    }
}

/// Number of interleavings.
fn run<M: Fn() + Send + Sync + 'static>(model: M) -> u64 {
    let count = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&count);
    // The bound of preemptions comes from LOOM_MAX_PREEMPTIONS.
    loom::model::Builder::new().check(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        model();
    });
    count.load(Ordering::Relaxed)
}

/// The test that a closure was written in.
fn test_of<M>() -> &'static str {
    let name = std::any::type_name::<M>();
    name.split("::").nth(1).unwrap_or(name)
}

/// How the twin failed.
fn noticed(test: &str, twin: &dyn Debug) -> String {
    let program = std::env::current_exe().expect("the path of this program");
    let output = Command::new(program)
        .args(["--exact", test, "--nocapture"])
        .env(TWIN, format!("{twin:?}"))
        .env("RUST_BACKTRACE", "0")
        .output()
        .expect("this program starts again");
    let text = String::from_utf8_lossy(&output.stderr);
    let panic = text
        .lines()
        .skip_while(|line| !line.contains("panicked at"))
        .nth(1);
    match panic {
        Some(panic) if !output.status.success() => panic.to_owned(),
        _ => panic!("the twin without {twin:?} went unnoticed: {text}"),
    }
}
