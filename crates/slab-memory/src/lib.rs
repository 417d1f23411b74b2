//! slab-memory
#![no_std]
