//! Code of the user that runs on the engine's thread, which a panic in it must not end.

use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};

use slab_memory::CopyError;

/// Calls a method of a memory or a bounce.
///
/// # Errors
/// Its own, and [`CopyError::Panicked`] if it panics; either ends the request.
pub(super) fn guarded<T>(call: impl FnOnce() -> Result<T, CopyError>) -> Result<T, CopyError> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or(Err(CopyError::Panicked))
}

/// A value whose drop may panic without harm.
pub(super) struct Caught<T>(Option<T>);

impl<T> Caught<T> {
    pub(super) fn new(value: T) -> Self {
        Self(Some(value))
    }

    pub(super) fn get_mut(&mut self) -> &mut T {
        self.0.as_mut().expect("present until it is dropped")
    }
}

impl<T> Deref for Caught<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().expect("present until it is dropped")
    }
}

impl<T> Drop for Caught<T> {
    fn drop(&mut self) {
        let value = self.0.take();
        if catch_unwind(AssertUnwindSafe(|| drop(value))).is_err() {
            tracing::error!("a memory, a bounce or a hold panicked when it was dropped");
        }
    }
}
