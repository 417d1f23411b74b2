//! The header of a safetensors file: JSON text to checked tensor entries.
//!
//! Pure: the bytes of the header and the length of the data section go in, entries or a [`HeaderError`] come
//! out. The rules are those of the format's reference implementation: a header of at most 100 MB, offsets that
//! ascend from zero to the end of the file without holes or overlaps, and sizes that agree with shape and type.
//! One rule is softer: an element type this crate does not know makes that tensor unusable, not the file.

use std::collections::{HashMap, HashSet};
use std::fmt;

use serde::Deserialize;
use serde::de::{MapAccess, Visitor};

use crate::dtype::Dtype;
use crate::tensor::{ShapeError, TensorSpec};

/// Longest header that is read, in bytes; the limit of the format's reference implementation.
pub(crate) const HEADER_LEN_MAX: u64 = 100_000_000;

/// What is wrong with a header.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HeaderError {
    /// The file ends before the eight bytes that give the header's length.
    #[error("the file has {len} bytes, fewer than the 8 that give the header's length")]
    TooShort {
        /// Length of the file in bytes.
        len: u64,
    },
    /// The header is longer than any reader of the format accepts.
    #[error("the header would have {len} bytes, more than the format's limit of 100000000")]
    TooLong {
        /// The length the file states, in bytes.
        len: u64,
    },
    /// The file ends inside its header.
    #[error("the header would end at byte {end}, but the file has only {file_len}")]
    Truncated {
        /// Where the header would end.
        end: u64,
        /// Length of the file in bytes.
        file_len: u64,
    },
    /// The header is not the JSON object the format asks for.
    #[error("the header is not a valid safetensors header")]
    Json {
        /// What the JSON parser found, with line and column.
        source: serde_json::Error,
    },
    /// The offsets of a tensor leave a hole, overlap its neighbour or descend.
    #[error(
        "tensor {name:?} claims bytes {start}..{end} where the next tensor must start at {expected}"
    )]
    Offsets {
        /// Name of the tensor.
        name: String,
        /// First byte it claims, relative to the data section.
        start: u64,
        /// End of the bytes it claims.
        end: u64,
        /// Where the tensors before it end.
        expected: u64,
    },
    /// Shape and element type of a tensor do not give the number of bytes it claims.
    #[error(
        "tensor {name:?} claims {claimed} bytes, which its shape and element type {dtype:?} do not give"
    )]
    Size {
        /// Name of the tensor.
        name: String,
        /// Element type as the file writes it.
        dtype: String,
        /// Number of bytes it claims.
        claimed: u64,
    },
    /// The tensors do not cover the data section exactly.
    #[error("{}", data_len_text(*described, *present))]
    DataLen {
        /// Bytes the header describes.
        described: u64,
        /// Bytes that follow the header.
        present: u64,
    },
}

fn data_len_text(described: u64, present: u64) -> String {
    if present < described {
        format!(
            "the file is truncated: {} of the {described} bytes of its tensors are missing",
            described - present
        )
    } else {
        format!(
            "{} bytes follow after the last tensor; the file is damaged, or not only a safetensors file",
            present - described
        )
    }
}

/// Why one tensor of a valid file cannot be sent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UnsupportedTensor {
    /// The element type has no counterpart among the dtypes of the control plane.
    #[error("element type {dtype:?} has no torch dtype; convert the tensor first")]
    Dtype {
        /// Element type as the file writes it.
        dtype: String,
    },
    /// The control plane cannot describe the shape.
    #[error("its shape cannot be sent")]
    Shape(#[source] ShapeError),
    /// A packed four-bit tensor whose last dimension does not fill whole bytes.
    #[error("a four-bit tensor needs an even last dimension, this one has {last}")]
    OddLastDimension {
        /// The last dimension, in four-bit elements.
        last: u64,
    },
}

/// One entry of a header, checked against its neighbours and its size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HeaderEntry {
    pub(crate) name: String,
    /// Shape and type as they are sent, or why they cannot be.
    pub(crate) spec: Result<TensorSpec, UnsupportedTensor>,
    /// Bytes relative to the data section.
    pub(crate) start: u64,
    pub(crate) end: u64,
}

/// Parses the JSON of a header whose data section has `data_len` bytes. Entries come in address order.
///
/// # Complexity
/// O(n log n) in the number of tensors; memory is a small multiple of the header's length, which the caller
/// has bounded by [`HEADER_LEN_MAX`].
pub(crate) fn parse_header(json: &[u8], data_len: u64) -> Result<Vec<HeaderEntry>, HeaderError> {
    let Entries(mut raw) =
        serde_json::from_slice(json).map_err(|source| HeaderError::Json { source })?;
    raw.sort_by_key(|(_, tensor)| tensor.data_offsets);

    let mut expected = 0;
    let mut entries = Vec::with_capacity(raw.len());
    for (name, tensor) in raw {
        let [start, end] = tensor.data_offsets;
        if start != expected || end < start {
            return Err(HeaderError::Offsets {
                name,
                start,
                end,
                expected,
            });
        }
        expected = end;
        let Some(spec) = wire_tensor(&tensor, end - start) else {
            return Err(HeaderError::Size {
                name,
                dtype: tensor.dtype,
                claimed: end - start,
            });
        };
        entries.push(HeaderEntry {
            name,
            spec,
            start,
            end,
        });
    }
    if expected != data_len {
        return Err(HeaderError::DataLen {
            described: expected,
            present: data_len,
        });
    }
    Ok(entries)
}

/// Checks the size of a tensor and describes it. `None`: shape, type and size disagree.
fn wire_tensor(tensor: &RawTensor, len: u64) -> Option<Result<TensorSpec, UnsupportedTensor>> {
    let unsupported = || {
        Some(Err(UnsupportedTensor::Dtype {
            dtype: tensor.dtype.clone(),
        }))
    };
    let Some(element_bits) = element_bits(&tensor.dtype) else {
        // The size of an unknown type cannot be checked; its offsets were.
        return unsupported();
    };
    let elements = tensor
        .shape
        .iter()
        .try_fold(1u64, |product, &dim| product.checked_mul(dim))?;
    let bits = elements.checked_mul(element_bits)?;
    if !bits.is_multiple_of(8) || bits / 8 != len {
        return None;
    }
    let Some(name) = torch_dtype(&tensor.dtype) else {
        return unsupported();
    };
    let Ok(dtype) = Dtype::parse(name) else {
        return unsupported();
    };
    let mut shape = tensor.shape.clone();
    if name == PACKED_F4
        && let Some(last) = shape.last_mut()
    {
        // Two elements share a byte and torch counts bytes in the last dimension.
        if *last % 2 != 0 {
            return Some(Err(UnsupportedTensor::OddLastDimension { last: *last }));
        }
        *last /= 2;
    }
    Some(TensorSpec::new(dtype, shape).map_err(UnsupportedTensor::Shape))
}

const PACKED_F4: &str = "float4_e2m1fn_x2";

/// Element types of the format and the torch dtypes that hold the same bytes.
const DTYPES: &[(&str, &str, u64)] = &[
    ("BOOL", "bool", 8),
    ("F4", PACKED_F4, 4),
    ("U8", "uint8", 8),
    ("I8", "int8", 8),
    ("F8_E5M2", "float8_e5m2", 8),
    ("F8_E4M3", "float8_e4m3fn", 8),
    ("F8_E8M0", "float8_e8m0fnu", 8),
    ("F8_E4M3FNUZ", "float8_e4m3fnuz", 8),
    ("F8_E5M2FNUZ", "float8_e5m2fnuz", 8),
    ("I16", "int16", 16),
    ("U16", "uint16", 16),
    ("F16", "float16", 16),
    ("BF16", "bfloat16", 16),
    ("I32", "int32", 32),
    ("U32", "uint32", 32),
    ("F32", "float32", 32),
    ("C64", "complex64", 64),
    ("F64", "float64", 64),
    ("I64", "int64", 64),
    ("U64", "uint64", 64),
];

/// Bits of an element of the type `name`, `None` for a type the format does not define.
fn element_bits(name: &str) -> Option<u64> {
    if matches!(name, "F6_E2M3" | "F6_E3M2") {
        return Some(6);
    }
    DTYPES
        .iter()
        .find(|(file, _, _)| *file == name)
        .map(|&(_, _, bits)| bits)
}

fn torch_dtype(name: &str) -> Option<&'static str> {
    DTYPES
        .iter()
        .find(|(file, _, _)| *file == name)
        .map(|&(_, torch, _)| torch)
}

/// The element type and shape under which the format stores a tensor.
///
/// The inverse of what reading does: a packed four-bit tensor gets its last dimension doubled. `None` if the
/// format has no such type, or if the doubled dimension does not fit.
pub(crate) fn file_tensor(spec: &TensorSpec) -> Option<(&'static str, Vec<u64>)> {
    let name = spec.dtype().name();
    let &(file, _, _) = DTYPES.iter().find(|(_, torch, _)| *torch == name)?;
    let mut shape = spec.shape().to_vec();
    if name == PACKED_F4 {
        let last = shape.last_mut()?;
        *last = last.checked_mul(2)?;
    }
    Some((file, shape))
}

#[derive(Deserialize)]
struct RawTensor {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// The header's object in file order, without `__metadata__`; a name that comes twice is an error.
struct Entries(Vec<(String, RawTensor)>);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct EntriesVisitor;
        impl<'de> Visitor<'de> for EntriesVisitor {
            type Value = Entries;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                let mut seen = HashSet::new();
                let mut entries = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<HashMap<String, String>>()?;
                        continue;
                    }
                    if !seen.insert(name.clone()) {
                        return Err(serde::de::Error::custom(format_args!(
                            "tensor {name:?} is described twice"
                        )));
                    }
                    let tensor = map.next_value()?;
                    entries.push((name, tensor));
                }
                Ok(Entries(entries))
            }
        }
        deserializer.deserialize_map(EntriesVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(dtype: &str, shape: &[u64]) -> TensorSpec {
        TensorSpec::new(Dtype::parse(dtype).unwrap(), shape).unwrap()
    }

    fn parse(json: &str, data_len: u64) -> Result<Vec<HeaderEntry>, HeaderError> {
        parse_header(json.as_bytes(), data_len)
    }

    #[test]
    fn entries_come_in_address_order_whatever_the_order_of_names() {
        let entries = parse(
            r#"{"__metadata__":{"format":"pt"},
                "b":{"dtype":"BF16","shape":[2,3],"data_offsets":[4,16]},
                "a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}  "#,
            16,
        )
        .unwrap();
        let names: Vec<_> = entries.iter().map(|e| e.name.as_str()).collect();
        assert_eq!(names, ["a", "b"]);
        assert_eq!(entries[0].spec, Ok(spec("float32", &[])));
        assert_eq!(entries[1].spec, Ok(spec("bfloat16", &[2, 3])));
        assert_eq!((entries[1].start, entries[1].end), (4, 16));
    }

    #[test]
    fn four_bit_tensors_count_bytes_in_their_last_dimension_and_come_back() {
        let entries = parse(
            r#"{"q":{"dtype":"F4","shape":[3,8],"data_offsets":[0,12]}}"#,
            12,
        )
        .unwrap();
        let packed = entries[0].spec.clone().unwrap();
        assert_eq!(packed, spec("float4_e2m1fn_x2", &[3, 4]));
        assert_eq!(file_tensor(&packed), Some(("F4", vec![3, 8])));
        assert_eq!(file_tensor(&spec("float4_e2m1fn_x2", &[])), None);
        assert_eq!(file_tensor(&spec("float4_e2m1fn_x2", &[u64::MAX])), None);

        let odd = parse(
            r#"{"q":{"dtype":"F4","shape":[2,3],"data_offsets":[0,3]}}"#,
            3,
        )
        .unwrap();
        assert_eq!(
            odd[0].spec,
            Err(UnsupportedTensor::OddLastDimension { last: 3 })
        );
    }

    #[test]
    fn an_element_type_without_a_torch_dtype_spoils_its_tensor_alone() {
        let entries = parse(
            r#"{"six":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]},
                "new":{"dtype":"F3","shape":[4],"data_offsets":[3,9]},
                "ok":{"dtype":"U8","shape":[1],"data_offsets":[9,10]}}"#,
            10,
        )
        .unwrap();
        assert!(matches!(
            entries[0].spec,
            Err(UnsupportedTensor::Dtype { .. })
        ));
        assert!(matches!(
            entries[1].spec,
            Err(UnsupportedTensor::Dtype { .. })
        ));
        assert_eq!(entries[2].spec, Ok(spec("uint8", &[1])));
    }

    #[test]
    fn every_type_of_the_table_is_found_again_from_its_torch_dtype() {
        for &(file, torch, bits) in DTYPES {
            assert_eq!(torch_dtype(file), Some(torch));
            assert_eq!(element_bits(file), Some(bits));
            assert_eq!(file_tensor(&spec(torch, &[2])).unwrap().0, file);
        }
        assert_eq!(file_tensor(&spec("complex128", &[2])), None);
    }

    #[test]
    fn a_shape_of_too_many_dimensions_spoils_its_tensor_alone() {
        let dims = vec!["1"; 65].join(",");
        let json = format!(r#"{{"x":{{"dtype":"U8","shape":[{dims}],"data_offsets":[0,1]}}}}"#);
        let entries = parse(&json, 1).unwrap();
        assert!(matches!(entries[0].spec, Err(UnsupportedTensor::Shape(_))));
    }

    #[test]
    fn holes_overlaps_and_descending_offsets_are_refused() {
        let hole = r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}"#;
        assert!(matches!(
            parse(hole, 2),
            Err(HeaderError::Offsets { expected: 0, .. })
        ));
        let overlap = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},
                          "b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}"#;
        assert!(matches!(
            parse(overlap, 6),
            Err(HeaderError::Offsets { expected: 4, .. })
        ));
        let descending = r#"{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},
                             "b":{"dtype":"U8","shape":[0],"data_offsets":[1,0]}}"#;
        assert!(matches!(
            parse(descending, 0),
            Err(HeaderError::Offsets { .. })
        ));
    }

    #[test]
    fn sizes_that_shape_and_type_do_not_give_are_refused_without_overflow() {
        for (json, len) in [
            (
                r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}"#,
                4,
            ),
            (
                r#"{"a":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]}}"#,
                0,
            ),
            (
                r#"{"a":{"dtype":"U64","shape":[2305843009213693952],"data_offsets":[0,0]}}"#,
                0,
            ),
            (
                r#"{"a":{"dtype":"F4","shape":[3],"data_offsets":[0,1]}}"#,
                1,
            ),
        ] {
            assert!(
                matches!(parse(json, len), Err(HeaderError::Size { .. })),
                "{json}"
            );
        }
    }

    #[test]
    fn tensors_must_cover_the_data_section_exactly() {
        let json = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
        for (present, says) in [
            (3, "truncated: 1 of the 4 bytes"),
            (9, "5 bytes follow after the last tensor"),
        ] {
            let error = parse(json, present).unwrap_err();
            assert!(error.to_string().contains(says), "{error}");
            assert!(matches!(
                error,
                HeaderError::DataLen {
                    described: 4,
                    present: found,
                } if found == present
            ));
        }
        assert!(parse("{}", 0).unwrap().is_empty());
    }

    #[test]
    fn text_that_is_no_header_is_a_json_error() {
        for json in [
            "",
            "[]",
            "{",
            "nul",
            "\u{1}",
            r#"{"a":1}"#,
            r#"{"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}}"#,
            r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0]}}"#,
            r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#,
        ] {
            assert!(
                matches!(parse(json, 1), Err(HeaderError::Json { .. })),
                "{json}"
            );
        }
        assert!(matches!(
            parse_header(&[0xff, 0xfe], 0),
            Err(HeaderError::Json { .. })
        ));
    }

    #[test]
    fn metadata_must_map_text_to_text_and_deep_nesting_is_no_stack_overflow() {
        let json = format!(
            r#"{{"__metadata__":{}{}}}"#,
            "[".repeat(100_000),
            "]".repeat(100_000)
        );
        assert!(matches!(parse(&json, 0), Err(HeaderError::Json { .. })));
    }
}
