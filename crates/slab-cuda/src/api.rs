//! The driver's functions, looked up one by one before any is called.
//!
//! cudarc opens the library, and declares the functions as CUDA's header does. They are called through pointers of our
//! own all the same, for two reasons: cudarc looks a function up when it is first called, and panics if it is not
//! there; and it declares the result as an enum of the codes that one version of CUDA knows, where a newer driver may
//! answer with another. Here whatever the driver answers is a number. That everything else agrees with cudarc's
//! declarations is checked when this is compiled.

// Takes functions from a library, and calls them.
#![allow(unsafe_code)]

use core::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::{Mutex, PoisonError};

use cudarc::driver::sys::{self, CUcontext, CUdevice, CUdeviceptr, CUevent, CUresult, CUstream};

use crate::error::{CudaError, DriverCode, Unavailable, init_code};

/// What a function answers when it has done what it should.
pub(crate) const SUCCESS: c_uint = 0;
/// What a query answers about work that has not ended.
pub(crate) const NOT_READY: c_uint = 600;
/// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED` to `_IMPLICIT`: a call that a capture of a graph is in the way of.
pub(crate) const CAPTURE_CODES: core::ops::RangeInclusive<c_uint> = 900..=906;

/// `cuMemcpyBatchAsync` as of CUDA 12.8.
pub(crate) type CopyBatchV1 = unsafe extern "C" fn(
    *mut CUdeviceptr,
    *mut CUdeviceptr,
    *mut usize,
    usize,
    *mut sys::CUmemcpyAttributes,
    *mut usize,
    usize,
    *mut usize,
    CUstream,
) -> c_uint;

/// `cuMemcpyBatchAsync` as of CUDA 13.0, which no longer says which copy failed. The bindings for 12.8 have no
/// declaration to compare it with: it is `cuMemcpyBatchAsync_v2` of the header of 13.0.
pub(crate) type CopyBatchV2 = unsafe extern "C" fn(
    *mut CUdeviceptr,
    *mut CUdeviceptr,
    *mut usize,
    usize,
    *mut sys::CUmemcpyAttributes,
    *mut usize,
    usize,
    CUstream,
) -> c_uint;

/// The batched copy that this driver has.
#[derive(Clone, Copy, Debug)]
pub(crate) enum CopyBatch {
    V1(CopyBatchV1),
    V2(CopyBatchV2),
}

/// Declares functions. Where an argument is a number here and an enum of the header's, because the driver writes it or
/// may be asked about a value that no enum has, the header's arguments follow.
macro_rules! functions {
    ($($name:ident($($arg:ty),*) $(as in ($($theirs:ty),*))?;)*) => {
        /// The functions that every driver in use has.
        #[allow(non_snake_case, reason = "the names are CUDA's")]
        #[derive(Clone, Copy, Debug)]
        pub(crate) struct Table {
            $(pub(crate) $name: unsafe extern "C" fn($($arg),*) -> c_uint,)*
        }

        impl Table {
            /// Looks all of them up.
            ///
            /// # Errors
            /// The name of the first that is missing.
            fn find(library: &'static libloading::Library) -> Result<Self, &'static str> {
                Ok(Self {$(
                    // SAFETY: the library is a CUDA driver, or says that it is by having a function of this name; the
                    // signature is that of CUDA's header. It is never unloaded.
                    $name: *unsafe {
                        library.get::<unsafe extern "C" fn($($arg),*) -> c_uint>(stringify!($name))
                    }
                    .map_err(|_| stringify!($name))?,
                )*})
            }
        }

        // Everything but the result is as cudarc has generated it from CUDA's header.
        const _: () = {
            $(functions!(@check $name($($arg),*) $(as in ($($theirs),*))?);)*
        };
    };
    (@check $name:ident($($arg:ty),*)) => {
        let _: unsafe fn($($arg),*) -> CUresult = sys::$name;
    };
    (@check $name:ident($($arg:ty),*) as in ($($theirs:ty),*)) => {
        let _: unsafe fn($($theirs),*) -> CUresult = sys::$name;
        $(assert!(size_of::<$arg>() == size_of::<$theirs>());)*
    };
}

functions! {
    cuInit(c_uint);
    cuDriverGetVersion(*mut c_int);
    cuDeviceGetCount(*mut c_int);
    cuDeviceGet(*mut CUdevice, c_int);
    cuDeviceGetName(*mut c_char, c_int, CUdevice);
    cuDeviceTotalMem_v2(*mut usize, CUdevice);
    cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice);
    cuDevicePrimaryCtxRelease_v2(CUdevice);
    cuCtxPushCurrent_v2(CUcontext);
    cuCtxPopCurrent_v2(*mut CUcontext);
    cuMemGetInfo_v2(*mut usize, *mut usize);
    cuMemAlloc_v2(*mut CUdeviceptr, usize);
    cuMemFree_v2(CUdeviceptr);
    cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
    cuMemFreeHost(*mut c_void);
    cuMemHostRegister_v2(*mut c_void, usize, c_uint);
    cuMemHostUnregister(*mut c_void);
    cuMemHostGetDevicePointer_v2(*mut CUdeviceptr, *mut c_void, c_uint);
    cuStreamCreate(*mut CUstream, c_uint);
    cuStreamDestroy_v2(CUstream);
    cuStreamWaitEvent(CUstream, CUevent, c_uint);
    cuEventCreate(*mut CUevent, c_uint);
    cuEventDestroy_v2(CUevent);
    cuEventRecord(CUevent, CUstream);
    cuEventQuery(CUevent);
    cuMemcpyAsync(CUdeviceptr, CUdeviceptr, usize, CUstream);
    cuStreamIsCapturing(CUstream, *mut c_uint) as in (CUstream, *mut sys::CUstreamCaptureStatus);
    cuThreadExchangeStreamCaptureMode(*mut c_uint) as in (*mut sys::CUstreamCaptureMode);
    cuGetErrorName(c_uint, *mut *const c_char) as in (CUresult, *mut *const c_char);
}

/// `cuGetProcAddress` as of CUDA 12.0, with the status as a number.
type ProcAddress =
    unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_uint) -> c_uint;

// Those that not every driver has.
const _: () = {
    functions!(@check cuGetProcAddress_v2(*const c_char, *mut *mut c_void, c_int, u64, *mut c_uint)
        as in (*const c_char, *mut *mut c_void, c_int, u64, *mut sys::CUdriverProcAddressQueryResult));
    functions!(@check cuMemcpyBatchAsync(
        *mut CUdeviceptr, *mut CUdeviceptr, *mut usize, usize, *mut sys::CUmemcpyAttributes, *mut usize, usize,
        *mut usize, CUstream
    ));
    // What pointers to numbers lead to.
    assert!(size_of::<sys::CUstreamCaptureStatus>() == size_of::<c_uint>());
    assert!(size_of::<sys::CUstreamCaptureMode>() == size_of::<c_uint>());
    assert!(size_of::<sys::CUdriverProcAddressQueryResult>() == size_of::<c_uint>());
};

/// The functions of a driver that has been initialised.
#[derive(Debug)]
pub(crate) struct Functions {
    pub(crate) table: Table,
    pub(crate) copy_batch: Option<CopyBatch>,
    pub(crate) version: u32,
    pub(crate) library: String,
}

impl Functions {
    /// Finds the library, looks up every function, and initialises the driver.
    pub(crate) fn load(version_min: u32) -> Result<Self, Unavailable> {
        let (library, handle) = open()?;
        let missing = |symbol| Unavailable::MissingSymbol {
            library: library.clone(),
            symbol,
        };
        let table = Table::find(handle).map_err(missing)?;
        let mut functions = Self {
            table,
            copy_batch: None,
            version: 0,
            library,
        };
        // SAFETY: no obligations but the value of the flags, which has to be 0.
        let code = unsafe { (table.cuInit)(0) };
        if code != SUCCESS {
            // A library that does not start may not have the name, and the stub has none at all.
            let code = init_code(code).unwrap_or_else(|| functions.name(code));
            return Err(Unavailable::InitFailed {
                code,
                library: functions.library,
            });
        }
        let mut found = 0;
        // SAFETY: `found` takes the answer.
        let code = unsafe { (table.cuDriverGetVersion)(&mut found) };
        let found = u32::try_from(found).unwrap_or(0);
        if code != SUCCESS || found < version_min {
            return Err(Unavailable::TooOld {
                library: functions.library,
                found,
                required: version_min,
            });
        }
        functions.version = found;
        functions.copy_batch = functions.find_copy_batch(handle);
        Ok(functions)
    }

    /// The newest form of the batched copy that driver and we know. None is no error.
    fn find_copy_batch(&self, handle: &'static libloading::Library) -> Option<CopyBatch> {
        // SAFETY: as in `Table::find`; drivers before 12.0 lack it.
        let address_of = *unsafe { handle.get::<ProcAddress>("cuGetProcAddress_v2") }.ok()?;
        let (version, is_newest) = match self.version {
            13_000.. => (13_000, true),
            12_080.. => (12_080, false),
            _ => return None,
        };
        let mut address = core::ptr::null_mut();
        let mut status = c_uint::MAX;
        // SAFETY: the text ends with NUL, and the places take the answers.
        let code = unsafe {
            address_of(
                c"cuMemcpyBatchAsync".as_ptr(),
                &mut address,
                version,
                0,
                &mut status,
            )
        };
        if code != SUCCESS || status != 0 || address.is_null() {
            return None;
        }
        // SAFETY: the driver answers with the function of the version that was asked for, which has the signature of
        // that version's header; function pointers are as wide as others.
        Some(unsafe {
            if is_newest {
                CopyBatch::V2(core::mem::transmute::<*mut c_void, CopyBatchV2>(address))
            } else {
                CopyBatch::V1(core::mem::transmute::<*mut c_void, CopyBatchV1>(address))
            }
        })
    }

    /// Turns the answer of a call into a result.
    pub(crate) fn check(&self, call: &'static str, code: c_uint) -> Result<(), CudaError> {
        if code == SUCCESS {
            return Ok(());
        }
        Err(CudaError::Driver {
            call,
            code: self.name(code),
        })
    }

    fn name(&self, code: c_uint) -> DriverCode {
        let mut name: *const c_char = core::ptr::null();
        // SAFETY: `name` takes the answer.
        let answer = unsafe { (self.table.cuGetErrorName)(code, &mut name) };
        let text = if answer == SUCCESS && !name.is_null() {
            // SAFETY: the driver's names are constants that end with NUL, and the driver is never unloaded.
            unsafe { CStr::from_ptr::<'static>(name) }.to_str().ok()
        } else {
            None
        };
        DriverCode::new(code, text.unwrap_or("unknown code"))
    }
}

/// Calls a function of the table and checks its answer. To be used in an unsafe block that says why its arguments are
/// right.
macro_rules! call {
    ($functions:expr, $name:ident($($arg:expr),* $(,)?)) => {{
        let functions = $functions;
        functions.check(stringify!($name), (functions.table.$name)($($arg),*))
    }};
}
pub(crate) use call;

/// Has cudarc open the library, once it is sure that it can: it panics otherwise. Returns the name under which it was
/// found.
///
/// cudarc takes the first of its names that the system's loader can open, and keeps it open for the life of the process.
/// The loader answers the same name with the same library as long as that is open, so what is found here first is what
/// cudarc then finds; later calls get that one, too, whatever has become of the files.
fn open() -> Result<(String, &'static libloading::Library), Unavailable> {
    static NAME: Mutex<Option<String>> = Mutex::new(None);
    // Held over all, so that two threads do not find two.
    let mut found = NAME.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(name) = &*found {
        // SAFETY: cudarc has opened it before, so that this does not panic.
        return Ok((name.clone(), unsafe { sys::culib() }));
    }
    let names: Vec<String> = ["cuda", "nvcuda"]
        .into_iter()
        .flat_map(cudarc::get_lib_name_candidates)
        .collect();
    let mut reason = None;
    for name in &names {
        // SAFETY: initialisers of a library run that calls itself the CUDA driver, which is what the program asks for
        // by loading the driver.
        match unsafe { libloading::Library::new(name) } {
            Ok(own) => {
                // SAFETY: as above; the library can be opened, so that this does not panic.
                let library = unsafe { sys::culib() };
                // cudarc's stays open, so that this closes nothing.
                drop(own);
                *found = Some(name.clone());
                return Ok((name.clone(), library));
            }
            Err(error) if name == "libcuda.so.1" => reason = Some(text_of(&error)),
            Err(error) => {
                reason.get_or_insert_with(|| text_of(&error));
            }
        }
    }
    Err(Unavailable::NoLibrary {
        first: names.first().cloned().unwrap_or_default(),
        reason: reason.unwrap_or_default(),
        others: names.len().saturating_sub(1),
    })
}

fn text_of(error: &libloading::Error) -> String {
    match error {
        libloading::Error::DlOpen { source } => source.to_string(),
        other => other.to_string(),
    }
}
