//! Codes that programs read, beside texts that people read.

use std::fmt;

/// Why a request was refused; travels as the key `code` of an error reply.
///
/// vLLM sends no such key, and its error texts are for people only, so a reply without a code
/// says nothing a program should act on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorCode {
    /// No room now; there may be later.
    PoolFull,
    /// The item is larger than the whole pool.
    TooLarge,
    /// As many reservations as the consumer allows are active.
    TooManyReservations,
    /// The consumer has got all the items it wants; there will never be room for another one.
    NoMoreItems,
    /// The id or the content is in use with another hash, shape or element type.
    Conflict,
    /// The id's earlier writer expired without saying that it is done.
    ActiveWriter,
    /// The consumer is going away.
    ShuttingDown,
    /// Not a request at all: not one frame of JSON with an object in it, or a field of a wrong kind.
    Malformed,
    /// A field that the operation needs is not there.
    MissingField,
    /// No such operation.
    UnknownOp,
    /// Not the name of an element type.
    UnsupportedDtype,
    /// Shape, element type and byte count contradict one another, or no such tensor can exist.
    SizeMismatch,
    /// More items in one batch than the consumer takes.
    TooManyItems,
    /// An id or hash is longer than 1 KiB.
    TooLong,
    /// A fault of the consumer's own.
    Internal,
}

impl ErrorCode {
    /// The code as it travels.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::PoolFull => "pool_full",
            Self::TooLarge => "too_large",
            Self::TooManyReservations => "too_many_reservations",
            Self::NoMoreItems => "no_more_items",
            Self::Conflict => "conflict",
            Self::ActiveWriter => "active_writer",
            Self::ShuttingDown => "shutting_down",
            Self::Malformed => "malformed",
            Self::MissingField => "missing_field",
            Self::UnknownOp => "unknown_op",
            Self::UnsupportedDtype => "unsupported_dtype",
            Self::SizeMismatch => "size_mismatch",
            Self::TooManyItems => "too_many_items",
            Self::TooLong => "too_long",
            Self::Internal => "internal",
        }
    }

    /// Reads a code; nothing for one this version does not know.
    pub fn parse(text: &str) -> Option<Self> {
        ALL.into_iter().find(|code| code.as_str() == text)
    }

    /// Whether the same request may succeed later without anybody changing it.
    pub const fn is_retryable(self) -> bool {
        matches!(
            self,
            Self::PoolFull | Self::TooManyReservations | Self::ActiveWriter | Self::Internal
        )
    }
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

const ALL: [ErrorCode; 15] = [
    ErrorCode::PoolFull,
    ErrorCode::TooLarge,
    ErrorCode::TooManyReservations,
    ErrorCode::NoMoreItems,
    ErrorCode::Conflict,
    ErrorCode::ActiveWriter,
    ErrorCode::ShuttingDown,
    ErrorCode::Malformed,
    ErrorCode::MissingField,
    ErrorCode::UnknownOp,
    ErrorCode::UnsupportedDtype,
    ErrorCode::SizeMismatch,
    ErrorCode::TooManyItems,
    ErrorCode::TooLong,
    ErrorCode::Internal,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_reads_back_and_unknown_ones_are_nothing() {
        for code in ALL {
            assert_eq!(ErrorCode::parse(code.as_str()), Some(code));
        }
        assert_eq!(ErrorCode::parse("Pool_Full"), None);
        assert_eq!(ErrorCode::parse(""), None);
    }
}
