//! Keeping pushes of the same content apart.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;

/// Lets one push at a time work on each content; the others wait in order.
///
/// A producer must not follow itself: a second push of content whose first is still under way would become that
/// one's follower, or, once it is complete and not yet taken, send the bytes a second time.
#[derive(Debug, Clone)]
pub struct ContentLanes<K, T> {
    lanes: HashMap<K, VecDeque<T>>,
}

impl<K: Eq + Hash, T> ContentLanes<K, T> {
    /// No content under way.
    pub fn new() -> Self {
        Self {
            lanes: HashMap::new(),
        }
    }

    /// Asks whether a push of `content` may start. `Some` gives `push` back: it may. Otherwise it waits.
    pub fn enter(&mut self, content: K, push: T) -> Option<T> {
        match self.lanes.get_mut(&content) {
            Some(waiting) => {
                waiting.push_back(push);
                None
            }
            None => {
                self.lanes.insert(content, VecDeque::new());
                Some(push)
            }
        }
    }

    /// The push of `content` that was under way has ended: the next one, if any, is under way now.
    pub fn leave(&mut self, content: &K) -> Option<T> {
        let next = self.lanes.get_mut(content)?.pop_front();
        if next.is_none() {
            self.lanes.remove(content);
        }
        next
    }

    /// Takes out all pushes that wait, in no particular order of contents.
    pub fn drain_waiting(&mut self) -> Vec<T> {
        self.lanes
            .values_mut()
            .flat_map(|waiting| waiting.drain(..))
            .collect()
    }
}

impl<K: Eq + Hash, T> Default for ContentLanes<K, T> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pushes_of_the_same_content_take_turns_and_others_do_not_wait() {
        let mut lanes = ContentLanes::new();
        assert_eq!(lanes.enter("a", 1), Some(1));
        assert_eq!(lanes.enter("a", 2), None);
        assert_eq!(lanes.enter("b", 3), Some(3));
        assert_eq!(lanes.enter("a", 4), None);
        assert_eq!(lanes.leave(&"a"), Some(2));
        assert_eq!(lanes.leave(&"a"), Some(4));
        assert_eq!(lanes.leave(&"a"), None);
        assert_eq!(lanes.enter("a", 5), Some(5), "an empty lane is open again");
    }

    #[test]
    fn drained_waiters_no_longer_get_a_turn() {
        let mut lanes = ContentLanes::new();
        assert_eq!(lanes.enter("a", 1), Some(1));
        assert_eq!(lanes.enter("a", 2), None);
        assert_eq!(lanes.drain_waiting(), [2]);
        assert_eq!(lanes.leave(&"a"), None);
        assert_eq!(lanes.leave(&"a"), None, "leaving twice is harmless");
    }
}
