//! Replies, read as leniently as requests are.

use serde_json::Value;

use super::{Refusal, RemoteReserve, RemoteStatus};
use crate::code::ErrorCode;
use crate::control::message::lenient::{self, Object};
use crate::reservation::Completion;

/// A reply without a result.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Refused(Refusal),
    Bad(&'static str),
}

/// Longest error text kept, in characters.
const TEXT_CHARS_MAX: usize = 1024;

/// The result of a reply, or why there is none.
pub(super) fn outcome(reply: &Value) -> Result<Value, Outcome> {
    let Value::Object(reply) = reply else {
        return Err(Outcome::Bad("it is not an object"));
    };
    if lenient::truth(reply.get("ok")) {
        return Ok(reply.get("result").cloned().unwrap_or(Value::Null));
    }
    let text = match reply.get("error") {
        Some(Value::String(text)) => text.chars().take(TEXT_CHARS_MAX).collect(),
        _ => "control request failed".to_owned(),
    };
    let code = reply
        .get("code")
        .and_then(Value::as_str)
        .and_then(ErrorCode::parse);
    Err(Outcome::Refused(Refusal { code, text }))
}

pub(super) fn peers(result: &Value) -> Result<Vec<u16>, &'static str> {
    match result.get("ports") {
        Some(Value::Array(ports)) if !ports.is_empty() => ports.iter().map(port).collect(),
        _ => Err("it lists no ports"),
    }
}

pub(super) fn port(value: &Value) -> Result<u16, &'static str> {
    match lenient::unsigned(value, "port").map(u16::try_from) {
        Ok(Ok(port)) if port > 0 => Ok(port),
        _ => Err("a port is not in 1..=65535"),
    }
}

pub(super) fn status(result: &Value) -> Result<Option<RemoteStatus>, &'static str> {
    if result.is_null() {
        return Ok(None);
    }
    let object = object(result)?;
    let Some(Value::Array(shape)) = object.get("shape") else {
        return Err("shape is not a list");
    };
    Ok(Some(RemoteStatus {
        mm_hash: text(object, "mm_hash")?,
        ready: lenient::truth(object.get("ready")),
        reservation_id: text(object, "reservation_id")?,
        len_bytes: number(object, "nbytes")?,
        shape: shape
            .iter()
            .map(|dim| lenient::unsigned(dim, "shape"))
            .collect::<Result<_, _>>()
            .map_err(|_| "a dimension is not a number")?,
        dtype: text(object, "dtype")?,
    }))
}

/// `len_bytes` is what was asked for; another size would let the writer run over its end.
pub(super) fn reserve(result: &Value, len_bytes: u64) -> Result<RemoteReserve, &'static str> {
    let object = object(result)?;
    if lenient::truth(object.get("cancelled")) {
        return Ok(RemoteReserve::Cancelled);
    }
    if number(object, "nbytes")? != len_bytes {
        return Err("nbytes is not what was asked for");
    }
    Ok(RemoteReserve::Granted {
        reservation_id: text(object, "reservation_id")?,
        session: text(object, "dst_session")?,
        address: number(object, "dst_ptr")?,
        len_bytes,
        write: object
            .get("write")
            .is_none_or(|write| lenient::truth(Some(write))),
        ready: lenient::truth(object.get("ready")),
        cached: lenient::truth(object.get("cached")),
    })
}

/// The items of a batch reply, which has to have as many as the request.
pub(super) fn items(result: &Value, count: usize) -> Result<&[Value], &'static str> {
    match result.get("items") {
        Some(Value::Array(items)) if items.len() == count => Ok(items),
        Some(Value::Array(_)) => Err("it has another number of items than the request"),
        _ => Err("it has no items"),
    }
}

pub(super) fn completion(result: &Value) -> Result<Completion, &'static str> {
    let object = object(result)?;
    Ok(Completion {
        completed: lenient::truth(object.get("completed")),
        became_ready: lenient::truth(object.get("became_ready")),
    })
}

pub(super) fn cancelled(result: &Value) -> Result<bool, &'static str> {
    Ok(lenient::truth(object(result)?.get("cancelled")))
}

fn object(value: &Value) -> Result<&Object, &'static str> {
    value.as_object().ok_or("the result is not an object")
}

fn text(object: &Object, name: &'static str) -> Result<String, &'static str> {
    object
        .get(name)
        .and_then(|value| lenient::text(value, name).ok())
        .ok_or("a text field is missing")
}

fn number(object: &Object, name: &'static str) -> Result<u64, &'static str> {
    object
        .get(name)
        .and_then(|value| lenient::unsigned(value, name).ok())
        .ok_or("a number field is missing")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_error_reply_is_a_refusal_with_or_without_a_code() {
        let refusal = |reply: Value| match outcome(&reply) {
            Err(Outcome::Refused(refusal)) => refusal,
            other => panic!("{other:?}"),
        };
        let ours = refusal(json!({"ok": false, "error": "full", "code": "pool_full"}));
        assert_eq!(ours.code, Some(ErrorCode::PoolFull));
        assert_eq!(ours.text, "full");
        let theirs = refusal(json!({"ok": false, "error": "full"}));
        assert_eq!(theirs.code, None);
        let bare = refusal(json!({}));
        assert_eq!(bare.text, "control request failed");
        assert_eq!(refusal(json!({"code": "unheard_of"})).code, None);
        assert_eq!(
            outcome(&json!([])),
            Err(Outcome::Bad("it is not an object"))
        );
    }

    #[test]
    fn a_reserve_reply_without_write_means_write() {
        let reply = json!({
            "reservation_id": "r", "dst_session": "h:1", "dst_ptr": u64::MAX, "nbytes": "4",
        });
        let Ok(RemoteReserve::Granted {
            write,
            ready,
            cached,
            address,
            ..
        }) = reserve(&reply, 4)
        else {
            panic!("refused");
        };
        assert_eq!((write, ready, cached), (true, false, false));
        assert_eq!(address, u64::MAX);
    }

    #[test]
    fn a_reserve_reply_of_another_size_is_refused() {
        let reply = json!({
            "reservation_id": "r", "dst_session": "h:1", "dst_ptr": 0, "nbytes": 3, "write": true,
        });
        assert!(reserve(&reply, 4).is_err());
        let cancelled = json!({"cancelled": true, "nbytes": 3});
        assert_eq!(reserve(&cancelled, 4), Ok(RemoteReserve::Cancelled));
    }

    #[test]
    fn a_list_of_ports_has_at_least_one_and_only_ports() {
        assert_eq!(peers(&json!({"ports": [1, "65535"]})), Ok(vec![1, 65535]));
        for bad in [
            json!(null),
            json!({"ports": []}),
            json!({"ports": 7}),
            json!({"ports": [0]}),
            json!({"ports": [65536]}),
            json!({"ports": ["x"]}),
        ] {
            assert!(peers(&bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_batch_reply_has_as_many_items_as_the_request() {
        let reply = json!({"items": [1, 2]});
        assert_eq!(items(&reply, 2).map(<[Value]>::len), Ok(2));
        assert!(items(&reply, 3).is_err());
        assert!(items(&json!({}), 0).is_err());
    }
}
