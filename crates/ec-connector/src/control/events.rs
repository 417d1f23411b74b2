//! Ready events, on the side that waits for them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use serde_json::Value;

use super::address::ControlAddress;
use super::client::{ClientError, ControlContext};
use super::deadline::{deadline_after, has_passed, left_millis};
use super::message::lenient;
use super::server::SocketReason;

/// An item became ready at one shard.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReadyEvent {
    /// Names the push.
    pub transfer_id: String,
    /// Names the content.
    pub mm_hash: String,
    /// Names the reservation.
    pub reservation_id: String,
    /// Bytes of the tensor.
    pub len_bytes: u64,
    /// Dimensions.
    pub shape: Vec<u64>,
    /// Name of the element type, as the shard spells it.
    pub dtype: String,
    /// The shard's control port, if it said so.
    pub shard: Option<u64>,
}

impl ReadyEvent {
    /// Reads one frame; nothing for what is no ready event.
    ///
    /// Undecodable frames, other objects and objects without a true `ready` are all ignored.
    pub fn decode(frame: &[u8]) -> Option<Self> {
        let value: Value = serde_json::from_slice(frame).ok()?;
        let object = value.as_object()?;
        if !lenient::truth(object.get("ready")) {
            return None;
        }
        let text = |name| lenient::text(object.get(name)?, name).ok();
        let shape = object.get("shape")?.as_array()?;
        let shard = match object.get("shard") {
            None | Some(Value::Null) => None,
            Some(shard) => Some(lenient::unsigned(shard, "shard").ok()?),
        };
        Some(Self {
            transfer_id: text("transfer_id")?,
            mm_hash: text("mm_hash")?,
            reservation_id: text("reservation_id").unwrap_or_default(),
            len_bytes: lenient::unsigned(object.get("nbytes")?, "nbytes").ok()?,
            shape: shape
                .iter()
                .map(|dim| lenient::unsigned(dim, "shape").ok())
                .collect::<Option<_>>()?,
            dtype: text("dtype")?,
            shard,
        })
    }
}

/// Receives the ready events of all shards of a consumer.
///
/// A shard's events go to exactly one subscriber: a second one would take events away from the
/// first.
pub struct EventSubscriber {
    socket: zmq::Socket,
    ignored: u64,
}

/// Longest event accepted; what a shard sends is below 16 KB.
const EVENT_BYTES_MAX: i64 = 1 << 20;

impl EventSubscriber {
    /// Connects to the event ports of all shards.
    ///
    /// The connections come about in the background; events wait at the shards meanwhile.
    ///
    /// # Errors
    /// [`ClientError::Setup`].
    pub fn connect(
        context: &ControlContext,
        shards: &[ControlAddress],
    ) -> Result<Self, ClientError> {
        let failed = |address: &ControlAddress, error| ClientError::Setup {
            address: address.clone(),
            source: SocketReason::new(error),
        };
        let make = || -> Result<zmq::Socket, zmq::Error> {
            let socket = context.context.socket(zmq::PULL)?;
            socket.set_ipv6(true)?;
            socket.set_linger(0)?;
            socket.set_maxmsgsize(EVENT_BYTES_MAX)?;
            Ok(socket)
        };
        let nowhere = ControlAddress::new(std::net::Ipv4Addr::LOCALHOST.into(), 0);
        let socket = make().map_err(|error| failed(shards.first().unwrap_or(&nowhere), error))?;
        for address in shards {
            socket
                .connect(&address.to_string())
                .map_err(|error| failed(address, error))?;
        }
        Ok(Self { socket, ignored: 0 })
    }

    /// The next event, waiting up to `timeout` for one; `Duration::MAX` waits for as long as it takes.
    ///
    /// # Errors
    /// What the message library says; the subscriber is of no use then.
    pub fn next(&mut self, timeout: Duration) -> Result<Option<ReadyEvent>, SocketReason> {
        let deadline = deadline_after(timeout);
        loop {
            match self.socket.recv_multipart(zmq::DONTWAIT) {
                Ok(frames) => match frames.as_slice() {
                    [frame] => match ReadyEvent::decode(frame) {
                        Some(event) => return Ok(Some(event)),
                        None => self.ignored += 1,
                    },
                    _ => self.ignored += 1,
                },
                Err(zmq::Error::EAGAIN | zmq::Error::EINTR) => {
                    if has_passed(deadline) {
                        return Ok(None);
                    }
                    match self.socket.poll(zmq::POLLIN, left_millis(deadline)) {
                        Ok(_) | Err(zmq::Error::EINTR) => {}
                        Err(error) => return Err(SocketReason::new(error)),
                    }
                }
                Err(error) => return Err(SocketReason::new(error)),
            }
        }
    }

    /// Messages that were no ready events, in total.
    pub fn ignored(&self) -> u64 {
        self.ignored
    }
}

/// Most half-complete transfers a [`ShardGather`] remembers.
const HALF_COMPLETE_MAX: usize = 4096;

/// Tells when an item is ready at every shard.
///
/// A transfer counts when events of as many *distinct* shards as there are were seen, so an event
/// that comes twice does no harm. Beyond 4,096 half-complete transfers the one that heard nothing
/// for longest is forgotten.
pub struct ShardGather {
    shard_count: usize,
    pending: HashMap<String, Pending>,
    /// Transfers by when they last heard something.
    order: BTreeMap<u64, String>,
    next: u64,
}

struct Pending {
    shards: BTreeSet<u64>,
    heard: u64,
}

impl ShardGather {
    /// Gathers for a consumer of `shard_count` shards.
    pub fn new(shard_count: usize) -> Self {
        Self {
            shard_count,
            pending: HashMap::new(),
            order: BTreeMap::new(),
            next: 0,
        }
    }

    /// Takes an event; gives it back when it is the last one its transfer waited for.
    pub fn handle(&mut self, event: ReadyEvent) -> Option<ReadyEvent> {
        if self.shard_count <= 1 {
            return Some(event);
        }
        let heard = self.next;
        self.next += 1;
        let pending = self
            .pending
            .entry(event.transfer_id.clone())
            .or_insert_with(|| Pending {
                shards: BTreeSet::new(),
                heard,
            });
        self.order.remove(&pending.heard);
        pending.heard = heard;
        // A shard that does not say who it is counts as one more.
        let shard = event.shard.unwrap_or(pending.shards.len() as u64);
        pending.shards.insert(shard);
        if pending.shards.len() >= self.shard_count {
            self.pending.remove(&event.transfer_id);
            return Some(event);
        }
        self.order.insert(heard, event.transfer_id);
        while self.order.len() > HALF_COMPLETE_MAX {
            if let Some((_, forgotten)) = self.order.pop_first() {
                self.pending.remove(&forgotten);
            }
        }
        None
    }

    /// Number of transfers some but not all shards announced.
    pub fn half_complete(&self) -> usize {
        self.pending.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn event(transfer_id: &str, shard: Option<u64>) -> ReadyEvent {
        let mut value = json!({
            "transfer_id": transfer_id, "mm_hash": "h", "ready": true, "reservation_id": "r",
            "nbytes": 2, "shape": [1], "dtype": "bfloat16",
        });
        if let Some(shard) = shard {
            value["shard"] = json!(shard);
        }
        ReadyEvent::decode(value.to_string().as_bytes()).unwrap()
    }

    #[test]
    fn what_is_no_ready_event_is_ignored() {
        for frame in [
            &b""[..],
            b"\xff",
            b"{",
            b"[]",
            b"7",
            b"{}",
            br#"{"transfer_id":"t","ready":false}"#,
            br#"{"ready":true}"#,
            br#"{"ready":true,"transfer_id":"t","mm_hash":"h","nbytes":-1,"shape":[],"dtype":"x"}"#,
        ] {
            assert_eq!(ReadyEvent::decode(frame), None);
        }
    }

    #[test]
    fn all_distinct_shards_are_needed_and_duplicates_do_no_harm() {
        let mut gather = ShardGather::new(2);
        assert!(gather.handle(event("t", Some(1))).is_none());
        assert!(gather.handle(event("t", Some(1))).is_none());
        assert!(gather.handle(event("u", Some(2))).is_none());
        assert!(gather.handle(event("t", Some(2))).is_some());
        assert_eq!(gather.half_complete(), 1);
    }

    #[test]
    fn a_shard_without_a_name_counts_as_one_more() {
        let mut gather = ShardGather::new(2);
        assert!(gather.handle(event("t", None)).is_none());
        assert!(gather.handle(event("t", None)).is_some());
    }

    #[test]
    fn one_shard_needs_no_gathering() {
        let mut gather = ShardGather::new(1);
        assert!(gather.handle(event("t", Some(1))).is_some());
        assert!(gather.handle(event("t", Some(1))).is_some());
        assert_eq!(gather.half_complete(), 0);
    }

    #[test]
    fn half_complete_transfers_are_bounded_and_the_quietest_goes_first() {
        let mut gather = ShardGather::new(2);
        for n in 0..HALF_COMPLETE_MAX {
            assert!(gather.handle(event(&format!("t{n}"), Some(1))).is_none());
        }
        assert!(gather.handle(event("t0", Some(1))).is_none());
        assert!(gather.handle(event("one more", Some(1))).is_none());
        assert_eq!(gather.half_complete(), HALF_COMPLETE_MAX);
        assert!(gather.handle(event("t1", Some(2))).is_none(), "forgotten");
        assert!(gather.handle(event("t0", Some(2))).is_some(), "heard since");
    }
}
