//! The HTTP store against servers that do not behave.
#![cfg(feature = "http")]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use mooncake_transport::metadata::{
    AnswerError, HttpStore, HttpTimeouts, MetadataStore, StoreError,
};

/// Serves every connection in turn with `serve`, which gets the head of the request.
fn server(mut serve: impl FnMut(TcpStream, String) + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/metadata", listener.local_addr().unwrap());
    thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            let mut head = Vec::new();
            let mut byte = [0];
            while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).is_ok_and(|n| n == 1) {
                head.push(byte[0]);
            }
            serve(stream, String::from_utf8(head).unwrap());
        }
    });
    url
}

/// A store with waits short enough for a test.
fn store(url: &str) -> HttpStore {
    let mut timeouts = HttpTimeouts::default();
    timeouts.total = Duration::from_millis(400);
    HttpStore::with_timeouts(url, timeouts).unwrap()
}

/// What a store makes of an answer.
fn answered(answer: &'static [u8]) -> Result<Option<Vec<u8>>, StoreError> {
    let url = server(move |mut stream, _| {
        // The client may have gone.
        let _ = stream.write_all(answer);
    });
    store(&url).get("k", 10)
}

#[test]
fn requests_and_answers_are_those_of_mooncakes_server() {
    let (sender, requests) = std::sync::mpsc::channel();
    let url = server(move |mut stream, head| {
        let len = head
            .lines()
            .find_map(|line| line.strip_prefix("Content-Length: "));
        let mut body = vec![0; len.map_or(0, |len| len.parse().unwrap())];
        stream.read_exact(&mut body).unwrap();
        let first = head.lines().next().unwrap().to_owned();
        sender.send((first, body)).unwrap();
        stream
            .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nvalue")
            .unwrap();
    });
    let store = store(&url);
    assert_eq!(store.get("a/b", 5), Ok(Some(b"value".to_vec())));
    store.put("a/b", b"{}").unwrap();
    assert_eq!(store.delete("a/b"), Ok(true));
    let line = |method| format!("{method} /metadata?key=a%2Fb HTTP/1.1");
    let found: Vec<_> = requests.try_iter().collect();
    assert_eq!(
        found,
        [
            (line("GET"), vec![]),
            (line("PUT"), b"{}".to_vec()),
            (line("DELETE"), vec![])
        ]
    );
}

#[test]
fn codes_tell_a_missing_key_from_a_refusal() {
    assert_eq!(answered(b"HTTP/1.1 404 Not Found\r\n\r\n"), Ok(None));
    for (answer, expected) in [
        (&b"HTTP/1.1 500 x\r\n\r\n"[..], 500),
        (b"HTTP/1.1 301 x\r\nLocation: /\r\n\r\n", 301),
        (b"HTTP/1.1 204 x\r\n\r\n", 204),
    ] {
        let error = answered(answer).unwrap_err();
        assert!(
            matches!(error, StoreError::Refused { code, .. } if code == expected),
            "{error:?}"
        );
    }
}

#[test]
fn answers_that_are_cut_too_long_or_not_http_are_typed_errors() {
    let malformed = |answer| match answered(answer) {
        Err(StoreError::Answer { source, .. }) => source,
        other => panic!("{other:?}"),
    };
    assert_eq!(malformed(b""), AnswerError::CutOff);
    assert_eq!(
        malformed(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nab"),
        AnswerError::CutOff
    );
    assert_eq!(malformed(b"\x03\0\0\0\0\0\0\0\x03{}"), AnswerError::NotHttp);
    assert_eq!(
        answered(b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n"),
        Err(StoreError::TooLong {
            key: "k".into(),
            max: 10
        })
    );
}

#[test]
fn silence_and_trickling_end_at_the_deadline_of_the_call() {
    let silent = server(|stream, _| {
        thread::spawn(move || {
            thread::sleep(Duration::from_secs(5));
            drop(stream);
        });
    });
    let trickling = server(|mut stream, _| {
        thread::spawn(move || {
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nA: ");
            while stream.write_all(b"x").is_ok() {
                thread::sleep(Duration::from_millis(20));
            }
        });
    });
    for url in [silent, trickling] {
        let begin = Instant::now();
        let error = store(&url).get("k", 10).unwrap_err();
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
}

#[test]
fn a_server_that_reads_nothing_of_a_long_value_ends_at_the_deadline() {
    let url = server(|stream, _| {
        thread::spawn(move || {
            thread::sleep(Duration::from_secs(5));
            drop(stream);
        });
    });
    let error = store(&url).put("k", &vec![b' '; 64 << 20]).unwrap_err();
    assert!(matches!(error, StoreError::Timeout { .. }), "{error:?}");
}

#[test]
fn a_store_that_is_gone_is_unreachable_until_it_is_back() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let store = store(&format!("http://{address}/metadata"));
    for error in [
        store.get("k", 10).unwrap_err(),
        store.put("k", b"v").unwrap_err(),
        store.delete("k").unwrap_err(),
    ] {
        assert!(
            matches!(&error, StoreError::Unreachable { store, .. } if store.contains("/metadata")),
            "{error:?}"
        );
    }
    let listener = TcpListener::bind(address).unwrap();
    let served = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let _ = stream.write_all(b"HTTP/1.1 404 Not Found\r\n\r\n");
        let _ = stream.read(&mut [0; 1024]);
    });
    assert_eq!(store.get("k", 10), Ok(None));
    served.join().unwrap();
}
