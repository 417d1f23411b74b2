//! From the frames of a request to the bytes of its reply, without sockets.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::message::rejection::Rejection;
use super::message::reply::{self, BatchItem, Reply, ReserveReplyBody, StatusReply};
use super::message::request::Request;
use super::message::snapshot::PoolSnapshot;
use super::throttle::Throttle;
use crate::name::{ReservationId, TransferId};
use crate::reservation::{
    CancelKind, CancelMatch, Completion, Effect, Grant, ItemStatus, ReserveError, ReserveRequest,
};

/// What a control server serves: one consumer shard behind its lock.
///
/// Calls come from the server's thread, one at a time. Each holds the lock once, briefly.
pub trait Shard: Send + Sync {
    /// How long one request, however many items it has, may wait for bytes that are on their way back.
    fn claim_wait(&self) -> Duration;

    /// Reserves, waiting until `deadline` and outside the lock for bytes that are on their way back.
    ///
    /// # Errors
    /// As [`Reservations::reserve`](crate::Reservations::reserve).
    fn reserve(
        &self,
        request: &ReserveRequest,
        deadline: Instant,
        effects: &mut Vec<Effect>,
    ) -> Result<ReserveReply, ReserveError>;

    /// Completes; see [`Reservations::complete`](crate::Reservations::complete).
    fn complete(
        &self,
        id: &TransferId,
        reservation: Option<ReservationId>,
        effects: &mut Vec<Effect>,
    ) -> Completion;

    /// Cancels; see [`Reservations::cancel`](crate::Reservations::cancel).
    fn cancel(
        &self,
        id: &TransferId,
        matching: CancelMatch,
        kind: CancelKind,
        effects: &mut Vec<Effect>,
    ) -> bool;

    /// The active record of an id.
    fn status(&self, id: &TransferId) -> Option<ItemStatus>;

    /// Expires what is overdue; called at least once a second.
    fn expire(&self, effects: &mut Vec<Effect>);

    /// How the slab is used now.
    fn snapshot(&self) -> PoolSnapshot;
}

/// The answer to a reserve, after waiting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReserveReply {
    /// The id has a reservation now.
    Granted(Grant),
    /// The id was cancelled: write nothing.
    Cancelled,
}

/// What a shard tells its peers about itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Site {
    /// `host:port` of the engine that receives the bytes.
    pub session: String,
    /// Absolute address of the slab's first byte as peers write to it.
    pub base: u64,
    /// Control ports of all shards of the consumer, in rank order.
    pub peers: Vec<u16>,
    /// This shard's control port; also names it in events.
    pub control_port: u16,
    /// This shard's event port.
    pub event_port: u16,
}

/// However long a shard would wait for bytes, a request holds the others up no longer.
const CLAIM_WAIT_MAX: Duration = Duration::from_secs(1);

/// Most of the time that looking at the slab may take, as one part in so many.
const SNAPSHOT_SHARE: u32 = 20;

/// Answers requests of one shard.
///
/// Whatever the frames hold, there is exactly one reply, and a panic below becomes an error reply.
pub struct Dispatcher {
    shard: Arc<dyn Shard>,
    site: Site,
    events_dropped: Arc<AtomicU64>,
    throttle: Throttle,
    /// The last look at the slab, and until when it is shown again.
    snapshot: Option<(PoolSnapshot, Instant)>,
}

/// The reply to one request, and what to announce after it was sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// One frame.
    pub reply: Vec<u8>,
    /// Ready events, one frame each, in order.
    pub events: Vec<Vec<u8>>,
}

impl Dispatcher {
    /// Serves `shard` as `site`.
    pub fn new(shard: Arc<dyn Shard>, site: Site) -> Self {
        Self::with_drop_count(shard, site, Arc::default())
    }

    pub(super) fn with_drop_count(
        shard: Arc<dyn Shard>,
        site: Site,
        events_dropped: Arc<AtomicU64>,
    ) -> Self {
        Self {
            shard,
            site,
            events_dropped,
            throttle: Throttle::default(),
            snapshot: None,
        }
    }

    /// Answers a request of `frame_count` frames, the first of which is `frame`.
    ///
    /// Only requests of one frame are understood (row D1).
    pub fn answer(&mut self, frame: &[u8], frame_count: usize) -> Answer {
        let mut effects = Vec::new();
        let reply = if frame_count == 1 {
            // The shard's state is behind its own lock, which knows how to deal with a panic.
            catch_unwind(AssertUnwindSafe(|| self.reply(frame, &mut effects))).unwrap_or_else(
                |_| {
                    tracing::error!("request handler panicked");
                    reply::failure(&Rejection::Internal)
                },
            )
        } else {
            reply::failure(&Rejection::NotOneFrame { count: frame_count })
        };
        Answer {
            reply,
            events: self.events(effects),
        }
    }

    /// Expires what is overdue; a panic below is logged and survived (row D2).
    pub fn expire(&mut self) -> Vec<Vec<u8>> {
        let mut effects = Vec::new();
        if catch_unwind(AssertUnwindSafe(|| self.shard.expire(&mut effects))).is_err() {
            tracing::error!("expiry panicked");
        }
        self.events(effects)
    }

    fn reply(&mut self, frame: &[u8], effects: &mut Vec<Effect>) -> Vec<u8> {
        let request = match Request::parse(frame) {
            Ok(request) => request,
            Err(rejection) => return reply::failure(&rejection),
        };
        match request {
            Request::Peers => reply::success(&Reply::Ports {
                ports: &self.site.peers,
            }),
            Request::EventPort => reply::success(&Reply::EventPort(self.site.event_port)),
            Request::Pool => {
                let mut snapshot = self.snapshot();
                snapshot.totals.events_dropped = self.events_dropped.load(Ordering::Relaxed);
                reply::success(&Reply::Pool(&snapshot))
            }
            Request::Status(id) => {
                let status = self.shard.status(&id);
                reply::success(&Reply::Status(status.as_ref().map(StatusReply::from)))
            }
            Request::Reserve(request) => {
                match self.reserve(&request, self.claim_deadline(), effects) {
                    Ok(body) => reply::success(&Reply::Reserve(body)),
                    Err(rejection) => reply::failure(&rejection),
                }
            }
            Request::ReserveBatch(items) => {
                // One for all: while an item waits, everybody else does.
                let deadline = self.claim_deadline();
                let answer = |item: Result<ReserveRequest, Rejection>| {
                    BatchItem::from(
                        item.and_then(|request| self.reserve(&request, deadline, effects)),
                    )
                };
                reply::success(&Reply::ReserveBatch {
                    items: items.into_iter().map(answer).collect(),
                })
            }
            Request::Complete(item) => {
                let completion =
                    self.shard
                        .complete(&item.transfer_id, item.reservation_id, effects);
                reply::success(&Reply::Complete(completion.into()))
            }
            Request::CompleteBatch(items) => {
                // A malformed item completes nothing, and says only that: the items before it
                // have taken effect, so the reply must not be an error (row D12).
                let answer = |item: Result<_, Rejection>| match item {
                    Ok(super::message::request::CompleteItem {
                        transfer_id,
                        reservation_id,
                    }) => self.shard.complete(&transfer_id, reservation_id, effects),
                    Err(_) => Completion::default(),
                };
                reply::success(&Reply::CompleteBatch {
                    items: items.into_iter().map(answer).map(Into::into).collect(),
                })
            }
            Request::Cancel {
                transfer_id,
                matching,
                kind,
            } => reply::success(&Reply::Cancel {
                cancelled: self.shard.cancel(&transfer_id, matching, kind, effects),
            }),
        }
    }

    /// How the slab is used. It is looked at under the lock, and its runs can be many: anybody may ask as often as
    /// they like, so a look is shown again until it has cost a [`SNAPSHOT_SHARE`]th of the time.
    fn snapshot(&mut self) -> PoolSnapshot {
        let begun = Instant::now();
        if let Some((snapshot, until)) = &self.snapshot
            && begun < *until
        {
            return snapshot.clone();
        }
        let snapshot = self.shard.snapshot();
        let until = Instant::now() + begun.elapsed() * SNAPSHOT_SHARE;
        self.snapshot = Some((snapshot.clone(), until));
        snapshot
    }

    fn claim_deadline(&self) -> Instant {
        let now = Instant::now();
        now.checked_add(self.shard.claim_wait().min(CLAIM_WAIT_MAX))
            .unwrap_or(now)
    }

    fn reserve(
        &self,
        request: &ReserveRequest,
        deadline: Instant,
        effects: &mut Vec<Effect>,
    ) -> Result<ReserveReplyBody, Rejection> {
        let len_bytes = request.tensor.len_bytes();
        match self.shard.reserve(request, deadline, effects)? {
            ReserveReply::Granted(grant) => {
                // An empty item has no place, and its address is zero (row V18).
                let address = if len_bytes == 0 {
                    0
                } else {
                    self.site
                        .base
                        .checked_add(grant.offset)
                        .ok_or(Rejection::Internal)?
                };
                Ok(ReserveReplyBody::granted(
                    &grant,
                    &self.site.session,
                    address,
                ))
            }
            ReserveReply::Cancelled => Ok(ReserveReplyBody::cancelled(len_bytes)),
        }
    }

    /// Turns effects into events to send, and says the rest in the log.
    fn events(&mut self, effects: Vec<Effect>) -> Vec<Vec<u8>> {
        let mut events = Vec::new();
        for effect in effects {
            match effect {
                Effect::Ready(status) => {
                    events.push(reply::event(&status, self.site.control_port));
                }
                Effect::FollowersLost { writer, count } => {
                    if let Some(suppressed) = self.throttle.admit() {
                        tracing::warn!(%writer, count, suppressed, "followers lost their writer");
                    }
                }
                Effect::PublishRefused { transfer_id } => {
                    if let Some(suppressed) = self.throttle.admit() {
                        tracing::warn!(%transfer_id, suppressed, "pool holds too many residents");
                    }
                }
            }
        }
        events
    }
}
