//! Copies runs of bytes within one task: between two shards, or between a shard and staging memory.
//!
//! The plan chooses the runs (contiguous byte ranges). Begin at [`copy_runs_on_host`].
#![allow(unsafe_code, reason = "makes views of shards that the plan has claimed")]

use crate::memory::Span;
use crate::plan::RunCopies;

/// Performs the copies of a step. The plan has claimed both spans: programs cannot access them, no two steps write
/// the same bytes, and no step reads bytes before the step that writes them is done. Bytes outside the spans are
/// not copied.
pub fn copy_runs_on_host(copies: &RunCopies, from: &Span, to: &Span) {
    copies.for_each_copy(|source, target, len| {
        let len = len.min(from.len().saturating_sub(source)).min(to.len().saturating_sub(target));
        if len > 0 {
            // SAFETY: both ranges lie within their spans, and only this step uses them, as described above.
            let (source, mut target) =
                unsafe { (from.read_view_unchecked(source, len), to.write_view_unchecked(target, len)) };
            target.copy_from(&source);
        }
    });
}
