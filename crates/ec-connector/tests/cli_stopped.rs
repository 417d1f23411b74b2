//! Consumers that stop without going away (SIGSTOP), each time at another moment of a push.

#[path = "support/processes.rs"]
mod processes;

use std::sync::Arc;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use processes::{Consumer, Process, file_of};
use rustix::process::Signal;
use serde_json::{Value, json};

const TIMEOUT_S: u64 = 2;

#[derive(Debug, Clone, Copy)]
enum When {
    /// Before the producer is started.
    AtOnce,
    /// When this request arrives.
    Before(&'static str),
    /// So long after the reply to the reserve was sent: while the engines meet, or while bytes are written.
    Reserved(Duration),
}

/// Carries control requests to the consumer until `stop` says that it is stopped; from then on nobody answers.
fn relay(control: &str, stop: impl Fn(&str, bool) -> bool + Send + 'static) -> String {
    let context = zmq::Context::new();
    let front = context.socket(zmq::REP).unwrap();
    front.bind("tcp://127.0.0.1:*").unwrap();
    let address = front.get_last_endpoint().unwrap().unwrap();
    let port: u16 = address.rsplit(':').next().unwrap().parse().unwrap();
    let back = context.socket(zmq::REQ).unwrap();
    back.connect(control).unwrap();
    // Ends with the test process.
    std::thread::spawn(move || {
        loop {
            let request = front.recv_bytes(0).unwrap();
            let decoded: Value = serde_json::from_slice(&request).unwrap();
            let op = decoded["op"].as_str().unwrap().to_owned();
            if stop(&op, false) {
                break;
            }
            back.send(request, 0).unwrap();
            let mut reply: Value = serde_json::from_slice(&back.recv_bytes(0).unwrap()).unwrap();
            if op == "peers" {
                reply["result"]["ports"] = json!([port]);
            }
            front.send(serde_json::to_vec(&reply).unwrap(), 0).unwrap();
            if stop(&op, true) {
                break;
            }
        }
        std::thread::park();
    });
    address
}

fn push_to_a_consumer_that_stops(when: When) {
    let dir = tempfile::tempdir().unwrap();
    // So long that the writes under way are not done when the consumer stops.
    let len = match when {
        When::Reserved(delay) if !delay.is_zero() => 64_000_000,
        _ => 4_000_000,
    };
    let file = file_of(dir.path(), "model", 2, len);
    let consumer = Consumer::start("160MiB", &[]);
    let pid = consumer.process.pid();
    let stopped = Arc::new(Mutex::new(None));
    let note = Arc::clone(&stopped);
    let stop = move || {
        rustix::process::kill_process(pid, Signal::STOP).unwrap();
        *note.lock().unwrap() = Some(Instant::now());
    };
    let to = match when {
        When::AtOnce => {
            stop();
            consumer.control.clone()
        }
        When::Before(which) => relay(&consumer.control, move |op, answered| {
            let now = op == which && !answered;
            if now {
                stop();
            }
            now
        }),
        When::Reserved(delay) => relay(&consumer.control, move |op, answered| {
            let now = op == "reserve" && answered;
            if now {
                std::thread::sleep(delay);
                stop();
            }
            now
        }),
    };
    let timeout = TIMEOUT_S.to_string();
    let mut pushing = Process::start(&[
        "push",
        "--json",
        "--timeout",
        &timeout,
        "--to",
        &to,
        file.to_str().unwrap(),
    ]);
    let rows = pushing.rows();
    assert_eq!(pushing.code(), 1, "{when:?}");
    assert_eq!(rows.len(), 2, "{when:?}");
    let took = stopped.lock().unwrap().expect("it was stopped").elapsed();
    // Twice the timeout, and what a busy machine needs to start the process and to hash.
    assert!(
        took < Duration::from_secs(2 * TIMEOUT_S + 6),
        "{when:?}: {took:?}, {rows:?}"
    );
    eprintln!("{when:?}: {took:?}, {}", rows[0]["code"]);
    for row in &rows {
        let code = row["code"].as_str().unwrap();
        assert!(
            ["unreachable", "write_failed", "write_unknown"].contains(&code),
            "{when:?}: {row}"
        );
    }
}

// row: F21
#[test]
fn a_consumer_that_stops_answering_at_any_moment_fails_a_push_within_twice_its_timeout() {
    let moments = [
        When::AtOnce,
        When::Before("peers"),
        When::Before("reserve"),
        When::Reserved(Duration::ZERO),
        When::Reserved(Duration::from_millis(5)),
        When::Reserved(Duration::from_millis(20)),
        When::Before("complete"),
    ];
    std::thread::scope(|scope| {
        for when in moments {
            scope.spawn(move || push_to_a_consumer_that_stops(when));
        }
    });
}
