//! The functions of the driver, found once per process.
//!
//! The types of the arguments are those of `cudarc`. The results are plain integers: a newer driver may return a code
//! that a Rust enum of today does not have. Begin at [`Driver::get`].
#![allow(unsafe_code, reason = "looks up functions of a C library, and calls them")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys::{
    self, CUDA_MEMCPY2D, CUcontext, CUdevice, CUdeviceptr, CUevent, CUmemAccessDesc, CUmemAllocationProp,
    CUmemGenericAllocationHandle, CUstream, CUuuid,
};

use super::error::{DriverUnavailable, GpuError};

/// The oldest version of CUDA that a driver must support: all functions below are as old.
const VERSION_MIN: c_int = 12_000;
/// `CUDA_SUCCESS`.
const SUCCESS: c_int = 0;

/// Defines the table: the name of each function and field, and the arguments.
macro_rules! driver_functions {
    ($($name:ident($($argument:ty),*);)*) => {
        /// The functions of the driver that this crate calls.
        #[allow(non_snake_case, reason = "the names of the driver")]
        pub struct DriverFunctions {
            $(pub $name: unsafe extern "C" fn($($argument),*) -> c_int,)*
        }

        impl DriverFunctions {
            /// Looks up all functions. An error names those that are missing.
            ///
            /// # Safety
            /// The library of the driver can be loaded.
            #[allow(non_snake_case, reason = "the names of the driver")]
            unsafe fn find() -> Result<Self, Vec<&'static str>> {
                // SAFETY: the caller has found that the library can be loaded.
                let library = unsafe { sys::culib() };
                let mut missing = Vec::new();
                $(
                    // SAFETY: the type is that of the driver's reference manual.
                    let $name = unsafe {
                        library.get::<unsafe extern "C" fn($($argument),*) -> c_int>(
                            concat!(stringify!($name), "\0").as_bytes(),
                        )
                    };
                    let $name = $name.ok().map(|function| *function);
                    if $name.is_none() {
                        missing.push(stringify!($name));
                    }
                )*
                let ($(Some($name),)*) = ($($name,)*) else { return Err(missing) };
                Ok(Self { $($name,)* })
            }
        }
    };
}

driver_functions! {
    cuInit(c_uint);
    cuDriverGetVersion(*mut c_int);
    cuGetErrorName(c_int, *mut *const c_char);
    cuDeviceGetCount(*mut c_int);
    cuDeviceGet(*mut CUdevice, c_int);
    cuDeviceGetName(*mut c_char, c_int, CUdevice);
    cuDeviceGetUuid_v2(*mut CUuuid, CUdevice);
    cuDeviceGetPCIBusId(*mut c_char, c_int, CUdevice);
    cuDeviceTotalMem_v2(*mut usize, CUdevice);
    cuDeviceGetAttribute(*mut c_int, c_int, CUdevice);
    cuDeviceCanAccessPeer(*mut c_int, CUdevice, CUdevice);
    cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice);
    cuCtxGetCurrent(*mut CUcontext);
    cuCtxSetCurrent(CUcontext);
    cuCtxGetStreamPriorityRange(*mut c_int, *mut c_int);
    cuStreamCreateWithPriority(*mut CUstream, c_uint, c_int);
    cuStreamQuery(CUstream);
    cuStreamDestroy_v2(CUstream);
    cuEventCreate(*mut CUevent, c_uint);
    cuEventRecord(CUevent, CUstream);
    cuEventQuery(CUevent);
    cuEventDestroy_v2(CUevent);
    cuMemAlloc_v2(*mut CUdeviceptr, usize);
    cuMemFree_v2(CUdeviceptr);
    cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
    cuMemFreeHost(*mut c_void);
    cuMemcpyHtoDAsync_v2(CUdeviceptr, *const c_void, usize, CUstream);
    cuMemcpyDtoHAsync_v2(*mut c_void, CUdeviceptr, usize, CUstream);
    cuMemcpyDtoDAsync_v2(CUdeviceptr, CUdeviceptr, usize, CUstream);
    cuMemcpy2DAsync_v2(*const CUDA_MEMCPY2D, CUstream);
    cuMemGetAllocationGranularity(*mut usize, *const CUmemAllocationProp, c_uint);
    cuMemCreate(*mut CUmemGenericAllocationHandle, usize, *const CUmemAllocationProp, c_ulonglong);
    cuMemRelease(CUmemGenericAllocationHandle);
    cuMemExportToShareableHandle(*mut c_void, CUmemGenericAllocationHandle, c_uint, c_ulonglong);
    cuMemImportFromShareableHandle(*mut CUmemGenericAllocationHandle, *mut c_void, c_uint);
    cuMemAddressReserve(*mut CUdeviceptr, usize, usize, CUdeviceptr, c_ulonglong);
    cuMemAddressFree(CUdeviceptr, usize);
    cuMemMap(CUdeviceptr, usize, usize, CUmemGenericAllocationHandle, c_ulonglong);
    cuMemUnmap(CUdeviceptr, usize);
    cuMemSetAccess(CUdeviceptr, usize, *const CUmemAccessDesc, usize);
    cuCtxSynchronize();
    cuPointerGetAttribute(*mut c_void, c_int, CUdeviceptr);
}

/// The driver, loaded and started.
pub struct Driver {
    functions: DriverFunctions,
}

/// Calls a function of the driver: `call!(driver, cuInit(0))`.
macro_rules! call {
    ($driver:expr, $name:ident($($argument:expr),* $(,)?)) => {{
        let driver: &$crate::driver::Driver = $driver;
        let code = (driver.functions().$name)($($argument),*);
        driver.check(stringify!($name), code)
    }};
}
pub(crate) use call;

impl Driver {
    /// Returns the driver. It is loaded and started by the first call; the result never changes in a process.
    pub fn get() -> Result<&'static Self, DriverUnavailable> {
        static DRIVER: OnceLock<Result<Driver, DriverUnavailable>> = OnceLock::new();
        DRIVER.get_or_init(Self::load).as_ref().map_err(Clone::clone)
    }

    fn load() -> Result<Self, DriverUnavailable> {
        // SAFETY: loading the library runs its constructors, which every program that uses a GPU runs.
        if !unsafe { sys::is_culib_present() } {
            return Err(DriverUnavailable::NotInstalled);
        }
        // SAFETY: the library can be loaded.
        let functions = unsafe { DriverFunctions::find() };
        let driver =
            Self { functions: functions.map_err(|names| DriverUnavailable::MissingFunctions { names })? };
        let version = driver.version().map_err(DriverUnavailable::DoesNotStart)?;
        if version < VERSION_MIN {
            return Err(DriverUnavailable::TooOld { version });
        }
        // SAFETY: the call takes a number.
        unsafe { call!(&driver, cuInit(0)) }.map_err(DriverUnavailable::DoesNotStart)?;
        Ok(driver)
    }

    /// Returns the newest version of CUDA that the driver supports.
    fn version(&self) -> Result<c_int, GpuError> {
        let mut version = 0;
        // SAFETY: the call writes a number.
        unsafe { call!(self, cuDriverGetVersion(&raw mut version))? };
        Ok(version)
    }

    /// Returns the number of devices.
    pub fn device_count(&self) -> Result<u32, GpuError> {
        let mut count = 0;
        // SAFETY: the call writes a number.
        unsafe { call!(self, cuDeviceGetCount(&raw mut count))? };
        Ok(u32::try_from(count).unwrap_or_default())
    }

    pub const fn functions(&self) -> &DriverFunctions {
        &self.functions
    }

    /// Returns the error of a code that a function returned.
    pub fn check(&self, call: &'static str, code: c_int) -> Result<(), GpuError> {
        if code == SUCCESS { Ok(()) } else { Err(GpuError { call, code, name: self.name_of(code) }) }
    }

    fn name_of(&self, code: c_int) -> String {
        let mut name: *const c_char = std::ptr::null();
        // SAFETY: the call writes the address of a constant text, or null.
        let answer = unsafe { (self.functions.cuGetErrorName)(code, &raw mut name) };
        if answer != SUCCESS || name.is_null() {
            return "an unknown error".to_owned();
        }
        // SAFETY: the text is a constant of the library, which stays loaded.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }
}

/// Returns the newest version of CUDA that the driver supports: 1000 times the major number plus 10 times the minor one.
///
/// # Errors
/// Returns why there is no driver.
pub fn driver_version() -> Result<i32, DriverUnavailable> {
    Driver::get()?.version().map_err(DriverUnavailable::DoesNotStart)
}

/// Returns the number of GPUs that this process may use.
///
/// # Errors
/// Returns why there is no driver.
pub fn device_count() -> Result<u32, DriverUnavailable> {
    Driver::get()?.device_count().map_err(DriverUnavailable::DoesNotStart)
}
