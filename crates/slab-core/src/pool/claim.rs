//! Claims: windows that are withheld until the bytes in them that still wait have come back.

use core::fmt;
use core::hash::{BuildHasher, Hash};

use super::Pool;
use super::reserve::{Cleared, Reserve};
use crate::error::{Error, Refused};
use crate::evict::Evict;
use crate::free_list::Tag;
use crate::id::PoolId;
use crate::region::{Allocation, Region};
use crate::slots::NIL;
use crate::store::Store;
use crate::twin::{Twin, is_left_out};

/// The right to a region whose bytes still wait for fences.
///
/// Consumed by [`Pool::poll_claim`](crate::Pool::poll_claim) or
/// [`Pool::drop_claim`](crate::Pool::drop_claim). **Dropping it withholds its window for ever.**
#[must_use = "dropping a claim withholds its window for ever"]
#[derive(PartialEq, Eq)]
pub struct Claim {
    pool: PoolId,
    index: u32,
    len: u64,
}

impl Claim {
    /// Bytes that were asked for.
    #[must_use]
    #[allow(
        clippy::len_without_is_empty,
        reason = "an empty request never becomes a claim"
    )]
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// The pool that made it.
    #[must_use]
    pub const fn pool(&self) -> PoolId {
        self.pool
    }
}

impl fmt::Debug for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Claim({} bytes of {:?})", self.len, self.pool)
    }
}

pub(super) struct Record {
    /// Bytes and granules asked for.
    len: u64,
    need: u64,
    state: State,
}

#[derive(Clone, Copy)]
enum State {
    /// The runs from slot `first` up to granule `end` are withheld; `pending` of them still wait.
    Pending { first: u32, end: u64, pending: u32 },
    /// All bytes are back, in the one run at this slot.
    Fulfilled { run: u32 },
    /// A fence in the window failed, so the window was given up; the next poll plans another.
    Lost,
}

impl<K: Eq + Hash, M, S: BuildHasher, St: Store, E: Evict> Pool<K, M, S, St, E> {
    /// Turns the claim into its allocation once every fence in its window is reached.
    ///
    /// If a timeline in the window failed, the window is given up and this call plans a new one, exactly as
    /// [`reserve`](Self::reserve) would (so it may evict); while none exists the claim stays pending.
    ///
    /// # Errors
    /// The claim itself, while it is not fulfilled; also if another pool made it.
    ///
    /// # Complexity
    /// O(1); after a failed timeline as `reserve`.
    pub fn poll_claim(&mut self, claim: Claim) -> Result<Allocation, Claim> {
        if self.check_claim(&claim).is_err() {
            return Err(claim);
        }
        let Record { len, need, state } = self.claims[claim.index];
        match state {
            State::Pending { .. } => Err(claim),
            State::Fulfilled { run } => {
                self.claims.remove(claim.index);
                self.list.retag(run, Tag::Caller, NIL);
                Ok(self.list.token(run, len))
            }
            State::Lost => {
                if let Ok(Some(run)) = self.list.take(need) {
                    self.claims.remove(claim.index);
                    return Ok(self.list.token(run, len));
                }
                let Some(window) = self.plan_remembering(need, true) else {
                    return Err(claim);
                };
                if window.cost.is_pending() {
                    let cleared = self.clear(window);
                    let state = self.withhold(cleared, need, claim.index);
                    self.claims[claim.index].state = state;
                    return Err(claim);
                }
                let Some(run) = self.take_planned(window, need) else {
                    return Err(claim);
                };
                self.claims.remove(claim.index);
                Ok(self.list.token(run, len))
            }
        }
    }

    /// Gives a claim up: what it withheld is free, or waits for its fences like any other bytes.
    ///
    /// # Errors
    /// [`Error::ForeignToken`], with the claim, if another pool made it.
    ///
    /// # Complexity
    /// O(runs of the window).
    pub fn drop_claim(&mut self, claim: Claim) -> Result<(), Refused<Claim>> {
        if let Err(cause) = self.check_claim(&claim) {
            return Err(Refused {
                value: claim,
                cause,
            });
        }
        self.surrender(claim.index);
        self.claims.remove(claim.index);
        Ok(())
    }

    /// The bytes a claim withholds: its window, or its region once fulfilled. `None` after a timeline in the
    /// window failed, until the next poll finds another, and if another pool made the claim. O(1).
    #[must_use]
    pub fn claim_window(&self, claim: &Claim) -> Option<Region> {
        self.check_claim(claim).ok()?;
        match self.claims[claim.index].state {
            State::Pending { first, end, .. } => {
                let start = self.list.node(first).start;
                Some(self.list.region_of(start, end - start))
            }
            State::Fulfilled { run } => Some(self.list.region(run)),
            State::Lost => None,
        }
    }

    /// Makes a claim on a cleared window. The caller checked the room for it.
    pub(super) fn claim(&mut self, cleared: Cleared, len: u64, need: u64) -> Reserve {
        let index = self.claims.insert(Record {
            len,
            need,
            state: State::Lost,
        });
        let state = self.withhold(cleared, need, index);
        self.claims[index].state = state;
        Reserve::Later(Claim {
            pool: self.list.id(),
            index,
            len,
        })
    }

    /// Withholds `need` granules of a cleared window, which holds waiting runs. An end run that waits
    /// cannot be cut, so a little more is withheld then, and given back on fulfilment.
    fn withhold(&mut self, cleared: Cleared, need: u64, claim: u32) -> State {
        let Cleared {
            first: mut slot,
            last,
            mut start,
            mut end,
        } = cleared;
        // Each end run of the window is needed, so the excess is shorter than either.
        let excess = end - start - need;
        if self.list.node(last).tag == Tag::Free {
            end -= excess;
        } else if self.list.node(slot).tag == Tag::Free {
            start += excess;
        }
        let mut first = NIL;
        let mut pending = 0;
        loop {
            let node = self.list.node(slot);
            match node.tag {
                Tag::Waiting => {
                    if !is_left_out(Twin::WithholdRun) {
                        self.timelines.set_claim(node.owner, claim);
                    }
                    pending += 1;
                }
                _ => {
                    let (from, to) = (node.start.max(start), (node.start + node.len).min(end));
                    slot = self.list.carve(slot, from, to);
                    self.list.retag(slot, Tag::Claimed, claim);
                }
            }
            if first == NIL {
                first = slot;
            }
            let node = self.list.node(slot);
            if node.start + node.len >= end {
                return State::Pending {
                    first,
                    end: node.start + node.len,
                    pending,
                };
            }
            slot = node.next;
        }
    }

    /// A waiting run of a claim's window has all its fences reached.
    pub(super) fn claimed_run_reached(&mut self, run: u32, claim: u32) {
        self.list.retag(run, Tag::Claimed, claim);
        let record = &mut self.claims[claim];
        let State::Pending {
            first,
            end,
            pending,
        } = record.state
        else {
            return;
        };
        if pending > 1 {
            record.state = State::Pending {
                first,
                end,
                pending: pending - 1,
            };
            return;
        }
        record.state = State::Fulfilled { run: first };
        let need = record.need;
        self.list.join(first, end);
        self.list.trim(first, need);
        self.note_gain();
    }

    /// A waiting run of a claim's window was quarantined: the rest of the window is given up.
    pub(super) fn claimed_run_failed(&mut self, claim: u32) {
        self.surrender(claim);
        self.claims[claim].state = State::Lost;
    }

    /// Gives up what a claim withholds.
    fn surrender(&mut self, claim: u32) {
        match self.claims[claim].state {
            State::Lost => {}
            State::Fulfilled { run } => {
                self.list.give(run);
                self.note_gain();
            }
            State::Pending { first, end, .. } => {
                let mut slot = first;
                loop {
                    let node = self.list.node(slot);
                    match node.tag {
                        Tag::Claimed => slot = self.list.give(slot),
                        Tag::Waiting => self.timelines.set_claim(node.owner, NIL),
                        // The run whose failure led here is quarantined already.
                        _ => {}
                    }
                    let node = self.list.node(slot);
                    if node.start + node.len >= end {
                        break;
                    }
                    slot = node.next;
                }
                self.note_gain();
            }
        }
    }

    fn check_claim(&self, claim: &Claim) -> Result<(), Error> {
        let pool = self.list.id();
        if claim.pool != pool {
            return Err(Error::ForeignToken {
                token: claim.pool,
                pool,
            });
        }
        // Fails only if two pools were given the same id.
        match self.claims.get(claim.index) {
            Some(record) if record.len == claim.len => Ok(()),
            _ => Err(Error::UnknownToken { pool }),
        }
    }
}
