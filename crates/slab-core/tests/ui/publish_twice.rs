use slab_core::{Allocation, Pool};

fn misuse(pool: &mut Pool<u32, ()>, allocation: Allocation) {
    let _a = pool.publish(1, allocation, ()).unwrap();
    let _b = pool.publish(2, allocation, ()).unwrap();
}

fn main() {}
