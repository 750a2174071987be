//! The digest of the state: a checksum over everything that a snapshot has of jobs and connections. The journal has it from time to
//! time, so that a replay notices that it has led to another state, wherever that differs ([`digest_of`]).
//!
//! Two records make one. The first marks a place; a copy of the state at this place costs one pointer for each job. A thread of
//! its own computes the digest of the copy, which takes up to half a second for a million keys. The second record has the result.
//!
//! After a restart, the comparison runs on a thread of its own while the service serves. A difference does not stop it: a program of
//! another version may decide otherwise on purpose, and a start may leave out an input that ended the former process. So a
//! difference is reported ([`DigestComparison`]).

use std::io::{self, BufWriter, Write};
use std::time::{Duration, Instant};

use crc_fast::{CrcAlgorithm, Digest};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::coordination::Coordinator;

/// The shortest time before a mark: since the start, or since the last digest.
const INTERVAL: Duration = Duration::from_secs(30);
/// The time between a digest and the next mark is at least this multiple of the time that the digest took, so digests take less than one
/// percent of a processor.
const INTERVAL_PER_COST: u32 = 100;
/// The bytes that are checksummed at once.
const BLOCK_BYTES: usize = 64 << 10;

/// A place in the journal whose state gets a digest: a random number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct StateMark(pub u64);

/// Returns the digest of a state.
///
/// # Errors
/// If a value of it cannot be encoded.
pub(super) fn digest_of(coordinator: &Coordinator) -> Result<u64, postcard::Error> {
    let to = BufWriter::with_capacity(BLOCK_BYTES, ChecksumWriter(Digest::new(CrcAlgorithm::Crc64Nvme)));
    let mut written = postcard::to_io(coordinator, to)?;
    written.flush().map_err(|_| postcard::Error::SerializeBufferFull)?;
    Ok(written.get_ref().0.finalize())
}

struct ChecksumWriter(Digest);

impl Write for ChecksumWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The result of the comparison of the restored state with a digest in the journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DigestComparison {
    /// There was no digest of this version after the last snapshot, or an input was set aside.
    #[default]
    None,
    /// The comparison runs.
    UnderWay,
    /// The state has the digest.
    Equal,
    /// The inputs lead this program to another state than the program that recorded them.
    Different,
}

/// The marks and digests that a replay has come to. It compares the last digest only: a state that differs once does not return.
#[derive(Default)]
pub(super) struct ReplayedDigests {
    marked: Option<(StateMark, Coordinator)>,
    /// The state at the last mark that has a digest.
    digested: Option<DigestedState>,
}

struct DigestedState {
    coordinator: Coordinator,
    digest: u64,
    record: u64,
}

impl ReplayedDigests {
    /// Notes the state at a mark.
    pub fn mark(&mut self, mark: StateMark, coordinator: &Coordinator) {
        self.marked = Some((mark, coordinator.clone()));
    }

    /// Notes the digest of the state at a mark, and the record that has it.
    pub fn note_digest(&mut self, mark: StateMark, digest: u64, record: u64) {
        if let Some((_, coordinator)) = self.marked.take_if(|(last, _)| *last == mark) {
            self.digested = Some(DigestedState { coordinator, digest, record });
        }
    }

    /// Forgets what was noted: an input was set aside, so the state differs.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// Returns whether there is a digest to compare with.
    pub fn has_digest(&self) -> bool {
        self.digested.is_some()
    }

    /// Compares the state with its digest, which takes up to half a second. Logs a difference.
    pub fn compare(self) -> DigestComparison {
        let Some(DigestedState { coordinator, digest, record }) = self.digested else {
            return DigestComparison::None;
        };
        match digest_of(&coordinator) {
            Ok(found) if found == digest => DigestComparison::Equal,
            // A state that cannot be encoded has no digest.
            Err(_) => DigestComparison::None,
            Ok(found) => {
                tracing::error!(
                    record,
                    digest = format_args!("{digest:016x}"),
                    found = format_args!("{found:016x}"),
                    "the inputs before this record lead this program to another state than the program that recorded them: report it, \
                     with a copy of the folder of the journal"
                );
                DigestComparison::Different
            }
        }
    }
}

/// When the next mark is due.
#[derive(Debug)]
pub(super) struct DigestSchedule {
    is_under_way: bool,
    /// Whether an input was recorded since the last mark.
    has_changed: bool,
    not_before: Instant,
}

impl DigestSchedule {
    /// Returns the schedule of a process that starts at `now`. Its first snapshot comes before its first digest.
    pub fn new(now: Instant) -> Self {
        Self { is_under_way: false, has_changed: false, not_before: now + INTERVAL }
    }

    /// Notes that an input is recorded.
    pub fn note_change(&mut self) {
        self.has_changed = true;
    }

    /// Returns whether a mark should be made at `now`.
    pub fn is_due(&self, now: Instant) -> bool {
        self.has_changed && !self.is_under_way && now >= self.not_before
    }

    /// Notes that a mark was made, and that its digest is under way.
    pub fn begin(&mut self) {
        (self.is_under_way, self.has_changed) = (true, false);
    }

    /// Notes that a digest has come, and how long it took.
    pub fn end(&mut self, now: Instant, took: Duration) {
        self.is_under_way = false;
        self.not_before = now + INTERVAL.max(took.saturating_mul(INTERVAL_PER_COST));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_due_after_changes_and_not_too_often() {
        let began = crate::clock::monotonic();
        let mut schedule = DigestSchedule::new(began);
        let at = |seconds| began + Duration::from_secs(seconds);
        assert!(!schedule.is_due(at(30)), "nothing has changed");
        schedule.note_change();
        assert!(!schedule.is_due(at(29)), "the process has just started");
        assert!(schedule.is_due(at(30)));
        schedule.begin();
        schedule.note_change();
        assert!(!schedule.is_due(at(100)), "one is under way");
        schedule.end(at(100), Duration::from_secs(1));
        assert!(!schedule.is_due(at(199)), "it cost much");
        assert!(schedule.is_due(at(200)));
    }
}
