//! The two libraries that the processes load: the plug-in and the simulated NCCL. Cargo builds both beside the tests.

use std::path::{Path, PathBuf};

use simulated_gpu::SimulatedGpu;

/// The libraries, of this build.
#[derive(Debug)]
pub struct Libraries {
    /// `libmuster_nccl_profiler.so`.
    pub plugin: PathBuf,
    /// The simulated driver and NCCL.
    pub nccl: PathBuf,
}

impl Libraries {
    /// Returns the libraries.
    #[track_caller]
    pub fn find() -> Self {
        let nccl = SimulatedGpu::library();
        let plugin = nccl.with_file_name("libmuster_nccl_profiler.so");
        assert!(plugin.is_file(), "{} is missing", plugin.display());
        Self { plugin, nccl }
    }
}

/// Returns the folder of cargo's results.
pub fn target_folder() -> PathBuf {
    let named = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    Path::new(env!("CARGO_MANIFEST_DIR")).join(named.unwrap_or_else(|| "target".into()))
}
