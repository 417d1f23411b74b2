use slab_core::{Allocation, PoolId, Region};

fn forge() -> Allocation {
    Allocation {
        pool: PoolId::new(),
        slot: 0,
        region: Region::new(0, 256).unwrap(),
        len: 256,
    }
}

fn main() {}
