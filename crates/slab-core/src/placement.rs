//! Where in the slab a new region goes.

/// Which of the free runs that are large enough an allocation is cut from.
///
/// Both policies are complete (an allocation fails only if no free run is large enough), cut from the
/// low end of the chosen run, and look at far fewer runs than there are. One exception: where the map can number no
/// more runs (the bound of an [`Inline`](crate::Inline) store), only a run of exactly the length asked for can be taken,
/// the lowest such, and all runs are looked at for it.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Placement {
    /// The tightest size class that has a run large enough. Classes are at most 1/64 wide, and one length
    /// each below 128 granules, so little is left over; large regions keep packing well at high occupancy.
    /// A request below an eighth of the running mean goes to the lowest of up to eight runs that are at most
    /// about a half longer than it, one a class: small regions gather at the low end of the slab.
    ///
    /// O(log runs) amortised, O(1) for lengths below 128 granules and wherever a class has one run.
    #[default]
    BestFit,
    /// The lowest address at which the request fits, offset for offset what a scan over an ordered list
    /// of holes would choose. O(log free runs) expected.
    FirstFit,
}
