//! Where in the slab a new region goes.

/// Which of the free runs that are large enough an allocation is cut from.
///
/// Both policies are complete (an allocation fails only if no free run is large enough), cut from the
/// low end of the chosen run, and look at far fewer runs than there are.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Placement {
    /// The tightest size class that has a run large enough, and in it the lowest address among at most
    /// eight runs. Classes are at most 1/32 wide, so little is left over; large regions keep packing
    /// well at high occupancy. O(log runs) amortised, O(1) when sizes are below 64 granules.
    #[default]
    BestFit,
    /// The lowest address at which the request fits, offset for offset what a scan over an ordered list
    /// of holes would choose. O(log free runs) expected.
    FirstFit,
}
