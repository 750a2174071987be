//! Repairing a damaged journal, and beginning a journal with a snapshot. Begin at [`JournalFolder::repair`].

use std::convert::Infallible;
use std::fs::{self, OpenOptions};
use std::io;
use std::path::PathBuf;

use crate::folder::{JournalError, JournalFolder};
use crate::recovery::{RecoveryError, segments_from};
use crate::removed::Removal;
use crate::segment::{SEGMENT_HEADER_BYTES, SegmentFile, SegmentHeader};
use crate::snapshot::write_snapshot;
use crate::upkeep::SnapshotWriter;

/// The report of a repair.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JournalRepair {
    /// The first record that was removed, and the segment that had it.
    pub number: u64,
    /// The segment in which the damage was.
    pub path: PathBuf,
    /// The reason for which the record counts as damaged.
    pub why: String,
    /// The files that were moved to `removed/`, or copied there before they were shortened.
    pub removed: Vec<PathBuf>,
}

impl JournalFolder {
    /// Ends the journal before its first damaged record, or before the record `end_before` if that comes first. Everything
    /// from there on is kept in `removed/`, snapshots too. Returns `None` if there is nothing to remove.
    ///
    /// # Errors
    /// If the folder cannot be read or changed, or the journal has no beginning.
    pub fn repair(&self, end_before: Option<u64>) -> Result<Option<JournalRepair>, JournalError> {
        let recovery = self.recover_before(end_before.map_or(u64::MAX, |end| end.saturating_add(1)))?;
        let damaged = match recovery.replay_before(end_before, |_| Ok::<(), Infallible>(())) {
            Ok(_) => return Ok(None),
            Err(RecoveryError::Journal(JournalError::Damaged { path, offset, number, why })) => {
                (path, offset, number, why)
            }
            Err(RecoveryError::Journal(other)) => return Err(other),
            Err(RecoveryError::Record { error, .. }) => match error {},
        };
        let (path, offset, number, why) = damaged;
        let mut removed = Vec::new();
        let mut removal = Removal::begin(self);
        let indexes = self.segment_indexes()?;
        for index in segments_from(self, &path)? {
            let segment = self.segment_path(index);
            if segment == path && offset >= SEGMENT_HEADER_BYTES {
                // Its records before the damage stay.
                let copy = segment.with_extension("damaged");
                fs::copy(&segment, &copy).map_err(JournalError::io("copy", &segment))?;
                removal.move_file(&copy)?;
                let shortened = OpenOptions::new()
                    .write(true)
                    .open(&segment)
                    .and_then(|file| file.set_len(offset as u64));
                shortened.map_err(JournalError::io("shorten", &segment))?;
            } else {
                removal.move_file(&segment)?;
            }
            removed.push(segment);
        }
        for record in self.snapshot_records()?.into_iter().filter(|record| *record > number) {
            let snapshot = self.snapshot_path(record);
            removal.move_file(&snapshot)?;
            removed.push(snapshot);
        }
        self.write_empty_segment(indexes.last().map_or(1, |last| last + 1), number)?;
        removal.finish();
        Ok(Some(JournalRepair { number, path, why, removed }))
    }

    /// Begins this journal, which must be empty, with a snapshot of a state whose next record is `record`.
    ///
    /// # Errors
    /// If the journal has files already, or cannot be written.
    pub fn begin_with_snapshot(&self, record: u64, write: SnapshotWriter) -> Result<u64, JournalError> {
        if !self.segment_indexes()?.is_empty() || !self.snapshot_records()?.is_empty() {
            let why = "it is a journal with contents; a snapshot begins an empty one".to_owned();
            return Err(JournalError::NotAJournal { path: self.path().to_owned(), why });
        }
        let path = self.snapshot_path(record);
        let bytes =
            write_snapshot(&path, self.id(), record, write).map_err(JournalError::io("write", &path))?;
        self.write_empty_segment(1, record)?;
        Ok(bytes)
    }

    /// Writes a segment without records, which says that the records before `first_record` end there.
    fn write_empty_segment(&self, index: u64, first_record: u64) -> Result<(), JournalError> {
        let path = self.segment_path(index);
        let header = SegmentHeader {
            folder: self.id(),
            first_record,
            durable: first_record,
            boot: self.boot(),
            follows_gap: false,
        };
        let write = || -> io::Result<()> {
            let mut segment = SegmentFile::allocate(&path, SEGMENT_HEADER_BYTES)?;
            segment.begin(&header);
            segment.finish()
        };
        write().map_err(JournalError::io("write", &path))?;
        self.sync_entries()
    }
}
