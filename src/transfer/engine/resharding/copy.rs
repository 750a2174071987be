//! Copies of runs between the memory of one task.
//!
//! It does not choose what is copied: plans do. Begin at [`copy_runs`].
#![allow(unsafe_code, reason = "makes views of shards that the plan has claimed")]

use crate::memory::Span;
use crate::plan::{Runs, each_common_run};

/// Returns the runs of one stretch.
pub const fn dense(bytes: u64) -> Runs {
    Runs { offset: 0, run_bytes: bytes, counts: Vec::new(), strides: Vec::new() }
}

/// Copies the bytes of some runs into others, which have as many. The plan has claimed both spans: programs are kept from
/// them, no two steps write the same bytes, and none reads what another one writes before it is there. The runs lie within
/// their spans; what does not is not copied.
pub fn copy_runs((from, from_runs): (&Span, &Runs), (to, to_runs): (&Span, &Runs)) {
    each_common_run(from_runs, to_runs, |source, target, len| {
        let len = len.min(from.len().saturating_sub(source)).min(to.len().saturating_sub(target));
        if len > 0 {
            // SAFETY: both stretches lie within their spans, and are this step's alone, see above.
            let (source, mut target) = unsafe { (from.read_view(source, len), to.write_view(target, len)) };
            target.copy_from(&source);
        }
    });
}
