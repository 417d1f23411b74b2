//! The clock of the measurements.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Time that this thread has run. Unlike the time of day it stands still while another process has the
/// processor, which on a shared machine is the larger part of the noise.
#[must_use]
pub fn cpu_time() -> Duration {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}
