//! A device with its context. Begin at [`Gpu::open`].
//!
//! The context is the primary one, which programs of the same process such as JAX use as well. It is retained once and
//! never released: a process that has used a GPU keeps its context.
#![allow(unsafe_code, reason = "calls the driver")]

use std::ffi::{CStr, c_char, c_int};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use cudarc::driver::sys::{CUcontext, CUdevice, CUuuid};

use super::driver::{Driver, call};
use super::error::{DriverUnavailable, GpuError};

/// The most devices of a process.
pub(crate) const DEVICES_MAX: usize = 64;

/// A device of this process. Clones are the same device.
#[derive(Clone)]
pub struct Gpu(Arc<GpuInner>);

struct GpuInner {
    driver: &'static Driver,
    ordinal: u32,
    context: CUcontext,
    loss: OnceLock<GpuError>,
}

// SAFETY: a context is used by any thread, once it is the current one of the thread.
unsafe impl Send for GpuInner {}
// SAFETY: as above.
unsafe impl Sync for GpuInner {}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Gpu").field(&self.ordinal()).finish()
    }
}

impl PartialEq for Gpu {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Gpu {}

/// The devices that are lost to this process, in the order of their losses.
static LOST: Mutex<Vec<(u32, GpuError)>> = Mutex::new(Vec::new());

/// Returns the devices that are lost to this process, each with its [loss](Gpu::loss), in the order of the losses. It makes no
/// call of the driver, and waits for none.
#[must_use]
pub fn lost_gpus() -> Vec<(u32, GpuError)> {
    LOST.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// The properties of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceFacts {
    /// The number of the device in this process.
    pub ordinal: u32,
    /// The name of the product.
    pub name: String,
    /// The bytes of its memory.
    pub memory: u64,
    /// The identity of the device, as `GPU-` and a UUID.
    pub uuid: String,
    /// The address on the PCI bus.
    pub pci: String,
    /// The ordinals of the devices whose memory it can read directly.
    pub peers: Vec<u32>,
}

/// Restores the context that was current before, when it is dropped.
#[must_use = "the context is current only while the guard lives"]
#[expect(missing_debug_implementations, reason = "it has nothing to show")]
pub struct ContextGuard<'a> {
    driver: &'a Driver,
    before: Option<CUcontext>,
}

impl Drop for ContextGuard<'_> {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // SAFETY: the context was current a moment ago.
            let _is_lost = unsafe { call!(self.driver, cuCtxSetCurrent(before)) };
        }
    }
}

impl Gpu {
    /// Opens the device with this number, as `CUDA_VISIBLE_DEVICES` numbers the devices of the process. The first call
    /// for a device makes its context, which takes a fraction of a second on a real one.
    ///
    /// # Errors
    /// Returns why there is no driver, or no such device.
    pub fn open(ordinal: u32) -> Result<Self, DriverUnavailable> {
        static OPEN: Mutex<Vec<Gpu>> = Mutex::new(Vec::new());
        let driver = Driver::get()?;
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = open.iter().find(|gpu| gpu.ordinal() == ordinal) {
            return Ok(found.clone());
        }
        let count = driver.device_count().map_err(DriverUnavailable::DoesNotStart)?;
        if ordinal >= count.min(DEVICES_MAX as u32) {
            return Err(DriverUnavailable::NoSuchDevice { ordinal, count });
        }
        let gpu = Self::retain(driver, ordinal).map_err(DriverUnavailable::DoesNotStart)?;
        open.push(gpu.clone());
        Ok(gpu)
    }

    fn retain(driver: &'static Driver, ordinal: u32) -> Result<Self, GpuError> {
        let device = device_handle(driver, ordinal)?;
        let mut context: CUcontext = std::ptr::null_mut();
        // SAFETY: the call writes a handle.
        unsafe { call!(driver, cuDevicePrimaryCtxRetain(&raw mut context, device))? };
        Ok(Self(Arc::new(GpuInner { driver, ordinal, context, loss: OnceLock::new() })))
    }

    /// Returns the number of the device.
    #[must_use]
    pub fn ordinal(&self) -> u32 {
        self.0.ordinal
    }

    /// Returns the error by which the device was lost to this process, or none while it works.
    #[must_use]
    pub fn loss(&self) -> Option<&GpuError> {
        self.0.loss.get()
    }

    /// Records an error of the device. The first sticky one is its loss.
    pub(crate) fn note_error(&self, error: &GpuError) {
        if error.is_sticky() && self.0.loss.set(error.clone()).is_ok() {
            LOST.lock().unwrap_or_else(PoisonError::into_inner).push((self.ordinal(), error.clone()));
            tracing::error!(gpu = self.ordinal(), %error, "a GPU is lost to this process");
        }
    }

    pub(crate) fn driver(&self) -> &'static Driver {
        self.0.driver
    }

    /// Makes the context current on this thread until the guard is dropped.
    ///
    /// # Errors
    /// Returns the error of the driver.
    pub fn enter(&self) -> Result<ContextGuard<'static>, GpuError> {
        let driver = self.0.driver;
        let mut before: CUcontext = std::ptr::null_mut();
        // SAFETY: the call writes a handle.
        unsafe { call!(driver, cuCtxGetCurrent(&raw mut before))? };
        if before == self.0.context {
            return Ok(ContextGuard { driver, before: None });
        }
        // SAFETY: the context is never released.
        unsafe { call!(driver, cuCtxSetCurrent(self.0.context))? };
        Ok(ContextGuard { driver, before: Some(before) })
    }
}

impl DeviceFacts {
    /// Returns what every device of this process says of itself. It makes no context.
    ///
    /// # Errors
    /// Returns why there is no driver.
    pub fn of_all_devices() -> Result<Vec<Self>, DriverUnavailable> {
        let driver = Driver::get()?;
        let count = driver.device_count().map_err(DriverUnavailable::DoesNotStart)?;
        let all: Result<_, _> = (0..count).map(|ordinal| Self::read(driver, ordinal, count)).collect();
        all.map_err(DriverUnavailable::DoesNotStart)
    }

    fn read(driver: &Driver, ordinal: u32, count: u32) -> Result<Self, GpuError> {
        let device = device_handle(driver, ordinal)?;
        let (mut name, mut pci): ([c_char; 256], [c_char; 64]) = ([0; 256], [0; 64]);
        let (mut memory, mut uuid) = (0usize, CUuuid { bytes: [0; 16] });
        // SAFETY: the calls write texts that end with a zero byte, of at most the given lengths, and numbers.
        unsafe {
            call!(driver, cuDeviceGetName(name.as_mut_ptr(), 255, device))?;
            call!(driver, cuDeviceGetPCIBusId(pci.as_mut_ptr(), 63, device))?;
            call!(driver, cuDeviceTotalMem_v2(&raw mut memory, device))?;
            call!(driver, cuDeviceGetUuid_v2(&raw mut uuid, device))?;
        }
        let mut peers = Vec::new();
        for other in (0..count).filter(|other| *other != ordinal) {
            let mut can: c_int = 0;
            let peer = device_handle(driver, other)?;
            // SAFETY: the call writes a number.
            unsafe { call!(driver, cuDeviceCanAccessPeer(&raw mut can, device, peer))? };
            peers.extend((can != 0).then_some(other));
        }
        let (name, pci, uuid) = (text(&name), text(&pci), uuid_text(uuid.bytes));
        Ok(Self { ordinal, name, memory: memory as u64, uuid, pci, peers })
    }
}

pub(crate) fn device_handle(driver: &Driver, ordinal: u32) -> Result<CUdevice, GpuError> {
    let mut device: CUdevice = 0;
    // SAFETY: the call writes a number.
    unsafe { call!(driver, cuDeviceGet(&raw mut device, ordinal.cast_signed()))? };
    Ok(device)
}

/// Returns the text that ends with a zero byte, or with the buffer.
fn text(bytes: &[c_char]) -> String {
    let bytes: Vec<u8> = bytes.iter().map(|byte| byte.cast_unsigned()).collect();
    CStr::from_bytes_until_nul(&bytes).map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
}

/// Returns a UUID as `nvidia-smi` prints it.
fn uuid_text(bytes: [c_char; 16]) -> String {
    let hex: String = bytes.iter().map(|byte| format!("{:02x}", byte.cast_unsigned())).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}
