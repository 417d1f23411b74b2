//! Memory known to an engine.

use std::fmt;
use std::sync::Arc;

use slab_memory::Memory;

use crate::error::EngineError;

/// Who may touch registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Access {
    /// Only this process, as the local side of its own tasks.
    Local,
    /// Peers may read.
    RemoteRead,
    /// Peers may read and write.
    RemoteWrite,
}

/// The call that makes an engine forget a registration. It returns only once no request of a peer
/// touches the memory any more, unless each such request holds the memory itself.
type Deregister = Box<dyn FnOnce() -> Result<(), EngineError> + Send + Sync>;

/// Memory that an engine knows; dropping it unregisters.
///
/// The memory stays alive at least as long as this value and any request that touches it. Should
/// unregistering fail, the memory is leaked on purpose: a peer may still reach it.
#[must_use = "dropping the registration unregisters the memory"]
pub struct Registration {
    memory: Option<Arc<dyn Memory>>,
    access: Access,
    deregister: Option<Deregister>,
}

impl Registration {
    /// Creates a registration; for implementors of [`Engine`](crate::Engine).
    ///
    /// `deregister` is called once, from [`unregister`](Registration::unregister) or drop. After
    /// it has returned `Ok`, no further request of a peer reaches the memory, and one that is still
    /// being cut off holds the memory itself.
    pub fn new(
        memory: Arc<dyn Memory>,
        access: Access,
        deregister: Box<dyn FnOnce() -> Result<(), EngineError> + Send + Sync>,
    ) -> Self {
        Self {
            memory: Some(memory),
            access,
            deregister: Some(deregister),
        }
    }

    /// Returns the registered memory.
    pub fn memory(&self) -> &Arc<dyn Memory> {
        // `memory` is only taken by `end`, after which the value is gone.
        self.memory
            .as_ref()
            .expect("present until the registration ends")
    }

    /// Returns who may touch the memory.
    pub fn access(&self) -> Access {
        self.access
    }

    /// Unregisters the memory: no new request of a peer is served, running ones are cut off.
    ///
    /// When it returns, nothing of a peer touches the memory any more; only on the engine's own thread,
    /// in the drop of a hold, it cannot wait for that, and requests that are cut off in a moment keep
    /// the memory mapped until then. An engine that cannot cut requests off (feature `ffi`) keeps the memory
    /// mapped until the engine itself is gone, and running requests of peers go on touching it.
    ///
    /// # Errors
    /// The engine's error; the memory is leaked then and never freed.
    pub fn unregister(mut self) -> Result<(), EngineError> {
        self.end()
    }

    fn end(&mut self) -> Result<(), EngineError> {
        let Some(deregister) = self.deregister.take() else {
            return Ok(());
        };
        let ended = deregister();
        if ended.is_err() {
            // Freeing memory that a peer may still write is worse than losing it.
            std::mem::forget(self.memory.take());
        }
        ended
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let (address, len) = self
            .memory
            .as_ref()
            .map_or((0, 0), |m| (m.address(), m.len()));
        if let Err(error) = self.end() {
            tracing::error!(address, len_bytes = len, %error, "memory leaked: cannot unregister");
        }
    }
}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let memory = self.memory.as_ref();
        f.debug_struct("Registration")
            .field("address", &memory.map(|memory| memory.address()))
            .field("len", &memory.map(|memory| memory.len()))
            .field("access", &self.access)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use slab_memory::HostSlab;

    use super::*;

    #[test]
    fn dropping_unregisters_once_and_then_releases_the_memory() {
        let memory: Arc<dyn Memory> = Arc::new(HostSlab::new(4096).unwrap());
        let calls = Arc::new(AtomicUsize::new(0));
        let make = || {
            let calls = Arc::clone(&calls);
            let deregister = Box::new(move || {
                calls.fetch_add(1, Ordering::SeqCst);
                Ok(())
            });
            Registration::new(Arc::clone(&memory), Access::RemoteRead, deregister)
        };
        drop(make());
        assert_eq!(calls.load(Ordering::SeqCst), 1);
        make().unregister().unwrap();
        assert_eq!(calls.load(Ordering::SeqCst), 2);
        assert_eq!(Arc::strong_count(&memory), 1);
    }

    #[test]
    fn memory_that_cannot_be_unregistered_is_leaked() {
        let memory: Arc<dyn Memory> = Arc::new(HostSlab::new(4096).unwrap());
        let make = || {
            let deregister = Box::new(|| Err(EngineError::ShutDown));
            Registration::new(Arc::clone(&memory), Access::RemoteWrite, deregister)
        };
        assert_eq!(make().unregister(), Err(EngineError::ShutDown));
        assert_eq!(Arc::strong_count(&memory), 2);
        drop(make());
        assert_eq!(Arc::strong_count(&memory), 3);
    }
}
