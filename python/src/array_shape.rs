//! Checks the shapes and data types of arrays that Python passes.
//!
//! Begin at [`ArrayShape::new`].

use muster::transfer::plan::{Dtype, MAX_RANK};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::errors::new_exception;

/// The shape and the data type of an array whose bytes have addresses.
#[derive(Debug, Clone)]
pub struct ArrayShape {
    /// The size of each dimension.
    pub sizes: Vec<u64>,
    /// The data type, which has whole bytes.
    pub dtype: Dtype,
    /// The size of the array in bytes.
    pub bytes: usize,
}

impl ArrayShape {
    /// Checks a shape and a data type.
    ///
    /// # Errors
    /// `ArrayMemoryError` if the data type has no whole bytes, or the array has too many dimensions or bytes.
    pub fn new(py: Python<'_>, sizes: Vec<u64>, dtype: Dtype) -> PyResult<Self> {
        let refuse = |text: String| Err(new_exception(py, "ArrayMemoryError", &text, &[]));
        let Ok(width) = dtype.bytes() else {
            let count = 8 / dtype.bits().clamp(1, 8);
            return refuse(format!(
                "elements of {dtype} are packed, {count} a byte, and have no addresses: pass their bytes, \
                 jax.lax.bitcast_convert_type(x.reshape(-1, {count}), jax.numpy.uint8), and convert back on arrival"
            ));
        };
        if sizes.len() > MAX_RANK {
            return refuse(format!("an array of {} dimensions; at most {MAX_RANK} are known", sizes.len()));
        }
        let bytes = if sizes.contains(&0) {
            Some(0)
        } else {
            sizes.iter().try_fold(width, |bytes, size| bytes.checked_mul(*size))
        };
        match bytes
            .and_then(|bytes| usize::try_from(bytes).ok())
            .filter(|bytes| isize::try_from(*bytes).is_ok())
        {
            Some(bytes) => Ok(Self { sizes, dtype, bytes }),
            None => refuse(format!(
                "an array of shape {sizes:?} and type {dtype} is larger than the address space"
            )),
        }
    }

    /// Checks a shape, and a data type by its name, which JAX and NumPy have.
    ///
    /// # Errors
    /// As [`new`](Self::new), and if JAX has no data type of that name.
    pub fn with_dtype_name(py: Python<'_>, sizes: Vec<u64>, dtype: &str) -> PyResult<Self> {
        let Ok(dtype) = dtype.parse::<Dtype>() else {
            let text =
                format!("JAX has no data type {dtype:?}: pass the bytes as uint8, or convert the array");
            return Err(new_exception(py, "ArrayMemoryError", &text, &[]));
        };
        Self::new(py, sizes, dtype)
    }

    /// Returns the shape as a tuple.
    pub fn as_tuple<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.sizes)
    }
}

/// Raises `ArrayMemoryError` if JAX has no data type of this name, or if its elements have no addresses.
#[pyfunction(name = "check_dtype")]
pub fn check_dtype_supported(py: Python<'_>, dtype: &str) -> PyResult<()> {
    ArrayShape::with_dtype_name(py, Vec::new(), dtype).map(|_| ())
}
