//! Tokens outside the lock: dropping one gives it back.

use core::fmt;

use super::{GiveBack, TakeBack, Token};
use crate::error::Refused;
use crate::fence::Fence;
use crate::id::PoolId;
use crate::region::{Allocation, Region};
use crate::resident::Lease;
use crate::sync::Arc;

/// A [`Lease`] outside the lock. Dropping it releases it, with no fence.
///
/// It may be dropped anywhere, inside the lock of its pool too: it never locks twice and never panics.
#[must_use = "dropping the guard releases the lease at once"]
pub struct LeaseGuard {
    home: Arc<dyn TakeBack>,
    /// Empty only while a consuming method runs.
    lease: Option<Lease>,
}

impl LeaseGuard {
    pub(super) fn new(home: Arc<dyn TakeBack>, lease: Lease) -> Self {
        Self {
            home,
            lease: Some(lease),
        }
    }

    /// First byte, counted from the start of the slab.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.region().offset()
    }

    /// Bytes of the content.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.lease.as_ref().map_or(0, Lease::len)
    }

    /// Whether the content has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The region that is held.
    #[must_use]
    pub fn region(&self) -> Region {
        self.lease.as_ref().map_or(Region::EMPTY, Lease::region)
    }

    /// The pool that made it.
    #[must_use]
    pub fn pool(&self) -> PoolId {
        let lease = self.lease.as_ref();
        lease
            .expect("a guard has its token until it is consumed")
            .pool()
    }

    /// Releases the lease; the bytes may be used until `fences` are reached. Costs what
    /// [`Pool::release`](crate::Pool::release) does, under the lock.
    ///
    /// # Errors
    /// The guard, with [`Error::UnknownTimeline`](crate::Error::UnknownTimeline), if another pool made a
    /// fence.
    ///
    /// # Panics
    /// If the calling thread is inside the pool's lock: use [`into_lease`](Self::into_lease) there.
    pub fn release_after(mut self, fences: &[Fence]) -> Result<(), Refused<Self>> {
        let Some(lease) = self.lease.take() else {
            return Ok(());
        };
        match self.home.give_with(GiveBack::Release(lease, fences)) {
            Ok(()) => Ok(()),
            Err(Refused { value, cause }) => {
                if let Token::Lease(lease) = value {
                    self.lease = Some(lease);
                }
                Err(Refused { value: self, cause })
            }
        }
    }

    /// The lease itself, to be used inside the lock.
    pub fn into_lease(mut self) -> Lease {
        self.lease
            .take()
            .expect("a guard has its token until it is consumed")
    }
}

impl Drop for LeaseGuard {
    fn drop(&mut self) {
        if let Some(lease) = self.lease.take() {
            self.home.take_back(Token::Lease(lease));
        }
    }
}

impl fmt::Debug for LeaseGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("LeaseGuard").field(&self.lease).finish()
    }
}

/// An [`Allocation`] outside the lock. Dropping it frees the bytes at once, with no fence.
///
/// It may be dropped anywhere, inside the lock of its pool too: it never locks twice and never panics.
#[must_use = "dropping the guard frees the bytes at once"]
pub struct AllocationGuard {
    home: Arc<dyn TakeBack>,
    /// Empty only while a consuming method runs.
    allocation: Option<Allocation>,
}

impl AllocationGuard {
    pub(super) fn new(home: Arc<dyn TakeBack>, allocation: Allocation) -> Self {
        Self {
            home,
            allocation: Some(allocation),
        }
    }

    /// First byte, counted from the start of the slab.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.region().offset()
    }

    /// Bytes that were asked for.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.allocation.as_ref().map_or(0, Allocation::len)
    }

    /// Whether zero bytes were asked for.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The region owned.
    #[must_use]
    pub fn region(&self) -> Region {
        self.allocation
            .as_ref()
            .map_or(Region::EMPTY, Allocation::region)
    }

    /// The pool that made it.
    #[must_use]
    pub fn pool(&self) -> PoolId {
        let allocation = self.allocation.as_ref();
        allocation
            .expect("a guard has its token until it is consumed")
            .pool()
    }

    /// Gives the bytes back; they may be used until `fences` are reached. Costs what
    /// [`Pool::free`](crate::Pool::free) does, under the lock.
    ///
    /// # Errors
    /// The guard, with [`Error::UnknownTimeline`](crate::Error::UnknownTimeline), if another pool made a
    /// fence.
    ///
    /// # Panics
    /// If the calling thread is inside the pool's lock: use [`into_allocation`](Self::into_allocation)
    /// there.
    pub fn free_after(mut self, fences: &[Fence]) -> Result<(), Refused<Self>> {
        match self.allocation.take() {
            Some(allocation) => self.give(GiveBack::Free(allocation, fences)),
            None => Ok(()),
        }
    }

    /// Takes the bytes out of use for good: something may still write to them. O(1), under the lock.
    ///
    /// # Errors
    /// The guard, if two pools share its pool's id.
    ///
    /// # Panics
    /// If the calling thread is inside the pool's lock: use [`into_allocation`](Self::into_allocation)
    /// there.
    pub fn quarantine(mut self) -> Result<(), Refused<Self>> {
        match self.allocation.take() {
            Some(allocation) => self.give(GiveBack::Quarantine(allocation)),
            None => Ok(()),
        }
    }

    /// The allocation itself, to be used inside the lock.
    pub fn into_allocation(mut self) -> Allocation {
        self.allocation
            .take()
            .expect("a guard has its token until it is consumed")
    }

    fn give(mut self, give: GiveBack<'_>) -> Result<(), Refused<Self>> {
        match self.home.give_with(give) {
            Ok(()) => Ok(()),
            Err(Refused { value, cause }) => {
                if let Token::Allocation(allocation) = value {
                    self.allocation = Some(allocation);
                }
                Err(Refused { value: self, cause })
            }
        }
    }
}

impl Drop for AllocationGuard {
    fn drop(&mut self) {
        if let Some(allocation) = self.allocation.take() {
            self.home.take_back(Token::Allocation(allocation));
        }
    }
}

impl fmt::Debug for AllocationGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("AllocationGuard")
            .field(&self.allocation)
            .finish()
    }
}
