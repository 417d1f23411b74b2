//! Registrations of memory outside the staging slab, counted by address.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use mooncake_transport::{Access, Engine, Registration};
use slab_memory::Memory;

use super::StageError;

/// The engine is never called under the table's lock: the last user of a registration may be dropped by the engine's
/// own thread, which must not wait for a thread that waits for it.
#[derive(Default)]
pub(super) struct Direct {
    table: Mutex<HashMap<u64, Registered>>,
    /// A registration is made or gone.
    settled: Condvar,
}

/// The memory at one address.
enum Registered {
    /// A thread is asking the engine to register it, or to forget it. Others wait for the answer.
    Unsettled,
    Yes {
        users: usize,
        registration: Registration,
    },
}

impl Direct {
    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Registered>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers `memory`, or joins the registration it has. Waits for an engine call of another thread that is under
    /// way for the same address.
    pub(super) fn share(
        this: &Arc<Self>,
        engine: &dyn Engine,
        memory: &Arc<dyn Memory>,
    ) -> Result<Share, StageError> {
        let address = memory.address();
        // Made only for who is counted.
        let share = || Share {
            home: Arc::clone(this),
            address,
        };
        let mut table = this.lock();
        loop {
            match table.entry(address) {
                Entry::Vacant(entry) => {
                    entry.insert(Registered::Unsettled);
                    break;
                }
                Entry::Occupied(mut entry) => match entry.get_mut() {
                    Registered::Unsettled => {}
                    Registered::Yes {
                        users,
                        registration,
                    } => {
                        let registered = registration.memory().len();
                        if registered != memory.len() {
                            return Err(StageError::OtherLength {
                                address,
                                registered,
                                asked: memory.len(),
                            });
                        }
                        *users += 1;
                        return Ok(share());
                    }
                },
            }
            table = this
                .settled
                .wait(table)
                .unwrap_or_else(PoisonError::into_inner);
        }
        drop(table);
        let mut unsettled = Unsettled {
            home: this,
            address,
            becomes: None,
        };
        let registration = engine.register(Arc::clone(memory), Access::Local)?;
        unsettled.becomes = Some(Registered::Yes {
            users: 1,
            registration,
        });
        drop(unsettled);
        Ok(share())
    }
}

/// The duty to say what became of an address that is unsettled, also if the engine panics.
struct Unsettled<'a> {
    home: &'a Direct,
    address: u64,
    /// Nothing: it is not registered.
    becomes: Option<Registered>,
}

impl Drop for Unsettled<'_> {
    fn drop(&mut self) {
        let mut table = self.home.lock();
        match self.becomes.take() {
            Some(registered) => table.insert(self.address, registered),
            None => table.remove(&self.address),
        };
        drop(table);
        self.home.settled.notify_all();
    }
}

/// One user of a direct registration; the last one dropped unregisters.
pub(super) struct Share {
    home: Arc<Direct>,
    address: u64,
}

impl Drop for Share {
    fn drop(&mut self) {
        let registration = {
            let mut table = self.home.lock();
            let Entry::Occupied(mut entry) = table.entry(self.address) else {
                return;
            };
            match entry.get_mut() {
                Registered::Yes { users, .. } if *users > 1 => {
                    *users -= 1;
                    return;
                }
                Registered::Yes { .. } => entry.insert(Registered::Unsettled),
                // Nobody has a share of an address that is unsettled.
                Registered::Unsettled => return,
            }
        };
        // The address must not be registered anew before this is done.
        let unsettled = Unsettled {
            home: &self.home,
            address: self.address,
            becomes: None,
        };
        if let Registered::Yes { registration, .. } = registration
            && let Err(error) = registration.unregister()
        {
            tracing::error!(
                address = self.address,
                %error,
                "memory of a push stays registered and is leaked"
            );
        }
        drop(unsettled);
    }
}
