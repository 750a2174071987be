//! DLPack: the structures by which Python libraries lend one another the memory of arrays.
//!
//! A capsule holds a tensor with a deleter. The consumer of the capsule calls the deleter when it no longer needs
//! the memory. If no consumer has taken the tensor, the destructor of the capsule calls the deleter. The names and
//! the layout are those of `dlpack.h`, versions 0.8 and 1.0. Begin at [`lend_memory`] and [`borrow_array`].
#![allow(unsafe_code, reason = "exchanges pointers with other libraries, by the rules of DLPack")]

use std::ffi::{CStr, c_void};

use muster::transfer::plan::{Dtype, MAX_RANK};
use pyo3::prelude::*;
use pyo3::{Bound, ffi};

use super::errors::new_exception;
use super::lent_memory::LentMemory;

/// The device type of host memory.
pub const CPU: i32 = 1;
const PLAIN: &CStr = c"dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";
const PLAIN_USED: &CStr = c"used_dltensor";
const VERSIONED_USED: &CStr = c"used_dltensor_versioned";
/// The major version of the tensors with a version.
const MAJOR: u32 = 1;

#[derive(Clone, Copy)]
#[repr(C)]
struct DLDevice {
    kind: i32,
    id: i32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct DLDataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct DLTensor {
    data: *mut c_void,
    device: DLDevice,
    ndim: i32,
    dtype: DLDataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

type Deleter = Option<unsafe extern "C" fn(*mut c_void)>;

#[repr(C)]
struct DLManagedTensor {
    tensor: DLTensor,
    context: *mut c_void,
    deleter: Deleter,
}

#[repr(C)]
struct DLManagedTensorVersioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: Deleter,
    flags: u64,
    tensor: DLTensor,
}

/// Returns the code of a data type whose elements are whole bytes.
fn dlpack_code(dtype: Dtype) -> Option<DLDataType> {
    let code = match dtype {
        Dtype::Int8 | Dtype::Int16 | Dtype::Int32 | Dtype::Int64 => 0,
        Dtype::Uint8 | Dtype::Uint16 | Dtype::Uint32 | Dtype::Uint64 => 1,
        Dtype::Float16 | Dtype::Float32 | Dtype::Float64 => 2,
        Dtype::Bfloat16 => 4,
        Dtype::Complex64 | Dtype::Complex128 => 5,
        Dtype::Bool => 6,
        Dtype::Float8E3m4 => 7,
        Dtype::Float8E4m3 => 8,
        Dtype::Float8E4m3b11fnuz => 9,
        Dtype::Float8E4m3fn => 10,
        Dtype::Float8E4m3fnuz => 11,
        Dtype::Float8E5m2 => 12,
        Dtype::Float8E5m2fnuz => 13,
        Dtype::Float8E8m0fnu => 14,
        _ => return None,
    };
    Some(DLDataType { code, bits: u8::try_from(dtype.bits()).ok()?, lanes: 1 })
}

fn dtype_from_dlpack_code(found: DLDataType) -> Option<Dtype> {
    let is_found = |dtype: &Dtype| {
        let code = dlpack_code(*dtype);
        code.is_some_and(|code| (code.code, code.bits, 1) == (found.code, found.bits, found.lanes))
    };
    Dtype::ALL.iter().copied().find(is_found)
}

/// A tensor that is lent, with all that its pointers point to.
struct LentTensor<T> {
    tensor: T,
    shape: Vec<i64>,
    strides: Vec<i64>,
    /// The owner of the memory, dropped when the consumer no longer needs it, on any thread, without the GIL.
    _owner: Box<dyn Send>,
    process: u32,
}

/// The memory that is lent: elements in row-major order, on a CPU device.
pub struct MemoryToLend<'a> {
    /// The address of the first element.
    pub address: *mut u8,
    /// The size of each dimension.
    pub shape: &'a [u64],
    /// The data type, which has whole bytes.
    pub dtype: Dtype,
    /// The index of the CPU device within this process.
    pub device: i32,
    /// The owner of the memory, dropped when the consumer no longer needs it. Its `Drop` runs on any thread and must neither
    /// wait nor take the GIL.
    pub owner: Box<dyn Send>,
}

/// Returns the strides of a row-major array, in elements.
fn row_major_strides(shape: &[i64]) -> Vec<i64> {
    let mut strides = vec![1; shape.len()];
    for at in (1..shape.len()).rev() {
        strides[at - 1] = shape[at].max(1).saturating_mul(strides[at]);
    }
    strides
}

/// Frees a tensor of this module. In a forked process the memory stays as it is: another thread of the parent may have
/// held a lock of it.
unsafe fn delete<T>(lent: *mut c_void) {
    // SAFETY: `lend_memory` took the pointer from a box, and the consumer calls the deleter once.
    let lent = unsafe { Box::from_raw(lent.cast::<LentTensor<T>>()) };
    if lent.process == std::process::id() {
        drop(lent);
    } else {
        std::mem::forget(lent);
    }
}

unsafe extern "C" fn delete_plain(tensor: *mut c_void) {
    // SAFETY: the consumer passes the tensor that it got from `lend_memory`.
    unsafe { delete::<DLManagedTensor>((*tensor.cast::<DLManagedTensor>()).context) }
}

unsafe extern "C" fn delete_versioned(tensor: *mut c_void) {
    // SAFETY: as above.
    unsafe { delete::<DLManagedTensorVersioned>((*tensor.cast::<DLManagedTensorVersioned>()).context) }
}

/// Frees the tensor of a capsule that nobody has consumed; a consumed one has another name.
unsafe extern "C" fn free_capsule(capsule: *mut ffi::PyObject) {
    // SAFETY: Python calls it with the capsule that `lend_memory` made, which it is about to free.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, PLAIN.as_ptr()) == 1 {
            delete_plain(ffi::PyCapsule_GetPointer(capsule, PLAIN.as_ptr()));
        } else if ffi::PyCapsule_IsValid(capsule, VERSIONED.as_ptr()) == 1 {
            delete_versioned(ffi::PyCapsule_GetPointer(capsule, VERSIONED.as_ptr()));
        }
    }
}

/// Returns a capsule that lends memory; with a version only to a consumer that knows those of version 1.
pub fn lend_memory<'py>(
    py: Python<'py>,
    loan: MemoryToLend<'_>,
    max_version: Option<(u32, u32)>,
) -> PyResult<Bound<'py, PyAny>> {
    let Some(dtype) = dlpack_code(loan.dtype) else {
        let text = format!(
            "{} has no DLPack here: view the bytes as uint8 (jax.lax.bitcast_convert_type)",
            loan.dtype
        );
        return Err(new_exception(py, "ArrayMemoryError", &text, &[]));
    };
    let shape: Vec<i64> = loan.shape.iter().map(|&size| i64::try_from(size).unwrap_or(i64::MAX)).collect();
    let strides = row_major_strides(&shape);
    let tensor = DLTensor {
        data: if shape.contains(&0) { std::ptr::null_mut() } else { loan.address.cast() },
        device: DLDevice { kind: CPU, id: loan.device },
        ndim: i32::try_from(shape.len()).unwrap_or(i32::MAX),
        dtype,
        shape: std::ptr::null_mut(),
        strides: std::ptr::null_mut(),
        byte_offset: 0,
    };
    let process = std::process::id();
    let (pointer, name) = if max_version.is_some_and(|(major, _)| major >= MAJOR) {
        let tensor = DLManagedTensorVersioned {
            major: MAJOR,
            minor: 0,
            context: std::ptr::null_mut(),
            deleter: Some(delete_versioned),
            flags: 0,
            tensor,
        };
        let mut lent = Box::new(LentTensor { tensor, shape, strides, _owner: loan.owner, process });
        lent.tensor.tensor.shape = lent.shape.as_mut_ptr();
        lent.tensor.tensor.strides = lent.strides.as_mut_ptr();
        let lent = Box::into_raw(lent);
        // SAFETY: the box was made above.
        unsafe {
            (*lent).tensor.context = lent.cast();
            ((&raw mut (*lent).tensor).cast(), VERSIONED)
        }
    } else {
        let tensor = DLManagedTensor { tensor, context: std::ptr::null_mut(), deleter: Some(delete_plain) };
        let mut lent = Box::new(LentTensor { tensor, shape, strides, _owner: loan.owner, process });
        lent.tensor.tensor.shape = lent.shape.as_mut_ptr();
        lent.tensor.tensor.strides = lent.strides.as_mut_ptr();
        let lent = Box::into_raw(lent);
        // SAFETY: as above.
        unsafe {
            (*lent).tensor.context = lent.cast();
            ((&raw mut (*lent).tensor).cast(), PLAIN)
        }
    };
    // SAFETY: the pointer is not null, the name is static, and the destructor knows both.
    unsafe {
        Bound::from_owned_ptr_or_err(py, ffi::PyCapsule_New(pointer, name.as_ptr(), Some(free_capsule)))
    }
}

/// An array that another library has lent.
pub struct BorrowedArray {
    /// The address of the first element.
    pub address: *const u8,
    /// The size of each dimension.
    pub shape: Vec<u64>,
    /// The data type.
    pub dtype: Dtype,
    /// The owner of the memory.
    pub lent: LentMemory,
}

/// The tensor of a capsule that this process has consumed. Its deleter is called once.
struct ConsumedTensor {
    tensor: *mut c_void,
    deleter: Deleter,
}

// SAFETY: DLPack lets any thread call the deleter, and nothing else uses the pointers.
unsafe impl Send for ConsumedTensor {}

impl ConsumedTensor {
    fn delete(self) {
        if let Some(deleter) = self.deleter {
            // SAFETY: the tensor was consumed, so the call of its deleter belongs to this value, which is gone then.
            unsafe { deleter(self.tensor) };
        }
    }
}

/// Consumes a capsule, whose memory stays lent until the result is dropped.
///
/// # Errors
/// `ArrayMemoryError` if it is no capsule of DLPack that is whole, on a CPU device, in row-major order and of a data type
/// with whole bytes.
pub fn borrow_array(capsule: &Bound<'_, PyAny>) -> PyResult<BorrowedArray> {
    let py = capsule.py();
    let refuse = |text: &str| new_exception(py, "ArrayMemoryError", text, &[]);
    let object = capsule.as_ptr();
    // SAFETY: the calls check that the object is a capsule of that name. The layout of the tensor follows from the name.
    // The name is changed before anything else can consume the tensor, since this thread holds the GIL.
    let (tensor, consumed) = unsafe {
        if ffi::PyCapsule_IsValid(object, VERSIONED.as_ptr()) == 1 {
            let pointer = ffi::PyCapsule_GetPointer(object, VERSIONED.as_ptr());
            let found = &*pointer.cast::<DLManagedTensorVersioned>();
            if found.major != MAJOR {
                // Of another version only the deleter's place is known, and the capsule calls that.
                return Err(refuse(&format!(
                    "the array is lent by DLPack {}, of which this is the first that is known: \
                    update muster, or pass a copy",
                    found.major
                )));
            }
            ffi::PyCapsule_SetName(object, VERSIONED_USED.as_ptr());
            (&raw const found.tensor, ConsumedTensor { tensor: pointer, deleter: found.deleter })
        } else if ffi::PyCapsule_IsValid(object, PLAIN.as_ptr()) == 1 {
            let pointer = ffi::PyCapsule_GetPointer(object, PLAIN.as_ptr());
            let found = &*pointer.cast::<DLManagedTensor>();
            ffi::PyCapsule_SetName(object, PLAIN_USED.as_ptr());
            (&raw const found.tensor, ConsumedTensor { tensor: pointer, deleter: found.deleter })
        } else {
            return Err(refuse(
                "__dlpack__() has returned no capsule of DLPack, or one that was consumed already",
            ));
        }
    };
    let lent = LentMemory::new(py, move |_| consumed.delete())?;
    // SAFETY: the exporter keeps the tensor until its deleter is called, which `lent` does.
    let found = unsafe { &*tensor };
    if found.device.kind != CPU {
        return Err(refuse("the memory is not on the host: copy it there first (jax.device_get)"));
    }
    let Some(dtype) = dtype_from_dlpack_code(found.dtype) else {
        let DLDataType { code, bits, lanes } = found.dtype;
        return Err(refuse(&format!(
            "the data type of DLPack with the code {code}, {bits} bits and {lanes} lanes has no counterpart of whole bytes in \
             JAX: pass its bytes as uint8"
        )));
    };
    let rank = usize::try_from(found.ndim).unwrap_or(usize::MAX);
    if rank > MAX_RANK || (rank > 0 && found.shape.is_null()) {
        return Err(refuse(&format!("an array of {} dimensions; at most {MAX_RANK} are known", found.ndim)));
    }
    let list = |pointer: *const i64| -> Vec<i64> {
        // SAFETY: the exporter says that there are `rank` numbers, and checks above that the pointer is not null.
        (0..rank).map(|at| unsafe { *pointer.add(at) }).collect()
    };
    let sizes = list(found.shape);
    let Ok(shape) = sizes.iter().map(|&size| u64::try_from(size)).collect::<Result<Vec<u64>, _>>() else {
        return Err(refuse("the shape of the array has a negative size"));
    };
    if !found.strides.is_null() && !sizes.contains(&0) {
        let strides = list(found.strides).into_iter().zip(row_major_strides(&sizes)).zip(&sizes);
        if strides.into_iter().any(|((found, wanted), &size)| size > 1 && found != wanted) {
            return Err(refuse(
                "the elements of the array are not contiguous in row-major order: pass a contiguous copy (jax.numpy.copy, \
                 numpy.ascontiguousarray, Tensor.contiguous)",
            ));
        }
    }
    let offset = usize::try_from(found.byte_offset).unwrap_or(usize::MAX);
    let address = found.data.cast::<u8>().cast_const().wrapping_add(offset);
    Ok(BorrowedArray { address, shape, dtype, lent })
}
