//! A proxy in front of one port, and one in front of an engine.
//!
//! Two threads pass a connection on, one for each direction, and one accepts. Dropping a proxy ends them all.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mooncake_transport::wire::control::{FrameDecoder, FrameKind, FrameLimits, encode_frame};
use mooncake_transport::wire::data::{DataVersion, Header};
use mooncake_transport::wire::descriptor::Descriptor;
use serde_json::Value;

use super::Random;
use super::plan::{FIRST_BYTES, Fault, Happened, Plan, Profile, Way};

/// Where the two listeners of an engine are, and what it says of itself.
pub(crate) fn listeners(session: &str) -> (SocketAddr, SocketAddr, Descriptor) {
    let control: SocketAddr = session.parse().unwrap();
    let mut stream = TcpStream::connect(control).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    stream
        .write_all(&encode_frame(FrameKind::Metadata, b"{}"))
        .unwrap();
    let mut reply = Vec::new();
    stream.read_to_end(&mut reply).unwrap();
    let frame = FrameDecoder::new(FrameLimits::CLIENT).push(&reply);
    let descriptor = Descriptor::decode(&frame.unwrap().unwrap().body).unwrap();
    let data = SocketAddr::new(control.ip(), descriptor.data_port);
    (control, data, descriptor)
}

/// Changes one whole control frame on its way back.
pub(crate) type Rewrite = Arc<dyn Fn(Vec<u8>) -> Vec<u8> + Send + Sync>;

/// How often a thread that can neither read nor write looks whether its connection has ended.
const LOOK: Duration = Duration::from_millis(20);

/// A port whose connections are passed on, more or less.
pub(crate) struct Proxy {
    address: SocketAddr,
    core: Arc<Core>,
    acceptor: Option<JoinHandle<()>>,
}

struct Core {
    target: SocketAddr,
    rewrite: Option<Rewrite>,
    profile: Profile,
    is_faulty: AtomicBool,
    stop: AtomicBool,
    state: Mutex<State>,
}

struct State {
    random: Random,
    live: Vec<Weak<Link>>,
    threads: Vec<JoinHandle<()>>,
    happened: Happened,
    /// How each connection began.
    heads: Vec<Vec<u8>>,
}

/// Bytes of a connection that are kept: those of a request's header.
const HEAD_LEN: u64 = 24;

/// One connection through the proxy.
struct Link {
    index: usize,
    near: TcpStream,
    far: TcpStream,
    end: AtomicU8,
    plan: Plan,
}

/// How a link has ended, if it has.
const OPEN: u8 = 0;
const STALLED: u8 = 1;
const ENDED: u8 = 2;

impl Proxy {
    /// Starts one on a free port of loopback.
    pub(crate) fn start(target: SocketAddr, seed: u64, profile: Profile) -> Self {
        let bind = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);
        Self::start_at(bind, target, seed, profile, None)
    }

    /// Starts one at an address, which may rewrite what comes back.
    pub(crate) fn start_at(
        bind: SocketAddr,
        target: SocketAddr,
        seed: u64,
        profile: Profile,
        rewrite: Option<Rewrite>,
    ) -> Self {
        let listener = TcpListener::bind(bind).unwrap();
        let address = listener.local_addr().unwrap();
        let core = Arc::new(Core {
            target,
            rewrite,
            profile,
            is_faulty: AtomicBool::new(true),
            stop: AtomicBool::new(false),
            state: Mutex::new(State {
                random: Random::new(seed),
                live: Vec::new(),
                threads: Vec::new(),
                happened: Happened::new(),
                heads: Vec::new(),
            }),
        });
        let accepting = Arc::clone(&core);
        let acceptor = thread("fault-accept", move || accepting.accept(&listener));
        Self {
            address,
            core,
            acceptor: Some(acceptor),
        }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Ends all connections, and does nothing more to those that come.
    pub(crate) fn heal(&self) {
        self.core.is_faulty.store(false, Ordering::SeqCst);
        self.core.end_all();
    }

    /// Goes on with faults after `heal`.
    pub(crate) fn break_again(&self) {
        self.core.is_faulty.store(true, Ordering::SeqCst);
    }

    /// Which faults have happened, not those that were planned.
    pub(crate) fn happened(&self) -> Happened {
        self.core.state().happened.clone()
    }

    /// The first bytes that came on each connection, at most those of a request's header.
    pub(crate) fn heads(&self) -> Vec<Vec<u8>> {
        self.core.state().heads.clone()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.core.stop.store(true, Ordering::SeqCst);
        // Wakes the listener, which then sees the flag.
        let _ = TcpStream::connect(self.address);
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
        self.core.end_all();
        let threads = std::mem::take(&mut self.core.state().threads);
        for thread in threads {
            let _ = thread.join();
        }
    }
}

fn thread(name: &str, run: impl FnOnce() + Send + 'static) -> JoinHandle<()> {
    std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(run)
        .unwrap()
}

impl Core {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn accept(self: &Arc<Self>, listener: &TcpListener) {
        for near in listener.incoming().map_while(Result::ok) {
            if self.stop.load(Ordering::SeqCst) {
                return;
            }
            // A target that is gone shows as a closed connection.
            let Ok(far) = TcpStream::connect(self.target) else {
                continue;
            };
            for stream in [&near, &far] {
                stream.set_nodelay(true).unwrap();
                stream.set_write_timeout(Some(LOOK)).unwrap();
                stream.set_read_timeout(Some(LOOK)).unwrap();
            }
            let mut state = self.state();
            let index = state.heads.len();
            state.heads.push(Vec::new());
            // Drawn in any case, so that healing does not shift what comes after it.
            let drawn = Plan::draw(&mut state.random, &self.profile);
            let plan = if self.is_faulty.load(Ordering::SeqCst) {
                drawn
            } else {
                Plan::CLEAN
            };
            let link = Arc::new(Link {
                index,
                near,
                far,
                end: AtomicU8::new(OPEN),
                plan,
            });
            state.live.retain(|link| link.strong_count() > 0);
            state.live.push(Arc::downgrade(&link));
            let (done, running): (Vec<_>, Vec<_>) = std::mem::take(&mut state.threads)
                .into_iter()
                .partition(JoinHandle::is_finished);
            state.threads = running;
            for thread in done {
                let _ = thread.join();
            }
            for way in [Way::There, Way::Back] {
                let (core, link) = (Arc::clone(self), Arc::clone(&link));
                let name = match way {
                    Way::There => "fault-there",
                    Way::Back => "fault-back",
                };
                state
                    .threads
                    .push(thread(name, move || core.pass_on(&link, way)));
            }
        }
    }

    fn end_all(&self) {
        let live = self.state().live.clone();
        for link in live.iter().filter_map(Weak::upgrade) {
            link.end(false);
        }
    }

    fn note(&self, fault: Fault) {
        *self.state().happened.entry(fault).or_default() += 1;
    }

    fn pass_on(&self, link: &Link, way: Way) {
        let (mut from, into) = match way {
            Way::There => (&link.near, &link.far),
            Way::Back => (&link.far, &link.near),
        };
        let mut buffer = vec![0; 64 << 10];
        let mut passed = 0;
        if way == Way::Back
            && let Some(rewrite) = &self.rewrite
        {
            let Ok(frame) = read_frame(link, from) else {
                // Closed without a reply, and so is this side.
                let _ = into.shutdown(Shutdown::Write);
                return;
            };
            if !self.pass_bytes(link, way, &mut rewrite(frame), &mut passed) {
                return;
            }
        }
        loop {
            let count = match from.read(&mut buffer[..link.piece_max(passed)]) {
                Ok(count) => count,
                Err(error) if is_moment(&error) => {
                    if link.end.load(Ordering::SeqCst) == ENDED {
                        return;
                    }
                    // A fault at byte 0, or right after what has passed, does not wait for more.
                    if self.is_due(link, way, passed) && !self.strike(link, way, into) {
                        return;
                    }
                    continue;
                }
                // A reset is passed on as one.
                Err(_) => return link.end(true),
            };
            match count {
                0 => {
                    if link.end.load(Ordering::SeqCst) == OPEN {
                        let _ = into.shutdown(Shutdown::Write);
                    }
                    return;
                }
                count => {
                    if !self.pass_bytes(link, way, &mut buffer[..count], &mut passed) {
                        return;
                    }
                }
            }
        }
    }

    fn is_due(&self, link: &Link, way: Way, passed: u64) -> bool {
        matches!(link.plan.fault, Some((fault_way, at, fault))
            if fault_way == way && at == passed && !matches!(fault, Fault::Flip | Fault::Pause))
    }

    /// Passes bytes on, up to where the fault is; says whether the connection goes on.
    fn pass_bytes(&self, link: &Link, way: Way, bytes: &mut [u8], passed: &mut u64) -> bool {
        let into = match way {
            Way::There => &link.far,
            Way::Back => &link.near,
        };
        let mut rest = bytes;
        while !rest.is_empty() {
            let mut max = link.piece_max(*passed).min(rest.len());
            if let Some((fault_way, at, fault)) = link.plan.fault
                && fault_way == way
            {
                if *passed == at {
                    match fault {
                        Fault::Flip => {
                            rest[0] ^= 0x10;
                            self.note(fault);
                        }
                        _ => {
                            if !self.strike(link, way, into) {
                                return false;
                            }
                        }
                    }
                } else if *passed < at {
                    let left = usize::try_from(at - *passed).unwrap_or(usize::MAX);
                    max = max.min(left);
                }
            }
            let (piece, behind) = std::mem::take(&mut rest).split_at_mut(max);
            if way == Way::There && *passed < HEAD_LEN {
                let kept = piece.len().min((HEAD_LEN - *passed) as usize);
                self.state().heads[link.index].extend_from_slice(&piece[..kept]);
            }
            if !link.write_all(into, piece) {
                return false;
            }
            *passed += piece.len() as u64;
            rest = behind;
        }
        true
    }

    /// Lets the fault of the link happen; says whether this direction goes on.
    fn strike(&self, link: &Link, way: Way, into: &TcpStream) -> bool {
        let Some((_, _, fault)) = link.plan.fault else {
            return true;
        };
        // Not if the connection was healed in the meantime.
        if link.end.load(Ordering::SeqCst) != OPEN {
            return false;
        }
        self.note(fault);
        match fault {
            Fault::Truncate => link.end(false),
            Fault::Reset => link.end(true),
            Fault::HalfClose => {
                let _ = into.shutdown(Shutdown::Write);
                let from = match way {
                    Way::There => &link.near,
                    Way::Back => &link.far,
                };
                link.swallow(from);
            }
            Fault::Stall => {
                let _ =
                    link.end
                        .compare_exchange(OPEN, STALLED, Ordering::SeqCst, Ordering::SeqCst);
                link.wait_for_end();
            }
            Fault::StallOneWay => link.wait_for_end(),
            Fault::Pause => {
                link.wait_until(Instant::now() + self.profile.pause);
                return link.end.load(Ordering::SeqCst) == OPEN;
            }
            Fault::Flip => return true,
        }
        false
    }
}

fn is_moment(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
    )
}

impl Link {
    fn piece_max(&self, passed: u64) -> usize {
        self.plan.pieces_max[usize::from(passed >= FIRST_BYTES)]
    }

    /// Ends both sides, and their threads with them; the last one closes the sockets.
    fn end(&self, reset: bool) {
        if self.end.swap(ENDED, Ordering::SeqCst) == ENDED {
            return;
        }
        for stream in [&self.near, &self.far] {
            if reset {
                // Sends nothing, but wakes whoever reads; closing sends the reset.
                let _ = socket2::SockRef::from(stream).set_linger(Some(Duration::ZERO));
                let _ = stream.shutdown(Shutdown::Read);
            } else {
                let _ = stream.shutdown(Shutdown::Both);
            }
        }
    }

    /// Writes all of it, unless the link ends or stalls.
    fn write_all(&self, mut into: &TcpStream, mut bytes: &[u8]) -> bool {
        while !bytes.is_empty() {
            match self.end.load(Ordering::SeqCst) {
                OPEN => {}
                STALLED => {
                    self.wait_for_end();
                    return false;
                }
                _ => return false,
            }
            match into.write(bytes) {
                Ok(count) => bytes = &bytes[count..],
                Err(error) if is_moment(&error) => {}
                Err(_) => {
                    self.end(true);
                    return false;
                }
            }
        }
        true
    }

    /// Reads and throws away, until the other end has nothing more to say.
    fn swallow(&self, mut from: &TcpStream) {
        let mut buffer = [0; 4096];
        while self.end.load(Ordering::SeqCst) != ENDED {
            match from.read(&mut buffer) {
                Ok(0) => return,
                Ok(_) => {}
                Err(error) if is_moment(&error) => {}
                Err(_) => return self.end(true),
            }
        }
    }

    fn wait_for_end(&self) {
        while self.end.load(Ordering::SeqCst) != ENDED {
            std::thread::sleep(LOOK / 4);
        }
    }

    fn wait_until(&self, at: Instant) {
        while self.end.load(Ordering::SeqCst) != ENDED && Instant::now() < at {
            std::thread::sleep(LOOK / 4);
        }
    }
}

/// Reads one control frame, length and all.
fn read_frame(link: &Link, mut from: &TcpStream) -> io::Result<Vec<u8>> {
    let mut frame = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        if let Some(len) = frame.first_chunk() {
            let len = 8 + usize::try_from(u64::from_le_bytes(*len)).unwrap();
            if frame.len() >= len {
                return Ok(frame);
            }
        }
        match from.read(&mut buffer) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => frame.extend_from_slice(&buffer[..count]),
            Err(error) if is_moment(&error) => {
                if link.end.load(Ordering::SeqCst) == ENDED {
                    return Err(error);
                }
            }
            Err(error) => {
                link.end(true);
                return Err(error);
            }
        }
    }
}

/// Makes descriptors say that the data listener is at `data`, and that this version is spoken, if one is given.
pub(crate) fn leads_to(data: SocketAddr, version: Option<u64>) -> Rewrite {
    Arc::new(move |frame| {
        if frame.get(8) != Some(&1) {
            return frame;
        }
        let mut descriptor: Value = serde_json::from_slice(&frame[9..]).unwrap();
        descriptor["tcp_data_host"] = data.ip().to_string().into();
        descriptor["tcp_data_port"] = data.port().into();
        if let Some(version) = version {
            descriptor["tcp_proto_version"] = version.into();
        }
        let text = descriptor.to_string();
        let mut frame = (text.len() as u64 + 1).to_le_bytes().to_vec();
        frame.push(1);
        frame.extend_from_slice(text.as_bytes());
        frame
    })
}

/// Proxies in front of both ports of an engine: whoever opens the proxy as a segment transfers through it.
pub(crate) struct EngineProxy {
    pub(crate) control: Proxy,
    pub(crate) data: Proxy,
}

impl EngineProxy {
    /// `version` is what the descriptor says that the engine speaks, if not what it says itself.
    pub(crate) fn start(
        control: SocketAddr,
        data: SocketAddr,
        seed: u64,
        profiles: [Profile; 2],
        version: Option<u64>,
    ) -> Self {
        let [control_profile, data_profile] = profiles;
        let data = Proxy::start(data, seed.wrapping_mul(2), data_profile);
        let rewrite = leads_to(data.address(), version);
        let bind = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);
        let seed = seed.wrapping_mul(2) + 1;
        Self {
            control: Proxy::start_at(bind, control, seed, control_profile, Some(rewrite)),
            data,
        }
    }

    /// The name to dial.
    pub(crate) fn session(&self) -> String {
        self.control.address().to_string()
    }

    pub(crate) fn heal(&self) {
        self.control.heal();
        self.data.heal();
    }

    /// Asserts that every data connection began with a request of `version`, unless it was cut before its first
    /// header was whole; returns how many were not.
    #[track_caller]
    pub(crate) fn assert_version(&self, version: DataVersion) -> usize {
        let heads = self.data.heads();
        let whole = heads.iter().filter_map(|head| head.first_chunk());
        whole
            .map(|head| assert_eq!(Header::decode(head).unwrap().version, version))
            .count()
    }

    pub(crate) fn happened(&self) -> Happened {
        let mut happened = self.control.happened();
        for (fault, count) in self.data.happened() {
            *happened.entry(fault).or_default() += count;
        }
        happened
    }
}
