//! Which idle residents to give up so that one request fits: windows of address neighbours.
//!
//! A window is a chain of neighbouring runs that are free, waiting (and not withheld by a claim), or
//! idle residents whose fences can be reached. Planning changes nothing: a window that is long enough is
//! plan and proof at once, and without one nothing is evicted.

use core::hash::{BuildHasher, Hash};

use super::Pool;
use crate::evict::Evict;
use crate::fence::Standing;
use crate::free_list::Tag;
use crate::slots::NIL;

/// Runs from which a window is grown at most, for each of the two kinds of start.
const STARTS_MAX: usize = 8;
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
    /// Sum of the prices of the residents to evict. `u128`: 2^32 prices of 64 bits cannot overflow it.
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
    pub(super) idle: bool,
    pub(super) waiting: bool,
}

impl<K: Eq + Hash, M, S: BuildHasher> Pool<K, M, S> {
    /// The window for `need` granules, or `None` if no eviction and no wait can make one now.
    ///
    /// Waiting bytes come first: what is on its way is not evicted for a second time. Then windows grown
    /// around the coldest entries, the cheapest of a bounded number. If none of these is long enough, the
    /// whole map is looked at once: O(live runs).
    pub(super) fn plan(&self, need: u64, waiting: bool) -> Option<Window> {
        if waiting {
            let allowed = Allowed {
                idle: false,
                waiting,
            };
            let found = self
                .timelines
                .oldest_first()
                .take(WAITS_MAX)
                .filter(|wait| wait.claim == NIL)
                .take(STARTS_MAX)
                .find_map(|wait| self.grow(wait.run, need, allowed));
            if found.is_some() {
                return found;
            }
        }
        let allowed = Allowed {
            idle: true,
            waiting,
        };
        self.plan_around_coldest(need, allowed)
            .or_else(|| self.cheapest(self.list.first_slot(), NIL, need, allowed))
    }

    fn plan_around_coldest(&self, need: u64, allowed: Allowed) -> Option<Window> {
        let mut best: Option<Window> = None;
        let mut start = self.order.coldest();
        for _ in 0..STARTS_MAX {
            let Some(entry) = start else { break };
            // A window that contains this entry, or any warmer one, costs no less than the entry itself.
            let floor = u128::from(self.order.price(entry));
            if best.is_some_and(|best| best.cost.price <= floor && !best.cost.is_pending()) {
                break;
            }
            let run = self.residents.entries[entry].run;
            if run != NIL
                && let Some(window) = self.grow(run, need, allowed)
                && best.is_none_or(|best| window.cost < best.cost)
            {
                best = Some(window);
            }
            start = self.order.warmer_than(entry);
        }
        best
    }

    /// Grows a window around `start` through its cheaper neighbour until it is long enough, then keeps the
    /// cheapest part of it that still is. O(runs of the window).
    fn grow(&self, start: u32, need: u64, allowed: Allowed) -> Option<Window> {
        self.cost(start, allowed)?;
        let (mut first, mut last) = (start, start);
        let mut len = self.list.node(start).len;
        while len < need {
            let below = self.neighbour(self.list.node(first).prev, allowed);
            let above = self.neighbour(self.list.node(last).next, allowed);
            let is_below = match (below, above) {
                (Some(below), Some(above)) => below <= above,
                (below, above) => below.or(above).map(|_| below.is_some())?,
            };
            let end = if is_below { &mut first } else { &mut last };
            *end = if is_below {
                self.list.node(*end).prev
            } else {
                self.list.node(*end).next
            };
            len += self.list.node(*end).len;
        }
        // Free neighbours cost nothing and may make a resident at the other end superfluous.
        if self.neighbour(self.list.node(first).prev, allowed) == Some(Cost::FREE) {
            first = self.list.node(first).prev;
        }
        if self.neighbour(self.list.node(last).next, allowed) == Some(Cost::FREE) {
            last = self.list.node(last).next;
        }
        self.cheapest(first, last, need, allowed)
    }

    /// The cheapest window among the runs from `first` to `last`, or to the end of the map: one pass over
    /// the shortest windows that end at each run.
    fn cheapest(&self, first: u32, last: u32, need: u64, allowed: Allowed) -> Option<Window> {
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
                    if window.len - first.len < need {
                        break;
                    }
                    window.len -= first.len;
                    if let Some(cost) = self.cost(window.first, allowed) {
                        window.cost.sub(cost);
                    }
                    window.first = first.next;
                }
                if window.len >= need && best.is_none_or(|best| window.cost < best.cost) {
                    best = Some(*window);
                }
            } else {
                current = None;
            }
            slot = if slot == last { NIL } else { node.next };
        }
        best
    }

    fn neighbour(&self, run: u32, allowed: Allowed) -> Option<Cost> {
        if run == NIL {
            None
        } else {
            self.cost(run, allowed)
        }
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
            Tag::Idle if allowed.idle => {
                let price = u128::from(self.order.price(node.owner));
                match self
                    .timelines
                    .standing(&self.residents.entries[node.owner].marks)
                {
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
