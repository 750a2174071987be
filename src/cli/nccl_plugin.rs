//! The file of NCCL's profiler plug-in, which programs load by `NCCL_PROFILER_PLUGIN`.
//!
//! The extension of the Python package has the plug-in's tables, so there the file is the extension itself: only a Python program can load it.
//! Beside an executable, the plug-in is a file of its own, which every program can load. Begin at [`find_nccl_plugin`].

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anyhow::{Context as _, Result};

/// The variable by which NCCL finds a profiler plug-in.
pub const NCCL_PLUGIN_VARIABLE: &str = "NCCL_PROFILER_PLUGIN";
const FILE_NAME: &str = "libmuster_nccl_profiler.so";
/// Where the file may be, seen from the folder of the executable.
const FOLDERS: [&str; 2] = ["", "../lib"];

static CONTAINING_LIBRARY: OnceLock<PathBuf> = OnceLock::new();

/// Sets the library that has the plug-in's tables. Only the first call has an effect.
pub fn set_nccl_plugin(file: PathBuf) {
    // A second call would come from a second command line in one process.
    let _ = CONTAINING_LIBRARY.set(file);
}

/// Returns the absolute path of the plug-in.
pub fn find_nccl_plugin() -> Result<PathBuf> {
    if let Some(file) = CONTAINING_LIBRARY.get() {
        return std::path::absolute(file).context("the path of the plug-in");
    }
    let executable = std::env::current_exe().context("the path of this executable")?;
    find_beside(executable.parent().unwrap_or(Path::new("/")))
}

/// Returns the path of the plug-in beside an executable in this folder.
fn find_beside(folder: &Path) -> Result<PathBuf> {
    let found = FOLDERS.iter().map(|at| folder.join(at).join(FILE_NAME)).find(|file| file.is_file());
    found.with_context(|| {
        format!(
            "there is no {FILE_NAME} in {folder} nor in {folder}/../lib: build it with `cargo build --release -p \
             muster-nccl-profiler` and copy it there, or, for Python programs, use the command of the Python package, which contains it",
            folder = folder.display()
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_plug_in_is_found_beside_the_executable_and_in_the_folder_of_libraries() {
        let root = std::env::temp_dir().join(format!("muster-plugin-{}", std::process::id()));
        let [bin, lib] = ["bin", "lib"].map(|folder| root.join(folder));
        std::fs::create_dir_all(&bin).unwrap();
        std::fs::create_dir_all(lib.join(FILE_NAME)).unwrap();
        let error = find_beside(&bin).unwrap_err().to_string();
        assert!(error.contains(&*bin.to_string_lossy()) && error.contains("cargo build"), "{error}");
        std::fs::remove_dir(lib.join(FILE_NAME)).unwrap();
        std::fs::write(lib.join(FILE_NAME), "").unwrap();
        assert_eq!(find_beside(&bin).unwrap(), bin.join("../lib").join(FILE_NAME));
        std::fs::write(bin.join(FILE_NAME), "").unwrap();
        assert_eq!(find_beside(&bin).unwrap(), bin.join(FILE_NAME));
        std::fs::remove_dir_all(root).unwrap();
    }
}
