//! What can go wrong, with the driver's own code where it was the driver.

use std::fmt;

/// A code of the driver, with the name that the driver gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DriverCode {
    number: u32,
    name: &'static str,
}

impl DriverCode {
    pub(crate) const fn new(number: u32, name: &'static str) -> Self {
        Self { number, name }
    }

    /// The number, as `cuda.h` has it.
    #[must_use]
    pub const fn number(self) -> u32 {
        self.number
    }

    /// The name, such as `CUDA_ERROR_OUT_OF_MEMORY`; `unknown code` where the driver has none.
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.name
    }
}

impl fmt::Display for DriverCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name, self.number)
    }
}

/// Why there is no driver to work with.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unavailable {
    /// No file of the driver can be loaded: there is no NVIDIA driver on this machine, or the loader does not find
    /// it.
    #[error(
        "no CUDA driver: {first} cannot be loaded ({reason}), nor {others} other names; install the NVIDIA driver or set LD_LIBRARY_PATH to its folder"
    )]
    NoLibrary {
        /// The first name that was tried.
        first: String,
        /// What the system's loader said about `libcuda.so.1`, which is the driver's own name.
        reason: String,
        /// How many further names were tried.
        others: usize,
    },
    /// The library lacks a function: it is a stub or something else, or a driver of before 11.4.
    #[error(
        "{library} lacks {symbol}: it is not a CUDA driver, or too old a one; take its folder from LD_LIBRARY_PATH, or update the driver"
    )]
    MissingSymbol {
        /// The name under which the library was found.
        library: String,
        /// The first function that is missing.
        symbol: &'static str,
    },
    /// The driver is there and does not start: there is no device, its kernel module is not loaded, or the library is
    /// the toolkit's stub (`CUDA_ERROR_STUB_LIBRARY`), whose folder has to leave `LD_LIBRARY_PATH`.
    #[error("{library} does not start: {code}{}", advice(code.number()))]
    InitFailed {
        /// The name under which the library was found.
        library: String,
        /// What `cuInit` answered.
        code: DriverCode,
    },
    /// The driver is older than what is needed.
    #[error("{library} supports CUDA {}.{}, at least {}.{} is needed; update the driver",
        found / 1000, found % 1000 / 10, required / 1000, required % 1000 / 10)]
    TooOld {
        /// The name under which the library was found.
        library: String,
        /// The version of CUDA that it supports, as 1000 × major + 10 × minor.
        found: u32,
        /// The least that is needed.
        required: u32,
    },
}

/// What `cuInit` answers where something is wrong with the machine. Numbers and names are those of `cuda.h`.
struct InitCode {
    number: u32,
    name: &'static str,
    /// What to do about it.
    advice: &'static str,
}

const INIT_CODES: [InitCode; 8] = [
    InitCode {
        number: 3,
        name: "CUDA_ERROR_NOT_INITIALIZED",
        advice: "is the driver's kernel module loaded?",
    },
    InitCode {
        number: 34,
        name: "CUDA_ERROR_STUB_LIBRARY",
        advice: "it is the stub of CUDA's toolkit: take its folder from LD_LIBRARY_PATH",
    },
    InitCode {
        number: 100,
        name: "CUDA_ERROR_NO_DEVICE",
        advice: "there is no GPU, or CUDA_VISIBLE_DEVICES hides it",
    },
    InitCode {
        number: 304,
        name: "CUDA_ERROR_OPERATING_SYSTEM",
        advice: "may this user open /dev/nvidia*?",
    },
    InitCode {
        number: 802,
        name: "CUDA_ERROR_SYSTEM_NOT_READY",
        advice: "a service of the driver's (such as the fabric manager) is not up yet",
    },
    InitCode {
        number: 803,
        name: "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        advice: "the library and the kernel module are of two versions: restart after an update of the driver",
    },
    InitCode {
        number: 804,
        name: "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE",
        advice: "the library is one for forward compatibility, which this GPU does not support: take its folder from LD_LIBRARY_PATH",
    },
    InitCode {
        number: 999,
        name: "CUDA_ERROR_UNKNOWN",
        advice: "is the driver's kernel module loaded, and may this user open /dev/nvidia*?",
    },
];

impl InitCode {
    fn find(number: u32) -> Option<&'static Self> {
        INIT_CODES.iter().find(|code| code.number == number)
    }
}

/// The name of a code of `cuInit`'s that a library without a driver behind it may not know.
pub(crate) fn init_code(number: u32) -> Option<DriverCode> {
    let name = InitCode::find(number)?.name;
    Some(DriverCode { number, name })
}

/// What to do about a code of `cuInit`'s, to be appended to a message.
fn advice(number: u32) -> String {
    InitCode::find(number).map_or_else(String::new, |code| format!("; {}", code.advice))
}

/// Why a call failed. All sizes are bytes.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// There is no driver to work with.
    #[error(transparent)]
    Unavailable(#[from] Unavailable),
    /// The driver refused a call, or reports that earlier work has failed.
    #[error("{call} failed: {code}")]
    Driver {
        /// The driver's function.
        call: &'static str,
        /// Its answer.
        code: DriverCode,
    },
    /// The machine has no device of that number.
    #[error("there is no device {ordinal}, the driver knows {count}")]
    NoSuchDevice {
        /// What was asked for, from 0.
        ordinal: u32,
        /// Devices that the driver knows.
        count: u32,
    },
    /// A memory of no bytes, or of more than an address can reach.
    #[error("a memory cannot have {len} bytes")]
    InvalidLength {
        /// What was asked for.
        len: u64,
    },
    /// Only memory that the host can address can be registered as host memory.
    #[error("the memory has no host address")]
    NotHostMemory,
    /// A stream, a memory and the timelines have to be of one device.
    #[error("something of device {found} was given to what belongs to device {expected}")]
    OtherDevice {
        /// Where the call belongs.
        expected: u32,
        /// Where what was given belongs.
        found: u32,
    },
    /// The stream is one of those that have no handle of their own (null, legacy, per thread).
    #[error("a default stream has no handle of its own; make a stream")]
    DefaultStream,
    /// As many streams are attached to the pool, or have failed, as were asked for. One that goes makes room once it is
    /// drained. One that has failed never does: what it touched is never known to be free, so that a pool of which many
    /// have failed has to be given up.
    #[error("{streams_max} streams are attached to the pool, have failed or are not drained yet")]
    TooManyStreams {
        /// The bound.
        streams_max: u32,
    },
    /// As much work is under way as may be: poll, and try again.
    #[error("{pending_max} loans or copies are under way, which is the bound; poll, and try again")]
    TooManyPending {
        /// The bound.
        pending_max: usize,
    },
    /// The work has not ended by the deadline.
    #[error("the work on the device has not ended by the deadline")]
    TimedOut,
    /// Work on the stream has failed before. What was lent on it is not reused.
    #[error("the stream has failed before: {call} answered {code}")]
    StreamFailed {
        /// The driver's function that told.
        call: &'static str,
        /// Its answer.
        code: DriverCode,
    },
    /// The stream is capturing a graph. What is submitted to it meanwhile runs when the graph is launched, any number of
    /// times, so that no event says when it has ended: lend around the launch instead, on the stream of the launch.
    #[error(
        "the stream is capturing a graph; lend to the stream that launches it, around the launch"
    )]
    StreamCapturing,
    /// A range lies in none of the memories that were named.
    #[error("{len} bytes at {address:#x} do not lie inside one of the memories")]
    OutsideMemory {
        /// First byte.
        address: u64,
        /// Number of bytes.
        len: u64,
    },
    /// A copy from host memory to host memory, for which the driver would let the caller wait: let the host do it.
    #[error(
        "the bytes at {from:#x} and {to:#x} are both in host memory; copy them without the device"
    )]
    BothOnHost {
        /// First byte to be read.
        from: u64,
        /// First byte to be written.
        to: u64,
    },
    /// The pool is larger than the memory that it is to divide.
    #[error("the pool has {pool} bytes, its memory {memory}")]
    PoolTooLarge {
        /// Bytes of the pool.
        pool: u64,
        /// Bytes of the memory.
        memory: u64,
    },
    /// The list of copies has not the places that were named.
    #[error(transparent)]
    Descriptor(slab_core::DescriptorError),
    /// The pool refused.
    #[error(transparent)]
    Pool(slab_core::Error),
}

impl From<slab_core::Error> for CudaError {
    fn from(error: slab_core::Error) -> Self {
        Self::Pool(error)
    }
}

impl CudaError {
    /// What engines are told.
    pub(crate) fn as_copy_error(&self) -> slab_memory::CopyError {
        let code = match self {
            Self::Driver { code, .. } | Self::StreamFailed { code, .. } => code.number(),
            // CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED.
            Self::StreamCapturing => 900,
            // CUDA_ERROR_UNKNOWN.
            _ => 999,
        };
        slab_memory::CopyError::Driver {
            code: i32::try_from(code).unwrap_or(i32::MAX),
        }
    }
}

/// A value that a call did not take, with the reason: the caller still owns it.
#[must_use = "the refused value is handed back"]
pub struct Refused<T> {
    /// What was given to the call.
    pub value: T,
    /// Why the call did not take it.
    pub cause: CudaError,
}

impl<T> Refused<T> {
    /// The reason alone; the value is dropped. An error like any other, whatever the value is.
    #[must_use]
    pub fn into_cause(self) -> CudaError {
        self.cause
    }
}

impl<T> fmt::Display for Refused<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.cause, f)
    }
}

// Whatever the value is: memories and holds have nothing to print.
impl<T> fmt::Debug for Refused<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Refused")
            .field("cause", &self.cause)
            .finish_non_exhaustive()
    }
}

impl<T> std::error::Error for Refused<T> {}
