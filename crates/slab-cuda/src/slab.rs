//! Memory of the device, and memory of the host that the device can read and write: one allocation each.

// Allocates through the driver, and implements an unsafe trait.
#![allow(unsafe_code)]

use core::ffi::{c_uint, c_void};
use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Instant;

use slab_memory::{
    Bounce, BounceDirection, CopyError, ForeignMemory, Memory, MemoryKind, checked_len,
};

use crate::api::call;
use crate::device::Device;
use crate::error::{CudaError, Refused};
use crate::stage::DeviceBounce;
use crate::stream::Backoff;

/// Pinned for every context, not only for the one that is current. `CU_MEMHOSTALLOC_PORTABLE` and
/// `CU_MEMHOSTREGISTER_PORTABLE` of `cuda.h`.
const PORTABLE: c_uint = 1;
/// `CU_MEMHOSTREGISTER_DEVICEMAP` of `cuda.h`: kernels can reach it. Memory that the driver allocates is so by itself.
const DEVICE_MAP: c_uint = 2;

mod sealed {
    #[allow(unnameable_types, reason = "the private half of a sealed trait")]
    pub trait Sealed {}
}

/// Memory that the device can read and write by itself.
pub trait CudaMemory: Memory + sealed::Sealed {
    /// The device that it was made for.
    fn device(&self) -> &Device;

    /// The engine's name for where it is: `cuda:0` for memory of device 0, `cpu:0` for memory of the host.
    fn location(&self) -> String;

    /// Where kernels of the device find the first byte. The same as [`address`](Memory::address), by which copies name
    /// it, but for registered host memory on devices that see it elsewhere.
    fn device_address(&self) -> u64 {
        self.address()
    }
}

/// Memory of a device, one allocation. It is given back to the driver with the last `Arc` of it, and not while work
/// that was ordered here touches it.
///
/// Engines reach it through pinned buffers (`Memory::bounce`); kernels get its addresses from a
/// [`Timeline`](crate::Timeline). The bytes are not cleared.
pub struct DeviceSlab {
    block: Arc<DeviceBlock>,
}

/// The allocation itself. Whoever started a copy holds it, so that it goes last.
pub(crate) struct DeviceBlock {
    device: Device,
    address: u64,
    len: u64,
    owner: Owner,
}

enum Owner {
    /// This value, which frees it.
    Own,
    /// Somebody else, for as long as this is held.
    Other(#[allow(dead_code, reason = "held, not read")] Box<dyn Any + Send + Sync>),
}

impl DeviceBlock {
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }
}

impl Drop for DeviceBlock {
    fn drop(&mut self) {
        if !matches!(self.owner, Owner::Own) {
            return;
        }
        let freed = self.device.enter().and_then(|_current| {
            // SAFETY: allocated by `DeviceSlab::new` and freed once, here; whoever has work under way holds the block.
            unsafe { call!(self.device.functions(), cuMemFree_v2(self.address)) }
        });
        freed.unwrap_or_else(|error| self.device.note_lost("device slab", self.len, &error));
    }
}

impl DeviceSlab {
    /// Allocates `len` bytes of the device's memory.
    ///
    /// # Errors
    /// [`CudaError::InvalidLength`] for no bytes; [`CudaError::Driver`] with `CUDA_ERROR_OUT_OF_MEMORY` if the device
    /// has not as many in one piece.
    pub fn new(device: &Device, len: u64) -> Result<Self, CudaError> {
        let size = checked_size(len)?;
        let _current = device.enter()?;
        let mut address = 0;
        // SAFETY: `address` takes the answer; a context is current.
        unsafe { call!(device.functions(), cuMemAlloc_v2(&mut address, size))? };
        // The value frees what was allocated, also if it is refused.
        Self::of(DeviceBlock {
            device: device.clone(),
            address,
            len,
            owner: Owner::Own,
        })
    }

    /// Wraps memory of the device that somebody else has allocated, such as a tensor of a framework, to be sent or to be
    /// copied from. `keep` is whatever keeps it from being freed; it is dropped when nothing ordered here touches the
    /// memory any more.
    ///
    /// # Errors
    /// [`CudaError::InvalidLength`] for no bytes, and for a range that wraps.
    ///
    /// # Safety
    /// All `len` bytes from `address` on are memory of `device`, in its primary context, and stay so while `keep` is
    /// held. Memory that is allocated in the order of a stream (`cudaMallocAsync`) is so only once the stream has got
    /// there: what is ordered here runs on other streams.
    pub unsafe fn from_raw(
        device: &Device,
        address: u64,
        len: u64,
        keep: impl Any + Send + Sync,
    ) -> Result<Self, CudaError> {
        checked_size(len)?;
        Self::of(DeviceBlock {
            device: device.clone(),
            address,
            len,
            owner: Owner::Other(Box::new(keep)),
        })
    }

    fn of(block: DeviceBlock) -> Result<Self, CudaError> {
        let len = block.len;
        if block.address.checked_add(len).is_none() {
            return Err(CudaError::InvalidLength { len });
        }
        Ok(Self {
            block: Arc::new(block),
        })
    }

    /// Copies all bytes of a passage, waiting for the device. O(bytes), with a limit on how long nothing moves.
    fn pass(
        &self,
        direction: BounceDirection,
        range: Range<u64>,
        step: impl FnMut(&mut [u8]),
    ) -> Result<(), CopyError> {
        let mut bounce = DeviceBounce::new(Arc::clone(&self.block), direction, range)?;
        pass_all(&mut bounce, step).map_err(|error| match error {
            CopyError::Driver { code } if direction == BounceDirection::In && !bounce.quiesce() => {
                CopyError::Unsettled { code }
            }
            // What is only read may be used again, though not freed, which the bounce sees to.
            other => other,
        })
    }
}

fn pass_all(bounce: &mut DeviceBounce, mut step: impl FnMut(&mut [u8])) -> Result<(), CopyError> {
    let mut backoff = Backoff::default();
    let mut waits_since = None;
    while !bounce.poll_finished()? {
        let buffer = bounce.buffer()?;
        let count = buffer.len();
        if count > 0 {
            step(buffer);
            bounce.commit(count)?;
            backoff = Backoff::default();
            waits_since = None;
        } else if bounce.is_stalled(*waits_since.get_or_insert_with(Instant::now)) {
            // CUDA_ERROR_TIMEOUT.
            return Err(CopyError::Driver { code: 909 });
        } else {
            backoff.pause();
        }
    }
    Ok(())
}

// SAFETY: address and length never change, and do not wrap, which `of` checks; there is no host pointer, so that no
// reference to the bytes can exist.
unsafe impl Memory for DeviceSlab {
    fn len(&self) -> u64 {
        self.block.len
    }

    fn kind(&self) -> MemoryKind {
        MemoryKind::Device(self.block.device.ordinal())
    }

    fn address(&self) -> u64 {
        self.block.address
    }

    fn host_ptr(&self) -> Option<NonNull<u8>> {
        None
    }

    /// Through pinned buffers, on a stream of the calling thread.
    ///
    /// # Errors
    /// As the trait has it. [`CopyError::Unsettled`] if a query or a record of an event failed, or the device did not end
    /// a copy for ten seconds.
    fn copy_in(&self, offset: u64, source: &[u8]) -> Result<(), CopyError> {
        let range = range_of(offset, source.len(), self.block.len)?;
        let mut rest = source;
        self.pass(BounceDirection::In, range, |buffer| {
            let (now, later) = rest.split_at(buffer.len());
            buffer.copy_from_slice(now);
            rest = later;
        })
    }

    fn copy_out(&self, offset: u64, target: &mut [u8]) -> Result<(), CopyError> {
        let range = range_of(offset, target.len(), self.block.len)?;
        let mut at = 0;
        self.pass(BounceDirection::Out, range, |buffer| {
            target[at..at + buffer.len()].copy_from_slice(buffer);
            at += buffer.len();
        })
    }

    /// Two pinned buffers that take turns: one passes the socket while the other is copied.
    fn bounce(
        self: Arc<Self>,
        direction: BounceDirection,
        range: Range<u64>,
    ) -> Result<Box<dyn Bounce>, CopyError> {
        checked_len(&range, self.block.len)?;
        let bounce = DeviceBounce::new(Arc::clone(&self.block), direction, range)?;
        Ok(Box::new(bounce))
    }
}

impl sealed::Sealed for DeviceSlab {}

impl CudaMemory for DeviceSlab {
    fn device(&self) -> &Device {
        &self.block.device
    }

    fn location(&self) -> String {
        self.block.device.location()
    }
}

impl fmt::Debug for DeviceSlab {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DeviceBlock {
            device,
            address,
            len,
            ..
        } = &*self.block;
        f.debug_struct("DeviceSlab")
            .field("device", &device.ordinal())
            .field("address", &format_args!("{address:#x}"))
            .field("len", len)
            .finish()
    }
}

/// Page-locked memory of the host, allocated by the driver: copies between it and its device run by themselves. Copies
/// and streams of another device are refused, as for device memory.
pub struct PinnedSlab {
    device: Device,
    memory: ForeignMemory,
}

impl PinnedSlab {
    /// Allocates `len` bytes.
    ///
    /// # Errors
    /// [`CudaError::InvalidLength`] for no bytes; [`CudaError::Driver`] with `CUDA_ERROR_OUT_OF_MEMORY` if the host
    /// cannot lock as many.
    pub fn new(device: &Device, len: u64) -> Result<Self, CudaError> {
        let size = checked_size(len)?;
        let pointer = allocate_pinned(device, size)?;
        // SAFETY: the driver keeps these bytes mapped until they are freed, which the drop of this value does; it
        // lends no reference to them, and copies by atomic accesses alone.
        match unsafe { ForeignMemory::new(pointer.as_ptr(), size) } {
            Some(memory) => Ok(Self {
                device: device.clone(),
                memory,
            }),
            None => {
                free_pinned(device, pointer, "pinned slab", len);
                Err(CudaError::InvalidLength { len })
            }
        }
    }
}

impl Drop for PinnedSlab {
    fn drop(&mut self) {
        if let Some(pointer) = self.memory.host_ptr() {
            free_pinned(&self.device, pointer, "pinned slab", self.memory.len());
        }
    }
}

// SAFETY: as for the `ForeignMemory` that it hands everything to.
unsafe impl Memory for PinnedSlab {
    fn len(&self) -> u64 {
        self.memory.len()
    }

    fn kind(&self) -> MemoryKind {
        MemoryKind::Host
    }

    fn address(&self) -> u64 {
        self.memory.address()
    }

    fn host_ptr(&self) -> Option<NonNull<u8>> {
        self.memory.host_ptr()
    }

    /// A byte at a time; engines go through [`host_ptr`](Memory::host_ptr) instead.
    fn copy_in(&self, offset: u64, source: &[u8]) -> Result<(), CopyError> {
        self.memory.copy_in(offset, source)
    }

    fn copy_out(&self, offset: u64, target: &mut [u8]) -> Result<(), CopyError> {
        self.memory.copy_out(offset, target)
    }
}

impl sealed::Sealed for PinnedSlab {}

impl CudaMemory for PinnedSlab {
    fn device(&self) -> &Device {
        &self.device
    }

    fn location(&self) -> String {
        HOST_LOCATION.to_owned()
    }
}

impl fmt::Debug for PinnedSlab {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PinnedSlab").field(&self.memory).finish()
    }
}

/// Memory of the host that was there before, such as a `HostSlab`, made known to the driver: copies between it and a
/// device run by themselves.
pub struct RegisteredHost {
    device: Device,
    /// Empty only once dropped.
    memory: Option<Arc<dyn Memory>>,
    pointer: NonNull<u8>,
    device_address: u64,
}

// SAFETY: the pointer is that of the memory, which is both.
unsafe impl Send for RegisteredHost {}
// SAFETY: as for `Send`.
unsafe impl Sync for RegisteredHost {}

impl RegisteredHost {
    /// Locks the pages of `memory`, all of it, until this value is dropped.
    ///
    /// # Errors
    /// The memory, with [`CudaError::NotHostMemory`] or [`CudaError::InvalidLength`]; or with [`CudaError::Driver`],
    /// such as `CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED`.
    pub fn new(device: &Device, memory: Arc<dyn Memory>) -> Result<Self, Refused<Arc<dyn Memory>>> {
        let pointer = match register(device, &*memory) {
            Ok(pointer) => pointer,
            Err(cause) => {
                return Err(Refused {
                    value: memory,
                    cause,
                });
            }
        };
        let mut registered = Self {
            device: device.clone(),
            memory: Some(memory),
            pointer,
            device_address: 0,
        };
        match registered.find_device_address() {
            Ok(address) => {
                registered.device_address = address;
                Ok(registered)
            }
            Err(cause) => Err(Refused {
                value: Arc::clone(registered.memory_arc()),
                cause,
            }),
        }
    }

    fn find_device_address(&self) -> Result<u64, CudaError> {
        let _current = self.device.enter()?;
        let mut address = 0;
        // SAFETY: `address` takes the answer; the memory is registered as mapped for the device. The flags have to be 0.
        unsafe {
            call!(
                self.device.functions(),
                cuMemHostGetDevicePointer_v2(&mut address, self.pointer.as_ptr().cast(), 0)
            )?;
        }
        Ok(address)
    }

    fn memory_arc(&self) -> &Arc<dyn Memory> {
        self.memory.as_ref().expect("empty only once dropped")
    }

    fn memory(&self) -> &dyn Memory {
        &**self.memory_arc()
    }
}

fn register(device: &Device, memory: &dyn Memory) -> Result<NonNull<u8>, CudaError> {
    let pointer = memory.host_ptr().ok_or(CudaError::NotHostMemory)?;
    let size = checked_size(memory.len())?;
    let _current = device.enter()?;
    // SAFETY: the bytes are mapped, by the contract of `Memory`, until the memory is dropped, before which they are
    // unregistered.
    unsafe {
        call!(
            device.functions(),
            cuMemHostRegister_v2(
                pointer.as_ptr().cast::<c_void>(),
                size,
                PORTABLE | DEVICE_MAP
            )
        )?;
    }
    Ok(pointer)
}

impl Drop for RegisteredHost {
    fn drop(&mut self) {
        let pointer = self.pointer.as_ptr().cast::<c_void>();
        let unregistered = self.device.enter().and_then(|_current| {
            // SAFETY: registered by `new`, unregistered once; whoever has work under way holds this value.
            unsafe { call!(self.device.functions(), cuMemHostUnregister(pointer)) }
        });
        let Some(memory) = self.memory.take() else {
            return;
        };
        if let Err(error) = unregistered {
            let len = memory.len();
            // The device may still reach the pages, so that they stay.
            std::mem::forget(memory);
            self.device.note_lost("registered memory", len, &error);
        }
    }
}

// SAFETY: everything is as the memory that it wraps has it, which is held.
unsafe impl Memory for RegisteredHost {
    fn len(&self) -> u64 {
        self.memory().len()
    }

    fn kind(&self) -> MemoryKind {
        MemoryKind::Host
    }

    /// That of the bytes, whatever the memory calls itself: copies name them by it.
    fn address(&self) -> u64 {
        self.pointer.as_ptr().addr() as u64
    }

    fn host_ptr(&self) -> Option<NonNull<u8>> {
        Some(self.pointer)
    }

    fn copy_in(&self, offset: u64, source: &[u8]) -> Result<(), CopyError> {
        self.memory().copy_in(offset, source)
    }

    fn copy_out(&self, offset: u64, target: &mut [u8]) -> Result<(), CopyError> {
        self.memory().copy_out(offset, target)
    }
}

impl sealed::Sealed for RegisteredHost {}

impl CudaMemory for RegisteredHost {
    fn device(&self) -> &Device {
        &self.device
    }

    fn location(&self) -> String {
        HOST_LOCATION.to_owned()
    }

    fn device_address(&self) -> u64 {
        self.device_address
    }
}

impl fmt::Debug for RegisteredHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegisteredHost")
            .field("address", &self.pointer)
            .field("len", &self.len())
            .finish()
    }
}

/// How Mooncake names memory of the host, whichever of its nodes it is on.
const HOST_LOCATION: &str = "cpu:0";

/// Allocates page-locked memory of the host.
pub(crate) fn allocate_pinned(device: &Device, size: usize) -> Result<NonNull<u8>, CudaError> {
    let _current = device.enter()?;
    let mut pointer = core::ptr::null_mut();
    // SAFETY: `pointer` takes the answer; a context is current.
    unsafe {
        call!(
            device.functions(),
            cuMemHostAlloc(&mut pointer, size, PORTABLE)
        )?;
    }
    NonNull::new(pointer.cast()).ok_or(CudaError::InvalidLength { len: size as u64 })
}

/// Gives page-locked memory back, which no copy touches and nobody else frees.
pub(crate) fn free_pinned(device: &Device, pointer: NonNull<u8>, what: &'static str, len: u64) {
    let freed = device.enter().and_then(|_current| {
        // SAFETY: allocated by `allocate_pinned` and freed once: its callers own it.
        unsafe { call!(device.functions(), cuMemFreeHost(pointer.as_ptr().cast())) }
    });
    freed.unwrap_or_else(|error| device.note_lost(what, len, &error));
}

/// The length as the driver takes it.
fn checked_size(len: u64) -> Result<usize, CudaError> {
    match isize::try_from(len) {
        Ok(size @ 1..) => Ok(size as usize),
        _ => Err(CudaError::InvalidLength { len }),
    }
}

fn range_of(offset: u64, len: usize, memory_len: u64) -> Result<Range<u64>, CopyError> {
    let len = len as u64;
    match offset.checked_add(len) {
        Some(end) if end <= memory_len => Ok(offset..end),
        _ => Err(CopyError::OutOfBounds {
            offset,
            len,
            memory_len,
        }),
    }
}
