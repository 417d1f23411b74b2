//! Element types as they travel on the control plane.
//!
//! A dtype is named by an attribute of the `torch` module without its `torch.` prefix. Several
//! names mean the same type (`half` and `float16`); [`Dtype`] is always the canonical one, so two
//! peers that spell a type differently still compare equal (row D10).

use std::fmt;

/// An element type, canonicalised.
///
/// # Examples
/// ```
/// use ec_connector::Dtype;
/// let half: Dtype = Dtype::parse("half")?;
/// assert_eq!(half, Dtype::FLOAT16);
/// assert_eq!((half.name(), half.size_bytes()), ("float16", 2));
/// # Ok::<(), ec_connector::UnsupportedDtype>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Dtype(u8);

impl Dtype {
    /// Unsigned 8-bit integers, also the type of raw bytes.
    pub const UINT8: Self = Self::canonical("uint8");
    /// Signed 8-bit integers.
    pub const INT8: Self = Self::canonical("int8");
    /// Truth values, one byte each.
    pub const BOOL: Self = Self::canonical("bool");
    /// 8-bit floats with 4 exponent bits, finite only.
    pub const FLOAT8_E4M3FN: Self = Self::canonical("float8_e4m3fn");
    /// 8-bit floats with 5 exponent bits.
    pub const FLOAT8_E5M2: Self = Self::canonical("float8_e5m2");
    /// 8-bit power-of-two scales.
    pub const FLOAT8_E8M0FNU: Self = Self::canonical("float8_e8m0fnu");
    /// Two 4-bit floats in one byte.
    pub const FLOAT4_E2M1FN_X2: Self = Self::canonical("float4_e2m1fn_x2");
    /// IEEE half precision.
    pub const FLOAT16: Self = Self::canonical("float16");
    /// Brain floats.
    pub const BFLOAT16: Self = Self::canonical("bfloat16");
    /// Signed 16-bit integers.
    pub const INT16: Self = Self::canonical("int16");
    /// Unsigned 16-bit integers.
    pub const UINT16: Self = Self::canonical("uint16");
    /// IEEE single precision.
    pub const FLOAT32: Self = Self::canonical("float32");
    /// Signed 32-bit integers.
    pub const INT32: Self = Self::canonical("int32");
    /// Unsigned 32-bit integers.
    pub const UINT32: Self = Self::canonical("uint32");
    /// IEEE double precision.
    pub const FLOAT64: Self = Self::canonical("float64");
    /// Signed 64-bit integers.
    pub const INT64: Self = Self::canonical("int64");
    /// Unsigned 64-bit integers.
    pub const UINT64: Self = Self::canonical("uint64");
    /// Pairs of single-precision floats.
    pub const COMPLEX64: Self = Self::canonical("complex64");

    /// Reads a name or alias, without the `torch.` prefix.
    ///
    /// # Errors
    /// [`UnsupportedDtype`] for any other text, also for names with other letter case.
    /// # Complexity
    /// O(number of names), at most 66 comparisons.
    pub fn parse(text: &str) -> Result<Self, UnsupportedDtype> {
        let name = ALIASES
            .iter()
            .find(|(alias, _)| *alias == text)
            .map_or(text, |&(_, name)| name);
        let index = TABLE.iter().position(|entry| entry.name == name);
        match index.and_then(|index| u8::try_from(index).ok()) {
            Some(index) => Ok(Self(index)),
            None => Err(UnsupportedDtype::new(text)),
        }
    }

    /// The canonical name, without the `torch.` prefix.
    pub fn name(self) -> &'static str {
        TABLE[usize::from(self.0)].name
    }

    /// Bytes of one element (1, 2, 4, 8 or 16).
    pub fn size_bytes(self) -> u64 {
        TABLE[usize::from(self.0)].size_bytes
    }

    /// Every supported type, each once, by ascending size.
    pub fn all() -> impl Iterator<Item = Self> {
        // The table holds far fewer than 256 entries.
        (0..TABLE.len()).filter_map(|index| u8::try_from(index).ok().map(Self))
    }

    /// Looks a canonical name up at compile time; a misspelt one does not compile.
    const fn canonical(name: &str) -> Self {
        let mut index = 0;
        while index < TABLE.len() {
            if same_bytes(TABLE[index].name.as_bytes(), name.as_bytes()) {
                return Self(index as u8);
            }
            index += 1;
        }
        panic!("not a canonical dtype name");
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Debug for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Dtype({})", self.name())
    }
}

/// The text is not the name of a supported element type.
///
/// Its text is the one a vLLM peer sends for the same mistake.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("Unsupported torch dtype string: '{text}'")]
pub struct UnsupportedDtype {
    text: Box<str>,
}

impl UnsupportedDtype {
    fn new(text: &str) -> Self {
        Self {
            text: text.chars().take(TEXT_CHARS_MAX).collect(),
        }
    }

    /// The text that was refused, cut after 128 characters.
    pub fn text(&self) -> &str {
        &self.text
    }
}

/// A refused name is echoed in the error; this keeps the echo small.
const TEXT_CHARS_MAX: usize = 128;

struct Entry {
    name: &'static str,
    size_bytes: u64,
}

const fn entry(name: &'static str, size_bytes: u64) -> Entry {
    Entry { name, size_bytes }
}

const fn same_bytes(left: &[u8], right: &[u8]) -> bool {
    if left.len() != right.len() {
        return false;
    }
    let mut index = 0;
    while index < left.len() {
        if left[index] != right[index] {
            return false;
        }
        index += 1;
    }
    true
}

/// Names and sizes as torch 2.14 reports them.
const TABLE: &[Entry] = &[
    entry("uint8", 1),
    entry("int8", 1),
    entry("bool", 1),
    entry("float8_e4m3fn", 1),
    entry("float8_e4m3fnuz", 1),
    entry("float8_e5m2", 1),
    entry("float8_e5m2fnuz", 1),
    entry("float8_e8m0fnu", 1),
    entry("float4_e2m1fn_x2", 1),
    entry("uint1", 1),
    entry("uint2", 1),
    entry("uint3", 1),
    entry("uint4", 1),
    entry("uint5", 1),
    entry("uint6", 1),
    entry("uint7", 1),
    entry("int1", 1),
    entry("int2", 1),
    entry("int3", 1),
    entry("int4", 1),
    entry("int5", 1),
    entry("int6", 1),
    entry("int7", 1),
    entry("quint8", 1),
    entry("qint8", 1),
    entry("quint4x2", 1),
    entry("quint2x4", 1),
    entry("bits8", 1),
    entry("bits1x8", 1),
    entry("bits2x4", 1),
    entry("bits4x2", 1),
    entry("float16", 2),
    entry("bfloat16", 2),
    entry("int16", 2),
    entry("uint16", 2),
    entry("bits16", 2),
    entry("float32", 4),
    entry("int32", 4),
    entry("uint32", 4),
    entry("complex32", 4),
    entry("bcomplex32", 4),
    entry("qint32", 4),
    entry("float64", 8),
    entry("int64", 8),
    entry("uint64", 8),
    entry("complex64", 8),
    entry("complex128", 16),
];

/// Alias, then the canonical name it stands for.
const ALIASES: &[(&str, &str)] = &[
    ("half", "float16"),
    ("float", "float32"),
    ("double", "float64"),
    ("short", "int16"),
    ("int", "int32"),
    ("long", "int64"),
    ("chalf", "complex32"),
    ("cfloat", "complex64"),
    ("cdouble", "complex128"),
    ("bit", "uint1"),
];

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, name: &str, size_bytes: u64) {
        let dtype = Dtype::parse(text).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!((dtype.name(), dtype.size_bytes()), (name, size_bytes));
    }

    #[test]
    fn every_canonical_name_reads_back_as_itself_with_its_size() {
        let by_size: [(u64, &str); 5] = [
            (
                1,
                "uint8 int8 bool float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz \
                 float8_e8m0fnu float4_e2m1fn_x2 uint1 uint2 uint3 uint4 uint5 uint6 uint7 int1 \
                 int2 int3 int4 int5 int6 int7 quint8 qint8 quint4x2 quint2x4 bits8 bits1x8 \
                 bits2x4 bits4x2",
            ),
            (2, "float16 bfloat16 int16 uint16 bits16"),
            (4, "float32 int32 uint32 complex32 bcomplex32 qint32"),
            (8, "float64 int64 uint64 complex64"),
            (16, "complex128"),
        ];
        let mut count = 0;
        for (size_bytes, names) in by_size {
            for name in names.split_whitespace() {
                check(name, name, size_bytes);
                count += 1;
            }
        }
        assert_eq!(Dtype::all().count(), count);
    }

    // row: D10
    #[test]
    fn an_alias_is_the_same_type_as_its_canonical_name() {
        for (alias, name, size_bytes) in [
            ("half", "float16", 2),
            ("float", "float32", 4),
            ("double", "float64", 8),
            ("short", "int16", 2),
            ("int", "int32", 4),
            ("long", "int64", 8),
            ("chalf", "complex32", 4),
            ("cfloat", "complex64", 8),
            ("cdouble", "complex128", 16),
            ("bit", "uint1", 1),
        ] {
            check(alias, name, size_bytes);
            assert_eq!(Dtype::parse(alias), Dtype::parse(name));
        }
    }

    #[test]
    fn an_unknown_name_is_refused_with_the_peers_text() {
        let error = Dtype::parse("f32").unwrap_err();
        assert_eq!(error.to_string(), "Unsupported torch dtype string: 'f32'");
        for text in ["", "Float16", "torch.float16", "float16 ", "nn"] {
            assert!(Dtype::parse(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn the_echo_of_a_refused_name_is_bounded() {
        let error = Dtype::parse(&"é".repeat(5000)).unwrap_err();
        assert_eq!(error.text().chars().count(), TEXT_CHARS_MAX);
    }

    #[test]
    fn the_constants_carry_their_names() {
        assert_eq!(Dtype::BFLOAT16.name(), "bfloat16");
        assert_eq!(Dtype::FLOAT4_E2M1FN_X2.size_bytes(), 1);
        assert_eq!(Dtype::COMPLEX64.to_string(), "complex64");
    }
}
