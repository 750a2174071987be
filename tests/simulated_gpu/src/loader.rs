//! How a test loads the simulated driver, sets faults and reads counters.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::{Counter, Setting};

/// The file name of the shared library.
const FILE: &str = "libsimulated_gpu.so";

/// The simulated driver, loaded into this process.
///
/// A setting or a counter goes through the shared library: the copies of both in the Rust library are other ones.
#[derive(Debug)]
pub struct SimulatedGpu {
    set: unsafe extern "C" fn(*const c_char, i64) -> c_int,
    get: unsafe extern "C" fn(*const c_char) -> i64,
}

impl SimulatedGpu {
    /// Returns the path of the shared library, which cargo builds beside the tests.
    ///
    /// # Panics
    /// If it is not there.
    pub fn library() -> PathBuf {
        let program = std::env::current_exe().unwrap_or_default();
        let folders = program.ancestors().skip(1).take(2);
        let places = folders.flat_map(|folder| [folder.join(FILE), folder.join("deps").join(FILE)]);
        let found = places.into_iter().find(|path| path.exists());
        found.unwrap_or_else(|| panic!("{FILE} is not beside {}", program.display()))
    }

    /// Loads the library into this process, where `dlopen("libcuda.so")` finds it from now on. It must come before the
    /// first call of a binding, which loads the system's driver otherwise.
    ///
    /// # Panics
    /// If the library cannot be loaded.
    pub fn load() -> &'static Self {
        static LOADED: OnceLock<SimulatedGpu> = OnceLock::new();
        LOADED.get_or_init(|| {
            let path = Self::library();
            let name = CString::new(path.as_os_str().as_encoded_bytes()).unwrap_or_default();
            // SAFETY: the library has no constructors, and stays loaded.
            let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
            assert!(!library.is_null(), "{} cannot be loaded", path.display());
            // SAFETY: `control.rs` defines the functions with these types.
            unsafe {
                Self {
                    set: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*const c_char, i64) -> c_int>(
                        symbol(library, c"simulated_gpu_set"),
                    ),
                    get: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*const c_char) -> i64>(symbol(
                        library,
                        c"simulated_gpu_get",
                    )),
                }
            }
        })
    }

    /// Returns whether tests use this driver: not if `MUSTER_GPU=real` asks for that of the machine.
    pub fn is_wanted() -> bool {
        std::env::var("MUSTER_GPU").as_deref() != Ok("real")
    }

    /// Loads the library if tests use this driver.
    ///
    /// # Panics
    /// As [`SimulatedGpu::load`].
    pub fn load_if_wanted() -> Option<&'static Self> {
        Self::is_wanted().then(Self::load)
    }

    /// Makes links by which a child process finds the library, in a folder for its `LD_LIBRARY_PATH`.
    ///
    /// # Errors
    /// If a link cannot be made.
    pub fn link_into(folder: &Path) -> std::io::Result<()> {
        for name in ["libcuda.so", "libcuda.so.1", "libnccl.so", "libnccl.so.2", "libnvidia-ml.so.1"] {
            std::os::unix::fs::symlink(Self::library(), folder.join(name))?;
        }
        Ok(())
    }

    /// Changes a setting of this process.
    pub fn set(&self, setting: Setting, value: i64) {
        let key = CString::new(setting.key()).unwrap_or_default();
        // SAFETY: the key is a C string.
        let status = unsafe { (self.set)(key.as_ptr(), value) };
        assert_eq!(status, 0, "the library knows {setting:?}");
    }

    /// Returns a counter of this process.
    pub fn count(&self, counter: Counter) -> i64 {
        self.read(counter.key())
    }

    /// Returns a setting of this process. A fault that counts tells how many uses are left.
    pub fn setting(&self, setting: Setting) -> i64 {
        self.read(setting.key())
    }

    fn read(&self, key: &str) -> i64 {
        let key = CString::new(key).unwrap_or_default();
        // SAFETY: the key is a C string.
        unsafe { (self.get)(key.as_ptr()) }
    }
}

/// Returns the address of a symbol.
unsafe fn symbol(library: *mut c_void, name: &CStr) -> *mut c_void {
    // SAFETY: the library is loaded, and the name is a C string.
    let address = unsafe { libc::dlsym(library, name.as_ptr()) };
    assert!(!address.is_null(), "the library has no {}", name.to_string_lossy());
    address
}
