//! Counters and timings of hot paths, per thread.
//!
//! It names and exposes no metric: `telemetry::metrics` does. Without the cargo feature `metrics` every type here
//! is empty, with the same methods, so a caller never checks; `BENCHMARKS.md` has what that saves. Begin at
//! `enabled.rs`.

#[cfg(not(feature = "metrics"))]
mod disabled;
#[cfg(feature = "metrics")]
mod enabled;

use std::ops::AddAssign;

#[cfg(not(feature = "metrics"))]
pub use disabled::{Counter, ENABLED, Histogram, LockHold, LockTimes, LockWait, Moment, Sharded};
#[cfg(feature = "metrics")]
pub use enabled::{Counter, ENABLED, Histogram, LockHold, LockTimes, LockWait, Moment, Sharded};

/// How many bounds [`HistogramSnapshot`] has.
pub const BOUNDS: usize = 18;
/// The least bound, in nanoseconds; each further one is four times the one before. The last is an hour and twelve minutes.
const FIRST_BOUND_NS: u64 = 250;

/// Times as they were read, counted by their size.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HistogramSnapshot {
    /// One for each bound, and one for what took longer.
    pub counts: [u64; BOUNDS + 1],
    /// All of them together, in nanoseconds.
    pub sum_ns: u64,
}

impl AddAssign<&Self> for HistogramSnapshot {
    fn add_assign(&mut self, more: &Self) {
        for (count, more) in self.counts.iter_mut().zip(more.counts) {
            *count += more;
        }
        self.sum_ns += more.sum_ns;
    }
}

impl HistogramSnapshot {
    /// The bounds, in nanoseconds.
    pub fn bounds_ns() -> impl Iterator<Item = u64> {
        (0..BOUNDS).map(|place| FIRST_BOUND_NS << (2 * place))
    }

    /// Whether nothing has been timed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.counts.iter().all(|count| *count == 0)
    }
}
