//! Encoder-cache connector: pushes encoder outputs into another process's pool.

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
    ContentLanes, Delivery, IdPolicy, PushAction, PushAnswer, PushConfig, PushFailure, PushMachine,
    PushOutcome, PushStep, Reserved, WriteEnd,
};
pub use reservation::{
    CancelKind, CancelMatch, Completion, Effect, Grant, ItemStatus, OwnedSpan, PendingReserve,
    ReservationConfig, ReservationState, ReservationStats, Reservations, Reserve, ReserveError,
    ReserveRequest, Stuck, StuckReleased, TakeError, TakePolicy, Taken,
};
pub use staging::{Source, StageError};
pub use tensor::{DIMS_MAX, ShapeError, TensorSpec};
pub use tensor_file::{
    FileTensor, HeaderError, OutputError, TensorFile, TensorFileError, UnsupportedTensor,
    write_tensor_file,
};
