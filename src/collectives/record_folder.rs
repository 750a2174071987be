//! The folder of records. Begin at [`RecordFolder::start_record`] and [`RecordFolder::read_all`].
//!
//! The writer holds a lock on its file for as long as it lives, so a reader knows which processes have ended, also those of
//! other process namespaces. The folder belongs to one user.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::mem::offset_of;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::time::SystemTime;

use rustix::fs::{FlockOperation, flock};

use crate::layout::{LAYOUT_VERSION, MAGIC, RecordLayout};
use crate::mapped_record::{MappedRecord, RECORD_BYTES, ReadRecord, RecordError, reserve};
use crate::monotonic_nanos;
use crate::record::Record;
use crate::snapshot::{RecordSnapshot, read_record};

const EXTENSION: &str = "collectives";
/// The number of records of ended processes that a new record leaves in the folder.
const ENDED_KEPT: usize = 32;
/// The number of names that a process tries for its file.
const NAMES_TRIED: u32 = 100;

/// A record as it was read from its file.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredRecord {
    /// The file.
    pub file: PathBuf,
    /// Whether its process still runs.
    pub is_alive: bool,
    /// The contents.
    pub snapshot: RecordSnapshot,
}

/// The folder with the records of one user's processes on this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordFolder(PathBuf);

impl RecordFolder {
    /// Returns the folder that `MUSTER_COLLECTIVES_DIR` names, or else the one of this user in `/dev/shm`.
    #[must_use]
    pub fn of_this_user() -> Self {
        match std::env::var_os("MUSTER_COLLECTIVES_DIR").filter(|folder| !folder.is_empty()) {
            Some(folder) => Self(folder.into()),
            None => {
                let user = rustix::process::geteuid().as_raw();
                Self(Path::new("/dev/shm").join(format!("muster-collectives-{user}")))
            }
        }
    }

    /// Returns a given folder.
    #[must_use]
    pub fn at(folder: impl Into<PathBuf>) -> Self {
        Self(folder.into())
    }

    /// Returns its path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Starts the record of this process in a file of its own, and removes the oldest records of ended processes. `job` and
    /// `task` are those that the environment tells.
    ///
    /// # Errors
    /// If the folder or the file cannot be used.
    pub fn start_record(&self, job: Option<&str>, task: Option<u32>) -> Result<Record, RecordError> {
        self.create()?;
        self.remove_old_records();
        let pid = std::process::id();
        for attempt in 0..NAMES_TRIED {
            let name = match attempt {
                0 => format!("{pid}.{EXTENSION}"),
                _ => format!("{pid}-{attempt}.{EXTENSION}"),
            };
            let path = self.0.join(name);
            let failed = |error: io::Error| RecordError::File { file: path.clone(), error };
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).truncate(false).mode(0o600);
            options.custom_flags(rustix::fs::OFlags::NOFOLLOW.bits().cast_signed());
            let file = options.open(&path).map_err(failed)?;
            if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
                // Another process has it: the same number in another namespace.
                continue;
            }
            // An older process of this number left it.
            if file.metadata().map_err(failed)?.len() != 0 {
                continue;
            }
            let header = offset_of!(RecordLayout, communicators);
            let sized = file.set_len(RECORD_BYTES as u64).and_then(|()| reserve(&file, 0, header));
            if let Err(error) = sized {
                let _ = std::fs::remove_file(&path);
                return Err(failed(error));
            }
            let memory = MappedRecord::map_own(file, path.clone())?;
            return Record::start(memory, job, task);
        }
        let error = io::Error::new(io::ErrorKind::AlreadyExists, "all its names are in use");
        Err(RecordError::File { file: self.0.join(format!("{pid}.{EXTENSION}")), error })
    }

    /// Returns all records, and why others cannot be read. A folder that does not exist has none.
    ///
    /// # Errors
    /// If the folder cannot be read, or belongs to another user.
    pub fn read_all(&self) -> Result<(Vec<StoredRecord>, Vec<RecordError>), RecordError> {
        let (mut records, mut errors) = (Vec::new(), Vec::new());
        let files = self.list()?;
        let owner = match std::fs::metadata(&self.0) {
            Ok(found) => found.uid(),
            Err(_) => return Ok((records, errors)),
        };
        // Another user could cut off a file while it is read. The administrator reads all folders.
        let user = rustix::process::geteuid().as_raw();
        if owner != user && user != 0 {
            return Err(RecordError::ForeignFolder(self.0.clone()));
        }
        for file in files {
            match read_file(&file, owner) {
                Ok(record) => records.push(record),
                Err(error) => errors.push(error),
            }
        }
        records.sort_by_key(|record| record.snapshot.started_unix_us);
        Ok((records, errors))
    }

    fn list(&self) -> Result<Vec<PathBuf>, RecordError> {
        let failed = |error| RecordError::Folder { folder: self.0.clone(), error };
        let entries = match std::fs::read_dir(&self.0) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(failed(error)),
        };
        let files = entries.filter_map(Result::ok).map(|entry| entry.path());
        Ok(files.filter(|file| file.extension().is_some_and(|extension| extension == EXTENSION)).collect())
    }

    fn create(&self) -> Result<(), RecordError> {
        let failed = |error| RecordError::Folder { folder: self.0.clone(), error };
        match DirBuilder::new().mode(0o700).create(&self.0) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(failed(error)),
        }
        let found = std::fs::symlink_metadata(&self.0).map_err(failed)?;
        let others_write = found.mode() & 0o022 != 0 && found.mode() & 0o1000 == 0;
        if !found.is_dir() || found.uid() != rustix::process::geteuid().as_raw() || others_write {
            return Err(RecordError::ForeignFolder(self.0.clone()));
        }
        Ok(())
    }

    /// Removes the records of ended processes but the latest ones. A record that cannot be removed stays.
    fn remove_old_records(&self) {
        let mut ended: Vec<(SystemTime, PathBuf)> = Vec::new();
        for path in self.list().unwrap_or_default() {
            let Ok(file) = open_to_read(&path) else { continue };
            if is_alive(&file) {
                continue;
            }
            if let Ok(changed) = file.metadata().and_then(|found| found.modified()) {
                ended.push((changed, path));
            }
        }
        ended.sort();
        let surplus = ended.len().saturating_sub(ENDED_KEPT);
        for (_, path) in &ended[..surplus] {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Returns whether the process that writes a record still runs: it holds the lock of the file.
fn is_alive(file: &File) -> bool {
    // The lock is given back when the caller drops the file.
    flock(file, FlockOperation::NonBlockingLockShared).is_err()
}

/// Opens a file to read. It follows no link, and does not wait for a writer of a pipe.
fn open_to_read(path: &Path) -> io::Result<File> {
    let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
    OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(path)
}

/// Reads the record in a file, which must be of the owner of the folder.
fn read_file(path: &Path, owner: u32) -> Result<StoredRecord, RecordError> {
    let failed = |error| RecordError::File { file: path.to_owned(), error };
    let file = open_to_read(path).map_err(failed)?;
    let found = file.metadata().map_err(failed)?;
    if !found.is_file() || found.uid() != owner {
        let found = "it is no file of the folder's owner".to_owned();
        return Err(RecordError::NoRecord { file: path.to_owned(), found });
    }
    let is_alive = is_alive(&file);
    let memory = ReadRecord::map(&file, path)?;
    let layout = memory.layout();
    let version = layout.version.load(Relaxed);
    let no_record = |found: String| RecordError::NoRecord { file: path.to_owned(), found };
    if layout.magic.load(Acquire) != MAGIC {
        return Err(no_record("its first bytes are others".to_owned()));
    }
    if version != LAYOUT_VERSION {
        return Err(no_record(format!("it has version {version}")));
    }
    let snapshot = read_record(layout, monotonic_nanos());
    Ok(StoredRecord { file: path.to_owned(), is_alive, snapshot })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Collective, CollectiveFunction, DataType, NewCommunicator, OperationHandle};

    struct TestFolder(PathBuf);

    impl TestFolder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("muster-records-{name}-{}", std::process::id()));
            let _ = std::fs::remove_dir_all(&path);
            Self(path)
        }

        fn records(&self) -> RecordFolder {
            RecordFolder::at(&self.0)
        }
    }

    impl Drop for TestFolder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn reduce(count: u64) -> Collective {
        Collective {
            function: CollectiveFunction::AllReduce,
            data_type: DataType::Float32,
            count,
            root: 0,
            channels: 2,
        }
    }

    const WORLD: NewCommunicator<'static> =
        NewCommunicator { hash: 0xABCD, rank: 1, ranks: 4, nodes: 1, name: b"world" };

    #[test]
    fn another_mapping_reads_what_was_recorded() {
        let folder = TestFolder::new("read");
        let record = folder.records().start_record(Some("train"), Some(3)).unwrap();
        let world = record.open_communicator(&WORLD).unwrap();
        let first = record.enqueue(world, &reduce(100), Some(0), true).unwrap();
        let second = record.enqueue(world, &reduce(200), Some(1), true).unwrap();
        for handle in [first, second] {
            record.channel_began(handle, 1_000);
            record.channel_began(handle, 1_200);
        }
        record.channel_ended(first, 4_000);
        record.channel_ended(first, 5_000);
        record.channel_ended(second, 9_000);
        let (records, errors) = folder.records().read_all().unwrap();
        assert!(errors.is_empty(), "{errors:?}");
        let [stored] = &records[..] else { panic!("{records:?}") };
        assert!(stored.is_alive);
        let RecordSnapshot { job, task, communicators, .. } = &stored.snapshot;
        assert_eq!((job.as_deref(), *task), (Some("train"), Some(3)));
        let [world] = &communicators[..] else { panic!("{communicators:?}") };
        assert_eq!((world.hash, world.rank, world.ranks, &*world.name), (0xABCD, 1, 4, "world"));
        assert_eq!(world.collectives, 2);
        let [totals] = &world.functions[..] else { panic!("{world:?}") };
        assert_eq!((totals.enqueued, totals.begun, totals.ended), (2, 2, 1));
        assert_eq!((totals.bytes, totals.timed_bytes, totals.gpu_ns), (1200, 400, 4_000));
        let [unfinished] = &world.unfinished[..] else { panic!("{world:?}") };
        assert_eq!((unfinished.number, unfinished.operation), (1, reduce(200)));
        assert!(unfinished.begun_ago.is_some());
        assert_eq!(world.latest.map(|latest| latest.chain), Some(unfinished.chain));
        drop(record);
        assert!(!folder.records().read_all().unwrap().0[0].is_alive, "the lock ends with the process");
    }

    #[test]
    fn a_collective_that_nccl_does_not_time_is_not_unfinished() {
        let record = Record::in_memory(None, None).unwrap();
        let world = record.open_communicator(&WORLD).unwrap();
        let unfinished = || {
            let snapshot = record.snapshot(0);
            let [world] = &snapshot.communicators[..] else { panic!("{snapshot:?}") };
            let numbers = world.unfinished.iter().map(|it| it.number).collect::<Vec<_>>();
            (numbers, world.latest_ended.map(|it| it.number))
        };
        let handles: Vec<_> =
            (0..4).map(|number| record.enqueue(world, &reduce(1), Some(number), true).unwrap()).collect();
        assert_eq!(unfinished(), (vec![0, 1, 2, 3], None));
        // Nothing comes of number 0, and number 1 begins.
        record.channel_began(handles[1], 1_000);
        assert_eq!(unfinished(), (vec![1, 2, 3], None));
        // Number 2 shares a kernel with number 1, which has not ended.
        record.channel_began(handles[2], 1_000);
        assert_eq!(unfinished(), (vec![1, 2, 3], None));
        for _ in 0..2 {
            record.channel_ended(handles[2], 2_000);
        }
        assert_eq!(unfinished(), (vec![3], Some(2)));
        let totals = record.snapshot(0).communicators[0].functions[0];
        assert_eq!((totals.enqueued, totals.timed, totals.gpu_ns), (4, 1, 1_000));
    }

    #[test]
    fn memory_is_reserved_before_it_is_used() {
        let folder = TestFolder::new("reserved");
        let record = folder.records().start_record(None, None).unwrap();
        let blocks = || {
            let entry = std::fs::read_dir(&folder.0).unwrap().next().unwrap().unwrap();
            entry.metadata().unwrap().blocks() * 512
        };
        let header = offset_of!(RecordLayout, communicators) as u64;
        let slot = size_of::<crate::layout::CommunicatorSlot>() as u64;
        assert!((header..slot).contains(&blocks()), "{}", blocks());
        let _ = record.snapshot(0);
        assert!(blocks() < slot, "a reader touches no slot that was never used");
        record.open_communicator(&WORLD).unwrap();
        assert!(blocks() >= slot, "{} of {slot}", blocks());
    }

    #[test]
    fn records_of_an_ended_process_of_the_same_number_stay() {
        let folder = TestFolder::new("same-number");
        for _ in 0..3 {
            drop(folder.records().start_record(None, None).unwrap());
        }
        assert_eq!(folder.records().read_all().unwrap().0.len(), 3);
    }

    #[test]
    fn a_record_counts_as_old_from_its_last_change() {
        let folder = TestFolder::new("touched");
        let record = folder.records().start_record(None, None).unwrap();
        let path = folder.records().read_all().unwrap().0[0].file.clone();
        let changed = || std::fs::metadata(&path).unwrap().modified().unwrap();
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        file.set_modified(SystemTime::UNIX_EPOCH).unwrap();
        record.touch();
        assert!(changed() > SystemTime::UNIX_EPOCH);
    }

    #[test]
    fn a_pipe_among_the_records_is_no_record() {
        let folder = TestFolder::new("pipe");
        let record = folder.records().start_record(None, None).unwrap();
        let pipe = folder.0.join(format!("1.{EXTENSION}"));
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        let (records, errors) = folder.records().read_all().unwrap();
        assert_eq!((records.len(), errors.len()), (1, 1), "{errors:?}");
        drop(record);
        folder.records().remove_old_records();
    }

    #[test]
    fn stale_and_forged_handles_have_no_effect() {
        let folder = TestFolder::new("handles");
        let record = folder.records().start_record(None, None).unwrap();
        let world = record.open_communicator(&WORLD).unwrap();
        let stale = record.enqueue(world, &reduce(1), Some(0), true).unwrap();
        for number in 1..=crate::COLLECTIVES_KEPT as u64 {
            record.enqueue(world, &reduce(1), Some(number), true).unwrap();
        }
        let before = record.snapshot(0);
        record.channel_began(stale, 5);
        fastrand::seed(7);
        for _ in 0..10_000 {
            // None of these can be the handle of an operation in the ring: their numbers are too large.
            let forged = OperationHandle::from_bits(fastrand::u64(..) | 1 << 40);
            record.channel_began(forged, fastrand::u64(..));
            record.channel_ended(forged, fastrand::u64(..));
        }
        record.channel_ended(OperationHandle::from_bits(0), 1);
        assert_eq!(record.snapshot(0), before);
    }

    #[test]
    fn slots_are_used_again_after_their_end_and_a_full_record_counts() {
        let folder = TestFolder::new("slots");
        let record = folder.records().start_record(None, None).unwrap();
        let open = |hash| record.open_communicator(&NewCommunicator { hash, ..WORLD });
        let slots: Vec<_> = (0..crate::COMMUNICATORS_MAX as u64).map(|hash| open(hash).unwrap()).collect();
        record.enqueue(slots[5], &reduce(1), Some(0), true).unwrap();
        assert_eq!(open(1_000), None);
        record.end_communicator(slots[5]);
        assert_eq!(record.snapshot(0).communicators.len(), crate::COMMUNICATORS_MAX - 1);
        assert_eq!(open(1_001), Some(slots[5]));
        let snapshot = record.snapshot(0);
        assert_eq!(snapshot.communicators_not_recorded, 1);
        let again = snapshot.communicators.iter().find(|it| it.hash == 1_001).unwrap();
        assert_eq!((again.collectives, again.functions.len(), again.latest), (0, 0, None));
    }

    #[test]
    fn old_records_go_and_files_that_are_none_are_named() {
        let folder = TestFolder::new("old");
        let records = folder.records();
        drop(records.start_record(None, None).unwrap());
        for number in 0..ENDED_KEPT + 5 {
            let path = folder.0.join(format!("x{number}.{EXTENSION}"));
            std::fs::copy(folder.0.join(format!("{}.{EXTENSION}", std::process::id())), path).unwrap();
        }
        let own = records.start_record(None, None).unwrap();
        assert_eq!(records.read_all().unwrap().0.len(), ENDED_KEPT + 1, "the own one, and those that stay");
        let other = records.start_record(None, None).unwrap();
        assert_eq!(records.read_all().unwrap().0.iter().filter(|record| record.is_alive).count(), 2);
        drop((own, other));
        std::fs::write(folder.0.join(format!("short.{EXTENSION}")), "x").unwrap();
        std::fs::write(folder.0.join(format!("zeros.{EXTENSION}")), vec![0; RECORD_BYTES]).unwrap();
        let (_, errors) = records.read_all().unwrap();
        assert_eq!(errors.len(), 2, "{errors:?}");
        assert_eq!(RecordFolder::at("/nowhere/at/all").read_all().unwrap().0.len(), 0);
        assert!(RecordFolder::at("/nowhere/at/all").start_record(None, None).is_err());
    }

    #[test]
    fn a_damaged_record_is_read_without_harm() {
        let folder = TestFolder::new("damage");
        let record = folder.records().start_record(None, None).unwrap();
        let world = record.open_communicator(&WORLD).unwrap();
        for number in 0..600 {
            record.enqueue(world, &reduce(number), Some(number), number % 2 == 0).unwrap();
        }
        drop(record);
        let path = folder.0.join(format!("{}.{EXTENSION}", std::process::id()));
        let whole = std::fs::read(&path).unwrap();
        for seed in 0..50 {
            fastrand::seed(seed);
            let mut damaged = whole.clone();
            // The first 12 bytes tell that it is a record; the first slots are where the contents are.
            for _ in 0..2_000 {
                let at = 12 + fastrand::usize(..200_000);
                damaged[at] = fastrand::u8(..);
            }
            std::fs::write(&path, damaged).unwrap();
            folder.records().read_all().unwrap();
        }
    }
}
