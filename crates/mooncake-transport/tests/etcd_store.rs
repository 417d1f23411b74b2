//! The store over etcd's gateway against servers that do not behave.
#![cfg(feature = "etcd")]

mod scripted;

use std::io::{ErrorKind, Write};
use std::net::SocketAddr;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use mooncake_transport::metadata::{
    AnswerError, EtcdStore, MetadataStore, StoreError, StoreTimeouts,
};
use scripted::{closing_server, nobody, server, silent_server, web_server};

const HEADER: &str = r#""header":{"revision":"2"}"#;

/// A store with waits short enough for a test.
fn store(servers: &[SocketAddr]) -> EtcdStore {
    let servers: Vec<_> = servers.iter().map(SocketAddr::to_string).collect();
    let mut timeouts = StoreTimeouts::default();
    timeouts.total = Duration::from_millis(400);
    EtcdStore::with_timeouts(&format!("etcd://{}", servers.join(";")), timeouts).unwrap()
}

fn answer(status: u16, body: &str) -> Vec<u8> {
    let len = body.len();
    format!("HTTP/1.1 {status} x\r\nContent-Length: {len}\r\n\r\n{body}").into_bytes()
}

/// A server that answers everything with `bytes`.
fn answering(bytes: Vec<u8>) -> SocketAddr {
    web_server(move |mut stream, _, _| {
        // The client may have gone.
        let _ = stream.write_all(&bytes);
    })
}

// row: W10.7
#[test]
fn requests_are_those_of_the_gateway() {
    let (sender, requests) = channel();
    let server = web_server(move |mut stream, head, body| {
        let first = head.lines().next().unwrap().to_owned();
        sender
            .send((first, String::from_utf8(body).unwrap()))
            .unwrap();
        let body = format!(
            r#"{{{HEADER},"kvs":[{{"key":"aw==","value":"dg=="}}],"deleted":"1","succeeded":true}}"#
        );
        stream.write_all(&answer(200, &body)).unwrap();
    });
    let store = store(&[server]);
    assert_eq!(store.get("k", 1), Ok(Some(b"v".to_vec())));
    store.put("k", b"v").unwrap();
    assert_eq!(store.delete("k"), Ok(true));
    assert_eq!(store.swap("k", None, Some(b"v")), Ok(true));
    assert_eq!(store.swap("k", Some(b"v"), None), Ok(true));
    let found: Vec<_> = requests.try_iter().collect();
    let expected = [
        ("range", r#"{"key":"aw=="}"#),
        ("put", r#"{"key":"aw==","value":"dg=="}"#),
        ("deleterange", r#"{"key":"aw=="}"#),
        (
            "txn",
            r#"{"compare":[{"key":"aw==","target":"CREATE","create_revision":"0"}],"success":[{"requestPut":{"key":"aw==","value":"dg=="}}]}"#,
        ),
        (
            "txn",
            r#"{"compare":[{"key":"aw==","target":"VALUE","value":"dg=="}],"success":[{"requestDeleteRange":{"key":"aw=="}}]}"#,
        ),
    ]
    .map(|(call, body)| (format!("POST /v3/kv/{call} HTTP/1.1"), body.to_owned()));
    assert_eq!(found, expected);
}

// row: W10.8d
#[test]
fn what_is_none_of_etcds_answers_is_a_typed_error() {
    for body in [
        "",
        "null",
        "[]",
        "{}",
        "<html>",
        r#"{"kvs":[]}"#,
        r#"{"header":{},"kvs":{}}"#,
        r#"{"header":{},"kvs":[7]}"#,
        r#"{"header":{},"kvs":[{"value":"%%"}]}"#,
        &"[".repeat(9_000),
    ] {
        let error = store(&[answering(answer(200, body))])
            .get("k", 10_000)
            .unwrap_err();
        let is_answer = matches!(
            error,
            StoreError::Answer {
                source: AnswerError::NotEtcd,
                ..
            }
        );
        assert!(is_answer, "{body}: {error:?}");
    }
    let refused = store(&[answering(answer(404, ""))])
        .get("k", 10)
        .unwrap_err();
    assert!(matches!(refused, StoreError::Refused { status: 404, .. }));
    let not_http = store(&[answering(b"+PONG\r\n".to_vec())]).put("k", b"v");
    assert!(matches!(
        not_http,
        Err(StoreError::Answer {
            source: AnswerError::NotHttp,
            ..
        })
    ));
    // Longer than asked for, in either measure.
    let long = format!(r#"{{{HEADER},"kvs":[{{"value":"dmFsdWU="}}]}}"#);
    for answer in [answer(200, &long), answer(200, &" ".repeat(30_000))] {
        assert_eq!(
            store(&[answering(answer)]).get("k", 4),
            Err(StoreError::TooLong {
                key: "k".into(),
                max: 4
            })
        );
    }
}

// row: W10.7
#[test]
fn servers_that_are_down_silent_or_without_a_leader_are_passed_over() {
    let good = || answering(answer(200, &format!("{{{HEADER}}}")));
    for bad in [
        nobody(),
        silent_server(),
        closing_server(),
        // Before it has read the request, and in the middle of its answer.
        server(drop),
        answering(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{".to_vec()),
        answering(answer(503, "")),
    ] {
        let store = store(&[bad, good()]);
        let begin = Instant::now();
        assert_eq!(store.get("k", 10), Ok(None));
        assert_eq!(store.put("k", b"v"), Ok(()));
        // From then on the good one is asked first.
        assert!(begin.elapsed() < Duration::from_secs(2));
    }
    let begin = Instant::now();
    let error = store(&[silent_server(), silent_server()])
        .get("k", 10)
        .unwrap_err();
    assert!(matches!(
        error,
        StoreError::Timeout {
            timeout_ms: 400,
            ..
        }
    ));
    assert!(begin.elapsed() < Duration::from_secs(2));
    let error = store(&[nobody(), nobody()]).get("k", 10).unwrap_err();
    assert!(matches!(error, StoreError::Unreachable { .. }));
}

#[test]
fn a_swap_that_a_server_may_have_made_is_not_made_again_by_another() {
    let (sender, calls) = channel();
    let counting = web_server(move |mut stream, head, _| {
        sender.send(head).unwrap();
        let _ = stream.write_all(&answer(200, &format!("{{{HEADER},\"succeeded\":true}}")));
    });
    let swap = |first| store(&[first, counting]).swap("k", None, Some(b"v"));
    assert!(matches!(
        swap(silent_server()),
        Err(StoreError::Timeout { .. })
    ));
    assert!(matches!(
        swap(closing_server()),
        Err(StoreError::Connection { source, .. }) if source.kind() == ErrorKind::UnexpectedEof
    ));
    assert!(matches!(
        swap(answering(answer(503, ""))),
        Err(StoreError::Refused { status: 503, .. })
    ));
    assert_eq!(calls.try_iter().count(), 0);
    assert_eq!(swap(nobody()), Ok(true));
    assert_eq!(calls.try_iter().count(), 1);
}

#[test]
fn a_delete_that_was_made_twice_says_that_the_key_was_there() {
    let empty = || answering(answer(200, &format!("{{{HEADER}}}")));
    for first in [
        silent_server(),
        closing_server(),
        answering(answer(503, "")),
    ] {
        assert_eq!(store(&[first, empty()]).delete("k"), Ok(true));
    }
    // Neither of these can have removed it.
    assert_eq!(store(&[nobody(), empty()]).delete("k"), Ok(false));
    assert_eq!(store(&[empty(), empty()]).delete("k"), Ok(false));
}
