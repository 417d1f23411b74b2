//! Processes that are stopped, killed and restarted at bad moments.

#[path = "support/processes.rs"]
mod processes;

use std::collections::HashSet;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use ec_connector::{
    CancelKind, ContentDigest, ControlAddress, ControlClient, ControlContext, Dtype, MmHash,
    RemoteReserve, ReserveRequest, TensorFile, TensorSpec, TransferId,
};
use mooncake_transport::Op;
use mooncake_transport::wire::control::{FrameKind, encode_frame};
use mooncake_transport::wire::data::{DataVersion, Header, Status};
use mooncake_transport::wire::descriptor::Descriptor;
use processes::{Consumer, PATIENCE, Process, file_of, push, with};
use rustix::process::Signal;
use serde_json::Value;

/// Reserves memory and never writes: what is left of a producer that was killed at the wrong moment.
fn leave_a_writer_behind(control: &str, id: &str, len: u64) {
    let address = ControlAddress::parse(control).unwrap();
    let mut client = ControlClient::new(&ControlContext::new(), address, Duration::from_secs(10));
    let request = ReserveRequest {
        transfer_id: TransferId::new(id).unwrap(),
        mm_hash: MmHash::new(format!("hash of {id}")).unwrap(),
        tensor: TensorSpec::new(Dtype::UINT8, [len]).unwrap(),
    };
    assert!(matches!(
        client.reserve(&request).unwrap(),
        RemoteReserve::Granted { write: true, .. }
    ));
}

/// Pushes the one tensor of a file of `len` zero bytes, and changes its last byte after it was hashed and before it is
/// sent. Returns the exit code, the row, and the tensor's digest before the change.
fn push_and_change(consumer: &Consumer, path: &Path, len: u64) -> (i32, Value, ContentDigest) {
    let header = format!(r#"{{"x":{{"dtype":"U8","shape":[{len}],"data_offsets":[0,{len}]}}}}"#);
    let mut on_disk = File::create(path).unwrap();
    on_disk
        .write_all(&(header.len() as u64).to_le_bytes())
        .unwrap();
    on_disk.write_all(header.as_bytes()).unwrap();
    let end = 8 + header.len() as u64 + len;
    on_disk.set_len(end).unwrap();
    let file = TensorFile::open(path).unwrap();
    let tensor = &file.tensors()[0];
    let digest = file.digest(tensor).unwrap();

    // Another producer of the same content: the push has hashed the tensor and waits for it.
    let address = ControlAddress::parse(&consumer.control).unwrap();
    let mut client = ControlClient::new(&ControlContext::new(), address, Duration::from_secs(10));
    let id = TransferId::new("other").unwrap();
    let request = ReserveRequest {
        transfer_id: id.clone(),
        mm_hash: MmHash::new(digest.mm_hash.as_str()).unwrap(),
        tensor: file.spec(tensor).unwrap().clone(),
    };
    let RemoteReserve::Granted { reservation_id, .. } = client.reserve(&request).unwrap() else {
        panic!("cancelled")
    };
    let path = path.to_str().unwrap();
    let mut pushing = Process::start(&["push", "--json", "--to", &consumer.control, path]);
    let deadline = Instant::now() + PATIENCE;
    while consumer.status()["reservations"]["following"] != 1 {
        assert!(Instant::now() < deadline, "{}", consumer.status());
        std::thread::sleep(Duration::from_millis(5));
    }
    on_disk.write_all_at(b"!", end - 1).unwrap();
    assert!(
        client
            .cancel(&id, Some(&reservation_id), CancelKind::Abandon)
            .unwrap()
    );
    let row = pushing.row();
    assert!(pushing.rows().is_empty());
    (pushing.code(), row, digest)
}

#[test]
fn a_file_that_changes_after_it_was_hashed_arrives_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model");
    let mut consumer = Consumer::start("1MiB", &[]);
    let (code, row, digest) = push_and_change(&consumer, &path, 50_000);
    assert_eq!(code, 0);
    assert_eq!(row["state"], "written", "{row}");
    // The consumer hashes what has arrived.
    assert_eq!(consumer.process.row()["sha256"], digest.sha256);

    let (code, again) = push(&consumer.control, &[&path], &[]);
    assert_eq!(code, 0);
    assert_eq!(again[0]["state"], "written");
    assert_ne!(again[0]["mm_hash"], digest.mm_hash);
    assert_eq!(consumer.process.row()["sha256"], again[0]["sha256"]);
}

#[test]
fn a_tensor_too_large_to_be_kept_that_changes_after_it_was_hashed_fails() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model");
    let consumer = Consumer::start("160MiB", &[]);
    let (code, row, _) = push_and_change(&consumer, &path, 130 << 20);
    assert_eq!(code, 1);
    assert_eq!(row["code"], "source_changed", "{row}");
    assert!(row["error"].as_str().unwrap().contains("has changed"));
    let status = consumer.settled_status();
    assert_eq!(status["bytes"]["free"], status["usable"], "{status}");
}

/// Starts a consumer that may open `descriptors` files.
fn consumer_with(descriptors: u32) -> (Consumer, SocketAddr) {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("ulimit -n {descriptors}; exec \"$@\""), "sh"]);
    command.arg(env!("CARGO_BIN_EXE_ec-connector"));
    command.args(["consume", "--json", "--listen", "127.0.0.1:0"]);
    command.args(["--pool", "16MiB"]);
    let consumer = Consumer::of(Process::spawn(command));
    // The listener that is neither the session's nor the control plane's.
    let session: SocketAddr = consumer.session.parse().unwrap();
    let descriptor = descriptor_of(session);
    (
        consumer,
        SocketAddr::new(session.ip(), descriptor.data_port),
    )
}

/// Asks an engine where it listens for data.
fn descriptor_of(session: SocketAddr) -> Descriptor {
    let mut stream = TcpStream::connect(session).unwrap();
    stream
        .write_all(&encode_frame(FrameKind::Metadata, b"{}"))
        .unwrap();
    let mut reply = Vec::new();
    stream.read_to_end(&mut reply).unwrap();
    Descriptor::decode(&reply[9..]).unwrap()
}

#[test]
fn idle_connections_lock_no_producer_out() {
    let dir = tempfile::tempdir().unwrap();
    let file = file_of(dir.path(), "model", 20, 50_000);
    let (mut consumer, data) = consumer_with(160);
    let mut idle: Vec<_> = (0..150)
        .map(|_| TcpStream::connect(data).unwrap())
        .collect();
    // The first ones hold every place there is by the time they are old enough to make way.
    std::thread::sleep(Duration::from_millis(1_500));
    idle.extend((0..150).map(|_| TcpStream::connect(data).unwrap()));
    let started = Instant::now();
    let (code, rows) = push(&consumer.control, &[&file], &["--timeout", "20"]);
    assert_eq!(code, 0, "{rows:?}");
    assert!(started.elapsed() < Duration::from_secs(15));
    for _ in 0..20 {
        assert_eq!(consumer.process.row()["event"], "received");
    }
    consumer.checked_status();
    let errors = consumer.process.errors();
    let warnings = errors.matches("too many connections").count();
    assert!((1..5).contains(&warnings), "{errors}");
    drop(idle);
}

#[test]
fn a_consumer_that_runs_out_of_descriptors_still_serves_data_connections() {
    let (consumer, data) = consumer_with(128);
    // What the rest of the process was to have: connections to the control plane that say nothing.
    let control: SocketAddr = consumer
        .control
        .strip_prefix("tcp://")
        .unwrap()
        .parse()
        .unwrap();
    let busy: Vec<_> = (0..60)
        .map(|_| TcpStream::connect(control).unwrap())
        .collect();
    let idle: Vec<_> = (0..100)
        .map(|_| TcpStream::connect(data).unwrap())
        .collect();
    std::thread::sleep(Duration::from_millis(1_500));
    for _ in 0..20 {
        let mut stream = TcpStream::connect(data).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        // Refused, for there is nothing at this address, and that is an answer.
        let header = Header {
            size: 8,
            address: 8,
            op: Op::Read,
            version: DataVersion::V2,
        };
        stream.write_all(&header.encode()).unwrap();
        let mut status = [0; 8];
        stream.read_exact(&mut status).unwrap();
        assert_eq!(Status::decode(status).unwrap(), Status::Rejected);
    }
    drop((busy, idle));
    consumer.checked_status();
    assert_eq!(consumer.stop(), 0);
}

#[test]
fn an_idle_consumer_ends_well_on_either_signal() {
    for signal in [Signal::TERM, Signal::INT] {
        let mut consumer = Consumer::start("1MiB", &[]);
        let started = Instant::now();
        consumer.process.signal(signal);
        assert_eq!(consumer.process.code(), 0);
        assert!(started.elapsed() < Duration::from_secs(10));
        assert!(consumer.process.rows().is_empty());
        assert_eq!(consumer.process.errors(), "");
    }
}

// row: V7
#[test]
fn a_drain_that_times_out_ends_with_code_1_and_names_the_stuck_bytes() {
    let mut consumer = Consumer::start("1MiB", &["--drain", "1"]);
    leave_a_writer_behind(&consumer.control, "gone", 5_000);
    let status = consumer.checked_status();
    assert_eq!(status["reservations"]["writing"], 1);
    assert_eq!(status["bytes"]["writing"], 5_120);
    consumer.process.signal(Signal::TERM);
    assert_eq!(consumer.process.code(), 1);
    let errors = consumer.process.errors();
    assert!(
        errors.contains("1 producers") && errors.contains("5120 bytes"),
        "{errors}"
    );
}

// row: V7
#[test]
fn an_expired_writer_is_visible_as_stuck_and_others_are_served() {
    let dir = tempfile::tempdir().unwrap();
    let file = file_of(dir.path(), "model", 4, 50_000);
    let consumer = Consumer::start("1MiB", &["--ttl", "1", "--drain", "0"]);
    leave_a_writer_behind(&consumer.control, "gone", 5_000);
    let deadline = Instant::now() + Duration::from_secs(20);
    while consumer.checked_status()["bytes"]["stuck"] != 5_120 {
        assert!(Instant::now() < deadline, "{}", consumer.status());
        std::thread::sleep(Duration::from_millis(100));
    }
    assert_eq!(
        consumer.checked_status()["reservations"]["expire_pending"],
        1
    );
    let mut status = Process::start(&["status", "--of", &consumer.control]);
    let text: Vec<_> = std::iter::from_fn(|| status.text()).collect();
    assert!(
        text.iter().any(|line| line.contains("never came back")),
        "{text:?}"
    );
    assert_eq!(push(&consumer.control, &[&file], &[]).0, 0);
    assert_eq!(consumer.stop(), 1);
}

// row: F21
#[test]
fn a_consumer_that_is_killed_fails_the_push_within_its_timeout_and_the_rest_at_once() {
    let dir = tempfile::tempdir().unwrap();
    for after_rows in [0, 1, 7] {
        let file = file_of(dir.path(), "model", 40, 500_000);
        let mut consumer = Consumer::start("64MiB", &[]);
        let args = [
            "push",
            "--json",
            "--timeout",
            "3",
            "--to",
            &consumer.control,
            file.to_str().unwrap(),
        ];
        let mut pushing = Process::start(&args);
        let mut rows: Vec<_> = (0..after_rows).map(|_| pushing.row()).collect();
        consumer.process.kill();
        let killed = Instant::now();
        rows.extend(pushing.rows());
        assert_eq!(pushing.code(), 1);
        // The pushes under way, then those that start after them: each has its timeout.
        assert!(
            killed.elapsed() < Duration::from_secs(20),
            "{:?}",
            killed.elapsed()
        );
        assert_eq!(rows.len(), 40, "every tensor has a row");
        let failed = with(&rows, "state", "failed");
        assert!(!failed.is_empty());
        for row in &failed {
            let code = row["code"].as_str().unwrap();
            assert!(
                ["unreachable", "write_failed", "write_unknown"].contains(&code),
                "{row}"
            );
        }
        assert_eq!(rows[39]["code"], "unreachable", "{}", rows[39]);
        assert!(!pushing.errors().contains("panicked"));
    }
}

// row: F20
#[test]
fn a_producer_that_is_killed_leaves_the_consumer_serving_and_the_bytes_adding_up() {
    let dir = tempfile::tempdir().unwrap();
    let consumer = Consumer::start("32MiB", &["--drain", "0"]);
    for after_rows in [0, 1, 4, 12] {
        // Content a killed producer was writing stays promised to it until it expires, so each has its own.
        let file = file_of(dir.path(), &format!("model{after_rows}"), 30, 400_000);
        let mut pushing = Process::start(&[
            "push",
            "--json",
            "--to",
            &consumer.control,
            file.to_str().unwrap(),
        ]);
        for _ in 0..after_rows {
            pushing.row();
        }
        // Different moments of the writes that are under way.
        std::thread::sleep(Duration::from_millis(3 * after_rows));
        pushing.kill();
        consumer.checked_status();
    }
    let other = file_of(dir.path(), "other", 10, 400_000);
    let (code, rows) = push(&consumer.control, &[&other], &[]);
    assert_eq!(code, 0, "{rows:?}");
    let status = consumer.checked_status();
    let open = status["reservations"]["writing"].as_u64().unwrap();
    let held = status["bytes"]["writing"].as_u64().unwrap();
    assert_eq!(open > 0, held > 0, "{status}");
    let code = consumer.stop();
    assert_eq!(code, i32::from(open > 0));
}

// row: F22
#[test]
fn a_consumer_restarted_on_the_same_address_is_used_again() {
    let dir = tempfile::tempdir().unwrap();
    let first = file_of(dir.path(), "first", 3, 100_000);
    let mut consumer = Consumer::start("4MiB", &[]);
    assert_eq!(push(&consumer.control, &[&first], &[]).0, 0);
    let listen = consumer.control.strip_prefix("tcp://").unwrap().to_owned();
    consumer.process.kill();

    // Started while nobody listens: the push waits for the consumer to come back.
    let args = [
        "push",
        "--json",
        "--to",
        &consumer.control,
        first.to_str().unwrap(),
    ];
    let mut pushing = Process::start(&args);
    std::thread::sleep(Duration::from_millis(300));
    let mut again = Consumer::start_at(&listen, "4MiB", &[]);
    assert_eq!(again.control, consumer.control);
    let rows = pushing.rows();
    assert_eq!(pushing.code(), 0, "{rows:?}");
    assert_eq!(
        with(&rows, "state", "written").len(),
        3,
        "it remembers nothing"
    );
    for _ in 0..3 {
        assert_eq!(again.process.row()["cached"], false);
    }
    again.checked_status();
}

#[test]
fn an_interrupted_push_does_not_go_on_waiting_for_room() {
    let dir = tempfile::tempdir().unwrap();
    let first = file_of(dir.path(), "first", 1, 900_000);
    let waiting = file_of(dir.path(), "waiting", 30, 800_000);
    let consumer = Consumer::start("1MiB", &["--keep"]);
    assert_eq!(push(&consumer.control, &[&first], &[]).0, 0);
    let args = [
        "push",
        "--json",
        "--to",
        &consumer.control,
        waiting.to_str().unwrap(),
    ];
    let mut pushing = Process::start(&args);
    // More than are under way at a time, so that the command waits to hand one over.
    std::thread::sleep(Duration::from_millis(500));
    let asked = Instant::now();
    pushing.signal(Signal::INT);
    let rows = pushing.rows();
    assert_eq!(pushing.code(), 1);
    assert!(
        asked.elapsed() < Duration::from_secs(10),
        "{:?}",
        asked.elapsed()
    );
    assert_eq!(with(&rows, "code", "interrupted").len(), 30, "{rows:?}");
}

#[test]
fn an_interrupted_push_finishes_what_is_under_way_and_reports_the_rest() {
    let dir = tempfile::tempdir().unwrap();
    let file = file_of(dir.path(), "model", 60, 2_000_000);
    let consumer = Consumer::start("256MiB", &[]);
    let args = [
        "push",
        "--json",
        "--to",
        &consumer.control,
        file.to_str().unwrap(),
    ];
    let mut pushing = Process::start(&args);
    let mut rows = vec![pushing.row()];
    pushing.signal(Signal::TERM);
    rows.extend(pushing.rows());
    let code = pushing.code();
    assert_eq!(rows.len(), 60);
    let interrupted = with(&rows, "code", "interrupted").len();
    let written = with(&rows, "state", "written").len();
    assert_eq!(interrupted + written, 60, "{rows:?}");
    assert_eq!(code, i32::from(interrupted > 0));
    let status = consumer.checked_status();
    assert_eq!(status["bytes"]["writing"], 0, "nothing is left half done");
    assert_eq!(consumer.stop(), 0);
}

#[test]
fn a_demo_whose_child_dies_says_so() {
    let mut demo = Process::start(&["demo", "--items", "400", "--pool", "64MiB"]);
    let line = demo.text().unwrap();
    let pid: i32 = line
        .split_whitespace()
        .nth(2)
        .and_then(|word| word.parse().ok())
        .unwrap_or_else(|| panic!("no process id in {line:?}"));
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, Signal::KILL).unwrap();
    while demo.text().is_some() {}
    assert_eq!(demo.code(), 1);
    let errors = demo.errors();
    assert!(
        !errors.contains("panicked") && !errors.is_empty(),
        "{errors}"
    );
}

/// Every push that was called written has arrived, and nothing arrived that was not pushed.
#[track_caller]
fn check_nothing_was_lost(pushed: &[Value], received: &[Value]) {
    let arrived: HashSet<&str> = received
        .iter()
        .map(|row| row["transfer_id"].as_str().unwrap())
        .collect();
    for row in pushed {
        let id = row["transfer_id"].as_str().unwrap();
        if row["state"] == "written" {
            assert!(arrived.contains(id), "called written and lost: {row}");
        }
    }
    let hashes: HashSet<&str> = pushed
        .iter()
        .map(|row| row["sha256"].as_str().unwrap())
        .collect();
    for row in received {
        assert!(hashes.contains(row["sha256"].as_str().unwrap()), "{row}");
    }
}

#[test]
fn a_consumer_that_is_stopped_receives_all_that_it_acknowledged_and_says_that_it_stops() {
    let dir = tempfile::tempdir().unwrap();
    for after_rows in [0, 1, 2, 5, 12] {
        let file = file_of(dir.path(), &format!("model{after_rows}"), 60, 2_000_000);
        let mut consumer = Consumer::start("256MiB", &[]);
        let mut pushing = Process::start(&[
            "push",
            "--json",
            "--timeout",
            "20",
            "--to",
            &consumer.control,
            file.to_str().unwrap(),
        ]);
        let mut pushed: Vec<_> = (0..after_rows).map(|_| pushing.row()).collect();
        let asked = Instant::now();
        consumer.process.signal(Signal::TERM);
        let received = consumer.process.rows();
        assert_eq!(consumer.process.code(), 0);
        assert!(asked.elapsed() < Duration::from_secs(15));
        pushed.extend(pushing.rows());
        assert_eq!(pushed.len(), 60, "every tensor has a row");
        check_nothing_was_lost(&pushed, &received);
        let failed = with(&pushed, "state", "failed");
        assert_eq!(pushing.code(), i32::from(!failed.is_empty()));
        // A push that had not begun to talk to the consumer may find it gone.
        if after_rows > 0 {
            for row in failed {
                assert_eq!(row["code"], "shutting_down", "{row}");
            }
        }
    }
}

#[test]
fn a_producer_that_waits_for_room_is_told_that_the_consumer_stops() {
    let dir = tempfile::tempdir().unwrap();
    let first = file_of(dir.path(), "first", 1, 900_000);
    let second = file_of(dir.path(), "second", 2, 800_000);
    let consumer = Consumer::start("1MiB", &["--keep"]);
    assert_eq!(push(&consumer.control, &[&first], &[]).0, 0);
    let mut waiting = Process::start(&[
        "push",
        "--json",
        "--to",
        &consumer.control,
        second.to_str().unwrap(),
    ]);
    // Long enough for its pauses to have grown to their longest.
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(consumer.stop(), 0);
    let stopped = Instant::now();
    let rows = waiting.rows();
    assert_eq!(waiting.code(), 1);
    assert!(stopped.elapsed() < Duration::from_secs(5));
    assert_eq!(rows.len(), 2);
    for row in &rows {
        assert_eq!(row["code"], "shutting_down", "{row}");
    }
}

#[test]
fn a_producer_that_was_suspended_until_its_reservations_expired_writes_again() {
    let dir = tempfile::tempdir().unwrap();
    let file = file_of(dir.path(), "model", 12, 8_000_000);
    let mut consumer = Consumer::start("512MiB", &["--ttl", "1"]);
    let mut pushing = Process::start(&[
        "push",
        "--json",
        "--to",
        &consumer.control,
        file.to_str().unwrap(),
    ]);
    let mut pushed = vec![pushing.row()];
    pushing.signal(Signal::STOP);
    std::thread::sleep(Duration::from_millis(2_500));
    pushing.signal(Signal::CONT);
    pushed.extend(pushing.rows());
    assert_eq!(pushing.code(), 0, "{pushed:?}");
    consumer.process.signal(Signal::TERM);
    let received = consumer.process.rows();
    assert_eq!(consumer.process.code(), 0);
    assert_eq!(pushed.len(), 12);
    check_nothing_was_lost(&pushed, &received);
}

#[test]
fn a_consumer_of_a_number_of_items_acknowledges_that_number_and_no_more() {
    let dir = tempfile::tempdir().unwrap();
    for wanted in [1, 3, 7] {
        let file = file_of(dir.path(), &format!("model{wanted}"), 20, 600_000);
        let mut consumer = Consumer::start("64MiB", &["--max-items", &wanted.to_string()]);
        let mut pushing = Process::start(&[
            "push",
            "--json",
            "--to",
            &consumer.control,
            file.to_str().unwrap(),
        ]);
        let pushed = pushing.rows();
        let received = consumer.process.rows();
        assert_eq!(consumer.process.code(), 0);
        assert_eq!(pushing.code(), 1);
        assert_eq!(received.len(), wanted);
        assert_eq!(with(&pushed, "state", "written").len(), wanted);
        let refused: usize = ["no_more_items", "shutting_down"]
            .map(|code| with(&pushed, "code", code).len())
            .iter()
            .sum();
        assert_eq!(refused, 20 - wanted, "{pushed:?}");
        check_nothing_was_lost(&pushed, &received);
    }
}

#[test]
fn a_consumer_whose_output_nobody_reads_ends_on_the_first_signal() {
    let dir = tempfile::tempdir().unwrap();
    // More rows than a pipe holds.
    let file = file_of(dir.path(), "model", 900, 64);
    let mut command = Command::new(env!("CARGO_BIN_EXE_ec-connector"));
    command
        .args(["consume", "--json", "--listen", "127.0.0.1:0"])
        .args(["--pool", "8MiB", "--drain", "1"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut consumer = command.spawn().unwrap();
    let mut stdout = BufReader::new(consumer.stdout.take().unwrap());
    let mut ready = String::new();
    stdout.read_line(&mut ready).unwrap();
    let ready: Value = serde_json::from_str(&ready).unwrap();
    let control = ready["control"].as_str().unwrap();
    let (code, _) = push(control, &[&file], &["--timeout", "5"]);
    assert_eq!(
        code, 0,
        "a full list of items to look at holds no producer up"
    );

    let pid = rustix::process::Pid::from_child(&consumer);
    rustix::process::kill_process(pid, Signal::TERM).unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    let status = loop {
        if let Some(status) = consumer.try_wait().unwrap() {
            break status;
        }
        if Instant::now() >= deadline {
            consumer.kill().unwrap();
            consumer.wait().unwrap();
            panic!("still running long after the signal");
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    assert_eq!(status.code(), Some(1));
    let mut errors = String::new();
    consumer
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut errors)
        .unwrap();
    assert!(errors.contains("nobody reads"), "{errors}");
    drop(stdout);
}
