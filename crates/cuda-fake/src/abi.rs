//! The functions of the driver, with the signatures of CUDA's `cuda.h`.

// The C interface: writes through pointers that the caller lends.
#![allow(unsafe_code)]
#![allow(
    non_snake_case,
    clippy::missing_safety_doc,
    reason = "the names are CUDA's, and so are the obligations: pointers lead to what the header says"
)]

use core::ffi::{c_char, c_int, c_uint, c_void};
use std::cell::RefCell;

use crate::capture::exchange_mode;
use crate::stream::{Event, Span, Stream, Work};
use crate::world::{
    CAPTURED_EVENT, DEVICE_BYTES, DEVICES, Held, INVALID_CONTEXT, INVALID_DEVICE, INVALID_HANDLE,
    INVALID_VALUE, Kind, NOT_READY, OUT_OF_MEMORY, SUCCESS, World, lock,
};

type Handle = *mut c_void;

// The flags that slab-cuda has reasons for.
const PORTABLE: c_uint = 1;
const DEVICE_MAP: c_uint = 2;
const STREAM_NON_BLOCKING: c_uint = 1;
const EVENT_DISABLE_TIMING: c_uint = 2;

thread_local! {
    /// Devices of the contexts that are current, the innermost last.
    static CURRENT: RefCell<Vec<i32>> = const { RefCell::new(Vec::new()) };
}

/// The handle of a device's primary context.
fn context_of(device: i32) -> u64 {
    0xC0 + device as u64
}

fn pointer(handle: u64) -> Handle {
    std::ptr::without_provenance_mut(handle as usize)
}

fn number(handle: Handle) -> u64 {
    handle.addr() as u64
}

/// Writes a result, where the caller asked for it.
unsafe fn put<T>(place: *mut T, value: T) -> u32 {
    if place.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: the caller lends a place for it.
    unsafe { place.write(value) };
    SUCCESS
}

/// Counts the call; the world, or the code that it is to answer.
fn enter(symbol: &str) -> Result<Held, u32> {
    let mut world = lock();
    world.enter(symbol)?;
    Ok(world)
}

/// As [`enter`], for calls that need a current context: the world and the context's device.
fn enter_context(symbol: &str) -> Result<(Held, i32), u32> {
    let mut world = enter(symbol)?;
    match CURRENT.with_borrow(|current| current.last().copied()) {
        Some(device) => match world.broken[device as usize] {
            Some(code) if symbol != "cuCtxPopCurrent_v2" => Err(code),
            _ => Ok((world, device)),
        },
        None => {
            world.note(format!("{symbol}: no current context"));
            Err(INVALID_CONTEXT)
        }
    }
}

/// Notes flags that nobody has a reason for, so that none is changed unseen.
fn check_flags(world: &mut World, call: &str, flags: c_uint, expected: c_uint) {
    if flags != expected {
        world.note(format!("{call}: flags {flags}, not {expected}"));
    }
}

fn code(result: Result<u32, u32>) -> u32 {
    result.unwrap_or_else(|code| code)
}

/// CUDA's function of that name.
#[unsafe(no_mangle)]
pub extern "C" fn cuInit(flags: c_uint) -> c_uint {
    let mut world = match enter("cuInit") {
        Ok(world) => world,
        Err(code) => return code,
    };
    if flags != 0 {
        return INVALID_VALUE;
    }
    world.initialised |= world.init_code == 0;
    world.init_code
}

/// CUDA's function of that name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> c_uint {
    code(enter("cuDriverGetVersion").map(|world| {
        // SAFETY: the caller lends the place.
        unsafe { put(version, world.version) }
    }))
}

/// CUDA's function of that name. Knows the codes that tests use.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(error: c_uint, name: *mut *const c_char) -> c_uint {
    let text = match error {
        0 => c"CUDA_SUCCESS",
        1 => c"CUDA_ERROR_INVALID_VALUE",
        2 => c"CUDA_ERROR_OUT_OF_MEMORY",
        3 => c"CUDA_ERROR_NOT_INITIALIZED",
        34 => c"CUDA_ERROR_STUB_LIBRARY",
        100 => c"CUDA_ERROR_NO_DEVICE",
        101 => c"CUDA_ERROR_INVALID_DEVICE",
        201 => c"CUDA_ERROR_INVALID_CONTEXT",
        400 => c"CUDA_ERROR_INVALID_HANDLE",
        600 => c"CUDA_ERROR_NOT_READY",
        700 => c"CUDA_ERROR_ILLEGAL_ADDRESS",
        719 => c"CUDA_ERROR_LAUNCH_FAILED",
        999 => c"CUDA_ERROR_UNKNOWN",
        _ => {
            // SAFETY: the caller lends the place.
            unsafe { put(name, std::ptr::null()) };
            return INVALID_VALUE;
        }
    };
    // SAFETY: the caller lends the place.
    unsafe { put(name, text.as_ptr()) }
}

/// CUDA's function of that name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> c_uint {
    // SAFETY: the caller lends the place.
    code(enter("cuDeviceGetCount").map(|_| unsafe { put(count, DEVICES) }))
}

/// CUDA's function of that name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> c_uint {
    code(enter("cuDeviceGet").map(|_| match ordinal {
        // SAFETY: the caller lends the place.
        0..DEVICES => unsafe { put(device, ordinal) },
        _ => INVALID_DEVICE,
    }))
}

/// CUDA's function of that name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, len: c_int, device: c_int) -> c_uint {
    code(enter("cuDeviceGetName").map(|_| {
        let text = format!("fake device {device}");
        let room = (len.max(1) - 1) as usize;
        for (at, byte) in text.bytes().take(room).chain([0]).enumerate() {
            // SAFETY: the caller lends `len` places, the last of which takes NUL at most.
            unsafe { put(name.add(at), byte as c_char) };
        }
        SUCCESS
    }))
}

/// CUDA's function of that name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) -> c_uint {
    code(enter("cuDeviceTotalMem_v2").map(|_| match device {
        // SAFETY: the caller lends the place.
        0..DEVICES => unsafe { put(bytes, DEVICE_BYTES as usize) },
        _ => INVALID_DEVICE,
    }))
}

/// CUDA's function of that name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut Handle, device: c_int) -> c_uint {
    code(
        enter("cuDevicePrimaryCtxRetain").map(|mut world| match device {
            0..DEVICES => {
                world.contexts[device as usize] += 1;
                // SAFETY: the caller lends the place.
                unsafe { put(context, pointer(context_of(device))) }
            }
            _ => INVALID_DEVICE,
        }),
    )
}

/// CUDA's function of that name.
#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> c_uint {
    code(enter("cuDevicePrimaryCtxRelease_v2").map(|mut world| {
        let count = world.contexts.get_mut(device as usize);
        match count {
            Some(count) if *count > 0 => {
                *count -= 1;
                if *count == 0 {
                    world.end_context(device);
                }
                SUCCESS
            }
            _ => {
                world.note(format!("device {device} was not retained"));
                INVALID_CONTEXT
            }
        }
    }))
}

/// CUDA's function of that name.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxPushCurrent_v2(context: Handle) -> c_uint {
    code(enter("cuCtxPushCurrent_v2").map(|mut world| {
        let device = (0..DEVICES).find(|device| context_of(*device) == number(context));
        match device {
            Some(device) if world.contexts[device as usize] > 0 => {
                CURRENT.with_borrow_mut(|current| current.push(device));
                SUCCESS
            }
            _ => {
                world.note(format!("no context {context:p}"));
                INVALID_CONTEXT
            }
        }
    }))
}

/// CUDA's function of that name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxPopCurrent_v2(context: *mut Handle) -> c_uint {
    code(enter_context("cuCtxPopCurrent_v2").map(|(_, device)| {
        CURRENT.with_borrow_mut(Vec::pop);
        // SAFETY: the caller lends the place.
        unsafe { put(context, pointer(context_of(device))) }
    }))
}

/// CUDA's function of that name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> c_uint {
    code(enter_context("cuMemGetInfo_v2").map(|(world, device)| {
        // SAFETY: the caller lends the places.
        unsafe {
            put(free, world.free_bytes(device) as usize);
            put(total, DEVICE_BYTES as usize)
        }
    }))
}

/// CUDA's function of that name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(address: *mut u64, len: usize) -> c_uint {
    code(enter_context("cuMemAlloc_v2").map(|(mut world, device)| {
        if len == 0 {
            return INVALID_VALUE;
        }
        match world.allocate(Kind::Device(device), len as u64) {
            // SAFETY: the caller lends the place.
            Some(found) => unsafe { put(address, found) },
            None => OUT_OF_MEMORY,
        }
    }))
}

/// CUDA's function of that name.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemFree_v2(address: u64) -> c_uint {
    code(enter_context("cuMemFree_v2").map(|(mut world, _)| {
        let fits = |kind| matches!(kind, Kind::Device(_));
        world.free(address, fits, "cuMemFree_v2")
    }))
}

/// CUDA's function of that name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostAlloc(place: *mut Handle, len: usize, flags: c_uint) -> c_uint {
    code(enter_context("cuMemHostAlloc").map(|(mut world, _)| {
        check_flags(&mut world, "cuMemHostAlloc", flags, PORTABLE);
        if len == 0 {
            return INVALID_VALUE;
        }
        match world.allocate(Kind::Pinned, len as u64) {
            Some(address) => {
                let address = std::ptr::with_exposed_provenance_mut(address as usize);
                // SAFETY: the caller lends the place.
                unsafe { put(place, address) }
            }
            None => OUT_OF_MEMORY,
        }
    }))
}

/// CUDA's function of that name.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemFreeHost(address: Handle) -> c_uint {
    code(enter_context("cuMemFreeHost").map(|(mut world, _)| {
        let fits = |kind| kind == Kind::Pinned;
        world.free(number(address), fits, "cuMemFreeHost")
    }))
}

/// CUDA's function of that name.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostRegister_v2(address: Handle, len: usize, flags: c_uint) -> c_uint {
    code(enter_context("cuMemHostRegister_v2").map(|(mut world, _)| {
        let span = Span {
            address: address.expose_provenance() as u64,
            len: len as u64,
        };
        let expected = PORTABLE | DEVICE_MAP;
        check_flags(&mut world, "cuMemHostRegister_v2", flags, expected);
        if len == 0 || address.is_null() {
            return INVALID_VALUE;
        }
        if world.is_partly_known(span) {
            return 712; // CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
        }
        world.register(span);
        SUCCESS
    }))
}

/// CUDA's function of that name. Registered memory is elsewhere for kernels; other memory is where it is.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostGetDevicePointer_v2(
    place: *mut u64,
    address: Handle,
    flags: c_uint,
) -> c_uint {
    let entered = enter_context("cuMemHostGetDevicePointer_v2");
    code(
        entered.map(|(world, _)| match world.blocks.get(&number(address)) {
            // SAFETY: the caller lends the place.
            Some(block) if flags == 0 => unsafe {
                put(place, block.alias.unwrap_or(number(address)))
            },
            _ => INVALID_VALUE,
        }),
    )
}

/// CUDA's function of that name.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostUnregister(address: Handle) -> c_uint {
    code(enter_context("cuMemHostUnregister").map(|(mut world, _)| {
        let fits = |kind| kind == Kind::Registered;
        world.free(number(address), fits, "cuMemHostUnregister")
    }))
}

/// CUDA's function of that name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreate(stream: *mut Handle, flags: c_uint) -> c_uint {
    code(enter_context("cuStreamCreate").map(|(mut world, device)| {
        check_flags(&mut world, "cuStreamCreate", flags, STREAM_NON_BLOCKING);
        let handle = world.handle();
        let line = Stream {
            device,
            ..Stream::default()
        };
        world.lines.streams.insert(handle, line);
        // SAFETY: the caller lends the place.
        unsafe { put(stream, pointer(handle)) }
    }))
}

/// CUDA's function of that name. What is queued still runs.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamDestroy_v2(stream: Handle) -> c_uint {
    code(enter_context("cuStreamDestroy_v2").map(|(mut world, _)| {
        let handle = number(stream);
        let line = world.lines.streams.get_mut(&handle);
        match line.filter(|line| !line.destroyed) {
            Some(line) => {
                line.destroyed = true;
                if line.queue.is_empty() {
                    world.lines.streams.remove(&handle);
                }
                SUCCESS
            }
            None => {
                world.note(format!("cuStreamDestroy_v2: no stream {handle:#x}"));
                INVALID_HANDLE
            }
        }
    }))
}

/// CUDA's function of that name.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamWaitEvent(stream: Handle, event: Handle, _flags: c_uint) -> c_uint {
    code(enter_context("cuStreamWaitEvent").map(|(mut world, _)| {
        let event = number(event);
        match world.lines.event(event).map(|event| event.recorded) {
            Some(round) => world.submit(number(stream), Work::Wait { event, round }),
            None => {
                world.note(format!("cuStreamWaitEvent: no event {event:#x}"));
                INVALID_HANDLE
            }
        }
    }))
}

/// CUDA's function of that name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventCreate(event: *mut Handle, flags: c_uint) -> c_uint {
    code(enter_context("cuEventCreate").map(|(mut world, device)| {
        check_flags(&mut world, "cuEventCreate", flags, EVENT_DISABLE_TIMING);
        let handle = world.handle();
        let made = Event {
            device,
            ..Event::default()
        };
        world.lines.events.insert(handle, made);
        // SAFETY: the caller lends the place.
        unsafe { put(event, pointer(handle)) }
    }))
}

/// CUDA's function of that name.
#[unsafe(no_mangle)]
pub extern "C" fn cuEventDestroy_v2(event: Handle) -> c_uint {
    code(enter_context("cuEventDestroy_v2").map(|(mut world, _)| {
        let event = number(event);
        match world.lines.event(event) {
            Some(known) if known.is_pending() => known.destroyed = true,
            Some(_) => drop(world.lines.events.remove(&event)),
            None => {
                world.note(format!("cuEventDestroy_v2: no event {event:#x}"));
                return INVALID_HANDLE;
            }
        }
        SUCCESS
    }))
}

/// CUDA's function of that name.
#[unsafe(no_mangle)]
pub extern "C" fn cuEventRecord(event: Handle, stream: Handle) -> c_uint {
    code(enter_context("cuEventRecord").map(|(mut world, _)| {
        let (event, stream) = (number(event), number(stream));
        let device = world.lines.streams.get(&stream).map(|s| s.device);
        let Some(known) = world.lines.event(event) else {
            world.note(format!("cuEventRecord: no event {event:#x}"));
            return INVALID_HANDLE;
        };
        if device.is_some_and(|device| device != known.device) {
            return INVALID_HANDLE;
        }
        let was_pending = known.is_pending();
        if world.loses_records {
            return SUCCESS;
        }
        let captured = world.captures.status(stream) != 0;
        if let Some(known) = world.lines.event(event) {
            known.captured = captured;
        }
        if captured {
            return SUCCESS;
        }
        let round = match world.lines.event(event) {
            Some(known) => {
                known.recorded += 1;
                known.stream = stream;
                known.recorded
            }
            None => return INVALID_HANDLE,
        };
        if was_pending {
            world.note(format!("cuEventRecord: {event:#x} is pending"));
        }
        world.submit(stream, Work::Record { event, round })
    }))
}

/// CUDA's function of that name.
#[unsafe(no_mangle)]
pub extern "C" fn cuEventQuery(event: Handle) -> c_uint {
    code(enter_context("cuEventQuery").map(|(mut world, _)| {
        let handle = number(event);
        let Some(event) = world.lines.event(handle) else {
            world.note(format!("cuEventQuery: no event {handle:#x}"));
            return INVALID_HANDLE;
        };
        if event.captured {
            return CAPTURED_EVENT;
        }
        if !event.is_pending() {
            return SUCCESS;
        }
        let stream = event.stream;
        let stream = world.lines.streams.get(&stream);
        stream.and_then(|stream| stream.failed).unwrap_or(NOT_READY)
    }))
}

/// CUDA's function of that name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamIsCapturing(stream: Handle, status: *mut c_uint) -> c_uint {
    let entered = enter_context("cuStreamIsCapturing");
    // SAFETY: the caller lends the place.
    code(entered.map(|(world, _)| unsafe { put(status, world.captures.status(number(stream))) }))
}

/// CUDA's function of that name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuThreadExchangeStreamCaptureMode(mode: *mut c_uint) -> c_uint {
    code(enter("cuThreadExchangeStreamCaptureMode").map(|_| {
        if mode.is_null() {
            return INVALID_VALUE;
        }
        // SAFETY: the caller lends the place, with the new mode in it.
        let before = exchange_mode(unsafe { mode.read() });
        // SAFETY: as above.
        before.map_or(INVALID_VALUE, |before| unsafe { put(mode, before) })
    }))
}

/// Queues one copy, if the driver knows all its bytes and need not wait for it.
fn copy(world: &mut World, call: &str, target: u64, source: u64, len: u64, stream: u64) -> u32 {
    let target = Span {
        address: target,
        len,
    };
    let source = Span {
        address: source,
        len,
    };
    for span in [target, source] {
        if !world.is_known(span) {
            world.note(format!("{call}: {span:x?} is not inside of an allocation"));
            return INVALID_VALUE;
        }
    }
    if world.is_host(target) && world.is_host(source) {
        world.note(format!(
            "{call}: from host memory to host memory, which the caller waits for"
        ));
    }
    world.submit(stream, Work::Copy { target, source })
}

/// CUDA's function of that name.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyAsync(target: u64, source: u64, len: usize, stream: Handle) -> c_uint {
    code(enter_context("cuMemcpyAsync").map(|(mut world, _)| {
        let stream = number(stream);
        copy(
            &mut world,
            "cuMemcpyAsync",
            target,
            source,
            len as u64,
            stream,
        )
    }))
}

/// The attributes of a batched copy: order of access to the source, and two hints of a location.
#[repr(C)]
pub struct CopyAttributes {
    access_order: c_uint,
    source_hint: [c_int; 2],
    target_hint: [c_int; 2],
    flags: c_uint,
}

/// What both forms have in common. Returns the index of the copy that was refused, if one was.
#[allow(clippy::too_many_arguments, reason = "it has CUDA's")]
unsafe fn copy_batch(
    call: &str,
    targets: *const u64,
    sources: *const u64,
    lens: *const usize,
    count: usize,
    attributes: *const CopyAttributes,
    indices: *const usize,
    attribute_count: usize,
    stream: Handle,
) -> Result<(), (u32, Option<usize>)> {
    let (mut world, _) = enter_context(call).map_err(|code| (code, None))?;
    if count == 0 || attribute_count != 1 || stream.is_null() {
        return Err((INVALID_VALUE, None));
    }
    // SAFETY: the caller lends as many attributes and indices as it says, which is one of each.
    let (order, first) = unsafe { ((*attributes).access_order, *indices) };
    // Only sources that are read in the order of the stream are known to hold what earlier work wrote.
    if order != 1 || first != 0 {
        world.note(format!("{call}: access order {order} from copy {first} on"));
        return Err((INVALID_VALUE, None));
    }
    for at in 0..count {
        // SAFETY: the caller lends three arrays of `count`.
        let (target, source, len) =
            unsafe { (*targets.add(at), *sources.add(at), *lens.add(at) as u64) };
        let result = match len {
            0 => INVALID_VALUE,
            len => copy(&mut world, call, target, source, len, number(stream)),
        };
        if result != SUCCESS {
            return Err((result, Some(at)));
        }
    }
    Ok(())
}

/// CUDA's `cuMemcpyBatchAsync` of 12.8. Reached by [`cuGetProcAddress_v2`].
pub unsafe extern "C" fn copy_batch_v1(
    targets: *const u64,
    sources: *const u64,
    lens: *const usize,
    count: usize,
    attributes: *const CopyAttributes,
    indices: *const usize,
    attribute_count: usize,
    failed: *mut usize,
    stream: Handle,
) -> c_uint {
    // SAFETY: passed on as it came.
    let result = unsafe {
        copy_batch(
            "cuMemcpyBatchAsync",
            targets,
            sources,
            lens,
            count,
            attributes,
            indices,
            attribute_count,
            stream,
        )
    };
    match result {
        Ok(()) => SUCCESS,
        Err((code, at)) => {
            // SAFETY: the caller lends the place.
            unsafe { put(failed, at.unwrap_or(usize::MAX)) };
            code
        }
    }
}

/// CUDA's `cuMemcpyBatchAsync` of 13.0. Reached by [`cuGetProcAddress_v2`].
pub unsafe extern "C" fn copy_batch_v2(
    targets: *const u64,
    sources: *const u64,
    lens: *const usize,
    count: usize,
    attributes: *const CopyAttributes,
    indices: *const usize,
    attribute_count: usize,
    stream: Handle,
) -> c_uint {
    // SAFETY: passed on as it came.
    let result = unsafe {
        copy_batch(
            "cuMemcpyBatchAsync_v2",
            targets,
            sources,
            lens,
            count,
            attributes,
            indices,
            attribute_count,
            stream,
        )
    };
    result.map_or_else(|(code, _)| code, |()| SUCCESS)
}

/// CUDA's function of that name. Knows `cuMemcpyBatchAsync` alone, in the form of the version asked for.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetProcAddress_v2(
    symbol: *const c_char,
    place: *mut *mut c_void,
    version: c_int,
    _flags: u64,
    status: *mut c_uint,
) -> c_uint {
    code(enter("cuGetProcAddress_v2").map(|world| {
        // SAFETY: the caller passes a text that ends with NUL.
        let symbol = unsafe { core::ffi::CStr::from_ptr(symbol) };
        let is_batch = symbol == c"cuMemcpyBatchAsync";
        let (found, answer): (*mut c_void, c_uint) = match version.min(world.version) {
            13_000.. if is_batch => (copy_batch_v2 as *mut c_void, 0),
            12_080.. if is_batch => (copy_batch_v1 as *mut c_void, 0),
            _ if is_batch => (std::ptr::null_mut(), 2),
            _ => (std::ptr::null_mut(), 1),
        };
        // SAFETY: the caller lends the places.
        unsafe {
            put(place, found);
            if !status.is_null() {
                put(status, answer);
            }
        }
        SUCCESS
    }))
}
