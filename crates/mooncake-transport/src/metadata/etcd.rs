//! etcd, through its JSON gateway.

mod answer;

use std::sync::atomic::{AtomicUsize, Ordering};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Serialize;
use serde::de::DeserializeOwned;

use self::answer::{Deleted, Done, Found, Txn};
use super::MetadataStore;
use super::address::{StoreAddressError, check_len};
use super::authority::Authority;
use super::dial::{Dialer, Share};
use super::error::{AnswerError, StoreError};
use super::timeouts::StoreTimeouts;
use super::web::{Answer, Request, ask};

/// Most servers of an address.
const SERVERS_MAX: usize = 16;

/// Longest answer beside the value in it: the key again, of at most some 4 KiB in base64, and numbers.
const AROUND_BYTES_MAX: u64 = 16 << 10;

/// An etcd cluster, of version 3.4 or newer, asked over the JSON gateway that its servers have on their
/// client port.
///
/// Its [`swap`](MetadataStore::swap) is one transaction. A [`delete`](MetadataStore::delete) that one server
/// may have carried out before another did says that the key was there. There is no lease: what an engine
/// publishes stays until it is deleted.
#[derive(Debug)]
pub struct EtcdStore {
    servers: Vec<Dialer>,
    /// The server that answered last, which is asked first.
    preferred: AtomicUsize,
}

impl EtcdStore {
    /// Creates the store at `address`, as real engines take it: `HOST:PORT` of up to 16 servers,
    /// separated by `;`, with `etcd://` before the first or without. Connects to nothing.
    ///
    /// # Errors
    /// [`StoreAddressError`].
    pub fn new(address: &str) -> Result<Self, StoreAddressError> {
        Self::with_timeouts(address, StoreTimeouts::default())
    }

    /// As [`new`](EtcdStore::new), with waits of the caller's choice.
    ///
    /// # Errors
    /// [`StoreAddressError`].
    pub fn with_timeouts(
        address: &str,
        timeouts: StoreTimeouts,
    ) -> Result<Self, StoreAddressError> {
        check_len(address)?;
        let list = address.strip_prefix("etcd://").unwrap_or(address);
        let count = list.split(';').count();
        if count > SERVERS_MAX {
            let max = SERVERS_MAX;
            return Err(StoreAddressError::TooManyServers { count, max });
        }
        let server = |text: &str| {
            let text = text.trim();
            if text.starts_with("https://") {
                return Err(StoreAddressError::Tls);
            }
            let text = text.strip_prefix("http://").unwrap_or(text);
            if text.contains('/') {
                return Err(StoreAddressError::Path);
            }
            let authority = Authority::parse(text, None)?;
            let name = format!("etcd://{}", authority.text());
            Ok(Dialer::new(name, authority, timeouts))
        };
        Ok(Self {
            servers: list.split(';').map(server).collect::<Result<_, _>>()?,
            preferred: AtomicUsize::new(0),
        })
    }

    /// Makes one call; a server that cannot be reached is not the last that is asked.
    fn call<A: DeserializeOwned>(
        &self,
        path: &str,
        call: &impl Serialize,
        key: &str,
        len_max: u64,
        again: Again,
    ) -> Result<Reply<A>, StoreError> {
        // Maps and strings always encode.
        let body = serde_json::to_vec(call).unwrap_or_default();
        let request = Request {
            method: "POST",
            target: path,
            body: Some(&body),
            key,
            len_max,
        };
        let count = self.servers.len();
        let share = Share {
            servers: u32::try_from(count).unwrap_or(u32::MAX),
        };
        let first = self.preferred.load(Ordering::Relaxed) % count;
        let mut tried = 0;
        let mut may_be_repeated = false;
        loop {
            let index = (first + tried) % count;
            let server = &self.servers[index];
            tried += 1;
            let answer = ask(server, share, &request);
            if tried < count && again.is_worth_it(&answer) {
                may_be_repeated |= !matches!(answer, Err(StoreError::Unreachable { .. }));
                continue;
            }
            let answer = answer?;
            if answer.status != 200 {
                return Err(StoreError::Refused {
                    store: server.store(),
                    key: key.to_owned(),
                    status: answer.status,
                });
            }
            self.preferred.store(index, Ordering::Relaxed);
            let answer = serde_json::from_slice(&answer.body).map_err(|_| StoreError::Answer {
                store: server.store(),
                source: AnswerError::NotEtcd,
            })?;
            return Ok(Reply {
                answer,
                may_be_repeated,
            });
        }
    }
}

/// What the server that was asked last has answered.
struct Reply<A> {
    answer: A,
    /// A server that was asked before it may have carried out the call.
    may_be_repeated: bool,
}

/// When another server is asked.
#[derive(Clone, Copy)]
enum Again {
    /// Whenever a server has not done what it should: doing it twice does no harm.
    Always,
    /// Only if the server has not got the request.
    Unsent,
}

impl Again {
    fn is_worth_it(self, answer: &Result<Answer, StoreError>) -> bool {
        match (self, answer) {
            (_, Err(StoreError::Unreachable { .. })) => true,
            (Self::Always, Err(StoreError::Timeout { .. } | StoreError::Connection { .. })) => true,
            // A member that has no leader, or is about to stop.
            (Self::Always, Ok(answer)) => answer.status >= 500,
            _ => false,
        }
    }
}

#[derive(Serialize)]
struct Key {
    key: String,
}

#[derive(Serialize)]
struct Put {
    key: String,
    value: String,
}

#[derive(Serialize)]
struct Compare {
    key: String,
    target: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    create_revision: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    value: Option<String>,
}

#[derive(Serialize)]
enum Operation {
    #[serde(rename = "requestPut")]
    Put(Put),
    #[serde(rename = "requestDeleteRange")]
    Delete(Key),
}

#[derive(Serialize)]
struct Transaction {
    compare: [Compare; 1],
    success: Vec<Operation>,
}

fn encoded(bytes: impl AsRef<[u8]>) -> String {
    STANDARD.encode(bytes)
}

impl MetadataStore for EtcdStore {
    fn get(&self, key: &str, len_max: u64) -> Result<Option<Vec<u8>>, StoreError> {
        let too_long = || StoreError::TooLong {
            key: key.to_owned(),
            max: len_max,
        };
        let call = Key { key: encoded(key) };
        let body_max = len_max
            .saturating_mul(4)
            .div_ceil(3)
            .saturating_add(AROUND_BYTES_MAX);
        let found: Reply<Found> = self
            .call("/v3/kv/range", &call, key, body_max, Again::Always)
            .map_err(|error| match error {
                StoreError::TooLong { .. } => too_long(),
                error => error,
            })?;
        let Some(value) = found.answer.into_value() else {
            return Ok(None);
        };
        if value.len() as u64 > len_max {
            return Err(too_long());
        }
        Ok(Some(value))
    }

    fn put(&self, key: &str, value: &[u8]) -> Result<(), StoreError> {
        let call = Put {
            key: encoded(key),
            value: encoded(value),
        };
        let path = "/v3/kv/put";
        let _: Reply<Done> = self.call(path, &call, key, AROUND_BYTES_MAX, Again::Always)?;
        Ok(())
    }

    fn delete(&self, key: &str) -> Result<bool, StoreError> {
        let call = Key { key: encoded(key) };
        let path = "/v3/kv/deleterange";
        let deleted: Reply<Deleted> =
            self.call(path, &call, key, AROUND_BYTES_MAX, Again::Always)?;
        // Where it is not there any more, the server that was asked before may have removed it.
        Ok(deleted.answer.any() || deleted.may_be_repeated)
    }

    fn swap(
        &self,
        key: &str,
        expected: Option<&[u8]>,
        new: Option<&[u8]>,
    ) -> Result<bool, StoreError> {
        let compare = Compare {
            key: encoded(key),
            target: if expected.is_some() {
                "VALUE"
            } else {
                "CREATE"
            },
            // No key has been created at revision 0: it is what an absent key compares as.
            create_revision: expected.is_none().then_some("0"),
            value: expected.map(encoded),
        };
        let operation = match new {
            Some(value) => Operation::Put(Put {
                key: encoded(key),
                value: encoded(value),
            }),
            None => Operation::Delete(Key { key: encoded(key) }),
        };
        let call = Transaction {
            compare: [compare],
            success: vec![operation],
        };
        let path = "/v3/kv/txn";
        let swapped: Reply<Txn> = self.call(path, &call, key, AROUND_BYTES_MAX, Again::Unsent)?;
        Ok(swapped.answer.succeeded())
    }

    fn value_end(&self) -> &'static str {
        "\n"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // row: W10.2
    #[test]
    fn one_server_or_several_with_or_without_the_scheme() {
        let check = |text: &str, expected: &[&str]| {
            let store = EtcdStore::new(text).unwrap();
            let found: Vec<_> = store.servers.iter().map(Dialer::store).collect();
            assert_eq!(found, expected, "{text}");
        };
        check("127.0.0.1:2379", &["etcd://127.0.0.1:2379"]);
        check("etcd://a:1", &["etcd://a:1"]);
        check(
            "etcd://a:1;[::1]:2; http://c:3",
            &["etcd://a:1", "etcd://[::1]:2", "etcd://c:3"],
        );
    }

    #[test]
    fn addresses_that_cannot_work_are_refused_each_for_its_reason() {
        let check =
            |text: &str, error| assert_eq!(EtcdStore::new(text).err(), Some(error), "{text}");
        check("etcd://", StoreAddressError::Host);
        check("host", StoreAddressError::Port);
        check("a:1;", StoreAddressError::Host);
        check("a:1;;b:2", StoreAddressError::Host);
        check("a:x", StoreAddressError::Port);
        check("https://a:1", StoreAddressError::Tls);
        check("etcd://a:1/path", StoreAddressError::Path);
        check("etcd://user:word@a:1", StoreAddressError::Port);
        let error = StoreAddressError::TooManyServers { count: 17, max: 16 };
        check(&["a:1"; 17].join(";"), error);
    }

    #[test]
    fn a_transaction_is_what_the_gateway_reads() {
        let call = Transaction {
            compare: [Compare {
                key: encoded("k"),
                target: "CREATE",
                create_revision: Some("0"),
                value: None,
            }],
            success: vec![Operation::Put(Put {
                key: encoded("k"),
                value: encoded("v"),
            })],
        };
        assert_eq!(
            serde_json::to_string(&call).unwrap(),
            r#"{"compare":[{"key":"aw==","target":"CREATE","create_revision":"0"}],"success":[{"requestPut":{"key":"aw==","value":"dg=="}}]}"#
        );
    }
}
