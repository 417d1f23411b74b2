//! The local side of one request: registered memory, straight or through a bounce.

use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use slab_memory::{Bounce, BounceDirection, CopyError, Memory, checked_len};

use super::caught::{Caught, guarded};
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

/// How many bounces there are and may be, for each has a buffer.
pub(super) struct BounceRoom {
    count: Arc<AtomicUsize>,
    max: usize,
}

impl BounceRoom {
    pub(super) fn new(max: usize) -> Self {
        Self {
            count: Arc::new(AtomicUsize::new(0)),
            max,
        }
    }

    /// Returns how many more there may be.
    pub(super) fn left(&self) -> usize {
        self.max.saturating_sub(self.count.load(Ordering::Relaxed))
    }

    /// Only one thread takes, so that what is left now is left in a moment.
    fn take(&self) -> Option<BouncePermit> {
        if self.left() == 0 {
            return None;
        }
        self.count.fetch_add(1, Ordering::Relaxed);
        Some(BouncePermit(Arc::clone(&self.count)))
    }
}

/// The right to one bounce.
struct BouncePermit(Arc<AtomicUsize>);

impl Drop for BouncePermit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

pub(super) struct LocalSide {
    memory: Caught<Arc<dyn Memory>>,
    /// What has not passed the socket yet.
    rest: Range<u64>,
    /// The permit goes after the buffer that it is for.
    bounce: Option<(Caught<Box<dyn Bounce>>, BouncePermit)>,
}

impl LocalSide {
    /// Returns none if the memory needs a bounce and there are as many as may be.
    pub(super) fn new(
        memory: Arc<dyn Memory>,
        range: Range<u64>,
        direction: BounceDirection,
        room: &BounceRoom,
    ) -> Result<Option<Self>, CopyError> {
        let memory = Caught::new(memory);
        let has_pointer = guarded(|| {
            checked_len(&range, memory.len())?;
            Ok(memory.host_ptr().is_some())
        })?;
        let mut bounce = None;
        if !has_pointer {
            let Some(permit) = room.take() else {
                return Ok(None);
            };
            let made = guarded(|| Arc::clone(&*memory).bounce(direction, range.clone()))?;
            bounce = Some((Caught::new(made), permit));
        }
        Ok(Some(Self {
            memory,
            rest: range,
            bounce,
        }))
    }

    /// Sends `head`, then the rest of the range.
    pub(super) fn send(&mut self, socket: BorrowedFd<'_>, head: &[u8]) -> Moved {
        let result = match &mut self.bounce {
            None => {
                let body = (&**self.memory, self.rest.clone());
                guarded(|| Ok(socket::send(socket, head, Some(body))))
            }
            Some((bounce, _)) => {
                let buffer = match guarded(|| bounce.get_mut().buffer()) {
                    Ok(buffer) => buffer,
                    Err(error) => return Moved::Memory(error),
                };
                // Head and body in two calls: the bounce path is not the fast one.
                if !head.is_empty() {
                    Ok(socket::send(socket, head, None))
                } else if buffer.is_empty() {
                    return Moved::Busy;
                } else {
                    Ok(socket::send(socket, buffer, None))
                }
            }
        };
        self.account(head.len(), result)
    }

    /// Receives into `head`, then into the rest of the range.
    pub(super) fn receive(&mut self, socket: BorrowedFd<'_>, head: &mut [u8]) -> Moved {
        let head_len = head.len();
        let result = match &mut self.bounce {
            None => {
                let body = (&**self.memory, self.rest.clone());
                guarded(|| Ok(socket::receive(socket, head, Some(body))))
            }
            Some((bounce, _)) => {
                if !head.is_empty() {
                    Ok(socket::receive(socket, head, None))
                } else {
                    match guarded(|| bounce.get_mut().buffer()) {
                        Ok([]) => return Moved::Busy,
                        Ok(buffer) => Ok(socket::receive(socket, buffer, None)),
                        Err(error) => return Moved::Memory(error),
                    }
                }
            }
        };
        self.account(head_len, result)
    }

    fn account(&mut self, head_len: usize, result: Result<io::Result<usize>, CopyError>) -> Moved {
        let count = match result {
            Ok(Ok(count)) => count,
            Ok(Err(error)) if error.kind() == io::ErrorKind::WouldBlock => {
                return Moved::WouldBlock;
            }
            Ok(Err(error)) => return Moved::Io(error),
            Err(error) => return Moved::Memory(error),
        };
        let body = count.saturating_sub(head_len);
        self.rest.start += body as u64;
        if let Some((bounce, _)) = &mut self.bounce
            && body > 0
            && let Err(error) = guarded(|| bounce.get_mut().commit(body))
        {
            return Moved::Memory(error);
        }
        Moved::Bytes(count)
    }

    /// Ends it. Says whether nothing of it touches the memory any more.
    pub(super) fn end(mut self) -> bool {
        self.quiesce()
    }

    fn quiesce(&mut self) -> bool {
        let Some((mut bounce, _permit)) = self.bounce.take() else {
            return true;
        };
        // A panic leaves open whether a copy runs.
        let is_quiet = guarded(|| Ok(bounce.get_mut().quiesce())).unwrap_or(false);
        if !is_quiet {
            tracing::error!(
                "a copy of a request that has ended may still run; its memory is never given back"
            );
            std::mem::forget(Arc::clone(&*self.memory));
        }
        is_quiet
    }

    /// Says whether all bytes that passed the socket are in place.
    pub(super) fn poll_in_place(&mut self) -> Result<bool, CopyError> {
        match &mut self.bounce {
            None => Ok(true),
            Some((bounce, _)) => guarded(|| bounce.get_mut().poll_finished()),
        }
    }
}

impl Drop for LocalSide {
    fn drop(&mut self) {
        self.quiesce();
    }
}
