//! The digest of the state: a checksum over everything that a snapshot has of jobs and connections. The journal has it from time to
//! time, so that a replay notices that it has led to another state, wherever that differs ([`digest_of`]).
//!
//! Two records make one. The first marks a place; a copy of the state at this place costs one pointer for each job. A thread of
//! its own computes the digest of the copy, which takes up to half a second for a million keys. The second record has the result.

use std::io::{self, BufWriter, Write};
use std::time::{Duration, Instant};

use crc_fast::{CrcAlgorithm, Digest};
use serde::{Deserialize, Serialize};

use crate::coordination::Coordinator;

/// The shortest time between a digest and the next mark, and its multiple of the time that the digest took: less than one percent of
/// a processor.
const INTERVAL: Duration = Duration::from_secs(30);
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

/// A state that differs from the one that the journal describes.
#[derive(Debug, thiserror::Error)]
#[error(
    "the inputs before it lead this program to another state than the program that recorded them (digest {found:016x} in place of \
     {expected:016x})"
)]
pub(super) struct DigestDifference {
    /// The record that has the digest.
    pub record: u64,
    expected: u64,
    found: u64,
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

    /// Compares the state with its digest. Returns whether there is one.
    ///
    /// # Errors
    /// If they differ.
    pub fn compare(self) -> Result<bool, DigestDifference> {
        let Some(DigestedState { coordinator, digest, record }) = self.digested else { return Ok(false) };
        // A state that cannot be encoded has no digest.
        let Ok(found) = digest_of(&coordinator) else { return Ok(false) };
        if found == digest { Ok(true) } else { Err(DigestDifference { record, expected: digest, found }) }
    }
}

/// When the next mark is due.
#[derive(Debug, Default)]
pub(super) struct DigestSchedule {
    is_under_way: bool,
    /// Whether an input was recorded since the last mark.
    has_changed: bool,
    not_before: Option<Instant>,
}

impl DigestSchedule {
    /// Notes that an input is recorded.
    pub fn note_change(&mut self) {
        self.has_changed = true;
    }

    /// Returns whether a mark should be made at `now`.
    pub fn is_due(&self, now: Instant) -> bool {
        self.has_changed && !self.is_under_way && self.not_before.is_none_or(|moment| now >= moment)
    }

    /// Notes that a mark was made, and that its digest is under way.
    pub fn begin(&mut self) {
        (self.is_under_way, self.has_changed) = (true, false);
    }

    /// Notes that a digest has come, and how long it took.
    pub fn end(&mut self, now: Instant, took: Duration) {
        self.is_under_way = false;
        self.not_before = Some(now + INTERVAL.max(took.saturating_mul(INTERVAL_PER_COST)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_due_after_changes_and_not_too_often() {
        let mut schedule = DigestSchedule::default();
        let began = crate::clock::monotonic();
        let at = |seconds| began + Duration::from_secs(seconds);
        assert!(!schedule.is_due(at(0)), "nothing has changed");
        schedule.note_change();
        assert!(schedule.is_due(at(0)));
        schedule.begin();
        schedule.note_change();
        assert!(!schedule.is_due(at(100)), "one is under way");
        schedule.end(at(100), Duration::from_secs(1));
        assert!(!schedule.is_due(at(199)), "it cost much");
        assert!(schedule.is_due(at(200)));
    }
}
