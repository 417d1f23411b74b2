//! How reserve, claims and residents play together, step by step.

use slab_core::{
    Allocation, Error, Fence, Placement, Pool, PoolConfig, PoolId, Reclaimed, Reserve, RunState,
};

type TestPool = Pool<u32, u32>;

const G: u64 = 256;

fn pool(granules: u64) -> TestPool {
    pool_with(granules, |_| {})
}

fn pool_with(granules: u64, adjust: impl FnOnce(&mut PoolConfig)) -> TestPool {
    let mut config = PoolConfig::new(PoolId::new(), granules * G);
    config.placement = Placement::FirstFit;
    adjust(&mut config);
    Pool::new(config).expect("valid configuration")
}

fn ready(pool: &mut TestPool, granules: u64) -> Allocation {
    match pool.reserve(granules * G) {
        Reserve::Ready(allocation) => allocation,
        other => panic!("{granules} granules: {other:?} in {}", pool.stats()),
    }
}

/// Publishes a resident of this many granules under `key` and retires it after `fences`.
fn resident(pool: &mut TestPool, key: u32, granules: u64, fences: &[Fence]) {
    let allocation = ready(pool, granules);
    let lease = pool.publish(key, allocation, 0).expect("own token");
    pool.release(lease, fences).expect("own token");
}

fn map(pool: &TestPool) -> String {
    pool.runs()
        .map(|run| {
            let letter = match run.state {
                RunState::Free => 'f',
                RunState::Caller => 'c',
                RunState::Resident { leases: 0 } => 'i',
                RunState::Resident { .. } => 'l',
                RunState::Waiting => 'w',
                RunState::Claimed => 'k',
                RunState::Quarantined => 'q',
                other => panic!("{other:?}"),
            };
            format!("{letter}{}", run.region.len() / G)
        })
        .collect::<Vec<_>>()
        .join(" ")
}

fn reclaimed(pool: &mut TestPool) -> Vec<u32> {
    match pool.drain_reclaimed() {
        Reclaimed::Keys(mut keys) => {
            keys.sort_unstable();
            keys.into_iter().collect()
        }
        Reclaimed::All => panic!("the bound is far"),
    }
}

#[test]
fn a_window_evicts_the_coldest_and_only_the_neighbours_it_needs() {
    let mut pool = pool(8);
    for key in 0..4 {
        resident(&mut pool, key, 2, &[]);
    }
    let bytes = ready(&mut pool, 3);
    assert_eq!(bytes.offset(), 0);
    assert_eq!(map(&pool), "c3 f1 i2 i2");
    assert_eq!(reclaimed(&mut pool), [0, 1]);
}

#[test]
fn a_window_grows_over_holes_before_it_evicts_a_neighbour() {
    let mut pool = pool(8);
    for key in 0..4 {
        resident(&mut pool, key, 2, &[]);
    }
    assert!(pool.evict(&2));
    // Touching the lowest makes the one beside the hole the coldest.
    let lease = pool.acquire(&0).expect("resident");
    pool.release(lease, &[]).expect("own token");
    let _bytes = ready(&mut pool, 4);
    assert_eq!(map(&pool), "i2 c4 i2");
    assert_eq!(reclaimed(&mut pool), [1, 2]);
}

#[test]
fn the_coldest_go_one_by_one_until_the_bytes_fit() {
    let mut pool = pool(12);
    for key in 0..6 {
        resident(&mut pool, key, 2, &[]);
    }
    // 0 and 2 become the warmest, so the coldest two, 1 and 3, do not touch.
    for key in [0, 2] {
        let lease = pool.acquire(&key).expect("resident");
        pool.release(lease, &[]).expect("own token");
    }
    let bytes = ready(&mut pool, 4);
    assert_eq!(bytes.offset(), 6 * G);
    assert_eq!(map(&pool), "i2 f2 i2 c4 i2");
    assert_eq!(reclaimed(&mut pool), [1, 3, 4]);
}

#[test]
fn after_four_times_the_request_the_cheapest_window_gives_way() {
    let mut pool = pool(36);
    for key in 0..12 {
        resident(&mut pool, key, 3, &[]);
    }
    // Cold and warm ones take turns, and the warm ones get warmer with the address.
    for key in (1..12).step_by(2) {
        let lease = pool.acquire(&key).expect("resident");
        pool.release(lease, &[]).expect("own token");
    }
    // Five cold ones make no room, and six would be more than four times what was asked for.
    let bytes = ready(&mut pool, 4);
    assert_eq!(bytes.offset(), 0);
    assert_eq!(reclaimed(&mut pool), [0, 1, 2, 4, 6, 8]);
}

#[test]
fn what_cannot_help_is_not_evicted_on_the_way() {
    let mut pool = pool(10);
    resident(&mut pool, 0, 3, &[]);
    let _wall = ready(&mut pool, 1);
    for key in 1..4 {
        resident(&mut pool, key, 2, &[]);
    }
    let bytes = ready(&mut pool, 4);
    assert_eq!(bytes.offset(), 4 * G);
    assert_eq!(reclaimed(&mut pool), [1, 2]);
}

#[test]
fn a_reserve_that_leases_make_impossible_evicts_nothing_and_is_remembered() {
    let mut pool = pool(8);
    for key in 0..4 {
        resident(&mut pool, key, 2, &[]);
    }
    let lease = pool.acquire(&1).expect("resident");
    assert_eq!(pool.reserve(5 * G), Reserve::Full);
    assert_eq!(pool.reserve(6 * G), Reserve::Full);
    assert_eq!(map(&pool), "i2 l2 i2 i2");
    assert_eq!(pool.stats().refusals, 2);
    pool.release(lease, &[]).expect("own token");
    assert!(matches!(pool.reserve(5 * G), Reserve::Ready(_)));
}

#[test]
fn waiting_bytes_are_claimed_rather_than_more_evicted() {
    let mut pool = pool(8);
    let stream = pool.add_timeline().expect("room");
    resident(&mut pool, 0, 4, &[]);
    let bytes = ready(&mut pool, 4);
    pool.free(bytes, &[stream.fence(7)]).expect("own token");
    let Reserve::Later(claim) = pool.reserve(3 * G) else {
        panic!("{}", pool.stats())
    };
    assert_eq!(map(&pool), "i4 w4");
    let claim = pool.poll_claim(claim).expect_err("not reached");
    pool.handle_reached(stream, 6).expect("own timeline");
    let claim = pool.poll_claim(claim).expect_err("not reached");
    pool.handle_reached(stream, 7).expect("own timeline");
    assert_eq!(map(&pool), "i4 k3 f1");
    let bytes = pool.poll_claim(claim).expect("reached");
    assert_eq!(
        (bytes.offset(), bytes.len(), bytes.region().len()),
        (4 * G, 3 * G, 3 * G)
    );
    assert_eq!(map(&pool), "i4 c3 f1");
}

#[test]
fn a_claimed_window_of_several_runs_is_withheld_until_the_last_fence() {
    let mut pool = pool(10);
    let (a, b) = (
        pool.add_timeline().expect("room"),
        pool.add_timeline().expect("room"),
    );
    resident(&mut pool, 0, 2, &[a.fence(1)]);
    resident(&mut pool, 1, 2, &[b.fence(1), a.fence(2)]);
    let wall = ready(&mut pool, 4);
    let tail = ready(&mut pool, 2);
    pool.free(tail, &[]).expect("own token");
    let Reserve::Later(claim) = pool.reserve(4 * G) else {
        panic!("{}", pool.stats())
    };
    assert_eq!(map(&pool), "w2 w2 c4 f2");
    pool.handle_reached(a, 1).expect("own timeline");
    assert_eq!(map(&pool), "k2 w2 c4 f2");
    // Withheld bytes are nobody else's.
    assert_eq!(pool.reserve(3 * G), Reserve::Full);
    pool.handle_reached(a, 2).expect("own timeline");
    let claim = pool.poll_claim(claim).expect_err("b is not reached");
    pool.handle_reached(b, 1).expect("own timeline");
    let bytes = pool.poll_claim(claim).expect("reached");
    assert_eq!((bytes.offset(), bytes.region().len()), (0, 4 * G));
    pool.free(bytes, &[]).expect("own token");
    pool.free(wall, &[]).expect("own token");
    assert_eq!(map(&pool), "f10");
}

#[test]
fn a_claim_takes_only_what_it_needs_of_a_free_end() {
    let mut pool = pool(8);
    let a = pool.add_timeline().expect("room");
    let (low, mid, _high) = (
        ready(&mut pool, 3),
        ready(&mut pool, 2),
        ready(&mut pool, 3),
    );
    pool.free(low, &[]).expect("own token");
    pool.free(mid, &[a.fence(1)]).expect("own token");
    let Reserve::Later(claim) = pool.reserve(4 * G) else {
        panic!("{}", pool.stats())
    };
    assert_eq!(map(&pool), "f1 k2 w2 c3");
    pool.drop_claim(claim).expect("own token");
    assert_eq!(map(&pool), "f3 w2 c3");
}

#[test]
fn a_failed_timeline_quarantines_and_the_claim_moves_to_another_window() {
    let mut pool = pool(8);
    let (a, b) = (
        pool.add_timeline().expect("room"),
        pool.add_timeline().expect("room"),
    );
    let (low, high) = (ready(&mut pool, 4), ready(&mut pool, 4));
    pool.free(low, &[a.fence(1)]).expect("own token");
    pool.free(high, &[b.fence(1)]).expect("own token");
    let Reserve::Later(claim) = pool.reserve(4 * G) else {
        panic!("{}", pool.stats())
    };
    pool.handle_failed(a).expect("own timeline");
    assert_eq!(map(&pool), "q4 w4");
    let claim = pool
        .poll_claim(claim)
        .expect_err("moved to the other window");
    pool.handle_reached(b, 1).expect("own timeline");
    assert_eq!(map(&pool), "q4 k4");
    assert_eq!(pool.poll_claim(claim).expect("reached").offset(), 4 * G);
    assert_eq!(
        pool.handle_reached(a, 9),
        Err(Error::TimelineFailed { timeline: 0 })
    );
}

#[test]
fn without_room_for_a_claim_a_reserve_does_without_waiting_bytes() {
    let mut pool = pool_with(8, |config| config.claims_max = 1);
    let a = pool.add_timeline().expect("room");
    let (low, mid) = (ready(&mut pool, 2), ready(&mut pool, 2));
    resident(&mut pool, 0, 4, &[]);
    pool.free(low, &[a.fence(1)]).expect("own token");
    let Reserve::Later(_claim) = pool.reserve(2 * G) else {
        panic!("{}", pool.stats())
    };
    pool.free(mid, &[a.fence(1)]).expect("own token");
    let bytes = ready(&mut pool, 2);
    assert_eq!(bytes.offset(), 4 * G);
    assert_eq!(reclaimed(&mut pool), [0]);
    assert_eq!(pool.reserve(4 * G), Reserve::Full);
    // Not remembered: with a claim it would work.
    pool.handle_reached(a, 1).expect("own timeline");
    assert_eq!(map(&pool), "k2 f2 c2 f2");
}
