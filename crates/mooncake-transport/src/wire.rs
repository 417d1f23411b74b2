//! Pure codecs of the wire formats: bytes in, values out, no I/O.
//!
//! [`control`] frames carry JSON requests and replies on short-lived connections; [`data`] headers
//! and status frames surround the payload on long-lived ones; a [`descriptor`] says where a
//! segment's memory is; [`name`] parses what peers are called. None of them panics on outside input.

pub mod control;
pub mod data;
pub mod descriptor;
pub(crate) mod json;
pub mod name;

pub use json::JsonError;
