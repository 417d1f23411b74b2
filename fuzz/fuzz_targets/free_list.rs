//! Free-list coalescing, both placements, against the naive map: bytes conserved, no touching free runs.
#![no_main]

#[path = "../../crates/slab-core/tests/free_list_harness/mod.rs"]
mod free_list_harness;

use free_list_harness::Checked;
use libfuzzer_sys::fuzz_target;
use slab_core::{Placement, Store};
use slab_fuzz::{Tape, choose_twin};

const ALIGNMENT: u64 = 64;
const CAPACITY: u64 = 300 * ALIGNMENT + 17;

fuzz_target!(|bytes: &[u8]| {
    choose_twin();
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
    while let Some(op) = tape.free_op(CAPACITY) {
        checked.apply(&op, |_, _, _, _| {});
    }
    checked.free_all();
}
