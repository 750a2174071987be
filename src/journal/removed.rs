//! The folder `removed/` of a journal: the segments and snapshots that a recovery or a repair took out, for people who look for
//! what was lost. No program reads them.
//!
//! Their number and their bytes are bounded: the files that were removed first are deleted. The files of the latest removal
//! stay, whatever they are: they are at most the journal. Begin at [`Removal`].

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use crate::folder::{JournalError, JournalFolder, SEGMENT_PREFIX, SNAPSHOT_PREFIX};

/// The space beyond which files of earlier removals are deleted.
const REMOVED_BYTES_MAX: u64 = 1 << 30;
/// The number of files beyond which files of earlier removals are deleted.
const REMOVED_FILES_MAX: usize = 256;

/// The files in the folder `removed/`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RemovedFiles {
    /// Their number.
    pub count: u64,
    /// The space that they take.
    pub bytes: u64,
}

struct RemovedFile {
    /// The time of the removal. Renaming changes this time of a file, but not that of its last write.
    removed_at: (i64, i64),
    path: PathBuf,
    bytes: u64,
}

/// Moves files of a journal to the folder `removed/`, and deletes old files there in the end.
pub(crate) struct Removal<'a> {
    folder: &'a JournalFolder,
    moved: Vec<OsString>,
}

impl<'a> Removal<'a> {
    pub fn begin(folder: &'a JournalFolder) -> Self {
        Self { folder, moved: Vec::new() }
    }

    /// Moves a file of the journal to the folder.
    pub fn move_file(&mut self, file: &Path) -> Result<(), JournalError> {
        let removed = self.folder.removed_path();
        fs::create_dir_all(&removed).map_err(JournalError::io("create", &removed))?;
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        // A file of the same name may be there from an earlier time.
        let mut names =
            (0_u32..).map(|copy| if copy == 0 { name.to_string() } else { format!("{name}.{copy}") });
        let Some(free) = names.find(|name| !removed.join(name).exists()) else { return Ok(()) };
        fs::rename(file, removed.join(&free)).map_err(JournalError::io("move away", file))?;
        self.moved.push(free.into());
        Ok(())
    }

    /// Deletes files of earlier removals, the oldest first, until the rest is within the bounds.
    pub fn finish(self) {
        if self.moved.is_empty() {
            return;
        }
        self.delete_beyond(REMOVED_BYTES_MAX, REMOVED_FILES_MAX);
    }

    fn delete_beyond(&self, bytes_max: u64, files_max: usize) {
        let mut files = list(&self.folder.removed_path());
        let mut bytes: u64 = files.iter().map(|file| file.bytes).sum();
        let mut count = files.len();
        files.sort_by(|a, b| (a.removed_at, &a.path).cmp(&(b.removed_at, &b.path)));
        files.retain(|file| !self.moved.iter().any(|moved| file.path.file_name() == Some(moved)));
        for file in files {
            if bytes <= bytes_max && count <= files_max {
                return;
            }
            match fs::remove_file(&file.path) {
                Ok(()) => {
                    (bytes, count) = (bytes - file.bytes, count - 1);
                    tracing::warn!(
                        bytes = file.bytes,
                        "{} is deleted: newer files that were removed from the journal take its space",
                        file.path.display()
                    );
                }
                // The journal does not need the space: it goes on.
                Err(error) => tracing::warn!("{} cannot be deleted: {error}", file.path.display()),
            }
        }
    }
}

impl JournalFolder {
    /// Returns how many files recoveries and repairs have taken out of the journal and kept, and the space that they take.
    #[must_use]
    pub fn removed_files(&self) -> RemovedFiles {
        let files = list(&self.removed_path());
        RemovedFiles { count: files.len() as u64, bytes: files.iter().map(|file| file.bytes).sum() }
    }

    fn removed_path(&self) -> PathBuf {
        self.path().join("removed")
    }
}

/// Lists what was removed, in no order. Other files in the folder are not listed.
fn list(removed: &Path) -> Vec<RemovedFile> {
    let mut files = Vec::new();
    for entry in fs::read_dir(removed).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let is_removed =
            [SEGMENT_PREFIX, SNAPSHOT_PREFIX].iter().any(|prefix| name.to_string_lossy().starts_with(prefix));
        if let Some(meta) = entry.metadata().ok().filter(|meta| is_removed && meta.is_file()) {
            let removed_at = (meta.ctime(), meta.ctime_nsec());
            files.push(RemovedFile { removed_at, path: entry.path(), bytes: meta.blocks() * 512 });
        }
    }
    files
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::folder::TestFolder;

    fn names(folder: &JournalFolder) -> Vec<String> {
        let entries = fs::read_dir(folder.removed_path()).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort_unstable();
        names
    }

    /// Removes one segment after the other, each by a removal of its own, with these bounds.
    fn remove_each(folder: &JournalFolder, segments: u64, bytes_max: u64, files_max: usize) {
        for _ in 0..segments {
            let mut removal = Removal::begin(folder);
            fs::write(folder.segment_path(1), [7; 5000]).unwrap();
            removal.move_file(&folder.segment_path(1)).unwrap();
            removal.delete_beyond(bytes_max, files_max);
            // The times of files have a resolution of some milliseconds.
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    #[test]
    fn the_files_that_were_removed_first_are_deleted_and_other_files_are_not() {
        let temporary = TestFolder::new();
        let folder = JournalFolder::open(&temporary.0.join("journal"), "test").unwrap();
        assert_eq!(folder.removed_files(), RemovedFiles::default());
        remove_each(&folder, 3, u64::MAX, 2);
        assert_eq!(names(&folder), ["segment-00000001.1", "segment-00000001.2"], "the number");
        fs::write(folder.removed_path().join("notes.txt"), "mine").unwrap();
        let kept = folder.removed_files();
        assert!(kept.count == 2 && kept.bytes >= 10_000, "{kept:?}");
        // The name of the first one is free again.
        remove_each(&folder, 1, kept.bytes, usize::MAX);
        assert_eq!(names(&folder), ["notes.txt", "segment-00000001", "segment-00000001.2"], "the bytes");
    }

    #[test]
    fn the_files_of_the_latest_removal_stay_though_they_are_beyond_the_bounds() {
        let temporary = TestFolder::new();
        let folder = JournalFolder::open(&temporary.0.join("journal"), "test").unwrap();
        remove_each(&folder, 2, u64::MAX, usize::MAX);
        let mut removal = Removal::begin(&folder);
        for index in [5, 6, 7] {
            fs::write(folder.segment_path(index), "x").unwrap();
            removal.move_file(&folder.segment_path(index)).unwrap();
        }
        removal.delete_beyond(0, 1);
        assert_eq!(names(&folder), ["segment-00000005", "segment-00000006", "segment-00000007"]);
    }
}
