//! A library that does what a test says, and notes what is done to it that a real one does not bear.
// Stands in for C functions.
#![allow(unsafe_code)]
#![allow(non_snake_case, reason = "the names of the header")]

use std::collections::{BTreeMap, HashMap};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use mooncake_sys as sys;

use super::library::FfiLibrary;

/// One engine of the fake library, found by its address.
pub(super) struct Fake {
    pub(super) state: Mutex<State>,
    changed: Condvar,
    calls_running: AtomicUsize,
    next_batch: AtomicUsize,
    /// What `submitTransfer`, `registerLocalMemory` and `unregisterLocalMemory` answer.
    pub(super) submit_code: AtomicI32,
    pub(super) register_code: AtomicI32,
    pub(super) unregister_code: AtomicI32,
    pub(super) free_code: AtomicI32,
    /// How many tasks of a call begin although `submitTransfer` answers with a code.
    pub(super) begun_all_the_same: AtomicUsize,
}

#[derive(Default)]
pub(super) struct State {
    /// Names of functions that do not return until taken out.
    pub(super) blocked: Vec<&'static str>,
    /// Calls that do not return for that reason.
    pub(super) stuck: usize,
    /// The state that a task has from the start.
    pub(super) initial: c_int,
    batches: HashMap<u64, Batch>,
    pub(super) submitted: Vec<Submitted>,
    pub(super) in_flight_max: usize,
    pub(super) largest_call: usize,
    pub(super) freed: usize,
    pub(super) destroyed: usize,
    pub(super) opened: Vec<(String, bool)>,
    pub(super) registered: Vec<(u64, usize, String, c_int)>,
    pub(super) installed: Vec<(String, Option<String>)>,
    pub(super) notified: Vec<(u64, String, String)>,
    pub(super) arrived: Vec<(String, String)>,
    pub(super) violations: Vec<String>,
}

struct Batch {
    states: Vec<c_int>,
    is_seen: Vec<bool>,
}

/// What was submitted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Submitted {
    pub(super) batch: u64,
    pub(super) index: usize,
    pub(super) opcode: c_int,
    pub(super) source: u64,
    pub(super) segment: i32,
    pub(super) remote: u64,
    pub(super) len: u64,
}

static ENGINES: Mutex<BTreeMap<usize, Arc<Fake>>> = Mutex::new(BTreeMap::new());

fn find(engine: *mut sys::Engine) -> Arc<Fake> {
    let engines = ENGINES.lock().unwrap();
    Arc::clone(engines.get(&engine.addr()).expect("a live engine"))
}

fn name(pointer: *const c_char) -> String {
    assert!(!pointer.is_null(), "a null text ends a real library");
    // SAFETY: the wrapper passes texts that end with NUL.
    unsafe { CStr::from_ptr(pointer) }
        .to_str()
        .unwrap()
        .to_owned()
}

/// A call under way.
struct Call(Arc<Fake>);

impl Call {
    fn begin(engine: *mut sys::Engine, function: &'static str) -> Self {
        let fake = find(engine);
        fake.calls_running.fetch_add(1, Ordering::SeqCst);
        let mut state = fake.state.lock().unwrap();
        state.stuck += 1;
        while state.blocked.contains(&function) {
            state = fake.changed.wait(state).unwrap();
        }
        state.stuck -= 1;
        if state.destroyed > 0 {
            state.violations.push(format!("{function} after destroy"));
        }
        drop(state);
        Self(fake)
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.state.lock().unwrap()
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.0.calls_running.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Fake {
    /// The fake behind the engine whose local name is `local_name`.
    pub(super) fn of(local_name: &str) -> Arc<Self> {
        let names = NAMES.lock().unwrap();
        find(std::ptr::without_provenance_mut(names[local_name]))
    }

    /// Blocks a function, or lets it go on.
    pub(super) fn block(&self, function: &'static str) {
        self.state.lock().unwrap().blocked.push(function);
    }

    pub(super) fn unblock(&self, function: &'static str) {
        self.state
            .lock()
            .unwrap()
            .blocked
            .retain(|name| *name != function);
        self.changed.notify_all();
    }

    /// Sets the state of the `index`th task that was submitted.
    pub(super) fn set_task(&self, index: usize, to: c_int) {
        let mut state = self.state.lock().unwrap();
        let Submitted { batch, index, .. } = state.submitted[index];
        state.batches.get_mut(&batch).unwrap().states[index] = to;
    }

    /// Waits until `check` says yes.
    #[track_caller]
    pub(super) fn until(&self, what: &str, check: impl Fn(&State) -> bool) {
        let begin = std::time::Instant::now();
        while !check(&self.state.lock().unwrap()) {
            assert!(begin.elapsed() < Duration::from_secs(20), "in vain: {what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Nothing was done that a real library does not bear.
    #[track_caller]
    pub(super) fn assert_no_violations(&self) {
        let state = self.state.lock().unwrap();
        assert_eq!(state.violations, [""; 0]);
    }
}

static NAMES: Mutex<BTreeMap<String, usize>> = Mutex::new(BTreeMap::new());

unsafe extern "C" fn create(
    metadata: *const c_char,
    local_name: *const c_char,
    host: *const c_char,
    _port: u64,
    auto_discover: c_int,
) -> *mut sys::Engine {
    static NEXT: AtomicUsize = AtomicUsize::new(16);
    let (metadata, local_name) = (name(metadata), name(local_name));
    assert_eq!(name(host), local_name);
    assert_eq!(auto_discover, 0);
    if metadata != "P2PHANDSHAKE" || local_name == "refused" {
        return std::ptr::null_mut();
    }
    let fake = Arc::new(Fake {
        state: Mutex::default(),
        changed: Condvar::new(),
        calls_running: AtomicUsize::new(0),
        next_batch: AtomicUsize::new(1),
        submit_code: AtomicI32::new(0),
        register_code: AtomicI32::new(0),
        unregister_code: AtomicI32::new(0),
        free_code: AtomicI32::new(0),
        begun_all_the_same: AtomicUsize::new(0),
    });
    let address = NEXT.fetch_add(16, Ordering::SeqCst);
    ENGINES.lock().unwrap().insert(address, fake);
    NAMES.lock().unwrap().insert(local_name, address);
    std::ptr::without_provenance_mut(address)
}

unsafe extern "C" fn destroy(engine: *mut sys::Engine) {
    let fake = find(engine);
    let mut state = fake.state.lock().unwrap();
    if fake.calls_running.load(Ordering::SeqCst) > 0 {
        state.violations.push("destroy during a call".to_owned());
    }
    state.destroyed += 1;
}

unsafe extern "C" fn host_and_port(
    engine: *mut sys::Engine,
    out: *mut c_char,
    room: usize,
) -> c_int {
    let _call = Call::begin(engine, "getLocalIpAndPort");
    let text = b"::1:15992\0";
    assert!(room >= text.len());
    // SAFETY: there is room.
    unsafe {
        out.cast::<u8>()
            .copy_from_nonoverlapping(text.as_ptr(), text.len());
    }
    0
}

unsafe extern "C" fn install(
    engine: *mut sys::Engine,
    protocol: *const c_char,
    args: *mut *mut c_void,
) -> *mut sys::Transport {
    let call = Call::begin(engine, "installTransport");
    // SAFETY: null, or a matrix and null.
    let matrix = (!args.is_null()).then(|| unsafe {
        assert!((*args.add(1)).is_null());
        name((*args).cast())
    });
    let protocol = name(protocol);
    let is_refused = matrix
        .as_deref()
        .is_some_and(|matrix| matrix.contains("no_such"));
    call.state().installed.push((protocol, matrix));
    match is_refused {
        true => std::ptr::null_mut(),
        false => std::ptr::without_provenance_mut(8),
    }
}

unsafe extern "C" fn discover(engine: *mut sys::Engine) -> c_int {
    let call = Call::begin(engine, "discoverTopology");
    call.state().installed.push(("discover".to_owned(), None));
    0
}

unsafe extern "C" fn register(
    engine: *mut sys::Engine,
    addr: *mut c_void,
    len: usize,
    location: *const c_char,
    is_remote: c_int,
) -> c_int {
    let call = Call::begin(engine, "registerLocalMemory");
    let code = call.0.register_code.load(Ordering::SeqCst);
    if code == 0 {
        let entry = (addr.addr() as u64, len, name(location), is_remote);
        call.state().registered.push(entry);
    }
    code
}

unsafe extern "C" fn unregister(engine: *mut sys::Engine, addr: *mut c_void) -> c_int {
    let call = Call::begin(engine, "unregisterLocalMemory");
    let code = call.0.unregister_code.load(Ordering::SeqCst);
    let mut state = call.state();
    let address = addr.addr() as u64;
    let Some(at) = state.registered.iter().position(|entry| entry.0 == address) else {
        return -3;
    };
    state.registered.remove(at);
    code
}

fn open_as(engine: *mut sys::Engine, segment: *const c_char, again: bool) -> sys::SegmentId {
    let call = Call::begin(engine, "openSegment");
    let name = name(segment);
    let mut state = call.state();
    state.opened.push((name.clone(), again));
    match name
        .rsplit_once(':')
        .and_then(|(_, port)| port.parse().ok())
    {
        Some(port) if port != 404 => port,
        _ => -1,
    }
}

unsafe extern "C" fn open(engine: *mut sys::Engine, segment: *const c_char) -> sys::SegmentId {
    open_as(engine, segment, false)
}

unsafe extern "C" fn open_again(
    engine: *mut sys::Engine,
    segment: *const c_char,
) -> sys::SegmentId {
    open_as(engine, segment, true)
}

unsafe extern "C" fn allocate(engine: *mut sys::Engine, capacity: usize) -> sys::BatchId {
    let call = Call::begin(engine, "allocateBatchID");
    assert!(capacity <= 4_096);
    let id = call.0.next_batch.fetch_add(1, Ordering::SeqCst) as u64;
    call.state().batches.insert(
        id,
        Batch {
            states: Vec::new(),
            is_seen: Vec::new(),
        },
    );
    id
}

unsafe extern "C" fn submit(
    engine: *mut sys::Engine,
    batch: sys::BatchId,
    requests: *mut sys::TransferRequest,
    count: usize,
) -> c_int {
    let call = Call::begin(engine, "submitTransfer");
    let code = call.0.submit_code.load(Ordering::SeqCst);
    let count = match code {
        0 => count,
        _ => count.min(call.0.begun_all_the_same.load(Ordering::SeqCst)),
    };
    if count == 0 {
        return code;
    }
    // SAFETY: the wrapper passes an array of at least that length.
    let requests = unsafe { std::slice::from_raw_parts(requests, count) };
    let mut state = call.state();
    let initial = state.initial;
    let entry = state.batches.get_mut(&batch).expect("a live batch");
    assert!(entry.states.is_empty(), "a batch has one submission");
    entry.states = vec![initial; count];
    entry.is_seen = vec![false; count];
    let submitted = requests
        .iter()
        .enumerate()
        .map(|(index, request)| Submitted {
            batch,
            index,
            opcode: request.opcode,
            source: request.source.addr() as u64,
            segment: request.target_id,
            remote: request.target_offset,
            len: request.length,
        });
    state.submitted.extend(submitted);
    let in_flight = state
        .batches
        .values()
        .flat_map(|batch| &batch.is_seen)
        .filter(|is_seen| !**is_seen)
        .count();
    state.in_flight_max = state.in_flight_max.max(in_flight);
    state.largest_call = state.largest_call.max(count);
    code
}

unsafe extern "C" fn status(
    engine: *mut sys::Engine,
    batch: sys::BatchId,
    index: usize,
    out: *mut sys::TransferStatus,
) -> c_int {
    let call = Call::begin(engine, "getTransferStatus");
    let mut state = call.state();
    let Some(entry) = state.batches.get_mut(&batch) else {
        state
            .violations
            .push(format!("poll of freed batch {batch}"));
        return 1;
    };
    let found = entry.states[index];
    if entry.is_seen[index] {
        state
            .violations
            .push(format!("task {index} of {batch} polled after its end"));
        return 1;
    }
    entry.is_seen[index] = matches!(found, 4 | 6);
    // SAFETY: the wrapper passes a status.
    unsafe {
        out.write(sys::TransferStatus {
            status: found,
            transferred_bytes: 0,
        });
    }
    0
}

unsafe extern "C" fn free(engine: *mut sys::Engine, batch: sys::BatchId) -> c_int {
    let call = Call::begin(engine, "freeBatchID");
    let code = call.0.free_code.load(Ordering::SeqCst);
    let mut state = call.state();
    let Some(entry) = state.batches.get(&batch) else {
        state.violations.push(format!("batch {batch} freed twice"));
        return 1;
    };
    if entry.is_seen.iter().any(|is_seen| !is_seen) {
        state
            .violations
            .push(format!("batch {batch} freed while busy"));
        return 4;
    }
    state.batches.remove(&batch);
    state.freed += 1;
    code
}

unsafe extern "C" fn notify(
    engine: *mut sys::Engine,
    target: u64,
    message: sys::NotifyMsg,
) -> c_int {
    let call = Call::begin(engine, "genNotifyInEngine");
    let entry = (target, name(message.name), name(message.msg));
    let code = if entry.2 == "refuse" { -102 } else { 0 };
    call.state().notified.push(entry);
    code
}

unsafe extern "C" fn take_notices(
    engine: *mut sys::Engine,
    count: *mut c_int,
) -> *mut sys::NotifyMsg {
    let call = Call::begin(engine, "getNotifsFromEngine");
    let arrived = std::mem::take(&mut call.state().arrived);
    // SAFETY: the wrapper passes a count.
    unsafe { count.write(arrived.len() as c_int) };
    if arrived.is_empty() {
        return std::ptr::null_mut();
    }
    let list: Box<[sys::NotifyMsg]> = arrived
        .into_iter()
        .map(|(name, message)| sys::NotifyMsg {
            name: CString::new(name).unwrap().into_raw(),
            msg: CString::new(message).unwrap().into_raw(),
        })
        .collect();
    Box::into_raw(list).cast()
}

unsafe extern "C" fn free_notices(list: *mut sys::NotifyMsg, count: c_int) -> c_int {
    // SAFETY: list and length are those of `take_notices`, and so are the texts.
    unsafe {
        let list = std::ptr::slice_from_raw_parts_mut(list, count as usize);
        for message in Box::from_raw(list) {
            drop(CString::from_raw(message.name));
            drop(CString::from_raw(message.msg));
        }
    }
    0
}

unsafe extern "C" fn unused_protocol(_: *mut sys::Engine, _: *const c_char) -> c_int {
    panic!("the wrapper does not use this")
}

unsafe extern "C" fn unused_list(
    _: *mut sys::Engine,
    _: *mut sys::BufferEntry,
    _: usize,
    _: *const c_char,
) -> c_int {
    panic!("the wrapper does not use this")
}

unsafe extern "C" fn unused_addresses(_: *mut sys::Engine, _: *mut *mut c_void, _: usize) -> c_int {
    panic!("the wrapper does not use this")
}

unsafe extern "C" fn unused_segment(_: *mut sys::Engine, _: sys::SegmentId) -> c_int {
    panic!("the wrapper does not use this")
}

unsafe extern "C" fn unused(_: *mut sys::Engine) -> c_int {
    panic!("the wrapper does not use this")
}

/// A library with everything that the wrapper uses.
pub(super) fn functions() -> sys::Functions {
    sys::Functions {
        createTransferEngine: create,
        destroyTransferEngine: destroy,
        getLocalIpAndPort: host_and_port,
        installTransport: install,
        uninstallTransport: unused_protocol,
        registerLocalMemory: register,
        unregisterLocalMemory: unregister,
        registerLocalMemoryBatch: unused_list,
        unregisterLocalMemoryBatch: unused_addresses,
        openSegment: open,
        openSegmentNoCache: open_again,
        closeSegment: unused_segment,
        removeLocalSegment: unused_protocol,
        syncSegmentCache: unused,
        allocateBatchID: allocate,
        submitTransfer: submit,
        getTransferStatus: status,
        freeBatchID: free,
        submitTransferWithNotify: None,
        getNotifsFromEngine: Some(take_notices),
        genNotifyInEngine: Some(notify),
        freeNotifsMsgBuf: Some(free_notices),
        discoverTopology: Some(discover),
        warmupEfaSegment: None,
        showLinks: None,
        enableGracefulShutdown: None,
        getNicLoadStats: None,
    }
}

pub(super) fn library(functions: sys::Functions) -> FfiLibrary {
    // SAFETY: the functions above, perhaps without some of the optional ones, keep the header's contract.
    unsafe { FfiLibrary::from_parts(Path::new("fake"), functions) }
}
