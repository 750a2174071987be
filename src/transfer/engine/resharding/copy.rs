//! Copies runs of bytes between shards and staging memory of one task.
//!
//! The plan chooses the runs. Begin at [`copy_runs`].
#![allow(unsafe_code, reason = "makes views of shards that the plan has claimed")]

use crate::memory::Span;
use crate::plan::{Runs, each_common_run};

/// Returns the runs of one contiguous range of `bytes` bytes from the first on.
pub const fn dense(bytes: u64) -> Runs {
    Runs { offset: 0, run_bytes: bytes, counts: Vec::new(), strides: Vec::new() }
}

/// Copies the bytes of some runs into other runs of the same number of bytes. The plan has claimed both
/// spans: programs cannot access them, no two steps write the same bytes, and no step reads bytes before the
/// step that writes them is done. Bytes outside the spans are not copied.
pub fn copy_runs((from, from_runs): (&Span, &Runs), (to, to_runs): (&Span, &Runs)) {
    each_common_run(from_runs, to_runs, |source, target, len| {
        let len = len.min(from.len().saturating_sub(source)).min(to.len().saturating_sub(target));
        if len > 0 {
            // SAFETY: both ranges lie within their spans, and only this step uses them, as described above.
            let (source, mut target) = unsafe { (from.read_view(source, len), to.write_view(target, len)) };
            target.copy_from(&source);
        }
    });
}
