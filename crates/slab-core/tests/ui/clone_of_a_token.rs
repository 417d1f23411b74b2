use slab_core::{Allocation, Claim, Lease};

fn copies<T: Clone>(token: &T) -> T {
    token.clone()
}

fn misuse(allocation: &Allocation, lease: &Lease, claim: &Claim) {
    let _ = copies(allocation);
    let _ = copies(lease);
    let _ = copies(claim);
}

fn main() {}
