//! The image of one tensor: a safetensors file with one entry, named `tensor`.
//!
//! Eight bytes, little-endian, say how long the JSON header is; the data follow it. A reader asks for
//! the header alone, so the data can stay where they are.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

/// What stands for "no tensor", as one element of [`Dtype::I64`].
pub const NONE_VALUE: i64 = -150_886_311;

/// Longest header accepted, in bytes. A header of one tensor has about a hundred; the rest is room
/// for whatever a writer puts into `__metadata__`.
const HEADER_BYTES_MAX: u64 = 64 << 10;

/// Most dimensions accepted. Frameworks stop at 32 or 64.
const DIMS_MAX: usize = 64;

/// Bytes before the header.
const PREFIX_LEN: u64 = 8;

/// The writer pads the header with spaces to a multiple of this.
const HEADER_ALIGN: usize = 8;

macro_rules! define_dtypes {
    ($($name:ident = $text:literal, $bits:literal, $doc:literal;)*) => {
        /// What an element is. The names are those of the safetensors format.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Dtype {
            $(#[doc = $doc] $name,)*
        }

        impl Dtype {
            /// Every type.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];

            /// Returns the name in the header.
            pub fn name(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }

            /// Returns the type of a name.
            pub fn from_name(name: &str) -> Option<Self> {
                match name { $($text => Some(Self::$name),)* _ => None }
            }

            /// Returns how many bits an element has.
            pub fn bits(self) -> u64 {
                match self { $(Self::$name => $bits,)* }
            }
        }
    };
}

define_dtypes! {
    Bool = "BOOL", 8, "A byte that is 0 or 1.";
    F4 = "F4", 4, "Four bits, MX format; two to a byte.";
    F6E2M3 = "F6_E2M3", 6, "Six bits, MX format; four to three bytes.";
    F6E3M2 = "F6_E3M2", 6, "Six bits, MX format; four to three bytes.";
    U8 = "U8", 8, "Unsigned, 8 bits.";
    I8 = "I8", 8, "Signed, 8 bits.";
    F8E5M2 = "F8_E5M2", 8, "Floating point, 8 bits.";
    F8E4M3 = "F8_E4M3", 8, "Floating point, 8 bits.";
    F8E8M0 = "F8_E8M0", 8, "A scale, 8 bits.";
    F8E4M3Fnuz = "F8_E4M3FNUZ", 8, "Floating point, 8 bits, without negative zero.";
    F8E5M2Fnuz = "F8_E5M2FNUZ", 8, "Floating point, 8 bits, without negative zero.";
    I16 = "I16", 16, "Signed, 16 bits.";
    U16 = "U16", 16, "Unsigned, 16 bits.";
    F16 = "F16", 16, "Floating point, 16 bits.";
    Bf16 = "BF16", 16, "Floating point, 16 bits, eight of them exponent.";
    I32 = "I32", 32, "Signed, 32 bits.";
    U32 = "U32", 32, "Unsigned, 32 bits.";
    F32 = "F32", 32, "Floating point, 32 bits.";
    C64 = "C64", 64, "Complex, two parts of 32 bits.";
    F64 = "F64", 64, "Floating point, 64 bits.";
    I64 = "I64", 64, "Signed, 64 bits.";
    U64 = "U64", 64, "Unsigned, 64 bits.";
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Why bytes are no image of a tensor, or a tensor has no image.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// The image ends before its header does.
    #[error("an image of {len} bytes, whose header would end at {header_end}")]
    Truncated {
        /// Bytes of the image.
        len: u64,
        /// Bytes it would need for the header alone.
        header_end: u64,
    },
    /// The header is longer than is read.
    #[error("a header of {len} bytes, more than {max}")]
    HeaderTooLong {
        /// Bytes of the header.
        len: u64,
        /// Bytes accepted.
        max: u64,
    },
    /// The header is not JSON of one tensor named `tensor`.
    #[error("the header does not describe one tensor named \"tensor\"")]
    Header,
    /// The element type is not known.
    #[error("elements of unknown type {name:?}")]
    Dtype {
        /// The name, cut off if it is long.
        name: String,
    },
    /// There are more dimensions than are accepted.
    #[error("{dims} dimensions, more than {max}")]
    TooManyDims {
        /// Dimensions.
        dims: usize,
        /// Dimensions accepted.
        max: usize,
    },
    /// The bytes of a tensor of this shape cannot be counted, or are no whole number.
    #[error("a shape whose bytes cannot be counted")]
    Shape,
    /// The data are not where and as many as the shape says.
    #[error("data at {start}..{end} in {have} bytes, where the shape needs {need}")]
    DataLen {
        /// First byte of the data, counted from the end of the header.
        start: u64,
        /// End of the data.
        end: u64,
        /// Bytes that follow the header.
        have: u64,
        /// Bytes that the shape needs.
        need: u64,
    },
}

/// Returns how many bytes `shape` takes in elements of `dtype`.
///
/// # Errors
/// [`ImageError::TooManyDims`] and [`ImageError::Shape`].
pub(in crate::pipe) fn data_len(dtype: Dtype, shape: &[u64]) -> Result<u64, ImageError> {
    if shape.len() > DIMS_MAX {
        return Err(ImageError::TooManyDims {
            dims: shape.len(),
            max: DIMS_MAX,
        });
    }
    // With a dimension of zero the product is zero, however large the others are.
    let count = if shape.contains(&0) {
        0
    } else {
        shape
            .iter()
            .try_fold(1_u64, |count, dim| count.checked_mul(*dim))
            .ok_or(ImageError::Shape)?
    };
    let bits = count.checked_mul(dtype.bits()).ok_or(ImageError::Shape)?;
    if bits % 8 == 0 {
        Ok(bits / 8)
    } else {
        Err(ImageError::Shape)
    }
}

/// What the header of an image says.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ImageHead {
    /// What an element is.
    pub dtype: Dtype,
    /// The dimensions; none for a single element.
    pub shape: Vec<u64>,
    /// First byte of the data, counted from the start of the image.
    pub data_start: u64,
    /// Bytes of the data.
    pub data_len: u64,
}

#[derive(Serialize, Deserialize)]
struct RawTensor {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawHeader {
    tensor: RawTensor,
    #[serde(rename = "__metadata__", default, skip_serializing)]
    _metadata: Option<BTreeMap<String, String>>,
}

/// Returns how long the header is, given the first eight bytes of an image of `image_len` bytes.
///
/// # Errors
/// [`ImageError::HeaderTooLong`] and [`ImageError::Truncated`].
pub fn head_len(prefix: [u8; 8], image_len: u64) -> Result<usize, ImageError> {
    let len = u64::from_le_bytes(prefix);
    if len > HEADER_BYTES_MAX {
        return Err(ImageError::HeaderTooLong {
            len,
            max: HEADER_BYTES_MAX,
        });
    }
    let header_end = PREFIX_LEN + len;
    if header_end > image_len {
        return Err(ImageError::Truncated {
            len: image_len,
            header_end,
        });
    }
    // At most `HEADER_BYTES_MAX`.
    Ok(len as usize)
}

impl ImageHead {
    /// Describes the tensor of an image to be written.
    ///
    /// # Errors
    /// [`ImageError::TooManyDims`] and [`ImageError::Shape`].
    pub fn new(dtype: Dtype, shape: &[u64]) -> Result<Self, ImageError> {
        let mut head = Self {
            dtype,
            shape: shape.to_vec(),
            data_start: 0,
            data_len: data_len(dtype, shape)?,
        };
        head.data_start = head.encode().len() as u64;
        if head.data_start.checked_add(head.data_len).is_none() {
            return Err(ImageError::Shape);
        }
        Ok(head)
    }

    /// Returns how many bytes the image has.
    pub fn image_len(&self) -> u64 {
        self.data_start + self.data_len
    }

    /// Returns everything before the data: the length of the header, and the header.
    pub fn encode(&self) -> Vec<u8> {
        let raw = RawHeader {
            tensor: RawTensor {
                dtype: self.dtype.name().to_owned(),
                shape: self.shape.clone(),
                data_offsets: [0, self.data_len],
            },
            _metadata: None,
        };
        // Texts and numbers alone: there is nothing in it that JSON cannot say.
        let mut header = serde_json::to_vec(&raw).unwrap_or_default();
        header.resize(header.len().next_multiple_of(HEADER_ALIGN), b' ');
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.append(&mut header);
        bytes
    }

    /// Reads the header of an image of `image_len` bytes.
    ///
    /// # Errors
    /// [`ImageError`].
    pub fn decode(header: &[u8], image_len: u64) -> Result<Self, ImageError> {
        // The format wants the brace at once, and spaces only after the object.
        if header.first() != Some(&b'{') {
            return Err(ImageError::Header);
        }
        let raw: RawHeader = serde_json::from_slice(header).map_err(|_| ImageError::Header)?;
        let RawTensor {
            dtype,
            shape,
            data_offsets: [start, end],
        } = raw.tensor;
        let dtype = Dtype::from_name(&dtype).ok_or_else(|| ImageError::Dtype {
            name: dtype.chars().take(32).collect(),
        })?;
        let need = data_len(dtype, &shape)?;
        let data_start = PREFIX_LEN + header.len() as u64;
        let have = image_len
            .checked_sub(data_start)
            .ok_or(ImageError::Truncated {
                len: image_len,
                header_end: data_start,
            })?;
        if start != 0 || end != need || have != need {
            return Err(ImageError::DataLen {
                start,
                end,
                have,
                need,
            });
        }
        Ok(Self {
            dtype,
            shape,
            data_start,
            data_len: need,
        })
    }

    /// Says whether this is the form in which "no tensor" is sent.
    pub(in crate::pipe) fn has_form_of_none(&self) -> bool {
        self.dtype == Dtype::I64 && self.shape == [1]
    }
}

/// Returns the image that stands for "no tensor".
pub fn none_image() -> Vec<u8> {
    let head = ImageHead {
        dtype: Dtype::I64,
        shape: vec![1],
        data_start: 0,
        data_len: 8,
    };
    let mut bytes = head.encode();
    bytes.extend_from_slice(&NONE_VALUE.to_le_bytes());
    bytes
}

/// Says whether a reader of the old kind would take the tensor for "no tensor": one element, in any
/// shape, whose value as a number is [`NONE_VALUE`].
pub(in crate::pipe) fn looks_like_none(dtype: Dtype, shape: &[u64], data: &[u8]) -> bool {
    if shape.iter().any(|dim| *dim != 1) {
        return false;
    }
    match dtype {
        Dtype::I64 => data == NONE_VALUE.to_le_bytes(),
        // It fits.
        Dtype::I32 => data == (NONE_VALUE as i32).to_le_bytes(),
        // It is below 2^53, so the conversion is exact.
        Dtype::F64 => data == (NONE_VALUE as f64).to_le_bytes(),
        // In 32 bits of floating point it is rounded to another number; narrower types and unsigned
        // ones cannot hold it.
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn decode(image: &[u8]) -> Result<ImageHead, ImageError> {
        let prefix = image[..8].try_into().unwrap();
        let len = head_len(prefix, image.len() as u64)?;
        ImageHead::decode(&image[8..8 + len], image.len() as u64)
    }

    fn image(header: &str, data: usize) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes.resize(bytes.len() + data, 7);
        bytes
    }

    // row: P4.4
    #[test]
    fn no_tensor_has_exactly_the_eighty_bytes_that_are_documented() {
        let mut expected = vec![0x40, 0, 0, 0, 0, 0, 0, 0];
        let header = br#"{"tensor":{"dtype":"I64","shape":[1],"data_offsets":[0,8]}}"#;
        expected.extend_from_slice(header);
        expected.resize(72, b' ');
        expected.extend_from_slice(&[0x59, 0xA8, 0x01, 0xF7, 0xFF, 0xFF, 0xFF, 0xFF]);
        assert_eq!(none_image(), expected);
        let head = decode(&expected).unwrap();
        assert!(head.has_form_of_none());
        assert!(looks_like_none(head.dtype, &head.shape, &expected[72..]));
    }

    // row: P4.3
    #[test]
    fn headers_of_any_padding_and_with_metadata_are_read() {
        for header in [
            r#"{"tensor":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}"#,
            r#"{"tensor":{"data_offsets":[0,24],"shape":[2,3],"dtype":"F32"}}   "#,
            r#"{"__metadata__":{"format":"pt"},"tensor":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}"#,
        ] {
            let head = decode(&image(header, 24)).unwrap();
            assert_eq!((head.dtype, head.shape), (Dtype::F32, vec![2, 3]));
            assert_eq!(head.data_start, 8 + header.len() as u64);
            assert_eq!(head.data_len, 24);
        }
    }

    // row: P7.15
    #[test]
    fn images_whose_lengths_disagree_are_refused() {
        let header = |shape: &str, offsets: &str| {
            format!(r#"{{"tensor":{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}}}"#)
        };
        let refused = |shape: &str, offsets: &str, data| {
            decode(&image(&header(shape, offsets), data)).unwrap_err()
        };
        for (offsets, data) in [
            ("[0,24]", 23),
            ("[0,24]", 25),
            ("[0,23]", 24),
            ("[1,25]", 25),
            ("[24,0]", 24),
            ("[0,18446744073709551615]", 24),
        ] {
            let error = refused("[2,3]", offsets, data);
            assert!(
                matches!(error, ImageError::DataLen { need: 24, .. }),
                "{error}"
            );
        }
        for shape in ["[4294967296,4294967296]", "[18446744073709551615]"] {
            assert_eq!(refused(shape, "[0,24]", 24), ImageError::Shape);
        }
        let many = format!("[{}1]", "1,".repeat(64));
        assert_eq!(
            refused(&many, "[0,4]", 4),
            ImageError::TooManyDims { dims: 65, max: 64 }
        );
        let zero = decode(&image(&header("[0,18446744073709551615]", "[0,0]"), 0)).unwrap();
        assert_eq!(zero.data_len, 0);
    }

    // row: P7.15
    #[test]
    fn headers_that_describe_no_single_tensor_are_refused() {
        for header in [
            "",
            "{}",
            "[]",
            " {\"tensor\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1]}}",
            r#"{"other":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#,
            r#"{"tensor":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[0],"data_offsets":[1,1]}}"#,
            r#"{"tensor":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"tensor":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#,
            r#"{"tensor":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}}"#,
            r#"{"tensor":{"dtype":"U8","shape":[1],"data_offsets":[0]}}"#,
            r#"{"tensor":{"dtype":"U8","shape":[1]}}"#,
            r#"{"tensor":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}x"#,
        ] {
            assert_eq!(
                decode(&image(header, 1)),
                Err(ImageError::Header),
                "{header}"
            );
        }
        let unknown = r#"{"tensor":{"dtype":"X9","shape":[1],"data_offsets":[0,1]}}"#;
        assert_eq!(
            decode(&image(unknown, 1)),
            Err(ImageError::Dtype { name: "X9".into() })
        );
        let odd = r#"{"tensor":{"dtype":"F4","shape":[3],"data_offsets":[0,1]}}"#;
        assert_eq!(decode(&image(odd, 1)), Err(ImageError::Shape));
    }

    // row: P7.15
    #[test]
    fn headers_that_do_not_fit_are_refused_before_they_are_read() {
        assert_eq!(
            head_len([255; 8], 1 << 40),
            Err(ImageError::HeaderTooLong {
                len: u64::MAX,
                max: HEADER_BYTES_MAX
            })
        );
        for image_len in [0, 8, 71] {
            assert_eq!(
                head_len(64_u64.to_le_bytes(), image_len),
                Err(ImageError::Truncated {
                    len: image_len,
                    header_end: 72
                })
            );
        }
        assert_eq!(head_len(64_u64.to_le_bytes(), 72), Ok(64));
    }

    // row: P7.5
    #[test]
    fn what_an_old_reader_takes_for_no_tensor_is_recognised() {
        let check = |dtype, shape: &[u64], data: &[u8], expected| {
            assert_eq!(
                looks_like_none(dtype, shape, data),
                expected,
                "{dtype} {shape:?}"
            );
        };
        let value = NONE_VALUE;
        for shape in [&[1][..], &[], &[1, 1, 1]] {
            check(Dtype::I64, shape, &value.to_le_bytes(), true);
            check(Dtype::I32, shape, &(value as i32).to_le_bytes(), true);
            check(Dtype::F64, shape, &(value as f64).to_le_bytes(), true);
            check(Dtype::F32, shape, &(value as f32).to_le_bytes(), false);
            check(Dtype::U32, shape, &(value as u32).to_le_bytes(), false);
            check(Dtype::U64, shape, &(value as u64).to_le_bytes(), false);
            check(Dtype::I64, shape, &(value + 1).to_le_bytes(), false);
        }
        check(Dtype::I64, &[2], &[0; 16], false);
        check(Dtype::I64, &[0], &[], false);
        let head = |dtype, shape: &[u64]| ImageHead::new(dtype, shape).unwrap();
        assert!(head(Dtype::I64, &[1]).has_form_of_none());
        assert!(!head(Dtype::I64, &[1, 1]).has_form_of_none());
        assert!(!head(Dtype::I32, &[1]).has_form_of_none());
    }

    #[test]
    fn names_and_types_are_one_to_one() {
        for dtype in Dtype::ALL {
            assert_eq!(Dtype::from_name(dtype.name()), Some(*dtype));
        }
        assert_eq!(Dtype::from_name("F33"), None);
    }

    proptest! {
        // row: P8.1
        #[test]
        fn property_a_head_is_read_as_it_was_written(
            dtype in prop::sample::select(Dtype::ALL), shape in prop::collection::vec(0..9_u64, 0..6),
        ) {
            let Ok(head) = ImageHead::new(dtype, &shape) else {
                prop_assert!(dtype.bits() < 8);
                return Ok(());
            };
            let mut bytes = head.encode();
            prop_assert_eq!(bytes.len() % 8, 0);
            bytes.resize(head.image_len() as usize, 0);
            prop_assert_eq!(decode(&bytes), Ok(head));
        }

        // row: P7.15, P8.4
        #[test]
        fn property_any_header_is_read_or_refused(
            noise in prop::collection::vec(any::<u8>(), 0..80),
            dims in "[0-9,]{0,24}", start in 0..3_u64, end in 0..40_u64, extra in 0..40_usize,
        ) {
            let _ = ImageHead::decode(&noise, noise.len() as u64 + 8);
            let header = format!(
                r#"{{"tensor":{{"dtype":"U16","shape":[{dims}],"data_offsets":[{start},{end}]}}}}"#
            );
            if let Ok(head) = decode(&image(&header, extra)) {
                prop_assert_eq!(head.data_len, extra as u64);
                prop_assert_eq!(start, 0);
                prop_assert_eq!(head.shape.iter().product::<u64>() * 2, extra as u64);
            }
        }
    }
}
