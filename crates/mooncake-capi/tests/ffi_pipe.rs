//! The tensor pipe over the C interface, with the native engine or another one like it on the other side.
//!
//! `EC_TEST_MOONCAKE_LIBRARY` names another library to be tried instead.

#[path = "program/program.rs"]
mod program;

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use mooncake_transport::ffi::{FfiConfig, FfiEngine, FfiLibrary};
use mooncake_transport::pipe::{
    Dtype, Message, Pipe, PipeConfig, PipeOptions, Role, StartError, Tensor,
};
use mooncake_transport::tcp::{TcpConfig, TcpEngine};
use mooncake_transport::{Engine, EngineError};

const LIMIT: Duration = Duration::from_secs(60);

fn ffi_engine(change: impl FnOnce(&mut FfiConfig)) -> Arc<FfiEngine> {
    let file = std::env::var_os("EC_TEST_MOONCAKE_LIBRARY").map_or_else(
        || program::library_dir().join("libtransfer_engine.so"),
        Into::into,
    );
    // SAFETY: our own library, or one that whoever runs the test vouches for.
    let library = unsafe { FfiLibrary::open(file) }.expect("the library loads");
    let mut config = FfiConfig::new("127.0.0.1");
    change(&mut config);
    Arc::new(FfiEngine::start(&library, config).expect("an engine"))
}

/// An engine that a pipe can read from: the library does not tell reading from writing.
fn readable() -> Arc<FfiEngine> {
    ffi_engine(|config| config.danger_remote_read_lets_write = true)
}

fn native() -> Arc<TcpEngine> {
    Arc::new(TcpEngine::start(TcpConfig::default()).unwrap())
}

/// Ports that are free now, for one pair of pipes.
fn config() -> PipeConfig {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let is_free = |port: u16| TcpListener::bind(("127.0.0.1", port)).is_ok();
    // The tests of this process look in different places, those of another one probably too.
    let first = 13_000 + (std::process::id() % 10) as u16 * 300;
    let first = first + NEXT.fetch_add(1, Ordering::Relaxed) * 60;
    let mut bases = (first..first + 2_000)
        .step_by(13)
        .filter(|base| [0, 9, 10].iter().all(|offset| is_free(base + offset)));
    let (prefill, decode) = (bases.next().unwrap(), bases.next().unwrap());
    let text = format!(
        r#"{{"prefill_url":"127.0.0.1:{prefill}","decode_url":"127.0.0.1:{decode}","metadata_server":"P2PHANDSHAKE"}}"#
    );
    PipeConfig::from_json(text.as_bytes()).unwrap()
}

fn options() -> PipeOptions {
    let mut options = PipeOptions::default();
    options.send_bytes = 4 << 20;
    options.receive_bytes = 4 << 20;
    options
}

fn bytes(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64)
        .map(|at| (at.wrapping_mul(seed * 2 + 1) >> 5) as u8 ^ seed as u8)
        .collect()
}

fn both_ways(one: Arc<dyn Engine>, other: Arc<dyn Engine>) {
    let config = config();
    let start =
        |role, engine| Pipe::with_engine(&config, role, 0, options(), engine).expect("a pipe");
    let mut prefill = start(Role::Prefill, one);
    let mut decode = start(Role::Decode, other);
    for (seed, len) in [(1, 1), (2, 4_097), (3, 1 << 20), (4, 0)] {
        let content = bytes(seed, len);
        let tensor = Tensor {
            dtype: Dtype::U8,
            shape: &[len as u64],
            bytes: &content,
        };
        prefill.sender().send(tensor, LIMIT).unwrap();
        decode.sender().send(tensor, LIMIT).unwrap();
        for side in [&mut decode, &mut prefill] {
            let Message::Tensor(received) = side.receiver().recv(LIMIT).unwrap() else {
                panic!("no tensor");
            };
            assert_eq!(received.shape(), [len as u64]);
            assert!(received.to_vec().unwrap() == content, "the bytes differ");
        }
    }
    prefill.sender().flush(LIMIT).unwrap();
    decode.sender().flush(LIMIT).unwrap();
    assert_eq!(prefill.receiver().bytes_in_use(), 0);
    assert_eq!(decode.receiver().bytes_in_use(), 0);
    prefill.close(LIMIT).unwrap();
    decode.close(LIMIT).unwrap();
}

#[test]
fn tensors_go_both_ways_between_the_c_interface_and_the_native_engine() {
    both_ways(readable(), native());
    both_ways(native(), readable());
}

#[test]
fn tensors_go_both_ways_between_two_engines_behind_the_c_interface() {
    both_ways(readable(), readable());
}

#[test]
fn a_pipe_does_not_start_over_an_engine_that_cannot_let_peers_read_alone() {
    let error = Pipe::with_engine(&config(), Role::Prefill, 0, options(), ffi_engine(|_| {}));
    assert!(
        matches!(
            error,
            Err(StartError::Engine(EngineError::Unsupported { .. }))
        ),
        "{error:?}"
    );
}
