//! Slabs in GPU memory, in pinned and in registered host memory, whose bytes are reused only once the device is done
//! with them.
//!
//! - [`Driver`] loads the CUDA driver at run time, and says what is missing where there is none; [`Device`] is one of
//!   its devices;
//! - [`DeviceSlab`], [`PinnedSlab`] and [`RegisteredHost`] are one allocation each, and `Memory` of slab-memory: an
//!   engine that knows nothing of CUDA sends from them and receives into them, device memory through pinned buffers
//!   and copies that run meanwhile;
//! - [`Timelines`] connects streams with a pool of slab-core: an address is lent for a [`Stream`], and the end of the
//!   [`Loan`] records an event that the bytes wait for;
//! - [`Copier`] runs copies between such memories, many with one call, and holds everything that they touch until they
//!   have ended.
//!
//! Invariants: no byte of a slab is handed out again before the events recorded on it are passed; memory is given back
//! to the driver only after that, or never; no loop of this crate waits for the device without a
//! limit (the driver's own calls may, such as those that free memory); nothing panics because a
//! library, a function or a device is missing.
//!
//! Not here: kernels, which region is whose (that is slab-core), sockets (mooncake-transport).
#![cfg_attr(docsrs, feature(doc_cfg))]
#![deny(unsafe_code)]
#![deny(unsafe_op_in_unsafe_fn)]
#![doc = ""]
#![doc = include_str!("../README.md")]

mod api;
mod caught;
mod copy;
mod device;
mod error;
#[cfg_attr(
    not(slab_loom),
    allow(unreachable_pub, reason = "public only to the models")
)]
mod keeper;
mod slab;
mod stage;
mod stream;
mod sync;
mod timeline;
#[cfg_attr(
    not(slab_loom),
    allow(unreachable_pub, reason = "public only to the models")
)]
mod track;
#[cfg(not(any(slab_loom, slab_twin)))]
mod twin;
#[cfg(any(slab_loom, slab_twin))]
#[doc(hidden)]
pub mod twin;

pub use copy::{Copier, CopyBatch, Copying};
pub use device::{Device, DeviceInfo, Driver, Lost, MemoryUse};
pub use error::{CudaError, DriverCode, Refused, Unavailable};
pub use slab::{CudaMemory, DeviceSlab, PinnedSlab, RegisteredHost};
pub use stream::Stream;
pub use timeline::{Lendable, Loan, Settling, Timeline, Timelines, TimelinesConfig};

/// The machine behind [`Timelines`], for the models of its locks.
#[cfg(slab_loom)]
#[doc(hidden)]
pub mod model {
    pub use crate::keeper::{Bounds, GiveBack, Keeper, Ledger, News};
    pub use crate::track::Mark;
}
