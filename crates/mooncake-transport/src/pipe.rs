//! A pipe that moves tensors between two processes: announced over ZeroMQ, read by the receiver's
//! engine from the sender's memory.
//!
//! It is compatible, in both directions, with the pipe that vLLM had over Mooncake: the same
//! configuration file, ports, sockets and messages. What is sent is copied once, into a registered
//! slab; what is received stays in the slab it was read to, and is parsed there. Each direction has a thread that
//! hears of its connection, and works on those of its callers.
//!
//! Invariants: the two directions share nothing that one could wait for the other in; a buffer is
//! reused only after the answer to its own notice, or after the engine serves no more reads; every
//! notice that was taken is answered, with `NAK` if need be; every wait has a bound; a direction that
//! has ended says why, to both sides where the other can be told.
//!
//! Not here: which tensor comes next. There is no authentication, either: whoever can connect to the
//! ports takes part.
//!
//! ```no_run
//! use std::time::Duration;
//! use mooncake_transport::pipe::{Dtype, Message, Pipe, PipeConfig, PipeOptions, Role, Tensor};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let config = PipeConfig::from_env()?; // MOONCAKE_CONFIG_PATH
//! let mut pipe = Pipe::start(&config, Role::Prefill, 0, PipeOptions::default())?;
//! let wait = Duration::from_secs(60);
//! pipe.sender().send(Tensor { dtype: Dtype::U8, shape: &[3], bytes: b"abc" }, wait)?;
//! match pipe.receiver().recv(wait)? {
//!     Message::Tensor(tensor) => println!("{} {:?}", tensor.dtype(), tensor.shape()),
//!     Message::NoTensor => println!("none"),
//! }
//! pipe.close(wait)?; // waits until the peer has everything
//! # Ok(())
//! # }
//! ```

mod buffers;
mod config;
mod error;
pub mod frame;
mod options;
mod ports;
mod receiver;
mod sender;
mod socket;
mod state;
mod watch;

use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::{IpAddr, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

pub use config::{
    AddressProblem, CONFIG_VARIABLE, ConfigError, HostPort, MetadataBackend, PipeConfig, Role,
};
pub use error::{Broken, ReadFailure, RecvError, SendError, SocketReason, StartError, Waiting};
pub use frame::Dtype;
pub use options::{Dialect, PipeOptions};
pub use ports::{PortKind, PortPlan, PortUse, Ports};
pub use receiver::{Message, PipeReceiver, ReceivedTensor};
pub use sender::{PipeSender, Tensor};

use self::buffers::Buffers;
use self::receiver::ReceiverParts;
use self::socket::{Incoming, Outgoing};
use self::state::{SendLimits, SendMachine};
use crate::engine::Engine;
use crate::error::IoFailure;
use crate::metadata::{MetadataStore, StoreConfig, StoreEngine, StoreTimeouts, open_store};
use crate::registration::Access;
use crate::tcp::{TcpConfig, TcpEngine};

/// The text that stands for an exchange of descriptors between the engines themselves.
const PEER_TO_PEER: &str = "P2PHANDSHAKE";

/// A pipe to the process with the same rank on the other side.
///
/// The two directions are independent values; [`split`](Self::split) gives each its own thread. The
/// pipe is for one peer and one life of it: once the peer's connection has ended, so have both
/// directions, after what was announced and can still be read.
#[derive(Debug)]
pub struct Pipe {
    sender: PipeSender,
    receiver: PipeReceiver,
}

impl Pipe {
    /// Starts a native engine under the configured name, and a pipe over it. With a `metadata_server`
    /// other than `P2PHANDSHAKE` the engine publishes itself in that store and finds the peer's there, as
    /// [`open_store`] and `metadata_backend` choose it; the store's feature has to be built. The cluster id
    /// is empty: for another, start an engine and pass it to [`with_engine`](Self::with_engine).
    ///
    /// # Errors
    /// [`StartError`]: among others, ports that overlap or are in use, a protocol other than `tcp`,
    /// and a `metadata_server` that is no store or one that does not answer.
    pub fn start(
        config: &PipeConfig,
        role: Role,
        rank: u16,
        options: PipeOptions,
    ) -> Result<Self, StartError> {
        options.check()?;
        let ports = plan(config, rank, &options)?;
        let (own, _) = both(&ports, role, rank)?;
        if config.protocol() != "tcp" {
            return Err(StartError::Protocol {
                protocol: config.protocol().to_owned(),
            });
        }
        let store = store_of(config, &options)?;
        let host = config.side(role).host();
        let mut engine = TcpConfig::default();
        engine.bind = resolve(host)?;
        engine.advertise = Some(host.to_owned());
        engine.control_port = Some(own.engine);
        engine.timeouts.control_reply = options.read_timeout;
        let engine: Arc<dyn Engine> = match store {
            None => Arc::new(TcpEngine::start(engine)?),
            Some(store) => {
                let named = StoreConfig {
                    name: Some(config.side(role).at(own.engine)),
                    ..StoreConfig::default()
                };
                Arc::new(StoreEngine::start(engine, store, named)?)
            }
        };
        Self::with_engine(config, role, rank, options, engine)
    }

    /// Starts a pipe over an engine of the caller's: one that finds peers through a store, or the
    /// real one. It has to be known to the peer under the configured name, `HOST:PORT + rank`, unless
    /// the peer is of our kind; the configuration's engine keys are not looked at.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn with_engine(
        config: &PipeConfig,
        role: Role,
        rank: u16,
        options: PipeOptions,
        engine: Arc<dyn Engine>,
    ) -> Result<Self, StartError> {
        options.check()?;
        let ports = plan(config, rank, &options)?;
        let (own, peer) = both(&ports, role, rank)?;
        let address = resolve(config.side(role).host())?;
        let other = config.side(role.peer());
        let linger = options.linger;

        let sent = Buffers::new("send_bytes", options.send_bytes)?;
        let received = Buffers::new("receive_bytes", options.receive_bytes)?;
        let sent_registration = engine.register(sent.slab().clone(), Access::RemoteRead)?;
        let received_registration = engine.register(received.slab().clone(), Access::Local)?;

        let context = zmq::Context::new();
        let connect = |port, name| Incoming::connect(&context, &other.at(port), name, linger);
        let notices = Outgoing::bind(&context, address, own.notices, linger)?;
        let answers = Outgoing::bind(&context, address, own.answers, linger)?;
        let peer_is_new = Arc::new(AtomicBool::new(false));
        let limits = SendLimits {
            outstanding_max: options.outstanding_max,
            answer_timeout: options.answer_timeout,
        };
        let session = match options.dialect {
            Dialect::Extended => Some(engine.session().to_owned()),
            Dialect::Plain => None,
        };
        let sender = PipeSender::new(
            notices,
            connect(peer.answers, "answers")?,
            sent_registration,
            SendMachine::new(limits, session, first_id()),
            sent,
            Arc::clone(&peer_is_new),
            Arc::clone(&engine),
        );
        let receiver = PipeReceiver::new(ReceiverParts {
            notices: connect(peer.notices, "notices")?,
            answers,
            engine,
            registration: received_registration,
            buffers: received,
            peer_session: options
                .peer_session
                .unwrap_or_else(|| other.at(peer.engine)),
            read_timeout: options.read_timeout,
            peer_is_new,
        });
        tracing::info!(%role, rank, peer = other.at(peer.engine), "pipe started");
        Ok(Self { sender, receiver })
    }

    /// Returns the sending direction.
    pub fn sender(&mut self) -> &mut PipeSender {
        &mut self.sender
    }

    /// Returns the receiving direction.
    pub fn receiver(&mut self) -> &mut PipeReceiver {
        &mut self.receiver
    }

    /// Takes the directions apart, each for a thread of its own.
    pub fn split(self) -> (PipeSender, PipeReceiver) {
        (self.sender, self.receiver)
    }

    /// Waits until the peer has answered everything that was sent, then closes the pipe. It is
    /// closed, and its buffers are given back, whatever the result is.
    ///
    /// # Errors
    /// As [`PipeSender::flush`]: what is not known to have arrived.
    pub fn close(self, timeout: Duration) -> Result<(), SendError> {
        drop(self.receiver);
        self.sender.close(timeout)
    }
}

/// The store that the configuration names, if it does, which is given no more time than the bytes of a tensor.
/// For real engines `P2PHANDSHAKE` wins over any backend, and a scheme over the backend.
fn store_of(
    config: &PipeConfig,
    options: &PipeOptions,
) -> Result<Option<Arc<dyn MetadataStore>>, StartError> {
    let server = config.metadata_server();
    if server == PEER_TO_PEER {
        return Ok(None);
    }
    let address = match config.metadata_backend() {
        Some(backend) if !server.contains("://") => format!("{backend}://{server}"),
        _ => server.to_owned(),
    };
    let mut timeouts = StoreTimeouts::default();
    timeouts.connect = timeouts.connect.min(options.read_timeout);
    timeouts.total = timeouts.total.min(options.read_timeout);
    open_store(&address, timeouts)
        .map(Some)
        .map_err(StartError::Metadata)
}

fn plan(config: &PipeConfig, rank: u16, options: &PipeOptions) -> Result<PortPlan, ConfigError> {
    PortPlan::new(config, options.ranks.max(rank.saturating_add(1)))
}

/// The ports of a rank on the own side and on the peer's.
fn both(plan: &PortPlan, role: Role, rank: u16) -> Result<(Ports, Ports), ConfigError> {
    match (plan.ports(role, rank), plan.ports(role.peer(), rank)) {
        (Some(own), Some(peer)) => Ok((own, peer)),
        // The plan was made for more ranks than this one.
        _ => Err(ConfigError::Ranks {
            ranks: rank.saturating_add(1),
            max: rank,
        }),
    }
}

/// An address of the own host, which is what sockets bind to.
fn resolve(host: &str) -> Result<IpAddr, StartError> {
    let error = |source: IoFailure| StartError::Resolve {
        host: host.to_owned(),
        source,
    };
    let mut addresses = (host, 0)
        .to_socket_addrs()
        .map_err(|source| error(source.into()))?;
    match addresses.next() {
        Some(address) => Ok(address.ip()),
        None => Err(error(
            std::io::Error::from(std::io::ErrorKind::NotFound).into(),
        )),
    }
}

/// A first number that another run of this program hardly begins with. JSON readers that count in
/// floating point can hold it.
fn first_id() -> u64 {
    RandomState::new().build_hasher().finish() >> 12
}
