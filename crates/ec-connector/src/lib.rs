//! Encoder-cache connector: pushes encoder outputs into another process's pool.
//!
//! A [`Consumer`] is one shard: slab, reservations, engine registration, control server. A [`Producer`] pushes
//! [`Item`]s to consumers. Both drive pure machines, [`Reservations`] and [`PushMachine`], to which time and
//! random ids are arguments. [`ControlClient`] and [`ControlServer`] speak vLLM's control plane by themselves;
//! [`TensorFile`] reads safetensors files tensor by tensor.
//!
//! Invariants: memory a writer owns is freed only when the writer says that it is done; a taken item stays where
//! it is until it is dropped; one push that fails harms no other; nothing from the network or a file panics.
//!
//! Not here: allocation and eviction (`slab-core`), moving bytes (`mooncake-transport`).

#![forbid(unsafe_code)]

mod code;
mod consumer;
mod content;
mod content_hash;
mod control;
mod dtype;
#[cfg(test)]
mod fake_engine;
mod moment;
mod name;
mod producer;
mod push;
mod random_ids;
mod reservation;
mod staging;
mod tensor;
mod tensor_file;

pub use code::ErrorCode;
pub use consumer::{Consumer, ConsumerConfig, ConsumerError, DrainTimedOut, ItemError, TakenItem};
pub use content::{Content, Room, Span};
pub use content_hash::{ContentDigest, ContentHasher};
pub use control::{
    AddressError, Answer, BATCH_ITEMS_MAX, ClientError, ControlAddress, ControlClient,
    ControlContext, ControlServer, Dispatcher, EventSubscriber, MAP_ENTRIES_MAX, MapRun, MapState,
    PoolSnapshot, ReadyEvent, Refusal, RemoteReserve, RemoteStatus, ReservationCounts,
    ReserveReply, ServerConfig, ServerCounters, ServerError, Shard, ShardGather, Site, SlabMap,
    SocketReason, StateBytes, Totals,
};
pub use dtype::{Dtype, UnsupportedDtype};
pub use moment::Moment;
pub use name::{MmHash, NAME_BYTES_MAX, NameTooLong, ReservationId, TransferId};
pub use producer::{
    Item, Producer, ProducerConfig, ProducerError, Push, PushError, PushId, PushReport,
};
pub use push::{
    Cause, ContentLanes, Delivery, IdPolicy, PushAction, PushAnswer, PushConfig, PushFailure,
    PushMachine, PushOutcome, PushStep, Reserved, StageEnd, WriteEnd, WriteError,
};
pub use reservation::{
    CancelKind, CancelMatch, Completion, Effect, Grant, ItemStatus, OwnedSpan, PendingReserve,
    ReservationConfig, ReservationState, ReservationStats, Reservations, Reserve, ReserveError,
    ReserveRequest, Shutdown, Stuck, StuckReleased, TakeError, TakePolicy, Taken,
};
pub use staging::{Source, StageError};
pub use tensor::{DIMS_MAX, ShapeError, TensorSpec};
pub use tensor_file::{
    FileTensor, HeaderError, OutputError, TensorFile, TensorFileError, UnsupportedTensor,
    write_tensor_file,
};

/// Runs the example of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
