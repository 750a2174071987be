//! The border between C and Rust: stops panics before they reach C, and checks every argument before it is used.
//!
//! It does not depend on any function of the interface. Begin at [`run_interface_function`].

use std::ffi::{CStr, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::process::check_not_forked;
use super::status::{CallError, MusterStatus, set_last_error};

/// Runs the body of a function of the interface.
pub fn run_interface_function(body: impl FnOnce() -> Result<(), CallError>) -> MusterStatus {
    let checked = || {
        // First, because another thread may have held any lock when the process was forked.
        check_not_forked()?;
        body()
    };
    match catch_unwind(AssertUnwindSafe(checked)) {
        Ok(Ok(())) => MusterStatus::Ok,
        Ok(Err(error)) => set_last_error(error),
        Err(_) => set_last_error(panic_error()),
    }
}

/// Returns the error of a panic, whose message is on standard error.
pub fn panic_error() -> CallError {
    let text = "muster failed inside (standard error has the message): please report it";
    CallError::new(MusterStatus::Internal, text)
}

/// Returns a text.
///
/// # Safety
/// `text` is null, or points to bytes that end with NUL and live for `'a`.
pub unsafe fn read_text<'a>(name: &str, text: *const c_char) -> Result<&'a str, CallError> {
    // SAFETY: the caller guarantees it.
    unsafe { read_optional_text(name, text) }?.ok_or_else(|| null_error(name))
}

/// Returns a text, if there is one.
///
/// # Safety
/// As of [`read_text`].
pub unsafe fn read_optional_text<'a>(name: &str, text: *const c_char) -> Result<Option<&'a str>, CallError> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: it ends with NUL, as the caller guarantees.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map(Some).map_err(|_| CallError::invalid_argument(format!("{name} is not UTF-8")))
}

/// Returns an array.
///
/// # Safety
/// `items` is null, or points to `len` initialised items that live for `'a` and that nothing writes meanwhile.
pub unsafe fn read_array<'a, T>(name: &str, items: *const T, len: usize) -> Result<&'a [T], CallError> {
    if len == 0 {
        return Ok(&[]);
    }
    check_pointer(name, items)?;
    check_fits_address_space(name, items as usize, len, size_of::<T>())?;
    // SAFETY: it is neither null nor misaligned nor too long, and the caller guarantees the rest.
    Ok(unsafe { std::slice::from_raw_parts(items, len) })
}

/// Checks that items lie within the address space.
pub fn check_fits_address_space(name: &str, start: usize, len: usize, size: usize) -> Result<(), CallError> {
    let bytes = len.checked_mul(size).filter(|bytes| isize::try_from(*bytes).is_ok());
    match bytes.and_then(|bytes| start.checked_add(bytes)) {
        Some(_) => Ok(()),
        None => Err(CallError::invalid_argument(format!("{name} has {len} items, which no memory holds"))),
    }
}

/// A place for an output of a function.
pub struct OutputPointer<T>(*mut T);

impl<T> OutputPointer<T> {
    /// Checks the place, before anything is done.
    pub fn new(name: &str, place: *mut T) -> Result<Self, CallError> {
        check_pointer(name, place)?;
        Ok(Self(place))
    }

    /// Checks a place that may be missing.
    pub fn optional(name: &str, place: *mut T) -> Result<Option<Self>, CallError> {
        if place.is_null() { Ok(None) } else { Self::new(name, place).map(Some) }
    }

    /// Writes the output.
    pub fn set(self, value: T) {
        // SAFETY: it is neither null nor misaligned, and the caller of the function passed it to be written.
        unsafe { self.0.write(value) }
    }
}

/// Checks that a pointer is neither null nor misaligned.
pub fn check_pointer<T>(name: &str, pointer: *const T) -> Result<(), CallError> {
    if pointer.is_null() {
        return Err(null_error(name));
    }
    if !pointer.is_aligned() {
        let wanted = align_of::<T>();
        return Err(CallError::invalid_argument(format!(
            "{name} is misaligned: its address must be a multiple of {wanted}"
        )));
    }
    Ok(())
}

fn null_error(name: &str) -> CallError {
    CallError::invalid_argument(format!("{name} is NULL"))
}

/// Returns a copy of a struct of options that begins with its size. Fields that the caller's header does not have keep
/// their defaults; fields that this library does not have must be zero.
///
/// # Safety
/// `given` is null or misaligned, or begins with its size in bytes, all of which are initialised. Any bytes are a valid `T`.
pub unsafe fn read_options<T: Copy>(name: &str, given: *const T, defaults: T) -> Result<T, CallError> {
    check_pointer(name, given)?;
    let start: *const u8 = given.cast();
    // SAFETY: it begins with its size, and is aligned for it.
    let size = unsafe { *given.cast::<usize>() };
    let known = size_of::<T>();
    if size < size_of::<usize>() || size > SIZE_MAX {
        return Err(CallError::invalid_argument(format!(
            "{name}->size is {size}: initialise the struct with its _init function, which sets its size"
        )));
    }
    let mut options = defaults;
    // SAFETY: both have so many bytes, and the caller guarantees that any are valid.
    unsafe { std::ptr::copy_nonoverlapping(start, (&raw mut options).cast::<u8>(), size.min(known)) };
    if size > known {
        // SAFETY: the struct has `size` bytes.
        let unknown = unsafe { std::slice::from_raw_parts(start.add(known), size - known) };
        if unknown.iter().any(|byte| *byte != 0) {
            return Err(CallError::invalid_argument(format!(
                "{name} has {size} bytes and uses options that this version of the library does not have"
            )));
        }
    }
    Ok(options)
}

/// The largest struct of options: a larger size is garbage.
const SIZE_MAX: usize = 4096;

/// Writes the defaults of a struct of options of which the caller's header has `size` bytes.
///
/// # Safety
/// `place` is null or misaligned, or may be written for `size` bytes.
pub unsafe fn write_defaults<T: Copy>(
    name: &str,
    place: *mut T,
    size: usize,
    defaults: T,
) -> Result<(), CallError> {
    check_pointer(name, place)?;
    if size < size_of::<usize>() || size > SIZE_MAX {
        return Err(CallError::invalid_argument(format!("size is {size}: pass sizeof *{name}")));
    }
    let known = size.min(size_of::<T>());
    // SAFETY: the caller has room for `size` bytes.
    unsafe {
        std::ptr::write_bytes(place.cast::<u8>(), 0, size);
        std::ptr::copy_nonoverlapping((&raw const defaults).cast::<u8>(), place.cast::<u8>(), known);
        place.cast::<usize>().write(size);
    }
    Ok(())
}
