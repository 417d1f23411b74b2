//! The declarations of Mooncake's `transfer_engine_c.h`, and a loader that finds them at run time.
//!
//! Written by hand for the header of Mooncake 0.3.13: nothing of Mooncake is needed to build, and
//! without its library on the machine a program gets a [`LoadError`] instead of failing to start.
//! Types and functions are as in C: no call here is checked, and every rule of the library is the
//! caller's to keep.
//!
//! Invariants: the layouts are asserted at compile time; a [`Library`] has every function of
//! [`Functions`] that is not an `Option`; a loaded library is never unloaded, so that its functions
//! can be kept for as long as the process runs.
//!
//! Not here: a safe engine (that is the feature `ffi` of `mooncake-transport`).
#![cfg_attr(docsrs, feature(doc_cfg))]
#![deny(unsafe_code)]
#![doc = ""]
#![doc = include_str!("../README.md")]

mod constants;
mod functions;
mod load;
mod types;

pub use constants::{
    ERR_ADDRESS_NOT_REGISTERED, ERR_ADDRESS_OVERLAPPED, ERR_BATCH_BUSY, ERR_CLOCK, ERR_CONTEXT,
    ERR_DEVICE_NOT_FOUND, ERR_DNS, ERR_ENDPOINT, ERR_INVALID_ARGUMENT, ERR_MALFORMED_JSON,
    ERR_MEMORY, ERR_METADATA, ERR_NOT_IMPLEMENTED, ERR_NUMA, ERR_REJECT_HANDSHAKE, ERR_SOCKET,
    ERR_TOO_MANY_REQUESTS, INVALID_BATCH, LOCAL_SEGMENT, OPCODE_READ, OPCODE_WRITE,
    STATE_CANCELLED, STATE_COMPLETED, STATE_FAILED, STATE_INVALID, STATE_PENDING, STATE_TIMEOUT,
    STATE_WAITING, STATUS_ADDRESS_NOT_REGISTERED, STATUS_BATCH_BUSY, STATUS_INVALID_ARGUMENT,
    STATUS_OK, STATUS_TOO_MANY_REQUESTS, STATUS_TRANSPORT_NOT_SUPPORTED,
};
pub use functions::{Functions, REQUIRED_SYMBOLS};
pub use load::{LIBRARY_VARIABLE, Library, LoadError, USUAL_NAMES};
pub use types::{
    BatchId, BufferEntry, Engine, NicLoadStat, NotifyMsg, SegmentId, TransferRequest,
    TransferStatus, Transport,
};
