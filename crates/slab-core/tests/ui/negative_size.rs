use slab_core::{FreeList, Pool};

fn misuse(list: &mut FreeList, pool: &mut Pool<u32, ()>, bytes: i64) {
    let _ = list.allocate(bytes);
    let _ = pool.reserve(bytes);
}

fn main() {}
