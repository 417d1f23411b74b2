//! Recency with credit for use and for being small: the default.

use alloc::vec::Vec;

use super::Evict;
use super::ghosts::Ghosts;
use crate::slots::NIL;

/// Uses beyond this many earn no more credit, so that what was popular once is given up in the end.
const USES_MAX: u8 = 8;
/// Queues a use is worth. One queue is also what half the length is worth.
const QUEUES_PER_USE: usize = 4;
const QUEUES: usize = QUEUES_PER_USE * USES_MAX as usize + 64;
/// The queue of an entry that is not idle.
const NONE: u8 = u8::MAX;

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
/// Uses of keys that left the pool are remembered, boundedly (see [`Credit::new`]), so a key that comes
/// back starts with what it had earned.
///
/// # Complexity
/// Every event O(1). A step of [`coldest_first`](Evict::coldest_first) compares the heads of the queues
/// that have members, at most 96, one for each level of credit.
///
/// # Source
/// Our own; `docs/EVICTION.md` compares it with what else was tried.
#[derive(Debug)]
pub struct Credit {
    entries: Vec<Entry>,
    /// Idle entries by level of credit, each queue in the order of becoming idle.
    queues: [Queue; QUEUES],
    /// Bit `q`: queue `q` has members.
    taken: u128,
    ghosts: Ghosts,
    /// Entries that became idle so far.
    clock: u64,
    gap: u64,
}

#[derive(Clone, Copy, Debug)]
struct Queue {
    oldest: u32,
    newest: u32,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    hash: u64,
    /// When it last became idle.
    touched: u64,
    older: u32,
    newer: u32,
    uses: u8,
    /// Credit for the length.
    small: u8,
    queue: u8,
}

impl Credit {
    /// A policy without entries: room for `entries` of them before it grows, and a memory for `ghosts` keys
    /// that left, of 8 bytes each, allocated at once. A [`Pool`](crate::Pool) made without a policy of
    /// the caller's remembers as many as it may have residents, at most 65,536.
    #[must_use]
    pub fn new(entries: usize, ghosts: u32) -> Self {
        let empty = Queue {
            oldest: NIL,
            newest: NIL,
        };
        Self {
            entries: Vec::with_capacity(entries),
            queues: [empty; QUEUES],
            taken: 0,
            ghosts: Ghosts::new(ghosts),
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

    /// When an idle entry is due, in eighths of a tick. Cannot overflow before 2^60 ticks; the gap
    /// is below the clock.
    fn due(&self, entry: u32) -> u64 {
        let Entry { touched, queue, .. } = self.entries[entry as usize];
        touched * 8 + self.gap.saturating_mul(u64::from(queue))
    }

    /// Takes an entry out of its queue, if it is in one.
    fn unlink(&mut self, entry: u32) {
        let Entry {
            older,
            newer,
            queue,
            ..
        } = self.entries[entry as usize];
        if queue == NONE {
            return;
        }
        let index = usize::from(queue);
        match older {
            NIL => self.queues[index].oldest = newer,
            older => self.entries[older as usize].newer = newer,
        }
        match newer {
            NIL => self.queues[index].newest = older,
            newer => self.entries[newer as usize].older = older,
        }
        if self.queues[index].oldest == NIL {
            self.taken &= !(1 << queue);
        }
        self.entries[entry as usize].queue = NONE;
    }
}

impl Evict for Credit {
    fn on_insert(&mut self, entry: u32, hash: u64, len: u64) {
        let mut uses = 1;
        if let Some((before, touched)) = self.ghosts.take(hash) {
            uses = (before + 1).min(USES_MAX);
            self.learn(u64::from((self.clock as u32).wrapping_sub(touched)));
        }
        let fresh = Entry {
            hash,
            touched: self.clock,
            older: NIL,
            newer: NIL,
            uses,
            small: len.max(1).leading_zeros() as u8,
            queue: NONE,
        };
        let index = entry as usize;
        if self.entries.len() <= index {
            self.entries.resize(index + 1, fresh);
        }
        self.entries[index] = fresh;
    }

    fn on_hit(&mut self, entry: u32) {
        let known = &mut self.entries[entry as usize];
        known.uses = (known.uses + 1).min(USES_MAX);
        if known.queue != NONE {
            let gap = self.clock - known.touched;
            self.learn(gap);
            self.unlink(entry);
        }
    }

    fn on_idle(&mut self, entry: u32) {
        self.clock += 1;
        let idle = &mut self.entries[entry as usize];
        let index = QUEUES_PER_USE * usize::from(idle.uses) + usize::from(idle.small);
        let Queue { oldest, newest } = &mut self.queues[index];
        idle.touched = self.clock;
        idle.older = *newest;
        idle.newer = NIL;
        idle.queue = index as u8;
        let previous = core::mem::replace(newest, entry);
        match previous {
            NIL => *oldest = entry,
            previous => self.entries[previous as usize].newer = entry,
        }
        self.taken |= 1 << index;
    }

    fn on_remove(&mut self, entry: u32) {
        self.unlink(entry);
        let Entry {
            hash,
            uses,
            touched,
            ..
        } = self.entries[entry as usize];
        self.ghosts
            .put(hash, uses, touched as u32, self.clock as u32);
    }

    fn coldest_first(&self) -> impl Iterator<Item = u32> + '_ {
        let mut taken = self.taken;
        // Read only where the bit is set.
        let mut heads = [NIL; QUEUES];
        let mut rest = taken;
        while rest != 0 {
            let queue = rest.trailing_zeros() as usize;
            heads[queue] = self.queues[queue].oldest;
            rest &= rest - 1;
        }
        core::iter::from_fn(move || {
            let mut coldest = None;
            let mut rest = taken;
            while rest != 0 {
                let queue = rest.trailing_zeros() as usize;
                let due = self.due(heads[queue]);
                if coldest.is_none_or(|(first, _)| due < first) {
                    coldest = Some((due, queue));
                }
                rest &= rest - 1;
            }
            let (_, queue) = coldest?;
            let entry = heads[queue];
            heads[queue] = self.entries[entry as usize].newer;
            if heads[queue] == NIL {
                taken &= !(1 << queue);
            }
            Some(entry)
        })
    }

    fn price(&self, entry: u32, coldest: u32) -> u64 {
        self.due(entry).saturating_sub(self.due(coldest)) + 1
    }
}
