//! Writing one received tensor as a safetensors file.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::json;

use super::header::file_tensor;
use crate::tensor::TensorSpec;

/// Writes `DIR/<sha256>.safetensors` with one tensor named `tensor`, and returns its path.
///
/// `metadata` becomes the file's `__metadata__`. `body` is given the open file and the offset at which the
/// bytes of the tensor begin; it writes them. The file appears under its name only when it is complete;
/// an earlier file of that name is replaced.
///
/// # Errors
/// [`OutputError`]; nothing is left behind but what was there before.
pub fn write_tensor_file<E: std::error::Error + Send + Sync + 'static>(
    dir: &Path,
    sha256: &str,
    tensor: &TensorSpec,
    metadata: &[(&str, &str)],
    body: impl FnOnce(&File, u64) -> Result<(), E>,
) -> Result<PathBuf, OutputError> {
    let len = tensor.len_bytes();
    let Some((dtype, shape)) = file_tensor(tensor) else {
        return Err(OutputError::Unsupported {
            dtype: tensor.dtype().name(),
            shape: tensor.shape().to_vec(),
        });
    };
    let metadata: serde_json::Map<_, _> = metadata
        .iter()
        .map(|&(key, value)| (key.to_owned(), value.into()))
        .collect();
    let mut header = json!({
        "__metadata__": metadata,
        "tensor": { "dtype": dtype, "shape": shape, "data_offsets": [0, len] },
    })
    .to_string();
    // Readers that map the file expect the data to start at a multiple of eight.
    while !header.len().is_multiple_of(8) {
        header.push(' ');
    }

    let path = dir.join(format!("{sha256}.safetensors"));
    let partial = Partial::create(dir, sha256)?;
    let io_error = |source| OutputError::Io {
        path: partial.path.clone(),
        source,
    };
    let mut start = (header.len() as u64).to_le_bytes().to_vec();
    start.extend_from_slice(header.as_bytes());
    let mut file = &partial.file;
    file.write_all(&start).map_err(io_error)?;
    body(&partial.file, start.len() as u64).map_err(|source| OutputError::Body {
        path: partial.path.clone(),
        source: Box::new(source),
    })?;
    fs::rename(&partial.path, &path).map_err(io_error)?;
    partial.keep();
    Ok(path)
}

/// Names tried when killed processes of the same number have left some behind.
const NAMES_TRIED: u32 = 16;

/// A file under a temporary name, removed when dropped.
struct Partial {
    path: PathBuf,
    file: File,
    kept: bool,
}

impl Partial {
    fn create(dir: &Path, sha256: &str) -> Result<Self, OutputError> {
        static SERIAL: AtomicU64 = AtomicU64::new(0);
        let mut tries = 0;
        loop {
            let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
            let path = dir.join(format!(".{sha256}.{}.{serial}.partial", std::process::id()));
            // Only a file of our own: whatever has the name already, a link included, is left alone.
            match OpenOptions::new().write(true).create_new(true).open(&path) {
                Ok(file) => {
                    return Ok(Self {
                        path,
                        file,
                        kept: false,
                    });
                }
                Err(error)
                    if error.kind() == io::ErrorKind::AlreadyExists && tries < NAMES_TRIED =>
                {
                    tries += 1;
                }
                Err(source) => return Err(OutputError::Io { path, source }),
            }
        }
    }

    fn keep(mut self) {
        self.kept = true;
    }
}
impl Drop for Partial {
    fn drop(&mut self) {
        if !self.kept
            && let Err(error) = fs::remove_file(&self.path)
        {
            tracing::warn!(path = ?self.path, %error, "partial file could not be removed");
        }
    }
}

/// Why a received tensor could not be written to a file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OutputError {
    /// The format has no element type for the tensor.
    #[error("safetensors files cannot hold a tensor of dtype {dtype} and shape {shape:?}")]
    Unsupported {
        /// Canonical torch dtype.
        dtype: &'static str,
        /// Its shape.
        shape: Vec<u64>,
    },
    /// The operating system refused, for instance because the disk is full.
    #[error("cannot write {path:?}")]
    Io {
        /// The file under its temporary name.
        path: PathBuf,
        /// The operating system's answer.
        source: io::Error,
    },
    /// The bytes of the tensor could not be written.
    #[error("cannot write {path:?}")]
    Body {
        /// The file under its temporary name.
        path: PathBuf,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::dtype::Dtype;
    use crate::tensor_file::TensorFile;

    fn spec(dtype: &str, shape: &[u64]) -> TensorSpec {
        TensorSpec::new(Dtype::parse(dtype).unwrap(), shape).unwrap()
    }

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(dir)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_written_file_reads_back_with_metadata_and_four_bit_shape() {
        let dir = tempfile::tempdir().unwrap();
        let path = write_tensor_file(
            dir.path(),
            "ab12",
            &spec("float4_e2m1fn_x2", &[2, 3]),
            &[("mm_hash", "m\"\n"), ("transfer_id", "t")],
            |file, offset| file.write_all_at(b"sixsix", offset),
        )
        .unwrap();
        assert_eq!(names(dir.path()), ["ab12.safetensors"]);

        let bytes = fs::read(&path).unwrap();
        let (header_len, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        assert_eq!(header_len % 8, 0);
        let pairs = metadata.metadata().as_ref().unwrap();
        assert_eq!(
            (pairs["mm_hash"].as_str(), pairs["transfer_id"].as_str()),
            ("m\"\n", "t")
        );
        assert_eq!(metadata.info("tensor").unwrap().shape, [2, 6]);

        let file = TensorFile::open(&path).unwrap();
        let [tensor] = file.tensors() else {
            panic!("one tensor expected")
        };
        assert_eq!(
            *file.spec(tensor).unwrap(),
            spec("float4_e2m1fn_x2", &[2, 3])
        );
        assert_eq!(bytes[tensor.range().start as usize..], *b"sixsix");
    }

    #[test]
    fn an_earlier_file_of_the_same_content_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        for transfer in ["one", "two"] {
            write_tensor_file(
                dir.path(),
                "ab",
                &spec("uint8", &[1]),
                &[("transfer_id", transfer)],
                |file, offset| file.write_all_at(b"x", offset),
            )
            .unwrap();
        }
        assert_eq!(names(dir.path()), ["ab.safetensors"]);
        let text = fs::read(dir.path().join("ab.safetensors")).unwrap();
        assert!(String::from_utf8_lossy(&text).contains("two"));
    }

    #[test]
    fn a_link_in_the_place_of_the_temporary_file_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let victim = dir.path().join("victim");
        fs::write(&victim, "precious").unwrap();
        // Whatever serial number the next file of this process gets.
        for serial in 0..12 {
            let name = format!(".cd.{}.{serial}.partial", std::process::id());
            std::os::unix::fs::symlink(&victim, dir.path().join(name)).unwrap();
        }
        let path = write_tensor_file(
            dir.path(),
            "cd",
            &spec("uint8", &[1]),
            &[],
            |file, offset| file.write_all_at(b"x", offset),
        )
        .unwrap();
        assert!(path.is_file());
        assert_eq!(fs::read(&victim).unwrap(), b"precious");
    }

    #[test]
    fn a_failure_leaves_nothing_behind() {
        let dir = tempfile::tempdir().unwrap();
        let failed = write_tensor_file(dir.path(), "ab", &spec("uint8", &[1]), &[], |_, _| {
            Err(io::Error::from(io::ErrorKind::StorageFull))
        });
        assert!(matches!(failed, Err(OutputError::Body { .. })));
        assert!(names(dir.path()).is_empty());

        let unsupported =
            write_tensor_file(dir.path(), "ab", &spec("complex128", &[1]), &[], |_, _| {
                Ok::<_, io::Error>(())
            });
        assert!(matches!(unsupported, Err(OutputError::Unsupported { .. })));

        let missing = dir.path().join("missing");
        let failed = write_tensor_file(&missing, "ab", &spec("uint8", &[1]), &[], |_, _| {
            Ok::<_, io::Error>(())
        });
        assert!(matches!(failed, Err(OutputError::Io { .. })));
    }
}
