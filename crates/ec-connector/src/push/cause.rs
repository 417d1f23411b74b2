//! Causes that travel through the push machine unseen.

use std::error::Error;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::Deref;
use std::sync::Arc;

/// Why something failed: the error of the driver, shared by all copies of a report.
///
/// The push machine hands causes on and never looks at them. Two of them are always equal and hash alike, so that
/// machines that differ in a cause only are one state to a model checker; look through the dereference to tell them
/// apart.
pub struct Cause<E>(Arc<E>);

impl<E> Cause<E> {
    /// Shares `error`.
    pub fn new(error: E) -> Self {
        Self(Arc::new(error))
    }
}

impl<E> From<E> for Cause<E> {
    fn from(error: E) -> Self {
        Self::new(error)
    }
}

impl<E> Clone for Cause<E> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<E> Deref for Cause<E> {
    type Target = E;

    fn deref(&self) -> &E {
        &self.0
    }
}

impl<E> PartialEq for Cause<E> {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl<E> Eq for Cause<E> {}

impl<E> Hash for Cause<E> {
    fn hash<H: Hasher>(&self, _: &mut H) {}
}

impl<E: fmt::Debug> fmt::Debug for Cause<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl<E: fmt::Display> fmt::Display for Cause<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl<E: Error> Error for Cause<E> {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.0.source()
    }
}
