//! Memory of a device that other processes of the host map, by the driver's virtual memory management.
//!
//! A process creates *physical memory*, maps it to addresses of its own, and exports it as a descriptor. Another process
//! imports the descriptor, and maps the same memory to other addresses. The physical memory is freed when no process maps it
//! or has a descriptor of it, so neither process can take it away from the other. Begin at [`SharedMemory::create`] and
//! [`ImportedMemory::import`].
//!
//! The driver maps memory for reading and writing alike: a process that was given a descriptor can write.
#![allow(unsafe_code, reason = "calls the driver, and owns memory by address")]

use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};

use cudarc::driver::sys::{
    CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationHandleType, CUmemAllocationProp,
    CUmemAllocationProp_st__bindgen_ty_1, CUmemAllocationType, CUmemGenericAllocationHandle, CUmemLocation,
    CUmemLocationType,
};

use super::device::{Gpu, device_handle};
use super::driver::call;
use super::error::GpuError;
use super::release_thread::release_off_reporting_thread;

/// `CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED` and
/// `CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED`.
const ATTRIBUTES: [c_int; 2] = [102, 103];
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const DESCRIPTOR: c_uint = 1;
/// `CU_MEM_ALLOC_GRANULARITY_MINIMUM`.
const MINIMUM: c_uint = 0;

/// Physical memory that this process created, and its addresses. Freed with the value.
pub(crate) struct SharedMemory {
    addresses: MappedAddresses,
    descriptor: OwnedFd,
}

/// Memory that was exported, mapped for another device or by another process. Unmapped with the value.
pub struct ImportedMemory(MappedAddresses);

/// Addresses that are mapped to physical memory.
struct MappedAddresses {
    gpu: Gpu,
    base: u64,
    /// A multiple of the granularity.
    len: usize,
    /// Whether work of the program may still use the addresses when they are unmapped.
    has_program_work: bool,
}

/// A handle of physical memory, released with the value. Its mappings stay.
struct PhysicalMemory<'a> {
    gpu: &'a Gpu,
    handle: CUmemGenericAllocationHandle,
}

/// Addresses to which nothing is mapped yet.
struct ReservedAddresses<'a> {
    gpu: &'a Gpu,
    base: u64,
    len: usize,
}

impl SharedMemory {
    /// Creates `len` bytes, rounded up to the granularity of the device.
    pub fn create(gpu: &Gpu, len: usize) -> Result<Self, GpuError> {
        let properties = properties_on(gpu)?;
        let len = round_up_to_granularity(gpu, &properties, len)?;
        let _context = gpu.enter()?;
        let mut handle = 0;
        // SAFETY: the call reads the properties, and writes a handle.
        unsafe { call!(gpu.driver(), cuMemCreate(&raw mut handle, len, &raw const properties, 0))? };
        let physical = PhysicalMemory { gpu, handle };
        let mut descriptor: c_int = -1;
        let to: *mut c_void = (&raw mut descriptor).cast();
        // SAFETY: the call writes a descriptor, for which there is a place.
        unsafe { call!(gpu.driver(), cuMemExportToShareableHandle(to, handle, DESCRIPTOR, 0))? };
        // SAFETY: the descriptor is new, and nothing else owns it.
        let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
        // The driver promises nothing about programs that this one starts.
        let _stays_open = rustix::io::fcntl_setfd(&descriptor, rustix::io::FdFlags::CLOEXEC);
        Ok(Self { addresses: MappedAddresses::map(&physical, len, true)?, descriptor })
    }

    /// Returns whether a device can have such memory.
    pub fn is_supported_by(gpu: &Gpu) -> bool {
        let supports = |attribute: c_int| -> Result<bool, GpuError> {
            let (device, mut value) = (device_handle(gpu.driver(), gpu.ordinal())?, 0);
            // SAFETY: the call writes a number.
            unsafe { call!(gpu.driver(), cuDeviceGetAttribute(&raw mut value, attribute, device))? };
            Ok(value != 0)
        };
        ATTRIBUTES.into_iter().all(|attribute| supports(attribute).unwrap_or(false))
    }

    pub fn base(&self) -> u64 {
        self.addresses.base
    }

    /// Returns the length in bytes, a multiple of the granularity.
    pub fn len(&self) -> usize {
        self.addresses.len
    }

    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl std::fmt::Debug for ImportedMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ImportedMemory")
            .field("gpu", &self.0.gpu.ordinal())
            .field("len", &self.0.len)
            .finish_non_exhaustive()
    }
}

impl ImportedMemory {
    /// Maps the first `len` bytes of memory that this process or another one exported, so that this device can copy from and to it. The
    /// memory may be another device's.
    ///
    /// Before the value is dropped, copies from and to it must have ended.
    ///
    /// # Errors
    /// Returns the error of the driver if the descriptor is none of device memory, the memory is shorter, or the device cannot
    /// access the other one directly.
    pub fn import(gpu: &Gpu, descriptor: BorrowedFd<'_>, len: usize) -> Result<Self, GpuError> {
        let properties = properties_on(gpu)?;
        let len = round_up_to_granularity(gpu, &properties, len)?;
        let _context = gpu.enter()?;
        let (mut handle, number) = (0, descriptor.as_raw_fd());
        // The descriptor is passed in place of the address.
        let from: *mut c_void = std::ptr::without_provenance_mut(number as usize);
        // SAFETY: the descriptor is open during the call, which writes a handle.
        unsafe { call!(gpu.driver(), cuMemImportFromShareableHandle(&raw mut handle, from, DESCRIPTOR))? };
        MappedAddresses::map(&PhysicalMemory { gpu, handle }, len, false).map(Self)
    }

    /// Returns the address of the first byte: a number, of use to the driver only.
    #[must_use]
    pub const fn base(&self) -> u64 {
        self.0.base
    }
}

impl MappedAddresses {
    /// Maps `len` bytes of physical memory to new addresses, for the device of the handle.
    fn map(physical: &PhysicalMemory<'_>, len: usize, has_program_work: bool) -> Result<Self, GpuError> {
        let (gpu, driver) = (physical.gpu, physical.gpu.driver());
        let mut base = 0;
        // SAFETY: the call writes an address.
        unsafe { call!(driver, cuMemAddressReserve(&raw mut base, len, 0, 0, 0))? };
        let reserved = ReservedAddresses { gpu, base, len };
        // SAFETY: the addresses are reserved, and nothing is mapped to them.
        unsafe { call!(driver, cuMemMap(base, len, 0, physical.handle, 0))? };
        std::mem::forget(reserved);
        let mapped = Self { gpu: gpu.clone(), base, len, has_program_work };
        let flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let access = CUmemAccessDesc { location: location_on(gpu)?, flags };
        // SAFETY: the call reads one description.
        unsafe { call!(driver, cuMemSetAccess(base, len, &raw const access, 1))? };
        Ok(mapped)
    }
}

impl Drop for MappedAddresses {
    fn drop(&mut self) {
        let (gpu, base, len, has_program_work) =
            (self.gpu.clone(), self.base, self.len, self.has_program_work);
        release_off_reporting_thread(move || {
            let Ok(_context) = gpu.enter() else { return };
            let driver = gpu.driver();
            if has_program_work {
                // As `cuMemFree` does.
                // SAFETY: the call waits for the device.
                let _is_lost = unsafe { call!(driver, cuCtxSynchronize()) };
            }
            // SAFETY: the addresses were this value's, and no copy uses them.
            let unmapped = unsafe { call!(driver, cuMemUnmap(base, len)) };
            // Addresses that are still mapped cannot be freed, and the driver gives them to no other allocation.
            if unmapped.is_ok() {
                drop(ReservedAddresses { gpu: &gpu, base, len });
            }
        });
    }
}

impl Drop for ReservedAddresses<'_> {
    fn drop(&mut self) {
        // SAFETY: nothing is mapped to the addresses.
        let _is_lost = unsafe { call!(self.gpu.driver(), cuMemAddressFree(self.base, self.len)) };
    }
}

impl Drop for PhysicalMemory<'_> {
    fn drop(&mut self) {
        // SAFETY: the handle is this value's.
        let _is_lost = unsafe { call!(self.gpu.driver(), cuMemRelease(self.handle)) };
    }
}

/// Returns the place of memory of a device.
fn location_on(gpu: &Gpu) -> Result<CUmemLocation, GpuError> {
    let id = device_handle(gpu.driver(), gpu.ordinal())?;
    Ok(CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id })
}

/// Returns the properties of memory of a device that can be exported as a descriptor.
fn properties_on(gpu: &Gpu) -> Result<CUmemAllocationProp, GpuError> {
    Ok(CUmemAllocationProp {
        type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        location: location_on(gpu)?,
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        },
    })
}

fn round_up_to_granularity(
    gpu: &Gpu,
    properties: &CUmemAllocationProp,
    len: usize,
) -> Result<usize, GpuError> {
    let (mut granularity, _context) = (0, gpu.enter()?);
    let properties: *const CUmemAllocationProp = properties;
    // SAFETY: the call reads the properties, and writes a number.
    unsafe {
        call!(gpu.driver(), cuMemGetAllocationGranularity(&raw mut granularity, properties, MINIMUM))?;
    }
    len.max(1).checked_next_multiple_of(granularity).ok_or_else(|| GpuError {
        call: "cuMemGetAllocationGranularity",
        code: 0,
        name: format!("{len} bytes are too many"),
    })
}
