//! Free-list coalescing, both placements, against the naive map: bytes conserved, no touching free runs.
#![no_main]

#[path = "../../crates/slab-core/tests/free_list_harness/mod.rs"]
mod free_list_harness;

use free_list_harness::Checked;
use libfuzzer_sys::fuzz_target;
use slab_core::{Placement, Store};
use slab_fuzz::{Tape, is_twin};
use slab_model::FreeOp;

const ALIGNMENT: u64 = 64;
const CAPACITY: u64 = 300 * ALIGNMENT + 17;

fuzz_target!(|bytes: &[u8]| {
    let mut tape = Tape::new(bytes);
    let Some(first) = tape.byte() else { return };
    let placement = if first & 1 == 0 {
        Placement::BestFit
    } else {
        Placement::FirstFit
    };
    if first & 2 == 0 {
        drive(Checked::new(placement, CAPACITY, ALIGNMENT), tape);
    } else {
        drive(Checked::new_inline(placement, CAPACITY, ALIGNMENT), tape);
    }
});

fn drive<St: Store>(mut checked: Checked<St>, mut tape: Tape<'_>) {
    let mut frees = 0;
    while let Some(op) = tape.free_op(CAPACITY) {
        if matches!(op, FreeOp::Free(_)) {
            frees += 1;
            // The twin loses a region: its bytes never come back.
            if is_twin() && frees == 5 {
                if let Some(lost) = checked.live.pop() {
                    std::mem::forget(lost);
                }
            }
        }
        checked.apply(&op, |_, _, _, _| {});
    }
    checked.free_all();
}
