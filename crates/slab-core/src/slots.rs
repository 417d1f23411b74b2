//! Slot array: values keep their index until removed, and freed indices are used again.

use core::mem;

use crate::store::{Array, Store};

/// No index. Also the number of values a slot array can hold at most.
pub(crate) const NIL: u32 = u32::MAX;

/// Values at stable `u32` indices. Insert and remove are O(1) (growth amortised).
pub(crate) struct Slots<T, St: Store> {
    slots: St::Array<Slot<T>>,
    vacant: u32,
    len: u32,
}

pub(crate) enum Slot<T> {
    Vacant { next: u32 },
    Taken(T),
}

impl<T, St: Store> Slots<T, St> {
    pub(crate) const EMPTY: Self = Self::new(<St::Array<Slot<T>> as Array<Slot<T>>>::EMPTY);

    /// Slots in an array without values.
    pub(crate) const fn new(slots: St::Array<Slot<T>>) -> Self {
        Self {
            slots,
            vacant: NIL,
            len: 0,
        }
    }

    #[inline]
    pub(crate) const fn len(&self) -> u32 {
        self.len
    }

    /// How many more values the store can hold.
    #[inline]
    pub(crate) const fn room(&self) -> u32 {
        St::SLOTS_MAX - self.len
    }

    /// The index of the next value.
    #[inline]
    pub(crate) fn next_index(&self) -> u32 {
        if self.vacant == NIL {
            self.slots.len() as u32
        } else {
            self.vacant
        }
    }

    /// Stores `value`. The callers bound the number of values by what the store can hold.
    #[inline]
    pub(crate) fn insert(&mut self, value: T) -> u32 {
        self.len += 1;
        if self.vacant == NIL {
            let index = self.slots.len() as u32;
            let pushed = self.slots.push(Slot::Taken(value));
            assert!(pushed.is_ok(), "callers bound the values by the store");
            return index;
        }
        let index = self.vacant;
        if let Slot::Vacant { next } =
            mem::replace(&mut self.slots[index as usize], Slot::Taken(value))
        {
            self.vacant = next;
        }
        index
    }

    /// Takes the value at `index` out, or `None` if there is none.
    #[inline]
    pub(crate) fn remove(&mut self, index: u32) -> Option<T> {
        let slot = self.slots.get_mut(index as usize)?;
        if matches!(slot, Slot::Vacant { .. }) {
            return None;
        }
        let taken = mem::replace(slot, Slot::Vacant { next: self.vacant });
        self.vacant = index;
        self.len -= 1;
        match taken {
            Slot::Taken(value) => Some(value),
            Slot::Vacant { .. } => None,
        }
    }

    /// The values, in no order.
    pub(crate) fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.slots.iter_mut().filter_map(|slot| match slot {
            Slot::Taken(value) => Some(value),
            Slot::Vacant { .. } => None,
        })
    }

    #[inline]
    pub(crate) fn get(&self, index: u32) -> Option<&T> {
        match self.slots.get(index as usize) {
            Some(Slot::Taken(value)) => Some(value),
            _ => None,
        }
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, index: u32) -> Option<&mut T> {
        match self.slots.get_mut(index as usize) {
            Some(Slot::Taken(value)) => Some(value),
            _ => None,
        }
    }
}

impl<T, St: Store> core::ops::Index<u32> for Slots<T, St> {
    type Output = T;

    #[inline]
    fn index(&self, index: u32) -> &T {
        self.get(index).expect("index of a stored value")
    }
}

impl<T, St: Store> core::ops::IndexMut<u32> for Slots<T, St> {
    #[inline]
    fn index_mut(&mut self, index: u32) -> &mut T {
        self.get_mut(index).expect("index of a stored value")
    }
}

#[cfg(test)]
mod tests {
    use super::Slots;
    use crate::store::{Inline, Store};

    fn check<St: Store>() {
        let mut slots = Slots::<char, St>::EMPTY;
        let a = slots.insert('a');
        let b = slots.insert('b');
        assert_eq!(slots.remove(a), Some('a'));
        assert_eq!(slots.remove(a), None);
        assert_eq!(slots.get(a), None);
        assert_eq!(slots.insert('c'), a);
        assert_eq!((slots[a], slots[b], slots.len()), ('c', 'b', 2));
    }

    #[test]
    fn a_freed_index_is_used_again_and_answers_none_in_between() {
        #[cfg(feature = "alloc")]
        check::<crate::store::Heap>();
        check::<Inline<4>>();
    }
}
