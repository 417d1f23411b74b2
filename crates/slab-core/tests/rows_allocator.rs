//! The corner cases of an offset allocator, one test a row.
//!
//! | row | why there is no run-time test |
//! | --- | --- |
//! | A2 | lengths are `u64`: a negative one does not compile (`ui/negative_size.rs`) |
//! | A4 | `free` consumes the allocation: a second free does not compile (`ui/double_free.rs`) |
//! | A8 | registering memory is the business of whoever owns it; this crate never sees an address |

use std::time::{Duration, Instant};

use slab_core::{
    Allocation, Error, FreeList, FreeListConfig, Placement, Pool, PoolConfig, PoolId, Refused,
    Region, Reserve, SharedPool,
};

const PLACEMENTS: [Placement; 2] = [Placement::BestFit, Placement::FirstFit];

fn list(capacity: u64, alignment: u64, placement: Placement) -> FreeList {
    let mut config = FreeListConfig::new(PoolId::new(), capacity);
    config.alignment = alignment;
    config.placement = placement;
    FreeList::new(config).expect("valid configuration")
}

fn map(list: &FreeList) -> Vec<(u64, u64, bool)> {
    list.runs()
        .map(|run| (run.region.offset(), run.region.len(), run.is_free))
        .collect()
}

// row: A1
#[test]
fn an_empty_allocation_owns_nothing_and_never_fails() {
    for placement in PLACEMENTS {
        let mut list = list(1024, 256, placement);
        let everything = list.allocate(1024).expect("room");
        let before = map(&list);
        let empties: Vec<Allocation> = (0..3)
            .map(|_| list.allocate(0).expect("never fails"))
            .collect();
        assert!(
            empties
                .iter()
                .all(|empty| empty.is_empty() && empty.region().is_empty())
        );
        for empty in empties {
            list.free(empty).expect("own token");
        }
        assert_eq!(map(&list), before);
        list.free(everything).expect("own token");
        assert_eq!(map(&list), [(0, 1024, true)]);
    }
}

// row: A1
#[test]
fn an_empty_reserve_is_ready_when_the_pool_is_full() {
    let mut pool: Pool<u32, ()> =
        Pool::new(PoolConfig::new(PoolId::new(), 1024)).expect("valid configuration");
    let Reserve::Ready(_everything) = pool.reserve(1024) else {
        panic!("the pool is empty")
    };
    let Reserve::Ready(empty) = pool.reserve(0) else {
        panic!("an empty reserve failed")
    };
    assert_eq!((empty.len(), empty.region().len()), (0, 0));
    pool.free(empty, &[]).expect("own token");
    assert_eq!(pool.stats().owned, 1024);
}

// row: A2
#[test]
#[cfg_attr(miri, ignore = "starts the compiler, which Miri cannot interpret")]
fn a_negative_size_does_not_compile() {
    trybuild::TestCases::new().compile_fail("tests/ui/negative_size.rs");
}

// row: A3
#[test]
fn a_tail_that_is_no_whole_granule_is_reported_and_never_handed_out() {
    for placement in PLACEMENTS {
        let mut list = list(1000, 256, placement);
        assert_eq!(
            (list.capacity(), list.usable(), list.unusable_tail()),
            (1000, 768, 232)
        );
        assert_eq!(
            list.allocate(1000),
            Err(Error::TooLarge {
                requested: 1000,
                usable: 768
            })
        );
        assert_eq!(
            list.allocate(768)
                .expect("all that is usable")
                .region()
                .end(),
            768
        );
    }
}

#[test]
fn a_slab_without_one_granule_or_with_an_odd_alignment_is_refused() {
    let mut config = FreeListConfig::new(PoolId::new(), 255);
    let refused = FreeList::new(config.clone()).map(|_| ());
    assert_eq!(
        refused,
        Err(Error::CapacityTooSmall {
            capacity: 255,
            alignment: 256
        })
    );
    for alignment in [0, 3, 257] {
        config.alignment = alignment;
        let refused = FreeList::new(config.clone()).map(|_| ());
        assert_eq!(refused, Err(Error::InvalidAlignment { alignment }));
    }
}

// row: A4
#[test]
#[cfg_attr(miri, ignore = "starts the compiler, which Miri cannot interpret")]
fn a_double_free_does_not_compile() {
    let cases = trybuild::TestCases::new();
    cases.compile_fail("tests/ui/double_free.rs");
    cases.compile_fail("tests/ui/clone_of_a_token.rs");
}

// row: A4b
#[test]
#[cfg_attr(miri, ignore = "starts the compiler, which Miri cannot interpret")]
fn a_region_that_nobody_allocated_cannot_be_named() {
    trybuild::TestCases::new().compile_fail("tests/ui/forged_token.rs");
}

// row: A4b
#[test]
fn a_token_of_another_list_is_handed_back_and_changes_nothing() {
    for placement in PLACEMENTS {
        let mut mine = list(4096, 256, placement);
        let mut other = list(4096, 256, placement);
        let _wall = mine.allocate(256).expect("room");
        let foreign = other.allocate(256).expect("room");
        let before = map(&mine);
        let Err(Refused { value, cause }) = mine.free(foreign) else {
            panic!("accepted")
        };
        assert_eq!(
            cause,
            Error::ForeignToken {
                token: other.id(),
                pool: mine.id()
            }
        );
        assert_eq!(map(&mine), before);
        other
            .free(value)
            .expect("the token is still good where it belongs");
        assert_eq!(map(&other), [(0, 4096, true)]);
    }
}

// row: A4b
#[test]
fn a_token_of_a_list_that_shares_the_id_is_refused_where_it_names_no_allocation() {
    let config = FreeListConfig::new(PoolId::from_raw(7), 4096);
    let mut mine = FreeList::new(config.clone()).expect("valid configuration");
    let mut twin = FreeList::new(config).expect("valid configuration");
    let _wall = twin.allocate(512).expect("room");
    let stray = twin.allocate(512).expect("room");
    let _mine = mine.allocate(256).expect("room");
    let before = map(&mine);
    let Err(refused) = mine.free(stray) else {
        panic!("accepted")
    };
    assert_eq!(
        refused.cause,
        Error::UnknownToken {
            pool: PoolId::from_raw(7)
        }
    );
    assert_eq!(map(&mine), before);
}

// row: A5
#[test]
fn a_request_beyond_the_capacity_fails_as_such_and_changes_nothing() {
    for placement in PLACEMENTS {
        let mut list = list(4096, 256, placement);
        let _wall = list.allocate(256).expect("room");
        let before = map(&list);
        let error = list.allocate(4097).map(|_| ());
        assert_eq!(
            error,
            Err(Error::TooLarge {
                requested: 4097,
                usable: 4096
            })
        );
        let error = list.allocate(4096).map(|_| ());
        let expected = Error::Exhausted {
            requested: 4096,
            free: 3840,
            largest_free: 3840,
        };
        assert_eq!(error, Err(expected));
        assert_eq!(map(&list), before);
    }
}

/// A list with `holes` holes of one granule, and one of ten granules behind them.
fn fragmented(holes: u64, placement: Placement) -> FreeList {
    let mut list = list((2 * holes + 10) * 256, 256, placement);
    let mut gone = Vec::new();
    for _ in 0..holes {
        gone.push(list.allocate(256).expect("room"));
        // Leaked on purpose: it stays a wall.
        let _wall = list.allocate(256).expect("room");
    }
    for hole in gone {
        list.free(hole).expect("own token");
    }
    list
}

fn fastest_pairs(list: &mut FreeList) -> Duration {
    let mut fastest = Duration::MAX;
    for _ in 0..7 {
        let start = Instant::now();
        for _ in 0..500 {
            let behind = list.allocate(2560).expect("room");
            list.free(behind).expect("own token");
        }
        fastest = fastest.min(start.elapsed());
    }
    fastest
}

// row: A6
#[test]
#[cfg_attr(miri, ignore = "measures time")]
fn a_request_that_fits_only_behind_many_holes_is_not_found_by_a_scan() {
    for placement in PLACEMENTS {
        let mut few = fragmented(10, placement);
        let mut many = fragmented(50_000, placement);
        let behind = many.allocate(2560).expect("room");
        assert_eq!(behind.offset(), 100_000 * 256);
        many.free(behind).expect("own token");
        // The lowest of all holes is where a small one goes.
        if placement == Placement::FirstFit {
            let lowest = many.allocate(256).expect("room");
            assert_eq!(lowest.offset(), 0);
            many.free(lowest).expect("own token");
        }
        // 5,000 times as many holes; a scan would take at least hundreds of times as long.
        let (few, many) = (fastest_pairs(&mut few), fastest_pairs(&mut many));
        assert!(
            many < few * 60,
            "{placement:?}: {many:?} behind many holes, {few:?} behind few"
        );
    }
}

// row: A7
#[test]
fn a_token_that_outlives_its_list_is_good_for_nothing_else() {
    let mut gone = list(4096, 256, Placement::BestFit);
    let orphan = gone.allocate(256).expect("room");
    drop(gone);
    let mut next = list(4096, 256, Placement::BestFit);
    let _same_place = next.allocate(256).expect("room");
    assert!(next.free(orphan).is_err());
    assert_eq!(next.free_bytes(), 4096 - 256);
}

// row: A7
#[test]
fn a_guard_keeps_the_pool_it_gives_its_bytes_back_to() {
    let pool: Pool<u32, ()> =
        Pool::new(PoolConfig::new(PoolId::new(), 4096)).expect("valid configuration");
    let shared = SharedPool::new(pool, ());
    let Reserve::Ready(bytes) = shared.with(|pool, ()| pool.reserve(100)) else {
        panic!("the pool is empty")
    };
    let guard = shared.allocation_guard(bytes).expect("own token");
    let observer = shared.clone();
    drop(shared);
    drop(guard);
    assert_eq!(observer.with(|pool, ()| pool.stats().free), 4096);
}

// row: A9
#[test]
fn sizes_near_the_end_of_the_number_range_do_not_overflow() {
    for placement in PLACEMENTS {
        for alignment in [1, 256, 1 << 40, 1 << 63] {
            let mut list = list(u64::MAX, alignment, placement);
            let usable = u64::MAX / alignment * alignment;
            assert_eq!(list.usable(), usable);
            if alignment > 1 {
                let error = list.allocate(u64::MAX).map(|_| ());
                assert_eq!(
                    error,
                    Err(Error::TooLarge {
                        requested: u64::MAX,
                        usable
                    })
                );
            }
            let everything = list.allocate(usable).expect("room");
            assert_eq!(everything.region().end(), usable);
            assert!(list.allocate(1).is_err());
            list.free(everything).expect("own token");
            assert_eq!(list.largest_free(), usable);
        }
    }
    assert_eq!(Region::new(u64::MAX - 255, 256), None);
    let mut pool: Pool<u32, ()> =
        Pool::new(PoolConfig::new(PoolId::new(), 4096)).expect("valid configuration");
    for len in [u64::MAX, u64::MAX - 255, 1 << 63] {
        assert_eq!(pool.reserve(len), Reserve::TooLarge);
    }
}
