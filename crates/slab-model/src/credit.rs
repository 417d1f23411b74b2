//! The default eviction order, sorted anew each time.

use std::collections::BTreeMap;

const USES_MAX: u64 = 8;

#[derive(Clone, Copy, Debug)]
struct Entry {
    hash: u64,
    len: u64,
    uses: u64,
    touched: u64,
    idle: bool,
}

/// The reference for recency with credit for use and for being small. It never forgets a key.
#[derive(Clone, Debug, Default)]
pub struct NaiveCredit {
    ticks: u64,
    gap: Option<u64>,
    entries: BTreeMap<u32, Entry>,
    /// Uses and last touch of keys that left, by hash.
    left: BTreeMap<u64, (u64, u64)>,
}

impl NaiveCredit {
    /// A key became resident, leased.
    pub fn insert(&mut self, entry: u32, hash: u64, len: u64) {
        let mut uses = 1;
        if let Some((before, touched)) = self.left.remove(&hash) {
            uses = (before + 1).min(USES_MAX);
            self.learn(self.ticks - touched);
        }
        let fresh = Entry {
            hash,
            len,
            uses,
            touched: self.ticks,
            idle: false,
        };
        self.entries.insert(entry, fresh);
    }

    /// An entry was leased once more.
    pub fn hit(&mut self, entry: u32) {
        let Some(known) = self.entries.get_mut(&entry) else {
            return;
        };
        known.uses = (known.uses + 1).min(USES_MAX);
        if std::mem::take(&mut known.idle) {
            let gap = self.ticks - known.touched;
            self.learn(gap);
        }
    }

    /// An entry's last lease ended.
    pub fn idle(&mut self, entry: u32) {
        self.ticks += 1;
        if let Some(known) = self.entries.get_mut(&entry) {
            known.touched = self.ticks;
            known.idle = true;
        }
    }

    /// An entry is not its key's any more.
    pub fn remove(&mut self, entry: u32) {
        if let Some(Entry {
            hash,
            uses,
            touched,
            ..
        }) = self.entries.remove(&entry)
        {
            self.left.insert(hash, (uses, touched));
        }
    }

    /// Whether an entry can be evicted; `None` if there is no such entry.
    #[must_use]
    pub fn is_idle(&self, entry: u32) -> Option<bool> {
        self.entries.get(&entry).map(|entry| entry.idle)
    }

    /// The idle entries, the coldest first, each with the eighths of a tick between its due time and that
    /// of the coldest.
    #[must_use]
    pub fn order(&self) -> Vec<(u32, u64)> {
        let credit = |entry: &Entry| 4 * entry.uses + u64::from(entry.len.max(1).leading_zeros());
        let due = |entry: &Entry| 8 * entry.touched + self.gap.unwrap_or(0) * credit(entry);
        let mut idle: Vec<_> = self
            .entries
            .iter()
            .filter(|(_, entry)| entry.idle)
            .collect();
        idle.sort_by_key(|(_, entry)| (due(entry), credit(entry), entry.touched));
        let first = idle.first().map_or(0, |(_, entry)| due(entry));
        idle.iter()
            .map(|(number, entry)| (**number, due(entry) - first))
            .collect()
    }

    fn learn(&mut self, gap: u64) {
        self.gap = Some(match self.gap {
            None | Some(0) => gap,
            Some(known) if gap > known => known + known / 32 + 1,
            Some(known) => known - known / 32,
        });
    }
}
