//! `--device`: a pool in the memory of a GPU instead of the host's.

use std::sync::Arc;
use std::time::{Duration, Instant};

use slab_memory::Memory;

/// A device of this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeviceName {
    /// A CUDA device, by its number.
    Cuda(u32),
}

impl std::fmt::Display for DeviceName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// Reads a device from the command line.
pub(crate) fn parse_device(text: &str) -> Result<DeviceName, String> {
    text.strip_prefix("cuda:")
        .filter(|number| number.bytes().all(|byte| byte.is_ascii_digit()))
        .and_then(|number| number.parse().ok())
        .map(DeviceName::Cuda)
        .ok_or_else(|| "a device is cuda: and its number, such as cuda:0".to_owned())
}

/// Memory of a device, and how to see whether the device still works.
pub(crate) struct DeviceMemory {
    pub(crate) memory: Arc<dyn Memory>,
    pub(crate) watch: Watch,
}

/// Looks now and then whether a device works. Copies that fail tell those alone whose bytes they are.
pub(crate) struct Watch {
    device: DeviceName,
    probe: Box<dyn FnMut() -> anyhow::Result<()>>,
    next: Instant,
    failures: u32,
}

/// Between two looks at a device that works.
const WATCH_PERIOD: Duration = Duration::from_secs(1);
/// Looks in a row that have to fail before the device is taken to have failed for good. A fault that stays fails all.
const FAILURES_MAX: u32 = 3;

impl Watch {
    #[cfg_attr(not(any(feature = "cuda", test)), expect(dead_code))]
    fn new(
        device: DeviceName,
        now: Instant,
        probe: impl FnMut() -> anyhow::Result<()> + 'static,
    ) -> Self {
        Self {
            device,
            probe: Box::new(probe),
            next: now + WATCH_PERIOD,
            failures: 0,
        }
    }

    /// Looks, if it is time; at every call once a look has failed.
    ///
    /// # Errors
    /// The device has failed for good.
    pub(crate) fn look(&mut self, now: Instant) -> anyhow::Result<()> {
        if now < self.next && self.failures == 0 {
            return Ok(());
        }
        self.next = now + WATCH_PERIOD;
        let Err(error) = (self.probe)() else {
            self.failures = 0;
            return Ok(());
        };
        self.failures += 1;
        if self.failures >= FAILURES_MAX {
            return Err(error.context(format!("{} has failed", self.device)));
        }
        tracing::warn!(device = %self.device, error = %format_args!("{error:#}"), "a look at the device has failed");
        Ok(())
    }
}

/// What is said about a pool that cannot have its size, on any memory.
pub(crate) const POOL_ADVICE: &str = "choose another --pool size";

/// Takes `len` bytes of the device's memory. Whatever fails here is a matter of configuration.
#[cfg(feature = "cuda")]
pub(crate) fn memory(device: DeviceName, len: u64) -> anyhow::Result<DeviceMemory> {
    use anyhow::Context;
    use ec_connector::ConsumerError;
    use slab_cuda::{CudaError, DeviceSlab, Driver};
    use slab_memory::SlabError;

    if len == 0 {
        let source = SlabError::Empty;
        let error = ConsumerError::Slab { bytes: 0, source };
        return Err(anyhow::Error::new(error).context(POOL_ADVICE));
    }
    let DeviceName::Cuda(ordinal) = device;
    let opened = Driver::load().and_then(|driver| driver.device(ordinal));
    let opened = opened.with_context(|| format!("--device {device} cannot be used"))?;
    let slab = DeviceSlab::new(&opened, len).map_err(|error| {
        let advice = match &error {
            CudaError::Driver { code, .. } if code.number() == OUT_OF_MEMORY as u32 => {
                format!("{device} has no {len} bytes to give; choose a smaller --pool")
            }
            CudaError::InvalidLength { .. } => POOL_ADVICE.to_owned(),
            _ => format!("cannot take {len} bytes of the memory of {device}"),
        };
        anyhow::Error::new(error).context(advice)
    })?;
    let slab: Arc<dyn Memory> = Arc::new(slab);
    let memory = Arc::clone(&slab);
    let probe = move || probe(&opened, &*slab);
    let watch = Watch::new(device, Instant::now(), probe);
    Ok(DeviceMemory { memory, watch })
}

/// `CUDA_ERROR_OUT_OF_MEMORY`.
#[cfg(feature = "cuda")]
const OUT_OF_MEMORY: i32 = 2;

/// Asks the driver something, which fails once the device's context is broken, then copies a byte, as items are copied.
#[cfg(feature = "cuda")]
fn probe(device: &slab_cuda::Device, slab: &dyn Memory) -> anyhow::Result<()> {
    use slab_memory::CopyError;

    device.memory_use()?;
    match slab.copy_out(0, &mut [0]) {
        // The *host* had no pinned buffer for it, which may pass.
        Err(CopyError::Driver {
            code: OUT_OF_MEMORY,
        }) => Ok(()),
        copied => Ok(copied?),
    }
}

/// Says that this program cannot.
#[cfg(not(feature = "cuda"))]
pub(crate) fn memory(device: DeviceName, _len: u64) -> anyhow::Result<DeviceMemory> {
    anyhow::bail!(
        "--device {device} cannot be used: this program was built without CUDA; build it with --features cuda"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_cuda_and_a_number() {
        assert_eq!(parse_device("cuda:0"), Ok(DeviceName::Cuda(0)));
        assert_eq!(parse_device("cuda:17"), Ok(DeviceName::Cuda(17)));
        assert_eq!(DeviceName::Cuda(17).to_string(), "cuda:17");
        for text in [
            "",
            "cuda",
            "cuda:",
            "cuda:-1",
            "cuda:+1",
            "cuda:4294967296",
            "CUDA:0",
            "cpu:0",
            "0",
        ] {
            assert!(parse_device(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_device_has_failed_when_three_looks_in_a_row_have() {
        let start = Instant::now();
        let after = |ms: u64| start + Duration::from_millis(ms);
        let mut answers = [false, true, false, false, true, true, true].into_iter();
        let mut watch = Watch::new(DeviceName::Cuda(3), start, move || {
            if answers.next().expect("asked too often") {
                anyhow::bail!("code 700");
            }
            Ok(())
        });
        assert!(watch.look(after(999)).is_ok(), "not asked yet");
        assert!(watch.look(after(1000)).is_ok());
        assert!(watch.look(after(1900)).is_ok(), "not asked again yet");
        assert!(watch.look(after(2000)).is_ok(), "the first failure");
        assert!(watch.look(after(2001)).is_ok(), "asked again at once");
        assert!(watch.look(after(3000)).is_ok(), "as if nothing had been");
        assert!(watch.look(after(3001)).is_ok());
        for ms in [4001, 4002] {
            assert!(watch.look(after(ms)).is_ok());
        }
        let error = watch.look(after(4003)).unwrap_err();
        assert_eq!(format!("{error:#}"), "cuda:3 has failed: code 700");
    }

    #[cfg(not(feature = "cuda"))]
    #[test]
    fn a_build_without_cuda_says_how_to_get_one() {
        let error = memory(DeviceName::Cuda(0), 1).err().expect("refused");
        assert!(error.to_string().ends_with("build it with --features cuda"));
    }
}
