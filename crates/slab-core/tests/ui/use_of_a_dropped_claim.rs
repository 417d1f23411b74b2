use slab_core::{Claim, Pool};

fn misuse(pool: &mut Pool<u32, ()>, claim: Claim) {
    pool.drop_claim(claim).unwrap();
    let _ = pool.poll_claim(claim);
}

fn main() {}
