//! The corner cases of residents and their leases, one test a row.
//!
//! The pin of the rows is the lease of whoever published or took the content; to retire is to release it.
//!
//! | row | why there is no run-time test |
//! | --- | --- |
//! | R3b, R5 | `release` consumes the lease: nothing can be done with it afterwards (`ui/release_twice.rs`, `ui/use_after_release.rs`) |
//! | R5b | there is no call that drops residents with leases; the pool of a guard lives as long as the guard |
//! | R6b, R11 | eviction calls nobody back: which entries give way is decided first, then they are removed |

mod common;

use common::{G, pool, publish, ready, release};
use slab_core::{Error, Pool, PoolConfig, PoolId, Refused, Reserve};
use std::time::{Duration, Instant};

// row: R1
#[test]
fn content_that_is_resident_stays_and_the_new_bytes_are_free_at_once() {
    let mut pool = pool(8);
    let first = publish(&mut pool, 1, 2, 0);
    let again = publish(&mut pool, 1, 2, 0);
    assert_eq!(again.region(), first.region());
    assert_eq!((pool.stats().free, pool.lease_count(&1)), (6 * G, Some(2)));
    release(&mut pool, first);
    assert_eq!(
        pool.reserve(7 * G),
        Reserve::Full,
        "the second lease still holds the bytes"
    );
    release(&mut pool, again);
    assert_eq!(
        (pool.stats().resident_idle, pool.stats().leases),
        (2 * G, 0)
    );
}

// row: R1
#[test]
#[cfg_attr(miri, ignore = "starts the compiler, which Miri cannot interpret")]
fn one_allocation_cannot_become_two_residents() {
    trybuild::TestCases::new().compile_fail("tests/ui/publish_twice.rs");
}

// row: R2
#[test]
fn content_that_its_owner_holds_outlives_a_publish_with_other_metadata() {
    let mut pool = pool(8);
    let owner = publish(&mut pool, 1, 2, 0);
    let newer = publish(&mut pool, 1, 2, 1);
    assert_ne!(newer.region(), owner.region());
    assert_eq!(
        (pool.stats().resident_leased, pool.stats().displaced),
        (4 * G, 1)
    );
    assert_eq!(pool.reserve(5 * G), Reserve::Full, "neither gives way");
    release(&mut pool, owner);
    assert_eq!((pool.stats().free, pool.stats().displaced), (6 * G, 0));
    release(&mut pool, newer);
}

// row: R3
#[test]
fn displaced_bytes_come_back_once_with_their_last_lease() {
    let mut pool = pool(8);
    let first = publish(&mut pool, 1, 2, 0);
    let second = pool.acquire(&1).expect("resident");
    let newer = publish(&mut pool, 1, 3, 0);
    release(&mut pool, first);
    assert_eq!((pool.stats().free, pool.stats().displaced), (3 * G, 1));
    release(&mut pool, second);
    assert_eq!((pool.stats().free, pool.stats().displaced), (5 * G, 0));
    release(&mut pool, newer);
    assert_eq!(pool.stats().resident_idle, 3 * G);
}

// row: R3b, R5
#[test]
#[cfg_attr(miri, ignore = "starts the compiler, which Miri cannot interpret")]
fn a_lease_cannot_be_used_after_its_release() {
    let cases = trybuild::TestCases::new();
    cases.compile_fail("tests/ui/release_twice.rs");
    cases.compile_fail("tests/ui/use_after_release.rs");
}

// row: R4
#[test]
fn a_lease_on_displaced_content_is_still_a_lease_on_that_content() {
    let mut pool = pool(8);
    let older = publish(&mut pool, 1, 1, 256);
    let region = older.region();
    let newer = publish(&mut pool, 1, 2, 512);
    assert_eq!(
        (older.region(), pool.lease_meta(&older)),
        (region, Some(&256))
    );
    assert_eq!(
        (pool.meta(&1), pool.lease_meta(&newer)),
        (Some(&512), Some(&512))
    );
    release(&mut pool, older);
    assert_eq!(
        pool.lease_count(&1),
        Some(1),
        "releasing the old lease leaves the new content alone"
    );
    release(&mut pool, newer);
}

// row: R5b
#[test]
fn nothing_takes_a_resident_away_from_under_a_lease() {
    let mut pool = pool(4);
    let lease = publish(&mut pool, 1, 4, 0);
    assert!(!pool.evict(&1));
    assert_eq!(pool.reserve(G), Reserve::Full);
    assert_eq!(
        (pool.is_resident(&1), pool.lease_meta(&lease)),
        (true, Some(&0))
    );
    release(&mut pool, lease);
    assert!(pool.evict(&1));
}

// row: R6
#[test]
fn an_entry_that_cannot_help_is_passed_over_and_stays_the_coldest() {
    let mut pool = pool(8);
    let coldest = publish(&mut pool, 0, 1, 0);
    let wall = publish(&mut pool, 1, 2, 0);
    let (a, b) = (publish(&mut pool, 2, 2, 0), publish(&mut pool, 3, 3, 0));
    for lease in [coldest, a, b] {
        release(&mut pool, lease);
    }
    // One granule beside a leased wall is no use for two.
    let bytes = ready(&mut pool, 2);
    assert_eq!(
        (bytes.offset(), pool.is_resident(&0), pool.is_resident(&3)),
        (3 * G, true, true)
    );
    let bytes_for_one = ready(&mut pool, 1);
    assert_eq!((bytes_for_one.offset(), pool.is_resident(&0)), (0, false));
    release(&mut pool, wall);
}

fn fastest_turnover(pool: &mut Pool<u64, ()>, keys: std::ops::Range<u64>) -> Duration {
    let mut fastest = Duration::MAX;
    let per_round = (keys.end - keys.start) / 7;
    let mut keys = keys;
    for _ in 0..7 {
        let start = Instant::now();
        for key in keys.by_ref().take(per_round as usize) {
            let Reserve::Ready(bytes) = pool.reserve(G) else {
                panic!("one is always idle")
            };
            let lease = pool.publish(key, bytes, ()).expect("own token");
            pool.release(lease, &[]).expect("own token");
        }
        fastest = fastest.min(start.elapsed());
    }
    fastest
}

// row: R6c
#[test]
#[cfg_attr(miri, ignore = "measures time")]
fn an_eviction_does_not_look_at_all_idle_entries() {
    let filled = |residents: u64| {
        let mut config = PoolConfig::new(PoolId::new(), residents * G);
        config.residents_max = u32::MAX;
        let mut pool: Pool<u64, ()> = Pool::new(config).expect("valid configuration");
        fastest_turnover(&mut pool, 0..residents);
        pool
    };
    let (mut few, mut many) = (filled(70), filled(35_000));
    let few = fastest_turnover(&mut few, 100_000..107_000);
    let many = fastest_turnover(&mut many, 100_000..107_000);
    // 500 times as many idle entries.
    assert!(many < few * 40, "{many:?} among many, {few:?} among few");
}

// row: R7
#[test]
fn publishing_over_idle_content_frees_it_and_takes_the_key_out_of_the_eviction_order() {
    let mut pool = pool(4);
    let lease = publish(&mut pool, 1, 2, 0);
    release(&mut pool, lease);
    let lease = publish(&mut pool, 1, 2, 1);
    assert_eq!((pool.stats().free, pool.stats().resident_idle), (2 * G, 0));
    assert_eq!(pool.reserve(3 * G), Reserve::Full, "nothing is idle");
    release(&mut pool, lease);
    assert!(matches!(pool.reserve(3 * G), Reserve::Ready(_)));
}

// row: R7b
#[test]
fn looking_at_idle_content_does_not_move_it_in_the_eviction_order() {
    let mut pool = pool(4);
    for key in [1, 2] {
        let lease = publish(&mut pool, key, 2, 0);
        release(&mut pool, lease);
    }
    assert!(pool.is_resident(&1));
    assert_eq!((pool.meta(&1), pool.lease_count(&1)), (Some(&0), Some(0)));
    let _bytes = ready(&mut pool, 1);
    assert_eq!((pool.is_resident(&1), pool.is_resident(&2)), (false, true));
}

// row: R8
#[test]
fn retired_content_becomes_evictable_with_its_last_lease_and_as_the_youngest() {
    let mut pool = pool(4);
    let owner = publish(&mut pool, 1, 2, 0);
    let reader = pool.acquire(&1).expect("resident");
    release(&mut pool, owner);
    assert_eq!((pool.stats().resident_idle, pool.evict(&1)), (0, false));
    let lease = publish(&mut pool, 2, 2, 0);
    release(&mut pool, lease);
    release(&mut pool, reader);
    let _bytes = ready(&mut pool, 2);
    assert_eq!((pool.is_resident(&1), pool.is_resident(&2)), (true, false));
}

// row: R9
#[test]
fn two_takers_hold_two_leases_and_each_counts() {
    let mut pool = pool(4);
    let first = publish(&mut pool, 1, 4, 0);
    let second = pool.acquire(&1).expect("resident");
    release(&mut pool, first);
    assert_eq!(pool.reserve(G), Reserve::Full);
    release(&mut pool, second);
    assert!(matches!(pool.reserve(G), Reserve::Ready(_)));
}

// row: R10
#[test]
fn calls_for_an_absent_key_answer_so_and_change_nothing() {
    let mut pool = pool(4);
    assert_eq!(pool.acquire(&9), None);
    assert!(!pool.evict(&9));
    assert!(!pool.is_resident(&9));
    assert_eq!((pool.meta(&9), pool.lease_count(&9)), (None, None));
    assert_eq!(pool.stats().free, 4 * G);
}

#[test]
fn content_without_bytes_is_a_resident_like_any_other() {
    let mut pool = pool(2);
    let _full = ready(&mut pool, 2);
    let first = publish(&mut pool, 1, 0, 0);
    let again = publish(&mut pool, 1, 0, 0);
    assert!(first.is_empty() && first.region().is_empty());
    assert_eq!((pool.lease_count(&1), pool.stats().owned), (Some(2), 2 * G));
    assert!(!pool.evict(&1));
    release(&mut pool, first);
    release(&mut pool, again);
    // It has no bytes to give.
    assert_eq!(pool.reserve(G), Reserve::Full);
    assert!(pool.is_resident(&1));
    assert!(pool.evict(&1));
}

#[test]
fn content_without_bytes_can_be_bound_anew_while_it_is_leased() {
    let mut pool = pool(2);
    let empty = publish(&mut pool, 1, 0, 0);
    let full = publish(&mut pool, 1, 2, 0);
    assert_eq!((pool.stats().displaced, pool.lease_count(&1)), (1, Some(1)));
    release(&mut pool, empty);
    assert_eq!(
        (pool.stats().displaced, pool.stats().resident_leased),
        (0, 2 * G)
    );
    release(&mut pool, full);
}

#[test]
fn at_the_bound_the_coldest_goes_and_if_all_are_leased_everything_is_handed_back() {
    let mut pool = common::pool_with(8, |config| config.residents_max = 2);
    let one = publish(&mut pool, 1, 1, 0);
    let two = publish(&mut pool, 2, 1, 0);
    let bytes = ready(&mut pool, 1);
    let region = bytes.region();
    let Err(Refused {
        value: (key, bytes, meta),
        cause,
    }) = pool.publish(3, bytes, 30)
    else {
        panic!("a third resident of two")
    };
    assert_eq!(cause, Error::TooManyResidents { residents_max: 2 });
    assert_eq!((key, bytes.region(), meta), (3, region, 30));
    // A key bound anew needs no third entry once its old content is idle.
    release(&mut pool, two);
    let two = publish(&mut pool, 2, 1, 1);
    assert_eq!((pool.is_resident(&1), pool.stats().residents), (true, 2));
    release(&mut pool, one);
    let three = pool.publish(3, bytes, 30).expect("the coldest goes");
    assert_eq!(
        (
            pool.is_resident(&1),
            pool.is_resident(&2),
            pool.stats().residents
        ),
        (false, true, 2)
    );
    release(&mut pool, two);
    release(&mut pool, three);
}

#[test]
fn a_displaced_entry_counts_towards_the_bound_until_its_last_lease() {
    let mut pool = common::pool_with(8, |config| config.residents_max = 2);
    let older = publish(&mut pool, 1, 1, 0);
    let newer = publish(&mut pool, 1, 1, 1);
    let bytes = ready(&mut pool, 1);
    let Err(refused) = pool.publish(2, bytes, 0) else {
        panic!("a third entry of two")
    };
    release(&mut pool, older);
    let (key, bytes, meta) = refused.value;
    let two = pool.publish(key, bytes, meta).expect("room again");
    release(&mut pool, newer);
    release(&mut pool, two);
}
