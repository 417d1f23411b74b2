//! The loaded library, and the one engine handle that a wrapper owns.
//!
//! Everything unsafe of the wrapper is here: each function of the library has a method that passes only
//! what the library bears. Invariants: no call overlaps the one that destroys the engine, none follows it, and
//! a batch has one owner, who frees it once.
// Calls the library, and hands it addresses.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_int, c_void};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard};

use mooncake_sys as sys;
use slab_memory::Memory;

use super::config::{Checked, Transport};
use super::error::LibraryError;
use crate::wire::control::Notice;

/// Bytes for host and port: a name has at most 512.
const SESSION_BYTES: usize = 1_024;

/// Mooncake's library, loaded. It is never unloaded.
#[derive(Clone, Debug)]
pub struct FfiLibrary {
    file: std::path::PathBuf,
    functions: sys::Functions,
}

impl FfiLibrary {
    /// Loads the file that the environment variable `MOONCAKE_LIBRARY` names, or else `libtransfer_engine.so`
    /// from wherever the system's loader finds it.
    ///
    /// # Errors
    /// [`LibraryError::Missing`], [`LibraryError::NotALibrary`], [`LibraryError::MissingSymbol`].
    ///
    /// # Safety
    /// The file is Mooncake's library, 0.3.0 or later, or one with the same C interface.
    pub unsafe fn load() -> Result<Self, LibraryError> {
        // SAFETY: the caller's promise.
        let library = unsafe { sys::Library::load() }?;
        // SAFETY: the caller's promise, for these are the library's.
        Ok(unsafe { Self::from_parts(library.file(), *library.functions()) })
    }

    /// Loads `file`.
    ///
    /// # Errors
    /// As [`load`](FfiLibrary::load).
    ///
    /// # Safety
    /// As [`load`](FfiLibrary::load).
    pub unsafe fn open(file: impl AsRef<Path>) -> Result<Self, LibraryError> {
        // SAFETY: the caller's promise.
        let library = unsafe { sys::Library::open(file) }?;
        // SAFETY: the caller's promise, for these are the library's.
        Ok(unsafe { Self::from_parts(library.file(), *library.functions()) })
    }

    /// # Safety
    /// The functions are those of the header, or keep its contract.
    pub(super) unsafe fn from_parts(file: &Path, functions: sys::Functions) -> Self {
        Self {
            file: file.to_owned(),
            functions,
        }
    }

    /// Returns the file as it was asked for.
    pub fn file(&self) -> &Path {
        &self.file
    }

    fn symbol<T>(&self, function: Option<T>, symbol: &'static str) -> Result<T, LibraryError> {
        function.ok_or_else(|| LibraryError::MissingSymbol {
            file: self.file.clone(),
            symbol,
        })
    }
}

/// An engine of the library.
#[derive(Clone, Copy)]
struct Raw(NonNull<sys::Engine>);

// SAFETY: nothing of the library's engine is tied to a thread, and what calls of several threads share is locked in
// Mooncake's source (mooncake-transfer-engine/): registered ranges by `mutex_` and pending messages by
// `send_notifies_lock_` in include/transfer_engine_impl.h; segments, addresses of peers and notifications by
// `segment_lock_`, `rpc_meta_lock_` and `notify_lock_` in include/transfer_metadata.h. A batch is an object of its own
// (`allocateBatchID` in src/multi_transport.cpp) that nothing locks: `LibraryBatch` has one owner, and only one
// thread has it at a time. The table of transports is changed by installing alone, which ends before the engine is
// shared. Destroying overlaps no call, by `Handle`. Tried over TCP (section 12.9 of the protocol page on the Mooncake
// wire); the locks of the RDMA transport were not read through and nothing was tried there.
unsafe impl Send for Raw {}
// SAFETY: as for `Send`.
unsafe impl Sync for Raw {}

/// The owner of an engine of the library.
pub(super) struct Handle {
    library: FfiLibrary,
    /// Every call holds it for reading; none once the engine is destroyed.
    engine: RwLock<Option<Raw>>,
    /// Set before the engine is destroyed: no call begins any more.
    is_closing: AtomicBool,
    is_tcp: bool,
    /// An engine works in the process that made it.
    process: u32,
}

/// The right to call: the engine is not destroyed meanwhile.
pub(super) struct Entered<'a> {
    library: &'a FfiLibrary,
    engine: Raw,
    is_tcp: bool,
    _guard: RwLockReadGuard<'a, Option<Raw>>,
}

/// A batch of the library and its only owner. One that is dropped leaks.
#[derive(Debug)]
#[must_use]
pub(super) struct LibraryBatch {
    id: sys::BatchId,
    len: usize,
}

/// Why requests were not submitted, with the library's code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NotSubmitted {
    /// None of them was started.
    Nothing { code: c_int },
    /// Some may have been: the library may touch their memory until the engine has been destroyed. Their batch
    /// leaks.
    Unclear { code: c_int },
}

/// Where the library finds the bytes of a task.
#[derive(Clone, Copy, Debug)]
pub(super) struct Source(*mut c_void);

// SAFETY: an address; whoever passes it to the library keeps the memory.
unsafe impl Send for Source {}

impl Source {
    /// The address of a byte of `memory`, which is device memory if it has no host address.
    pub(super) fn new(memory: &dyn Memory, offset: u64) -> Self {
        let base: *mut u8 = match memory.host_ptr() {
            Some(pointer) => pointer.as_ptr(),
            None => std::ptr::without_provenance_mut(memory.address() as usize),
        };
        Self(base.wrapping_add(offset as usize).cast())
    }

    pub(super) fn address(self) -> u64 {
        self.0.addr() as u64
    }
}

/// One request, checked: opcode and length are valid by construction.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    pub(super) is_write: bool,
    pub(super) source: Source,
    pub(super) segment: sys::SegmentId,
    pub(super) remote: u64,
    pub(super) len: u64,
}

impl Handle {
    /// Makes an engine and installs its transport.
    pub(super) fn create(
        library: &FfiLibrary,
        texts: &Checked,
        transport: &Transport,
    ) -> Result<Self, LibraryError> {
        let name = texts.local_name.as_ptr();
        // SAFETY: texts that end with NUL. The scheme is P2PHANDSHAKE, http(s), or one that the user vouches for.
        // The engine discovers and installs nothing by itself (the last argument).
        let engine = unsafe {
            (library.functions.createTransferEngine)(texts.metadata.as_ptr(), name, name, 0, 0)
        };
        let engine = NonNull::new(engine).ok_or(LibraryError::Null {
            call: "createTransferEngine",
        })?;
        let handle = Self {
            library: library.clone(),
            engine: RwLock::new(Some(Raw(engine))),
            is_closing: AtomicBool::new(false),
            is_tcp: *transport == Transport::Tcp,
            process: std::process::id(),
        };
        match handle.install(texts, transport) {
            Ok(()) => Ok(handle),
            Err(error) => {
                handle.destroy();
                Err(error)
            }
        }
    }

    fn install(&self, texts: &Checked, transport: &Transport) -> Result<(), LibraryError> {
        let Some(entered) = self.enter()? else {
            return Ok(());
        };
        match transport {
            Transport::Tcp => entered.install(c"tcp", None),
            Transport::Rdma => {
                entered.discover()?;
                entered.install(c"rdma", None)
            }
            Transport::RdmaOver(_) => entered.install(c"rdma", texts.matrix.as_deref()),
        }
    }

    /// Begins a call; none once the engine is being destroyed.
    ///
    /// A thread must not enter again while it has entered.
    pub(super) fn enter(&self) -> Result<Option<Entered<'_>>, LibraryError> {
        self.check_process()?;
        if self.is_closing.load(Ordering::SeqCst) {
            return Ok(None);
        }
        let guard = self.engine.read().unwrap_or_else(PoisonError::into_inner);
        Ok(guard.map(|engine| Entered {
            library: &self.library,
            engine,
            is_tcp: self.is_tcp,
            _guard: guard,
        }))
    }

    /// In a process that was forked the engine's threads are missing, and locks may be held by nobody: nothing
    /// of the engine may be used.
    pub(super) fn check_process(&self) -> Result<(), LibraryError> {
        match std::process::id() == self.process {
            true => Ok(()),
            false => Err(LibraryError::Forked),
        }
    }

    /// Says whether the transport moves memory that is not registered here.
    pub(super) fn is_tcp(&self) -> bool {
        self.is_tcp
    }

    /// No call begins from now on.
    pub(super) fn close(&self) {
        self.is_closing.store(true, Ordering::SeqCst);
    }

    /// Waits for running calls, and destroys the engine. Afterwards nothing of it touches memory. Takes up to
    /// 5 s, beside the calls.
    pub(super) fn destroy(&self) {
        self.close();
        let engine = self
            .engine
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(Raw(engine)) = engine {
            // SAFETY: the engine is live and taken out, so that this happens once; no call is running, for
            // each holds the lock, and none follows.
            unsafe { (self.library.functions.destroyTransferEngine)(engine.as_ptr()) };
        }
    }
}

impl Entered<'_> {
    fn functions(&self) -> &sys::Functions {
        &self.library.functions
    }

    fn engine(&self) -> *mut sys::Engine {
        self.engine.0.as_ptr()
    }

    fn discover(&self) -> Result<(), LibraryError> {
        const CALL: &str = "discoverTopology";
        let discover = self
            .library
            .symbol(self.functions().discoverTopology, CALL)?;
        // SAFETY: the engine is live.
        match unsafe { discover(self.engine()) } {
            0 => Ok(()),
            code => Err(LibraryError::Code { call: CALL, code }),
        }
    }

    fn install(&self, protocol: &CStr, matrix: Option<&CStr>) -> Result<(), LibraryError> {
        let mut args = [
            matrix.map_or(std::ptr::null_mut(), |matrix| {
                matrix.as_ptr().cast_mut().cast::<c_void>()
            }),
            std::ptr::null_mut(),
        ];
        let args = match matrix {
            Some(_) => args.as_mut_ptr(),
            None => std::ptr::null_mut(),
        };
        // SAFETY: the engine is live; texts end with NUL and are only read; the matrix was checked to be a JSON
        // object; `args` is null, or holds the matrix and null.
        let transport =
            unsafe { (self.functions().installTransport)(self.engine(), protocol.as_ptr(), args) };
        match transport.is_null() {
            false => Ok(()),
            true => Err(LibraryError::Null {
                call: "installTransport",
            }),
        }
    }

    /// Host and port, as the library says them: without brackets around an IPv6 address.
    pub(super) fn host_and_port(&self) -> Result<String, LibraryError> {
        let mut buffer = [0u8; SESSION_BYTES];
        // SAFETY: the engine is live; the buffer has the length that is said.
        let code = unsafe {
            (self.functions().getLocalIpAndPort)(
                self.engine(),
                buffer.as_mut_ptr().cast(),
                buffer.len(),
            )
        };
        if code != 0 {
            return Err(LibraryError::Code {
                call: "getLocalIpAndPort",
                code,
            });
        }
        let text = CStr::from_bytes_until_nul(&buffer).unwrap_or_default();
        Ok(text.to_string_lossy().into_owned())
    }

    /// Registers memory.
    ///
    /// # Safety
    /// The range lies inside a memory that is kept until the engine has been destroyed, and does not wrap.
    pub(super) unsafe fn register(
        &self,
        first: Source,
        len: usize,
        location: &CStr,
        is_remote: bool,
    ) -> Result<(), LibraryError> {
        // SAFETY: the engine is live, the text ends with NUL, and the caller's promise.
        let code = unsafe {
            (self.functions().registerLocalMemory)(
                self.engine(),
                first.0,
                len,
                location.as_ptr(),
                c_int::from(is_remote),
            )
        };
        match code {
            0 => Ok(()),
            code => Err(LibraryError::Code {
                call: "registerLocalMemory",
                code,
            }),
        }
    }

    /// Forgets memory. Not a fence: requests of peers that are running go on touching it.
    pub(super) fn unregister(&self, address: u64) -> Result<(), LibraryError> {
        let first = std::ptr::without_provenance_mut(address as usize);
        // SAFETY: the engine is live; the address is only compared.
        match unsafe { (self.functions().unregisterLocalMemory)(self.engine(), first) } {
            0 => Ok(()),
            code => Err(LibraryError::Code {
                call: "unregisterLocalMemory",
                code,
            }),
        }
    }

    /// Opens a segment; `again` fetches what is known about it once more. May take a minute.
    pub(super) fn open(&self, name: &CStr, again: bool) -> Result<sys::SegmentId, LibraryError> {
        let functions = self.functions();
        let (open, call) = match again {
            true => (functions.openSegmentNoCache, "openSegmentNoCache"),
            false => (functions.openSegment, "openSegment"),
        };
        // SAFETY: the engine is live and the text ends with NUL.
        match unsafe { open(self.engine(), name.as_ptr()) } {
            id if id >= 0 => Ok(id),
            code => Err(LibraryError::Code { call, code }),
        }
    }

    /// Starts requests as one batch. May block while the library connects.
    ///
    /// # Safety
    /// The memory of each request is kept until its task was seen in a final state, or until the engine has
    /// been destroyed.
    pub(super) unsafe fn submit(&self, requests: &[Request]) -> Result<LibraryBatch, NotSubmitted> {
        let mut entries: Vec<sys::TransferRequest> = requests
            .iter()
            .map(|request| sys::TransferRequest {
                opcode: match request.is_write {
                    true => sys::OPCODE_WRITE,
                    false => sys::OPCODE_READ,
                },
                source: request.source.0,
                target_id: request.segment,
                target_offset: request.remote,
                length: request.len,
            })
            .collect();
        // SAFETY: the engine is live, and the capacity is at most `CHUNK_MAX`.
        let id = unsafe { (self.functions().allocateBatchID)(self.engine(), entries.len()) };
        if id == sys::INVALID_BATCH || id == 0 {
            return Err(NotSubmitted::Nothing {
                code: sys::STATUS_TOO_MANY_REQUESTS,
            });
        }
        let batch = LibraryBatch {
            id,
            len: entries.len(),
        };
        // SAFETY: the engine is live; the batch was just made, is ours alone and has room; the library copies
        // the entries; the caller keeps the memory.
        let code = unsafe {
            (self.functions().submitTransfer)(
                self.engine(),
                batch.id,
                entries.as_mut_ptr(),
                entries.len(),
            )
        };
        if code == sys::STATUS_OK {
            return Ok(batch);
        }
        // Over TCP these codes come before a task is added to the batch. Any other may come from a transport that
        // was handed some, and over RDMA they all may: there nothing is known but what the source says, which posts
        // what it has prepared when a later request fails.
        let proves_nothing_began = self.is_tcp
            && matches!(
                code,
                sys::STATUS_INVALID_ARGUMENT
                    | sys::STATUS_TOO_MANY_REQUESTS
                    | sys::STATUS_TRANSPORT_NOT_SUPPORTED
            );
        if !proves_nothing_began {
            tracing::error!(
                code,
                "the library may have begun a call that it says failed; its batch and memory stay until the engine ends"
            );
            return Err(NotSubmitted::Unclear { code });
        }
        if let Err(code) = self.free(batch) {
            tracing::error!(code, "an empty batch of the library leaks");
        }
        Err(NotSubmitted::Nothing { code })
    }

    /// The state of a task. An error is the library's code.
    pub(super) fn state(&self, batch: &LibraryBatch, index: usize) -> Result<c_int, c_int> {
        if index >= batch.len {
            return Err(sys::STATUS_INVALID_ARGUMENT);
        }
        let mut status = sys::TransferStatus::default();
        // SAFETY: the engine is live; the batch is, because freeing it consumes it; the status may be written.
        let code = unsafe {
            (self.functions().getTransferStatus)(self.engine(), batch.id, index, &mut status)
        };
        match code {
            sys::STATUS_OK => Ok(status.status),
            code => Err(code),
        }
    }

    /// Frees a batch. One that the library refuses to free leaks, for its id must not be used again unless
    /// it is known what it still is.
    pub(super) fn free(&self, batch: LibraryBatch) -> Result<(), c_int> {
        // SAFETY: the engine is live; the batch is ours and is consumed.
        match unsafe { (self.functions().freeBatchID)(self.engine(), batch.id) } {
            sys::STATUS_OK => Ok(()),
            code => Err(code),
        }
    }

    /// Sends a notification. May take a minute.
    pub(super) fn notify(
        &self,
        segment: sys::SegmentId,
        name: &CString,
        message: &CString,
    ) -> Result<(), LibraryError> {
        const CALL: &str = "genNotifyInEngine";
        let notify = self
            .library
            .symbol(self.functions().genNotifyInEngine, CALL)?;
        let texts = sys::NotifyMsg {
            name: name.as_ptr().cast_mut(),
            msg: message.as_ptr().cast_mut(),
        };
        let target = i64::from(segment).cast_unsigned();
        // SAFETY: the engine is live; the texts end with NUL and are only read.
        match unsafe { notify(self.engine(), target, texts) } {
            0 => Ok(()),
            code => Err(LibraryError::Code { call: CALL, code }),
        }
    }

    /// Takes the notifications that have arrived.
    pub(super) fn take_notices(&self) -> Result<Vec<Notice>, LibraryError> {
        let functions = self.functions();
        let take = self
            .library
            .symbol(functions.getNotifsFromEngine, "getNotifsFromEngine")?;
        let give_back = self
            .library
            .symbol(functions.freeNotifsMsgBuf, "freeNotifsMsgBuf")?;
        let mut count: c_int = 0;
        // SAFETY: the engine is live and the count may be written.
        let list = unsafe { take(self.engine(), &mut count) };
        let len = usize::try_from(count).unwrap_or(0);
        if list.is_null() || len == 0 {
            return Ok(Vec::new());
        }
        let text = |pointer: *const std::ffi::c_char| match pointer.is_null() {
            true => String::new(),
            // SAFETY: the library ends its texts with NUL, and they are ours until given back.
            false => unsafe { CStr::from_ptr(pointer) }
                .to_string_lossy()
                .into_owned(),
        };
        // SAFETY: the library returned a list of that length, which is ours until given back.
        let messages = unsafe { std::slice::from_raw_parts(list, len) };
        let notices = messages
            .iter()
            .map(|message| Notice {
                name: text(message.name),
                message: text(message.msg),
            })
            .collect();
        // SAFETY: list and length as the library returned them; once.
        unsafe { give_back(list, count) };
        Ok(notices)
    }
}
