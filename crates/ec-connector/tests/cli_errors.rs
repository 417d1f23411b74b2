//! What the commands say when something is wrong, and how they end.

#[path = "support/processes.rs"]
mod processes;

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use processes::{
    Consumer, Process, Tensor, file_of, push, push_with_errors, run, with, write_safetensors,
};
use safetensors::tensor::Dtype;

/// Runs a command that must be refused as wrong usage or configuration, and returns what it says.
fn refused(args: &[&str]) -> String {
    let started = Instant::now();
    let (code, rows, errors) = run(args);
    assert_eq!(code, 2, "{args:?} said {errors}");
    assert!(rows.is_empty(), "{args:?} printed {rows:?}");
    assert!(started.elapsed() < Duration::from_secs(20), "{args:?}");
    assert!(!errors.contains("panicked"), "{errors}");
    errors
}

// row: F17, F18, F15
#[test]
fn wrong_usage_ends_with_code_2_and_says_what_would_be_right() {
    let consume = |listen, pool| refused(&["consume", "--listen", listen, "--pool", pool]);
    let advertise = |host| {
        refused(&[
            "consume",
            "--listen",
            "127.0.0.1:0",
            "--pool",
            "1MiB",
            "--advertise",
            host,
        ])
    };
    let drain = |seconds| {
        refused(&[
            "consume",
            "--listen",
            "127.0.0.1:0",
            "--pool",
            "1MiB",
            "--drain",
            seconds,
        ])
    };
    for (errors, says) in [
        (refused(&[]), "Usage"),
        (refused(&["fly"]), "unrecognized"),
        (consume("127.0.0.1:0", "lots"), "not a size"),
        (consume("127.0.0.1:0", "1.5GiB"), "whole number"),
        (consume("127.0.0.1:0", "0"), "--pool"),
        (consume("127.0.0.1:0", "100"), "--pool"),
        (consume("127.0.0.1:0", "4000TiB"), "--pool"),
        (consume("127.0.0.1", "1MiB"), "HOST:PORT"),
        (consume("127.0.0.1:99999", "1MiB"), "HOST:PORT"),
        (consume("no.such.host.invalid:1", "1MiB"), "HOST:PORT"),
        (consume("0.0.0.0:0", "1MiB"), "--advertise"),
        (consume("[::]:0", "1MiB"), "--advertise"),
        (advertise("0.0.0.0"), "--advertise"),
        (advertise("::"), "--advertise"),
        (advertise("[::]"), "--advertise"),
        (refused(&["consume", "--pool", "1MiB"]), "--listen"),
        (drain("18446744073709551615"), "--drain"),
        (drain("86401"), "--drain"),
        (refused(&["push", "--to", "tcp://127.0.0.1:1"]), "FILE"),
        (refused(&["push", "--to", "127.0.0.1:1", "x"]), "tcp://"),
        (
            refused(&["push", "--to", "tcp://127.0.0.1:1", "--timeout=-1", "x"]),
            "timeout",
        ),
        (
            refused(&[
                "push",
                "--to",
                "tcp://127.0.0.1:1",
                "--mm-hash",
                "a=00",
                "x",
                "y",
            ]),
            "one FILE",
        ),
        (
            refused(&[
                "push",
                "--to",
                "tcp://127.0.0.1:1",
                "--mm-hash",
                "a=xyz",
                "x",
            ]),
            "hexadecimal",
        ),
        (
            refused(&["push", "--to", "tcp://no.such.host.invalid:1", "x"]),
            "host \"no.such.host.invalid\"",
        ),
        (
            refused(&["status", "--of", "tcp://no.such.host.invalid:1"]),
            "is not known",
        ),
        (refused(&["status"]), "--of"),
        (refused(&["demo", "--items", "0"]), "--items"),
        (refused(&["demo", "/no/such/file"]), "/no/such/file"),
        (refused(&["demo", "--items", "1", "--pool", "0"]), "--pool"),
    ] {
        assert!(errors.contains(says), "{says:?} is not in: {errors}");
    }
}

// row: F17
#[test]
fn a_port_in_use_ends_with_code_2_and_names_the_option() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let listen = taken.local_addr().unwrap().to_string();
    let errors = refused(&["consume", "--listen", &listen, "--pool", "1MiB"]);
    assert!(
        errors.contains("--listen") && errors.contains(&listen),
        "{errors}"
    );
}

#[test]
fn an_output_directory_must_exist() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("missing");
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    for out in [missing, file] {
        let out = out.to_str().unwrap();
        let errors = refused(&[
            "consume",
            "--listen",
            "127.0.0.1:0",
            "--pool",
            "1MiB",
            "--out",
            out,
        ]);
        assert!(errors.contains("--out"), "{errors}");
    }
}

#[test]
fn a_hash_for_a_tensor_that_is_not_there_is_refused_before_anything_is_sent() {
    let dir = tempfile::tempdir().unwrap();
    let file = file_of(dir.path(), "model", 1, 10);
    let errors = refused(&[
        "push",
        "--json",
        "--to",
        "tcp://127.0.0.1:1",
        "--mm-hash",
        "other=00",
        file.to_str().unwrap(),
    ]);
    assert!(errors.contains("other"), "{errors}");
}

// row: F16
#[test]
fn each_bad_file_fails_with_a_row_of_its_own_and_the_good_ones_arrive() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let good = file_of(dir.path(), "good.safetensors", 2, 1_000);
    let whole = fs::read(&good).unwrap();
    fs::write(at("truncated"), &whole[..whole.len() - 1]).unwrap();
    fs::write(at("headless"), &whole[..20]).unwrap();
    fs::write(at("empty"), "").unwrap();
    fs::write(at("text"), "PK\u{3}\u{4} this is no tensor file at all").unwrap();
    fs::write(at("not-json"), [&5u64.to_le_bytes()[..], b"{]{]{"].concat()).unwrap();
    let also_good = file_of(dir.path(), "also-good.safetensors", 1, 1_000);
    let bad: Vec<PathBuf> = [
        "missing",
        "truncated",
        "headless",
        "empty",
        "text",
        "not-json",
    ]
    .map(at)
    .into();
    let mut files: Vec<&Path> = vec![&good];
    files.extend(bad.iter().map(PathBuf::as_path));
    files.push(dir.path());
    files.push(&also_good);

    let consumer = Consumer::start("1MiB", &[]);
    let (code, rows) = push(&consumer.control, &files, &[]);
    assert_eq!(code, 1);
    assert_eq!(rows.len(), 2 + 7 + 1, "{rows:?}");
    assert_eq!(with(&rows, "state", "written").len(), 3);
    let failed = with(&rows, "state", "failed");
    for (row, path) in failed
        .iter()
        .zip(bad.iter().map(PathBuf::as_path).chain([dir.path()]))
    {
        assert_eq!(row["file"], path.to_str().unwrap());
        assert_eq!(row["code"], "file");
        assert!(row["name"].is_null());
        let error = row["error"].as_str().unwrap();
        assert!(
            error.contains(path.to_str().unwrap()) && error.len() > 30,
            "{error}"
        );
    }
    assert_eq!(consumer.checked_status()["residents"], 3);
}

// row: F16
#[test]
fn a_tensor_of_an_unsupported_type_fails_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    write_safetensors(
        &path,
        &[
            Tensor {
                name: "six".to_owned(),
                dtype: Dtype::F6_E2M3,
                shape: vec![4],
                bytes: vec![1, 2, 3],
            },
            Tensor::u8("ok", 100),
        ],
    );
    let consumer = Consumer::start("1MiB", &[]);
    let (code, rows) = push(&consumer.control, &[&path], &[]);
    assert_eq!(code, 1);
    let six = with(&rows, "name", "six")[0];
    assert_eq!(six["code"], "unsupported_dtype");
    assert!(six["error"].as_str().unwrap().contains("F6_E2M3"), "{six}");
    assert_eq!(with(&rows, "name", "ok")[0]["state"], "written");
}

// row: F16
#[test]
fn hostile_names_reach_neither_the_file_system_nor_the_terminal() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    fs::create_dir(&out).unwrap();
    let path = dir.path().join("model.safetensors");
    let names = [
        "../../escape",
        "/etc/passwd",
        "a\u{1b}[2J\u{7}b",
        "line\nbreak\r",
        "\u{202e}reversed",
        "nul\0byte",
        "",
        &"long".repeat(5_000),
    ];
    let tensors: Vec<_> = names.iter().map(|name| Tensor::u8(name, 500)).collect();
    write_safetensors(&path, &tensors);
    let mut consumer = Consumer::start("1MiB", &["--out", out.to_str().unwrap()]);
    let (code, rows) = push(&consumer.control, &[&path], &[]);
    assert_eq!(code, 0);
    let mut sent: Vec<_> = rows
        .iter()
        .map(|row| row["name"].as_str().unwrap())
        .collect();
    sent.sort_unstable();
    let mut expected = names.to_vec();
    expected.sort_unstable();
    assert_eq!(sent, expected, "JSON carries names as they are");
    for _ in names {
        assert_eq!(consumer.process.row()["event"], "received");
    }
    for entry in fs::read_dir(&out).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let (stem, extension) = name.split_once('.').unwrap();
        assert_eq!(extension, "safetensors");
        assert!(stem.len() == 64 && stem.bytes().all(|b| b.is_ascii_hexdigit()));
    }

    let mut process = Process::start(&["push", "--to", &consumer.control, path.to_str().unwrap()]);
    let mut lines = 0;
    while let Some(line) = process.text() {
        lines += 1;
        assert!(
            !line.contains(['\x1b', '\x07', '\0', '\r', '\u{202e}']),
            "{line:?}"
        );
    }
    assert_eq!(process.code(), 0);
    assert_eq!(lines, names.len() + 1, "a name breaks no line");
}

// row: F19
#[test]
fn a_full_disk_fails_the_item_and_the_consumer_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    fs::create_dir(&out).unwrap();
    let path = dir.path().join("model.safetensors");
    write_safetensors(
        &path,
        &[Tensor::u8("big", 3_000_000), Tensor::u8("small", 1_000)],
    );
    // A limit on file sizes (1,024 blocks of 512 bytes, or of 1,024) refuses writes as a full disk does; the
    // signal that goes with it is ignored.
    let mut command = Command::new("sh");
    command.args(["-c", "trap '' XFSZ; ulimit -f 1024; exec \"$@\"", "sh"]);
    command.arg(env!("CARGO_BIN_EXE_ec-connector"));
    command.args([
        "consume",
        "--json",
        "--listen",
        "127.0.0.1:0",
        "--pool",
        "8MiB",
    ]);
    command.args(["--out", out.to_str().unwrap()]);
    let mut consumer = Consumer::of(Process::spawn(command));
    let (code, _) = push(&consumer.control, &[&path], &[]);
    assert_eq!(code, 0, "the bytes arrived in the pool");
    let rows = [consumer.process.row(), consumer.process.row()];
    for row in &rows {
        assert_eq!(row["event"], "received");
        let is_big = row["nbytes"] == 3_000_000;
        assert_eq!(row["error"].is_string(), is_big, "{row}");
    }
    let names: Vec<_> = fs::read_dir(&out)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    let small = rows.iter().find(|row| row["nbytes"] == 1_000).unwrap();
    assert_eq!(
        names,
        [format!("{}.safetensors", small["sha256"].as_str().unwrap())],
        "nothing half written is left"
    );
    consumer.checked_status();
    assert_eq!(consumer.stop(), 1, "an item failed");
}

#[test]
fn a_shape_that_cannot_be_sent_and_a_file_of_no_tensors_are_named_for_what_they_are() {
    let dir = tempfile::tempdir().unwrap();
    let deep = dir.path().join("deep");
    write_safetensors(
        &deep,
        &[Tensor {
            name: "deep".to_owned(),
            dtype: Dtype::U8,
            shape: vec![1; 1_000],
            bytes: vec![1],
        }],
    );
    let longer = file_of(dir.path(), "longer", 1, 1_000);
    let mut bytes = fs::read(&longer).unwrap();
    bytes.extend_from_slice(b"and more");
    fs::write(&longer, bytes).unwrap();
    let empty = dir.path().join("empty");
    write_safetensors(&empty, &[]);

    let consumer = Consumer::start("1MiB", &[]);
    let (code, rows) = push(&consumer.control, &[&deep, &longer], &[]);
    assert_eq!(code, 1);
    assert_eq!(rows[0]["code"], "unsupported_shape", "{rows:?}");
    let error = rows[1]["error"].as_str().unwrap();
    assert!(error.contains("8 bytes follow after the last"), "{error}");

    let (code, rows) = push(&consumer.control, &[&empty], &[]);
    assert_eq!((code, rows.len()), (0, 0));
    let mut process = Process::start(&["push", "--to", &consumer.control, empty.to_str().unwrap()]);
    let text = process.text().unwrap();
    assert!(text.contains("holds no tensors"), "{text}");
    assert_eq!(process.code(), 0);
}

#[test]
fn lines_for_people_fit_an_ordinary_terminal() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model");
    write_safetensors(&path, &[Tensor::u8(&"encoder.layer.".repeat(40), 500_000)]);
    let mut serving = Process::start(&["consume", "--listen", "127.0.0.1:0", "--pool", "1MiB"]);
    let ready = serving.text().unwrap();
    let control = ready.split_whitespace().last().unwrap().to_owned();
    let mut lines = vec![ready, serving.text().unwrap()];
    for args in [
        vec!["push", "--to", &control, path.to_str().unwrap()],
        vec!["status", "--of", &control],
        vec!["demo", "--items", "4", "--pool", "64MiB"],
    ] {
        let mut process = Process::start(&args);
        lines.extend(std::iter::from_fn(|| process.text()));
        assert_eq!(process.code(), 0);
    }
    lines.push(serving.text().unwrap());
    for line in &lines {
        assert!(line.chars().count() <= 80, "{line}");
    }
    assert!(lines.len() > 30, "{lines:?}");
}

#[test]
fn a_consumer_that_is_not_there_is_named_and_not_waited_for_twice() {
    let dir = tempfile::tempdir().unwrap();
    let file = file_of(dir.path(), "model", 30, 1_000);
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp://{}", free.local_addr().unwrap());
    drop(free);

    let started = Instant::now();
    let (code, rows, errors) = push_with_errors(&address, &[&file], &["--timeout", "1"]);
    assert!(
        started.elapsed() < Duration::from_secs(15),
        "{:?}",
        started.elapsed()
    );
    assert_eq!(code, 1);
    assert_eq!(rows.len(), 30, "{errors}");
    assert!(
        rows.iter().all(|row| row["code"] == "unreachable"),
        "{rows:?}"
    );
    assert!(
        rows[0]["error"]
            .as_str()
            .unwrap()
            .contains("did not answer for 1 s; check that it runs"),
        "{}",
        rows[0]
    );

    let started = Instant::now();
    let (code, rows, errors) = run(&["status", "--json", "--of", &address]);
    assert!(started.elapsed() < Duration::from_secs(15));
    assert_eq!((code, rows.len()), (1, 0));
    assert!(errors.contains(&address), "{errors}");
}

#[test]
fn a_reader_that_goes_away_ends_the_command_quietly() {
    let dir = tempfile::tempdir().unwrap();
    let file = file_of(dir.path(), "model", 200, 100);
    let consumer = Consumer::start("1MiB", &[]);
    let mut command = Command::new("sh");
    command.args(["-c", "\"$@\" | head -n 1", "sh"]);
    command.arg(env!("CARGO_BIN_EXE_ec-connector"));
    command.args(["push", "--json", "--to", &consumer.control]);
    command.arg(&file);
    let mut process = Process::spawn(command);
    assert_eq!(process.rows().len(), 1);
    process.wait();
    assert_eq!(process.errors(), "");
}
