//! JSON as the peers' decoder takes it, on top of `serde_json`.
//!
//! More lenient than `serde_json` where real peers are: comments, anything after the document,
//! repeated keys (the last wins), invalid UTF-8 (replaced). Stricter in depth, so that no nesting
//! can exhaust the stack.

use std::borrow::Cow;
use std::fmt;

use serde::de::{self, DeserializeSeed, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// Deepest nesting of arrays and objects that is accepted; `serde_json` itself stops at 128.
pub(crate) const DEPTH_MAX: usize = 100;

/// Why a JSON text was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum JsonError {
    /// Not a JSON document.
    #[error("not JSON at line {line}, column {column}")]
    Malformed {
        /// Line of the first offending byte, from 1.
        line: usize,
        /// Column of the first offending byte, from 1.
        column: usize,
    },
    /// Arrays and objects are nested deeper than is accepted.
    #[error("JSON nested deeper than {max} levels")]
    TooDeep {
        /// Levels accepted.
        max: usize,
    },
    /// The document is not an object.
    #[error("the JSON document is not an object")]
    NotAnObject,
    /// A member has a type that cannot be read as what it should be.
    #[error("JSON member `{member}` has the wrong type")]
    WrongType {
        /// Name of the member.
        member: &'static str,
    },
}

/// Removes comments and whatever follows the document, and checks the nesting.
fn prepare(bytes: &[u8]) -> Result<Cow<'_, [u8]>, JsonError> {
    // Cut points are ASCII bytes outside strings, so pieces of UTF-8 stay UTF-8.
    let mut cleaned: Option<Vec<u8>> = None;
    let mut copied = 0;
    let mut depth = 0usize;
    let mut at = 0;
    let mut end = bytes.len();
    while at < bytes.len() {
        match bytes[at] {
            b'"' => {
                at += 1;
                while at < bytes.len() && bytes[at] != b'"' {
                    at += if bytes[at] == b'\\' { 2 } else { 1 };
                }
                at += 1;
            }
            b'[' | b'{' => {
                depth += 1;
                if depth > DEPTH_MAX {
                    return Err(JsonError::TooDeep { max: DEPTH_MAX });
                }
                at += 1;
            }
            b']' | b'}' => {
                at += 1;
                depth = depth.saturating_sub(1);
                if depth == 0 {
                    end = at;
                    break;
                }
            }
            b'/' => {
                let rest = &bytes[at..];
                let len = if rest.starts_with(b"/*") {
                    // Behind the opening, whose asterisk does not close it.
                    rest[2..]
                        .windows(2)
                        .position(|pair| pair == b"*/")
                        .map(|found| found + 4)
                } else if rest.starts_with(b"//") {
                    let end = rest.iter().position(|byte| *byte == b'\n');
                    Some(end.unwrap_or(rest.len()))
                } else {
                    None
                };
                // A lone slash or an open comment stays and fails in the parser.
                let Some(len) = len else { break };
                let cleaned = cleaned.get_or_insert_default();
                cleaned.extend_from_slice(&bytes[copied..at]);
                cleaned.push(b' ');
                at += len;
                copied = at;
            }
            _ => at += 1,
        }
    }
    Ok(match cleaned {
        Some(mut cleaned) => {
            cleaned.extend_from_slice(&bytes[copied..end]);
            Cow::Owned(cleaned)
        }
        None => Cow::Borrowed(&bytes[..end]),
    })
}

/// Decodes the document that `bytes` start with.
pub(crate) fn decode<T: for<'de> Deserialize<'de>>(bytes: &[u8]) -> Result<T, JsonError> {
    let prepared = prepare(bytes)?;
    let text = String::from_utf8_lossy(&prepared);
    let mut deserializer = serde_json::Deserializer::from_str(&text);
    // Without `end`: real decoders ignore what follows.
    T::deserialize(&mut deserializer).map_err(|error| JsonError::Malformed {
        line: error.line(),
        column: error.column(),
    })
}

/// Any JSON value, with the contents of arrays and objects thrown away.
///
/// Reading members as this first and judging their type later gives typed errors, and one value
/// holds no more memory than its text is long. Whoever keeps many of them has to bound that.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) enum Scalar {
    /// The member is missing.
    #[default]
    Absent,
    Null,
    Bool(bool),
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Text(String),
    Array,
    Object,
}

impl Scalar {
    /// Reads text as a real decoder does: scalars become their text, `null` and absence nothing.
    pub(crate) fn into_text(self, member: &'static str) -> Result<String, JsonError> {
        Ok(match self {
            Self::Absent | Self::Null => String::new(),
            Self::Bool(value) => value.to_string(),
            Self::Unsigned(value) => value.to_string(),
            Self::Signed(value) => value.to_string(),
            Self::Float(value) => format!("{value:?}"),
            Self::Text(text) => text,
            Self::Array | Self::Object => return Err(JsonError::WrongType { member }),
        })
    }

    /// Reads an unsigned integer; absence and `null` are 0, as are they for a real decoder.
    pub(crate) fn as_unsigned(&self, member: &'static str) -> Result<u64, JsonError> {
        match *self {
            Self::Absent | Self::Null => Ok(0),
            Self::Bool(value) => Ok(u64::from(value)),
            Self::Unsigned(value) => Ok(value),
            // 2^64 as a float is exact; anything below it fits.
            Self::Float(value) if (0.0..18_446_744_073_709_551_616.0).contains(&value) => {
                Ok(value as u64)
            }
            _ => Err(JsonError::WrongType { member }),
        }
    }
}

impl<'de> Deserialize<'de> for Scalar {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ScalarVisitor;
        impl<'de> Visitor<'de> for ScalarVisitor {
            type Value = Scalar;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("any JSON value")
            }
            fn visit_unit<E>(self) -> Result<Scalar, E> {
                Ok(Scalar::Null)
            }
            fn visit_bool<E>(self, value: bool) -> Result<Scalar, E> {
                Ok(Scalar::Bool(value))
            }
            fn visit_u64<E>(self, value: u64) -> Result<Scalar, E> {
                Ok(Scalar::Unsigned(value))
            }
            fn visit_i64<E>(self, value: i64) -> Result<Scalar, E> {
                Ok(Scalar::Signed(value))
            }
            fn visit_f64<E>(self, value: f64) -> Result<Scalar, E> {
                Ok(Scalar::Float(value))
            }
            fn visit_str<E>(self, value: &str) -> Result<Scalar, E> {
                Ok(Scalar::Text(value.to_owned()))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Scalar, A::Error> {
                while seq.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Scalar::Array)
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Scalar, A::Error> {
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(Scalar::Object)
            }
        }
        deserializer.deserialize_any(ScalarVisitor)
    }
}

/// A type that takes the members of an object one by one, the last of a name winning.
pub(crate) trait Members: Default {
    /// Takes the value of `member`; must consume exactly one value from `map`.
    fn take<'de, A: MapAccess<'de>>(&mut self, member: &str, map: &mut A) -> Result<(), A::Error>;
}

/// A document that should be an object of `T`'s members.
#[derive(Debug, PartialEq)]
pub(crate) enum Document<T> {
    Object(T),
    Null,
    Other,
}

impl<'de, T: Members> Deserialize<'de> for Document<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(DocumentVisitor(std::marker::PhantomData))
    }
}

struct DocumentVisitor<T>(std::marker::PhantomData<T>);

impl<'de, T: Members> Visitor<'de> for DocumentVisitor<T> {
    type Value = Document<T>;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any JSON value")
    }
    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(Document::Null)
    }
    fn visit_bool<E>(self, _: bool) -> Result<Self::Value, E> {
        Ok(Document::Other)
    }
    fn visit_u64<E>(self, _: u64) -> Result<Self::Value, E> {
        Ok(Document::Other)
    }
    fn visit_i64<E>(self, _: i64) -> Result<Self::Value, E> {
        Ok(Document::Other)
    }
    fn visit_f64<E>(self, _: f64) -> Result<Self::Value, E> {
        Ok(Document::Other)
    }
    fn visit_str<E>(self, _: &str) -> Result<Self::Value, E> {
        Ok(Document::Other)
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Document::Other)
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut members = T::default();
        while let Some(member) = map.next_key_seed(MemberName)? {
            members.take(&member, &mut map)?;
        }
        Ok(Document::Object(members))
    }
}

/// A member name, borrowed from the text unless it contains escapes.
struct MemberName;

impl<'de> DeserializeSeed<'de> for MemberName {
    type Value = Cow<'de, str>;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        struct NameVisitor;
        impl<'de> Visitor<'de> for NameVisitor {
            type Value = Cow<'de, str>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a member name")
            }
            fn visit_borrowed_str<E: de::Error>(self, name: &'de str) -> Result<Self::Value, E> {
                Ok(Cow::Borrowed(name))
            }
            fn visit_str<E: de::Error>(self, name: &str) -> Result<Self::Value, E> {
                Ok(Cow::Owned(name.to_owned()))
            }
        }
        deserializer.deserialize_str(NameVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: Result<Scalar, JsonError>) {
        assert_eq!(decode::<Scalar>(text.as_bytes()), expected, "{text}");
    }

    fn malformed(text: &str) {
        assert!(
            matches!(
                decode::<Scalar>(text.as_bytes()),
                Err(JsonError::Malformed { .. })
            ),
            "{text}"
        );
    }

    #[test]
    fn a_comment_ends_at_the_first_closing_behind_its_opening() {
        check("/*/ 1 */ 2", Ok(Scalar::Unsigned(2)));
        check("/**/ 3", Ok(Scalar::Unsigned(3)));
        malformed("/*/ 1");
    }

    #[test]
    fn comments_and_trailing_bytes_are_ignored() {
        check(
            "/* a */ {\"x\": /* } */ 1} trailing ] garbage /* open",
            Ok(Scalar::Object),
        );
        check("// line\n[1, 2] }", Ok(Scalar::Array));
        check("{\"a\":\"/* kept */ \\\" // \"}", Ok(Scalar::Object));
        check("\"/* text */\"", Ok(Scalar::Text("/* text */".into())));
        check("null x", Ok(Scalar::Null));
    }

    #[test]
    fn what_a_real_decoder_refuses_is_refused() {
        for text in [
            "",
            " ",
            "\u{feff}{}",
            "{'a':1}",
            "{\"a\":1,}",
            "[1,]",
            "{",
            "\"open",
            "/",
            "/* {}",
        ] {
            malformed(text);
        }
    }

    #[test]
    fn deep_nesting_is_a_typed_error_and_not_a_stack_overflow() {
        let nested = |levels: usize| "[".repeat(levels) + &"]".repeat(levels);
        check(&nested(DEPTH_MAX), Ok(Scalar::Array));
        check(
            &nested(DEPTH_MAX + 1),
            Err(JsonError::TooDeep { max: DEPTH_MAX }),
        );
        check(
            &nested(1_000_000),
            Err(JsonError::TooDeep { max: DEPTH_MAX }),
        );
        check(
            &"{\"a\":".repeat(5_000),
            Err(JsonError::TooDeep { max: DEPTH_MAX }),
        );
    }

    #[test]
    fn invalid_utf8_is_replaced() {
        assert_eq!(
            decode::<Scalar>(b"\"a\xFFb\""),
            Ok(Scalar::Text("a\u{fffd}b".into()))
        );
    }

    #[test]
    fn scalars_become_text_as_real_decoders_make_it() {
        for (json, text) in [
            ("5", "5"),
            ("-5", "-5"),
            ("true", "true"),
            ("1e2", "100.0"),
            ("null", ""),
        ] {
            let scalar = decode::<Scalar>(json.as_bytes()).unwrap();
            assert_eq!(scalar.into_text("x").unwrap(), text);
        }
        assert!(Scalar::Array.into_text("x").is_err());
    }

    #[test]
    fn unsigned_numbers_accept_integral_floats_and_refuse_text() {
        assert_eq!(Scalar::Unsigned(u64::MAX).as_unsigned("x"), Ok(u64::MAX));
        assert_eq!(Scalar::Float(3.0).as_unsigned("x"), Ok(3));
        assert_eq!(Scalar::Absent.as_unsigned("x"), Ok(0));
        for bad in [
            Scalar::Signed(-1),
            Scalar::Float(-1.0),
            Scalar::Float(1e30),
            Scalar::Float(f64::NAN),
            Scalar::Text("5".into()),
            Scalar::Array,
        ] {
            assert_eq!(
                bad.as_unsigned("x"),
                Err(JsonError::WrongType { member: "x" })
            );
        }
    }
}
