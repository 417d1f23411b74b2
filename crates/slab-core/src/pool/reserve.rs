//! Asking for bytes: what is free, what can be made free, what is on its way.

use core::hash::{BuildHasher, Hash};

use super::plan::{STARTS_MAX, Window};
use super::{Claim, Pool};
use crate::evict::Evict;
use crate::fence::Standing;
use crate::free_list::Tag;
use crate::region::Allocation;
use crate::resident::Entry;
use crate::slots::NIL;
use crate::store::Store;

/// A reserve that evicts the coldest one by one stops before their bytes exceed this many times the
/// request. More gains no hits on the trace of `docs/EVICTION.md`.
const SPARE: u64 = 4;

/// Answer of [`Pool::reserve`].
#[must_use = "an allocation or claim in the answer would leak"]
#[derive(Debug, PartialEq, Eq)]
pub enum Reserve {
    /// The bytes, ready to be written.
    Ready(Allocation),
    /// The bytes are on their way: poll the claim after the next `handle_reached`.
    Later(Claim),
    /// Not now: what would have to give way is leased, owned or withheld, or the map can number no more runs.
    /// Nothing was evicted.
    Full,
    /// Never: the request exceeds the usable capacity. Nothing was evicted.
    TooLarge,
}

/// A window after its residents were evicted: free and waiting runs only.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cleared {
    /// The runs that contain the window's first and last granule.
    pub(super) first: u32,
    pub(super) last: u32,
    /// The window's granules.
    pub(super) start: u64,
    pub(super) end: u64,
}

impl<K: Eq + Hash, M, S: BuildHasher, St: Store, E: Evict> Pool<K, M, S, St, E> {
    /// Asks for `len` bytes, evicting idle residents if that, and nothing less, makes room.
    ///
    /// First it is made sure that there can be room; if not, nothing is evicted. Then residents go in the
    /// order of the eviction policy, until the bytes fit or four times as many have gone; then the window
    /// of neighbours that costs least.
    ///
    /// Bytes that already wait for a fence count as on their way: if they make room, the answer is a
    /// claim and nothing is evicted. Zero bytes are always ready and own nothing.
    ///
    /// # Complexity
    /// O(log runs) when a free run fits. Otherwise O(runs of the windows tried), a bounded number of
    /// them, and O(log runs) amortised an eviction; only if none fits is the whole map looked at once. A
    /// size that was refused is refused again in O(1) until something becomes free or evictable, unless the map could
    /// number no more runs then.
    pub fn reserve(&mut self, len: u64) -> Reserve {
        if len == 0 {
            return Reserve::Ready(Allocation::empty(self.list.id()));
        }
        let need = self.list.granules_of(len);
        if need > self.list.total() {
            self.too_large += 1;
            return Reserve::TooLarge;
        }
        if let Ok(Some(run)) = self.list.take(need) {
            return Reserve::Ready(self.list.token(run, len));
        }
        if let Some(run) = self.take_coldest(need) {
            return Reserve::Ready(self.list.token(run, len));
        }
        let claimable = self.claims.len() < self.claims_max;
        if let Some(window) = self.plan_remembering(need, claimable) {
            if window.cost.is_pending() {
                let cleared = self.clear(window);
                return self.claim(cleared, len, need);
            }
            if let Some(run) = self.take_planned(window, need) {
                return Reserve::Ready(self.list.token(run, len));
            }
        }
        self.classes.count_refusal(len);
        Reserve::Full
    }

    /// The commonest plan, without planning: nothing is on its way, and the coldest resident and its free
    /// neighbours are enough. What [`plan`](Self::plan) and [`take_planned`](Self::take_planned) would do then.
    fn take_coldest(&mut self, need: u64) -> Option<u32> {
        if self.timelines.is_waited() {
            return None;
        }
        let entry = self.coldest()?;
        let Entry { run, ref marks, .. } = self.residents.entries[entry];
        if run == NIL || self.timelines.standing(marks) != Standing::Reached {
            return None;
        }
        let (own, len) = self.list.len_once_free(run);
        // What is longer than needed leaves a rest, which takes one more run unless a neighbour gives its own.
        if len < need || (len != need && len == own && !self.list.has_room(1)) {
            return None;
        }
        let run = self.evict_entry(entry);
        self.list.take_from(run, need).ok()
    }

    /// Makes room where a window that waits for nothing proves that it can be made: evicts the coldest
    /// one after the other, which keeps the order and costs no more than what comes back, as long as that
    /// stays within [`SPARE`] times the request; then what a window planned anew still needs.
    pub(super) fn take_planned(&mut self, window: Window, need: u64) -> Option<u32> {
        let mut spare = need.saturating_mul(SPARE);
        let mut evicted = false;
        // Without room for one more run, what is longer than needed cannot be cut: the window alone is sure.
        while self.list.has_room(1)
            && let Some(entry) = self.coldest_that_helps(need)
        {
            let len = self.list.node(self.residents.entries[entry].run).len;
            if len > spare {
                break;
            }
            spare -= len;
            evicted = true;
            let run = self.evict_entry(entry);
            if self.list.node(run).len >= need {
                return self.list.take_from(run, need).ok();
            }
        }
        // The window's runs may have merged with others, but what they were can still give way.
        let window = if evicted {
            self.plan(need, false)?
        } else {
            window
        };
        let cleared = self.clear(window);
        self.list.take_from(cleared.first, need).ok()
    }

    /// The coldest idle resident, of a bounded number, that is part of a window for `need` granules.
    fn coldest_that_helps(&self, need: u64) -> Option<u32> {
        let mut entries = self.coldest_first().take(STARTS_MAX).peekable();
        let coldest = *entries.peek()?;
        entries.find(|entry| self.can_help(self.residents.entries[*entry].run, need, coldest))
    }

    /// Plans, and remembers a refusal until something becomes free or evictable.
    pub(super) fn plan_remembering(&mut self, need: u64, claimable: bool) -> Option<Window> {
        if need >= self.refused_min {
            return None;
        }
        let window = self.plan(need, claimable);
        // Without room for more runs a longer request may fit where a shorter one would have to be cut.
        if window.is_none() && claimable && self.list.has_room(2) {
            self.refused_min = need;
        }
        window
    }

    /// Evicts exactly the residents of a window.
    pub(super) fn clear(&mut self, window: Window) -> Cleared {
        let start = self.list.node(window.first).start;
        let last = self.list.node(window.last);
        let end = last.start + last.len;
        let mut first = NIL;
        let mut slot = window.first;
        loop {
            let node = self.list.node(slot);
            if node.tag == Tag::Resident {
                // Merging keeps the lower of two free runs, so `first` stays what it is.
                slot = self.evict_entry(node.owner);
            }
            if first == NIL {
                first = slot;
            }
            let node = self.list.node(slot);
            if node.start + node.len >= end {
                return Cleared {
                    first,
                    last: slot,
                    start,
                    end,
                };
            }
            slot = node.next;
        }
    }
}
