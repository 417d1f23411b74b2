//! The reservation machine's memory is a pool of `slab-core`.

use std::hash::BuildHasher;

use slab_core::{Allocation, Claim, Lease, Pool, Refused, Region, Reserve};

use super::{Content, Room, Span};
use crate::name::MmHash;
use crate::tensor::TensorSpec;

/// Nothing here records a fence: whoever lets a device read the bytes holds a lease and ends it
/// with the fences it knows.
impl<S: BuildHasher> Content for Pool<MmHash, TensorSpec, S> {
    type Allocation = Allocation;
    type Lease = Lease;
    type Claim = Claim;

    fn reserve(&mut self, len_bytes: u64) -> Room<Allocation, Claim> {
        match Pool::reserve(self, len_bytes) {
            Reserve::Ready(allocation) => Room::Ready(allocation),
            Reserve::Later(claim) => Room::Later(claim),
            Reserve::Full => Room::Full,
            Reserve::TooLarge => Room::TooLarge,
        }
    }

    fn poll_claim(&mut self, claim: Claim) -> Result<Allocation, Claim> {
        Pool::poll_claim(self, claim)
    }

    fn drop_claim(&mut self, claim: Claim) {
        accepted(Pool::drop_claim(self, claim));
    }

    fn publish(
        &mut self,
        key: &MmHash,
        allocation: Allocation,
        tensor: &TensorSpec,
    ) -> Result<Lease, Allocation> {
        Pool::publish(self, key.clone(), allocation, tensor.clone())
            .map_err(|refused| refused.value.1)
    }

    fn acquire(&mut self, key: &MmHash) -> Option<Lease> {
        Pool::acquire(self, key)
    }

    fn tensor(&self, key: &MmHash) -> Option<&TensorSpec> {
        self.meta(key)
    }

    fn lease_count(&self, key: &MmHash) -> Option<u64> {
        Pool::lease_count(self, key)
    }

    fn evict(&mut self, key: &MmHash) -> bool {
        Pool::evict(self, key)
    }

    fn release(&mut self, lease: Lease) {
        accepted(Pool::release(self, lease, &[]));
    }

    fn free(&mut self, allocation: Allocation) {
        accepted(Pool::free(self, allocation, &[]));
    }

    fn allocation_span(allocation: &Allocation) -> Span {
        allocation.region().into()
    }

    fn lease_span(lease: &Lease) -> Span {
        lease.region().into()
    }
}

impl From<Region> for Span {
    fn from(region: Region) -> Self {
        Self {
            offset: region.offset(),
            len_bytes: region.len(),
        }
    }
}

/// A pool refuses only tokens of another pool and fences it does not know; the machine has
/// neither. Should it happen, the bytes are lost to reuse, which is safe, and the log says so.
fn accepted<T>(result: Result<(), Refused<T>>) {
    if let Err(refused) = result {
        debug_assert!(false, "a pool refused its own token: {}", refused.cause);
        tracing::error!(cause = %refused.cause, "pool refused its own token");
    }
}
