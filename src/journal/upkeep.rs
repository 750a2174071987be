//! The threads that keep a journal: one allocates spare segments and writes segments to the disk, the other writes
//! snapshots and deletes the files that they replace. Begin at `UpkeepThreads::start`.
//!
//! The thread that appends never waits for these threads, with one exception: if the present segment is full before the
//! spare is ready, it allocates a segment itself.
//!
//! While the journal is *in trouble* (no room, or the disk reports an error), [`JournalStatus::trouble`] says why. The
//! user of the journal should then refuse changes. The trouble ends when a spare can be allocated again. If records were
//! lost or a write to the disk failed, it ends only when a snapshot is complete that contains all records up to then, so
//! that none of them is needed.
//!
//! After a failed write the kernel may drop the bytes and report success the next time. So a file whose write has failed is
//! never written to the disk again, and no record counts as durable from then on until that snapshot is complete. A record
//! after a lost one does not count as durable either.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::folder::{JournalError, JournalFolder, SEGMENT_PREFIX};
use crate::options::{AppendError, JournalOptions};
use crate::segment::SegmentFile;
use crate::snapshot::write_snapshot;

/// The time after which records are written to the disk though no thread waits for that.
const SYNC_INTERVAL: Duration = Duration::from_secs(1);
/// The time between two attempts to allocate a segment.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Writes the state of a snapshot.
pub type SnapshotWriter = Box<dyn FnOnce(&mut dyn Write) -> io::Result<()> + Send>;

/// Receives the number below which all records are durable.
pub type DurableHook = Box<dyn Fn(u64) + Send>;

/// A description of a journal for metrics, pages and logs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct JournalStatus {
    /// The number of appended records, over all lives of the journal.
    pub records: u64,
    /// All records below this number are on the disk.
    pub durable_records: u64,
    /// The bytes that this process has appended.
    pub appended_bytes: u64,
    /// The segments in the folder, the spare one included.
    pub segments: u64,
    /// The space that segments and snapshots take, and what was removed from the journal and is kept.
    pub disk_bytes: u64,
    /// The snapshots that this process has written.
    pub snapshots: u64,
    /// The snapshots that could not be written.
    pub failed_snapshots: u64,
    /// The length of the latest snapshot.
    pub snapshot_bytes: u64,
    /// The time that the latest snapshot took.
    pub snapshot_time: Duration,
    /// The number of times that records were written to the disk.
    pub syncs: u64,
    /// The records that could not be written.
    pub lost_records: u64,
    /// Why changes should be refused, in a sentence; `None` if all is well.
    pub trouble: Option<String>,
}

impl JournalStatus {
    /// Returns the number of records that the loss of the host would lose now.
    #[must_use]
    pub fn records_not_on_disk(&self) -> u64 {
        // Without a record there is no durable one either.
        self.records.saturating_sub(self.durable_records.saturating_sub(1))
    }
}

#[derive(Default)]
struct UpkeepState {
    /// The segment in use.
    current: Option<Arc<File>>,
    /// Segments that are full.
    sealed: Vec<SegmentFile>,
    /// Files of an earlier process, which may not be on the disk.
    inherited: Vec<File>,
    spare: Option<SegmentFile>,
    next_index: u64,
    snapshots: VecDeque<(u64, SnapshotWriter)>,
    is_writing_snapshot: bool,
    is_stopping: bool,
    /// Files were created whose names may not be on the disk.
    has_new_files: bool,
    status: JournalStatus,
}

impl UpkeepState {
    /// Returns the index of a new segment. Each index is used once, whether the segment can be allocated or not.
    fn take_index(&mut self) -> u64 {
        self.next_index += 1;
        self.next_index - 1
    }
}

/// The shared state of the writer and the threads.
pub(crate) struct UpkeepShared {
    pub folder: JournalFolder,
    pub options: JournalOptions,
    state: Mutex<UpkeepState>,
    wake: Condvar,
    wake_snapshots: Condvar,
    durable_changed: Condvar,
    /// The number of the next record.
    pub next_record: AtomicU64,
    pub appended_bytes: AtomicU64,
    pub lost_records: AtomicU64,
    pub durable: AtomicU64,
    /// Set by those who wait for the disk, before they wake its thread.
    is_sync_requested: AtomicBool,
    is_in_trouble: AtomicBool,
    /// Records below this number are lost or may be: only a snapshot whose number is at least this makes the journal whole.
    /// 0: none are. Changed under the lock of the state.
    needed_snapshot: AtomicU64,
    /// No record from this number on counts as durable. Changed under the lock of the state.
    durable_limit: AtomicU64,
    /// The present segment must not be used any more: its last write to the disk has failed.
    pub is_segment_tainted: AtomicBool,
    pub last_snapshot_bytes: AtomicU64,
    /// The snapshots that failed in a row, and the monotonic time before which no other one is tried.
    snapshot_failures: AtomicU64,
    snapshot_retry_at: AtomicU64,
    on_durable: Mutex<Option<DurableHook>>,
    /// Whether the file system has no room, for tests.
    #[cfg(test)]
    pub fails_allocations: AtomicBool,
    /// Whether each write to the disk fails, for tests.
    #[cfg(test)]
    pub fails_syncs: AtomicBool,
    /// Whether records are written to the disk only on request, for tests.
    #[cfg(test)]
    pub syncs_on_request_only: AtomicBool,
}

/// The threads of a journal.
pub(crate) struct UpkeepThreads(Vec<JoinHandle<()>>);

impl UpkeepShared {
    pub(crate) fn new(
        folder: JournalFolder,
        options: JournalOptions,
        next_index: u64,
        inherited: Vec<File>,
        durable: u64,
        snapshot_bytes: u64,
    ) -> Self {
        let state = UpkeepState { next_index, inherited, ..UpkeepState::default() };
        Self {
            folder,
            options,
            state: Mutex::new(state),
            wake: Condvar::new(),
            wake_snapshots: Condvar::new(),
            durable_changed: Condvar::new(),
            next_record: AtomicU64::new(0),
            appended_bytes: AtomicU64::new(0),
            lost_records: AtomicU64::new(0),
            durable: AtomicU64::new(durable),
            is_sync_requested: AtomicBool::new(false),
            is_in_trouble: AtomicBool::new(false),
            needed_snapshot: AtomicU64::new(0),
            durable_limit: AtomicU64::new(u64::MAX),
            is_segment_tainted: AtomicBool::new(false),
            last_snapshot_bytes: AtomicU64::new(snapshot_bytes),
            snapshot_failures: AtomicU64::new(0),
            snapshot_retry_at: AtomicU64::new(0),
            on_durable: Mutex::new(None),
            #[cfg(test)]
            fails_allocations: AtomicBool::new(false),
            #[cfg(test)]
            fails_syncs: AtomicBool::new(false),
            #[cfg(test)]
            syncs_on_request_only: AtomicBool::new(false),
        }
    }

    fn lock(&self) -> MutexGuard<'_, UpkeepState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether changes should be refused.
    pub(crate) fn is_in_trouble(&self) -> bool {
        self.is_in_trouble.load(Ordering::Relaxed)
    }

    fn set_trouble(&self, why: String) {
        let mut state = self.lock();
        if state.status.trouble.is_none() {
            tracing::error!(
                "the journal in {} cannot be written: {why}. Changes are refused until it can be",
                self.folder.path().display()
            );
        }
        state.status.trouble.get_or_insert(why);
        self.is_in_trouble.store(true, Ordering::Relaxed);
    }

    fn clear_trouble_if_over(&self) {
        let mut state = self.lock();
        if state.spare.is_none() || self.needed_snapshot.load(Ordering::Relaxed) > 0 {
            return;
        }
        if state.status.trouble.take().is_some() {
            tracing::warn!("the journal in {} can be written again", self.folder.path().display());
        }
        self.is_in_trouble.store(false, Ordering::Relaxed);
    }

    /// Puts the segment `next` into use, and hands over the one before, which is written to the disk unless it is tainted.
    pub(crate) fn rotate(&self, next: &SegmentFile, full: Option<SegmentFile>) {
        let mut state = self.lock();
        let is_tainted = self.is_segment_tainted.swap(false, Ordering::Relaxed);
        state.current = Some(Arc::clone(next.file()));
        state.has_new_files = true;
        state.sealed.extend(full.filter(|_| !is_tainted));
        drop(state);
        self.wake.notify_one();
    }

    /// Returns a segment with room for `bytes`: the spare one, or one that is allocated now.
    pub(crate) fn take_segment(&self, bytes: usize) -> io::Result<SegmentFile> {
        let index = {
            let mut state = self.lock();
            if bytes <= self.options.segment_bytes
                && let Some(spare) = state.spare.take()
            {
                return Ok(spare);
            }
            state.take_index()
        };
        self.allocate(index, bytes.max(self.options.segment_bytes))
    }

    fn allocate(&self, index: u64, bytes: usize) -> io::Result<SegmentFile> {
        #[cfg(test)]
        if self.fails_allocations.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        SegmentFile::allocate(&self.folder.segment_path(index), bytes)
    }

    /// Records that the record `number` could not be written.
    pub(crate) fn record_lost(&self, number: u64, error: &AppendError) {
        self.lost_records.fetch_add(1, Ordering::Relaxed);
        self.require_snapshot(number + 1, number, error.to_string());
    }

    /// Begins a trouble that ends when a spare segment can be allocated.
    pub(crate) fn report_no_room(&self, error: &io::Error) {
        self.set_trouble(format!("a new segment cannot be allocated: {error}"));
    }

    /// Begins a trouble that only a snapshot ends whose number is at least `snapshot`. No record from `durable_limit` on counts
    /// as durable until then.
    fn require_snapshot(&self, snapshot: u64, durable_limit: u64, why: String) {
        {
            let _state = self.lock();
            self.needed_snapshot.fetch_max(snapshot, Ordering::Relaxed);
            self.durable_limit.fetch_min(durable_limit, Ordering::Relaxed);
        }
        self.set_trouble(why);
    }

    /// Returns the least number of a snapshot that makes the journal whole; 0: it is whole.
    pub(crate) fn needed_snapshot(&self) -> u64 {
        self.needed_snapshot.load(Ordering::Relaxed)
    }

    /// Ends the trouble if the snapshot before `record` makes the journal whole.
    fn on_snapshot_complete(&self, record: u64) {
        let _state = self.lock();
        if self.needed_snapshot.load(Ordering::Relaxed) <= record {
            self.needed_snapshot.store(0, Ordering::Relaxed);
            self.durable_limit.store(u64::MAX, Ordering::Relaxed);
        }
        // The snapshot is on the disk, and replaces all records before it.
        self.durable.fetch_max(record, Ordering::Release);
    }

    /// Asks for records to be written to the disk now.
    pub(crate) fn request_sync(&self) {
        // A request that the thread has not seen yet covers this one: it looks at the records after the request.
        if !self.is_sync_requested.swap(true, Ordering::AcqRel) {
            // The thread must not be between its look at the request and its wait.
            drop(self.lock());
            self.wake.notify_one();
        }
    }

    /// Waits until all records below `number` are durable, for `within` at most. Returns whether they are.
    pub(crate) fn wait_until_durable(&self, number: u64, within: Duration) -> bool {
        self.request_sync();
        let state = self.lock();
        let waits = |_: &mut UpkeepState| self.durable.load(Ordering::Acquire) < number;
        drop(self.durable_changed.wait_timeout_while(state, within, waits));
        self.durable.load(Ordering::Acquire) >= number
    }

    /// Calls `hook` with the number below which all records are durable, each time that it grows.
    pub(crate) fn set_durable_hook(&self, hook: DurableHook) {
        *self.on_durable.lock().unwrap_or_else(PoisonError::into_inner) = Some(hook);
    }

    pub(crate) fn queue_snapshot(&self, record: u64, write: SnapshotWriter) {
        self.lock().snapshots.push_back((record, write));
        self.wake_snapshots.notify_one();
    }

    /// Returns whether a snapshot can be begun: none waits or is being written, and none has just failed.
    pub(crate) fn is_ready_for_snapshot(&self) -> bool {
        let state = self.lock();
        !state.is_writing_snapshot
            && state.snapshots.is_empty()
            && muster_clock::monotonic_nanoseconds() >= self.snapshot_retry_at.load(Ordering::Relaxed)
    }

    pub(crate) fn status(&self) -> JournalStatus {
        let mut status = self.lock().status.clone();
        status.records = self.next_record.load(Ordering::Relaxed).saturating_sub(1);
        status.appended_bytes = self.appended_bytes.load(Ordering::Relaxed);
        status.lost_records = self.lost_records.load(Ordering::Relaxed);
        status.durable_records = self.durable.load(Ordering::Relaxed);
        status
    }

    fn stop(&self) {
        self.lock().is_stopping = true;
        self.wake.notify_all();
        self.wake_snapshots.notify_all();
    }

    /// Allocates spare segments and writes to the disk until the journal is stopped.
    fn run_disk_thread(&self) {
        loop {
            let (wants_spare, stops, requested) = {
                let mut state = self.lock();
                let idle = |state: &mut UpkeepState| {
                    !(state.is_stopping
                        || self.is_sync_requested.load(Ordering::Acquire)
                        || (state.spare.is_none() && state.status.trouble.is_none())
                        || !state.sealed.is_empty())
                };
                let wait = if state.status.trouble.is_some() { RETRY_INTERVAL } else { SYNC_INTERVAL };
                state = match self.wake.wait_timeout_while(state, wait, idle) {
                    Ok((state, _)) => state,
                    Err(poisoned) => poisoned.into_inner().0,
                };
                let requested = self.is_sync_requested.swap(false, Ordering::AcqRel);
                (state.spare.is_none() && !state.is_stopping, state.is_stopping, requested)
            };
            if wants_spare {
                self.allocate_spare();
            }
            if self.may_write_to_disk(requested) {
                self.write_to_disk();
            }
            self.clear_trouble_if_over();
            if stops {
                return;
            }
        }
    }

    #[cfg(not(test))]
    #[expect(clippy::unused_self, reason = "the form for tests reads a flag")]
    fn may_write_to_disk(&self, _requested: bool) -> bool {
        true
    }

    #[cfg(test)]
    fn may_write_to_disk(&self, requested: bool) -> bool {
        requested || !self.syncs_on_request_only.load(Ordering::Relaxed)
    }

    fn allocate_spare(&self) {
        let index = self.lock().take_index();
        match self.allocate(index, self.options.segment_bytes) {
            Ok(spare) => {
                let mut state = self.lock();
                state.has_new_files = true;
                state.spare = Some(spare);
            }
            Err(error) => self.set_trouble(format!("a new segment cannot be allocated: {error}")),
        }
        self.measure_disk();
    }

    fn write_to_disk(&self) {
        // Read before the files are taken: each record below this number is in one of them, or was written earlier.
        let written = self.next_record.load(Ordering::Acquire);
        let (current, sealed, inherited, has_new_files) = {
            let mut state = self.lock();
            let has_new_files = std::mem::take(&mut state.has_new_files);
            let sealed = std::mem::take(&mut state.sealed);
            (state.current.clone(), sealed, std::mem::take(&mut state.inherited), has_new_files)
        };
        let is_idle = sealed.is_empty() && inherited.is_empty() && !has_new_files;
        if is_idle && written <= self.durable.load(Ordering::Relaxed) {
            return;
        }
        let names = if has_new_files { self.folder.sync_entries() } else { Ok(()) };
        let inherited = inherited.iter().try_for_each(File::sync_data);
        let sealed = sealed.into_iter().try_for_each(SegmentFile::finish);
        let current = current.map_or(Ok(()), |current| current.sync_data());
        let names = names.map_err(io::Error::other);
        let synced = names.and(inherited).and(sealed).and(current);
        #[cfg(test)]
        let synced = if self.fails_syncs.load(Ordering::Relaxed) {
            Err(io::Error::other("a fault of a test"))
        } else {
            synced
        };
        match synced {
            Ok(()) => {
                let durable = {
                    let mut state = self.lock();
                    state.status.syncs += 1;
                    let durable = written.min(self.durable_limit.load(Ordering::Relaxed));
                    self.durable.fetch_max(durable, Ordering::Release).max(durable)
                };
                self.durable_changed.notify_all();
                let hook = self.on_durable.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(hook) = hook.as_ref() {
                    hook(durable);
                }
            }
            Err(error) => {
                // Nothing of these files is written to the disk again; see the head of the file.
                let written = {
                    let mut state = self.lock();
                    state.current = None;
                    self.is_segment_tainted.store(true, Ordering::Relaxed);
                    self.next_record.load(Ordering::Acquire)
                };
                let durable = self.durable.load(Ordering::Relaxed);
                self.require_snapshot(written, durable, format!("the disk reports an error: {error}"));
            }
        }
    }

    /// Writes queued snapshots until the journal is stopped.
    fn run_snapshot_thread(&self) {
        loop {
            let (record, write) = {
                let mut state = self.lock();
                loop {
                    if let Some(next) = state.snapshots.pop_front() {
                        state.is_writing_snapshot = true;
                        break next;
                    }
                    if state.is_stopping {
                        return;
                    }
                    state = self.wake_snapshots.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
            };
            let began = muster_clock::monotonic();
            let path = self.folder.snapshot_path(record);
            match write_snapshot(&path, self.folder.id(), record, write) {
                Ok(bytes) => {
                    self.last_snapshot_bytes.store(bytes, Ordering::Relaxed);
                    {
                        let mut state = self.lock();
                        state.status.snapshots += 1;
                        state.status.snapshot_bytes = bytes;
                        state.status.snapshot_time = began.elapsed();
                    }
                    self.on_snapshot_complete(record);
                    self.snapshot_failures.store(0, Ordering::Relaxed);
                    self.wake.notify_one();
                    if let Err(error) = self.delete_replaced_files() {
                        tracing::warn!("files of the journal that are no longer needed stay: {error}");
                    }
                }
                Err(error) => {
                    self.lock().status.failed_snapshots += 1;
                    let failures = self.snapshot_failures.fetch_add(1, Ordering::Relaxed).min(6);
                    let pause = u64::try_from(RETRY_INTERVAL.as_nanos()).unwrap_or(u64::MAX) << failures;
                    let retry_at = muster_clock::monotonic_nanoseconds().saturating_add(pause);
                    self.snapshot_retry_at.store(retry_at, Ordering::Relaxed);
                    tracing::warn!("{} cannot be written: {error}", path.display());
                }
            }
            self.lock().is_writing_snapshot = false;
            self.measure_disk();
        }
    }

    /// Deletes all snapshots but the last two, and the segments that the older one replaces.
    fn delete_replaced_files(&self) -> Result<(), JournalError> {
        let snapshots = self.folder.snapshot_records()?;
        let Some((kept, older)) = snapshots.split_last_chunk::<2>().map(|(older, kept)| (kept[0], older))
        else {
            return Ok(());
        };
        for record in older {
            let path = self.folder.snapshot_path(*record);
            std::fs::remove_file(&path).map_err(JournalError::io("delete", &path))?;
        }
        for index in crate::recovery::segments_before(&self.folder, kept)? {
            let path = self.folder.segment_path(index);
            std::fs::remove_file(&path).map_err(JournalError::io("delete", &path))?;
        }
        Ok(())
    }

    fn measure_disk(&self) {
        let mut bytes = self.folder.removed_files().bytes;
        let mut segments = 0;
        for entry in std::fs::read_dir(self.folder.path()).into_iter().flatten().flatten() {
            use std::os::unix::fs::MetadataExt as _;
            bytes += entry.metadata().map_or(0, |meta| meta.blocks() * 512);
            segments += u64::from(entry.file_name().to_string_lossy().starts_with(SEGMENT_PREFIX));
        }
        let mut state = self.lock();
        state.status.disk_bytes = bytes;
        state.status.segments = segments;
    }
}

impl UpkeepThreads {
    pub(crate) fn start(shared: &Arc<UpkeepShared>) -> io::Result<Self> {
        let start = |name: &str, run: fn(&UpkeepShared)| {
            let shared = Arc::clone(shared);
            std::thread::Builder::new().name(name.to_owned()).spawn(move || run(&shared))
        };
        Ok(Self(vec![
            start("journal-disk", UpkeepShared::run_disk_thread)?,
            start("journal-snapshot", UpkeepShared::run_snapshot_thread)?,
        ]))
    }

    /// Ends the threads, after what was appended is on the disk and queued snapshots are written.
    pub(crate) fn stop(&mut self, shared: &UpkeepShared) {
        shared.stop();
        for thread in self.0.drain(..) {
            let _ = thread.join();
        }
    }
}
