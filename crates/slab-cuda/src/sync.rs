//! The lock of the book of streams, chosen once: the standard library's, or loom's where the models of the crate
//! `slab-loom` explore interleavings (`--cfg slab_loom`).

use std::sync::{PoisonError, TryLockError};

#[cfg(slab_loom)]
pub(crate) use loom::sync::{Mutex, MutexGuard};
#[cfg(not(slab_loom))]
pub(crate) use std::sync::{Mutex, MutexGuard};

/// Nothing panics under these locks but a program's own destructors, and what they guard is consistent at every step.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// As [`lock`], if nobody holds it.
pub(crate) fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(error)) => Some(error.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}
