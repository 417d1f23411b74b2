//! A pipe of ours and one of the old kind: the real engine, pyzmq and safetensors in a process.
#![cfg(feature = "pipe")]

#[path = "peer/process.rs"]
mod process;

mod pipe_support;

use std::time::Duration;

use mooncake_transport::pipe::{
    Broken, Dialect, Dtype, Message, Pipe, PipeOptions, RecvError, Role, SendError, Tensor, Waiting,
};
use pipe_support::{LONG, bytes, config, free_bases, options, recv_broken, send, start, within};
use process::Process;
use serde_json::{Value, json};

struct PeerPipe {
    process: Process,
    _directory: tempfile::TempDir,
}

impl PeerPipe {
    /// Starts the peer on the other side than `ours`, and then ours.
    fn with_ours(ours: Role, change: impl Fn(&mut PipeOptions)) -> (Pipe, Self) {
        let bases = free_bases();
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pipe.json");
        let text = json!({
            "prefill_url": format!("127.0.0.1:{}", bases.0),
            "decode_url": format!("127.0.0.1:{}", bases.1),
            "metadata_server": "P2PHANDSHAKE",
        });
        std::fs::write(&path, text.to_string()).unwrap();
        let variables = [("MOONCAKE_CONFIG_PATH", path.as_os_str())];
        let mut process = Process::start("pipe_peer.py", variables);
        let kv_rank = if ours == Role::Prefill { 1 } else { 0 };
        let started = process.call(json!({"do": "start", "kv_rank": kv_rank}));
        assert_eq!(started["code"], 0, "{started}");
        // With this kind of metadata the real engine listens on a port of its own choice.
        let mut options = options();
        options.peer_session = started["session"].as_str().map(str::to_owned);
        change(&mut options);
        let pipe = start(&config(bases), ours, options);
        let peer = Self {
            process,
            _directory: directory,
        };
        (pipe, peer)
    }

    fn call(&mut self, command: Value) -> Value {
        self.process.call(command)
    }
}

/// Types that the peer's arrays have, and shapes with elements and without.
const TENSORS: [(Dtype, &[u64]); 8] = [
    (Dtype::U8, &[1]),
    (Dtype::U8, &[65_537]),
    (Dtype::F16, &[3, 5]),
    (Dtype::F32, &[2, 3, 4]),
    (Dtype::I64, &[7]),
    (Dtype::F64, &[0, 4]),
    (Dtype::I32, &[1, 1, 1, 2]),
    (Dtype::F32, &[100_000]),
];

fn len_of(dtype: Dtype, shape: &[u64]) -> usize {
    (shape.iter().product::<u64>() * dtype.bits() / 8) as usize
}

// row: P8.1, P8.2, P8.3
#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn an_old_pipe_sends_to_ours_on_either_side() {
    for role in [Role::Prefill, Role::Decode] {
        let (mut pipe, mut peer) = PeerPipe::with_ours(role, |_| {});
        for (seed, (dtype, shape)) in TENSORS.iter().enumerate() {
            peer.call(json!({
                "do": "send", "dtype": dtype.name(), "shape": shape, "seed": seed,
            }));
        }
        peer.call(json!({"do": "send_none"}));
        for (seed, (dtype, shape)) in TENSORS.iter().enumerate() {
            let Message::Tensor(tensor) = pipe.receiver().recv(LONG).unwrap() else {
                panic!("{dtype} {shape:?}: no tensor");
            };
            assert_eq!((tensor.dtype(), tensor.shape()), (*dtype, *shape));
            let expected = bytes(seed as u64, len_of(*dtype, shape));
            assert!(tensor.to_vec().unwrap() == expected, "{dtype} {shape:?}");
        }
        let received = pipe.receiver().recv(LONG).unwrap();
        assert!(matches!(received, Message::NoTensor));
        assert_eq!(pipe.receiver().bytes_in_use(), 0);
        // Every buffer of the peer was answered in the way it knows.
        let answers = peer.call(json!({"do": "flush"}));
        assert_eq!(answers["answers"], json!(vec!["ACK"; TENSORS.len() + 1]));
        pipe.close(LONG).unwrap();
    }
}

// row: P8.1, P8.2, P8.3
#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn an_old_pipe_receives_from_ours_on_either_side() {
    for (role, dialect) in [
        (Role::Prefill, Dialect::Extended),
        (Role::Decode, Dialect::Extended),
        (Role::Prefill, Dialect::Plain),
    ] {
        let (mut pipe, mut peer) = PeerPipe::with_ours(role, |options| options.dialect = dialect);
        for (seed, (dtype, shape)) in TENSORS.iter().enumerate() {
            let tensor = Tensor {
                dtype: *dtype,
                shape,
                bytes: &bytes(seed as u64, len_of(*dtype, shape)),
            };
            pipe.sender().send(tensor, LONG).unwrap();
        }
        pipe.sender().send_none(LONG).unwrap();
        for (seed, (dtype, shape)) in TENSORS.iter().enumerate() {
            let received = peer.call(json!({"do": "recv", "seed": seed}));
            let expected = json!({
                "none": false, "dtype": dtype.name(), "shape": shape, "equal": true,
            });
            assert_eq!(received, expected);
        }
        assert_eq!(peer.call(json!({"do": "recv"})), json!({"none": true}));
        pipe.sender().flush(LONG).unwrap();
        assert_eq!(pipe.sender().bytes_in_use(), 0);
        pipe.close(LONG).unwrap();
    }
}

// row: P8.1, P8.3
#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn tensors_go_back_and_forth_between_an_old_pipe_and_ours() {
    let (mut pipe, mut peer) = PeerPipe::with_ours(Role::Prefill, |_| {});
    let count = 30;
    peer.process
        .begin(&json!({"do": "serve", "count": count, "echo": true}))
        .unwrap();
    for seed in 0..count {
        let len = 10_000 + seed as usize;
        send(&mut pipe, seed, len).unwrap();
        pipe_support::assert_receives(&mut pipe, seed, len);
    }
    peer.process.finish().unwrap();
    pipe.close(LONG).unwrap();
}

// row: P7.7, P8.4
#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn a_killed_peer_is_an_error_in_time_and_the_buffers_come_back() {
    let (mut pipe, mut peer) = PeerPipe::with_ours(Role::Decode, |_| {});
    peer.call(json!({"do": "send", "dtype": "U8", "shape": [100_000], "seed": 1}));
    pipe_support::assert_receives(&mut pipe, 1, 100_000);
    send(&mut pipe, 2, 100_000).unwrap();
    // One that is announced and not read when the peer dies.
    peer.call(json!({"do": "send", "dtype": "U8", "shape": [100_000], "seed": 3}));
    std::thread::sleep(Duration::from_millis(300));
    peer.process.kill();
    within(LONG, || {
        let why = recv_broken(&mut pipe);
        assert!(matches!(why, Broken::Read(_) | Broken::PeerGone), "{why}");
        let refused = pipe.sender().flush(LONG);
        assert_eq!(refused, Err(SendError::Broken(Broken::PeerGone)));
    });
    assert_eq!(pipe.receiver().bytes_in_use(), 0);
    within(Duration::from_secs(5), || drop(pipe));
}

/// Long enough to be interrupted.
const LARGE: u64 = 64 << 20;

/// Lets the peer send a large tensor and returns while its bytes are on their way.
fn begin_to_receive(pipe: &mut Pipe, peer: &mut PeerPipe) {
    peer.call(json!({"do": "send_zeros", "length": LARGE}));
    let begin = std::time::Instant::now();
    loop {
        match pipe.receiver().recv(Duration::from_millis(1)) {
            Err(RecvError::TimedOut(Waiting::Bytes)) => return,
            Err(RecvError::TimedOut(_)) => assert!(begin.elapsed() < LONG),
            other => panic!("too late: {other:?}"),
        }
    }
}

// row: P7.7, P8.4
#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn a_peer_killed_while_its_tensor_is_read_is_an_error_in_time() {
    let (mut pipe, mut peer) =
        PeerPipe::with_ours(Role::Prefill, |options| options.receive_bytes = 80 << 20);
    begin_to_receive(&mut pipe, &mut peer);
    peer.process.kill();
    let why = within(LONG, || recv_broken(&mut pipe));
    assert!(matches!(why, Broken::Read(_) | Broken::PeerGone), "{why}");
    assert_eq!(pipe.receiver().bytes_in_use(), 0);
    within(Duration::from_secs(5), || drop(pipe));
}

// row: P7.7, P8.4
#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn a_peer_stopped_while_its_tensor_is_read_is_an_error_in_time() {
    let (mut pipe, mut peer) = PeerPipe::with_ours(Role::Decode, |options| {
        options.receive_bytes = 80 << 20;
        options.read_timeout = Duration::from_secs(1);
    });
    begin_to_receive(&mut pipe, &mut peer);
    let stop = std::process::Command::new("kill")
        .args(["-STOP", &peer.process.id().to_string()])
        .status();
    assert!(stop.unwrap().success());
    let why = within(LONG, || recv_broken(&mut pipe));
    assert_eq!(why, Broken::ReadTimeout { timeout_ms: 1_000 });
    // Neither the answer that nobody takes nor the read that does not end hold up the close.
    within(Duration::from_secs(5), || drop(pipe));
}

// row: P7.7, P7.9, P8.4
#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn a_peer_killed_while_it_reads_from_us_is_an_error_in_time() {
    let (mut pipe, mut peer) =
        PeerPipe::with_ours(Role::Prefill, |options| options.send_bytes = 80 << 20);
    let data = vec![0; LARGE as usize];
    let tensor = Tensor {
        dtype: Dtype::U8,
        shape: &[LARGE],
        bytes: &data,
    };
    peer.process
        .begin(&json!({"do": "serve", "count": 1, "echo": false}))
        .unwrap();
    pipe.sender().send(tensor, LONG).unwrap();
    // It takes ten times as long to read.
    std::thread::sleep(Duration::from_millis(3));
    peer.process.kill();
    let refused = within(LONG, || pipe.sender().flush(LONG));
    assert_eq!(refused, Err(SendError::Broken(Broken::PeerGone)));
    within(Duration::from_secs(5), || drop(pipe));
}

// row: P7.9, P7.10
#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn an_old_pipe_that_never_receives_holds_up_neither_send_nor_close_for_ever() {
    let (mut pipe, _peer) = PeerPipe::with_ours(Role::Prefill, |_| {});
    send(&mut pipe, 0, 300_000).unwrap();
    let tensor = Tensor {
        dtype: Dtype::U8,
        shape: &[300_000],
        bytes: &bytes(1, 300_000),
    };
    let wait = Duration::from_millis(200);
    let refused = loop {
        if let Err(error) = pipe.sender().send(tensor, wait) {
            break error;
        }
    };
    assert_eq!(refused, SendError::TimedOut(Waiting::Room));
    within(Duration::from_secs(5), || pipe.close(wait)).unwrap_err();
}

// row: P7.3
#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn an_old_pipe_is_not_left_waiting_for_the_answer_to_what_we_cannot_take() {
    let (mut pipe, mut peer) = PeerPipe::with_ours(Role::Decode, |_| {});
    let len = 2 << 20;
    peer.call(json!({"do": "send", "dtype": "U8", "shape": [len], "seed": 1}));
    let why = recv_broken(&mut pipe);
    assert!(matches!(why, Broken::TooLong { len: l, .. } if l > len));
    // It logs the word and frees its buffer.
    let answers = peer.call(json!({"do": "flush"}));
    assert_eq!(answers["answers"], json!(["NAK"]));
}
