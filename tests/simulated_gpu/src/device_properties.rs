//! The properties of devices.

use std::ffi::{c_char, c_int};

use crate::context::check_ready;
use crate::device::{Device, count};
use crate::error::{Answer, INVALID_VALUE, code_of, write_out};
use crate::settings::Setting;

/// Runs a query of a device.
fn answer_device_query(ordinal: c_int, body: impl FnOnce(Device) -> Answer) -> c_int {
    code_of(check_ready().and_then(|()| body(Device::find(ordinal)?)))
}

/// Returns the number of devices.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(to: *mut c_int) -> c_int {
    // SAFETY: the caller passes a place for a number.
    code_of(check_ready().and_then(|()| unsafe { write_out(to, count() as c_int) }))
}

/// Returns the handle of a device, which is its number; error 101 if it does not exist.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(to: *mut c_int, ordinal: c_int) -> c_int {
    // SAFETY: the caller passes a place for a number.
    answer_device_query(ordinal, |device| unsafe { write_out(to, device.ordinal()) })
}

/// Writes a text that ends with NUL, cut to the caller's length.
unsafe fn write_text(to: *mut c_char, len: c_int, text: &str) -> Answer {
    let len = usize::try_from(len).ok().filter(|len| *len > 0 && !to.is_null()).ok_or(INVALID_VALUE)?;
    let text = &text.as_bytes()[..text.len().min(len - 1)];
    // SAFETY: the caller's buffer has `len` bytes.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), to.cast(), text.len());
        to.add(text.len()).write(0);
    }
    Ok(())
}

/// Returns the name of a device, cut to the caller's length.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetName(to: *mut c_char, len: c_int, ordinal: c_int) -> c_int {
    // SAFETY: the caller passes a buffer of `len` bytes.
    answer_device_query(ordinal, |_| unsafe { write_text(to, len, "Simulated GPU") })
}

/// Returns the bus id of a device, `domain:bus:device.function` in hexadecimal digits.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetPCIBusId(to: *mut c_char, len: c_int, ordinal: c_int) -> c_int {
    answer_device_query(ordinal, |device| {
        let text = format!("0000:{:02x}:00.0", (device.host_number() + 1) & 0xff);
        // SAFETY: the caller passes a buffer of `len` bytes.
        unsafe { write_text(to, len, &text) }
    })
}

/// The same as `cuDeviceGetUuid_v2` for bindings of CUDA before 13.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetUuid(to: *mut [u8; 16], ordinal: c_int) -> c_int {
    // SAFETY: the caller passes a place for 16 bytes.
    unsafe { cuDeviceGetUuid_v2(to, ordinal) }
}

/// Returns the UUID of a device: the same for every process that sees the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetUuid_v2(to: *mut [u8; 16], ordinal: c_int) -> c_int {
    answer_device_query(ordinal, |device| {
        let mut uuid = *b"simulatd\0\0\0\0\0\0\0\0";
        uuid[8..].copy_from_slice(&device.host_number().to_be_bytes());
        // SAFETY: the caller passes a place for 16 bytes.
        unsafe { write_out(to, uuid) }
    })
}

/// Returns the bytes of memory of a device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceTotalMem_v2(to: *mut usize, ordinal: c_int) -> c_int {
    // SAFETY: the caller passes a place for a number.
    answer_device_query(ordinal, |_| unsafe { write_out(to, Setting::Memory.amount() as usize) })
}

/// Returns an attribute of a device; error 1 for a number that no attribute has. Attributes that are not listed here are 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetAttribute(to: *mut c_int, attribute: c_int, ordinal: c_int) -> c_int {
    /// The last attribute of CUDA 12.0.
    const ATTRIBUTE_MAX: c_int = 134;
    answer_device_query(ordinal, |device| {
        if !(1..=ATTRIBUTE_MAX).contains(&attribute) {
            return Err(INVALID_VALUE);
        }
        let value = match attribute {
            // Threads of a block; multiprocessors; copy engines.
            1 => 1024,
            16 => 8,
            40 => 3,
            // Bus number, as in the bus id.
            33 => (device.host_number() as c_int + 1) & 0xff,
            // Compute capability 9.0.
            75 => 9,
            // Maps host memory; overlaps copies and kernels; unified addresses; stream priorities.
            19 | 15 | 41 | 78 => 1,
            // Registered memory has one address for host and device; stream memory operations; registration of host memory.
            91 | 122 | 99 => 1,
            // Virtual memory management with descriptors; events for other processes.
            102 | 103 | 125 => 1,
            // Memory pools (115) are 0, which keeps callers on `cuMemAlloc_v2`.
            _ => 0,
        };
        // SAFETY: the caller passes a place for a number.
        unsafe { write_out(to, value) }
    })
}

/// Returns whether a device can access the memory of another one. A device and itself give 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceCanAccessPeer(to: *mut c_int, one: c_int, other: c_int) -> c_int {
    answer_device_query(one, |one| {
        let other = Device::find(other)?;
        // SAFETY: the caller passes a place for a number.
        unsafe { write_out(to, (one != other && Setting::PeerAccess.amount() != 0).into()) }
    })
}
