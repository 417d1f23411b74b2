//! The lock, its waiters, and guards dropped wherever they may be dropped.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use slab_core::{
    Allocation, AllocationGuard, Error, LeaseGuard, Pool, PoolConfig, PoolId, Reserve, SharedPool,
};

type Shared<X> = SharedPool<u64, u32, X>;

const G: u64 = 256;

fn shared<X>(granules: u64, state: X) -> Shared<X> {
    let config = PoolConfig::new(PoolId::new(), granules * G);
    SharedPool::new(Pool::new(config).expect("valid configuration"), state)
}

fn reserve(pool: &mut Pool<u64, u32>, granules: u64) -> Option<Allocation> {
    match pool.reserve(granules * G) {
        Reserve::Ready(allocation) => Some(allocation),
        _ => None,
    }
}

/// Far beyond what any step here takes, so that a lost wake-up fails the test instead of hanging it.
fn soon() -> Option<Instant> {
    Some(Instant::now() + Duration::from_secs(30))
}

fn take<X: Send + 'static>(shared: &Shared<X>, granules: u64) -> AllocationGuard {
    let allocation = shared
        .with(|pool, _| reserve(pool, granules))
        .expect("room");
    shared.allocation_guard(allocation).expect("own token")
}

fn lease<X: Send + 'static>(shared: &Shared<X>, key: u64, granules: u64) -> LeaseGuard {
    let lease = shared.with(|pool, _| {
        let allocation = reserve(pool, granules).expect("room");
        pool.publish(key, allocation, 0).expect("own token")
    });
    shared.lease_guard(lease).expect("own token")
}

#[test]
fn guards_and_handles_may_cross_threads_and_hide_the_pools_types() {
    fn crosses<T: Send + Sync + 'static>() {}
    crosses::<SharedPool<String, Vec<u8>, Vec<u8>>>();
    crosses::<AllocationGuard>();
    crosses::<LeaseGuard>();
    let shared = shared(8, ());
    let hold: Box<dyn std::any::Any + Send> = Box::new(lease(&shared, 1, 1));
    thread::spawn(move || drop(hold)).join().expect("no panic");
    assert_eq!(shared.with(|pool, ()| pool.lease_count(&1)), Some(0));
}

#[test]
fn dropping_a_guard_gives_its_token_back() {
    let shared = shared(8, ());
    let bytes = take(&shared, 3);
    let content = lease(&shared, 1, 2);
    assert_eq!(
        (bytes.len(), content.len(), content.offset()),
        (3 * G, 2 * G, 3 * G)
    );
    let again = shared.acquire(&1).expect("resident");
    assert_eq!(
        shared.with(|pool, ()| (pool.stats().owned, pool.lease_count(&1))),
        (3 * G, Some(2))
    );
    drop(bytes);
    drop(content);
    drop(again);
    assert_eq!(
        shared.with(|pool, ()| (pool.stats().owned, pool.lease_count(&1))),
        (0, Some(0))
    );
}

#[test]
fn a_guard_gives_its_token_up_to_the_lock() {
    let shared = shared(8, ());
    let bytes = take(&shared, 3).into_allocation();
    let content = lease(&shared, 1, 2).into_lease();
    shared.with(|pool, ()| {
        pool.free(bytes, &[]).expect("own token");
        pool.release(content, &[]).expect("own token");
        assert_eq!(pool.stats().free, 6 * G);
    });
}

#[test]
fn bytes_given_back_after_a_fence_wait_for_it() {
    let shared = shared(8, ());
    let stream = shared.with(|pool, ()| pool.add_timeline()).expect("room");
    let foreign = self::shared(8, ())
        .with(|pool, ()| pool.add_timeline())
        .expect("room");
    let refused = take(&shared, 3)
        .free_after(&[foreign.fence(1)])
        .expect_err("a foreign fence");
    assert_eq!(refused.cause, Error::UnknownTimeline { timeline: 0 });
    refused
        .value
        .free_after(&[stream.fence(1)])
        .expect("own fence");
    let refused = lease(&shared, 1, 2)
        .release_after(&[foreign.fence(1)])
        .expect_err("a foreign fence");
    refused
        .value
        .release_after(&[stream.fence(1)])
        .expect("own fence");
    take(&shared, 1).quarantine().expect("own token");
    shared.with(|pool, ()| {
        assert!(pool.evict(&1));
        assert_eq!((pool.stats().waiting, pool.stats().quarantined), (5 * G, G));
        pool.handle_reached(stream, 1).expect("own timeline");
        assert_eq!(pool.stats().free, 7 * G);
    });
}

#[test]
fn a_token_of_another_pool_gets_no_guard() {
    let (mine, other) = (shared(8, ()), shared(8, ()));
    let refused = mine
        .lease_guard(lease(&other, 1, 1).into_lease())
        .expect_err("a foreign lease");
    assert_eq!(
        refused.cause,
        Error::ForeignToken {
            token: other.id(),
            pool: mine.id()
        }
    );
    drop(other.lease_guard(refused.value).expect("own token"));
    let refused = mine
        .allocation_guard(take(&other, 1).into_allocation())
        .expect_err("a foreign allocation");
    drop(other.allocation_guard(refused.value).expect("own token"));
    assert_eq!(
        other.with(|pool, ()| (pool.stats().owned, pool.stats().leases)),
        (0, 0)
    );
}

#[test]
fn guards_that_the_state_owns_may_be_dropped_inside_the_lock() {
    let shared = shared(8, Vec::<LeaseGuard>::new());
    let guards = vec![lease(&shared, 1, 2), lease(&shared, 2, 2)];
    shared.with(|_, state| state.extend(guards));
    let inside = shared.with(|pool, state| {
        state.clear();
        // They go back when the lock is left, not in the middle of the caller's work.
        pool.stats().leases
    });
    assert_eq!((inside, shared.with(|pool, _| pool.stats().leases)), (2, 0));
}

#[test]
fn a_waiter_sees_what_a_guard_dropped_by_its_own_body_gave_back() {
    let shared = shared(4, ());
    let mut guard = Some(take(&shared, 4));
    let allocation = shared.wait_until(soon(), |pool, ()| {
        let allocation = reserve(pool, 4);
        if allocation.is_none() {
            guard = None;
        }
        allocation
    });
    drop(
        shared
            .allocation_guard(allocation.expect("in time"))
            .expect("own token"),
    );
}

#[test]
fn a_waiter_wakes_when_another_thread_gives_bytes_back() {
    let shared = shared(4, ());
    let guard = take(&shared, 4);
    thread::scope(|scope| {
        let waiter = scope.spawn(|| shared.wait_until(soon(), |pool, ()| reserve(pool, 4)));
        thread::sleep(Duration::from_millis(20));
        drop(guard);
        let allocation = waiter.join().expect("no panic").expect("woken in time");
        drop(shared.allocation_guard(allocation).expect("own token"));
    });
}

#[test]
fn a_waiter_gives_up_at_its_deadline_after_one_last_look() {
    let shared = shared(4, ());
    let _guard = take(&shared, 4);
    let start = Instant::now();
    let mut looks = 0;
    let answer = shared.wait_until(Some(start + Duration::from_millis(30)), |pool, ()| {
        looks += 1;
        reserve(pool, 1)
    });
    assert_eq!(answer, None);
    assert!(start.elapsed() >= Duration::from_millis(30) && looks >= 2);
    // A deadline in the past still gets its look.
    assert_eq!(shared.wait_until(Some(start), |_, ()| Some(5)), Some(5));
}

#[test]
fn a_claim_is_awaited_outside_the_lock() {
    let shared = shared(4, ());
    let stream = shared.with(|pool, ()| pool.add_timeline()).expect("room");
    take(&shared, 4)
        .free_after(&[stream.fence(1)])
        .expect("own fence");
    let Reserve::Later(claim) = shared.with(|pool, ()| pool.reserve(2 * G)) else {
        panic!("the bytes wait")
    };
    thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let mut claim = Some(claim);
            shared.wait_until(soon(), |pool, ()| match pool.poll_claim(claim.take()?) {
                Ok(allocation) => Some(allocation),
                Err(pending) => {
                    claim = Some(pending);
                    None
                }
            })
        });
        thread::sleep(Duration::from_millis(20));
        shared
            .with(|pool, ()| pool.handle_reached(stream, 1))
            .expect("own timeline");
        let allocation = waiter.join().expect("no panic").expect("woken in time");
        assert_eq!(allocation.len(), 2 * G);
        drop(shared.allocation_guard(allocation).expect("own token"));
    });
    assert_eq!(shared.with(|pool, ()| pool.stats().free), 4 * G);
}

#[test]
fn a_panic_under_the_lock_leaves_a_pool_that_works() {
    let shared = shared(4, Vec::<AllocationGuard>::new());
    let guard = take(&shared, 1);
    let outside = take(&shared, 1);
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        shared.with(|_, state| {
            state.push(guard);
            state.clear();
            panic!("the caller's fault");
        });
    }));
    assert!(panicked.is_err());
    assert!(shared.is_poisoned());
    // The guard dropped inside went back while unwinding, the other one goes back now.
    assert_eq!(shared.with(|pool, _| pool.stats().owned), G);
    drop(outside);
    assert_eq!(shared.with(|pool, _| pool.stats().owned), 0);
}

#[test]
fn asking_for_the_lock_inside_the_lock_panics_instead_of_hanging() {
    let shared = shared(4, ());
    let nested = catch_unwind(AssertUnwindSafe(|| {
        shared.with(|_, ()| shared.with(|_, ()| ()));
    }));
    assert!(nested.is_err());
    // Another pool's lock is another lock.
    let other = self::shared(4, ());
    let free = shared.with(|_, ()| other.with(|pool, ()| pool.stats().free));
    assert_eq!(free, 4 * G);
}

#[test]
fn a_debug_print_under_the_lock_does_not_lock() {
    let shared = shared(4, ());
    let text = shared.with(|_, ()| format!("{shared:?}"));
    assert!(text.contains("SharedPool"), "{text}");
}

#[test]
fn many_threads_share_a_small_pool_without_losing_a_byte() {
    const THREADS: u64 = 4;
    const ROUNDS: u64 = if cfg!(miri) { 10 } else { 2_000 };
    let shared = shared(16, ());
    let written = Arc::new(AtomicU64::new(0));
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let (shared, written) = (&shared, Arc::clone(&written));
            scope.spawn(move || {
                let mut held: Vec<LeaseGuard> = Vec::new();
                for round in 0..ROUNDS {
                    let key = (thread * 7 + round * 13) % 11;
                    if let Some(guard) = shared.acquire(&key) {
                        held.push(guard);
                    } else {
                        let granules = 1 + (round + thread) % 5;
                        let lease = shared.wait_until(
                            Some(Instant::now() + Duration::from_millis(1)),
                            |pool, ()| {
                                let allocation = reserve(pool, granules)?;
                                pool.publish(key, allocation, granules as u32).ok()
                            },
                        );
                        if let Some(lease) = lease {
                            written.fetch_add(1, Ordering::Relaxed);
                            held.push(shared.lease_guard(lease).expect("own token"));
                        }
                    }
                    if held.len() > 2 {
                        drop(held.remove(0));
                    }
                }
            });
        }
    });
    let stats = shared.with(|pool, ()| pool.stats());
    assert!(written.load(Ordering::Relaxed) > 0);
    assert_eq!((stats.leases, stats.owned, stats.displaced), (0, 0, 0));
    assert_eq!(stats.free + stats.resident_idle, stats.usable);
}

#[test]
fn only_the_thread_in_the_lock_is_inside() {
    let pool = shared(1, ());
    assert!(!pool.is_inside());
    pool.with(|_, ()| {
        assert!(pool.is_inside());
        let other = pool.clone();
        let elsewhere = thread::spawn(move || other.is_inside());
        assert!(!elsewhere.join().expect("no panic"));
    });
    assert!(!pool.is_inside());
}
