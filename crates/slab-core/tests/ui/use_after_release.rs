use slab_core::{Lease, Pool};

fn misuse(pool: &mut Pool<u32, ()>, lease: Lease) -> u64 {
    pool.release(lease, &[]).unwrap();
    lease.offset()
}

fn main() {}
