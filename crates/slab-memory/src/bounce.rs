//! Moving bytes through host buffers for memory that the host cannot address.

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec;
use core::ops::Range;

use crate::memory::{CopyError, Memory, checked_len};

/// Which way a [`Bounce`] moves bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BounceDirection {
    /// From the network into the memory.
    In,
    /// From the memory to the network.
    Out,
}

/// The passage of one request's bytes between a socket and a memory without a host pointer.
///
/// An engine loops: borrow [`buffer`](Bounce::buffer), move bytes between it and the socket, say
/// how many with [`commit`](Bounce::commit). It reports the request as done only once
/// [`poll_finished`](Bounce::poll_finished) answers `true`. Dropping a bounce early waits until no
/// copy of it is running, so the memory is quiet afterwards, unless [`quiesce`](Bounce::quiesce)
/// answers `false`.
pub trait Bounce: Send {
    /// Lends host bytes: space to receive into (`In`) or bytes to send (`Out`).
    ///
    /// Empty while a copy has to finish first, and once the range is through: poll again.
    ///
    /// # Errors
    /// The error of the copy that filled or emptied the buffer; the request has failed.
    fn buffer(&mut self) -> Result<&mut [u8], CopyError>;

    /// Says that the first `count` bytes of [`buffer`](Bounce::buffer) were received or sent.
    ///
    /// Starts the copy of received bytes and returns at once.
    ///
    /// # Errors
    /// As [`buffer`](Bounce::buffer).
    ///
    /// # Panics
    /// If `count` is more than `buffer` lent.
    fn commit(&mut self, count: usize) -> Result<(), CopyError>;

    /// Says whether every byte of the range is in place (`In`) or was sent (`Out`).
    ///
    /// # Errors
    /// As [`buffer`](Bounce::buffer).
    fn poll_finished(&mut self) -> Result<bool, CopyError>;

    /// Waits until no copy is running, and says whether that is so; nothing else is called afterwards. `true` by default,
    /// for bounces whose copies end with the calls that start them or, at the latest, with the drop.
    ///
    /// `false` is for those that cannot wait for ever, or that will never hear of a copy: it may run at any later
    /// time. Then neither the memory nor whatever reserves the range may be given back. How long it waits is the memory's to
    /// say; a second call does not wait again.
    fn quiesce(&mut self) -> bool {
        true
    }
}

/// Largest host buffer of one [`BlockingBounce`], in bytes: large enough to amortise a system call
/// and a driver call, small enough for the hundreds of requests that an engine
/// lets have one at a time.
const BUFFER_BYTES_MAX: u64 = 256 * 1024;

/// A [`Bounce`] over the blocking copies of [`Memory`].
#[derive(Debug)]
pub struct BlockingBounce<M: Memory + ?Sized> {
    memory: Arc<M>,
    direction: BounceDirection,
    /// Bytes that have not passed between `buffer` and the memory yet.
    rest: Range<u64>,
    buffer: Box<[u8]>,
    /// `Out`: the part of `buffer` that is filled and not sent yet.
    filled: Range<usize>,
    /// A copy has failed that may still run.
    is_unsettled: bool,
}

impl<M: Memory + ?Sized> BlockingBounce<M> {
    /// Creates the passage for `range` of `memory`.
    ///
    /// # Errors
    /// [`CopyError::OutOfBounds`] if `range` does not lie inside the memory.
    pub fn new(
        memory: Arc<M>,
        direction: BounceDirection,
        range: Range<u64>,
    ) -> Result<Self, CopyError> {
        let len = checked_len(&range, memory.len())?;
        let size = len.min(BUFFER_BYTES_MAX) as usize;
        Ok(Self {
            memory,
            direction,
            rest: range,
            buffer: vec![0; size].into_boxed_slice(),
            filled: 0..0,
            is_unsettled: false,
        })
    }

    fn rest_len(&self) -> u64 {
        self.rest.end - self.rest.start
    }
}

impl<M: Memory + ?Sized> Bounce for BlockingBounce<M> {
    fn buffer(&mut self) -> Result<&mut [u8], CopyError> {
        match self.direction {
            BounceDirection::In => {
                let size = self.rest_len().min(self.buffer.len() as u64) as usize;
                Ok(&mut self.buffer[..size])
            }
            BounceDirection::Out => {
                if self.filled.is_empty() {
                    let size = self.rest_len().min(self.buffer.len() as u64) as usize;
                    self.memory
                        .copy_out(self.rest.start, &mut self.buffer[..size])?;
                    self.rest.start += size as u64;
                    self.filled = 0..size;
                }
                Ok(&mut self.buffer[self.filled.clone()])
            }
        }
    }

    fn commit(&mut self, count: usize) -> Result<(), CopyError> {
        match self.direction {
            BounceDirection::In => {
                assert!(
                    count as u64 <= self.rest_len(),
                    "more bytes committed than were lent"
                );
                // Also if the call panics, which leaves open what it has begun.
                let was_unsettled = core::mem::replace(&mut self.is_unsettled, true);
                let copied = self.memory.copy_in(self.rest.start, &self.buffer[..count]);
                self.is_unsettled =
                    was_unsettled || matches!(copied, Err(CopyError::Unsettled { .. }));
                copied?;
                self.rest.start += count as u64;
            }
            BounceDirection::Out => {
                assert!(
                    count <= self.filled.len(),
                    "more bytes committed than were lent"
                );
                self.filled.start += count;
            }
        }
        Ok(())
    }

    fn poll_finished(&mut self) -> Result<bool, CopyError> {
        Ok(self.rest.is_empty() && self.filled.is_empty())
    }

    fn quiesce(&mut self) -> bool {
        !self.is_unsettled
    }
}

#[cfg(all(test, feature = "std"))]
mod tests {
    use super::*;
    use crate::HostSlab;

    #[test]
    fn bytes_pass_in_and_out_in_pieces() {
        let slab = Arc::new(HostSlab::new(1 << 20).unwrap());
        let bytes: alloc::vec::Vec<u8> = (0..700_001u32).map(|i| (i % 251) as u8).collect();
        let range = 11..11 + bytes.len() as u64;

        let mut inward = slab
            .clone()
            .bounce(BounceDirection::In, range.clone())
            .unwrap();
        let mut rest = &bytes[..];
        while !inward.poll_finished().unwrap() {
            let buffer = inward.buffer().unwrap();
            let count = buffer.len().min(rest.len()).min(77_777);
            buffer[..count].copy_from_slice(&rest[..count]);
            rest = &rest[count..];
            inward.commit(count).unwrap();
        }
        assert!(rest.is_empty());
        assert!(inward.buffer().unwrap().is_empty());

        let mut outward = slab.bounce(BounceDirection::Out, range).unwrap();
        let mut read = alloc::vec::Vec::new();
        while !outward.poll_finished().unwrap() {
            let buffer = outward.buffer().unwrap();
            let count = buffer.len().min(33_333);
            read.extend_from_slice(&buffer[..count]);
            outward.commit(count).unwrap();
        }
        assert_eq!(read, bytes);
    }

    #[test]
    fn a_range_outside_the_memory_is_refused() {
        let slab = Arc::new(HostSlab::new(4096).unwrap());
        let error = slab
            .clone()
            .bounce(BounceDirection::In, 4000..4097)
            .err()
            .unwrap();
        assert_eq!(
            error,
            CopyError::OutOfBounds {
                offset: 4000,
                len: 97,
                memory_len: 4096
            }
        );
        let reversed = Range { start: 10, end: 5 };
        let error = slab.bounce(BounceDirection::Out, reversed).err().unwrap();
        assert!(matches!(error, CopyError::OutOfBounds { offset: 10, .. }));
    }

    #[test]
    fn an_empty_range_is_finished_at_once() {
        let slab = Arc::new(HostSlab::new(4096).unwrap());
        let mut bounce = slab.bounce(BounceDirection::Out, 5..5).unwrap();
        assert!(bounce.buffer().unwrap().is_empty());
        assert!(bounce.poll_finished().unwrap());
    }
}
