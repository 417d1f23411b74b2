//! What is remembered of keys that are not resident any more.

#[cfg(feature = "alloc")]
use crate::store::Heap;
use crate::store::{Inline, Store};

/// Places that one hash can be remembered at: half a cache line.
const WAYS: usize = 4;

/// A bounded memory of removed entries: how often they were used, and when last.
///
/// Sets of four places; in a full set the one untouched for longest is forgotten. Keys are told apart by
/// the set and 24 more bits of their hash, so about one strange key in four million is mistaken for a
/// remembered one, which costs a wrong rank and nothing else.
pub(super) struct Ghosts<St: Store> {
    /// From the top: 24 bits of the hash, 8 of the uses, 32 of the time of last touch. Zero if vacant: what
    /// is remembered was used.
    places: St::Array<u64>,
}

#[cfg(feature = "alloc")]
impl Ghosts<Heap> {
    /// Room for `keys` keys, rounded up to whole sets. Allocated at once, 8 bytes a key, and never again.
    pub(super) fn new(keys: u32) -> Self {
        let places = (keys as usize).max(WAYS).next_multiple_of(WAYS);
        Self {
            places: alloc::vec![0; places],
        }
    }
}

impl<const SLOTS: usize, const CLASSES: usize> Ghosts<Inline<SLOTS, CLASSES>> {
    /// Room for as many keys as slots, rounded down to whole sets.
    pub(super) const fn new_inline() -> Self {
        Self {
            places: heapless::Vec::from_array([0; SLOTS]),
        }
    }
}

impl<St: Store> Ghosts<St> {
    /// Remembers a key that was used `uses` times and last touched at `touched`. `now` is not before any
    /// time given so far.
    pub(super) fn put(&mut self, hash: u64, uses: u8, touched: u32, now: u32) {
        let oldest = self.set(hash).iter_mut().max_by_key(|place| match **place {
            0 => u64::MAX,
            place => u64::from(now.wrapping_sub(place as u32)),
        });
        if let Some(place) = oldest {
            *place = tag(hash) | u64::from(uses) << 32 | u64::from(touched);
        }
    }

    /// Uses and time of last touch of a remembered key, which is forgotten.
    pub(super) fn take(&mut self, hash: u64) -> Option<(u8, u32)> {
        let tag = tag(hash);
        let mut places = self.set(hash).iter_mut();
        let place = places.find(|place| **place != 0 && **place & TAG == tag)?;
        let place = core::mem::take(place);
        Some(((place >> 32) as u8, place as u32))
    }

    fn set(&mut self, hash: u64) -> &mut [u64] {
        let sets = (self.places.len() / WAYS) as u64;
        // The high half of a product spreads over any number of sets. At least one: a store has four slots.
        let first = (((hash & 0xFFFF_FFFF) * sets) >> 32) as usize * WAYS;
        &mut self.places[first..first + WAYS]
    }
}

const TAG: u64 = 0xFFFF_FF00_0000_0000;

/// The bits of the hash that choose a set are the lower half.
const fn tag(hash: u64) -> u64 {
    hash & TAG
}

#[cfg(test)]
mod tests {
    use super::Ghosts;
    use crate::store::Inline;

    #[test]
    fn a_full_set_forgets_what_was_touched_longest_ago_and_a_taken_key_is_gone() {
        let mut ghosts = Ghosts::<Inline<4>>::new_inline();
        let hash = |key: u64| key << 40;
        for key in 1..=4 {
            ghosts.put(hash(key), key as u8, 10 * key as u32, 50);
        }
        assert_eq!(ghosts.take(hash(2)), Some((2, 20)));
        assert_eq!(ghosts.take(hash(2)), None);
        ghosts.put(hash(5), 5, 50, 50);
        ghosts.put(hash(6), 6, 60, 60);
        assert_eq!(ghosts.take(hash(1)), None);
        for key in 3..=6 {
            assert_eq!(ghosts.take(hash(key)), Some((key as u8, 10 * key as u32)));
        }
    }

    #[test]
    fn ages_are_told_apart_across_the_wrap_of_the_clock() {
        let mut ghosts = Ghosts::<Inline<4>>::new_inline();
        for key in 1..=4_u32 {
            ghosts.put(u64::from(key) << 40, 1, (u32::MAX - 2).wrapping_add(key), 2);
        }
        ghosts.put(5 << 40, 1, 3, 3);
        assert_eq!(ghosts.take(1 << 40), None);
        assert!(ghosts.take(4 << 40).is_some());
    }
}
