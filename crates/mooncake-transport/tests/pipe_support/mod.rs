//! What the tests of the pipe share: ports, pairs of pipes, and a peer made by hand.
#![allow(dead_code, reason = "every test target uses its own part")]

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use mooncake_transport::pipe::{
    Broken, Dtype, Message, Pipe, PipeConfig, PipeOptions, RecvError, Role, SendError, Tensor,
};
use mooncake_transport::tcp::{TcpConfig, TcpEngine};
use mooncake_transport::{Access, Engine, Op, Registration, Remote, Task};
use serde_json::json;
use slab_memory::{HostSlab, Memory};

/// Longer than anything a test waits for; reaching it is a failure.
pub(crate) const LONG: Duration = Duration::from_secs(20);

/// Two base ports with free ports behind them, below those that the system gives out.
pub(crate) fn free_bases() -> (u16, u16) {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let first = std::process::id().wrapping_mul(37) % 400;
    for _ in 0..2_000 {
        let slot = (first + NEXT.fetch_add(1, Ordering::Relaxed)) % 400;
        let prefill = 18_000 + (slot * 35) as u16;
        let decode = prefill + 15;
        let is_free = |port: u16| TcpListener::bind(("127.0.0.1", port)).is_ok();
        let needed = [prefill, decode].map(|base| [base, base + 9, base + 10]);
        if needed.as_flattened().iter().all(|port| is_free(*port)) {
            return (prefill, decode);
        }
    }
    panic!("no free ports");
}

pub(crate) fn config((prefill, decode): (u16, u16)) -> PipeConfig {
    let text = json!({
        "prefill_url": format!("127.0.0.1:{prefill}"),
        "decode_url": format!("127.0.0.1:{decode}"),
        "metadata_server": "P2PHANDSHAKE",
    });
    PipeConfig::from_json(text.to_string().as_bytes()).unwrap()
}

/// Small buffers and short waits.
pub(crate) fn options() -> PipeOptions {
    let mut options = PipeOptions::default();
    options.send_bytes = 1 << 20;
    options.receive_bytes = 1 << 20;
    options.read_timeout = Duration::from_secs(5);
    options.linger = Duration::from_millis(300);
    options
}

pub(crate) fn start(config: &PipeConfig, role: Role, options: PipeOptions) -> Pipe {
    Pipe::start(config, role, 0, options).unwrap()
}

/// Two pipes that are each other's peers.
pub(crate) fn pair_with(change: impl Fn(&mut PipeOptions)) -> (Pipe, Pipe) {
    let config = config(free_bases());
    let mut options = options();
    change(&mut options);
    (
        start(&config, Role::Prefill, options.clone()),
        start(&config, Role::Decode, options),
    )
}

pub(crate) fn pair() -> (Pipe, Pipe) {
    pair_with(|_| {})
}

pub(crate) fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// Sends `len` bytes of a seed as a tensor of one dimension.
pub(crate) fn send(pipe: &mut Pipe, seed: u64, len: usize) -> Result<(), SendError> {
    let tensor = Tensor {
        dtype: Dtype::U8,
        shape: &[len as u64],
        bytes: &bytes(seed, len),
    };
    pipe.sender().send(tensor, LONG)
}

#[track_caller]
pub(crate) fn assert_receives(pipe: &mut Pipe, seed: u64, len: usize) {
    match pipe.receiver().recv(LONG).unwrap() {
        Message::Tensor(tensor) => {
            assert_eq!(tensor.dtype(), Dtype::U8);
            assert_eq!(tensor.shape(), [len as u64]);
            assert!(tensor.to_vec().unwrap() == bytes(seed, len), "bytes differ");
        }
        Message::NoTensor => panic!("no tensor"),
    }
}

/// How a receiving direction ended; the second call says the same.
#[track_caller]
pub(crate) fn recv_broken(pipe: &mut Pipe) -> Broken {
    let mut broken = || match pipe.receiver().recv(LONG) {
        Err(RecvError::Broken(why)) => why,
        other => panic!("{other:?}"),
    };
    let why = broken();
    assert_eq!(broken(), why);
    why
}

/// How a sending direction ended; the second call says the same.
#[track_caller]
pub(crate) fn send_broken(pipe: &mut Pipe) -> Broken {
    let mut broken = || match pipe.sender().flush(LONG) {
        Err(SendError::Broken(why)) => why,
        other => panic!("{other:?}"),
    };
    let why = broken();
    assert_eq!(broken(), why);
    why
}

/// Runs `body`, which must not take longer than `limit`.
#[track_caller]
pub(crate) fn within<R>(limit: Duration, body: impl FnOnce() -> R) -> R {
    let begin = Instant::now();
    let result = body();
    assert!(begin.elapsed() < limit, "it took {:?}", begin.elapsed());
    result
}

/// A peer of the old kind, as far as the wire shows: four sockets, an engine, and no opinion.
pub(crate) struct OldPeer {
    pub(crate) notices: zmq::Socket,
    pub(crate) answers: zmq::Socket,
    pub(crate) received_notices: zmq::Socket,
    pub(crate) received_answers: zmq::Socket,
    pub(crate) engine: TcpEngine,
    pub(crate) slab: Arc<HostSlab>,
    registration: Option<Registration>,
    our_session: String,
}

impl OldPeer {
    /// The decode side, with an engine at the configured name.
    pub(crate) fn start((prefill, decode): (u16, u16)) -> Self {
        let context = zmq::Context::new();
        let socket = |kind| {
            let socket = context.socket(kind).unwrap();
            socket.set_linger(0).unwrap();
            socket.set_rcvtimeo(20_000).unwrap();
            socket.set_sndtimeo(20_000).unwrap();
            socket
        };
        let bound = |port: u16| {
            let socket = socket(zmq::PUSH);
            socket.bind(&format!("tcp://127.0.0.1:{port}")).unwrap();
            socket
        };
        let connected = |port: u16| {
            let socket = socket(zmq::PULL);
            socket.connect(&format!("tcp://127.0.0.1:{port}")).unwrap();
            socket
        };
        let mut config = TcpConfig::default();
        config.control_port = Some(decode);
        let engine = TcpEngine::start(config).unwrap();
        let slab = Arc::new(HostSlab::new(1 << 20).unwrap());
        let registration = engine.register(slab.clone(), Access::RemoteRead).unwrap();
        Self {
            notices: bound(decode + 9),
            answers: bound(decode + 10),
            received_notices: connected(prefill + 9),
            received_answers: connected(prefill + 10),
            engine,
            slab,
            registration: Some(registration),
            our_session: format!("127.0.0.1:{prefill}"),
        }
    }

    /// Starts another engine in the place of this one: the same name, other ports, other memory.
    pub(crate) fn restart_engine(&mut self) {
        let port = self.engine.control_address().port();
        let mut config = TcpConfig::default();
        config.control_port = Some(port);
        self.registration = None;
        // The old one has to let go of the port first; any other will do for the moment.
        self.engine = TcpEngine::start(TcpConfig::default()).unwrap();
        self.engine = TcpEngine::start(config).unwrap();
        self.slab = Arc::new(HostSlab::new(1 << 20).unwrap());
        let registration = self.engine.register(self.slab.clone(), Access::RemoteRead);
        self.registration = Some(registration.unwrap());
    }

    /// Peers cannot read the memory any more.
    pub(crate) fn unregister(&mut self) {
        self.registration.take().unwrap().unregister().unwrap();
    }

    /// Puts an image into memory and sends a notice of two frames.
    pub(crate) fn send_image(&self, offset: u64, image: &[u8]) {
        self.slab.copy_in(offset, image).unwrap();
        self.notify(self.slab.address() + offset, image.len() as u64);
    }

    pub(crate) fn notify(&self, address: u64, len: u64) {
        let frames = [address.to_be_bytes(), len.to_be_bytes()];
        self.send_frames(&frames.map(|frame| frame.to_vec()));
    }

    pub(crate) fn send_frames(&self, frames: &[Vec<u8>]) {
        self.notices.send_multipart(frames, 0).unwrap();
    }

    /// Takes one answer.
    #[track_caller]
    pub(crate) fn answer(&self) -> Vec<Vec<u8>> {
        self.received_answers.recv_multipart(0).expect("no answer")
    }

    /// Takes one notice and reads the image behind its first two frames; returns the frames, too.
    #[track_caller]
    pub(crate) fn take(&self) -> (Vec<u8>, Vec<Vec<u8>>) {
        let frames = self.received_notices.recv_multipart(0).expect("no notice");
        let number = |frame: &[u8]| u64::from_be_bytes(frame.try_into().unwrap());
        let (address, len) = (number(&frames[0]), number(&frames[1]));
        let image = self.read(address, len).expect("the image cannot be read");
        (image, frames)
    }

    pub(crate) fn read(&self, address: u64, len: u64) -> Result<Vec<u8>, Remote> {
        let memory: Arc<dyn Memory> = Arc::new(HostSlab::new(len.max(1)).unwrap());
        let segment = self.engine.open_segment(&self.our_session).unwrap();
        let task = Task {
            op: Op::Read,
            segment,
            remote: address,
            memory: memory.clone(),
            range: 0..len,
            hold: Box::new(()),
        };
        let batch = self.engine.submit(vec![task]).unwrap();
        let report = batch.wait(Some(Instant::now() + LONG)).unwrap();
        let remote = report.tasks()[0].remote.clone();
        if !remote.is_applied() {
            return Err(remote);
        }
        let mut image = vec![0; len as usize];
        memory.copy_out(0, &mut image).unwrap();
        Ok(image)
    }

    pub(crate) fn acknowledge(&self) {
        self.send_answer(&[b"ACK"]);
    }

    pub(crate) fn send_answer(&self, frames: &[&[u8]]) {
        self.answers.send_multipart(frames, 0).unwrap();
    }
}

/// The image that the usual writer makes of bytes.
pub(crate) fn image_of(data: &[u8]) -> Vec<u8> {
    let len = data.len();
    let header =
        format!(r#"{{"tensor":{{"dtype":"U8","shape":[{len}],"data_offsets":[0,{len}]}}}}"#);
    let mut image = (header.len() as u64).to_le_bytes().to_vec();
    image.extend_from_slice(header.as_bytes());
    image.extend_from_slice(data);
    image
}
