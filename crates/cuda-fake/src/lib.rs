//! A CUDA driver without a device: the `cu*` functions that slab-cuda uses, over host memory.
//!
//! Device memory is host memory under addresses that the host cannot follow. Work submitted to a stream is queued, and
//! runs only when a test says so (`fake_advance`), at once, or on a seeded schedule that every call moves on
//! ([`schedule`](control::fake_schedule)). What a real driver would leave undefined is noted as *misuse*: memory freed
//! while queued work touches it, an event recorded again before it is reached, a copy outside of an allocation or from
//! host memory that the driver does not know, a kernel over the host's address of registered memory, a handle used
//! after it was destroyed. Streams can be captured into graphs, which are thrown away; devices can be broken, after
//! which every call fails, as a real one does after a fault.
//!
//! The functions of the driver are in [`abi`], those by which a test is in control in [`control`]; both lock the one
//! world. A test takes the latter from the loaded library by their names.
//!
//! Environment, read when the library is first called: `CUDA_FAKE_INIT` (the code that `cuInit` answers, 0 by default),
//! `CUDA_FAKE_DRIVER_VERSION` (13000 by default; `cuMemcpyBatchAsync` is there from 12080, its second form from 13000),
//! `CUDA_FAKE_SCHEDULE` (`manual` by default, `immediate`, or a seed), and for processes that no test is in control of
//! `CUDA_FAKE_FAIL` (`symbol:nth:count:code`: that many calls of a function fail, from the nth on), `CUDA_FAKE_SAY`
//! (set to anything: misuse is written to standard error as it happens) and `CUDA_FAKE_LOSE_RECORDS` (set to anything:
//! recorded events are lost).

pub mod abi;
mod capture;
pub mod control;
mod stream;
mod world;

use std::path::PathBuf;

/// The file of the library, which cargo builds beside the tests of the crates that name it.
///
/// # Panics
/// If it is not there.
#[must_use]
pub fn library_path() -> PathBuf {
    let test = std::env::current_exe().expect("a test knows its file");
    let file = test.with_file_name("libcuda_fake.so");
    assert!(file.is_file(), "cargo has not built {}", file.display());
    file
}
