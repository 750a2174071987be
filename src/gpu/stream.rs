//! Streams: ordered work of a device. Begin at [`GpuStream`].
#![allow(unsafe_code, reason = "calls the driver")]

use std::ffi::{c_int, c_void};

use cudarc::driver::sys::CUstream;

use super::device::Gpu;
use super::driver::call;
use super::error::GpuError;
use super::event::{GpuEvent, query};

/// `CU_STREAM_NON_BLOCKING`: the default stream does not order it.
const NON_BLOCKING: u32 = 1;

/// A stream of the highest priority, which the default stream does not order. It is destroyed with the value; its work still ends.
#[derive(Debug)]
pub struct GpuStream {
    gpu: Gpu,
    stream: CUstream,
}

// SAFETY: the driver accepts a stream from any thread.
unsafe impl Send for GpuStream {}
// SAFETY: as above.
unsafe impl Sync for GpuStream {}

impl GpuStream {
    /// Creates a stream.
    ///
    /// # Errors
    /// Returns the error of the driver.
    pub fn new(gpu: &Gpu) -> Result<Self, GpuError> {
        let (mut least, mut greatest): (c_int, c_int) = (0, 0);
        let mut stream = std::ptr::null_mut();
        let _context = gpu.enter()?;
        // SAFETY: the calls write numbers and a handle.
        unsafe {
            call!(gpu.driver(), cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest))?;
            call!(gpu.driver(), cuStreamCreateWithPriority(&raw mut stream, NON_BLOCKING, greatest))?;
        }
        Ok(Self { gpu: gpu.clone(), stream })
    }

    pub(crate) const fn handle(&self) -> CUstream {
        self.stream
    }

    /// Returns the stream as other libraries name it (a `cudaStream_t`); valid as long as this value.
    #[must_use]
    pub const fn raw(&self) -> *mut c_void {
        self.stream.cast()
    }

    /// Returns an event that stands for all work of the stream so far.
    ///
    /// # Errors
    /// Returns the error of the driver.
    pub fn record_event(&self) -> Result<GpuEvent, GpuError> {
        // SAFETY: the stream is of this device, and not destroyed.
        unsafe { GpuEvent::recorded_on(&self.gpu, self.raw()) }
    }

    /// Returns whether all work of the stream is done. A sticky error is also the [loss](Gpu::loss) of the device.
    ///
    /// # Errors
    /// Returns the error of the work, or another sticky one.
    pub fn is_idle(&self) -> Result<bool, GpuError> {
        // SAFETY: the stream is not destroyed.
        query(&self.gpu, || unsafe { call!(self.gpu.driver(), cuStreamQuery(self.stream)) })
    }
}

impl Drop for GpuStream {
    fn drop(&mut self) {
        if let Ok(_context) = self.gpu.enter() {
            // SAFETY: the stream is this value's. The driver frees it once its work is done.
            let _is_lost = unsafe { call!(self.gpu.driver(), cuStreamDestroy_v2(self.stream)) };
        }
    }
}
