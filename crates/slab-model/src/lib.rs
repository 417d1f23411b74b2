//! Operation lists and naive oracles: what the allocator and the pool have to agree with.
//!
//! Everything here is written for being obviously right, not fast: sorted vectors, linear scans, no shared
//! code with the crates under test. Lengths and positions are in granules unless a name says bytes; tokens
//! and keys are plain numbers. An oracle panics when the answer it is told breaks a rule.
#![forbid(unsafe_code)]

mod credit;
mod first_fit;
mod free_ops;
mod holes;
mod pool;
mod pool_ops;
mod shadow;

pub use credit::NaiveCredit;
pub use first_fit::NaiveFirstFit;
pub use free_ops::{FreeOp, free_ops};
pub use holes::NaiveHoles;
pub use pool::{Answer, NaivePool, Polled, Published, Run, RunKind};
pub use pool_ops::{FencePick, PoolOp, pool_ops};
pub use shadow::ShadowMemory;
