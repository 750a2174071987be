//! The plug-in's library: its search, loading and unloading.

use std::ffi::{CString, c_void};
use std::os::unix::ffi::OsStrExt;
use std::sync::{Arc, Mutex, Weak};

use super::table::{ProfilerTable, known_tables};
use crate::settings::Setting;
use crate::wait::lock;

/// Names the library.
const VARIABLE: &str = "NCCL_PROFILER_PLUGIN";

/// A loaded library. It is unloaded when the last communicator that uses it ends.
#[derive(Debug)]
pub struct Plugin {
    library: usize,
    table: usize,
    pub version: u32,
}

/// The plug-in of this process.
enum PluginState {
    /// No communicator uses one now.
    Unloaded(Weak<Plugin>),
    /// None was found. The process does not search again.
    Failed,
}

static PLUGIN: Mutex<PluginState> = Mutex::new(PluginState::Unloaded(Weak::new()));

impl Plugin {
    /// Returns the plug-in that the environment names. The first communicator loads it.
    ///
    /// Simpler than NCCL: without the variable, or with an empty one, no library is searched. NCCL searches
    /// `libnccl-profiler.so`, and if that is missing asks the library of the net plug-in.
    pub fn of_environment() -> Option<Arc<Self>> {
        let mut state = lock(&PLUGIN);
        let PluginState::Unloaded(former) = &*state else { return None };
        if let Some(plugin) = former.upgrade() {
            return Some(plugin);
        }
        let loaded = Self::load().map(Arc::new);
        *state = loaded
            .as_ref()
            .map_or(PluginState::Failed, |plugin| PluginState::Unloaded(Arc::downgrade(plugin)));
        loaded
    }

    fn load() -> Option<Self> {
        let value = std::env::var_os(VARIABLE)?;
        if value.is_empty() || value.eq_ignore_ascii_case("none") {
            return None;
        }
        let library = if value.eq_ignore_ascii_case("STATIC_PLUGIN") {
            open(None)?
        } else {
            open(Some(value.as_bytes())).or_else(|| {
                let name = [b"libnccl-profiler-", value.as_bytes(), b".so"].concat();
                open(Some(&name))
            })?
        };
        let mut plugin = Self { library: library as usize, table: 0, version: 0 };
        (plugin.version, plugin.table) =
            known_tables(Setting::NcclVersion.get()).find_map(|(version, name)| {
                // SAFETY: the library is loaded, and the name is a C string.
                let table = unsafe { libc::dlsym(library, name.as_ptr()) };
                (!table.is_null()).then_some((version, table as usize))
            })?;
        Some(plugin)
    }

    /// Returns the table. It lives as long as the library is loaded.
    pub fn table(&self) -> &ProfilerTable {
        // SAFETY: the symbol is a table of this layout, and the library is loaded until the value is dropped.
        unsafe { &*(self.table as *const ProfilerTable) }
    }
}

impl Drop for Plugin {
    fn drop(&mut self) {
        // SAFETY: the library was opened once by `load`, and nothing calls into it any more.
        unsafe { libc::dlclose(self.library as *mut c_void) };
    }
}

/// Opens a library; `None` is the program itself.
fn open(name: Option<&[u8]>) -> Option<*mut c_void> {
    let name = name.map(CString::new).transpose().ok()?;
    let name = name.as_ref().map_or(std::ptr::null(), |name| name.as_ptr());
    // SAFETY: the name is a C string or null. The user who names the library vouches for its constructors.
    let library = unsafe { libc::dlopen(name, libc::RTLD_NOW | libc::RTLD_LOCAL) };
    (!library.is_null()).then_some(library)
}
