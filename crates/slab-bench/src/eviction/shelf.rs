//! Entries in queues: what the contenders keep their entries in.

/// No entry.
pub(super) const NIL: u32 = u32::MAX;

/// Entries, each in one of `N` queues between its insertion and its removal, leased ones included.
#[derive(Debug)]
pub(super) struct Shelf<const N: usize> {
    entries: Vec<Entry>,
    queues: [Queue; N],
    clock: u64,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) hash: u64,
    pub(super) len: u64,
    /// Counted as the policy likes.
    pub(super) uses: u8,
    pub(super) idle: bool,
    pub(super) queue: usize,
    /// Grows along a queue.
    pub(super) order: u64,
    older: u32,
    newer: u32,
}

#[derive(Clone, Copy, Debug)]
struct Queue {
    oldest: u32,
    newest: u32,
    bytes: u64,
}

impl<const N: usize> Shelf<N> {
    pub(super) const fn new() -> Self {
        let queue = Queue {
            oldest: NIL,
            newest: NIL,
            bytes: 0,
        };
        Self {
            entries: Vec::new(),
            queues: [queue; N],
            clock: 0,
        }
    }

    /// A new entry, leased, the newest of a queue.
    pub(super) fn insert(&mut self, entry: u32, hash: u64, len: u64, queue: usize) {
        let fresh = Entry {
            hash,
            len,
            uses: 0,
            idle: false,
            queue,
            order: 0,
            older: NIL,
            newer: NIL,
        };
        let index = entry as usize;
        if self.entries.len() <= index {
            self.entries.resize(index + 1, fresh);
        }
        self.entries[index] = fresh;
        self.link(entry, queue);
    }

    pub(super) fn remove(&mut self, entry: u32) {
        self.unlink(entry);
    }

    /// Makes an entry the newest of a queue.
    pub(super) fn move_to(&mut self, entry: u32, queue: usize) {
        self.unlink(entry);
        self.link(entry, queue);
    }

    pub(super) fn get(&self, entry: u32) -> &Entry {
        &self.entries[entry as usize]
    }

    pub(super) fn get_mut(&mut self, entry: u32) -> &mut Entry {
        &mut self.entries[entry as usize]
    }

    pub(super) const fn oldest(&self, queue: usize) -> u32 {
        self.queues[queue].oldest
    }

    pub(super) const fn bytes(&self, queue: usize) -> u64 {
        self.queues[queue].bytes
    }

    /// The next newer entry of the same queue.
    pub(super) fn newer(&self, entry: u32) -> u32 {
        self.entries[entry as usize].newer
    }

    /// A queue from its oldest entry on.
    pub(super) fn oldest_first(&self, queue: usize) -> impl Iterator<Item = u32> + '_ {
        self.from(self.queues[queue].oldest)
    }

    /// An entry and the newer ones of its queue.
    pub(super) fn from(&self, entry: u32) -> impl Iterator<Item = u32> + '_ {
        let mut at = entry;
        std::iter::from_fn(move || {
            let entry = at;
            (entry != NIL).then(|| {
                at = self.newer(entry);
                entry
            })
        })
    }

    pub(super) fn is_idle(&self, entry: u32) -> bool {
        self.get(entry).idle
    }

    /// How far an entry stands behind the oldest of its queue; queues count one after the other.
    pub(super) fn distance(&self, entry: u32) -> u64 {
        let Entry { queue, order, .. } = *self.get(entry);
        let oldest = self.get(self.queues[queue].oldest).order;
        let before: u64 = (0..queue).map(|queue| self.span(queue)).sum();
        before + order - oldest
    }

    /// How far the newest of a queue stands behind the oldest, and one; zero if it is empty.
    pub(super) fn span(&self, queue: usize) -> u64 {
        let Queue { oldest, newest, .. } = self.queues[queue];
        if oldest == NIL {
            return 0;
        }
        self.get(newest).order - self.get(oldest).order + 1
    }

    fn link(&mut self, entry: u32, queue: usize) {
        self.clock += 1;
        let order = self.clock;
        let Queue {
            oldest,
            newest,
            bytes,
        } = &mut self.queues[queue];
        let older = std::mem::replace(newest, entry);
        if older == NIL {
            *oldest = entry;
        } else {
            self.entries[older as usize].newer = entry;
        }
        let linked = &mut self.entries[entry as usize];
        (linked.older, linked.newer) = (older, NIL);
        (linked.queue, linked.order) = (queue, order);
        *bytes += linked.len;
    }

    fn unlink(&mut self, entry: u32) {
        let Entry {
            len,
            queue,
            older,
            newer,
            ..
        } = *self.get(entry);
        match older {
            NIL => self.queues[queue].oldest = newer,
            older => self.get_mut(older).newer = newer,
        }
        match newer {
            NIL => self.queues[queue].newest = older,
            newer => self.get_mut(newer).older = older,
        }
        self.queues[queue].bytes -= len;
    }
}
