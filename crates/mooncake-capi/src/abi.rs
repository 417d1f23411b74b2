//! The functions of the header.
//!
//! Each checks what it was given, looks up handle, batch and segment, and turns whatever comes of it into
//! the header's code. The safety of each is that of C: pointers that are not null lead where the header
//! says, and memory stays as long as it says.
// Reads the caller's structures and writes the caller's buffers.
#![allow(unsafe_code)]
#![allow(non_snake_case, reason = "the names of the header")]

use std::ffi::{c_char, c_int, c_void};
use std::fmt;
use std::io::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use mooncake_sys as sys;
use mooncake_transport::{Access, Engine as _, Op, Segment, Task};
use slab_memory::ForeignMemory;

use crate::batches::{self, Message, State};
use crate::engine::Engine;
use crate::{engines, listen, notices, text};

/// Says on standard error why a call failed.
pub(crate) fn complain(what: &fmt::Arguments<'_>, error: &dyn std::error::Error) {
    let mut line = format!("transfer_engine: {what}: {error}");
    let mut cause = error.source();
    while let Some(error) = cause {
        line.push_str(&format!(": {error}"));
        cause = error.source();
    }
    say(&line);
}

/// Writes a line to standard error. One that cannot be written is lost: `eprintln!` would panic, and a call fail
/// that has done its work.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}

/// Runs a call; a panic in it becomes `failure`.
fn guarded<T>(failure: T, call: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or(failure)
}

/// Runs a call with the engine of a handle; `failure` if it is of none.
fn with_engine<T>(
    handle: *mut sys::Engine,
    failure: T,
    unknown: T,
    call: impl FnOnce(&Engine) -> T,
) -> T {
    guarded(failure, || engines::with(handle, call).unwrap_or(unknown))
}

/// As `with_engine`, for calls with negative codes.
fn call(handle: *mut sys::Engine, act: impl FnOnce(&Engine) -> c_int) -> c_int {
    const WRONG: c_int = sys::ERR_INVALID_ARGUMENT;
    with_engine(handle, WRONG, WRONG, act)
}

/// Creates an engine; null if a text is missing, if the metadata is not `P2PHANDSHAKE`, or if the engine
/// cannot listen.
///
/// # Safety
/// The texts are null or end with NUL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn createTransferEngine(
    metadata_conn_string: *const c_char,
    local_server_name: *const c_char,
    ip_or_host_name: *const c_char,
    _rpc_port: u64,
    auto_discover: c_int,
) -> *mut sys::Engine {
    guarded(std::ptr::null_mut(), || {
        // SAFETY: the caller's promise.
        let texts = unsafe {
            (
                text::read(metadata_conn_string),
                text::read(local_server_name),
            )
        };
        let (Some(metadata), Some(name)) = texts else {
            say("transfer_engine: no engine without metadata and a name, in UTF-8");
            return std::ptr::null_mut();
        };
        if ip_or_host_name.is_null() {
            return std::ptr::null_mut();
        }
        if metadata != "P2PHANDSHAKE" {
            say(&format!(
                "transfer_engine: metadata {metadata:?} is not P2PHANDSHAKE"
            ));
            return std::ptr::null_mut();
        }
        let native = match listen::start(name) {
            Ok(native) => native,
            Err(error) => {
                complain(&format_args!("cannot start an engine as {name:?}"), &error);
                return std::ptr::null_mut();
            }
        };
        let installed = auto_discover != 0 || std::env::var_os("MC_FORCE_TCP").is_some();
        engines::insert(Engine::new(native, installed)).handle()
    })
}

/// Ends an engine. Tasks under way end; when it returns, no memory is touched any more. Waits for calls
/// that are running. The engine's batches are gone with it: their ids are answered with errors.
///
/// # Safety
/// None of its own; it may be called with any handle, and more than once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn destroyTransferEngine(engine: *mut sys::Engine) {
    guarded((), || {
        if let Some(key) = engines::remove(engine) {
            batches::drop_of(key);
        }
    });
}

/// Writes host and port of the engine; IPv6 addresses have no brackets.
///
/// # Safety
/// `buf_len` bytes from `buf_out` on may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getLocalIpAndPort(
    engine: *mut sys::Engine,
    buf_out: *mut c_char,
    buf_len: usize,
) -> c_int {
    call(engine, |engine| {
        if buf_out.is_null() && buf_len > 0 {
            return sys::ERR_INVALID_ARGUMENT;
        }
        // SAFETY: the caller's promise, and not null if there is room.
        unsafe { text::write(&engine.host_and_port(), buf_out, buf_len) };
        0
    })
}

/// Does nothing: there is no device that TCP could choose.
///
/// # Safety
/// None of its own.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn discoverTopology(engine: *mut sys::Engine) -> c_int {
    call(engine, |_| 0)
}

/// Installs the transport `tcp`; null for any other. Given a matrix of devices, it must be a JSON object.
///
/// # Safety
/// `proto` is null or ends with NUL; `args` is null or leads to a pointer that is null or a text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn installTransport(
    engine: *mut sys::Engine,
    proto: *const c_char,
    args: *mut *mut c_void,
) -> *mut sys::Transport {
    let null = std::ptr::null_mut();
    with_engine(engine, null, null, |engine| {
        // SAFETY: the caller's promise.
        let (proto, matrix) = unsafe {
            let matrix = if args.is_null() { null } else { *args.cast() };
            (text::read(proto), matrix.cast::<c_char>())
        };
        if proto != Some("tcp") {
            return null;
        }
        if !matrix.is_null() {
            // SAFETY: the caller's promise.
            let matrix = unsafe { text::read(matrix) };
            let is_object = matrix
                .and_then(|matrix| serde_json::from_str::<serde_json::Value>(matrix).ok())
                .is_some_and(|matrix| matrix.is_object());
            if !is_object {
                return null;
            }
        }
        engine.install();
        engine.key().transport().cast()
    })
}

/// Does nothing.
///
/// # Safety
/// None of its own.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uninstallTransport(
    engine: *mut sys::Engine,
    proto: *const c_char,
) -> c_int {
    call(engine, |_| match proto.is_null() {
        true => sys::ERR_INVALID_ARGUMENT,
        false => 0,
    })
}

/// Registers memory, for peers too unless `remote_accessible` is 0.
///
/// # Safety
/// The memory is mapped until it was unregistered or the engine destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn registerLocalMemory(
    engine: *mut sys::Engine,
    addr: *mut c_void,
    length: usize,
    location: *const c_char,
    remote_accessible: c_int,
) -> c_int {
    call(engine, |engine| {
        if location.is_null() {
            return sys::ERR_INVALID_ARGUMENT;
        }
        let access = match remote_accessible {
            0 => Access::Local,
            _ => Access::RemoteWrite,
        };
        // SAFETY: the caller's promise.
        unsafe { engine.register(&[(addr.cast(), length)], access) }
    })
}

/// Forgets memory. Returns when no request of a peer touches it any more.
///
/// # Safety
/// None of its own.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unregisterLocalMemory(
    engine: *mut sys::Engine,
    addr: *mut c_void,
) -> c_int {
    call(engine, |engine| engine.unregister(&[addr.addr() as u64]))
}

/// Registers all of a list for peers, or none.
///
/// # Safety
/// `buffer_list` has `buffer_len` entries; the memory is as for [`registerLocalMemory`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn registerLocalMemoryBatch(
    engine: *mut sys::Engine,
    buffer_list: *mut sys::BufferEntry,
    buffer_len: usize,
    location: *const c_char,
) -> c_int {
    call(engine, |engine| {
        // SAFETY: the caller's promise.
        let Some(list) = (unsafe { entries(buffer_list, buffer_len) }) else {
            return sys::ERR_INVALID_ARGUMENT;
        };
        if location.is_null() {
            return sys::ERR_INVALID_ARGUMENT;
        }
        let ranges: Vec<_> = list
            .iter()
            .map(|entry| (entry.addr.cast(), entry.length))
            .collect();
        // SAFETY: the caller's promise.
        unsafe { engine.register(&ranges, Access::RemoteWrite) }
    })
}

/// Forgets all of a list, or none if an address is unknown.
///
/// # Safety
/// `addr_list` has `addr_len` entries.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unregisterLocalMemoryBatch(
    engine: *mut sys::Engine,
    addr_list: *mut *mut c_void,
    addr_len: usize,
) -> c_int {
    call(engine, |engine| {
        // SAFETY: the caller's promise.
        match unsafe { entries(addr_list, addr_len) } {
            None => sys::ERR_INVALID_ARGUMENT,
            Some(list) => {
                let firsts: Vec<_> = list.iter().map(|addr| addr.addr() as u64).collect();
                engine.unregister(&firsts)
            }
        }
    })
}

/// Opens a segment; -1 on failure. Blocks for a control exchange.
///
/// # Safety
/// `segment_name` is null or ends with NUL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn openSegment(
    engine: *mut sys::Engine,
    segment_name: *const c_char,
) -> sys::SegmentId {
    // SAFETY: the caller's promise.
    call(engine, |engine| match unsafe { text::read(segment_name) } {
        None => -1,
        Some(name) => engine.open(name),
    })
}

/// As [`openSegment`]: a peer that has moved is found again when a transfer to it fails.
///
/// # Safety
/// As [`openSegment`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn openSegmentNoCache(
    engine: *mut sys::Engine,
    segment_name: *const c_char,
) -> sys::SegmentId {
    // SAFETY: the caller's promise.
    unsafe { openSegment(engine, segment_name) }
}

/// Does nothing; the id stays valid.
///
/// # Safety
/// None of its own.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn closeSegment(
    engine: *mut sys::Engine,
    _segment_id: sys::SegmentId,
) -> c_int {
    call(engine, |_| 0)
}

/// Forgets a segment: its id is unknown from then on, tasks under way go on.
///
/// # Safety
/// `segment_name` is null or ends with NUL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn removeLocalSegment(
    engine: *mut sys::Engine,
    segment_name: *const c_char,
) -> c_int {
    // SAFETY: the caller's promise.
    call(engine, |engine| match unsafe { text::read(segment_name) } {
        None => sys::ERR_INVALID_ARGUMENT,
        Some(name) => engine.forget(name),
    })
}

/// Does nothing: descriptors are fetched again when they are needed.
///
/// # Safety
/// None of its own.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syncSegmentCache(engine: *mut sys::Engine) -> c_int {
    call(engine, |_| 0)
}

/// Does nothing: there is no EFA here.
///
/// # Safety
/// None of its own.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warmupEfaSegment(
    _engine: *mut sys::Engine,
    _segment_name: *const c_char,
) -> c_int {
    0
}

/// Makes a batch for up to `batch_size` requests; `INVALID_BATCH` on failure.
///
/// # Safety
/// None of its own.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn allocateBatchID(
    engine: *mut sys::Engine,
    batch_size: usize,
) -> sys::BatchId {
    const NONE: sys::BatchId = sys::INVALID_BATCH;
    with_engine(engine, NONE, NONE, |engine| {
        batches::allocate(engine.key(), batch_size)
    })
}

/// Adds requests to a batch, all or none: 1 for a wrong argument, 2 for a full batch, 8 without a transport.
/// A batch that another engine allocated is a wrong argument.
///
/// # Safety
/// `entries` has `count` entries, and the memory of each stays mapped until its task was seen in a final
/// state or the engine was destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn submitTransfer(
    engine: *mut sys::Engine,
    batch_id: sys::BatchId,
    entries: *mut sys::TransferRequest,
    count: usize,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { submit(engine, batch_id, entries, count, |_| Ok(None)) }
}

/// As [`submitTransfer`], and sends a notification to the first request's segment, once all tasks of the
/// batch are done, from inside the [`getTransferStatus`] that finds it.
///
/// # Safety
/// As [`submitTransfer`]; the texts are null or end with NUL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn submitTransferWithNotify(
    engine: *mut sys::Engine,
    batch_id: sys::BatchId,
    entries: *mut sys::TransferRequest,
    count: usize,
    notify_msg: sys::NotifyMsg,
) -> c_int {
    let message = |segments: &[Segment]| {
        // SAFETY: the caller's promise.
        let texts = unsafe { (text::read(notify_msg.name), text::read(notify_msg.msg)) };
        match (segments.first(), texts) {
            (Some(segment), (Some(name), Some(text))) => Ok(Some(Message {
                segment: segment.clone(),
                name: name.to_owned(),
                text: text.to_owned(),
            })),
            _ => Err(sys::STATUS_INVALID_ARGUMENT),
        }
    };
    // SAFETY: the caller's promise.
    unsafe { submit(engine, batch_id, entries, count, message) }
}

/// # Safety
/// As [`submitTransfer`].
unsafe fn submit(
    engine: *mut sys::Engine,
    batch_id: sys::BatchId,
    requests: *mut sys::TransferRequest,
    count: usize,
    message: impl FnOnce(&[Segment]) -> Result<Option<Message>, c_int>,
) -> c_int {
    const WRONG: c_int = sys::STATUS_INVALID_ARGUMENT;
    with_engine(engine, WRONG, WRONG, |engine| {
        match batches::with_own(engine.key(), batch_id, |batch| batch.has_room(count)) {
            None => return WRONG,
            Some(false) => return sys::STATUS_TOO_MANY_REQUESTS,
            Some(true) => {}
        }
        // SAFETY: the caller's promise; there is room for `count`, so that it is no absurd number.
        let Some(requests) = (unsafe { entries(requests, count) }) else {
            return WRONG;
        };
        // Before the batch is locked: the engine's own segment is opened when it is first asked for.
        let checked: Result<Vec<_>, _> = requests
            .iter()
            .map(|request| check(engine, request))
            .collect();
        let (ops, segments): (Vec<_>, Vec<_>) = match checked {
            Ok(checked) => checked.into_iter().unzip(),
            Err(code) => return code,
        };
        let message = match message(&segments) {
            Ok(message) => message,
            Err(code) => return code,
        };
        let submitted = batches::with_own(engine.key(), batch_id, |batch| {
            // Another thread may have been faster.
            if !batch.has_room(count) {
                return sys::STATUS_TOO_MANY_REQUESTS;
            }
            for ((request, op), segment) in requests.iter().zip(ops).zip(segments) {
                // SAFETY: the caller's promise.
                let state = unsafe { start(engine, request, op, segment) };
                batch.push(state, request.length);
            }
            if let Some(message) = message {
                batch.set_message(message);
            }
            sys::STATUS_OK
        });
        submitted.unwrap_or(WRONG)
    })
}

/// Checks what concerns the call as a whole.
fn check(engine: &Engine, request: &sys::TransferRequest) -> Result<(Op, Segment), c_int> {
    let op = match request.opcode {
        sys::OPCODE_READ => Op::Read,
        sys::OPCODE_WRITE => Op::Write,
        _ => return Err(sys::STATUS_INVALID_ARGUMENT),
    };
    if !engine.is_installed() {
        return Err(sys::STATUS_TRANSPORT_NOT_SUPPORTED);
    }
    let segment = engine.segment(request.target_id);
    Ok((op, segment.ok_or(sys::STATUS_INVALID_ARGUMENT)?))
}

/// Starts one task. What is wrong with it alone makes it a failed one.
///
/// # Safety
/// The memory of the request stays mapped until its task was seen in a final state or the engine was
/// destroyed.
unsafe fn start(
    engine: &Engine,
    request: &sys::TransferRequest,
    op: Op,
    segment: Segment,
) -> State {
    if request.length == 0 {
        return State::Completed;
    }
    let memory = usize::try_from(request.length)
        .ok()
        // SAFETY: the caller's promise; the engine lets go of it when the task has settled.
        .and_then(|len| unsafe { ForeignMemory::new(request.source.cast(), len) });
    let Some(memory) = memory else {
        return State::Failed;
    };
    let task = Task {
        op,
        segment,
        remote: request.target_offset,
        memory: Arc::new(memory),
        range: 0..request.length,
        hold: Box::new(()),
    };
    // One native batch a task: a task that takes long must not hold up what is known about the others.
    match engine.native().submit(vec![task]) {
        Ok(batch) => State::Running(batch),
        Err(refused) => {
            complain(&format_args!("a task was refused"), &refused.cause);
            State::Failed
        }
    }
}

/// Says what became of a request: 0, or 1 if there is none (and `status` is left alone).
///
/// # Safety
/// `status` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getTransferStatus(
    engine: *mut sys::Engine,
    batch_id: sys::BatchId,
    task_id: usize,
    status: *mut sys::TransferStatus,
) -> c_int {
    const WRONG: c_int = sys::STATUS_INVALID_ARGUMENT;
    with_engine(engine, WRONG, WRONG, |engine| {
        if status.is_null() {
            return WRONG;
        }
        let looked = batches::with(batch_id, |batch| batch.look(task_id)).flatten();
        let Some((found, message)) = looked else {
            return WRONG;
        };
        // Outside the batch's lock: it is a control exchange. Its failure does not undo the transfer.
        if let Some(message) = message {
            engine.notify(&message.segment, &message.name, &message.text);
        }
        // SAFETY: not null, and the caller's promise.
        unsafe { status.write(found) };
        sys::STATUS_OK
    })
}

/// Frees a batch: 4 while a request has not been seen in a final state, 1 for an id that is none.
///
/// # Safety
/// None of its own.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn freeBatchID(engine: *mut sys::Engine, batch_id: sys::BatchId) -> c_int {
    const WRONG: c_int = sys::STATUS_INVALID_ARGUMENT;
    with_engine(engine, WRONG, WRONG, |_| batches::free(batch_id))
}

/// Sends a notification. Blocks for a control exchange.
///
/// # Safety
/// The texts are null or end with NUL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn genNotifyInEngine(
    engine: *mut sys::Engine,
    target_id: u64,
    notify_msg: sys::NotifyMsg,
) -> c_int {
    call(engine, |engine| {
        // SAFETY: the caller's promise.
        let texts = unsafe { (text::read(notify_msg.name), text::read(notify_msg.msg)) };
        let (Some(name), Some(text)) = texts else {
            return sys::ERR_INVALID_ARGUMENT;
        };
        let segment = sys::SegmentId::try_from(target_id.cast_signed())
            .ok()
            .and_then(|id| engine.segment(id));
        match segment {
            None => sys::ERR_METADATA,
            Some(segment) => engine.notify(&segment, name, text),
        }
    })
}

/// Takes the notifications that have arrived; null and 0 if there are none.
///
/// # Safety
/// `size` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getNotifsFromEngine(
    engine: *mut sys::Engine,
    size: *mut c_int,
) -> *mut sys::NotifyMsg {
    if size.is_null() {
        return std::ptr::null_mut();
    }
    let none = (std::ptr::null_mut(), 0);
    let (list, count) = with_engine(engine, none, none, |engine| {
        notices::hand_out(engine.take_notices().notices)
    });
    // SAFETY: not null, and the caller's promise.
    unsafe { size.write(count) };
    list
}

/// Takes back what [`getNotifsFromEngine`] returned; -1 if it is not that, or of another length.
///
/// # Safety
/// None of its own.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn freeNotifsMsgBuf(msg: *mut sys::NotifyMsg, size: c_int) -> c_int {
    guarded(sys::ERR_INVALID_ARGUMENT, || {
        match notices::take_back(msg, size) {
            true => 0,
            false => sys::ERR_INVALID_ARGUMENT,
        }
    })
}

/// Writes that there are no RDMA links, as text or as an empty JSON object.
///
/// # Safety
/// `buf_len` bytes from `buf_out` on may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn showLinks(
    _engine: *mut sys::Engine,
    buf_out: *mut c_char,
    buf_len: usize,
    json: c_int,
) -> c_int {
    if buf_out.is_null() || buf_len == 0 {
        return sys::ERR_INVALID_ARGUMENT;
    }
    let links = if json == 0 { "no RDMA links\n" } else { "{}" };
    // SAFETY: the caller's promise, and not null.
    unsafe { text::write(links, buf_out, buf_len) };
    0
}

/// Says that there are no RDMA devices.
///
/// # Safety
/// `count` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getNicLoadStats(
    _engine: *mut sys::Engine,
    stats: *mut sys::NicLoadStat,
    count: *mut usize,
) -> c_int {
    if stats.is_null() || count.is_null() {
        return sys::ERR_INVALID_ARGUMENT;
    }
    // SAFETY: not null, and the caller's promise.
    unsafe { count.write(0) };
    0
}

/// Lets SIGTERM and SIGINT end the process with the code 128 and the signal's number. With the P2P handshake
/// nothing has to be taken back before: peers see their connections close.
///
/// # Safety
/// None of its own.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn enableGracefulShutdown(_engine: *mut sys::Engine) {
    extern "C" fn end(signal: c_int) {
        // SAFETY: `_exit` may be called from a signal handler.
        unsafe { libc::_exit(128 + signal) }
    }
    for signal in [libc::SIGTERM, libc::SIGINT] {
        // SAFETY: the handler calls nothing but `_exit`.
        let before = unsafe { libc::signal(signal, end as *const () as libc::sighandler_t) };
        if before == libc::SIG_ERR {
            let error = std::io::Error::last_os_error();
            complain(&format_args!("cannot handle signal {signal}"), &error);
        }
    }
}

/// The caller's array; none for null with a length, or for more entries than memory can hold. An empty one
/// may be null.
///
/// # Safety
/// `first` is null or leads to `count` entries that nobody changes while the result is used.
unsafe fn entries<'a, T>(first: *const T, count: usize) -> Option<&'a [T]> {
    if count == 0 {
        return Some(&[]);
    }
    let bytes = count.checked_mul(size_of::<T>())?;
    if first.is_null() || !first.is_aligned() || isize::try_from(bytes).is_err() {
        return None;
    }
    // SAFETY: checked above, and the caller's promise.
    Some(unsafe { std::slice::from_raw_parts(first, count) })
}
