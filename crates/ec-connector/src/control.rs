//! The control plane: JSON messages over ZeroMQ.

pub(crate) mod python;
