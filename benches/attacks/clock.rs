//! The clock of the benchmark; no other file reads it.

use std::time::Instant;

/// Returns the present time.
#[expect(clippy::disallowed_methods, reason = "a benchmark measures real time")]
pub fn now() -> Instant {
    Instant::now()
}
