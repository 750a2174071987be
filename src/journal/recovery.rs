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
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use crate::folder::{JournalError, JournalFolder};
use crate::record::{Decoded, JournalRecord, decode, intact_records, marked_durable};
use crate::segment::{SEGMENT_HEADER_BYTES, SegmentHeader};
use crate::snapshot::read_snapshot;

/// A segment is read in blocks of this length, which the caches of a processor hold.
const READ_BLOCK_BYTES: usize = 128 << 10;
static ZEROES: [u8; READ_BLOCK_BYTES] = [0; READ_BLOCK_BYTES];

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
    /// The bytes of the segments that were read.
    pub bytes: u64,
    /// The records that were cut off.
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

/// The cause of a cut where records could not be written.
const NO_ROOM: &str =
    "the service could not write the records that follow, because there was no room or the disk failed";

/// The state of a replay.
struct Replay<'a> {
    folder: &'a JournalFolder,
    /// The number of the next record.
    expected: u64,
    /// The first record that no snapshot contains.
    start: u64,
    /// The greatest number that a mark has.
    durable: u64,
    bytes: u64,
    /// This record and all later ones count as damaged.
    end_before: Option<u64>,
}

/// A segment that was read into memory.
struct LoadedSegment {
    index: u64,
    /// Its bytes; of the zeroes at its end, some may be missing.
    bytes: Vec<u8>,
    /// The length of the file.
    length: usize,
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
        each: impl FnMut(JournalRecord<'_>) -> Result<(), E>,
    ) -> Result<RecoveryEnd, RecoveryError<E>> {
        self.replay_before(None, each)
    }

    /// Does what [`Self::replay`] does; the record `end_before` counts as damaged.
    pub(crate) fn replay_before<E>(
        &self,
        end_before: Option<u64>,
        mut each: impl FnMut(JournalRecord<'_>) -> Result<(), E>,
    ) -> Result<RecoveryEnd, RecoveryError<E>> {
        let start = self.snapshot.as_ref().map_or(1, |snapshot| snapshot.record);
        let indexes = self.folder.segment_indexes()?;
        let headers = read_headers(self.folder, &indexes)?;
        let first = self.first_needed(&headers, start)?;
        let mut replay =
            Replay { folder: self.folder, expected: start, start, durable: 0, bytes: 0, end_before };
        let mut end = RecoveryEnd {
            next_record: start,
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
            let (bytes, length) = read_segment(self.folder, *index)?;
            let mut segment = LoadedSegment { index: *index, bytes, length, header: *header };
            if segment.is_spare() {
                end.spares.push(*index);
                continue;
            }
            end.read.push(*index);
            let later = &headers[position + 1..];
            end.cut = replay.replay_segment(&mut segment, later, &mut each)?;
        }
        end.next_record = replay.expected.max(start);
        (end.bytes, end.durable) = (replay.bytes, replay.durable);
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
    /// Returns whether the segment was never used. A segment whose header alone is lost is none.
    fn is_spare(&self) -> bool {
        self.header.is_none() && self.bytes.iter().all(|byte| *byte == 0)
    }
}

impl Replay<'_> {
    /// Replays one segment. Returns the cut if the journal ends in it by one.
    fn replay_segment<E>(
        &mut self,
        segment: &mut LoadedSegment,
        later: &[(u64, Option<SegmentHeader>)],
        each: &mut impl FnMut(JournalRecord<'_>) -> Result<(), E>,
    ) -> Result<Option<JournalCut>, RecoveryError<E>> {
        let Some(header) = segment.header.filter(|header| header.folder == self.folder.id()) else {
            return Ok(self.end_at(segment, 0, later)?);
        };
        self.durable = self.durable.max(header.durable);
        // The snapshot contains what is missing before `start`.
        self.expected = self.expected.max(header.first_record.min(self.start));
        if header.first_record > self.expected {
            return Ok(self.end_at_gap(segment, &header, later)?);
        }
        let mut at = SEGMENT_HEADER_BYTES;
        loop {
            match decode(&segment.bytes[at..], self.folder.seed()) {
                Decoded::Record(record, occupied) if record.number == self.expected => {
                    if self.end_before.is_some_and(|end| record.number >= end) {
                        let why = "it is to be removed".to_owned();
                        let path = self.folder.segment_path(segment.index);
                        let (offset, number) = (at, record.number);
                        return Err(JournalError::Damaged { path, offset, number, why }.into());
                    }
                    if let Some(durable) = marked_durable(&record) {
                        self.durable = self.durable.max(durable);
                    } else if record.number >= self.start {
                        each(record)
                            .map_err(|error| RecoveryError::Record { number: record.number, error })?;
                    }
                    self.expected += 1;
                    at = (at + occupied).min(segment.bytes.len());
                }
                // A payload may end with the missing zeroes.
                Decoded::Invalid if segment.bytes.len() < segment.length => {
                    segment.bytes.resize(segment.length, 0);
                }
                _ => {
                    // The snapshot contains the records before `start`, so a hole among them does not matter.
                    if let Some(place) = self.place_of_start(segment, at) {
                        (at, self.expected) = (place, self.start);
                        continue;
                    }
                    self.bytes += at as u64;
                    return Ok(self.end_at(segment, at, later)?);
                }
            }
        }
    }

    /// Returns the place of the first record that no snapshot contains, if it is behind a hole at `at`.
    fn place_of_start(&self, segment: &LoadedSegment, at: usize) -> Option<usize> {
        if self.expected >= self.start {
            return None;
        }
        let rest = &segment.bytes[at..];
        let mut records = intact_records(rest, self.folder.seed(), self.expected.saturating_sub(1));
        let (_, place) = records.find(|(record, _)| record.number == self.start)?;
        Some(at + place)
    }

    /// Decides what the absence of the next record means; see the head of the file.
    fn end_at(
        &mut self,
        segment: &LoadedSegment,
        at: usize,
        later: &[(u64, Option<SegmentHeader>)],
    ) -> Result<Option<JournalCut>, JournalError> {
        let next = later.iter().find_map(|(_, header)| *header);
        let rest = &segment.bytes[at..];
        if self.expected < self.start {
            // The snapshot contains all up to `start`, which is not in this segment (`place_of_start`). It, or the end, comes next.
            let after = self.start.saturating_sub(1);
            if intact_records(rest, self.folder.seed(), after).next().is_none() {
                return Ok(None);
            }
            self.expected = self.start;
        }
        if next.is_some_and(|next| next.first_record == self.expected) {
            return Ok(None);
        }
        let mut lost = 0;
        for (record, _) in intact_records(rest, self.folder.seed(), self.expected.saturating_sub(1)) {
            lost += 1;
            self.durable = self.durable.max(marked_durable(&record).unwrap_or(0));
        }
        let lost_here = lost;
        lost += self.count_later_records(later)?;
        if next.is_some_and(|next| next.follows_gap) && lost_here == 0 && self.durable <= self.expected {
            return Ok(Some(self.cut(segment, at, lost, NO_ROOM.to_owned())));
        }
        let same_boot = segment.header.is_some_and(|header| self.is_of_this_boot(&header));
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

    /// Counts the intact records of the segments `later`, and looks at their marks.
    fn count_later_records(&mut self, later: &[(u64, Option<SegmentHeader>)]) -> Result<u64, JournalError> {
        let mut count = 0;
        for (index, header) in later {
            let Some(header) = header else { continue };
            let (mut bytes, length) = read_segment(self.folder, *index)?;
            bytes.resize(length, 0);
            self.durable = self.durable.max(header.durable);
            let records = &bytes[SEGMENT_HEADER_BYTES.min(bytes.len())..];
            let after = header.first_record.saturating_sub(1);
            for (record, _) in intact_records(records, self.folder.seed(), after) {
                count += 1;
                self.durable = self.durable.max(marked_durable(&record).unwrap_or(0));
            }
        }
        Ok(count)
    }

    /// Decides what it means that a segment begins after the next record, though the one before it has ended well.
    fn end_at_gap(
        &mut self,
        segment: &LoadedSegment,
        header: &SegmentHeader,
        later: &[(u64, Option<SegmentHeader>)],
    ) -> Result<Option<JournalCut>, JournalError> {
        let lost = self.count_later_records(&[&[(segment.index, Some(*header))], later].concat())?;
        if self.durable <= self.expected && header.follows_gap {
            return Ok(Some(self.cut(segment, 0, lost, NO_ROOM.to_owned())));
        }
        if self.durable <= self.expected && !self.is_of_this_boot(header) {
            let why = "the host restarted before the records in front of this segment were on the disk";
            return Ok(Some(self.cut(segment, 0, lost, why.to_owned())));
        }
        let why = format!("the next segment begins with record {}", header.first_record);
        let path = self.folder.segment_path(segment.index);
        Err(JournalError::Damaged { path, offset: 0, number: self.expected, why })
    }

    /// Returns whether the host has not restarted since a segment was begun.
    fn is_of_this_boot(&self, header: &SegmentHeader) -> bool {
        let boot = self.folder.boot();
        header.boot == boot && boot != [0; 16]
    }

    fn cut(&self, segment: &LoadedSegment, offset: usize, lost_records: u64, why: String) -> JournalCut {
        let path = self.folder.segment_path(segment.index);
        JournalCut { path, offset, number: self.expected, lost_records, why }
    }
}

/// Reads a segment, but not all of the zeroes at its end, which are most of it. Returns the bytes and the length of the file.
fn read_segment(folder: &JournalFolder, index: u64) -> Result<(Vec<u8>, usize), JournalError> {
    let path = folder.segment_path(index);
    let read = || -> io::Result<(Vec<u8>, usize)> {
        let mut file = fs::File::open(&path)?;
        let (mut bytes, mut zeroes) = (Vec::new(), 0);
        let mut block = Vec::with_capacity(READ_BLOCK_BYTES);
        loop {
            block.clear();
            let length = file.by_ref().take(READ_BLOCK_BYTES as u64).read_to_end(&mut block)?;
            if length == 0 {
                let read = bytes.len() + zeroes;
                return Ok((bytes, read));
            }
            if block == ZEROES[..length] {
                zeroes += length;
            } else {
                bytes.resize(bytes.len() + std::mem::take(&mut zeroes), 0);
                bytes.extend_from_slice(&block);
            }
        }
    };
    read().map_err(JournalError::io("read", &path))
}

/// Returns the headers of the segments in the order of their records. The order of their indexes may differ: the writer may
/// need a segment while the spare one is being allocated. A segment without a valid header follows the one before it.
fn read_headers(
    folder: &JournalFolder,
    indexes: &[u64],
) -> Result<Vec<(u64, Option<SegmentHeader>)>, JournalError> {
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

/// Returns the segments all of whose records have numbers below `record`. A segment without a header, which may be the spare
/// one, is not among them.
pub(crate) fn segments_before(folder: &JournalFolder, record: u64) -> Result<Vec<u64>, JournalError> {
    let headers = read_headers(folder, &folder.segment_indexes()?)?;
    let is_begun = |(_, header): &(u64, Option<SegmentHeader>)| {
        header.is_some_and(|header| header.first_record <= record)
    };
    let needed_from = headers.iter().rposition(is_begun).unwrap_or(0);
    let older = headers[..needed_from].iter().filter(|(_, header)| header.is_some());
    Ok(older.map(|(index, _)| *index).collect())
}

/// Returns the segment `first` and those whose records follow, in the order of their records.
pub(crate) fn segments_from(folder: &JournalFolder, first: &Path) -> Result<Vec<u64>, JournalError> {
    let headers = read_headers(folder, &folder.segment_indexes()?)?;
    let from = headers.iter().position(|(index, _)| folder.segment_path(*index) == first);
    Ok(headers[from.unwrap_or(headers.len())..].iter().map(|(index, _)| *index).collect())
}
