//! S3-FIFO.

use std::collections::{HashSet, VecDeque};

use std::ops::{Index, IndexMut};

use slab_core::Evict;

use super::shelf::{NIL, Shelf};

const SMALL: usize = 0;
const MAIN: usize = 1;
const USES_MAX: u8 = 3;

/// Three FIFO queues: what is new goes through a small one, and only what was used again in it, or came back
/// soon after it, enters the main one.
///
/// As published, in bytes: the small queue is a tenth of the capacity, the ghosts are as many bytes as the main
/// queue. What gives way is decided when it is asked for; the queues are turned when it has gone. An entry that
/// the pool cannot use, or that is leased, is passed over where it stands.
///
/// # Source
/// Yang, Zhang, Qiu, Yue, Rashmi: "FIFO queues are all you need for cache eviction" (SOSP 2023), algorithm 1.
#[derive(Debug)]
pub struct S3Fifo {
    shelf: Shelf<2>,
    ghosts: Ghosts,
    small_max: u64,
}

impl S3Fifo {
    /// Without entries, for a cache of so many bytes.
    #[must_use]
    pub fn new(capacity: u64) -> Self {
        let small_max = capacity / 10;
        Self {
            shelf: Shelf::new(),
            ghosts: Ghosts::new(capacity - small_max),
            small_max,
        }
    }

    /// Idle entries of the small queue that were not used again, as many as are beyond its share.
    fn surplus(&self) -> impl Iterator<Item = u32> + '_ {
        let mut bytes = self.shelf.bytes(SMALL);
        let small = self.shelf.oldest_first(SMALL);
        let unused =
            small.filter(|entry| self.shelf.is_idle(*entry) && self.shelf.get(*entry).uses <= 1);
        unused.take_while(move |entry| {
            let is_surplus = bytes >= self.small_max;
            bytes -= self.shelf.get(*entry).len;
            is_surplus
        })
    }

    /// Idle entries of the main queue as it would turn: each use lets an entry pass once.
    fn turning(&self) -> impl Iterator<Item = u32> + '_ {
        (0..=USES_MAX).flat_map(move |uses| {
            let main = self.shelf.oldest_first(MAIN);
            main.filter(move |entry| {
                self.shelf.is_idle(*entry) && self.shelf.get(*entry).uses == uses
            })
        })
    }

    /// Moves what was used again from before `entry` in the small queue to the main one.
    fn promote_before(&mut self, entry: u32) {
        let mut at = self.shelf.oldest(SMALL);
        while at != entry && at != NIL {
            let next = self.shelf.newer(at);
            if self.shelf.is_idle(at) && self.shelf.get(at).uses > 1 {
                self.shelf.get_mut(at).uses = 0;
                self.shelf.move_to(at, MAIN);
            }
            at = next;
        }
    }

    /// Turns the main queue until `entry`, which is in it, is due.
    fn turn_to(&mut self, entry: u32) {
        let mut at = self.shelf.oldest(MAIN);
        while at != entry || self.shelf.get(entry).uses > 0 {
            let next = self.shelf.newer(at);
            if self.shelf.is_idle(at) {
                let uses = &mut self.shelf.get_mut(at).uses;
                *uses = uses.saturating_sub(1);
                self.shelf.move_to(at, MAIN);
            }
            at = if next == NIL {
                self.shelf.oldest(MAIN)
            } else {
                next
            };
        }
    }

    /// Idle entries in the order of giving them up.
    fn order(&self) -> impl Iterator<Item = u32> + '_ {
        let small = move |is_used: bool| {
            self.shelf.oldest_first(SMALL).filter(move |entry| {
                self.shelf.is_idle(*entry) && (self.shelf.get(*entry).uses > 1) == is_used
            })
        };
        // Counted only if it comes to that.
        let rest = std::iter::once(()).flat_map(move |()| {
            let surplus = self.surplus().count();
            small(false).skip(surplus).chain(small(true))
        });
        self.surplus().chain(self.turning()).chain(rest)
    }
}

impl Evict for S3Fifo {
    type Rank = ();

    fn on_insert(&mut self, entry: u32, hash: u64, len: u64) {
        let queue = if self.ghosts.take(hash) { MAIN } else { SMALL };
        self.shelf.insert(entry, hash, len, queue);
    }

    fn on_hit(&mut self, entry: u32, _: &mut impl IndexMut<u32, Output = ()>) {
        let entry = self.shelf.get_mut(entry);
        entry.uses = (entry.uses + 1).min(USES_MAX);
        entry.idle = false;
    }

    fn on_idle(&mut self, entry: u32, _: &mut impl IndexMut<u32, Output = ()>) {
        self.shelf.get_mut(entry).idle = true;
    }

    fn on_remove(&mut self, entry: u32, _: u64, _: &mut impl IndexMut<u32, Output = ()>) {
        let is_due = self.order().next() == Some(entry);
        let known = *self.shelf.get(entry);
        match known.queue {
            SMALL if is_due => self.promote_before(entry),
            MAIN if is_due => self.turn_to(entry),
            _ => {}
        }
        if known.idle && known.queue == SMALL {
            self.ghosts.put(known.hash, known.len);
        }
        self.shelf.remove(entry);
    }

    fn coldest_first<'a>(
        &'a self,
        _: impl Index<u32, Output = ()> + 'a,
    ) -> impl Iterator<Item = u32> + 'a {
        self.order()
    }

    fn price(&self, entry: u32, _: u32, _: &impl Index<u32, Output = ()>) -> u64 {
        let uses = u64::from(self.shelf.get(entry).uses);
        (self.shelf.distance(entry) + 1) * (uses + 1)
    }
}

/// Hashes of what left the small queue, the oldest forgotten first.
#[derive(Debug)]
struct Ghosts {
    queue: VecDeque<(u64, u64)>,
    known: HashSet<u64>,
    bytes: u64,
    bytes_max: u64,
}

impl Ghosts {
    fn new(bytes_max: u64) -> Self {
        Self {
            queue: VecDeque::new(),
            known: HashSet::new(),
            bytes: 0,
            bytes_max,
        }
    }

    fn put(&mut self, hash: u64, len: u64) {
        self.known.insert(hash);
        self.queue.push_back((hash, len));
        self.bytes += len;
        while self.bytes > self.bytes_max {
            let Some((hash, len)) = self.queue.pop_front() else {
                return;
            };
            self.known.remove(&hash);
            self.bytes -= len;
        }
    }

    /// A hash that came back leaves its place in the queue behind.
    fn take(&mut self, hash: u64) -> bool {
        self.known.remove(&hash)
    }
}
