//! What an engine has in the store, and how it gets there and leaves.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::MetadataStore;
use super::error::StoreError;
use super::key::Keys;
use super::value::RpcMeta;

/// Longest value beside a descriptor that is read, in bytes.
const RPC_META_BYTES_MAX: u64 = 16 << 10;

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
    /// Claims the name in the store. `holder` looks for the engine that an entry names.
    pub(super) fn claim(
        store: Arc<dyn MetadataStore>,
        keys: Keys,
        name: &str,
        rpc_meta: RpcMeta,
        holder: impl Fn(&RpcMeta) -> Holder,
    ) -> Result<Self, StoreError> {
        let publisher = Self {
            descriptor_key: keys.descriptor(name)?,
            rpc_meta_key: keys.rpc_meta(name)?,
            keys,
            store,
            rpc_meta,
            asked: AtomicU64::new(0),
            state: Mutex::new(State {
                withdrawn: false,
                covered: 0,
                outcome: Ok(()),
            }),
        };
        if let Some(found) = publisher.rpc_meta_of(&publisher.rpc_meta_key)? {
            match holder(&found) {
                Holder::Answers => return Err(publisher.taken(&found, true)),
                Holder::Unknown => return Err(publisher.taken(&found, false)),
                Holder::Gone => {
                    tracing::warn!(
                        key = publisher.rpc_meta_key,
                        holder = found.holder(),
                        "replacing the entry of an engine that is gone"
                    );
                    // Some stores refuse to replace it.
                    publisher.store.delete(&publisher.rpc_meta_key)?;
                }
            }
        }
        publisher.put_rpc_meta()?;
        Ok(publisher)
    }

    pub(super) fn keys(&self) -> &Keys {
        &self.keys
    }

    /// Writes the entry again, and takes back what the store has lost meanwhile.
    ///
    /// However many threads call at once, each waits for two writes at most: the one under way, and one
    /// for all that came meanwhile.
    pub(super) fn publish(&self, descriptor: impl FnOnce() -> String) -> Result<(), StoreError> {
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
        let outcome = self.write(&descriptor());
        state.covered = covers;
        state.outcome.clone_from(&outcome);
        outcome
    }

    fn write(&self, descriptor: &str) -> Result<(), StoreError> {
        match self.rpc_meta_of(&self.rpc_meta_key)? {
            Some(found) if found != self.rpc_meta => return Err(self.taken(&found, false)),
            Some(_) => {}
            None => self.put_rpc_meta()?,
        }
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
        match self.rpc_meta_of(&self.rpc_meta_key)? {
            Some(found) if found != self.rpc_meta => return Ok(()),
            Some(_) => drop(self.store.delete(&self.rpc_meta_key)?),
            None => {}
        }
        self.store.delete(&self.descriptor_key).map(drop)
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
        let Some(value) = self.store.get(key, RPC_META_BYTES_MAX)? else {
            return Ok(None);
        };
        RpcMeta::decode(&value)
            .map(Some)
            .map_err(|source| StoreError::Value {
                key: key.to_owned(),
                source,
            })
    }

    /// Writes under which address we are, and looks whether that is what the store has then: some
    /// replace whatever is there, and an answer may be lost.
    fn put_rpc_meta(&self) -> Result<(), StoreError> {
        let put = self
            .store
            .put(&self.rpc_meta_key, self.rpc_meta.encode().as_bytes());
        match (self.rpc_meta_of(&self.rpc_meta_key), put) {
            (Ok(Some(found)), _) if found == self.rpc_meta => Ok(()),
            (Ok(Some(found)), _) => Err(self.taken(&found, false)),
            (_, Err(error)) | (Err(error), Ok(())) => Err(error),
            (Ok(None), Ok(())) => Err(StoreError::NotPublished {
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
