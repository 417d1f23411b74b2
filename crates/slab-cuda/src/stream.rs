//! Streams, and the events that say how far one has come.

// Calls the driver.
#![allow(unsafe_code)]

use core::ffi::{c_uint, c_void};
use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys::{CUevent, CUstream};

use crate::api::{CAPTURE_CODES, NOT_READY, call};
use crate::device::{Current, Device, Side};
use crate::error::CudaError;
use crate::track::Mark;
use crate::twin::{Twin, is_left_out};

/// Events tell only whether they were passed, which is much cheaper than when. From `cuda.h`.
const EVENT_DISABLE_TIMING: c_uint = 2;
/// The handles of the default streams: null, `CU_STREAM_LEGACY`, `CU_STREAM_PER_THREAD`.
const DEFAULT_STREAMS_MAX: usize = 2;

/// A stream of a device: work that runs in the order in which it was submitted. Cloning gives another handle.
#[derive(Clone)]
pub struct Stream {
    inner: Arc<Inner>,
}

struct Inner {
    device: Device,
    raw: CUstream,
    owner: Owner,
}

enum Owner {
    /// This value, which destroys it.
    Own,
    /// The device, which destroys it once nobody holds the device.
    Device,
    /// Somebody else, for as long as this is held.
    Other(#[allow(dead_code, reason = "held, not read")] Box<dyn Any + Send + Sync>),
}

// SAFETY: streams may be used from any thread (CUDA driver API: its functions are thread-safe).
unsafe impl Send for Inner {}
// SAFETY: as for `Send`.
unsafe impl Sync for Inner {}

impl Stream {
    /// Makes a stream that does not wait for the default stream, nor that for it.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn new(device: &Device) -> Result<Self, CudaError> {
        let raw = device.create_stream()?;
        Ok(Self::of(device, raw, Owner::Own))
    }

    /// Wraps a stream that somebody else has made, such as the one that a framework submits its kernels to. `keep` is
    /// whatever keeps it from being destroyed.
    ///
    /// # Errors
    /// [`CudaError::DefaultStream`] for a default stream, which is another one in each context or thread.
    ///
    /// # Safety
    /// `raw` is a `CUstream` of the primary context of `device` (not one of a green context), and is not destroyed while
    /// `keep` is held.
    pub unsafe fn from_raw(
        device: &Device,
        raw: *mut c_void,
        keep: impl Any + Send + Sync,
    ) -> Result<Self, CudaError> {
        if raw.addr() <= DEFAULT_STREAMS_MAX {
            return Err(CudaError::DefaultStream);
        }
        Ok(Self::of(device, raw.cast(), Owner::Other(Box::new(keep))))
    }

    /// The calling thread's own stream for one use.
    pub(crate) fn side(device: &Device, side: Side) -> Result<Self, CudaError> {
        let raw = device.side_stream(side)?;
        Ok(Self::of(device, raw, Owner::Device))
    }

    fn of(device: &Device, raw: CUstream, owner: Owner) -> Self {
        let device = device.clone();
        Self {
            inner: Arc::new(Inner { device, raw, owner }),
        }
    }

    /// Its device.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// The handle, a `CUstream`, to submit work with. Work submitted through it is known to nobody here: lend the
    /// memory that it touches, on this stream.
    #[must_use]
    pub fn as_raw(&self) -> *mut c_void {
        self.inner.raw.cast()
    }

    pub(crate) fn raw(&self) -> CUstream {
        self.inner.raw
    }

    /// Refuses a stream whose work goes into a graph.
    pub(crate) fn check_runs(&self, _current: &Current<'_>) -> Result<(), CudaError> {
        let mut status = 0;
        // SAFETY: `status` takes the answer; a context is current, and the stream is live and no default stream.
        unsafe {
            call!(
                self.device().functions(),
                cuStreamIsCapturing(self.raw(), &mut status)
            )?;
        }
        // 0 is CU_STREAM_CAPTURE_STATUS_NONE.
        if status == 0 {
            Ok(())
        } else {
            Err(CudaError::StreamCapturing)
        }
    }

    /// Has everything that is submitted here from now on wait for what was submitted to `other` before.
    ///
    /// # Errors
    /// [`CudaError::OtherDevice`], [`CudaError::StreamCapturing`] if one of them is, or [`CudaError::Driver`]; then it
    /// does not wait.
    pub fn wait_for(&self, other: &Self) -> Result<(), CudaError> {
        self.device().check_same(other.device())?;
        let current = self.device().enter()?;
        self.check_runs(&current)?;
        let mut event = Event::take(self.device())?;
        event.record(other)?;
        // SAFETY: both are live. The driver keeps what it needs of the event if that is destroyed before it is passed.
        unsafe {
            call!(
                self.device().functions(),
                cuStreamWaitEvent(self.raw(), event.raw, 0)
            )
        }
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream")
            .field("device", &self.device().ordinal())
            .field("raw", &self.as_raw())
            .finish()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if !matches!(self.owner, Owner::Own) {
            return;
        }
        let destroyed = self.device.enter().and_then(|_current| {
            // SAFETY: made by `Stream::new`, destroyed once. The driver ends what is queued first.
            unsafe { call!(self.device.functions(), cuStreamDestroy_v2(self.raw)) }
        });
        destroyed.unwrap_or_else(|error| self.device.note_lost("stream", 0, &error));
    }
}

impl Mark for Event {
    fn poll(&mut self) -> Result<bool, CudaError> {
        Self::poll(self)
    }
}

/// A point in a stream. Used again once it was passed, else destroyed.
pub(crate) struct Event {
    device: Device,
    raw: CUevent,
    /// Where it was recorded last: that stream must not go before it is passed. Kept until this value goes, for it may be
    /// asked under a lock, and the stream may be the last one's whose owner has a destructor of its own.
    stream: Option<Stream>,
    /// It was recorded, or may have been, and is not seen to be passed.
    is_pending: bool,
}

// SAFETY: events may be used from any thread (CUDA driver API: its functions are thread-safe).
unsafe impl Send for Event {}

impl Event {
    /// One that was used before, or a new one.
    pub(crate) fn take(device: &Device) -> Result<Self, CudaError> {
        let raw = match device.take_event() {
            Some(raw) => raw,
            None => {
                let _current = device.enter()?;
                let mut raw = core::ptr::null_mut();
                // SAFETY: `raw` takes the answer; a context is current.
                unsafe {
                    call!(
                        device.functions(),
                        cuEventCreate(&mut raw, EVENT_DISABLE_TIMING)
                    )?;
                }
                raw
            }
        };
        Ok(Self {
            device: device.clone(),
            raw,
            stream: None,
            is_pending: false,
        })
    }

    /// Records it behind everything that was submitted to the stream so far. If that fails, another event is tried once:
    /// without one, nobody learns when the work before it has ended, and what that touches is lost.
    pub(crate) fn record(&mut self, stream: &Stream) -> Result<(), CudaError> {
        if is_left_out(Twin::RecordEvent) {
            return Ok(());
        }
        self.record_once(stream).or_else(|error| {
            let again = Self::take(&self.device).and_then(|mut other| {
                other.record_once(stream)?;
                Ok(other)
            });
            // The first error says what is wrong.
            *self = again.map_err(|_| error)?;
            Ok(())
        })
    }

    fn record_once(&mut self, stream: &Stream) -> Result<(), CudaError> {
        let current = self.device.enter()?;
        // An event that goes into a graph is never passed.
        stream.check_runs(&current)?;
        // Also if it fails: the driver may have done it all the same, so that the event is not used again.
        self.stream = Some(stream.clone());
        self.is_pending = true;
        // SAFETY: both are live, and of one device: its callers have checked that.
        unsafe {
            call!(
                self.device.functions(),
                cuEventRecord(self.raw, stream.raw())
            )
        }
    }

    /// Whether the stream has passed it.
    pub(crate) fn poll(&mut self) -> Result<bool, CudaError> {
        let _current = self.device.enter()?;
        let functions = self.device.functions();
        // SAFETY: it is live.
        let code = unsafe { (functions.table.cuEventQuery)(self.raw) };
        // That a graph is being captured says nothing about the event: it is asked again.
        if code == NOT_READY || CAPTURE_CODES.contains(&code) {
            return Ok(false);
        }
        functions.check("cuEventQuery", code)?;
        self.is_pending = false;
        Ok(true)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let leftover = if self.is_pending {
            Some(self.raw)
        } else {
            self.device.keep_event(self.raw)
        };
        let Some(raw) = leftover else {
            return;
        };
        let destroyed = self.device.enter().and_then(|_current| {
            // SAFETY: made by `take` and nobody else's. The driver keeps what it needs until the event is passed.
            unsafe { call!(self.device.functions(), cuEventDestroy_v2(raw)) }
        });
        destroyed.unwrap_or_else(|error| self.device.note_lost("event", 0, &error));
    }
}

/// Pauses between two looks at the device: short at first, so that what ends soon is seen soon.
#[derive(Debug, Default)]
pub(crate) struct Backoff {
    pauses: u32,
}

impl Backoff {
    /// Looks that only let other threads run: about what a copy of a staging buffer takes.
    const YIELDS: u32 = 64;
    const PAUSE: Duration = Duration::from_micros(50);

    pub(crate) fn pause(&mut self) {
        self.pauses = self.pauses.saturating_add(1);
        if self.pauses <= Self::YIELDS {
            std::thread::yield_now();
        } else {
            std::thread::sleep(Self::PAUSE);
        }
    }
}
