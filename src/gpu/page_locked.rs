//! Page-locked host memory. Begin at [`PageLocked`].
#![allow(unsafe_code, reason = "calls the driver, and owns memory by address")]

use std::ffi::c_void;
use std::ptr::NonNull;

use super::device::Gpu;
use super::driver::call;
use super::error::GpuError;
use super::release_thread::free_later;

/// `CU_MEMHOSTALLOC_PORTABLE`: page-locked for every device of the process.
const PORTABLE: u32 = 1;

/// Page-locked memory of this process, freed some time after the value is dropped. Any device of the process copies from and to it.
#[derive(Debug)]
pub struct PageLocked {
    gpu: Gpu,
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the value owns the memory, which has no thread.
unsafe impl Send for PageLocked {}
// SAFETY: shared access gives the address only.
unsafe impl Sync for PageLocked {}

impl PageLocked {
    /// Allocates `len` bytes. Their contents are undefined.
    ///
    /// # Errors
    /// Returns the error of the driver: the system limits how much memory is locked.
    pub fn allocate(gpu: &Gpu, len: usize) -> Result<Self, GpuError> {
        let mut base: *mut c_void = std::ptr::null_mut();
        let _context = gpu.enter()?;
        // SAFETY: the call writes an address.
        unsafe { call!(gpu.driver(), cuMemHostAlloc(&raw mut base, len.max(1), PORTABLE))? };
        let Some(base) = NonNull::new(base.cast()) else {
            return Err(GpuError { call: "cuMemHostAlloc", code: 0, name: "it gave no address".to_owned() });
        };
        Ok(Self { gpu: gpu.clone(), base, len })
    }

    /// Returns the address of the first byte.
    #[must_use]
    pub const fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Returns the length in bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns whether it has no bytes.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for PageLocked {
    fn drop(&mut self) {
        let (gpu, base) = (self.gpu.clone(), self.base.as_ptr().expose_provenance());
        free_later(move || {
            let Ok(_context) = gpu.enter() else { return };
            let base = std::ptr::with_exposed_provenance_mut::<c_void>(base);
            // SAFETY: the memory was this value's.
            let _is_lost = unsafe { call!(gpu.driver(), cuMemFreeHost(base)) };
        });
    }
}
