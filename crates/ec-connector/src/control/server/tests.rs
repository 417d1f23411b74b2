//! The rules of the server's loop, over scripted sockets.

use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;

use super::*;
use crate::control::dispatch::ReserveReply;
use crate::control::message::snapshot::PoolSnapshot;
use crate::dtype::Dtype;
use crate::name::{MmHash, ReservationId, TransferId};
use crate::reservation::{
    CancelKind, CancelMatch, Completion, Effect, ItemStatus, ReservationState, ReserveError,
    ReserveRequest,
};
use crate::tensor::TensorSpec;

/// A shard that announces an item per completion, and panics where it is told to.
#[derive(Default)]
struct ScriptedShard {
    expired: AtomicUsize,
    panic_in_expire: bool,
    panic_in_status: bool,
}

impl Shard for ScriptedShard {
    fn claim_wait(&self) -> Duration {
        Duration::MAX
    }

    fn reserve(
        &self,
        _: &ReserveRequest,
        _: Instant,
        _: &mut Vec<Effect>,
    ) -> Result<ReserveReply, ReserveError> {
        Ok(ReserveReply::Cancelled)
    }

    fn complete(
        &self,
        id: &TransferId,
        _: Option<ReservationId>,
        effects: &mut Vec<Effect>,
    ) -> Completion {
        effects.push(Effect::Ready(ItemStatus {
            transfer_id: id.clone(),
            mm_hash: MmHash::new("h").unwrap(),
            tensor: TensorSpec::new(Dtype::UINT8, [1]).unwrap(),
            reservation_id: ReservationId::from_random(0),
            state: ReservationState::Ready,
            cached: false,
        }));
        Completion {
            completed: true,
            became_ready: true,
        }
    }

    fn cancel(&self, _: &TransferId, _: CancelMatch, _: CancelKind, _: &mut Vec<Effect>) -> bool {
        true
    }

    fn status(&self, _: &TransferId) -> Option<ItemStatus> {
        assert!(!self.panic_in_status, "as told");
        None
    }

    fn expire(&self, _: &mut Vec<Effect>) {
        self.expired.fetch_add(1, Ordering::Relaxed);
        assert!(!self.panic_in_expire, "as told");
    }

    fn snapshot(&self) -> PoolSnapshot {
        PoolSnapshot::default()
    }
}

/// Requests to hand out, and a log of what was sent in which order.
#[derive(Default)]
struct ScriptedSockets {
    requests: VecDeque<Vec<u8>>,
    errors: VecDeque<zmq::Error>,
    subscribed: bool,
    log: Arc<Mutex<Vec<String>>>,
}

impl Sockets for ScriptedSockets {
    fn receive(&mut self, _: Duration) -> Result<Received, zmq::Error> {
        if let Some(error) = self.errors.pop_front() {
            return Err(error);
        }
        Ok(match self.requests.pop_front() {
            Some(frame) => Received::Request {
                frame,
                frame_count: 1,
            },
            None => Received::Nothing,
        })
    }

    fn reply(&mut self, bytes: &[u8]) -> Result<(), zmq::Error> {
        let text = String::from_utf8_lossy(bytes).into_owned();
        self.log.lock().unwrap().push(text);
        Ok(())
    }

    fn send_event(&mut self, bytes: &[u8]) -> Result<bool, zmq::Error> {
        if self.subscribed {
            let value: serde_json::Value = serde_json::from_slice(bytes).unwrap();
            self.log
                .lock()
                .unwrap()
                .push(format!("event {}", value["transfer_id"]));
        }
        Ok(self.subscribed)
    }
}

fn service(shard: ScriptedShard, events_max: usize) -> Service<ScriptedSockets> {
    let site = Site {
        session: "127.0.0.1:1".to_owned(),
        base: 0,
        peers: vec![1],
        control_port: 1,
        event_port: 2,
    };
    let counters = Arc::new(Counters::default());
    Service {
        sockets: ScriptedSockets::default(),
        dispatcher: Dispatcher::with_drop_count(
            Arc::new(shard),
            site,
            Arc::clone(&counters.events_dropped),
        ),
        backlog: Backlog::new(events_max),
        expired_at: Instant::now(),
        counters,
        throttle: Throttle::default(),
        backlog_throttle: Throttle::new(BACKLOG_LOG_PERIOD),
        failures: 0,
    }
}

fn complete(id: &str) -> Vec<u8> {
    format!(r#"{{"op":"complete","transfer_id":"{id}","reservation_id":"r"}}"#).into_bytes()
}

const PEERS: &[u8] = br#"{"op":"peers"}"#;

#[test]
fn an_event_leaves_right_after_the_reply_of_its_request() {
    let mut service = service(ScriptedShard::default(), 8);
    service.sockets.subscribed = true;
    service.sockets.requests = [complete("a"), PEERS.to_vec()].into();
    while !service.sockets.requests.is_empty() {
        assert!(service.turn());
    }
    let log = service.sockets.log.lock().unwrap();
    assert!(log[0].contains("became_ready"), "{log:?}");
    assert_eq!(log[1], "event \"a\"");
    assert!(log[2].contains("ports"), "{log:?}");
}

// row: D15
#[test]
fn events_wait_for_a_subscriber_and_the_oldest_is_dropped_and_counted() {
    let mut service = service(ScriptedShard::default(), 2);
    service.sockets.requests = ["a", "b", "c", "d"].map(complete).into();
    for _ in 0..4 {
        assert!(service.turn());
    }
    assert_eq!(service.counters.events_dropped.load(Ordering::Relaxed), 2);
    service.sockets.log.lock().unwrap().clear();
    service.sockets.subscribed = true;
    assert!(service.turn());
    assert_eq!(
        *service.sockets.log.lock().unwrap(),
        ["event \"c\"", "event \"d\""]
    );
    assert_eq!(service.counters.events_sent.load(Ordering::Relaxed), 2);
}

/// What is logged while `run` runs, as text.
fn logged(run: impl FnOnce()) -> String {
    let path = tempfile::NamedTempFile::new().unwrap();
    let file = path.reopen().unwrap();
    let subscriber = tracing_subscriber::fmt()
        .with_writer(Mutex::new(file))
        .with_ansi(false)
        .finish();
    tracing::subscriber::with_default(subscriber, run);
    std::fs::read_to_string(path.path()).unwrap()
}

#[test]
fn events_that_nobody_ever_fetched_are_no_warning_and_others_are_one() {
    let mut service = service(ScriptedShard::default(), 2);
    let mut complete_all = |subscribed, ids: &[&str]| {
        service.sockets.subscribed = subscribed;
        service.sockets.requests = ids.iter().copied().map(complete).collect();
        logged(|| {
            while !service.sockets.requests.is_empty() {
                assert!(service.turn());
            }
            // Events of the last request leave in the next turn.
            assert!(service.turn());
            service.backlog_throttle = Throttle::new(BACKLOG_LOG_PERIOD);
        })
    };
    assert_eq!(complete_all(false, &["a", "b", "c", "d"]), "");
    assert_eq!(complete_all(true, &["e"]), "");
    let log = complete_all(false, &["f", "g", "h", "i", "j"]);
    assert_eq!(log.lines().count(), 1, "{log}");
    assert!(
        log.contains("WARN") && log.contains("not fetched fast enough"),
        "{log}"
    );
}

// row: D2
#[test]
fn a_panic_in_the_expiry_tick_is_survived() {
    let shard = ScriptedShard {
        panic_in_expire: true,
        ..ScriptedShard::default()
    };
    let mut service = service(shard, 8);
    service.expired_at -= Duration::from_secs(2);
    service.sockets.requests = [PEERS.to_vec()].into();
    assert!(service.turn());
    let log = service.sockets.log.lock().unwrap();
    assert!(log[0].contains(r#""ok": true"#), "{log:?}");
}

#[test]
fn a_panic_in_a_request_is_answered_with_an_error_and_survived() {
    let shard = ScriptedShard {
        panic_in_status: true,
        ..ScriptedShard::default()
    };
    let mut service = service(shard, 8);
    let status = br#"{"op":"status","transfer_id":"t"}"#.to_vec();
    service.sockets.requests = [status, PEERS.to_vec()].into();
    assert!(service.turn());
    assert!(service.turn());
    let log = service.sockets.log.lock().unwrap();
    assert_eq!(
        log[0],
        r#"{"ok": false, "error": "internal error", "code": "internal"}"#
    );
    assert!(log[1].contains(r#""ok": true"#));
}

#[test]
fn expiry_runs_every_second_also_while_requests_keep_coming() {
    let shard = Arc::new(ScriptedShard::default());
    let mut service = service(ScriptedShard::default(), 8);
    let site = Site {
        session: String::new(),
        base: 0,
        peers: vec![],
        control_port: 1,
        event_port: 2,
    };
    service.dispatcher = Dispatcher::new(shard.clone(), site);
    for round in 0..3 {
        service.sockets.requests = vec![PEERS.to_vec(); 100].into();
        service.expired_at -= Duration::from_secs(1);
        for _ in 0..100 {
            assert!(service.turn());
        }
        assert_eq!(shard.expired.load(Ordering::Relaxed), round + 1);
    }
}

#[test]
fn a_socket_error_is_survived_and_a_lost_library_ends_the_loop() {
    let mut service = service(ScriptedShard::default(), 8);
    service.sockets.errors = [zmq::Error::EFSM, zmq::Error::ETERM].into();
    service.sockets.requests = [PEERS.to_vec()].into();
    assert!(service.turn());
    assert!(!service.turn());
    assert!(service.turn(), "the request is still there");
}

#[test]
fn a_socket_that_never_recovers_ends_the_service_and_one_that_does_is_forgiven() {
    let mut service = service(ScriptedShard::default(), 4);
    for _ in 0..FAILURES_MAX - 1 {
        service.sockets.errors.push_back(zmq::Error::EFSM);
    }
    for _ in 0..FAILURES_MAX - 1 {
        assert!(service.turn());
    }
    assert!(service.turn(), "nothing was wrong this time");
    for _ in 0..FAILURES_MAX {
        service.sockets.errors.push_back(zmq::Error::EFSM);
    }
    for _ in 0..FAILURES_MAX - 1 {
        assert!(service.turn());
    }
    assert!(!service.turn());
}

/// A shard that counts how often its slab was looked at, and takes its time.
#[derive(Default)]
struct SlowToLookAt(AtomicUsize);

impl Shard for SlowToLookAt {
    fn claim_wait(&self) -> Duration {
        Duration::MAX
    }

    fn reserve(
        &self,
        _: &ReserveRequest,
        deadline: Instant,
        _: &mut Vec<Effect>,
    ) -> Result<ReserveReply, ReserveError> {
        let left = deadline.saturating_duration_since(Instant::now());
        assert!(
            left <= Duration::from_secs(1),
            "one request would wait {left:?}"
        );
        // Every item waits as long as it may.
        std::thread::sleep(left);
        Err(ReserveError::PoolFull)
    }

    fn complete(
        &self,
        _: &TransferId,
        _: Option<ReservationId>,
        _: &mut Vec<Effect>,
    ) -> Completion {
        Completion::default()
    }

    fn cancel(&self, _: &TransferId, _: CancelMatch, _: CancelKind, _: &mut Vec<Effect>) -> bool {
        true
    }

    fn status(&self, _: &TransferId) -> Option<ItemStatus> {
        None
    }

    fn expire(&self, _: &mut Vec<Effect>) {}

    fn snapshot(&self) -> PoolSnapshot {
        self.0.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(50));
        PoolSnapshot::default()
    }
}

fn dispatcher(shard: Arc<dyn Shard>) -> Dispatcher {
    let site = Site {
        session: "127.0.0.1:1".to_owned(),
        base: 0,
        peers: vec![1],
        control_port: 1,
        event_port: 2,
    };
    Dispatcher::new(shard, site)
}

#[test]
fn the_slab_is_not_looked_at_as_often_as_anybody_asks() {
    let shard = Arc::new(SlowToLookAt::default());
    let mut dispatcher = dispatcher(Arc::clone(&shard) as _);
    let request = br#"{"op":"x_pool"}"#;
    let first = dispatcher.answer(request, 1).reply;
    for _ in 0..100 {
        assert_eq!(dispatcher.answer(request, 1).reply, first);
    }
    // A look of 50 ms is good for a second; a hundred replies take far less.
    assert_eq!(shard.0.load(Ordering::Relaxed), 1);
}

#[test]
fn all_items_of_a_batch_wait_for_bytes_together_and_not_one_after_the_other() {
    let mut dispatcher = dispatcher(Arc::new(SlowToLookAt::default()));
    let item = r#"{"transfer_id":"t","mm_hash":"h","nbytes":1,"shape":[1],"dtype":"uint8"}"#;
    let items = vec![item; 100].join(",");
    let request = format!(r#"{{"op":"reserve_batch","items":[{items}]}}"#);
    let begun = Instant::now();
    let reply = dispatcher.answer(request.as_bytes(), 1).reply;
    assert!(begun.elapsed() < Duration::from_secs(3));
    let reply = String::from_utf8(reply).unwrap();
    assert_eq!(reply.matches("pool_full").count(), 100);
}
