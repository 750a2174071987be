//! The clock of the benchmark: the only file here that reads it.

use std::time::Instant;

/// Returns the current time.
#[expect(clippy::disallowed_methods, reason = "a benchmark measures real time")]
pub fn now() -> Instant {
    Instant::now()
}
