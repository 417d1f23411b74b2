//! What etcd's gateway answers, as far as it is used. Numbers come as strings, and what is zero or false
//! is left out.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, SeqAccess, Visitor};

/// What stands in every answer; what has none is none of etcd's.
#[derive(Deserialize)]
struct Header {}

/// The answer to a put.
#[derive(Deserialize)]
pub(super) struct Done {
    #[serde(rename = "header")]
    _header: Header,
}

/// The answer to a range of one key.
#[derive(Deserialize)]
pub(super) struct Found {
    #[serde(rename = "header")]
    _header: Header,
    #[serde(default)]
    kvs: First,
}

impl Found {
    /// Returns the value, if the key was there.
    pub(super) fn into_value(self) -> Option<Vec<u8>> {
        self.kvs.0.map(|pair| pair.value)
    }
}

#[derive(Deserialize)]
struct Pair {
    #[serde(default, deserialize_with = "decoded")]
    value: Vec<u8>,
}

fn decoded<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
    let text = String::deserialize(deserializer)?;
    STANDARD.decode(text).map_err(serde::de::Error::custom)
}

/// The first of a list; however many come with it, no more than one is held.
#[derive(Default)]
struct First(Option<Pair>);

impl<'de> Deserialize<'de> for First {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct FirstVisitor;
        impl<'de> Visitor<'de> for FirstVisitor {
            type Value = First;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<First, A::Error> {
                let first = seq.next_element()?;
                while seq.next_element::<IgnoredAny>()?.is_some() {}
                Ok(First(first))
            }
        }
        deserializer.deserialize_seq(FirstVisitor)
    }
}

/// The answer to a deletion.
#[derive(Deserialize)]
pub(super) struct Deleted {
    #[serde(rename = "header")]
    _header: Header,
    #[serde(default)]
    deleted: String,
}

impl Deleted {
    pub(super) fn any(&self) -> bool {
        !matches!(&*self.deleted, "" | "0")
    }
}

/// The answer to a transaction.
#[derive(Deserialize)]
pub(super) struct Txn {
    #[serde(rename = "header")]
    _header: Header,
    #[serde(default)]
    succeeded: bool,
}

impl Txn {
    pub(super) fn succeeded(&self) -> bool {
        self.succeeded
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read_as_the_gateway_writes_them() {
        let found = |text: &str| {
            let found: Result<Found, _> = serde_json::from_str(text);
            found.ok().map(Found::into_value)
        };
        let header = r#""header":{"cluster_id":"1","revision":"2"}"#;
        assert_eq!(found(&format!("{{{header}}}")), Some(None));
        assert_eq!(
            found(&format!(
                r#"{{{header},"kvs":[{{"key":"aw==","value":"dg=="}}],"count":"1"}}"#
            )),
            Some(Some(b"v".to_vec()))
        );
        for text in [
            "{}",
            "[]",
            "null",
            "{\"header\":1}",
            "",
            "{\"error\":\"x\"}",
        ] {
            assert_eq!(found(text), None, "{text}");
        }
        let many = format!(r#"{{{header},"kvs":[{}{{}}]}}"#, "{},".repeat(10_000));
        assert_eq!(found(&many), Some(Some(Vec::new())));
        let deleted = |text: String| serde_json::from_str::<Deleted>(&text).unwrap().any();
        assert!(deleted(format!(r#"{{{header},"deleted":"1"}}"#)));
        assert!(!deleted(format!("{{{header}}}")));
        let txn = |text: String| serde_json::from_str::<Txn>(&text).unwrap().succeeded();
        assert!(txn(format!(r#"{{{header},"succeeded":true}}"#)));
        assert!(!txn(format!("{{{header}}}")));
    }
}
