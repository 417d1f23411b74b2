//! The corner cases of a consumer's pool, one test a row.
//!
//! | row | why there is no run-time test |
//! | --- | --- |
//! | M1 | a pool is made whole by its constructor: there is no time before it in which to call it |
//! | M2c | lengths are `u64`; negative dimensions end where they are parsed, not here |
//! | M15 | `publish` consumes the allocation: freeing it does not compile (`ui/free_of_a_resident.rs`) |

mod common;

use common::{G, pool, pool_with, publish, ready, release};
use slab_core::{Error, Pool, PoolConfig, PoolId, Reclaimed, Reserve, RunState, SharedPool};

fn drained(pool: &mut common::TestPool) -> Vec<u32> {
    match pool.drain_reclaimed() {
        Reclaimed::Keys(mut keys) => {
            keys.sort_unstable();
            keys.into_iter().collect()
        }
        Reclaimed::All => panic!("the bound is far"),
    }
}

// row: M2
#[test]
fn bytes_taken_for_work_that_fails_come_back() {
    let pool: Pool<u32, ()> =
        Pool::new(PoolConfig::new(PoolId::new(), 4096)).expect("valid configuration");
    let shared = SharedPool::new(pool, ());
    let work = || -> Result<(), &'static str> {
        let Reserve::Ready(bytes) = shared.with(|pool, ()| pool.reserve(1000)) else {
            return Err("full");
        };
        let _guard = shared.allocation_guard(bytes).map_err(|_| "foreign")?;
        Err("the shape makes no sense")
    };
    assert_eq!(work(), Err("the shape makes no sense"));
    assert_eq!(shared.with(|pool, ()| pool.stats().free), 4096);
}

// row: M3
#[test]
fn a_request_beyond_the_capacity_evicts_nothing() {
    let mut pool = pool(4);
    for key in 0..4 {
        let lease = publish(&mut pool, key, 1, 0);
        release(&mut pool, lease);
    }
    assert_eq!(pool.reserve(4 * G + 1), Reserve::TooLarge);
    assert_eq!((pool.stats().residents, pool.stats().evictions), (4, 0));
    assert!(drained(&mut pool).is_empty());
}

// row: M3
#[test]
fn a_leased_entry_that_splits_the_room_makes_the_request_fail_without_an_eviction() {
    let mut pool = pool(8);
    let leases: Vec<_> = (0..8).map(|key| publish(&mut pool, key, 1, 0)).collect();
    let mut middle = None;
    for (key, lease) in leases.into_iter().enumerate() {
        if key == 4 {
            middle = Some(lease);
        } else {
            release(&mut pool, lease);
        }
    }
    assert_eq!(pool.reserve(5 * G), Reserve::Full);
    assert_eq!((pool.stats().residents, pool.stats().evictions), (8, 0));
    // What fits beside it takes only its share.
    let bytes = ready(&mut pool, 4);
    assert_eq!((bytes.offset(), drained(&mut pool)), (0, vec![0, 1, 2, 3]));
    release(&mut pool, middle.expect("entry 4"));
}

// row: M4
#[test]
fn bytes_that_wait_for_a_fence_are_not_evicted_for_a_second_time() {
    let mut pool = pool(4);
    let stream = pool.add_timeline().expect("room");
    for key in 0..4 {
        let lease = publish(&mut pool, key, 1, 0);
        pool.release(lease, &[stream.fence(u64::from(key) + 1)])
            .expect("own token");
    }
    // The two coldest give way, but their readers are still at work.
    let Reserve::Later(first) = pool.reserve(2 * G) else {
        panic!("{}", pool.stats())
    };
    assert_eq!(
        (drained(&mut pool), pool.stats().waiting),
        (vec![0, 1], 2 * G)
    );
    // Given up, the same bytes serve the next request: nothing more is evicted.
    pool.drop_claim(first).expect("own token");
    let Reserve::Later(claim) = pool.reserve(2 * G) else {
        panic!("{}", pool.stats())
    };
    assert!(drained(&mut pool).is_empty());
    pool.handle_reached(stream, 1).expect("own timeline");
    let claim = pool.poll_claim(claim).expect_err("one of two fences");
    pool.handle_reached(stream, 2).expect("own timeline");
    assert_eq!(
        pool.poll_claim(claim).expect("both fences").region().len(),
        2 * G
    );
    assert_eq!(pool.stats().resident_idle, 2 * G);
}

// row: M5
#[test]
fn fences_belong_to_the_content_and_not_to_its_key() {
    let mut pool = pool(4);
    let stream = pool.add_timeline().expect("room");
    let older = publish(&mut pool, 1, 2, 0);
    let reader = pool.acquire(&1).expect("resident");
    pool.release(reader, &[stream.fence(5)]).expect("own token");
    let newer = publish(&mut pool, 1, 2, 1);
    // A later retire of the same key does not overwrite what the older content waits for.
    pool.release(newer, &[stream.fence(2)]).expect("own token");
    release(&mut pool, older);
    assert_eq!(
        (pool.stats().waiting, pool.stats().resident_idle),
        (2 * G, 2 * G)
    );
    pool.handle_reached(stream, 2).expect("own timeline");
    assert_eq!(pool.stats().waiting, 2 * G);
    assert!(pool.evict(&1));
    assert_eq!((pool.stats().free, pool.stats().waiting), (2 * G, 2 * G));
    pool.handle_reached(stream, 5).expect("own timeline");
    assert_eq!(pool.stats().free, 4 * G);
}

// row: M5
#[test]
fn fences_of_idle_content_outlive_another_lease_on_it() {
    let mut pool = pool(2);
    let stream = pool.add_timeline().expect("room");
    let lease = publish(&mut pool, 1, 2, 0);
    pool.release(lease, &[stream.fence(3)]).expect("own token");
    let lease = pool.acquire(&1).expect("resident");
    release(&mut pool, lease);
    assert!(pool.evict(&1));
    assert_eq!(pool.stats().waiting, 2 * G);
    pool.handle_reached(stream, 3).expect("own timeline");
    assert_eq!(pool.stats().free, 2 * G);
}

// row: M6
#[test]
fn bytes_wait_for_every_stream_that_used_them_and_for_its_latest_use() {
    let mut pool = pool(2);
    let model = pool.add_timeline().expect("room");
    let copies = pool.add_timeline().expect("room");
    let owner = publish(&mut pool, 1, 2, 0);
    let reader = pool.acquire(&1).expect("resident");
    pool.release(reader, &[model.fence(9), model.fence(4)])
        .expect("own token");
    pool.release(owner, &[copies.fence(1), model.fence(7)])
        .expect("own token");
    let Reserve::Later(claim) = pool.reserve(2 * G) else {
        panic!("{}", pool.stats())
    };
    pool.handle_reached(model, 8).expect("own timeline");
    pool.handle_reached(copies, 1).expect("own timeline");
    let claim = pool
        .poll_claim(claim)
        .expect_err("the model's last use is at 9");
    pool.handle_reached(model, 9).expect("own timeline");
    assert!(pool.poll_claim(claim).is_ok());
}

// row: M7
#[test]
fn a_key_that_is_resident_again_is_not_reported_as_reclaimed() {
    let mut pool = pool(2);
    for key in [1, 2] {
        let lease = publish(&mut pool, key, 1, 0);
        release(&mut pool, lease);
    }
    let bytes = ready(&mut pool, 2);
    pool.free(bytes, &[]).expect("own token");
    let lease = publish(&mut pool, 1, 1, 0);
    assert_eq!(drained(&mut pool), [2]);
    release(&mut pool, lease);
    assert!(pool.evict(&1));
    assert_eq!(drained(&mut pool), [1]);
    assert!(drained(&mut pool).is_empty());
}

// row: M7
#[test]
fn more_reclaimed_keys_than_the_bound_are_reported_as_all_once() {
    let mut pool = pool_with(8, |config| config.reclaimed_max = 2);
    for key in 0..3 {
        let lease = publish(&mut pool, key, 1, 0);
        release(&mut pool, lease);
        assert!(pool.evict(&key));
    }
    assert!(matches!(pool.drain_reclaimed(), Reclaimed::All));
    assert!(drained(&mut pool).is_empty());
}

// row: M8
#[test]
fn a_pool_is_not_gone_while_a_guard_holds_a_lease_on_it() {
    let pool: Pool<u32, u32> =
        Pool::new(PoolConfig::new(PoolId::new(), 4096)).expect("valid configuration");
    let dropped = std::sync::Arc::new(());
    let shared = SharedPool::new(pool, std::sync::Arc::clone(&dropped));
    let guard = shared
        .with(|pool, _| {
            let Reserve::Ready(bytes) = pool.reserve(100) else {
                panic!("the pool is empty")
            };
            pool.publish(1, bytes, 0)
        })
        .map(|lease| shared.lease_guard(lease))
        .expect("own token")
        .expect("own token");
    drop(shared);
    assert_eq!(std::sync::Arc::strong_count(&dropped), 2, "the pool lives");
    drop(guard);
    assert_eq!(std::sync::Arc::strong_count(&dropped), 1);
}

// row: M13
#[test]
fn content_of_another_shape_that_nobody_uses_gives_way_to_the_new_shape() {
    let mut pool = pool(4);
    let lease = publish(&mut pool, 1, 2, 256);
    assert!(!pool.evict(&1), "in use");
    release(&mut pool, lease);
    assert!(pool.evict(&1));
    let lease = publish(&mut pool, 1, 4, 512);
    assert_eq!(pool.meta(&1), Some(&512));
    release(&mut pool, lease);
}

// row: M14
#[test]
fn a_second_writer_of_resident_content_never_displaces_what_is_in_use() {
    let mut pool = pool(4);
    // T1 and T2 are both told to write, T1 is taken first and its bytes are in use.
    let (t1, t2) = (ready(&mut pool, 2), ready(&mut pool, 2));
    let second_copy = t2.region();
    let taken = pool.publish(1, t1, 0).expect("own token");
    let in_use = taken.region();
    // T2 completes: writer and follower lease what is there, T2's own bytes are free.
    let writer = pool.publish(1, t2, 0).expect("own token");
    let follower = pool.acquire(&1).expect("resident");
    assert_eq!((writer.region(), follower.region()), (in_use, in_use));
    let next = ready(&mut pool, 2);
    assert_eq!(
        next.region(),
        second_copy,
        "the next push goes where nobody reads"
    );
    for lease in [taken, writer, follower] {
        assert!(!pool.evict(&1));
        release(&mut pool, lease);
    }
    assert!(pool.evict(&1));
}

// row: M15
#[test]
#[cfg_attr(miri, ignore = "starts the compiler, which Miri cannot interpret")]
fn bytes_of_a_resident_cannot_be_freed() {
    trybuild::TestCases::new().compile_fail("tests/ui/free_of_a_resident.rs");
}

#[test]
#[cfg_attr(miri, ignore = "starts the compiler, which Miri cannot interpret")]
fn a_claim_cannot_be_polled_after_it_was_given_up() {
    trybuild::TestCases::new().compile_fail("tests/ui/use_of_a_dropped_claim.rs");
}

#[test]
fn tokens_and_fences_of_another_pool_are_handed_back_and_change_nothing() {
    let (mut mine, mut other) = (pool(4), pool(4));
    let stream = mine.add_timeline().expect("room");
    let foreign = other.add_timeline().expect("room");
    let lease = publish(&mut mine, 1, 2, 0);
    let bytes = ready(&mut mine, 1);
    let before = mine.stats();

    let refused = other.release(lease, &[]).expect_err("a foreign lease");
    assert_eq!(
        refused.cause,
        Error::ForeignToken {
            token: mine.id(),
            pool: other.id()
        }
    );
    let refused = mine
        .release(refused.value, &[foreign.fence(1)])
        .expect_err("a foreign fence");
    assert_eq!(refused.cause, Error::UnknownTimeline { timeline: 0 });
    let lease = refused.value;

    let refused = other.free(bytes, &[]).expect_err("a foreign allocation");
    let refused = mine
        .free(refused.value, &[stream.fence(1), foreign.fence(1)])
        .expect_err("a foreign fence");
    let refused = other
        .quarantine(refused.value)
        .expect_err("a foreign allocation");
    let refused = other
        .publish(2, refused.value, 0)
        .expect_err("a foreign allocation");
    let (_, bytes, _) = refused.value;
    assert_eq!(other.lease_meta(&lease), None);
    assert_eq!(mine.stats(), before);
    assert_eq!(
        other.handle_reached(stream, 1),
        Err(Error::UnknownTimeline { timeline: 0 })
    );
    assert_eq!(
        other.handle_failed(stream),
        Err(Error::UnknownTimeline { timeline: 0 })
    );

    mine.free(bytes, &[stream.fence(1)]).expect("own token");
    let Reserve::Later(claim) = mine.reserve(2 * G) else {
        panic!("{}", mine.stats())
    };
    let claim = other.poll_claim(claim).expect_err("a foreign claim");
    let refused = other.drop_claim(claim).expect_err("a foreign claim");
    mine.drop_claim(refused.value).expect("own token");
    release(&mut mine, lease);
    assert_eq!(other.stats().free, 4 * G);
}

#[test]
fn a_timeline_beyond_the_bound_is_refused() {
    let mut pool = pool_with(4, |config| config.timelines_max = 1);
    pool.add_timeline().expect("room");
    assert_eq!(
        pool.add_timeline(),
        Err(Error::TooManyTimelines { timelines_max: 1 })
    );
}

#[test]
fn bytes_whose_completion_is_unknown_are_counted_and_never_reused() {
    let mut pool = pool(4);
    let stream = pool.add_timeline().expect("room");
    let bytes = ready(&mut pool, 1);
    pool.quarantine(bytes).expect("own token");
    let lease = publish(&mut pool, 1, 1, 0);
    pool.release(lease, &[stream.fence(1)]).expect("own token");
    let waiting = ready(&mut pool, 1);
    pool.free(waiting, &[stream.fence(1)]).expect("own token");
    pool.handle_failed(stream).expect("own timeline");
    // Waiting bytes are lost at once. Resident ones can still be read, and are lost when evicted, which
    // therefore no reserve does.
    assert_eq!(
        (pool.stats().quarantined, pool.stats().resident_idle),
        (2 * G, G)
    );
    assert_eq!(pool.reserve(2 * G), Reserve::Full);
    let lease = pool.acquire(&1).expect("resident");
    release(&mut pool, lease);
    assert!(pool.evict(&1));
    assert_eq!((pool.stats().quarantined, pool.stats().free), (3 * G, G));
    // New use of a failed timeline cannot complete either.
    let bytes = ready(&mut pool, 1);
    pool.free(bytes, &[stream.fence(1)]).expect("own token");
    assert!(pool.runs().all(|run| run.state == RunState::Quarantined));
}

#[test]
fn evictions_and_refusals_are_counted_by_size() {
    let mut pool = pool(4);
    let lease = publish(&mut pool, 1, 2, 0);
    assert_eq!(pool.reserve(3 * G), Reserve::Full);
    release(&mut pool, lease);
    let _bytes = ready(&mut pool, 3);
    let classes: Vec<_> = pool
        .size_classes()
        .map(|class| {
            (
                class.len_min,
                class.len_max,
                class.evictions,
                class.evicted_bytes,
                class.refusals,
            )
        })
        .collect();
    assert_eq!(classes, [(512, 1023, 1, 512, 1)]);
    let stats = pool.stats();
    assert_eq!(
        (stats.evictions, stats.evicted_bytes, stats.refusals),
        (1, 512, 1)
    );
}
