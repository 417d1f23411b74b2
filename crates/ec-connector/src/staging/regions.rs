//! The free list of the staging slab, and the order of those who wait for room in it.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use slab_core::{Allocation, Error as PoolError, FreeList};

use super::StageError;

/// Regions are handed out in the order in which they were first asked for: a large one is not overtaken for ever.
pub(super) struct Regions {
    state: Mutex<State>,
    /// Called under no lock, when whoever is first in line may find room.
    room: Box<dyn Fn() + Send + Sync>,
}

struct State {
    list: FreeList,
    /// Turns of those who wait. As many as there are pushes at most.
    waiting: BTreeSet<u64>,
    next: u64,
}

impl Regions {
    pub(super) fn new(list: FreeList, room: Box<dyn Fn() + Send + Sync>) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::new(State {
                list,
                waiting: BTreeSet::new(),
                next: 0,
            }),
            room,
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // The list's methods finish before anything else can panic under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes `len` bytes, or a place in line for them; `turn` is the place taken before. Does not wait.
    ///
    /// # Complexity
    /// O(log free runs + log waiting).
    pub(super) fn take(
        this: &Arc<Self>,
        len: u64,
        turn: Option<Turn>,
    ) -> Result<Result<Region, Turn>, StageError> {
        let taken = {
            let mut state = this.lock();
            let number = turn.as_ref().map(|turn| turn.number);
            let first = state.waiting.first().copied();
            if first.is_some() && first != number {
                Ok(None)
            } else {
                match state.list.allocate(len) {
                    Ok(allocation) => Ok(Some(allocation)),
                    Err(PoolError::Exhausted { .. }) => Ok(None),
                    Err(error) => Err(error),
                }
            }
        };
        // Dropped after the lock is: a turn that ends lets the next one look.
        match taken? {
            Some(allocation) => Ok(Ok(Region {
                home: Arc::clone(this),
                allocation: Some(allocation),
            })),
            None => Ok(Err(turn.unwrap_or_else(|| Turn::new(this)))),
        }
    }

    #[cfg(test)]
    pub(super) fn free_bytes(&self) -> u64 {
        self.lock().list.free_bytes()
    }
}

/// A place in the line for room; dropping it lets the next one in line look.
pub(crate) struct Turn {
    home: Arc<Regions>,
    number: u64,
}

impl Turn {
    fn new(home: &Arc<Regions>) -> Self {
        let mut state = home.lock();
        let number = state.next;
        state.next += 1;
        state.waiting.insert(number);
        drop(state);
        Self {
            home: Arc::clone(home),
            number,
        }
    }

    /// Where in line: lower numbers come first.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let others = {
            let mut state = self.home.lock();
            state.waiting.remove(&self.number);
            !state.waiting.is_empty()
        };
        if others {
            (self.home.room)();
        }
    }
}

/// A region of the staging slab; dropping it gives it back.
pub(super) struct Region {
    home: Arc<Regions>,
    /// Present until dropped.
    allocation: Option<Allocation>,
}

impl Region {
    pub(super) fn offset(&self) -> u64 {
        self.allocation.as_ref().map_or(0, Allocation::offset)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let Some(allocation) = self.allocation.take() else {
            return;
        };
        let anybody_waits = {
            let mut state = self.home.lock();
            if let Err(refused) = state.list.free(allocation) {
                tracing::error!(error = %refused.cause, "staging region lost");
            }
            !state.waiting.is_empty()
        };
        if anybody_waits {
            (self.home.room)();
        }
    }
}
