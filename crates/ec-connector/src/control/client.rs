//! The control client.
//!
//! One request at a time over one REQ socket. After any error of the exchange the socket is
//! dropped and the next request makes a new one: a REQ socket whose reply is missing cannot be
//! used again. There is no retry here; what may be repeated is for the caller to know.

mod decode;
mod socket;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde_json::{Value, json};

use self::socket::Exchange;
use super::address::ControlAddress;
use super::deadline::deadline_after;
use super::message::snapshot::PoolSnapshot;
use super::python;
use super::server::SocketReason;
use crate::code::ErrorCode;
use crate::moment::seconds;
use crate::name::TransferId;
use crate::reservation::{CancelKind, Completion, ReserveRequest};

/// The message library's threads, shared by all clients and subscribers made from it.
///
/// One per process is enough. Clones share it.
#[derive(Clone, Default)]
pub struct ControlContext {
    pub(super) context: zmq::Context,
    monitors: Arc<AtomicU64>,
}

impl ControlContext {
    /// Starts the library's I/O thread when the first socket is made.
    pub fn new() -> Self {
        Self::default()
    }

    fn monitor_endpoint(&self) -> String {
        let number = self.monitors.fetch_add(1, Ordering::Relaxed);
        format!("inproc://ec-control-monitor-{number}")
    }
}

/// Asks one control server.
///
/// Each call blocks until the reply, an error, or the timeout. A client belongs to one thread at a
/// time; make one per thread and server. It has three of the message library's sockets while it is connected, of which
/// a [`ControlContext`] allows 1,023.
pub struct ControlClient {
    context: ControlContext,
    address: ControlAddress,
    timeout: Duration,
    fail_fast: bool,
    exchange: Option<Exchange>,
}

/// Why a request has no usable reply.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The server refused the request.
    #[error(transparent)]
    Refused(Refusal),
    /// There was no connection within the timeout, or none at all for a client that fails fast.
    /// The request did not leave.
    #[error("no control server at {address}")]
    Unreachable {
        /// Who was asked.
        address: ControlAddress,
    },
    /// The request left and no reply came in time.
    #[error("no reply from {address} within {}", seconds(*timeout_ms))]
    Timeout {
        /// Who was asked.
        address: ControlAddress,
        /// How long this request waited.
        timeout_ms: u64,
    },
    /// The request left and the connection ended before a reply came.
    #[error("{address} closed the connection before it replied")]
    Disconnected {
        /// Who was asked.
        address: ControlAddress,
    },
    /// The reply is not what the operation answers.
    #[error("{address} sent a reply that does not fit {op}: {what}")]
    BadReply {
        /// Who was asked.
        address: ControlAddress,
        /// The operation.
        op: &'static str,
        /// What is wrong with it.
        what: &'static str,
        /// What the decoder says, where it says more.
        source: Option<serde_json::Error>,
    },
    /// No socket could be made, or it failed before the request left.
    #[error("no usable control socket to {address}")]
    Setup {
        /// Who was to be asked.
        address: ControlAddress,
        /// What the message library says.
        source: SocketReason,
    },
    /// The message library failed after the request had left.
    #[error("control socket to {address} failed")]
    Socket {
        /// Who was asked.
        address: ControlAddress,
        /// What the library says.
        source: SocketReason,
    },
}

impl ClientError {
    /// Whether the server may have carried the request out.
    ///
    /// False only where that is certain: it refused, or the request never left.
    pub fn may_have_been_applied(&self) -> bool {
        !matches!(
            self,
            Self::Refused(_) | Self::Unreachable { .. } | Self::Setup { .. }
        )
    }

    /// The code of a refusal that has one.
    pub fn code(&self) -> Option<ErrorCode> {
        match self {
            Self::Refused(refusal) => refusal.code,
            _ => None,
        }
    }
}

/// An error reply.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("consumer refused: {text}")]
#[non_exhaustive]
pub struct Refusal {
    /// Why, for programs; nothing from a server that sends no codes.
    pub code: Option<ErrorCode>,
    /// Why, for people.
    pub text: String,
}

/// A reservation at a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RemoteReserve {
    /// The id has a reservation now.
    Granted {
        /// Names the reservation; opaque.
        reservation_id: String,
        /// `host:port` of the engine to write to.
        session: String,
        /// Absolute address to write to.
        address: u64,
        /// Bytes of the tensor; equal to what was asked for.
        len_bytes: u64,
        /// Write, then complete.
        write: bool,
        /// The bytes are there.
        ready: bool,
        /// The record borrows a resident.
        cached: bool,
    },
    /// The id was cancelled: write nothing.
    Cancelled,
}

/// An active record at a server.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RemoteStatus {
    /// Names the content.
    pub mm_hash: String,
    /// The bytes are there.
    pub ready: bool,
    /// Names the reservation; opaque.
    pub reservation_id: String,
    /// Bytes of the tensor.
    pub len_bytes: u64,
    /// Dimensions.
    pub shape: Vec<u64>,
    /// Name of the element type, as the server spells it.
    pub dtype: String,
}

impl ControlClient {
    /// A client that connects with its first request. Each request may take `timeout` in all, or as long as it needs
    /// if that is beyond what the clock can count, as `Duration::MAX` is.
    pub fn new(context: &ControlContext, address: ControlAddress, timeout: Duration) -> Self {
        Self {
            context: context.clone(),
            address,
            timeout,
            fail_fast: false,
            exchange: None,
        }
    }

    /// Whether a connection that is refused ends a request at once. By default a request waits
    /// for its timeout, because the server may be about to start.
    pub fn set_fail_fast(&mut self, fail_fast: bool) {
        self.fail_fast = fail_fast;
    }

    /// How long each later request may take in all; `Duration::MAX` for as long as it needs.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// Who is asked.
    pub fn address(&self) -> &ControlAddress {
        &self.address
    }

    /// Control ports of all shards, in rank order; never empty.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn peers(&mut self) -> Result<Vec<u16>, ClientError> {
        const OP: &str = "peers";
        let result = self.request(OP, &json!({ "op": OP }))?;
        decode::peers(&result).map_err(self.bad_reply(OP))
    }

    /// Port of the shard's event socket.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn event_port(&mut self) -> Result<u16, ClientError> {
        const OP: &str = "event_port";
        let result = self.request(OP, &json!({ "op": OP }))?;
        decode::port(&result).map_err(self.bad_reply(OP))
    }

    /// The active record of an id; nothing when it is unknown or finished.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn status(&mut self, id: &TransferId) -> Result<Option<RemoteStatus>, ClientError> {
        const OP: &str = "status";
        let request = json!({ "op": OP, "transfer_id": id.as_str() });
        let result = self.request(OP, &request)?;
        decode::status(&result).map_err(self.bad_reply(OP))
    }

    /// Asks for memory for one item.
    ///
    /// Repeating it after a lost reply answers `write: false`; cancel with
    /// [`CancelKind::Refresh`] first.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn reserve(&mut self, request: &ReserveRequest) -> Result<RemoteReserve, ClientError> {
        const OP: &str = "reserve";
        let mut body = json!({ "op": OP });
        extend(&mut body, reserve_fields(request));
        let result = self.request(OP, &body)?;
        decode::reserve(&result, request.tensor.len_bytes()).map_err(self.bad_reply(OP))
    }

    /// Asks for memory for many items, each answered on its own.
    ///
    /// # Errors
    /// [`ClientError`] if the batch as a whole has no usable reply.
    pub fn reserve_batch(
        &mut self,
        requests: &[ReserveRequest],
    ) -> Result<Vec<Result<RemoteReserve, Refusal>>, ClientError> {
        const OP: &str = "reserve_batch";
        let items: Vec<Value> = requests.iter().map(reserve_fields).collect();
        let result = self.request(OP, &json!({ "op": OP, "items": items }))?;
        let items = decode::items(&result, requests.len()).map_err(self.bad_reply(OP))?;
        items
            .iter()
            .zip(requests)
            .map(|(item, request)| match decode::outcome(item) {
                Ok(result) => decode::reserve(&result, request.tensor.len_bytes()).map(Ok),
                Err(decode::Outcome::Refused(refusal)) => Ok(Err(refusal)),
                Err(decode::Outcome::Bad(what)) => Err(what),
            })
            .collect::<Result<_, _>>()
            .map_err(self.bad_reply(OP))
    }

    /// Says that all bytes of a reservation are in place.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn complete(
        &mut self,
        id: &TransferId,
        reservation_id: &str,
    ) -> Result<Completion, ClientError> {
        const OP: &str = "complete";
        let request = json!({
            "op": OP, "transfer_id": id.as_str(), "reservation_id": reservation_id,
        });
        let result = self.request(OP, &request)?;
        decode::completion(&result).map_err(self.bad_reply(OP))
    }

    /// Says that all bytes of many reservations are in place, each answered on its own.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn complete_batch(
        &mut self,
        items: &[(TransferId, String)],
    ) -> Result<Vec<Completion>, ClientError> {
        const OP: &str = "complete_batch";
        let body: Vec<Value> = items
            .iter()
            .map(|(id, reservation_id)| {
                json!({ "transfer_id": id.as_str(), "reservation_id": reservation_id })
            })
            .collect();
        let result = self.request(OP, &json!({ "op": OP, "items": body }))?;
        decode::items(&result, items.len())
            .and_then(|items| items.iter().map(decode::completion).collect())
            .map_err(self.bad_reply(OP))
    }

    /// Cancels; without a reservation id whatever reservation the transfer has.
    ///
    /// Never pass [`CancelKind::Abandon`] or [`CancelKind::Refresh`] while a write to the
    /// reservation may still be under way: the memory may be somebody else's at once.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn cancel(
        &mut self,
        id: &TransferId,
        reservation_id: Option<&str>,
        kind: CancelKind,
    ) -> Result<bool, ClientError> {
        const OP: &str = "cancel";
        let mut request = json!({
            "op": OP, "transfer_id": id.as_str(), "reservation_id": reservation_id.unwrap_or(""),
        });
        // Sent only when true, as the peer does.
        for (flag, set) in [("abandon", kind.abandon()), ("refresh", kind.refresh())] {
            if set {
                extend(&mut request, json!({ flag: true }));
            }
        }
        let result = self.request(OP, &request)?;
        decode::cancelled(&result).map_err(self.bad_reply(OP))
    }

    /// How the server's slab is used; only servers of this project know the operation.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn pool(&mut self) -> Result<PoolSnapshot, ClientError> {
        const OP: &str = "x_pool";
        let result = self.request(OP, &json!({ "op": OP }))?;
        serde_json::from_value(result)
            .map_err(|error| self.undecodable(OP, "it is no snapshot", error))
    }

    fn bad_reply(&self, op: &'static str) -> impl Fn(&'static str) -> ClientError + use<> {
        let address = self.address.clone();
        move |what| ClientError::BadReply {
            address: address.clone(),
            op,
            what,
            source: None,
        }
    }

    fn undecodable(
        &self,
        op: &'static str,
        what: &'static str,
        error: serde_json::Error,
    ) -> ClientError {
        ClientError::BadReply {
            address: self.address.clone(),
            op,
            what,
            source: Some(error),
        }
    }

    /// One exchange. The socket comes back only if it is known to be in order.
    fn request(&mut self, op: &'static str, body: &Value) -> Result<Value, ClientError> {
        let address = self.address.clone();
        let bytes = python::to_json(body)
            .map_err(|error| self.undecodable(op, "the request cannot be encoded", error))?;
        let deadline = deadline_after(self.timeout);
        let mut exchange = match self.exchange.take() {
            Some(exchange) => exchange,
            None => Exchange::connect(&self.context, &address)?,
        };
        exchange.send(&bytes, deadline, self.fail_fast)?;
        let frame = exchange.receive(op, deadline, self.timeout)?;
        let reply: Value = serde_json::from_slice(&frame)
            .map_err(|error| self.undecodable(op, "it is not JSON", error))?;
        match decode::outcome(&reply) {
            Ok(result) => {
                self.exchange = Some(exchange);
                Ok(result)
            }
            Err(decode::Outcome::Refused(refusal)) => {
                self.exchange = Some(exchange);
                Err(ClientError::Refused(refusal))
            }
            Err(decode::Outcome::Bad(what)) => Err(self.bad_reply(op)(what)),
        }
    }
}

fn reserve_fields(request: &ReserveRequest) -> Value {
    json!({
        "transfer_id": request.transfer_id.as_str(),
        "mm_hash": request.mm_hash.as_str(),
        "nbytes": request.tensor.len_bytes(),
        "shape": request.tensor.shape(),
        "dtype": request.tensor.dtype().name(),
    })
}

fn extend(object: &mut Value, fields: Value) {
    if let (Value::Object(object), Value::Object(fields)) = (object, fields) {
        object.extend(fields);
    }
}
