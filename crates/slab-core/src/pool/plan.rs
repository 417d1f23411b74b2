//! Which idle residents to give up so that one request fits: windows of address neighbours.
//!
//! A window is a chain of neighbouring runs that are free, waiting (and not withheld by a claim), or
//! idle residents whose fences can be reached. Planning changes nothing: a window that is long enough
//! proves that room can be made, and without one nothing is evicted.

use core::hash::{BuildHasher, Hash};

use super::Pool;
use crate::evict::Evict;
use crate::fence::Standing;
use crate::free_list::Tag;
use crate::resident::Ranks;
use crate::slots::NIL;
use crate::store::Store;

/// Runs from which a window is grown at most, for each of the two kinds of start.
pub(super) const STARTS_MAX: usize = 8;
/// Waits looked at for starts at most: claims may withhold any number of the oldest.
const WAITS_MAX: usize = 64;

/// Neighbouring runs whose owners give way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Window {
    pub(super) first: u32,
    pub(super) last: u32,
    /// Granules.
    len: u64,
    pub(super) cost: Cost,
}

/// What giving way costs. Ordered: evictions weigh more than any wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Cost {
    /// Sum over the residents to evict of price times granules. `u128`: prices of 64 bits times the granules of
    /// a slab cannot overflow it.
    price: u128,
    /// Runs that are waiting, or will be once evicted.
    pending: u32,
}

impl Cost {
    const FREE: Self = Self {
        price: 0,
        pending: 0,
    };

    pub(super) const fn is_pending(self) -> bool {
        self.pending > 0
    }

    fn add(&mut self, other: Self) {
        self.price += other.price;
        self.pending += other.pending;
    }

    fn sub(&mut self, other: Self) {
        self.price -= other.price;
        self.pending -= other.pending;
    }
}

/// What may be part of a window besides free runs.
#[derive(Clone, Copy)]
pub(super) struct Allowed {
    /// The idle entry to give up first, or `NIL` if none may give way.
    pub(super) coldest: u32,
    pub(super) waiting: bool,
}

impl<K: Eq + Hash, M, S: BuildHasher, St: Store, E: Evict> Pool<K, M, S, St, E> {
    /// The window for `need` granules, or `None` if no eviction and no wait can make one now.
    ///
    /// Waiting bytes come first: what is on its way is not evicted for a second time. Then the coldest
    /// entry, if it is enough; then windows grown around the coldest entries, the cheapest of a bounded
    /// number. If none of these is long enough, the whole map is looked at once: O(live runs).
    pub(super) fn plan(&self, need: u64, waiting: bool) -> Option<Window> {
        if waiting {
            let allowed = Allowed {
                coldest: NIL,
                waiting,
            };
            let found = self
                .timelines
                .oldest_first()
                .take(WAITS_MAX)
                .filter(|wait| wait.claim == NIL)
                .take(STARTS_MAX)
                .find_map(|wait| self.grow(wait.run, need, allowed, None));
            if found.is_some() {
                return found;
            }
        }
        let mut starts = self.coldest_first().take(STARTS_MAX).peekable();
        let allowed = Allowed {
            coldest: starts.peek().copied().unwrap_or(NIL),
            waiting,
        };
        if let Some(window) = self.alone(need, allowed) {
            return Some(window);
        }
        let mut best: Option<Window> = None;
        for entry in starts {
            let run = self.residents.entries[entry].run;
            let bound = best.map(|best| best.cost);
            if run != NIL
                && let Some(window) = self.grow(run, need, allowed, bound)
                && bound.is_none_or(|bound| window.cost < bound)
            {
                best = Some(window);
            }
        }
        best.or_else(|| self.cheapest(self.list.first_slot(), NIL, need, allowed))
    }

    /// The window of the coldest entry and its free neighbours, if that is enough and need not wait. O(1).
    fn alone(&self, need: u64, allowed: Allowed) -> Option<Window> {
        let run = self.residents.entries.get(allowed.coldest)?.run;
        if run == NIL || self.cost(run, allowed)?.is_pending() {
            return None;
        }
        let (first, last) = self.with_free_neighbours(run, run);
        self.cheapest(first, last, need, allowed)
    }

    /// Grows a window around `start` through its colder neighbour until it is long enough, then keeps the
    /// cheapest part of it that still is. Gives up where the window gets to cost more than `bound`.
    /// O(runs of the window).
    fn grow(&self, start: u32, need: u64, allowed: Allowed, bound: Option<Cost>) -> Option<Window> {
        let mut cost = self.cost(start, allowed)?;
        let (mut first, mut last) = (start, start);
        let mut len = self.list.node(start).len;
        while len < need {
            let (below, above) = (self.list.node(first).prev, self.list.node(last).next);
            let is_below = match (self.warmth(below, allowed), self.warmth(above, allowed)) {
                (Some(colder), Some(warmer)) => colder <= warmer,
                (below, above) => below.or(above).map(|_| below.is_some())?,
            };
            let run = if is_below { below } else { above };
            cost.add(self.cost(run, allowed)?);
            if bound.is_some_and(|bound| bound < cost) {
                return None;
            }
            len += self.list.node(run).len;
            *(if is_below { &mut first } else { &mut last }) = run;
        }
        // Free neighbours cost nothing and may make a resident at the other end superfluous.
        let (first, last) = self.with_free_neighbours(first, last);
        self.cheapest(first, last, need, allowed)
    }

    /// Whether a run is part of a window for `need` granules that waits for nothing. O(runs of the window).
    pub(super) fn can_help(&self, run: u32, need: u64, coldest: u32) -> bool {
        let allowed = Allowed {
            coldest,
            waiting: false,
        };
        if run == NIL || self.cost(run, allowed).is_none() {
            return false;
        }
        let mut len = self.list.node(run).len;
        for upwards in [true, false] {
            let mut at = run;
            while len < need {
                let node = self.list.node(at);
                at = if upwards { node.next } else { node.prev };
                if at == NIL || self.cost(at, allowed).is_none() {
                    break;
                }
                len += self.list.node(at).len;
            }
        }
        len >= need
    }

    fn with_free_neighbours(&self, first: u32, last: u32) -> (u32, u32) {
        let is_free = |run: u32| run != NIL && self.list.node(run).tag == Tag::Free;
        let (below, above) = (self.list.node(first).prev, self.list.node(last).next);
        (
            if is_free(below) { below } else { first },
            if is_free(above) { above } else { last },
        )
    }

    /// The cheapest window among the runs from `first` to `last`, or to the end of the map: one pass over
    /// the shortest windows that end at each run.
    fn cheapest(&self, first: u32, last: u32, need: u64, allowed: Allowed) -> Option<Window> {
        let has_room = self.list.has_room(1);
        let mut best: Option<Window> = None;
        let mut current: Option<Window> = None;
        let mut slot = first;
        while slot != NIL {
            let node = self.list.node(slot);
            if let Some(cost) = self.cost(slot, allowed) {
                let window = current.get_or_insert(Window {
                    first: slot,
                    last: slot,
                    len: 0,
                    cost: Cost::FREE,
                });
                window.last = slot;
                window.len += node.len;
                window.cost.add(cost);
                while window.first != window.last {
                    let first = self.list.node(window.first);
                    let rest = window.len - first.len;
                    // One run that cannot be cut would be left.
                    let is_stuck = !has_room && first.next == window.last && rest != need;
                    if rest < need || is_stuck {
                        break;
                    }
                    window.len -= first.len;
                    if let Some(cost) = self.cost(window.first, allowed) {
                        window.cost.sub(cost);
                    }
                    window.first = first.next;
                }
                if window.len >= need
                    && best.is_none_or(|best| window.cost < best.cost)
                    && self.has_room_for(window, need)
                {
                    best = Some(*window);
                }
            } else {
                current = None;
            }
            slot = if slot == last { NIL } else { node.next };
        }
        best
    }

    pub(super) fn coldest_first(&self) -> impl Iterator<Item = u32> + '_ {
        self.order.coldest_first(Ranks(&self.residents.entries))
    }

    fn price(&self, entry: u32, coldest: u32) -> u128 {
        let ranks = Ranks(&self.residents.entries);
        u128::from(self.order.price(entry, coldest, &ranks))
    }

    /// Whether the map can number what becomes of a window. One that waits may be cut at both ends; any other
    /// becomes one run, with a rest if it is longer than needed.
    fn has_room_for(&self, window: &Window, need: u64) -> bool {
        if self.list.has_room(2) {
            return true;
        }
        if window.cost.is_pending() {
            return false;
        }
        self.list.has_room(1)
            || window.first != window.last
            || window.len == need
            || self.with_free_neighbours(window.first, window.last) != (window.first, window.last)
    }

    /// What each granule of a run costs, to choose between neighbours, or `None` if it must not give way.
    fn warmth(&self, run: u32, allowed: Allowed) -> Option<(u128, u32)> {
        if run == NIL {
            return None;
        }
        let Cost { price, pending } = self.cost(run, allowed)?;
        Some((price / u128::from(self.list.node(run).len), pending))
    }

    /// What it costs that the owner of a run gives way, or `None` if it must not.
    fn cost(&self, run: u32, allowed: Allowed) -> Option<Cost> {
        let node = self.list.node(run);
        match node.tag {
            Tag::Free => Some(Cost::FREE),
            Tag::Waiting => {
                let withheld = self.timelines.wait(node.owner).claim != NIL;
                (allowed.waiting && !withheld).then_some(Cost {
                    price: 0,
                    pending: 1,
                })
            }
            Tag::Resident if allowed.coldest != NIL => {
                let resident = &self.residents.entries[node.owner];
                if resident.leases > 0 {
                    return None;
                }
                let price = self.price(node.owner, allowed.coldest) * u128::from(node.len);
                match self.timelines.standing(&resident.marks) {
                    Standing::Reached => Some(Cost { price, pending: 0 }),
                    Standing::Pending => allowed.waiting.then_some(Cost { price, pending: 1 }),
                    // Evicting it would quarantine its bytes: nothing gained.
                    Standing::Failed => None,
                }
            }
            _ => None,
        }
    }
}
