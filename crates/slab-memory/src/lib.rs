//! Memory that a transfer engine may read and write on behalf of peers.
//!
//! [`Memory`] is the contract between whoever owns such memory and the engines that touch it:
//! length, kind, the address peers name on the wire, and a host pointer where there is one.
//! [`Bounce`] is how an engine moves bytes in and out of memory that the host cannot address.
//! `HostSlab` (feature `std`) is host memory: one anonymous mapping, faulted in at once.
//! [`ForeignMemory`] is host memory that somebody else owns.
//!
//! Invariants: the bytes of a `Memory` are never behind a Rust reference, so the kernel, a device
//! or another thread may change them at any time; and they stay mapped until the last `Arc` goes.
//!
//! Not here: which range is in use by whom (that is `slab-core`), sockets, drivers.
//!
//! # Features
//! - `std` (default): `HostSlab` and its errors. Without it the crate is `no_std` and needs only an
//!   allocator, for the boxed bounces.
#![cfg_attr(not(feature = "std"), no_std)]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![deny(unsafe_code)]
#![doc = ""]
#![cfg_attr(feature = "std", doc = include_str!("../README.md"))]

extern crate alloc;

mod bounce;
mod foreign;
#[cfg(feature = "std")]
mod host;
#[cfg(feature = "std")]
mod limit;
mod memory;
#[cfg(feature = "std")]
mod words;

pub use bounce::{BlockingBounce, Bounce, BounceDirection};
pub use foreign::ForeignMemory;
#[cfg(feature = "std")]
pub use host::{HostSlab, SlabError};
#[cfg(feature = "std")]
pub use limit::{MemoryLimit, available_memory};
pub use memory::{CopyError, Memory, MemoryKind, checked_len};
