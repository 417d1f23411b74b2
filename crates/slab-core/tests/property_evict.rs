//! The policies order idle entries as their definitions say, whatever happens to the entries.

mod cases;

use std::ops::{Index, IndexMut};

use cases::config;
use proptest::prelude::*;
use slab_core::{Credit, CreditRank, Evict, Inline, Lru};
use slab_model::NaiveCredit;

/// The ranks of all entries: what a pool does for its policy.
struct Ranks<R>(Vec<Option<R>>);

impl<R> Ranks<R> {
    fn new() -> Self {
        Self((0..100).map(|_| None).collect())
    }

    fn insert(&mut self, entry: u32, rank: R) {
        self.0[entry as usize] = Some(rank);
    }
}

impl<R> Index<u32> for Ranks<R> {
    type Output = R;

    fn index(&self, entry: u32) -> &R {
        self.0[entry as usize].as_ref().expect("an entry")
    }
}

impl<R> Index<u32> for &Ranks<R> {
    type Output = R;

    fn index(&self, entry: u32) -> &R {
        &(**self)[entry]
    }
}

impl<R> IndexMut<u32> for Ranks<R> {
    fn index_mut(&mut self, entry: u32) -> &mut R {
        self.0[entry as usize].as_mut().expect("an entry")
    }
}

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

/// Of a list; an interpreter takes minutes for as many as an ordinary run.
const EVENTS: usize = if cfg!(miri) { 60 } else { 400 };

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

fn apply<E: Evict>(
    policy: &mut E,
    ranks: &mut Ranks<E::Rank>,
    oracle: &mut NaiveCredit,
    event: Event,
) {
    match event {
        Event::Use { key } if oracle.is_idle(key).is_none() => {
            ranks.insert(key, policy.on_insert(key, hash(key), len(key)));
            oracle.insert(key, hash(key), len(key));
        }
        Event::Use { key } => {
            policy.on_hit(key, ranks);
            oracle.hit(key);
        }
        Event::Idle { key } if oracle.is_idle(key) == Some(false) => {
            policy.on_idle(key, ranks);
            oracle.idle(key);
        }
        Event::Remove { key } if oracle.is_idle(key).is_some() => {
            policy.on_remove(key, hash(key), ranks);
            oracle.remove(key);
        }
        Event::Idle { .. } | Event::Remove { .. } => {}
    }
}

/// Compares a policy with its definition after each event.
fn check_credit(mut policy: impl Evict<Rank = CreditRank>, events: Vec<Event>) {
    let (mut ranks, mut oracle) = (Ranks::new(), NaiveCredit::default());
    for event in events {
        apply(&mut policy, &mut ranks, &mut oracle, event);
        let order: Vec<u32> = policy.coldest_first(&ranks).collect();
        let coldest = order.first().copied();
        assert_eq!(policy.coldest(&ranks), coldest);
        let priced: Vec<(u32, u64)> = order
            .into_iter()
            .map(|entry| {
                (
                    entry,
                    policy.price(entry, coldest.unwrap_or(entry), &ranks) - 1,
                )
            })
            .collect();
        assert_eq!(priced, oracle.order());
    }
}

proptest! {
    #![proptest_config(config(400))]

    #[test]
    fn credit_orders_and_prices_as_its_definition_says(events in events(24, EVENTS)) {
        // Room enough that no set of the memory overflows.
        check_credit(Credit::new(1 << 12), events);
    }

    #[test]
    fn credit_without_a_heap_orders_and_prices_the_same(events in events(24, EVENTS)) {
        check_credit(Credit::<Inline<4096>>::new_inline(), events);
    }

    #[test]
    fn lru_orders_by_the_end_of_the_last_lease(events in events(24, EVENTS)) {
        let (mut policy, mut oracle) = (Lru::new(), NaiveCredit::default());
        let mut ranks = Ranks::new();
        let mut idle: Vec<u32> = Vec::new();
        for event in events {
            apply(&mut policy, &mut ranks, &mut oracle, event);
            idle.retain(|key| oracle.is_idle(*key) == Some(true));
            if let Event::Idle { key } = event
                && oracle.is_idle(key) == Some(true)
                && !idle.contains(&key)
            {
                idle.push(key);
            }
            let order: Vec<u32> = policy.coldest_first(&ranks).collect();
            prop_assert_eq!(&order, &idle);
            let prices: Vec<u64> =
                order.iter().map(|key| policy.price(*key, order[0], &ranks)).collect();
            prop_assert!(prices.is_sorted() && prices.iter().all(|price| *price >= 1));
        }
    }
}

/// A policy with the ranks that it works on.
struct Ranked {
    policy: Credit,
    ranks: Ranks<CreditRank>,
}

impl Ranked {
    fn new() -> Self {
        Self {
            policy: Credit::new(64),
            ranks: Ranks::new(),
        }
    }

    fn insert(&mut self, entry: u32, hash: u64, len: u64) {
        let rank = self.policy.on_insert(entry, hash, len);
        self.ranks.insert(entry, rank);
        self.policy.on_idle(entry, &mut self.ranks);
    }

    fn use_once_more(&mut self, entry: u32) {
        self.policy.on_hit(entry, &mut self.ranks);
        self.policy.on_idle(entry, &mut self.ranks);
    }

    /// A resident of `len` bytes that is used `uses` times and idle in between.
    fn used(&mut self, entry: u32, len: u64, uses: u32) {
        self.insert(entry, hash(entry), len);
        for _ in 1..uses {
            self.use_once_more(entry);
        }
    }

    fn order(&self) -> Vec<u32> {
        self.policy.coldest_first(&self.ranks).collect()
    }
}

#[test]
fn without_a_second_use_credit_is_least_recently_used() {
    let mut ranked = Ranked::new();
    for (entry, len) in [(0, 1), (1, 1 << 40), (2, 300)] {
        ranked.used(entry, len, 1);
    }
    assert_eq!(ranked.order(), [0, 1, 2]);
}

#[test]
fn what_was_used_again_and_what_is_small_stays_longer() {
    let mut ranked = Ranked::new();
    for entry in 0..40 {
        ranked.used(entry, 4096, 1);
    }
    // One key comes back after forty ticks, so that is the gap.
    ranked.use_once_more(0);
    ranked.used(50, 16, 1);
    for entry in 60..80 {
        ranked.used(entry, 1 << 20, 1);
    }
    let order = ranked.order();
    let place = |entry| order.iter().position(|other| *other == entry);
    assert!(place(60) < place(50), "younger, but 65,536 times as large");
    assert!(place(60) < place(0), "younger, but used once");
}

#[test]
fn a_key_that_left_comes_back_with_what_it_had_earned() {
    let mut ranked = Ranked::new();
    ranked.used(0, 4096, 5);
    for entry in 1..20 {
        ranked.used(entry, 4096, 1);
    }
    ranked.use_once_more(1);
    ranked.policy.on_remove(0, hash(0), &mut ranked.ranks);
    ranked.insert(30, hash(0), 4096);
    ranked.used(31, 4096, 1);
    let order = ranked.order();
    assert_eq!(order.last(), Some(&30));
    assert_eq!(order.first(), Some(&2));
}
