//! A hash table of numbers that never grows: linear probing, half full at most.
//!
//! Invariant: a number stands at the place its hash names or after it (around the end), with no vacant place in
//! between. Removal moves later numbers up instead of leaving marks, so a table never wears out.

use super::Index;
use crate::slots::NIL;

/// Room for `N` numbers in `2 * N` places.
#[allow(unnameable_types, unreachable_pub, reason = "part of the sealed trait")]
pub struct Table<const N: usize> {
    places: [[u32; 2]; N],
    len: usize,
}

impl<const N: usize> Table<N> {
    const PLACES: usize = 2 * N;

    /// The place that a hash names: the high half of a product spreads over any number of places.
    const fn home(hash: u64) -> usize {
        ((hash as u128 * Self::PLACES as u128) >> 64) as usize
    }

    const fn after(place: usize) -> usize {
        if place + 1 == Self::PLACES {
            0
        } else {
            place + 1
        }
    }

    const fn get(&self, place: usize) -> u32 {
        self.places[place / 2][place % 2]
    }

    const fn set(&mut self, place: usize, number: u32) {
        self.places[place / 2][place % 2] = number;
    }
}

impl<const N: usize> Index for Table<N> {
    const EMPTY: Self = Self {
        places: [[NIL; 2]; N],
        len: 0,
    };

    fn find(&self, hash: u64, mut is: impl FnMut(u32) -> bool) -> Option<u32> {
        let mut place = Self::home(hash);
        loop {
            match self.get(place) {
                NIL => return None,
                number if is(number) => return Some(number),
                _ => place = Self::after(place),
            }
        }
    }

    fn insert(&mut self, hash: u64, number: u32, _: impl Fn(u32) -> u64) {
        debug_assert!(self.len < N, "as many numbers as slots");
        let mut place = Self::home(hash);
        while self.get(place) != NIL {
            place = Self::after(place);
        }
        self.set(place, number);
        self.len += 1;
    }

    fn remove(&mut self, hash: u64, number: u32, hash_of: impl Fn(u32) -> u64) {
        let mut hole = Self::home(hash);
        while self.get(hole) != number {
            if self.get(hole) == NIL {
                return;
            }
            hole = Self::after(hole);
        }
        let mut place = hole;
        loop {
            place = Self::after(place);
            let later = self.get(place);
            if later == NIL {
                break;
            }
            // It may move up to the hole unless its own home lies after the hole.
            let home = Self::home(hash_of(later));
            let is_between = if hole <= place {
                hole < home && home <= place
            } else {
                hole < home || home <= place
            };
            if !is_between {
                self.set(hole, later);
                hole = place;
            }
        }
        self.set(hole, NIL);
        self.len -= 1;
    }

    fn len(&self) -> usize {
        self.len
    }

    fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        let numbers = self.places.as_flattened().iter().copied();
        numbers.filter(|number| *number != NIL)
    }
}

#[cfg(test)]
mod tests {
    use super::Table;
    use crate::store::Index;

    /// Hashes that crowd at both ends, so that chains run around the end of the table.
    fn hash_of(number: u32) -> u64 {
        match number % 3 {
            0 => u64::MAX - u64::from(number),
            1 => u64::from(number),
            _ => u64::from(number) << 59,
        }
    }

    #[test]
    fn numbers_are_found_until_removed_whatever_the_order() {
        let mut table = Table::<13>::EMPTY;
        let mut inside = [false; 64];
        let mut random = 7_u32;
        // An interpreter takes minutes for as many.
        for _ in 0..if cfg!(miri) { 200 } else { 20_000 } {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let number = random >> 26;
            let is_in = &mut inside[number as usize];
            if *is_in {
                table.remove(hash_of(number), number, hash_of);
                *is_in = false;
            } else if table.len() < 13 {
                table.insert(hash_of(number), number, hash_of);
                *is_in = true;
            }
            for number in 0..64_u32 {
                let found = table.find(hash_of(number), |other| other == number);
                assert_eq!(found.is_some(), inside[number as usize], "number {number}");
            }
            let count = inside.iter().filter(|is_in| **is_in).count();
            assert_eq!((table.len(), table.iter().count()), (count, count));
        }
    }

    #[test]
    fn removing_what_is_not_there_changes_nothing() {
        let mut table = Table::<4>::EMPTY;
        table.insert(1, 8, |_| 1);
        table.remove(1, 9, |_| 1);
        assert_eq!(table.find(1, |number| number == 8), Some(8));
    }
}
