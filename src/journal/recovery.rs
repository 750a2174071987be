//! Reading a journal: the latest intact snapshot, and the records after it. Begin at [`JournalFolder::recover`], then
//! [`JournalRecovery::replay`].
//!
//! Records must follow one another without a gap. Where the next record is missing or invalid, one of these holds:
//!
//! 1. The next segment begins with exactly this record. The earlier segment was full, or an earlier recovery cut it here.
//! 2. Nothing follows, and nothing says that more was written: this is the end. If the bytes here are not zero, an
//!    interrupted append has left them, and they are cut off (a *torn tail*).
//! 3. Something follows, or a durable mark says that the record was on the disk. Then the record was written whole and
//!    is damaged now ([`JournalError::Damaged`]) - unless the host has restarted since the segment was written and no
//!    mark covers the record: a host that loses its power may have written later records and not this one. Then all
//!    from here on is cut off, and the cut says how many intact records are lost.
//!
//! A damaged snapshot is passed over if an older one and the records after it are there. Reading changes no file.

use std::fs;
use std::path::{Path, PathBuf};

use crate::folder::{JournalError, JournalFolder};
use crate::record::{Decoded, JournalRecord, decode, intact_records, marked_durable};
use crate::segment::{SEGMENT_HEADER_BYTES, SegmentHeader};
use crate::snapshot::read_snapshot;

/// A snapshot that was read.
#[derive(Debug)]
pub struct LoadedSnapshot {
    /// The number of the first record that the state does not contain.
    pub record: u64,
    /// The state, as it was written.
    pub state: Vec<u8>,
}

/// A journal that is about to be read.
#[derive(Debug)]
pub struct JournalRecovery<'a> {
    folder: &'a JournalFolder,
    snapshot: Option<LoadedSnapshot>,
    damaged_snapshots: Vec<String>,
}

/// Records that a recovery has cut off.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JournalCut {
    /// The segment that is cut.
    pub path: PathBuf,
    /// The place at which it is cut.
    pub offset: usize,
    /// The number of the first record that is missing.
    pub number: u64,
    /// The number of intact records behind the cut, which are lost.
    pub lost_records: u64,
    /// The cause, in a sentence.
    pub why: String,
}

/// The end of a journal.
#[derive(Debug)]
pub struct RecoveryEnd {
    /// The number of the next record.
    pub next_record: u64,
    /// The number of records that were replayed.
    pub records: u64,
    /// The bytes of the segments that were read.
    pub bytes: u64,
    /// What was cut off.
    pub cut: Option<JournalCut>,
    /// All records below this number were durable.
    pub(crate) durable: u64,
    /// The index of the next segment.
    pub(crate) next_segment: u64,
    /// Segments without records, and segments behind a cut.
    pub(crate) spares: Vec<u64>,
    pub(crate) behind_cut: Vec<u64>,
    /// The segments that were read, whose records may not be on the disk yet.
    pub(crate) read: Vec<u64>,
}

/// The reason for which a journal cannot be replayed.
#[derive(Debug, thiserror::Error)]
pub enum RecoveryError<E> {
    /// The journal cannot be read.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The user of the journal does not accept a record.
    #[error("record {number} cannot be applied: {error}")]
    Record {
        /// The number of the record.
        number: u64,
        /// The reason.
        error: E,
    },
}

impl JournalFolder {
    /// Reads the latest intact snapshot.
    ///
    /// # Errors
    /// If the folder cannot be listed.
    pub fn recover(&self) -> Result<JournalRecovery<'_>, JournalError> {
        self.recover_before(u64::MAX)
    }

    /// Reads the latest intact snapshot of a state whose next record is below `record`.
    ///
    /// # Errors
    /// If the folder cannot be listed.
    pub fn recover_before(&self, record: u64) -> Result<JournalRecovery<'_>, JournalError> {
        let mut damaged_snapshots = Vec::new();
        for record in self.snapshot_records()?.into_iter().rev().filter(|known| *known < record) {
            let path = self.snapshot_path(record);
            match read_snapshot(&path, self.id(), record) {
                Ok(state) => {
                    let snapshot = Some(LoadedSnapshot { record, state });
                    return Ok(JournalRecovery { folder: self, snapshot, damaged_snapshots });
                }
                Err(why) => damaged_snapshots.push(format!("{}: {why}", path.display())),
            }
        }
        Ok(JournalRecovery { folder: self, snapshot: None, damaged_snapshots })
    }
}

/// The state of a replay.
struct Replay<'a> {
    folder: &'a JournalFolder,
    /// The number of the next record.
    expected: u64,
    /// The first record that no snapshot contains.
    start: u64,
    /// The greatest number that a mark has.
    durable: u64,
    records: u64,
    bytes: u64,
}

/// A segment that was read into memory.
struct LoadedSegment {
    index: u64,
    bytes: Vec<u8>,
    header: Option<SegmentHeader>,
}

impl JournalRecovery<'_> {
    /// Returns the snapshot from which the replay goes on; `None`: it goes on from an empty state.
    #[must_use]
    pub fn snapshot(&self) -> Option<&LoadedSnapshot> {
        self.snapshot.as_ref()
    }

    /// Returns, in words, the snapshots that are damaged and were passed over.
    #[must_use]
    pub fn damaged_snapshots(&self) -> &[String] {
        &self.damaged_snapshots
    }

    /// Passes the records after the snapshot to `each`, in the order of their numbers, and returns the end of the journal.
    /// Marks of the journal itself are not passed on.
    ///
    /// # Errors
    /// If a record is damaged, a file cannot be read, or `each` refuses a record.
    pub fn replay<E>(
        &self,
        mut each: impl FnMut(JournalRecord<'_>) -> Result<(), E>,
    ) -> Result<RecoveryEnd, RecoveryError<E>> {
        let start = self.snapshot.as_ref().map_or(1, |snapshot| snapshot.record);
        let indexes = self.folder.segment_indexes()?;
        let headers = read_headers(self.folder, &indexes)?;
        let first = self.first_needed(&headers, start)?;
        let mut replay =
            Replay { folder: self.folder, expected: start, start, durable: 0, records: 0, bytes: 0 };
        let mut end = RecoveryEnd {
            next_record: start,
            records: 0,
            bytes: 0,
            cut: None,
            durable: 0,
            next_segment: indexes.last().map_or(1, |last| last + 1),
            spares: Vec::new(),
            behind_cut: Vec::new(),
            read: Vec::new(),
        };
        if let Some((_, header)) = headers.get(first)
            && let Some(header) = header
        {
            replay.expected = header.first_record;
        }
        for (position, (index, header)) in headers.iter().enumerate().skip(first) {
            if end.cut.is_some() {
                end.behind_cut.push(*index);
                continue;
            }
            let segment =
                LoadedSegment { index: *index, bytes: read_segment(self.folder, *index)?, header: *header };
            if segment.is_spare() {
                end.spares.push(*index);
                continue;
            }
            end.read.push(*index);
            let later = &headers[position + 1..];
            end.cut = replay.replay_segment(&segment, later, &mut each)?;
        }
        end.next_record = replay.expected.max(start);
        (end.records, end.bytes, end.durable) = (replay.records, replay.bytes, replay.durable);
        Ok(end)
    }

    /// Returns the position of the first segment that has a record at or after `start`.
    fn first_needed(
        &self,
        headers: &[(u64, Option<SegmentHeader>)],
        start: u64,
    ) -> Result<usize, JournalError> {
        let begun = |(_, header): &(u64, Option<SegmentHeader>)| {
            header.is_some_and(|header| header.first_record <= start)
        };
        if let Some(first) = headers.iter().rposition(begun) {
            return Ok(first);
        }
        match headers.iter().find_map(|(_, header)| *header) {
            Some(header) if start < header.first_record => Err(JournalError::NoBeginning {
                path: self.folder.path().to_owned(),
                first: header.first_record,
                damaged: match self.damaged_snapshots.first() {
                    Some(damaged) => format!(" ({damaged})"),
                    None => String::new(),
                },
            }),
            _ => Ok(0),
        }
    }
}

impl LoadedSegment {
    /// Returns whether the segment was never used.
    fn is_spare(&self) -> bool {
        self.header.is_none() && self.bytes.iter().take(SEGMENT_HEADER_BYTES).all(|byte| *byte == 0)
    }
}

impl Replay<'_> {
    /// Replays one segment. Returns the cut if the journal ends in it by one.
    fn replay_segment<E>(
        &mut self,
        segment: &LoadedSegment,
        later: &[(u64, Option<SegmentHeader>)],
        each: &mut impl FnMut(JournalRecord<'_>) -> Result<(), E>,
    ) -> Result<Option<JournalCut>, RecoveryError<E>> {
        let Some(header) = segment.header.filter(|header| header.folder == self.folder.id()) else {
            return Ok(self.end_at(segment, 0, later)?);
        };
        self.durable = self.durable.max(header.durable);
        if header.first_record > self.expected {
            if self.expected >= self.start {
                return Ok(self.end_at_gap(segment, &header)?);
            }
            // The snapshot contains what is missing.
            self.expected = header.first_record;
        }
        let mut at = SEGMENT_HEADER_BYTES;
        loop {
            match decode(&segment.bytes[at..], self.folder.seed()) {
                Decoded::Record(record, occupied) if record.number == self.expected => {
                    if let Some(durable) = marked_durable(&record) {
                        self.durable = self.durable.max(durable);
                    } else if record.number >= self.start {
                        each(record)
                            .map_err(|error| RecoveryError::Record { number: record.number, error })?;
                        self.records += 1;
                    }
                    self.expected += 1;
                    at = (at + occupied).min(segment.bytes.len());
                }
                _ => {
                    self.bytes += at as u64;
                    return Ok(self.end_at(segment, at, later)?);
                }
            }
        }
    }

    /// Decides what the absence of the next record means; see the head of the file.
    fn end_at(
        &mut self,
        segment: &LoadedSegment,
        at: usize,
        later: &[(u64, Option<SegmentHeader>)],
    ) -> Result<Option<JournalCut>, JournalError> {
        let next = later.iter().find_map(|(_, header)| *header);
        if next.is_some_and(|next| next.first_record == self.expected) || self.expected < self.start {
            return Ok(None);
        }
        let rest = &segment.bytes[at..];
        let mut lost = 0;
        for record in intact_records(rest, self.folder.seed(), self.expected.saturating_sub(1)) {
            lost += 1;
            self.durable = self.durable.max(marked_durable(&record).unwrap_or(0));
        }
        if let Some(next) = next.filter(|next| next.follows_gap && lost == 0 && next.durable <= self.expected)
        {
            return Ok(Some(self.cut(
                segment,
                at,
                0,
                format!(
                    "the service could not write the records up to {}, because there was no room",
                    next.first_record
                ),
            )));
        }
        for (index, header) in later.iter().filter(|(_, header)| header.is_some()) {
            let bytes = read_segment(self.folder, *index)?;
            let Some(header) = header else { continue };
            self.durable = self.durable.max(header.durable);
            let records = &bytes[SEGMENT_HEADER_BYTES.min(bytes.len())..];
            for record in intact_records(records, self.folder.seed(), header.first_record.saturating_sub(1)) {
                lost += 1;
                self.durable = self.durable.max(marked_durable(&record).unwrap_or(0));
            }
        }
        let boot = self.folder.boot();
        let same_boot = segment.header.is_some_and(|header| header.boot == boot && boot != [0; 16]);
        let why = if self.durable > self.expected {
            format!("the journal says that all records up to {} were on the disk", self.durable - 1)
        } else if lost > 0 && same_boot {
            format!("{lost} intact record(s) follow, and the host has not restarted since they were written")
        } else if lost > 0 {
            let why = "the host restarted before this record was on the disk".to_owned();
            return Ok(Some(self.cut(segment, at, lost, why)));
        } else if rest.iter().all(|byte| *byte == 0) {
            return Ok(None);
        } else {
            return Ok(Some(self.cut(segment, at, 0, "the write of this record was interrupted".to_owned())));
        };
        let path = self.folder.segment_path(segment.index);
        Err(JournalError::Damaged { path, offset: at, number: self.expected, why })
    }

    /// Decides what it means that a segment begins after the next record, though the one before it has ended well.
    fn end_at_gap(
        &self,
        segment: &LoadedSegment,
        header: &SegmentHeader,
    ) -> Result<Option<JournalCut>, JournalError> {
        if header.follows_gap && header.durable <= self.expected {
            let why =
                "the service could not write the records before this segment, because there was no room";
            return Ok(Some(self.cut(segment, 0, 0, why.to_owned())));
        }
        let why = format!("the next segment begins with record {}", header.first_record);
        let path = self.folder.segment_path(segment.index);
        Err(JournalError::Damaged { path, offset: 0, number: self.expected, why })
    }

    fn cut(&self, segment: &LoadedSegment, offset: usize, lost_records: u64, why: String) -> JournalCut {
        let path = self.folder.segment_path(segment.index);
        JournalCut { path, offset, number: self.expected, lost_records, why }
    }
}

fn read_segment(folder: &JournalFolder, index: u64) -> Result<Vec<u8>, JournalError> {
    let path = folder.segment_path(index);
    fs::read(&path).map_err(JournalError::io("read", &path))
}

/// Returns the headers of the segments in the order of their records. The order of their indexes may differ: the writer may
/// need a segment while the spare one is being allocated. A segment without a valid header follows the one before it.
fn read_headers(
    folder: &JournalFolder,
    indexes: &[u64],
) -> Result<Vec<(u64, Option<SegmentHeader>)>, JournalError> {
    use std::io::Read as _;
    let mut headers = Vec::new();
    let mut first_record = 0;
    for index in indexes {
        let path = folder.segment_path(*index);
        let mut bytes = Vec::new();
        let read = fs::File::open(&path)
            .and_then(|file| file.take(SEGMENT_HEADER_BYTES as u64).read_to_end(&mut bytes));
        read.map_err(JournalError::io("read", &path))?;
        let header = SegmentHeader::decode(&bytes);
        first_record = header.map_or(first_record, |header| header.first_record);
        headers.push((first_record, (*index, header)));
    }
    headers.sort_by_key(|(first_record, _)| *first_record);
    Ok(headers.into_iter().map(|(_, header)| header).collect())
}

/// Returns the segments all of whose records have numbers below `record`.
pub(crate) fn segments_before(folder: &JournalFolder, record: u64) -> Result<Vec<u64>, JournalError> {
    let headers = read_headers(folder, &folder.segment_indexes()?)?;
    let is_needed_from =
        headers.iter().rposition(|(_, header)| header.is_some_and(|header| header.first_record <= record));
    Ok(headers[..is_needed_from.unwrap_or(0)].iter().map(|(index, _)| *index).collect())
}

/// Returns the segment `first` and those whose records follow, in the order of their records.
pub(crate) fn segments_from(folder: &JournalFolder, first: &Path) -> Result<Vec<u64>, JournalError> {
    let headers = read_headers(folder, &folder.segment_indexes()?)?;
    let from = headers.iter().position(|(index, _)| folder.segment_path(*index) == first);
    Ok(headers[from.unwrap_or(headers.len())..].iter().map(|(index, _)| *index).collect())
}
