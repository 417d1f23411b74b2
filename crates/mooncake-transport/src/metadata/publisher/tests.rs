//! The entry of one engine in a store that is switched off, emptied and taken over.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::*;

/// A store in memory, which can be switched off, and may protect names as Mooncake's server does.
#[derive(Default)]
struct Fake {
    entries: Mutex<HashMap<String, Vec<u8>>>,
    is_down: AtomicBool,
    /// Calls of `put` are counted, and wait for this.
    gate: Mutex<()>,
    puts: AtomicU64,
    protects: bool,
    ends_lines: bool,
    /// Another engine's entry, which is there at the second look.
    rival: Mutex<Option<RpcMeta>>,
    /// Takes the name with a descriptor, at the first look at `rpc_meta`, behind which it is ours still.
    thief: Mutex<Option<RpcMeta>>,
    /// A swap is carried out and its answer lost, and so is the answer to the next look.
    hides_swap: AtomicBool,
    hides_get: AtomicBool,
}

impl Fake {
    fn check(&self) -> Result<(), StoreError> {
        if self.is_down.load(Ordering::Relaxed) {
            return Err(StoreError::Timeout {
                store: "fake".into(),
                timeout_ms: 1,
            });
        }
        Ok(())
    }

    fn text(&self, key: &str) -> Option<String> {
        let entries = self.entries.lock().unwrap();
        entries
            .get(key)
            .map(|value| String::from_utf8(value.clone()).unwrap())
    }

    fn set(&self, key: &str, value: &str) {
        let mut entries = self.entries.lock().unwrap();
        entries.insert(key.into(), value.into());
    }
}

impl MetadataStore for Fake {
    fn get(&self, key: &str, _: u64) -> Result<Option<Vec<u8>>, StoreError> {
        self.check()?;
        if self.hides_get.swap(false, Ordering::Relaxed) {
            return Err(StoreError::Timeout {
                store: "fake".into(),
                timeout_ms: 1,
            });
        }
        let found = self.entries.lock().unwrap().get(key).cloned();
        if key == RPC_META
            && let Some(thief) = self.thief.lock().unwrap().take()
        {
            self.set(RPC_META, &thief.encode());
            self.set(DESCRIPTOR, "the thief's");
        }
        Ok(found)
    }

    fn put(&self, key: &str, value: &[u8]) -> Result<(), StoreError> {
        self.check()?;
        self.puts.fetch_add(1, Ordering::SeqCst);
        drop(self.gate.lock().unwrap());
        let mut entries = self.entries.lock().unwrap();
        if self.protects && key.contains("rpc_meta") && entries.contains_key(key) {
            return Err(StoreError::Refused {
                store: "fake".into(),
                key: key.into(),
                status: 400,
            });
        }
        entries.insert(key.into(), value.into());
        Ok(())
    }

    fn delete(&self, key: &str) -> Result<bool, StoreError> {
        self.check()?;
        Ok(self.entries.lock().unwrap().remove(key).is_some())
    }

    fn swap(
        &self,
        key: &str,
        expected: Option<&[u8]>,
        new: Option<&[u8]>,
    ) -> Result<bool, StoreError> {
        self.check()?;
        if let Some(rival) = self.rival.lock().unwrap().take() {
            self.set(key, &rival.encode());
        }
        let mut entries = self.entries.lock().unwrap();
        if entries.get(key).map(Vec::as_slice) != expected {
            return Ok(false);
        }
        match new {
            Some(new) => drop(entries.insert(key.into(), new.into())),
            None => drop(entries.remove(key)),
        }
        if self.hides_swap.swap(false, Ordering::Relaxed) {
            self.hides_get.store(true, Ordering::Relaxed);
            return Err(StoreError::Timeout {
                store: "fake".into(),
                timeout_ms: 1,
            });
        }
        Ok(true)
    }

    fn value_end(&self) -> &'static str {
        if self.ends_lines { "\n" } else { "" }
    }
}

const RPC_META: &str = "mooncake/rpc_meta/name";
const DESCRIPTOR: &str = "mooncake/ram/name";

fn at(port: u16) -> RpcMeta {
    RpcMeta::new("127.0.0.1", port).unwrap()
}

fn claim(
    store: &Arc<Fake>,
    port: u16,
    holder: impl Fn(&RpcMeta) -> Holder,
) -> Result<Publisher, StoreError> {
    let keys = Keys::new("").unwrap();
    Publisher::claim(store.clone(), keys, "name", at(port), holder)
}

fn nobody(found: &RpcMeta) -> Holder {
    panic!("nobody is there to look for: {found:?}");
}

fn taken(port: u16, answers: bool) -> StoreError {
    StoreError::NameTaken {
        key: RPC_META.into(),
        holder: format!("127.0.0.1:{port}"),
        answers,
    }
}

#[test]
fn an_entry_that_another_engine_takes_while_it_is_withdrawn_stays_whole() {
    let store = Arc::new(Fake::default());
    let publisher = claim(&store, 1, nobody).unwrap();
    publisher.publish(|| Some("ours".into())).unwrap();
    *store.thief.lock().unwrap() = Some(at(2));
    publisher.withdraw().unwrap();
    assert_eq!(store.text(RPC_META), Some(at(2).encode()));
    assert_eq!(store.text(DESCRIPTOR).as_deref(), Some("the thief's"));
}

#[test]
fn a_claim_whose_answer_was_lost_leaves_no_name_behind() {
    let store = Arc::new(Fake::default());
    store.hides_swap.store(true, Ordering::Relaxed);
    let error = claim(&store, 1, nobody).err().expect("the answer was lost");
    assert!(matches!(error, StoreError::Timeout { .. }), "{error:?}");
    assert!(store.entries.lock().unwrap().is_empty());
}

#[test]
fn an_entry_is_written_kept_up_to_date_and_withdrawn() {
    let store = Arc::new(Fake::default());
    let publisher = claim(&store, 1, nobody).unwrap();
    assert_eq!(store.text(RPC_META), Some(at(1).encode()));
    publisher.publish(|| Some("one".into())).unwrap();
    publisher.publish(|| Some("two".into())).unwrap();
    assert_eq!(store.text(DESCRIPTOR).as_deref(), Some("two"));
    publisher.withdraw().unwrap();
    assert!(store.entries.lock().unwrap().is_empty());
    // What a registration that outlives the engine does then.
    publisher.publish(|| Some("three".into())).unwrap();
    publisher.withdraw().unwrap();
    assert!(store.entries.lock().unwrap().is_empty());
}

// row: W10.4b
#[test]
fn the_entry_of_a_dead_engine_is_replaced_and_that_of_another_is_not() {
    for protects in [false, true] {
        let store = Arc::new(Fake {
            protects,
            ..Fake::default()
        });
        store.set(RPC_META, &at(9).encode());
        for answers in [true, false] {
            let holder = |_: &RpcMeta| {
                if answers {
                    Holder::Answers
                } else {
                    Holder::Unknown
                }
            };
            assert_eq!(claim(&store, 1, holder).err(), Some(taken(9, answers)));
            assert_eq!(store.text(RPC_META), Some(at(9).encode()));
        }
        let found = |found: &RpcMeta| {
            assert_eq!(*found, at(9));
            Holder::Gone
        };
        claim(&store, 1, found).unwrap();
        assert_eq!(store.text(RPC_META), Some(at(1).encode()));
    }
}

#[test]
fn threads_that_publish_at_once_wait_for_two_writes_at_most() {
    let store = Arc::new(Fake::default());
    let publisher = claim(&store, 1, nobody).unwrap();
    let before = store.puts.load(Ordering::SeqCst);
    let version = AtomicU64::new(0);
    let publish = || {
        version.fetch_add(1, Ordering::SeqCst);
        publisher
            .publish(|| Some(version.load(Ordering::SeqCst).to_string()))
            .unwrap();
    };
    let until = |counter: &AtomicU64, value| {
        while counter.load(Ordering::SeqCst) < value {
            std::thread::yield_now();
        }
    };
    std::thread::scope(|scope| {
        let shut = store.gate.lock().unwrap();
        scope.spawn(publish);
        until(&store.puts, before + 1);
        for _ in 0..8 {
            scope.spawn(publish);
        }
        until(&publisher.asked, 9);
        drop(shut);
    });
    assert_eq!(store.puts.load(Ordering::SeqCst), before + 2);
    assert_eq!(store.text(DESCRIPTOR).as_deref(), Some("9"));
}

#[test]
fn a_store_that_lost_everything_gets_the_entry_back() {
    let store = Arc::new(Fake::default());
    let publisher = claim(&store, 1, nobody).unwrap();
    store.is_down.store(true, Ordering::Relaxed);
    assert!(matches!(
        publisher.publish(|| Some("one".into())),
        Err(StoreError::Timeout { .. })
    ));
    store.entries.lock().unwrap().clear();
    store.is_down.store(false, Ordering::Relaxed);
    publisher.publish(|| Some("two".into())).unwrap();
    assert_eq!(store.text(RPC_META), Some(at(1).encode()));
    assert_eq!(store.text(DESCRIPTOR).as_deref(), Some("two"));
}

// row: W10.4c
#[test]
fn a_name_that_another_engine_took_meanwhile_is_left_to_it() {
    let store = Arc::new(Fake::default());
    let publisher = claim(&store, 1, nobody).unwrap();
    store.set(RPC_META, &at(2).encode());
    store.set(DESCRIPTOR, "theirs");
    assert_eq!(
        publisher.publish(|| Some("ours".into())),
        Err(taken(2, false))
    );
    publisher.withdraw().unwrap();
    assert_eq!(store.text(RPC_META), Some(at(2).encode()));
    assert_eq!(store.text(DESCRIPTOR).as_deref(), Some("theirs"));
}

#[test]
fn an_entry_that_no_engine_writes_is_named_and_left_alone() {
    let store = Arc::new(Fake::default());
    store.set(RPC_META, "[]");
    let error = claim(&store, 1, nobody).err();
    assert!(matches!(error, Some(StoreError::Value { key, .. }) if key == RPC_META));
    assert_eq!(store.text(RPC_META).as_deref(), Some("[]"));
}

#[test]
fn of_two_that_claim_a_free_name_at_once_one_is_refused() {
    let store = Arc::new(Fake::default());
    *store.rival.lock().unwrap() = Some(at(2));
    let holder = |found: &RpcMeta| {
        assert_eq!(*found, at(2));
        Holder::Answers
    };
    assert_eq!(claim(&store, 1, holder).err(), Some(taken(2, true)));
    assert_eq!(store.text(RPC_META), Some(at(2).encode()));
}

// row: W10.4b
#[test]
fn of_two_that_replace_a_dead_engine_at_once_one_is_refused() {
    let store = Arc::new(Fake::default());
    store.set(RPC_META, &at(9).encode());
    *store.rival.lock().unwrap() = Some(at(2));
    let holder = |found: &RpcMeta| match found.port {
        9 => Holder::Gone,
        _ => Holder::Answers,
    };
    assert_eq!(claim(&store, 1, holder).err(), Some(taken(2, true)));
    assert_eq!(store.text(RPC_META), Some(at(2).encode()));
}

// row: W10.8c
#[test]
fn the_keeper_writes_what_is_old_missing_or_was_not_written_and_nothing_else() {
    let store = Arc::new(Fake {
        ends_lines: true,
        ..Fake::default()
    });
    let publisher = claim(&store, 1, nobody).unwrap();
    let look = |text: &str| publisher.look_after(|| Some(text.to_owned()));
    let descriptor = || store.text(DESCRIPTOR);
    publisher.publish(|| Some("one".into())).unwrap();
    assert_eq!(look("not asked for"), Ok(()));
    assert_eq!(descriptor().as_deref(), Some("one\n"));
    // What an unregistration on the engine's own thread leaves to it.
    publisher.mark_stale();
    assert_eq!(look("two"), Ok(()));
    assert_eq!(descriptor().as_deref(), Some("two\n"));
    store.is_down.store(true, Ordering::Relaxed);
    assert!(publisher.publish(|| Some("three".into())).is_err());
    assert!(matches!(look("three"), Err(StoreError::Timeout { .. })));
    store.is_down.store(false, Ordering::Relaxed);
    assert_eq!(look("three"), Ok(()));
    assert_eq!(descriptor().as_deref(), Some("three\n"));
    // A store that was emptied, and one where somebody deleted half of the entry.
    for keys in [&[RPC_META, DESCRIPTOR][..], &[RPC_META], &[DESCRIPTOR]] {
        for key in keys {
            store.delete(key).unwrap();
        }
        assert_eq!(look("four"), Ok(()));
        assert_eq!(descriptor().as_deref(), Some("four\n"));
        assert_eq!(store.text(RPC_META), Some(at(1).encode() + "\n"));
    }
    // A name that is another's by now is left to it.
    store.set(RPC_META, &at(2).encode());
    assert_eq!(look("five"), Err(taken(2, false)));
    assert_eq!(descriptor().as_deref(), Some("four\n"));
    publisher.withdraw().unwrap();
    assert_eq!(look("six"), Ok(()));
    assert_eq!(store.text(RPC_META), Some(at(2).encode()));
}
