//! `slab-core` beside other offset allocators, and its eviction beside other policies ([`eviction`]): the
//! contenders and what they are put through.
//!
//! Sizes and offsets are bytes; every contender works in granules of 256 bytes, so all return aligned
//! offsets. The programs are under `src/bin`; run them with `cargo xtask bench alloc` and
//! `cargo xtask bench instructions`.

mod clock;
mod contender;
pub mod eviction;
mod peers;
mod random;
mod sustained;
mod workload;

pub use clock::cpu_time;
pub use contender::{BestFit, Contender, FirstFit, GRANULE, Nothing};
pub use peers::{OffsetAllocator, RangeAlloc, Rlsf};
pub use random::{Random, Sizes};
pub use sustained::sustained;
pub use workload::{Churn, Steady, Tail, Workload};
