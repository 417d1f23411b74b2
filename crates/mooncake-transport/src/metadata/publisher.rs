//! What an engine has in the store, and how it gets there and leaves.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::MetadataStore;
use super::error::StoreError;
use super::key::Keys;
use super::value::RpcMeta;
use crate::wire::control::FRAME_BYTES_MAX;

/// Longer than an engine's own descriptor may be configured to become.
const OWN_BYTES_MAX: u64 = FRAME_BYTES_MAX;

/// Longest value beside a descriptor that is read, in bytes.
const RPC_META_BYTES_MAX: u64 = 16 << 10;

/// Looks at an entry that others change at the same time.
const CLAIMS_MAX: usize = 4;

/// What is known of whoever is named by an entry under our name.
pub(super) enum Holder {
    /// It answers.
    Answers,
    /// Nobody listens there, or it is ourselves.
    Gone,
    /// It cannot be told.
    Unknown,
}

/// The entry of one engine.
pub(super) struct Publisher {
    store: Arc<dyn MetadataStore>,
    keys: Keys,
    descriptor_key: String,
    rpc_meta_key: String,
    rpc_meta: RpcMeta,
    /// Calls of `publish` so far.
    asked: AtomicU64,
    /// The descriptor in the store is known to be an old one.
    is_stale: AtomicBool,
    /// Held while the entry is written, so that a later descriptor is written later.
    state: Mutex<State>,
}

struct State {
    withdrawn: bool,
    /// The calls up to this one found their descriptor, or a later one, written already.
    covered: u64,
    /// What came of that.
    outcome: Result<(), StoreError>,
}

impl Publisher {
    /// Claims the name in the store. `holder` looks for the engine that an entry names, at each of a few tries.
    pub(super) fn claim(
        store: Arc<dyn MetadataStore>,
        keys: Keys,
        name: &str,
        rpc_meta: RpcMeta,
        mut holder: impl FnMut(&RpcMeta) -> Holder,
    ) -> Result<Self, StoreError> {
        let publisher = Self {
            descriptor_key: keys.descriptor(name)?,
            rpc_meta_key: keys.rpc_meta(name)?,
            keys,
            store,
            rpc_meta,
            asked: AtomicU64::new(0),
            is_stale: AtomicBool::new(false),
            state: Mutex::new(State {
                withdrawn: false,
                covered: 0,
                outcome: Ok(()),
            }),
        };
        for _ in 0..CLAIMS_MAX {
            let found = publisher.raw_rpc_meta(&publisher.rpc_meta_key)?;
            if let Some(found) = &found {
                let found = publisher.decoded(&publisher.rpc_meta_key, found)?;
                match holder(&found) {
                    Holder::Answers => return Err(publisher.taken(&found, true)),
                    Holder::Unknown => return Err(publisher.taken(&found, false)),
                    Holder::Gone => tracing::warn!(
                        key = publisher.rpc_meta_key,
                        holder = found.holder(),
                        "replacing the entry of an engine that is gone"
                    ),
                }
            }
            match publisher.set_rpc_meta(found.as_deref()) {
                Ok(true) => return Ok(publisher),
                Ok(false) => {}
                Err(error) => {
                    // It may have been set all the same, and would stand for an engine that never was.
                    publisher.withdraw_or_say();
                    return Err(error);
                }
            }
        }
        Err(StoreError::Contended {
            key: publisher.rpc_meta_key,
        })
    }

    pub(super) fn keys(&self) -> &Keys {
        &self.keys
    }

    pub(super) fn rpc_meta_key(&self) -> &str {
        &self.rpc_meta_key
    }

    /// Writes the entry again, and takes back what the store has lost meanwhile.
    ///
    /// However many threads call at once, each waits for two writes at most: the one under way, and one
    /// for all that came meanwhile. `descriptor` is `None` once the engine is gone.
    pub(super) fn publish(
        &self,
        descriptor: impl FnOnce() -> Option<String>,
    ) -> Result<(), StoreError> {
        let ticket = self.asked.fetch_add(1, Ordering::AcqRel) + 1;
        let mut state = self.state();
        if state.withdrawn {
            return Ok(());
        }
        if state.covered >= ticket {
            return state.outcome.clone();
        }
        // Whoever has asked by now changed its registrations before, so the descriptor shows them.
        let covers = self.asked.load(Ordering::Acquire);
        self.is_stale.store(false, Ordering::Release);
        let Some(descriptor) = descriptor() else {
            return Ok(());
        };
        let outcome = self.write(descriptor);
        state.covered = covers;
        state.outcome.clone_from(&outcome);
        outcome
    }

    /// Says that the descriptor in the store is an old one, where nobody can wait for a new one to be
    /// written.
    pub(super) fn mark_stale(&self) {
        self.is_stale.store(true, Ordering::Release);
    }

    /// Writes the entry again if it is old, incomplete, or was not written for an error.
    pub(super) fn look_after(
        &self,
        descriptor: impl FnOnce() -> Option<String>,
    ) -> Result<(), StoreError> {
        let is_in_order = {
            let state = self.state();
            if state.withdrawn {
                return Ok(());
            }
            state.outcome.is_ok() && !self.is_stale.load(Ordering::Acquire)
        };
        if is_in_order && self.is_complete()? {
            return Ok(());
        }
        self.publish(descriptor)
    }

    /// Says whether both keys are there, and the first is ours.
    fn is_complete(&self) -> Result<bool, StoreError> {
        match self.rpc_meta_of(&self.rpc_meta_key)? {
            Some(found) if found != self.rpc_meta => Err(self.taken(&found, false)),
            Some(_) => self.store.exists(&self.descriptor_key),
            None => Ok(false),
        }
    }

    fn write(&self, mut descriptor: String) -> Result<(), StoreError> {
        match self.rpc_meta_of(&self.rpc_meta_key)? {
            Some(found) if found != self.rpc_meta => return Err(self.taken(&found, false)),
            Some(_) => {}
            None => {
                if !self.set_rpc_meta(None)? {
                    let found = self.rpc_meta_of(&self.rpc_meta_key)?;
                    let key = self.rpc_meta_key.clone();
                    return Err(found.map_or(StoreError::Contended { key }, |found| {
                        self.taken(&found, false)
                    }));
                }
            }
        }
        descriptor.push_str(self.store.value_end());
        self.store.put(&self.descriptor_key, descriptor.as_bytes())
    }

    /// Takes the entry out of the store, once, unless it names somebody else by now.
    pub(super) fn withdraw(&self) -> Result<(), StoreError> {
        let mut state = self.state();
        if state.withdrawn {
            return Ok(());
        }
        // Whatever comes of it, nothing is published from now on.
        state.withdrawn = true;
        // In this order: whoever takes the name names himself first and puts his descriptor afterwards, so that
        // what was there while the name was still ours is not his. What he puts later is not what is expected.
        let descriptor = match self.store.get(&self.descriptor_key, OWN_BYTES_MAX) {
            Ok(descriptor) => descriptor,
            // Then it is none of ours.
            Err(StoreError::TooLong { .. }) => None,
            Err(error) => return Err(error),
        };
        let found = self.raw_rpc_meta(&self.rpc_meta_key)?;
        if let Some(found) = &found
            && self.decoded(&self.rpc_meta_key, found)? != self.rpc_meta
        {
            return Ok(());
        }
        if let Some(descriptor) = &descriptor {
            self.store
                .swap(&self.descriptor_key, Some(descriptor), None)?;
        }
        if found.is_some() {
            self.store
                .swap(&self.rpc_meta_key, found.as_deref(), None)?;
        }
        Ok(())
    }

    /// As `withdraw`, where there is nobody to return an error to.
    pub(super) fn withdraw_or_say(&self) {
        if let Err(error) = self.withdraw() {
            let key = self.rpc_meta_key();
            tracing::warn!(key, %error, "the entry stays in the metadata store");
        }
    }

    /// Reads a descriptor, as bytes.
    pub(super) fn descriptor_of(&self, key: &str, len_max: u64) -> Result<Vec<u8>, StoreError> {
        self.store
            .get(key, len_max)?
            .ok_or_else(|| StoreError::NotPublished {
                key: key.to_owned(),
            })
    }

    /// Reads where an engine takes control exchanges.
    pub(super) fn rpc_meta_of(&self, key: &str) -> Result<Option<RpcMeta>, StoreError> {
        let found = self.raw_rpc_meta(key)?;
        found.map(|found| self.decoded(key, &found)).transpose()
    }

    fn raw_rpc_meta(&self, key: &str) -> Result<Option<Vec<u8>>, StoreError> {
        self.store.get(key, RPC_META_BYTES_MAX)
    }

    fn decoded(&self, key: &str, value: &[u8]) -> Result<RpcMeta, StoreError> {
        RpcMeta::decode(value).map_err(|source| StoreError::Value {
            key: key.to_owned(),
            source,
        })
    }

    /// Writes under which address we are in place of `expected`, and looks whether that is what the store
    /// has then: not every store can compare and replace at once, and an answer may be lost. Returns
    /// `false` if somebody else was there first.
    fn set_rpc_meta(&self, expected: Option<&[u8]>) -> Result<bool, StoreError> {
        let value = self.rpc_meta.encode() + self.store.value_end();
        let swapped = self
            .store
            .swap(&self.rpc_meta_key, expected, Some(value.as_bytes()));
        match (self.rpc_meta_of(&self.rpc_meta_key), swapped) {
            (Ok(Some(found)), _) if found == self.rpc_meta => Ok(true),
            (Ok(_), Ok(false)) => Ok(false),
            (_, Err(error)) | (Err(error), Ok(_)) => Err(error),
            (Ok(Some(found)), Ok(true)) => Err(self.taken(&found, false)),
            (Ok(None), Ok(true)) => Err(StoreError::NotPublished {
                key: self.rpc_meta_key.clone(),
            }),
        }
    }

    fn taken(&self, holder: &RpcMeta, answers: bool) -> StoreError {
        StoreError::NameTaken {
            key: self.rpc_meta_key.clone(),
            holder: holder.holder(),
            answers,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing that may panic stands between two changes of the state.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
