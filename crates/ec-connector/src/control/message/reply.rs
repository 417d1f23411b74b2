//! Replies and events, written to bytes.

use serde::Serialize;

use super::rejection::Rejection;
use super::snapshot::PoolSnapshot;
use crate::control::python;
use crate::reservation::{Completion, Grant, ItemStatus};

/// Writes `{"ok": true, "result": …}`.
pub(crate) fn success(result: &Reply<'_>) -> Vec<u8> {
    write(&Success { ok: true, result })
}

/// Writes `{"ok": false, "error": …, "code": …}`.
pub(crate) fn failure(rejection: &Rejection) -> Vec<u8> {
    write(&Failure::from(rejection))
}

/// Writes a ready event; `shard` is the control port of the sender.
pub(crate) fn event(status: &ItemStatus, shard: u16) -> Vec<u8> {
    write(&Event {
        transfer_id: status.transfer_id.as_str(),
        status: StatusReply::from(status),
        shard,
    })
}

/// What an operation answers.
#[derive(Serialize)]
#[serde(untagged)]
pub(crate) enum Reply<'a> {
    Ports { ports: &'a [u16] },
    EventPort(u16),
    Status(Option<StatusReply<'a>>),
    Reserve(ReserveReplyBody),
    ReserveBatch { items: Vec<BatchItem> },
    Complete(CompletionReply),
    CompleteBatch { items: Vec<CompletionReply> },
    Cancel { cancelled: bool },
    Pool(&'a PoolSnapshot),
}

#[derive(Serialize)]
#[serde(untagged)]
pub(crate) enum BatchItem {
    Success { ok: bool, result: ReserveReplyBody },
    Failure(Failure),
}

#[derive(Serialize)]
#[serde(untagged)]
pub(crate) enum ReserveReplyBody {
    Granted {
        reservation_id: String,
        dst_session: String,
        dst_ptr: u64,
        nbytes: u64,
        write: bool,
        ready: bool,
        cached: bool,
    },
    Cancelled {
        reservation_id: &'static str,
        dst_session: &'static str,
        dst_ptr: u64,
        nbytes: u64,
        write: bool,
        ready: bool,
        cancelled: bool,
    },
}

#[derive(Serialize)]
pub(crate) struct Failure {
    ok: bool,
    error: String,
    code: &'static str,
}

#[derive(Serialize)]
pub(crate) struct CompletionReply {
    completed: bool,
    became_ready: bool,
}

#[derive(Serialize)]
pub(crate) struct StatusReply<'a> {
    mm_hash: &'a str,
    ready: bool,
    reservation_id: String,
    nbytes: u64,
    shape: &'a [u64],
    dtype: &'static str,
}

#[derive(Serialize)]
struct Success<'a> {
    ok: bool,
    result: &'a Reply<'a>,
}

#[derive(Serialize)]
struct Event<'a> {
    transfer_id: &'a str,
    #[serde(flatten)]
    status: StatusReply<'a>,
    shard: u16,
}

impl ReserveReplyBody {
    /// `dst_ptr` is the absolute address of the item's first byte, zero for an empty item.
    pub(crate) fn granted(grant: &Grant, session: &str, dst_ptr: u64) -> Self {
        Self::Granted {
            reservation_id: grant.reservation_id.to_string(),
            dst_session: session.to_owned(),
            dst_ptr,
            nbytes: grant.len_bytes,
            write: grant.write,
            ready: grant.ready,
            cached: grant.cached,
        }
    }

    /// `len_bytes` echoes the request.
    pub(crate) fn cancelled(len_bytes: u64) -> Self {
        Self::Cancelled {
            reservation_id: "",
            dst_session: "",
            dst_ptr: 0,
            nbytes: len_bytes,
            write: false,
            ready: false,
            cancelled: true,
        }
    }
}

impl From<Result<ReserveReplyBody, Rejection>> for BatchItem {
    fn from(item: Result<ReserveReplyBody, Rejection>) -> Self {
        match item {
            Ok(result) => Self::Success { ok: true, result },
            Err(rejection) => Self::Failure(Failure::from(&rejection)),
        }
    }
}

impl From<&Rejection> for Failure {
    fn from(rejection: &Rejection) -> Self {
        Self {
            ok: false,
            error: rejection.to_string(),
            code: rejection.code().as_str(),
        }
    }
}

impl From<Completion> for CompletionReply {
    fn from(completion: Completion) -> Self {
        Self {
            completed: completion.completed,
            became_ready: completion.became_ready,
        }
    }
}

impl<'a> From<&'a ItemStatus> for StatusReply<'a> {
    fn from(status: &'a ItemStatus) -> Self {
        Self {
            mm_hash: status.mm_hash.as_str(),
            ready: status.is_ready(),
            reservation_id: status.reservation_id.to_string(),
            nbytes: status.tensor.len_bytes(),
            shape: status.tensor.shape(),
            dtype: status.tensor.dtype().name(),
        }
    }
}

/// Encoding into memory can only fail for types whose own `Serialize` fails; none of these does.
/// Should that change, the peer is told of a fault of ours instead of nothing.
fn write<T: Serialize>(value: &T) -> Vec<u8> {
    python::to_json(value).unwrap_or_else(|error| {
        tracing::error!(%error, "reply could not be encoded");
        br#"{"ok": false, "error": "internal error", "code": "internal"}"#.to_vec()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Dtype;
    use crate::name::{MmHash, ReservationId, TransferId};
    use crate::reservation::ReservationState;
    use crate::tensor::TensorSpec;

    #[track_caller]
    fn check(bytes: &[u8], expected: &str) {
        assert_eq!(std::str::from_utf8(bytes), Ok(expected));
    }

    fn status() -> ItemStatus {
        ItemStatus {
            transfer_id: TransferId::new("t").unwrap(),
            mm_hash: MmHash::new("hé").unwrap(),
            tensor: TensorSpec::new(Dtype::BFLOAT16, [2, 3]).unwrap(),
            reservation_id: ReservationId::from_random(0),
            state: ReservationState::Ready,
            cached: false,
        }
    }

    #[test]
    fn replies_have_the_keys_and_the_order_of_the_peer() {
        check(
            &success(&Reply::Ports { ports: &[1, 2] }),
            r#"{"ok": true, "result": {"ports": [1, 2]}}"#,
        );
        check(
            &success(&Reply::EventPort(7)),
            r#"{"ok": true, "result": 7}"#,
        );
        check(
            &success(&Reply::Status(None)),
            r#"{"ok": true, "result": null}"#,
        );
        check(
            &success(&Reply::Status(Some(StatusReply::from(&status())))),
            concat!(
                r#"{"ok": true, "result": {"mm_hash": "h\u00e9", "ready": true, "#,
                r#""reservation_id": "00000000000040008000000000000000", "nbytes": 12, "#,
                r#""shape": [2, 3], "dtype": "bfloat16"}}"#
            ),
        );
        check(
            &success(&Reply::Cancel { cancelled: true }),
            r#"{"ok": true, "result": {"cancelled": true}}"#,
        );
        let completion = Completion {
            completed: true,
            became_ready: false,
        };
        check(
            &success(&Reply::Complete(completion.into())),
            r#"{"ok": true, "result": {"completed": true, "became_ready": false}}"#,
        );
        check(
            &success(&Reply::CompleteBatch {
                items: vec![completion.into()],
            }),
            r#"{"ok": true, "result": {"items": [{"completed": true, "became_ready": false}]}}"#,
        );
    }

    #[test]
    fn reserve_replies_have_the_keys_and_the_order_of_the_peer() {
        let grant = Grant {
            reservation_id: ReservationId::from_random(0),
            offset: 256,
            len_bytes: 12,
            write: true,
            ready: false,
            cached: false,
        };
        let granted = ReserveReplyBody::granted(&grant, "127.0.0.1:9", u64::MAX);
        check(
            &success(&Reply::Reserve(granted)),
            concat!(
                r#"{"ok": true, "result": {"reservation_id": "00000000000040008000000000000000", "#,
                r#""dst_session": "127.0.0.1:9", "dst_ptr": 18446744073709551615, "nbytes": 12, "#,
                r#""write": true, "ready": false, "cached": false}}"#
            ),
        );
        let items = vec![
            BatchItem::from(Ok(ReserveReplyBody::cancelled(12))),
            BatchItem::from(Err(Rejection::SizeMismatch)),
        ];
        check(
            &success(&Reply::ReserveBatch { items }),
            concat!(
                r#"{"ok": true, "result": {"items": [{"ok": true, "result": {"#,
                r#""reservation_id": "", "dst_session": "", "dst_ptr": 0, "nbytes": 12, "#,
                r#""write": false, "ready": false, "cancelled": true}}, "#,
                r#"{"ok": false, "error": "shape and dtype do not match nbytes", "#,
                r#""code": "size_mismatch"}]}}"#
            ),
        );
    }

    #[test]
    fn an_event_is_the_status_with_the_id_before_and_the_shard_after_it() {
        check(
            &event(&status(), 14579),
            concat!(
                r#"{"transfer_id": "t", "mm_hash": "h\u00e9", "ready": true, "#,
                r#""reservation_id": "00000000000040008000000000000000", "nbytes": 12, "#,
                r#""shape": [2, 3], "dtype": "bfloat16", "shard": 14579}"#
            ),
        );
    }

    #[test]
    fn an_error_carries_a_code_after_its_text() {
        check(
            &failure(&Rejection::NotJson),
            r#"{"ok": false, "error": "malformed control request", "code": "malformed"}"#,
        );
    }
}
