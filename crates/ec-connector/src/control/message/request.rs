//! Requests, read from bytes.

use serde_json::Value;

use super::lenient::{Object, field, text, truth, unsigned};
use super::rejection::{BATCH_ITEMS_MAX, Rejection};
use crate::control::python;
use crate::dtype::Dtype;
use crate::name::{MmHash, NameTooLong, ReservationId, TransferId};
use crate::reservation::{CancelKind, CancelMatch, ReserveRequest};
use crate::tensor::{DIMS_MAX, ShapeError, TensorSpec};

/// A request that was understood. Items of a batch were understood or refused one by one.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Request {
    Peers,
    EventPort,
    Pool,
    Status(TransferId),
    Reserve(ReserveRequest),
    ReserveBatch(Vec<Result<ReserveRequest, Rejection>>),
    Complete(CompleteItem),
    CompleteBatch(Vec<Result<CompleteItem, Rejection>>),
    Cancel {
        transfer_id: TransferId,
        matching: CancelMatch,
        kind: CancelKind,
    },
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct CompleteItem {
    pub(crate) transfer_id: TransferId,
    /// Nothing for a text that can name no reservation.
    pub(crate) reservation_id: Option<ReservationId>,
}

impl Request {
    /// Reads one frame. Depth is bounded by the decoder (128), the rest by the frame's size.
    pub(crate) fn parse(frame: &[u8]) -> Result<Self, Rejection> {
        let value: Value = serde_json::from_slice(frame).map_err(|_| Rejection::NotJson)?;
        let Value::Object(object) = value else {
            return Err(Rejection::NotAnObject);
        };
        let op = match object.get("op") {
            Some(Value::String(op)) => op.as_str(),
            other => {
                return Err(Rejection::UnknownOp {
                    repr: repr_of_other(other),
                });
            }
        };
        match op {
            "peers" => Ok(Self::Peers),
            "event_port" => Ok(Self::EventPort),
            "x_pool" => Ok(Self::Pool),
            "status" => transfer_id(&object).map(Self::Status),
            "reserve" => reserve_item(&object).map(Self::Reserve),
            "reserve_batch" => Ok(Self::ReserveBatch(batch(&object, reserve_item)?)),
            "complete" => complete_item(&object).map(Self::Complete),
            "complete_batch" => Ok(Self::CompleteBatch(batch(&object, complete_item)?)),
            "cancel" => cancel(&object),
            _ => Err(Rejection::UnknownOp {
                repr: python::repr(op),
            }),
        }
    }
}

fn transfer_id(object: &Object) -> Result<TransferId, Rejection> {
    const FIELD: &str = "transfer_id";
    let text = text(field(object, FIELD)?, FIELD)?;
    TransferId::new(text).map_err(too_long(FIELD))
}

/// Sizes are checked before anything else is: a negative or overflowing one must reach neither a
/// comparison nor the pool (rows A2, A9, M2, M2c).
fn reserve_item(object: &Object) -> Result<ReserveRequest, Rejection> {
    let transfer_id = transfer_id(object)?;
    let mm_hash = text(field(object, "mm_hash")?, "mm_hash")?;
    let mm_hash = MmHash::new(mm_hash).map_err(too_long("mm_hash"))?;
    let len_bytes = unsigned(field(object, "nbytes")?, "nbytes")?;
    let Value::Array(dims) = field(object, "shape")? else {
        return Err(Rejection::WrongKind {
            field: "shape",
            expected: "a list of integers",
        });
    };
    if dims.len() > DIMS_MAX {
        return Err(ShapeError::TooManyDims { count: dims.len() }.into());
    }
    let shape = dims
        .iter()
        .map(|dim| unsigned(dim, "shape"))
        .collect::<Result<Vec<u64>, _>>()?;
    let dtype = Dtype::parse(&text(field(object, "dtype")?, "dtype")?)?;
    let tensor = TensorSpec::new(dtype, shape)?;
    // Left out with `--cfg slab_twin`, for the fuzz target to notice.
    if tensor.len_bytes() != len_bytes && !cfg!(slab_twin) {
        return Err(Rejection::SizeMismatch);
    }
    Ok(ReserveRequest {
        transfer_id,
        mm_hash,
        tensor,
    })
}

fn complete_item(object: &Object) -> Result<CompleteItem, Rejection> {
    Ok(CompleteItem {
        transfer_id: transfer_id(object)?,
        reservation_id: ReservationId::parse(&text(
            field(object, "reservation_id")?,
            "reservation_id",
        )?),
    })
}

fn cancel(object: &Object) -> Result<Request, Rejection> {
    let transfer_id = transfer_id(object)?;
    let reservation = match object.get("reservation_id") {
        None => String::new(),
        Some(value) => text(value, "reservation_id")?,
    };
    let matching = if reservation.is_empty() {
        CancelMatch::Any
    } else {
        CancelMatch::Only(ReservationId::parse(&reservation))
    };
    let kind = CancelKind::from_flags(truth(object.get("abandon")), truth(object.get("refresh")));
    Ok(Request::Cancel {
        transfer_id,
        matching,
        kind,
    })
}

/// The items of a batch, each read on its own.
fn batch<T>(
    object: &Object,
    item: impl Fn(&Object) -> Result<T, Rejection>,
) -> Result<Vec<Result<T, Rejection>>, Rejection> {
    let Value::Array(items) = field(object, "items")? else {
        return Err(Rejection::WrongKind {
            field: "items",
            expected: "a list of objects",
        });
    };
    if items.len() > BATCH_ITEMS_MAX {
        return Err(Rejection::TooManyItems { count: items.len() });
    }
    let read = |value: &Value| match value {
        Value::Object(object) => item(object),
        _ => Err(Rejection::WrongKind {
            field: "items",
            expected: "a list of objects",
        }),
    };
    Ok(items.iter().map(read).collect())
}

fn too_long(field: &'static str) -> impl Fn(NameTooLong) -> Rejection {
    move |_| Rejection::TooLong { field }
}

/// How Python would print an op that is no string; containers are not worth a faithful echo.
fn repr_of_other(op: Option<&Value>) -> String {
    match op {
        None | Some(Value::Null) => "None".to_owned(),
        Some(Value::Bool(true)) => "True".to_owned(),
        Some(Value::Bool(false)) => "False".to_owned(),
        Some(Value::Number(number)) => number.to_string(),
        Some(Value::String(text)) => python::repr(text),
        Some(Value::Array(_)) => "[...]".to_owned(),
        Some(Value::Object(_)) => "{...}".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn reserve_json() -> Value {
        json!({
            "op": "reserve", "transfer_id": "t", "mm_hash": "h",
            "nbytes": 2048, "shape": [2, 512], "dtype": "bfloat16",
        })
    }

    fn with(mut request: Value, field: &str, value: Value) -> Value {
        request[field] = value;
        request
    }

    fn parse(request: &Value) -> Result<Request, Rejection> {
        Request::parse(request.to_string().as_bytes())
    }

    #[track_caller]
    fn check(request: Value, error: &str, code: &str) {
        let rejection = parse(&request).unwrap_err();
        assert_eq!(
            (rejection.to_string().as_str(), rejection.code().as_str()),
            (error, code),
            "{request}"
        );
    }

    #[test]
    fn a_reserve_is_read_with_every_lenient_spelling() {
        let plain = parse(&reserve_json()).unwrap();
        let lenient = json!({
            "op": "reserve", "transfer_id": "t", "mm_hash": "h",
            "nbytes": "2048", "shape": ["2", 512.7], "dtype": "bfloat16", "extra": [1],
        });
        assert_eq!(parse(&lenient).unwrap(), plain);
        let numbers = with(
            with(reserve_json(), "transfer_id", json!(7)),
            "mm_hash",
            json!(8),
        );
        let Ok(Request::Reserve(request)) = parse(&numbers) else {
            panic!("integers are no names");
        };
        assert_eq!(request.transfer_id.as_str(), "7");
        assert_eq!(request.mm_hash.as_str(), "8");
    }

    #[test]
    fn with_duplicate_keys_the_last_wins() {
        let text = r#"{"op":"zap","op":"status","transfer_id":"a","transfer_id":"b"}"#;
        let Ok(Request::Status(id)) = Request::parse(text.as_bytes()) else {
            panic!("the last op is known");
        };
        assert_eq!(id.as_str(), "b");
    }

    // row: F2
    #[test]
    fn what_is_no_json_object_is_malformed() {
        let deep = "[".repeat(100_000);
        let lone_surrogate = br#"{"op":"status","transfer_id":"\ud800"}"#;
        for frame in [
            &b""[..],
            b"\xff\xfe",
            b"{",
            b"{} {}",
            b"\xef\xbb\xbf{}",
            br#"{"op":NaN}"#,
            br#"{"op":"peers","x":Infinity}"#,
            lone_surrogate,
            deep.as_bytes(),
        ] {
            assert_eq!(Request::parse(frame), Err(Rejection::NotJson));
        }
        assert_eq!(Rejection::NotJson.to_string(), "malformed control request");
        for value in [json!(null), json!(1), json!("x"), json!([{"op": "peers"}])] {
            assert_eq!(parse(&value), Err(Rejection::NotAnObject));
        }
    }

    // row: F3
    #[test]
    fn an_unknown_op_is_echoed_as_python_prints_it() {
        check(
            json!({"op": "zap"}),
            "unknown control op: 'zap'",
            "unknown_op",
        );
        check(json!({}), "unknown control op: None", "unknown_op");
        check(
            json!({"op": null}),
            "unknown control op: None",
            "unknown_op",
        );
        check(json!({"op": 7}), "unknown control op: 7", "unknown_op");
        check(
            json!({"op": true}),
            "unknown control op: True",
            "unknown_op",
        );
        check(
            json!({"op": [1]}),
            "unknown control op: [...]",
            "unknown_op",
        );
        check(
            json!({"op": "Peers"}),
            "unknown control op: 'Peers'",
            "unknown_op",
        );
    }

    // row: F3
    #[test]
    fn each_missing_field_is_named() {
        for name in ["transfer_id", "mm_hash", "nbytes", "shape", "dtype"] {
            let mut request = reserve_json();
            request.as_object_mut().unwrap().shift_remove(name);
            check(request, &format!("'{name}'"), "missing_field");
        }
        check(json!({"op": "status"}), "'transfer_id'", "missing_field");
        check(json!({"op": "cancel"}), "'transfer_id'", "missing_field");
        check(json!({"op": "reserve_batch"}), "'items'", "missing_field");
        check(json!({"op": "complete_batch"}), "'items'", "missing_field");
        check(
            json!({"op": "complete", "transfer_id": "t"}),
            "'reservation_id'",
            "missing_field",
        );
    }

    // row: A2, M2, M2c
    #[test]
    fn negative_sizes_are_refused_before_anything_else() {
        let both = with(reserve_json(), "shape", json!([-2, -512]));
        check(both, "field 'shape' must not be negative", "size_mismatch");
        let m2c = with(
            with(reserve_json(), "shape", json!([-1024])),
            "nbytes",
            json!(-2048),
        );
        check(m2c, "field 'nbytes' must not be negative", "size_mismatch");
        // Also when the dtype is unknown and the product would be zero.
        let zero = with(
            with(reserve_json(), "shape", json!([0, -1])),
            "dtype",
            json!("f32"),
        );
        check(zero, "field 'shape' must not be negative", "size_mismatch");
    }

    // row: A9, F4
    #[test]
    fn sizes_beyond_64_bits_are_refused() {
        let huge = with(reserve_json(), "shape", json!([u64::MAX, 2]));
        check(
            huge,
            "shape has more bytes than 64 bits can count",
            "size_mismatch",
        );
        let text = reserve_json()
            .to_string()
            .replace("2048", "18446744073709551616");
        let rejection = Request::parse(text.as_bytes()).unwrap_err();
        assert_eq!(rejection, Rejection::TooLarge { field: "nbytes" });
        let wide = with(reserve_json(), "shape", json!(vec![1; 65]));
        check(
            wide,
            "shape has 65 dimensions, more than 64",
            "size_mismatch",
        );
    }

    // row: F4
    #[test]
    fn sizes_that_contradict_one_another_are_refused() {
        let text = "shape and dtype do not match nbytes";
        check(
            with(reserve_json(), "nbytes", json!(2047)),
            text,
            "size_mismatch",
        );
        check(
            with(reserve_json(), "dtype", json!("float32")),
            text,
            "size_mismatch",
        );
        check(
            with(reserve_json(), "shape", json!([])),
            text,
            "size_mismatch",
        );
        check(
            with(reserve_json(), "dtype", json!("f32")),
            "Unsupported torch dtype string: 'f32'",
            "unsupported_dtype",
        );
    }

    #[test]
    fn wrong_kinds_are_named() {
        check(
            with(reserve_json(), "shape", json!("12")),
            "field 'shape' must be a list of integers",
            "malformed",
        );
        check(
            with(reserve_json(), "shape", json!([null])),
            "field 'shape' must be an integer, a string of digits or a float",
            "malformed",
        );
        check(
            with(reserve_json(), "transfer_id", json!(null)),
            "field 'transfer_id' must be a string or an integer",
            "malformed",
        );
        check(
            json!({"op": "cancel", "transfer_id": "t", "reservation_id": null}),
            "field 'reservation_id' must be a string or an integer",
            "malformed",
        );
        check(
            json!({"op": "reserve_batch", "items": {}}),
            "field 'items' must be a list of objects",
            "malformed",
        );
    }

    // row: D5
    #[test]
    fn names_and_batches_are_bounded() {
        check(
            with(reserve_json(), "mm_hash", json!("x".repeat(1025))),
            "field 'mm_hash' is longer than 1024 bytes",
            "too_long",
        );
        for op in ["reserve_batch", "complete_batch"] {
            check(
                json!({"op": op, "items": vec![json!({}); 1025]}),
                "batch of 1025 items is longer than 1024",
                "too_many_items",
            );
        }
    }

    #[test]
    fn items_of_a_batch_are_read_one_by_one() {
        let good = reserve_json();
        let bad = with(reserve_json(), "nbytes", json!(1));
        let batch = json!({"op": "reserve_batch", "items": [good, bad, 7]});
        let Ok(Request::ReserveBatch(items)) = parse(&batch) else {
            panic!("one bad item harms the others");
        };
        assert!(items[0].is_ok());
        assert_eq!(items[1], Err(Rejection::SizeMismatch));
        assert!(matches!(items[2], Err(Rejection::WrongKind { .. })));
    }

    #[test]
    fn a_cancel_without_a_reservation_matches_any() {
        let kind = |request: Value| match parse(&request).unwrap() {
            Request::Cancel { matching, kind, .. } => (matching, kind),
            other => panic!("{other:?}"),
        };
        let id = ReservationId::from_random(1);
        assert_eq!(
            kind(json!({"op": "cancel", "transfer_id": "t"})),
            (CancelMatch::Any, CancelKind::Plain)
        );
        assert_eq!(
            kind(json!({"op": "cancel", "transfer_id": "t", "reservation_id": "", "abandon": 1})),
            (CancelMatch::Any, CancelKind::Abandon)
        );
        assert_eq!(
            kind(json!({
                "op": "cancel", "transfer_id": "t", "reservation_id": id.to_string(),
                "abandon": true, "refresh": "yes",
            })),
            (CancelMatch::Only(Some(id)), CancelKind::Refresh)
        );
        assert_eq!(
            kind(json!({"op": "cancel", "transfer_id": "t", "reservation_id": 7, "refresh": true})),
            (CancelMatch::Only(None), CancelKind::RefreshOnly)
        );
    }
}
