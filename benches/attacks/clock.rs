//! Time for the benchmark: the one place here that reads the clock.

use std::time::Instant;

/// The time now.
#[expect(clippy::disallowed_methods, reason = "a benchmark measures real time")]
pub fn now() -> Instant {
    Instant::now()
}
