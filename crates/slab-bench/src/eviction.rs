//! Caches that are put through a trace, and the policies that are compared in them.
//!
//! A [`Cache`] is replayed by [`replay`]: the pool under test ([`Ours`]), vLLM's rule ([`Vllm`]), and orders
//! in a cache without fragmentation ([`Unfragmented`] for a policy, [`Ranked`] for a rank). What each is and
//! how they compare stands in `docs/EVICTION.md`.

mod bound;
mod caches;
mod replay;
mod s3_fifo;
mod shelf;
mod sieve;
mod trace;
mod tuned;
mod unfragmented;
mod variants;
mod w_tiny_lfu;

pub use bound::bound;
pub use caches::{Known, Ours, Ranked, Vllm};
pub use replay::{Cache, Outcome, replay};
pub use s3_fifo::S3Fifo;
pub use sieve::Sieve;
pub use trace::{Arguments, GHOSTS, LEN_MEAN, Request, SAMPLE, footprint, load, references, size};
pub use tuned::{Tuned, Tuning};
pub use unfragmented::Unfragmented;
pub use variants::{Variant, variants};
pub use w_tiny_lfu::WTinyLfu;
