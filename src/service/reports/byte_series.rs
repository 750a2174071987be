//! The number of bytes moved over time. A [`SecondSeries`] has one point for each of the last 600 seconds. A
//! [`TenSecondSeries`] has one point for each of the last four steps of ten seconds.
//!
//! Begin at [`ByteSeries::add_bytes_between`].

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::coordination::Timestamp;

/// The number of seconds that are kept.
pub const POINTS: usize = 600;
/// The bytes of a report are spread over the time since the report before, but at most over this: a worker
/// that was silent for longer was not moving bytes evenly.
const SPREAD_MAX_US: u64 = 60_000_000;
const SECOND_US: u64 = 1_000_000;

/// The length of a step of [`TenSecondSeries`] in seconds: the window over which rates are measured.
pub const STEP_SECONDS: u64 = 10;
/// The number of steps that are kept: enough for the last complete step of tasks that report only every
/// twenty seconds.
const STEPS: usize = 4;

/// Bytes of each second, for the last ten minutes.
pub type SecondSeries = ByteSeries<POINTS, 1>;
/// Bytes of each step of ten seconds, for the last few.
pub type TenSecondSeries = ByteSeries<STEPS, STEP_SECONDS>;

/// Bytes per step of `SECONDS` seconds, for the last `COUNT` steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ByteSeries<const COUNT: usize, const SECONDS: u64> {
    /// The newest step with a point; steps are counted from the Unix epoch.
    newest: u64,
    points: [u64; COUNT],
}

impl<const COUNT: usize, const SECONDS: u64> Default for ByteSeries<COUNT, SECONDS> {
    fn default() -> Self {
        Self { newest: 0, points: [0; COUNT] }
    }
}

/// Serialised as its newest step and the steps in which bytes moved.
impl<const COUNT: usize, const SECONDS: u64> Serialize for ByteSeries<COUNT, SECONDS> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let first = (self.newest + 1).saturating_sub(Self::COUNT);
        let steps = (first..=self.newest).map(|step| (step, self.bytes_of_step(step)));
        (self.newest, steps.filter(|(_, bytes)| *bytes > 0).collect::<Vec<_>>()).serialize(serializer)
    }
}

impl<'de, const COUNT: usize, const SECONDS: u64> Deserialize<'de> for ByteSeries<COUNT, SECONDS> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let (newest, steps): (u64, Vec<(u64, u64)>) = Deserialize::deserialize(deserializer)?;
        let mut series = Self { newest, points: [0; COUNT] };
        steps.into_iter().for_each(|(step, bytes)| series.add_to_step(step, bytes));
        Ok(series)
    }
}

impl<const COUNT: usize, const SECONDS: u64> ByteSeries<COUNT, SECONDS> {
    const STEP_US: u64 = SECONDS * SECOND_US;
    const COUNT: u64 = COUNT as u64;

    fn index_of_step(step: u64) -> usize {
        (step % Self::COUNT) as usize
    }

    /// Adds bytes that moved evenly between two times.
    pub fn add_bytes_between(&mut self, from: Timestamp, until: Timestamp, bytes: u64) {
        if bytes == 0 {
            return;
        }
        self.advance_to_step(until.0 / Self::STEP_US);
        let from = from.0.max(until.0.saturating_sub(SPREAD_MAX_US)).min(until.0);
        let whole = until.0 - from;
        let mut left = bytes;
        let mut at = from;
        // The remainder of the division goes to the last step.
        while at / Self::STEP_US < until.0 / Self::STEP_US {
            let end = (at / Self::STEP_US + 1) * Self::STEP_US;
            let part = u128::from(bytes) * u128::from(end - at) / u128::from(whole.max(1));
            let part = u64::try_from(part).unwrap_or(u64::MAX).min(left);
            self.add_to_step(at / Self::STEP_US, part);
            left -= part;
            at = end;
        }
        self.add_to_step(until.0 / Self::STEP_US, left);
    }

    /// Returns the bytes of the `count` steps up to `last`, the oldest first.
    #[must_use]
    pub fn bytes_of_last_steps(&self, last: u64, count: usize) -> Vec<u64> {
        let first = (last + 1).saturating_sub(count.min(COUNT) as u64);
        (first..=last).map(|step| self.bytes_of_step(step)).collect()
    }

    /// Returns the bytes of one step.
    #[must_use]
    pub fn bytes_of_step(&self, step: u64) -> u64 {
        if self.covers_step(step) { self.points[Self::index_of_step(step)] } else { 0 }
    }

    fn covers_step(&self, step: u64) -> bool {
        step <= self.newest && self.newest - step < Self::COUNT
    }

    fn add_to_step(&mut self, step: u64, bytes: u64) {
        if self.covers_step(step) {
            let point = &mut self.points[Self::index_of_step(step)];
            *point = point.saturating_add(bytes);
        }
    }

    fn advance_to_step(&mut self, step: u64) {
        if step <= self.newest {
            return;
        }
        if step - self.newest >= Self::COUNT {
            self.points.fill(0);
        } else {
            for gone in self.newest + 1..=step {
                self.points[Self::index_of_step(gone)] = 0;
            }
        }
        self.newest = step;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn timestamp_at_ms(ms: u64) -> Timestamp {
        Timestamp(ms * 1000)
    }

    #[test]
    fn bytes_are_spread_over_the_time_in_which_they_moved_and_none_is_lost() {
        let mut ring = SecondSeries::default();
        ring.add_bytes_between(timestamp_at_ms(10_500), timestamp_at_ms(12_500), 1001);
        assert_eq!(ring.bytes_of_last_steps(13, 5), [0, 250, 500, 251, 0]);
        ring.add_bytes_between(timestamp_at_ms(12_500), timestamp_at_ms(12_600), 9);
        assert_eq!(ring.bytes_of_last_steps(12, 1), [260]);
        // Two reports at the same time.
        ring.add_bytes_between(timestamp_at_ms(12_600), timestamp_at_ms(12_600), 1);
        assert_eq!(ring.bytes_of_last_steps(12, 1), [261]);
    }

    #[test]
    fn the_series_covers_ten_minutes_and_no_future() {
        let mut ring = SecondSeries::default();
        ring.add_bytes_between(timestamp_at_ms(1_000_000), timestamp_at_ms(1_000_900), 7);
        ring.add_bytes_between(timestamp_at_ms(1_599_000), timestamp_at_ms(1_599_900), 8);
        assert_eq!(ring.bytes_of_last_steps(1599, POINTS)[0], 7);
        ring.add_bytes_between(timestamp_at_ms(1_600_000), timestamp_at_ms(1_600_900), 9);
        let window = ring.bytes_of_last_steps(1600, 9999);
        assert_eq!((window.len(), window[0], window[POINTS - 2], window[POINTS - 1]), (POINTS, 0, 8, 9));
        assert_eq!(ring.bytes_of_last_steps(1605, 3), [0, 0, 0]);
        ring.add_bytes_between(timestamp_at_ms(9_000_000), timestamp_at_ms(9_000_500), u64::MAX);
        ring.add_bytes_between(timestamp_at_ms(9_000_500), timestamp_at_ms(9_000_600), 5);
        assert_eq!(
            ring.bytes_of_last_steps(9000, POINTS).iter().rev().take(2).collect::<Vec<_>>(),
            [&u64::MAX, &0]
        );
    }

    #[test]
    fn seconds_and_steps_of_ten_tell_the_same() {
        let (mut seconds, mut steps) = (SecondSeries::default(), TenSecondSeries::default());
        for (from, until, bytes) in [(7_300, 8_300, 40), (8_300, 13_300, 1000), (19_000, 21_000, 700)] {
            seconds.add_bytes_between(timestamp_at_ms(from), timestamp_at_ms(until), bytes);
            steps.add_bytes_between(timestamp_at_ms(from), timestamp_at_ms(until), bytes);
        }
        for step in 0..3 {
            let by_second: u64 = seconds.bytes_of_last_steps(step * 10 + 9, 10).iter().sum();
            assert_eq!(steps.bytes_of_step(step), by_second, "step {step}");
        }
    }

    #[test]
    fn a_long_silence_is_not_smeared_over_all_of_it() {
        let mut ring = SecondSeries::default();
        ring.add_bytes_between(timestamp_at_ms(0), timestamp_at_ms(500_000), 600);
        let window = ring.bytes_of_last_steps(500, POINTS);
        assert_eq!(window.iter().sum::<u64>(), 600);
        assert_eq!(window.iter().filter(|point| **point > 0).count(), 60);
    }
}
