//! The folder of a journal: its lock, its identity, and the names of its files. Begin at [`JournalFolder::open`].
//!
//! A process that has the folder open holds a lock on the file `lock`, which the kernel releases when the process ends. The
//! file contains a description of the process, for the message to a second one.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::FlockOperation;

/// The version of the format that this program writes. It reads this version and all earlier ones.
const FORMAT: u32 = 1;

/// The name of the file without which a folder is no journal.
pub(crate) const IDENTITY_NAME: &str = "identity";
/// The beginnings of the names of segments and of snapshots.
pub(crate) const SEGMENT_PREFIX: &str = "segment-";
pub(crate) const SNAPSHOT_PREFIX: &str = "snapshot-";

/// Returns whether a file with this name is part of the journal in its folder.
pub(crate) fn is_part_of_journal(name: &str) -> bool {
    name == IDENTITY_NAME || name.starts_with(SEGMENT_PREFIX) || name.starts_with(SNAPSHOT_PREFIX)
}

/// The reason for which a journal cannot be opened or read.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The file system refuses.
    #[error("cannot {what} {path}: {source}")]
    Io {
        /// The attempted action.
        what: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The error of the file system.
        source: io::Error,
    },
    /// Another process has the journal open.
    #[error("{path} is in use by {holder}. Stop that process first, or choose another folder")]
    InUse {
        /// The folder.
        path: PathBuf,
        /// The description that the other process left.
        holder: String,
    },
    /// The folder contains something else.
    #[error("{path} is not a journal: {why}. Choose an empty folder, or one that the service has made")]
    NotAJournal {
        /// The folder.
        path: PathBuf,
        /// The reason.
        why: String,
    },
    /// The journal was written by a newer program.
    #[error(
        "{path} has format {found}, and this program knows the formats up to {known}. Start it with a newer program"
    )]
    NewerFormat {
        /// The folder.
        path: PathBuf,
        /// The format of the journal.
        found: u32,
        /// The greatest format that this program knows.
        known: u32,
    },
    /// A record that was written whole is damaged or missing.
    #[error(
        "record {number} is damaged, at byte {offset} of {path}: {why}. The journal is not opened, so that nothing is lost \
         that follows. Restore the file from a copy, or end the journal before this record with: muster journal repair"
    )]
    Damaged {
        /// The segment.
        path: PathBuf,
        /// The place in the segment.
        offset: usize,
        /// The number of the record.
        number: u64,
        /// Why this is not the end of an interrupted write.
        why: String,
    },
    /// A copy cannot be put in place of the journal.
    #[error(
        "the journal of before the upgrade cannot be restored: move the files of {copy} to {path} yourself, and start the former \
         version: {source}"
    )]
    NotRestored {
        /// The folder of the copy.
        copy: PathBuf,
        /// The folder of the journal.
        path: PathBuf,
        /// The error of the file system.
        source: io::Error,
    },
    /// The records before the first one are missing, and no intact snapshot replaces them.
    #[error(
        "the journal in {path} begins with record {first}, and there is no intact snapshot of the state before it{damaged}. \
         Restore the missing files from a copy"
    )]
    NoBeginning {
        /// The folder.
        path: PathBuf,
        /// The first record that is there.
        first: u64,
        /// A damaged snapshot, if there is one.
        damaged: String,
    },
}

impl JournalError {
    /// Returns a function that adds to an error of the file system what was attempted.
    pub(crate) fn io<'a>(what: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> Self + use<'a> {
        move |source| Self::Io { what, path: path.to_owned(), source }
    }
}

/// The folder of a journal. The folder is locked as long as this exists, unless it was opened only to read.
#[derive(Debug)]
pub struct JournalFolder {
    path: PathBuf,
    id: u64,
    boot: [u8; 16],
    lock: Option<File>,
}

impl JournalFolder {
    /// Opens and locks the journal in `path`; creates it if the folder is empty or absent. `holder` describes this process
    /// to others that try to open the folder.
    ///
    /// # Errors
    /// If the folder is in use, contains something else, or cannot be accessed.
    pub fn open(path: &Path, holder: &str) -> Result<Self, JournalError> {
        Self::create(path)?;
        let identity = path.join(IDENTITY_NAME);
        if !identity.exists() {
            refuse_foreign_files(path)?;
        }
        let lock = lock_folder(path, holder)?;
        let id = match fs::read_to_string(&identity) {
            Ok(text) => parse_identity(path, &text)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => create_identity(path, &identity)?,
            Err(error) => return Err(JournalError::io("read", &identity)(error)),
        };
        Ok(Self { path: path.to_owned(), id, boot: boot_id(), lock: Some(lock) })
    }

    /// Creates the folder, which only its user can open, unless it exists.
    ///
    /// # Errors
    /// If it cannot be created.
    pub fn create(path: &Path) -> Result<(), JournalError> {
        let created = DirBuilder::new().recursive(true).mode(0o700).create(path);
        created.map_err(JournalError::io("create", path))
    }

    /// Opens a journal that another process may write, only to read it. Files may go and records may come meanwhile, so a
    /// journal that looks damaged may be intact.
    ///
    /// # Errors
    /// If there is no journal, or it cannot be accessed.
    pub fn open_for_reading(path: &Path) -> Result<Self, JournalError> {
        let identity = path.join(IDENTITY_NAME);
        let text = fs::read_to_string(&identity).map_err(JournalError::io("read", &identity))?;
        let id = parse_identity(path, &text)?;
        Ok(Self { path: path.to_owned(), id, boot: boot_id(), lock: None })
    }

    /// Refuses a folder that was opened only to read.
    pub(crate) fn check_locked(&self) -> Result<(), JournalError> {
        match &self.lock {
            Some(_) => Ok(()),
            None => Err(JournalError::io("write to", &self.path)(io::ErrorKind::PermissionDenied.into())),
        }
    }

    /// Returns the path of the folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Returns the seed of the checksums of records, so that a record of another folder is not valid here.
    pub(crate) fn seed(&self) -> u32 {
        let [a, b, c, d, e, f, g, h] = self.id.to_le_bytes();
        u32::from_le_bytes([a, b, c, d]) ^ u32::from_le_bytes([e, f, g, h])
    }

    pub(crate) fn boot(&self) -> [u8; 16] {
        self.boot
    }

    /// Pretends that the host has restarted.
    #[cfg(test)]
    pub(crate) fn pretend_restart_of_host(&mut self) {
        self.boot[0] ^= 1;
    }

    pub(crate) fn segment_path(&self, index: u64) -> PathBuf {
        self.path.join(format!("{SEGMENT_PREFIX}{index:08}"))
    }

    pub(crate) fn snapshot_path(&self, record: u64) -> PathBuf {
        self.path.join(format!("{SNAPSHOT_PREFIX}{record:016}"))
    }

    /// Returns the indexes of the segments, ascending.
    pub(crate) fn segment_indexes(&self) -> Result<Vec<u64>, JournalError> {
        self.numbered_files(SEGMENT_PREFIX)
    }

    /// Returns the record numbers of the snapshots, ascending.
    pub(crate) fn snapshot_records(&self) -> Result<Vec<u64>, JournalError> {
        self.numbered_files(SNAPSHOT_PREFIX)
    }

    fn numbered_files(&self, prefix: &str) -> Result<Vec<u64>, JournalError> {
        let entries = fs::read_dir(&self.path).map_err(JournalError::io("list", &self.path))?;
        let mut numbers = Vec::new();
        for entry in entries {
            let entry = entry.map_err(JournalError::io("list", &self.path))?;
            let name = entry.file_name();
            numbers.extend(name.to_str().and_then(|name| name.strip_prefix(prefix)?.parse::<u64>().ok()));
        }
        numbers.sort_unstable();
        Ok(numbers)
    }

    /// Deletes snapshots that were not complete when their process died.
    pub(crate) fn delete_unfinished_snapshots(&self) -> Result<(), JournalError> {
        let entries = fs::read_dir(&self.path).map_err(JournalError::io("list", &self.path))?;
        for entry in entries.flatten() {
            let name = entry.file_name();
            if name.to_str().is_some_and(|name| name.starts_with(SNAPSHOT_PREFIX) && name.ends_with(".new")) {
                fs::remove_file(entry.path()).map_err(JournalError::io("delete", &entry.path()))?;
            }
        }
        Ok(())
    }

    /// Writes the entries of the folder itself to the disk.
    pub(crate) fn sync_entries(&self) -> Result<(), JournalError> {
        let synced = File::open(&self.path).and_then(|folder| folder.sync_all());
        synced.map_err(JournalError::io("write to the disk", &self.path))
    }
}

/// The time that a process which was killed may take to end and to release its lock.
const LOCK_WAIT: Duration = Duration::from_secs(2);

fn lock_within(lock: &File, wait: Duration) -> rustix::io::Result<()> {
    let began = muster_clock::monotonic();
    loop {
        match rustix::fs::flock(lock, FlockOperation::NonBlockingLockExclusive) {
            Err(rustix::io::Errno::WOULDBLOCK) if began.elapsed() < wait => {
                std::thread::sleep(Duration::from_millis(5));
            }
            locked => return locked,
        }
    }
}

/// Locks the folder and leaves the description of this process in it.
fn lock_folder(path: &Path, holder: &str) -> Result<File, JournalError> {
    let name = path.join("lock");
    let failed = |what| JournalError::io(what, &name);
    let mut lock = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&name)
        .map_err(failed("open"))?;
    match lock_within(&lock, LOCK_WAIT) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => {
            let mut holder = String::new();
            let _ = lock.take(1024).read_to_string(&mut holder);
            let holder = holder.trim();
            let holder = if holder.is_empty() { "another process" } else { holder }.to_owned();
            return Err(JournalError::InUse { path: path.to_owned(), holder });
        }
        Err(error) => return Err(failed("lock")(error.into())),
    }
    let described = lock.set_len(0).and_then(|()| lock.write_all(holder.as_bytes()));
    described.map_err(failed("write"))?;
    Ok(lock)
}

/// Refuses a folder that has other files than a journal that is being created.
fn refuse_foreign_files(path: &Path) -> Result<(), JournalError> {
    let entries = fs::read_dir(path).map_err(JournalError::io("list", path))?;
    let foreign = entries
        .flatten()
        .map(|entry| entry.file_name())
        .find(|name| name != "lock" && name != "identity.new");
    if let Some(foreign) = foreign {
        let why = format!("it contains {}, and no file named identity", foreign.display());
        return Err(JournalError::NotAJournal { path: path.to_owned(), why });
    }
    Ok(())
}

fn create_identity(path: &Path, identity: &Path) -> Result<u64, JournalError> {
    let id = muster_clock::random_nonzero().get();
    let new = path.join("identity.new");
    let written = fs::write(&new, format!("muster journal\nformat {FORMAT}\nid {id:016x}\n"))
        .and_then(|()| File::open(&new)?.sync_all())
        .and_then(|()| fs::rename(&new, identity))
        .and_then(|()| File::open(path)?.sync_all());
    written.map_err(JournalError::io("write", identity))?;
    Ok(id)
}

fn parse_identity(path: &Path, text: &str) -> Result<u64, JournalError> {
    let not_one = |why: &str| JournalError::NotAJournal { path: path.to_owned(), why: why.to_owned() };
    let mut lines = text.lines();
    if lines.next() != Some("muster journal") {
        return Err(not_one("its file identity is of another kind"));
    }
    let format = lines.next().and_then(|line| line.strip_prefix("format ")?.parse::<u32>().ok());
    let format = format.ok_or_else(|| not_one("its file identity names no format"))?;
    if format > FORMAT {
        return Err(JournalError::NewerFormat { path: path.to_owned(), found: format, known: FORMAT });
    }
    let id = lines.next().and_then(|line| u64::from_str_radix(line.strip_prefix("id ")?, 16).ok());
    id.ok_or_else(|| not_one("its file identity names no id"))
}

/// Returns the identity of this boot of the kernel; zeroes if the kernel does not tell it.
fn boot_id() -> [u8; 16] {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    u128::from_str_radix(&digits, 16).unwrap_or_default().to_le_bytes()
}

/// A folder of a test, which is deleted at its end.
#[cfg(test)]
pub(crate) struct TestFolder(pub PathBuf);

#[cfg(test)]
impl TestFolder {
    pub(crate) fn new() -> Self {
        let path = std::env::temp_dir().join(format!("muster-journal-{:016x}", muster_clock::random_u64()));
        fs::create_dir(&path).expect("a folder for a test");
        Self(path)
    }
}

#[cfg(test)]
impl Drop for TestFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_process_is_refused_and_learns_of_the_first() {
        let folder = TestFolder::new();
        let path = folder.0.join("journal");
        let first = JournalFolder::open(&path, "process 17, which serves 127.0.0.1:8476").unwrap();
        let refused = JournalFolder::open(&path, "another").unwrap_err().to_string();
        assert!(refused.contains("in use by process 17, which serves 127.0.0.1:8476"), "{refused}");
        let id = first.id();
        drop(first);
        assert_eq!(JournalFolder::open(&path, "another").unwrap().id(), id, "the folder keeps its identity");
    }

    #[test]
    fn what_is_no_journal_is_refused_and_left_alone() {
        let folder = TestFolder::new();
        fs::write(folder.0.join("photo.jpg"), "x").unwrap();
        let refused = JournalFolder::open(&folder.0, "test").unwrap_err().to_string();
        assert!(refused.contains("is not a journal: it contains photo.jpg"), "{refused}");
        fs::remove_file(folder.0.join("photo.jpg")).unwrap();
        fs::write(folder.0.join("identity"), "muster journal\nformat 99\nid 00\n").unwrap();
        let refused = JournalFolder::open(&folder.0, "test").unwrap_err().to_string();
        assert!(refused.contains("has format 99, and this program knows the formats up to 1"), "{refused}");
        for text in ["", "muster journal\n", "muster journal\nformat x\n", "muster journal\nformat 1\nid z\n"]
        {
            fs::write(folder.0.join("identity"), text).unwrap();
            let refused = JournalFolder::open(&folder.0, "test");
            assert!(matches!(refused, Err(JournalError::NotAJournal { .. })), "{text:?}: {refused:?}");
        }
    }
}
