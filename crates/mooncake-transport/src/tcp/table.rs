//! A table of connections with keys that are never valid for a later entry of the same slot.

/// Names one entry of a [`Table`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Key {
    pub(super) index: usize,
    generation: u64,
}

struct Slot<T> {
    generation: u64,
    value: Option<T>,
    /// The entry is lent out by `take` and will come back.
    lent: bool,
}

/// Entries in stable slots; freed slots are used again under a new generation.
pub(super) struct Table<T> {
    slots: Vec<Slot<T>>,
    free: Vec<usize>,
}

impl<T> Table<T> {
    pub(super) fn new() -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
        }
    }

    pub(super) fn insert(&mut self, value: T) -> Key {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot {
                generation: 0,
                value: None,
                lent: false,
            });
            self.slots.len() - 1
        });
        let slot = &mut self.slots[index];
        slot.generation += 1;
        slot.value = Some(value);
        Key {
            index,
            generation: slot.generation,
        }
    }

    /// Returns the key that the slot's current entry has.
    pub(super) fn key_at(&self, index: usize) -> Option<Key> {
        let slot = self.slots.get(index)?;
        slot.value.as_ref().map(|_| Key {
            index,
            generation: slot.generation,
        })
    }

    pub(super) fn get(&self, key: Key) -> Option<&T> {
        let slot = self.slots.get(key.index)?;
        if slot.generation == key.generation {
            slot.value.as_ref()
        } else {
            None
        }
    }

    pub(super) fn get_mut(&mut self, key: Key) -> Option<&mut T> {
        let slot = self.slots.get_mut(key.index)?;
        if slot.generation == key.generation {
            slot.value.as_mut()
        } else {
            None
        }
    }

    /// Lends the entry out; `put_back` or `remove` must follow.
    pub(super) fn take(&mut self, key: Key) -> Option<T> {
        let slot = self.slots.get_mut(key.index)?;
        if slot.generation != key.generation {
            return None;
        }
        let value = slot.value.take();
        slot.lent |= value.is_some();
        value
    }

    pub(super) fn put_back(&mut self, key: Key, value: T) {
        let slot = &mut self.slots[key.index];
        debug_assert!(slot.lent && slot.generation == key.generation);
        slot.lent = false;
        slot.value = Some(value);
    }

    /// Removes the entry, also one that is lent out (whoever has it then keeps it).
    pub(super) fn remove(&mut self, key: Key) -> Option<T> {
        let slot = self.slots.get_mut(key.index)?;
        if slot.generation != key.generation || (slot.value.is_none() && !slot.lent) {
            return None;
        }
        slot.lent = false;
        // Keys of the entry that went are of an older generation from now on.
        slot.generation += 1;
        self.free.push(key.index);
        slot.value.take()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (Key, &T)> {
        self.slots.iter().enumerate().filter_map(|(index, slot)| {
            Some((
                Key {
                    index,
                    generation: slot.generation,
                },
                slot.value.as_ref()?,
            ))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_outlives_its_entry_without_naming_the_next_one() {
        let mut table = Table::new();
        let first = table.insert('a');
        assert_eq!(table.remove(first), Some('a'));
        assert_eq!(table.remove(first), None);
        let second = table.insert('b');
        assert_eq!(second.index, first.index);
        assert!(table.get_mut(first).is_none() && table.take(first).is_none());
        assert_eq!(table.key_at(second.index), Some(second));
        assert_eq!(table.get_mut(second), Some(&mut 'b'));
    }

    #[test]
    fn an_entry_that_is_lent_out_can_be_removed_or_put_back() {
        let mut table = Table::new();
        let key = table.insert(1);
        let value = table.take(key).unwrap();
        assert!(table.take(key).is_none());
        table.put_back(key, value);
        assert_eq!(table.iter().count(), 1);
        let _value = table.take(key).unwrap();
        assert_eq!(table.remove(key), None);
        assert!(table.key_at(key.index).is_none());
        assert_ne!(table.insert(2), key);
    }
}
