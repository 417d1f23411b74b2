//! Bytes on their way between the host and device memory, through pinned buffers.
//!
//! A passage has two buffers that take turns: while the host fills or empties one, the other is copied. Invariant: the
//! host touches a buffer only if no copy of it is under way, which its event says.

// Lends pinned memory as slices, and starts copies.
#![allow(unsafe_code)]

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use slab_memory::{Bounce, BounceDirection, CopyError};

use crate::api::call;
use crate::device::{Device, Side, lock};
use crate::error::CudaError;
use crate::slab::{DeviceBlock, allocate_pinned, free_pinned};
use crate::stream::{Backoff, Event, Stream};
use crate::twin::{Twin, is_left_out};

/// Bytes of one buffer: some 10 µs of a PCIe link, several times what starting a copy costs.
pub(crate) const BUFFER_BYTES: usize = 256 * 1024;
/// How long a copy of a buffer may take before it is taken for lost. Thousands of times what it takes.
pub(crate) const QUIET_LIMIT: Duration = Duration::from_secs(10);
/// How long it may take where others on the same stream have waited that long before.
const STALLED_LIMIT: Duration = Duration::from_millis(10);

/// Since when, and until when, somebody has waited for the copies of a stream in vain. What stands behind a copy that
/// does not end does not end either, so that all who wait share one limit: an engine's thread may have hundreds of
/// bounces to end.
#[derive(Debug, Default)]
pub(crate) struct Stall {
    waits: Mutex<Option<Waits>>,
}

#[derive(Clone, Copy, Debug)]
struct Waits {
    since: Instant,
    last: Instant,
}

impl Stall {
    /// Takes note of a wait at `now`, and returns when it is to be given up. Whoever goes on waiting asks again: another
    /// may have seen that the stream gets on.
    fn wait_at(&self, now: Instant) -> Instant {
        let mut waits = lock(&self.waits);
        let before = waits.filter(|waits| now.duration_since(waits.last) < QUIET_LIMIT);
        // Where nobody has waited for long, the stream may have got on unseen.
        let since = before.map_or(now, |waits| waits.since);
        *waits = Some(Waits { since, last: now });
        since + QUIET_LIMIT
    }

    /// A copy has ended, or a wait for one that never will.
    fn clear(&self) {
        *lock(&self.waits) = None;
    }
}

/// One pinned buffer, and how far its copies have come.
struct Buffer {
    device: Device,
    /// Of the stream that its copies are on.
    lane: usize,
    pointer: NonNull<u8>,
    event: Event,
    /// `In`: bytes received. `Out`: bytes copied and not sent yet.
    filled: Range<usize>,
    /// A copy is under way.
    busy: bool,
    /// A copy may be under way of which nothing will be heard.
    lost: bool,
}

// SAFETY: the memory is the buffer's alone, and not tied to a thread.
unsafe impl Send for Buffer {}

impl Buffer {
    fn take(device: &Device, lane: usize) -> Result<Self, CudaError> {
        let event = Event::take(device)?;
        let pointer = match device.take_buffer() {
            Some(pointer) => pointer,
            None => {
                let pointer = allocate_pinned(device, BUFFER_BYTES)?;
                // SAFETY: the allocation has as many bytes, and is ours. Slices over it need them initialised.
                unsafe { pointer.as_ptr().write_bytes(0, BUFFER_BYTES) };
                pointer
            }
        };
        Ok(Self {
            device: device.clone(),
            lane,
            pointer,
            event,
            filled: 0..0,
            busy: false,
            lost: false,
        })
    }

    /// Whether the host may touch the buffer.
    fn poll_quiet(&mut self) -> Result<bool, CudaError> {
        if self.busy {
            let polled = self.event.poll();
            if !matches!(polled, Ok(false)) {
                self.device.stall(self.lane).clear();
            }
            match polled {
                Ok(passed) => self.busy = !passed,
                Err(error) => {
                    self.lost = true;
                    return Err(error);
                }
            }
        }
        Ok(!self.busy)
    }

    /// The bytes of a range of the buffer, which no copy is under way of.
    fn bytes(&mut self, range: Range<usize>) -> &mut [u8] {
        assert!(!self.busy && !self.lost, "the device has the buffer");
        assert!(range.start <= range.end && range.end <= BUFFER_BYTES);
        // SAFETY: the range lies inside the buffer, which is initialised, and is this value's alone; no copy is under
        // way, and none is started while the borrow lasts, for that takes the buffer as well.
        unsafe {
            core::slice::from_raw_parts_mut(
                self.pointer.as_ptr().add(range.start),
                range.end - range.start,
            )
        }
    }

    /// Starts the copy between the first `len` bytes of the buffer and the device.
    fn start(
        &mut self,
        stream: &Stream,
        direction: BounceDirection,
        address: u64,
        len: usize,
    ) -> Result<(), CudaError> {
        let own = self.pointer.as_ptr().expose_provenance() as u64;
        let (target, source) = match direction {
            BounceDirection::In => (address, own),
            _ => (own, address),
        };
        let current = self.device.enter()?;
        // From here on the device may have the buffer, until the event says otherwise.
        self.busy = true;
        // SAFETY: `len` bytes are inside the buffer and inside the device memory: the passage cuts them off a checked
        // range. Both stay until the event is passed, or for ever.
        let copied = unsafe {
            call!(
                self.device.functions(),
                cuMemcpyAsync(target, source, len, stream.raw())
            )
        };
        drop(current);
        let recorded = self.event.record(stream);
        // Without an event nothing will be heard of a copy that was begun, and a refused one may have been.
        self.lost = recorded.is_err();
        copied.and(recorded)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let len = BUFFER_BYTES as u64;
        if self.busy || self.lost {
            let cause = "a copy of it may still be under way";
            self.device.note_lost("staging buffer", len, &cause);
        } else if let Some(pointer) = self.device.keep_buffer(self.pointer) {
            free_pinned(&self.device, pointer, "staging buffer", len);
        }
    }
}

/// The passage of one request's bytes into or out of device memory.
pub(crate) struct DeviceBounce {
    /// Empty only once dropped.
    block: Option<Arc<DeviceBlock>>,
    base: u64,
    direction: BounceDirection,
    stream: Stream,
    lane: usize,
    /// `In`: what was not received yet. `Out`: what no copy was started for yet.
    rest: Range<u64>,
    /// One or two. Empty where the range is.
    buffers: Vec<Buffer>,
    /// Whose turn it is.
    turn: usize,
    failed: Option<CopyError>,
    /// A wait for the copies has ended without their end.
    is_given_up: bool,
}

impl DeviceBounce {
    pub(crate) fn new(
        block: Arc<DeviceBlock>,
        direction: BounceDirection,
        range: Range<u64>,
    ) -> Result<Self, CopyError> {
        let device = block.device();
        let len = range.end.saturating_sub(range.start);
        let count = len.div_ceil(BUFFER_BYTES as u64).min(2);
        let stream = Stream::side(device, Side::Bounces).map_err(|e| e.as_copy_error())?;
        let lane = Device::lane();
        let buffers = (0..count).map(|_| Buffer::take(device, lane)).collect();
        let buffers: Result<Vec<Buffer>, CudaError> = buffers;
        let mut bounce = Self {
            base: block.address(),
            direction,
            stream,
            lane,
            rest: range,
            buffers: buffers.map_err(|error| error.as_copy_error())?,
            turn: 0,
            failed: None,
            is_given_up: false,
            block: Some(block),
        };
        if direction != BounceDirection::In {
            for at in 0..bounce.buffers.len() {
                let Err(error) = bounce.fetch(at) else {
                    continue;
                };
                let error = error.as_copy_error();
                if bounce.quiesce() {
                    return Err(error);
                }
                // Told by the first use. The caller has to learn at the end that the memory is not quiet.
                bounce.failed = Some(error);
                break;
            }
        }
        Ok(bounce)
    }

    /// Says whether it makes no sense to wait for the copies any longer than the caller, who waits since `start`, has.
    pub(crate) fn is_stalled(&self, start: Instant) -> bool {
        let now = Instant::now();
        let limit = self.stream.device().stall(self.lane).wait_at(now);
        now >= limit.max(start + STALLED_LIMIT)
    }

    /// Whether no buffer is in use by the device. One whose copy was lost is for ever.
    fn poll_quiet(&mut self) -> bool {
        let mut is_quiet = true;
        for buffer in self.buffers.iter_mut().filter(|buffer| !buffer.lost) {
            is_quiet &= buffer.poll_quiet().unwrap_or(true);
        }
        is_quiet
    }

    fn rest_len(&self) -> usize {
        usize::try_from(self.rest.end.saturating_sub(self.rest.start)).unwrap_or(usize::MAX)
    }

    /// `Out`: starts the copy of the next bytes into a buffer that is free.
    fn fetch(&mut self, at: usize) -> Result<(), CudaError> {
        let len = self.rest_len().min(BUFFER_BYTES);
        let Some(buffer) = self.buffers.get_mut(at).filter(|_| len > 0) else {
            return Ok(());
        };
        let address = self.base + self.rest.start;
        buffer.filled = 0..len;
        buffer.start(&self.stream, self.direction, address, len)?;
        self.rest.start += len as u64;
        Ok(())
    }

    /// `In`: starts the copy of the bytes received, which end where the rest begins.
    fn store(&mut self) -> Result<(), CudaError> {
        let Some(buffer) = self.buffers.get_mut(self.turn) else {
            return Ok(());
        };
        let len = buffer.filled.end;
        let address = self.base + self.rest.start - len as u64;
        buffer.start(&self.stream, self.direction, address, len)?;
        buffer.filled = 0..0;
        self.take_turns();
        Ok(())
    }

    fn take_turns(&mut self) {
        self.turn = (self.turn + 1) % self.buffers.len().max(1);
    }

    /// The range of the current buffer that may be lent; none while the device has it.
    fn poll_lendable(&mut self) -> Result<Option<Range<usize>>, CudaError> {
        let rest = self.rest_len();
        let direction = self.direction;
        let Some(buffer) = self.buffers.get_mut(self.turn) else {
            return Ok(None);
        };
        if !buffer.poll_quiet()? {
            return Ok(None);
        }
        Ok(Some(match direction {
            BounceDirection::In => {
                let start = buffer.filled.end;
                start..start + rest.min(BUFFER_BYTES - start)
            }
            _ => buffer.filled.clone(),
        }))
    }

    fn advance(&mut self, count: usize) -> Result<(), CudaError> {
        let turn = self.turn;
        match self.direction {
            BounceDirection::In => {
                self.buffers[turn].filled.end += count;
                self.rest.start += count as u64;
                if self.rest.is_empty() || self.buffers[turn].filled.end == BUFFER_BYTES {
                    self.store()?;
                }
            }
            _ => {
                self.buffers[turn].filled.start += count;
                if self.buffers[turn].filled.is_empty() {
                    self.take_turns();
                    self.fetch(turn)?;
                }
            }
        }
        Ok(())
    }

    /// Remembers an error: the request has failed for good.
    fn fail<T>(&mut self, error: &CudaError) -> Result<T, CopyError> {
        let error = error.as_copy_error();
        self.failed = Some(error);
        Err(error)
    }
}

impl Bounce for DeviceBounce {
    fn buffer(&mut self) -> Result<&mut [u8], CopyError> {
        if let Some(error) = self.failed {
            return Err(error);
        }
        match self.poll_lendable() {
            Ok(None) => Ok(&mut []),
            Ok(Some(range)) => Ok(self.buffers[self.turn].bytes(range)),
            Err(error) => self.fail(&error),
        }
    }

    fn commit(&mut self, count: usize) -> Result<(), CopyError> {
        if let Some(error) = self.failed {
            return Err(error);
        }
        if count == 0 {
            return Ok(());
        }
        let lent = match self.poll_lendable() {
            Ok(lent) => lent.map_or(0, |range| range.len()),
            Err(error) => return self.fail(&error),
        };
        assert!(count <= lent, "more bytes committed than were lent");
        match self.advance(count) {
            Ok(()) => Ok(()),
            Err(error) => self.fail(&error),
        }
    }

    fn poll_finished(&mut self) -> Result<bool, CopyError> {
        if let Some(error) = self.failed {
            return Err(error);
        }
        if !self.rest.is_empty() {
            return Ok(false);
        }
        for at in 0..self.buffers.len() {
            match self.buffers[at].poll_quiet() {
                Ok(quiet) if quiet && self.buffers[at].filled.is_empty() => {}
                Ok(_) => return Ok(false),
                Err(error) => return self.fail(&error),
            }
        }
        Ok(true)
    }

    /// Waits at most [`QUIET_LIMIT`], and hardly at all behind another that has waited that long.
    fn quiesce(&mut self) -> bool {
        if self.is_given_up {
            return false;
        }
        if is_left_out(Twin::AwaitCopies) {
            self.buffers
                .iter_mut()
                .for_each(|buffer| buffer.busy = false);
        }
        let start = Instant::now();
        let mut backoff = Backoff::default();
        while !self.poll_quiet() && !self.is_stalled(start) {
            backoff.pause();
        }
        let is_quiet = |buffer: &Buffer| !buffer.busy && !buffer.lost;
        self.is_given_up = !self.buffers.iter().all(is_quiet);
        !self.is_given_up
    }
}

impl Drop for DeviceBounce {
    /// Waits as [`quiesce`](Bounce::quiesce) does, if nobody has. What may be touched longer is never given back.
    fn drop(&mut self) {
        let is_quiet = self.quiesce();
        if let Some(block) = self.block.take()
            && !is_quiet
        {
            let (device, len) = (block.device().clone(), block.len());
            std::mem::forget(block);
            let cause = "a copy of it may still be under way";
            device.note_lost("device slab", len, &cause);
        }
    }
}

#[cfg(all(test, not(slab_loom)))]
mod tests {
    use super::*;

    #[test]
    fn those_who_wait_in_vain_on_one_stream_share_one_limit() {
        let stall = Stall::default();
        let start = Instant::now();
        let after = |ms: u64| start + Duration::from_millis(ms);
        assert_eq!(stall.wait_at(start), after(10_000));
        assert_eq!(stall.wait_at(after(4_000)), after(10_000));
        assert_eq!(stall.wait_at(after(10_001)), after(10_000));
        assert_eq!(stall.wait_at(after(19_000)), after(10_000));
        // The stream has got on, which somebody saw.
        stall.clear();
        assert_eq!(stall.wait_at(after(20_000)), after(30_000));
        // Nobody has waited for so long that it may have done so unseen.
        assert_eq!(stall.wait_at(after(30_000)), after(40_000));
    }
}
