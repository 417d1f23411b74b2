//! The functions by which a test is in control. All numbers are plain; texts end with NUL.

// Exported under their own names; reads and writes what the test lends.
#![allow(unsafe_code)]

use core::ffi::{CStr, c_char};

use crate::stream::{Span, Work};
use crate::world::{CAPTURE_INVALIDATED, INVALID_VALUE, Kind, SUCCESS, Schedule, lock};

/// Forgets all blocks, streams, events, misuse, injections and counts.
#[unsafe(no_mangle)]
pub extern "C" fn fake_reset() {
    lock().reset();
}

/// How queued work gets on: 0 when told, 1 at once, else by a schedule that `seed` decides.
#[unsafe(no_mangle)]
pub extern "C" fn fake_schedule(kind: u32, seed: u64) {
    let mut world = lock();
    world.schedule = match kind {
        0 => Schedule::Manual,
        1 => Schedule::Immediate,
        _ => Schedule::Seeded(seed),
    };
    if kind == 1 {
        while world.advance_any() {}
    }
}

/// The version that the driver says it has. Drivers opened from now on see it.
#[unsafe(no_mangle)]
pub extern "C" fn fake_version(version: i32) {
    lock().version = version;
}

/// Runs up to `count` pieces of work of a stream, 0 for those of any; returns how many ran.
#[unsafe(no_mangle)]
pub extern "C" fn fake_advance(stream: u64, count: u64) -> u64 {
    let mut world = lock();
    let mut ran = 0;
    while ran < count {
        let more = match stream {
            0 => world.advance_any(),
            stream => world.advance(stream),
        };
        if !more {
            break;
        }
        ran += 1;
    }
    ran
}

/// Keeps a stream from running, whatever the schedule, or lets it go on.
#[unsafe(no_mangle)]
pub extern "C" fn fake_hold(stream: u64, held: u32) {
    let mut world = lock();
    if let Some(line) = world.lines.streams.get_mut(&stream) {
        line.held = held != 0;
    }
    if world.schedule == Schedule::Immediate {
        while world.advance_any() {}
    }
}

/// Ends a stream with an error: what is queued never ends, its events answer with the code.
#[unsafe(no_mangle)]
pub extern "C" fn fake_fail_stream(stream: u64, code: u32) {
    if let Some(line) = lock().lines.streams.get_mut(&stream) {
        line.failed = Some(code);
    }
}

/// Breaks a device: every call with its context fails with `code` from now on, and nothing that is queued ends.
#[unsafe(no_mangle)]
pub extern "C" fn fake_break_device(device: i32, code: u32) {
    lock().break_device(device, code);
}

/// Begins to capture a stream, as the calling thread: mode 0 is global, 1 thread-local, 2 relaxed.
#[unsafe(no_mangle)]
pub extern "C" fn fake_begin_capture(stream: u64, mode: u32) {
    lock().captures.begin(stream, mode);
}

/// Ends a capture, and throws the graph away. Answers with an error if the capture was spoiled.
#[unsafe(no_mangle)]
pub extern "C" fn fake_end_capture(stream: u64) -> u32 {
    match lock().captures.end(stream) {
        Some(true) => SUCCESS,
        Some(false) => CAPTURE_INVALIDATED,
        None => INVALID_VALUE,
    }
}

/// Has the `nth` call of a function from now on, and `count` - 1 more, fail with `code`. 1 is the next.
///
/// # Safety
/// `symbol` ends with NUL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_inject(symbol: *const c_char, nth: u64, count: u64, code: u32) {
    // SAFETY: the caller's promise.
    let symbol = unsafe { CStr::from_ptr(symbol) };
    let symbol = symbol.to_string_lossy().into_owned();
    lock().inject(symbol, nth, count, code);
}

/// No call is to fail any more.
#[unsafe(no_mangle)]
pub extern "C" fn fake_clear_injections() {
    lock().clear_injections();
}

/// Calls that failed by injection.
#[unsafe(no_mangle)]
pub extern "C" fn fake_injected() -> u64 {
    lock().injected
}

/// Whether recording an event is lost from now on, although the driver says that it worked.
#[unsafe(no_mangle)]
pub extern "C" fn fake_lose_records(lose: u32) {
    lock().loses_records = lose != 0;
}

/// How often a function was called.
///
/// # Safety
/// `symbol` ends with NUL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_calls(symbol: *const c_char) -> u64 {
    // SAFETY: the caller's promise.
    let symbol = unsafe { CStr::from_ptr(symbol) };
    let calls = &lock().calls;
    symbol
        .to_str()
        .ok()
        .and_then(|symbol| calls.get(symbol).copied())
        .unwrap_or(0)
}

/// Queues a kernel that reads a range, and writes `value` all over it if that is not negative.
#[unsafe(no_mangle)]
pub extern "C" fn fake_launch(stream: u64, address: u64, len: u64, value: i32) -> u32 {
    let mut world = lock();
    let span = Span { address, len };
    let found = world.resolve(span);
    let is_known = world.is_known(found);
    let is_host_address = found == span && world.is_registered(span);
    if !is_known || is_host_address {
        world.note(format!("a kernel was launched over {span:x?}"));
        return INVALID_VALUE;
    }
    let span = found;
    let value = u8::try_from(value).ok();
    world.submit(stream, Work::Kernel { span, value })
}

/// Queued pieces of work that touch a range.
#[unsafe(no_mangle)]
pub extern "C" fn fake_touching(address: u64, len: u64) -> u64 {
    let world = lock();
    let span = world.resolve(Span { address, len });
    world.lines.touching(span) as u64
}

/// Queued pieces of work.
#[unsafe(no_mangle)]
pub extern "C" fn fake_queued() -> u64 {
    let world = lock();
    let queued = world.lines.streams.values().map(|s| s.queue.len());
    queued.sum::<usize>() as u64
}

/// What is there: 0 device blocks, 1 pinned ones, 2 registered ones, 3 streams, 4 events, 5 retained contexts.
#[unsafe(no_mangle)]
pub extern "C" fn fake_live(what: u32) -> u64 {
    let world = lock();
    let blocks = |fits: fn(Kind) -> bool| world.blocks.values().filter(|b| fits(b.kind)).count();
    let count = match what {
        0 => blocks(|kind| matches!(kind, Kind::Device(_))),
        1 => blocks(|kind| kind == Kind::Pinned),
        2 => blocks(|kind| kind == Kind::Registered),
        3 => world
            .lines
            .streams
            .values()
            .filter(|s| !s.destroyed)
            .count(),
        4 => world.lines.events.values().filter(|e| !e.destroyed).count(),
        _ => world.contexts.iter().sum::<u32>() as usize,
    };
    count as u64
}

/// Writes what was noted at `index` into `text`, cut to `room` bytes and without NUL; returns its length, 0 if there is
/// no such note.
///
/// # Safety
/// `text` has room for `room` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_misuse(index: u64, text: *mut u8, room: u64) -> u64 {
    let world = lock();
    let Some(note) = world.misuse.get(index as usize) else {
        return 0;
    };
    let len = note.len().min(room as usize);
    // SAFETY: the caller promises room for that many.
    unsafe { std::ptr::copy_nonoverlapping(note.as_ptr(), text, len) };
    len as u64
}

/// Copies bytes of a block to the test.
///
/// # Safety
/// `buffer` has room for `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_peek(address: u64, len: u64, buffer: *mut u8) -> u32 {
    match len {
        0 => SUCCESS,
        len => lock().peek(Span { address, len }, buffer, false),
    }
}

/// Copies bytes of the test to a block.
///
/// # Safety
/// `buffer` has `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_poke(address: u64, len: u64, buffer: *const u8) -> u32 {
    match len {
        0 => SUCCESS,
        len => lock().peek(Span { address, len }, buffer.cast_mut(), true),
    }
}
