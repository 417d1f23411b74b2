//! A pool over device memory: what is lent comes back behind its event, and streams come and go.

mod fake;
mod pool_setup;

use std::sync::Arc;
use std::time::{Duration, Instant};

use fake::{Fake, Live, soon};
use pool_setup::{G, GRANULES, setup, setup_with};
use slab_core::{Pool, PoolConfig, PoolId, Reserve, SharedPool};
use slab_cuda::{CudaError, CudaMemory, DeviceSlab, Stream, Timelines, TimelinesConfig};

#[test]
fn bytes_wait_for_the_event_and_are_free_once_it_is_passed() {
    let fake = Fake::manual();
    let setup = setup(&fake);
    let timeline = setup.attach();
    let loan = timeline.lend(setup.publish(1, GRANULES)).unwrap();
    assert_eq!(loan.address(), setup.base);
    assert_eq!(loan.len(), GRANULES * G);
    fake.launch(loan.stream(), loan.address(), loan.len(), None);
    loan.release().unwrap();
    assert_eq!(setup.timelines.poll(), Ok(1));
    // The resident is idle, and gives way only to somebody who waits for it.
    let claim = match setup.pool.with(|pool, ()| pool.reserve(G)) {
        Reserve::Later(claim) => claim,
        other => panic!("handed out too early, or refused: {other:?}"),
    };
    assert_eq!(setup.stats().waiting, GRANULES * G);
    fake.advance(timeline.stream(), 1);
    assert_eq!(
        setup.timelines.poll(),
        Ok(1),
        "the kernel ran, the event is behind it"
    );
    fake.advance(timeline.stream(), 1);
    assert_eq!(setup.timelines.poll(), Ok(0));
    let bytes = setup.pool.with(|pool, ()| pool.poll_claim(claim)).unwrap();
    drop(setup.pool.allocation_guard(bytes));
    assert_eq!(setup.stats().free, GRANULES * G);
}

#[test]
fn a_loan_that_is_dropped_inside_the_pools_lock_comes_back_with_the_next_poll() {
    let fake = Fake::manual();
    let setup = setup(&fake);
    let timeline = setup.attach();
    let loan = timeline.lend(setup.allocate(3)).unwrap();
    fake.launch(loan.stream(), loan.address(), loan.len(), Some(1));
    setup.pool.with(|_, ()| drop(loan));
    assert_eq!(setup.stats().owned, 3 * G);
    assert_eq!(setup.timelines.poll(), Ok(1));
    assert_eq!(setup.stats().waiting, 3 * G);
    fake.advance_all();
    assert_eq!(setup.timelines.poll(), Ok(0));
    assert_eq!(setup.stats().free, GRANULES * G);
}

#[test]
fn what_is_settled_comes_back_to_its_owner_when_the_work_has_ended() {
    let fake = Fake::manual();
    let setup = setup(&fake);
    let timeline = setup.attach();
    let loan = timeline.lend(setup.allocate(2)).unwrap();
    let (address, len) = (loan.address(), loan.len());
    fake.launch(loan.stream(), address, len, Some(0xA5));
    let mut settling = loan.settle().unwrap();
    assert_eq!(settling.poll(), Ok(false));
    let refused = settling.wait(Instant::now()).unwrap_err();
    assert_eq!(refused.cause, CudaError::TimedOut);
    fake.advance_all();
    let bytes = refused.value.wait(soon()).unwrap();
    assert!(fake.peek(address, len as usize).iter().all(|b| *b == 0xA5));
    let bytes = bytes.into_allocation();
    let lease = setup.pool.with(|pool, ()| pool.publish(9, bytes, ()));
    drop(setup.pool.lease_guard(lease.unwrap()));
    assert_eq!(setup.stats().resident_idle, 2 * G);
}

#[test]
fn what_is_settled_and_dropped_waits_for_its_event() {
    let fake = Fake::manual();
    let setup = setup(&fake);
    let timeline = setup.attach();
    let loan = timeline.lend(setup.allocate(2)).unwrap();
    fake.launch(loan.stream(), loan.address(), loan.len(), Some(3));
    drop(loan.settle().unwrap());
    setup.timelines.poll().unwrap();
    assert_eq!(setup.stats().waiting, 2 * G);
    fake.advance_all();
    setup.timelines.poll().unwrap();
    assert_eq!(setup.stats().free, GRANULES * G);
}

#[test]
fn a_resident_lent_to_two_streams_waits_for_both() {
    let fake = Fake::manual();
    let setup = setup(&fake);
    let (one, two) = (setup.attach(), setup.attach());
    let lease = setup.publish(1, GRANULES);
    let second = setup.pool.acquire(&1).unwrap();
    for (timeline, lease) in [(&one, lease), (&two, second)] {
        let loan = timeline.lend(lease).unwrap();
        fake.launch(loan.stream(), loan.address(), loan.len(), None);
        loan.release().unwrap();
    }
    let reserve = || match setup.pool.with(|pool, ()| pool.reserve(G)) {
        Reserve::Ready(bytes) => drop(setup.pool.allocation_guard(bytes)),
        Reserve::Later(claim) => {
            setup.pool.with(|pool, ()| pool.drop_claim(claim)).unwrap();
            panic!("later");
        }
        other => panic!("{other:?}"),
    };
    let is_ready = || std::panic::catch_unwind(std::panic::AssertUnwindSafe(reserve)).is_ok();
    fake.advance(one.stream(), 9);
    setup.timelines.poll().unwrap();
    assert!(!is_ready(), "the other stream still reads");
    fake.advance(two.stream(), 9);
    setup.timelines.poll().unwrap();
    assert!(is_ready());
}

#[test]
fn a_query_that_fails_quarantines_and_is_told_once() {
    let mut fake = Fake::manual();
    fake.expect_lost();
    let setup = setup(&fake);
    let (good, bad) = (setup.attach(), setup.attach());
    for (timeline, granules) in [(&bad, 2), (&good, 3)] {
        let loan = timeline.lend(setup.allocate(granules)).unwrap();
        fake.launch(loan.stream(), loan.address(), loan.len(), Some(1));
        loan.release().unwrap();
    }
    fake.fail_stream(bad.stream(), 700);
    fake.advance_all();
    let error = setup.timelines.poll().unwrap_err();
    assert_eq!(
        error.to_string(),
        "cuEventQuery failed: CUDA_ERROR_ILLEGAL_ADDRESS (700)"
    );
    let stats = setup.stats();
    assert_eq!(
        (stats.quarantined, stats.free),
        (2 * G, 6 * G),
        "the rest goes on"
    );
    assert_eq!(setup.timelines.poll(), Ok(0), "told once");
    let refused = bad.lend(setup.allocate(1)).unwrap_err();
    assert!(matches!(refused.cause, CudaError::StreamFailed { .. }));
    let loan = good.lend(refused.value).unwrap();
    loan.release().unwrap();
    fake.advance_all();
    // The memory may be touched for ever, so it is never freed.
    let device = setup.device.clone();
    drop((setup, good, bad));
    assert_eq!(fake.live(Live::DeviceBlocks), 1);
    assert_eq!(device.lost().bytes, GRANULES * G);
}

#[test]
fn a_record_that_fails_once_is_done_with_another_event() {
    let fake = Fake::manual();
    let setup = setup(&fake);
    let timeline = setup.attach();
    for code in [2, 719] {
        let loan = timeline.lend(setup.allocate(3)).unwrap();
        fake.launch(loan.stream(), loan.address(), loan.len(), Some(1));
        fake.inject(c"cuEventRecord", 1, code);
        loan.release().unwrap();
        assert_eq!(setup.timelines.poll(), Ok(1));
        assert_eq!(setup.stats().waiting, 3 * G);
        fake.advance_all();
        assert_eq!(setup.timelines.poll(), Ok(0));
        assert_eq!(setup.stats().free, GRANULES * G);
    }
    assert_eq!(fake.injected(), 2);
}

/// Dropping what keeps a stream takes the locks of the pool's timelines, here by the drop of a loan. Polled under one of
/// them, this would wait for ever.
#[test]
fn what_keeps_a_stream_may_hold_a_loan_of_the_same_pool() {
    let fake = Fake::manual();
    let setup = setup(&fake);
    let (own, other) = (Stream::new(&setup.device).unwrap(), setup.attach());
    for is_attached in [false, true] {
        let kept = other.lend(setup.allocate(1)).unwrap();
        let keep = std::sync::Mutex::new((kept, other.clone()));
        let wrapped = fake::foreign_stream(&setup.device, own.as_raw(), keep).unwrap();
        let timeline = setup.timelines.attach(&wrapped).unwrap();
        let loan = timeline.lend(setup.allocate(1)).unwrap();
        fake.launch(loan.stream(), loan.address(), loan.len(), Some(1));
        loan.release().unwrap();
        drop((timeline, wrapped));
        fake.advance_all();
        // The event is the last that knows the stream.
        if is_attached {
            drop(setup.attach());
        } else {
            setup.timelines.poll().unwrap();
        }
        setup.timelines.poll().unwrap();
        fake.advance_all();
        assert_eq!(setup.timelines.poll(), Ok(0));
        assert_eq!(setup.stats().free, GRANULES * G);
    }
}

#[test]
fn a_record_that_fails_twice_keeps_the_bytes_and_lets_earlier_ones_come_back() {
    let mut fake = Fake::manual();
    fake.expect_lost();
    let setup = setup(&fake);
    let timeline = setup.attach();
    let first = timeline.lend(setup.allocate(1)).unwrap();
    let (second, third) = (
        timeline.lend(setup.allocate(2)).unwrap(),
        timeline.lend(setup.allocate(3)).unwrap(),
    );
    fake.launch(first.stream(), first.address(), first.len(), Some(1));
    first.release().unwrap();
    // And the second try.
    fake.inject_many(c"cuEventRecord", 1, 2, 719);
    let error = second.release().unwrap_err();
    assert!(matches!(
        error,
        CudaError::Driver {
            call: "cuEventRecord",
            ..
        }
    ));
    drop(third);
    assert_eq!(setup.timelines.poll(), Ok(1));
    assert_eq!(setup.stats().waiting, 6 * G);
    fake.advance_all();
    // What was recorded before is passed, then the failure is told.
    assert!(setup.timelines.poll().is_err());
    let stats = setup.stats();
    assert_eq!((stats.free, stats.quarantined), (3 * G, 5 * G));
}

#[test]
fn a_resident_behind_a_record_that_failed_is_quarantined_when_it_would_be_reused() {
    let mut fake = Fake::manual();
    fake.expect_lost();
    let setup = setup(&fake);
    let timeline = setup.attach();
    let loan = timeline.lend(setup.publish(1, GRANULES)).unwrap();
    // And the second try.
    fake.inject_many(c"cuEventRecord", 1, 2, 719);
    assert!(loan.settle().is_err());
    assert!(setup.timelines.poll().is_err());
    let reserved = setup.pool.with(|pool, ()| {
        pool.evict(&1);
        pool.reserve(G)
    });
    assert_eq!(reserved, Reserve::Full);
    assert_eq!(setup.stats().quarantined, GRANULES * G);
}

#[test]
fn an_event_that_cannot_be_made_refuses_the_loan_before_the_address_is_seen() {
    let fake = Fake::immediate();
    let setup = setup(&fake);
    let timeline = setup.attach();
    fake.inject(c"cuEventCreate", 1, 2);
    let refused = timeline.lend(setup.allocate(1)).unwrap_err();
    assert!(matches!(
        refused.cause,
        CudaError::Driver {
            call: "cuEventCreate",
            ..
        }
    ));
    timeline.lend(refused.value).unwrap().release().unwrap();
    assert_eq!(setup.timelines.poll(), Ok(0));
}

#[test]
fn loans_and_events_are_bounded_together() {
    let fake = Fake::manual();
    let setup = setup_with(&fake, |config| config.pending_max = 2);
    let timeline = setup.attach();
    let held = timeline.lend(setup.allocate(1)).unwrap();
    timeline.lend(setup.allocate(1)).unwrap().release().unwrap();
    let refused = timeline.lend(setup.allocate(1)).unwrap_err();
    assert_eq!(refused.cause, CudaError::TooManyPending { pending_max: 2 });
    fake.advance_all();
    // At the bound it looks by itself.
    let third = timeline.lend(refused.value).unwrap();
    drop((held, third));
    fake.advance_all();
    assert_eq!(setup.timelines.poll(), Ok(0));
    assert_eq!(setup.stats().free, GRANULES * G);
}

#[test]
fn streams_come_and_go_and_a_drained_timeline_is_used_again() {
    let fake = Fake::manual();
    let setup = setup_with(&fake, |config| config.streams_max = 2);
    // The pool has 16 timelines; forty streams come and go.
    let other = setup.attach();
    for _ in 0..40 {
        let timeline = setup.attach();
        let loan = timeline.lend(setup.allocate(1)).unwrap();
        fake.launch(loan.stream(), loan.address(), loan.len(), Some(1));
        loan.release().unwrap();
        drop(timeline);
        // Not drained: its timeline is nobody else's yet.
        let stream = Stream::new(&setup.device).unwrap();
        let error = setup.timelines.attach(&stream).unwrap_err();
        assert_eq!(error, CudaError::TooManyStreams { streams_max: 2 });
        fake.advance_all();
    }
    assert_eq!(setup.timelines.poll(), Ok(0));
    assert_eq!(setup.stats().free, GRANULES * G);
    assert_eq!(fake.calls(c"cuEventRecord"), 40);
    assert_eq!(fake.calls(c"cuEventCreate"), 1, "events are used again");
    drop(other);
}

#[test]
fn the_pools_own_bound_of_timelines_is_told_as_such() {
    let fake = Fake::immediate();
    let setup = setup_with(&fake, |config| config.streams_max = 100);
    let held: Vec<_> = (0..16).map(|_| setup.attach()).collect();
    let stream = Stream::new(&setup.device).unwrap();
    let error = setup.timelines.attach(&stream).unwrap_err();
    let cause = slab_core::Error::TooManyTimelines { timelines_max: 16 };
    assert_eq!(error, CudaError::Pool(cause));
    drop(held);
    setup.timelines.attach(&stream).unwrap();
}

#[test]
fn a_stream_lives_until_its_events_are_passed() {
    let fake = Fake::manual();
    let setup = setup(&fake);
    let timeline = setup.attach();
    let loan = timeline.lend(setup.allocate(1)).unwrap();
    fake.launch(loan.stream(), loan.address(), loan.len(), Some(1));
    drop(timeline);
    assert_eq!(fake.live(Live::Streams), 1, "the loan holds it");
    loan.release().unwrap();
    assert_eq!(fake.live(Live::Streams), 1, "the event holds it");
    fake.advance_all();
    setup.timelines.poll().unwrap();
    assert_eq!(fake.live(Live::Streams), 0);
}

#[test]
fn a_loan_that_is_forgotten_keeps_its_bytes_and_the_memory() {
    let mut fake = Fake::manual();
    fake.expect_lost();
    let setup = setup(&fake);
    let timeline = setup.attach();
    let loan = timeline.lend(setup.publish(1, 3)).unwrap();
    fake.launch(loan.stream(), loan.address(), loan.len(), None);
    std::mem::forget(loan);
    assert_eq!(setup.timelines.poll(), Ok(1));
    assert!(!setup.pool.with(|pool, ()| pool.evict(&1)));
    drop((setup, timeline));
    assert_eq!(fake.live(Live::DeviceBlocks), 1);
    assert_eq!(fake.queued(), 1);
}

#[test]
fn the_last_handle_waits_for_what_is_pending_before_the_memory_goes() {
    let fake = Fake::manual();
    let setup = setup(&fake);
    let timeline = setup.attach();
    let loan = timeline.lend(setup.allocate(4)).unwrap();
    fake.launch(loan.stream(), loan.address(), loan.len(), Some(1));
    drop((loan, timeline));
    fake.run_seeded(4);
    let pool = setup.pool.clone();
    let stats = || pool.with(|pool, ()| pool.stats());
    assert_eq!(stats().owned, 4 * G);
    drop(setup);
    assert_eq!(fake.live(Live::DeviceBlocks), 0);
    assert_eq!(stats().free, GRANULES * G, "the guard came back by itself");
}

#[test]
fn tokens_and_streams_of_elsewhere_are_refused() {
    let fake = Fake::immediate();
    let setup = setup(&fake);
    let timeline = setup.attach();
    let elsewhere = self::setup(&fake);
    let refused = timeline.lend(elsewhere.allocate(1)).unwrap_err();
    assert!(matches!(
        refused.cause,
        CudaError::Pool(slab_core::Error::ForeignToken { .. })
    ));
    let second = fake.driver().device(1).unwrap();
    let stream = Stream::new(&second).unwrap();
    let error = setup.timelines.attach(&stream).unwrap_err();
    let other = CudaError::OtherDevice {
        expected: 0,
        found: 1,
    };
    assert_eq!(error, other);
    assert_eq!(timeline.stream().wait_for(&stream).unwrap_err(), other);
}

#[test]
fn a_pool_larger_than_its_memory_is_refused() {
    let fake = Fake::manual();
    let slab: Arc<dyn CudaMemory> = Arc::new(DeviceSlab::new(&fake.device(), 1024).unwrap());
    let config = PoolConfig::new(PoolId::new(), 1025);
    let pool = SharedPool::new(Pool::<u32, ()>::new(config).unwrap(), ());
    let error = Timelines::new(&pool, slab, TimelinesConfig::default()).unwrap_err();
    let (pool, memory) = (1025, 1024);
    assert_eq!(error, CudaError::PoolTooLarge { pool, memory });
}

#[test]
fn a_stream_waits_for_what_was_submitted_to_another() {
    let fake = Fake::manual();
    let setup = setup(&fake);
    let (writer, reader) = (setup.attach(), setup.attach());
    let loan = writer.lend(setup.allocate(1)).unwrap();
    fake.launch(loan.stream(), loan.address(), loan.len(), Some(1));
    reader.stream().wait_for(writer.stream()).unwrap();
    fake.launch(reader.stream(), loan.address(), loan.len(), None);
    assert_eq!(fake.advance(reader.stream(), 9), 0);
    fake.advance(writer.stream(), 9);
    assert_eq!(fake.advance(reader.stream(), 9), 2);
    drop(loan);
    fake.advance_all();
    assert_eq!(setup.timelines.drain(soon()), Ok(0));
}

#[test]
fn draining_ends_at_its_deadline() {
    let fake = Fake::manual();
    let setup = setup(&fake);
    let timeline = setup.attach();
    timeline.lend(setup.allocate(1)).unwrap().release().unwrap();
    let deadline = Instant::now() + Duration::from_millis(5);
    assert_eq!(setup.timelines.drain(deadline), Ok(1));
    fake.advance_all();
}

#[test]
fn the_default_streams_have_no_handle_of_their_own() {
    let fake = Fake::manual();
    let device = fake.device();
    for raw in 0..=2 {
        let raw = std::ptr::without_provenance_mut(raw);
        let stream = fake::foreign_stream(&device, raw, ());
        assert_eq!(stream.unwrap_err(), CudaError::DefaultStream);
    }
    // One that somebody else has made is not destroyed with its wrapper.
    let own = Stream::new(&device).unwrap();
    let keep = Arc::new(());
    let foreign = fake::foreign_stream(&device, own.as_raw(), Arc::clone(&keep)).unwrap();
    assert_eq!(Arc::strong_count(&keep), 2);
    drop(foreign);
    assert_eq!((Arc::strong_count(&keep), fake.live(Live::Streams)), (1, 1));
}

#[test]
fn the_last_handle_tells_the_pool_how_it_ended() {
    let mut fake = Fake::manual();
    fake.expect_lost();
    let setup = setup(&fake);
    let (good, bad) = (setup.attach(), setup.attach());
    for (timeline, granules) in [(&good, 3), (&bad, 2)] {
        let loan = timeline.lend(setup.allocate(granules)).unwrap();
        fake.launch(loan.stream(), loan.address(), loan.len(), Some(1));
        loan.release().unwrap();
    }
    drop(bad.lend(setup.allocate(1)).unwrap());
    fake.fail_stream(bad.stream(), 700);
    fake.advance_all();
    let pool = setup.pool.clone();
    drop((good, bad, setup));
    let stats = pool.with(|pool, ()| pool.stats());
    assert_eq!((stats.quarantined, stats.free), (3 * G, 5 * G));
    assert_eq!(fake.live(Live::DeviceBlocks), 1);
}

#[test]
fn the_last_handle_may_go_inside_the_pools_lock() {
    let fake = Fake::manual();
    let setup = setup(&fake);
    let timeline = setup.attach();
    timeline.lend(setup.allocate(2)).unwrap().release().unwrap();
    drop(timeline.lend(setup.allocate(3)).unwrap());
    fake.advance_all();
    let pool = setup.pool.clone();
    pool.with(|_, ()| drop((timeline, setup)));
    let stats = pool.with(|pool, ()| pool.stats());
    // What was given back before waits for news that do not come.
    assert_eq!((stats.waiting, stats.free), (2 * G, 6 * G));
    assert_eq!(fake.live(Live::DeviceBlocks), 0);
}

#[test]
fn polling_inside_the_pools_lock_is_a_bug_of_the_caller_that_stops_nobody_else() {
    let fake = Fake::manual();
    let setup = setup(&fake);
    let polled = setup.pool.with(|_, ()| {
        let poll = || setup.timelines.poll();
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(poll)).is_err()
    });
    assert!(polled);
    assert_eq!(setup.timelines.poll(), Ok(0));
}
