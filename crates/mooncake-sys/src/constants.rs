//! The numbers of the header.

use core::ffi::c_int;

use crate::types::{BatchId, SegmentId};

/// The segment id of the engine's own memory.
pub const LOCAL_SEGMENT: SegmentId = 0;
/// The batch id that stands for none.
pub const INVALID_BATCH: BatchId = u64::MAX;

/// Moves bytes from the target to the source. The library takes every opcode but
/// [`OPCODE_WRITE`] for this one.
pub const OPCODE_READ: c_int = 0;
/// Moves bytes from the source to the target.
pub const OPCODE_WRITE: c_int = 1;

/// State of a task: submitted (`STATUS_WAITING`).
pub const STATE_WAITING: c_int = 0;
/// State of a task: under way (`STATUS_PENDING`).
pub const STATE_PENDING: c_int = 1;
/// State of a task: it was no valid request (`STATUS_INVALID`).
pub const STATE_INVALID: c_int = 2;
/// State of a task: cancelled (`STATUS_CANCELED`).
pub const STATE_CANCELLED: c_int = 3;
/// State of a task: done (`STATUS_COMPLETED`).
pub const STATE_COMPLETED: c_int = 4;
/// State of a task: late (`STATUS_TIMEOUT`). It may still be under way.
pub const STATE_TIMEOUT: c_int = 5;
/// State of a task: failed (`STATUS_FAILED`).
pub const STATE_FAILED: c_int = 6;

/// Success of any call that returns an `int`.
pub const STATUS_OK: c_int = 0;
/// `submitTransfer*`, `getTransferStatus`: a wrong argument. These calls and `freeBatchID` answer
/// positive codes.
pub const STATUS_INVALID_ARGUMENT: c_int = 1;
/// `submitTransfer*`: more requests than the batch has room for.
pub const STATUS_TOO_MANY_REQUESTS: c_int = 2;
/// `submitTransfer*`: the memory of a request is not registered. Over RDMA tasks before it may have begun.
pub const STATUS_ADDRESS_NOT_REGISTERED: c_int = 3;
/// `freeBatchID`: a task has not been seen in a final state.
pub const STATUS_BATCH_BUSY: c_int = 4;
/// `submitTransfer*`: the transport of the segment is not installed.
pub const STATUS_TRANSPORT_NOT_SUPPORTED: c_int = 8;

/// A wrong argument. All calls but those named at [`STATUS_INVALID_ARGUMENT`] answer negative codes.
pub const ERR_INVALID_ARGUMENT: c_int = -1;
/// Too many requests.
pub const ERR_TOO_MANY_REQUESTS: c_int = -2;
/// The address is not the start of a registered range.
pub const ERR_ADDRESS_NOT_REGISTERED: c_int = -3;
/// The batch has tasks under way.
pub const ERR_BATCH_BUSY: c_int = -4;
/// No such device.
pub const ERR_DEVICE_NOT_FOUND: c_int = -6;
/// The range overlaps a registered one.
pub const ERR_ADDRESS_OVERLAPPED: c_int = -7;
/// A host name could not be resolved.
pub const ERR_DNS: c_int = -101;
/// A connection failed.
pub const ERR_SOCKET: c_int = -102;
/// A peer answered with something that is no JSON.
pub const ERR_MALFORMED_JSON: c_int = -103;
/// A peer refused the exchange.
pub const ERR_REJECT_HANDSHAKE: c_int = -104;
/// The metadata store failed, or does not have the entry.
pub const ERR_METADATA: c_int = -200;
/// An RDMA endpoint failed.
pub const ERR_ENDPOINT: c_int = -201;
/// An RDMA context failed.
pub const ERR_CONTEXT: c_int = -202;
/// A NUMA call failed.
pub const ERR_NUMA: c_int = -300;
/// A clock failed.
pub const ERR_CLOCK: c_int = -301;
/// Memory could not be had.
pub const ERR_MEMORY: c_int = -302;
/// Not implemented.
pub const ERR_NOT_IMPLEMENTED: c_int = -303;
