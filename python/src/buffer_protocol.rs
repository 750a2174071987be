//! The buffer protocol of Python, in both directions: lends the memory of a Buffer as a `memoryview`, and borrows
//! the memory of `bytes`, NumPy arrays and similar objects.
//!
//! The protocol is part of Python's stable ABI from 3.11 on. Python 3.10 has the same functions and the same
//! structure, but not in its stable ABI. This module declares them itself, so one wheel serves every Python from
//! 3.10 on. Begin at [`buffer_class`] and [`borrow`].
#![allow(unsafe_code, reason = "implements and uses a protocol of C structures")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use muster::transfer::plan::Dtype;
use muster::transfer::{Buffer as MemoryBuffer, BufferExport};
use pyo3::prelude::*;
use pyo3::types::{PyTuple, PyType};
use pyo3::{PyTypeInfo, ffi};

use super::buffer::Buffer;
use super::errors::new_exception;
use super::lent_memory::LentMemory;

const WRITABLE: c_int = 0x1;
const FORMAT: c_int = 0x4;
const ND: c_int = 0x8;
const STRIDES: c_int = 0x10 | ND;
const F_CONTIGUOUS: c_int = 0x40 | STRIDES;

/// A view of memory: `Py_buffer`.
#[repr(C)]
struct PyBufferView {
    buf: *mut c_void,
    obj: *mut ffi::PyObject,
    len: isize,
    itemsize: isize,
    readonly: c_int,
    ndim: c_int,
    format: *mut c_char,
    shape: *mut isize,
    strides: *mut isize,
    suboffsets: *mut isize,
    internal: *mut c_void,
}

unsafe extern "C" {
    fn PyObject_GetBuffer(object: *mut ffi::PyObject, view: *mut PyBufferView, flags: c_int) -> c_int;
    fn PyBuffer_Release(view: *mut PyBufferView);
}

/// The memory to which a view of a Buffer points.
struct ExportedView {
    shape: Vec<isize>,
    strides: Vec<isize>,
    _export: BufferExport,
    process: u32,
}

/// Returns the format of a data type, if the protocol has one.
const fn format_of_dtype(dtype: Dtype) -> Option<&'static CStr> {
    Some(match dtype {
        Dtype::Bool => c"?",
        Dtype::Int8 => c"b",
        Dtype::Int16 => c"h",
        Dtype::Int32 => c"i",
        Dtype::Int64 => c"l",
        Dtype::Uint8 => c"B",
        Dtype::Uint16 => c"H",
        Dtype::Uint32 => c"I",
        Dtype::Uint64 => c"L",
        Dtype::Float16 => c"e",
        Dtype::Float32 => c"f",
        Dtype::Float64 => c"d",
        Dtype::Complex64 => c"Zf",
        Dtype::Complex128 => c"Zd",
        _ => return None,
    })
}

/// Returns the class of Buffers with the buffer protocol.
pub fn buffer_class(py: Python<'_>) -> PyResult<Bound<'_, PyType>> {
    let mut slots = [
        ffi::PyType_Slot { slot: ffi::Py_bf_getbuffer, pfunc: get_buffer as *mut c_void },
        ffi::PyType_Slot { slot: ffi::Py_bf_releasebuffer, pfunc: release_buffer as *mut c_void },
        ffi::PyType_Slot { slot: 0, pfunc: std::ptr::null_mut() },
    ];
    let mut spec = ffi::PyType_Spec {
        name: c"muster._native.Buffer".as_ptr(),
        basicsize: 0,
        itemsize: 0,
        flags: (ffi::Py_TPFLAGS_DEFAULT | ffi::Py_TPFLAGS_BASETYPE) as c_uint,
        slots: slots.as_mut_ptr(),
    };
    let bases = PyTuple::new(py, [Buffer::type_object(py)])?;
    // SAFETY: the specification is complete, its name is static, and Python copies the rest.
    let class = unsafe {
        Bound::from_owned_ptr_or_err(py, ffi::PyType_FromSpecWithBases(&raw mut spec, bases.as_ptr()))?
    };
    Ok(class.cast_into::<PyType>()?)
}

/// Fills in a view of a Buffer. A data type without a format is viewed as bytes.
unsafe extern "C" fn get_buffer(object: *mut ffi::PyObject, view: *mut PyBufferView, flags: c_int) -> c_int {
    Python::attach(|py| {
        // SAFETY: Python calls it with an object of the class, and with a view to fill in.
        let made = unsafe { make_view(&Bound::from_borrowed_ptr(py, object), flags) };
        match made {
            Ok(made) => {
                // SAFETY: as above.
                unsafe { view.write(made) };
                0
            }
            Err(error) => {
                // SAFETY: as above.
                unsafe { (*view).obj = std::ptr::null_mut() };
                error.restore(py);
                -1
            }
        }
    })
}

fn make_view(object: &Bound<'_, PyAny>, flags: c_int) -> PyResult<PyBufferView> {
    let py = object.py();
    let buffer = object.cast::<Buffer>()?.get();
    let array = buffer.array_shape();
    let (format, sizes, width) = match format_of_dtype(array.dtype) {
        Some(format) => (format, array.sizes.clone(), array.dtype.bits() / 8),
        None => (c"B", vec![array.bytes as u64], 1),
    };
    let long = sizes.iter().filter(|size| **size > 1).count() > 1;
    if flags & F_CONTIGUOUS == F_CONTIGUOUS && long {
        return Err(new_exception(
            py,
            "ArrayMemoryError",
            "the elements are in row-major order: ask for that order",
            &[],
        ));
    }
    let export = buffer.export(py)?;
    let shape: Vec<isize> = sizes.iter().map(|&size| isize::try_from(size).unwrap_or(isize::MAX)).collect();
    let itemsize = isize::try_from(width).unwrap_or(1);
    let mut strides = vec![itemsize; shape.len()];
    for at in (1..shape.len()).rev() {
        strides[at - 1] = strides[at].saturating_mul(shape[at].max(1));
    }
    let (ndim, address) = (c_int::try_from(shape.len()).unwrap_or(1), export.address());
    let mut held = Box::new(ExportedView { shape, strides, _export: export, process: std::process::id() });
    let (shape, strides) = (held.shape.as_mut_ptr(), held.strides.as_mut_ptr());
    let has = |flag: c_int| flags & flag == flag;
    Ok(PyBufferView {
        buf: address.cast(),
        obj: object.clone().into_ptr(),
        len: isize::try_from(array.bytes).unwrap_or(isize::MAX),
        itemsize,
        readonly: 0,
        ndim: if has(ND) { ndim } else { 1 },
        format: if has(FORMAT) { format.as_ptr().cast_mut() } else { std::ptr::null_mut() },
        shape: if has(ND) { shape } else { std::ptr::null_mut() },
        strides: if has(STRIDES) { strides } else { std::ptr::null_mut() },
        suboffsets: std::ptr::null_mut(),
        internal: Box::into_raw(held).cast(),
    })
}

unsafe extern "C" fn release_buffer(_: *mut ffi::PyObject, view: *mut PyBufferView) {
    // SAFETY: Python calls it once for each view, which `get_buffer` has filled in.
    let held = unsafe { Box::from_raw((*view).internal.cast::<ExportedView>()) };
    if held.process != std::process::id() {
        // A forked process leaves the memory as it is: another thread of the parent may have held a lock of it.
        std::mem::forget(held);
    }
}

/// A view of another object's memory, which keeps that memory until it is released.
struct BorrowedView(Box<PyBufferView>);

// SAFETY: the view is only released, with the GIL, which any thread may do.
unsafe impl Send for BorrowedView {}

impl BorrowedView {
    fn release(mut self, _: Python<'_>) {
        // SAFETY: `borrow` got the view, and this is its only release, with the GIL.
        unsafe { PyBuffer_Release(&raw mut *self.0) };
    }
}

/// The owner of memory that transfers write.
struct WritableLoan {
    address: *mut u8,
    len: usize,
    _lent: LentMemory,
}

// SAFETY: the object keeps its memory where it is until the loan is over.
unsafe impl Send for WritableLoan {}

impl AsMut<[u8]> for WritableLoan {
    fn as_mut(&mut self) -> &mut [u8] {
        if self.len == 0 {
            return &mut [];
        }
        // SAFETY: the memory is mapped and writable until the loan is over. The engine takes its address and its length.
        unsafe { std::slice::from_raw_parts_mut(self.address, self.len) }
    }
}

/// Borrows the memory of an object as contiguous bytes that transfers may write.
///
/// # Errors
/// The exception that the object raises if it has no such memory.
pub fn borrow_writable(object: &Bound<'_, PyAny>) -> PyResult<MemoryBuffer> {
    let (address, len, lent) = borrow_with_flags(object, WRITABLE)?;
    Ok(MemoryBuffer::foreign(WritableLoan { address, len, _lent: lent }))
}

/// Borrows the memory of an object as contiguous bytes, until the result's last part is dropped: address, length, loan.
///
/// # Errors
/// The exception that the object raises if it has no such memory.
pub fn borrow(object: &Bound<'_, PyAny>) -> PyResult<(*const u8, usize, LentMemory)> {
    let (address, len, lent) = borrow_with_flags(object, 0)?;
    Ok((address.cast_const(), len, lent))
}

fn borrow_with_flags(object: &Bound<'_, PyAny>, flags: c_int) -> PyResult<(*mut u8, usize, LentMemory)> {
    let py = object.py();
    let mut view = Box::new(PyBufferView {
        buf: std::ptr::null_mut(),
        obj: std::ptr::null_mut(),
        len: 0,
        itemsize: 0,
        readonly: 0,
        ndim: 0,
        format: std::ptr::null_mut(),
        shape: std::ptr::null_mut(),
        strides: std::ptr::null_mut(),
        suboffsets: std::ptr::null_mut(),
        internal: std::ptr::null_mut(),
    });
    // SAFETY: the object is alive and the view is to be filled in. Its address does not change.
    if unsafe { PyObject_GetBuffer(object.as_ptr(), &raw mut *view, flags) } != 0 {
        return Err(PyErr::fetch(py));
    }
    let (address, len) = (view.buf.cast::<u8>(), usize::try_from(view.len).unwrap_or(0));
    let foreign = BorrowedView(view);
    Ok((address, len, LentMemory::new(py, move |py| foreign.release(py))?))
}
