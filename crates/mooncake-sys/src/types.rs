//! The types of the header, with their layout.

use core::ffi::{c_char, c_int, c_void};
use core::marker::{PhantomData, PhantomPinned};

/// Names a batch of requests (`batch_id_t`). It is a pointer of the library in disguise: a number that
/// the library did not give, or that was freed, must never be passed to it.
pub type BatchId = u64;

/// Names an opened segment (`segment_id_t`).
pub type SegmentId = i32;

macro_rules! opaque {
    ($(#[doc = $doc:literal] $name:ident)+) => {$(
        #[doc = $doc]
        #[repr(C)]
        pub struct $name {
            _bytes: [u8; 0],
            // The library decides about threads and may keep the address.
            _marker: PhantomData<(*mut u8, PhantomPinned)>,
        }

        impl core::fmt::Debug for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                f.debug_struct(stringify!($name)).finish_non_exhaustive()
            }
        }
    )+};
}

opaque! {
    /// An engine (`transfer_engine_t` points to one).
    Engine
    /// An installed transport (`transport_t` points to one).
    Transport
}

/// One request (`transfer_request_t`). The library copies it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct TransferRequest {
    /// [`OPCODE_READ`](crate::OPCODE_READ) or [`OPCODE_WRITE`](crate::OPCODE_WRITE); the library does
    /// not check.
    pub opcode: c_int,
    /// The local memory. The library touches it until the task is in a final state or the engine has
    /// been destroyed.
    pub source: *mut c_void,
    /// The peer.
    pub target_id: SegmentId,
    /// First byte at the peer: an absolute address in its process.
    pub target_offset: u64,
    /// Bytes to move.
    pub length: u64,
}

/// What became of one request (`transfer_status_t`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct TransferStatus {
    /// One of the `STATE_` constants.
    pub status: c_int,
    /// Bytes moved; over TCP none until the task is done.
    pub transferred_bytes: u64,
}

/// A notification (`notify_msg_t`). The library writes to neither text.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct NotifyMsg {
    /// The name, ended by NUL.
    pub name: *mut c_char,
    /// The message, ended by NUL.
    pub msg: *mut c_char,
}

/// A range to register (`buffer_entry_t`).
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct BufferEntry {
    /// First byte.
    pub addr: *mut c_void,
    /// Bytes.
    pub length: usize,
}

/// The load of one network device (`nic_load_stat_t`).
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct NicLoadStat {
    /// Name of the device, ended by NUL.
    pub device_name: [c_char; 64],
    /// Bytes under way.
    pub inflight_bytes: u64,
    /// Bandwidth seen lately, in bits per second.
    pub ewma_bandwidth_bps: f64,
}

macro_rules! assert_layout {
    ($($name:ident: $size:literal { $($field:ident @ $offset:literal),+ })+) => {$(
        const _: () = {
            assert!(size_of::<$name>() == $size);
            assert!(align_of::<$name>() == 8);
            $(assert!(core::mem::offset_of!($name, $field) == $offset);)+
        };
    )+};
}

// On targets with pointers of other sizes the header has other layouts, and this does not compile.
assert_layout! {
    TransferRequest: 40 { opcode @ 0, source @ 8, target_id @ 16, target_offset @ 24, length @ 32 }
    TransferStatus: 16 { status @ 0, transferred_bytes @ 8 }
    NotifyMsg: 16 { name @ 0, msg @ 8 }
    BufferEntry: 16 { addr @ 0, length @ 8 }
    NicLoadStat: 80 { device_name @ 0, inflight_bytes @ 64, ewma_bandwidth_bps @ 72 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bytes of a value as another compiler would read them.
    macro_rules! field_at {
        ($value:expr, $offset:literal, $type:ty) => {{
            let value = $value;
            let start: *const u8 = (&raw const value).cast();
            // SAFETY: the offset and the size lie inside the value (asserted above), all of whose
            // bytes at that place are initialised because a field lies there.
            #[allow(unsafe_code)]
            unsafe {
                start.add($offset).cast::<$type>().read_unaligned()
            }
        }};
    }

    #[test]
    fn a_request_is_laid_out_as_in_c() {
        let request = TransferRequest {
            opcode: 1,
            source: core::ptr::without_provenance_mut(0x1122_3344_5566_7788),
            target_id: -3,
            target_offset: 0x7fff_0000_0000_0001,
            length: u64::MAX,
        };
        assert_eq!(field_at!(request, 0, i32), 1);
        assert_eq!(field_at!(request, 8, u64), 0x1122_3344_5566_7788);
        assert_eq!(field_at!(request, 16, i32), -3);
        assert_eq!(field_at!(request, 24, u64), 0x7fff_0000_0000_0001);
        assert_eq!(field_at!(request, 32, u64), u64::MAX);
    }

    #[test]
    fn a_status_and_a_buffer_are_laid_out_as_in_c() {
        let status = TransferStatus {
            status: 6,
            transferred_bytes: 1 << 40,
        };
        assert_eq!(field_at!(status, 0, i32), 6);
        assert_eq!(field_at!(status, 8, u64), 1 << 40);
        let entry = BufferEntry {
            addr: core::ptr::without_provenance_mut(4096),
            length: 77,
        };
        assert_eq!(field_at!(entry, 0, u64), 4096);
        assert_eq!(field_at!(entry, 8, u64), 77);
    }

    #[test]
    fn the_load_of_a_device_is_laid_out_as_in_c() {
        let mut stat = NicLoadStat {
            device_name: [0; 64],
            inflight_bytes: 5,
            ewma_bandwidth_bps: 2.5,
        };
        stat.device_name[63] = 9;
        assert_eq!(field_at!(stat, 63, u8), 9);
        assert_eq!(field_at!(stat, 64, u64), 5);
        assert_eq!(field_at!(stat, 72, f64), 2.5);
    }
}
