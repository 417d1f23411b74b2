//! slab-core
#![no_std]
