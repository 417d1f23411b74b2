//! The synchronisation primitives of this crate, chosen once: the standard library's, or loom's where the models of
//! the crate `slab-loom` explore interleavings (`--cfg slab_loom`).

// The handle of a pool is no part of what is explored, and loom's cannot become an `Arc<dyn Trait>`.
pub(crate) use std::sync::{Arc, PoisonError};

#[cfg(slab_loom)]
pub(crate) use loom::sync::atomic::{AtomicUsize, Ordering};
#[cfg(slab_loom)]
pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};
#[cfg(not(slab_loom))]
pub(crate) use std::sync::atomic::{AtomicUsize, Ordering};
#[cfg(not(slab_loom))]
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};

/// A number that no other living thread has, and that is not 0: the address of a thread-local.
#[cfg(not(slab_loom))]
pub(crate) fn thread_mark() -> usize {
    std::thread_local! {
        static MARK: u8 = const { 0 };
    }
    MARK.with(|mark| core::ptr::from_ref(mark).addr())
}

/// As above, for threads that loom makes of one thread of the system.
#[cfg(slab_loom)]
pub(crate) fn thread_mark() -> usize {
    loom::thread_local! {
        static MARK: u8 = 0;
    }
    MARK.with(|mark| core::ptr::from_ref(mark).addr())
}
