//! Writing one received tensor as a safetensors file.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::json;

use sha2::{Digest, Sha256};

use super::header::file_tensor;
use super::{TensorFile, TensorFileError};
use crate::content_hash::hex;
use crate::tensor::TensorSpec;

/// Writes `DIR/<sha256>.safetensors` with one tensor named `tensor`, and returns its path.
///
/// `metadata` becomes the file's `__metadata__`. `body` is given the open file and the offset at which the
/// bytes of the tensor begin; it writes them. The file appears under its name only when it is complete.
///
/// An earlier file of that name is replaced if it holds the same tensor, or is no readable safetensors file. If
/// it holds another one (equal bytes, but another shape or type), it stays, and the new one becomes
/// `DIR/<sha256>.<dtype>-<shape>.safetensors`, with the torch dtype and the dimensions joined by `x`. Processes
/// that write to one directory do not replace each other's tensors either, where the file system has hard links.
///
/// The file is whole for whoever opens it, but not synced: after a crash of the machine it may be empty.
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
    // It becomes part of a path.
    if sha256.len() != 64 || !sha256.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(OutputError::NotAHash {
            text: sha256.to_owned(),
        });
    }
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
        TENSOR_NAME: { "dtype": dtype, "shape": shape, "data_offsets": [0, len] },
    })
    .to_string();
    // Readers that map the file expect the data to start at a multiple of eight.
    while !header.len().is_multiple_of(8) {
        header.push(' ');
    }

    let mut partial = Partial::create(dir, sha256)?;
    let temporary = partial.path.clone();
    let io_error = |source| OutputError::Io {
        path: temporary.clone(),
        source,
    };
    let mut start = (header.len() as u64).to_le_bytes().to_vec();
    start.extend_from_slice(header.as_bytes());
    partial.file.write_all(&start).map_err(io_error)?;
    body(&partial.file, start.len() as u64).map_err(|source| OutputError::Body {
        path: temporary.clone(),
        source: Box::new(source),
    })?;
    for name in [sha256.to_owned(), typed_name(sha256, tensor)] {
        let path = dir.join(format!("{name}.safetensors"));
        if partial.appear(&path, tensor).map_err(io_error)? {
            return Ok(path);
        }
    }
    Err(OutputError::NamesTaken {
        dir: dir.to_owned(),
        sha256: sha256.to_owned(),
    })
}

/// Name of the tensor in a written file.
const TENSOR_NAME: &str = "tensor";

/// Longest name without its extension; file systems allow 255 bytes in all.
const NAME_LEN_MAX: usize = 200;

/// The name, without its extension, that a tensor gets if `<sha256>` names one of another shape or type.
fn typed_name(sha256: &str, tensor: &TensorSpec) -> String {
    let dims: Vec<_> = tensor.shape().iter().map(u64::to_string).collect();
    let shape = if dims.is_empty() {
        "scalar".to_owned()
    } else {
        dims.join("x")
    };
    let name = format!("{sha256}.{}-{shape}", tensor.dtype().name());
    if name.len() <= NAME_LEN_MAX {
        return name;
    }
    let digest = hex(&Sha256::digest(shape.as_bytes()));
    format!(
        "{sha256}.{}-{}d-{}",
        tensor.dtype().name(),
        dims.len(),
        &digest[..16]
    )
}

/// Names tried when killed processes of the same number have left some behind.
const NAMES_TRIED: u32 = 16;

/// A file under a temporary name, which is removed when dropped.
struct Partial {
    path: PathBuf,
    file: File,
    /// The temporary name has become the final one.
    renamed: bool,
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
                        renamed: false,
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

    /// Gives the complete file the name `path`. False, and nothing changes, if a file of that name holds something
    /// else than `tensor`.
    fn appear(&mut self, path: &Path, tensor: &TensorSpec) -> io::Result<bool> {
        // A link, unlike a renamed file, never takes the place of a file that appears at the same time.
        match fs::hard_link(&self.path, path) {
            Ok(()) => return Ok(true),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            // Not every file system has links. Whatever else is wrong, the rename says so.
            Err(_) if fs::symlink_metadata(path).is_err() => {
                self.rename(path)?;
                return Ok(true);
            }
            Err(_) => {}
        }
        let makes_way = match TensorFile::open(path) {
            Ok(file) => match file.tensors() {
                [found] => {
                    found.name() == TENSOR_NAME && file.spec(found).is_ok_and(|spec| spec == tensor)
                }
                _ => false,
            },
            // It was complete when it got its name, and has been damaged since.
            Err(TensorFileError::Header { .. }) => true,
            Err(_) => false,
        };
        if makes_way {
            self.rename(path)?;
        }
        Ok(makes_way)
    }

    fn rename(&mut self, path: &Path) -> io::Result<()> {
        fs::rename(&self.path, path)?;
        self.renamed = true;
        Ok(())
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.renamed
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
    /// The file is named by a sha256.
    #[error("{text:?} is no sha256: 64 hexadecimal digits are needed")]
    NotAHash {
        /// What was given.
        text: String,
    },
    /// The format has no element type for the tensor.
    #[error("safetensors files cannot hold a tensor of dtype {dtype} and shape {shape:?}")]
    Unsupported {
        /// Canonical torch dtype.
        dtype: &'static str,
        /// Its shape.
        shape: Vec<u64>,
    },
    /// Files of other content have both names that the tensor could have; move one of them away.
    #[error(
        "the names of {sha256} in {dir:?} are taken by files that hold something else; move them away"
    )]
    NamesTaken {
        /// The directory.
        dir: PathBuf,
        /// Digest of the tensor's bytes.
        sha256: String,
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

    /// A digest; the tests call it `ab`.
    const AB: &str = "abababababababababababababababababababababababababababababababab";

    fn shortened(name: &std::ffi::OsStr) -> String {
        name.to_str().unwrap().replace(AB, "ab")
    }

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(dir)
            .unwrap()
            .map(|entry| shortened(&entry.unwrap().file_name()))
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_written_file_reads_back_with_metadata_and_four_bit_shape() {
        let dir = tempfile::tempdir().unwrap();
        let path = write_tensor_file(
            dir.path(),
            AB,
            &spec("float4_e2m1fn_x2", &[2, 3]),
            &[("mm_hash", "m\"\n"), ("transfer_id", "t")],
            |file, offset| file.write_all_at(b"sixsix", offset),
        )
        .unwrap();
        assert_eq!(names(dir.path()), ["ab.safetensors"]);

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
    fn a_name_that_is_no_digest_is_refused_before_anything_is_touched() {
        let dir = tempfile::tempdir().unwrap();
        for name in [
            "",
            "ab",
            "../x",
            &format!("../{}", &AB[3..]),
            &"é".repeat(32),
        ] {
            let refused = write_tensor_file(dir.path(), name, &spec("uint8", &[0]), &[], |_, _| {
                Ok::<_, io::Error>(())
            });
            assert!(
                matches!(refused, Err(OutputError::NotAHash { .. })),
                "{name:?}: {refused:?}"
            );
        }
        assert!(names(dir.path()).is_empty());
    }

    #[test]
    fn an_earlier_file_of_the_same_content_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        for transfer in ["one", "two"] {
            write_tensor_file(
                dir.path(),
                AB,
                &spec("uint8", &[1]),
                &[("transfer_id", transfer)],
                |file, offset| file.write_all_at(b"x", offset),
            )
            .unwrap();
        }
        assert_eq!(names(dir.path()), ["ab.safetensors"]);
        let text = fs::read(dir.path().join(format!("{AB}.safetensors"))).unwrap();
        assert!(String::from_utf8_lossy(&text).contains("two"));
    }

    /// Writes `bytes` under the digest `ab` and returns the name of the file they are in.
    fn write(dir: &Path, dtype: &str, shape: &[u64], bytes: &[u8]) -> Result<String, OutputError> {
        write_tensor_file(dir, AB, &spec(dtype, shape), &[], |file, offset| {
            file.write_all_at(bytes, offset)
        })
        .map(|path| shortened(path.file_name().unwrap()))
    }

    #[test]
    fn equal_bytes_of_another_shape_or_type_get_a_file_of_their_own() {
        let dir = tempfile::tempdir().unwrap();
        let cases: [(&str, &[u64], &str); 6] = [
            ("float32", &[1, 2], "ab.safetensors"),
            ("float32", &[2], "ab.float32-2.safetensors"),
            ("float32", &[2, 1], "ab.float32-2x1.safetensors"),
            ("int64", &[], "ab.int64-scalar.safetensors"),
            ("float16", &[2, 2], "ab.float16-2x2.safetensors"),
            (
                "float4_e2m1fn_x2",
                &[8],
                "ab.float4_e2m1fn_x2-8.safetensors",
            ),
        ];
        // The second round finds its own files again.
        for _ in 0..2 {
            for (dtype, shape, name) in cases {
                assert_eq!(write(dir.path(), dtype, shape, b"eightby.").unwrap(), name);
            }
        }
        assert_eq!(names(dir.path()).len(), cases.len());
        for (dtype, shape, name) in cases {
            let file = TensorFile::open(dir.path().join(name.replace("ab", AB))).unwrap();
            assert_eq!(
                *file.spec(&file.tensors()[0]).unwrap(),
                spec(dtype, shape),
                "{name}"
            );
        }
    }

    #[test]
    fn shapes_too_long_for_a_file_name_are_told_apart_by_their_digest() {
        let dir = tempfile::tempdir().unwrap();
        let long = |last: u64| {
            let mut shape = vec![1_000_000_000_000; 64];
            (shape[0], shape[63]) = (0, last);
            shape
        };
        let names: Vec<_> = [long(1), long(2), long(3)]
            .iter()
            .map(|shape| write(dir.path(), "uint8", shape, b"").unwrap())
            .collect();
        assert_eq!(names[0], "ab.safetensors");
        assert!(names[1].starts_with("ab.uint8-64d-") && names[2].starts_with("ab.uint8-64d-"));
        assert_ne!(names[1], names[2]);
    }

    #[test]
    fn a_damaged_file_is_replaced_and_one_of_foreign_content_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let plain = dir.path().join(format!("{AB}.safetensors"));
        fs::write(&plain, "cut short").unwrap();
        assert_eq!(
            write(dir.path(), "uint8", &[1], b"x").unwrap(),
            "ab.safetensors"
        );
        assert!(TensorFile::open(&plain).is_ok());

        let typed = dir.path().join(format!("{AB}.uint8-1.safetensors"));
        fs::remove_file(&plain).unwrap();
        fs::create_dir(&plain).unwrap();
        fs::create_dir(&typed).unwrap();
        let failed = write(dir.path(), "uint8", &[1], b"x").unwrap_err();
        assert!(matches!(failed, OutputError::NamesTaken { .. }), "{failed}");
        assert_eq!(
            names(dir.path()),
            ["ab.safetensors", "ab.uint8-1.safetensors"]
        );
        fs::remove_dir(&typed).unwrap();
        assert_eq!(
            write(dir.path(), "uint8", &[1], b"x").unwrap(),
            "ab.uint8-1.safetensors"
        );
    }

    #[test]
    fn a_link_in_the_place_of_the_temporary_file_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let victim = dir.path().join("victim");
        fs::write(&victim, "precious").unwrap();
        // Whatever serial number the next file of this process gets.
        for serial in 0..12 {
            let name = format!(".{AB}.{}.{serial}.partial", std::process::id());
            std::os::unix::fs::symlink(&victim, dir.path().join(name)).unwrap();
        }
        let path = write_tensor_file(dir.path(), AB, &spec("uint8", &[1]), &[], |file, offset| {
            file.write_all_at(b"x", offset)
        })
        .unwrap();
        assert!(path.is_file());
        assert_eq!(fs::read(&victim).unwrap(), b"precious");
    }

    #[test]
    fn a_failure_leaves_nothing_behind() {
        let dir = tempfile::tempdir().unwrap();
        let failed = write_tensor_file(dir.path(), AB, &spec("uint8", &[1]), &[], |_, _| {
            Err(io::Error::from(io::ErrorKind::StorageFull))
        });
        assert!(matches!(failed, Err(OutputError::Body { .. })));
        assert!(names(dir.path()).is_empty());

        let unsupported =
            write_tensor_file(dir.path(), AB, &spec("complex128", &[1]), &[], |_, _| {
                Ok::<_, io::Error>(())
            });
        assert!(matches!(unsupported, Err(OutputError::Unsupported { .. })));

        let missing = dir.path().join("missing");
        let failed = write_tensor_file(&missing, AB, &spec("uint8", &[1]), &[], |_, _| {
            Ok::<_, io::Error>(())
        });
        assert!(matches!(failed, Err(OutputError::Io { .. })));
    }
}
