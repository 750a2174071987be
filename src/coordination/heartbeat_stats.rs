//! The statistics of one task's heartbeats: the usual interval, the longest recent gap, a histogram of the gaps, and
//! their history (`heartbeat_history.rs`).
//!
//! `failure_detection.rs` decides when a task without heartbeats fails. Begin at `HeartbeatStats`.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::heartbeat_history::{HeartbeatGap, HeartbeatHistory};
use super::ids::Timestamp;

/// The number of classes in which gaps are counted.
pub const GAP_BUCKETS: usize = 19;
/// The longest gap of the first class, in microseconds. Each further class holds gaps up to twice as long,
/// and the last one all longer gaps.
const FIRST_BUCKET_US: u64 = 1_000;
/// The length of a window. The longest recent gap is that of the present window and the one before.
const LONGEST_GAP_WINDOW: Duration = Duration::from_secs(5 * 60);
/// The weight of the moving average: each gap moves it by one part in this number.
const AVERAGED: u64 = 16;

/// Gaps between heartbeats, counted by their length.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = Gaps)]
pub struct GapHistogram {
    /// The number of gaps in each class. A class holds gaps up to 1 ms, 2 ms, 4 ms and so on; the last one
    /// holds all longer gaps.
    #[schema(value_type = Vec<u64>)]
    pub counts: [u64; GAP_BUCKETS],
    /// The sum of all gaps, in microseconds.
    pub sum_us: u64,
}

impl GapHistogram {
    /// Returns the longest gap that belongs to a class, in microseconds; the last class has no limit.
    #[must_use]
    pub fn upper_bound_us_of_bucket(class: usize) -> Option<u64> {
        (class + 1 < GAP_BUCKETS).then(|| FIRST_BUCKET_US << class)
    }

    /// Returns the number of gaps.
    #[must_use]
    pub fn gap_count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Adds the gaps of `other`.
    pub(super) fn add_gaps_of(&mut self, other: &HeartbeatStats) {
        for (mine, theirs) in self.counts.iter_mut().zip(&other.counts) {
            *mine += u64::from(*theirs);
        }
        self.sum_us = self.sum_us.saturating_add(other.sum_us);
    }
}

fn bucket_of(gap_us: u64) -> usize {
    let doublings = u64::BITS - (gap_us.saturating_sub(1) / FIRST_BUCKET_US).leading_zeros();
    (doublings as usize).min(GAP_BUCKETS - 1)
}

/// The statistics of one task's heartbeats in this run.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct HeartbeatStats {
    /// The last heartbeat; `None` at the start of an incarnation and after the service itself was down.
    last: Option<Timestamp>,
    counts: [u32; GAP_BUCKETS],
    sum_us: u64,
    /// The moving average of the gaps.
    interval_us: u64,
    window_began: Timestamp,
    longest_us: u64,
    longest_before_us: u64,
    history: HeartbeatHistory,
}

impl HeartbeatStats {
    /// Records a heartbeat.
    pub fn record_heartbeat(&mut self, now: Timestamp) {
        let Some(last) = self.last.replace(now) else { return };
        let gap_us = now.0.saturating_sub(last.0);
        let count = &mut self.counts[bucket_of(gap_us)];
        *count = count.saturating_add(1);
        self.sum_us = self.sum_us.saturating_add(gap_us);
        self.interval_us = match self.interval_us {
            0 => gap_us,
            usual => usual - usual / AVERAGED + gap_us / AVERAGED,
        };
        let window = now.since(self.window_began);
        if window >= LONGEST_GAP_WINDOW {
            self.longest_before_us = if window < 2 * LONGEST_GAP_WINDOW { self.longest_us } else { 0 };
            self.longest_us = 0;
            self.window_began = now;
        }
        self.longest_us = self.longest_us.max(gap_us);
        self.history.add_gap(now, gap_us);
    }

    /// Skips the gap from the last heartbeat to the next one, because the task did not cause it.
    pub fn skip_next_gap(&mut self) {
        self.last = None;
    }

    pub fn view(&self) -> Option<HeartbeatStatsView> {
        let counts = self.counts.map(u64::from);
        let heard = counts.iter().any(|count| *count > 0);
        heard.then(|| HeartbeatStatsView {
            interval_us: self.interval_us,
            longest_recent_us: self.longest_us.max(self.longest_before_us),
            gaps: GapHistogram { counts, sum_us: self.sum_us },
        })
    }

    /// Returns whether the history is within its bound.
    pub fn is_within_bounds(&self) -> bool {
        self.history.is_within_bounds()
    }

    /// Returns the gaps over time, the oldest first.
    pub fn gap_history(&self) -> Vec<HeartbeatGap> {
        self.history.gaps()
    }

    /// Returns the usual interval and the longest recent gap, in microseconds; 0 where there is none yet.
    pub fn usual_and_longest_gap_us(&self) -> (u64, u64) {
        (self.interval_us, self.longest_us.max(self.longest_before_us))
    }
}

/// The statistics of a task's heartbeats, from its second one in this run on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = PulseView)]
pub struct HeartbeatStatsView {
    /// The usual interval, in microseconds: a moving average over about the last sixteen gaps.
    pub interval_us: u64,
    /// The longest gap of the last five to ten minutes, in microseconds.
    pub longest_recent_us: u64,
    /// All gaps of this run, by their length.
    pub gaps: GapHistogram,
}

/// A heartbeat is overdue after so many usual intervals and this time.
const OVERDUE_FACTOR: f64 = 1.2;
const OVERDUE_SLACK: Duration = Duration::from_secs(1);

/// Returns the time since the last heartbeat of a task, if its next one is overdue. Until its usual interval is known (`interval_us`
/// is 0), it is taken as half of the timeout, which is the clients' default.
#[must_use]
pub fn silence_if_heartbeat_overdue(
    last: Option<Timestamp>,
    interval_us: u64,
    timeout: Duration,
    now: Timestamp,
) -> Option<Duration> {
    let usual = if interval_us > 0 { Duration::from_micros(interval_us) } else { timeout / 2 };
    let silent = now.since(last?);
    (silent > usual.mul_f64(OVERDUE_FACTOR) + OVERDUE_SLACK).then_some(silent)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_gap_has_the_class_that_its_bound_says() {
        for gap in [0, 1, 1_000, 1_001, 2_000, 2_001, 4_000, 4_001, 131_072_000, 262_144_000, u64::MAX] {
            let class = bucket_of(gap);
            assert!(
                GapHistogram::upper_bound_us_of_bucket(class).is_none_or(|longest| gap <= longest),
                "{gap} is in {class}"
            );
            let fits_below = class > 0
                && GapHistogram::upper_bound_us_of_bucket(class - 1).is_some_and(|longest| gap <= longest);
            assert!(!fits_below, "{gap} is in {class}");
        }
    }

    #[test]
    fn a_heartbeat_is_overdue_a_fifth_of_its_usual_interval_and_a_second_late() {
        let timeout = Duration::from_secs(100);
        let after = |seconds: u64, interval_us: u64| {
            silence_if_heartbeat_overdue(
                Some(Timestamp(0)),
                interval_us,
                timeout,
                Timestamp(seconds * 1_000_000),
            )
        };
        assert_eq!(after(7, 5_000_000), None);
        assert_eq!(after(8, 5_000_000), Some(Duration::from_secs(8)));
        assert_eq!(after(43, 5_000_000), Some(Duration::from_secs(43)));
        assert_eq!(after(43, 50_000_000), None);
        assert_eq!(after(61, 0), None, "its interval is taken as half of the timeout");
        assert_eq!(after(62, 0), Some(Duration::from_secs(62)));
        assert_eq!(
            silence_if_heartbeat_overdue(None, 5_000_000, timeout, Timestamp(u64::MAX)),
            None,
            "it never sent one"
        );
    }

    #[test]
    fn a_pause_of_the_service_is_not_counted_as_a_gap() {
        let mut pulse = HeartbeatStats::default();
        pulse.record_heartbeat(Timestamp(1_000_000));
        pulse.record_heartbeat(Timestamp(2_000_000));
        pulse.skip_next_gap();
        pulse.record_heartbeat(Timestamp(90_000_000));
        pulse.record_heartbeat(Timestamp(91_000_000));
        let view = pulse.view().expect("two gaps");
        assert_eq!((view.gaps.gap_count(), view.gaps.sum_us), (2, 2_000_000));
        assert_eq!((view.interval_us, view.longest_recent_us), (1_000_000, 1_000_000));
    }

    #[test]
    fn a_long_gap_is_forgotten_after_two_windows() {
        let mut pulse = HeartbeatStats::default();
        let mut now = Timestamp(0);
        let mut beat = |pulse: &mut HeartbeatStats, by: u64| {
            now = now.after(Duration::from_secs(by));
            pulse.record_heartbeat(now);
        };
        beat(&mut pulse, 1);
        beat(&mut pulse, 50);
        for _ in 0..29 {
            beat(&mut pulse, 10);
        }
        assert_eq!(pulse.usual_and_longest_gap_us().1, 50_000_000);
        for _ in 0..61 {
            beat(&mut pulse, 10);
        }
        assert_eq!(pulse.usual_and_longest_gap_us().1, 10_000_000);
    }
}
