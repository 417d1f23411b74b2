//! One engine: the native one, its segments by number, and its registrations by address.
// Wraps addresses of the caller.
#![allow(unsafe_code)]

use std::collections::{BTreeMap, HashMap};
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mooncake_sys as sys;
use mooncake_transport::tcp::TcpEngine;
use mooncake_transport::{
    Access, ControlError, Engine as _, EngineError, Notices, Registration, Segment,
};
use slab_memory::ForeignMemory;

use crate::engines::EngineKey;

/// Segments open at a time, removed ones left out.
const SEGMENTS_MAX: usize = 1 << 20;

pub(crate) struct Engine {
    key: EngineKey,
    native: TcpEngine,
    /// Whether a transport is installed.
    installed: AtomicBool,
    segments: Mutex<Segments>,
    /// Registered ranges by their first address. No two overlap.
    memory: Mutex<BTreeMap<u64, Registered>>,
}

#[derive(Default)]
struct Segments {
    by_name: HashMap<String, sys::SegmentId>,
    by_id: HashMap<sys::SegmentId, Segment>,
    given: sys::SegmentId,
}

struct Registered {
    len: u64,
    registration: Registration,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing under these locks can leave the data half changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Engine {
    pub(crate) fn new(native: TcpEngine, installed: bool) -> Self {
        Self {
            key: EngineKey::next(),
            native,
            installed: AtomicBool::new(installed),
            segments: Mutex::default(),
            memory: Mutex::default(),
        }
    }

    pub(crate) fn key(&self) -> EngineKey {
        self.key
    }

    pub(crate) fn native(&self) -> &TcpEngine {
        &self.native
    }

    pub(crate) fn install(&self) {
        self.installed.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_installed(&self) -> bool {
        self.installed.load(Ordering::Relaxed)
    }

    /// Host and port as the header wants them: IPv6 addresses without brackets.
    pub(crate) fn host_and_port(&self) -> String {
        self.native.session().replace(['[', ']'], "")
    }

    /// Opens a segment. Blocks for a control exchange.
    pub(crate) fn open(&self, name: &str) -> sys::SegmentId {
        const FAILED: sys::SegmentId = -1;
        let name = name.trim_start_matches('/');
        if !self.is_installed() || name.is_empty() {
            return FAILED;
        }
        if name == self.native.session() {
            return sys::LOCAL_SEGMENT;
        }
        if let Some(id) = locked(&self.segments).by_name.get(name) {
            return *id;
        }
        let segment = match self.native.open_segment(name) {
            Ok(segment) => segment,
            Err(error) => {
                crate::abi::complain(&format_args!("cannot open {name:?}"), &error);
                return FAILED;
            }
        };
        let mut segments = locked(&self.segments);
        // Another thread may have been faster.
        if let Some(id) = segments.by_name.get(name) {
            return *id;
        }
        let Some(id) = segments.given.checked_add(1) else {
            return FAILED;
        };
        if segments.by_id.len() >= SEGMENTS_MAX {
            return FAILED;
        }
        segments.given = id;
        segments.by_name.insert(name.to_owned(), id);
        segments.by_id.insert(id, segment);
        id
    }

    /// Forgets a segment. Its tasks go on.
    pub(crate) fn forget(&self, name: &str) -> c_int {
        let name = name.trim_start_matches('/');
        if name.is_empty() || name == self.native.session() {
            return sys::ERR_INVALID_ARGUMENT;
        }
        let mut segments = locked(&self.segments);
        let forgotten = segments
            .by_name
            .remove(name)
            .and_then(|id| segments.by_id.remove(&id));
        drop(segments);
        // Not under the lock: it may be the last of its connections.
        drop(forgotten);
        0
    }

    /// The segment that is called `id`; the engine itself is opened when it is first asked for.
    pub(crate) fn segment(&self, id: sys::SegmentId) -> Option<Segment> {
        if let Some(segment) = locked(&self.segments).by_id.get(&id) {
            return Some(segment.clone());
        }
        if id != sys::LOCAL_SEGMENT {
            return None;
        }
        let segment = self.native.open_segment(self.native.session()).ok()?;
        locked(&self.segments)
            .by_id
            .insert(sys::LOCAL_SEGMENT, segment.clone());
        Some(segment)
    }

    /// Registers the ranges, or none.
    ///
    /// # Safety
    /// Each range is mapped, and used by C alone, until it has been unregistered or the engine is gone.
    pub(crate) unsafe fn register(&self, ranges: &[(*mut u8, usize)], access: Access) -> c_int {
        let mut registered = locked(&self.memory);
        let mut added = Vec::new();
        let mut failure = 0;
        let mut refusal = None;
        for &(addr, len) in ranges {
            // SAFETY: the caller's promise.
            let memory = unsafe { ForeignMemory::new(addr, len) }.filter(|_| len > 0);
            let Some(memory) = memory else {
                failure = sys::ERR_INVALID_ARGUMENT;
                break;
            };
            let (first, len) = (addr.addr() as u64, len as u64);
            // Ranges do not overlap, so only the last one that starts before our end can reach in.
            let before = registered.range(..first + len).next_back();
            if before.is_some_and(|(other, entry)| other + entry.len > first) {
                failure = sys::ERR_ADDRESS_OVERLAPPED;
                break;
            }
            match self.native.register(Arc::new(memory), access) {
                Ok(registration) => {
                    registered.insert(first, Registered { len, registration });
                    added.push(first);
                }
                Err(error) => {
                    failure = code_of(&error);
                    refusal = Some(error);
                    break;
                }
            }
        }
        if failure != 0 {
            let taken: Vec<_> = added
                .iter()
                .filter_map(|first| registered.remove(first))
                .collect();
            drop(registered);
            drop(taken);
        }
        // Once everything is as it was.
        if let Some(error) = refusal {
            crate::abi::complain(&format_args!("cannot register memory"), &error);
        }
        failure
    }

    /// Unregisters the ranges that begin at `firsts`, or none. Returns when no request of a peer
    /// touches them any more.
    pub(crate) fn unregister(&self, firsts: &[u64]) -> c_int {
        let mut registered = locked(&self.memory);
        let mut distinct = firsts.to_vec();
        distinct.sort_unstable();
        distinct.dedup();
        let all_known = distinct.iter().all(|first| registered.contains_key(first));
        if !all_known || distinct.len() != firsts.len() {
            return sys::ERR_ADDRESS_NOT_REGISTERED;
        }
        let taken: Vec<_> = firsts
            .iter()
            .filter_map(|first| registered.remove(first))
            .collect();
        drop(registered);
        // Not under the lock: it waits for requests that are being cut off.
        let mut code = 0;
        for entry in taken {
            if let Err(error) = entry.registration.unregister() {
                crate::abi::complain(&format_args!("cannot unregister memory"), &error);
                code = sys::ERR_METADATA;
            }
        }
        code
    }

    /// Sends a notification. Blocks for a control exchange.
    pub(crate) fn notify(&self, segment: &Segment, name: &str, message: &str) -> c_int {
        match self.native.notify(segment, name, message) {
            Ok(()) => 0,
            Err(error) => {
                let peer = segment.name();
                crate::abi::complain(&format_args!("cannot notify {peer:?}"), &error);
                code_of(&error)
            }
        }
    }

    pub(crate) fn take_notices(&self) -> Notices {
        self.native.take_notices().unwrap_or_default()
    }
}

/// The negative code that says most nearly the same.
fn code_of(error: &EngineError) -> c_int {
    match error {
        EngineError::Overlap { .. } => sys::ERR_ADDRESS_OVERLAPPED,
        EngineError::DescriptorTooLong { .. } => sys::ERR_METADATA,
        EngineError::Resolve { .. } => sys::ERR_DNS,
        EngineError::Control { source, .. } => match source {
            ControlError::Json(_) | ControlError::Frame(_) | ControlError::WrongType => {
                sys::ERR_MALFORMED_JSON
            }
            ControlError::NotifyRefused => sys::ERR_REJECT_HANDSHAKE,
            _ => sys::ERR_SOCKET,
        },
        _ => sys::ERR_INVALID_ARGUMENT,
    }
}
