//! How a journal is written, and why a record may not be. Begin at [`JournalOptions`].

/// The greatest length of a segment, and so of a record.
pub(crate) const SEGMENT_BYTES_MAX: usize = 1 << 32;

/// How a journal is written.
#[derive(Debug, Clone)]
pub struct JournalOptions {
    /// The length of a segment, in bytes. A record that is longer gets a segment of its own.
    pub segment_bytes: usize,
    /// A snapshot is due when so many bytes, and as many as the last snapshot has, were appended since.
    pub snapshot_after_bytes: u64,
}

impl Default for JournalOptions {
    fn default() -> Self {
        Self { segment_bytes: 16 << 20, snapshot_after_bytes: 64 << 20 }
    }
}

/// The reason for which a record is not in the journal.
#[derive(Debug, thiserror::Error)]
pub enum AppendError {
    /// There is no room for another segment, or the file system refuses.
    #[error("a new segment cannot be allocated: {0}")]
    NoSegment(std::io::Error),
    /// The record is longer than the greatest segment.
    #[error("the record is longer than {SEGMENT_BYTES_MAX} bytes")]
    TooLong,
}
