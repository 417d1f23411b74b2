//! What the integration tests share.
#![allow(dead_code, reason = "each test target uses its own part")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mooncake_transport::tcp::{TcpConfig, TcpEngine};
use mooncake_transport::wire::control::{FrameKind, encode_frame};
use mooncake_transport::wire::data::{DataVersion, Header, Op, Status};
use mooncake_transport::wire::descriptor::Descriptor;
use mooncake_transport::{Access, Batch, BatchReport, Engine, Registration, Remote, Segment, Task};
use slab_memory::{HostSlab, Memory};

/// Longer than anything a test waits for; reaching it is a failure.
pub(crate) const LONG: Duration = Duration::from_secs(20);

pub(crate) fn engine() -> TcpEngine {
    engine_with(|_| {})
}

pub(crate) fn engine_with(change: impl FnOnce(&mut TcpConfig)) -> TcpEngine {
    let mut config = TcpConfig::default();
    change(&mut config);
    TcpEngine::start(config).unwrap()
}

/// An engine whose waits are short enough to be waited for.
pub(crate) fn hasty_engine() -> TcpEngine {
    engine_with(|config| {
        config.timeouts.connect = Duration::from_millis(500);
        config.timeouts.control_reply = Duration::from_millis(1000);
        config.timeouts.control_idle = Duration::from_millis(600);
        config.timeouts.control_total = Duration::from_millis(1800);
        config.timeouts.progress = Duration::from_millis(800);
        config.timeouts.status = Duration::from_millis(800);
        config.timeouts.reject_drain = Duration::from_millis(500);
    })
}

pub(crate) fn slab(len: u64) -> Arc<HostSlab> {
    Arc::new(HostSlab::new(len).unwrap())
}

pub(crate) fn register(engine: &TcpEngine, slab: &Arc<HostSlab>) -> Registration {
    engine.register(slab.clone(), Access::RemoteWrite).unwrap()
}

/// Bytes that differ from seed to seed and from offset to offset.
pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
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

pub(crate) fn fill(slab: &HostSlab, offset: u64, seed: u64, len: usize) {
    slab.copy_in(offset, &pattern(seed, len)).unwrap();
}

pub(crate) fn bytes(slab: &HostSlab, offset: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    slab.copy_out(offset, &mut bytes).unwrap();
    bytes
}

pub(crate) fn assert_pattern(slab: &HostSlab, offset: u64, seed: u64, len: usize) {
    let found = bytes(slab, offset, len);
    let expected = pattern(seed, len);
    if let Some(at) = (0..len).find(|at| found[*at] != expected[*at]) {
        panic!("byte {at} of {len} differs");
    }
}

pub(crate) fn task(
    op: Op,
    segment: &Segment,
    remote: u64,
    slab: &Arc<HostSlab>,
    range: Range<u64>,
) -> Task {
    let memory: Arc<dyn Memory> = slab.clone();
    Task {
        op,
        segment: segment.clone(),
        remote,
        memory,
        range,
        hold: Box::new(()),
    }
}

pub(crate) fn finish(batch: &Batch) -> BatchReport {
    batch
        .wait(Some(Instant::now() + LONG))
        .expect("the batch did not settle")
}

/// Runs one task and returns what became of it.
pub(crate) fn run_one(engine: &TcpEngine, task: Task) -> Remote {
    let batch = engine.submit(vec![task]).unwrap();
    finish(&batch).tasks()[0].remote.clone()
}

/// A raw connection with a limit on every read and write.
pub(crate) fn dial(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    limit(&stream);
    stream
}

pub(crate) fn limit(stream: &TcpStream) {
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream.set_write_timeout(Some(LONG)).unwrap();
    stream.set_nodelay(true).unwrap();
}

pub(crate) fn header(op: Op, address: u64, size: u64) -> [u8; 24] {
    Header {
        size,
        address,
        op,
        version: DataVersion::V2,
    }
    .encode()
}

pub(crate) fn read_status(stream: &mut TcpStream) -> Status {
    let mut frame = [0; 8];
    stream.read_exact(&mut frame).expect("no status frame");
    Status::decode(frame).unwrap()
}

/// Reads until the peer closes, which it must do, cleanly or by a reset.
pub(crate) fn read_to_close(stream: &mut TcpStream) -> Vec<u8> {
    let mut all = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return all,
            Ok(count) => all.extend_from_slice(&buffer[..count]),
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return all,
            Err(error) => panic!("the peer neither answered nor closed: {error}"),
        }
    }
}

/// Sends one control request and returns whatever comes back until the peer closes.
pub(crate) fn ask(address: SocketAddr, request: &[u8]) -> Vec<u8> {
    let mut stream = dial(address);
    // The peer may close before it has read all of a request that it refuses.
    let _ = stream.write_all(request);
    read_to_close(&mut stream)
}

/// Makes one good write and one good read, to show that the target still serves.
pub(crate) fn assert_serves(target: &TcpEngine, slab: &HostSlab) {
    let address = slab.address() + slab.len() - 16;
    let mut stream = dial(target.data_address());
    stream.write_all(&header(Op::Write, address, 16)).unwrap();
    stream.write_all(b"0123456789abcdef").unwrap();
    assert_eq!(read_status(&mut stream), Status::Ok);
    stream.write_all(&header(Op::Read, address, 16)).unwrap();
    assert_eq!(read_status(&mut stream), Status::Ok);
    let mut read = [0; 16];
    stream.read_exact(&mut read).unwrap();
    assert_eq!(&read, b"0123456789abcdef");
    let alive = ask(
        target.control_address(),
        &encode_frame(FrameKind::Probe, b"{}"),
    );
    assert_eq!(
        alive,
        encode_frame(FrameKind::Probe, b"{\"status\":\"success\"}\n")
    );
}

/// A listener that gives up if nobody connects, so that a test of an engine that does not fails.
pub(crate) fn listener() -> TcpListener {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    // The kernel applies it to `accept` as well.
    let socket = socket2::SockRef::from(&listener);
    socket.set_read_timeout(Some(LONG)).unwrap();
    listener
}

/// A peer made of plain listeners, which does whatever a test wants.
pub(crate) struct FakePeer {
    pub(crate) control: TcpListener,
    pub(crate) data: TcpListener,
}

impl FakePeer {
    pub(crate) fn new() -> Self {
        Self {
            control: listener(),
            data: listener(),
        }
    }

    pub(crate) fn name(&self) -> String {
        self.control.local_addr().unwrap().to_string()
    }

    pub(crate) fn descriptor(&self) -> Descriptor {
        let data_port = self.data.local_addr().unwrap().port();
        let mut descriptor = Descriptor::new(self.name(), data_port);
        descriptor.data_host = Some("127.0.0.1".into());
        descriptor
    }

    /// Opens this peer as a segment of `engine`, answering its one metadata request.
    pub(crate) fn open(&self, engine: &TcpEngine) -> Segment {
        std::thread::scope(|scope| {
            scope.spawn(|| self.answer_metadata(&self.descriptor()));
            engine.open_segment(&self.name()).unwrap()
        })
    }

    /// Answers one metadata request and returns its text.
    pub(crate) fn answer_metadata(&self, descriptor: &Descriptor) -> Vec<u8> {
        self.answer_control(&encode_frame(
            FrameKind::Metadata,
            (descriptor.encode() + "\n").as_bytes(),
        ))
    }

    /// Takes one control request, answers with `reply`, and returns the request's payload.
    pub(crate) fn answer_control(&self, reply: &[u8]) -> Vec<u8> {
        let (mut stream, _) = self.control.accept().expect("nobody asked in time");
        limit(&stream);
        let mut len = [0; 8];
        stream.read_exact(&mut len).unwrap();
        let mut payload = vec![0; u64::from_le_bytes(len) as usize];
        stream.read_exact(&mut payload).unwrap();
        stream.write_all(reply).unwrap();
        payload
    }

    pub(crate) fn accept_data(&self) -> TcpStream {
        let (stream, _) = self.data.accept().expect("nobody connected in time");
        limit(&stream);
        stream
    }
}

pub(crate) fn read_header(stream: &mut TcpStream) -> Header {
    let mut bytes = [0; 24];
    stream.read_exact(&mut bytes).expect("no request");
    Header::decode(&bytes).unwrap()
}

pub(crate) fn read_exactly(stream: &mut TcpStream, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    stream
        .read_exact(&mut bytes)
        .expect("the payload ended early");
    bytes
}
