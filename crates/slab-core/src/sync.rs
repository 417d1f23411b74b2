//! The synchronisation primitives of this crate, chosen once.

pub(crate) use std::sync::atomic::{AtomicUsize, Ordering};
pub(crate) use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// A number that no other living thread has, and that is not 0: the address of a thread-local.
pub(crate) fn thread_mark() -> usize {
    std::thread_local! {
        static MARK: u8 = const { 0 };
    }
    MARK.with(|mark| core::ptr::from_ref(mark).addr())
}
