//! The stores themselves against real servers of etcd and Redis, and engines of ours that find each other in them.
#![cfg(all(feature = "http", feature = "etcd", feature = "redis"))]

#[path = "peer/harness.rs"]
mod harness;
#[path = "peer/ours.rs"]
mod ours;
#[path = "peer/servers.rs"]
mod servers;
#[path = "peer/stream.rs"]
mod stream;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, Barrier};
use std::thread;

use mooncake_transport::metadata::{
    EtcdStore, MetadataStore, RedisStore, StoreConfig, StoreEngine, StoreError,
};
use mooncake_transport::tcp::TcpConfig;
use mooncake_transport::wire::descriptor::Descriptor;
use mooncake_transport::{Access, Engine, EngineError, Op};
use ours::{eventually, filled, holds, transfer};
use servers::{Kind, Server, engine_in, is_unreachable};

const LEN: u64 = 100_003;

/// Makes a test of each of these for either store.
macro_rules! with_each_store {
    ($($name:ident)*) => {
        with_each_store! { etcd, Etcd, $($name)* }
        with_each_store! { redis, Redis, $($name)* }
    };
    ($module:ident, $kind:ident, $($name:ident)*) => {
        mod $module {
            $(
                #[test]
                #[ignore = "needs-debian: the server"]
                fn $name() {
                    super::$name(super::Kind::$kind);
                }
            )*
        }
    };
}

with_each_store! {
    values_are_kept_as_they_are_and_compared_as_they_are
    of_many_that_claim_a_name_at_once_exactly_one_gets_it
    engines_of_ours_find_each_other_both_ways
    a_dead_engines_entry_is_replaced_and_a_live_one_is_not
    a_killed_store_is_an_error_in_time_and_is_filled_again
}

fn values_are_kept_as_they_are_and_compared_as_they_are(kind: Kind) {
    let server = Server::start(kind);
    let store = server.store();
    let key = "mooncake/ram/a b\u{e9}:1";
    assert_eq!(store.get(key, 100), Ok(None));
    assert_eq!(store.delete(key), Ok(false));
    assert_eq!(store.exists(key), Ok(false));
    let bytes: Vec<u8> = (0..=255).collect();
    store.put(key, &bytes).unwrap();
    assert_eq!(store.get(key, 256), Ok(Some(bytes.clone())));
    assert_eq!(store.exists(key), Ok(true));
    let too_long = |max| {
        let key = key.to_owned();
        Err(StoreError::TooLong { key, max })
    };
    assert_eq!(store.get(key, 255), too_long(255));
    // What no descriptor is longer than, by default.
    let long = stream::bytes(1, 0, 1 << 20);
    store.put(key, &long).unwrap();
    assert_eq!(store.get(key, 1 << 20), Ok(Some(long)));
    assert_eq!(store.get(key, 300_000), too_long(300_000));
    assert_eq!(store.delete(key), Ok(true));
    let swap = |expected: Option<&str>, new: Option<&str>| {
        store
            .swap(key, expected.map(str::as_bytes), new.map(str::as_bytes))
            .unwrap()
    };
    let is = |expected: Option<&str>| {
        let found = store.get(key, 100).unwrap();
        assert_eq!(found.as_deref(), expected.map(str::as_bytes));
    };
    assert!(!swap(Some("a"), Some("b")));
    assert!(!swap(Some("a"), None));
    is(None);
    assert!(swap(None, Some("a")));
    assert!(!swap(None, Some("b")));
    assert!(!swap(None, None));
    assert!(!swap(Some("aa"), Some("b")));
    assert!(!swap(Some(""), Some("b")));
    is(Some("a"));
    assert!(swap(Some("a"), Some("b")));
    assert!(!swap(Some("a"), None));
    is(Some("b"));
    assert!(swap(Some("b"), None));
    is(None);
    assert!(swap(None, None));
}

// row: W10.4b
fn of_many_that_claim_a_name_at_once_exactly_one_gets_it(kind: Kind) {
    const MANY: usize = 6;
    let server = Server::start(kind);
    let store = server.store();
    for expected in [None, Some(&b"dead"[..])] {
        let barrier = Barrier::new(MANY);
        let claim = |index: usize| {
            let value = index.to_string();
            barrier.wait();
            store.swap("key", expected, Some(value.as_bytes())).unwrap()
        };
        let won: usize = thread::scope(|scope| {
            let claims: Vec<_> = (0..MANY).map(|i| scope.spawn(move || claim(i))).collect();
            claims
                .into_iter()
                .map(|c| usize::from(c.join().unwrap()))
                .sum()
        });
        assert_eq!(won, 1);
        store.put("key", b"dead").unwrap();
    }
    let barrier = Barrier::new(MANY);
    let engines: Vec<_> = thread::scope(|scope| {
        let start = || {
            barrier.wait();
            engine_in(store.clone(), "name")
        };
        let starts: Vec<_> = (0..MANY).map(|_| scope.spawn(start)).collect();
        starts.into_iter().map(|s| s.join().unwrap()).collect()
    });
    let (started, refused): (Vec<_>, Vec<_>) = engines.into_iter().partition(Result::is_ok);
    assert_eq!(started.len(), 1);
    for error in refused {
        let is_taken = matches!(
            error,
            Err(EngineError::Store(StoreError::NameTaken {
                answers: true,
                ..
            }))
        );
        assert!(is_taken, "{error:?}");
    }
}

// row: W10.3
fn engines_of_ours_find_each_other_both_ways(kind: Kind) {
    let server = Server::start(kind);
    let left = server.engine("left").unwrap();
    let right = server.engine("right").unwrap();
    for (from, to, name) in [(&left, &right, "right"), (&right, &left, "left")] {
        let there = filled(LEN, 1);
        let registration = to.register(there.clone(), Access::RemoteWrite).unwrap();
        let segment = from.open_segment(name).unwrap();
        transfer(from, Op::Write, &segment, there.address(), &filled(LEN, 7));
        assert!(holds(&there, 7));
        let sink = filled(LEN, 2);
        transfer(from, Op::Read, &segment, there.address(), &sink);
        assert!(holds(&sink, 7));
        from.probe(name).unwrap();
        from.notify(&segment, from.session(), "written").unwrap();
        assert_eq!(to.take_notices().unwrap().notices[0].message, "written");
        registration.unregister().unwrap();
    }
    // In the form of real engines, for this store.
    let value = server.store().get("mooncake/rpc_meta/left", 1_000).unwrap();
    let port = left.control_address().port();
    let text = format!("{{\"ip_or_host_name\":\"127.0.0.1\",\"rpc_port\":{port}}}\n");
    assert_eq!(value, Some(text.into_bytes()));
    let value = server.store().get("mooncake/ram/left", 10_000).unwrap();
    assert!(value.unwrap().ends_with(b"}\n"));
    // Engines of another cluster are elsewhere.
    let mut named = StoreConfig::default();
    named.name = Some("left".to_owned());
    named.cluster = "other/one".to_owned();
    let other = StoreEngine::start(TcpConfig::default(), server.store(), named).unwrap();
    assert!(matches!(
        other.open_segment("right"),
        Err(EngineError::Store(StoreError::NotPublished { key })) if key == "mooncake/other/one/ram/right"
    ));
    other.close().unwrap();
    left.close().unwrap();
    drop(right);
    for key in ["ram/left", "rpc_meta/left", "ram/right", "rpc_meta/right"] {
        assert!(!server.store().exists(&format!("mooncake/{key}")).unwrap());
    }
}

// row: W10.4a
fn a_dead_engines_entry_is_replaced_and_a_live_one_is_not(kind: Kind) {
    let server = Server::start(kind);
    let store = server.store();
    let keys = ["mooncake/rpc_meta/name", "mooncake/ram/name"];
    let engine = server.engine("name").unwrap();
    let _registration = engine
        .register(filled(LEN, 1), Access::RemoteWrite)
        .unwrap();
    assert!(matches!(
        server.engine("name"),
        Err(EngineError::Store(StoreError::NameTaken {
            answers: true,
            ..
        }))
    ));
    let left = keys.map(|key| store.get(key, 10_000).unwrap().unwrap());
    drop(engine);
    for (key, value) in keys.iter().zip(&left) {
        // As a crash leaves it.
        store.put(key, value).unwrap();
    }
    let engine = server.engine("name").unwrap();
    let text = store.get(keys[1], 10_000).unwrap().unwrap();
    assert!(Descriptor::decode(&text).unwrap().buffers.is_empty());
    assert_ne!(store.get(keys[0], 1_000).unwrap().unwrap(), left[0]);
    engine.close().unwrap();
}

// row: W10.8c
fn a_killed_store_is_an_error_in_time_and_is_filled_again(kind: Kind) {
    let mut server = Server::start(kind);
    let left = server.engine("left").unwrap();
    let right = server.engine("right").unwrap();
    let there = filled(LEN, 1);
    let _registration = right.register(there.clone(), Access::RemoteWrite).unwrap();
    let open = left.open_segment("right").unwrap();
    let exists = |store: &dyn MetadataStore, name: &str| {
        store
            .exists(&format!("mooncake/ram/{name}"))
            .unwrap_or(false)
    };
    server.kill();
    let begin = std::time::Instant::now();
    for result in [
        left.open_segment("right").map(drop),
        left.probe("right"),
        left.republish().map_err(EngineError::from),
        left.register(filled(LEN, 2), Access::RemoteRead).map(drop),
    ] {
        let error = result.unwrap_err();
        assert!(is_unreachable(&error), "{error:?}");
    }
    // Four calls of at most 3 s each, and nothing that waits for longer.
    assert!(begin.elapsed().as_secs() < 20);
    transfer(&left, Op::Write, &open, there.address(), &filled(LEN, 5));
    assert!(holds(&there, 5));
    // One that kept what it had, and one that did not.
    server.run();
    transfer(
        &left,
        Op::Write,
        &left.open_segment("right").unwrap(),
        there.address(),
        &filled(LEN, 6),
    );
    assert!(holds(&there, 6));
    left.republish().unwrap();
    server.run_empty();
    let store = server.store();
    eventually("the entries", || {
        exists(&*store, "left") && exists(&*store, "right")
    });
    transfer(
        &left,
        Op::Write,
        &left.open_segment("right").unwrap(),
        there.address(),
        &filled(LEN, 7),
    );
    assert!(holds(&there, 7));
    // An engine that ends while there is no store ends all the same, and in time.
    server.kill();
    let begin = std::time::Instant::now();
    assert!(left.close().is_err());
    drop(right);
    assert!(begin.elapsed().as_secs() < 20);
}

// row: W10.7
#[test]
#[ignore = "needs-debian: etcd"]
fn an_etcd_server_that_is_down_is_passed_over() {
    let dead = Server::start(Kind::Etcd);
    let port = dead.port();
    drop(dead);
    let server = Server::start(Kind::Etcd);
    let address = format!("etcd://127.0.0.1:{port};127.0.0.1:{}", server.port());
    let store = EtcdStore::new(&address).unwrap();
    store.put("key", b"value").unwrap();
    assert_eq!(store.get("key", 100), Ok(Some(b"value".to_vec())));
    assert_eq!(store.swap("key", Some(b"value"), None), Ok(true));
    assert_eq!(store.delete("key"), Ok(false));
    // A key that the server does not take.
    assert!(matches!(
        store.put("", b"value"),
        Err(StoreError::Refused { status: 400, .. })
    ));
}

// row: W10.8a
#[test]
#[ignore = "needs-debian: Redis"]
fn password_database_and_type_are_told_apart() {
    let server = Server::start_with(Kind::Redis, Some("word"));
    let port = server.port();
    let at = |text: &str| RedisStore::new(&format!("redis://{text}")).unwrap();
    let store = at(&format!(":word@127.0.0.1:{port}"));
    store.put("key", b"value").unwrap();
    // A real engine would come up without having written anything.
    let without = at(&format!("127.0.0.1:{port}"));
    for result in [
        without.put("key", b"other"),
        without.swap("key", None, Some(b"x")).map(drop),
    ] {
        let error = result.unwrap_err();
        assert!(
            matches!(&error, StoreError::ErrorReply { reply, .. } if reply.starts_with("NOAUTH")),
            "{error:?}"
        );
    }
    assert!(server_refuses_an_engine(without));
    let wrong = at(&format!(":wrong@127.0.0.1:{port}"));
    let error = wrong.get("key", 100).unwrap_err();
    assert!(
        matches!(&error, StoreError::Denied { command: "AUTH", reply, .. } if reply.starts_with("WRONGPASS")),
        "{error:?}"
    );
    assert!(!format!("{error} {wrong:?}").contains("wrong@"));
    let user = at(&format!("default:word@127.0.0.1:{port}/3"));
    assert_eq!(user.get("key", 100), Ok(None));
    user.put("key", b"third").unwrap();
    assert_eq!(store.get("key", 100), Ok(Some(b"value".to_vec())));
    let outside = at(&format!(":word@127.0.0.1:{port}/99"));
    assert!(matches!(
        outside.get("key", 100),
        Err(StoreError::Denied {
            command: "SELECT",
            ..
        })
    ));
    let mut raw = TcpStream::connect(("127.0.0.1", port)).unwrap();
    raw.write_all(b"AUTH word\r\nLPUSH list x\r\n").unwrap();
    let mut replies = [0; 9];
    raw.read_exact(&mut replies).unwrap();
    assert_eq!(&replies, b"+OK\r\n:1\r\n");
    assert!(matches!(
        store.get("list", 100),
        Err(StoreError::ErrorReply { reply, .. }) if reply.starts_with("WRONGTYPE")
    ));
}

fn server_refuses_an_engine(store: RedisStore) -> bool {
    let named = StoreConfig::default();
    let started = StoreEngine::start(TcpConfig::default(), Arc::new(store), named);
    matches!(
        started,
        Err(EngineError::Store(StoreError::ErrorReply { .. }))
    )
}
