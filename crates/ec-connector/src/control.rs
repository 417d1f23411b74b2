//! The control plane: JSON messages over ZeroMQ.
//!
//! [`ControlServer`] answers for one [`Shard`]; [`ControlClient`] asks; ready items are announced
//! to an [`EventSubscriber`]. [`Dispatcher`] is the server without its sockets.

mod address;
mod client;
mod deadline;
mod dispatch;
mod events;
mod message;
pub(crate) mod python;
mod server;
mod throttle;

pub use address::{AddressError, ControlAddress};
pub use client::{
    ClientError, ControlClient, ControlContext, Refusal, RemoteReserve, RemoteStatus,
};
pub use dispatch::{Answer, Dispatcher, ReserveReply, Shard, Site};
pub use events::{EventSubscriber, ReadyEvent, ShardGather};
pub use message::rejection::BATCH_ITEMS_MAX;
pub use message::snapshot::{
    MAP_ENTRIES_MAX, MapRun, MapState, PoolSnapshot, ReservationCounts, SlabMap, StateBytes, Totals,
};
pub use server::{ControlServer, ServerConfig, ServerCounters, ServerError, SocketReason};
