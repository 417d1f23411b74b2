//! The two directions of a pipe as pure state machines: facts go in, decisions come out.
//!
//! Neither knows a socket, an engine or a clock; buffers are whatever the driver says they are.
//! Invariants: a buffer that was announced is given back only by the answer to its own notice, or
//! with the machine itself; every notice that was taken is answered; a direction that has ended says
//! why, the same each time.

mod recv;
mod send;

pub(super) use recv::{Delivery, RecvMachine, RecvWant, Retry};
pub(super) use send::{SendLimits, SendMachine};

/// Whether a peer numbers its messages, as far as it has been heard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Numbers {
    Unheard,
    Used,
    Unused,
}

impl Numbers {
    /// Notes one message; false if it is not like those before.
    fn note(&mut self, has_number: bool) -> bool {
        let heard = if has_number { Self::Used } else { Self::Unused };
        let fits = *self == Self::Unheard || *self == heard;
        *self = heard;
        fits
    }
}
