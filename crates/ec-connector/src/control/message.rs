//! Requests, replies and events as JSON.
//!
//! One frame carries one message. Requests are read leniently, as the protocol's other side is;
//! what is written is byte for byte what Python's standard encoder would write.

pub(super) mod lenient;
pub(super) mod rejection;
pub(super) mod reply;
pub(super) mod request;
pub(super) mod snapshot;
