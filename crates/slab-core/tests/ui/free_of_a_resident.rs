use slab_core::{Allocation, Pool};

fn misuse(pool: &mut Pool<u32, ()>, allocation: Allocation) {
    let _lease = pool.publish(1, allocation, ()).unwrap();
    pool.free(allocation, &[]).unwrap();
}

fn main() {}
