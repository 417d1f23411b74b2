//! Captures of graphs: streams whose work is put down instead of run, and the calls that a capture is in the way of.
//!
//! As CUDA has it, a call that may be unsafe during a capture is refused, and spoils the capture, if the calling thread
//! captures in another mode than the relaxed one, or if its own mode is global and so is another thread's capture. Of
//! the functions here, all may be unsafe that are not named in [`is_harmless`]: more than of a real driver's.

use std::cell::Cell;
use std::thread::ThreadId;

/// The modes of captures, and of threads.
const GLOBAL: u32 = 0;
const RELAXED: u32 = 2;

thread_local! {
    static MODE: Cell<u32> = const { Cell::new(GLOBAL) };
}

/// Sets the mode of this thread; returns the one before.
pub(crate) fn exchange_mode(mode: u32) -> Option<u32> {
    (mode <= RELAXED).then(|| MODE.replace(mode))
}

fn is_harmless(symbol: &str) -> bool {
    matches!(
        symbol,
        "cuInit"
            | "cuDriverGetVersion"
            | "cuGetProcAddress_v2"
            | "cuDeviceGet"
            | "cuDeviceGetCount"
            | "cuDeviceGetName"
            | "cuDeviceTotalMem_v2"
            | "cuCtxPushCurrent_v2"
            | "cuCtxPopCurrent_v2"
            | "cuStreamIsCapturing"
            | "cuThreadExchangeStreamCaptureMode"
    )
}

#[derive(Debug)]
struct Capture {
    stream: u64,
    mode: u32,
    thread: ThreadId,
    spoiled: bool,
}

/// All captures under way.
#[derive(Debug, Default)]
pub(crate) struct Captures(Vec<Capture>);

impl Captures {
    /// The calling thread begins to capture what is submitted to a stream.
    pub(crate) fn begin(&mut self, stream: u64, mode: u32) {
        self.0.push(Capture {
            stream,
            mode,
            thread: std::thread::current().id(),
            spoiled: false,
        });
    }

    /// Ends the capture of a stream. Says whether it is whole; nothing if there is none.
    pub(crate) fn end(&mut self, stream: u64) -> Option<bool> {
        let at = self.0.iter().position(|c| c.stream == stream)?;
        Some(!self.0.swap_remove(at).spoiled)
    }

    /// 0 for a stream that is not captured, 1 for one that is, 2 where that is spoiled.
    pub(crate) fn status(&self, stream: u64) -> u32 {
        let capture = self.0.iter().find(|capture| capture.stream == stream);
        capture.map_or(0, |capture| 1 + u32::from(capture.spoiled))
    }

    pub(crate) fn spoil(&mut self, stream: u64) {
        for capture in self.0.iter_mut().filter(|c| c.stream == stream) {
            capture.spoiled = true;
        }
    }

    /// Whether a call of this thread is refused. That spoils what is in its way.
    pub(crate) fn refuse(&mut self, symbol: &str) -> bool {
        let mode = MODE.get();
        if mode == RELAXED || is_harmless(symbol) {
            return false;
        }
        let own = std::thread::current().id();
        let mut refused = false;
        for capture in &mut self.0 {
            let is_in_the_way = match capture.thread == own {
                true => capture.mode != RELAXED,
                false => capture.mode == GLOBAL && mode == GLOBAL,
            };
            capture.spoiled |= is_in_the_way;
            refused |= is_in_the_way;
        }
        refused
    }
}
