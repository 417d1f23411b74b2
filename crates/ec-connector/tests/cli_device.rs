//! `--device`: pools in GPU memory, on the fake driver, and what is said where there is no driver.
#![cfg(feature = "cuda")]

#[path = "support/processes.rs"]
mod processes;

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use cuda_fake::library_path;
use processes::{Consumer, PATIENCE, Process, file_of, push, with};

/// A folder in which the loader looks for the driver: `library` is there under the driver's name, if given.
struct Folder(tempfile::TempDir);

impl Folder {
    fn with(library: Option<&Path>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        if let Some(library) = library {
            std::os::unix::fs::symlink(library, dir.path().join("libcuda.so")).unwrap();
        }
        Self(dir)
    }

    /// Starts the program with this folder, the fake being on that schedule if it is the driver.
    fn start(&self, schedule: &str, variables: &[(&str, &str)], args: &[&str]) -> Process {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ec-connector"));
        command
            .args(args)
            .env("LD_LIBRARY_PATH", self.0.path())
            .env("CUDA_FAKE_SCHEDULE", schedule)
            .env("CUDA_FAKE_SAY", "1")
            .envs(variables.iter().copied());
        Process::spawn(command)
    }
}

const DEMO: [&str; 8] = [
    "demo", "--device", "cuda:0", "--json", "--items", "16", "--pool", "96MiB",
];

#[test]
fn a_demo_on_a_device_verifies_every_byte_whenever_the_streams_advance() {
    let folder = Folder::with(Some(&library_path()));
    for schedule in ["immediate", "7", "20261130"] {
        let mut demo = folder.start(schedule, &[], &DEMO);
        let rows = demo.rows();
        assert_eq!(demo.code(), 0, "schedule {schedule}: {}", demo.errors());
        let [summary] = rows.as_slice() else {
            panic!("one line expected, got {rows:?}")
        };
        assert_eq!(summary["items"], 16);
        assert_eq!(summary["verified"], 16);
        assert!(summary["cached"].as_u64().unwrap() >= 1, "{summary}");
        assert_eq!(demo.errors(), "", "nothing is lost and nothing to warn of");
    }
}

#[test]
fn files_are_pushed_from_device_to_device() {
    let dir = tempfile::tempdir().unwrap();
    let file = file_of(dir.path(), "model.safetensors", 9, 40_001);
    let folder = Folder::with(Some(&library_path()));
    let args = ["demo", "--device", "cuda:1", "--pool", "256KiB"];
    let args = [&args[..], &[file.to_str().unwrap()]].concat();
    let mut demo = folder.start("99", &[], &args);
    let mut text = String::new();
    while let Some(line) = demo.text() {
        text.push_str(&line);
        text.push('\n');
    }
    assert_eq!(demo.code(), 0, "{}", demo.errors());
    assert!(text.contains("9 pushed, 9 verified, 0 cached"), "{text}");
    assert!(
        text.contains("with a pool of 256.0 KiB on cuda:1"),
        "{text}"
    );
}

#[test]
fn a_pool_on_a_device_receives_caches_evicts_and_writes_files() {
    let dir = tempfile::tempdir().unwrap();
    let out = tempfile::tempdir().unwrap();
    // Twice what the pool holds.
    let file = file_of(dir.path(), "model.safetensors", 8, 256 << 10);
    let folder = Folder::with(Some(&library_path()));
    let mut consumer = Consumer::of(folder.start(
        "5",
        &[],
        &[
            "consume",
            "--json",
            "--listen",
            "127.0.0.1:0",
            "--pool",
            "1MiB",
            "--device",
            "cuda:0",
            "--out",
            out.path().to_str().unwrap(),
        ],
    ));
    let (code, pushed) = push(&consumer.control, &[&file], &[]);
    assert_eq!(code, 0, "{pushed:?}");
    assert_eq!(with(&pushed, "state", "written").len(), 8);
    for _ in 0..8 {
        let received = consumer.process.row();
        let sha256 = received["sha256"].as_str().unwrap();
        let sent = with(&pushed, "sha256", sha256);
        assert_eq!(sent.len(), 1, "{received}");
        let path = out.path().join(format!("{sha256}.safetensors"));
        let bytes = std::fs::read(path).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let source = std::fs::read(&file).unwrap();
        let source = safetensors::SafeTensors::deserialize(&source).unwrap();
        let name = sent[0]["name"].as_str().unwrap();
        assert_eq!(
            tensors.tensor("tensor").unwrap().data(),
            source.tensor(name).unwrap().data()
        );
    }
    let status = consumer.settled_status();
    let resident = status["bytes"]["resident"].as_u64().unwrap();
    assert!(0 < resident && resident <= 1 << 20, "{status}");
    assert!(
        status["totals"]["evictions"].as_u64().unwrap() > 0,
        "{status}"
    );
    end(consumer);
}

/// Ends a consumer, which must have used the driver as it bears.
fn end(mut consumer: Consumer) {
    consumer.process.signal(rustix::process::Signal::TERM);
    assert_eq!(consumer.process.code(), 0);
    let errors = consumer.process.errors();
    assert!(!errors.contains("misuse of the driver"), "{errors}");
}

/// Runs `consume` and `demo` with what cannot work; both have to say the same and end with code 2.
fn refused(folder: &Folder, variables: &[(&str, &str)], device: &str) -> String {
    refused_pool(folder, variables, &["--device", device, "--pool", "64MiB"])
}

fn refused_pool(folder: &Folder, variables: &[(&str, &str)], of_pool: &[&str]) -> String {
    let commands = [
        [&["consume", "--listen", "127.0.0.1:0"], of_pool].concat(),
        [&["demo", "--items", "2"], of_pool].concat(),
    ];
    let said: Vec<String> = commands
        .iter()
        .map(|args| {
            let mut process = folder.start("immediate", variables, args);
            assert_eq!(process.text(), None, "{args:?}");
            let errors = process.errors();
            assert_eq!(process.code(), 2, "{args:?} said {errors}");
            let errors = process.errors();
            assert!(!errors.contains("panicked"), "{errors}");
            errors
        })
        .collect();
    assert_eq!(said[0], said[1]);
    said[0].clone()
}

#[test]
fn what_is_missing_is_said_and_ends_with_code_2() {
    let fake = Folder::with(Some(&library_path()));
    let init = refused(&fake, &[("CUDA_FAKE_INIT", "100")], "cuda:0");
    assert!(
        init.contains(
            "--device cuda:0 cannot be used: libcuda.so does not start: CUDA_ERROR_NO_DEVICE (100)"
        ),
        "{init}"
    );
    let old = refused(&fake, &[("CUDA_FAKE_DRIVER_VERSION", "11030")], "cuda:0");
    assert!(old.contains("update the driver"), "{old}");
    let number = refused(&fake, &[], "cuda:7");
    assert!(number.contains("there is no device 7"), "{number}");
    // Any library without the driver's functions will do.
    let stub = Folder::with(Some(Path::new(&c_library())));
    let stub = refused(&stub, &[], "cuda:0");
    assert!(stub.contains("libcuda.so lacks cuInit"), "{stub}");
}

/// The file of the C library, which every process has.
fn c_library() -> String {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let mut paths = maps
        .lines()
        .filter_map(|line| line.split_whitespace().last());
    let path = paths.find(|path| path.contains("/libc.so") || path.contains("/libc-"));
    path.expect("the process has a C library").to_owned()
}

#[test]
fn without_a_driver_the_error_says_what_to_install() {
    // The loader takes the first file of a name, whatever it is: so there is none even on a machine with a driver.
    let folder = Folder::with(None);
    for name in ["libcuda.so", "libcuda.so.1"] {
        std::fs::write(folder.0.path().join(name), "no library").unwrap();
    }
    let said = refused(&folder, &[], "cuda:0");
    assert!(
        said.contains("--device cuda:0 cannot be used: no CUDA driver"),
        "{said}"
    );
    assert!(said.contains("install the NVIDIA driver"), "{said}");
}

#[test]
fn a_pool_larger_than_the_device_is_refused_with_advice() {
    let folder = Folder::with(Some(&library_path()));
    let errors = refused_pool(&folder, &[], &["--device", "cuda:0", "--pool", "64GiB"]);
    assert!(
        errors.contains("cuda:0 has no 68719476736 bytes to give; choose a smaller --pool"),
        "{errors}"
    );
    assert!(errors.contains("CUDA_ERROR_OUT_OF_MEMORY (2)"), "{errors}");
}

#[test]
fn a_pool_that_no_memory_can_have_is_refused_as_on_the_host() {
    let folder = Folder::with(Some(&library_path()));
    let on_host = refused_pool(&folder, &[], &["--pool", "0"]);
    assert!(on_host.contains("choose another --pool size"), "{on_host}");
    let on_device = refused_pool(&folder, &[], &["--pool", "0", "--device", "cuda:0"]);
    assert_eq!(on_device, on_host);
    // Beyond what an address can reach.
    let endless = ["--pool", "9223372036854775808", "--device", "cuda:0"];
    let endless = refused_pool(&folder, &[], &endless);
    assert!(
        endless.contains("choose another --pool size: a memory cannot have"),
        "{endless}"
    );
}

#[test]
fn what_else_fails_when_the_pool_is_made_is_said_without_advice_about_its_size() {
    let folder = Folder::with(Some(&library_path()));
    let fail = [("CUDA_FAKE_FAIL", "cuMemAlloc_v2:1:1:719")];
    let errors = refused(&folder, &fail, "cuda:0");
    assert!(
        errors.contains("cannot take 67108864 bytes of the memory of cuda:0: cuMemAlloc_v2 failed"),
        "{errors}"
    );
    assert!(errors.contains("(719)"), "{errors}");
    assert!(!errors.contains("--pool"), "{errors}");
}

/// Starts a consumer on a device of which those calls fail.
fn failing_consumer(folder: &Folder, fail: &str, more: &[&str]) -> Consumer {
    let consume = ["consume", "--json", "--listen", "127.0.0.1:0"];
    let device = ["--pool", "8MiB", "--device", "cuda:0"];
    let args = [&consume, &device, more].concat();
    Consumer::of(folder.start("immediate", &[("CUDA_FAKE_FAIL", fail)], &args))
}

#[test]
fn a_copy_to_the_device_that_fails_once_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let file = file_of(dir.path(), "model.safetensors", 6, 100_000);
    let folder = Folder::with(Some(&library_path()));
    let mut consumer = failing_consumer(&folder, "cuMemcpyAsync:1:1:700", &[]);
    // The engine closes the connection of that write instead of acknowledging it, and the producer writes again.
    let (code, pushed) = push(&consumer.control, &[&file], &[]);
    assert_eq!(code, 0, "{pushed:?}");
    assert_eq!(with(&pushed, "state", "written").len(), 6, "{pushed:?}");
    for _ in 0..6 {
        let received = consumer.process.row();
        let sha256 = received["sha256"].as_str().unwrap();
        assert_eq!(with(&pushed, "sha256", sha256).len(), 1, "{received}");
    }
    consumer.settled_status();
    end(consumer);
}

#[test]
fn a_consumer_whose_device_has_failed_for_good_says_so_and_ends() {
    let dir = tempfile::tempdir().unwrap();
    let file = file_of(dir.path(), "model.safetensors", 1, 100_000);
    let folder = Folder::with(Some(&library_path()));
    // The first copy brings the item, the second one would read it.
    let consumer = failing_consumer(&folder, "cuMemcpyAsync:2:1000000:700", &[]);
    let (_, pushed) = push(&consumer.control, &[&file], &["--timeout", "5"]);
    assert_eq!(pushed.len(), 1);
    says_that_the_device_has_failed(consumer, "code 700");
}

fn says_that_the_device_has_failed(mut consumer: Consumer, code: &str) {
    assert_eq!(consumer.process.code(), 1, "{}", consumer.process.errors());
    let errors = consumer.process.errors();
    let last = errors
        .lines()
        .find(|line| line.starts_with("ec-connector: "));
    let last = last.expect("it says why it ends");
    assert!(last.contains("cuda:0 has failed: "), "{errors}");
    assert!(last.contains(code), "{errors}");
}

#[test]
fn a_consumer_to_whose_device_nothing_can_be_copied_ends_whether_or_not_it_takes() {
    let dir = tempfile::tempdir().unwrap();
    let file = file_of(dir.path(), "model.safetensors", 1, 100_000);
    let folder = Folder::with(Some(&library_path()));
    for more in [&[][..], &["--no-take"]] {
        let consumer = failing_consumer(&folder, "cuMemcpyAsync:1:1000000:700", more);
        let (code, pushed) = push(&consumer.control, &[&file], &["--timeout", "5"]);
        assert_eq!(code, 1, "{pushed:?}");
        says_that_the_device_has_failed(consumer, "code 700");
    }
}

#[test]
fn a_consumer_whose_idle_device_fails_for_good_ends_whether_or_not_it_takes() {
    let folder = Folder::with(Some(&library_path()));
    for more in [&[][..], &["--no-take"]] {
        let consumer = failing_consumer(&folder, "cuMemGetInfo_v2:2:1000000:700", more);
        says_that_the_device_has_failed(consumer, "cuMemGetInfo_v2 failed: ");
    }
}

#[test]
fn a_consumer_survives_looks_at_its_device_that_fail_for_a_moment() {
    let dir = tempfile::tempdir().unwrap();
    let file = file_of(dir.path(), "model.safetensors", 2, 100_000);
    let folder = Folder::with(Some(&library_path()));
    let mut consumer = failing_consumer(&folder, "cuMemGetInfo_v2:1:2:700", &[]);
    let deadline = Instant::now() + PATIENCE;
    while consumer
        .process
        .errors()
        .matches("a look at the device")
        .count()
        < 2
    {
        assert!(Instant::now() < deadline, "it does not look");
        std::thread::sleep(Duration::from_millis(20));
    }
    let (code, pushed) = push(&consumer.control, &[&file], &[]);
    assert_eq!(code, 0, "{pushed:?}");
    for _ in 0..2 {
        consumer.process.row();
    }
    end(consumer);
}

#[test]
fn a_demo_whose_device_fails_while_it_pushes_sums_up_what_went_well() {
    let folder = Folder::with(Some(&library_path()));
    // The producer's tensors take some 210 copies, which it then sends with as many.
    let fail = [("CUDA_FAKE_FAIL", "cuMemcpyAsync:300:1000000:700")];
    let args = ["demo", "--device", "cuda:0", "--json", "--items", "8"];
    let mut demo = folder.start("immediate", &fail, &args);
    let rows = demo.rows();
    assert_eq!(demo.code(), 1, "{}", demo.errors());
    let [summary] = rows.as_slice() else {
        panic!("one line expected, got {rows:?}")
    };
    assert_eq!(summary["items"], 8);
    assert!(summary["verified"].as_u64().unwrap() < 8, "{summary}");
    let errors = demo.errors();
    assert!(errors.contains("push failed: "), "{errors}");
    assert!(
        errors.contains("the driver failed the copy with code 700"),
        "{errors}"
    );
}

#[test]
fn a_demo_whose_device_fails_ends_and_says_why() {
    let folder = Folder::with(Some(&library_path()));
    let fail = [("CUDA_FAKE_FAIL", "cuMemcpyAsync:1:1000000:700")];
    let mut demo = folder.start("immediate", &fail, &DEMO);
    assert_eq!(demo.rows().len(), 0);
    assert_eq!(demo.code(), 1, "{}", demo.errors());
    let errors = demo.errors();
    assert!(
        errors.contains("cannot copy to cuda:0: the driver failed the copy with code 700"),
        "{errors}"
    );
}
