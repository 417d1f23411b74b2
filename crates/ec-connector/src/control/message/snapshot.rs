//! What `x_pool` answers: how the slab is used, at one moment.

mod capture;

use serde::{Deserialize, Serialize};

use crate::content::Span;

/// Most entries of a [`SlabMap`].
pub const MAP_ENTRIES_MAX: usize = 4096;

/// How a consumer shard's slab is used, at one moment.
///
/// All counts come from one hold of the lock, so they agree with one another: the bytes by state
/// add up to `usable`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PoolSnapshot {
    /// Bytes of the slab.
    pub capacity: u64,
    /// Bytes of it that can be handed out.
    pub usable: u64,
    /// Bytes by what they are used for.
    pub bytes: StateBytes,
    /// The largest item that fits without evicting anything, in bytes.
    pub largest_free: u64,
    /// Keys with content.
    pub residents: u64,
    /// Leases on residents.
    pub leases: u64,
    /// Owner leases that wait to be fetched.
    pub taken_waiting: u64,
    /// Active reservations.
    pub reservations: ReservationCounts,
    /// Finished ids remembered.
    pub tombstones: u64,
    /// Totals since the start.
    pub totals: Totals,
    /// The slab from its first byte to its last usable one.
    pub map: SlabMap,
}

/// Bytes by state; each byte is counted once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct StateBytes {
    /// Free.
    pub free: u64,
    /// Promised to writers.
    pub writing: u64,
    /// Complete, taken by nobody, shared by nobody.
    pub ready: u64,
    /// Of writers that were cancelled or expired and never said that they are done.
    pub stuck: u64,
    /// Residents somebody leases.
    pub leased: u64,
    /// Residents nobody leases.
    pub resident: u64,
    /// Given back, behind a fence.
    pub waiting: u64,
    /// Promised to a reserve that waits.
    pub claimed: u64,
    /// Withdrawn because it is unknown whether somebody still uses them.
    pub quarantined: u64,
    /// Owned by the process itself.
    pub owned: u64,
}

/// Active reservations by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ReservationCounts {
    /// Writers that are writing.
    pub writing: u64,
    /// Records that follow a writer.
    pub following: u64,
    /// Ready records.
    pub ready: u64,
    /// Cancelled, the writer may still be writing.
    pub cancel_pending: u64,
    /// Expired, the writer may still be writing.
    pub expire_pending: u64,
}

/// Totals since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Totals {
    /// Ready items nobody took in time.
    pub ready_expired: u64,
    /// Writers that did not finish in time.
    pub writers_expired: u64,
    /// Followers whose writer went away.
    pub followers_lost: u64,
    /// Finished ids forgotten before their time.
    pub tombstones_dropped: u64,
    /// Times the pool held too many residents to share or take an item.
    pub publishes_refused: u64,
    /// Ready events dropped because nobody fetched them.
    pub events_dropped: u64,
    /// Residents dropped to make room.
    pub evictions: u64,
    /// Their bytes.
    pub evicted_bytes: u64,
}

/// The slab in address order, without gaps.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SlabMap {
    /// The slab had more than [`MAP_ENTRIES_MAX`] runs, so the entries are of equal length and
    /// each shows what most of its bytes are used for.
    pub aggregated: bool,
    /// Runs, neighbours in different states.
    pub runs: Vec<MapRun>,
}

/// One run of a [`SlabMap`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MapRun {
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// What they are used for.
    pub state: MapState,
}

/// What a run of the slab is used for; see [`StateBytes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum MapState {
    /// Free.
    Free,
    /// Promised to a writer.
    Writing,
    /// Complete, unpublished.
    Ready,
    /// Of a writer that never came back.
    Stuck,
    /// A leased resident.
    Leased,
    /// An idle resident.
    Resident,
    /// Behind a fence.
    Waiting,
    /// Promised to a reserve that waits.
    Claimed,
    /// Withdrawn.
    Quarantined,
    /// Owned by the process itself.
    Owned,
}

impl StateBytes {
    /// The count of one state.
    pub fn of(&self, state: MapState) -> u64 {
        match state {
            MapState::Free => self.free,
            MapState::Writing => self.writing,
            MapState::Ready => self.ready,
            MapState::Stuck => self.stuck,
            MapState::Leased => self.leased,
            MapState::Resident => self.resident,
            MapState::Waiting => self.waiting,
            MapState::Claimed => self.claimed,
            MapState::Quarantined => self.quarantined,
            MapState::Owned => self.owned,
        }
    }

    pub(crate) fn add(&mut self, state: MapState, bytes: u64) {
        *match state {
            MapState::Free => &mut self.free,
            MapState::Writing => &mut self.writing,
            MapState::Ready => &mut self.ready,
            MapState::Stuck => &mut self.stuck,
            MapState::Leased => &mut self.leased,
            MapState::Resident => &mut self.resident,
            MapState::Waiting => &mut self.waiting,
            MapState::Claimed => &mut self.claimed,
            MapState::Quarantined => &mut self.quarantined,
            MapState::Owned => &mut self.owned,
        } += bytes;
    }

    /// All bytes.
    pub fn total(&self) -> u64 {
        STATES.into_iter().map(|state| self.of(state)).sum()
    }
}

const STATES: [MapState; 10] = [
    MapState::Free,
    MapState::Writing,
    MapState::Ready,
    MapState::Stuck,
    MapState::Leased,
    MapState::Resident,
    MapState::Waiting,
    MapState::Claimed,
    MapState::Quarantined,
    MapState::Owned,
];

impl SlabMap {
    /// Draws the map from runs in address order without gaps, the first at zero.
    ///
    /// `granule` is the pool's alignment; aggregated entries are a multiple of it long.
    pub fn draw(runs: &[(Span, MapState)], granule: u64) -> Self {
        let mut exact: Vec<MapRun> = Vec::with_capacity(runs.len().min(MAP_ENTRIES_MAX));
        for &(span, state) in runs {
            push(&mut exact, span.offset, span.len_bytes, state);
        }
        if exact.len() <= MAP_ENTRIES_MAX {
            return Self {
                aggregated: false,
                runs: exact,
            };
        }
        let end = exact.last().map_or(0, |run| run.offset + run.len);
        let width = end
            .div_ceil(MAP_ENTRIES_MAX as u64)
            .next_multiple_of(granule.max(1));
        let mut coarse = Vec::with_capacity(MAP_ENTRIES_MAX);
        let mut run_index = 0;
        let mut start = 0;
        while start < end {
            let stop = end.min(start + width);
            let mut bytes = StateBytes::default();
            while let Some(run) = exact.get(run_index) {
                let run_end = run.offset + run.len;
                bytes.add(run.state, run_end.min(stop) - run.offset.max(start));
                if run_end > stop {
                    break;
                }
                run_index += 1;
                if run_end == stop {
                    break;
                }
            }
            // Of two states with equally many bytes the first in declaration order shows.
            let state = STATES
                .into_iter()
                .rev()
                .max_by_key(|&state| bytes.of(state))
                .unwrap_or(MapState::Free);
            push(&mut coarse, start, stop - start, state);
            start = stop;
        }
        Self {
            aggregated: true,
            runs: coarse,
        }
    }
}

/// Appends a run, merging it with a neighbour of the same state.
fn push(runs: &mut Vec<MapRun>, offset: u64, len: u64, state: MapState) {
    match runs.last_mut() {
        _ if len == 0 => {}
        Some(last) if last.state == state && last.offset + last.len == offset => last.len += len,
        _ => runs.push(MapRun { offset, len, state }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(lens: impl IntoIterator<Item = (u64, MapState)>) -> Vec<(Span, MapState)> {
        let mut offset = 0;
        lens.into_iter()
            .map(|(len_bytes, state)| {
                let span = Span { offset, len_bytes };
                offset += len_bytes;
                (span, state)
            })
            .collect()
    }

    #[test]
    fn neighbours_in_the_same_state_are_one_run() {
        let map = SlabMap::draw(
            &runs([
                (256, MapState::Ready),
                (512, MapState::Ready),
                (256, MapState::Free),
            ]),
            256,
        );
        assert!(!map.aggregated);
        assert_eq!(
            map.runs,
            [
                MapRun {
                    offset: 0,
                    len: 768,
                    state: MapState::Ready
                },
                MapRun {
                    offset: 768,
                    len: 256,
                    state: MapState::Free
                },
            ]
        );
    }

    #[test]
    fn a_map_of_many_runs_is_bounded_covers_everything_and_says_so() {
        for count in [4096_u64, 4097, 10_000, 100_001] {
            let many = runs((0..count).map(|n| {
                let state = if n % 2 == 0 {
                    MapState::Leased
                } else {
                    MapState::Free
                };
                (256 * (1 + n % 3), state)
            }));
            let end = many.last().map_or(0, |(s, _)| s.offset + s.len_bytes);
            let map = SlabMap::draw(&many, 256);
            assert_eq!(map.aggregated, count > 4096);
            assert!(map.runs.len() <= MAP_ENTRIES_MAX);
            let mut offset = 0;
            for run in &map.runs {
                assert_eq!(run.offset, offset);
                offset += run.len;
            }
            assert_eq!(offset, end);
        }
    }

    #[test]
    fn an_aggregated_entry_shows_what_most_of_it_is() {
        // One large leased run among many small alternating ones.
        let mut lens = vec![(10 << 20, MapState::Leased)];
        for n in 0..10_000 {
            lens.push((
                256,
                if n % 2 == 0 {
                    MapState::Free
                } else {
                    MapState::Stuck
                },
            ));
        }
        let map = SlabMap::draw(&runs(lens), 256);
        assert!(map.aggregated);
        assert_eq!(map.runs[0].state, MapState::Leased);
        assert!(map.runs[0].len > 10 << 19);
    }

    #[test]
    fn an_empty_slab_has_an_empty_map() {
        assert_eq!(SlabMap::draw(&[], 256), SlabMap::default());
    }
}
