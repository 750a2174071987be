//! The functions that the shared library exports for tests. No real driver has them, which is how a program tells that
//! the driver is simulated.

use std::ffi::{CStr, c_char, c_int};

use crate::counters::Counter;
use crate::settings::Setting;

/// Changes a setting. Returns 0, or -1 if there is no such setting.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn simulated_gpu_set(key: *const c_char, value: i64) -> c_int {
    // SAFETY: the caller passes a C string.
    match unsafe { CStr::from_ptr(key) }.to_str().ok().and_then(Setting::from_key) {
        Some(setting) => {
            setting.set(value);
            0
        }
        None => -1,
    }
}

/// Returns the value of a counter or a setting; `i64::MIN` if there is none of this key.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn simulated_gpu_get(key: *const c_char) -> i64 {
    // SAFETY: the caller passes a C string.
    let Ok(key) = unsafe { CStr::from_ptr(key) }.to_str() else { return i64::MIN };
    let counter = Counter::from_key(key).map(Counter::get);
    counter.or_else(|| Setting::from_key(key).map(Setting::get)).unwrap_or(i64::MIN)
}
