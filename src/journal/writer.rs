//! Appending to a journal. Begin at [`JournalWriter::begin`] and [`JournalWriter::append`].
//!
//! One thread appends at a time. An append writes to mapped memory: the payload first, by the caller's own encoder, then the
//! header with the checksum. If the process dies in between, the record is invalid, and no record follows it.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::folder::{JournalError, JournalFolder};
use crate::options::{AppendError, JournalOptions, SEGMENT_BYTES_MAX};
use crate::record::{HEADER_BYTES, RecordKind, occupied_bytes, write_header};
use crate::recovery::RecoveryEnd;
use crate::removed::Removal;
use crate::segment::{SEGMENT_HEADER_BYTES, SegmentFile, SegmentHeader};
use crate::upkeep::{DurableHook, JournalStatus, SnapshotWriter, UpkeepShared, UpkeepThreads};

/// A durable mark is appended after so many bytes of records, if more has become durable.
const MARK_INTERVAL_BYTES: usize = 1 << 16;

/// Appends to a journal. When it is dropped, the appended records are written to the disk.
pub struct JournalWriter {
    shared: Arc<UpkeepShared>,
    threads: UpkeepThreads,
    segment: SegmentFile,
    next_record: u64,
    /// Whether a record could not be written since the present segment was begun.
    has_gap: bool,
    /// The number in the latest mark, and the bytes that were appended since.
    marked: u64,
    unmarked_bytes: usize,
    bytes_since_snapshot: u64,
}

impl JournalWriter {
    /// Begins a new segment after the end of a journal that was recovered.
    ///
    /// # Errors
    /// If there is no room, or the folder cannot be changed.
    pub fn begin(
        folder: JournalFolder,
        end: &RecoveryEnd,
        options: JournalOptions,
    ) -> Result<Self, JournalError> {
        folder.check_locked()?;
        for index in &end.spares {
            let path = folder.segment_path(*index);
            std::fs::remove_file(&path).map_err(JournalError::io("delete", &path))?;
        }
        folder.delete_unfinished_snapshots()?;
        let mut removal = Removal::begin(&folder);
        for index in &end.behind_cut {
            removal.move_file(&folder.segment_path(*index))?;
        }
        removal.finish();
        let inherited =
            end.read.iter().filter_map(|index| File::open(folder.segment_path(*index)).ok()).collect();
        let snapshot_bytes = match folder.snapshot_records()?.last() {
            Some(last) => std::fs::metadata(folder.snapshot_path(*last)).map_or(0, |meta| meta.len()),
            None => 0,
        };
        let path = folder.segment_path(end.next_segment);
        let durable = end.durable.min(end.next_record);
        let shared = Arc::new(UpkeepShared::new(
            folder,
            options,
            end.next_segment,
            inherited,
            durable,
            snapshot_bytes,
        ));
        let mut segment = shared.take_segment(0).map_err(JournalError::io("allocate", &path))?;
        segment.begin(&shared_header(&shared, end.next_record, false));
        shared.next_record.store(end.next_record, Ordering::Release);
        shared.rotate(&segment, None);
        let threads =
            UpkeepThreads::start(&shared).map_err(JournalError::io("start the threads of", &path))?;
        Ok(Self {
            shared,
            threads,
            segment,
            next_record: end.next_record,
            has_gap: false,
            marked: durable,
            unmarked_bytes: 0,
            bytes_since_snapshot: 0,
        })
    }

    /// Returns the number of the next record.
    #[must_use]
    pub fn next_record(&self) -> u64 {
        self.next_record
    }

    /// Appends a record and returns its number. `encode` writes the payload and returns its length; it returns `None` if
    /// the space is too short. `length` returns the length of the payload; it is called only then.
    ///
    /// # Errors
    /// If there is no room. The record is then not in the journal. If its user goes on as if it were, it must call
    /// [`Self::record_lost`].
    pub fn append(
        &mut self,
        kind: RecordKind,
        length: impl Fn() -> usize,
        mut encode: impl FnMut(&mut [u8]) -> Option<usize>,
    ) -> Result<u64, AppendError> {
        if self.has_gap || self.shared.is_segment_tainted.load(Ordering::Relaxed) {
            self.begin_segment(0, true)?;
        }
        let durable = self.shared.durable.load(Ordering::Relaxed);
        if self.unmarked_bytes >= MARK_INTERVAL_BYTES && durable > self.marked {
            (self.marked, self.unmarked_bytes) = (durable, 0);
            self.append_mark(durable)?;
        }
        self.append_record(kind, &length, &mut encode)
    }

    fn append_mark(&mut self, durable: u64) -> Result<u64, AppendError> {
        self.append_record(RecordKind::DURABLE_MARK, &|| 8, &mut |space| {
            space.get_mut(..8)?.copy_from_slice(&durable.to_le_bytes());
            Some(8)
        })
    }

    fn append_record(
        &mut self,
        kind: RecordKind,
        length: &dyn Fn() -> usize,
        encode: &mut dyn FnMut(&mut [u8]) -> Option<usize>,
    ) -> Result<u64, AppendError> {
        if let Some(number) = self.try_append(kind, encode) {
            return Ok(number);
        }
        let needed = SEGMENT_HEADER_BYTES + occupied_bytes(length());
        if needed > SEGMENT_BYTES_MAX {
            return Err(AppendError::TooLong);
        }
        self.begin_segment(needed, false)?;
        self.try_append(kind, encode).ok_or(AppendError::TooLong)
    }

    /// Appends a record to the present segment, if it has room.
    fn try_append(
        &mut self,
        kind: RecordKind,
        encode: &mut dyn FnMut(&mut [u8]) -> Option<usize>,
    ) -> Option<u64> {
        let unused = self.segment.unused();
        let (_, space) = unused.split_at_mut_checked(HEADER_BYTES)?;
        let payload = encode(space)?;
        let number = self.next_record;
        write_header(&mut unused[..HEADER_BYTES + payload], self.shared.folder.seed(), number, kind);
        let occupied = occupied_bytes(payload);
        self.segment.advance(occupied);
        self.next_record += 1;
        self.unmarked_bytes += occupied;
        self.bytes_since_snapshot = self.bytes_since_snapshot.saturating_add(occupied as u64);
        self.shared.next_record.store(self.next_record, Ordering::Release);
        self.shared.appended_bytes.fetch_add(occupied as u64, Ordering::Relaxed);
        Some(number)
    }

    fn begin_segment(&mut self, bytes: usize, follows_gap: bool) -> Result<(), AppendError> {
        let mut next = self.shared.take_segment(bytes).map_err(|error| {
            self.shared.report_no_room(&error);
            AppendError::NoSegment(error)
        })?;
        next.begin(&shared_header(&self.shared, self.next_record, follows_gap || self.has_gap));
        let full = std::mem::replace(&mut self.segment, next);
        self.shared.rotate(&self.segment, Some(full));
        self.has_gap = false;
        Ok(())
    }

    /// Records that the user of the journal goes on without the record that could not be appended. The journal is in trouble
    /// until a snapshot is complete that makes up for it.
    pub fn record_lost(&mut self, error: &AppendError) {
        self.has_gap = true;
        let number = self.next_record;
        self.next_record += 1;
        self.shared.next_record.store(self.next_record, Ordering::Release);
        self.shared.record_lost(number, error);
    }

    /// Begins what ends a trouble, if that is possible now: a new segment. A snapshot is due then.
    pub fn maintain(&mut self) {
        if self.has_gap || self.shared.is_segment_tainted.load(Ordering::Relaxed) {
            let _ = self.begin_segment(0, true);
        }
    }

    /// Returns whether a snapshot should be made now: enough was appended, or only a snapshot ends the present trouble.
    #[must_use]
    pub fn is_snapshot_due(&self) -> bool {
        let needed = self.shared.needed_snapshot();
        let after = self.shared.options.snapshot_after_bytes;
        let is_wanted = if needed > 0 {
            !self.has_gap && !self.shared.is_segment_tainted.load(Ordering::Relaxed)
        } else {
            self.bytes_since_snapshot >= after
                && self.bytes_since_snapshot >= self.shared.last_snapshot_bytes.load(Ordering::Relaxed)
        };
        is_wanted && self.shared.is_ready_for_snapshot()
    }

    /// Makes a snapshot of the state after all records so far. `write` runs on another thread.
    pub fn begin_snapshot(&mut self, write: SnapshotWriter) {
        self.bytes_since_snapshot = 0;
        self.shared.queue_snapshot(self.next_record, write);
    }

    /// Returns whether changes should be refused, because the journal cannot be written.
    #[must_use]
    pub fn is_in_trouble(&self) -> bool {
        self.shared.is_in_trouble()
    }

    /// Returns the number below which all records are on the disk.
    #[must_use]
    pub fn durable_records(&self) -> u64 {
        self.shared.durable.load(Ordering::Acquire)
    }

    /// Returns a handle by which other threads ask for records to be written to the disk.
    #[must_use]
    pub fn sync(&self) -> JournalSync {
        JournalSync(Arc::clone(&self.shared))
    }

    /// Returns the description for metrics and pages.
    #[must_use]
    pub fn status(&self) -> JournalStatus {
        self.shared.status()
    }
}

/// A handle by which any thread asks for records to be written to the disk, and learns when they are.
#[derive(Clone)]
pub struct JournalSync(Arc<UpkeepShared>);

impl JournalSync {
    /// Asks for all records to be written to the disk now.
    pub fn request_sync(&self) {
        self.0.request_sync();
    }

    /// Returns the number below which all records are on the disk.
    #[must_use]
    pub fn durable_records(&self) -> u64 {
        self.0.durable.load(Ordering::Acquire)
    }

    /// Asks for all records to be written to the disk, and waits until those below `number` are, for `within` at most.
    /// Returns whether they are.
    pub fn wait_until_durable(&self, number: u64, within: Duration) -> bool {
        self.0.wait_until_durable(number, within)
    }

    /// Calls `hook` each time that more records are durable, on the thread that writes to the disk.
    pub fn set_durable_hook(&self, hook: DurableHook) {
        self.0.set_durable_hook(hook);
    }
}

#[cfg(test)]
impl JournalWriter {
    /// Pretends that the file system has no room, or has room again.
    pub(crate) fn set_fails_allocations(&self, fails: bool) {
        self.shared.fails_allocations.store(fails, Ordering::Relaxed);
    }

    /// Pretends that the disk reports errors, or works again.
    pub(crate) fn set_fails_syncs(&self, fails: bool) {
        self.shared.fails_syncs.store(fails, Ordering::Relaxed);
    }

    /// Writes to the disk only on request from now on.
    pub(crate) fn sync_on_request_only(&self) {
        self.shared.syncs_on_request_only.store(true, Ordering::Relaxed);
    }
}

impl Drop for JournalWriter {
    fn drop(&mut self) {
        self.threads.stop(&self.shared);
        // The mark shows a later reader that nothing is missing at the end.
        let durable = self.durable_records();
        let is_whole = self.shared.needed_snapshot() == 0;
        if durable == self.next_record && is_whole && self.append_mark(durable).is_ok() {
            let _ = self.segment.file().sync_data();
        }
    }
}

fn shared_header(shared: &UpkeepShared, first_record: u64, follows_gap: bool) -> SegmentHeader {
    SegmentHeader {
        folder: shared.folder.id(),
        first_record,
        durable: shared.durable.load(Ordering::Relaxed).min(first_record),
        boot: shared.folder.boot(),
        follows_gap,
    }
}
