//! Reads files of the host, up to a maximum length. The root of the files is `/`; tests use another folder.
//!
//! Begin at `HostRoot::read_text`.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

/// The root of a host's files. Reads are bounded; an unreadable file counts as missing.
#[derive(Debug, Clone)]
pub struct HostRoot(PathBuf);

/// The greatest number of bytes read from a file.
pub(super) const FILE_MAX: u64 = 64 << 10;
/// The greatest number of bytes read from the kernel's log. It is larger than any log by default.
const LOG_MAX: usize = 16 << 20;
/// The greatest number of entries read from a folder.
const ENTRIES_MAX: usize = 4096;

impl Default for HostRoot {
    fn default() -> Self {
        Self::new("/")
    }
}

impl HostRoot {
    /// Returns a root at `path`.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    fn resolve_path(&self, path: &str) -> PathBuf {
        self.0.join(path.trim_start_matches('/'))
    }

    /// Returns the text of a file, without surrounding white space.
    #[must_use]
    pub fn read_text(&self, path: &str) -> Option<String> {
        let mut text = Vec::new();
        File::open(self.resolve_path(path)).ok()?.take(FILE_MAX).read_to_end(&mut text).ok()?;
        Some(String::from_utf8_lossy(&text).trim().to_owned())
    }

    /// Returns the number that a file holds.
    #[must_use]
    pub fn read_number(&self, path: &str) -> Option<u64> {
        self.read_text(path)?.parse().ok()
    }

    /// Returns the names in a folder, sorted.
    #[must_use]
    pub fn list_names(&self, path: &str) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.resolve_path(path)) else { return Vec::new() };
        let entries = entries.take(ENTRIES_MAX).filter_map(Result::ok);
        let mut names: Vec<String> =
            entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names
    }

    /// Returns the records of the kernel's log, a line each: `PRIORITY,NUMBER,TIME,FLAGS;MESSAGE`.
    ///
    /// # Errors
    /// Returns why the log cannot be read.
    pub fn read_kernel_log(&self) -> io::Result<String> {
        // At its end, the log has no end of file: a reader that may not wait gets an error.
        let nonblocking = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
        let mut log = fs::OpenOptions::new()
            .read(true)
            .custom_flags(nonblocking)
            .open(self.resolve_path("/dev/kmsg"))?;
        // A read gives one record.
        let (mut text, mut record) = (Vec::new(), [0; 8192]);
        while text.len() < LOG_MAX {
            match log.read(&mut record) {
                Ok(0) => break,
                Ok(len) => text.extend_from_slice(&record[..len]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                // The record was overwritten meanwhile; the next read gives the oldest that is left.
                Err(error) if matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::Interrupted) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    /// Returns whether a file or folder exists.
    #[must_use]
    pub fn exists(&self, path: &str) -> bool {
        self.resolve_path(path).exists()
    }

    /// Returns the last component of a link's target.
    #[must_use]
    pub fn link_target_name(&self, path: &str) -> Option<String> {
        let target = fs::read_link(self.resolve_path(path)).ok()?;
        Some(Path::new(&target).file_name()?.to_str()?.to_owned())
    }
}
