//! The driver, its devices, and what belongs to a device for as long as anything of it is used.

// Calls the driver.
#![allow(unsafe_code)]

use core::ffi::{c_char, c_int, c_uint};
use std::cell::Cell;
use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{CUcontext, CUevent, CUstream};

use crate::api::{Functions, call};
use crate::error::CudaError;
use crate::stage::Stall;

/// The least version of CUDA that a driver has to support: the oldest that cudarc, from which the signatures come,
/// knows.
const VERSION_MIN: u32 = 11_040;
/// Most events kept for reuse per device. Each is a few hundred bytes of the driver's.
const IDLE_EVENTS_MAX: usize = 1024;
/// Most staging buffers kept for reuse per device: 128 MiB, and as many as the 256 bounces need that an engine lets
/// have one by default. To give one back would wait for everything that the device does meanwhile.
const IDLE_BUFFERS_MAX: usize = 512;
/// Side streams per device and use. Threads beyond that many share them.
const SIDE_STREAMS: usize = 8;
/// Makes a stream that does not wait for the default stream. From `cuda.h`.
const STREAM_NON_BLOCKING: c_uint = 1;
/// `CU_STREAM_CAPTURE_MODE_RELAXED` of `cuda.h`: what this thread calls is allowed while another captures a graph.
const CAPTURE_RELAXED: c_uint = 2;

/// The CUDA driver of this machine, loaded and initialised.
///
/// ```
/// use slab_cuda::{CudaError, Driver};
///
/// match Driver::load() {
///     Ok(driver) => println!("{} devices", driver.devices().map_or(0, |found| found.len())),
///     Err(CudaError::Unavailable(why)) => println!("{why}"),
///     Err(other) => println!("{other}"),
/// }
/// ```
#[derive(Clone, Debug)]
pub struct Driver {
    functions: Arc<Functions>,
}

impl Driver {
    /// Loads the driver's library, looks up every function that is used, and initialises the driver.
    ///
    /// The library is the first that the system's loader finds of the names that cudarc tries, `libcuda.so` before
    /// `libcuda.so.1`. It stays loaded until the process ends, and later calls get the same one: where it does not
    /// start, or is a stub, that is for good. Where none is found, a later call may find one.
    ///
    /// # Errors
    /// [`CudaError::Unavailable`] says which of the three is missing: the library, a function in it, a driver that
    /// starts; or that it is too old.
    ///
    /// # Complexity
    /// The first call reads a library from disk and initialises the devices, which may take a second.
    pub fn load() -> Result<Self, CudaError> {
        let functions = Arc::new(Functions::load(VERSION_MIN)?);
        Ok(Self { functions })
    }

    /// The version of CUDA that the driver supports, as 1000 × major + 10 × minor.
    #[must_use]
    pub fn version(&self) -> u32 {
        self.functions.version
    }

    /// The name under which the library was found.
    #[must_use]
    pub fn library(&self) -> &str {
        &self.functions.library
    }

    /// Whether the driver takes many copies in one call (`cuMemcpyBatchAsync`, from CUDA 12.8 on).
    #[must_use]
    pub fn has_batched_copies(&self) -> bool {
        self.functions.copy_batch.is_some()
    }

    /// The devices of this machine, in the order of their numbers.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn devices(&self) -> Result<Vec<DeviceInfo>, CudaError> {
        (0..self.count()?)
            .map(|ordinal| self.info(ordinal))
            .collect()
    }

    /// Opens a device, in its primary context, which is the one that CUDA's runtime uses. Clone the answer rather than
    /// open a device twice: each time it gets side streams, staging buffers and events of its own, and counts for itself
    /// what is lost.
    ///
    /// # Errors
    /// [`CudaError::NoSuchDevice`], or [`CudaError::Driver`].
    pub fn device(&self, ordinal: u32) -> Result<Device, CudaError> {
        let count = self.count()?;
        if ordinal >= count {
            return Err(CudaError::NoSuchDevice { ordinal, count });
        }
        let functions = Arc::clone(&self.functions);
        let number = self.number(ordinal)?;
        let mut context = core::ptr::null_mut();
        let relaxed = Relaxed::new(&self.functions)?;
        // SAFETY: `context` takes the answer; the device is one that the driver named.
        unsafe { call!(&*functions, cuDevicePrimaryCtxRetain(&mut context, number))? };
        drop(relaxed);
        Ok(Device {
            inner: Arc::new(Inner {
                functions,
                ordinal,
                number,
                context,
                idle_events: Mutex::default(),
                idle_buffers: Mutex::default(),
                side_streams: Mutex::default(),
                stalls: Default::default(),
                lost: AtomicUsize::new(0),
                lost_bytes: AtomicU64::new(0),
            }),
        })
    }

    fn count(&self) -> Result<u32, CudaError> {
        let mut count = 0;
        // SAFETY: `count` takes the answer.
        unsafe { call!(&*self.functions, cuDeviceGetCount(&mut count))? };
        Ok(u32::try_from(count).unwrap_or(0))
    }

    fn number(&self, ordinal: u32) -> Result<c_int, CudaError> {
        let mut number = 0;
        // SAFETY: `number` takes the answer; an ordinal that does not exist is an error of the driver's.
        unsafe { call!(&*self.functions, cuDeviceGet(&mut number, ordinal as c_int))? };
        Ok(number)
    }

    fn info(&self, ordinal: u32) -> Result<DeviceInfo, CudaError> {
        let number = self.number(ordinal)?;
        let mut name = [0; 256];
        let mut bytes = 0;
        // SAFETY: the places take the answers, and the name is cut to its room; the device is one that the driver
        // named.
        unsafe {
            call!(
                &*self.functions,
                cuDeviceGetName(name.as_mut_ptr(), name.len() as c_int, number)
            )?;
            call!(&*self.functions, cuDeviceTotalMem_v2(&mut bytes, number))?;
        }
        let name = name.iter().take_while(|c| **c != 0);
        let name: Vec<u8> = name.map(|c: &c_char| c.to_ne_bytes()[0]).collect();
        Ok(DeviceInfo {
            ordinal,
            name: String::from_utf8_lossy(&name).into_owned(),
            memory_bytes: bytes as u64,
        })
    }
}

/// What the driver says about a device.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its number, from 0.
    pub ordinal: u32,
    /// Its name.
    pub name: String,
    /// Its memory, in use or not.
    pub memory_bytes: u64,
}

/// How much of a device's memory is in use.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryUse {
    /// Bytes that can be allocated.
    pub free_bytes: u64,
    /// All bytes.
    pub total_bytes: u64,
}

/// What was never given back to the driver, because it would not take it, or because work may still touch it.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lost {
    /// Memories, events, streams and contexts.
    pub count: usize,
    /// Bytes of the memories.
    pub bytes: u64,
}

/// A device, opened. Cloning gives another handle; the device is let go with the last one, and with everything made
/// from it.
#[derive(Clone)]
pub struct Device {
    inner: Arc<Inner>,
}

struct Inner {
    functions: Arc<Functions>,
    ordinal: u32,
    number: c_int,
    context: CUcontext,
    idle_events: Mutex<Vec<CUevent>>,
    /// Pinned host buffers of one length, see `stage.rs`.
    idle_buffers: Mutex<Vec<NonNull<u8>>>,
    side_streams: Mutex<[[Option<CUstream>; SIDE_STREAMS]; 2]>,
    /// One for each of the streams for bounces.
    stalls: [Stall; SIDE_STREAMS],
    lost: AtomicUsize,
    lost_bytes: AtomicU64,
}

// SAFETY: contexts, events and streams may be used from any thread (CUDA driver API, "the driver API is thread-safe");
// idle ones are behind locks, and belong to nobody else.
unsafe impl Send for Inner {}
// SAFETY: as for `Send`.
unsafe impl Sync for Inner {}

/// What a side stream is for: copies that a user orders wait for work of the user's, and those of the engines must not
/// stand behind them.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Side {
    Copies,
    Bounces,
}

impl Device {
    /// Its number, from 0.
    #[must_use]
    pub fn ordinal(&self) -> u32 {
        self.inner.ordinal
    }

    /// The engine's name for memory of the device, such as `cuda:0`.
    #[must_use]
    pub fn location(&self) -> String {
        format!("cuda:{}", self.inner.ordinal)
    }

    /// How much of its memory is in use, by everybody.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn memory_use(&self) -> Result<MemoryUse, CudaError> {
        let _current = self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the places take the answers; a context is current.
        unsafe { call!(self.functions(), cuMemGetInfo_v2(&mut free, &mut total))? };
        Ok(MemoryUse {
            free_bytes: free as u64,
            total_bytes: total as u64,
        })
    }

    /// What was never given back to the driver since the device was opened. Each was logged as an error.
    #[must_use]
    pub fn lost(&self) -> Lost {
        Lost {
            count: self.inner.lost.load(Ordering::Relaxed),
            bytes: self.inner.lost_bytes.load(Ordering::Relaxed),
        }
    }

    pub(crate) fn functions(&self) -> &Functions {
        &self.inner.functions
    }

    /// Refuses what belongs to another device.
    pub(crate) fn check_same(&self, other: &Self) -> Result<(), CudaError> {
        if self.ordinal() == other.ordinal() {
            return Ok(());
        }
        Err(CudaError::OtherDevice {
            expected: self.ordinal(),
            found: other.ordinal(),
        })
    }

    /// Makes the device's context current for this thread until the guard goes, and lets it call what would be refused
    /// while another thread captures a graph, and spoil that: none of our calls is meant for a graph.
    pub(crate) fn enter(&self) -> Result<Current<'_>, CudaError> {
        self.inner.enter()
    }

    /// Takes note of something that is never given back.
    pub(crate) fn note_lost(&self, what: &'static str, len_bytes: u64, cause: &dyn fmt::Display) {
        self.inner.note_lost(what, len_bytes, cause);
    }

    pub(crate) fn take_event(&self) -> Option<CUevent> {
        lock(&self.inner.idle_events).pop()
    }

    /// Keeps an event that nothing waits for and no stream has to pass. Gives it back if there are enough.
    pub(crate) fn keep_event(&self, event: CUevent) -> Option<CUevent> {
        keep(&self.inner.idle_events, IDLE_EVENTS_MAX, event)
    }

    pub(crate) fn take_buffer(&self) -> Option<NonNull<u8>> {
        lock(&self.inner.idle_buffers).pop()
    }

    /// Keeps a staging buffer that no copy touches. Gives it back if there are enough.
    pub(crate) fn keep_buffer(&self, buffer: NonNull<u8>) -> Option<NonNull<u8>> {
        keep(&self.inner.idle_buffers, IDLE_BUFFERS_MAX, buffer)
    }

    /// The stream of the calling thread for one use, made when it is first asked for.
    pub(crate) fn side_stream(&self, side: Side) -> Result<CUstream, CudaError> {
        let mut streams = lock(&self.inner.side_streams);
        let place = &mut streams[side as usize][Self::lane()];
        match *place {
            Some(stream) => Ok(stream),
            None => {
                let stream = self.create_stream()?;
                *place = Some(stream);
                Ok(stream)
            }
        }
    }

    /// Which of the side streams are the calling thread's.
    pub(crate) fn lane() -> usize {
        thread_number() % SIDE_STREAMS
    }

    /// How the bounces on the stream of a lane get on.
    pub(crate) fn stall(&self, lane: usize) -> &Stall {
        &self.inner.stalls[lane]
    }

    pub(crate) fn create_stream(&self) -> Result<CUstream, CudaError> {
        let _current = self.enter()?;
        let mut stream = core::ptr::null_mut();
        // SAFETY: `stream` takes the answer; a context is current.
        unsafe {
            call!(
                self.functions(),
                cuStreamCreate(&mut stream, STREAM_NON_BLOCKING)
            )?;
        }
        Ok(stream)
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Device").field(&self.inner.ordinal).finish()
    }
}

impl Inner {
    fn enter(&self) -> Result<Current<'_>, CudaError> {
        let relaxed = Relaxed::new(&self.functions)?;
        // SAFETY: the context is retained until this value goes.
        unsafe { call!(&*self.functions, cuCtxPushCurrent_v2(self.context))? };
        Ok(Current {
            inner: self,
            _relaxed: relaxed,
        })
    }

    fn note_lost(&self, what: &'static str, len_bytes: u64, cause: &dyn fmt::Display) {
        self.lost.fetch_add(1, Ordering::Relaxed);
        self.lost_bytes.fetch_add(len_bytes, Ordering::Relaxed);
        tracing::error!(
            device = self.ordinal,
            what,
            len_bytes,
            cause = %cause,
            "something is never given back to the driver"
        );
    }

    /// Gives back what was kept for reuse.
    fn clear(&self) -> Result<(), CudaError> {
        let _current = self.enter()?;
        for event in lock(&self.idle_events).drain(..) {
            // SAFETY: it was made by the driver, and is nobody's but ours.
            let result = unsafe { call!(&*self.functions, cuEventDestroy_v2(event)) };
            result.unwrap_or_else(|error| self.note_lost("event", 0, &error));
        }
        for buffer in lock(&self.idle_buffers).drain(..) {
            // SAFETY: as above; only buffers that no copy touches are kept.
            let result = unsafe { call!(&*self.functions, cuMemFreeHost(buffer.as_ptr().cast())) };
            let len = crate::stage::BUFFER_BYTES as u64;
            result.unwrap_or_else(|error| self.note_lost("staging buffer", len, &error));
        }
        for stream in lock(&self.side_streams).iter_mut().flatten() {
            let Some(stream) = stream.take() else {
                continue;
            };
            // SAFETY: as above; what copies on it holds the device, so there are none.
            let result = unsafe { call!(&*self.functions, cuStreamDestroy_v2(stream)) };
            result.unwrap_or_else(|error| self.note_lost("stream", 0, &error));
        }
        Ok(())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Err(error) = self.clear() {
            self.note_lost("context", 0, &error);
        }
        // Without it the release is tried all the same: at worst it is refused.
        let _relaxed = Relaxed::new(&self.functions);
        // SAFETY: retained when the value was made, and released once.
        let result = unsafe { call!(&*self.functions, cuDevicePrimaryCtxRelease_v2(self.number)) };
        result.unwrap_or_else(|error| self.note_lost("context", 0, &error));
    }
}

/// A context that is current for this thread until the guard goes: whoever's was current before is so again then.
pub(crate) struct Current<'a> {
    inner: &'a Inner,
    // Dropped after the context was popped.
    _relaxed: Relaxed<'a>,
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        let mut context = core::ptr::null_mut();
        // SAFETY: `context` takes the answer; the guard pushed one.
        let result = unsafe { call!(&*self.inner.functions, cuCtxPopCurrent_v2(&mut context)) };
        // The thread keeps the context as its current one, which the next call pushes again.
        result.unwrap_or_else(|error| self.inner.note_lost("current context", 0, &error));
    }
}

/// Lets this thread call, until the guard goes, what would be refused while another captures a graph, and would spoil
/// that.
struct Relaxed<'a> {
    functions: &'a Functions,
    mode_before: c_uint,
    /// The mode is the thread's, so that the guard stays on it.
    _thread: core::marker::PhantomData<*const ()>,
}

impl<'a> Relaxed<'a> {
    fn new(functions: &'a Functions) -> Result<Self, CudaError> {
        Ok(Self {
            functions,
            mode_before: exchange_capture_mode(functions, CAPTURE_RELAXED)?,
            _thread: core::marker::PhantomData,
        })
    }
}

impl Drop for Relaxed<'_> {
    fn drop(&mut self) {
        if let Err(error) = exchange_capture_mode(self.functions, self.mode_before) {
            tracing::warn!(cause = %error, "calls of this thread stay allowed while graphs are captured");
        }
    }
}

/// Sets how this thread gets on with captures of graphs; returns how it did before.
fn exchange_capture_mode(functions: &Functions, mode: c_uint) -> Result<c_uint, CudaError> {
    let mut mode = mode;
    // SAFETY: `mode` is one of the header's, and takes the answer.
    unsafe { call!(functions, cuThreadExchangeStreamCaptureMode(&mut mode))? };
    Ok(mode)
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // Nothing panics under these locks, and what they guard is consistent at every step.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn keep<T>(idle: &Mutex<Vec<T>>, most: usize, value: T) -> Option<T> {
    let mut idle = lock(idle);
    if idle.len() >= most {
        return Some(value);
    }
    idle.push(value);
    None
}

/// Numbers the threads that ask, from 0.
fn thread_number() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static NUMBER: Cell<Option<usize>> = const { Cell::new(None) };
    }
    NUMBER.with(|number| {
        number.get().unwrap_or_else(|| {
            // Relaxed: only that two threads get two numbers matters.
            let drawn = NEXT.fetch_add(1, Ordering::Relaxed);
            number.set(Some(drawn));
            drawn
        })
    })
}
