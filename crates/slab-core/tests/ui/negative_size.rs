use slab_core::{FreeList, Pool};

fn misuse(list: &mut FreeList, pool: &mut Pool<u32, ()>) {
    let _ = list.allocate(-1);
    let _ = pool.reserve(-2048);
}

fn main() {}
