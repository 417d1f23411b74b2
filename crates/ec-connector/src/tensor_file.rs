//! Safetensors files: reading tensors as ranges of an open file, and writing one received tensor.
//!
//! A file is never loaded whole. Opening it reads the header only; the bytes of a tensor are read through a
//! bounded buffer, or straight into a slab by whoever sends them.

mod header;
mod write;

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use slab_memory::{HostSlab, SlabError};

use crate::content_hash::{ContentDigest, ContentHasher, fill_hashed};
use crate::tensor::TensorSpec;

pub use header::{HeaderError, UnsupportedTensor};
pub use write::{OutputError, write_tensor_file};

/// An open safetensors file whose header has been checked.
#[derive(Debug, Clone)]
pub struct TensorFile {
    path: PathBuf,
    file: Arc<File>,
    tensors: Vec<FileTensor>,
}

impl TensorFile {
    /// Opens `path` and checks its header against the file's length.
    ///
    /// # Errors
    /// [`TensorFileError`]: the file is missing, unreadable, not a regular file, or no safetensors file.
    ///
    /// # Complexity
    /// Reads the header only, at most 100 MB.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, TensorFileError> {
        let path = path.as_ref();
        let io_error = |call| {
            let path = path.to_owned();
            move |source| TensorFileError::Io { path, call, source }
        };
        // Asked before opening: opening a pipe would block until somebody writes to it.
        if !std::fs::metadata(path).map_err(io_error("open"))?.is_file() {
            return Err(TensorFileError::NotAFile {
                path: path.to_owned(),
            });
        }
        let file = File::open(path).map_err(io_error("open"))?;
        let file_len = file.metadata().map_err(io_error("read"))?.len();
        let invalid = |source| TensorFileError::Header {
            path: path.to_owned(),
            source,
        };
        if file_len < 8 {
            return Err(invalid(HeaderError::TooShort { len: file_len }));
        }
        let mut prefix = [0; 8];
        file.read_exact_at(&mut prefix, 0)
            .map_err(io_error("read"))?;
        let header_len = u64::from_le_bytes(prefix);
        if header_len > header::HEADER_LEN_MAX {
            return Err(invalid(HeaderError::TooLong { len: header_len }));
        }
        let data_start = 8 + header_len;
        if data_start > file_len {
            return Err(invalid(HeaderError::Truncated {
                end: data_start,
                file_len,
            }));
        }
        // At most `HEADER_LEN_MAX`, and no more than the file holds.
        let mut json = vec![0; header_len as usize];
        file.read_exact_at(&mut json, 8).map_err(io_error("read"))?;
        let tensors = header::parse_header(&json, file_len - data_start)
            .map_err(invalid)?
            .into_iter()
            .map(|entry| FileTensor {
                name: entry.name,
                spec: entry.spec,
                range: data_start + entry.start..data_start + entry.end,
            })
            .collect();
        Ok(Self {
            path: path.to_owned(),
            file: Arc::new(file),
            tensors,
        })
    }

    /// The path the file was opened under.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The open file, for reading tensor ranges straight into a slab.
    pub fn file(&self) -> &Arc<File> {
        &self.file
    }

    /// The tensors in the order of their bytes.
    pub fn tensors(&self) -> &[FileTensor] {
        &self.tensors
    }

    /// Hashes the bytes of `tensor` as content of its shape and type.
    ///
    /// The file may change afterwards. Whoever sends its bytes under this digest compares what is sent
    /// ([`Source::File`](crate::Source::File) can), or uses [`load`](Self::load).
    ///
    /// # Errors
    /// [`TensorFileError::Unsupported`] for a tensor that cannot be sent; [`TensorFileError::Io`] if the file
    /// cannot be read or has become shorter since it was opened.
    ///
    /// # Complexity
    /// Reads the tensor once through a buffer of 1 MiB.
    pub fn digest(&self, tensor: &FileTensor) -> Result<ContentDigest, TensorFileError> {
        let mut hasher = ContentHasher::new(self.spec(tensor)?);
        let mut buffer = vec![0; tensor.len().min(READ_BUFFER) as usize];
        let mut offset = tensor.range.start;
        while offset < tensor.range.end {
            let len = (tensor.range.end - offset).min(READ_BUFFER);
            let chunk = &mut buffer[..len as usize];
            self.file
                .read_exact_at(chunk, offset)
                .map_err(|source| TensorFileError::Io {
                    path: self.path.clone(),
                    call: "read",
                    source,
                })?;
            hasher.update(chunk);
            offset += len;
        }
        Ok(hasher.finish())
    }

    /// Reads the bytes of `tensor` into `slab`, from byte `start` of it on, and hashes them there: bytes and digest
    /// belong together, whatever happens to the file, as long as nobody else writes to that part of the slab.
    ///
    /// # Errors
    /// As [`digest`](Self::digest); [`TensorFileError::Slab`] if the slab does not have these bytes.
    ///
    /// # Complexity
    /// Reads the tensor once, and copies it once in pieces that stay in cache.
    pub fn load(
        &self,
        tensor: &FileTensor,
        slab: &HostSlab,
        start: u64,
    ) -> Result<ContentDigest, TensorFileError> {
        let mut hasher = ContentHasher::new(self.spec(tensor)?);
        let read = fill_hashed(
            slab,
            start..start.saturating_add(tensor.len()),
            &self.file,
            tensor.range.start,
            |piece| hasher.update(piece),
        );
        read.map_err(|source| TensorFileError::Slab {
            path: self.path.clone(),
            source,
        })?;
        Ok(hasher.finish())
    }

    /// Shape and type of `tensor` as they are sent.
    ///
    /// # Errors
    /// [`TensorFileError::Unsupported`] if they cannot be sent.
    pub fn spec<'a>(&self, tensor: &'a FileTensor) -> Result<&'a TensorSpec, TensorFileError> {
        tensor
            .spec
            .as_ref()
            .map_err(|source| TensorFileError::Unsupported {
                path: self.path.clone(),
                name: tensor.name.clone(),
                source: source.clone(),
            })
    }
}

/// One tensor of a [`TensorFile`].
#[derive(Debug, Clone)]
pub struct FileTensor {
    name: String,
    spec: Result<TensorSpec, UnsupportedTensor>,
    range: Range<u64>,
}

impl FileTensor {
    /// The name as the file gives it: any text, not a safe file name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The tensor's bytes, as offsets from the start of the file.
    pub fn range(&self) -> Range<u64> {
        self.range.clone()
    }

    /// Number of bytes.
    pub fn len(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// Whether the tensor has no bytes.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }
}

/// Why a safetensors file, or one tensor of it, cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TensorFileError {
    /// The operating system refused; a file that has become shorter gives an unexpected end of file.
    #[error("cannot {call} {path:?}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What was tried.
        call: &'static str,
        /// The operating system's answer.
        source: io::Error,
    },
    /// A directory, a pipe or a device.
    #[error("{path:?} is not a regular file; give the path of a safetensors file")]
    NotAFile {
        /// The path.
        path: PathBuf,
    },
    /// No safetensors file, or a damaged one.
    #[error("{path:?} is not a usable safetensors file")]
    Header {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: HeaderError,
    },
    /// The tensor's bytes could not be read into memory; a file that has become shorter ends early.
    #[error("cannot read {path:?}")]
    Slab {
        /// The file.
        path: PathBuf,
        /// What went wrong.
        source: SlabError,
    },
    /// The tensor's element type cannot be sent.
    #[error("tensor {name:?} of {path:?} cannot be sent")]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Why.
        source: UnsupportedTensor,
    },
}

/// Bytes read from a file at a time: large enough to amortise the call, small enough to stay in cache.
const READ_BUFFER: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::dtype::Dtype;

    fn spec(dtype: Dtype, shape: &[u64]) -> TensorSpec {
        TensorSpec::new(dtype, shape).unwrap()
    }

    fn file_with(bytes: &[u8]) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        file
    }

    fn safetensors(header: &str, data: &[u8]) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes.extend_from_slice(data);
        bytes
    }

    fn header_error(bytes: &[u8]) -> HeaderError {
        match TensorFile::open(file_with(bytes).path()) {
            Err(TensorFileError::Header { source, .. }) => source,
            other => panic!("expected a header error, got {other:?}"),
        }
    }

    #[test]
    fn tensors_are_ranges_of_the_file_and_hash_like_their_bytes() {
        let header = r#"{"x":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"y":{"dtype":"I8","shape":[0],"data_offsets":[3,3]}}"#;
        let file = file_with(&safetensors(header, b"abc"));
        let file = TensorFile::open(file.path()).unwrap();
        let [x, y] = file.tensors() else {
            panic!("two tensors expected")
        };
        assert_eq!(
            (x.name(), x.len(), y.len(), y.is_empty()),
            ("x", 3, 0, true)
        );
        assert_eq!(x.range().start, 8 + header.len() as u64);
        let mut expected = ContentHasher::new(&spec(Dtype::UINT8, &[3]));
        expected.update(b"abc");
        let expected = expected.finish();
        assert_eq!(file.digest(x).unwrap(), expected);
        let slab = HostSlab::new(8).unwrap();
        assert_eq!(file.load(x, &slab, 5).unwrap(), expected);
        let mut bytes = [0; 3];
        slab.copy_out(5, &mut bytes).unwrap();
        assert_eq!(&bytes, b"abc");
        assert!(matches!(
            file.load(x, &slab, slab.len() - 2),
            Err(TensorFileError::Slab { .. })
        ));
        assert_eq!(
            file.digest(y).unwrap(),
            ContentHasher::new(&spec(Dtype::INT8, &[0])).finish()
        );
    }

    // row: F16
    #[test]
    fn missing_files_directories_and_foreign_bytes_are_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(
            TensorFile::open(dir.path().join("none")),
            Err(TensorFileError::Io { call: "open", .. })
        ));
        assert!(matches!(
            TensorFile::open(dir.path()),
            Err(TensorFileError::NotAFile { .. })
        ));
        assert!(matches!(
            header_error(b""),
            HeaderError::TooShort { len: 0 }
        ));
        assert!(matches!(
            header_error(b"PK\x03\x04 not tensors at all"),
            HeaderError::TooLong { .. }
        ));
        let mut cut = 1000u64.to_le_bytes().to_vec();
        cut.extend_from_slice(b"{}");
        assert!(matches!(
            header_error(&cut),
            HeaderError::Truncated {
                end: 1008,
                file_len: 10
            }
        ));
    }

    // row: F16
    #[test]
    fn a_file_cut_inside_its_data_is_refused_when_opened() {
        let header = r#"{"x":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}"#;
        assert!(matches!(
            header_error(&safetensors(header, b"ab")),
            HeaderError::DataLen {
                described: 3,
                present: 2
            }
        ));
    }

    #[test]
    fn a_file_cut_after_it_was_opened_is_a_read_error() {
        let header = r#"{"x":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}"#;
        let on_disk = file_with(&safetensors(header, b"abc"));
        let file = TensorFile::open(on_disk.path()).unwrap();
        on_disk.as_file().set_len(10).unwrap();
        assert!(matches!(
            file.digest(&file.tensors()[0]),
            Err(TensorFileError::Io { call: "read", .. })
        ));
        assert!(matches!(
            file.load(&file.tensors()[0], &HostSlab::new(8).unwrap(), 0),
            Err(TensorFileError::Slab { .. })
        ));
    }
}
