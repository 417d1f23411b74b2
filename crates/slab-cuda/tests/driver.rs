//! Loading the driver, with what can be wrong about it, and what a device says of itself.

mod fake;

use std::path::Path;
use std::process::Command;

use cuda_fake::library_path;
use fake::Fake;
use slab_cuda::{CudaError, DeviceSlab, Driver, Unavailable};

/// Set for the process that only loads the driver.
const CHILD: &str = "SLAB_CUDA_TEST_CHILD";
/// The test that does so then.
const CHILD_TEST: &str = "the_driver_is_found_by_the_name_that_cudarc_looks_for";

/// What a process of its own says that finds `library` as the driver. Both of the driver's names are taken, so that no
/// driver of this machine is found instead.
fn load_with(library: &Path, variables: &[(&str, &str)]) -> String {
    let name = std::thread::current().name().unwrap_or("none").to_owned();
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("driver-{name}"));
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).unwrap();
    for name in ["libcuda.so", "libcuda.so.1"] {
        std::os::unix::fs::symlink(library, dir.join(name)).unwrap();
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", CHILD_TEST, "--nocapture"])
        .env("LD_LIBRARY_PATH", &dir)
        .env(CHILD, "1")
        .envs(variables.iter().copied())
        .output()
        .expect("this program starts again");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{said}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let line = said.lines().find_map(|line| line.split_once("loaded: "));
    line.expect("the process says how it went").1.to_owned()
}

/// What the process that [`load_with`] starts does.
fn load_and_say_so() {
    let text = match Driver::load() {
        Ok(driver) => format!("version {} from {}", driver.version(), driver.library()),
        Err(CudaError::Unavailable(why)) => {
            let kind = match why {
                Unavailable::NoLibrary { .. } => "no library",
                Unavailable::MissingSymbol { .. } => "missing symbol",
                Unavailable::InitFailed { .. } => "init failed",
                Unavailable::TooOld { .. } => "too old",
                _ => "other",
            };
            format!("{kind}: {why}")
        }
        Err(other) => format!("unexpected: {other}"),
    };
    println!("loaded: {text}");
}

#[test]
fn the_driver_is_found_by_the_name_that_cudarc_looks_for() {
    if std::env::var_os(CHILD).is_some() {
        return load_and_say_so();
    }
    assert_eq!(
        load_with(&library_path(), &[]),
        "version 13000 from libcuda.so"
    );
}

#[test]
fn without_a_library_the_error_says_so_and_what_to_do() {
    // The loader takes the first file of a name, whatever it is: so there is none even on a machine with a driver.
    let text = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
    let said = load_with(&text, &[]);
    let expected = "no library: no CUDA driver: libcuda.so cannot be loaded (";
    assert!(said.starts_with(expected), "{said}");
    assert!(said.contains("install the NVIDIA driver"), "{said}");
    // What the loader says of the driver's own name.
    assert!(said.contains("libcuda.so.1: "), "{said}");
}

#[test]
fn a_library_without_the_functions_is_told_by_the_first_that_it_lacks() {
    // Any library will do: the C library is one that is there.
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let libc = maps
        .lines()
        .filter_map(|line| line.split_whitespace().last())
        .find(|path| path.contains("/libc.so") || path.contains("/libc-"))
        .expect("the process has a C library");
    let said = load_with(Path::new(libc), &[]);
    assert_eq!(
        said,
        "missing symbol: libcuda.so lacks cuInit: it is not a CUDA driver, or too old a one; take its folder \
         from LD_LIBRARY_PATH, or update the driver"
    );
}

#[test]
fn a_driver_that_does_not_start_is_told_by_the_drivers_code() {
    for (code, said) in [
        (
            "999",
            "CUDA_ERROR_UNKNOWN (999); is the driver's kernel module loaded, and may this user open /dev/nvidia*?",
        ),
        (
            "100",
            "CUDA_ERROR_NO_DEVICE (100); there is no GPU, or CUDA_VISIBLE_DEVICES hides it",
        ),
        (
            "34",
            "CUDA_ERROR_STUB_LIBRARY (34); it is the stub of CUDA's toolkit: take its folder from LD_LIBRARY_PATH",
        ),
        // The fake has no name for this one, as a stub need not have any.
        (
            "803",
            "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803); the library and the kernel module are of two versions: restart \
             after an update of the driver",
        ),
        // One for which nothing can be done, and one that neither this driver nor a list of ours has a name for.
        ("2", "CUDA_ERROR_OUT_OF_MEMORY (2)"),
        ("4711", "unknown code (4711)"),
    ] {
        let found = load_with(&library_path(), &[("CUDA_FAKE_INIT", code)]);
        assert_eq!(
            found,
            format!("init failed: libcuda.so does not start: {said}")
        );
    }
}

#[test]
fn a_driver_that_is_too_old_is_told_by_its_version() {
    let old = [("CUDA_FAKE_DRIVER_VERSION", "11030")];
    assert_eq!(
        load_with(&library_path(), &old),
        "too old: libcuda.so supports CUDA 11.3, at least 11.4 is needed; update the driver"
    );
    let oldest = [("CUDA_FAKE_DRIVER_VERSION", "11040")];
    assert_eq!(
        load_with(&library_path(), &oldest),
        "version 11040 from libcuda.so"
    );
}

#[test]
fn devices_are_listed_and_those_that_are_not_there_refused() {
    let fake = Fake::manual();
    let driver = fake.driver();
    let devices = driver.devices().unwrap();
    assert_eq!(devices.len(), 2);
    assert_eq!(devices[1].ordinal, 1);
    assert_eq!(devices[1].name, "fake device 1");
    assert_eq!(devices[1].memory_bytes, 1 << 30);
    let error = driver.device(2).unwrap_err();
    assert_eq!(
        error,
        CudaError::NoSuchDevice {
            ordinal: 2,
            count: 2
        }
    );
    assert_eq!(
        error.to_string(),
        "there is no device 2, the driver knows 2"
    );
    assert_eq!(driver.device(1).unwrap().location(), "cuda:1");
}

#[test]
fn memory_in_use_is_what_was_allocated() {
    let fake = Fake::manual();
    let device = fake.device();
    let before = device.memory_use().unwrap();
    let slab = DeviceSlab::new(&device, 1 << 20).unwrap();
    let after = device.memory_use().unwrap();
    assert_eq!(after.total_bytes, before.total_bytes);
    assert_eq!(before.free_bytes - after.free_bytes, 1 << 20);
    drop(slab);
    assert_eq!(device.memory_use().unwrap(), before);
}

#[test]
fn errors_of_the_driver_carry_the_call_and_its_name() {
    let fake = Fake::manual();
    let driver = fake.driver();
    fake.inject(c"cuDeviceGetCount", 1, 999);
    let error = driver.devices().unwrap_err();
    assert_eq!(
        error.to_string(),
        "cuDeviceGetCount failed: CUDA_ERROR_UNKNOWN (999)"
    );
    // A code of a later driver is a number like any other.
    fake.inject(c"cuDevicePrimaryCtxRetain", 1, 1_000_000);
    let CudaError::Driver { call, code } = driver.device(0).unwrap_err() else {
        panic!("the driver refused");
    };
    assert_eq!(
        (call, code.number()),
        ("cuDevicePrimaryCtxRetain", 1_000_000)
    );
    assert_eq!(code.name(), "unknown code");
}

#[test]
fn batched_copies_are_there_from_the_version_that_has_them() {
    let fake = Fake::manual();
    for (version, has) in [
        (12_070, false),
        (12_080, true),
        (12_090, true),
        (13_000, true),
    ] {
        fake.set_version(version);
        assert_eq!(fake.driver().has_batched_copies(), has, "{version}");
    }
    // A driver that does not answer goes without.
    fake.inject(c"cuGetProcAddress_v2", 1, 801);
    assert!(!fake.driver().has_batched_copies());
}
