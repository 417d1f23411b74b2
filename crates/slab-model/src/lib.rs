//! slab-model
