//! A temporary folder of a test.

use std::path::PathBuf;

/// A folder that is removed on drop.
pub struct TempFolder(pub PathBuf);

impl TempFolder {
    /// Creates an empty folder whose name contains `name` and this process's id.
    pub fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("muster-test-{}-{name}", std::process::id()));
        // A process with the same id may have left it behind.
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir(&folder).expect("a folder can be made");
        Self(folder)
    }

    /// Returns the path of a file in the folder.
    pub fn path(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }
}

impl Drop for TempFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
