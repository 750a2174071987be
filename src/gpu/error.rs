//! Why there is no driver, and what a call of the driver answered.

use std::ffi::c_int;

/// The reason why no GPU of this host can be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DriverUnavailable {
    /// The loader finds no library of the driver.
    #[error(
        "there is no CUDA driver: the loader finds no libcuda.so (in a container, run it with --gpus all)"
    )]
    NotInstalled,
    /// The library lacks functions.
    #[error("the CUDA driver lacks {}: install driver R525 or later", names.join(", "))]
    MissingFunctions {
        /// The names of the functions.
        names: Vec<&'static str>,
    },
    /// The driver supports only an older version of CUDA.
    #[error(
        "the CUDA driver supports CUDA {}.{}, and 12.0 is needed: install driver R525 or later",
        version / 1000,
        version % 1000 / 10
    )]
    TooOld {
        /// The version, as the driver gives it: 1000 times the major number plus 10 times the minor one.
        version: i32,
    },
    /// The driver does not start.
    #[error("the CUDA driver does not start: {0}")]
    DoesNotStart(GpuError),
    /// There is no device with this number.
    #[error("there is no GPU {ordinal}: this host has {count}")]
    NoSuchDevice {
        /// The number that was asked for.
        ordinal: u32,
        /// The number of devices.
        count: u32,
    },
}

/// The failure of a call of the driver.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{call}: {name} ({code})")]
pub struct GpuError {
    /// The name of the function.
    pub call: &'static str,
    /// The code that it returned.
    pub code: c_int,
    /// The driver's name of the code.
    pub name: String,
}

/// Codes after which every call of the process fails, as the reference manual of the driver marks them ("the process
/// must be terminated and relaunched"). 4 and 709 say that the driver or the context has ended.
const STICKY: [c_int; 15] = [4, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 999];
/// `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: c_int = 2;

impl GpuError {
    /// Returns whether every later call of the process fails, too.
    #[must_use]
    pub fn is_sticky(&self) -> bool {
        STICKY.contains(&self.code)
    }

    /// Returns whether memory was missing.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        self.code == OUT_OF_MEMORY
    }
}
