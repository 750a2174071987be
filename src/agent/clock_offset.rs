//! Estimates the offset between this host's clock and the service's clock with Cristian's algorithm. Each answer to a
//! transfer report is a sample. The estimate is the sample with the shortest round trip among the last eight. Its
//! error is at most half of that round trip.
//!
//! The module does not correct any clock. Begin at [`ClockSamples`].

use std::collections::VecDeque;
use std::time::Duration;

use crate::coordination::Timestamp;
use crate::proto::muster::v1::ClockReading;

/// The number of samples. An adjusted clock shows after as many answers.
const SAMPLES_MAX: usize = 8;

/// The samples of the last answers.
#[derive(Debug, Default)]
pub(super) struct ClockSamples(VecDeque<ClockReading>);

impl ClockSamples {
    /// Adds a sample: the request left at `asked` by this host's clock, and the service's time arrived `took`
    /// later.
    pub fn add_sample(&mut self, asked: Timestamp, took: Duration, service: Timestamp) {
        let micros = |time: u64| i64::try_from(time).unwrap_or(i64::MAX);
        let half = u64::try_from(took.as_micros() / 2).unwrap_or(u64::MAX);
        let middle = micros(asked.0.saturating_add(half));
        if self.0.len() == SAMPLES_MAX {
            self.0.pop_front();
        }
        let ahead_us = middle.saturating_sub(micros(service.0));
        self.0.push_back(ClockReading { ahead_us, within_us: half });
    }

    /// Returns the sample with the shortest round trip, which is the most precise.
    pub fn shortest_round_trip_sample(&self) -> Option<ClockReading> {
        self.0.iter().min_by_key(|reading| reading.within_us).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Adds a sample of a clock that is `ahead`, with these transit times.
    fn add_sample_with_transit_times(offset: &mut ClockSamples, at: u64, ahead: i64, there: u64, back: u64) {
        let shown = |at: u64| Timestamp(at.checked_add_signed(ahead).unwrap());
        offset.add_sample(shown(at), Duration::from_micros(there + back), Timestamp(at + there));
    }

    #[test]
    fn the_offset_error_is_at_most_half_of_the_round_trip() {
        let mut random = fastrand::Rng::with_seed(1);
        for _ in 0..10_000 {
            let (ahead, there, back) =
                (random.i64(-5_000_000..5_000_000), random.u64(0..90_000), random.u64(0..90_000));
            let mut offset = ClockSamples::default();
            add_sample_with_transit_times(&mut offset, 1_000_000_000, ahead, there, back);
            let shortest_round_trip_sample = offset.shortest_round_trip_sample().unwrap();
            assert!(
                shortest_round_trip_sample.ahead_us.abs_diff(ahead)
                    <= shortest_round_trip_sample.within_us + 1,
                "{ahead} {there} {back} {shortest_round_trip_sample:?}"
            );
        }
    }

    #[test]
    fn the_quickest_of_the_last_answers_counts_and_old_ones_are_forgotten() {
        let mut offset = ClockSamples::default();
        assert_eq!(offset.shortest_round_trip_sample(), None);
        add_sample_with_transit_times(&mut offset, 1_000_000_000, 700, 10, 10);
        add_sample_with_transit_times(&mut offset, 2_000_000_000, 700, 90_000, 10);
        assert_eq!(offset.shortest_round_trip_sample(), Some(ClockReading { ahead_us: 700, within_us: 10 }));
        // The clock is adjusted.
        for round in 0..SAMPLES_MAX as u64 {
            add_sample_with_transit_times(&mut offset, 3_000_000_000 + round, 0, 500, 500);
        }
        assert_eq!(offset.shortest_round_trip_sample(), Some(ClockReading { ahead_us: 0, within_us: 500 }));
    }

    #[test]
    fn absurd_times_are_only_absurd() {
        let mut offset = ClockSamples::default();
        offset.add_sample(Timestamp(u64::MAX), Duration::MAX, Timestamp(0));
        offset.add_sample(Timestamp(0), Duration::ZERO, Timestamp(u64::MAX));
        assert_eq!(
            offset.shortest_round_trip_sample(),
            Some(ClockReading { ahead_us: -i64::MAX, within_us: 0 })
        );
    }
}
