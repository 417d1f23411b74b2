//! Who may give way for a request: the rules of reserve and of a claim that lost its window.

use super::{Answer, Claim, NaivePool, Piece, Polled, State};

impl NaivePool {
    /// Takes note of what a reserve of `need` granules answered and which keys it evicted. The allocation,
    /// if any, gets the number `token`.
    ///
    /// # Panics
    /// If the answer, a placement or an eviction breaks a rule.
    pub fn reserve(&mut self, token: u64, need: u64, evicted: &[u32], answer: Answer) {
        if need == 0 {
            assert!(
                matches!(answer, Answer::Ready { .. }),
                "an empty reserve answered {answer:?}"
            );
            assert!(evicted.is_empty(), "an empty reserve evicted {evicted:?}");
            return;
        }
        let waiting = self.claims.len() < self.bounds.claims;
        match answer {
            Answer::Ready { start } => self.made_room(need, evicted, start, State::Caller(token)),
            Answer::Later { claim, start, len } => {
                assert!(waiting, "a claim beyond the bound");
                self.claims.insert(claim, Claim { need, window: None });
                self.withheld(claim, evicted, (start, len));
            }
            Answer::Full => self.refused(need, evicted, waiting),
            Answer::TooLarge => {
                assert!(
                    need > self.len,
                    "{need} of {} granules are too many",
                    self.len
                );
                assert!(
                    evicted.is_empty(),
                    "a request that is too large evicted {evicted:?}"
                );
            }
        }
        assert!(
            need <= self.len || answer == Answer::TooLarge,
            "{need} of {} granules answered {answer:?}",
            self.len
        );
    }

    /// Takes note of what polling a claim answered and which keys it evicted.
    ///
    /// # Panics
    /// If the claim is fulfilled before or not when its last fence is reached, or a rule of reserve is
    /// broken by a claim that looks for a new window.
    pub fn poll(&mut self, claim: u64, evicted: &[u32], polled: Polled) {
        let Claim { need, window } = self.claims[&claim];
        let waits = self.pieces.iter().any(
            |piece| matches!(piece.state, State::Waiting { claim: Some(by), .. } if by == claim),
        );
        match (window, polled) {
            (Some(window), Polled::Pending(now)) => {
                assert!(
                    waits,
                    "claim {claim} is not fulfilled though nothing in it waits"
                );
                assert_eq!(
                    now,
                    Some((window.0, window.1 - window.0)),
                    "claim {claim} moved"
                );
                assert!(evicted.is_empty(), "polling evicted {evicted:?}");
            }
            (Some(window), Polled::Ready { token, start }) => {
                assert!(
                    !waits,
                    "claim {claim} is fulfilled though something in it waits"
                );
                assert_eq!(start, window.0, "claim {claim} moved");
                assert!(evicted.is_empty(), "polling evicted {evicted:?}");
                if let Some(piece) = self.piece_mut(&State::Claimed(claim)) {
                    piece.state = State::Caller(token);
                }
                self.claims.remove(&claim);
            }
            (None, Polled::Ready { token, start }) => {
                self.made_room(need, evicted, start, State::Caller(token));
                self.claims.remove(&claim);
            }
            (None, Polled::Pending(Some(window))) => self.withheld(claim, evicted, window),
            (None, Polled::Pending(None)) => self.refused(need, evicted, true),
        }
    }

    /// The owner of a region of `need` granules at `start` got it at once.
    fn made_room(&mut self, need: u64, evicted: &[u32], start: u64, owner: State) {
        if self.longest_free() >= need {
            assert!(
                evicted.is_empty(),
                "{evicted:?} evicted although {need} granules were free"
            );
        } else {
            assert!(!evicted.is_empty(), "{need} granules from nowhere");
            let claimable = self.claims.len() < self.bounds.claims;
            assert!(
                !claimable || !self.only_waiting_fits(need) || self.many_wait(),
                "{evicted:?} evicted although waiting bytes were enough"
            );
        }
        let regions = self.evict_all(evicted);
        let index = self.pieces.iter().position(|piece| piece.start == start);
        let index = index.unwrap_or_else(|| panic!("{start} is not the start of a run"));
        let Piece { len, state, .. } = self.pieces[index].clone();
        assert!(
            state == State::Free && len >= need,
            "{need} granules at {start}: {:?}",
            self.pieces
        );
        let evicted_len: u64 = regions.iter().map(|(_, len)| len).sum();
        let needed = needed((start, start + len), &regions, need);
        assert!(
            evicted_len - needed <= SPARE * need,
            "{evicted_len} granules evicted, {needed} were needed for {need}"
        );
        self.pieces.remove(index);
        self.insert(start, need, owner);
        self.insert(start + need, len - need, State::Free);
    }

    /// A claim got a window: its pieces are withheld.
    fn withheld(&mut self, claim: u64, evicted: &[u32], (start, len): (u64, u64)) {
        let need = self.claims[&claim].need;
        let end = start + len;
        assert!(
            self.longest_free() < need,
            "a claim although {need} granules were free"
        );
        if self.only_waiting_fits(need) && !self.many_wait() {
            assert!(
                evicted.is_empty(),
                "{evicted:?} evicted although waiting bytes were enough"
            );
        }
        self.evict_all(evicted);
        let mut pieces = Vec::new();
        let mut waits = 0;
        for piece in self.pieces.drain(..) {
            if piece.end() <= start || end <= piece.start {
                pieces.push(piece);
                continue;
            }
            let inside = start <= piece.start && piece.end() <= end;
            match piece.state {
                State::Free => {
                    let (from, to) = (
                        piece.start.max(start),
                        piece.start.saturating_add(piece.len).min(end),
                    );
                    for (from, to, state) in [
                        (piece.start, from, State::Free),
                        (from, to, State::Claimed(claim)),
                        (to, piece.start + piece.len, State::Free),
                    ] {
                        if from < to {
                            pieces.push(Piece {
                                start: from,
                                len: to - from,
                                state,
                            });
                        }
                    }
                }
                State::Waiting {
                    fences,
                    claim: None,
                } => {
                    assert!(inside, "a waiting run was cut");
                    waits += 1;
                    let state = State::Waiting {
                        fences,
                        claim: Some(claim),
                    };
                    pieces.push(Piece { state, ..piece });
                }
                state => panic!("the window {start}+{len} holds {state:?}"),
            }
        }
        self.pieces = pieces;
        assert!(waits > 0, "a claim on bytes that are all free");
        assert!(len >= need, "a window of {len} granules for {need}");
        let ends_wait = [start, end - 1].iter().all(|granule| {
            self.pieces.iter().any(|piece| {
                (piece.start..piece.end()).contains(granule)
                    && matches!(piece.state, State::Waiting { .. })
            })
        });
        assert!(len == need || ends_wait, "more is withheld than needed");
        if let Some(record) = self.claims.get_mut(&claim) {
            record.window = Some((start, end));
        }
    }

    /// There was no room, and there was none to make.
    fn refused(&self, need: u64, evicted: &[u32], waiting: bool) {
        assert!(
            evicted.is_empty(),
            "a reserve that failed evicted {evicted:?}"
        );
        assert!(
            self.longest(|piece| self.gives_way(piece, true, waiting)) < need,
            "{need} granules refused: {:?}",
            self.pieces
        );
    }

    fn evict_all(&mut self, evicted: &[u32]) -> Vec<(u64, u64)> {
        let mut regions = Vec::new();
        for key in evicted {
            let number = self.current(*key).expect("an evicted key was resident");
            assert_eq!(
                self.residents[&number].leases, 0,
                "key {key} was evicted while leased"
            );
            let region = self
                .piece_mut(&State::Resident(number))
                .map(|piece| (piece.start, piece.len));
            regions.push(region.expect("content without bytes is not evicted for room"));
            self.evict_number(number);
        }
        regions
    }

    fn longest_free(&self) -> u64 {
        self.longest(|piece| piece.state == State::Free)
    }

    fn only_waiting_fits(&self, need: u64) -> bool {
        self.longest(|piece| self.gives_way(piece, false, true)) >= need
    }

    /// Beyond this many waiting runs the pool may overlook some.
    fn many_wait(&self) -> bool {
        let waits = |piece: &&Piece| matches!(piece.state, State::Waiting { claim: None, .. });
        self.pieces.iter().filter(waits).count() > 8
    }

    fn gives_way(&self, piece: &Piece, idle: bool, waiting: bool) -> bool {
        match &piece.state {
            State::Free => true,
            State::Waiting { claim, .. } => waiting && claim.is_none(),
            State::Resident(number) if idle => {
                let resident = &self.residents[number];
                let fences = &resident.fences;
                resident.leases == 0
                    && !fences.iter().any(|fence| self.is_failed(*fence))
                    && (waiting || fences.iter().all(|fence| self.is_reached(*fence)))
            }
            _ => false,
        }
    }

    /// The longest stretch of neighbours that all pass.
    fn longest(&self, passes: impl Fn(&Piece) -> bool) -> u64 {
        let (mut longest, mut stretch) = (0, 0);
        for piece in &self.pieces {
            stretch = if passes(piece) {
                stretch + piece.len
            } else {
                0
            };
            longest = longest.max(stretch);
        }
        longest
    }
}

/// The least granules of `evicted` regions that make `need` granules of the free run `from..to`.
fn needed((from, to): (u64, u64), evicted: &[(u64, u64)], need: u64) -> u64 {
    (from..=to - need)
        .map(|start| {
            let touched =
                |(at, len): &&(u64, u64)| *at < start + need && start < at.saturating_add(*len);
            evicted.iter().filter(touched).map(|(_, len)| len).sum()
        })
        .min()
        .unwrap_or(0)
}

/// What a reserve may evict besides what its region needs, as a multiple of the request.
const SPARE: u64 = 4;
