//! Names that arrive from the network: transfers, content, reservations.
//!
//! Each is bounded where it is made, so that nothing behind a constructor has to check a length
//! again. Cloning shares the text.

use std::fmt;
use std::sync::Arc;

/// Longest transfer id or content hash, in bytes of UTF-8.
pub const NAME_BYTES_MAX: usize = 1024;

/// Names one push of one item; chosen by the caller, global.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TransferId(Arc<str>);

/// Names content: equal hashes mean equal bytes, shape and element type.
///
/// This is the key of residents.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MmHash(Arc<str>);

/// Names one reservation; every fresh reserve gets another one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ReservationId(u128);

/// A transfer id or content hash is longer than [`NAME_BYTES_MAX`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("name of {len_bytes} bytes is longer than {NAME_BYTES_MAX}")]
pub struct NameTooLong {
    /// Length of the refused name in bytes.
    pub len_bytes: usize,
}

impl TransferId {
    /// Takes a name of at most [`NAME_BYTES_MAX`] bytes; an empty one is allowed.
    ///
    /// # Errors
    /// [`NameTooLong`].
    pub fn new(text: impl Into<Arc<str>>) -> Result<Self, NameTooLong> {
        bounded(text.into()).map(Self)
    }

    /// The name as sent.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl MmHash {
    /// Takes a hash text of at most [`NAME_BYTES_MAX`] bytes; an empty one is allowed.
    ///
    /// # Errors
    /// [`NameTooLong`].
    pub fn new(text: impl Into<Arc<str>>) -> Result<Self, NameTooLong> {
        bounded(text.into()).map(Self)
    }

    /// The hash as sent.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl ReservationId {
    /// Makes an id in the form of a version 4 UUID from 128 random bits.
    pub const fn from_random(bits: u128) -> Self {
        let version = (bits & !(0xf << 76)) | (0x4 << 76);
        Self((version & !(0b11 << 62)) | (0b10 << 62))
    }

    /// Reads 32 lower-case hex digits; any other text names no reservation.
    pub fn parse(text: &str) -> Option<Self> {
        let digits = text.as_bytes();
        if digits.len() != 32
            || !digits
                .iter()
                .all(|d| matches!(d, b'0'..=b'9' | b'a'..=b'f'))
        {
            return None;
        }
        u128::from_str_radix(text, 16).ok().map(Self)
    }
}

fn bounded(text: Arc<str>) -> Result<Arc<str>, NameTooLong> {
    let len_bytes = text.len();
    if len_bytes > NAME_BYTES_MAX {
        return Err(NameTooLong { len_bytes });
    }
    Ok(text)
}

impl fmt::Display for TransferId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for TransferId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TransferId({:?})", &*self.0)
    }
}

impl fmt::Display for MmHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for MmHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MmHash({:?})", &*self.0)
    }
}

impl fmt::Display for ReservationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for ReservationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ReservationId({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reservation_id_is_32_lower_case_hex_digits_and_reads_back() {
        for bits in [0, 1, u128::MAX, 0x1234_5678 << 90] {
            let id = ReservationId::from_random(bits);
            let text = id.to_string();
            assert_eq!(text.len(), 32);
            assert_eq!(&text[12..13], "4");
            assert!(matches!(&text[16..17], "8" | "9" | "a" | "b"));
            assert_eq!(ReservationId::parse(&text), Some(id));
        }
    }

    #[test]
    fn other_spellings_name_no_reservation() {
        let text = ReservationId::from_random(u128::MAX).to_string();
        let wrong = [
            String::new(),
            text.to_uppercase(),
            text[1..].to_owned(),
            format!("{text}0"),
            format!("+{}", &text[1..]),
            format!(" {}", &text[1..]),
        ];
        for text in wrong {
            assert_eq!(ReservationId::parse(&text), None, "{text:?}");
        }
    }

    #[test]
    fn names_of_one_kibibyte_pass_and_longer_ones_do_not() {
        assert!(TransferId::new("x".repeat(1024)).is_ok());
        assert!(MmHash::new("").is_ok());
        let error = MmHash::new("x".repeat(1025)).unwrap_err();
        assert_eq!(error, NameTooLong { len_bytes: 1025 });
    }
}
