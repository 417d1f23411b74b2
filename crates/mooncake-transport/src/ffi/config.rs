//! How an engine over the library is made, what it allows, and how long it waits.

use std::ffi::{CStr, CString};
use std::time::Duration;

use super::error::{LibraryError, TextProblem};
use crate::error::EngineError;

/// Longest text passed to the library but for messages, in bytes.
const TEXT_BYTES_MAX: usize = 4_096;
/// Longest matrix of devices, in bytes.
const MATRIX_BYTES_MAX: usize = 1 << 20;

/// Where engines find each other.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Metadata {
    /// Peers ask each other: names are `host:port`.
    P2p,
    /// An HTTP store, such as `http://host:8080/metadata`. A library without HTTP ends the process.
    Http(String),
    /// Any other store (`etcd://host:2379`, `redis://host:6379`), not checked. If the library was not built with it,
    /// or the text is wrong, the library ends the process.
    Unchecked(String),
}

/// What moves the bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Transport {
    /// TCP.
    Tcp,
    /// RDMA, over the devices that the library finds.
    Rdma,
    /// RDMA, over the devices of a matrix: a JSON object that maps a location to preferred and fallback
    /// devices, such as `{"cpu:0":[["mlx5_0"],["mlx5_1"]],"cuda:0":[["mlx5_0"],[]]}`.
    RdmaOver(String),
}

/// Configuration of an [`FfiEngine`](super::FfiEngine).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FfiConfig {
    /// Host that peers are told to dial, with P2P; with a store the name of the engine in it. The library
    /// listens on every address of the machine, whatever it says.
    pub local_name: String,
    /// Where engines find each other. Default P2P.
    pub metadata: Metadata,
    /// What moves the bytes. Default TCP.
    pub transport: Transport,
    /// Location that host memory is registered with: a key of the matrix, or `*`, the default, which lets the
    /// library find out. Device memory is registered with `cuda:` and the device's number.
    pub host_location: String,
    /// Registers memory with [`Access::RemoteRead`](crate::Access::RemoteRead) although the library lets peers write
    /// it as well, which is refused by default.
    pub danger_remote_read_lets_write: bool,
    /// Asks a peer for its descriptor before the library does, and refuses one that would end the process. With P2P
    /// only: with a store nothing is looked at. It costs a connection for each segment that is opened; turn it off for peers
    /// of another protocol than the engine's, or of several, if the library takes that. Default on.
    pub vet_peers: bool,
    /// Bounds of every queue and count.
    pub limits: FfiLimits,
    /// Bounds of every wait.
    pub timeouts: FfiTimeouts,
    device_memory: bool,
}

impl FfiConfig {
    /// TCP and P2P under the host `local_name`, with default limits.
    pub fn new(local_name: impl Into<String>) -> Self {
        Self {
            local_name: local_name.into(),
            metadata: Metadata::P2p,
            transport: Transport::Tcp,
            host_location: "*".to_owned(),
            danger_remote_read_lets_write: false,
            vet_peers: true,
            limits: FfiLimits::default(),
            timeouts: FfiTimeouts::default(),
            device_memory: false,
        }
    }

    /// Lets memory without a host address be registered and transferred: the library is given
    /// [`Memory::address`](slab_memory::Memory::address) as a device pointer.
    ///
    /// # Safety
    /// Each memory without a host address that this engine is given has an address that the library, built for that
    /// kind of device, may read and write for as long as the memory lives.
    #[expect(unsafe_code, reason = "the promise cannot be checked")]
    pub unsafe fn allow_device_memory(mut self) -> Self {
        self.device_memory = true;
        self
    }

    pub(super) fn device_memory(&self) -> bool {
        self.device_memory
    }
}

/// Bounds of queues and counts. A value outside its range is an [`EngineError::Setting`] when the engine
/// is started.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FfiLimits {
    /// Tasks that the library has at a time for one peer, 1 to 1,024; the others wait here. Above some two
    /// thousand a library with its connection pool on does not recover. Default 512.
    pub in_flight_per_peer: usize,
    /// Tasks in one batch, 1 to 2^24. Default 65,536.
    pub batch_tasks_max: usize,
    /// Tasks under way in the engine, `batch_tasks_max` to 2^24. Default 262,144.
    pub tasks_open_max: usize,
    /// Threads that hand tasks to the library, 1 to 64. Without its connection pool the library connects
    /// inside that call, one task after the other, so that a peer that does not answer occupies one of them.
    /// Default 4.
    pub submit_threads: usize,
    /// Calls that may take a minute (opening a segment, notifying) running at a time, 1 to 1,024; each has a thread. Default 64.
    pub calls_max: usize,
}

impl Default for FfiLimits {
    fn default() -> Self {
        Self {
            in_flight_per_peer: 512,
            batch_tasks_max: 65_536,
            tasks_open_max: 262_144,
            submit_threads: 4,
            calls_max: 64,
        }
    }
}

/// Shortest and longest wait that can be configured. A day is as good as for ever.
const WAIT_MIN: Duration = Duration::from_millis(1);
const WAIT_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// Bounds of waits, each from 1 ms to 24 h.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FfiTimeouts {
    /// For a call that opens a segment or notifies. The library's own limit is a minute. Default 70 s.
    pub call: Duration,
    /// For a peer to be asked for its descriptor before the library asks; counts in `call`. Default 10 s.
    pub vet: Duration,
    /// For a task, counted from `submit`, beside the time that its length takes at `min_bytes_per_s`.
    /// Default 60 s.
    pub task: Duration,
    /// Bytes a second that a task has to move on average. From 1 to 1 GiB; default 64 KiB.
    pub min_bytes_per_s: u64,
}

impl Default for FfiTimeouts {
    fn default() -> Self {
        Self {
            call: Duration::from_secs(70),
            vet: Duration::from_secs(10),
            task: Duration::from_secs(60),
            min_bytes_per_s: 64 << 10,
        }
    }
}

impl FfiTimeouts {
    /// Returns how long a task of `len` bytes may take. One that takes longer settles as [`Local::Held`](crate::Local::Held) if
    /// the library has it.
    pub fn task_max(&self, len: u64) -> Duration {
        // Below 1 only before the configuration has been checked.
        let rate = self.min_bytes_per_s.max(1);
        Duration::from_secs(len / rate).saturating_add(self.task)
    }
}

/// The configuration as the library takes it.
pub(super) struct Checked {
    pub(super) metadata: CString,
    pub(super) local_name: CString,
    pub(super) host_location: CString,
    pub(super) matrix: Option<CString>,
}

impl FfiConfig {
    pub(super) fn check(&self) -> Result<Checked, EngineError> {
        let limits = &self.limits;
        let counts = [
            ("in_flight_per_peer", limits.in_flight_per_peer, 1, 1_024),
            ("batch_tasks_max", limits.batch_tasks_max, 1, 1 << 24),
            // Otherwise there are batches of legal length that never can be submitted.
            (
                "tasks_open_max",
                limits.tasks_open_max,
                limits.batch_tasks_max,
                1 << 24,
            ),
            ("submit_threads", limits.submit_threads, 1, 64),
            ("calls_max", limits.calls_max, 1, 1_024),
            (
                "min_bytes_per_s",
                usize::try_from(self.timeouts.min_bytes_per_s).unwrap_or(usize::MAX),
                1,
                1 << 30,
            ),
        ];
        for (setting, value, min, max) in counts {
            if !(min..=max).contains(&value) {
                return Err(EngineError::Setting {
                    setting,
                    value: value as u64,
                    min: min as u64,
                    max: max as u64,
                });
            }
        }
        let timeouts = &self.timeouts;
        let waits = [
            ("call", timeouts.call),
            ("vet", timeouts.vet),
            ("task", timeouts.task),
        ];
        for (setting, wait) in waits {
            if !(WAIT_MIN..=WAIT_MAX).contains(&wait) {
                return Err(EngineError::Setting {
                    setting,
                    value: u64::try_from(wait.as_millis()).unwrap_or(u64::MAX),
                    min: WAIT_MIN.as_millis() as u64,
                    max: WAIT_MAX.as_millis() as u64,
                });
            }
        }
        let metadata = match &self.metadata {
            Metadata::P2p => "P2PHANDSHAKE",
            Metadata::Http(address) => {
                if !address.starts_with("http://") && !address.starts_with("https://") {
                    let address = address.clone();
                    return Err(LibraryError::MetadataScheme { address }.into());
                }
                address
            }
            Metadata::Unchecked(address) => address,
        };
        let matrix = match &self.transport {
            Transport::RdmaOver(matrix) => {
                check_matrix(matrix)?;
                Some(text("the matrix of devices", matrix, MATRIX_BYTES_MAX)?)
            }
            _ => None,
        };
        Ok(Checked {
            metadata: text("the metadata address", metadata, TEXT_BYTES_MAX)?,
            local_name: text("the local name", &self.local_name, TEXT_BYTES_MAX)?,
            host_location: text("the location", &self.host_location, TEXT_BYTES_MAX)?,
            matrix,
        })
    }
}

/// The library ends the process on a matrix whose top level is no object.
fn check_matrix(matrix: &str) -> Result<(), LibraryError> {
    let expected = |expected| Err(LibraryError::Matrix { expected });
    let Ok(value) = serde_json::from_str::<serde_json::Value>(matrix) else {
        return expected("JSON");
    };
    let Some(locations) = value.as_object() else {
        return expected("an object");
    };
    for devices in locations.values() {
        let lists = devices.as_array().map_or(&[][..], Vec::as_slice);
        let are_names = lists.iter().all(|list| {
            list.as_array()
                .is_some_and(|names| names.iter().all(serde_json::Value::is_string))
        });
        if lists.len() != 2 || !are_names {
            return expected("an object of locations, each with two arrays of device names");
        }
    }
    Ok(())
}

/// A text for the library.
pub(super) fn text(what: &'static str, text: &str, max: usize) -> Result<CString, LibraryError> {
    let len = text.len();
    let problem = match CString::new(text) {
        _ if len == 0 => TextProblem::Empty,
        _ if len > max => TextProblem::TooLong { len, max },
        Err(_) => TextProblem::Nul,
        Ok(text) => return Ok(text),
    };
    Err(LibraryError::Text { what, problem })
}

/// The location of device memory.
pub(super) fn device_location(device: u32) -> CString {
    CString::new(format!("cuda:{device}")).unwrap_or_else(|_| CStr::to_owned(c"*"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(change: impl FnOnce(&mut FfiConfig)) -> EngineError {
        let mut config = FfiConfig::new("127.0.0.1");
        change(&mut config);
        config.check().err().expect("refused")
    }

    fn library_error(change: impl FnOnce(&mut FfiConfig)) -> LibraryError {
        match refused(change) {
            EngineError::Library { source } => source,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_default_is_tcp_over_the_handshake() {
        let checked = FfiConfig::new("10.0.0.1").check().unwrap();
        assert_eq!(checked.metadata.as_c_str(), c"P2PHANDSHAKE");
        assert_eq!(checked.local_name.as_c_str(), c"10.0.0.1");
        assert_eq!(checked.host_location.as_c_str(), c"*");
        assert!(checked.matrix.is_none());
    }

    #[test]
    fn more_than_the_library_bears_is_refused() {
        for (change, name) in [
            (
                (|c: &mut FfiConfig| c.limits.in_flight_per_peer = 1_025) as fn(&mut FfiConfig),
                "in_flight_per_peer",
            ),
            (|c| c.limits.in_flight_per_peer = 0, "in_flight_per_peer"),
            (|c| c.limits.tasks_open_max = 5, "tasks_open_max"),
            (|c| c.limits.submit_threads = 0, "submit_threads"),
            (|c| c.timeouts.task = Duration::ZERO, "task"),
            (|c| c.timeouts.call = Duration::MAX, "call"),
            (|c| c.timeouts.min_bytes_per_s = 0, "min_bytes_per_s"),
        ] {
            let error = refused(change);
            assert!(
                matches!(error, EngineError::Setting { setting, .. } if setting == name),
                "{error:?}"
            );
        }
    }

    #[test]
    fn what_would_end_the_process_is_refused() {
        let problem = |change: fn(&mut FfiConfig)| match library_error(change) {
            LibraryError::Text { problem, .. } => problem,
            other => panic!("{other:?}"),
        };
        assert_eq!(problem(|c| c.local_name.clear()), TextProblem::Empty);
        assert_eq!(problem(|c| c.local_name = "a\0b".into()), TextProblem::Nul);
        assert!(matches!(
            problem(|c| c.host_location = "x".repeat(5_000)),
            TextProblem::TooLong { len: 5_000, .. }
        ));
        for address in ["etcd://a:1", "p2phandshake", "", "HTTP"] {
            let error = library_error(|c| c.metadata = Metadata::Http(address.into()));
            assert!(matches!(error, LibraryError::MetadataScheme { .. }));
        }
        for matrix in [
            "[]",
            "\"a\"",
            "{",
            r#"{"cpu:0":[]}"#,
            r#"{"cpu:0":[[1],[]]}"#,
            r#"{"a":5}"#,
        ] {
            let error = library_error(|c| c.transport = Transport::RdmaOver(matrix.into()));
            assert!(matches!(error, LibraryError::Matrix { .. }), "{matrix}");
        }
        let mut config = FfiConfig::new("a");
        config.transport = Transport::RdmaOver(r#"{"cpu:0":[["nic_a"],["nic_b"]]}"#.into());
        assert!(config.check().unwrap().matrix.is_some());
        config.metadata = Metadata::Unchecked("redis://a:1".into());
        assert_eq!(config.check().unwrap().metadata.as_c_str(), c"redis://a:1");
    }
}
