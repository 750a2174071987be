//! Counters and timings of hot paths, per thread.
//!
//! It names and exposes no metric: `telemetry::metrics` does. Without the cargo feature `metrics` every type here
//! is empty, with the same methods, so a caller never checks; `BENCHMARKS.md` has what that saves. Begin at
//! `kept.rs`.

#[cfg(feature = "metrics")]
mod kept;
#[cfg(not(feature = "metrics"))]
#[path = "meter/unkept.rs"]
mod kept;

use std::ops::AddAssign;

pub use kept::{Count, Holding, Lock, Moment, ON, Sharded, Times, Waiting};

/// The number of bounds of a [`Timed`] histogram.
pub const BOUNDS: usize = 18;
/// The least bound, in nanoseconds. Each further bound is four times the one before; the last is 1 h 12 min.
const LEAST_NS: u64 = 250;

/// A histogram of times, as [`Times::read`] returns it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Timed {
    /// The number of times in the bucket of each bound; the last bucket counts longer times.
    pub counts: [u64; BOUNDS + 1],
    /// The sum of all times, in nanoseconds.
    pub sum_ns: u64,
}

impl AddAssign<&Self> for Timed {
    fn add_assign(&mut self, more: &Self) {
        for (count, more) in self.counts.iter_mut().zip(more.counts) {
            *count += more;
        }
        self.sum_ns += more.sum_ns;
    }
}

impl Timed {
    /// Returns the upper bounds of the buckets, in nanoseconds.
    pub fn bounds_ns() -> impl Iterator<Item = u64> {
        (0..BOUNDS).map(|place| LEAST_NS << (2 * place))
    }

    /// Returns whether nothing was timed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.counts.iter().all(|count| *count == 0)
    }
}
