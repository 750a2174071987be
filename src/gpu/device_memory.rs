//! Memory of a device. Begin at [`DeviceMemory`].
#![allow(unsafe_code, reason = "calls the driver, and owns memory by address")]

use std::ffi::{c_int, c_void};
use std::os::fd::BorrowedFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use super::device::Gpu;
use super::driver::call;
use super::error::GpuError;
use super::release_thread::release_off_reporting_thread;
use super::shared_memory::SharedMemory;

/// The bytes of all live values of [`DeviceMemory`].
static DEVICE_BYTES: AtomicU64 = AtomicU64::new(0);
/// `CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL`.
const DEVICE_ORDINAL: c_int = 9;

/// Returns the bytes of device memory that this crate knows in this process: allocated here, or lent by the program.
#[must_use]
pub fn device_memory_bytes() -> u64 {
    DEVICE_BYTES.load(Ordering::Relaxed)
}

/// A range of a device's memory. The host cannot touch its bytes: [`Gpu::copy`] does.
pub struct DeviceMemory {
    gpu: Gpu,
    address: u64,
    len: usize,
    owner: Owner,
}

enum Owner {
    /// This value frees the memory.
    Here,
    /// As above, and other processes may map it.
    HereShared(SharedMemory),
    /// The program does, once this is dropped. It is never looked at; the lock makes it shareable.
    Program(#[expect(dead_code, reason = "it is only dropped")] Mutex<Box<dyn Send>>),
}

impl std::fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeviceMemory")
            .field("gpu", &self.gpu.ordinal())
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

impl DeviceMemory {
    /// Allocates `len` bytes. Their contents are undefined.
    ///
    /// # Errors
    /// Returns the error of the driver, such as that memory is missing.
    pub fn allocate(gpu: &Gpu, len: usize) -> Result<Self, GpuError> {
        let mut address = 0;
        let _context = gpu.enter()?;
        // SAFETY: the call writes an address.
        unsafe { call!(gpu.driver(), cuMemAlloc_v2(&raw mut address, len.max(1)))? };
        Ok(Self::counted(Self { gpu: gpu.clone(), address, len, owner: Owner::Here }))
    }

    /// Allocates `len` bytes that other processes of the host [can map](Self::descriptor), if the device supports that; else as
    /// [`DeviceMemory::allocate`]. The length is rounded up to what the driver allocates, usually 2 MiB.
    ///
    /// # Errors
    /// Returns the error of the driver, such as that memory is missing.
    pub fn allocate_shared(gpu: &Gpu, len: usize) -> Result<Self, GpuError> {
        if !SharedMemory::is_supported_by(gpu) {
            return Self::allocate(gpu, len);
        }
        // A sandbox or a virtual GPU may refuse what the attributes promise.
        let shared = match SharedMemory::create(gpu, len) {
            Err(error) if !error.is_out_of_memory() && !error.is_sticky() => {
                tracing::warn!(gpu = gpu.ordinal(), %error, "memory of a GPU cannot be shared with other processes");
                return Self::allocate(gpu, len);
            }
            created => created?,
        };
        let (address, len) = (shared.base(), shared.len());
        Ok(Self::counted(Self { gpu: gpu.clone(), address, len, owner: Owner::HereShared(shared) }))
    }

    fn counted(memory: Self) -> Self {
        DEVICE_BYTES.fetch_add(memory.len as u64, Ordering::Relaxed);
        memory
    }

    /// Takes memory of the program, such as that of an array. `owner` is dropped with the last use of the memory, on any
    /// thread, so its `Drop` must neither wait nor take a lock that a thread holds while it calls this crate.
    ///
    /// # Errors
    /// Returns the error of the driver if the address is no memory of this device.
    ///
    /// # Safety
    /// Until `owner` is dropped, the `len` bytes at `address` must stay allocated.
    pub unsafe fn of_program(
        gpu: &Gpu,
        address: u64,
        len: usize,
        owner: Box<dyn Send>,
    ) -> Result<Self, GpuError> {
        let owner = Owner::Program(Mutex::new(owner));
        let memory = Self::counted(Self { gpu: gpu.clone(), address, len, owner });
        if len > 0 {
            let mut ordinal: c_int = -1;
            let _context = gpu.enter()?;
            let to: *mut c_void = (&raw mut ordinal).cast();
            // SAFETY: the attribute is a number, for which there is a place.
            unsafe { call!(gpu.driver(), cuPointerGetAttribute(to, DEVICE_ORDINAL, address))? };
            if u32::try_from(ordinal) != Ok(gpu.ordinal()) {
                let name = format!("the address is memory of GPU {ordinal}, not of GPU {}", gpu.ordinal());
                return Err(GpuError { call: "cuPointerGetAttribute", code: 1, name });
            }
        }
        Ok(memory)
    }

    /// Returns the device.
    #[must_use]
    pub const fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Returns the address of the first byte: a number, of use to the driver only.
    #[must_use]
    pub const fn address(&self) -> u64 {
        self.address
    }

    /// Returns the descriptor by which another process maps the memory; none of memory that cannot be mapped so.
    #[must_use]
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match &self.owner {
            Owner::HereShared(shared) => Some(shared.descriptor()),
            Owner::Here | Owner::Program(_) => None,
        }
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

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        DEVICE_BYTES.fetch_sub(self.len as u64, Ordering::Relaxed);
        if matches!(self.owner, Owner::Here) {
            let (gpu, address) = (self.gpu.clone(), self.address);
            release_off_reporting_thread(move || {
                let Ok(_context) = gpu.enter() else { return };
                // SAFETY: the memory was this value's. The driver waits for the copies that use it.
                let _is_lost = unsafe { call!(gpu.driver(), cuMemFree_v2(address)) };
            });
        }
    }
}
