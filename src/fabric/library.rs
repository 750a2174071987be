//! The functions of libfabric, found once per process. The library stays loaded.
#![allow(unsafe_code, reason = "looks up functions of a C library, and calls them")]

use std::error::Error as _;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use libloading::os::unix::{Library as LoadedLibrary, RTLD_LOCAL, RTLD_NOW};

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
        // SAFETY: the library's initialization has no requirements.
        let file = unsafe { LoadedLibrary::open(Some("libfabric.so.1"), RTLD_NOW | RTLD_LOCAL) };
        // The loader's own text is the source of the error.
        let why = |error: libloading::Error| error.source().unwrap_or(&error).to_string();
        let file = file.map_err(|error| FabricUnavailable::Library(why(error)))?;
        // The functions are used for as long as the process runs.
        let file = ManuallyDrop::new(file);
        // SAFETY: the types are those of the library's headers, since its first version.
        let library = unsafe {
            let version: unsafe extern "C" fn() -> u32 = find(&file, "fi_version")?;
            Self {
                get_info: find(&file, "fi_getinfo")?,
                free_info: find(&file, "fi_freeinfo")?,
                duplicate_info: find(&file, "fi_dupinfo")?,
                open_fabric: find(&file, "fi_fabric")?,
                describe_error: find(&file, "fi_strerror")?,
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
/// `F` is a pointer to a function of the type that has this name.
unsafe fn find<F: Copy>(library: &LoadedLibrary, name: &'static str) -> Result<F, FabricUnavailable> {
    // SAFETY: the caller guarantees the type.
    unsafe { library.get(name) }.map(|found| *found).map_err(|_| FabricUnavailable::Symbol(name))
}
