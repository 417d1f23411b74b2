//! Slot array: values keep their index until removed, and freed indices are used again.

use alloc::vec::Vec;
use core::mem;

/// No index. Also the number of values a slot array can hold at most.
pub(crate) const NIL: u32 = u32::MAX;

/// Values at stable `u32` indices. Insert and remove are O(1) (growth amortised).
#[derive(Debug)]
pub(crate) struct Slots<T> {
    slots: Vec<Slot<T>>,
    vacant: u32,
    len: u32,
}

#[derive(Debug)]
enum Slot<T> {
    Vacant { next: u32 },
    Taken(T),
}

impl<T> Slots<T> {
    pub(crate) fn with_capacity(capacity: usize) -> Self {
        Self {
            slots: Vec::with_capacity(capacity),
            vacant: NIL,
            len: 0,
        }
    }

    pub(crate) const fn len(&self) -> u32 {
        self.len
    }

    /// Stores `value`. The callers bound the number of values well below `NIL`.
    pub(crate) fn insert(&mut self, value: T) -> u32 {
        self.len += 1;
        if self.vacant == NIL {
            self.slots.push(Slot::Taken(value));
            return (self.slots.len() - 1) as u32;
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

    pub(crate) fn get(&self, index: u32) -> Option<&T> {
        match self.slots.get(index as usize) {
            Some(Slot::Taken(value)) => Some(value),
            _ => None,
        }
    }

    pub(crate) fn get_mut(&mut self, index: u32) -> Option<&mut T> {
        match self.slots.get_mut(index as usize) {
            Some(Slot::Taken(value)) => Some(value),
            _ => None,
        }
    }
}

impl<T> core::ops::Index<u32> for Slots<T> {
    type Output = T;

    fn index(&self, index: u32) -> &T {
        self.get(index).expect("index of a stored value")
    }
}

impl<T> core::ops::IndexMut<u32> for Slots<T> {
    fn index_mut(&mut self, index: u32) -> &mut T {
        self.get_mut(index).expect("index of a stored value")
    }
}

#[cfg(test)]
mod tests {
    use super::Slots;

    #[test]
    fn a_freed_index_is_used_again_and_answers_none_in_between() {
        let mut slots = Slots::with_capacity(0);
        let a = slots.insert('a');
        let b = slots.insert('b');
        assert_eq!(slots.remove(a), Some('a'));
        assert_eq!(slots.remove(a), None);
        assert_eq!(slots.get(a), None);
        assert_eq!(slots.insert('c'), a);
        assert_eq!((slots[a], slots[b], slots.len()), ('c', 'b', 2));
    }
}
