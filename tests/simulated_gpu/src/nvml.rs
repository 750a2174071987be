//! NVML: the health of the devices, as the settings say.
//!
//! A device's handle is its number plus one. The source is NVML's reference manual (12.x).

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

use crate::device::{Device, count};
use crate::settings::Setting;

const SUCCESS: c_int = 0;
const INVALID_ARGUMENT: c_int = 2;
const NOT_SUPPORTED: c_int = 3;
const INSUFFICIENT_SIZE: c_int = 7;
const GPU_IS_LOST: c_int = 15;

/// The answer of a function: nothing, or its error code.
type NvmlAnswer = Result<(), c_int>;

fn code(answer: NvmlAnswer) -> c_int {
    answer.err().unwrap_or(SUCCESS)
}

/// Returns the device of a handle.
fn device(handle: *mut c_void) -> Result<Device, c_int> {
    let number = (handle as usize).checked_sub(1).ok_or(INVALID_ARGUMENT)?;
    Device::find(number as c_int).map_err(|_| INVALID_ARGUMENT)
}

/// Returns a setting that concerns the first device only; others have the value of a healthy one.
fn of_first(device: Device, setting: Setting, healthy: i64) -> i64 {
    if device.index() == 0 { setting.get() } else { healthy }
}

/// Writes a result of a call.
unsafe fn put<T>(to: *mut T, value: T) -> NvmlAnswer {
    if to.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    // SAFETY: the caller gives the address of a result.
    unsafe { to.write(value) };
    Ok(())
}

/// Writes a text with its zero byte.
unsafe fn put_text(to: *mut c_char, capacity: usize, text: &str) -> NvmlAnswer {
    if text.len() >= capacity {
        return Err(INSUFFICIENT_SIZE);
    }
    for (at, byte) in text.bytes().chain([0]).enumerate() {
        // SAFETY: the text with its zero byte fits.
        unsafe { put(to.add(at), byte as c_char)? };
    }
    Ok(())
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInit_v2() -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlShutdown() -> c_int {
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlSystemGetDriverVersion(text: *mut c_char, capacity: c_uint) -> c_int {
    code(unsafe { put_text(text, capacity as usize, "580.0") })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCount_v2(number: *mut c_uint) -> c_int {
    code(unsafe { put(number, count() as c_uint) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, handle: *mut *mut c_void) -> c_int {
    let found = Device::find(index as c_int).map_err(|_| INVALID_ARGUMENT);
    code(found.and_then(|device| {
        if of_first(device, Setting::NvmlLost, 0) != 0 {
            return Err(GPU_IS_LOST);
        }
        unsafe { put(handle, (device.index() + 1) as *mut c_void) }
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetName(
    handle: *mut c_void,
    text: *mut c_char,
    capacity: c_uint,
) -> c_int {
    code(device(handle).and_then(|_| unsafe { put_text(text, capacity as usize, "Simulated GPU") }))
}

/// The layout of `nvmlPciInfo_t`.
#[repr(C)]
pub struct PciInfo {
    bus_id_legacy: [c_char; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    device_id: c_uint,
    subsystem_id: c_uint,
    bus_id: [c_char; 32],
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetPciInfo_v3(handle: *mut c_void, info: *mut PciInfo) -> c_int {
    code(device(handle).and_then(|device| {
        let bus = device.host_number() as c_uint + 1;
        let (legacy, full) = (format!("0000:{bus:02X}:00.0"), format!("00000000:{bus:02X}:00.0"));
        let mut found = PciInfo {
            bus_id_legacy: [0; 16],
            domain: 0,
            bus,
            device: 0,
            device_id: 0,
            subsystem_id: 0,
            bus_id: [0; 32],
        };
        unsafe {
            put_text(found.bus_id_legacy.as_mut_ptr(), 16, &legacy)?;
            put_text(found.bus_id.as_mut_ptr(), 32, &full)?;
            put(info, found)
        }
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetPersistenceMode(handle: *mut c_void, mode: *mut c_uint) -> c_int {
    code(device(handle).and_then(|_| unsafe { put(mode, Setting::NvmlPersistence.get() as c_uint) }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetEccMode(
    handle: *mut c_void,
    now: *mut c_uint,
    after_reset: *mut c_uint,
) -> c_int {
    let mode = Setting::NvmlEcc.get() as c_uint;
    code(device(handle).and_then(|_| unsafe { put(now, mode).and_then(|()| put(after_reset, mode)) }))
}

/// Tells corrected errors as 0. Without ECC, errors are not counted.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetTotalEccErrors(
    handle: *mut c_void,
    kind: c_uint,
    _counter: c_uint,
    errors: *mut c_ulonglong,
) -> c_int {
    const UNCORRECTED: c_uint = 1;
    code(device(handle).and_then(|device| {
        if !Setting::NvmlEcc.is_on() {
            return Err(NOT_SUPPORTED);
        }
        let found = if kind == UNCORRECTED { of_first(device, Setting::NvmlUncorrected, 0) } else { 0 };
        unsafe { put(errors, found as c_ulonglong) }
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetRemappedRows(
    handle: *mut c_void,
    corrected: *mut c_uint,
    uncorrected: *mut c_uint,
    is_pending: *mut c_uint,
    has_failed: *mut c_uint,
) -> c_int {
    code(device(handle).and_then(|device| {
        let rows = of_first(device, Setting::NvmlRemappedRows, 0) as c_uint;
        let [pending, failed] = [Setting::NvmlRemapPending, Setting::NvmlRemapFailed]
            .map(|setting| of_first(device, setting, 0) as c_uint);
        unsafe {
            put(corrected, 0)?;
            put(uncorrected, rows)?;
            put(is_pending, pending)?;
            put(has_failed, failed)
        }
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCurrentClocksThrottleReasons(
    handle: *mut c_void,
    reasons: *mut c_ulonglong,
) -> c_int {
    code(device(handle).and_then(|device| {
        let found = of_first(device, Setting::NvmlClockReasons, 0);
        unsafe { put(reasons, found as c_ulonglong) }
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCurrPcieLinkWidth(handle: *mut c_void, lanes: *mut c_uint) -> c_int {
    code(device(handle).and_then(|device| {
        let found = of_first(device, Setting::NvmlPcieWidth, 16);
        unsafe { put(lanes, found as c_uint) }
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMaxPcieLinkWidth(handle: *mut c_void, lanes: *mut c_uint) -> c_int {
    code(device(handle).and_then(|_| unsafe { put(lanes, 16) }))
}

/// The first links of a device are the ones that are down.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetNvLinkState(
    handle: *mut c_void,
    link: c_uint,
    state: *mut c_uint,
) -> c_int {
    code(device(handle).and_then(|device| {
        if i64::from(link) >= Setting::NvmlLinks.get() {
            return Err(INVALID_ARGUMENT);
        }
        let is_up = i64::from(link) >= of_first(device, Setting::NvmlLinksDown, 0);
        unsafe { put(state, c_uint::from(is_up)) }
    }))
}

/// Tells the errors as replays; other counters are 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetNvLinkErrorCounter(
    handle: *mut c_void,
    link: c_uint,
    counter: c_uint,
    errors: *mut c_ulonglong,
) -> c_int {
    const REPLAYS: c_uint = 0;
    code(device(handle).and_then(|device| {
        if i64::from(link) >= Setting::NvmlLinks.get() {
            return Err(INVALID_ARGUMENT);
        }
        let found = if counter == REPLAYS { of_first(device, Setting::NvmlLinkErrors, 0) } else { 0 };
        unsafe { put(errors, found as c_ulonglong) }
    }))
}
