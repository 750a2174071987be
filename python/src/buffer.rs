//! `Buffer`: memory of the transfer engine that Python programs use as arrays, without a copy.
//!
//! Every consumer of a Buffer, by DLPack or by the buffer protocol, holds an export of it. Until the consumer drops
//! the export, the memory stays allocated and no further transfer writes it. `muster/_memory.py` makes JAX arrays of
//! Buffers. Begin at [`Buffer`].

use std::sync::LazyLock;

use muster::transfer::{ArenaPool, Buffer as MemoryBuffer, BufferExport, Span};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::array_shape::ArrayShape;
use super::dlpack::{CPU, MemoryToLend, lend_memory};
use super::errors::{memory_error, new_exception};
use super::process_owned::ProcessOwnedBuffer;
use super::wait::forked_error;

/// The process that made the first Buffer, and the arenas of all its Buffers.
static MEMORY: LazyLock<(u32, ArenaPool)> = LazyLock::new(|| (std::process::id(), ArenaPool::default()));

/// The bytes of memory that this machine has.
static TOTAL_MEMORY: LazyLock<u64> = LazyLock::new(|| {
    let found = rustix::system::sysinfo();
    found.totalram.saturating_mul(found.mem_unit.into())
});

/// Memory of the transfer engine with a shape and a data type.
///
/// The class that programs see is derived from this one: `buffer_protocol.rs` adds the buffer protocol, `muster/_memory.py`
/// the rest.
#[pyclass(frozen, subclass, module = "muster._native", name = "BufferMemory")]
pub struct Buffer {
    memory: ProcessOwnedBuffer,
    address: usize,
    shape: ArrayShape,
    device: i32,
}

impl Buffer {
    /// Returns the memory.
    ///
    /// # Errors
    /// `MusterError` in a process that was forked from the one that made it, with which it shares the bytes.
    pub fn memory(&self, py: Python<'_>) -> PyResult<&MemoryBuffer> {
        self.memory.get(py)
    }

    /// Returns the span of all its bytes, without a layout.
    pub fn span(&self, py: Python<'_>) -> PyResult<Span> {
        Ok(self.memory(py)?.full_span())
    }

    /// Hands its address out.
    pub fn export(&self, py: Python<'_>) -> PyResult<BufferExport> {
        self.memory(py)?.export().map_err(|error| memory_error(py, &error))
    }

    /// Returns a capsule of DLPack that holds an export.
    fn lend_export_as_capsule<'py>(
        &self,
        py: Python<'py>,
        export: BufferExport,
        max_version: Option<(u32, u32)>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let loan = MemoryToLend {
            address: export.address(),
            shape: &self.shape.sizes,
            dtype: self.shape.dtype,
            device: self.device,
            owner: Box::new(export),
        };
        lend_memory(py, loan, max_version)
    }

    /// Returns the shape, the data type and the size in bytes.
    pub const fn array_shape(&self) -> &ArrayShape {
        &self.shape
    }
}

#[pymethods]
impl Buffer {
    #[new]
    #[pyo3(signature = (shape, dtype, device))]
    fn new(py: Python<'_>, shape: Vec<u64>, dtype: &str, device: i32) -> PyResult<Self> {
        let shape = ArrayShape::with_dtype_name(py, shape, dtype)?;
        if device < 0 {
            let text = format!("device is {device}: give the index of a local CPU device, from 0 on");
            return Err(new_exception(py, "SettingsError", &text, &[]));
        }
        if shape.bytes as u64 > *TOTAL_MEMORY {
            let text =
                format!("{} bytes were asked for, and this machine has {}", shape.bytes, *TOTAL_MEMORY);
            return Err(new_exception(py, "ArrayMemoryError", &text, &[]));
        }
        let (process, arenas) = &*MEMORY;
        if *process != std::process::id() {
            return Err(forked_error(py));
        }
        let bytes = shape.bytes;
        // New memory is populated at once, which takes long.
        let made = py.detach(|| {
            let memory = arenas.allocate(bytes)?;
            let address = memory.export()?.address().addr();
            Ok((memory, address))
        });
        let (memory, address) = made.map_err(|error| memory_error(py, &error))?;
        Ok(Self { memory: ProcessOwnedBuffer::new(memory), address, shape, device })
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
    fn device(&self) -> i32 {
        self.device
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.shape.bytes
    }

    /// Returns the address of the first byte.
    #[getter]
    pub const fn address(&self) -> usize {
        self.address
    }

    #[getter]
    fn exports(&self, py: Python<'_>) -> PyResult<u32> {
        Ok(self.memory(py)?.exports())
    }

    /// Returns a capsule of DLPack while a transfer receives into the Buffer, for an array that nobody sees before the
    /// transfer is complete; `None` if no transfer receives into it now.
    fn lend_while_received<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        match self.memory(py)?.export_while_written() {
            Some(export) => self.lend_export_as_capsule(py, export, None).map(Some),
            None => Ok(None),
        }
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        (CPU, self.device)
    }

    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<i64>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let refuse = |text: &str| Err(new_exception(py, "ArrayMemoryError", text, &[]));
        if stream.is_some_and(|stream| stream != -1) {
            return refuse("the memory is on the host, where there are no streams: ask with stream=None");
        }
        if dl_device.is_some_and(|device| device != (CPU, self.device)) {
            return refuse(&format!(
                "the memory is on CPU device {}: ask for no other, or copy the array there (jax.device_put)",
                self.device
            ));
        }
        if copy == Some(true) {
            return refuse(
                "a Buffer lends its memory and makes no copies: ask without copy=True, and copy the array",
            );
        }
        self.lend_export_as_capsule(py, self.export(py)?, max_version)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let shape = self.shape.as_tuple(py)?.repr()?;
        Ok(format!("<muster.Buffer {}{shape} on CPU device {}>", self.shape.dtype, self.device))
    }
}
