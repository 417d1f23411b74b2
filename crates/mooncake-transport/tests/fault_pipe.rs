//! Two pipes of ours whose connections a proxy breaks at random: those of notices and answers, and those of
//! their engines.
//!
//! Whatever happens, every call ends within its time, what was received is what was sent, in order, closing
//! does not hang, and buffers and connections are given back; afterwards the same engines carry a new pipe.
#![cfg(feature = "pipe")]

mod fault_support;
mod pipe_support;

use std::net::{Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use fault_support::plan::{Fault, Happened, Profile};
use fault_support::proxy::{Proxy, leads_to};
use fault_support::{Random, alone, are_usual_seeds, run_seeds, seeds};
use mooncake_transport::Engine;
use mooncake_transport::pipe::{
    Dtype, Message, Pipe, PipeConfig, PipeOptions, PipeReceiver, PipeSender, RecvError, Role,
    SendError, Tensor,
};
use mooncake_transport::tcp::{TcpConfig, TcpEngine};
use pipe_support::{LONG, bytes, free_bases, pair};
use serde_json::json;
use slab_memory::HostSlab;

/// For one call of a pipe.
const CALL: Duration = Duration::from_millis(800);

/// What a call may take on top: an exchange with the peer's engine, and a busy machine.
const SLACK: Duration = Duration::from_secs(5);

const SIZES: [usize; 8] = [1, 7, 8, 255, 4_097, 65_537, 100_001, 200_001];

const TENSORS_MAX: u64 = 6;

/// Where the peer of each side sees it: at its own ports, on another address of this host.
const SEEN_AT: [(Role, Ipv4Addr); 2] = [
    (Role::Prefill, Ipv4Addr::new(127, 0, 0, 2)),
    (Role::Decode, Ipv4Addr::new(127, 0, 0, 3)),
];

fn engine(advertise: Ipv4Addr, port: u16) -> TcpEngine {
    let mut config = TcpConfig::default();
    config.advertise = Some(advertise.to_string());
    config.control_port = Some(port);
    let timeouts = &mut config.timeouts;
    timeouts.connect = Duration::from_millis(400);
    timeouts.control_reply = Duration::from_millis(400);
    timeouts.control_idle = Duration::from_millis(300);
    timeouts.progress = Duration::from_millis(300);
    timeouts.status = Duration::from_millis(300);
    timeouts.refresh_interval = Duration::from_millis(100);
    TcpEngine::start(config).unwrap()
}

fn options() -> PipeOptions {
    let mut options = PipeOptions::default();
    options.send_bytes = 1 << 20;
    options.receive_bytes = 1 << 20;
    options.answer_timeout = Duration::from_millis(700);
    options.read_timeout = Duration::from_millis(500);
    options.linger = Duration::from_millis(100);
    options
}

/// What is done to connections between engines that carry bytes, and to all others.
#[derive(Clone, Copy)]
struct Profiles {
    data: Profile,
    others: Profile,
}

/// One side: its engine, the proxies that the other side sees it through, and how it sees the other.
struct Side {
    role: Role,
    engine: Arc<TcpEngine>,
    proxies: Vec<Proxy>,
    config: PipeConfig,
}

impl Side {
    fn new(index: usize, bases: [u16; 2], seed: u64, profiles: Profiles) -> Self {
        let (role, seen_at) = SEEN_AT[index];
        let base = bases[index];
        let engine = engine(seen_at, base);
        let seed = |nth: u64| seed.wrapping_mul(8) + 4 * index as u64 + nth;
        let data = Proxy::start(engine.data_address(), seed(0), profiles.data);
        let at = |ip: Ipv4Addr, port: u16| SocketAddr::new(ip.into(), port);
        let in_front = |offset, nth, rewrite| {
            let port = base + offset;
            let target = at(Ipv4Addr::LOCALHOST, port);
            Proxy::start_at(
                at(seen_at, port),
                target,
                seed(nth),
                profiles.others,
                rewrite,
            )
        };
        let rewrite = leads_to(data.address(), None);
        let control = in_front(0, 1, Some(rewrite));
        let proxies = vec![in_front(9, 2, None), in_front(10, 3, None), control, data];
        let mut hosts = SEEN_AT.map(|(_, seen_at)| seen_at);
        hosts[index] = Ipv4Addr::LOCALHOST;
        let text = json!({
            "prefill_url": format!("{}:{}", hosts[0], bases[0]),
            "decode_url": format!("{}:{}", hosts[1], bases[1]),
            "metadata_server": "P2PHANDSHAKE",
        });
        Self {
            role,
            engine: Arc::new(engine),
            proxies,
            config: PipeConfig::from_json(text.to_string().as_bytes()).unwrap(),
        }
    }

    fn start(&self) -> Pipe {
        let engine: Arc<dyn Engine> = self.engine.clone();
        Pipe::with_engine(&self.config, self.role, 0, options(), engine).unwrap()
    }
}

/// Runs `call`, which has to end in its time whatever it says.
fn timed<T>(limit: Duration, what: &str, call: impl FnOnce() -> T) -> T {
    let begin = Instant::now();
    let result = call();
    let took = begin.elapsed();
    assert!(took < limit + SLACK, "{what} took {took:?}");
    result
}

/// The seed and the length of each tensor that one side sends.
type Tensors = Vec<(u64, usize)>;

fn tensors(random: &mut Random) -> Tensors {
    (0..1 + random.below(TENSORS_MAX))
        .map(|_| (random.next(), random.pick(&SIZES)))
        .collect()
}

/// Sends what there is and closes; says whether all of it is known to have arrived.
fn send_all(mut sender: PipeSender, tensors: &Tensors) -> bool {
    let mut is_sent = true;
    for (seed, len) in tensors {
        let data = bytes(*seed, *len);
        let tensor = Tensor {
            dtype: Dtype::U8,
            shape: &[*len as u64],
            bytes: &data,
        };
        match timed(CALL, "send", || sender.send(tensor, CALL)) {
            Ok(()) => {}
            Err(SendError::TimedOut(_) | SendError::Broken(_)) => {
                is_sent = false;
                break;
            }
            Err(error) => panic!("{error:?}"),
        }
    }
    let is_flushed = match timed(CALL, "flush", || sender.flush(CALL)) {
        Ok(()) => {
            assert_eq!((sender.outstanding(), sender.bytes_in_use()), (0, 0));
            true
        }
        Err(SendError::TimedOut(_) | SendError::Broken(_)) => false,
        Err(error) => panic!("{error:?}"),
    };
    let closed = timed(CALL, "close", || sender.close(CALL));
    is_sent && is_flushed && closed.is_ok()
}

/// Receives up to as many as were sent, and returns how many; the memory goes with the receiver.
fn receive_all(mut receiver: PipeReceiver, tensors: &Tensors) -> (usize, Option<Weak<HostSlab>>) {
    let mut slab = None;
    let mut count = 0;
    while count < tensors.len() {
        match timed(CALL, "recv", || receiver.recv(CALL)) {
            Ok(Message::Tensor(tensor)) => {
                let (seed, len) = tensors[count];
                assert_eq!(
                    (tensor.dtype(), tensor.shape()),
                    (Dtype::U8, &[len as u64][..])
                );
                let found = tensor.to_vec().unwrap();
                assert!(
                    found == bytes(seed, len),
                    "tensor {count} of {len} bytes differs"
                );
                slab = Some(Arc::downgrade(tensor.slab()));
                count += 1;
            }
            Ok(Message::NoTensor) => panic!("nobody has sent no tensor"),
            Err(RecvError::TimedOut(_) | RecvError::Broken(_)) => break,
            Err(error) => panic!("{error:?}"),
        }
    }
    timed(Duration::ZERO, "closing the receiver", || drop(receiver));
    (count, slab)
}

/// What many seeds have come to.
#[derive(Default)]
struct Sum {
    happened: Happened,
    arrived: u64,
    lost: u64,
}

/// Both ways at once, to the end. Returns how many have arrived of how many, and whether both senders know.
fn exchange(sides: &[Side; 2], random: &mut Random) -> (u64, u64, bool) {
    let sent = [tensors(random), tensors(random)];
    let [prefill, decode] = sides.each_ref().map(|side| side.start().split());
    let results: Vec<(bool, usize)> = std::thread::scope(|scope| {
        let sending = [(prefill.0, &sent[0]), (decode.0, &sent[1])]
            .map(|(sender, tensors)| scope.spawn(move || send_all(sender, tensors)));
        let receiving = [(decode.1, &sent[0]), (prefill.1, &sent[1])]
            .map(|(receiver, tensors)| scope.spawn(move || receive_all(receiver, tensors)));
        sending
            .into_iter()
            .zip(receiving)
            .map(|(sender, receiver)| {
                let (count, slab) = receiver.join().unwrap_or_else(|why| resume_unwind(why));
                // A read that was under way keeps them until the engine has ended it, which it does in its time.
                let begin = Instant::now();
                while slab.as_ref().is_some_and(|slab| slab.strong_count() > 0) {
                    assert!(begin.elapsed() < SLACK, "received bytes are held for good");
                    std::thread::sleep(Duration::from_millis(2));
                }
                let is_known = sender.join().unwrap_or_else(|why| resume_unwind(why));
                (is_known, count)
            })
            .collect()
    });
    for ((is_known, count), tensors) in results.iter().zip(&sent) {
        assert!(
            !is_known || *count == tensors.len(),
            "{count} of {} have arrived, and the sender was told that all have",
            tensors.len()
        );
    }
    for side in sides {
        // No pipe holds the engine any more, and so none its memory.
        assert_eq!(Arc::strong_count(&side.engine), 1);
    }
    let arrived = results.iter().map(|(_, count)| *count as u64).sum();
    let all = sent.iter().map(|tensors| tensors.len() as u64).sum();
    (arrived, all, results.iter().all(|(is_known, _)| *is_known))
}

fn run(seed: u64, profiles: Profiles, sum: &Mutex<Sum>) {
    let mut random = Random::new(seed ^ 0xF1FE);
    let (prefill, decode) = free_bases();
    let sides = [0, 1].map(|index| Side::new(index, [prefill, decode], seed, profiles));
    let (arrived, all, _) = exchange(&sides, &mut random);
    for proxy in sides.iter().flat_map(|side| &side.proxies) {
        proxy.heal();
    }
    let (again, all_again, is_known) = exchange(&sides, &mut random);
    assert!(
        again == all_again && is_known,
        "{again} of {all_again} tensors after the faults have ended"
    );
    let mut sum = sum.lock().unwrap();
    for proxy in sides.iter().flat_map(|side| &side.proxies) {
        for (fault, count) in proxy.happened() {
            *sum.happened.entry(fault).or_default() += count;
        }
    }
    sum.arrived += arrived;
    sum.lost += all - arrived;
}

fn run_all(usual: Range<u64>) {
    let _alone = alone();
    let sum = Mutex::new(Sum::default());
    let profiles = Profiles {
        data: Profile::NETWORK,
        // Messages are short, and a pipe does not outlive one of their connections.
        others: Profile {
            percent: 15,
            bytes_bits: 10,
            ..Profile::NETWORK
        },
    };
    run_seeds(seeds(usual), 6, |seed| run(seed, profiles, &sum));
    let Sum {
        happened,
        arrived,
        lost,
    } = sum.into_inner().unwrap();
    println!("counted: {arrived} arrived, {lost} lost, {happened:?}");
    if are_usual_seeds() {
        assert!(arrived > 0 && lost > 0, "no seed has come to both ends");
        assert!(happened.len() > 4, "{happened:?}");
    }
}

// row: P8.4
#[test]
fn property_pipes_survive_random_faults() {
    run_all(0..18);
}

// row: P7.9
#[test]
fn one_direction_goes_on_while_both_ends_of_the_other_close_at_once() {
    let _alone = alone();
    for _ in 0..40 {
        let (prefill, decode) = pair();
        let ((sender, mut receiver), (mut peer_sender, peer_receiver)) =
            (prefill.split(), decode.split());
        // So that all connections are there.
        let mut send = |seed| {
            let data = bytes(seed, 100);
            let tensor = Tensor {
                dtype: Dtype::U8,
                shape: &[100],
                bytes: &data,
            };
            peer_sender.send(tensor, LONG).unwrap();
        };
        send(1);
        receiver.recv(LONG).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| drop(sender));
            drop(peer_receiver);
        });
        // More than once, for what has gone wrong may have gone wrong behind the first.
        for seed in 2..4 {
            send(seed);
            let Message::Tensor(tensor) = receiver.recv(LONG).unwrap() else {
                panic!("no tensor");
            };
            assert!(tensor.to_vec().unwrap() == bytes(seed, 100));
        }
    }
}

#[test]
fn a_proxy_that_changes_a_bit_of_a_tensor_is_noticed() {
    let _alone = alone();
    let sum = Mutex::new(Sum::default());
    let profiles = Profiles {
        data: Profile {
            percent: 100,
            bytes_bits: 17,
            faults: &[Fault::Flip],
            ..Profile::NETWORK
        },
        others: Profile {
            percent: 0,
            ..Profile::NETWORK
        },
    };
    let is_noticed = (0..12).any(|seed| {
        let run = || run(seed, profiles, &sum);
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).err();
        let complaint = panic
            .as_ref()
            .and_then(|panic| panic.downcast_ref::<String>());
        complaint.is_some_and(|complaint| complaint.contains("bytes differs"))
    });
    assert!(is_noticed, "the comparison does not look at the bytes");
}
