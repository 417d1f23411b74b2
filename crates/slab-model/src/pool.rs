//! A pool that is told what the real one answered, checks that it may, and follows.
//!
//! Where the rules leave a choice (which window gives way) the oracle checks the choice; where they leave
//! none it computes the result itself. After every step [`NaivePool::runs`] is the map the real pool has to
//! have, run for run.

mod room;

use std::collections::{BTreeMap, BTreeSet};

/// What a reserve answered. Positions are granules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The region starts here. Without meaning if nothing was asked for.
    Ready {
        /// First granule.
        start: u64,
    },
    /// A claim that withholds this window.
    Later {
        /// Number of the claim, fresh.
        claim: u64,
        /// First granule of the window.
        start: u64,
        /// Its length.
        len: u64,
    },
    /// Not now.
    Full,
    /// Never.
    TooLarge,
}

/// What polling a claim answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Polled {
    /// The claim became this allocation.
    Ready {
        /// Number of the allocation, fresh.
        token: u64,
        /// First granule.
        start: u64,
    },
    /// It still withholds this window (first granule, length), or none.
    Pending(Option<(u64, u64)>),
}

/// What a publish has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Published {
    /// Lease the resident with this number: the content is there.
    Existing(u64),
    /// Make a resident; this is its number.
    New(u64),
    /// Refuse.
    Refused,
}

/// One run of the map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// First granule.
    pub start: u64,
    /// Granules.
    pub len: u64,
    /// Whose it is.
    pub kind: RunKind,
}

/// Whose a run is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunKind {
    /// Nobody's.
    Free,
    /// An allocation's.
    Caller,
    /// A resident's, with this many leases.
    Resident(u64),
    /// Nobody's, after fences.
    Waiting,
    /// A claim's.
    Claimed,
    /// Out of use.
    Quarantined,
}

/// Timeline and value.
type Fence = (usize, u64);

#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    Free,
    Caller(u64),
    Resident(u64),
    Waiting {
        fences: Vec<Fence>,
        claim: Option<u64>,
    },
    Claimed(u64),
    Quarantined,
}

#[derive(Clone, Debug)]
struct Piece {
    start: u64,
    len: u64,
    state: State,
}

impl Piece {
    fn end(&self) -> u64 {
        self.start + self.len
    }
}

#[derive(Clone, Debug)]
struct Resident {
    key: u32,
    meta: u32,
    bytes: u64,
    leases: u64,
    current: bool,
    fences: Vec<Fence>,
}

#[derive(Clone, Debug)]
struct Claim {
    need: u64,
    /// First granule and end, until lost.
    window: Option<(u64, u64)>,
}

#[derive(Clone, Copy, Debug)]
struct Timeline {
    reached: u64,
    failed: bool,
}

/// Bounds of a pool.
#[derive(Clone, Copy, Debug)]
struct Bounds {
    residents: usize,
    claims: usize,
    timelines: usize,
}

/// The reference for a pool.
#[derive(Clone, Debug)]
pub struct NaivePool {
    len: u64,
    bounds: Bounds,
    /// By start, without gap.
    pieces: Vec<Piece>,
    residents: BTreeMap<u64, Resident>,
    next_resident: u64,
    /// Numbers of the residents without leases, in the order of their last leases' ends.
    idle: Vec<u64>,
    timelines: Vec<Timeline>,
    claims: BTreeMap<u64, Claim>,
    reclaimed: BTreeSet<u32>,
}

impl NaivePool {
    /// A pool of `len` granules, all free.
    #[must_use]
    pub fn new(len: u64, residents_max: usize, claims_max: usize, timelines_max: usize) -> Self {
        Self {
            len,
            bounds: Bounds {
                residents: residents_max,
                claims: claims_max,
                timelines: timelines_max,
            },
            pieces: vec![Piece {
                start: 0,
                len,
                state: State::Free,
            }],
            residents: BTreeMap::new(),
            next_resident: 0,
            idle: Vec::new(),
            timelines: Vec::new(),
            claims: BTreeMap::new(),
            reclaimed: BTreeSet::new(),
        }
    }

    /// Publishes the allocation `token` of `bytes` bytes. The pool evicted the residents of these keys.
    ///
    /// # Panics
    /// If the evictions break a rule.
    pub fn publish(
        &mut self,
        token: u64,
        bytes: u64,
        key: u32,
        meta: u32,
        evicted: &[u32],
    ) -> Published {
        let previous = self.current(key);
        if let Some(number) = previous {
            let resident = &self.residents[&number];
            if resident.meta == meta && resident.bytes == bytes {
                assert!(evicted.is_empty(), "{evicted:?} evicted for nothing");
                self.lease(number);
                self.settle(&State::Caller(token), Vec::new());
                return Published::Existing(number);
            }
        }
        let previous_idle = previous.filter(|number| self.residents[number].leases == 0);
        if previous_idle.is_none() && self.residents.len() >= self.bounds.residents {
            if self.idle.is_empty() {
                assert!(evicted.is_empty(), "{evicted:?} evicted though refused");
                return Published::Refused;
            }
            let [key] = evicted else {
                panic!("{evicted:?} evicted for one more resident");
            };
            let number = self.current(*key).expect("an evicted key was resident");
            assert!(
                self.idle.contains(&number),
                "key {key} was evicted while leased"
            );
            self.evict_number(number);
        } else {
            assert!(evicted.is_empty(), "{evicted:?} evicted for nothing");
        }
        if let Some(number) = previous_idle {
            self.idle.retain(|idle| *idle != number);
            self.remove(number);
        } else if let Some(resident) = previous.and_then(|number| self.residents.get_mut(&number)) {
            resident.current = false;
        }
        let number = self.next_resident;
        self.next_resident += 1;
        let resident = Resident {
            key,
            meta,
            bytes,
            leases: 1,
            current: true,
            fences: Vec::new(),
        };
        self.residents.insert(number, resident);
        self.reclaimed.remove(&key);
        if let Some(piece) = self.piece_mut(&State::Caller(token)) {
            piece.state = State::Resident(number);
        }
        Published::New(number)
    }

    /// Leases the resident of `key` and returns its number.
    pub fn acquire(&mut self, key: u32) -> Option<u64> {
        let number = self.current(key)?;
        self.lease(number);
        Some(number)
    }

    /// Ends a lease on a resident.
    ///
    /// # Panics
    /// If the resident has none.
    pub fn release(&mut self, number: u64, fences: &[Fence]) {
        let resident = self
            .residents
            .get_mut(&number)
            .expect("a leased resident exists");
        assert!(resident.leases > 0, "resident {number} has no lease");
        resident.leases -= 1;
        resident.fences.extend_from_slice(fences);
        if resident.leases > 0 {
            return;
        }
        if resident.current {
            self.idle.push(number);
        } else {
            self.remove(number);
        }
    }

    /// Gives an allocation back.
    pub fn free(&mut self, token: u64, fences: &[Fence]) {
        self.settle(&State::Caller(token), fences.to_vec());
    }

    /// Puts an allocation out of use.
    pub fn quarantine(&mut self, token: u64) {
        if let Some(piece) = self.piece_mut(&State::Caller(token)) {
            piece.state = State::Quarantined;
        }
    }

    /// Evicts the resident of `key` if nobody leases it, and says whether it did.
    pub fn evict(&mut self, key: u32) -> bool {
        match self.current(key) {
            Some(number) if self.residents[&number].leases == 0 => {
                self.evict_number(number);
                true
            }
            _ => false,
        }
    }

    /// Adds a timeline, unless there are as many as there may be.
    pub fn add_timeline(&mut self) -> bool {
        let room = self.timelines.len() < self.bounds.timelines;
        if room {
            self.timelines.push(Timeline {
                reached: 0,
                failed: false,
            });
        }
        room
    }

    /// How many timelines there are.
    #[must_use]
    pub fn timelines(&self) -> usize {
        self.timelines.len()
    }

    /// How far a timeline has come.
    #[must_use]
    pub fn reached(&self, timeline: usize) -> u64 {
        self.timelines[timeline].reached
    }

    /// A timeline comes to `value`. False if it has failed.
    pub fn reach(&mut self, timeline: usize, value: u64) -> bool {
        let line = &mut self.timelines[timeline];
        if line.failed {
            return false;
        }
        line.reached = line.reached.max(value);
        for index in 0..self.pieces.len() {
            let State::Waiting { fences, claim } = &self.pieces[index].state else {
                continue;
            };
            if fences.iter().all(|fence| self.is_reached(*fence)) {
                self.pieces[index].state = claim.map_or(State::Free, State::Claimed);
            }
        }
        let claims: Vec<u64> = self.claims.keys().copied().collect();
        for claim in claims {
            self.join_claim(claim);
        }
        self.normalise();
        true
    }

    /// A timeline fails.
    pub fn fail(&mut self, timeline: usize) {
        self.timelines[timeline].failed = true;
        let mut lost = BTreeSet::new();
        for index in 0..self.pieces.len() {
            let State::Waiting { fences, claim } = &self.pieces[index].state else {
                continue;
            };
            if fences.iter().any(|fence| self.is_failed(*fence)) {
                lost.extend(*claim);
                self.pieces[index].state = State::Quarantined;
            }
        }
        for claim in lost {
            self.surrender(claim);
        }
    }

    /// Gives a claim up.
    pub fn drop_claim(&mut self, claim: u64) {
        self.surrender(claim);
        self.claims.remove(&claim);
    }

    /// Keys of the residents that can be evicted, those first whose last leases ended first.
    #[must_use]
    pub fn idle_keys(&self) -> Vec<u32> {
        self.idle
            .iter()
            .map(|number| self.residents[number].key)
            .collect()
    }

    /// Keys evicted since the last drain that are not resident now.
    pub fn drain(&mut self) -> BTreeSet<u32> {
        std::mem::take(&mut self.reclaimed)
    }

    /// Keys that are resident.
    #[must_use]
    pub fn keys(&self) -> BTreeSet<u32> {
        self.residents
            .values()
            .filter(|resident| resident.current)
            .map(|resident| resident.key)
            .collect()
    }

    /// Leases on the resident of `key`.
    #[must_use]
    pub fn lease_count(&self, key: u32) -> Option<u64> {
        self.current(key)
            .map(|number| self.residents[&number].leases)
    }

    /// All leases, on displaced residents too.
    #[must_use]
    pub fn leases(&self) -> u64 {
        self.residents
            .values()
            .map(|resident| resident.leases)
            .sum()
    }

    /// Residents that are not current but leased.
    #[must_use]
    pub fn displaced(&self) -> usize {
        self.residents
            .values()
            .filter(|resident| !resident.current)
            .count()
    }

    /// The map.
    #[must_use]
    pub fn runs(&self) -> Vec<Run> {
        self.pieces
            .iter()
            .map(|piece| Run {
                start: piece.start,
                len: piece.len,
                kind: match &piece.state {
                    State::Free => RunKind::Free,
                    State::Caller(_) => RunKind::Caller,
                    State::Resident(number) => RunKind::Resident(self.residents[number].leases),
                    State::Waiting { .. } => RunKind::Waiting,
                    State::Claimed(_) => RunKind::Claimed,
                    State::Quarantined => RunKind::Quarantined,
                },
            })
            .collect()
    }

    fn current(&self, key: u32) -> Option<u64> {
        self.residents
            .iter()
            .find(|(_, resident)| resident.current && resident.key == key)
            .map(|(number, _)| *number)
    }

    fn lease(&mut self, number: u64) {
        self.idle.retain(|idle| *idle != number);
        if let Some(resident) = self.residents.get_mut(&number) {
            resident.leases += 1;
        }
    }

    fn evict_number(&mut self, number: u64) {
        self.idle.retain(|idle| *idle != number);
        self.reclaimed.insert(self.residents[&number].key);
        self.remove(number);
    }

    fn remove(&mut self, number: u64) {
        if let Some(resident) = self.residents.remove(&number) {
            self.settle(&State::Resident(number), resident.fences);
        }
    }

    /// The owner of a piece gives way. Empty content has no piece.
    fn settle(&mut self, owner: &State, mut fences: Vec<Fence>) {
        fences.retain(|fence| !self.is_reached(*fence));
        let state = if fences.iter().any(|fence| self.is_failed(*fence)) {
            State::Quarantined
        } else if fences.is_empty() {
            State::Free
        } else {
            State::Waiting {
                fences,
                claim: None,
            }
        };
        if let Some(piece) = self.piece_mut(owner) {
            piece.state = state;
        }
        self.normalise();
    }

    fn is_reached(&self, (timeline, value): Fence) -> bool {
        self.timelines[timeline].reached >= value
    }

    fn is_failed(&self, fence: Fence) -> bool {
        self.timelines[fence.0].failed && !self.is_reached(fence)
    }

    /// Everything in a claim's window is back: the claim keeps its low end, the rest is free.
    fn join_claim(&mut self, claim: u64) {
        let Claim { need, window } = self.claims[&claim];
        let Some((start, end)) = window else { return };
        let waits = self.pieces.iter().any(
            |piece| matches!(piece.state, State::Waiting { claim: Some(by), .. } if by == claim),
        );
        if waits {
            return;
        }
        self.pieces
            .retain(|piece| piece.state != State::Claimed(claim));
        self.insert(start, need, State::Claimed(claim));
        if start + need < end {
            self.insert(start + need, end - start - need, State::Free);
        }
        if let Some(record) = self.claims.get_mut(&claim) {
            record.window = Some((start, start + need));
        }
        self.normalise();
    }

    fn surrender(&mut self, claim: u64) {
        for piece in &mut self.pieces {
            match &mut piece.state {
                State::Waiting { claim: by, .. } if *by == Some(claim) => *by = None,
                State::Claimed(by) if *by == claim => piece.state = State::Free,
                _ => {}
            }
        }
        if let Some(record) = self.claims.get_mut(&claim) {
            record.window = None;
        }
        self.normalise();
    }

    fn insert(&mut self, start: u64, len: u64, state: State) {
        if len > 0 {
            self.pieces.push(Piece { start, len, state });
            self.pieces.sort_by_key(|piece| piece.start);
        }
    }

    fn piece_mut(&mut self, owner: &State) -> Option<&mut Piece> {
        self.pieces.iter_mut().find(|piece| piece.state == *owner)
    }

    /// Merges free pieces that touch.
    fn normalise(&mut self) {
        let mut merged: Vec<Piece> = Vec::with_capacity(self.pieces.len());
        for piece in self.pieces.drain(..) {
            match merged.last_mut() {
                Some(last) if last.state == State::Free && piece.state == State::Free => {
                    last.len += piece.len;
                }
                _ => merged.push(piece),
            }
        }
        self.pieces = merged;
    }
}
