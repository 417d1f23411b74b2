use slab_core::{Lease, Pool};

fn misuse(pool: &mut Pool<u32, ()>, lease: Lease) {
    pool.release(lease, &[]).unwrap();
    pool.release(lease, &[]).unwrap();
}

fn main() {}
