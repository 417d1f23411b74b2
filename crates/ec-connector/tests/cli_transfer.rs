//! The commands together: what is pushed arrives, is cached the next time, and makes room when room is needed.

#[path = "support/processes.rs"]
mod processes;

use std::collections::BTreeSet;
use std::fs;
use std::time::{Duration, Instant};

use processes::{Consumer, Process, Tensor, file_of, push, run, with, write_safetensors};
use safetensors::tensor::Dtype;
use serde_json::Value;

/// Sorted pairs of transfer id and sha256.
fn arrivals(rows: &[Value]) -> BTreeSet<(String, String)> {
    rows.iter()
        .map(|row| {
            let text = |key: &str| row[key].as_str().unwrap().to_owned();
            (text("transfer_id"), text("sha256"))
        })
        .collect()
}

fn receive(consumer: &mut Consumer, count: usize) -> Vec<Value> {
    (0..count)
        .map(|_| {
            let row = consumer.process.row();
            assert_eq!(row["event"], "received", "{row}");
            row
        })
        .collect()
}

#[test]
fn demo_verifies_every_generated_item_and_keeps_its_json_contract() {
    let (code, rows, errors) = run(&["demo", "--json", "--items", "24", "--pool", "160MiB"]);
    assert_eq!(code, 0, "{errors}");
    let [summary] = rows.as_slice() else {
        panic!("one line expected, got {rows:?}")
    };
    let keys: Vec<_> = summary.as_object().unwrap().keys().collect();
    assert_eq!(
        keys,
        [
            "items", "verified", "cached", "bytes", "seconds", "gb_per_s", "p50_us", "p99_us"
        ]
    );
    assert_eq!(summary["items"], 24);
    assert_eq!(summary["verified"], 24);
    assert!(summary["cached"].as_u64().unwrap() >= 1, "{summary}");
    assert!(summary["bytes"].as_u64().unwrap() > 24 * 256 * 1152 * 2);
    assert!(summary["seconds"].as_f64().unwrap() > 0.0);
    assert!(summary["gb_per_s"].as_f64().unwrap() > 0.0);
    let [p50, p99] = ["p50_us", "p99_us"].map(|key| summary[key].as_u64().unwrap());
    assert!(0 < p50 && p50 <= p99, "{summary}");
}

#[test]
fn demo_pushes_the_tensors_of_files_and_draws_the_pool_for_people() {
    let dir = tempfile::tempdir().unwrap();
    let file = file_of(dir.path(), "model.safetensors", 9, 40_000);
    let mut process = Process::start(&["demo", "--pool", "256KiB", file.to_str().unwrap()]);
    let mut text = String::new();
    while let Some(line) = process.text() {
        text.push_str(&line);
        text.push('\n');
    }
    assert_eq!(process.code(), 0, "{}", process.errors());
    assert!(text.contains("9 pushed, 9 verified, 0 cached"), "{text}");
    assert!(text.contains("resident"), "{text}");
    assert!(!text.contains('\x1b'), "no colours in a pipe: {text}");
}

#[test]
fn what_is_pushed_is_received_with_the_same_hash_and_cached_the_second_time() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    write_safetensors(
        &path,
        &[
            Tensor::u8("a", 1_000_000),
            Tensor::u8("b", 1),
            Tensor {
                name: "c".to_owned(),
                dtype: Dtype::BF16,
                shape: vec![3, 5],
                bytes: (0..30).collect(),
            },
            Tensor {
                name: "empty".to_owned(),
                dtype: Dtype::F32,
                shape: vec![0, 4],
                bytes: vec![],
            },
            Tensor {
                name: "scalar".to_owned(),
                dtype: Dtype::I64,
                shape: vec![],
                bytes: vec![9; 8],
            },
        ],
    );
    let mut consumer = Consumer::start("8MiB", &[]);
    let (code, pushed) = push(&consumer.control, &[&path], &[]);
    assert_eq!(code, 0);
    let names: Vec<_> = pushed
        .iter()
        .map(|row| row["name"].as_str().unwrap())
        .collect();
    assert_eq!(pushed.len(), 5, "{names:?}");
    assert_eq!(with(&pushed, "state", "written").len(), 5);
    let keys: Vec<_> = pushed[0].as_object().unwrap().keys().cloned().collect();
    assert_eq!(
        keys,
        [
            "event",
            "file",
            "name",
            "transfer_id",
            "mm_hash",
            "nbytes",
            "sha256",
            "state",
            "code",
            "error"
        ]
    );
    let received = receive(&mut consumer, 5);
    assert_eq!(arrivals(&pushed), arrivals(&received));
    let keys: Vec<_> = received[0].as_object().unwrap().keys().cloned().collect();
    assert_eq!(
        keys,
        [
            "event",
            "transfer_id",
            "mm_hash",
            "shape",
            "dtype",
            "nbytes",
            "sha256",
            "cached"
        ]
    );
    let c = with(&received, "dtype", "bfloat16")[0];
    assert_eq!(c["shape"], serde_json::json!([3, 5]));
    assert_eq!(c["nbytes"], 30);
    assert!(received.iter().all(|row| row["cached"] == false));

    let (code, again) = push(&consumer.control, &[&path], &[]);
    assert_eq!(code, 0);
    assert_eq!(with(&again, "state", "cached").len(), 5, "{again:?}");
    let received = receive(&mut consumer, 5);
    assert_eq!(arrivals(&again), arrivals(&received));
    assert!(received.iter().all(|row| row["cached"] == true));
    let hashes = |rows: &[Value]| -> BTreeSet<String> {
        rows.iter()
            .map(|row| row["mm_hash"].as_str().unwrap().to_owned())
            .collect()
    };
    assert_eq!(hashes(&pushed), hashes(&again));
    let status = consumer.settled_status();
    assert_eq!(status["residents"], 5);
    assert_eq!(consumer.stop(), 0);
}

#[test]
fn a_pool_a_tenth_of_the_file_receives_all_of_it_by_reclaiming_residents() {
    let dir = tempfile::tempdir().unwrap();
    let file = file_of(dir.path(), "model.safetensors", 40, 200_000);
    let mut consumer = Consumer::start("800KiB", &[]);
    let (code, pushed) = push(&consumer.control, &[&file], &[]);
    assert_eq!(code, 0, "{pushed:?}");
    assert_eq!(with(&pushed, "state", "written").len(), 40);
    assert_eq!(arrivals(&pushed), arrivals(&receive(&mut consumer, 40)));
    let status = consumer.checked_status();
    assert!(status["residents"].as_u64().unwrap() >= 3, "{status}");
    assert_eq!(status["bytes"]["writing"], 0);
    assert_eq!(consumer.stop(), 0);
}

// row: M3, A5
#[test]
fn a_tensor_larger_than_the_pool_fails_alone_at_once_and_evicts_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let small = file_of(dir.path(), "small.safetensors", 4, 50_000);
    let mixed = dir.path().join("mixed.safetensors");
    write_safetensors(
        &mixed,
        &[Tensor::u8("huge", 2_000_000), Tensor::u8("fits", 100_000)],
    );
    let consumer = Consumer::start("1MiB", &[]);
    assert_eq!(push(&consumer.control, &[&small], &[]).0, 0);
    let started = Instant::now();
    let (code, rows) = push(&consumer.control, &[&mixed], &[]);
    assert!(
        started.elapsed() < Duration::from_secs(20),
        "not waited for"
    );
    assert_eq!(code, 1);
    let huge = with(&rows, "name", "huge")[0];
    assert_eq!(
        (&huge["state"], &huge["code"]),
        (&"failed".into(), &"too_large".into())
    );
    assert!(huge["error"].as_str().unwrap().contains("larger"), "{huge}");
    assert_eq!(with(&rows, "name", "fits")[0]["state"], "written");
    assert_eq!(
        consumer.checked_status()["residents"],
        5,
        "nothing was evicted"
    );
    let (_, again) = push(&consumer.control, &[&small], &[]);
    assert_eq!(with(&again, "state", "cached").len(), 4);
}

#[test]
fn out_writes_one_safetensors_file_for_each_content() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    fs::create_dir(&out).unwrap();
    let path = dir.path().join("model.safetensors");
    write_safetensors(
        &path,
        &[
            Tensor::u8("a", 70_001),
            Tensor {
                name: "packed".to_owned(),
                dtype: Dtype::F4,
                shape: vec![2, 6],
                bytes: vec![1, 2, 3, 4, 5, 6],
            },
        ],
    );
    let mut consumer = Consumer::start("4MiB", &["--out", out.to_str().unwrap()]);
    let (code, pushed) = push(&consumer.control, &[&path], &[]);
    assert_eq!(code, 0);
    receive(&mut consumer, 2);
    let original = fs::read(&path).unwrap();
    let original = safetensors::SafeTensors::deserialize(&original).unwrap();
    for row in &pushed {
        let name = format!("{}.safetensors", row["sha256"].as_str().unwrap());
        let bytes = fs::read(out.join(name)).unwrap();
        let (_, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        let pairs = metadata.metadata().as_ref().unwrap();
        assert_eq!(pairs["mm_hash"], row["mm_hash"].as_str().unwrap());
        assert_eq!(pairs["transfer_id"], row["transfer_id"].as_str().unwrap());
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(file.names(), ["tensor"]);
        let (got, expected) = (
            file.tensor("tensor").unwrap(),
            original.tensor(row["name"].as_str().unwrap()).unwrap(),
        );
        assert_eq!(got.dtype(), expected.dtype());
        assert_eq!(got.shape(), expected.shape());
        assert_eq!(got.data(), expected.data());
    }
    assert_eq!(fs::read_dir(&out).unwrap().count(), 2, "no partial files");
}

#[test]
fn out_keeps_tensors_of_equal_bytes_and_different_shape_or_type_apart() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    fs::create_dir(&out).unwrap();
    let path = dir.path().join("model.safetensors");
    let tensor = |name: &str, dtype, shape: &[usize]| Tensor {
        name: name.to_owned(),
        dtype,
        shape: shape.to_vec(),
        bytes: vec![0; 24],
    };
    write_safetensors(
        &path,
        &[
            tensor("a", Dtype::F32, &[2, 3]),
            tensor("b", Dtype::F32, &[3, 2]),
            tensor("c", Dtype::BF16, &[12]),
            tensor("again", Dtype::F32, &[2, 3]),
        ],
    );
    let mut consumer = Consumer::start("1MiB", &["--out", out.to_str().unwrap()]);
    assert_eq!(push(&consumer.control, &[&path], &[]).0, 0);
    let received = receive(&mut consumer, 4);
    let mut seen = BTreeSet::new();
    for row in &received {
        assert!(row["error"].is_null(), "{row}");
        let usual = format!("{}.safetensors", row["sha256"].as_str().unwrap());
        let name = row["file"].as_str().unwrap_or(&usual).to_owned();
        let bytes = fs::read(out.join(&name)).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let tensor = file.tensor("tensor").unwrap();
        let shape: Vec<u64> = tensor.shape().iter().map(|&dim| dim as u64).collect();
        assert_eq!(serde_json::json!(shape), row["shape"], "{name}");
        assert_eq!(tensor.dtype() == Dtype::BF16, row["dtype"] == "bfloat16");
        assert_eq!(tensor.data(), [0; 24]);
        seen.insert(name);
    }
    assert_eq!(seen.len(), 3, "{seen:?}");
    assert_eq!(fs::read_dir(&out).unwrap().count(), 3);
}

#[test]
fn kept_tensors_stay_leased_and_their_memory_is_not_reused() {
    let dir = tempfile::tempdir().unwrap();
    let first = file_of(dir.path(), "first.safetensors", 3, 300_000);
    let second = file_of(dir.path(), "second.safetensors", 1, 300_000);
    let consumer = Consumer::start("1MiB", &["--keep"]);
    assert_eq!(push(&consumer.control, &[&first], &[]).0, 0);
    let (code, rows) = push(&consumer.control, &[&second], &["--timeout", "0.5"]);
    assert_eq!(code, 1);
    assert_eq!(rows[0]["code"], "pool_full", "{rows:?}");
    let status = consumer.checked_status();
    assert!(status["bytes"]["leased"].as_u64().unwrap() >= 900_000);
    assert_eq!(consumer.stop(), 0);
}

#[test]
fn without_taking_items_are_reported_as_ready_and_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let file = file_of(dir.path(), "model.safetensors", 2, 10_000);
    let mut consumer = Consumer::start("1MiB", &["--no-take"]);
    let (code, pushed) = push(&consumer.control, &[&file], &[]);
    assert_eq!(code, 0);
    for _ in 0..2 {
        let row = consumer.process.row();
        assert_eq!(row["event"], "item_ready");
        let keys: Vec<_> = row.as_object().unwrap().keys().cloned().collect();
        assert_eq!(
            keys,
            [
                "event",
                "transfer_id",
                "mm_hash",
                "shape",
                "dtype",
                "nbytes",
                "cached"
            ]
        );
        assert!(
            pushed
                .iter()
                .any(|sent| sent["transfer_id"] == row["transfer_id"])
        );
    }
    let status = consumer.checked_status();
    assert_eq!(status["reservations"]["ready"], 2);
    assert!(status["bytes"]["ready"].as_u64().unwrap() >= 20_000);
    assert_eq!(consumer.stop(), 0);
}

#[test]
fn a_consumer_stops_after_as_many_transfers_as_it_was_told() {
    let dir = tempfile::tempdir().unwrap();
    let file = file_of(dir.path(), "model.safetensors", 3, 10_000);
    let mut consumer = Consumer::start("1MiB", &["--max-items", "3"]);
    assert_eq!(push(&consumer.control, &[&file], &[]).0, 0);
    assert_eq!(consumer.process.rows().len(), 3);
    assert_eq!(consumer.process.code(), 0);
}

#[test]
fn two_producers_of_the_same_content_both_end_well() {
    let dir = tempfile::tempdir().unwrap();
    let file = file_of(dir.path(), "model.safetensors", 12, 400_000);
    let consumer = Consumer::start("64MiB", &[]);
    let args = [
        "push",
        "--json",
        "--to",
        &consumer.control,
        file.to_str().unwrap(),
    ];
    let mut both = [Process::start(&args), Process::start(&args)];
    for process in &mut both {
        let rows = process.rows();
        assert_eq!(process.code(), 0, "{rows:?}");
        assert_eq!(rows.len(), 12);
    }
    let status = consumer.settled_status();
    assert_eq!(status["residents"], 12);
}

#[test]
fn a_given_hash_names_the_content() {
    let dir = tempfile::tempdir().unwrap();
    let file = file_of(dir.path(), "model", 1, 100);
    let mut consumer = Consumer::start("1MiB", &[]);
    let (code, rows) = push(&consumer.control, &[&file], &["--mm-hash", "model.0=Beef"]);
    assert_eq!(code, 0);
    assert_eq!(rows[0]["mm_hash"], "Beef");
    assert_eq!(consumer.process.row()["mm_hash"], "Beef");
}

#[test]
fn lines_for_people_carry_no_escape_sequences_in_a_pipe() {
    let dir = tempfile::tempdir().unwrap();
    let file = file_of(dir.path(), "model.safetensors", 2, 1_000);
    let consumer = Consumer::start("1MiB", &[]);
    for args in [
        vec!["push", "--to", &consumer.control, file.to_str().unwrap()],
        vec!["status", "--of", &consumer.control],
    ] {
        let mut process = Process::start(&args);
        let mut text = String::new();
        while let Some(line) = process.text() {
            text.push_str(&line);
            text.push('\n');
        }
        assert_eq!(process.code(), 0, "{}", process.errors());
        assert!(text.lines().count() >= 3, "{text}");
        assert!(!text.contains('\x1b'), "{text}");
        assert_eq!(process.errors(), "");
    }
}
