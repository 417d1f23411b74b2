//! A real model file, pushed tensor by tensor into files of its own.

#[path = "support/processes.rs"]
mod processes;

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use ec_connector::TensorFile;
use processes::{Consumer, push, with};

/// Bytes `range` of a file.
fn read(file: &File, range: std::ops::Range<u64>) -> Vec<u8> {
    let mut bytes = vec![0; (range.end - range.start) as usize];
    file.read_exact_at(&mut bytes, range.start).unwrap();
    bytes
}

#[test]
#[ignore = "needs-network: a published model file"]
fn a_published_model_arrives_tensor_by_tensor() {
    let path = PathBuf::from(
        std::env::var_os("EC_FIXTURE_SAFETENSORS")
            .expect("EC_FIXTURE_SAFETENSORS names the model file"),
    );
    let dir = tempfile::tempdir().unwrap();
    // A tenth of the file or so, but room for its largest tensor.
    let model = TensorFile::open(&path).unwrap();
    let largest = model
        .tensors()
        .iter()
        .map(|tensor| tensor.len())
        .max()
        .unwrap();
    let pool = (largest + (4 << 20)).to_string();
    let mut consumer = Consumer::start(&pool, &["--out", dir.path().to_str().unwrap()]);
    let (code, rows) = push(&consumer.control, &[&path], &[]);
    assert_eq!(code, 0, "{:?}", with(&rows, "state", "failed"));
    assert_eq!(rows.len(), model.tensors().len());
    for _ in &rows {
        let received = consumer.process.row();
        assert!(received["error"].is_null(), "{received}");
    }
    for (row, tensor) in rows.iter().zip(model.tensors()) {
        assert_eq!(row["name"], tensor.name());
        let name = format!("{}.safetensors", row["sha256"].as_str().unwrap());
        let written = TensorFile::open(dir.path().join(name)).unwrap();
        let [copy] = written.tensors() else {
            panic!("one tensor expected")
        };
        assert_eq!(
            written.spec(copy).unwrap().dtype(),
            model.spec(tensor).unwrap().dtype()
        );
        assert!(
            read(written.file(), copy.range()) == read(model.file(), tensor.range()),
            "bytes of {} differ",
            tensor.name()
        );
    }
    let files = fs::read_dir(dir.path()).unwrap().count();
    let contents: std::collections::HashSet<_> = rows
        .iter()
        .map(|row| row["sha256"].as_str().unwrap())
        .collect();
    assert_eq!(files, contents.len());
    consumer.checked_status();
    assert_eq!(consumer.stop(), 0);
}
