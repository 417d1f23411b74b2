//! Inside the value: the vectors of `heapless` and a hash table of fixed size.

use super::table::Table;
use super::{Array, Inline, Store, sealed};

impl<const SLOTS: usize, const CLASSES: usize> Store for Inline<SLOTS, CLASSES> {}

impl<const SLOTS: usize, const CLASSES: usize> Inline<SLOTS, CLASSES> {
    /// The bounds that the types cannot say. Looked at by every constructor, so a wrong one does not compile.
    pub(crate) const IS_VALID: () = assert!(
        SLOTS >= 4 && SLOTS < 1 << 31,
        "the slots of an inline store are at least 4 and below 2^31"
    );
}

impl<const SLOTS: usize, const CLASSES: usize> sealed::Store for Inline<SLOTS, CLASSES> {
    type Array<T> = heapless::Vec<T, SLOTS>;
    type Heads = heapless::Vec<u32, CLASSES>;
    type Index = Table<SLOTS>;
    const NODES_MAX: u32 = SLOTS as u32;
    const SLOTS_MAX: u32 = SLOTS as u32;
}

impl<T, const N: usize> Array<T> for heapless::Vec<T, N> {
    const EMPTY: Self = Self::new();

    #[inline]
    fn push(&mut self, value: T) -> Result<(), T> {
        Self::push(self, value)
    }

    fn clear(&mut self) {
        Self::clear(self);
    }
}
