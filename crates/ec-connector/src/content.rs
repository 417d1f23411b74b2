//! The memory a reservation machine works on, as a trait.
//!
//! The machine in [`Reservations`](crate::Reservations) decides who owns which bytes; it never
//! sees an address. Everything it needs from a pool is [`Content`], so that tests and model
//! checkers can run the same code over a pool of a few bytes.

mod pool;

use crate::name::MmHash;
use crate::tensor::TensorSpec;

/// Keyed content in one slab, and the tokens that own parts of it.
///
/// Tokens are consumed by the call that ends them; a machine that drops one leaks its bytes.
pub trait Content {
    /// Owns bytes that no key names.
    type Allocation;
    /// A counted borrow of a resident: while one is held, its bytes stay.
    type Lease;
    /// A promise of bytes that are on their way back.
    type Claim;

    /// Finds room for `len_bytes`, evicting residents nobody leases where that helps.
    ///
    /// Zero bytes always succeed and own nothing.
    fn reserve(&mut self, len_bytes: u64) -> Room<Self::Allocation, Self::Claim>;

    /// Turns a claim into the bytes it waits for, or hands it back.
    ///
    /// # Errors
    /// The claim, while its bytes are not there yet.
    fn poll_claim(&mut self, claim: Self::Claim) -> Result<Self::Allocation, Self::Claim>;

    /// Gives a claim up.
    fn drop_claim(&mut self, claim: Self::Claim);

    /// Makes the bytes the resident of `key` and borrows it.
    ///
    /// If `key` is resident with an equal spec, that resident stays, the new bytes go back, and
    /// the lease is one on the resident. With another spec the key is bound anew and the earlier
    /// bytes live until their last lease.
    ///
    /// # Errors
    /// The allocation, if the pool holds as many residents as it may.
    fn publish(
        &mut self,
        key: &MmHash,
        allocation: Self::Allocation,
        tensor: &TensorSpec,
    ) -> Result<Self::Lease, Self::Allocation>;

    /// Borrows the resident of `key`, if there is one.
    fn acquire(&mut self, key: &MmHash) -> Option<Self::Lease>;

    /// Shape and type of the resident of `key`, if there is one.
    fn tensor(&self, key: &MmHash) -> Option<&TensorSpec>;

    /// Number of leases on the resident of `key`, if there is one.
    fn lease_count(&self, key: &MmHash) -> Option<u64>;

    /// Drops the resident of `key` unless it is leased; says whether it did.
    fn evict(&mut self, key: &MmHash) -> bool;

    /// Ends a borrow.
    fn release(&mut self, lease: Self::Lease);

    /// Gives unpublished bytes back.
    fn free(&mut self, allocation: Self::Allocation);

    /// Where an allocation lies; an empty one has no bytes and no place.
    fn allocation_span(allocation: &Self::Allocation) -> Span;

    /// Where a borrowed resident lies.
    fn lease_span(lease: &Self::Lease) -> Span;
}

/// What [`Content::reserve`] found.
pub enum Room<A, C> {
    /// The bytes, at once.
    Ready(A),
    /// Bytes that are still being given back; see [`Content::poll_claim`].
    Later(C),
    /// No room as long as nothing is given back.
    Full,
    /// More than the whole pool.
    TooLarge,
}

/// A range of the slab in bytes, rounded out to what it really occupies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Span {
    /// First byte, counted from the slab's start.
    pub offset: u64,
    /// Bytes occupied; zero for an empty allocation, whose offset means nothing.
    pub len_bytes: u64,
}
