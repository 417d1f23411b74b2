//! Every contender does what it is measured for: regions do not overlap, are aligned and inside the
//! slab, and all of it can be had again once they are given back.

use std::collections::BTreeMap;

use slab_bench::{
    BestFit, Contender, FirstFit, GRANULE, OffsetAllocator, Random, RangeAlloc, Rlsf, Sizes,
};

fn check<C: Contender>(capacity: u64, sizes: Sizes) {
    let mut contender = C::new(capacity, 1 << 14);
    let mut random = Random::new(5);
    let mut live: BTreeMap<u64, C::Region> = BTreeMap::new();
    for _ in 0..10_000 {
        if random.below(100) < 45
            && let Some((_, region)) = live.pop_first()
        {
            contender.give(region);
            continue;
        }
        let len = sizes.draw(&mut random);
        let Some(region) = contender.take(len) else {
            continue;
        };
        assert_eq!(C::len(&region), len);
        let begin = contender.offset(&region);
        let end = begin + len.next_multiple_of(GRANULE);
        assert!(begin.is_multiple_of(GRANULE) && end <= capacity);
        if let Some((at, below)) = live.range(..=begin).next_back() {
            let end_below = at + C::len(below).next_multiple_of(GRANULE);
            assert!(end_below <= begin, "{} overlaps below", C::NAME);
        }
        if let Some((at, _)) = live.range(begin..).next() {
            assert!(end <= *at, "{} overlaps above", C::NAME);
        }
        live.insert(begin, region);
    }
    for (_, region) in live {
        contender.give(region);
    }
    assert!(
        contender.take(capacity / 100 * 85).is_some(),
        "{} does not merge what is given back",
        C::NAME
    );
}

fn check_all<C: Contender>() {
    check::<C>(1 << 30, Sizes::Encoder);
    check::<C>(4 << 20, Sizes::Small);
    check::<C>(4 << 20, Sizes::Equal);
}

#[test]
fn best_fit_hands_out_disjoint_regions() {
    check_all::<BestFit>();
}

#[test]
fn first_fit_hands_out_disjoint_regions() {
    check_all::<FirstFit>();
}

#[test]
fn the_peers_hand_out_disjoint_regions() {
    check_all::<OffsetAllocator>();
    check_all::<RangeAlloc>();
    check_all::<Rlsf>();
}
