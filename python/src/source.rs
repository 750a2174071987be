//! `Source`: the memory of an array of JAX, NumPy or another library. A transfer sends it without a copy.
//!
//! The library of the array keeps the memory allocated until the Source and the last transfer that reads it are
//! gone. A Source is not a snapshot: the program can still change its bytes. `muster/_memory.py` decides how each
//! kind of object becomes a Source. Begin at [`Source`].
#![allow(unsafe_code, reason = "makes buffers of addresses that other libraries lend")]

use muster::transfer::plan::Dtype;
use muster::transfer::{Buffer as MemoryBuffer, Span};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::array_shape::ArrayShape;
use super::buffer::Buffer;
use super::errors::{memory_error, new_exception};
use super::lent_memory::{LentMemory, drop_with_gil};
use super::process_owned::ProcessOwnedBuffer;
use super::{buffer_protocol, dlpack};

/// Memory that transfers read.
#[pyclass(frozen, module = "muster._native")]
pub struct Source {
    memory: ProcessOwnedBuffer,
    address: usize,
    shape: ArrayShape,
}

impl Source {
    /// Makes one of memory that is lent.
    ///
    /// # Safety
    /// The array must have its bytes at `address` until `lent` is dropped.
    unsafe fn from_lent_memory(
        py: Python<'_>,
        address: *const u8,
        shape: ArrayShape,
        lent: LentMemory,
    ) -> PyResult<Self> {
        // The parts of a complex number are aligned, not the number.
        let align = match shape.dtype {
            Dtype::Complex64 => 4,
            Dtype::Complex128 => 8,
            dtype => dtype.bits() as usize / 8,
        };
        // SAFETY: the caller guarantees the memory. Whether the program writes it while it is sent is up to the program,
        // which the documentation tells: the peer receives either bytes.
        let memory = unsafe { MemoryBuffer::read_only(address, shape.bytes, align, Box::new(lent)) };
        let memory = memory.map_err(|error| memory_error(py, &error))?;
        Ok(Self { memory: ProcessOwnedBuffer::new(memory), address: address.addr(), shape })
    }

    /// Returns the memory.
    ///
    /// # Errors
    /// `MusterError` in a process that was forked from the one that made it.
    pub fn memory(&self, py: Python<'_>) -> PyResult<&MemoryBuffer> {
        self.memory.get(py)
    }

    /// Returns the span of all its bytes, without a layout.
    pub fn span(&self, py: Python<'_>) -> PyResult<Span> {
        Ok(self.memory(py)?.full_span())
    }

    /// Returns the shape and the data type.
    pub const fn array_shape(&self) -> &ArrayShape {
        &self.shape
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        // Python frees its objects on threads that have the GIL.
        Python::attach(|py| drop_with_gil(py, self.memory.take()));
    }
}

#[pymethods]
impl Source {
    /// Takes the memory that a capsule of DLPack lends.
    #[staticmethod]
    fn from_dlpack(capsule: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = capsule.py();
        let found = dlpack::borrow_array(capsule)?;
        let shape = ArrayShape::new(py, found.shape, found.dtype)?;
        // SAFETY: the exporter keeps the elements that the tensor describes until it gets the loan back.
        unsafe { Self::from_lent_memory(py, found.address, shape, found.lent) }
    }

    /// Takes the memory of an object with the buffer protocol, whose bytes are an array of this shape and type.
    #[staticmethod]
    fn from_buffer(object: &Bound<'_, PyAny>, shape: Vec<u64>, dtype: &str) -> PyResult<Self> {
        let py = object.py();
        let shape = ArrayShape::with_dtype_name(py, shape, dtype)?;
        let (address, len, lent) = buffer_protocol::borrow(object)?;
        if len != shape.bytes {
            let text = format!(
                "an array of shape {:?} and type {} has {} bytes, and the memory has {len}",
                shape.sizes, shape.dtype, shape.bytes
            );
            return Err(new_exception(py, "ArrayMemoryError", &text, &[]));
        }
        // SAFETY: the object keeps the bytes until its view is released.
        unsafe { Self::from_lent_memory(py, address, shape, lent) }
    }

    /// Takes the memory of a Buffer.
    #[staticmethod]
    #[pyo3(name = "of")]
    fn of_buffer(py: Python<'_>, buffer: &Buffer) -> PyResult<Self> {
        let memory = buffer.memory(py)?.clone();
        let (address, shape) = (buffer.address(), buffer.array_shape().clone());
        Ok(Self { memory: ProcessOwnedBuffer::new(memory), address, shape })
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

    #[getter]
    fn address(&self) -> usize {
        self.address
    }

    /// Returns a copy of the bytes as a transfer would send them now.
    fn tobytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, pyo3::types::PyBytes>> {
        let read = self.memory(py)?.with_bytes(|bytes| pyo3::types::PyBytes::new(py, bytes));
        read.map_err(|error| memory_error(py, &error))
    }
}
