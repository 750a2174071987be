//! Summarizes repeated measurements by their median and a range. The benchmarks report this summary.
//!
//! The range goes from minimum to maximum ([`SampleRange::of`]), or is the 95 % confidence interval of the median
//! ([`SampleRange::of_median`]). Begin at [`SampleRange::of`].

use serde::Serialize;

/// A median with the range of the other values.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct SampleRange {
    /// The middle value, or the mean of the two middle ones.
    pub median: f64,
    /// The smallest value.
    pub min: f64,
    /// The greatest value.
    pub max: f64,
}

impl SampleRange {
    /// Returns the range of the values; `None` if there are none.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        let (&min, &max) = values.first().zip(values.last())?;
        let middle = values.len() / 2;
        let median = if values.len() % 2 == 1 {
            values[middle]
        } else {
            f64::midpoint(values[middle - 1], values[middle])
        };
        Some(Self { median, min, max })
    }

    /// Returns the median and, as the range, its 95 % confidence interval by order statistics, which assume nothing
    /// about the distribution; `None` if there are no values.
    pub fn of_median(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        let count = values.len() as f64;
        let out = ((count - 1.96 * count.sqrt()) / 2.0).floor().max(0.0) as usize;
        let interval = Self::of(values.get(out..values.len().saturating_sub(out))?.iter().copied())?;
        Some(Self { median: Self::of(values)?.median, ..interval })
    }
}
