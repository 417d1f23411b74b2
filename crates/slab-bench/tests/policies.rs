//! The policies that the default one is compared with do what was published.

use slab_bench::eviction::{Cache, S3Fifo, Sieve, Tuned, Tuning, Unfragmented, WTinyLfu};
use slab_core::{Credit, Evict};

/// Requests of one content of length 1; what they found.
fn request<E: Evict>(cache: &mut Unfragmented<E>, ids: impl IntoIterator<Item = u32>) -> Vec<bool> {
    let request = |id| {
        let hit = cache.hit(id);
        if !hit {
            assert!(cache.insert(id, 1), "room can be made");
        }
        cache.end_request();
        hit
    };
    ids.into_iter().map(request).collect()
}

/// Whether each is there, asked in an order in which no answer changes another.
fn residents<E: Evict>(
    cache: &mut Unfragmented<E>,
    ids: impl IntoIterator<Item = u32>,
) -> Vec<u32> {
    ids.into_iter().filter(|id| cache.hit(*id)).collect()
}

#[test]
fn sieve_spares_what_was_used_and_keeps_its_hand_where_it_stopped() {
    let mut cache = Unfragmented::new(3, Sieve::new());
    request(&mut cache, [1, 2, 3, 1]);
    // The hand clears 1, takes 2 and stays at 3; 1 is not looked at again before the hand comes round.
    request(&mut cache, [4, 5]);
    assert_eq!(residents(&mut cache, 1..=5), [1, 4, 5]);
    let mut cache = Unfragmented::new(3, Sieve::new());
    request(&mut cache, [1, 2, 3, 1, 4, 5, 6, 7]);
    // 2, 3, 4 and 5 went, although 1 is the oldest and was not used any more.
    assert_eq!(residents(&mut cache, 1..=7), [1, 6, 7]);
}

#[test]
fn s3_fifo_promotes_what_was_used_twice_and_what_comes_back() {
    let mut cache = Unfragmented::new(10, S3Fifo::new(10));
    request(&mut cache, 1..=10);
    // 1 is used twice more, 2 once more.
    request(&mut cache, [1, 1, 2]);
    request(&mut cache, [11]);
    // 1 moved on and 2 went first of all, but is remembered: it comes back to the main queue.
    assert_eq!(request(&mut cache, [2]), [false]);
    request(&mut cache, 100..200);
    let found = residents(&mut cache, 1..=11);
    assert_eq!(
        found,
        [1, 2],
        "one-time content leaves the main queue alone"
    );
}

#[test]
fn s3_fifo_lets_each_use_pass_once_in_the_main_queue() {
    let mut cache = Unfragmented::new(10, S3Fifo::new(10));
    // All of them get to the main queue.
    for id in 1..=9 {
        request(&mut cache, [id, id, id]);
    }
    request(&mut cache, [10, 11]);
    request(&mut cache, [2, 3, 3]);
    // Newcomers with three uses each push older ones out of the main queue: 1 and 4 had no use left.
    request(&mut cache, [12, 12, 12, 13, 13, 13, 14, 14, 14, 15, 16]);
    let found = residents(&mut cache, [2, 3]);
    assert_eq!(found, [2, 3]);
    assert!(residents(&mut cache, [1]).is_empty());
}

#[test]
fn w_tiny_lfu_admits_only_what_is_used_more_often_than_its_victim() {
    let mut cache = Unfragmented::new(100, WTinyLfu::new(100, 100));
    request(&mut cache, 0..100);
    request(&mut cache, 0..100);
    request(&mut cache, 1_000..1_050);
    let kept = residents(&mut cache, 0..100).len();
    assert!(
        kept >= 98,
        "what came once pushed out {} used twice",
        100 - kept
    );
    cache.end_request();
    // Used often enough, a newcomer gets in.
    for _ in 0..6 {
        request(&mut cache, [2_000, 3_000]);
    }
    request(&mut cache, 4_000..4_010);
    assert_eq!(residents(&mut cache, [2_000, 3_000]), [2_000, 3_000]);
}

#[test]
fn tuned_as_shipped_is_the_default_policy() {
    let mut shipped = Unfragmented::new(30, Credit::new(1 << 12));
    let mut tuned = Unfragmented::new(30, Tuned::new(Tuning::SHIPPED));
    let ids =
        |seed: u32| (0..4_000_u32).map(move |at| (at.wrapping_mul(seed) >> 7) % 97 % (1 + at % 89));
    for seed in [2_654_435_761, 40_503, 2_246_822_519] {
        let expected = request(&mut shipped, ids(seed));
        assert!(expected.contains(&true) && expected.contains(&false));
        assert_eq!(request(&mut tuned, ids(seed)), expected);
    }
}
