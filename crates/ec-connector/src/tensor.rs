//! Shape and element type of one item.

use std::sync::Arc;

use crate::dtype::Dtype;

/// Most dimensions a shape may have; torch itself allows 64.
pub const DIMS_MAX: usize = 64;

/// Shape and element type of one item; its size in bytes follows from them.
///
/// Two specs are equal when a reader could not tell the tensors apart by shape and type. Cloning
/// shares the shape.
///
/// # Examples
/// ```
/// use ec_connector::{Dtype, TensorSpec};
/// let spec = TensorSpec::new(Dtype::BFLOAT16, [256, 1152])?;
/// assert_eq!(spec.len_bytes(), 256 * 1152 * 2);
/// # Ok::<(), ec_connector::ShapeError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    dtype: Dtype,
    shape: Arc<[u64]>,
    len_bytes: u64,
}

/// A shape that describes no tensor of this address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ShapeError {
    /// More than [`DIMS_MAX`] dimensions.
    #[error("shape has {count} dimensions, more than {DIMS_MAX}")]
    TooManyDims {
        /// Number of dimensions given.
        count: usize,
    },
    /// The product of the dimensions and the element size does not fit 64 bits.
    #[error("shape has more bytes than 64 bits can count")]
    Overflow,
}

impl TensorSpec {
    /// Describes a tensor; an empty shape is one element (row V19), a zero dimension none.
    ///
    /// # Errors
    /// [`ShapeError`], also when a partial product overflows and a later dimension is zero.
    pub fn new(dtype: Dtype, shape: impl Into<Arc<[u64]>>) -> Result<Self, ShapeError> {
        let shape = shape.into();
        if shape.len() > DIMS_MAX {
            return Err(ShapeError::TooManyDims { count: shape.len() });
        }
        let len_bytes = shape
            .iter()
            .try_fold(dtype.size_bytes(), |product, &dim| product.checked_mul(dim))
            .ok_or(ShapeError::Overflow)?;
        Ok(Self {
            dtype,
            shape,
            len_bytes,
        })
    }

    /// The element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// The dimensions, outermost first.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Bytes of the whole tensor, densely packed.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(shape: &[u64], expected: Result<u64, ShapeError>) {
        let spec = TensorSpec::new(Dtype::FLOAT32, shape);
        assert_eq!(spec.map(|spec| spec.len_bytes()), expected, "{shape:?}");
    }

    // row: V19
    #[test]
    fn a_shape_without_dimensions_is_one_element() {
        check(&[], Ok(4));
    }

    // row: V18
    #[test]
    fn a_zero_dimension_makes_zero_bytes() {
        check(&[7, 0, 3], Ok(0));
    }

    // row: A9
    #[test]
    fn products_beyond_64_bits_are_refused() {
        check(&[1 << 62], Err(ShapeError::Overflow));
        check(&[u64::MAX, u64::MAX, 0], Err(ShapeError::Overflow));
        check(&[1 << 61], Ok(1 << 63));
    }

    #[test]
    fn dimensions_are_bounded() {
        check(&[1; 64], Ok(4));
        check(&[1; 65], Err(ShapeError::TooManyDims { count: 65 }));
    }
}
