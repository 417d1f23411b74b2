//! Memory in which tensors are hashed and from which they are sent, so that a file is read once.

use std::any::Any;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;
use ec_connector::Source;
use slab_core::{Allocation, FreeList, FreeListConfig, PoolId};
use slab_memory::{HostSlab, Memory};

/// A slab and what of it is free.
pub(super) struct Desk {
    slab: Arc<HostSlab>,
    free: Arc<Mutex<FreeList>>,
}

impl Desk {
    pub(super) fn new(len: u64) -> Result<Self> {
        let slab = Arc::new(HostSlab::new(len)?);
        let free = FreeList::new(FreeListConfig::new(PoolId::new(), len))?;
        Ok(Self {
            slab,
            free: Arc::new(Mutex::new(free)),
        })
    }

    pub(super) fn len(&self) -> u64 {
        self.slab.len()
    }

    /// Room for `len` bytes, if there is some now.
    pub(super) fn spot(&self, len: u64) -> Option<Spot> {
        let allocation = lock(&self.free).allocate(len).ok()?;
        Some(Spot {
            slab: Arc::clone(&self.slab),
            range: allocation.offset()..allocation.offset() + len,
            place: Place {
                free: Arc::clone(&self.free),
                allocation: Some(allocation),
            },
        })
    }
}

fn lock(free: &Mutex<FreeList>) -> std::sync::MutexGuard<'_, FreeList> {
    // The list's methods finish before anything else can panic under the lock.
    free.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A part of the desk that nobody else uses.
pub(super) struct Spot {
    slab: Arc<HostSlab>,
    range: Range<u64>,
    place: Place,
}

impl Spot {
    pub(super) fn slab(&self) -> &HostSlab {
        &self.slab
    }

    pub(super) fn range(&self) -> Range<u64> {
        self.range.clone()
    }

    /// Its bytes, sent from where they lie; the spot is given back when nothing reads them any more.
    pub(super) fn into_source(self) -> Source {
        Source::Memory {
            memory: self.slab as Arc<dyn Memory>,
            range: self.range,
            hold: Arc::new(self.place) as Arc<dyn Any + Send + Sync>,
        }
    }
}

/// The duty to give a part of the desk back.
struct Place {
    free: Arc<Mutex<FreeList>>,
    /// Present until dropped.
    allocation: Option<Allocation>,
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(allocation) = self.allocation.take()
            && let Err(refused) = lock(&self.free).free(allocation)
        {
            tracing::error!(error = %refused.cause, "a part of the desk is lost");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spots_are_given_back_when_their_source_is_dropped() {
        let desk = Desk::new(1024).unwrap();
        let whole = desk.spot(1024).unwrap();
        assert!(desk.spot(1).is_none());
        let source = whole.into_source();
        assert_eq!(source.len_bytes(), Some(1024));
        assert!(desk.spot(1).is_none());
        drop(source);
        let (one, two) = (desk.spot(300).unwrap(), desk.spot(300).unwrap());
        assert!(one.range().end <= two.range().start || two.range().end <= one.range().start);
        assert!(desk.spot(1025).is_none());
    }
}
