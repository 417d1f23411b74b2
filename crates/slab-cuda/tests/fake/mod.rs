//! The fake driver, loaded in place of a real one, and in the hands of a test.
#![allow(dead_code, reason = "each test target uses its own part")]

use std::ffi::{CStr, c_char};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use libloading::Library;
use slab_cuda::{Device, Driver, Stream};

/// Its soname is libcuda.so, so that whoever asks the loader for that name from now on gets it, a real driver or not.
fn library() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        // SAFETY: our own library, whose initialisers do nothing.
        unsafe { Library::new(cuda_fake::library_path()) }.expect("the fake driver can be loaded")
    })
}

/// Calls a function of the fake.
macro_rules! fake {
    ($name:ident($($arg:expr => $ty:ty),*) -> $answer:ty) => {{
        type Function = unsafe extern "C" fn($($ty),*) -> $answer;
        // SAFETY: the function has this signature, in `cuda_fake::control`, and gets what it asks for: texts that end
        // with NUL, and buffers of the length that is named.
        unsafe {
            let function = library().get::<Function>(stringify!($name)).expect(stringify!($name));
            function($($arg),*)
        }
    }};
}

/// The fake driver for one test at a time. Dropping it asserts that nothing was misused, and that nothing is left.
pub(crate) struct Fake {
    _one_at_a_time: MutexGuard<'static, ()>,
    expects_lost: bool,
}

/// What a capture is in the way of: potentially unsafe calls of all threads, of its own, of none.
#[derive(Clone, Copy, Debug)]
pub(crate) enum CaptureMode {
    Global = 0,
    ThreadLocal,
    Relaxed,
}

/// What can be counted.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Live {
    DeviceBlocks = 0,
    PinnedBlocks,
    RegisteredBlocks,
    Streams,
    Events,
    Contexts,
}

const ALL: [Live; 6] = [
    Live::DeviceBlocks,
    Live::PinnedBlocks,
    Live::RegisteredBlocks,
    Live::Streams,
    Live::Events,
    Live::Contexts,
];

impl Fake {
    /// Nothing runs until it is told to.
    pub(crate) fn manual() -> Self {
        static ONE: Mutex<()> = Mutex::new(());
        let one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        fake!(fake_reset() -> ());
        fake!(fake_schedule(0 => u32, 0 => u64) -> ());
        Self {
            _one_at_a_time: one,
            expects_lost: false,
        }
    }

    /// Everything runs at once.
    pub(crate) fn immediate() -> Self {
        let fake = Self::manual();
        fake!(fake_schedule(1 => u32, 0 => u64) -> ());
        fake
    }

    /// Every call moves a few random streams on.
    pub(crate) fn seeded(seed: u64) -> Self {
        let fake = Self::manual();
        fake.run_seeded(seed);
        fake
    }

    pub(crate) fn run_seeded(&self, seed: u64) {
        fake!(fake_schedule(2 => u32, seed => u64) -> ());
    }

    pub(crate) fn run_manually(&self) {
        fake!(fake_schedule(0 => u32, 0 => u64) -> ());
    }

    pub(crate) fn run_immediately(&self) {
        run_immediately();
    }

    pub(crate) fn clear_injections(&self) {
        fake!(fake_clear_injections() -> ());
    }

    pub(crate) fn driver(&self) -> Driver {
        Driver::load().expect("the fake driver starts")
    }

    pub(crate) fn device(&self) -> Device {
        self.driver().device(0).expect("the fake has devices")
    }

    pub(crate) fn set_version(&self, version: i32) {
        fake!(fake_version(version => i32) -> ());
    }

    /// Runs up to `count` pieces of work of a stream.
    pub(crate) fn advance(&self, stream: &Stream, count: u64) -> u64 {
        let handle = stream.as_raw().addr() as u64;
        fake!(fake_advance(handle => u64, count => u64) -> u64)
    }

    /// Runs up to `count` pieces of work, the oldest stream's first.
    pub(crate) fn advance_any(&self, count: u64) -> u64 {
        fake!(fake_advance(0 => u64, count => u64) -> u64)
    }

    /// Runs all that can run.
    pub(crate) fn advance_all(&self) -> u64 {
        self.advance_any(u64::MAX)
    }

    /// Keeps a stream from running, whatever the schedule, or lets it go on.
    pub(crate) fn hold(&self, stream: &Stream, held: bool) {
        let handle = stream.as_raw().addr() as u64;
        fake!(fake_hold(handle => u64, u32::from(held) => u32) -> ());
    }

    pub(crate) fn fail_stream(&self, stream: &Stream, code: u32) {
        let handle = stream.as_raw().addr() as u64;
        fake!(fake_fail_stream(handle => u64, code => u32) -> ());
    }

    /// Breaks a device for good: every call for it fails from now on, and nothing that is queued ends.
    pub(crate) fn break_device(&self, device: &Device, code: u32) {
        fake!(fake_break_device(device.ordinal() as i32 => i32, code => u32) -> ());
    }

    /// This thread captures a graph from the stream, until the end of which is asked.
    pub(crate) fn begin_capture(&self, stream: &Stream, mode: CaptureMode) {
        let handle = stream.as_raw().addr() as u64;
        fake!(fake_begin_capture(handle => u64, mode as u32 => u32) -> ());
    }

    /// Ends a capture. Says whether nothing has spoiled it.
    pub(crate) fn end_capture(&self, stream: &Stream) -> bool {
        let handle = stream.as_raw().addr() as u64;
        fake!(fake_end_capture(handle => u64) -> u32) == 0
    }

    /// Calls the driver past the crate: allocates memory with no context. Returns the code.
    pub(crate) fn allocate_directly(&self) -> u32 {
        let mut address = 0;
        fake!(cuMemAlloc_v2(&mut address => *mut u64, 16 => usize) -> u32)
    }

    /// The `nth` call from now on fails.
    pub(crate) fn inject(&self, symbol: &CStr, nth: u64, code: u32) {
        self.inject_many(symbol, nth, 1, code);
    }

    pub(crate) fn inject_many(&self, symbol: &CStr, nth: u64, count: u64, code: u32) {
        fake!(
            fake_inject(symbol.as_ptr() => *const c_char, nth => u64, count => u64, code => u32) -> ()
        );
    }

    pub(crate) fn injected(&self) -> u64 {
        fake!(fake_injected() -> u64)
    }

    pub(crate) fn lose_records(&self, lose: bool) {
        fake!(fake_lose_records(u32::from(lose) => u32) -> ());
    }

    pub(crate) fn calls(&self, symbol: &CStr) -> u64 {
        fake!(fake_calls(symbol.as_ptr() => *const c_char) -> u64)
    }

    /// Submits a kernel that reads a range, and writes `value` all over it if there is one.
    pub(crate) fn launch(&self, stream: &Stream, address: u64, len: u64, value: Option<u8>) {
        let code = self.try_launch(stream, address, len, value);
        assert_eq!(code, 0, "the launch of a kernel");
    }

    /// As [`launch`](Self::launch), on a stream that may have failed: returns the code.
    pub(crate) fn try_launch(
        &self,
        stream: &Stream,
        address: u64,
        len: u64,
        value: Option<u8>,
    ) -> u32 {
        let handle = stream.as_raw().addr() as u64;
        let value = value.map_or(-1, i32::from);
        fake!(fake_launch(handle => u64, address => u64, len => u64, value => i32) -> u32)
    }

    /// Queued pieces of work that touch a range.
    pub(crate) fn touching(&self, address: u64, len: u64) -> u64 {
        fake!(fake_touching(address => u64, len => u64) -> u64)
    }

    pub(crate) fn queued(&self) -> u64 {
        fake!(fake_queued() -> u64)
    }

    pub(crate) fn live(&self, what: Live) -> u64 {
        fake!(fake_live(what as u32 => u32) -> u64)
    }

    pub(crate) fn peek(&self, address: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let code = fake!(
            fake_peek(address => u64, len as u64 => u64, bytes.as_mut_ptr() => *mut u8) -> u32
        );
        assert_eq!(code, 0, "{len} bytes at {address:#x}");
        bytes
    }

    pub(crate) fn poke(&self, address: u64, bytes: &[u8]) {
        let code = fake!(
            fake_poke(address => u64, bytes.len() as u64 => u64, bytes.as_ptr() => *const u8) -> u32
        );
        assert_eq!(code, 0, "{} bytes at {address:#x}", bytes.len());
    }

    pub(crate) fn misuse(&self) -> Vec<String> {
        let mut notes = Vec::new();
        loop {
            let mut text = vec![0; 500];
            let len = fake!(
                fake_misuse(notes.len() as u64 => u64, text.as_mut_ptr() => *mut u8, 500 => u64) -> u64
            );
            if len == 0 {
                return notes;
            }
            text.truncate(len as usize);
            notes.push(String::from_utf8_lossy(&text).into_owned());
        }
    }

    /// The test has something lost on purpose: what is left at its end is its own to check.
    pub(crate) fn expect_lost(&mut self) {
        self.expects_lost = true;
    }
}

/// Runs everything at once from now on.
pub(crate) fn run_immediately() {
    fake!(fake_schedule(1 => u32, 0 => u64) -> ());
}

impl Drop for Fake {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        assert_eq!(self.misuse(), [""; 0]);
        for what in ALL {
            let left = self.live(what);
            assert!(self.expects_lost || left == 0, "{left} {what:?} are left");
        }
    }
}

/// Longer than anything a test waits for; reaching it is a failure.
pub(crate) fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

/// Bytes that differ from seed to seed and from offset to offset.
pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// Wraps memory of the device that somebody else has allocated.
pub(crate) fn foreign_slab(
    device: &Device,
    address: u64,
    len: u64,
    keep: impl std::any::Any + Send + Sync,
) -> Result<slab_cuda::DeviceSlab, slab_cuda::CudaError> {
    // SAFETY: `keep` owns as much memory there, or the range is refused.
    unsafe { slab_cuda::DeviceSlab::from_raw(device, address, len, keep) }
}

/// Wraps a stream that somebody else has made.
pub(crate) fn foreign_stream(
    device: &Device,
    raw: *mut std::ffi::c_void,
    keep: impl std::any::Any + Send + Sync,
) -> Result<Stream, slab_cuda::CudaError> {
    // SAFETY: the handle is that of a default stream, or of one that the test holds longer than this.
    unsafe { Stream::from_raw(device, raw, keep) }
}
