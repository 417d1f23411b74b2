//! The HTTP store against servers that do not behave.
#![cfg(feature = "http")]

mod scripted;

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use mooncake_transport::metadata::{
    AnswerError, HttpStore, MetadataStore, StoreError, StoreTimeouts,
};
use scripted::{silent_server, web_server};

/// The address of a server that serves every request in turn with `serve`, which gets its head.
fn server(mut serve: impl FnMut(TcpStream, String) + Send + 'static) -> String {
    url(web_server(move |stream, head, _| serve(stream, head)))
}

fn url(address: SocketAddr) -> String {
    format!("http://{address}/metadata")
}

/// A store with waits short enough for a test.
fn store(url: &str) -> HttpStore {
    let mut timeouts = StoreTimeouts::default();
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

// row: W10.6
#[test]
fn requests_and_answers_are_those_of_mooncakes_server() {
    let (sender, requests) = std::sync::mpsc::channel();
    let server = web_server(move |mut stream, head, body| {
        let first = head.lines().next().unwrap().to_owned();
        sender.send((first, body)).unwrap();
        stream
            .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nvalue")
            .unwrap();
    });
    let store = store(&url(server));
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

// row: W10.6
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
            matches!(error, StoreError::Refused { status, .. } if status == expected),
            "{error:?}"
        );
    }
}

// row: W10.8d
#[test]
fn answers_that_are_cut_too_long_or_not_http_are_typed_errors() {
    for cut in [&b""[..], b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nab"] {
        assert!(
            matches!(answered(cut), Err(StoreError::Connection { source, .. })
                if source.kind() == ErrorKind::UnexpectedEof),
            "{:?}",
            answered(cut)
        );
    }
    assert!(matches!(
        answered(b"\x03\0\0\0\0\0\0\0\x03{}"),
        Err(StoreError::Answer {
            source: AnswerError::NotHttp,
            ..
        })
    ));
    assert_eq!(
        answered(b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n"),
        Err(StoreError::TooLong {
            key: "k".into(),
            max: 10
        })
    );
}

// row: W10.8d
#[test]
fn silence_and_trickling_end_at_the_deadline_of_the_call() {
    let silent = url(silent_server());
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
    let error = store(&url(silent_server()))
        .put("k", &vec![b' '; 64 << 20])
        .unwrap_err();
    assert!(matches!(error, StoreError::Timeout { .. }), "{error:?}");
}

#[test]
fn a_swap_compares_and_tells_a_refusal_from_a_value_that_is_there() {
    // Mooncake's server, as far as this goes: it has one value, and refuses to replace it.
    let kept = Arc::new(Mutex::new(Some(b"old".to_vec())));
    let value = kept.clone();
    let refuses_all = Arc::new(AtomicBool::new(false));
    let refuses = refuses_all.clone();
    let server = web_server(move |mut stream, head, body| {
        let mut value = value.lock().unwrap();
        let (status, text) = match (head.split(' ').next().unwrap(), value.clone()) {
            ("GET", Some(value)) => (200, value),
            ("GET", None) => (404, vec![]),
            ("DELETE", _) => (if value.take().is_some() { 200 } else { 404 }, vec![]),
            (_, Some(_)) => (400, vec![]),
            (_, None) if refuses.load(Ordering::SeqCst) => (400, vec![]),
            (_, None) => {
                *value = Some(body);
                (200, vec![])
            }
        };
        let head = format!(
            "HTTP/1.1 {status} x\r\nContent-Length: {}\r\n\r\n",
            text.len()
        );
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(&text).unwrap();
    });
    let store = store(&url(server));
    let is = |expected: Option<&[u8]>| assert_eq!(kept.lock().unwrap().as_deref(), expected);
    assert_eq!(store.swap("k", None, Some(b"new")), Ok(false));
    assert_eq!(store.swap("k", Some(b"o"), Some(b"new")), Ok(false));
    assert_eq!(store.swap("k", Some(b"older"), None), Ok(false));
    is(Some(b"old"));
    assert_eq!(store.swap("k", Some(b"old"), Some(b"new")), Ok(true));
    is(Some(b"new"));
    assert_eq!(store.swap("k", Some(b"new"), None), Ok(true));
    is(None);
    assert_eq!(store.swap("k", Some(b"new"), Some(b"x")), Ok(false));
    refuses_all.store(true, Ordering::SeqCst);
    assert!(matches!(
        store.swap("k", None, Some(b"x")),
        Err(StoreError::Refused { status: 400, .. })
    ));
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
