//! The thread that looks after an engine's entry while the engine lives.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::publisher::Publisher;

/// Looks at the entry from time to time, and at once when it is woken.
pub(super) struct Keeper {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    orders: Mutex<Orders>,
    changed: Condvar,
}

#[derive(Default)]
struct Orders {
    look: bool,
    end: bool,
    withdraw: bool,
}

impl Shared {
    fn orders(&self) -> MutexGuard<'_, Orders> {
        // Flags are set one by one, and each is good alone.
        self.orders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn order(&self, order: impl FnOnce(&mut Orders)) {
        order(&mut self.orders());
        self.changed.notify_one();
    }

    /// Waits for an order, or until it is time to look. Returns whether to go on.
    fn wait(&self, every: Option<Duration>) -> bool {
        let orders = self.orders();
        let idle = |orders: &mut Orders| !orders.look && !orders.end;
        let mut orders = match every {
            Some(every) => {
                let waited = self.changed.wait_timeout_while(orders, every, idle);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
            None => {
                let waited = self.changed.wait_while(orders, idle);
                waited.unwrap_or_else(PoisonError::into_inner)
            }
        };
        orders.look = false;
        !orders.end
    }
}

impl Keeper {
    /// Starts the thread; `descriptor` is `None` once the engine is gone.
    pub(super) fn start(
        publisher: Arc<Publisher>,
        every: Option<Duration>,
        descriptor: impl Fn() -> Option<String> + Send + 'static,
    ) -> std::io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let ours = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("mooncake-store".to_owned())
            .spawn(move || {
                // Said once until it changes: nobody else hears of it.
                let mut last = Ok(());
                while ours.wait(every) {
                    let outcome = publisher.look_after(&descriptor);
                    if outcome != last {
                        match &outcome {
                            Ok(()) => tracing::info!(
                                key = publisher.rpc_meta_key(),
                                "the entry in the metadata store is in order again"
                            ),
                            Err(error) => tracing::warn!(
                                %error,
                                "the entry in the metadata store cannot be kept; trying again"
                            ),
                        }
                        last = outcome;
                    }
                }
                if ours.orders().withdraw {
                    publisher.withdraw_or_say();
                }
            })?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }

    /// Returns what has the entry looked after at once, without waiting; it may outlive the thread.
    pub(super) fn waker(&self) -> impl Fn() + Send + Sync + 'static {
        let shared = Arc::clone(&self.shared);
        move || shared.order(|orders| orders.look = true)
    }

    /// Ends the thread after a last call to the store, if it is in one.
    pub(super) fn end(&mut self) {
        self.shared.order(|orders| orders.end = true);
        if let Some(thread) = self.thread.take() {
            // A panic of its own would have been printed.
            let _ = thread.join();
        }
    }

    /// Ends the thread without waiting, and leaves it the entry to withdraw.
    pub(super) fn end_and_withdraw(&mut self) {
        self.shared.order(|orders| {
            orders.end = true;
            orders.withdraw = true;
        });
        self.thread = None;
    }
}
