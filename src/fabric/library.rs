//! The functions of libfabric, found once per process. The library stays loaded.
#![allow(unsafe_code, reason = "looks up functions of a C library, and calls them")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::error::{FabricError, FabricUnavailable};
use crate::layouts::Info;

type GetInfo =
    unsafe extern "C" fn(u32, *const c_char, *const c_char, u64, *const Info, *mut *mut Info) -> c_int;
type OpenFabric = unsafe extern "C" fn(
    *mut crate::layouts::FabricAttributes,
    *mut *mut crate::layouts::FabricFid,
    *mut c_void,
) -> c_int;

/// The functions of the library.
pub struct Library {
    pub get_info: GetInfo,
    pub free_info: unsafe extern "C" fn(*mut Info),
    /// Copies a description; makes an empty one of none.
    pub duplicate_info: unsafe extern "C" fn(*const Info) -> *mut Info,
    pub open_fabric: OpenFabric,
    describe_error: unsafe extern "C" fn(c_int) -> *const c_char,
    /// The version, as `FI_VERSION` makes it.
    pub version: u32,
    calls: Mutex<()>,
}

/// The oldest minor version of 1: its structs are those of `layouts.rs`.
const MINOR_MIN: u32 = 9;

impl Library {
    /// Returns the library. It is loaded by the first call; the result never changes in a process.
    pub fn get() -> Result<&'static Self, FabricUnavailable> {
        static LOADED: OnceLock<Result<Library, FabricUnavailable>> = OnceLock::new();
        LOADED.get_or_init(Self::load).as_ref().map_err(Clone::clone)
    }

    fn load() -> Result<Self, FabricUnavailable> {
        // SAFETY: the name is a C string. The library's initialization has no requirements.
        let handle = unsafe { libc::dlopen(c"libfabric.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            // SAFETY: the text is one of this thread, until its next call.
            let why = unsafe { libc::dlerror() };
            let why = if why.is_null() {
                "no reason is known".into()
            } else {
                // SAFETY: as above.
                unsafe { CStr::from_ptr(why) }.to_string_lossy()
            };
            return Err(FabricUnavailable::Library(why.into_owned()));
        }
        // SAFETY: the types are those of the library's headers, since its first version.
        let library = unsafe {
            let version: unsafe extern "C" fn() -> u32 = find(handle, c"fi_version")?;
            Self {
                get_info: find(handle, c"fi_getinfo")?,
                free_info: find(handle, c"fi_freeinfo")?,
                duplicate_info: find(handle, c"fi_dupinfo")?,
                open_fabric: find(handle, c"fi_fabric")?,
                describe_error: find(handle, c"fi_strerror")?,
                version: version(),
                calls: Mutex::new(()),
            }
        };
        let (major, minor) = library.version_pair();
        if major < 1 || major == 1 && minor < MINOR_MIN {
            return Err(FabricUnavailable::Version { major, minor });
        }
        Ok(library)
    }

    /// Lets this thread call the library. No two threads do at the same time, also not for different endpoints and domains:
    /// some providers of 1.17 crash otherwise when one of them opens or closes something, although each is opened for use by any thread.
    /// A call takes a microsecond or less, but for the registration of memory. The guard is taken before the lock of an endpoint, and
    /// nothing that takes it is dropped while it is held.
    pub fn lock_calls(&self) -> MutexGuard<'_, ()> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the version: major and minor.
    pub const fn version_pair(&self) -> (u32, u32) {
        (self.version >> 16, self.version & 0xffff)
    }

    /// Checks the result of a call: negative numbers are errors.
    pub fn check(&self, call: &'static str, result: isize) -> Result<(), FabricError> {
        if result >= 0 {
            Ok(())
        } else {
            Err(self.error(call, c_int::try_from(-result).unwrap_or(c_int::MAX)))
        }
    }

    /// Returns the error with a positive number.
    pub fn error(&self, call: &'static str, code: c_int) -> FabricError {
        // SAFETY: the library returns a constant text for every number.
        let name = unsafe { CStr::from_ptr((self.describe_error)(code)) };
        FabricError { call, code, name: name.to_string_lossy().into_owned() }
    }
}

/// Returns a function of the library.
///
/// # Safety
/// The handle is that of the library, and `F` is a pointer to a function of the type that has this name.
unsafe fn find<F>(handle: *mut c_void, name: &'static CStr) -> Result<F, FabricUnavailable> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>(), "F is a pointer") };
    // SAFETY: the handle is the library's, and the name a C string.
    let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
    if found.is_null() {
        return Err(FabricUnavailable::Symbol(name.to_str().unwrap_or_default()));
    }
    // SAFETY: the caller guarantees the type, and both are pointers.
    Ok(unsafe { std::mem::transmute_copy(&found) })
}
