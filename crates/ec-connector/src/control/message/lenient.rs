//! Reading fields the way the protocol's Python side does, as far as that has a clear meaning.
//!
//! Text fields accept strings and integers, number fields integers, digit strings and floats
//! (truncated), flags anything by its Python truth value. Whatever else Python would convert
//! (`None` to `"None"`, `True` to 1) is a mistake of the sender and is refused.

use serde_json::{Map, Value};

use super::rejection::Rejection;

pub(crate) type Object = Map<String, Value>;

/// The field, or the refusal that names it.
pub(crate) fn field<'a>(object: &'a Object, name: &'static str) -> Result<&'a Value, Rejection> {
    object
        .get(name)
        .ok_or(Rejection::MissingField { field: name })
}

/// A text field; an integer stands for its decimal digits.
pub(crate) fn text(value: &Value, field: &'static str) -> Result<String, Rejection> {
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Number(number) if !number.is_f64() => Ok(number.to_string()),
        _ => Err(Rejection::WrongKind {
            field,
            expected: "a string or an integer",
        }),
    }
}

/// A number field: an integer, a string of digits, or a float, which is truncated.
///
/// An integer beyond 64 bits arrives as a float and is refused as too large, as it should be.
pub(crate) fn unsigned(value: &Value, field: &'static str) -> Result<u64, Rejection> {
    let wrong_kind = Rejection::WrongKind {
        field,
        expected: "an integer, a string of digits or a float",
    };
    match value {
        Value::Number(number) => {
            if let Some(value) = number.as_u64() {
                return Ok(value);
            }
            match number.as_f64().map(f64::trunc) {
                // Also -0.9, which truncates to zero.
                Some(0.0) => Ok(0),
                Some(value) if value < 0.0 => Err(Rejection::Negative { field }),
                // 2^64 is the first float beyond the range; the conversion below it is exact.
                Some(value) if value < 18_446_744_073_709_551_616.0 => Ok(value as u64),
                _ => Err(Rejection::TooLarge { field }),
            }
        }
        Value::String(text) => {
            let digits = text.strip_prefix('-').unwrap_or(text);
            if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
                return Err(wrong_kind);
            }
            let value = digits.parse().map_err(|_| Rejection::TooLarge { field })?;
            if value > 0 && digits.len() != text.len() {
                return Err(Rejection::Negative { field });
            }
            Ok(value)
        }
        _ => Err(wrong_kind),
    }
}

/// Whether Python would take the value for true; a missing one is false.
pub(crate) fn truth(value: Option<&Value>) -> bool {
    match value {
        None | Some(Value::Null) => false,
        Some(Value::Bool(flag)) => *flag,
        Some(Value::Number(number)) => number.as_f64() != Some(0.0),
        Some(Value::String(text)) => !text.is_empty(),
        Some(Value::Array(items)) => !items.is_empty(),
        Some(Value::Object(object)) => !object.is_empty(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[track_caller]
    fn check_unsigned(value: Value, expected: Result<u64, Rejection>) {
        assert_eq!(unsigned(&value, "n"), expected, "{value}");
    }

    const NEGATIVE: Rejection = Rejection::Negative { field: "n" };
    const TOO_LARGE: Rejection = Rejection::TooLarge { field: "n" };

    #[test]
    fn numbers_are_read_from_integers_digit_strings_and_floats() {
        check_unsigned(json!(0), Ok(0));
        check_unsigned(json!(u64::MAX), Ok(u64::MAX));
        check_unsigned(json!("4"), Ok(4));
        check_unsigned(json!("18446744073709551615"), Ok(u64::MAX));
        check_unsigned(json!(4.9), Ok(4));
        check_unsigned(json!(-0.9), Ok(0));
        check_unsigned(json!(1e15), Ok(1_000_000_000_000_000));
    }

    #[test]
    fn numbers_outside_the_range_are_refused() {
        check_unsigned(json!(-1), Err(NEGATIVE));
        check_unsigned(json!(-1.5), Err(NEGATIVE));
        check_unsigned(json!("-1"), Err(NEGATIVE));
        check_unsigned(json!("18446744073709551616"), Err(TOO_LARGE));
        check_unsigned(json!(18_446_744_073_709_551_616.0), Err(TOO_LARGE));
        check_unsigned(json!(1e300), Err(TOO_LARGE));
        let beyond: Value = serde_json::from_str("18446744073709551616").unwrap();
        check_unsigned(beyond, Err(TOO_LARGE));
    }

    #[test]
    fn other_kinds_are_no_numbers() {
        for value in [
            json!(null),
            json!(true),
            json!([1]),
            json!({}),
            json!(""),
            json!("-"),
            json!("+4"),
            json!(" 4"),
            json!("4_0"),
            json!("4.0"),
            json!("٤"),
        ] {
            let refused = unsigned(&value, "n");
            assert!(
                matches!(refused, Err(Rejection::WrongKind { .. })),
                "{value}: {refused:?}"
            );
        }
    }

    #[test]
    fn texts_are_read_from_strings_and_integers() {
        for (value, expected) in [
            (json!("x"), "x"),
            (json!(""), ""),
            (json!(7), "7"),
            (json!(-7), "-7"),
            (json!(u64::MAX), "18446744073709551615"),
        ] {
            assert_eq!(text(&value, "t").as_deref(), Ok(expected));
        }
        for value in [json!(null), json!(true), json!(1.5), json!([]), json!({})] {
            assert!(text(&value, "t").is_err(), "{value}");
        }
    }

    #[test]
    fn flags_follow_python_truth() {
        for value in [
            json!(true),
            json!(1),
            json!(-1),
            json!(0.5),
            json!("false"),
            json!([0]),
        ] {
            assert!(truth(Some(&value)), "{value}");
        }
        for value in [
            json!(null),
            json!(false),
            json!(0),
            json!(0.0),
            json!(-0.0),
            json!(""),
            json!([]),
            json!({}),
        ] {
            assert!(!truth(Some(&value)), "{value}");
        }
        assert!(!truth(None));
    }
}
