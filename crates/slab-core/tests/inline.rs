//! Where the bounds of a store without a heap are reached: typed answers, and nothing that changed.

use std::hash::RandomState;

use slab_core::{
    Allocation, Credit, Error, FreeList, FreeListConfig, Inline, Placement, Pool, PoolConfig,
    PoolId, Reclaimed, Reserve,
};

const G: u64 = 256;

/// Six runs.
type Store = Inline<8, 256>;
type TestPool = Pool<u32, (), RandomState, Store>;

fn list(granules: u64, placement: Placement) -> FreeList<Store> {
    let mut config = FreeListConfig::new(PoolId::new(), granules * G);
    config.placement = placement;
    FreeList::new_inline(config)
}

fn pool(granules: u64) -> TestPool {
    let config = PoolConfig::new(PoolId::new(), granules * G);
    Pool::new_inline(config, RandomState::new())
}

fn reserve(pool: &mut TestPool, granules: u64) -> Option<Allocation> {
    match pool.reserve(granules * G) {
        Reserve::Ready(bytes) => Some(bytes),
        _ => None,
    }
}

fn keep(pool: &mut TestPool, key: u32, granules: u64) -> bool {
    let Some(bytes) = reserve(pool, granules) else {
        return false;
    };
    let lease = pool.publish(key, bytes, ()).expect("room for a resident");
    pool.release(lease, &[]).expect("own lease");
    true
}

#[test]
fn a_list_holds_as_many_runs_as_its_store_says_and_takes_all_of_them_back() {
    for placement in [Placement::BestFit, Placement::FirstFit] {
        let mut list = list(100, placement);
        let live: Vec<Allocation> = (0..5).filter_map(|_| list.allocate(G).ok()).collect();
        assert_eq!((live.len(), list.run_count()), (5, 6));
        assert_eq!(list.allocate(G), Err(Error::TooManyRuns { runs_max: 6 }));
        // The last run as a whole needs no further one.
        let rest = list.allocate(95 * G).expect("exactly the rest");
        assert_eq!(list.free_bytes(), 0);
        for allocation in live {
            list.free(allocation).expect("own token");
        }
        list.free(rest).expect("own token");
        assert_eq!((list.run_count(), list.largest_free()), (1, 100 * G));
    }
}

#[test]
fn a_pool_whose_runs_are_all_used_turns_over_where_no_further_run_is_needed() {
    let mut pool = pool(12);
    for key in 0..6 {
        assert!(keep(&mut pool, key, 2));
    }
    assert_eq!((pool.stats().runs, pool.stats().free), (6, 0));
    for key in 6..50 {
        assert!(keep(&mut pool, key, 2), "as long as what gives way");
    }
    // Two neighbours together give way to what leaves a rest.
    assert!(keep(&mut pool, 50, 3));
    assert_eq!(pool.stats().runs, 6);
}

#[test]
fn a_reserve_that_would_need_one_more_run_than_there_are_evicts_nothing() {
    let mut pool = pool(12);
    for key in 0..6 {
        assert!(keep(&mut pool, key, 2));
    }
    // What is idle lies between what is not, so nothing can merge and leave a rest.
    let leases: Vec<_> = [0, 2, 4]
        .iter()
        .filter_map(|key| pool.acquire(key))
        .collect();
    assert_eq!((leases.len(), pool.reserve(G)), (3, Reserve::Full));
    assert_eq!((pool.stats().residents, pool.stats().evictions), (6, 0));
    assert!(keep(&mut pool, 60, 2), "exactly as long");
    for lease in leases {
        pool.release(lease, &[]).expect("own lease");
    }
    assert!(keep(&mut pool, 61, 1), "two neighbours merge");
}

#[test]
fn a_refusal_for_want_of_runs_is_thought_over_once_neighbours_need_not_wait() {
    let mut pool = pool(12);
    let line = pool.add_timeline().expect("the first one");
    let mut leases = Vec::new();
    for key in 0..6 {
        let bytes = reserve(&mut pool, 2).expect("room");
        leases.push(pool.publish(key, bytes, ()).expect("room for a resident"));
    }
    for lease in leases.drain(2..4) {
        pool.release(lease, &[line.fence(1)]).expect("own lease");
    }
    assert_eq!(
        pool.reserve(4 * G),
        Reserve::Full,
        "a window that waits may have to be cut"
    );
    pool.handle_reached(line, 1).expect("own timeline");
    assert!(reserve(&mut pool, 4).is_some());
}

#[test]
fn residents_without_bytes_are_bounded_by_the_slots_and_make_room_for_each_other() {
    let mut pool = pool(12);
    for key in 0..20 {
        let Reserve::Ready(bytes) = pool.reserve(0) else {
            panic!("no bytes are always there")
        };
        let lease = pool.publish(key, bytes, ()).expect("an idle one gives way");
        pool.release(lease, &[]).expect("own lease");
    }
    assert_eq!(pool.stats().residents, 8);
    let leases: Vec<_> = (12..20).filter_map(|key| pool.acquire(&key)).collect();
    assert_eq!(leases.len(), 8);
    let Reserve::Ready(bytes) = pool.reserve(0) else {
        panic!("no bytes are always there")
    };
    let refused = pool.publish(99, bytes, ()).expect_err("all are leased");
    assert_eq!(refused.cause, Error::TooManyResidents { residents_max: 8 });
}

#[test]
fn fences_beyond_the_store_are_refused_with_the_token_and_change_nothing() {
    let mut pool = pool(12);
    let timelines: Vec<_> = (0..8)
        .map(|_| pool.add_timeline().expect("as many as slots"))
        .collect();
    let too_many = pool.add_timeline();
    assert_eq!(too_many, Err(Error::TooManyTimelines { timelines_max: 8 }));

    let first = reserve(&mut pool, 2).expect("room");
    let second = reserve(&mut pool, 2).expect("room");
    let fences: Vec<_> = timelines.iter().map(|line| line.fence(1)).collect();
    pool.free(first, &fences[..6]).expect("six of eight");
    let before = pool.stats();
    let refused = pool
        .free(second, &fences[5..])
        .expect_err("three more would be nine");
    assert_eq!(refused.cause, Error::TooManyFences { fences_max: 8 });
    assert_eq!(pool.stats(), before);
    // Of one timeline only the highest is kept, and what is reached needs no place.
    let twice = [
        timelines[6].fence(1),
        timelines[6].fence(2),
        timelines[7].fence(0),
    ];
    pool.free(refused.value, &twice)
        .expect("one place is enough");
    for line in &timelines {
        pool.handle_reached(*line, 2).expect("own timeline");
    }
    assert_eq!(pool.stats().free, 12 * G);
}

#[test]
fn fences_that_are_reached_take_no_room_from_others() {
    let mut pool = pool(12);
    let lines: Vec<_> = (0..3)
        .map(|_| pool.add_timeline().expect("three of eight"))
        .collect();
    let at = |value| {
        lines
            .iter()
            .map(|line| line.fence(value))
            .collect::<Vec<_>>()
    };
    let mut leases = Vec::new();
    for key in 0..5 {
        let bytes = reserve(&mut pool, 1).expect("room");
        leases.push(pool.publish(key, bytes, ()).expect("room for a resident"));
    }
    for lease in leases.drain(..2) {
        pool.release(lease, &at(1)).expect("six marks of eight");
    }
    for line in &lines {
        pool.handle_reached(*line, 1).expect("own timeline");
    }
    for lease in leases.drain(..2) {
        pool.release(lease, &at(2))
            .expect("the six are of no use any more");
    }
    let lease = leases.pop().expect("the fifth");
    let refused = pool
        .release(lease, &at(2))
        .expect_err("nine are not reached");
    assert_eq!(refused.cause, Error::TooManyFences { fences_max: 8 });
    pool.handle_reached(lines[0], 2).expect("own timeline");
    pool.release(refused.value, &at(2)[1..])
        .expect("six of eight");
}

#[test]
fn a_policy_without_a_heap_bounds_the_residents_of_any_pool() {
    let config = PoolConfig::new(PoolId::new(), 12 * G);
    let policy = Credit::<Inline<4>>::new_inline();
    let mut pool: Pool<u32, (), _, _, _> =
        Pool::with_policy(config, RandomState::new(), policy).expect("valid configuration");
    for key in 0..6 {
        let Reserve::Ready(bytes) = pool.reserve(G) else {
            panic!("there is room")
        };
        let lease = pool.publish(key, bytes, ()).expect("an idle one gives way");
        pool.release(lease, &[]).expect("own lease");
    }
    assert_eq!((pool.stats().residents, pool.stats().evictions), (4, 2));
}

#[test]
fn more_evictions_than_slots_between_two_drains_are_reported_as_all() {
    let mut pool = pool(12);
    for key in 0..9 {
        assert!(keep(&mut pool, key, 1) && pool.evict(&key));
    }
    assert!(matches!(pool.drain_reclaimed(), Reclaimed::All));
    assert!(keep(&mut pool, 3, 1) && pool.evict(&3) && keep(&mut pool, 4, 1));
    assert!(keep(&mut pool, 3, 1) && pool.evict(&3) && pool.evict(&4));
    let Reclaimed::Keys(mut keys) = pool.drain_reclaimed() else {
        panic!("three evictions are fewer than eight")
    };
    keys.sort_unstable();
    assert_eq!(&*keys, [3, 4], "each once");
}

#[test]
#[should_panic(expected = "size classes")]
fn a_capacity_beyond_the_size_classes_is_no_pool() {
    drop(pool(64 << 3));
}

#[test]
fn first_fit_needs_no_size_classes() {
    let mut config = FreeListConfig::new(PoolId::new(), u64::MAX);
    config.placement = Placement::FirstFit;
    let mut list = FreeList::<Inline<4, 0>>::new_inline(config);
    let all = list.allocate(list.usable()).expect("the whole slab");
    list.free(all).expect("own token");
}
