//! What goes into the push machine and what comes out of it.

use mooncake_transport::{EngineError, Reason};

use super::cause::Cause;
use crate::code::ErrorCode;
use crate::control::ClientError;
use crate::moment::{Moment, seconds};
use crate::name::TransferId;
use crate::reservation::CancelKind;

/// Where transfer ids come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum IdPolicy {
    /// The producer draws them, and another one when one is spent.
    Fresh,
    /// Somebody else chose the id and will look for the item under it: no other one may be used.
    Given,
}

/// Limits of a push.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct PushConfig {
    /// How long to wait: for room at the consumer and in the staging slab, for another producer of the same content,
    /// for replies.
    pub timeout_ms: u64,
    /// How long one request may take.
    pub control_timeout_ms: u64,
    /// Age at which a granted reservation is renewed instead of written; well below the consumer's time to live.
    pub refresh_age_ms: u64,
    /// Most error replies without a code (from consumers that send none) before the push fails.
    pub uncoded_errors_max: u32,
}

impl Default for PushConfig {
    /// The constants of vLLM's producer, and five errors without a code.
    fn default() -> Self {
        Self {
            timeout_ms: 60_000,
            control_timeout_ms: 30_000,
            refresh_age_ms: 150_000,
            uncoded_errors_max: 5,
        }
    }
}

/// What [`poll`](super::PushMachine::poll) wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PushStep {
    /// Do this and report the result.
    Do(PushAction),
    /// Nothing before this moment.
    WaitUntil(Moment),
    /// Nothing before this moment, unless there may be room to stage the source: then
    /// [`handle_room`](super::PushMachine::handle_room).
    WaitForRoom(Moment),
    /// The result of an earlier action is outstanding.
    InProgress,
    /// The push has ended.
    Done(PushOutcome),
}

/// Something to do; each names the method that takes the result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PushAction {
    /// Send `reserve`; then [`handle_reserve`](super::PushMachine::handle_reserve).
    Reserve {
        /// Id to reserve under.
        transfer_id: TransferId,
        /// How long to wait for the reply.
        timeout_ms: u64,
    },
    /// Put the source where the engine can read it; then [`handle_staged`](super::PushMachine::handle_staged).
    /// Asked until it is there, where it stays until the push has ended.
    Stage,
    /// Write the source to the consumer; then [`handle_write`](super::PushMachine::handle_write).
    Write {
        /// The consumer's engine.
        session: String,
        /// Where the first byte goes.
        address: u64,
    },
    /// Send `complete`; then [`handle_complete`](super::PushMachine::handle_complete).
    Complete {
        /// Id of the record.
        transfer_id: TransferId,
        /// Its reservation.
        reservation_id: String,
        /// How long to wait for the reply.
        timeout_ms: u64,
    },
    /// Send `status`; then [`handle_status`](super::PushMachine::handle_status).
    Status {
        /// Id of the record.
        transfer_id: TransferId,
        /// How long to wait for the reply.
        timeout_ms: u64,
    },
    /// Send `cancel`; then [`handle_cancel`](super::PushMachine::handle_cancel).
    Cancel {
        /// Id of the record.
        transfer_id: TransferId,
        /// Only this reservation; none matches any.
        reservation_id: Option<String>,
        /// What the consumer may conclude about the memory.
        kind: CancelKind,
        /// How long to wait for the reply.
        timeout_ms: u64,
    },
}

/// What became of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PushAnswer<T> {
    /// The consumer did it and said this.
    Reply(T),
    /// The consumer refused.
    Refused {
        /// Why, for programs; vLLM sends none.
        code: Option<ErrorCode>,
        /// Why, for people.
        text: String,
    },
    /// There was no reply.
    Lost {
        /// The request may have been received and acted upon.
        sent: bool,
        /// Why there was none.
        cause: Cause<ClientError>,
    },
    /// What came is no reply to this request; it may have been acted upon. Asking again would not help.
    BadReply {
        /// What is wrong with it.
        cause: Cause<ClientError>,
    },
}

/// The reply to a reserve, as far as a producer cares.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reserved {
    /// The id has a reservation.
    Granted {
        /// Names it.
        reservation_id: String,
        /// The consumer's engine.
        session: String,
        /// Where the first byte goes.
        address: u64,
        /// Bytes of the tensor.
        len_bytes: u64,
        /// This push must write and complete.
        write: bool,
        /// The bytes are there.
        ready: bool,
    },
    /// The id was cancelled: nothing is to be written.
    Cancelled,
}

/// What became of staging the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StageEnd {
    /// It is in place.
    Ready,
    /// There is no room for it now; there will be when other pushes have ended.
    Later,
    /// It cannot be had.
    Failed,
}

/// How a write ended, as the engine tells it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WriteEnd {
    /// All bytes are in the consumer's memory.
    Applied,
    /// The connection was closed without an answer: nothing more will be stored, and another connection may fare
    /// better.
    Closed {
        /// What the engine reported.
        cause: Cause<WriteError>,
    },
    /// Nothing more will be stored; the range may be partly written. Trying again is no use.
    Ended {
        /// What the engine reported.
        cause: Cause<WriteError>,
    },
    /// Bytes may still be stored.
    Unknown {
        /// What the engine reported.
        cause: Cause<WriteError>,
    },
}

/// Why a write to a consumer's memory did not succeed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WriteError {
    /// The engine could not reach the consumer's, or did not take the write; nothing was sent.
    #[error("the write could not begin")]
    Begin(#[source] EngineError),
    /// The write had begun.
    #[error(transparent)]
    Task(Reason),
}

/// How a push ended.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PushOutcome {
    /// The id last used.
    pub transfer_id: TransferId,
    /// What happened.
    pub result: Result<Delivery, PushFailure>,
}

/// How the content came to be at the consumer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Delivery {
    /// This push wrote it.
    Written,
    /// It was there, or another producer wrote it.
    Cached,
}

/// Why a push failed.
#[derive(Debug, Clone, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum PushFailure {
    /// No room came free in time.
    #[error(
        "the consumer's pool stayed full for {}: all that is in it is in use there; have items released (a consumer with --keep or --no-take releases none), give it a larger pool, or raise the timeout", seconds(*waited_ms)
    )]
    PoolFull {
        /// How long the push waited, in milliseconds: its timeout, if it used that up.
        waited_ms: u64,
    },
    /// The consumer refused for a reason that waiting does not change.
    #[error("the consumer refused: {}", refusal(*code, text))]
    Refused {
        /// Why, for programs; vLLM sends none.
        code: Option<ErrorCode>,
        /// Why, for people.
        text: String,
    },
    /// The consumer did not answer.
    #[error(
        "the consumer did not answer for {}; check that it runs and that the address is right", seconds(*waited_ms)
    )]
    Unreachable {
        /// How long the push waited, in milliseconds: its timeout, if it used that up.
        waited_ms: u64,
        /// What became of the last request.
        #[source]
        cause: Cause<ClientError>,
    },
    /// Whoever answers does not speak the consumer's protocol.
    #[error("the answer makes no sense; check that this is the control address of a consumer")]
    BadReply {
        /// What is wrong with it.
        #[source]
        cause: Cause<ClientError>,
    },
    /// Another producer's write of the same content did not end in time.
    #[error("another producer was still writing the same content after {}; push again", seconds(*waited_ms))]
    StillWriting {
        /// How long the push waited, in milliseconds.
        waited_ms: u64,
    },
    /// The time was over before the push had found out where it stands.
    #[error("the push was not done after {}; push again, with a longer timeout", seconds(*waited_ms))]
    TimedOut {
        /// How long the push waited, in milliseconds: its timeout, if it used that up.
        waited_ms: u64,
    },
    /// No room came free in the producer's own staging slab in time.
    #[error(
        "the producer's staging slab had no room for {}; give it a larger one, or raise the timeout",
        seconds(*waited_ms)
    )]
    StagingFull {
        /// How long the push waited in all, in milliseconds.
        waited_ms: u64,
    },
    /// The consumer cancelled the item: nobody wants it any more.
    #[error("the consumer cancelled the item")]
    Cancelled,
    /// The consumer may or may not have the item; it no longer knows the id.
    #[error(
        "the consumer no longer knows the transfer id, so nobody can say whether the item arrived"
    )]
    Unconfirmed,
    /// The consumer gave the reservation up before the write was completed.
    #[error("the consumer gave the reservation up before it was completed; push again")]
    NotCompleted,
    /// The consumer granted another number of bytes than it was asked for.
    #[error("the consumer reserved {granted} bytes where {asked} were asked for")]
    WrongLength {
        /// Bytes asked for.
        asked: u64,
        /// Bytes granted.
        granted: u64,
    },
    /// The write was rejected, or the connection broke.
    #[error("the write to the consumer's memory failed")]
    WriteEnded {
        /// What the engine reported.
        #[source]
        cause: Cause<WriteError>,
    },
    /// Nobody knows how the write ended; the consumer keeps the memory reserved.
    #[error(
        "nobody knows how the write to the consumer's memory ended, so the consumer keeps it reserved"
    )]
    WriteUnknown {
        /// What the engine reported.
        #[source]
        cause: Cause<WriteError>,
    },
    /// The source could not be read or staged.
    #[error("the source could not be made ready for the transfer")]
    Source,
    /// The producer was closed before the push had ended.
    #[error("the producer was closed before the push had ended")]
    Closed,
}

impl PushFailure {
    /// The failure as programs read it: the consumer's code where it sent one.
    pub fn code(&self) -> &'static str {
        match self {
            Self::PoolFull { .. } => ErrorCode::PoolFull.as_str(),
            Self::Refused {
                code: Some(code), ..
            } => code.as_str(),
            Self::Refused { code: None, .. } => "refused",
            Self::Unreachable { .. } => "unreachable",
            Self::BadReply { .. } => "bad_reply",
            Self::StillWriting { .. } | Self::TimedOut { .. } => "timed_out",
            Self::StagingFull { .. } => "staging_full",
            Self::Cancelled => "cancelled",
            Self::Unconfirmed => "unconfirmed",
            Self::NotCompleted => "not_completed",
            Self::WrongLength { .. } => "wrong_length",
            Self::WriteEnded { .. } => "write_failed",
            Self::WriteUnknown { .. } => "write_unknown",
            Self::Source => "source",
            Self::Closed => "closed",
        }
    }
}

/// The consumer's text, with what to do where the code tells.
fn refusal(code: Option<ErrorCode>, text: &str) -> String {
    match code {
        Some(ErrorCode::TooLarge) => {
            "the item is larger than its whole pool; start it with a larger one".to_owned()
        }
        Some(ErrorCode::ShuttingDown) => format!("{text}; push again when it has restarted"),
        _ => text.to_owned(),
    }
}
