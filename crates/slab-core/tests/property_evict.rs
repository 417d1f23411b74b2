//! The policies order idle entries as their definitions say, whatever happens to the entries.

use proptest::prelude::*;
use slab_core::{Credit, Evict, Lru};
use slab_model::NaiveCredit;

/// What happens to an entry, if it can.
#[derive(Clone, Copy, Debug)]
enum Event {
    /// A key becomes resident, or is used once more.
    Use { key: u32 },
    /// The last lease on a key ends.
    Idle { key: u32 },
    /// A key's resident leaves, idle or not.
    Remove { key: u32 },
}

fn events(keys: u32, count: usize) -> impl Strategy<Value = Vec<Event>> {
    let event = prop_oneof![
        5 => (0..keys).prop_map(|key| Event::Use { key }),
        6 => (0..keys).prop_map(|key| Event::Idle { key }),
        2 => (0..keys).prop_map(|key| Event::Remove { key }),
    ];
    prop::collection::vec(event, 1..=count)
}

/// Each key has its own entry number, hash and length.
fn hash(key: u32) -> u64 {
    u64::from(key + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

fn len(key: u32) -> u64 {
    [0, 1, 300, 4096, 5000, 40_000_000][key as usize % 6]
}

fn apply(policy: &mut impl Evict, oracle: &mut NaiveCredit, event: Event) {
    match event {
        Event::Use { key } if oracle.is_idle(key).is_none() => {
            policy.on_insert(key, hash(key), len(key));
            oracle.insert(key, hash(key), len(key));
        }
        Event::Use { key } => {
            policy.on_hit(key);
            oracle.hit(key);
        }
        Event::Idle { key } if oracle.is_idle(key) == Some(false) => {
            policy.on_idle(key);
            oracle.idle(key);
        }
        Event::Remove { key } if oracle.is_idle(key).is_some() => {
            policy.on_remove(key);
            oracle.remove(key);
        }
        Event::Idle { .. } | Event::Remove { .. } => {}
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn credit_orders_and_prices_as_its_definition_says(events in events(24, 400)) {
        // Room enough that no set of the memory overflows.
        let (mut policy, mut oracle) = (Credit::new(0, 1 << 12), NaiveCredit::default());
        for event in events {
            apply(&mut policy, &mut oracle, event);
            let order: Vec<u32> = policy.coldest_first().collect();
            let coldest = order.first().copied();
            let priced: Vec<(u32, u64)> = order
                .into_iter()
                .map(|entry| (entry, policy.price(entry, coldest.unwrap_or(entry)) - 1))
                .collect();
            prop_assert_eq!(priced, oracle.order());
        }
    }

    #[test]
    fn lru_orders_by_the_end_of_the_last_lease(events in events(24, 400)) {
        let (mut policy, mut oracle) = (Lru::with_capacity(0), NaiveCredit::default());
        let mut idle: Vec<u32> = Vec::new();
        for event in events {
            apply(&mut policy, &mut oracle, event);
            idle.retain(|key| oracle.is_idle(*key) == Some(true));
            if let Event::Idle { key } = event
                && oracle.is_idle(key) == Some(true)
                && !idle.contains(&key)
            {
                idle.push(key);
            }
            let order: Vec<u32> = policy.coldest_first().collect();
            prop_assert_eq!(&order, &idle);
            let prices: Vec<u64> = order.iter().map(|key| policy.price(*key, order[0])).collect();
            prop_assert!(prices.is_sorted() && prices.iter().all(|price| *price >= 1));
        }
    }
}

/// Gives `policy` a resident of `len` bytes that is used `uses` times and idle in between.
fn used(policy: &mut Credit, entry: u32, len: u64, uses: u32) {
    policy.on_insert(entry, hash(entry), len);
    policy.on_idle(entry);
    for _ in 1..uses {
        policy.on_hit(entry);
        policy.on_idle(entry);
    }
}

fn coldest(policy: &Credit) -> Option<u32> {
    policy.coldest_first().next()
}

#[test]
fn without_a_second_use_credit_is_least_recently_used() {
    let mut policy = Credit::new(0, 64);
    for (entry, len) in [(0, 1), (1, 1 << 40), (2, 300)] {
        used(&mut policy, entry, len, 1);
    }
    assert_eq!(policy.coldest_first().collect::<Vec<_>>(), [0, 1, 2]);
}

#[test]
fn what_was_used_again_and_what_is_small_stays_longer() {
    let mut policy = Credit::new(0, 64);
    for entry in 0..40 {
        used(&mut policy, entry, 4096, 1);
    }
    // One key comes back after forty ticks, so that is the gap.
    policy.on_hit(0);
    policy.on_idle(0);
    used(&mut policy, 50, 16, 1);
    for entry in 60..80 {
        used(&mut policy, entry, 1 << 20, 1);
    }
    let order: Vec<u32> = policy.coldest_first().collect();
    let place = |entry| order.iter().position(|other| *other == entry);
    assert!(place(60) < place(50), "younger, but 65,536 times as large");
    assert!(place(60) < place(0), "younger, but used once");
}

#[test]
fn a_key_that_left_comes_back_with_what_it_had_earned() {
    let mut policy = Credit::new(0, 64);
    used(&mut policy, 0, 4096, 5);
    for entry in 1..20 {
        used(&mut policy, entry, 4096, 1);
    }
    policy.on_hit(1);
    policy.on_idle(1);
    policy.on_remove(0);
    policy.on_insert(30, hash(0), 4096);
    policy.on_idle(30);
    used(&mut policy, 31, 4096, 1);
    let order: Vec<u32> = policy.coldest_first().collect();
    assert_eq!(order.last(), Some(&30));
    assert_eq!(coldest(&policy), Some(2));
}
