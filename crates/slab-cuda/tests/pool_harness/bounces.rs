//! Bytes of the pool on their way to or from a socket, as an engine has them pass.

use std::sync::Arc;

use slab_core::AllocationGuard;
use slab_cuda::CudaError;
use slab_memory::{Bounce, BounceDirection, CopyError, Memory};

use super::{Harness, pick};

pub(super) struct Passage {
    bounce: Box<dyn Bounce>,
    bytes: AllocationGuard,
    direction: BounceDirection,
    /// Every byte of it.
    value: u8,
}

impl Harness {
    /// Bytes that were kept are received into, or sent.
    pub(super) fn begin_bounce(&mut self, kept: u8, direction: BounceDirection) {
        let Some(at) = pick(self.kept.len(), kept) else {
            return;
        };
        let bytes = self.kept.swap_remove(at);
        let value = kept | 1;
        let (start, len) = (bytes.offset(), bytes.len());
        if direction == BounceDirection::Out {
            let content = vec![value; len as usize];
            self.fake.poke(self.base + start, &content);
        }
        let memory: Arc<dyn Memory> = self.timelines.memory().clone();
        // If it fails it waits for what it has begun, so that the streams have to advance by themselves.
        self.fake.run_seeded(u64::from(kept));
        let begun = memory.bounce(direction, start..start + len);
        self.fake.run_manually();
        match begun {
            Ok(bounce) => self.bounces.push(Passage {
                bounce,
                bytes,
                direction,
                value,
            }),
            Err(error) => {
                self.check_quiet(bytes.region());
                self.kept.push(bytes);
                self.note_copy_error(error);
            }
        }
    }

    /// Lets some bytes pass. One that is through, or has failed, ends.
    pub(super) fn pass_bytes(&mut self, at: u8, most: u8) {
        let Some(at) = pick(self.bounces.len(), at) else {
            return;
        };
        let mut passage = self.bounces.swap_remove(at);
        let stepped = passage.step(usize::from(most) * 16);
        match stepped.and_then(|()| passage.bounce.poll_finished()) {
            Ok(false) => self.bounces.push(passage),
            Ok(true) => {
                let found = self.bytes(passage.bytes.offset(), passage.bytes.len());
                assert!(found.iter().all(|byte| *byte == passage.value), "passed");
                self.met.bounced += 1;
                self.end_passage(passage);
            }
            Err(error) => {
                self.note_copy_error(error);
                self.end_passage(passage);
            }
        }
    }

    /// Gives one up, whatever has passed.
    pub(super) fn end_bounce(&mut self, at: u8) {
        if let Some(at) = pick(self.bounces.len(), at) {
            let passage = self.bounces.swap_remove(at);
            self.end_passage(passage);
        }
    }

    pub(super) fn end_bounces(&mut self) {
        while !self.bounces.is_empty() {
            self.end_bounce(0);
        }
    }

    fn end_passage(&mut self, passage: Passage) {
        let Passage {
            mut bounce, bytes, ..
        } = passage;
        // It waits for its copies, so that the streams have to advance by themselves.
        self.fake.run_seeded(u64::from(bytes.len() as u32));
        let is_quiet = bounce.quiesce();
        drop(bounce);
        self.fake.run_manually();
        if is_quiet {
            self.check_quiet(bytes.region());
            self.kept.push(bytes);
        } else {
            assert!(self.has_failed(), "nothing was made to fail");
            // As an engine does: nobody will know when the bytes can be used.
            std::mem::forget(bytes);
        }
    }

    fn note_copy_error(&mut self, error: CopyError) {
        self.met.errors += 1;
        assert!(self.has_failed(), "nothing was made to fail: {error}");
    }

    /// Whether something was made to fail, so that not everything has to work and to come back.
    pub(super) fn has_failed(&self) -> bool {
        self.failed || self.fake.injected() > 0
    }

    /// Errors are all right where some were made, and nowhere else.
    pub(super) fn note(&mut self, result: Result<(), CudaError>) {
        if let Err(error) = result {
            self.met.errors += 1;
            let is_bound = matches!(
                error,
                CudaError::TooManyPending { .. } | CudaError::TooManyStreams { .. }
            );
            let is_known = is_bound || self.has_failed();
            assert!(is_known, "nothing was made to fail: {error}");
        }
    }
}

impl Passage {
    fn step(&mut self, most: usize) -> Result<(), CopyError> {
        let buffer = self.bounce.buffer()?;
        let count = buffer.len().min(most);
        let lent = &mut buffer[..count];
        match self.direction {
            BounceDirection::Out => {
                assert!(lent.iter().all(|byte| *byte == self.value), "sent");
            }
            _ => lent.fill(self.value),
        }
        self.bounce.commit(count)
    }
}
