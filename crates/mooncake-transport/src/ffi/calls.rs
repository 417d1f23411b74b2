//! Calls of the library that may take a minute, each on a thread of its own: whoever asks waits no longer than
//! is configured.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};

use super::core::Core;
use super::error::LibraryError;
use crate::error::EngineError;

/// A call under way, counted.
struct Running(Arc<Core>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.calls_running.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Runs `act` on a thread and waits for what it comes to.
pub(super) fn call<T: Send + 'static>(
    core: &Arc<Core>,
    name: &'static str,
    act: impl FnOnce(&Core) -> Result<T, EngineError> + Send + 'static,
) -> Result<T, EngineError> {
    let max = core.limits.calls_max;
    core.calls_running
        .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |running| {
            (running < max).then_some(running + 1)
        })
        .map_err(|_| LibraryError::TooManyCalls { max })?;
    let running = Running(Arc::clone(core));
    let (sender, receiver) = sync_channel(1);
    std::thread::Builder::new()
        .name("mooncake-call".to_owned())
        .spawn(move || {
            // Nobody receives it after the timeout.
            let _ = sender.send(act(&running.0));
        })
        .map_err(|error| EngineError::Start {
            source: error.into(),
        })?;
    let timeout = core.timeouts.call;
    receiver.recv_timeout(timeout).unwrap_or_else(|error| {
        Err(match error {
            RecvTimeoutError::Timeout => LibraryError::CallTimeout {
                call: name,
                timeout_ms: u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX),
            },
            // Its thread panicked.
            RecvTimeoutError::Disconnected => LibraryError::Null { call: name },
        }
        .into())
    })
}
