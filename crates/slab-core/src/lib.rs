//! Offset allocation with leases and event-gated reuse, as pure state machines.
//!
//! - [`FreeList`] carves regions of any size from one slab, by best or by first fit;
//! - [`Pool`] adds keyed residents with leases, eviction in the order of a policy ([`Evict`])
//!   or of address neighbours when a request needs room, fences that gate reuse, and claims on bytes that
//!   are on their way back;
//! - `SharedPool` (feature `std`) puts one lock around a pool and the caller's own state, and hands out
//!   guards that give their token back when dropped;
//! - [`runs`], [`Blocks`] and `CopyList` (feature `alloc`) list the raw copies between a tensor and blocks
//!   scattered over a region, as few as there can be.
//!
//! List and pool keep their map in a [`Store`]: on the heap (`Heap`, feature `alloc`), or inside the value
//! itself ([`Inline`]), with `const` constructors, for a `static` on a machine without a heap.
//!
//! # How calls are named
//! Methods of a pool that take a fact in are `handle_*` (a timeline has come this far, or has failed);
//! methods that hand a decision out are `poll_*` and `drain_*`; the rest act at once. After each
//! `handle_*`, poll the claims; after any call that may evict, drain the reclaimed keys when convenient.
//!
//! # Tokens
//! [`Allocation`], [`Lease`] and [`Claim`] are rights, not handles: `#[must_use]`, not `Clone`, consumed by the
//! call that ends them. A token carries the [`PoolId`] of its pool and is refused, and handed back in
//! [`Refused`], anywhere else. A dropped token leaks what it owns, which is safe; the guards of
//! `SharedPool` give it back instead.
//!
//! # Costs
//! Each call states its complexity; one that states none is O(1) and touches no memory but its arguments. Nothing
//! allocates but constructors, lists of copies, and the tables of a `Heap` store when they outgrow what their
//! configuration reserved.
//!
//! # What is not here
//! Addresses, clocks, threads, drivers, I/O, copying. The crate is `no_std` and forbids `unsafe`.
//!
//! # Features
//! None by default: [`Inline`] stores only. `alloc`: the store `Heap` and its constructors, `CopyList`. `std` (implies
//! `alloc`): `SharedPool`, `PoolId::new`, and the default hasher of `Pool`.

#![no_std]
#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(feature = "alloc")]
extern crate alloc;
#[cfg(feature = "std")]
extern crate std;

mod descriptor;
mod error;
mod evict;
mod fence;
mod free_list;
mod heap;
mod id;
mod placement;
mod pool;
mod region;
mod resident;
mod slots;
mod store;

#[cfg(feature = "std")]
mod shared;
#[cfg(feature = "std")]
mod sync;
#[cfg(not(any(slab_loom, slab_twin)))]
mod twin;
#[cfg(any(slab_loom, slab_twin))]
#[doc(hidden)]
pub mod twin;

pub use descriptor::{BlockRun, Blocks, CopySpan, DescriptorError, runs};
#[cfg(feature = "alloc")]
pub use descriptor::{CopyList, CopyListPool};
pub use error::{Error, Refused};
pub use evict::{Credit, CreditRank, Evict, Lru, LruRank};
pub use fence::{Fence, TimelineId};
pub use free_list::{FreeList, FreeListConfig, FreeRun};
pub use id::PoolId;
pub use placement::Placement;
pub use pool::{Claim, Pool, PoolConfig, PoolStats, Reserve, RunState, RunView, SizeClassStats};
pub use region::{Allocation, Region};
pub use resident::{Lease, Reclaimed, ReclaimedKeys};
#[cfg(feature = "alloc")]
pub use store::Heap;
pub use store::{Inline, Store};

#[cfg(feature = "std")]
pub use shared::{AllocationGuard, LeaseGuard, SharedPool};

/// The examples of the README, compiled.
#[cfg(all(doctest, feature = "alloc"))]
#[doc = include_str!("../README.md")]
struct Readme;
