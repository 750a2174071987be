//! Counters and timings of hot paths.
//!
//! `telemetry::metrics` names and exports the metrics. In a build without the cargo feature `metrics`, every type
//! here measures nothing but has the same methods, so callers need no `cfg`. `BENCHMARKS.md` shows how much time such
//! a build saves. Begin at `enabled.rs`.

#[cfg(not(feature = "metrics"))]
mod disabled;
#[cfg(feature = "metrics")]
mod enabled;

use std::ops::AddAssign;

#[cfg(not(feature = "metrics"))]
pub use disabled::{Counter, ENABLED, Histogram, LockHold, LockTimes, LockWait, Moment, Sharded};
#[cfg(feature = "metrics")]
pub use enabled::{Counter, ENABLED, Histogram, LockHold, LockTimes, LockWait, Moment, Sharded};

/// The number of bounds of a [`Histogram`].
pub const BOUNDS: usize = 18;
/// The least bound, in nanoseconds. Each further bound is four times the one before; the last is 1 h 12 min.
const FIRST_BOUND_NS: u64 = 250;

/// A histogram of times, as [`Histogram::snapshot`] returns it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HistogramSnapshot {
    /// The number of times in the bucket of each bound; the last bucket counts longer times.
    pub counts: [u64; BOUNDS + 1],
    /// The sum of all times, in nanoseconds.
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
    /// Returns the upper bounds of the buckets, in nanoseconds.
    pub fn bounds_ns() -> impl Iterator<Item = u64> {
        (0..BOUNDS).map(|place| FIRST_BOUND_NS << (2 * place))
    }

    /// Returns whether nothing was timed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.counts.iter().all(|count| *count == 0)
    }
}
