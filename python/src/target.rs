//! `Target`: memory of a NumPy array, a `bytearray` or a similar object, which a transfer writes.
//!
//! The object keeps its memory until the Target and the last transfer that writes to it are gone. Begin at
//! [`Target`].

use muster::transfer::Span;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::array_shape::ArrayShape;
use super::buffer_protocol;
use super::errors::new_exception;
use super::lent_memory::drop_with_gil;
use super::process_owned::ProcessOwnedBuffer;

/// Memory that transfers write.
#[pyclass(frozen, module = "muster._native")]
pub struct Target {
    memory: ProcessOwnedBuffer,
    shape: ArrayShape,
}

impl Target {
    /// Returns the span of all its bytes, without a layout.
    ///
    /// # Errors
    /// `MusterError` in a process that was forked from the one that made it.
    pub fn span(&self, py: Python<'_>) -> PyResult<Span> {
        Ok(self.memory.get(py)?.full_span())
    }

    /// Returns the shape and the data type.
    pub const fn array_shape(&self) -> &ArrayShape {
        &self.shape
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        // Python frees its objects on threads that have the GIL.
        Python::attach(|py| drop_with_gil(py, self.memory.take()));
    }
}

#[pymethods]
impl Target {
    /// Takes the writable memory of an object, whose bytes are an array of this shape and type.
    #[staticmethod]
    fn from_buffer(object: &Bound<'_, PyAny>, shape: Vec<u64>, dtype: &str) -> PyResult<Self> {
        let py = object.py();
        let shape = ArrayShape::with_dtype_name(py, shape, dtype)?;
        let memory = buffer_protocol::borrow_writable(object)?;
        if memory.len() != shape.bytes {
            let text = format!(
                "an array of shape {:?} and type {} has {} bytes, and the memory has {}",
                shape.sizes,
                shape.dtype,
                shape.bytes,
                memory.len()
            );
            return Err(new_exception(py, "ArrayMemoryError", &text, &[]));
        }
        Ok(Self { memory: ProcessOwnedBuffer::new(memory), shape })
    }

    #[getter(shape)]
    fn shape_tuple<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        self.shape.as_tuple(py)
    }

    #[getter(dtype)]
    fn dtype_name(&self) -> &'static str {
        self.shape.dtype.name()
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.shape.bytes
    }
}
