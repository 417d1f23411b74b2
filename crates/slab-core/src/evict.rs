//! The order in which idle residents are given up, behind one trait.
//!
//! A policy sees entry numbers, hashes, lengths and events, never keys or offsets: what fits where is
//! the planner's business (`pool/plan.rs`), what an entry is worth is the policy's. A reserve never
//! fails for a policy's sake: every new resident gets its bytes if any idle ones can make room, so what
//! a policy knows of a key acts only as the rank that the key's resident starts with.

mod credit;
mod ghosts;
mod lru;

use core::ops::{Index, IndexMut};

pub use credit::{Credit, CreditRank};
pub use lru::{Lru, LruRank};

/// Ranks idle residents for a [`Pool`](crate::Pool).
///
/// The pool numbers its residents ("entries") and reports what happens to them; the policy keeps the
/// idle ones in order. Numbers are small (below the most residents the pool has had at a time) and are
/// used again after [`on_remove`](Self::on_remove).
///
/// The life of an entry, as a policy sees it:
/// `on_insert on_hit* (on_idle on_hit+)* on_idle? on_remove`. It starts leased; idle means that nobody
/// leases it; `on_hit` ends idleness.
///
/// What a policy keeps of each entry is its [`Rank`](Self::Rank). The pool stores it beside what it keeps itself, so
/// that a lease touches one place in memory, and lends the ranks of all entries to each call. A policy that
/// keeps nothing there says `type Rank = ()`.
///
/// [`Credit`] is the default, [`Lru`] the plain one. A policy changes which residents give way, never
/// whether a reserve succeeds.
pub trait Evict {
    /// What the policy keeps of each entry.
    type Rank;
    /// Entries that the policy has room for: a pool has no more residents.
    const ENTRIES_MAX: u32 = u32::MAX;
    /// A key became resident as `entry`, leased by its publisher. `hash` is the pool's hash of the key,
    /// `len` the bytes of the content.
    fn on_insert(&mut self, entry: u32, hash: u64, len: u64) -> Self::Rank;
    /// An entry, idle or leased, was leased once more: this is a use.
    fn on_hit(&mut self, entry: u32, ranks: &mut impl IndexMut<u32, Output = Self::Rank>);
    /// An entry's last lease ended: it can be evicted from now on.
    fn on_idle(&mut self, entry: u32, ranks: &mut impl IndexMut<u32, Output = Self::Rank>);
    /// An entry, idle or leased, is not its key's any more. An idle one was evicted or displaced. `hash` is
    /// the pool's hash of the key.
    fn on_remove(
        &mut self,
        entry: u32,
        hash: u64,
        ranks: &mut impl IndexMut<u32, Output = Self::Rank>,
    );
    /// The idle entries in the order of giving them up. The pool looks at a bounded number of them.
    fn coldest_first<'a>(
        &'a self,
        ranks: impl Index<u32, Output = Self::Rank> + 'a,
    ) -> impl Iterator<Item = u32> + 'a;
    /// What [`coldest_first`](Self::coldest_first) yields first. Worth writing where that can be had for less
    /// than an iterator.
    fn coldest(&self, ranks: impl Index<u32, Output = Self::Rank>) -> Option<u32> {
        self.coldest_first(ranks).next()
    }
    /// What each byte of an idle entry costs if the entry is given up, at least 1, where `coldest` is what
    /// [`coldest_first`](Self::coldest_first) yields first. Sums over neighbours are compared. Should not
    /// fall along `coldest_first`.
    fn price(&self, entry: u32, coldest: u32, ranks: &impl Index<u32, Output = Self::Rank>) -> u64;
}
