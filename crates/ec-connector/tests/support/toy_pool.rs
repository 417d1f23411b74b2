//! A pool of a few bytes with the naive algorithm, for driving the reservation machine.
//!
//! Placement is first fit, eviction drops idle residents in order of idling and only if that
//! makes room. Misuse of a token panics.

#![allow(dead_code, reason = "each test target uses its own part")]

use std::collections::{BTreeMap, HashMap};

use ec_connector::{Content, MmHash, Room, Span, TensorSpec};

pub(crate) struct ToyPool {
    capacity: u64,
    align: u64,
    residents_max: usize,
    /// Occupied bytes by offset, whoever owns them.
    live: BTreeMap<u64, u64>,
    entries: HashMap<u64, Entry>,
    current: HashMap<MmHash, u64>,
    /// Idle entries, coldest first.
    idle: Vec<u64>,
    next_entry: u64,
    /// While true, bytes given back wait until `settle`.
    pub(crate) hold_back: bool,
    waiting: Vec<Span>,
    pub(crate) evicted: Vec<MmHash>,
}

struct Entry {
    key: MmHash,
    tensor: TensorSpec,
    span: Span,
    leases: u64,
}

#[derive(Debug)]
pub(crate) struct ToyAllocation(Span);

#[derive(Debug)]
pub(crate) struct ToyLease {
    entry: u64,
    span: Span,
}

#[derive(Debug)]
pub(crate) struct ToyClaim(u64);

impl ToyPool {
    pub(crate) fn new(capacity: u64, align: u64) -> Self {
        Self {
            capacity,
            align,
            residents_max: usize::MAX,
            live: BTreeMap::new(),
            entries: HashMap::new(),
            current: HashMap::new(),
            idle: Vec::new(),
            next_entry: 0,
            hold_back: false,
            waiting: Vec::new(),
            evicted: Vec::new(),
        }
    }

    pub(crate) fn with_residents_max(mut self, residents_max: usize) -> Self {
        self.residents_max = residents_max;
        self
    }

    pub(crate) fn free_bytes(&self) -> u64 {
        self.capacity - self.live.values().sum::<u64>()
    }

    pub(crate) fn is_resident(&self, key: &MmHash) -> bool {
        self.current.contains_key(key)
    }

    /// Bytes that were given back while `hold_back` was set become free.
    pub(crate) fn settle(&mut self) {
        self.hold_back = false;
        for span in std::mem::take(&mut self.waiting) {
            self.remove_live(span);
        }
    }

    /// Drops every idle resident.
    pub(crate) fn evict_all(&mut self) {
        let keys: Vec<MmHash> = self.current.keys().cloned().collect();
        for key in keys {
            self.evict(&key);
        }
    }

    /// Every occupied span, whoever owns it.
    pub(crate) fn live_spans(&self) -> Vec<Span> {
        self.live
            .iter()
            .map(|(&offset, &len_bytes)| Span { offset, len_bytes })
            .collect()
    }

    fn remove_live(&mut self, span: Span) {
        if span.len_bytes > 0 {
            let removed = self.live.remove(&span.offset);
            assert_eq!(removed, Some(span.len_bytes), "bytes given back twice");
        }
    }

    fn give_back(&mut self, span: Span) {
        if self.hold_back {
            self.waiting.push(span);
        } else {
            self.remove_live(span);
        }
    }

    fn first_fit(live: &BTreeMap<u64, u64>, capacity: u64, len: u64) -> Option<u64> {
        let mut start = 0;
        for (&offset, &occupied) in live {
            if offset - start >= len {
                return Some(start);
            }
            start = offset + occupied;
        }
        (capacity - start >= len).then_some(start)
    }

    fn drop_entry(&mut self, id: u64) {
        let entry = self.entries.remove(&id).expect("an entry dropped twice");
        assert_eq!(entry.leases, 0, "a leased resident was dropped");
        self.idle.retain(|idle| *idle != id);
        if self.current.get(&entry.key) == Some(&id) {
            self.current.remove(&entry.key);
        }
        self.give_back(entry.span);
    }

    fn lease(&mut self, id: u64) -> ToyLease {
        let entry = self.entries.get_mut(&id).expect("a lease of nothing");
        entry.leases += 1;
        let span = entry.span;
        self.idle.retain(|idle| *idle != id);
        ToyLease { entry: id, span }
    }
}

impl Content for ToyPool {
    type Allocation = ToyAllocation;
    type Lease = ToyLease;
    type Claim = ToyClaim;

    fn reserve(&mut self, len_bytes: u64) -> Room<ToyAllocation, ToyClaim> {
        if len_bytes == 0 {
            return Room::Ready(ToyAllocation(Span::default()));
        }
        let Some(len) = len_bytes.checked_next_multiple_of(self.align) else {
            return Room::TooLarge;
        };
        if len > self.capacity {
            return Room::TooLarge;
        }
        // Evicting the shortest prefix of the idle list that makes room, if one does.
        let mut plan = self.live.clone();
        for count in 0..=self.idle.len() {
            if let Some(offset) = Self::first_fit(&plan, self.capacity, len) {
                let victims = self.idle[..count].to_vec();
                for id in victims {
                    self.evicted.push(self.entries[&id].key.clone());
                    let held = std::mem::replace(&mut self.hold_back, false);
                    self.drop_entry(id);
                    self.hold_back = held;
                }
                self.live.insert(offset, len);
                return Room::Ready(ToyAllocation(Span {
                    offset,
                    len_bytes: len,
                }));
            }
            if let Some(id) = self.idle.get(count) {
                plan.remove(&self.entries[id].span.offset);
            }
        }
        for span in &self.waiting {
            plan.remove(&span.offset);
        }
        match Self::first_fit(&plan, self.capacity, len) {
            Some(_) => Room::Later(ToyClaim(len)),
            None => Room::Full,
        }
    }

    fn poll_claim(&mut self, claim: ToyClaim) -> Result<ToyAllocation, ToyClaim> {
        match self.reserve(claim.0) {
            Room::Ready(allocation) => Ok(allocation),
            _ => Err(claim),
        }
    }

    fn drop_claim(&mut self, _: ToyClaim) {}

    fn publish(
        &mut self,
        key: &MmHash,
        allocation: ToyAllocation,
        tensor: &TensorSpec,
    ) -> Result<ToyLease, ToyAllocation> {
        if let Some(&id) = self.current.get(key) {
            if self.entries[&id].tensor == *tensor {
                self.give_back(allocation.0);
                return Ok(self.lease(id));
            }
            self.current.remove(key);
            if self.entries[&id].leases == 0 {
                self.drop_entry(id);
            }
        } else if self.entries.len() >= self.residents_max {
            return Err(allocation);
        }
        let id = self.next_entry;
        self.next_entry += 1;
        let entry = Entry {
            key: key.clone(),
            tensor: tensor.clone(),
            span: allocation.0,
            leases: 0,
        };
        self.entries.insert(id, entry);
        self.current.insert(key.clone(), id);
        Ok(self.lease(id))
    }

    fn acquire(&mut self, key: &MmHash) -> Option<ToyLease> {
        let id = *self.current.get(key)?;
        Some(self.lease(id))
    }

    fn tensor(&self, key: &MmHash) -> Option<&TensorSpec> {
        let id = self.current.get(key)?;
        Some(&self.entries[id].tensor)
    }

    fn lease_count(&self, key: &MmHash) -> Option<u64> {
        let id = self.current.get(key)?;
        Some(self.entries[id].leases)
    }

    fn evict(&mut self, key: &MmHash) -> bool {
        match self.current.get(key) {
            Some(&id) if self.entries[&id].leases == 0 => {
                self.drop_entry(id);
                true
            }
            _ => false,
        }
    }

    fn release(&mut self, lease: ToyLease) {
        let entry = self
            .entries
            .get_mut(&lease.entry)
            .expect("a lease released twice");
        entry.leases = entry.leases.checked_sub(1).expect("a lease released twice");
        if entry.leases == 0 {
            if self.current.get(&entry.key) == Some(&lease.entry) {
                self.idle.push(lease.entry);
            } else {
                self.drop_entry(lease.entry);
            }
        }
    }

    fn free(&mut self, allocation: ToyAllocation) {
        self.give_back(allocation.0);
    }

    fn allocation_span(allocation: &ToyAllocation) -> Span {
        allocation.0
    }

    fn lease_span(lease: &ToyLease) -> Span {
        lease.span
    }
}
