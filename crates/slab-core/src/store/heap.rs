//! The heap: vectors and the hash table of `hashbrown`.

use alloc::vec::Vec;

use hashbrown::HashTable;

use super::{Array, Heap, Index, Store, sealed};

impl Store for Heap {}

impl sealed::Store for Heap {
    type Array<T> = Vec<T>;
    type Heads = Vec<u32>;
    type Index = HashTable<u32>;
    // Two of the nodes are no runs; the top bit of a slot is free for the index of free runs.
    const NODES_MAX: u32 = 1 << 31;
    const SLOTS_MAX: u32 = u32::MAX;
}

impl<T> Array<T> for Vec<T> {
    const EMPTY: Self = Self::new();

    #[inline]
    fn push(&mut self, value: T) -> Result<(), T> {
        Self::push(self, value);
        Ok(())
    }

    fn clear(&mut self) {
        Self::clear(self);
    }
}

impl Index for HashTable<u32> {
    const EMPTY: Self = Self::new();

    #[inline]
    fn find(&self, hash: u64, mut is: impl FnMut(u32) -> bool) -> Option<u32> {
        self.find(hash, |number| is(*number)).copied()
    }

    #[inline]
    fn insert(&mut self, hash: u64, number: u32, hash_of: impl Fn(u32) -> u64) {
        self.insert_unique(hash, number, |number| hash_of(*number));
    }

    #[inline]
    fn remove(&mut self, hash: u64, number: u32, _: impl Fn(u32) -> u64) {
        if let Ok(found) = self.find_entry(hash, |other| *other == number) {
            found.remove();
        }
    }

    fn len(&self) -> usize {
        Self::len(self)
    }

    fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        Self::iter(self).copied()
    }
}
