//! Two pipes of ours against each other.
#![cfg(feature = "pipe")]

mod pipe_support;

use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mooncake_transport::metadata::StoreAddressError;
use mooncake_transport::pipe::{
    Broken, ConfigError, Dtype, Message, Pipe, PipeConfig, RecvError, Role, SendError, StartError,
    Tensor, Waiting,
};
use mooncake_transport::tcp::{TcpConfig, TcpEngine};
use mooncake_transport::{Engine, EngineError};
use pipe_support::{
    LONG, assert_receives, bytes, config, free_bases, options, pair, pair_with, recv_broken, send,
    send_broken, start, within,
};
use serde_json::json;

const SHORT: Duration = Duration::from_millis(50);

// row: P8.1, P8.2
#[test]
fn tensors_arrive_in_order_in_both_directions_and_leave_no_buffer() {
    let (mut prefill, mut decode) = pair();
    for seed in 0..20 {
        send(&mut prefill, seed, 1_000 + seed as usize).unwrap();
        send(&mut decode, seed + 100, 2_000 + seed as usize).unwrap();
    }
    for seed in 0..20 {
        assert_receives(&mut decode, seed, 1_000 + seed as usize);
        assert_receives(&mut prefill, seed + 100, 2_000 + seed as usize);
    }
    for pipe in [&mut prefill, &mut decode] {
        pipe.sender().flush(LONG).unwrap();
        assert_eq!(pipe.sender().outstanding(), 0);
        assert_eq!(pipe.sender().bytes_in_use(), 0);
        assert_eq!(pipe.receiver().bytes_in_use(), 0);
    }
    prefill.close(LONG).unwrap();
    decode.close(LONG).unwrap();
}

// row: P4.4, P8.1
#[test]
fn no_tensor_takes_the_place_of_one() {
    let (mut prefill, mut decode) = pair();
    send(&mut prefill, 1, 10).unwrap();
    prefill.sender().send_none(LONG).unwrap();
    send(&mut prefill, 2, 10).unwrap();
    assert_receives(&mut decode, 1, 10);
    assert!(matches!(
        decode.receiver().recv(LONG).unwrap(),
        Message::NoTensor
    ));
    assert_receives(&mut decode, 2, 10);
}

// row: P7.5
#[test]
fn a_tensor_like_no_tensor_is_refused_until_the_peer_is_known_to_tell_them_apart() {
    let (mut prefill, mut decode) = pair();
    let value = -150_886_311_i64;
    let wide = value.to_le_bytes();
    let narrow = (value as i32).to_le_bytes();
    let float = (value as f64).to_le_bytes();
    let cases: [(Dtype, &[u64], &[u8]); 4] = [
        (Dtype::I64, &[1], &wide),
        (Dtype::I64, &[1, 1], &wide),
        (Dtype::I32, &[1], &narrow),
        (Dtype::F64, &[1], &float),
    ];
    for (dtype, shape, bytes) in cases {
        let tensor = Tensor {
            dtype,
            shape,
            bytes,
        };
        let refused = prefill.sender().send(tensor, LONG);
        assert_eq!(refused, Err(SendError::LooksLikeNone { dtype }));
    }
    send(&mut prefill, 1, 10).unwrap();
    assert_receives(&mut decode, 1, 10);
    prefill.sender().flush(LONG).unwrap();
    for (dtype, shape, bytes) in cases {
        let tensor = Tensor {
            dtype,
            shape,
            bytes,
        };
        prefill.sender().send(tensor, LONG).unwrap();
        let Message::Tensor(received) = decode.receiver().recv(LONG).unwrap() else {
            panic!("{dtype} {shape:?} was taken for no tensor");
        };
        assert_eq!((received.dtype(), received.shape()), (dtype, shape));
        assert_eq!(received.to_vec().unwrap(), bytes);
    }
}

// row: P7.6
#[test]
fn a_tensor_without_dimensions_is_refused_until_the_peer_is_known_to_take_it() {
    let (mut prefill, mut decode) = pair();
    let tensor = Tensor {
        dtype: Dtype::F32,
        shape: &[],
        bytes: &[1, 2, 3, 4],
    };
    let refused = prefill.sender().send(tensor, LONG);
    assert_eq!(refused, Err(SendError::NoDimensions));
    // That the peer is of our kind shows in its own tensors as well.
    send(&mut decode, 1, 10).unwrap();
    assert_receives(&mut prefill, 1, 10);
    prefill.sender().send(tensor, LONG).unwrap();
    let Message::Tensor(received) = decode.receiver().recv(LONG).unwrap() else {
        panic!("no tensor");
    };
    assert!(received.shape().is_empty());
    assert_eq!(received.to_vec().unwrap(), [1, 2, 3, 4]);
}

// row: P7.4
#[test]
fn what_cannot_be_sent_is_said_at_once_and_the_pipe_goes_on() {
    let (mut prefill, mut decode) = pair();
    let mut refused = |shape: &[u64], len: usize| {
        let tensor = Tensor {
            dtype: Dtype::F16,
            shape,
            bytes: &vec![0; len],
        };
        prefill.sender().send(tensor, LONG).unwrap_err()
    };
    // Fewer or more bytes than the shape says: a tensor with gaps cannot be said.
    assert_eq!(refused(&[3], 5), SendError::Length { len: 5, need: 6 });
    assert_eq!(refused(&[3], 8), SendError::Length { len: 8, need: 6 });
    assert!(matches!(refused(&[u64::MAX], 2), SendError::Tensor(_)));
    assert!(matches!(refused(&[1; 65], 2), SendError::Tensor(_)));
    let too_large = refused(&[1 << 19], 1 << 20);
    assert!(
        matches!(too_large, SendError::TooLarge { len, max } if len > max),
        "{too_large}"
    );
    assert_eq!(prefill.sender().bytes_in_use(), 0);
    send(&mut prefill, 1, 10).unwrap();
    assert_receives(&mut decode, 1, 10);
    prefill.close(LONG).unwrap();
}

// row: P7.4, P7.7
#[test]
fn without_a_peer_a_send_ends_in_time_and_can_be_made_again() {
    let config = config(free_bases());
    let mut prefill = start(&config, Role::Prefill, options());
    let tensor = Tensor {
        dtype: Dtype::U8,
        shape: &[10],
        bytes: &bytes(1, 10),
    };
    let refused = within(LONG, || prefill.sender().send(tensor, SHORT));
    assert_eq!(refused, Err(SendError::TimedOut(Waiting::Peer)));
    assert_eq!(prefill.sender().bytes_in_use(), 0);
    let refused = within(LONG, || prefill.receiver().recv(SHORT).map(drop));
    assert_eq!(refused, Err(RecvError::TimedOut(Waiting::Tensor)));
    let mut decode = start(&config, Role::Decode, options());
    prefill.sender().send(tensor, LONG).unwrap();
    assert_receives(&mut decode, 1, 10);
    within(LONG, || prefill.close(LONG)).unwrap();
}

// row: P7.8
#[test]
fn both_sides_may_wait_for_a_tensor_before_they_send_one() {
    let (prefill, decode) = pair();
    let halves = [prefill.split(), decode.split()];
    std::thread::scope(|scope| {
        for (mut sender, mut receiver) in halves {
            let waits = scope.spawn(move || {
                let received = receiver.recv(LONG).unwrap();
                assert!(matches!(received, Message::Tensor(tensor) if tensor.len() == 10));
                receiver
            });
            scope.spawn(move || {
                // The other thread waits by now, and does not hold up this one.
                std::thread::sleep(SHORT);
                let tensor = Tensor {
                    dtype: Dtype::U8,
                    shape: &[10],
                    bytes: &[0; 10],
                };
                sender.send(tensor, LONG).unwrap();
                sender.close(LONG).unwrap();
                drop(waits.join().unwrap());
            });
        }
    });
}

// row: P7.9
#[test]
fn closing_does_not_wait_for_a_peer_that_takes_nothing() {
    let (mut prefill, decode) = pair();
    for seed in 0..100 {
        send(&mut prefill, seed, 100).unwrap();
    }
    let begin = Instant::now();
    let closed = prefill.close(SHORT);
    assert_eq!(closed, Err(SendError::TimedOut(Waiting::Answers)));
    drop(decode);
    // Two lingering closes of 300 ms at most, and the engines' own.
    assert!(
        begin.elapsed() < Duration::from_secs(5),
        "{:?}",
        begin.elapsed()
    );
}

// row: P7.9
#[test]
fn a_last_tensor_and_its_answer_survive_an_immediate_close() {
    let (mut prefill, mut decode) = pair();
    send(&mut prefill, 5, 100_000).unwrap();
    let receiving = std::thread::spawn(move || {
        assert_receives(&mut decode, 5, 100_000);
        // The answer may still be in the library's hands.
        drop(decode);
    });
    prefill.close(LONG).unwrap();
    receiving.join().unwrap();
}

// row: P7.10
#[test]
fn a_slow_receiver_makes_the_sender_wait_within_its_bounds() {
    let (mut prefill, mut decode) = pair();
    send(&mut prefill, 0, 100_000).unwrap();
    let mut sent = 1;
    let refused = loop {
        let tensor = Tensor {
            dtype: Dtype::U8,
            shape: &[100_000],
            bytes: &bytes(sent, 100_000),
        };
        match prefill.sender().send(tensor, SHORT) {
            Ok(()) => sent += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(refused, SendError::TimedOut(Waiting::Room));
    assert_eq!(sent, 10, "a mebibyte holds ten images of this size");
    assert_receives(&mut decode, 0, 100_000);
    send(&mut prefill, sent, 100_000).unwrap();
    for seed in 1..=sent {
        assert_receives(&mut decode, seed, 100_000);
    }
    prefill.close(LONG).unwrap();
}

// row: P7.10
#[test]
fn the_number_of_unanswered_tensors_is_bounded_too() {
    let (mut prefill, mut decode) = pair_with(|options| options.outstanding_max = 2);
    send(&mut prefill, 0, 1).unwrap();
    send(&mut prefill, 1, 1).unwrap();
    let refused = prefill.sender().send_none(SHORT);
    assert_eq!(refused, Err(SendError::TimedOut(Waiting::Room)));
    assert_receives(&mut decode, 0, 1);
    prefill.sender().send_none(LONG).unwrap();
}

// row: P7.10
#[test]
fn received_tensors_that_are_kept_hold_up_the_next_and_lose_nothing() {
    let (mut prefill, mut decode) = pair();
    let len = 600_000;
    send(&mut prefill, 1, len).unwrap();
    let kept = decode.receiver().recv(LONG).unwrap();
    send(&mut prefill, 2, len).unwrap();
    for _ in 0..2 {
        let refused = decode.receiver().recv(SHORT).map(drop);
        assert_eq!(refused, Err(RecvError::TimedOut(Waiting::Room)));
    }
    let Message::Tensor(kept) = kept else {
        panic!("no tensor");
    };
    assert!(kept.to_vec().unwrap() == bytes(1, len));
    drop(kept);
    assert_receives(&mut decode, 2, len);
}

// row: P7.13
#[test]
fn ports_that_meet_are_refused_before_anything_is_opened() {
    let config = config((20_000, 20_009));
    let refused = Pipe::start(&config, Role::Prefill, 0, options()).unwrap_err();
    assert!(
        matches!(
            refused,
            StartError::Config(ConfigError::PortOverlap { port: 20_009, .. })
        ),
        "{refused}"
    );
    // The last rank that has room is 8; ports of all lower ranks are checked with it.
    let config = pipe_support::config((20_000, 20_005));
    for (rank, ranks) in [(2, 1), (0, 3)] {
        let mut options = options();
        options.ranks = ranks;
        let refused = Pipe::start(&config, Role::Decode, rank, options).unwrap_err();
        assert!(matches!(refused, StartError::Config(_)), "{refused}");
    }
}

// row: P7.14
#[test]
fn an_engine_that_does_not_start_is_an_error() {
    let bases = free_bases();
    let _taken = TcpListener::bind(("127.0.0.1", bases.0)).unwrap();
    let refused = Pipe::start(&config(bases), Role::Prefill, 0, options()).unwrap_err();
    assert!(
        matches!(refused, StartError::Engine(EngineError::Bind { .. })),
        "{refused}"
    );
    // Neither does one that nobody could read from.
    let mut initiator = TcpConfig::default();
    initiator.listen = false;
    let engine: Arc<dyn Engine> = Arc::new(TcpEngine::start(initiator).unwrap());
    let refused = Pipe::with_engine(&config(bases), Role::Prefill, 0, options(), engine);
    assert!(matches!(
        refused,
        Err(StartError::Engine(EngineError::NotListening))
    ));
}

// row: P7.14
#[test]
fn a_port_in_use_is_named() {
    let bases = free_bases();
    for offset in [9, 10] {
        let port = bases.1 + offset;
        let _taken = TcpListener::bind(("127.0.0.1", port)).unwrap();
        let refused = Pipe::start(&config(bases), Role::Decode, 0, options()).unwrap_err();
        let StartError::Socket { endpoint, .. } = refused else {
            panic!("{refused}");
        };
        assert_eq!(endpoint, format!("tcp://127.0.0.1:{port}"));
    }
}

// row: P1.2
#[test]
fn what_the_native_engine_lacks_is_named() {
    let start = |key: &str, value: &str| {
        let mut text = json!({
            "prefill_url": "127.0.0.1:20000", "decode_url": "127.0.0.1:20100",
            "metadata_server": "P2PHANDSHAKE",
        });
        text[key] = json!(value);
        let config = PipeConfig::from_json(text.to_string().as_bytes()).unwrap();
        Pipe::start(&config, Role::Prefill, 0, options()).unwrap_err()
    };
    let refused = start("protocol", "rdma");
    assert!(matches!(&refused, StartError::Protocol { protocol } if protocol == "rdma"));
    let refused = start("metadata_server", "zookeeper://127.0.0.1:2181");
    let scheme = "zookeeper".to_owned();
    assert!(matches!(
        refused,
        StartError::Metadata(StoreAddressError::UnknownScheme { scheme: s }) if s == scheme
    ));
}

// row: P7.17
#[test]
fn a_received_tensor_stays_where_it_was_read_to() {
    let (mut prefill, mut decode) = pair();
    send(&mut prefill, 9, 50_000).unwrap();
    let Message::Tensor(tensor) = decode.receiver().recv(LONG).unwrap() else {
        panic!("no tensor");
    };
    // The range is in the receiver's own slab, and the bytes are there.
    let range = tensor.range();
    assert_eq!(range.end - range.start, 50_000);
    let mut found = vec![0; 50_000];
    tensor.slab().copy_out(range.start, &mut found).unwrap();
    assert!(found == bytes(9, 50_000));
    assert!(tensor.copy_out(49_999, &mut [0; 2]).is_err());
    assert!(tensor.copy_out(u64::MAX, &mut [0; 2]).is_err());
    // Exactly its image is in use, until it is dropped, after the pipe's own end too.
    let in_use = decode.receiver().bytes_in_use();
    assert!((50_000..52_000).contains(&in_use), "{in_use}");
    let slab = Arc::clone(tensor.slab());
    drop(decode);
    tensor.slab().copy_out(range.start, &mut found).unwrap();
    assert!(found == bytes(9, 50_000));
    drop(tensor);
    assert_eq!(Arc::strong_count(&slab), 1);
}

// row: P7.7
#[test]
fn a_peer_that_leaves_is_noticed_by_both_directions() {
    let (mut prefill, mut decode) = pair();
    send(&mut prefill, 1, 10).unwrap();
    assert_receives(&mut decode, 1, 10);
    send(&mut decode, 2, 10).unwrap();
    assert_receives(&mut prefill, 2, 10);
    // Announced, and never fetched.
    send(&mut prefill, 3, 10).unwrap();
    drop(decode);
    within(LONG, || {
        assert_eq!(recv_broken(&mut prefill), Broken::PeerGone);
        assert_eq!(send_broken(&mut prefill), Broken::PeerGone);
    });
    assert!(prefill.sender().bytes_in_use() > 0, "it may still be read");
    within(LONG, || prefill.close(LONG)).unwrap_err();
}

// row: P7.7
#[test]
fn what_was_announced_and_is_gone_with_the_peer_is_an_error() {
    let (mut prefill, mut decode) = pair();
    send(&mut prefill, 1, 10).unwrap();
    assert_receives(&mut decode, 1, 10);
    send(&mut prefill, 2, 10).unwrap();
    // The notice is at the receiver before the sender goes.
    std::thread::sleep(Duration::from_millis(200));
    drop(prefill);
    let why = within(LONG, || recv_broken(&mut decode));
    assert!(matches!(why, Broken::Read(_) | Broken::PeerGone), "{why}");
    assert_eq!(decode.receiver().bytes_in_use(), 0);
}

// row: P7.16
#[test]
fn a_peer_that_came_back_is_not_taken_for_the_old_one() {
    let config = config(free_bases());
    let mut prefill = start(&config, Role::Prefill, options());
    let mut decode = start(&config, Role::Decode, options());
    send(&mut decode, 1, 10).unwrap();
    assert_receives(&mut prefill, 1, 10);
    send(&mut prefill, 2, 10).unwrap();
    drop(decode);
    let decode = start(&config, Role::Decode, options());
    // Its connections are made again by themselves; the pipe does not go on over them.
    let why = recv_broken(&mut prefill);
    assert!(
        matches!(why, Broken::PeerGone | Broken::PeerRestarted),
        "{why}"
    );
    let why = send_broken(&mut prefill);
    assert!(
        matches!(why, Broken::PeerGone | Broken::PeerRestarted),
        "{why}"
    );
    drop((prefill, decode));
    // Two new ones do, with other memory under the same names.
    let mut prefill = start(&config, Role::Prefill, options());
    let mut decode = start(&config, Role::Decode, options());
    send(&mut prefill, 3, 1_000).unwrap();
    assert_receives(&mut decode, 3, 1_000);
}

// row: P7.7
#[test]
fn dropping_a_pipe_gives_its_memory_and_ports_back() {
    let config = config(free_bases());
    for round in 0..3 {
        let mut prefill = start(&config, Role::Prefill, options());
        let mut decode = start(&config, Role::Decode, options());
        send(&mut prefill, round, 1_000).unwrap();
        assert_receives(&mut decode, round, 1_000);
        send(&mut prefill, round, 1_000).unwrap();
        within(LONG, || drop((prefill, decode)));
    }
}
