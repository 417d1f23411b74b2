//! What every transfer engine offers.

use std::sync::Arc;

use slab_memory::Memory;

use crate::batch::{Batch, Task};
use crate::error::{EngineError, Refused};
use crate::registration::{Access, Registration};
use crate::segment::Segment;
use crate::wire::control::Notice;

/// Notifications that have arrived, oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Notices {
    /// The notifications.
    pub notices: Vec<Notice>,
    /// How many older ones were dropped since the last call because nobody took them.
    pub dropped: u64,
}

/// A transfer engine: memory known to it can be read and written by peers, and it reads and writes
/// theirs.
///
/// The trait is object-safe. All calls may be made from any thread; those that block say so.
pub trait Engine: Send + Sync {
    /// Returns the name by which peers dial this engine, `host:port`.
    fn session(&self) -> &str;

    /// Makes `memory` known, to be touched as `access` says.
    ///
    /// # Errors
    /// [`EngineError::UnusableMemory`], [`EngineError::Overlap`], [`EngineError::DescriptorTooLong`].
    fn register(
        &self,
        memory: Arc<dyn Memory>,
        access: Access,
    ) -> Result<Registration, EngineError>;

    /// Opens the peer called `name` for transfers. Blocks for a control exchange, unless the
    /// segment is open already.
    ///
    /// # Errors
    /// What went wrong with the name, the exchange or the peer's descriptor.
    fn open_segment(&self, name: &str) -> Result<Segment, EngineError>;

    /// Starts `tasks` and returns at once. They run in any order.
    ///
    /// # Errors
    /// The tasks, untouched, with the cause: a range outside its memory, a segment of another
    /// engine, a batch too long, too many tasks under way.
    fn submit(&self, tasks: Vec<Task>) -> Result<Batch, Refused<Vec<Task>>>;

    /// Sends a notification to the peer. Blocks for a control exchange.
    ///
    /// # Errors
    /// [`EngineError::Control`]; after a lost reply the peer may have taken the notification.
    fn notify(&self, segment: &Segment, name: &str, message: &str) -> Result<(), EngineError>;

    /// Takes the notifications that peers have sent.
    ///
    /// # Errors
    /// [`EngineError::Unsupported`].
    fn take_notices(&self) -> Result<Notices, EngineError>;

    /// Asks whether the peer called `name` is alive. Blocks for a control exchange.
    ///
    /// # Errors
    /// [`EngineError::Control`] if it is not; [`EngineError::Unsupported`].
    fn probe(&self, name: &str) -> Result<(), EngineError>;
}
