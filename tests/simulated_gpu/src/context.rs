//! Initialization, primary contexts, and the current context of each thread. Other contexts do not exist here.

use std::cell::Cell;
use std::ffi::{c_int, c_uint};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use crate::device::{DEVICES_MAX, Device};
use crate::error::{
    Answer, CONTEXT_IS_DESTROYED, INVALID_CONTEXT, INVALID_VALUE, NO_DEVICE, NOT_INITIALIZED, NOT_PERMITTED,
    check_sticky, code_of, write_out,
};
use crate::settings::Setting;
use crate::wait::lock;

/// The handle of device 0's primary context; the next devices follow at this distance.
const FIRST_CONTEXT: usize = 0x0c00_0000;
const CONTEXT_DISTANCE: usize = 0x1000;

static IS_INITIALIZED: AtomicBool = AtomicBool::new(false);
/// How often the primary context of each device is retained.
static RETAINED: Mutex<[u32; DEVICES_MAX]> = Mutex::new([0; DEVICES_MAX]);

thread_local! {
    /// The handle of the current context; 0 for none.
    static CURRENT: Cell<usize> = const { Cell::new(0) };
    /// Whether this thread runs a host function of a stream.
    static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
}

/// Returns an error unless the library is initialized, has no sticky error, and may be called by this thread.
pub fn check_ready() -> Answer {
    if !IS_INITIALIZED.load(SeqCst) {
        return Err(NOT_INITIALIZED);
    }
    if IN_HOST_FUNCTION.get() {
        return Err(NOT_PERMITTED);
    }
    check_sticky()
}

/// Returns the device of the current context.
pub fn current_device() -> Answer<Device> {
    check_ready()?;
    let device = device_of(CURRENT.get())?;
    if lock(&RETAINED)[device.index()] == 0 {
        return Err(CONTEXT_IS_DESTROYED);
    }
    Ok(device)
}

/// Releases the primary context of a device once; returns whether that was the last time.
pub fn release_primary_context(device: Device) -> Answer<bool> {
    let mut retained = lock(&RETAINED);
    let count = &mut retained[device.index()];
    *count = count.checked_sub(1).ok_or(INVALID_CONTEXT)?;
    Ok(*count == 0)
}

/// Runs a host function of a stream, during which this thread may make no CUDA call.
pub fn run_host_function(function: impl FnOnce()) {
    IN_HOST_FUNCTION.set(true);
    function();
    IN_HOST_FUNCTION.set(false);
}

fn device_of(context: usize) -> Answer<Device> {
    let offset = context.checked_sub(FIRST_CONTEXT).filter(|offset| offset % CONTEXT_DISTANCE == 0);
    let ordinal = offset.and_then(|offset| c_int::try_from(offset / CONTEXT_DISTANCE).ok());
    ordinal.and_then(|ordinal| Device::find(ordinal).ok()).ok_or(INVALID_CONTEXT)
}

/// Initializes the library. Every other call but those for versions and errors gives error 3 before it. Without a device it
/// gives error 100.
#[unsafe(no_mangle)]
pub extern "C" fn cuInit(flags: c_uint) -> c_int {
    if flags != 0 {
        return INVALID_VALUE.0;
    }
    if Setting::Devices.amount() == 0 {
        return NO_DEVICE.0;
    }
    IS_INITIALIZED.store(true, SeqCst);
    0
}

/// Returns 1000 × major + 10 × minor of the CUDA version that the driver supports. It needs no initialization.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> c_int {
    // SAFETY: the caller passes a place for a number.
    code_of(unsafe { write_out(version, Setting::Version.get() as c_int) })
}

/// Retains the primary context of a device, which all libraries of a process share. It does not become current.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut usize, ordinal: c_int) -> c_int {
    code_of(check_ready().and_then(|()| {
        let device = Device::find(ordinal)?;
        // SAFETY: the caller passes a place for a handle.
        unsafe { write_out(context, FIRST_CONTEXT + device.index() * CONTEXT_DISTANCE)? };
        lock(&RETAINED)[device.index()] += 1;
        Ok(())
    }))
}

/// Returns the flags of a primary context (always 0), and whether it is retained.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxGetState(
    ordinal: c_int,
    flags: *mut c_uint,
    is_active: *mut c_int,
) -> c_int {
    code_of(check_ready().and_then(|()| {
        let device = Device::find(ordinal)?;
        let is_retained = lock(&RETAINED)[device.index()] > 0;
        // SAFETY: the caller passes places for two numbers.
        unsafe { write_out(flags, 0).and(write_out(is_active, is_retained.into())) }
    }))
}

/// Makes a context current on the calling thread; null makes none current.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(context: usize) -> c_int {
    code_of(check_ready().and_then(|()| {
        if context != 0 {
            device_of(context)?;
        }
        CURRENT.set(context);
        Ok(())
    }))
}

/// Returns the current context of the calling thread, or null. Without a context it succeeds.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetCurrent(context: *mut usize) -> c_int {
    // SAFETY: the caller passes a place for a handle.
    code_of(check_ready().and_then(|()| unsafe { write_out(context, CURRENT.get()) }))
}

/// Returns the device of the current context; error 201 without one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetDevice(ordinal: *mut c_int) -> c_int {
    // SAFETY: the caller passes a place for a number.
    code_of(current_device().and_then(|device| unsafe { write_out(ordinal, device.ordinal()) }))
}
