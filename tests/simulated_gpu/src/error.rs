//! The driver's error codes, and the sticky error of this process.

use std::ffi::{CStr, c_char, c_int};

use crate::settings::Setting;

/// A code of `CUresult` other than success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CudaError(pub c_int);

/// The answer of an entry point.
pub type Answer<T = ()> = Result<T, CudaError>;

/// Defines the codes: constant, number, name, text.
macro_rules! codes {
    ($($constant:ident = $code:literal, $name:literal, $text:literal;)*) => {
        $(pub const $constant: CudaError = CudaError($code);)*

        /// Code, name and text.
        const CODES: &[(c_int, &CStr, &CStr)] = &[(0, c"CUDA_SUCCESS", c"no error"), $(($code, $name, $text),)*];
    };
}

codes! {
    INVALID_VALUE = 1, c"CUDA_ERROR_INVALID_VALUE", c"invalid argument";
    OUT_OF_MEMORY = 2, c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory";
    NOT_INITIALIZED = 3, c"CUDA_ERROR_NOT_INITIALIZED", c"initialization error";
    NO_DEVICE = 100, c"CUDA_ERROR_NO_DEVICE", c"no CUDA-capable device is detected";
    INVALID_DEVICE = 101, c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal";
    INVALID_CONTEXT = 201, c"CUDA_ERROR_INVALID_CONTEXT", c"invalid device context";
    ECC_UNCORRECTABLE = 214, c"CUDA_ERROR_ECC_UNCORRECTABLE", c"uncorrectable ECC error encountered";
    PEER_ACCESS_UNSUPPORTED = 217, c"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
        c"peer access is not supported between these two devices";
    INVALID_HANDLE = 400, c"CUDA_ERROR_INVALID_HANDLE", c"invalid resource handle";
    NOT_READY = 600, c"CUDA_ERROR_NOT_READY", c"device not ready";
    ILLEGAL_ADDRESS = 700, c"CUDA_ERROR_ILLEGAL_ADDRESS", c"an illegal memory access was encountered";
    CONTEXT_IS_DESTROYED = 709, c"CUDA_ERROR_CONTEXT_IS_DESTROYED", c"context is destroyed";
    HOST_MEMORY_ALREADY_REGISTERED = 712, c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
        c"part or all of the requested memory range is already mapped";
    HOST_MEMORY_NOT_REGISTERED = 713, c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
        c"pointer does not correspond to a registered memory region";
    NOT_PERMITTED = 800, c"CUDA_ERROR_NOT_PERMITTED", c"operation not permitted";
    NOT_SUPPORTED = 801, c"CUDA_ERROR_NOT_SUPPORTED", c"operation not supported";
    UNKNOWN = 999, c"CUDA_ERROR_UNKNOWN", c"unknown error";
}

/// Returns the code of an answer.
pub fn code_of(answer: Answer) -> c_int {
    answer.map_or_else(|error| error.0, |()| 0)
}

/// Writes an output; a null pointer is an invalid value.
///
/// # Safety
/// A pointer that is not null is valid for a write.
pub unsafe fn write_out<T>(to: *mut T, value: T) -> Answer {
    if to.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: as the caller promises. C's structs may lie anywhere.
    unsafe { to.write_unaligned(value) };
    Ok(())
}

/// Returns an error if the process has a sticky one.
pub fn check_sticky() -> Answer {
    error_of(Setting::Sticky.get())
}

/// Returns the error that a setting names; 0 names none.
pub fn error_of(code: i64) -> Answer {
    if code == 0 { Ok(()) } else { Err(CudaError(c_int::try_from(code).unwrap_or(UNKNOWN.0))) }
}

/// Returns whether the process has a sticky error.
pub fn is_lost() -> bool {
    Setting::Sticky.is_on()
}

/// Makes an error sticky, unless there is one.
///
/// The manual says of these errors that they leave the process in an inconsistent state, and that any further work
/// returns the same error until the process ends.
pub fn make_sticky(error: CudaError) {
    Setting::Sticky.set_once(error.0.into());
}

fn find(code: c_int) -> Option<&'static (c_int, &'static CStr, &'static CStr)> {
    CODES.iter().find(|(known, ..)| *known == code)
}

/// Returns the name of a code. An unknown code gives null and error 1. It needs no initialization.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(code: c_int, name: *mut *const c_char) -> c_int {
    let text = find(code).map(|(_, name, _)| name.as_ptr());
    // SAFETY: the caller passes a place for a pointer.
    let written = unsafe { write_out(name, text.unwrap_or_default()) };
    code_of(written.and(text.map(drop).ok_or(INVALID_VALUE)))
}

/// Returns the text of a code, under the rules of `cuGetErrorName`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(code: c_int, text: *mut *const c_char) -> c_int {
    let found = find(code).map(|(.., text)| text.as_ptr());
    // SAFETY: the caller passes a place for a pointer.
    let written = unsafe { write_out(text, found.unwrap_or_default()) };
    code_of(written.and(found.map(drop).ok_or(INVALID_VALUE)))
}
