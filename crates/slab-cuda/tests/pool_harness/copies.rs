//! Lists of copies between the pool and pinned memory, either way and within the pool.

use slab_core::{AllocationGuard, CopyList, CopySpan, LeaseGuard};
use slab_cuda::{CopyBatch, Copying, CudaError};

use super::{Harness, pick};

/// What a list of copies reads, and keeps until it has ended.
enum Source {
    Lease(u8, LeaseGuard),
    Pinned(u8, AllocationGuard),
}

/// What it writes, and keeps until it has ended.
pub(super) enum Target {
    Kept(AllocationGuard),
    Pinned(AllocationGuard),
}

type Hold = (Vec<Source>, Target);

/// A list of copies under way, and what has to be found where once they have ended.
pub(super) struct Copies {
    copying: Copying,
    expected: Vec<(u64, u64, u8)>,
}

/// Copies of one list are cut off the sources in pieces of about this length.
const PIECE: u64 = 300;

impl Harness {
    /// Copies what is leased to bytes that were kept, or to pinned memory.
    pub(super) fn copy_leased(&mut self, lease: u8, leases: u8, target: u8, into_pinned: bool) {
        let target = match into_pinned {
            true => {
                let len = u64::from(target % 8 + 1) * 200;
                match self.pinned_pool.with(|pool, ()| pool.reserve(len)) {
                    slab_core::Reserve::Ready(bytes) => {
                        Target::Pinned(self.pinned_pool.allocation_guard(bytes).unwrap())
                    }
                    _ => return,
                }
            }
            false => match pick(self.kept.len(), target) {
                Some(at) => Target::Kept(self.kept.swap_remove(at)),
                None => return,
            },
        };
        let mut sources = Vec::new();
        for _ in 0..leases {
            if let Some(at) = pick(self.leases.len(), lease) {
                let (key, lease) = self.leases.swap_remove(at);
                sources.push(Source::Lease(key, lease));
            }
        }
        self.copy((sources, target));
    }

    /// Copies what was once copied to pinned memory back into the pool.
    pub(super) fn copy_back(&mut self, pinned: u8, kept: u8) {
        let (Some(from), Some(to)) = (pick(self.pinned.len(), pinned), pick(self.kept.len(), kept))
        else {
            return;
        };
        let (key, bytes) = self.pinned.swap_remove(from);
        let target = Target::Kept(self.kept.swap_remove(to));
        self.copy((vec![Source::Pinned(key, bytes)], target));
    }

    fn copy(&mut self, hold: Hold) {
        let pinned = &self.pinned_memory;
        let (mut to, mut room) = match &hold.1 {
            Target::Kept(bytes) => (self.base + bytes.offset(), bytes.len()),
            Target::Pinned(bytes) => (pinned.address() + bytes.offset(), bytes.len()),
        };
        let mut spans = Vec::new();
        let mut expected = Vec::new();
        for source in &hold.0 {
            let (key, mut from, mut rest) = match source {
                Source::Lease(key, lease) => (*key, self.base + lease.offset(), lease.len()),
                Source::Pinned(key, bytes) => {
                    (*key, pinned.address() + bytes.offset(), bytes.len())
                }
            };
            while rest.min(room) > 0 {
                let len = rest.min(room).min(PIECE);
                spans.push(CopySpan {
                    source: from,
                    destination: to,
                    len,
                });
                expected.push((to, len, key));
                (from, to) = (from + len, to + len);
                (rest, room) = (rest - len, room - len);
            }
        }
        let mut list = CopyList::new(spans.len());
        let places = 0..list.store(0, spans).unwrap();
        let memories = vec![self.timelines.memory().clone(), pinned.clone()];
        match self
            .copier
            .submit(CopyBatch::new(list, places, memories, hold))
        {
            Ok(copying) => self.copies.push(Copies { copying, expected }),
            Err(refused) => {
                self.take_back(refused.value);
                self.note(Err(refused.cause));
            }
        }
    }

    /// Looks at a list under way. Once it has ended, what it held is the harness's again.
    pub(super) fn poll_copies(&mut self, at: u8) {
        let Some(at) = pick(self.copies.len(), at) else {
            return;
        };
        let mut copies = self.copies.swap_remove(at);
        match copies.copying.poll() {
            Ok(false) => return self.copies.push(copies),
            Ok(true) => {
                for (address, len, key) in copies.expected {
                    let found = self.fake.peek(address, len as usize);
                    assert!(found.iter().all(|byte| *byte == key), "copied: {key}");
                }
                self.met.copied += 1;
            }
            Err(error) => self.note(Err(error)),
        }
        match copies.copying.into_batch() {
            Ok(batch) => self.take_back(batch),
            // Held for ever.
            Err(copying) => drop(copying),
        }
    }

    /// What a batch of which nothing is under way has held.
    fn take_back(&mut self, batch: CopyBatch) {
        let (_, hold) = batch.into_parts();
        let (sources, target) = *hold.downcast::<Hold>().unwrap();
        let mut key = None;
        for source in sources {
            match source {
                Source::Lease(of, lease) => {
                    key.get_or_insert(of);
                    self.leases.push((of, lease));
                }
                Source::Pinned(of, bytes) => self.pinned.push((of, bytes)),
            }
        }
        match target {
            Target::Kept(bytes) => {
                self.check_quiet(bytes.region());
                self.kept.push(bytes);
            }
            Target::Pinned(bytes) => {
                let address = self.pinned_memory.address() + bytes.offset();
                assert_eq!(self.fake.touching(address, bytes.len()), 0, "pinned");
                // Kept only where all of it has one content.
                let found = self.fake.peek(address, bytes.len() as usize);
                if let Some(key) = key.filter(|key| found.iter().all(|byte| byte == key)) {
                    self.pinned.push((key, bytes));
                }
            }
        }
    }

    pub(super) fn advance_copies(&mut self, count: u8) {
        self.fake.advance(self.copier.stream(), u64::from(count));
        let polled: Result<(), CudaError> = self.copier.poll().map(|_| ());
        self.note(polled);
    }
}
