//! Which handles are engines.
//!
//! A handle is a number that was never an address, so one that is unknown or was destroyed is found out
//! by looking it up, and nothing is followed.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

use crate::engine::Engine;

/// Above every address of a user's process, and not canonical, so that whoever follows a handle crashes
/// there and not elsewhere. The last four bits are zero: what is given out looks like an aligned pointer.
const FIRST: u64 = 0x4d43_0000_0000_0000;
const STEP: u64 = 16;

struct Slot {
    /// Every call holds it for reading; whoever destroys the engine waits for them.
    engine: RwLock<Option<Engine>>,
}

type Table = RwLock<HashMap<u64, Arc<Slot>>>;

fn table() -> &'static Table {
    static TABLE: OnceLock<Table> = OnceLock::new();
    TABLE.get_or_init(Table::default)
}

/// Names an engine; never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EngineKey(u64);

impl EngineKey {
    pub(crate) fn of(handle: *mut mooncake_sys::Engine) -> Self {
        Self(handle.addr() as u64)
    }

    pub(crate) fn next() -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        Self(FIRST + (1 + COUNT.fetch_add(1, Ordering::Relaxed)) * STEP)
    }

    pub(crate) fn handle(self) -> *mut mooncake_sys::Engine {
        std::ptr::without_provenance_mut(self.0 as usize)
    }

    /// A pointer that stands for the engine's transport.
    pub(crate) fn transport(self) -> *mut c_void {
        std::ptr::without_provenance_mut((self.0 + STEP / 2) as usize)
    }
}

pub(crate) fn insert(engine: Engine) -> EngineKey {
    let key = engine.key();
    let slot = Arc::new(Slot {
        engine: RwLock::new(Some(engine)),
    });
    let mut table = table().write().unwrap_or_else(PoisonError::into_inner);
    table.insert(key.0, slot);
    key
}

/// Calls `act` with the engine; none if the handle is of no engine.
pub(crate) fn with<T>(
    handle: *mut mooncake_sys::Engine,
    act: impl FnOnce(&Engine) -> T,
) -> Option<T> {
    let slot = {
        let table = table().read().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(table.get(&EngineKey::of(handle).0)?)
    };
    let engine = slot.engine.read().unwrap_or_else(PoisonError::into_inner);
    engine.as_ref().map(act)
}

/// Ends the engine once no call of it is running; returns when nothing of it touches memory any more.
pub(crate) fn remove(handle: *mut mooncake_sys::Engine) -> Option<EngineKey> {
    let key = EngineKey::of(handle);
    let slot = {
        let mut table = table().write().unwrap_or_else(PoisonError::into_inner);
        table.remove(&key.0)?
    };
    let engine = slot
        .engine
        .write()
        .unwrap_or_else(PoisonError::into_inner)
        .take();
    drop(engine);
    Some(key)
}
