//! A transfer engine that speaks Mooncake's TCP wire protocol, in Rust alone.
//!
//! [`Engine`] is what every engine offers; `tcp::TcpEngine` (feature `tcp`, on by default) is the
//! native one, both initiator and target. [`wire`] holds the codecs, pure and public.
//!
//! Invariants: a task's hold is dropped only when nothing touches its local range; every task
//! settles; registered memory outlives every request that touches it; nothing from the outside
//! panics, and every queue, wait and thread count is bounded.
//!
//! Not here: which bytes to send to whom (that is `ec-connector`), allocation (`slab-core`).
//!
//! # Features
//! - `tcp` (default): the native engine over TCP. Linux.
//! - `pipe`: the point-to-point tensor pipe over ZeroMQ and an engine. Builds libzmq, with a C++ compiler.
//! - `http`: `metadata::HttpStore`, Mooncake's HTTP metadata service. Nothing foreign is built.
//! - `etcd`: `metadata::EtcdStore`, names in an etcd cluster.
//! - `redis`: `metadata::RedisStore`, names in a Redis server.
//! - `ffi`: `ffi::FfiEngine`, the real engine through its C interface, loaded at run time: RDMA, GPU memory.
#![cfg_attr(docsrs, feature(doc_cfg))]
#![deny(unsafe_code)]
// Each public type says whether it may grow.
#![warn(clippy::exhaustive_enums, clippy::exhaustive_structs)]
#![doc = ""]
#![cfg_attr(feature = "tcp", doc = include_str!("../README.md"))]

mod batch;
mod engine;
mod error;
#[cfg(feature = "ffi")]
pub mod ffi;
#[cfg(feature = "tcp")]
pub mod metadata;
#[cfg(feature = "pipe")]
pub mod pipe;
mod registration;
mod segment;
#[cfg(feature = "tcp")]
pub mod tcp;
pub mod wire;

pub use batch::{Batch, BatchReport, Local, Reason, Remote, Settled, Task, Ticket};
pub use engine::{Engine, Notices};
pub use error::{ControlError, EngineError, IoFailure, Listener, Refused};
pub use registration::{Access, Registration};
pub use segment::{EngineId, Segment};
pub use wire::data::Op;
