//! What a pool reports about itself.

use core::fmt;

use crate::region::Region;

/// Counts and bytes of one moment. All bytes are multiples of the alignment unless said otherwise.
///
/// `free + owned + resident_leased + resident_idle + waiting + claimed + quarantined == usable`.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// Bytes of the slab, as configured.
    pub capacity: u64,
    /// Bytes that can be handed out: the capacity rounded down to the alignment.
    pub usable: u64,
    /// Bytes nobody owns.
    pub free: u64,
    /// Bytes in [`Allocation`](crate::Allocation)s.
    pub owned: u64,
    /// Bytes of residents with leases, displaced ones included. Where the map could number no more runs when a claim
    /// was fulfilled, what its region has in excess counts here too, leased or not.
    pub resident_leased: u64,
    /// Bytes of residents without leases: evictable.
    pub resident_idle: u64,
    /// Bytes that wait for fences, in a claim's window or not.
    pub waiting: u64,
    /// Bytes that claims withhold and that no longer wait.
    pub claimed: u64,
    /// Bytes that are never reused because their completion is unknown.
    pub quarantined: u64,
    /// Length of the largest free run.
    pub largest_free: u64,
    /// Keys that are resident.
    pub residents: u64,
    /// Residents whose key was published again with other metadata, alive through their leases.
    pub displaced: u64,
    /// Leases in callers' hands.
    pub leases: u64,
    /// Claims in callers' hands.
    pub claims: u64,
    /// Runs of the slab map.
    pub runs: u64,
    /// Residents evicted since the pool was made.
    pub evictions: u64,
    /// Their bytes.
    pub evicted_bytes: u64,
    /// Reserves answered [`Reserve::Full`](crate::Reserve::Full) since the pool was made.
    pub refusals: u64,
    /// Reserves answered [`Reserve::TooLarge`](crate::Reserve::TooLarge) since the pool was made.
    pub too_large: u64,
}

impl fmt::Display for PoolStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} of {} bytes free (largest run {}), {} owned, {} leased, {} idle, {} waiting, {} claimed, {} quarantined",
            self.free,
            self.usable,
            self.largest_free,
            self.owned,
            self.resident_leased,
            self.resident_idle,
            self.waiting,
            self.claimed,
            self.quarantined,
        )
    }
}

/// One run of the slab map.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunView {
    /// Where it is.
    pub region: Region,
    /// Who owns it.
    pub state: RunState,
}

/// Owner of a run: exactly one.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunState {
    /// Nobody: it can be handed out.
    Free,
    /// An [`Allocation`](crate::Allocation).
    Caller,
    /// A resident, current or displaced.
    Resident {
        /// How many leases hold it; none means evictable.
        leases: u64,
    },
    /// Nobody, once its fences are reached.
    Waiting,
    /// A [`Claim`](crate::Claim), with no fence left.
    Claimed,
    /// Nobody, for good.
    Quarantined,
}

/// Counts since the pool was made, of the residents or requests whose length lies in one power of two.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SizeClassStats {
    /// Shortest length of the class in bytes.
    pub len_min: u64,
    /// Longest length of the class in bytes.
    pub len_max: u64,
    /// Residents evicted.
    pub evictions: u64,
    /// Bytes of the regions of those.
    pub evicted_bytes: u64,
    /// Reserves answered [`Reserve::Full`](crate::Reserve::Full).
    pub refusals: u64,
}

/// Class `c` holds the lengths of `c` significant bits.
const CLASSES: usize = 65;

#[derive(Debug)]
pub(super) struct SizeClasses([Counts; CLASSES]);

#[derive(Clone, Copy, Debug)]
struct Counts {
    evictions: u64,
    evicted_bytes: u64,
    refusals: u64,
}

impl SizeClasses {
    pub(super) const fn new() -> Self {
        Self(
            [Counts {
                evictions: 0,
                evicted_bytes: 0,
                refusals: 0,
            }; CLASSES],
        )
    }

    pub(super) const fn count_eviction(&mut self, len: u64, region_len: u64) {
        let counts = &mut self.0[class_of(len)];
        counts.evictions += 1;
        counts.evicted_bytes += region_len;
    }

    pub(super) const fn count_refusal(&mut self, len: u64) {
        self.0[class_of(len)].refusals += 1;
    }

    /// Adds the sums over all classes.
    pub(super) fn sum_into(&self, stats: &mut PoolStats) {
        for counts in &self.0 {
            stats.evictions += counts.evictions;
            stats.evicted_bytes += counts.evicted_bytes;
            stats.refusals += counts.refusals;
        }
    }

    /// Classes in which something happened, shortest first.
    pub(super) fn iter(&self) -> impl Iterator<Item = SizeClassStats> + '_ {
        self.0
            .iter()
            .enumerate()
            .filter(|(_, counts)| counts.evictions > 0 || counts.refusals > 0)
            .map(|(class, counts)| SizeClassStats {
                len_min: if class == 0 { 0 } else { 1 << (class - 1) },
                len_max: if class == 0 {
                    0
                } else {
                    u64::MAX >> (64 - class)
                },
                evictions: counts.evictions,
                evicted_bytes: counts.evicted_bytes,
                refusals: counts.refusals,
            })
    }
}

const fn class_of(len: u64) -> usize {
    (u64::BITS - len.leading_zeros()) as usize
}
