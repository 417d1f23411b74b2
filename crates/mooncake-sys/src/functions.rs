//! The functions of the header, as pointers.

use core::ffi::{CStr, c_char, c_int, c_void};

use crate::types::{
    BatchId, BufferEntry, Engine, NicLoadStat, NotifyMsg, SegmentId, TransferRequest,
    TransferStatus, Transport,
};

/// Declares the table, the names that every library has, and how the table is filled.
macro_rules! functions {
    (
        required { $($(#[$rdoc:meta])* fn $rname:ident($($rarg:ident: $rtype:ty),*) $(-> $rret:ty)?;)+ }
        optional { $($(#[$odoc:meta])* fn $oname:ident($($oarg:ident: $otype:ty),*) $(-> $oret:ty)?;)+ }
    ) => {
        /// The functions of a loaded library, under their names in the header.
        ///
        /// Those that every version since 0.3.0 has are there; those that came later are `None` where
        /// the library is older. Each is unsafe to call: the library checks next to nothing, and much
        /// of what it is given wrongly ends the process.
        #[derive(Clone, Copy, Debug)]
        #[allow(non_snake_case, reason = "the names of the header")]
        #[expect(clippy::exhaustive_structs, reason = "tests of callers make tables of their own")]
        pub struct Functions {
            $($(#[$rdoc])* pub $rname: unsafe extern "C" fn($($rarg: $rtype),*) $(-> $rret)?,)+
            $($(#[$odoc])* pub $oname: Option<unsafe extern "C" fn($($oarg: $otype),*) $(-> $oret)?>,)+
        }

        /// Names of the functions that every library has.
        pub const REQUIRED_SYMBOLS: &[&str] = &[$(stringify!($rname)),+];

        impl Functions {
            /// Fills the table from `find`, which returns the address of a function, never null.
            ///
            /// The error is the name of a missing function that every library has.
            ///
            /// # Safety
            /// Every address is that of a function of the header with the name asked for, and stays
            /// so for as long as the process runs.
            #[allow(unsafe_code)]
            #[allow(non_snake_case, reason = "the names of the header")]
            pub(crate) unsafe fn fill(
                find: impl Fn(&CStr) -> Option<*mut c_void>,
            ) -> Result<Self, &'static str> {
                $(
                    let $rname = {
                        type Function = unsafe extern "C" fn($($rtype),*) $(-> $rret)?;
                        let name = concat!(stringify!($rname), "\0");
                        let address = find(c_name(name)).ok_or(stringify!($rname))?;
                        // SAFETY: a function pointer has the size of an address, and the caller
                        // promises that this is the function with the signature declared here.
                        unsafe { core::mem::transmute::<*mut c_void, Function>(address) }
                    };
                )+
                $(
                    let $oname = {
                        type Function = unsafe extern "C" fn($($otype),*) $(-> $oret)?;
                        let name = concat!(stringify!($oname), "\0");
                        find(c_name(name)).map(|address| {
                            // SAFETY: as above.
                            unsafe { core::mem::transmute::<*mut c_void, Function>(address) }
                        })
                    };
                )+
                Ok(Self { $($rname,)+ $($oname,)+ })
            }
        }
    };
}

/// A name that `concat!` has ended with its only NUL.
fn c_name(name: &'static str) -> &'static CStr {
    CStr::from_bytes_with_nul(name.as_bytes()).unwrap_or_default()
}

functions! {
    required {
        /// Creates an engine; null on failure. `metadata_conn_string`, `local_server_name` and
        /// `ip_or_host_name` must not be null; the last and `rpc_port` are ignored. An unknown metadata scheme ends the process.
        fn createTransferEngine(
            metadata_conn_string: *const c_char,
            local_server_name: *const c_char,
            ip_or_host_name: *const c_char,
            rpc_port: u64,
            auto_discover: c_int
        ) -> *mut Engine;
        /// Destroys an engine, or does nothing for null. Takes up to 5 s. No other call may be running, and
        /// none may follow.
        fn destroyTransferEngine(engine: *mut Engine);
        /// Writes host and port, cut to `buf_len` bytes with the NUL. IPv6 addresses have no brackets.
        fn getLocalIpAndPort(engine: *mut Engine, buf_out: *mut c_char, buf_len: usize) -> c_int;
        /// Installs a transport; null on failure. `args` is null, or holds the matrix of devices and null.
        fn installTransport(
            engine: *mut Engine,
            proto: *const c_char,
            args: *mut *mut c_void
        ) -> *mut Transport;
        /// Does nothing.
        fn uninstallTransport(engine: *mut Engine, proto: *const c_char) -> c_int;
        /// Registers memory. The library does not check that it is mapped, nor that it does not wrap.
        fn registerLocalMemory(
            engine: *mut Engine,
            addr: *mut c_void,
            length: usize,
            location: *const c_char,
            remote_accessible: c_int
        ) -> c_int;
        /// Forgets memory. Requests of peers that are running go on.
        fn unregisterLocalMemory(engine: *mut Engine, addr: *mut c_void) -> c_int;
        /// Registers all of `buffer_list`, or none.
        fn registerLocalMemoryBatch(
            engine: *mut Engine,
            buffer_list: *mut BufferEntry,
            buffer_len: usize,
            location: *const c_char
        ) -> c_int;
        /// Forgets memory. If one address is unknown, the others are lost for the life of the engine.
        fn unregisterLocalMemoryBatch(
            engine: *mut Engine,
            addr_list: *mut *mut c_void,
            addr_len: usize
        ) -> c_int;
        /// Opens a segment; -1 on failure. May take a minute.
        fn openSegment(engine: *mut Engine, segment_name: *const c_char) -> SegmentId;
        /// As `openSegment`, and fetches a descriptor that is known already once more.
        fn openSegmentNoCache(engine: *mut Engine, segment_name: *const c_char) -> SegmentId;
        /// Does nothing.
        fn closeSegment(engine: *mut Engine, segment_id: SegmentId) -> c_int;
        /// Forgets a segment. Given the engine's own name, the next registration ends the process.
        fn removeLocalSegment(engine: *mut Engine, segment_name: *const c_char) -> c_int;
        /// Fetches the descriptors of open segments once more.
        fn syncSegmentCache(engine: *mut Engine) -> c_int;
        /// Makes room for `batch_size` requests. An absurd number ends the process.
        fn allocateBatchID(engine: *mut Engine, batch_size: usize) -> BatchId;
        /// Adds requests to a batch. Positive codes; on failure nothing was added. One thread at a time
        /// for each batch.
        fn submitTransfer(
            engine: *mut Engine,
            batch_id: BatchId,
            entries: *mut TransferRequest,
            count: usize
        ) -> c_int;
        /// Says what became of a request. Positive codes.
        fn getTransferStatus(
            engine: *mut Engine,
            batch_id: BatchId,
            task_id: usize,
            status: *mut TransferStatus
        ) -> c_int;
        /// Frees a batch all of whose requests were seen in a final state; else a positive code. The id
        /// must not be used after it returned 0.
        fn freeBatchID(engine: *mut Engine, batch_id: BatchId) -> c_int;
    }
    optional {
        /// As `submitTransfer`, with a notification when all is done. Since 0.3.4.post1. Best not used: the message of a failed batch may go
        /// out with another one.
        fn submitTransferWithNotify(
            engine: *mut Engine,
            batch_id: BatchId,
            entries: *mut TransferRequest,
            count: usize,
            notify_msg: NotifyMsg
        ) -> c_int;
        /// Takes the notifications that have arrived; null with `*size` 0 if there are none. They belong to the
        /// caller until `freeNotifsMsgBuf`. Since 0.3.4.post1.
        fn getNotifsFromEngine(engine: *mut Engine, size: *mut c_int) -> *mut NotifyMsg;
        /// Sends a notification. `target_id` is a segment id, sign-extended. May take a minute. Since 0.3.5.
        fn genNotifyInEngine(engine: *mut Engine, target_id: u64, notify_msg: NotifyMsg) -> c_int;
        /// Gives back what `getNotifsFromEngine` returned, with its length. Since 0.3.6.
        fn freeNotifsMsgBuf(msg: *mut NotifyMsg, size: c_int) -> c_int;
        /// Finds the devices of the machine. Since 0.3.10.post2.
        fn discoverTopology(engine: *mut Engine) -> c_int;
        /// Prepares an EFA connection. Since 0.3.10.post2.
        fn warmupEfaSegment(engine: *mut Engine, segment_name: *const c_char) -> c_int;
        /// Writes an inventory of RDMA links, as text or as JSON. Since 0.3.12.
        fn showLinks(engine: *mut Engine, buf: *mut c_char, buf_len: usize, json: c_int) -> c_int;
        /// Installs handlers of SIGTERM and SIGINT for the whole process. Since 0.3.12. A library must
        /// not call it.
        fn enableGracefulShutdown(engine: *mut Engine);
        /// Writes the load of up to `*count` devices, and how many there are. Since 0.3.12.
        fn getNicLoadStats(engine: *mut Engine, stats: *mut NicLoadStat, count: *mut usize) -> c_int;
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    extern "C" fn nothing() {}

    /// Fills a table from a library that lacks one function.
    fn fill_without(missing: &str) -> (Result<Functions, &'static str>, Vec<String>) {
        let asked = RefCell::new(Vec::new());
        let find = |name: &CStr| {
            let name = name.to_str().unwrap();
            asked.borrow_mut().push(name.to_owned());
            (name != missing).then_some(nothing as *mut c_void)
        };
        // SAFETY: nothing of the table is called.
        #[allow(unsafe_code)]
        let functions = unsafe { Functions::fill(find) };
        (functions, asked.into_inner())
    }

    #[test]
    fn the_header_has_27_functions_of_which_18_are_in_every_library() {
        let (functions, asked) = fill_without("none");
        assert!(functions.is_ok());
        assert_eq!(asked.len(), 27);
        assert_eq!(REQUIRED_SYMBOLS.len(), 18);
        assert_eq!(asked[..18], *REQUIRED_SYMBOLS);
    }

    #[test]
    fn a_missing_function_of_the_18_is_named_and_of_the_rest_is_none() {
        for name in REQUIRED_SYMBOLS {
            assert_eq!(fill_without(name).0.unwrap_err(), *name);
        }
        let functions = fill_without("genNotifyInEngine").0.unwrap();
        assert!(functions.genNotifyInEngine.is_none());
        assert!(functions.getNotifsFromEngine.is_some());
    }
}
