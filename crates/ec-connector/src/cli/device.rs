//! `--device`: a pool in the memory of a GPU instead of the host's.

use std::sync::Arc;

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

/// Takes `len` bytes of the device's memory. Whatever fails here is a matter of configuration.
#[cfg(feature = "cuda")]
pub(crate) fn memory(device: DeviceName, len: u64) -> anyhow::Result<Arc<dyn Memory>> {
    use anyhow::Context;
    use slab_cuda::{DeviceSlab, Driver};

    let DeviceName::Cuda(ordinal) = device;
    let opened = Driver::load().and_then(|driver| driver.device(ordinal));
    let opened = opened.with_context(|| format!("--device {device} cannot be used"))?;
    let slab = DeviceSlab::new(&opened, len)
        .with_context(|| format!("{device} has no {len} bytes to give; choose a smaller --pool"))?;
    Ok(Arc::new(slab))
}

/// Says that this program cannot.
#[cfg(not(feature = "cuda"))]
pub(crate) fn memory(device: DeviceName, _len: u64) -> anyhow::Result<Arc<dyn Memory>> {
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

    #[cfg(not(feature = "cuda"))]
    #[test]
    fn a_build_without_cuda_says_how_to_get_one() {
        let error = memory(DeviceName::Cuda(0), 1).err().expect("refused");
        assert!(error.to_string().ends_with("build it with --features cuda"));
    }
}
