use slab_core::{FreeList, FreeListConfig, PoolId};

fn main() {
    let mut list = FreeList::new(FreeListConfig::new(PoolId::new(), 4096)).unwrap();
    let allocation = list.allocate(1).unwrap();
    list.free(allocation).unwrap();
    list.free(allocation).unwrap();
}
