//! Recency with credit for use and for being small: the default.

use core::fmt;
use core::ops::{Index, IndexMut};

use super::Evict;
use super::ghosts::Ghosts;
use crate::slots::NIL;
#[cfg(feature = "alloc")]
use crate::store::Heap;
use crate::store::{Array, Inline, Store};

/// Uses beyond this many earn no more credit, so that what was popular once is given up in the end.
const USES_MAX: u8 = 8;
/// Queues a use is worth. One queue is also what half the length is worth.
const QUEUES_PER_USE: usize = 4;
const QUEUES: usize = QUEUES_PER_USE * USES_MAX as usize + 64;
/// The queue of an entry that is not idle.
const NONE: u8 = u8::MAX;

// The type is written once for both cases of the default store, which exists only with the feature.
macro_rules! define_credit {
    ($($default:tt)*) => {
        /// Least recently used first, with credit for every use and for being small.
        ///
        /// Time is counted in idle entries: each [`on_idle`](Evict::on_idle) is one tick. An entry is due at the
        /// time it became idle plus `credit × gap / 8`, where `credit` is four a use, up to eight uses, less
        /// one for each doubling of the length; the entry that is due first is the coldest. `gap` is how long
        /// keys typically take to be used again, a running median of what the policy observes. So in a pool much
        /// smaller than that, what was used repeatedly and what is small stays until it had its chance; in a pool
        /// that outlives the gap anyway the order is close to least recently used; and until a key has come back
        /// for the first time it is exactly that.
        ///
        /// Uses of keys that left the pool are remembered, boundedly (see `Credit::new` and [`Credit::new_inline`]), so a key that comes
        /// back starts with what it had earned.
        ///
        /// # Complexity
        /// Every event O(1). A step of [`coldest_first`](Evict::coldest_first) compares the heads of the queues
        /// that have members, at most 96, one for each level of credit.
        ///
        /// # Source
        /// Our own; `docs/EVICTION.md` compares it with what else was tried.
        pub struct Credit<St: Store $($default)*> {
            /// Idle entries by level of credit, each queue in the order of becoming idle.
            queues: [Queue; QUEUES],
            /// Neighbours in the queue, by entry. Apart from the ranks: two of three that change when an entry
            /// leaves its queue are of other entries, and here they lie close together.
            links: St::Array<Links>,
            /// Bit `q`: queue `q` has members.
            taken: u128,
            ghosts: Ghosts<St>,
            /// Entries that became idle so far.
            clock: u64,
            gap: u64,
        }
    };
}

#[cfg(feature = "alloc")]
define_credit!(= Heap);
#[cfg(not(feature = "alloc"))]
define_credit!();

#[derive(Clone, Copy)]
struct Queue {
    oldest: u32,
    newest: u32,
    /// When the oldest became idle.
    since: u64,
}

#[derive(Clone, Copy)]
struct Links {
    older: u32,
    newer: u32,
}

/// What [`Credit`] keeps of an entry.
#[derive(Clone, Copy, Debug)]
pub struct CreditRank {
    /// When it last became idle.
    touched: u64,
    uses: u8,
    /// Credit for the length.
    small: u8,
    queue: u8,
}

#[cfg(feature = "alloc")]
impl Credit<Heap> {
    /// A policy without entries, with a memory for `ghosts` keys that left, of 8 bytes each, allocated at
    /// once. A [`Pool`](crate::Pool) made without a policy of the caller's remembers as many as it may have
    /// residents, at most 65,536. O(ghosts).
    #[must_use]
    pub fn new(ghosts: u32) -> Self {
        Self::with(Ghosts::new(ghosts))
    }
}

impl<const SLOTS: usize, const CLASSES: usize> Credit<Inline<SLOTS, CLASSES>> {
    /// A policy without entries and without a heap, with a memory for as many keys that left as the store has
    /// slots. O(slots).
    #[must_use]
    pub const fn new_inline() -> Self {
        const { Inline::<SLOTS, CLASSES>::IS_VALID };
        Self::with(Ghosts::new_inline())
    }
}

impl<St: Store> Credit<St> {
    const fn with(ghosts: Ghosts<St>) -> Self {
        let empty = Queue {
            oldest: NIL,
            newest: NIL,
            since: 0,
        };
        Self {
            queues: [empty; QUEUES],
            links: <St::Array<Links> as Array<Links>>::EMPTY,
            taken: 0,
            ghosts,
            clock: 0,
            gap: 0,
        }
    }

    /// A key was used again after `gap` ticks. Steps of a 32nd up and down balance where as many gaps
    /// are longer as are shorter.
    fn learn(&mut self, gap: u64) {
        if self.gap == 0 {
            self.gap = gap;
        } else if gap > self.gap {
            self.gap += self.gap / 32 + 1;
        } else {
            self.gap -= self.gap / 32;
        }
    }

    /// When an entry is due that became idle at `since` and stands in `queue`, in eighths of a tick. Cannot
    /// overflow before 2^60 ticks; the gap is below the clock.
    const fn due(&self, since: u64, queue: usize) -> u64 {
        since * 8 + self.gap.saturating_mul(queue as u64)
    }

    /// Takes an entry out of this queue.
    #[inline]
    fn unlink(&mut self, entry: u32, queue: u8, ranks: &impl Index<u32, Output = CreditRank>) {
        let Links { older, newer } = self.links[entry as usize];
        let ends = &mut self.queues[usize::from(queue)];
        match newer {
            NIL => ends.newest = older,
            newer => self.links[newer as usize].older = older,
        }
        if older != NIL {
            self.links[older as usize].newer = newer;
            return;
        }
        ends.oldest = newer;
        match newer {
            NIL => self.taken &= !(1 << queue),
            newer => ends.since = ranks[newer].touched,
        }
    }
}

impl<St: Store> Evict for Credit<St> {
    type Rank = CreditRank;
    const ENTRIES_MAX: u32 = St::SLOTS_MAX;

    fn on_insert(&mut self, entry: u32, hash: u64, len: u64) -> CreditRank {
        let mut uses = 1;
        if let Some((before, touched)) = self.ghosts.take(hash) {
            uses = (before + 1).min(USES_MAX);
            self.learn(u64::from((self.clock as u32).wrapping_sub(touched)));
        }
        while self.links.len() <= entry as usize {
            let pushed = self.links.push(Links {
                older: NIL,
                newer: NIL,
            });
            assert!(pushed.is_ok(), "entries are numbered below the slots");
        }
        CreditRank {
            touched: self.clock,
            uses,
            small: len.max(1).leading_zeros() as u8,
            queue: NONE,
        }
    }

    #[inline]
    fn on_hit(&mut self, entry: u32, ranks: &mut impl IndexMut<u32, Output = CreditRank>) {
        let rank = &mut ranks[entry];
        rank.uses = (rank.uses + 1).min(USES_MAX);
        let queue = core::mem::replace(&mut rank.queue, NONE);
        if queue != NONE {
            let gap = self.clock - rank.touched;
            self.learn(gap);
            self.unlink(entry, queue, ranks);
        }
    }

    #[inline]
    fn on_idle(&mut self, entry: u32, ranks: &mut impl IndexMut<u32, Output = CreditRank>) {
        self.clock += 1;
        let rank = &mut ranks[entry];
        let queue = QUEUES_PER_USE * usize::from(rank.uses) + usize::from(rank.small);
        rank.touched = self.clock;
        rank.queue = queue as u8;
        let ends = &mut self.queues[queue];
        let previous = core::mem::replace(&mut ends.newest, entry);
        self.links[entry as usize] = Links {
            older: previous,
            newer: NIL,
        };
        if previous != NIL {
            self.links[previous as usize].newer = entry;
            return;
        }
        ends.oldest = entry;
        ends.since = self.clock;
        self.taken |= 1 << queue;
    }

    fn on_remove(
        &mut self,
        entry: u32,
        hash: u64,
        ranks: &mut impl IndexMut<u32, Output = CreditRank>,
    ) {
        let CreditRank {
            uses,
            touched,
            queue,
            ..
        } = ranks[entry];
        if queue != NONE {
            self.unlink(entry, queue, ranks);
        }
        self.ghosts
            .put(hash, uses, touched as u32, self.clock as u32);
    }

    fn coldest_first<'a>(
        &'a self,
        ranks: impl Index<u32, Output = CreditRank> + 'a,
    ) -> impl Iterator<Item = u32> + 'a {
        let mut taken = self.taken;
        let mut heads = self.queues;
        core::iter::from_fn(move || {
            let queue = self.first_due(taken, &heads)?;
            let head = &mut heads[queue];
            let entry = head.oldest;
            head.oldest = self.links[entry as usize].newer;
            if head.oldest == NIL {
                taken &= !(1 << queue);
            } else {
                head.since = ranks[head.oldest].touched;
            }
            Some(entry)
        })
    }

    fn coldest(&self, _: impl Index<u32, Output = CreditRank>) -> Option<u32> {
        let queue = self.first_due(self.taken, &self.queues)?;
        Some(self.queues[queue].oldest)
    }

    fn price(&self, entry: u32, coldest: u32, ranks: &impl Index<u32, Output = CreditRank>) -> u64 {
        let due = |entry| {
            let CreditRank { touched, queue, .. } = ranks[entry];
            self.due(touched, usize::from(queue))
        };
        due(entry).saturating_sub(due(coldest)) + 1
    }
}

impl<St: Store> Credit<St> {
    /// The queue whose oldest member is due first, the lowest of equals, among those with a bit in `taken`.
    fn first_due(&self, taken: u128, queues: &[Queue; QUEUES]) -> Option<usize> {
        let mut first = None;
        let mut rest = taken;
        while rest != 0 {
            let queue = rest.trailing_zeros() as usize;
            let due = self.due(queues[queue].since, queue);
            if first.is_none_or(|(earliest, _)| due < earliest) {
                first = Some((due, queue));
            }
            rest &= rest - 1;
        }
        first.map(|(_, queue)| queue)
    }
}

impl<St: Store> fmt::Debug for Credit<St> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credit")
            .field("clock", &self.clock)
            .field("gap", &self.gap)
            .finish_non_exhaustive()
    }
}
