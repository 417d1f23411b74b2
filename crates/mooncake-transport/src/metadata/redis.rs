//! Redis, over plain TCP connections. Commands and replies are those of the crate `redis`; connections
//! are ours, since every reply ends at a deadline and within a bound.

use std::fmt;
use std::io::{self, Read, Write};

use redis::{Cmd, ConnectionAddr, IntoConnectionInfo, Parser, Value, cmd};

use super::MetadataStore;
use super::address::{StoreAddressError, check_len};
use super::authority::Authority;
use super::dial::{Dialer, Share, Timed};
use super::error::{AnswerError, StoreError};
use super::timeouts::StoreTimeouts;

/// Port of an address that has none, as with other clients of Redis.
const DEFAULT_PORT: u16 = 6379;

/// Longest reply beside the value in it, and longest text of an error.
const AROUND_BYTES_MAX: u64 = 4 << 10;

/// Most characters of an error's text that are kept.
const TEXT_MAX: usize = 200;

/// A Redis server.
///
/// One connection a call, so that a server that was restarted is reached again by the next one. Its
/// [`swap`](MetadataStore::swap) is a transaction (`WATCH`, or `SET NX` where there must be no value). Keys
/// have no time to live.
#[derive(Clone)]
pub struct RedisStore {
    dialer: Dialer,
    /// What every connection starts with.
    greetings: Vec<Greeting>,
}

#[derive(Clone)]
struct Greeting {
    command: Vec<u8>,
    /// Names the command, whose arguments may be secret.
    name: &'static str,
}

impl RedisStore {
    /// Creates the store at `address`: `redis://[USER:PASSWORD@]HOST[:PORT][/DATABASE]`, with port 6379
    /// and database 0 where there is none. In user and password everything but letters and digits may be
    /// escaped as `%XX`; `:PASSWORD@` is a password without a user. Connects to nothing.
    ///
    /// # Errors
    /// [`StoreAddressError`].
    pub fn new(address: &str) -> Result<Self, StoreAddressError> {
        Self::with_timeouts(address, StoreTimeouts::default())
    }

    /// As [`new`](RedisStore::new), with waits of the caller's choice.
    ///
    /// # Errors
    /// [`StoreAddressError`].
    pub fn with_timeouts(
        address: &str,
        timeouts: StoreTimeouts,
    ) -> Result<Self, StoreAddressError> {
        check_len(address)?;
        if address.starts_with("rediss://") {
            return Err(StoreAddressError::Tls);
        }
        let expected = "redis://";
        let rest = address
            .strip_prefix(expected)
            .ok_or(StoreAddressError::Scheme { expected })?;
        if rest.contains(['?', '#']) {
            return Err(StoreAddressError::Path);
        }
        let (place, path) = match rest.split_once('/') {
            Some((place, path)) => (place, path),
            None => (rest, ""),
        };
        let of_path = path.is_empty() || path.parse::<u32>().is_ok_and(|_| !path.starts_with('+'));
        if !of_path {
            return Err(StoreAddressError::Path);
        }
        let (secrets, authority) = match place.rsplit_once('@') {
            Some((secrets, authority)) => (secrets, authority),
            None => ("", place),
        };
        let authority = Authority::parse(authority, Some(DEFAULT_PORT))?;
        // What is left to go wrong are user and password.
        let parsed = address
            .into_connection_info()
            .map_err(|_| StoreAddressError::Credentials)?;
        if !matches!(parsed.addr(), ConnectionAddr::Tcp(..)) {
            return Err(StoreAddressError::Host);
        }
        let settings = parsed.redis_settings();
        let mut greetings = Vec::new();
        match (settings.username(), settings.password()) {
            (_, None) if !secrets.is_empty() => return Err(StoreAddressError::Credentials),
            (_, None) => {}
            (None | Some(""), Some(password)) => greetings.push(Greeting {
                command: cmd("AUTH").arg(password).get_packed_command(),
                name: "AUTH",
            }),
            (Some(user), Some(password)) => greetings.push(Greeting {
                command: cmd("AUTH").arg(user).arg(password).get_packed_command(),
                name: "AUTH",
            }),
        }
        if settings.db() != 0 {
            greetings.push(Greeting {
                command: cmd("SELECT").arg(settings.db()).get_packed_command(),
                name: "SELECT",
            });
        }
        // Without the password.
        let name = format!("{expected}{}/{}", authority.text(), settings.db());
        Ok(Self {
            dialer: Dialer::new(name, authority, timeouts),
            greetings,
        })
    }

    fn open<'a>(&'a self, key: &'a str) -> Result<Session<'a>, StoreError> {
        let mut session = Session {
            dialer: &self.dialer,
            stream: self.dialer.connect(Share { servers: 1 })?,
            parser: Parser::new(),
            key,
        };
        for greeting in &self.greetings {
            match session.exchange(&greeting.command, 0)? {
                Value::Okay => {}
                Value::ServerError(error) => {
                    return Err(StoreError::Denied {
                        store: self.dialer.store(),
                        command: greeting.name,
                        reply: text_of(error.code(), error.details()),
                    });
                }
                _ => return Err(session.unexpected()),
            }
        }
        Ok(session)
    }
}

/// One connection, for one call.
struct Session<'a> {
    dialer: &'a Dialer,
    stream: Timed,
    parser: Parser,
    key: &'a str,
}

impl Session<'_> {
    fn ask(&mut self, command: &Cmd) -> Result<Value, StoreError> {
        self.ask_for(command, 0)
    }

    /// Sends a command whose reply has a value of at most `len_max` bytes; an error as reply is an error.
    fn ask_for(&mut self, command: &Cmd, len_max: u64) -> Result<Value, StoreError> {
        let reply = self.exchange(&command.get_packed_command(), len_max)?;
        self.checked(reply)
    }

    fn checked(&self, reply: Value) -> Result<Value, StoreError> {
        let Value::ServerError(error) = reply else {
            return Ok(reply);
        };
        Err(StoreError::ErrorReply {
            store: self.dialer.store(),
            key: self.key.to_owned(),
            reply: text_of(error.code(), error.details()),
        })
    }

    fn exchange(&mut self, command: &[u8], len_max: u64) -> Result<Value, StoreError> {
        let sent = self.stream.write_all(command);
        let mut input = Bounded {
            from: &mut self.stream,
            left: len_max.saturating_add(AROUND_BYTES_MAX),
            end: None,
        };
        let parsed = self.parser.parse_value(&mut input);
        let end = input.end;
        let Err(_) = parsed else {
            return parsed.map_err(|_| self.unexpected());
        };
        Err(match (sent, end) {
            (Err(error), _) | (Ok(()), Some(End::Failed(error))) => self.dialer.broken(&error),
            (Ok(()), Some(End::Closed)) => {
                let error = io::ErrorKind::UnexpectedEof.into();
                self.dialer.broken(&error)
            }
            (Ok(()), Some(End::TooLong)) => StoreError::TooLong {
                key: self.key.to_owned(),
                max: len_max,
            },
            (Ok(()), None) => self.answer(AnswerError::NotRedis),
        })
    }

    fn answer(&self, source: AnswerError) -> StoreError {
        StoreError::Answer {
            store: self.dialer.store(),
            source,
        }
    }

    /// A reply of a kind that the command does not have.
    fn unexpected(&self) -> StoreError {
        self.answer(AnswerError::NotRedis)
    }
}

/// What a server says of an error, at a length that can be printed.
fn text_of(code: &str, details: Option<&str>) -> String {
    let text = [code, details.unwrap_or_default()].join(" ");
    text.trim().chars().take(TEXT_MAX).collect()
}

/// Reads no more than a reply may have, and remembers why it read no further.
struct Bounded<'a, R> {
    from: &'a mut R,
    left: u64,
    end: Option<End>,
}

enum End {
    Failed(io::Error),
    Closed,
    TooLong,
}

impl<R: Read> Read for Bounded<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.left == 0 {
            self.end = Some(End::TooLong);
            return Ok(0);
        }
        let len = usize::try_from(self.left).map_or(buffer.len(), |left| left.min(buffer.len()));
        match self.from.read(&mut buffer[..len]) {
            Ok(0) => {
                self.end = Some(End::Closed);
                Ok(0)
            }
            Ok(count) => {
                self.left -= count as u64;
                Ok(count)
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Err(error),
            Err(error) => {
                let kind = error.kind();
                self.end = Some(End::Failed(error));
                Err(kind.into())
            }
        }
    }
}

impl MetadataStore for RedisStore {
    fn get(&self, key: &str, len_max: u64) -> Result<Option<Vec<u8>>, StoreError> {
        let mut session = self.open(key)?;
        match session.ask_for(cmd("GET").arg(key), len_max)? {
            Value::Nil => Ok(None),
            // Left out with `--cfg slab_twin`, for the fuzz target to notice.
            Value::BulkString(value) if value.len() as u64 > len_max && !cfg!(slab_twin) => {
                Err(StoreError::TooLong {
                    key: key.to_owned(),
                    max: len_max,
                })
            }
            Value::BulkString(value) => Ok(Some(value)),
            _ => Err(session.unexpected()),
        }
    }

    fn put(&self, key: &str, value: &[u8]) -> Result<(), StoreError> {
        let mut session = self.open(key)?;
        match session.ask(cmd("SET").arg(key).arg(value))? {
            Value::Okay => Ok(()),
            _ => Err(session.unexpected()),
        }
    }

    fn delete(&self, key: &str) -> Result<bool, StoreError> {
        let mut session = self.open(key)?;
        match session.ask(cmd("DEL").arg(key))? {
            Value::Int(count) => Ok(count > 0),
            _ => Err(session.unexpected()),
        }
    }

    fn swap(
        &self,
        key: &str,
        expected: Option<&[u8]>,
        new: Option<&[u8]>,
    ) -> Result<bool, StoreError> {
        let mut session = self.open(key)?;
        if let (None, Some(value)) = (expected, new) {
            return match session.ask(cmd("SET").arg(key).arg(value).arg("NX"))? {
                Value::Okay => Ok(true),
                Value::Nil => Ok(false),
                _ => Err(session.unexpected()),
            };
        }
        // From here on a change by others makes EXEC do nothing.
        session.ask(cmd("WATCH").arg(key))?;
        let len_max = expected.map_or(0, <[u8]>::len) as u64;
        let is_expected = match session.ask_for(cmd("GET").arg(key), len_max) {
            Ok(Value::BulkString(found)) => expected == Some(&*found),
            Ok(Value::Nil) => expected.is_none(),
            Ok(_) => return Err(session.unexpected()),
            Err(StoreError::TooLong { .. }) => false,
            Err(error) => return Err(error),
        };
        if !is_expected {
            return Ok(false);
        }
        session.ask(&cmd("MULTI"))?;
        match new {
            Some(value) => session.ask(cmd("SET").arg(key).arg(value))?,
            None => session.ask(cmd("DEL").arg(key))?,
        };
        match session.ask(&cmd("EXEC"))? {
            Value::Nil => Ok(false),
            Value::Array(mut replies) if replies.len() == 1 => {
                session.checked(replies.remove(0))?;
                Ok(true)
            }
            _ => Err(session.unexpected()),
        }
    }

    fn value_end(&self) -> &'static str {
        "\n"
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The greetings hold the password.
        f.debug_struct("RedisStore")
            .field("dialer", &self.dialer)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Name and greetings of the store at `address`.
    fn parsed(address: &str) -> Result<(String, Vec<String>), StoreAddressError> {
        let store = RedisStore::new(address)?;
        let words = |greeting: &Greeting| {
            let text = String::from_utf8(greeting.command.clone()).unwrap();
            let words: Vec<_> = text.split("\r\n").skip(2).step_by(2).collect();
            words.join(" ")
        };
        let greetings = store.greetings.iter().map(words).collect();
        assert!(
            !format!("{store:?}").contains("word"),
            "a password is shown"
        );
        Ok((store.dialer.store(), greetings))
    }

    // row: W10.8b
    #[test]
    fn password_user_and_database_are_what_a_connection_starts_with() {
        let check = |address: &str, name: &str, greetings: &[&str]| {
            let expected = greetings.iter().map(|text| (*text).to_owned()).collect();
            assert_eq!(
                parsed(address),
                Ok((name.to_owned(), expected)),
                "{address}"
            );
        };
        check("redis://h:1", "redis://h:1/0", &[]);
        check("redis://h", "redis://h/0", &[]);
        check("redis://[::1]:7/3", "redis://[::1]:7/3", &["SELECT 3"]);
        check("redis://:word@h:1/", "redis://h:1/0", &["AUTH word"]);
        check(
            "redis://me:pass%40word@h:1/2",
            "redis://h:1/2",
            &["AUTH me pass@word", "SELECT 2"],
        );
    }

    #[test]
    fn addresses_that_cannot_work_are_refused_each_for_its_reason() {
        let check = |text: &str, error| assert_eq!(parsed(text).err(), Some(error), "{text}");
        let expected = "redis://";
        check("rediss://h:1", StoreAddressError::Tls);
        check("h:1", StoreAddressError::Scheme { expected });
        check("redis://", StoreAddressError::Host);
        check("redis://h:x", StoreAddressError::Port);
        check("redis://h:0", StoreAddressError::Port);
        check("redis://h:1/x", StoreAddressError::Path);
        check("redis://h:1/-1", StoreAddressError::Path);
        check("redis://h:1/0?protocol=resp3", StoreAddressError::Path);
        check("redis://user@h:1", StoreAddressError::Credentials);
        check("redis://a:%ff@h:1", StoreAddressError::Credentials);
    }

    #[test]
    fn the_text_of_an_error_is_kept_short() {
        assert_eq!(text_of("ERR", Some("no")), "ERR no");
        assert_eq!(text_of("NOAUTH", None), "NOAUTH");
        assert_eq!(
            text_of("X", Some(&"\u{e9}".repeat(9_999))).chars().count(),
            TEXT_MAX
        );
    }
}
