//! The local side of one request: registered memory, straight or through a bounce.

use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use slab_memory::{Bounce, BounceDirection, CopyError, Memory};

use super::socket;

/// What moving bytes came to.
#[derive(Debug)]
pub(super) enum Moved {
    /// This many bytes, head and body together; 0 when receiving is the end of the stream.
    Bytes(usize),
    /// The socket has nothing to give or no room.
    WouldBlock,
    /// The memory has a copy to finish first; try again after a moment.
    Busy,
    /// The connection failed.
    Io(io::Error),
    /// The memory failed.
    Memory(CopyError),
}

pub(super) struct LocalSide {
    memory: Arc<dyn Memory>,
    /// What has not passed the socket yet.
    rest: Range<u64>,
    bounce: Option<Box<dyn Bounce>>,
}

impl LocalSide {
    pub(super) fn new(
        memory: Arc<dyn Memory>,
        range: Range<u64>,
        direction: BounceDirection,
    ) -> Result<Self, CopyError> {
        socket::checked_len(&*memory, &range)?;
        let bounce = match memory.host_ptr() {
            Some(_) => None,
            None => Some(Arc::clone(&memory).bounce(direction, range.clone())?),
        };
        Ok(Self {
            memory,
            rest: range,
            bounce,
        })
    }

    /// Sends `head`, then the rest of the range.
    pub(super) fn send(&mut self, socket: BorrowedFd<'_>, head: &[u8]) -> Moved {
        let result = match &mut self.bounce {
            None => socket::send(socket, head, Some((&*self.memory, self.rest.clone()))),
            Some(bounce) => {
                let buffer = match bounce.buffer() {
                    Ok(buffer) => buffer,
                    Err(error) => return Moved::Memory(error),
                };
                // Head and body in two calls: the bounce path is not the fast one.
                if !head.is_empty() {
                    socket::send(socket, head, None)
                } else if buffer.is_empty() {
                    return Moved::Busy;
                } else {
                    socket::send(socket, buffer, None)
                }
            }
        };
        self.account(head.len(), result)
    }

    /// Receives into `head`, then into the rest of the range.
    pub(super) fn receive(&mut self, socket: BorrowedFd<'_>, head: &mut [u8]) -> Moved {
        let head_len = head.len();
        let result = match &mut self.bounce {
            None => socket::receive(socket, head, Some((&*self.memory, self.rest.clone()))),
            Some(bounce) => {
                if !head.is_empty() {
                    socket::receive(socket, head, None)
                } else {
                    match bounce.buffer() {
                        Ok([]) => return Moved::Busy,
                        Ok(buffer) => socket::receive(socket, buffer, None),
                        Err(error) => return Moved::Memory(error),
                    }
                }
            }
        };
        self.account(head_len, result)
    }

    fn account(&mut self, head_len: usize, result: io::Result<usize>) -> Moved {
        let count = match result {
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Moved::WouldBlock,
            Err(error) => return Moved::Io(error),
        };
        let body = count.saturating_sub(head_len);
        self.rest.start += body as u64;
        if let Some(bounce) = &mut self.bounce
            && body > 0
            && let Err(error) = bounce.commit(body)
        {
            return Moved::Memory(error);
        }
        Moved::Bytes(count)
    }

    /// Says whether all bytes that passed the socket are in place.
    pub(super) fn poll_in_place(&mut self) -> Result<bool, CopyError> {
        match &mut self.bounce {
            None => Ok(true),
            Some(bounce) => bounce.poll_finished(),
        }
    }
}
