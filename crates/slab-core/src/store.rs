//! Where a map lives: on the heap, or inside the value itself.
//!
//! One implementation of everything else works over the few operations of [`Array`] and [`Index`]. The traits
//! are sealed: what they promise (contents stay in place, a full array says so) is checked for these two.

mod inline;
mod table;

#[cfg(feature = "alloc")]
mod heap;

pub(crate) use sealed::{Array, Index};

/// Where a [`FreeList`](crate::FreeList) or [`Pool`](crate::Pool) keeps its map: `Heap` (feature `alloc`) or
/// [`Inline`]. Sealed.
pub trait Store: sealed::Store {}

/// On the heap: grows when needed, by what the configuration reserves up front. Needs the feature `alloc`.
#[cfg(feature = "alloc")]
#[derive(Clone, Copy, Debug)]
pub struct Heap(());

/// Inside the value: no heap, nothing grows, every bound is in the type.
///
/// `SLOTS` bounds each table. The map of the slab needs two slots for itself, so there are at most `SLOTS - 2`
/// runs, free and live together; there are at most `SLOTS` residents, claims, timelines, marks of fences not
/// reached yet and keys between two drains, or fewer where the configuration says so. `SLOTS` is at least 4
/// and below 2^31.
///
/// `CLASSES` bounds the size classes of [`Placement::BestFit`](crate::Placement::BestFit), and with it the
/// capacity: a slab of `64 << k` granules needs `64 * (k + 1) + 1` of them. The default reaches to slabs of 2^21
/// granules (512 MiB in granules of 256 bytes). First fit needs none.
///
/// # Size
/// A free list takes about 53 bytes a slot, 4 a class and less than a KiB. A pool takes about 280 bytes a slot (keys of
/// four bytes without metadata), 4 a class and 4 KiB.
#[derive(Clone, Copy, Debug)]
pub struct Inline<const SLOTS: usize, const CLASSES: usize = 1024>(());

#[allow(
    unnameable_types,
    unreachable_pub,
    reason = "the private half of a sealed trait"
)]
mod sealed {
    use core::ops::DerefMut;

    /// The types a store is made of.
    pub trait Store {
        /// Contiguous values.
        type Array<T>: Array<T>;
        /// First members of the size classes.
        type Heads: Array<u32>;
        /// Entry numbers by the hash of a key.
        type Index: Index;
        /// Nodes that a map can have.
        const NODES_MAX: u32;
        /// Values that any other table can have.
        const SLOTS_MAX: u32;
    }

    /// Values in a row.
    pub trait Array<T>: DerefMut<Target = [T]> + IntoIterator<Item = T> {
        /// Without values.
        const EMPTY: Self;
        /// Adds a value at the end, or gives it back if there is no room.
        fn push(&mut self, value: T) -> Result<(), T>;
        /// Forgets all values.
        fn clear(&mut self);
    }

    /// Numbers by hash.
    pub trait Index {
        /// Without numbers.
        const EMPTY: Self;
        /// The number with this hash that `is` accepts.
        fn find(&self, hash: u64, is: impl FnMut(u32) -> bool) -> Option<u32>;
        /// Adds a number that is not there. There is room for as many as slots.
        fn insert(&mut self, hash: u64, number: u32, hash_of: impl Fn(u32) -> u64);
        /// Takes out a number.
        fn remove(&mut self, hash: u64, number: u32, hash_of: impl Fn(u32) -> u64);
        fn len(&self) -> usize;
        fn iter(&self) -> impl Iterator<Item = u32> + '_;
    }
}
