use slab_core::{Allocation, PoolId};

fn forge() -> Allocation {
    Allocation {
        pool: PoolId::new(),
        offset: 0,
        len: 256,
        place: 0,
    }
}

fn main() {}
