//! The reply tables of the control protocol and the rows of its corner cases, one test each, on
//! the reservation machine over a toy pool. A comment above a test names the row it holds.

#[path = "support/rig.rs"]
mod rig;
#[path = "support/toy_pool.rs"]
mod toy_pool;

use ec_connector::{
    CancelKind, CancelMatch, Completion, Content, Dtype, Effect, ErrorCode, Grant, Moment,
    ReservationConfig, ReservationId, ReservationState, Reservations, Reserve, ReserveError,
    ReserveRequest, Shutdown, Stuck, StuckReleased, TakeError, TakePolicy, TensorSpec,
};
use rig::{Rig, bytes, hash, id};
use toy_pool::ToyPool;

const TTL: u64 = 300_000;

const DONE: Completion = Completion {
    completed: true,
    became_ready: true,
};
const DONE_BEFORE: Completion = Completion {
    completed: true,
    became_ready: false,
};
const REFUSED: Completion = Completion {
    completed: false,
    became_ready: false,
};

#[track_caller]
fn check_grant(grant: Grant, write: bool, ready: bool, cached: bool) {
    assert_eq!(
        (grant.write, grant.ready, grant.cached),
        (write, ready, cached),
        "(write, ready, cached)"
    );
}

// ---- reserve, one test per line of the table ----

#[test]
fn reserve_of_a_new_id_with_room_makes_a_writer() {
    let mut rig = Rig::new(4096);
    let grant = rig.reserve("t", "h", 1000);
    check_grant(grant, true, false, false);
    assert_eq!(grant.len_bytes, 1000);
    assert_eq!(grant.offset % 256, 0);
    assert_eq!(rig.status("t").unwrap().state, ReservationState::Writing);
    assert_eq!(rig.machine.stats().writing_bytes, 1024);
    assert!(rig.drain_ready().is_empty());
}

#[test]
fn reserve_without_room_is_refused_and_leaves_no_record() {
    let mut rig = Rig::new(1024);
    rig.reserve("t1", "h1", 1024);
    let error = rig.reserve_refused("t2", "h2", 1);
    assert_eq!(error, ReserveError::PoolFull);
    assert_eq!(error.to_string(), "EC consumer buffer pool is full");
    assert_eq!(error.code(), ErrorCode::PoolFull);
    assert!(rig.status("t2").is_none());
}

// row: A5
#[test]
fn reserve_of_more_than_the_pool_is_too_large_and_evicts_nothing() {
    let mut rig = Rig::new(1024);
    rig.make_resident("h", 512);
    let error = rig.reserve_refused("t2", "h2", 1025);
    assert_eq!(error.code(), ErrorCode::TooLarge);
    assert_eq!(error.to_string(), "EC consumer buffer pool is full");
    assert!(rig.pool.is_resident(&hash("h")));
}

// row: M3, D4
#[test]
fn reserve_that_no_eviction_can_serve_evicts_nothing() {
    let mut rig = Rig::new(1024);
    rig.make_resident("h1", 256);
    let kept = rig.push_and_take("t2", "h2", 256);
    rig.make_resident("h3", 256);
    assert_eq!(
        rig.reserve_refused("t4", "h4", 1024),
        ReserveError::PoolFull
    );
    assert!(rig.pool.is_resident(&hash("h1")));
    assert!(rig.pool.is_resident(&hash("h3")));
    rig.release(kept);
}

#[test]
fn reserve_of_resident_content_is_ready_and_cached_and_announced() {
    let mut rig = Rig::new(4096);
    rig.make_resident("h", 512);
    rig.drain_ready();
    let grant = rig.reserve("t", "h", 512);
    check_grant(grant, false, true, true);
    assert_eq!(rig.drain_ready(), ["t"]);
    assert_eq!(rig.pool.lease_count(&hash("h")), Some(1));
}

#[test]
fn reserve_of_content_being_written_follows_the_writer_at_its_place() {
    let mut rig = Rig::new(4096);
    rig.reserve("other", "o", 256);
    let writer = rig.reserve("w", "h", 512);
    let follower = rig.reserve("f", "h", 512);
    check_grant(follower, false, false, false);
    assert_eq!(follower.offset, writer.offset);
    assert_ne!(follower.reservation_id, writer.reservation_id);
    assert_eq!(rig.pool.free_bytes(), 4096 - 256 - 512);
}

#[test]
fn reserve_of_content_being_written_in_another_shape_is_refused() {
    let mut rig = Rig::new(4096);
    rig.reserve("w", "h", 512);
    let error = rig.reserve_refused("f", "h", 256);
    assert_eq!(
        error.to_string(),
        "conflicting in-flight tensor for mm_hash"
    );
    assert_eq!(error.code(), ErrorCode::Conflict);
}

#[test]
fn reserve_repeated_while_writing_keeps_id_and_place_and_renews_the_deadline() {
    let mut rig = Rig::new(4096);
    let writer = rig.reserve("w", "h", 512);
    let follower = rig.reserve("f", "h", 512);
    rig.pass(TTL - 1);
    for (name, first) in [("w", writer), ("f", follower)] {
        let again = rig.reserve(name, "h", 512);
        check_grant(again, false, false, false);
        assert_eq!(again.reservation_id, first.reservation_id);
        assert_eq!(again.offset, first.offset);
    }
    rig.pass(TTL - 1);
    assert_eq!(rig.status("w").unwrap().state, ReservationState::Writing);
    assert_eq!(rig.status("f").unwrap().state, ReservationState::Writing);
    rig.pass(1);
    assert_eq!(
        rig.status("w").unwrap().state,
        ReservationState::ExpirePending
    );
}

// row: V6
#[test]
fn reserve_repeated_after_a_lost_reply_does_not_tell_to_write_until_refreshed() {
    let mut rig = Rig::new(4096);
    rig.reserve("w", "h", 512);
    check_grant(rig.reserve("w", "h", 512), false, false, false);
    assert!(rig.cancel("w", CancelKind::Refresh));
    check_grant(rig.reserve("w", "h", 512), true, false, false);
    assert_eq!(rig.pool.free_bytes(), 4096 - 512);
}

#[test]
fn reserve_repeated_when_ready_is_announced_again_and_renews_nothing() {
    let mut rig = Rig::new(4096);
    let grant = rig.reserve("t", "h", 512);
    rig.complete("t", &grant);
    assert_eq!(rig.drain_ready(), ["t"]);
    rig.pass(TTL - 1);
    check_grant(rig.reserve("t", "h", 512), false, true, false);
    assert_eq!(rig.drain_ready(), ["t"]);
    assert_eq!(rig.pass(1), 1);
    assert!(rig.status("t").is_none());
}

#[test]
fn reserve_of_an_active_id_with_another_identity_is_refused_in_every_active_state() {
    let mut rig = Rig::new(8192);
    rig.reserve("writing", "h1", 512);
    let ready = rig.reserve("ready", "h2", 512);
    rig.complete("ready", &ready);
    rig.reserve("cancelled", "h3", 512);
    rig.cancel("cancelled", CancelKind::Plain);
    for name in ["writing", "ready", "cancelled"] {
        for (other_hash, len) in [("other", 512), ("h1", 256)] {
            let error = rig.reserve_refused(name, other_hash, len);
            assert_eq!(error, ReserveError::ConflictingReservation, "{name}");
            assert_eq!(error.to_string(), "conflicting reservation for transfer_id");
        }
    }
}

#[test]
fn reserve_of_a_cancel_pending_id_says_cancelled() {
    let mut rig = Rig::new(4096);
    rig.reserve("t", "h", 512);
    rig.cancel("t", CancelKind::Plain);
    rig.reserve_cancelled("t", "h", 512);
}

#[test]
fn reserve_of_a_cancelled_id_says_cancelled_whatever_the_identity() {
    let mut rig = Rig::new(4096);
    rig.cancel("t", CancelKind::Plain);
    rig.reserve_cancelled("t", "h", 512);
    rig.reserve_cancelled("t", "other", 256);
    assert_eq!(rig.pool.free_bytes(), 4096);
}

#[test]
fn reserve_of_an_expired_id_starts_afresh() {
    let mut rig = Rig::new(4096);
    let grant = rig.reserve("t", "h", 512);
    rig.complete("t", &grant);
    assert_eq!(rig.pass(TTL), 1);
    let again = rig.reserve("t", "other", 256);
    check_grant(again, true, false, false);
    assert_ne!(again.reservation_id, grant.reservation_id);
}

#[test]
fn reserve_of_an_expire_pending_id_says_that_its_writer_is_active() {
    let mut rig = Rig::new(4096);
    rig.reserve("it's", "h", 512);
    rig.pass(TTL);
    let error = rig.reserve_refused("it's", "other", 256);
    assert_eq!(error.code(), ErrorCode::ActiveWriter);
    assert_eq!(
        error.to_string(),
        "Transfer \"it's\" still has an active writer"
    );
}

#[test]
fn reserve_during_shutdown_is_refused_before_anything_else() {
    let mut rig = Rig::new(4096);
    rig.cancel("cancelled", CancelKind::Plain);
    let now = rig.now();
    rig.machine
        .begin_shutdown(&mut rig.pool, now, Shutdown::Finish, &mut rig.effects);
    for name in ["cancelled", "new"] {
        let error = rig.reserve_refused(name, "h", 256);
        assert_eq!(
            error.to_string(),
            "Consumer reservation manager is shutting down"
        );
        assert_eq!(error.code(), ErrorCode::ShuttingDown);
    }
}

#[test]
fn reserve_expires_first_so_that_overdue_bytes_are_found() {
    let mut rig = Rig::new(1024);
    let grant = rig.reserve("old", "h", 1024);
    rig.complete("old", &grant);
    rig.now_ms += TTL;
    check_grant(rig.reserve("new", "h2", 1024), true, false, false);
    assert!(rig.status("old").is_none());
}

#[test]
fn reserve_beyond_the_limit_of_records_is_refused_and_known_ids_are_not() {
    let config = {
        let mut config = ReservationConfig::default();
        config.reservations_max = 2;
        config
    };
    let mut rig = Rig::with(ToyPool::new(4096, 256), config);
    rig.reserve("t1", "h1", 256);
    rig.reserve("t2", "h2", 256);
    let error = rig.reserve_refused("t3", "h3", 256);
    assert_eq!(error, ReserveError::TooManyReservations { limit: 2 });
    assert_eq!(error.code(), ErrorCode::TooManyReservations);
    assert!(error.code().is_retryable());
    check_grant(rig.reserve("t1", "h1", 256), false, false, false);
    rig.cancel("t2", CancelKind::Abandon);
    check_grant(rig.reserve("t3", "h3", 256), true, false, false);
}

// row: D10
#[test]
fn reserve_compares_element_types_by_meaning_not_by_spelling() {
    let spec = |name: &str| TensorSpec::new(Dtype::parse(name).unwrap(), [128]).unwrap();
    let mut rig = Rig::new(4096);
    rig.ask("t1", "h", spec("half")).unwrap();
    let Ok(Reserve::Granted(follower)) = rig.ask("t2", "h", spec("float16")) else {
        panic!("an alias conflicts with its canonical name");
    };
    check_grant(follower, false, false, false);
    let status = rig.status("t1").unwrap();
    assert_eq!(status.tensor.dtype().name(), "float16");
    assert!(matches!(
        rig.ask("t3", "h", spec("bfloat16")),
        Err(ReserveError::ConflictingInFlight)
    ));
}

// row: M13
#[test]
fn reserve_of_resident_content_in_another_shape_is_refused_only_while_it_is_in_use() {
    let mut rig = Rig::new(4096);
    let owner = rig.push_and_take("t1", "h", 256);
    let error = rig.reserve_refused("t2", "h", 512);
    assert_eq!(error.to_string(), "conflicting cached tensor for mm_hash");
    assert_eq!(error.code(), ErrorCode::Conflict);
    rig.release(owner);
    check_grant(rig.reserve("t2", "h", 512), true, false, false);
    assert!(!rig.pool.is_resident(&hash("h")), "the unused one made way");
}

// row: M13, D4
#[test]
fn reserve_of_another_shape_that_fails_leaves_the_resident() {
    let mut rig = Rig::new(1024);
    rig.make_resident("h", 256);
    let error = rig.reserve_refused("t2", "h", 2048);
    assert_eq!(error.code(), ErrorCode::TooLarge);
    assert!(rig.pool.is_resident(&hash("h")));
}

// row: V18
#[test]
fn zero_bytes_are_granted_without_room_and_completed_without_a_write() {
    let mut rig = Rig::new(256);
    rig.reserve("full", "h1", 256);
    let grant = rig.reserve("empty", "h0", 0);
    check_grant(grant, true, false, false);
    assert_eq!(grant.len_bytes, 0);
    let follower = rig.reserve("follower", "h0", 0);
    check_grant(follower, false, false, false);
    assert_eq!(rig.complete("empty", &grant), DONE);
    let taken = rig.take("follower", "h0");
    assert!(taken.cached);
    rig.release(taken);
    let taken = rig.take("empty", "h0");
    rig.release(taken);
}

// row: V19
#[test]
fn a_tensor_without_dimensions_is_one_element() {
    let mut rig = Rig::new(256);
    let scalar = TensorSpec::new(Dtype::FLOAT32, []).unwrap();
    let Ok(Reserve::Granted(grant)) = rig.ask("t", "h", scalar) else {
        panic!("a scalar was refused");
    };
    assert_eq!(grant.len_bytes, 4);
    assert_eq!(rig.complete("t", &grant), DONE);
}

// ---- reserve that has to wait for bytes ----

#[test]
fn reserve_waits_for_bytes_on_their_way_back_and_then_gets_them() {
    let mut rig = Rig::new(1024);
    let grant = rig.reserve("old", "h", 1024);
    rig.complete("old", &grant);
    rig.pool.hold_back = true;
    rig.cancel("old", CancelKind::Plain);
    let Ok(Reserve::Later(pending)) = rig.ask("new", "h2", bytes(1024)) else {
        panic!("the reserve did not wait");
    };
    assert_eq!(pending.request().transfer_id, id("new"));
    assert!(rig.status("new").is_none());
    let now = rig.now();
    let Ok(Reserve::Later(pending)) =
        rig.machine
            .resume(&mut rig.pool, now, pending, &mut rig.effects)
    else {
        panic!("the bytes are not there yet");
    };
    rig.pool.settle();
    let Ok(Reserve::Granted(grant)) =
        rig.machine
            .resume(&mut rig.pool, now, pending, &mut rig.effects)
    else {
        panic!("the bytes are there");
    };
    check_grant(grant, true, false, false);
}

#[test]
fn a_waiting_reserve_that_gives_up_says_pool_full_and_leaves_no_record() {
    let mut rig = Rig::new(1024);
    rig.reserve("old", "h", 1024);
    rig.pool.hold_back = true;
    rig.cancel("old", CancelKind::Abandon);
    let Ok(Reserve::Later(pending)) = rig.ask("new", "h2", bytes(1024)) else {
        panic!("the reserve did not wait");
    };
    assert_eq!(
        rig.machine.give_up(&mut rig.pool, pending),
        ReserveError::PoolFull
    );
    assert!(rig.status("new").is_none());
    rig.pool.settle();
    assert_eq!(rig.pool.free_bytes(), 1024);
}

#[test]
fn a_waiting_reserve_sees_what_happened_meanwhile() {
    let mut rig = Rig::new(1024);
    rig.reserve("old", "h", 1024);
    rig.pool.hold_back = true;
    rig.cancel("old", CancelKind::Abandon);
    let mut pending = Vec::new();
    for name in ["cancelled", "follower"] {
        let Ok(Reserve::Later(waiting)) = rig.ask(name, "h2", bytes(512)) else {
            panic!("the reserve did not wait");
        };
        pending.push(waiting);
    }
    rig.cancel("cancelled", CancelKind::Plain);
    rig.pool.settle();
    rig.reserve("writer", "h2", 512);
    let now = rig.now();
    let mut answers = pending.into_iter().map(|waiting| {
        rig.machine
            .resume(&mut rig.pool, now, waiting, &mut rig.effects)
    });
    assert!(matches!(answers.next(), Some(Ok(Reserve::Cancelled))));
    let Some(Ok(Reserve::Granted(grant))) = answers.next() else {
        panic!("the second one follows the writer");
    };
    check_grant(grant, false, false, false);
}

// ---- complete, one test per line of the table ----

#[test]
fn complete_of_an_unknown_or_finished_id_or_another_reservation_changes_nothing() {
    let mut rig = Rig::new(4096);
    let stranger = ReservationId::from_random(99);
    assert_eq!(rig.complete_as("unknown", Some(stranger)), REFUSED);
    rig.cancel("cancelled", CancelKind::Plain);
    assert_eq!(rig.complete_as("cancelled", Some(stranger)), REFUSED);
    assert_eq!(rig.complete_as("cancelled", None), REFUSED);
    let grant = rig.reserve("t", "h", 512);
    assert_eq!(rig.complete_as("t", Some(stranger)), REFUSED);
    assert_eq!(rig.complete_as("t", None), REFUSED);
    assert_eq!(rig.status("t").unwrap().state, ReservationState::Writing);
    assert_eq!(rig.complete("t", &grant), DONE);
    rig.pass(TTL);
    assert_eq!(rig.complete("t", &grant), REFUSED);
}

#[test]
fn complete_of_a_ready_item_is_idempotent() {
    let mut rig = Rig::new(4096);
    let grant = rig.reserve("t", "h", 512);
    assert_eq!(rig.complete("t", &grant), DONE);
    rig.drain_ready();
    assert_eq!(rig.complete("t", &grant), DONE_BEFORE);
    assert!(rig.drain_ready().is_empty());
}

#[test]
fn complete_by_a_follower_is_refused() {
    let mut rig = Rig::new(4096);
    rig.reserve("w", "h", 512);
    let follower = rig.reserve("f", "h", 512);
    assert_eq!(rig.complete("f", &follower), REFUSED);
    assert_eq!(rig.status("w").unwrap().state, ReservationState::Writing);
}

#[test]
fn complete_without_followers_publishes_nothing() {
    let mut rig = Rig::new(4096);
    let grant = rig.reserve("t", "h", 512);
    assert_eq!(rig.complete("t", &grant), DONE);
    assert!(!rig.pool.is_resident(&hash("h")));
    assert_eq!(rig.machine.stats().ready_bytes, 512);
    // A second id writes its own copy until somebody takes the first.
    check_grant(rig.reserve("t2", "h", 512), true, false, false);
}

#[test]
fn complete_with_followers_publishes_and_announces_followers_first() {
    let mut rig = Rig::new(4096);
    let grant = rig.reserve("w", "h", 512);
    rig.reserve("f1", "h", 512);
    rig.reserve("f2", "h", 512);
    assert_eq!(rig.complete("w", &grant), DONE);
    assert_eq!(rig.drain_ready(), ["f1", "f2", "w"]);
    assert_eq!(rig.pool.lease_count(&hash("h")), Some(3));
    for name in ["w", "f1", "f2"] {
        check_grant(rig.reserve(name, "h", 512), false, true, true);
    }
    assert_eq!(rig.pool.free_bytes(), 4096 - 512);
}

#[test]
fn complete_renews_the_deadline_of_writer_and_followers() {
    let mut rig = Rig::new(4096);
    let grant = rig.reserve("w", "h", 512);
    rig.reserve("f", "h", 512);
    rig.pass(TTL - 1);
    rig.complete("w", &grant);
    rig.pass(TTL - 1);
    assert!(rig.status("w").unwrap().is_ready());
    assert!(rig.status("f").unwrap().is_ready());
    assert_eq!(rig.pass(1), 2);
}

#[test]
fn complete_of_a_cancel_pending_writer_serves_its_followers_and_gives_the_memory_up() {
    let mut rig = Rig::new(4096);
    let grant = rig.reserve("w", "h", 512);
    rig.reserve("f", "h", 512);
    rig.cancel("w", CancelKind::Plain);
    assert_eq!(rig.complete("w", &grant), DONE_BEFORE);
    assert_eq!(rig.drain_ready(), ["f"]);
    assert_eq!(rig.pool.lease_count(&hash("h")), Some(1));
    rig.reserve_cancelled("w", "h", 512);

    let alone = rig.reserve("alone", "h2", 512);
    rig.cancel("alone", CancelKind::Plain);
    let free = rig.pool.free_bytes();
    assert_eq!(rig.complete("alone", &alone), DONE_BEFORE);
    assert_eq!(rig.pool.free_bytes(), free + 512);
    assert!(!rig.pool.is_resident(&hash("h2")));
}

#[test]
fn complete_of_an_expire_pending_writer_serves_its_followers_and_frees_the_id() {
    let mut rig = Rig::new(4096);
    let grant = rig.reserve("w", "h", 512);
    rig.now_ms += TTL - 1;
    rig.reserve("f", "h", 512);
    rig.pass(1);
    assert_eq!(
        rig.status("w").unwrap().state,
        ReservationState::ExpirePending
    );
    assert_eq!(rig.complete("w", &grant), DONE_BEFORE);
    assert_eq!(rig.drain_ready(), ["f"]);
    check_grant(rig.reserve("w", "h", 512), false, true, true);
}

// ---- cancel, one test per line of the table ----

const KINDS: [CancelKind; 3] = [CancelKind::Plain, CancelKind::Abandon, CancelKind::Refresh];

#[test]
fn cancel_of_another_reservation_is_refused_in_every_state() {
    let stranger = CancelMatch::Only(Some(ReservationId::from_random(99)));
    let nameless = CancelMatch::Only(None);
    for kind in KINDS {
        let mut rig = Rig::new(8192);
        rig.reserve("writing", "h1", 512);
        rig.reserve("following", "h1", 512);
        let ready = rig.reserve("ready", "h2", 512);
        rig.complete("ready", &ready);
        rig.reserve("cancel-pending", "h3", 512);
        rig.cancel("cancel-pending", CancelKind::Plain);
        rig.cancel("cancelled", CancelKind::Plain);
        for name in [
            "writing",
            "following",
            "ready",
            "cancel-pending",
            "cancelled",
        ] {
            assert!(!rig.cancel_as(name, stranger, kind), "{name} {kind:?}");
            assert!(!rig.cancel_as(name, nameless, kind), "{name} {kind:?}");
        }
        assert_eq!(
            rig.status("writing").unwrap().state,
            ReservationState::Writing
        );
    }
}

#[test]
fn cancel_of_an_unknown_id_is_remembered() {
    for kind in [CancelKind::Plain, CancelKind::Abandon] {
        let mut rig = Rig::new(4096);
        assert!(rig.cancel("t", kind));
        rig.reserve_cancelled("t", "h", 512);
        rig.pass(TTL);
        check_grant(rig.reserve("t", "h", 512), true, false, false);
    }
}

// row: V8, D6
#[test]
fn refresh_of_an_unknown_id_leaves_it_reservable() {
    let mut rig = Rig::new(4096);
    assert!(rig.cancel("t", CancelKind::Refresh));
    assert_eq!(rig.machine.stats().tombstones, 0);
    check_grant(rig.reserve("t", "h", 512), true, false, false);
}

#[test]
fn cancel_of_a_cancelled_id_renews_its_memory() {
    for kind in KINDS {
        let mut rig = Rig::new(4096);
        rig.cancel("t", CancelKind::Plain);
        rig.pass(TTL - 1);
        assert!(rig.cancel("t", kind));
        rig.pass(TTL - 1);
        rig.reserve_cancelled("t", "h", 512);
        rig.pass(1);
        check_grant(rig.reserve("t", "h", 512), true, false, false);
    }
}

#[test]
fn cancel_of_a_follower_ends_it_and_not_its_writer() {
    for kind in KINDS {
        let mut rig = Rig::new(4096);
        let grant = rig.reserve("w", "h", 512);
        rig.reserve("f", "h", 512);
        assert!(rig.cancel("f", kind));
        assert!(rig.status("f").is_none());
        if kind == CancelKind::Refresh {
            check_grant(rig.reserve("f", "h", 512), false, false, false);
            rig.cancel("f", CancelKind::Plain);
        } else {
            rig.reserve_cancelled("f", "h", 512);
        }
        assert_eq!(rig.complete("w", &grant), DONE);
        assert_eq!(rig.drain_ready(), ["w"]);
        assert!(!rig.pool.is_resident(&hash("h")), "nobody follows any more");
    }
}

// row: C3.7a
#[test]
fn plain_cancel_of_a_writer_keeps_its_memory() {
    let mut rig = Rig::new(4096);
    rig.reserve("w", "h", 512);
    assert!(rig.cancel("w", CancelKind::Plain));
    let status = rig.status("w").unwrap();
    assert_eq!(status.state, ReservationState::CancelPending);
    assert!(!status.is_ready());
    rig.pass(100 * TTL);
    assert_eq!(rig.pool.free_bytes(), 4096 - 512);
    assert_eq!(rig.machine.stats().stuck_bytes, 512);
}

#[test]
fn abandoning_cancel_of_a_writer_frees_its_memory_at_once() {
    let mut rig = Rig::new(4096);
    rig.reserve("w", "h", 512);
    assert!(rig.cancel("w", CancelKind::Abandon));
    assert_eq!(rig.pool.free_bytes(), 4096);
    rig.reserve_cancelled("w", "h", 512);
}

#[test]
fn refresh_of_a_writer_frees_its_memory_and_its_id() {
    let mut rig = Rig::new(4096);
    let grant = rig.reserve("w", "h", 512);
    assert!(rig.cancel_as(
        "w",
        CancelMatch::Only(Some(grant.reservation_id)),
        CancelKind::Refresh
    ));
    assert_eq!(rig.pool.free_bytes(), 4096);
    check_grant(rig.reserve("w", "h", 512), true, false, false);
}

// row: V5, V16
#[test]
fn followers_of_a_writer_that_goes_away_can_be_reserved_again() {
    for kind in [CancelKind::Abandon, CancelKind::Refresh] {
        let mut rig = Rig::new(4096);
        rig.reserve("w", "h", 512);
        rig.reserve("f1", "h", 512);
        rig.reserve("f2", "h", 512);
        assert!(rig.cancel("w", kind));
        assert!(rig.status("f1").is_none());
        assert_eq!(
            rig.effects,
            [Effect::FollowersLost {
                writer: id("w"),
                count: 2
            }]
        );
        assert_eq!(rig.machine.stats().followers_lost, 2);
        check_grant(rig.reserve("f1", "h", 512), true, false, false);
        check_grant(rig.reserve("f2", "h", 512), false, false, false);
    }
}

#[test]
fn cancel_of_a_cancel_pending_writer() {
    for (kind, answer, freed) in [
        (CancelKind::Plain, true, false),
        (CancelKind::Abandon, true, true),
        (CancelKind::Refresh, false, false),
    ] {
        let mut rig = Rig::new(4096);
        rig.reserve("w", "h", 512);
        rig.cancel("w", CancelKind::Plain);
        assert_eq!(rig.cancel("w", kind), answer, "{kind:?}");
        assert_eq!(rig.status("w").is_none(), freed, "{kind:?}");
        assert_eq!(rig.pool.free_bytes() == 4096, freed, "{kind:?}");
        rig.reserve_cancelled("w", "h", 512);
    }
}

#[test]
fn cancel_of_an_expire_pending_writer() {
    for (kind, freed) in [
        (CancelKind::Plain, false),
        (CancelKind::Abandon, true),
        (CancelKind::Refresh, true),
    ] {
        let mut rig = Rig::new(4096);
        rig.reserve("w", "h", 512);
        rig.pass(TTL);
        assert!(rig.cancel("w", kind), "{kind:?}");
        assert_eq!(rig.pool.free_bytes() == 4096, freed, "{kind:?}");
        match kind {
            CancelKind::Abandon => rig.reserve_cancelled("w", "h", 512),
            CancelKind::Refresh => {
                check_grant(rig.reserve("w", "h", 512), true, false, false);
            }
            _ => assert_eq!(
                rig.reserve_refused("w", "h", 512).code(),
                ErrorCode::ActiveWriter
            ),
        }
    }
}

// row: V12, D8
#[test]
fn plain_cancel_of_an_expire_pending_writer_is_remembered() {
    let mut rig = Rig::new(4096);
    let grant = rig.reserve("w", "h", 512);
    rig.pass(TTL);
    assert!(rig.cancel("w", CancelKind::Plain));
    // A refresh must not undo what the consumer's own side decided.
    assert!(!rig.cancel("w", CancelKind::Refresh));
    assert_eq!(rig.complete("w", &grant), DONE_BEFORE);
    assert_eq!(rig.pool.free_bytes(), 4096);
    rig.reserve_cancelled("w", "h", 512);
}

#[test]
fn cancel_of_a_ready_item_gives_up_memory_or_lease() {
    for kind in [CancelKind::Plain, CancelKind::Abandon] {
        let mut rig = Rig::new(4096);
        let grant = rig.reserve("owned", "h", 512);
        rig.complete("owned", &grant);
        rig.make_resident("r", 512);
        rig.reserve("leased", "r", 512);
        assert!(rig.cancel("owned", kind));
        assert!(rig.cancel("leased", kind));
        assert_eq!(rig.pool.lease_count(&hash("r")), Some(0));
        assert_eq!(rig.pool.free_bytes(), 4096 - 512);
        rig.reserve_cancelled("owned", "h", 512);
        rig.reserve_cancelled("leased", "r", 512);
    }
}

#[test]
fn refresh_of_a_ready_item_is_refused() {
    let mut rig = Rig::new(4096);
    let grant = rig.reserve("t", "h", 512);
    rig.complete("t", &grant);
    assert!(!rig.cancel("t", CancelKind::Refresh));
    assert!(rig.status("t").unwrap().is_ready());
}

// row: V9
#[test]
fn cancel_of_an_expired_id_makes_it_cancelled_and_a_refresh_does_not() {
    for kind in KINDS {
        let mut rig = Rig::new(4096);
        let grant = rig.reserve("t", "h", 512);
        rig.complete("t", &grant);
        rig.pass(TTL);
        if kind == CancelKind::Refresh {
            assert!(!rig.cancel("t", kind));
            check_grant(rig.reserve("t", "h", 512), true, false, false);
        } else {
            assert!(rig.cancel("t", kind));
            rig.reserve_cancelled("t", "h", 512);
        }
    }
}

#[test]
fn refresh_without_abandon_is_refused_for_active_ids_only() {
    let mut rig = Rig::new(4096);
    rig.reserve("w", "h", 512);
    rig.reserve("f", "h", 512);
    assert!(!rig.cancel("w", CancelKind::RefreshOnly));
    assert!(!rig.cancel("f", CancelKind::RefreshOnly));
    rig.cancel("cancelled", CancelKind::Plain);
    assert!(rig.cancel("cancelled", CancelKind::RefreshOnly));
    assert!(rig.cancel("unknown", CancelKind::RefreshOnly));
    check_grant(rig.reserve("unknown", "h2", 256), true, false, false);
}

// row: V13
#[test]
fn clean_up_after_pool_full_makes_only_that_id_unusable() {
    let mut rig = Rig::new(512);
    rig.reserve("holder", "h", 512);
    assert_eq!(rig.reserve_refused("t", "h2", 512), ReserveError::PoolFull);
    assert!(rig.cancel("t", CancelKind::Abandon));
    rig.cancel("holder", CancelKind::Abandon);
    rig.reserve_cancelled("t", "h2", 512);
    check_grant(rig.reserve("fresh", "h2", 512), true, false, false);
}

// ---- time ----

// row: C3.7a
#[test]
fn expiry_ends_ready_items_and_followers_and_keeps_memory_of_writers() {
    let mut rig = Rig::new(4096);
    rig.make_resident("r", 256);
    rig.reserve("leased", "r", 256);
    rig.reserve("w", "h", 512);
    rig.reserve("f", "h", 512);
    let grant = rig.reserve("owned", "o", 512);
    rig.complete("owned", &grant);
    assert_eq!(rig.pass(TTL - 1), 0);
    assert_eq!(rig.pass(1), 2, "only ready items are counted");
    assert!(rig.status("leased").is_none());
    assert_eq!(rig.pool.lease_count(&hash("r")), Some(0));
    assert!(rig.status("owned").is_none());
    assert!(rig.status("f").is_none());
    assert_eq!(
        rig.status("w").unwrap().state,
        ReservationState::ExpirePending
    );
    assert_eq!(rig.pool.free_bytes(), 4096 - 256 - 512);
    rig.reserve_cancelled("f", "h", 512);
    let stats = rig.machine.stats();
    assert_eq!((stats.ready_expired, stats.writers_expired), (2, 1));
    assert_eq!(stats.stuck_bytes, 512);
}

#[test]
fn a_new_writer_replaces_one_that_is_deferred() {
    let mut rig = Rig::new(4096);
    let old = rig.reserve("old", "h", 512);
    rig.cancel("old", CancelKind::Plain);
    let new = rig.reserve("new", "h", 512);
    check_grant(new, true, false, false);
    assert_ne!(old.offset, new.offset);
    // The old one finishes; the new one is still the writer to follow.
    assert_eq!(rig.complete("old", &old), DONE_BEFORE);
    let follower = rig.reserve("f", "h", 512);
    assert_eq!(follower.offset, new.offset);
    assert_eq!(rig.complete("new", &new), DONE);
    assert_eq!(rig.drain_ready(), ["f", "new"]);
}

// row: V14
#[test]
fn a_sweep_looks_only_at_what_is_overdue() {
    let config = {
        let mut config = ReservationConfig::default();
        config.reservations_max = 100_000;
        config
    };
    let mut rig = Rig::with(ToyPool::new(1 << 30, 256), config);
    // Followers cost the toy pool nothing, so the records can be many.
    rig.reserve("w", "h", 256);
    for n in 0..50_000 {
        rig.reserve(&format!("f{n}"), "h", 256);
    }
    let started = std::time::Instant::now();
    for _ in 0..50_000 {
        rig.pass(1);
    }
    // A scan of all records would look at 2.5e9 of them, some tens of seconds.
    assert!(started.elapsed() < std::time::Duration::from_secs(5));
    assert_eq!(rig.machine.stats().following, 50_000);
}

#[test]
fn time_that_goes_back_stands_still() {
    let mut rig = Rig::new(4096);
    rig.reserve("w", "h", 512);
    rig.pass(TTL - 1);
    rig.now_ms = 0;
    rig.expire();
    rig.reserve("w2", "h2", 512);
    rig.now_ms = 1_000_000 + TTL;
    rig.expire();
    assert_eq!(
        rig.status("w").unwrap().state,
        ReservationState::ExpirePending
    );
    assert_eq!(rig.status("w2").unwrap().state, ReservationState::Writing);
}

// row: V15
#[test]
fn finished_ids_are_remembered_up_to_a_limit_and_early_losses_counted() {
    let config = {
        let mut config = ReservationConfig::default();
        config.tombstones_max = 3;
        config
    };
    let mut rig = Rig::with(ToyPool::new(4096, 256), config);
    for name in ["a", "b", "c", "d"] {
        rig.cancel(name, CancelKind::Plain);
    }
    let stats = rig.machine.stats();
    assert_eq!((stats.tombstones, stats.tombstones_dropped), (3, 1));
    check_grant(rig.reserve("a", "h", 256), true, false, false);
    rig.reserve_cancelled("b", "h", 256);
}

// ---- stuck memory ----

// row: V7
#[test]
fn memory_of_a_writer_that_never_returns_is_counted_and_released_only_on_request() {
    let mut rig = Rig::new(1024);
    rig.reserve("dead", "h", 1024);
    rig.pass(100 * TTL);
    assert_eq!(rig.reserve_refused("t", "h2", 256), ReserveError::PoolFull);
    let stats = rig.machine.stats();
    assert_eq!((stats.stuck_bytes, stats.expire_pending), (1024, 1));
    let now = rig.now();
    let released = rig
        .machine
        .release_stuck(&mut rig.pool, now, Stuck::All, &mut rig.effects);
    assert_eq!(
        released,
        StuckReleased {
            records: 1,
            bytes: 1024
        }
    );
    assert_eq!(rig.machine.stats().stuck_bytes, 0);
    check_grant(rig.reserve("t", "h2", 256), true, false, false);
}

// row: V7
#[test]
fn releasing_one_stuck_id_leaves_the_others_and_never_touches_a_live_writer() {
    let mut rig = Rig::new(4096);
    rig.reserve("dead1", "h1", 256);
    rig.reserve("dead2", "h2", 512);
    rig.cancel("dead1", CancelKind::Plain);
    rig.cancel("dead2", CancelKind::Plain);
    rig.reserve("live", "h3", 256);
    let ready = rig.reserve("ready", "h4", 256);
    rig.complete("ready", &ready);
    let now = rig.now();
    for (name, records) in [("dead1", 1), ("live", 0), ("ready", 0), ("unknown", 0)] {
        let released =
            rig.machine
                .release_stuck(&mut rig.pool, now, Stuck::One(&id(name)), &mut rig.effects);
        assert_eq!(released.records, records, "{name}");
    }
    assert_eq!(rig.machine.stats().stuck_bytes, 512);
    assert_eq!(rig.machine.writers_outstanding(), 2);
}

// row: V7, V15
#[test]
fn releasing_all_stuck_memory_goes_by_id_so_what_is_forgotten_first_is_repeatable() {
    let config = {
        let mut config = ReservationConfig::default();
        config.tombstones_max = 2;
        config
    };
    let mut rig = Rig::with(ToyPool::new(8192, 256), config);
    for name in ["d", "a", "e", "c", "b"] {
        rig.reserve(name, name, 256);
        rig.cancel(name, CancelKind::Plain);
    }
    let now = rig.now();
    rig.machine
        .release_stuck(&mut rig.pool, now, Stuck::All, &mut rig.effects);
    for name in ["a", "b", "c"] {
        check_grant(rig.reserve(name, name, 256), true, false, false);
    }
    for name in ["d", "e"] {
        rig.reserve_cancelled(name, name, 256);
    }
}

// ---- shutdown ----

// row: V17
#[test]
fn a_cancelling_shutdown_ends_followers_and_ready_items_and_waits_for_writers_only() {
    let mut rig = Rig::new(4096);
    let writer = rig.reserve("w", "h", 512);
    rig.reserve("f", "h", 512);
    let ready = rig.reserve("ready", "h2", 512);
    rig.complete("ready", &ready);
    rig.reserve("expired", "h3", 256);
    rig.pass(TTL - 1);
    rig.reserve("w", "h", 512);
    rig.reserve("f", "h", 512);
    rig.pass(1);
    assert_eq!(rig.machine.writers_outstanding(), 2);
    let now = rig.now();
    // A second one, and one that would go back, change nothing.
    for how in [Shutdown::Cancel, Shutdown::Cancel, Shutdown::Finish] {
        rig.machine
            .begin_shutdown(&mut rig.pool, now, how, &mut rig.effects);
        assert!(rig.machine.is_shutting_down());
    }
    assert!(rig.status("f").is_none());
    assert!(rig.status("ready").is_none());
    assert_eq!(
        rig.status("w").unwrap().state,
        ReservationState::CancelPending
    );
    assert_eq!(
        rig.status("expired").unwrap().state,
        ReservationState::ExpirePending
    );
    assert_eq!(rig.machine.writers_outstanding(), 2, "followers are none");
    assert!(rig.machine.is_exhausted(), "what they write goes to nobody");
    assert_eq!(rig.complete("w", &writer), DONE_BEFORE);
    assert!(rig.cancel("expired", CancelKind::Abandon));
    assert_eq!(rig.machine.writers_outstanding(), 0);
    assert_eq!(rig.pool.free_bytes(), 4096);
}

#[test]
fn a_finishing_shutdown_takes_what_writers_complete_and_what_had_to_wait() {
    let mut config = ReservationConfig::default();
    config.take = TakePolicy::OnReady { taken_max: 1 };
    let mut rig = Rig::with(ToyPool::new(4096, 256), config);
    let writer = rig.reserve("w", "h", 512);
    rig.reserve("f", "h", 512);
    for name in ["listed", "waits"] {
        let grant = rig.reserve(name, name, 512);
        rig.complete(name, &grant);
    }
    let now = rig.now();
    rig.machine
        .begin_shutdown(&mut rig.pool, now, Shutdown::Finish, &mut rig.effects);
    assert_eq!(
        rig.reserve_refused("new", "h4", 256).code(),
        ErrorCode::ShuttingDown
    );
    assert_eq!(rig.complete("w", &writer), DONE);
    let mut names = Vec::new();
    while !rig.machine.is_exhausted() {
        let taken = rig.machine.next_taken(&mut rig.pool).unwrap();
        names.push(taken.transfer_id.to_string());
        rig.release(taken);
    }
    assert_eq!(names, ["listed", "waits", "f", "w"]);
    assert_eq!(rig.machine.writers_outstanding(), 0);
}

#[test]
fn an_acknowledged_item_does_not_expire_while_its_owner_is_behind() {
    let mut config = ReservationConfig::default();
    config.take = TakePolicy::OnReady { taken_max: 1 };
    let mut rig = Rig::with(ToyPool::new(4096, 256), config);
    for name in ["listed", "waits", "cached"] {
        let hash = if name == "cached" { "waits" } else { name };
        let grant = rig.reserve(name, hash, 512);
        if grant.write {
            assert!(rig.complete(name, &grant).became_ready);
        }
    }
    rig.pass(10 * TTL);
    let now = rig.now();
    assert_eq!(rig.machine.expire(&mut rig.pool, now, &mut rig.effects), 0);
    let mut names = Vec::new();
    while let Some(taken) = rig.machine.next_taken(&mut rig.pool) {
        names.push(taken.transfer_id.to_string());
        rig.release(taken);
    }
    assert!(
        names.starts_with(&["listed".into(), "waits".into()]),
        "{names:?}"
    );
    assert_eq!(rig.machine.stats().ready_expired, 0);
}

#[test]
fn a_finishing_shutdown_can_be_cut_short() {
    let mut rig = Rig::new(4096);
    let writer = rig.reserve("w", "h", 512);
    for (how, exhausted) in [(Shutdown::Finish, false), (Shutdown::Cancel, true)] {
        let now = rig.now();
        rig.machine
            .begin_shutdown(&mut rig.pool, now, how, &mut rig.effects);
        assert_eq!(rig.machine.is_exhausted(), exhausted);
        assert_eq!(rig.machine.writers_outstanding(), 1);
    }
    assert_eq!(rig.complete("w", &writer), DONE_BEFORE);
    assert_eq!(rig.machine.writers_outstanding(), 0);
    assert_eq!(rig.pool.free_bytes(), 4096);
}

#[test]
fn no_transfer_beyond_the_items_wanted_is_acknowledged() {
    let mut config = ReservationConfig::default();
    config.take = TakePolicy::OnReady { taken_max: 8 };
    config.items_max = Some(2);
    let mut rig = Rig::with(ToyPool::new(4096, 256), config);
    let first = rig.reserve("t1", "h1", 256);
    rig.reserve("t2", "h2", 256);
    let error = rig.reserve_refused("t3", "h3", 256);
    assert_eq!(error, ReserveError::ItemsUnderWay { limit: 2 });
    assert_eq!(
        error.code(),
        ErrorCode::TooManyReservations,
        "worth asking again"
    );
    assert!(rig.complete("t1", &first).became_ready);
    // Of the two that are wanted one has come and one is under way.
    rig.reserve_refused("t3", "h3", 256);
    // A transfer that came before is no new one, and one that failed makes room.
    check_grant(rig.reserve("t1", "h1", 256), false, true, true);
    assert!(rig.cancel("t2", CancelKind::Abandon));
    let third = rig.reserve("t3", "h3", 256);
    assert!(rig.complete("t3", &third).became_ready);
    let error = rig.reserve_refused("t4", "h1", 256);
    assert_eq!(error, ReserveError::NoMoreItems { limit: 2 });
    assert_eq!(error.code(), ErrorCode::NoMoreItems);
    assert!(!error.code().is_retryable(), "nothing can change that");
}

// ---- taking ----

#[test]
fn take_makes_the_bytes_resident_and_forgets_the_id() {
    let mut rig = Rig::new(4096);
    let grant = rig.reserve("t", "h", 512);
    assert_eq!(
        rig.machine
            .take(&mut rig.pool, &id("t"), &hash("h"))
            .unwrap_err(),
        TakeError::NotReady
    );
    rig.complete("t", &grant);
    assert_eq!(
        rig.machine
            .take(&mut rig.pool, &id("t"), &hash("other"))
            .unwrap_err(),
        TakeError::NotReady
    );
    let taken = rig.take("t", "h");
    assert!(!taken.cached);
    assert_eq!(taken.lease_offset(), grant.offset);
    assert!(rig.status("t").is_none());
    assert_eq!(rig.machine.stats().tombstones, 0);
    assert_eq!(rig.complete("t", &grant), REFUSED);
    // A reserve before anybody cancels the id finds the resident.
    check_grant(rig.reserve("t", "h", 512), false, true, true);
    rig.release(taken);
}

#[test]
fn two_takes_of_one_content_are_two_leases() {
    let mut rig = Rig::new(4096);
    let first = rig.push_and_take("t1", "h", 512);
    let second = rig.push_and_take("t2", "h", 512);
    assert!(second.cached);
    assert_eq!(rig.pool.lease_count(&hash("h")), Some(2));
    rig.release(first);
    assert_eq!(rig.pool.lease_count(&hash("h")), Some(1));
    rig.release(second);
    assert_eq!(rig.pool.lease_count(&hash("h")), Some(0));
}

// row: M14
#[test]
fn a_second_writer_never_displaces_content_that_is_in_use() {
    let mut rig = Rig::new(4096);
    let first = rig.reserve("t1", "h", 512);
    rig.complete("t1", &first);
    let second = rig.reserve("t2", "h", 512);
    check_grant(second, true, false, false);
    check_grant(rig.reserve("t3", "h", 512), false, false, false);
    let in_use = rig.take("t1", "h");
    assert_eq!(rig.complete("t2", &second), DONE);
    // The resident stayed, the second copy went back, and everybody leases the first.
    assert_eq!(rig.pool.free_bytes(), 4096 - 512);
    assert_eq!(rig.pool.lease_count(&hash("h")), Some(3));
    for name in ["t2", "t3"] {
        let taken = rig.take(name, "h");
        assert_eq!(taken.lease_offset(), first.offset);
        rig.release(taken);
    }
    // A push that needs the freed place does not get the bytes in use.
    let next = rig.reserve("t4", "h4", 512);
    assert_ne!(next.offset, in_use.lease_offset());
    rig.release(in_use);
}

// row: M14
#[test]
fn taking_two_unpublished_copies_keeps_the_first() {
    let mut rig = Rig::new(4096);
    let first = rig.reserve("t1", "h", 512);
    rig.complete("t1", &first);
    let second = rig.reserve("t2", "h", 512);
    rig.complete("t2", &second);
    let one = rig.take("t1", "h");
    let two = rig.take("t2", "h");
    assert_eq!(one.lease_offset(), first.offset);
    assert_eq!(two.lease_offset(), first.offset);
    assert_eq!(rig.pool.free_bytes(), 4096 - 512);
    rig.release(one);
    rig.release(two);
}

// row: V4b, R4
#[test]
fn a_lease_gives_what_was_leased_also_after_the_hash_was_bound_to_another_shape() {
    let mut rig = Rig::new(4096);
    let small = rig.reserve("t1", "h", 256);
    rig.complete("t1", &small);
    let large = rig.reserve("t2", "h", 512);
    check_grant(large, true, false, false);
    rig.complete("t2", &large);
    let t1 = rig.take("t1", "h");
    let cached = rig.reserve("t3", "h", 256);
    check_grant(cached, false, true, true);
    let t2 = rig.take("t2", "h");
    assert_eq!(t2.lease_offset(), large.offset);
    let t3 = rig.take("t3", "h");
    assert_eq!(t3.tensor, bytes(256));
    assert_eq!(t3.lease_offset(), small.offset);
    for taken in [t1, t2, t3] {
        rig.release(taken);
    }
    assert_eq!(rig.bytes_in_use(), 0);
}

#[test]
fn ready_items_are_polled_once_each_in_order_whatever_became_of_their_events() {
    let mut rig = Rig::new(4096);
    let grant = rig.reserve("w", "h", 512);
    rig.reserve("f", "h", 512);
    rig.complete("w", &grant);
    let gone = rig.reserve("gone", "h", 512);
    assert!(gone.ready);
    rig.cancel("gone", CancelKind::Plain);
    rig.effects.clear();
    let mut polled = Vec::new();
    while let Some(status) = rig.machine.poll_ready() {
        assert!(status.is_ready());
        polled.push(status.transfer_id.to_string());
    }
    assert_eq!(polled, ["f", "w"]);
    assert!(rig.status("w").unwrap().is_ready(), "polling takes nothing");
}

fn on_ready(taken_max: usize) -> ReservationConfig {
    let mut config = ReservationConfig::default();
    config.take = TakePolicy::OnReady { taken_max };
    config
}

#[test]
fn taking_on_ready_takes_writer_and_followers_in_the_call_that_made_them_ready() {
    let mut rig = Rig::with(ToyPool::new(4096, 256), on_ready(8));
    let grant = rig.reserve("w", "h", 512);
    rig.reserve("f", "h", 512);
    assert_eq!(rig.complete("w", &grant), DONE);
    assert_eq!(
        rig.drain_ready(),
        ["f", "w"],
        "events come before the taking"
    );
    assert!(rig.status("w").is_none());
    assert_eq!(rig.machine.stats().taken_waiting, 2);
    let follower = rig.machine.next_taken(&mut rig.pool).unwrap();
    assert_eq!(follower.transfer_id, id("f"));
    assert!(follower.cached);
    let writer = rig.machine.next_taken(&mut rig.pool).unwrap();
    assert!(!writer.cached);
    assert!(rig.machine.next_taken(&mut rig.pool).is_none());
    // A reserve that answers ready is an item of its own.
    check_grant(rig.reserve("w", "h", 512), false, true, true);
    assert_eq!(rig.drain_ready(), ["w"]);
    let again = rig.machine.next_taken(&mut rig.pool).unwrap();
    assert!(again.cached);
    for taken in [follower, writer, again] {
        rig.release(taken);
    }
    assert_eq!(rig.bytes_in_use(), 0);
}

#[test]
fn taking_on_ready_waits_while_the_list_is_full_and_goes_on_when_it_drains() {
    let mut rig = Rig::with(ToyPool::new(4096, 256), on_ready(1));
    for name in ["a", "b", "c"] {
        let grant = rig.reserve(name, name, 256);
        assert_eq!(rig.complete(name, &grant), DONE);
    }
    assert!(rig.status("a").is_none());
    assert!(rig.status("b").unwrap().is_ready());
    assert!(rig.status("c").unwrap().is_ready());
    for name in ["a", "b", "c"] {
        let taken = rig.machine.next_taken(&mut rig.pool).unwrap();
        assert_eq!(taken.transfer_id, id(name));
        rig.release(taken);
    }
    assert!(rig.machine.next_taken(&mut rig.pool).is_none());
}

#[test]
fn a_pool_with_too_many_residents_refuses_the_take_and_loses_nothing() {
    let mut rig = Rig::with(
        ToyPool::new(4096, 256).with_residents_max(1),
        ReservationConfig::default(),
    );
    let kept = rig.push_and_take("t1", "h1", 256);
    let grant = rig.reserve("t2", "h2", 256);
    rig.complete("t2", &grant);
    assert_eq!(
        rig.machine
            .take(&mut rig.pool, &id("t2"), &hash("h2"))
            .unwrap_err(),
        TakeError::PublishRefused
    );
    assert!(rig.status("t2").unwrap().is_ready());
    rig.release(kept);
    rig.pool.evict_all();
    let taken = rig.take("t2", "h2");
    assert_eq!(taken.lease_offset(), grant.offset);
    rig.release(taken);
    assert_eq!(rig.machine.stats().publishes_refused, 1);
}

#[test]
fn a_pool_with_too_many_residents_loses_followers_but_not_the_writer() {
    let mut rig = Rig::with(
        ToyPool::new(4096, 256).with_residents_max(0),
        ReservationConfig::default(),
    );
    let grant = rig.reserve("w", "h", 256);
    rig.reserve("f", "h", 256);
    assert_eq!(rig.complete("w", &grant), DONE);
    assert_eq!(
        rig.effects[..2],
        [
            Effect::PublishRefused {
                transfer_id: id("w")
            },
            Effect::FollowersLost {
                writer: id("w"),
                count: 1
            }
        ]
    );
    assert!(rig.status("w").unwrap().is_ready());
    check_grant(rig.reserve("f", "h", 256), true, false, false);
}

#[test]
fn a_record_can_be_read_until_it_ends() {
    let mut machine: Reservations<ToyPool> = Reservations::new(ReservationConfig::default());
    let mut pool = ToyPool::new(1024, 256);
    let mut effects = Vec::new();
    let request = ReserveRequest {
        transfer_id: id("t"),
        mm_hash: hash("h"),
        tensor: bytes(100),
    };
    let fresh = ReservationId::from_random(7);
    let now = Moment::from_millis(5);
    let answer = machine.reserve(&mut pool, now, fresh, &request, &mut effects);
    assert!(matches!(answer, Ok(Reserve::Granted(_))));
    let status = machine.status(&id("t")).unwrap();
    assert_eq!(status.reservation_id, fresh);
    assert_eq!(status.mm_hash, hash("h"));
    assert_eq!(status.tensor.len_bytes(), 100, "not what it occupies");
    let spans: Vec<_> = machine.owned_spans().collect();
    assert_eq!(spans.len(), 1);
    assert_eq!(spans[0].span.len_bytes, 256);
}

trait LeaseOffset {
    fn lease_offset(&self) -> u64;
}

impl LeaseOffset for ec_connector::Taken<ToyPool> {
    fn lease_offset(&self) -> u64 {
        ToyPool::lease_span(&self.lease).offset
    }
}
