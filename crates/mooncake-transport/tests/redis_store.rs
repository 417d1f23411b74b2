//! The store over Redis against servers that do not behave.
#![cfg(feature = "redis")]

mod scripted;

use std::io::{ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use mooncake_transport::metadata::{
    AnswerError, MetadataStore, RedisStore, StoreError, StoreTimeouts,
};
use scripted::{nobody, server, silent_server};

/// A store with waits short enough for a test.
fn store(address: SocketAddr) -> RedisStore {
    let mut timeouts = StoreTimeouts::default();
    timeouts.total = Duration::from_millis(400);
    RedisStore::with_timeouts(&format!("redis://{address}"), timeouts).unwrap()
}

/// A server that answers each piece that it reads with the next of `replies`, then closes.
fn answering(replies: Vec<Vec<u8>>) -> SocketAddr {
    server(move |mut stream| {
        let replies = replies.clone();
        thread::spawn(move || {
            for reply in replies {
                if stream.read(&mut [0; 4_096]).is_ok_and(|count| count == 0) {
                    return;
                }
                // The client may have gone.
                let _ = stream.write_all(&reply);
            }
        });
    })
}

/// What a store makes of the reply to `GET`.
fn get(reply: impl Into<Vec<u8>>) -> Result<Option<Vec<u8>>, StoreError> {
    store(answering(vec![reply.into()])).get("k", 100)
}

// row: W10.8d
#[test]
fn what_is_none_of_redis_is_a_typed_error_in_bounded_memory() {
    let not_redis = |reply: &[u8]| {
        let error = get(reply).unwrap_err();
        let source = AnswerError::NotRedis;
        assert!(
            matches!(&error, StoreError::Answer { source: found, .. } if *found == source),
            "{}: {error:?}",
            String::from_utf8_lossy(reply)
        );
    };
    not_redis(b"HTTP/1.1 400 Bad Request\r\n\r\n");
    not_redis(b"$x\r\n");
    not_redis(b"+OK\r\n");
    not_redis(b":1\r\n");
    not_redis(b"*1\r\n$1\r\nx\r\n");
    not_redis(b"%1\r\n+a\r\n+b\r\n");
    not_redis(&b"*1\r\n".repeat(200));
    for cut in [&b""[..], b"$5\r\nab", b"+O", b"*3\r\n+a\r\n"] {
        let error = get(cut).unwrap_err();
        assert!(
            matches!(&error, StoreError::Connection { source, .. }
                if source.kind() == ErrorKind::UnexpectedEof),
            "{error:?}"
        );
    }
    let too_long = Err(StoreError::TooLong {
        key: "k".into(),
        max: 100,
    });
    for (head, more) in [
        ("$9000000000000000000\r\n", "x"),
        ("*4000000000\r\n", "*4000000000\r\n"),
        ("+", "x"),
        ("-", "x"),
    ] {
        let mut reply = head.as_bytes().to_vec();
        reply.extend(more.repeat(10_000).into_bytes());
        let found = get(reply);
        // Deep nesting is refused before the length is.
        let is_refused = matches!(found, Err(StoreError::Answer { .. }));
        assert!(
            found == too_long || (head.starts_with('*') && is_refused),
            "{head}: {found:?}"
        );
    }
    assert_eq!(
        get("$100\r\n".to_owned() + &"x".repeat(100) + "\r\n"),
        Ok(Some(vec![b'x'; 100]))
    );
    assert_eq!(
        get("$101\r\n".to_owned() + &"x".repeat(101) + "\r\n"),
        too_long
    );
    assert_eq!(get("$-1\r\n"), Ok(None));
}

// row: W10.8a
#[test]
fn errors_as_replies_are_kept_short_and_reported() {
    let error = get("-OOM command not allowed\r\n").unwrap_err();
    assert!(matches!(&error, StoreError::ErrorReply { reply, key, .. }
        if reply == "OOM command not allowed" && key == "k"));
    let long = format!("-X {}\r\n", "y".repeat(3_000));
    let error = get(long).unwrap_err();
    assert!(matches!(&error, StoreError::ErrorReply { reply, .. } if reply.len() == 200));
    let set = store(answering(vec![b"-READONLY no\r\n".to_vec()])).put("k", b"v");
    assert!(matches!(set, Err(StoreError::ErrorReply { .. })));
    // A transaction may fail at each of its steps.
    let steps = [
        "+OK\r\n",
        "$1\r\na\r\n",
        "+OK\r\n",
        "+QUEUED\r\n",
        "*1\r\n+OK\r\n",
    ];
    let swap = |replies: &[&str]| {
        let replies = replies.iter().map(|reply| reply.as_bytes().to_vec());
        store(answering(replies.collect())).swap("k", Some(b"a"), Some(b"b"))
    };
    assert_eq!(swap(&steps), Ok(true));
    for broken in 0..steps.len() {
        let mut replies = steps;
        replies[broken] = "-ERR no\r\n";
        let error = swap(&replies).unwrap_err();
        assert!(
            matches!(error, StoreError::ErrorReply { .. }),
            "{broken}: {error:?}"
        );
    }
    let mut replies = steps;
    replies[4] = "*1\r\n-ERR no\r\n";
    assert!(matches!(swap(&replies), Err(StoreError::ErrorReply { .. })));
    // Somebody else was faster.
    replies[4] = "*-1\r\n";
    assert_eq!(swap(&replies), Ok(false));
    replies[1] = "$1\r\nb\r\n";
    assert_eq!(swap(&replies), Ok(false));
}

// row: W10.8d
#[test]
fn silence_and_trickling_end_at_the_deadline_of_the_call() {
    let trickling = server(|mut stream| {
        thread::spawn(move || {
            while stream.write_all(b"+").is_ok() {
                thread::sleep(Duration::from_millis(20));
            }
        });
    });
    for address in [silent_server(), trickling] {
        let begin = Instant::now();
        let error = store(address).get("k", 10).unwrap_err();
        assert!(
            matches!(
                error,
                StoreError::Timeout {
                    timeout_ms: 400,
                    ..
                }
            ),
            "{error:?}"
        );
        assert!(begin.elapsed() < Duration::from_secs(4));
    }
    let error = store(nobody()).put("k", b"v").unwrap_err();
    assert!(matches!(error, StoreError::Unreachable { .. }));
}
