//! The oracles refuse wrong answers: each rule they hold is broken once.

use slab_model::{
    Answer, NaiveFirstFit, NaiveHoles, NaivePool, Polled, Published, RunKind, ShadowMemory,
};

/// A pool of 8 granules with a resident of 2 at 0 (key 1), one of 2 at 2 (key 2) and a wall of 4, in
/// which key 1 is leased if asked for. Returns the number of the resident of key 1.
fn crowded(lease_first: bool) -> (NaivePool, u64) {
    let mut pool = NaivePool::new(8, 10, 10, 2);
    pool.reserve(1, 2, &[], Answer::Ready { start: 0 });
    pool.reserve(2, 2, &[], Answer::Ready { start: 2 });
    pool.reserve(3, 4, &[], Answer::Ready { start: 4 });
    let Published::New(first) = pool.publish(1, 512, 1, 0, &[]) else {
        panic!("new content")
    };
    let Published::New(second) = pool.publish(2, 512, 2, 0, &[]) else {
        panic!("new content")
    };
    if !lease_first {
        pool.release(first, &[]);
    }
    pool.release(second, &[]);
    (pool, first)
}

#[test]
fn right_answers_pass() {
    let (mut pool, _) = crowded(false);
    pool.reserve(4, 5, &[], Answer::Full);
    pool.reserve(5, 9, &[], Answer::TooLarge);
    pool.reserve(6, 3, &[1, 2], Answer::Ready { start: 0 });
    let kinds: Vec<RunKind> = pool.runs().iter().map(|run| run.kind).collect();
    assert_eq!(kinds, [RunKind::Caller, RunKind::Free, RunKind::Caller]);
}

#[test]
#[should_panic(expected = "evicted while leased")]
fn evicting_a_leased_resident_is_wrong() {
    crowded(true)
        .0
        .reserve(4, 4, &[1, 2], Answer::Ready { start: 0 });
}

#[test]
#[should_panic(expected = "a reserve that failed evicted")]
fn evicting_for_nothing_is_wrong() {
    crowded(true).0.reserve(4, 4, &[2], Answer::Full);
}

#[test]
#[should_panic(expected = "8 granules evicted, 2 were needed for 1")]
fn evicting_far_more_than_needed_is_wrong() {
    let mut pool = NaivePool::new(8, 4, 4, 2);
    for (token, start, len, key) in [(1, 0, 2, 1), (2, 2, 6, 2)] {
        pool.reserve(token, len, &[], Answer::Ready { start });
        let Published::New(number) = pool.publish(token, len * 256, key, 0, &[]) else {
            panic!("a key published for the first time")
        };
        pool.release(number, &[]);
    }
    pool.reserve(3, 1, &[1, 2], Answer::Ready { start: 0 });
}

#[test]
#[should_panic(expected = "granules refused")]
fn refusing_what_could_be_made_is_wrong() {
    crowded(false).0.reserve(4, 4, &[], Answer::Full);
}

#[test]
#[should_panic(expected = "evicted although")]
fn evicting_although_there_is_room_is_wrong() {
    let (mut pool, _) = crowded(false);
    pool.free(3, &[]);
    pool.reserve(4, 3, &[1], Answer::Ready { start: 4 });
}

#[test]
#[should_panic(expected = "evicted although waiting bytes were enough")]
fn evicting_what_waiting_bytes_could_serve_is_wrong() {
    let (mut pool, _) = crowded(false);
    assert!(pool.add_timeline());
    pool.free(3, &[(0, 1)]);
    pool.reserve(4, 2, &[1], Answer::Ready { start: 0 });
}

#[test]
#[should_panic(expected = "is not the start of a run")]
fn handing_out_owned_bytes_is_wrong() {
    let mut pool = NaivePool::new(8, 10, 10, 2);
    pool.reserve(1, 4, &[], Answer::Ready { start: 0 });
    pool.reserve(2, 2, &[], Answer::Ready { start: 2 });
}

/// A claim on 2 of the 4 waiting granules at 4.
fn claimed() -> NaivePool {
    let (mut pool, _) = crowded(true);
    assert!(pool.add_timeline());
    pool.free(3, &[(0, 1)]);
    pool.reserve(
        4,
        3,
        &[],
        Answer::Later {
            claim: 9,
            start: 4,
            len: 4,
        },
    );
    pool
}

#[test]
#[should_panic(expected = "is fulfilled though something in it waits")]
fn fulfilling_a_claim_early_is_wrong() {
    claimed().poll(9, &[], Polled::Ready { token: 5, start: 4 });
}

#[test]
#[should_panic(expected = "is not fulfilled though nothing in it waits")]
fn not_fulfilling_a_claim_in_time_is_wrong() {
    let mut pool = claimed();
    pool.poll(9, &[], Polled::Pending(Some((4, 4))));
    assert!(pool.reach(0, 1));
    pool.poll(9, &[], Polled::Pending(Some((4, 3))));
}

#[test]
#[should_panic(expected = "was overwritten")]
fn handing_bytes_out_before_their_fence_destroys_them() {
    let mut memory = ShadowMemory::new(8);
    memory.write(2, 2, 7);
    memory.leave(2, 2, 7, &[(0, 5)]);
    memory.write(3, 4, 8);
    memory.verify(3, 4, 8);
    memory.reach(0, 5);
    memory.verify(3, 4, 8);
}

#[test]
fn handing_bytes_out_after_their_fence_is_fine() {
    let mut memory = ShadowMemory::new(8);
    memory.write(2, 2, 7);
    memory.leave(2, 2, 7, &[(0, 5), (1, 1)]);
    memory.reach(0, 5);
    memory.reach(1, 1);
    memory.write(3, 4, 8);
    memory.write_late();
    memory.verify(3, 4, 8);
}

#[test]
#[should_panic(expected = "holes are")]
fn placing_over_a_live_region_is_wrong() {
    let mut holes = NaiveHoles::new(8);
    holes.placed(0, 4);
    holes.placed(2, 2);
}

#[test]
#[should_panic(expected = "refused, holes are")]
fn refusing_what_fits_is_wrong() {
    NaiveHoles::new(8).refused(8);
}

#[test]
fn first_fit_takes_the_lowest_hole_and_merges_both_ways() {
    let mut list = NaiveFirstFit::new(8);
    assert_eq!(
        (list.allocate(2), list.allocate(2), list.allocate(2)),
        (Some(0), Some(2), Some(4))
    );
    list.free(0, 2);
    list.free(4, 2);
    assert_eq!(list.holes(), [(0, 2), (4, 4)]);
    assert_eq!(
        (list.allocate(1), list.allocate(3), list.allocate(2)),
        (Some(0), Some(4), None)
    );
    list.free(2, 2);
    assert_eq!(list.holes(), [(1, 3), (7, 1)]);
}
