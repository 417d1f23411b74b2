//! The control plane over real sockets: the reply tables of the protocol, the rows of its corner
//! cases that concern the server, and every kind of bad message. A comment above a test names the
//! row it holds.

#[path = "support/toy_pool.rs"]
mod toy_pool;
#[path = "support/toy_shard.rs"]
mod toy_shard;

use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpStream};
use std::time::{Duration, Instant};

use ec_connector::{
    CancelKind, ClientError, ControlAddress, ControlClient, ControlContext, ControlServer, Dtype,
    ErrorCode, EventSubscriber, MmHash, RemoteReserve, ReserveRequest, ServerConfig, ServerError,
    ShardGather, Shutdown, TensorSpec, TransferId,
};
use serde_json::{Value, json};
use toy_shard::{BASE, SESSION, ToyShard, Wire, eventually};

const TTL: u64 = 300_000;

fn reserve(transfer: &str, mm_hash: &str, len: u64) -> Value {
    json!({
        "op": "reserve", "transfer_id": transfer, "mm_hash": mm_hash,
        "nbytes": len, "shape": [len], "dtype": "uint8",
    })
}

fn complete(transfer: &str, reservation: &Value) -> Value {
    json!({"op": "complete", "transfer_id": transfer, "reservation_id": reservation})
}

fn request(transfer: &str, mm_hash: &str, len: u64) -> ReserveRequest {
    ReserveRequest {
        transfer_id: TransferId::new(transfer).unwrap(),
        mm_hash: MmHash::new(mm_hash).unwrap(),
        tensor: TensorSpec::new(Dtype::UINT8, [len]).unwrap(),
    }
}

fn keys(value: &Value) -> Vec<&str> {
    value
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect()
}

// ---- results ----

#[test]
fn peers_and_event_port_tell_the_ports() {
    let mut wire = Wire::new(4096);
    let port = wire.server.control_port();
    assert_eq!(
        wire.result(&json!({"op": "peers"})),
        json!({"ports": [port]})
    );
    let events = wire.server.event_port();
    assert_eq!(wire.result(&json!({"op": "event_port"})), json!(events));

    let mut wire = Wire::with(ToyShard::new(4096), |config| {
        config.peers = Some(vec![5, 6]);
    });
    assert_eq!(
        wire.result(&json!({"op": "peers"})),
        json!({"ports": [5, 6]})
    );
}

#[test]
fn reserve_complete_and_status_have_the_key_sets_of_the_peer() {
    let mut wire = Wire::new(4096);
    let granted = wire.result(&reserve("t", "h", 1000));
    assert_eq!(
        keys(&granted),
        [
            "reservation_id",
            "dst_session",
            "dst_ptr",
            "nbytes",
            "write",
            "ready",
            "cached"
        ]
    );
    assert_eq!(granted["dst_session"], SESSION);
    assert_eq!(granted["dst_ptr"], BASE, "beyond 2^53, exact");
    assert_eq!(granted["nbytes"], 1000);
    assert_eq!(granted["reservation_id"].as_str().unwrap().len(), 32);

    let status = wire.result(&json!({"op": "status", "transfer_id": "t"}));
    assert_eq!(
        keys(&status),
        [
            "mm_hash",
            "ready",
            "reservation_id",
            "nbytes",
            "shape",
            "dtype"
        ]
    );
    assert_eq!(status["ready"], false);
    assert_eq!(status["reservation_id"], granted["reservation_id"]);

    let completed = wire.result(&complete("t", &granted["reservation_id"]));
    assert_eq!(completed, json!({"completed": true, "became_ready": true}));
    let status = wire.result(&json!({"op": "status", "transfer_id": "t"}));
    assert_eq!(status["ready"], true);
    let unknown = wire.result(&json!({"op": "status", "transfer_id": "u"}));
    assert_eq!(unknown, Value::Null);
}

#[test]
fn a_cancelled_reserve_has_its_own_key_set() {
    let mut wire = Wire::new(4096);
    let cancel = json!({"op": "cancel", "transfer_id": "t"});
    assert_eq!(wire.result(&cancel), json!({"cancelled": true}));
    assert_eq!(
        wire.ask_text(&reserve("t", "h", 7)),
        concat!(
            r#"{"ok": true, "result": {"reservation_id": "", "dst_session": "", "dst_ptr": 0, "#,
            r#""nbytes": 7, "write": false, "ready": false, "cancelled": true}}"#
        )
    );
}

// row: V18
#[test]
fn zero_bytes_have_address_zero_and_are_written_by_nobody() {
    let mut wire = Wire::new(256);
    wire.result(&reserve("full", "h1", 256));
    let granted = wire.result(&reserve("t", "h", 0));
    assert_eq!(granted["dst_ptr"], 0);
    assert_eq!(granted["write"], true);
    let completed = wire.result(&complete("t", &granted["reservation_id"]));
    assert_eq!(completed["completed"], true);
}

// row: V19
#[test]
fn a_tensor_without_dimensions_is_granted() {
    let mut wire = Wire::new(256);
    let scalar = json!({
        "op": "reserve", "transfer_id": "t", "mm_hash": "h",
        "nbytes": 4, "shape": [], "dtype": "float32",
    });
    assert_eq!(wire.result(&scalar)["write"], true);
}

#[test]
fn names_and_numbers_may_come_in_other_kinds_and_big_integers_stay_exact() {
    let mut wire = Wire::new(4096);
    let lenient = json!({
        "op": "reserve", "transfer_id": 7, "mm_hash": 8,
        "nbytes": "512", "shape": ["2", 256.9], "dtype": "uint8", "unknown": {"a": [1]},
    });
    let granted = wire.result(&lenient);
    let status = wire.result(&json!({"op": "status", "transfer_id": "7"}));
    assert_eq!(status["mm_hash"], "8");
    assert_eq!(status["shape"], json!([2, 256]));
    assert_eq!(granted["reservation_id"], status["reservation_id"]);
}

// row: D10
#[test]
fn aliases_meet_their_canonical_names_and_are_reported_by_them() {
    let mut wire = Wire::new(4096);
    let typed = |transfer: &str, dtype: &str| {
        json!({
            "op": "reserve", "transfer_id": transfer, "mm_hash": "h",
            "nbytes": 256, "shape": [128], "dtype": dtype,
        })
    };
    let writer = wire.result(&typed("t1", "half"));
    let follower = wire.result(&typed("t2", "float16"));
    assert_eq!(follower["dst_ptr"], writer["dst_ptr"]);
    let status = wire.result(&json!({"op": "status", "transfer_id": "t1"}));
    assert_eq!(status["dtype"], "float16");
}

// row: C3.5
#[test]
fn a_reserve_batch_answers_each_item_on_its_own() {
    let mut wire = Wire::new(1024);
    let batch = json!({"op": "reserve_batch", "items": [
        reserve("a", "ha", 512),
        {"transfer_id": "b", "mm_hash": "hb", "nbytes": 4, "shape": [1], "dtype": "f32"},
        reserve("c", "hc", 1024),
        7,
        reserve("d", "hd", 512),
        reserve("a", "ha", 512),
    ]});
    let result = wire.result(&batch);
    let items = result["items"].as_array().unwrap();
    assert_eq!(items.len(), 6);
    assert_eq!(items[0]["result"]["write"], true);
    assert_eq!(
        items[1],
        json!({
            "ok": false, "error": "Unsupported torch dtype string: 'f32'",
            "code": "unsupported_dtype",
        })
    );
    assert_eq!(items[2]["code"], "pool_full");
    assert_eq!(items[3]["code"], "malformed");
    assert_eq!(items[4]["result"]["write"], true);
    assert_eq!(items[5]["result"]["write"], false, "the second time");
}

// row: D12
#[test]
fn a_malformed_item_of_a_complete_batch_completes_nothing_and_harms_no_other() {
    let mut wire = Wire::new(1024);
    let a = wire.result(&reserve("a", "ha", 512));
    let b = wire.result(&reserve("b", "hb", 512));
    let batch = json!({"op": "complete_batch", "items": [
        {"transfer_id": "a", "reservation_id": a["reservation_id"]},
        {"transfer_id": "b"},
        7,
        {"transfer_id": "b", "reservation_id": b["reservation_id"]},
        {"transfer_id": "b", "reservation_id": "other"},
    ]});
    let result = wire.result(&batch);
    let item = |completed: bool, became_ready: bool| json!({"completed": completed, "became_ready": became_ready});
    assert_eq!(
        result["items"],
        json!([
            item(true, true),
            item(false, false),
            item(false, false),
            item(true, true),
            item(false, false),
        ])
    );
}

// row: D9
#[test]
fn two_refused_pushes_of_a_batch_leave_the_granted_ones() {
    let mut wire = Wire::new(512);
    let items: Vec<Value> = ["a", "b", "c", "d"]
        .map(|name| reserve(name, name, 256))
        .into();
    let result = wire.result(&json!({"op": "reserve_batch", "items": items}));
    let granted: Vec<bool> = result["items"]
        .as_array()
        .unwrap()
        .iter()
        .map(|item| item["ok"] == true)
        .collect();
    assert_eq!(granted, [true, true, false, false]);
    for (name, index) in [("a", 0), ("b", 1)] {
        let reservation = &result["items"][index]["result"]["reservation_id"];
        assert_eq!(
            wire.result(&complete(name, reservation)),
            json!({"completed": true, "became_ready": true})
        );
    }
}

// row: V8, D6
#[test]
fn refresh_of_an_id_a_restarted_consumer_does_not_know_lets_the_push_go_on() {
    let mut wire = Wire::new(4096);
    let cancel = json!({
        "op": "cancel", "transfer_id": "t", "reservation_id": "0".repeat(32),
        "abandon": true, "refresh": true,
    });
    assert_eq!(wire.result(&cancel), json!({"cancelled": true}));
    assert_eq!(wire.result(&reserve("t", "h", 256))["write"], true);
}

// ---- errors ----

// row: F3, F4
#[test]
fn every_error_reply_has_the_peers_text_and_a_code() {
    let mut wire = Wire::new(1024);
    wire.check_error(
        &json!({"op": "zap"}),
        "unknown control op: 'zap'",
        "unknown_op",
    );
    wire.check_error(&json!({}), "unknown control op: None", "unknown_op");
    wire.check_error(&json!({"op": "status"}), "'transfer_id'", "missing_field");
    let with = |field: &str, value: Value| {
        let mut request = reserve("t", "h", 512);
        request[field] = value;
        request
    };
    wire.check_error(
        &with("dtype", json!("f32")),
        "Unsupported torch dtype string: 'f32'",
        "unsupported_dtype",
    );
    wire.check_error(
        &with("nbytes", json!(511)),
        "shape and dtype do not match nbytes",
        "size_mismatch",
    );

    wire.result(&reserve("t", "h", 512));
    wire.check_error(
        &reserve("t", "other", 512),
        "conflicting reservation for transfer_id",
        "conflict",
    );
    wire.check_error(
        &reserve("t2", "h", 256),
        "conflicting in-flight tensor for mm_hash",
        "conflict",
    );
    let full = "EC consumer buffer pool is full";
    wire.check_error(&reserve("t3", "h3", 1024), full, "pool_full");
    wire.check_error(&reserve("t3", "h3", 1025), full, "too_large");

    wire.shard.pass(TTL);
    wire.check_error(
        &reserve("t", "h", 512),
        "Transfer 't' still has an active writer",
        "active_writer",
    );
    wire.shard.with_state(|pool, machine, now| {
        machine.begin_shutdown(pool, now, Shutdown::Cancel, &mut Vec::new())
    });
    wire.check_error(
        &reserve("t4", "h4", 1),
        "Consumer reservation manager is shutting down",
        "shutting_down",
    );
}

#[test]
fn a_conflict_with_a_resident_in_use_is_refused() {
    let mut wire = Wire::new(1024);
    let granted = wire.result(&reserve("t", "h", 256));
    wire.result(&complete("t", &granted["reservation_id"]));
    wire.shard.take_and_retire("t", "h");
    assert_eq!(wire.result(&reserve("user", "h", 256))["cached"], true);
    wire.check_error(
        &reserve("t2", "h", 512),
        "conflicting cached tensor for mm_hash",
        "conflict",
    );
}

// row: M2, M2c, A2, F4
#[test]
fn negative_sizes_change_nothing_in_the_pool() {
    let mut wire = Wire::new(4096);
    let mut sized = |shape: Value, len: i64| {
        let request = json!({
            "op": "reserve", "transfer_id": "t", "mm_hash": "h",
            "nbytes": len, "shape": shape, "dtype": "bfloat16",
        });
        let reply = wire.ask(&request);
        assert_eq!(reply["code"], "size_mismatch", "{reply}");
    };
    sized(json!([-2, -512]), 2048);
    sized(json!([-1024]), -2048);
    // Three reserves of half the pool: two fit, at distinct places, and the third does not.
    let first = wire.result(&reserve("a", "ha", 2048));
    let second = wire.result(&reserve("b", "hb", 2048));
    assert_eq!(
        [&first["dst_ptr"], &second["dst_ptr"]],
        [&json!(BASE), &json!(BASE + 2048)]
    );
    assert_eq!(wire.ask(&reserve("c", "hc", 2048))["code"], "pool_full");
}

// row: D1, F1
#[test]
fn a_request_of_several_frames_is_answered_with_an_error_and_the_server_serves_on() {
    let mut wire = Wire::new(4096);
    let peers: &[u8] = br#"{"op":"peers"}"#;
    for count in [2, 3, 1000] {
        let reply = wire.exchange(&vec![peers; count]);
        assert_eq!(
            reply,
            format!(
                "{{\"ok\": false, \"error\": \"malformed control request: expected one frame, \
                 got {count}\", \"code\": \"malformed\"}}"
            )
        );
    }
    wire.result(&json!({"op": "peers"}));
}

// row: F1, F2
#[test]
fn frames_that_are_no_json_object_are_malformed() {
    let mut wire = Wire::new(4096);
    let deep = "[".repeat(1 << 20);
    let malformed = r#"{"ok": false, "error": "malformed control request", "code": "malformed"}"#;
    for frame in [
        &b""[..],
        b"\xff\xfe\x00",
        b"{",
        b"nul",
        b"{}x",
        deep.as_bytes(),
    ] {
        assert_eq!(wire.exchange(&[frame]), malformed);
    }
    for frame in ["null", "[]", "7", "\"x\""] {
        let reply = wire.exchange(&[frame.as_bytes()]);
        assert_eq!(
            reply,
            r#"{"ok": false, "error": "malformed control request: not an object", "code": "malformed"}"#
        );
    }
    wire.result(&json!({"op": "peers"}));
}

// row: D3
#[test]
fn error_texts_name_fields_and_never_an_implementation() {
    let mut wire = Wire::new(4096);
    wire.check_error(
        &json!({"op": "cancel", "transfer_id": {}}),
        "field 'transfer_id' must be a string or an integer",
        "malformed",
    );
    wire.check_error(
        &json!({"op": "reserve_batch", "items": "x"}),
        "field 'items' must be a list of objects",
        "malformed",
    );
}

// row: D5
#[test]
fn names_and_batches_beyond_their_limits_are_refused() {
    let mut wire = Wire::new(4096);
    let long = "x".repeat(1025);
    wire.check_error(
        &json!({"op": "status", "transfer_id": long}),
        "field 'transfer_id' is longer than 1024 bytes",
        "too_long",
    );
    let items = vec![reserve("t", "h", 1); 1025];
    wire.check_error(
        &json!({"op": "reserve_batch", "items": items}),
        "batch of 1025 items is longer than 1024",
        "too_many_items",
    );
    let items = vec![reserve("t", "h", 1); 1024];
    let result = wire.result(&json!({"op": "reserve_batch", "items": items}));
    assert_eq!(result["items"].as_array().unwrap().len(), 1024);
}

// row: D5, F5
#[test]
fn a_message_of_100_megabytes_costs_its_sender_the_connection_and_nobody_else() {
    let mut wire = Wire::new(4096);
    let flood = wire.context.socket(zmq::REQ).unwrap();
    flood.set_linger(0).unwrap();
    flood.set_rcvtimeo(500).unwrap();
    flood.connect(&wire.server.address().to_string()).unwrap();
    flood.send(vec![b'x'; 100_000_000], 0).unwrap();
    assert_eq!(flood.recv_bytes(0), Err(zmq::Error::EAGAIN), "no reply");
    drop(flood);
    wire.result(&json!({"op": "peers"}));
    assert_eq!(wire.server.counters().requests, 1, "it was never a request");
    // The longest message allowed is still answered.
    let mut padded = br#"{"op":"peers"}"#.to_vec();
    padded.resize(4 << 20, b' ');
    assert!(wire.exchange(&[&padded]).contains("ports"));
}

/// Some of these strings are read as frames of an old version of the message protocol, whose peer is gone by then.
#[test]
fn random_bytes_on_the_control_port_cost_nobody_else_a_reply() {
    let wire = Wire::new(4096);
    let address = wire.server.address().clone();
    let context = ControlContext::new();
    for seed in 0..60_u64 {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let bytes: Vec<u8> = (0..3000)
            .map(|_| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                (state >> 24) as u8
            })
            .collect();
        let mut stray = TcpStream::connect(("127.0.0.1", address.port())).unwrap();
        // The server may hang up in the middle.
        let _ = stray.write_all(&bytes);
        drop(stray);
        std::thread::sleep(Duration::from_millis(20));
        let mut client = ControlClient::new(&context, address.clone(), Duration::from_secs(10));
        assert!(client.peers().is_ok(), "after bytes of seed {seed}");
    }
}

#[test]
fn a_client_that_vanishes_before_its_reply_harms_nobody() {
    let mut wire = Wire::new(4096);
    for _ in 0..50 {
        let socket = wire.context.socket(zmq::REQ).unwrap();
        socket.set_linger(0).unwrap();
        socket.connect(&wire.server.address().to_string()).unwrap();
        socket.send(r#"{"op":"peers"}"#, 0).unwrap();
    }
    wire.result(&json!({"op": "peers"}));
}

// row: F1, F2
#[test]
fn frames_of_random_bytes_always_get_one_reply_each() {
    let mut wire = Wire::new(4096);
    // xorshift64*, so that a failure repeats.
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move || {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        state.wrapping_mul(0x2545_f491_4f6c_dd1d)
    };
    let valid = reserve("t", "h", 512).to_string().into_bytes();
    for _ in 0..2000 {
        let count = 1 + random() % 3;
        let mut frames: Vec<Vec<u8>> = (0..count)
            .map(|_| (0..random() % 64).map(|_| random() as u8).collect())
            .collect();
        match random() % 4 {
            0 => frames[0].clear(),
            1 => {
                // A valid request with a few bytes changed reaches deeper.
                frames.truncate(1);
                frames[0].clone_from(&valid);
                for _ in 0..1 + random() % 4 {
                    let at = (random() % valid.len() as u64) as usize;
                    frames[0][at] = b"0123456789-\"{}[],:eE.x\xff"[(random() % 23) as usize];
                }
            }
            _ => {}
        }
        let borrowed: Vec<&[u8]> = frames.iter().map(Vec::as_slice).collect();
        let reply: Value = serde_json::from_str(&wire.exchange(&borrowed)).unwrap();
        assert!(reply["ok"].is_boolean());
    }
    assert!(wire.server.is_serving());
    wire.result(&json!({"op": "peers"}));
}

// ---- time, events, stopping ----

#[test]
fn overdue_items_expire_within_a_second_also_without_any_request() {
    let mut wire = Wire::new(4096);
    let granted = wire.result(&reserve("t", "h", 512));
    wire.result(&complete("t", &granted["reservation_id"]));
    wire.shard.pass(TTL);
    let started = Instant::now();
    eventually("the item expired", || {
        wire.shard
            .with_state(|_, machine, _| machine.stats().ready == 0)
    });
    assert!(started.elapsed() < Duration::from_secs(2));
}

#[test]
fn a_late_subscriber_gets_the_events_in_order_followers_first() {
    let mut wire = Wire::new(4096);
    let writer = wire.result(&reserve("w", "h", 512));
    wire.result(&reserve("f", "h", 512));
    wire.result(&complete("w", &writer["reservation_id"]));
    wire.result(&reserve("w", "h", 512));
    let events = wire.subscribe();
    let mut seen = Vec::new();
    for _ in 0..3 {
        let text = events.recv_string(0).unwrap().unwrap();
        let event: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(
            keys(&event),
            [
                "transfer_id",
                "mm_hash",
                "ready",
                "reservation_id",
                "nbytes",
                "shape",
                "dtype",
                "shard"
            ]
        );
        assert_eq!(event["ready"], true);
        assert_eq!(event["shard"], wire.server.control_port());
        seen.push(event["transfer_id"].as_str().unwrap().to_owned());
    }
    assert_eq!(seen, ["f", "w", "w"]);
}

#[test]
fn cancel_and_expiry_announce_nothing() {
    let mut wire = Wire::new(4096);
    wire.result(&reserve("w", "h", 512));
    wire.result(&reserve("f", "h", 512));
    wire.result(&json!({"op": "cancel", "transfer_id": "w", "abandon": true}));
    wire.shard.pass(TTL);
    let events = wire.subscribe();
    events.set_rcvtimeo(300).unwrap();
    assert_eq!(events.recv_bytes(0), Err(zmq::Error::EAGAIN));
}

// row: D15
#[test]
fn dropped_events_are_counted_and_told() {
    let shard = ToyShard::new(4096);
    let mut wire = Wire::with(shard, |config| config.events_max = 2);
    let granted = wire.result(&reserve("t", "h", 512));
    wire.result(&complete("t", &granted["reservation_id"]));
    for _ in 0..4 {
        wire.result(&reserve("t", "h", 512));
    }
    // Five events were queued, two are kept.
    eventually("three were dropped", || {
        wire.server.counters().events_dropped == 3
    });
    let snapshot = wire.result(&json!({"op": "x_pool"}));
    assert_eq!(snapshot["totals"]["events_dropped"], 3);
}

#[test]
fn stopping_takes_about_a_tick_and_frees_the_port() {
    let wire = Wire::new(4096);
    let port = wire.server.control_port();
    let started = Instant::now();
    wire.server.stop();
    assert!(started.elapsed() < Duration::from_millis(500));
    let host = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let config = ServerConfig::new(host, port, SESSION, BASE);
    let again = ControlServer::start(config, ToyShard::new(4096)).unwrap();
    assert_eq!(again.control_port(), port);
}

// row: F17
#[test]
fn a_port_in_use_is_a_typed_error_that_names_it() {
    let wire = Wire::new(4096);
    let port = wire.server.control_port();
    let host = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let config = ServerConfig::new(host, port, SESSION, BASE);
    let Err(ServerError::Bind { endpoint, source }) =
        ControlServer::start(config, ToyShard::new(4096))
    else {
        panic!("two servers on one port");
    };
    assert_eq!(endpoint, format!("tcp://127.0.0.1:{port}"));
    assert_eq!(source.to_string(), "Address already in use");
}

#[test]
fn an_ipv6_literal_is_served_in_brackets() {
    let host = IpAddr::V6(Ipv6Addr::LOCALHOST);
    if std::net::TcpListener::bind((host, 0)).is_err() {
        eprintln!("this machine has no IPv6 loopback; the literal is checked without it");
        let address = ControlAddress::new(host, 1);
        assert_eq!(address.to_string(), "tcp://[::1]:1");
        return;
    }
    let config = ServerConfig::new(host, 0, SESSION, BASE);
    let server = ControlServer::start(config, ToyShard::new(4096)).unwrap();
    assert!(server.address().to_string().starts_with("tcp://[::1]:"));
    let mut client = client(server.address().clone());
    assert_eq!(client.peers().unwrap(), [server.control_port()]);
}

// ---- the client ----

fn client(address: ControlAddress) -> ControlClient {
    ControlClient::new(&ControlContext::new(), address, Duration::from_secs(10))
}

#[test]
fn the_client_speaks_every_operation() {
    let wire = Wire::new(4096);
    let mut client = client(wire.server.address().clone());
    assert_eq!(client.peers().unwrap(), [wire.server.control_port()]);
    assert_eq!(client.event_port().unwrap(), wire.server.event_port());

    let one = request("one", "h1", 512);
    let RemoteReserve::Granted {
        reservation_id,
        session,
        address,
        write,
        ..
    } = client.reserve(&one).unwrap()
    else {
        panic!("cancelled");
    };
    assert_eq!((session.as_str(), address, write), (SESSION, BASE, true));
    let status = client.status(&one.transfer_id).unwrap().unwrap();
    assert_eq!(status.reservation_id, reservation_id);
    assert_eq!((status.ready, status.len_bytes), (false, 512));
    let done = client.complete(&one.transfer_id, &reservation_id).unwrap();
    assert!(done.became_ready);

    let batch = [
        request("two", "h2", 512),
        request("big", "h3", 1 << 20),
        request("three", "h4", 512),
    ];
    let answers = client.reserve_batch(&batch).unwrap();
    assert_eq!(
        answers[1].as_ref().unwrap_err().code,
        Some(ErrorCode::TooLarge)
    );
    let ids: Vec<(TransferId, String)> = [0, 2]
        .map(|index| match &answers[index] {
            Ok(RemoteReserve::Granted { reservation_id, .. }) => {
                (batch[index].transfer_id.clone(), reservation_id.clone())
            }
            other => panic!("{other:?}"),
        })
        .into();
    let done = client.complete_batch(&ids).unwrap();
    assert!(done.iter().all(|completion| completion.completed));

    assert!(
        client
            .cancel(&one.transfer_id, Some(&reservation_id), CancelKind::Abandon)
            .unwrap()
    );
    assert!(client.status(&one.transfer_id).unwrap().is_none());
    assert_eq!(client.reserve(&one).unwrap(), RemoteReserve::Cancelled);
    assert_eq!(client.pool().unwrap().bytes.free, 4096 - 1024);
}

#[test]
fn a_refusal_is_typed_and_leaves_the_connection_in_order() {
    let wire = Wire::new(512);
    let mut client = client(wire.server.address().clone());
    let error = client.reserve(&request("t", "h", 1024)).unwrap_err();
    assert_eq!(error.code(), Some(ErrorCode::TooLarge));
    assert!(!error.may_have_been_applied());
    assert_eq!(
        error.to_string(),
        "consumer refused: EC consumer buffer pool is full"
    );
    assert!(client.reserve(&request("t", "h", 512)).is_ok());
}

#[test]
fn without_a_server_a_request_times_out_and_is_known_not_to_have_left() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = free.local_addr().unwrap().port();
    drop(free);
    let address = ControlAddress::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port);
    let mut client = client(address);
    client.set_timeout(Duration::from_millis(200));
    let started = Instant::now();
    let error = client.peers().unwrap_err();
    assert!(matches!(error, ClientError::Unreachable { .. }), "{error}");
    assert!(!error.may_have_been_applied());
    assert!(started.elapsed() >= Duration::from_millis(200));

    client.set_timeout(Duration::from_secs(60));
    client.set_fail_fast(true);
    let started = Instant::now();
    let error = client.peers().unwrap_err();
    assert!(matches!(error, ClientError::Unreachable { .. }), "{error}");
    assert!(started.elapsed() < Duration::from_secs(10));
}

#[test]
fn a_server_that_starts_late_is_reached_by_the_waiting_request() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = free.local_addr().unwrap().port();
    drop(free);
    let host = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let mut client = client(ControlAddress::new(host, port));
    let asking = std::thread::spawn(move || client.peers());
    std::thread::sleep(Duration::from_millis(150));
    let config = ServerConfig::new(host, port, SESSION, BASE);
    let _server = ControlServer::start(config, ToyShard::new(4096)).unwrap();
    assert_eq!(asking.join().unwrap().unwrap(), [port]);
}

/// A peer that receives one request and does with it what it is told.
///
/// It keeps its connection until the guard is dropped, unless it is told to drop it.
fn fake_peer(
    behave: impl FnOnce(zmq::Socket) -> Option<zmq::Socket> + Send + 'static,
) -> (ControlAddress, std::sync::mpsc::Sender<()>) {
    let context = zmq::Context::new();
    let socket = context.socket(zmq::REP).unwrap();
    socket.set_linger(0).unwrap();
    socket.bind("tcp://127.0.0.1:*").unwrap();
    let endpoint = socket.get_last_endpoint().unwrap().unwrap();
    let (guard, guarded) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        socket.recv_multipart(0).unwrap();
        let kept = behave(socket);
        let _ended = guarded.recv();
        drop(kept);
    });
    (ControlAddress::parse(&endpoint).unwrap(), guard)
}

/// A peer that answers one request with these frames.
fn answering(frames: &'static [&'static str]) -> (ControlAddress, std::sync::mpsc::Sender<()>) {
    fake_peer(move |socket| {
        socket.send_multipart(frames, 0).unwrap();
        Some(socket)
    })
}

// row: C2.1
#[test]
fn a_server_that_never_replies_times_out_and_the_next_request_uses_another_socket() {
    let (send, receive) = std::sync::mpsc::channel();
    let (address, _guard) = fake_peer(move |socket| {
        // The late reply to the first request, which nobody waits for any more.
        receive.recv().unwrap();
        socket
            .send(r#"{"ok": true, "result": {"ports": [1]}}"#, 0)
            .unwrap();
        socket.recv_multipart(0).unwrap();
        socket
            .send(r#"{"ok": true, "result": {"ports": [2]}}"#, 0)
            .unwrap();
        Some(socket)
    });
    let mut client = client(address);
    client.set_timeout(Duration::from_millis(200));
    let error = client.peers().unwrap_err();
    assert!(
        matches!(
            error,
            ClientError::Timeout {
                timeout_ms: 200,
                ..
            }
        ),
        "{error}"
    );
    assert!(error.may_have_been_applied());
    send.send(()).unwrap();
    client.set_timeout(Duration::from_secs(10));
    assert_eq!(client.peers().unwrap(), [2]);
}

#[test]
fn a_server_that_goes_away_is_noticed_before_the_timeout() {
    let (address, _guard) = fake_peer(|socket| {
        drop(socket);
        None
    });
    let mut client = client(address);
    client.set_timeout(Duration::from_secs(60));
    let started = Instant::now();
    let error = client.peers().unwrap_err();
    assert!(matches!(error, ClientError::Disconnected { .. }), "{error}");
    assert!(error.may_have_been_applied());
    assert!(started.elapsed() < Duration::from_secs(10));
}

#[test]
fn replies_that_fit_no_operation_are_typed_errors() {
    let replies: [&'static [&'static str]; 7] = [
        &[""],
        &["{"],
        &["[]"],
        &[r#"{"ok": true}"#],
        &[r#"{"ok": true, "result": {"ports": []}}"#],
        &[r#"{"ok": true, "result": {"ports": [0]}}"#],
        &[r#"{"ok": true, "result": {"ports": [1]}}"#, "{}"],
    ];
    for frames in replies {
        let (address, _guard) = answering(frames);
        let error = client(address).peers().unwrap_err();
        assert!(
            matches!(error, ClientError::BadReply { .. }),
            "{frames:?}: {error}"
        );
    }
}

#[test]
fn an_error_reply_without_code_is_a_refusal_without_code() {
    let (address, _guard) = answering(&[r#"{"ok": false, "error": "boom"}"#]);
    let error = client(address).peers().unwrap_err();
    let ClientError::Refused(refusal) = &error else {
        panic!("{error}");
    };
    assert_eq!((refusal.code, refusal.text.as_str()), (None, "boom"));
}

#[test]
fn a_wait_for_ever_is_one() {
    let wire = Wire::new(4096);
    let context = ControlContext::new();
    let mut client = ControlClient::new(&context, wire.server.address().clone(), Duration::MAX);
    let asked = request("t", "h", 512);
    let RemoteReserve::Granted { reservation_id, .. } = client.reserve(&asked).unwrap() else {
        panic!("cancelled");
    };
    client
        .complete(&asked.transfer_id, &reservation_id)
        .unwrap();
    let events = wire.server.address().with_port(wire.server.event_port());
    let mut subscriber = EventSubscriber::connect(&context, &[events]).unwrap();
    let event = subscriber.next(Duration::MAX).unwrap().unwrap();
    assert_eq!(event.transfer_id, "t");
}

#[test]
fn the_decoders_word_is_the_source_of_a_bad_reply() {
    let (address, _guard) = answering(&["{,"]);
    let error = client(address).pool().unwrap_err();
    let source = std::error::Error::source(&error).expect("the decoder says why");
    assert!(source.to_string().contains("line 1"), "{source}");
    assert!(!error.to_string().contains("line 1"), "{error}");
}

// ---- the subscriber ----

#[test]
fn a_subscriber_hears_both_shards_and_tells_when_an_item_is_everywhere() {
    let shards = [Wire::new(4096), Wire::new(4096)];
    let context = ControlContext::new();
    let addresses: Vec<ControlAddress> = shards
        .iter()
        .map(|wire| wire.server.address().with_port(wire.server.event_port()))
        .collect();
    let mut subscriber = EventSubscriber::connect(&context, &addresses).unwrap();
    let mut gather = ShardGather::new(2);
    let mut ready = Vec::new();
    for (index, wire) in shards.iter().enumerate() {
        let mut client = client(wire.server.address().clone());
        for name in ["both", "only-first"] {
            if (name, index) == ("only-first", 1) {
                continue;
            }
            let asked = request(name, name, 512);
            let RemoteReserve::Granted { reservation_id, .. } = client.reserve(&asked).unwrap()
            else {
                panic!("cancelled");
            };
            client
                .complete(&asked.transfer_id, &reservation_id)
                .unwrap();
        }
    }
    for _ in 0..3 {
        let event = subscriber.next(Duration::from_secs(5)).unwrap().unwrap();
        ready.extend(gather.handle(event).map(|event| event.transfer_id));
    }
    assert_eq!(ready, ["both"]);
    assert_eq!(gather.half_complete(), 1);
    assert_eq!(subscriber.next(Duration::from_millis(50)).unwrap(), None);
}

#[test]
fn a_subscriber_drops_what_is_no_event_and_goes_on() {
    let context = zmq::Context::new();
    let shard = context.socket(zmq::PUSH).unwrap();
    shard.set_linger(1000).unwrap();
    shard.bind("tcp://127.0.0.1:*").unwrap();
    let endpoint = shard.get_last_endpoint().unwrap().unwrap();
    let address = ControlAddress::parse(&endpoint).unwrap();
    let mut subscriber = EventSubscriber::connect(&ControlContext::new(), &[address]).unwrap();
    for frame in [&b"\xff"[..], b"[]", br#"{"ready": false}"#] {
        shard.send(frame, 0).unwrap();
    }
    shard.send_multipart([&b"{}"[..], b"{}"], 0).unwrap();
    let event = concat!(
        r#"{"transfer_id": "t", "mm_hash": "h", "ready": 1, "reservation_id": "r", "#,
        r#""nbytes": "8", "shape": [8], "dtype": "uint8", "new": null}"#
    );
    shard.send(event, 0).unwrap();
    let event = subscriber.next(Duration::from_secs(5)).unwrap().unwrap();
    assert_eq!((event.transfer_id.as_str(), event.len_bytes), ("t", 8));
    assert_eq!(event.shard, None);
    assert_eq!(subscriber.ignored(), 4);
}
