//! The reservation rules once more, written as plainly as possible: every operation looks at all
//! records, and nothing is indexed.

#![allow(dead_code, reason = "each test target uses its own part")]

use std::collections::{BTreeMap, BTreeSet};

use ec_connector::{CancelKind, ReservationId, ReservationState, Shutdown};

pub(crate) const TTL: u64 = 1000;

/// Where bytes lie, in granules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Cancelled,
    Expired,
}

#[derive(Clone, Debug)]
pub(crate) enum Role {
    Writer,
    Follower {
        writer: String,
        joined: u64,
    },
    /// Ready, with bytes of its own.
    Owner,
    /// Ready, with a lease on an entry.
    Lessee {
        entry: usize,
    },
}

#[derive(Clone, Debug)]
pub(crate) struct Record {
    pub(crate) hash: u8,
    pub(crate) len: u64,
    pub(crate) reservation: ReservationId,
    pub(crate) state: ReservationState,
    pub(crate) role: Role,
    pub(crate) place: Place,
    pub(crate) deadline: Option<u64>,
    pub(crate) cancelled_while_expired: bool,
    /// Order of becoming ready, until it was reported.
    pub(crate) unreported: Option<u64>,
    pub(crate) written: bool,
}

#[derive(Clone, Debug)]
pub(crate) struct Tombstone {
    pub(crate) id: String,
    pub(crate) end: End,
    pub(crate) reservation: Option<ReservationId>,
    pub(crate) deadline: u64,
}

/// Published bytes; gone entries stay in the list with `alive` unset.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) hash: u8,
    pub(crate) len: u64,
    pub(crate) place: Place,
    pub(crate) leases: usize,
    pub(crate) current: bool,
    pub(crate) alive: bool,
}

#[derive(Clone, Debug)]
pub(crate) struct TakenItem {
    pub(crate) id: String,
    pub(crate) entry: usize,
    pub(crate) cached: bool,
}

/// What a reserve has to answer.
#[derive(Debug)]
pub(crate) enum Expected {
    ShuttingDown,
    Cancelled,
    ActiveWriter,
    ConflictingReservation,
    ConflictingCached,
    ConflictingInFlight,
    TooMany,
    NoMoreItems,
    ItemsUnderWay,
    Known,
    Cached {
        entry: usize,
    },
    Follower {
        writer: String,
    },
    /// A new writer if there is room, which is for the pool to say.
    Room,
}

pub(crate) struct Oracle {
    pub(crate) records: BTreeMap<String, Record>,
    pub(crate) tombstones: Vec<Tombstone>,
    pub(crate) entries: Vec<Entry>,
    pub(crate) writers: BTreeMap<u8, String>,
    pub(crate) taken: Vec<TakenItem>,
    pub(crate) taken_max: Option<usize>,
    pub(crate) announced: Vec<String>,
    pub(crate) shutdown: Option<Shutdown>,
    pub(crate) items_max: Option<usize>,
    /// Transfers the owner got.
    pub(crate) handed: BTreeSet<String>,
    pub(crate) now: u64,
    pub(crate) reservations_max: usize,
    pub(crate) tombstones_max: usize,
    sequence: u64,
}

impl Oracle {
    pub(crate) fn new(
        reservations_max: usize,
        tombstones_max: usize,
        taken_max: Option<usize>,
    ) -> Self {
        Self {
            records: BTreeMap::new(),
            tombstones: Vec::new(),
            entries: Vec::new(),
            writers: BTreeMap::new(),
            taken: Vec::new(),
            taken_max,
            announced: Vec::new(),
            shutdown: None,
            items_max: None,
            handed: BTreeSet::new(),
            now: 0,
            reservations_max,
            tombstones_max,
            sequence: 0,
        }
    }

    fn sequence(&mut self) -> u64 {
        self.sequence += 1;
        self.sequence
    }

    pub(crate) fn current(&self, hash: u8) -> Option<usize> {
        self.entries
            .iter()
            .position(|entry| entry.alive && entry.current && entry.hash == hash)
    }

    /// The answer a reserve has to get; nothing changes yet except an expired tombstone.
    pub(crate) fn expect_reserve(&mut self, id: &str, hash: u8, len: u64) -> Expected {
        self.expire();
        if self.shutdown.is_some() {
            return Expected::ShuttingDown;
        }
        if let Some(at) = self.tombstones.iter().position(|t| t.id == id) {
            if self.tombstones[at].end == End::Cancelled {
                return Expected::Cancelled;
            }
            self.tombstones.remove(at);
        }
        if let Some(record) = self.records.get(id) {
            if record.state == ReservationState::ExpirePending {
                return Expected::ActiveWriter;
            }
            if (record.hash, record.len) != (hash, len) {
                return Expected::ConflictingReservation;
            }
            if record.state == ReservationState::CancelPending {
                return Expected::Cancelled;
            }
            return Expected::Known;
        }
        if self.records.len() >= self.reservations_max {
            return Expected::TooMany;
        }
        if let Some(max) = self.items_max
            && !self.handed.contains(id)
        {
            if self.handed.len() >= max {
                return Expected::NoMoreItems;
            }
            let mut all: BTreeSet<&String> = self.handed.iter().collect();
            all.extend(self.records.keys());
            if all.len() >= max {
                return Expected::ItemsUnderWay;
            }
        }
        if let Some(entry) = self.current(hash) {
            if self.entries[entry].len == len {
                return Expected::Cached { entry };
            }
            if self.entries[entry].leases > 0 {
                return Expected::ConflictingCached;
            }
        }
        if let Some(writer) = self.writers.get(&hash)
            && let Some(record) = self.records.get(writer)
            && record.state == ReservationState::Writing
        {
            if record.len != len {
                return Expected::ConflictingInFlight;
            }
            return Expected::Follower {
                writer: writer.clone(),
            };
        }
        Expected::Room
    }

    /// A repeated reserve.
    pub(crate) fn touch_known(&mut self, id: &str) {
        let now = self.now;
        let record = self.records.get_mut(id).unwrap();
        if record.state == ReservationState::Writing {
            record.deadline = Some(now + TTL);
        } else {
            self.announced.push(id.to_owned());
        }
        self.take_ready();
    }

    pub(crate) fn admit_cached(&mut self, id: &str, reservation: ReservationId, entry: usize) {
        self.entries[entry].leases += 1;
        let Entry {
            hash, len, place, ..
        } = self.entries[entry].clone();
        let unreported = Some(self.sequence());
        self.admit(
            id,
            reservation,
            hash,
            len,
            place,
            Role::Lessee { entry },
            unreported,
        );
        self.announced.push(id.to_owned());
        self.take_ready();
    }

    pub(crate) fn admit_follower(&mut self, id: &str, reservation: ReservationId, writer: &str) {
        let Record {
            hash, len, place, ..
        } = self.records[writer].clone();
        let role = Role::Follower {
            writer: writer.to_owned(),
            joined: self.sequence(),
        };
        self.admit(id, reservation, hash, len, place, role, None);
    }

    pub(crate) fn admit_writer(
        &mut self,
        id: &str,
        reservation: ReservationId,
        hash: u8,
        len: u64,
        place: Place,
    ) {
        if let Some(entry) = self.current(hash) {
            assert_ne!(self.entries[entry].len, len);
            assert_eq!(self.entries[entry].leases, 0);
            self.entries[entry].alive = false;
        }
        self.writers.insert(hash, id.to_owned());
        self.admit(id, reservation, hash, len, place, Role::Writer, None);
    }

    #[allow(clippy::too_many_arguments, reason = "each is a field")]
    fn admit(
        &mut self,
        id: &str,
        reservation: ReservationId,
        hash: u8,
        len: u64,
        place: Place,
        role: Role,
        unreported: Option<u64>,
    ) {
        let written = matches!(role, Role::Writer);
        let state = if matches!(role, Role::Lessee { .. }) {
            ReservationState::Ready
        } else {
            ReservationState::Writing
        };
        let record = Record {
            hash,
            len,
            reservation,
            state,
            role,
            place,
            deadline: if state == ReservationState::Ready {
                self.ready_deadline()
            } else {
                Some(self.now + TTL)
            },
            cancelled_while_expired: false,
            unreported,
            written,
        };
        assert!(self.records.insert(id.to_owned(), record).is_none());
    }

    /// What the machine takes by itself does not expire while it waits for that.
    fn ready_deadline(&self) -> Option<u64> {
        self.taken_max.is_none().then_some(self.now + TTL)
    }

    pub(crate) fn complete(
        &mut self,
        id: &str,
        reservation: Option<ReservationId>,
    ) -> (bool, bool) {
        let Some(record) = self.records.get(id).cloned() else {
            return (false, false);
        };
        if Some(record.reservation) != reservation {
            return (false, false);
        }
        match record.role {
            Role::Follower { .. } => return (false, false),
            Role::Owner | Role::Lessee { .. } => return (true, false),
            Role::Writer => {}
        }
        if self.writers.get(&record.hash).map(String::as_str) == Some(id) {
            self.writers.remove(&record.hash);
        }
        let followers = self.followers(id);
        let mut role = Role::Owner;
        let mut place = record.place;
        if !followers.is_empty() {
            let entry = self.publish(record.hash, record.len, record.place);
            place = self.entries[entry].place;
            for follower in followers {
                self.entries[entry].leases += 1;
                let order = self.sequence();
                let deadline = self.ready_deadline();
                let record = self.records.get_mut(&follower).unwrap();
                record.state = ReservationState::Ready;
                record.role = Role::Lessee { entry };
                record.place = place;
                record.deadline = deadline;
                record.unreported = Some(order);
                self.announced.push(follower);
            }
            role = Role::Lessee { entry };
        }
        let became_ready = record.state == ReservationState::Writing;
        if became_ready {
            let order = self.sequence();
            let deadline = self.ready_deadline();
            let record = self.records.get_mut(id).unwrap();
            record.state = ReservationState::Ready;
            record.role = role;
            record.place = place;
            record.deadline = deadline;
            record.unreported = Some(order);
            self.announced.push(id.to_owned());
        } else {
            self.records.remove(id);
            if let Role::Lessee { entry } = role {
                self.unlease(entry);
            }
            let end = match record.state {
                ReservationState::ExpirePending if !record.cancelled_while_expired => End::Expired,
                _ => End::Cancelled,
            };
            self.bury(id, end, Some(record.reservation));
        }
        self.take_ready();
        (true, became_ready)
    }

    /// `matching`: nothing for any reservation, else the one meant, if it names one.
    pub(crate) fn cancel(
        &mut self,
        id: &str,
        matching: Option<Option<ReservationId>>,
        kind: CancelKind,
    ) -> bool {
        let differs = |own: Option<ReservationId>| {
            matching.is_some_and(|wanted| wanted.is_none() || wanted != own)
        };
        if let Some(tombstone) = self.tombstones.iter().find(|t| t.id == id).cloned() {
            if differs(tombstone.reservation) {
                return false;
            }
            if tombstone.end == End::Expired && kind.refresh() {
                return false;
            }
            self.bury(id, End::Cancelled, tombstone.reservation);
            return true;
        }
        let Some(record) = self.records.get(id).cloned() else {
            if !kind.refresh() {
                self.bury(id, End::Cancelled, None);
            }
            return true;
        };
        if differs(Some(record.reservation)) {
            return false;
        }
        let deferred = record.state == ReservationState::CancelPending
            || record.state == ReservationState::ExpirePending;
        match kind {
            CancelKind::RefreshOnly => false,
            CancelKind::Refresh => {
                let undone = record.state == ReservationState::CancelPending
                    || record.state == ReservationState::Ready
                    || record.cancelled_while_expired;
                if !undone {
                    self.finish(id, End::Expired);
                }
                !undone
            }
            CancelKind::Abandon => {
                self.finish(id, End::Cancelled);
                true
            }
            CancelKind::Plain => {
                if !matches!(record.role, Role::Writer) {
                    self.finish(id, End::Cancelled);
                } else {
                    let record = self.records.get_mut(id).unwrap();
                    if record.state == ReservationState::ExpirePending {
                        record.cancelled_while_expired = true;
                    } else if !deferred {
                        record.state = ReservationState::CancelPending;
                        record.deadline = None;
                    }
                }
                true
            }
        }
    }

    pub(crate) fn expire(&mut self) -> usize {
        let mut due: Vec<(u64, String)> = self
            .records
            .iter()
            .filter_map(|(id, record)| Some((record.deadline?, id.clone())))
            .filter(|(deadline, _)| *deadline <= self.now)
            .collect();
        due.sort();
        let mut ended = 0;
        for (_, id) in due {
            match self.records.get(&id).map(|record| record.role.clone()) {
                None => {}
                Some(Role::Owner | Role::Lessee { .. }) => {
                    ended += 1;
                    self.finish(&id, End::Expired);
                }
                Some(Role::Follower { .. }) => self.finish(&id, End::Cancelled),
                Some(Role::Writer) => {
                    let record = self.records.get_mut(&id).unwrap();
                    record.state = ReservationState::ExpirePending;
                    record.deadline = None;
                }
            }
        }
        self.reap();
        ended
    }

    pub(crate) fn take(&mut self, id: &str, hash: u8) -> Option<usize> {
        let record = self.records.get(id)?;
        if record.state != ReservationState::Ready || record.hash != hash {
            return None;
        }
        let record = self.records.remove(id).unwrap();
        let entry = match record.role {
            Role::Lessee { entry } => entry,
            _ => self.publish(record.hash, record.len, record.place),
        };
        self.handed.insert(id.to_owned());
        self.taken.push(TakenItem {
            id: id.to_owned(),
            entry,
            cached: !record.written,
        });
        Some(entry)
    }

    pub(crate) fn poll_ready(&mut self) -> Option<String> {
        let id = self.first_unreported()?;
        self.records.get_mut(&id).unwrap().unreported = None;
        self.handed.insert(id.clone());
        Some(id)
    }

    pub(crate) fn next_taken(&mut self) -> Option<TakenItem> {
        let mut first = None;
        if !self.taken.is_empty() {
            first = Some(self.taken.remove(0));
        }
        self.take_ready();
        first
    }

    pub(crate) fn begin_shutdown(&mut self, how: Shutdown) {
        if self.shutdown == Some(Shutdown::Cancel) {
            return;
        }
        self.shutdown = Some(how);
        if how == Shutdown::Finish {
            return;
        }
        let ids: Vec<String> = self.records.keys().cloned().collect();
        for id in ids {
            match self.records.get(&id).map(|r| (r.state, r.role.clone())) {
                Some((ReservationState::Writing, Role::Writer)) => {
                    let record = self.records.get_mut(&id).unwrap();
                    record.state = ReservationState::CancelPending;
                    record.deadline = None;
                }
                Some((_, Role::Writer)) | None => {}
                Some(_) => self.finish(&id, End::Cancelled),
            }
        }
    }

    /// Ends deferred writers; answers how many granules that gave back.
    pub(crate) fn release_stuck(&mut self, only: Option<&str>) -> u64 {
        let ids: Vec<String> = self
            .records
            .iter()
            .filter(|(id, _)| only.is_none_or(|only| only == id.as_str()))
            .filter(|(_, record)| {
                matches!(
                    record.state,
                    ReservationState::CancelPending | ReservationState::ExpirePending
                )
            })
            .map(|(id, _)| id.clone())
            .collect();
        let mut granules = 0;
        for id in ids {
            granules += self.records[&id].place.len;
            self.finish(&id, End::Cancelled);
        }
        granules
    }

    pub(crate) fn unlease(&mut self, entry: usize) {
        let entry = &mut self.entries[entry];
        entry.leases -= 1;
        if entry.leases == 0 && !entry.current {
            entry.alive = false;
        }
    }

    /// Everything that occupies bytes, each once.
    pub(crate) fn places(&self) -> Vec<Place> {
        let owned = self
            .records
            .values()
            .filter(|record| matches!(record.role, Role::Writer | Role::Owner))
            .map(|record| record.place);
        let published = self
            .entries
            .iter()
            .filter(|entry| entry.alive)
            .map(|entry| entry.place);
        owned.chain(published).collect()
    }

    fn followers(&self, writer: &str) -> Vec<String> {
        let mut followers: Vec<(u64, String)> = self
            .records
            .iter()
            .filter_map(|(id, record)| match &record.role {
                Role::Follower {
                    writer: own,
                    joined,
                } if own == writer => Some((*joined, id.clone())),
                _ => None,
            })
            .collect();
        followers.sort();
        followers.into_iter().map(|(_, id)| id).collect()
    }

    fn publish(&mut self, hash: u8, len: u64, place: Place) -> usize {
        if let Some(entry) = self.current(hash) {
            if self.entries[entry].len == len {
                self.entries[entry].leases += 1;
                return entry;
            }
            self.entries[entry].current = false;
            if self.entries[entry].leases == 0 {
                self.entries[entry].alive = false;
            }
        }
        self.entries.push(Entry {
            hash,
            len,
            place,
            leases: 1,
            current: true,
            alive: true,
        });
        self.entries.len() - 1
    }

    fn finish(&mut self, id: &str, end: End) {
        let followers = self.followers(id);
        let record = self.records.remove(id).unwrap();
        match record.role {
            Role::Lessee { entry } => self.unlease(entry),
            Role::Writer => {
                if self.writers.get(&record.hash).map(String::as_str) == Some(id) {
                    self.writers.remove(&record.hash);
                }
                for follower in followers {
                    let lost = self.records.remove(&follower).unwrap();
                    self.bury(&follower, End::Expired, Some(lost.reservation));
                }
            }
            Role::Owner | Role::Follower { .. } => {}
        }
        self.bury(id, end, Some(record.reservation));
    }

    fn bury(&mut self, id: &str, end: End, reservation: Option<ReservationId>) {
        self.tombstones.retain(|tombstone| tombstone.id != id);
        self.tombstones.push(Tombstone {
            id: id.to_owned(),
            end,
            reservation,
            deadline: self.now + TTL,
        });
        self.reap();
    }

    fn reap(&mut self) {
        while let Some(head) = self.tombstones.first() {
            if head.deadline > self.now && self.tombstones.len() <= self.tombstones_max {
                break;
            }
            self.tombstones.remove(0);
        }
    }

    fn first_unreported(&self) -> Option<String> {
        self.records
            .iter()
            .filter_map(|(id, record)| Some((record.unreported?, id.clone())))
            .min()
            .map(|(_, id)| id)
    }

    fn take_ready(&mut self) {
        let Some(limit) = self.taken_max else {
            return;
        };
        while self.taken.len() < limit
            && let Some(id) = self.first_unreported()
        {
            let hash = self.records[&id].hash;
            self.take(&id, hash);
        }
    }
}
