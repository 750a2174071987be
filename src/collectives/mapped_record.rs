//! The memory of a record: its file, mapped by its writer or by a reader. Begin at [`MappedRecord`] and [`ReadRecord`].

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use memmap2::{Mmap, MmapMut, MmapOptions};
use rustix::fs::{FallocateFlags, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, fallocate, futimens};
use rustix::io::Errno;

use crate::layout::{LAYOUT_VERSION, RecordLayout};

pub(crate) const RECORD_BYTES: usize = size_of::<RecordLayout>();

/// Why a record cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The folder cannot be used.
    #[error("the folder {folder} of records of collectives cannot be used: {error}")]
    Folder {
        /// The folder.
        folder: PathBuf,
        /// The reason.
        error: io::Error,
    },
    /// Another user could change the folder's files.
    #[error(
        "the folder {0} of records of collectives belongs to another user: name another one in MUSTER_COLLECTIVES_DIR"
    )]
    ForeignFolder(PathBuf),
    /// A file cannot be used.
    #[error("the record {file} cannot be used: {error}")]
    File {
        /// The file.
        file: PathBuf,
        /// The reason.
        error: io::Error,
    },
    /// The file is no record of this version.
    #[error("{file} is no record of collectives of version {LAYOUT_VERSION}: {found}")]
    NoRecord {
        /// The file.
        file: PathBuf,
        /// The reason, in a clause.
        found: String,
    },
}

/// The mapped record of this process.
pub(crate) struct MappedRecord {
    memory: MmapMut,
    /// Holds the lock. Memory of the process alone has no file.
    file: Option<File>,
    path: PathBuf,
}

impl std::fmt::Debug for MappedRecord {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("MappedRecord").field(&self.path).finish()
    }
}

impl MappedRecord {
    pub(crate) fn map_own(file: File, path: PathBuf) -> Result<Self, RecordError> {
        // SAFETY: the file is this process's own by its lock and its folder, and only numbers that are atomic are in it.
        #[expect(unsafe_code, reason = "shared memory")]
        let memory = unsafe { MmapOptions::new().len(RECORD_BYTES).map_mut(&file) };
        let memory = memory.map_err(|error| RecordError::File { file: path.clone(), error })?;
        Ok(Self { memory, file: Some(file), path })
    }

    pub(crate) fn map_anonymous() -> Result<Self, RecordError> {
        let path = PathBuf::from("in memory");
        let memory = MmapMut::map_anon(RECORD_BYTES)
            .map_err(|error| RecordError::File { file: path.clone(), error })?;
        Ok(Self { memory, file: None, path })
    }

    /// Makes sure that the file system has memory for a part of the file.
    pub(crate) fn reserve(&self, offset: usize, length: usize) -> io::Result<()> {
        self.file.as_ref().map_or(Ok(()), |file| reserve(file, offset, length))
    }

    /// Sets the time of the file's last change to now.
    pub(crate) fn touch(&self) {
        let Some(file) = &self.file else { return };
        let at = |nanoseconds| Timespec { tv_sec: 0, tv_nsec: nanoseconds };
        let times = Timestamps { last_access: at(UTIME_OMIT), last_modification: at(UTIME_NOW) };
        // The time only orders the records of ended processes.
        let _ = futimens(file, &times);
    }

    /// Returns the layout, after a check of the length.
    pub(crate) fn layout(&self) -> Result<&RecordLayout, RecordError> {
        if self.memory.len() < RECORD_BYTES {
            let found = format!("it has {} bytes", self.memory.len());
            return Err(RecordError::NoRecord { file: self.path.clone(), found });
        }
        Ok(self.layout_of_own())
    }

    #[inline]
    pub(crate) fn layout_of_own(&self) -> &RecordLayout {
        layout_at(&self.memory)
    }
}

/// Makes sure that the file system has memory for a part of a file. A file system that cannot do that has what it has.
pub(crate) fn reserve(file: &File, offset: usize, length: usize) -> io::Result<()> {
    match fallocate(file, FallocateFlags::empty(), offset as u64, length as u64) {
        Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// A mapped record of any process.
pub(crate) struct ReadRecord(Mmap);

impl ReadRecord {
    pub(crate) fn map(file: &File, path: &Path) -> Result<Self, RecordError> {
        let failed = |error| RecordError::File { file: path.to_owned(), error };
        let length = file.metadata().map_err(failed)?.len();
        if length != RECORD_BYTES as u64 {
            let found = format!("it has {length} bytes");
            return Err(RecordError::NoRecord { file: path.to_owned(), found });
        }
        // SAFETY: writers never truncate their files, and only numbers that are atomic are in it.
        #[expect(unsafe_code, reason = "shared memory")]
        let memory = unsafe { MmapOptions::new().len(RECORD_BYTES).map(file) };
        memory.map(Self).map_err(failed)
    }

    pub(crate) fn layout(&self) -> &RecordLayout {
        layout_at(&self.0)
    }
}

/// Returns the layout at the start of a mapping that has as many bytes.
#[inline]
fn layout_at(memory: &[u8]) -> &RecordLayout {
    assert!(memory.len() >= RECORD_BYTES, "the length was checked");
    // SAFETY: a mapping begins at a page, so the address is aligned; the length was checked; every bit pattern is valid for
    // atomic numbers, which others may change at any time. A reader's mapping cannot be written, and is only loaded from.
    #[expect(unsafe_code, reason = "shared memory")]
    #[expect(clippy::cast_ptr_alignment, reason = "a mapping begins at a page")]
    unsafe {
        &*memory.as_ptr().cast::<RecordLayout>()
    }
}
