//! Formats amounts for templates. The functions take references, because templates pass references.
//!
//! The functions of `text` do the formatting. Begin at [`bytes_text()`].

pub(super) use crate::text::format_grouped;

/// A number of bytes in a template.
pub(super) trait ByteCount: Copy {
    fn count(self) -> u64;
}

impl ByteCount for u64 {
    fn count(self) -> u64 {
        self
    }
}

impl ByteCount for usize {
    fn count(self) -> u64 {
        self as u64
    }
}

impl<T: ByteCount> ByteCount for &T {
    fn count(self) -> u64 {
        (*self).count()
    }
}

/// Returns a number of bytes as text.
pub(super) fn bytes_text(count: impl ByteCount) -> String {
    crate::text::format_bytes(count.count())
}

/// Returns bytes a second as text.
pub(super) fn rate_text(count: impl ByteCount) -> String {
    format!("{}/s", bytes_text(count))
}
