//! Registered memory.
//!
//! The library does not check what is registered beyond overlaps, and not even those reliably, so that is
//! done here. It stops no request of a peer when memory is unregistered: whatever was registered is kept until
//! the engine has been destroyed.
// Registers addresses.
#![allow(unsafe_code)]

use std::collections::{BTreeMap, HashMap};
use std::ffi::CString;
use std::sync::Arc;

use slab_memory::{Memory, MemoryKind};

use super::config::device_location;
use super::error::LibraryError;
use super::library::{Entered, Source};
use crate::error::EngineError;
use crate::registration::Access;

pub(super) struct MemoryBook {
    host_location: CString,
    device_memory: bool,
    /// Lengths by first address, those that could not be unregistered included. No two overlap.
    ranges: BTreeMap<u64, u64>,
    /// Everything that was ever registered.
    kept: HashMap<(u64, u64), Vec<Arc<dyn Memory>>>,
}

impl MemoryBook {
    pub(super) fn new(host_location: CString, device_memory: bool) -> Self {
        Self {
            host_location,
            device_memory,
            ranges: BTreeMap::new(),
            kept: HashMap::new(),
        }
    }

    /// Checks that the library can be told of the memory.
    pub(super) fn check_reach(memory: &dyn Memory, device_memory: bool) -> Result<(), EngineError> {
        let (address, len) = (memory.address(), memory.len());
        match memory.host_ptr() {
            // Peers name the address that the application tells them, and the library publishes the pointer.
            Some(pointer) if pointer.as_ptr().addr() as u64 != address => {
                Err(EngineError::UnusableMemory { address, len })
            }
            Some(_) => Ok(()),
            None if device_memory => Ok(()),
            None => Err(LibraryError::DeviceMemory { address }.into()),
        }
    }

    /// Registers memory with the library.
    pub(super) fn register(
        &mut self,
        entered: &Entered<'_>,
        memory: &Arc<dyn Memory>,
        access: Access,
    ) -> Result<(), EngineError> {
        let (address, len) = (memory.address(), memory.len());
        let unusable = EngineError::UnusableMemory { address, len };
        let (Some(end), Ok(size)) = (address.checked_add(len), usize::try_from(len)) else {
            return Err(unusable);
        };
        if address == 0 || len == 0 {
            return Err(unusable);
        }
        Self::check_reach(&**memory, self.device_memory)?;
        // Ranges do not overlap, so only the last one that starts before our end can reach in.
        if let Some((&other_address, &other_len)) = self.ranges.range(..end).next_back()
            && other_address + other_len > address
        {
            return Err(EngineError::Overlap {
                address,
                len,
                other_address,
                other_len,
            });
        }
        let location = match memory.kind() {
            MemoryKind::Device(device) => device_location(device),
            _ => self.host_location.clone(),
        };
        // Before the call, so that it is kept whatever comes of it.
        let kept = self.kept.entry((address, len)).or_default();
        if !kept.iter().any(|other| Arc::ptr_eq(other, memory)) {
            kept.push(Arc::clone(memory));
        }
        // SAFETY: all of a memory, whose range does not wrap (checked above) and which `kept` holds until the
        // engine has been destroyed.
        let registered = unsafe {
            let first = Source::new(&**memory, 0);
            entered.register(first, size, &location, access != Access::Local)
        };
        registered?;
        self.ranges.insert(address, len);
        Ok(())
    }

    /// Says whether the bytes lie inside one registered memory.
    pub(super) fn covers(&self, address: u64, len: u64) -> bool {
        let before = self.ranges.range(..=address).next_back();
        before.is_some_and(|(&first, &all)| {
            let offset = address - first;
            offset <= all && len <= all - offset
        })
    }

    /// Lets the library forget memory. If it refuses, nothing can be registered there any more.
    pub(super) fn unregister(
        &mut self,
        entered: &Entered<'_>,
        address: u64,
    ) -> Result<(), LibraryError> {
        entered.unregister(address)?;
        self.ranges.remove(&address);
        Ok(())
    }

    /// Takes everything that is kept. The engine has been destroyed.
    pub(super) fn take_kept(&mut self) -> Vec<Arc<dyn Memory>> {
        self.ranges.clear();
        std::mem::take(&mut self.kept)
            .into_values()
            .flatten()
            .collect()
    }
}
