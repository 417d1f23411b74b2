//! A pipe of ours and one of the old kind, whose connections a proxy breaks at random.
//!
//! The old kind waits for ever where something is lost. Ours ends every call in its time, tells the truth
//! of what has arrived, and closes.
#![cfg(feature = "pipe")]

mod fault_support;
#[path = "peer/process.rs"]
mod process;

mod pipe_support;

use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use fault_support::plan::{Happened, Profile};
use fault_support::proxy::{EngineProxy, Proxy, leads_to, listeners};
use fault_support::{Open, Random, alone, are_usual_seeds, seeds};
use mooncake_transport::pipe::{
    Dtype, Message, Pipe, PipeConfig, RecvError, Role, SendError, Tensor,
};
use mooncake_transport::tcp::{TcpConfig, TcpEngine};
use pipe_support::{bytes, free_bases, options};
use process::Process;
use serde_json::{Value, json};

/// For one call of our pipe, and what it may take on top: an exchange with the peer's engine, a busy machine.
const CALL: Duration = Duration::from_millis(1_500);
const SLACK: Duration = Duration::from_secs(6);

/// For a tensor that our pipe says has arrived.
const PEER: Duration = Duration::from_secs(20);

const SIZES: [usize; 5] = [1, 255, 4_097, 65_537, 200_001];

/// Where the peer sees our sockets, and ours the peer's.
const OURS_AT: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
const PEER_AT: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 3);

const BROKEN: Profile = Profile {
    percent: 35,
    bytes_bits: 12,
    ..Profile::NETWORK
};

/// The peer's engine serves control connections one at a time, and a stalled one holds it up for 5 s.
const CLEAN: Profile = Profile {
    percent: 0,
    ..Profile::NETWORK
};

fn config(prefill: (Ipv4Addr, u16), decode: (Ipv4Addr, u16)) -> Value {
    json!({
        "prefill_url": format!("{}:{}", prefill.0, prefill.1),
        "decode_url": format!("{}:{}", decode.0, decode.1),
        "metadata_server": "P2PHANDSHAKE",
    })
}

/// Our pipe as the prefill side, the old one as the decode side, and everything between them.
struct World {
    pipe: Pipe,
    process: Process,
    proxies: Vec<Proxy>,
    engines: EngineProxy,
    _directory: tempfile::TempDir,
}

impl World {
    fn new(seed: u64) -> Self {
        const HERE: Ipv4Addr = Ipv4Addr::LOCALHOST;
        let (prefill, decode) = free_bases();
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pipe.json");
        let text = config((OURS_AT, prefill), (HERE, decode));
        std::fs::write(&path, text.to_string()).unwrap();
        let variables = [
            ("MOONCAKE_CONFIG_PATH", path.as_os_str()),
            ("MC_TCP_PROGRESS_TIMEOUT_SEC", "1".as_ref()),
            ("MC_TCP_STATUS_TIMEOUT_SEC", "1".as_ref()),
        ];
        let mut process = Process::start("pipe_peer.py", variables);
        let started = process.call(json!({"do": "start", "kv_rank": 1}));
        assert_eq!(started["code"], 0, "{started}");

        let mut engine = TcpConfig::default();
        engine.advertise = Some(OURS_AT.to_string());
        engine.control_port = Some(prefill);
        engine.timeouts.control_reply = Duration::from_secs(1);
        engine.timeouts.progress = Duration::from_millis(500);
        engine.timeouts.status = Duration::from_millis(500);
        let engine = TcpEngine::start(engine).unwrap();
        let nth = |nth: u64| seed.wrapping_mul(16) + nth;
        let in_front = |at: Ipv4Addr, port: u16, index, profile, rewrite| {
            let target = SocketAddr::new(HERE.into(), port);
            let bind = SocketAddr::new(at.into(), port);
            Proxy::start_at(bind, target, nth(index), profile, rewrite)
        };
        let ours_data = Proxy::start(engine.data_address(), nth(0), Profile::NETWORK);
        let rewrite = leads_to(ours_data.address(), None);
        let proxies = vec![
            in_front(OURS_AT, prefill, 1, CLEAN, Some(rewrite)),
            in_front(OURS_AT, prefill + 9, 2, BROKEN, None),
            in_front(OURS_AT, prefill + 10, 3, BROKEN, None),
            in_front(PEER_AT, decode + 9, 4, BROKEN, None),
            in_front(PEER_AT, decode + 10, 5, BROKEN, None),
            ours_data,
        ];
        // With this kind of metadata the real engine listens on a port of its own choice.
        let (control_at, data_at, _) = listeners(started["session"].as_str().unwrap());
        let engines =
            EngineProxy::start(control_at, data_at, nth(6), [CLEAN, Profile::NETWORK], None);
        let mut options = options();
        options.peer_session = Some(engines.session());
        options.answer_timeout = Duration::from_secs(1);
        options.read_timeout = Duration::from_secs(1);
        let text = config((HERE, prefill), (PEER_AT, decode));
        let config = PipeConfig::from_json(text.to_string().as_bytes()).unwrap();
        let pipe = Pipe::with_engine(
            &config,
            Role::Prefill,
            0,
            options,
            std::sync::Arc::new(engine),
        );
        Self {
            pipe: pipe.unwrap(),
            process,
            proxies,
            engines,
            _directory: directory,
        }
    }

    fn happened(&self, sum: &mut Happened) {
        for happened in self
            .proxies
            .iter()
            .map(Proxy::happened)
            .chain([self.engines.happened()])
        {
            for (fault, count) in happened {
                *sum.entry(fault).or_default() += count;
            }
        }
    }
}

#[track_caller]
fn timed<T>(call: impl FnOnce() -> T) -> T {
    let begin = Instant::now();
    let result = call();
    assert!(begin.elapsed() < CALL + SLACK, "{:?}", begin.elapsed());
    result
}

/// Sends to the old pipe; says whether all of it is known to have arrived. The rest is the peer's to wait for.
fn send_all(world: &mut World, tensors: &[(u64, usize)]) -> bool {
    for (seed, _) in tensors {
        let command = json!({"do": "recv", "seed": seed});
        world.process.begin(&command).unwrap();
    }
    for (seed, len) in tensors {
        let data = bytes(*seed, *len);
        let tensor = Tensor {
            dtype: Dtype::U8,
            shape: &[*len as u64],
            bytes: &data,
        };
        match timed(|| world.pipe.sender().send(tensor, CALL)) {
            Ok(()) => {}
            Err(SendError::TimedOut(_) | SendError::Broken(_)) => return false,
            Err(error) => panic!("{error:?}"),
        }
    }
    match timed(|| world.pipe.sender().flush(CALL)) {
        Ok(()) => {}
        Err(SendError::TimedOut(_) | SendError::Broken(_)) => return false,
        Err(error) => panic!("{error:?}"),
    }
    assert_eq!(world.pipe.sender().bytes_in_use(), 0);
    for (_, len) in tensors {
        let answer = world.process.finish_within(PEER).unwrap();
        let expected = json!({"none": false, "dtype": "U8", "shape": [len], "equal": true});
        assert_eq!(answer, expected);
    }
    true
}

/// Receives from the old pipe; says whether all has come.
fn receive_all(world: &mut World, tensors: &[(u64, usize)]) -> bool {
    for (seed, len) in tensors {
        let command = json!({"do": "send", "dtype": "U8", "shape": [len], "seed": seed});
        world.process.call(command);
    }
    for (seed, len) in tensors {
        match timed(|| world.pipe.receiver().recv(CALL)) {
            Ok(Message::Tensor(tensor)) => {
                assert_eq!(tensor.shape(), [*len as u64]);
                assert!(
                    tensor.to_vec().unwrap() == bytes(*seed, *len),
                    "{len} bytes differ"
                );
            }
            Ok(Message::NoTensor) => panic!("nobody has sent no tensor"),
            Err(RecvError::TimedOut(_) | RecvError::Broken(_)) => return false,
            Err(error) => panic!("{error:?}"),
        }
    }
    true
}

// row: P8.3, P8.4
#[test]
#[ignore = "needs-network: the Mooncake wheel"]
fn property_a_pipe_of_ours_survives_random_faults_beside_an_old_one() {
    let _alone = alone();
    let (mut arrived, mut lost, mut happened) = (0, 0, Happened::new());
    for seed in seeds(0..7) {
        println!("seed {seed}");
        let open = Open::now();
        let mut random = Random::new(seed);
        let tensors: Vec<_> = (0..1 + random.below(4))
            .map(|_| (random.next() >> 12, random.pick(&SIZES)))
            .collect();
        let mut world = World::new(seed);
        let exchange = if seed % 2 == 0 { send_all } else { receive_all };
        if exchange(&mut world, &tensors) {
            arrived += 1;
        } else {
            lost += 1;
        }
        world.happened(&mut happened);
        let World {
            pipe,
            process,
            proxies,
            engines,
            _directory,
        } = world;
        let closed = timed(|| pipe.close(CALL));
        if let Err(SendError::Length { .. } | SendError::Copy(_)) = closed {
            panic!("{closed:?}");
        }
        drop((process, proxies, engines));
        open.assert_back(&format!("seed {seed}"));
    }
    println!("counted: {arrived} arrived, {lost} lost, {happened:?}");
    if are_usual_seeds() {
        assert!(arrived > 0 && lost > 0, "no seed has come to both ends");
        assert!(happened.len() > 1, "{happened:?}");
    }
}
