//! `libtransfer_engine.so`: Mooncake's C interface, served by the native TCP engine.
//!
//! A C program written for Mooncake over TCP with the P2P handshake links or loads this library
//! instead, with nothing of Mooncake on the machine; and it is what the engine over the C interface is
//! tested against. The header is `include/transfer_engine_c.h`.
//!
//! Invariants: a handle, a batch id or a list that this library did not give, or that has been given
//! back, is answered with an error, never followed: handles are numbers that are looked up. Null
//! texts and pointers, texts that are not UTF-8 and unknown opcodes are errors. No panic leaves a call.
//! Memory is the caller's: it stays mapped until its task was seen in a final state, or it was
//! unregistered, or the engine was destroyed.
//!
//! # Where it differs from Mooncake's library
//! - Metadata is `P2PHANDSHAKE`; with any other, `createTransferEngine` returns null.
//! - It listens on the address that `local_server_name` is, or on loopback for `localhost`, or on every
//!   address for another host name; on any free ports.
//! - `remote_accessible` 0 keeps peers out. Memory at null, and ranges that wrap, are refused (-1).
//! - `unregisterLocalMemory` returns when no request of a peer touches the memory any more.
//!   `unregisterLocalMemoryBatch` with an unknown address changes nothing.
//! - `submitTransfer` into a batch that another engine allocated is an invalid argument (1), and a batch is gone
//!   when its engine is destroyed.
//! - An opcode that is neither read nor write is an invalid argument (1), not a read.
//! - `openSegmentNoCache` and `syncSegmentCache` fetch nothing: a peer that has moved is found again when
//!   a transfer to it fails.
//! - `removeLocalSegment` refuses the engine's own name (-1).
//! - The message of `submitTransferWithNotify` is dropped if a task of its batch fails.
//! - Why a call failed is said in a line on standard error where the code alone would not tell.
#![deny(unsafe_code)]

mod abi;
mod batches;
mod engine;
mod engines;
mod listen;
mod notices;
mod text;

pub use abi::{
    allocateBatchID, closeSegment, createTransferEngine, destroyTransferEngine, discoverTopology,
    enableGracefulShutdown, freeBatchID, freeNotifsMsgBuf, genNotifyInEngine, getLocalIpAndPort,
    getNicLoadStats, getNotifsFromEngine, getTransferStatus, installTransport, openSegment,
    openSegmentNoCache, registerLocalMemory, registerLocalMemoryBatch, removeLocalSegment,
    showLinks, submitTransfer, submitTransferWithNotify, syncSegmentCache, uninstallTransport,
    unregisterLocalMemory, unregisterLocalMemoryBatch, warmupEfaSegment,
};
