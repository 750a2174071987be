//! The work of a context: its end, its streams' priorities, and the wait for all of it.

use std::ffi::c_int;

use crate::context::{check_ready, current_device, release_primary_context};
use crate::device::Device;
use crate::error::{check_sticky, code_of, write_out};
use crate::{device_memory, stream};

/// Releases the primary context of a device. The last release destroys it with its streams and memory; threads on which it
/// is current then get error 709. A release without a retain gives error 201.
#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease_v2(ordinal: c_int) -> c_int {
    code_of(check_ready().and_then(|()| {
        let device = Device::find(ordinal)?;
        if release_primary_context(device)? {
            stream::destroy_all(device);
            device_memory::free_all(device);
        }
        Ok(())
    }))
}

/// Returns the range of priorities. A smaller number is a higher priority. A device without priorities returns 0 and 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) -> c_int {
    let outputs = [(least, stream::LEAST_PRIORITY), (greatest, stream::GREATEST_PRIORITY)];
    code_of(current_device().and_then(|_| {
        // Either output may be null, if the caller does not want it.
        outputs.into_iter().filter(|(to, _)| !to.is_null()).try_for_each(|(to, value)| {
            // SAFETY: the caller passes places for two numbers.
            unsafe { write_out(to, value) }
        })
    }))
}

/// Waits until all work of the current context has ended, and returns an error of that work.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSynchronize() -> c_int {
    code_of(current_device().and_then(|device| {
        stream::synchronize_all(device);
        check_sticky()
    }))
}
