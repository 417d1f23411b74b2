//! Why a request is answered with an error.

use crate::code::ErrorCode;
use crate::dtype::UnsupportedDtype;
use crate::reservation::ReserveError;
use crate::tensor::ShapeError;

/// Most items in one batch.
pub const BATCH_ITEMS_MAX: usize = 1024;

/// Why a request is answered with an error.
///
/// Where a vLLM consumer has a stable text for the situation, the text is that one. Texts are for
/// people; programs read [`code`](Self::code).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Rejection {
    #[error("malformed control request: expected one frame, got {count}")]
    NotOneFrame { count: usize },
    #[error("malformed control request")]
    NotJson,
    #[error("malformed control request: not an object")]
    NotAnObject,
    #[error("unknown control op: {repr}")]
    UnknownOp { repr: String },
    #[error("'{field}'")]
    MissingField { field: &'static str },
    #[error("field '{field}' must be {expected}")]
    WrongKind {
        field: &'static str,
        expected: &'static str,
    },
    #[error("field '{field}' is longer than 1024 bytes")]
    TooLong { field: &'static str },
    #[error("field '{field}' must not be negative")]
    Negative { field: &'static str },
    #[error("field '{field}' does not fit 64 bits")]
    TooLarge { field: &'static str },
    #[error("batch of {count} items is longer than {BATCH_ITEMS_MAX}")]
    TooManyItems { count: usize },
    #[error(transparent)]
    Dtype(#[from] UnsupportedDtype),
    #[error(transparent)]
    Shape(#[from] ShapeError),
    #[error("shape and dtype do not match nbytes")]
    SizeMismatch,
    #[error(transparent)]
    Reserve(#[from] ReserveError),
    #[error("internal error")]
    Internal,
}

impl Rejection {
    pub(crate) fn code(&self) -> ErrorCode {
        match self {
            Self::NotOneFrame { .. }
            | Self::NotJson
            | Self::NotAnObject
            | Self::WrongKind { .. } => ErrorCode::Malformed,
            Self::UnknownOp { .. } => ErrorCode::UnknownOp,
            Self::MissingField { .. } => ErrorCode::MissingField,
            Self::TooLong { .. } => ErrorCode::TooLong,
            Self::TooManyItems { .. } => ErrorCode::TooManyItems,
            Self::Dtype(_) => ErrorCode::UnsupportedDtype,
            Self::Negative { .. } | Self::TooLarge { .. } | Self::Shape(_) | Self::SizeMismatch => {
                ErrorCode::SizeMismatch
            }
            Self::Reserve(error) => error.code(),
            Self::Internal => ErrorCode::Internal,
        }
    }
}
