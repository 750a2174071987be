//! Events: points in a stream.
//!
//! An event that was *recorded* stands for the work of its stream up to that call. It has *happened* when this work is
//! done. Begin at [`GpuEvent`].
#![allow(unsafe_code, reason = "calls the driver")]

use std::ffi::c_int;

use cudarc::driver::sys::{CUevent, CUstream};

use super::device::Gpu;
use super::driver::call;
use super::error::GpuError;

/// `CU_EVENT_DISABLE_TIMING`: the event only orders.
const DISABLE_TIMING: u32 = 2;
/// `CUDA_ERROR_NOT_READY`.
const NOT_READY: c_int = 600;

/// An event of a device, destroyed with the value.
#[derive(Debug)]
pub struct GpuEvent {
    gpu: Gpu,
    event: CUevent,
}

// SAFETY: the driver accepts an event from any thread.
unsafe impl Send for GpuEvent {}
// SAFETY: as above.
unsafe impl Sync for GpuEvent {}

impl GpuEvent {
    /// Creates an event that was never recorded: it counts as happened.
    pub(crate) fn new(gpu: &Gpu) -> Result<Self, GpuError> {
        let mut event = std::ptr::null_mut();
        let _context = gpu.enter()?;
        // SAFETY: the call writes a handle.
        unsafe { call!(gpu.driver(), cuEventCreate(&raw mut event, DISABLE_TIMING))? };
        Ok(Self { gpu: gpu.clone(), event })
    }

    /// Creates an event, and records it on a stream of the program: it stands for all work of the stream so far.
    ///
    /// # Errors
    /// Returns the error of the driver.
    ///
    /// # Safety
    /// `stream` must be a stream of this device (a `CUstream`) that is not destroyed during the call, or null for the
    /// default stream.
    pub unsafe fn recorded_on(gpu: &Gpu, stream: *mut std::ffi::c_void) -> Result<Self, GpuError> {
        let event = Self::new(gpu)?;
        // SAFETY: the caller guarantees the stream.
        unsafe { event.record(stream.cast())? };
        Ok(event)
    }

    /// Records the event on a stream.
    ///
    /// # Safety
    /// The stream must be one of the event's device, and not destroyed.
    pub(crate) unsafe fn record(&self, stream: CUstream) -> Result<(), GpuError> {
        let _context = self.gpu.enter()?;
        // SAFETY: the caller guarantees the stream.
        unsafe { call!(self.gpu.driver(), cuEventRecord(self.event, stream)) }
    }

    /// Returns whether the work before the latest record is done. A sticky error is also the [loss](Gpu::loss) of the device.
    ///
    /// # Errors
    /// Returns the error of the work, or another sticky one.
    pub fn has_happened(&self) -> Result<bool, GpuError> {
        // SAFETY: the event is this value's.
        query(&self.gpu, || unsafe { call!(self.gpu.driver(), cuEventQuery(self.event)) })
    }
}

/// Asks the driver about an event or a stream, and returns whether its work is done. A sticky error is the loss of the device.
pub(crate) fn query(gpu: &Gpu, ask: impl FnOnce() -> Result<(), GpuError>) -> Result<bool, GpuError> {
    let answer = gpu.enter().and_then(|_context| ask());
    match answer {
        Err(error) if error.code == NOT_READY => Ok(false),
        answer => answer.map(|()| true).inspect_err(|error| gpu.note_error(error)),
    }
}

impl Drop for GpuEvent {
    fn drop(&mut self) {
        if let Ok(_context) = self.gpu.enter() {
            // SAFETY: the event is this value's. The driver frees it once its recorded work is done.
            let _is_lost = unsafe { call!(self.gpu.driver(), cuEventDestroy_v2(self.event)) };
        }
    }
}
