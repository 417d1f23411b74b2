//! Every interleaving of a few threads at one `SharedPool`, up to a bound of preemptions; alone, and with the timelines
//! of a device before it.

#![cfg(slab_loom)]

use std::hash::{BuildHasherDefault, DefaultHasher};
use std::sync::Arc;

use loom::sync::atomic::{AtomicBool, Ordering};
use loom::thread;
use slab_core::twin::Twin;
use slab_core::{
    AllocationGuard, Fence, LeaseGuard, Pool, PoolConfig, PoolId, Reserve, SharedPool,
};
use slab_cuda::CudaError;
use slab_cuda::model::{Bounds, GiveBack, Keeper, Mark};
use slab_loom::explore;

type Hasher = BuildHasherDefault<DefaultHasher>;
type Shared<X = ()> = SharedPool<u8, (), X, Hasher>;

const G: u64 = 256;

/// A pool of two granules.
fn shared<X>(state: X) -> Shared<X> {
    let config = PoolConfig::new(PoolId::new(), 2 * G);
    let pool = Pool::with_hasher(config, Hasher::default()).expect("valid configuration");
    SharedPool::new(pool, state)
}

/// A resident of the whole pool, leased.
fn lease_of_all<X: Send + 'static>(shared: &Shared<X>, key: u8) -> LeaseGuard {
    let lease = shared.with(|pool, _| {
        let Reserve::Ready(bytes) = pool.reserve(2 * G) else {
            panic!("the pool is empty");
        };
        pool.publish(key, bytes, ()).expect("own token")
    });
    shared.lease_guard(lease).expect("own token")
}

/// All bytes of the pool, reserved.
fn all_of(shared: &Shared) -> AllocationGuard {
    let Reserve::Ready(bytes) = shared.with(|pool, ()| pool.reserve(2 * G)) else {
        panic!("the pool is empty");
    };
    shared.allocation_guard(bytes).expect("own token")
}

/// All bytes are accounted for, and none is in anybody's hands.
fn check_at_rest<X>(shared: &Shared<X>) {
    shared.with(|pool, _| {
        let stats = pool.stats();
        assert_eq!(stats.owned + stats.resident_leased, 0, "lost: {stats:?}");
        assert_eq!(stats.waiting + stats.claimed + stats.quarantined, 0);
        assert_eq!(stats.free + stats.resident_idle, stats.usable);
    });
}

#[test]
fn a_reserve_that_waits_gets_the_bytes_of_a_guard_dropped_elsewhere() {
    explore(
        "A thread waits for room; another gives bytes back by dropping a guard",
        || {
            let pool = shared(());
            let bytes = pool.with(|pool, ()| match pool.reserve(2 * G) {
                Reserve::Ready(bytes) => bytes,
                other => panic!("the pool is empty: {other:?}"),
            });
            let guard = pool.allocation_guard(bytes).expect("own token");
            let waiter = {
                let pool = pool.clone();
                thread::spawn(move || {
                    let bytes = pool.wait_until(None, |pool, ()| match pool.reserve(G) {
                        Reserve::Ready(bytes) => Some(bytes),
                        _ => None,
                    });
                    drop(pool.allocation_guard(bytes.expect("no deadline")));
                })
            };
            drop(guard);
            waiter.join().expect("no panic");
            check_at_rest(&pool);
        },
        &[Twin::NotifyOnLeave, Twin::EraseMarkOnLeave],
    );
}

#[test]
fn guards_dropped_by_two_threads_at_once_both_come_back() {
    explore(
        "Two threads drop guards while a third has the lock in turn; nobody's token is lost or given to the wrong list",
        || {
            let pool = shared(());
            let first = lease_of_all(&pool, 1);
            let second = pool.acquire(&1).expect("resident");
            let other = thread::spawn(move || drop(second));
            drop(first);
            other.join().expect("no panic");
            check_at_rest(&pool);
        },
        &[Twin::EraseMarkOnLeave],
    );
}

#[test]
fn a_resident_is_leased_or_evicted_and_never_both() {
    explore(
        "A lease is asked for while a reserve evicts: one of the two gets the bytes, never both",
        || {
            let pool = shared(());
            drop(lease_of_all(&pool, 1));
            let reader = {
                let pool = pool.clone();
                thread::spawn(move || {
                    let lease = pool.acquire(&1);
                    let leased = lease.is_some();
                    (leased, lease)
                })
            };
            let room = pool.with(|pool, ()| match pool.reserve(2 * G) {
                Reserve::Ready(bytes) => Some(bytes),
                Reserve::Full => None,
                other => panic!("nothing is on its way back: {other:?}"),
            });
            let evicted = room.is_some();
            drop(room.map(|bytes| pool.allocation_guard(bytes)));
            let (leased, lease) = reader.join().expect("no panic");
            // The reader holds its lease to the end, so a reserve that came later was refused.
            assert!(leased != evicted, "leased: {leased}, evicted: {evicted}");
            drop(lease);
            check_at_rest(&pool);
        },
        &[Twin::EraseMarkOnLeave],
    );
}

#[test]
fn bytes_behind_a_fence_are_handed_out_once_it_is_reached() {
    explore(
        "Bytes given back behind a fence are handed out when the fence is reached, not before, and whoever waits wakes",
        || {
            let pool = shared(false);
            let timeline = pool
                .with(|pool, _| pool.add_timeline())
                .expect("room for a timeline");
            let guard = lease_of_all(&pool, 1);
            let waiter = {
                let pool = pool.clone();
                thread::spawn(move || {
                    let bytes = pool.wait_until(None, |pool, reached| match pool.reserve(2 * G) {
                        Reserve::Ready(bytes) => {
                            assert!(*reached, "handed out before the fence was reached");
                            Some(bytes)
                        }
                        Reserve::Later(claim) => {
                            pool.drop_claim(claim).expect("own token");
                            None
                        }
                        _ => None,
                    });
                    drop(pool.allocation_guard(bytes.expect("no deadline")));
                })
            };
            guard
                .release_after(&[Fence::new(timeline, 1)])
                .expect("own fence");
            pool.with(|pool, reached| {
                *reached = true;
                pool.handle_reached(timeline, 1).expect("own timeline");
            });
            waiter.join().expect("no panic");
            check_at_rest(&pool);
        },
        &[Twin::NotifyOnLeave],
    );
}

#[test]
fn a_guard_dropped_inside_the_lock_is_given_back_before_the_lock_is_left() {
    explore(
        "The state owns guards and drops them inside the lock; a waiter elsewhere still sees the bytes",
        || {
            let pool = shared(None);
            let guard = lease_of_all(&pool, 1);
            pool.with(|_, held| *held = Some(guard));
            let waiter = {
                let pool = pool.clone();
                thread::spawn(move || {
                    let bytes = pool.wait_until(None, |pool, _| match pool.reserve(G) {
                        Reserve::Ready(bytes) => Some(bytes),
                        _ => None,
                    });
                    drop(pool.allocation_guard(bytes.expect("no deadline")));
                })
            };
            pool.with(|_, held| drop(held.take()));
            waiter.join().expect("no panic");
            check_at_rest(&pool);
        },
        &[Twin::NotifyOnLeave],
    );
}

#[test]
fn a_waiter_that_gives_bytes_back_itself_looks_again() {
    explore(
        "A waiter that drops a guard in its own look, before and after it slept, finds the bytes and does not hang",
        || {
            let pool = shared(Vec::new());
            let first = lease_of_all(&pool, 1);
            let second = pool.acquire(&1).expect("resident");
            pool.with(|_, held| held.push(first));
            let waiter = {
                let pool = pool.clone();
                thread::spawn(move || {
                    let bytes = pool.wait_until(None, |pool, held| {
                        held.pop();
                        match pool.reserve(G) {
                            Reserve::Ready(bytes) => Some(bytes),
                            _ => None,
                        }
                    });
                    drop(pool.allocation_guard(bytes.expect("no deadline")));
                })
            };
            pool.with(|_, held| held.push(second));
            waiter.join().expect("no panic");
            check_at_rest(&pool);
        },
        &[Twin::LookAgain, Twin::MarkOnWake],
    );
}

#[test]
fn a_sleeping_waiter_is_not_inside_the_lock() {
    explore(
        "A guard dropped by a thread that waited before is not mistaken for one dropped inside the lock",
        || {
            let pool = shared(0);
            let guard = lease_of_all(&pool, 1);
            let waiter = {
                let pool = pool.clone();
                thread::spawn(move || {
                    pool.wait_until(None, |_, turns| (*turns > 0).then_some(()));
                    drop(guard);
                })
            };
            pool.with(|_, turns| *turns += 1);
            waiter.join().expect("no panic");
            check_at_rest(&pool);
        },
        &[Twin::NotifyOnLeave],
    );
}

#[test]
fn a_guard_dropped_inside_the_lock_is_on_no_list_once_the_lock_is_left() {
    explore(
        "One thread drops a guard inside the lock, another is in the lock in turn: the token is never left on the side",
        || {
            let pool = shared(None);
            let guard = lease_of_all(&pool, 1);
            pool.with(|_, held| *held = Some(guard));
            let other = {
                let pool = pool.clone();
                thread::spawn(move || {
                    pool.with(|pool, held| {
                        let leases = pool.stats().leases;
                        assert_eq!(leases, u64::from(held.is_some()));
                    });
                })
            };
            pool.with(|_, held| drop(held.take()));
            other.join().expect("no panic");
            check_at_rest(&pool);
        },
        &[Twin::TakeReturned],
    );
}

#[test]
fn guards_outlive_handles() {
    explore(
        "The last handle but one goes, and guards after it, here and elsewhere",
        || {
            let last = shared(());
            let pool = last.clone();
            let first = lease_of_all(&pool, 1);
            let second = pool.acquire(&1).expect("resident");
            let other = thread::spawn(move || drop(first));
            drop(pool);
            drop(second);
            other.join().expect("no panic");
            check_at_rest(&last);
        },
        &[Twin::EraseMarkOnLeave],
    );
}

#[test]
fn everyone_who_waits_is_woken() {
    explore(
        "two threads wait for different things, which come one after the other",
        || {
            let pool = shared(0);
            let waits_for = |turn: i32| {
                let pool = pool.clone();
                thread::spawn(move || {
                    pool.wait_until(None, |_, turns| (*turns >= turn).then_some(()));
                })
            };
            let first = waits_for(1);
            let second = waits_for(2);
            pool.with(|_, turns| *turns += 1);
            first.join().expect("no panic");
            pool.with(|_, turns| *turns += 1);
            second.join().expect("no panic");
        },
        &[Twin::NotifyEveryone, Twin::NotifyOnLeave],
    );
}

/// An event of a device that is a flag.
struct Passed(Arc<AtomicBool>);

impl Mark for Passed {
    fn poll(&mut self) -> Result<bool, CudaError> {
        Ok(self.0.load(Ordering::Acquire))
    }
}

#[test]
fn a_reserve_beside_a_poll_gets_bytes_only_once_the_device_is_done() {
    explore(
        "A device passes an event, one thread polls, another gives bytes back behind that event and reserves",
        || {
            let pool = shared(());
            let (keeper, slot) = keeper_of_one(&pool);
            let bytes = all_of(&pool);
            let passed = Arc::new(AtomicBool::new(false));
            let poller = {
                let keeper = Arc::clone(&keeper);
                thread::spawn(move || keeper.poll().expect("nothing fails"))
            };
            let device = {
                let passed = Arc::clone(&passed);
                thread::spawn(move || passed.store(true, Ordering::Release))
            };
            let (fence, recorded) = keeper.record(slot, || Ok(Passed(Arc::clone(&passed))));
            recorded.expect("nothing fails");
            bytes.free_after(&[fence]).expect("own fence");
            match pool.with(|pool, ()| pool.reserve(2 * G)) {
                Reserve::Ready(bytes) => {
                    let is_passed = passed.load(Ordering::Acquire);
                    assert!(is_passed, "handed out before the event was passed");
                    drop(pool.allocation_guard(bytes));
                }
                Reserve::Later(claim) => {
                    pool.with(|pool, ()| pool.drop_claim(claim))
                        .expect("own token");
                }
                other => panic!("on their way back: {other:?}"),
            }
            device.join().expect("no panic");
            poller.join().expect("no panic");
            assert_eq!(keeper.poll().expect("nothing fails"), 0);
            check_at_rest(&pool);
        },
        &[Twin::RecordMark],
    );
}

/// A keeper of one stream, which is attached and has one loan.
fn keeper_of_one<M: Mark>(pool: &Shared) -> (Arc<Keeper<M>>, usize) {
    let bounds = Bounds {
        streams_max: 1,
        pending_max: 2,
    };
    let keeper = Arc::new(Keeper::new(Box::new(pool.clone()), bounds));
    let slot = keeper.attach().expect("room for a stream");
    keeper.begin(slot).expect("room for a loan");
    (keeper, slot)
}

#[test]
fn a_timeline_is_given_to_another_stream_only_once_it_is_drained() {
    explore(
        "A device passes an event, a stream goes behind it, and another comes for its timeline",
        || {
            let pool = shared(());
            let (keeper, slot) = keeper_of_one(&pool);
            let passed = Arc::new(AtomicBool::new(false));
            let device = {
                let passed = Arc::clone(&passed);
                thread::spawn(move || passed.store(true, Ordering::Release))
            };
            let comes = {
                let (keeper, passed) = (Arc::clone(&keeper), Arc::clone(&passed));
                thread::spawn(move || {
                    if keeper.attach().is_ok() {
                        let is_passed = passed.load(Ordering::Acquire);
                        assert!(is_passed, "attached before the event was passed");
                    }
                })
            };
            let (_, recorded) = keeper.record(slot, || Ok(Passed(Arc::clone(&passed))));
            recorded.expect("nothing fails");
            keeper.detach(slot);
            device.join().expect("no panic");
            comes.join().expect("no panic");
        },
        &[slab_cuda::twin::Twin::AwaitDrain],
    );
}

/// An event that nobody will hear of.
struct Lost;

impl Mark for Lost {
    fn poll(&mut self) -> Result<bool, CudaError> {
        Err(CudaError::TimedOut)
    }
}

#[test]
fn a_stream_that_has_failed_is_told_of_once_and_its_bytes_stay() {
    explore(
        "Two threads poll a stream that has failed, one of them beside a reserve",
        || {
            let pool = shared(());
            let (keeper, slot) = keeper_of_one(&pool);
            let bytes = all_of(&pool);
            let (fence, recorded) = keeper.record(slot, || Ok(Lost));
            recorded.expect("the record itself works");
            let poller = {
                let keeper = Arc::clone(&keeper);
                thread::spawn(move || usize::from(keeper.poll().is_err()))
            };
            let told = usize::from(keeper.poll().is_err());
            bytes.free_after(&[fence]).expect("own fence");
            let reserved = pool.with(|pool, ()| pool.reserve(G));
            assert!(!matches!(reserved, Reserve::Ready(_)), "{reserved:?}");
            if let Reserve::Later(claim) = reserved {
                pool.with(|pool, ()| pool.drop_claim(claim))
                    .expect("own token");
            }
            let told = told + poller.join().expect("no panic");
            let told = told + usize::from(keeper.poll().is_err());
            assert_eq!(told, 1, "how often the failure was told");
        },
        &[slab_cuda::twin::Twin::TellOnce],
    );
}

#[test]
fn nothing_is_pending_only_once_what_was_dropped_is_back() {
    explore(
        "A loan was dropped, the device is done, and two threads poll; one that hears of nothing pending reserves",
        || {
            let pool = shared(());
            let (keeper, slot) = keeper_of_one(&pool);
            let bytes = all_of(&pool);
            let passed = Passed(Arc::new(AtomicBool::new(true)));
            let (fence, recorded) = keeper.record(slot, || Ok(passed));
            recorded.expect("nothing fails");
            let give = GiveBack::new(move |fence| {
                bytes.free_after(&[fence]).expect("own fence");
                Ok(())
            });
            keeper.leave(give, fence);
            let poller = {
                let keeper = Arc::clone(&keeper);
                thread::spawn(move || keeper.poll().expect("nothing fails"))
            };
            if keeper.poll() == Ok(0) {
                let reserved = pool.with(|pool, ()| pool.reserve(2 * G));
                let Reserve::Ready(bytes) = reserved else {
                    panic!("nothing is pending, and yet: {reserved:?}");
                };
                drop(pool.allocation_guard(bytes));
            }
            poller.join().expect("no panic");
            assert_eq!(keeper.poll(), Ok(0));
            check_at_rest(&pool);
        },
        &[slab_cuda::twin::Twin::CountGiving],
    );
}
