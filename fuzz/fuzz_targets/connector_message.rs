//! Messages of the connector's control plane: requests, through the dispatcher to a shard that writes down what it was
//! asked, and ready events.
#![no_main]

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ec_connector::{
    CancelKind, CancelMatch, Completion, Dispatcher, Effect, Grant, ItemStatus, PoolSnapshot,
    ReadyEvent, ReservationId, ReserveError, ReserveReply, ReserveRequest, Shard, Site, TransferId,
};
use libfuzzer_sys::fuzz_target;
use serde_json::{Value, json};
use slab_fuzz::within_reach_of;

const ID: ReservationId = ReservationId::from_random(7);

fuzz_target!(|frame: &[u8]| {
    let (reply, asked) = within_reach_of(frame.len(), || answer(frame));
    check_reply(&reply, !asked.is_empty());
    let value: Option<Value> = serde_json::from_slice(frame).ok();
    if let Some(value) = &value {
        check_request(value, &reply, &asked);
        // Laid out otherwise, the request is the same; the last bit of a float may not be.
        if !has_float(value) {
            let spread = serde_json::to_vec_pretty(value).expect("it was JSON");
            assert_eq!(answer(&spread), (reply, asked));
        }
    } else {
        assert!(asked.is_empty());
    }
    let event = within_reach_of(frame.len(), || ReadyEvent::decode(frame));
    if let Some(event) = event {
        let again = json!({
            "ready": true,
            "transfer_id": event.transfer_id,
            "mm_hash": event.mm_hash,
            "reservation_id": event.reservation_id,
            "nbytes": event.len_bytes,
            "shape": event.shape,
            "dtype": event.dtype,
            "shard": event.shard,
        });
        assert_eq!(
            ReadyEvent::decode(again.to_string().as_bytes()),
            Some(event)
        );
    }
});

fn has_float(value: &Value) -> bool {
    match value {
        Value::Number(number) => number.is_f64(),
        Value::Array(values) => values.iter().any(has_float),
        Value::Object(object) => object.values().any(has_float),
        _ => false,
    }
}

/// The reply, and what the shard was asked.
fn answer(frame: &[u8]) -> (Vec<u8>, Vec<Asked>) {
    let shard = Arc::new(Recorder::default());
    let site = Site {
        session: "h:1".into(),
        base: 1 << 20,
        peers: vec![5, 6],
        control_port: 5,
        event_port: 7,
    };
    let answer = Dispatcher::new(shard.clone(), site).answer(frame, 1);
    assert!(answer.events.is_empty(), "nothing became ready");
    let asked = std::mem::take(&mut *shard.asked.lock().expect("one thread"));
    (answer.reply, asked)
}

/// Whatever came, the answer is one that peers can read. A refused message reached no shard.
fn check_reply(reply: &[u8], was_asked: bool) {
    let value: Value = serde_json::from_slice(reply).expect("a reply is JSON");
    match value["ok"] {
        Value::Bool(true) => assert!(value.get("result").is_some(), "{value}"),
        Value::Bool(false) => {
            assert!(
                value["error"].is_string() && value["code"].is_string(),
                "{value}"
            );
            assert_ne!(value["code"], "internal", "{value}");
            assert!(!was_asked, "{value}");
        }
        _ => panic!("neither done nor refused: {value}"),
    }
}

/// A reserve reaches the shard only with the bytes it named, and the grant names as many.
fn check_request(request: &Value, reply: &[u8], asked: &[Asked]) {
    let Some("reserve") = request["op"].as_str() else {
        return;
    };
    for asked in asked {
        let Asked::Reserve(reserve) = asked else {
            panic!("a reserve became {asked:?}");
        };
        let len = reserve.tensor.len_bytes();
        if let Some(named) = request["nbytes"].as_u64() {
            assert_eq!(len, named);
        }
        let value: Value = serde_json::from_slice(reply).expect("a reply is JSON");
        assert_eq!(value["result"]["nbytes"], len);
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Asked {
    Reserve(ReserveRequest),
    Complete(TransferId, Option<ReservationId>),
    Cancel(TransferId, CancelMatch, CancelKind),
    Status(TransferId),
}

#[derive(Default)]
struct Recorder {
    asked: Mutex<Vec<Asked>>,
}

impl Recorder {
    fn note(&self, asked: Asked) {
        self.asked.lock().expect("one thread").push(asked);
    }
}

impl Shard for Recorder {
    fn claim_wait(&self) -> Duration {
        Duration::ZERO
    }

    fn reserve(
        &self,
        request: &ReserveRequest,
        _: Instant,
        _: &mut Vec<Effect>,
    ) -> Result<ReserveReply, ReserveError> {
        self.note(Asked::Reserve(request.clone()));
        Ok(ReserveReply::Granted(Grant {
            reservation_id: ID,
            offset: 64,
            len_bytes: request.tensor.len_bytes(),
            write: true,
            ready: false,
            cached: false,
        }))
    }

    fn complete(
        &self,
        id: &TransferId,
        reservation: Option<ReservationId>,
        _: &mut Vec<Effect>,
    ) -> Completion {
        self.note(Asked::Complete(id.clone(), reservation));
        Completion::default()
    }

    fn cancel(
        &self,
        id: &TransferId,
        matching: CancelMatch,
        kind: CancelKind,
        _: &mut Vec<Effect>,
    ) -> bool {
        self.note(Asked::Cancel(id.clone(), matching, kind));
        true
    }

    fn status(&self, id: &TransferId) -> Option<ItemStatus> {
        self.note(Asked::Status(id.clone()));
        None
    }

    fn expire(&self, _: &mut Vec<Effect>) {}

    fn snapshot(&self) -> PoolSnapshot {
        PoolSnapshot::default()
    }
}
