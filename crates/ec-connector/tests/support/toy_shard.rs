//! A consumer shard over a toy pool, and a bare REQ socket to talk to its server.

#![allow(dead_code, reason = "each test target uses its own part")]

use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ec_connector::{
    CancelKind, CancelMatch, Completion, ControlServer, Effect, ItemStatus, MmHash, Moment,
    PoolSnapshot, ReservationConfig, ReservationId, Reservations, Reserve, ReserveError,
    ReserveReply, ReserveRequest, ServerConfig, Shard, TransferId,
};
use serde_json::Value;

use super::toy_pool::ToyPool;

pub(crate) const SESSION: &str = "127.0.0.1:15999";
pub(crate) const BASE: u64 = 0x7f00_0000_0000_0000;

pub(crate) struct ToyShard {
    state: Mutex<(ToyPool, Reservations<ToyPool>)>,
    now_ms: AtomicU64,
    fresh: AtomicU64,
}

impl ToyShard {
    pub(crate) fn new(capacity: u64) -> Arc<Self> {
        Self::with(capacity, ReservationConfig::default())
    }

    pub(crate) fn with(capacity: u64, config: ReservationConfig) -> Arc<Self> {
        let pool = ToyPool::new(capacity, 256);
        Arc::new(Self {
            state: Mutex::new((pool, Reservations::new(config))),
            now_ms: AtomicU64::new(1_000_000),
            fresh: AtomicU64::new(0),
        })
    }

    pub(crate) fn pass(&self, millis: u64) {
        self.now_ms.fetch_add(millis, Ordering::SeqCst);
    }

    pub(crate) fn with_state<R>(
        &self,
        body: impl FnOnce(&mut ToyPool, &mut Reservations<ToyPool>, Moment) -> R,
    ) -> R {
        let mut state = self.state.lock().unwrap();
        let (pool, machine) = &mut *state;
        body(pool, machine, self.now())
    }

    /// Takes a ready item and gives its lease back, so the content is an idle resident.
    pub(crate) fn take_and_retire(&self, transfer: &str, mm_hash: &str) {
        use ec_connector::Content;
        self.with_state(|pool, machine, _| {
            let id = TransferId::new(transfer).unwrap();
            let hash = MmHash::new(mm_hash).unwrap();
            let taken = machine.take(pool, &id, &hash).unwrap();
            pool.release(taken.lease);
        });
    }

    fn now(&self) -> Moment {
        Moment::from_millis(self.now_ms.load(Ordering::SeqCst))
    }
}

impl Shard for ToyShard {
    fn claim_wait(&self) -> Duration {
        Duration::ZERO
    }

    fn reserve(
        &self,
        request: &ReserveRequest,
        _: Instant,
        effects: &mut Vec<Effect>,
    ) -> Result<ReserveReply, ReserveError> {
        let fresh = self.fresh.fetch_add(1, Ordering::SeqCst);
        let fresh = ReservationId::from_random(fresh.into());
        self.with_state(|pool, machine, now| {
            match machine.reserve(pool, now, fresh, request, effects)? {
                Reserve::Granted(grant) => Ok(ReserveReply::Granted(grant)),
                Reserve::Cancelled => Ok(ReserveReply::Cancelled),
                Reserve::Later(pending) => Err(machine.give_up(pool, pending)),
            }
        })
    }

    fn complete(
        &self,
        id: &TransferId,
        reservation: Option<ReservationId>,
        effects: &mut Vec<Effect>,
    ) -> Completion {
        self.with_state(|pool, machine, now| machine.complete(pool, now, id, reservation, effects))
    }

    fn cancel(
        &self,
        id: &TransferId,
        matching: CancelMatch,
        kind: CancelKind,
        effects: &mut Vec<Effect>,
    ) -> bool {
        self.with_state(|pool, machine, now| machine.cancel(pool, now, id, matching, kind, effects))
    }

    fn status(&self, id: &TransferId) -> Option<ItemStatus> {
        self.with_state(|_, machine, _| machine.status(id))
    }

    fn expire(&self, effects: &mut Vec<Effect>) {
        self.with_state(|pool, machine, now| machine.expire(pool, now, effects));
    }

    fn snapshot(&self) -> PoolSnapshot {
        self.with_state(|pool, machine, _| {
            let mut snapshot = PoolSnapshot::default();
            snapshot.bytes.free = pool.free_bytes();
            snapshot.bytes.stuck = machine.stats().stuck_bytes;
            snapshot
        })
    }
}

/// A server of a toy shard on a free loopback port, and a REQ socket that speaks to it.
pub(crate) struct Wire {
    pub(crate) shard: Arc<ToyShard>,
    pub(crate) server: ControlServer,
    pub(crate) context: zmq::Context,
    socket: Option<zmq::Socket>,
}

impl Wire {
    pub(crate) fn new(capacity: u64) -> Self {
        Self::with(ToyShard::new(capacity), |_| {})
    }

    pub(crate) fn with(shard: Arc<ToyShard>, change: impl FnOnce(&mut ServerConfig)) -> Self {
        let host = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let mut config = ServerConfig::new(host, 0, SESSION, BASE);
        change(&mut config);
        let server = ControlServer::start(config, shard.clone()).unwrap();
        Self {
            shard,
            server,
            context: zmq::Context::new(),
            socket: None,
        }
    }

    fn socket(&mut self) -> &zmq::Socket {
        let address = self.server.address().to_string();
        let context = &self.context;
        self.socket.get_or_insert_with(|| {
            let socket = context.socket(zmq::REQ).unwrap();
            socket.set_linger(0).unwrap();
            socket.set_rcvtimeo(10_000).unwrap();
            socket.connect(&address).unwrap();
            socket
        })
    }

    /// Sends frames and returns the one frame of the reply.
    #[track_caller]
    pub(crate) fn exchange(&mut self, frames: &[&[u8]]) -> String {
        let socket = self.socket();
        socket.send_multipart(frames, 0).unwrap();
        let reply = socket.recv_multipart(0).unwrap();
        assert_eq!(reply.len(), 1, "a reply has one frame");
        String::from_utf8(reply.into_iter().next().unwrap()).unwrap()
    }

    /// Sends a request and returns the reply's text.
    #[track_caller]
    pub(crate) fn ask_text(&mut self, request: &Value) -> String {
        self.exchange(&[request.to_string().as_bytes()])
    }

    /// Sends a request and returns the reply.
    #[track_caller]
    pub(crate) fn ask(&mut self, request: &Value) -> Value {
        serde_json::from_str(&self.ask_text(request)).unwrap()
    }

    /// Sends a request and returns its result.
    #[track_caller]
    pub(crate) fn result(&mut self, request: &Value) -> Value {
        let reply = self.ask(request);
        assert_eq!(reply["ok"], true, "{request} got {reply}");
        reply["result"].clone()
    }

    /// Sends a request and checks the error it gets.
    #[track_caller]
    pub(crate) fn check_error(&mut self, request: &Value, error: &str, code: &str) {
        let reply = self.ask(request);
        let expected = serde_json::json!({"ok": false, "error": error, "code": code});
        assert_eq!(reply, expected, "{request}");
    }

    /// A PULL socket on the event port.
    pub(crate) fn subscribe(&self) -> zmq::Socket {
        let socket = self.context.socket(zmq::PULL).unwrap();
        socket.set_linger(0).unwrap();
        socket.set_rcvtimeo(5_000).unwrap();
        let address = self.server.address().with_port(self.server.event_port());
        socket.connect(&address.to_string()).unwrap();
        socket
    }
}

/// Waits until `done` says so, and fails after ten seconds.
#[track_caller]
pub(crate) fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    for _ in 0..1000 {
        if done() {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("did not happen: {what}");
}
