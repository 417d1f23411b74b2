//! Runs of blocks, the copies they make, and the lists that hold them, against the per-block loop.

mod cases;

use std::num::NonZeroU64;

use cases::config;
use proptest::prelude::*;
use slab_core::{BlockRun, Blocks, CopyList, CopyListPool, CopySpan, DescriptorError, runs};

/// Ids with long runs, repetitions and steps back, some at the end of the number range.
fn ids(max: u64) -> impl Strategy<Value = Vec<u64>> {
    let stretch = (0..max, 1..9_u64, 0..4_u8).prop_map(move |(first, len, kind)| match kind {
        0 => vec![first; len as usize],
        1 => (0..len).map(|step| first.saturating_sub(step)).collect(),
        _ => (first..(first + len).min(max)).collect::<Vec<u64>>(),
    });
    prop::collection::vec(stretch, 0..12).prop_map(|stretches| stretches.concat())
}

fn expand(runs: &[BlockRun]) -> Vec<u64> {
    runs.iter()
        .flat_map(|run| (0..run.len as u64).map(|step| run.first + step))
        .collect()
}

/// One copy a block: what the runs have to be equal to, byte for byte.
fn per_block(copies: &[CopySpan], block: u64) -> Vec<CopySpan> {
    let mut single = Vec::new();
    for copy in copies {
        let mut done = 0;
        while done < copy.len {
            let len = block.min(copy.len - done);
            single.push(CopySpan {
                source: copy.source + done,
                destination: copy.destination + done,
                len,
            });
            done += len;
        }
    }
    single
}

proptest! {
    #![proptest_config(config(2000))]

    #[test]
    fn runs_are_the_fewest_that_give_the_ids_back(ids in ids(500)) {
        let found: Vec<BlockRun> = runs(&ids).collect();
        prop_assert_eq!(expand(&found), ids.clone());
        let mut slot = 0;
        for run in &found {
            prop_assert_eq!(run.slot, slot);
            prop_assert!(run.len >= 1);
            slot += run.len;
        }
        let breaks = ids.windows(2).filter(|pair| pair[0] + 1 != pair[1]).count();
        prop_assert_eq!(found.len(), if ids.is_empty() { 0 } else { breaks + 1 });
    }

    #[test]
    fn saves_and_loads_are_the_per_block_loop_with_fewer_copies(
        ids in ids(200),
        block in 1..64_u64,
        cut in 0..64_u64,
        spare in 0..3_usize,
    ) {
        let region = Blocks::new(1 << 32, NonZeroU64::new(block).unwrap(), 200).unwrap();
        let used = ids.len().saturating_sub(spare);
        let bytes = (used as u64 * block).saturating_sub(cut.min(block - 1));
        let tensor = 1 << 40;
        let saves: Vec<CopySpan> = region.save(&ids, tensor, bytes).unwrap().collect();
        let expected: Vec<CopySpan> = ids[..used]
            .iter()
            .enumerate()
            .map(|(slot, id)| CopySpan {
                source: tensor + slot as u64 * block,
                destination: (1 << 32) + id * block,
                len: block.min(bytes - slot as u64 * block),
            })
            .collect();
        prop_assert_eq!(per_block(&saves, block), expected);
        prop_assert_eq!(saves.iter().map(|copy| copy.len).sum::<u64>(), bytes);
        prop_assert_eq!(saves.len(), runs(&ids[..used]).count());

        let loads: Vec<CopySpan> = region.load(&ids, tensor).unwrap().collect();
        let expected: Vec<CopySpan> = ids
            .iter()
            .enumerate()
            .map(|(slot, id)| CopySpan {
                source: (1 << 32) + id * block,
                destination: tensor + slot as u64 * block,
                len: block,
            })
            .collect();
        prop_assert_eq!(per_block(&loads, block), expected);
    }

    #[test]
    fn a_list_holds_what_was_stored_and_refuses_what_does_not_fit(
        places in 0..20_usize,
        first in 0..25_usize,
        count in 0..25_usize,
    ) {
        let copy = |n: usize| CopySpan {
            source: n as u64 + 100,
            destination: n as u64 + 200,
            len: n as u64 + 1,
        };
        let mut list = CopyList::new(places);
        let stored = list.store(first, (0..count).map(copy));
        if first + count <= places {
            prop_assert_eq!(stored, Ok(first + count));
            for n in 0..count {
                let at = first + n;
                let held = (list.sources()[at], list.destinations()[at], list.lengths()[at]);
                prop_assert_eq!(held, (copy(n).source, copy(n).destination, copy(n).len));
            }
        } else {
            let error = DescriptorError::OutOfPlaces { first, count, capacity: places };
            prop_assert_eq!(stored, Err(error));
        }
        let lengths = (list.sources().len(), list.destinations().len(), list.lengths().len());
        prop_assert_eq!(lengths, (places, places, places));
    }

    /// Each list in use is marked in its places; a list handed out twice would show another's mark.
    #[test]
    fn a_list_is_in_one_pair_of_hands_and_large_enough(
        ops in prop::collection::vec((any::<bool>(), 0..50_usize), 1..120),
        idle_max in 0..6_usize,
    ) {
        let mut pool = CopyListPool::new(idle_max);
        let mut held: Vec<(u64, CopyList)> = Vec::new();
        let mut peak = 0;
        for (mark, (acquire, pick)) in ops.into_iter().enumerate() {
            let mark = mark as u64;
            if acquire {
                let mut list = pool.acquire(pick);
                prop_assert!(list.capacity() >= pick);
                let places = list.capacity();
                let span = CopySpan { source: mark, destination: mark, len: mark };
                prop_assert_eq!(list.store(0, std::iter::repeat_n(span, places)), Ok(places));
                held.push((mark, list));
            } else if !held.is_empty() {
                let (_, list) = held.swap_remove(pick % held.len());
                pool.release(list);
            }
            peak = peak.max(held.len());
            prop_assert!(pool.idle() <= peak.min(idle_max));
            for (mark, list) in &held {
                prop_assert!(list.lengths().iter().all(|len| len == mark));
            }
        }
    }
}

#[test]
fn ids_at_the_end_of_the_number_range_make_no_run_around_it() {
    let found: Vec<_> = runs(&[u64::MAX - 1, u64::MAX, 0]).collect();
    assert_eq!(found.iter().map(|run| run.len).collect::<Vec<_>>(), [2, 1]);
}

#[test]
fn what_does_not_fit_is_refused_before_any_copy_is_made() {
    let block = NonZeroU64::new(16).unwrap();
    let region = Blocks::new(4096, block, 4).unwrap();
    assert_eq!(
        region.save(&[0, 1], 0, 33).err(),
        Some(DescriptorError::TooFewBlocks {
            bytes: 33,
            blocks: 2,
            block_bytes: 16
        })
    );
    assert_eq!(
        region.save(&[0, 4], 0, 32).err(),
        Some(DescriptorError::NoSuchBlock { id: 4, blocks: 4 })
    );
    assert!(region.save(&[0, 4], 0, 16).is_ok(), "block 4 is not needed");
    assert_eq!(
        region.load(&[0, 4], 0).err(),
        Some(DescriptorError::NoSuchBlock { id: 4, blocks: 4 })
    );
    for end in [
        region.save(&[0], u64::MAX - 14, 15).err(),
        region.load(&[0], u64::MAX - 14).err(),
        Blocks::new(u64::MAX - 14, block, 1).err(),
        Blocks::new(0, block, u64::MAX).err(),
    ] {
        assert_eq!(end, Some(DescriptorError::AddressOverflow));
    }
    assert_eq!(region.save(&[], 7, 0).unwrap().count(), 0);
    assert_eq!(region.needed(0), 0);
    assert_eq!(region.needed(17), 2);
}

#[test]
fn a_list_that_is_too_small_grows_instead_of_being_thrown_away() {
    let mut pool = CopyListPool::new(4);
    let list = pool.acquire(3);
    pool.release(list);
    assert_eq!(pool.acquire(10).capacity(), 10);
    assert_eq!(pool.idle(), 0, "the small one became the large one");
}
