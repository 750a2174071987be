//! Keeps the gaps between the heartbeats of one task over time, in at most [`HISTORY_POINTS`] points.
//!
//! At first, each gap is a point. When all points are used, time is divided into intervals, and each point is the
//! longest gap of its interval. The intervals grow with time, up to 41 s. From then on, the points cover at least the
//! last 43 minutes. The histogram of gaps is in `heartbeat_stats.rs`. Begin at `HeartbeatHistory::add_gap`.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::ids::Timestamp;

/// The greatest number of points for one task. A point has eight bytes: half a KiB a task, 5 MB for ten
/// thousand.
pub const HISTORY_POINTS: usize = 64;
/// The unit of a point's time, in microseconds: 32 bits hold 497 days.
const TIME_UNIT_US: u64 = 10_000;
/// The unit of a gap, in microseconds: 32 bits hold nearly five days.
const GAP_UNIT_US: u64 = 100;
/// The longest step, as a power of two of time units: 41 s. With it, the points cover at least 43 minutes,
/// and more if heartbeats are farther apart.
const MAX_STEP_LOG2: u32 = 12;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct HistoryPoint {
    /// The end of the gap, since the history began, in time units.
    at: u32,
    gap: u32,
}

/// The gaps of one task over time: one point for each heartbeat until the table is full, then the longest gap
/// of each step. The step doubles as often as necessary; at the longest step, the oldest points are dropped.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct HeartbeatHistory {
    began: Timestamp,
    /// The length of a step, as a power of two of time units.
    step: u32,
    points: VecDeque<HistoryPoint>,
}

impl HeartbeatHistory {
    /// Adds a gap that ended at `now`.
    pub fn add_gap(&mut self, now: Timestamp, gap_us: u64) {
        if self.points.is_empty() {
            (self.began, self.step) = (now, 0);
        }
        let point = HistoryPoint {
            at: saturate_u32(now.0.saturating_sub(self.began.0) / TIME_UNIT_US),
            gap: saturate_u32(gap_us / GAP_UNIT_US),
        };
        if self.merge_into_last(point) {
            return;
        }
        if self.points.len() == HISTORY_POINTS {
            self.downsample();
            if self.merge_into_last(point) {
                return;
            }
        }
        self.points.push_back(point);
    }

    /// Merges the gap into the last point if both belong to one step; the longer gap stays. Returns whether
    /// it did.
    fn merge_into_last(&mut self, point: HistoryPoint) -> bool {
        let step = self.step;
        let Some(last) = self.points.back_mut().filter(|last| last.at >> step == point.at >> step) else {
            return false;
        };
        if point.gap >= last.gap {
            *last = point;
        }
        true
    }

    /// Makes room for at least one point.
    fn downsample(&mut self) {
        while self.points.len() > HISTORY_POINTS * 3 / 4 && self.step < MAX_STEP_LOG2 {
            self.step += 1;
            let all = std::mem::replace(&mut self.points, VecDeque::with_capacity(HISTORY_POINTS));
            for point in all {
                if !self.merge_into_last(point) {
                    self.points.push_back(point);
                }
            }
        }
        if self.points.len() == HISTORY_POINTS {
            self.points.pop_front();
        }
    }

    /// Returns whether the number of points is within its bound.
    pub fn is_within_bounds(&self) -> bool {
        self.points.len() <= HISTORY_POINTS
    }

    /// Returns the gaps, the oldest first.
    pub fn gaps(&self) -> Vec<HeartbeatGap> {
        let moment = |at: u32| Timestamp(self.began.0 + u64::from(at) * TIME_UNIT_US);
        let view = |point: &HistoryPoint| HeartbeatGap {
            at: moment(point.at),
            gap_us: u64::from(point.gap) * GAP_UNIT_US,
        };
        self.points.iter().map(view).collect()
    }
}

/// Converts to 32 bits; a larger number becomes the maximum.
fn saturate_u32(units: u64) -> u32 {
    u32::try_from(units).unwrap_or(u32::MAX)
}

/// A gap between two heartbeats.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = GapAt)]
pub struct HeartbeatGap {
    /// The time of the heartbeat that ended it, to ten milliseconds.
    pub at: Timestamp,
    /// Its length in microseconds, to a tenth of a millisecond.
    pub gap_us: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000;

    /// Adds heartbeats from `from` to `until`, `apart` microseconds from one another.
    fn add_regular_gaps(course: &mut HeartbeatHistory, from: u64, until: u64, apart: u64) {
        for at in (from + apart..=until).step_by(usize::try_from(apart).expect("it is short")) {
            course.add_gap(Timestamp(at), apart);
        }
    }

    #[test]
    fn every_gap_is_one_point_until_the_history_is_full() {
        let mut course = HeartbeatHistory::default();
        add_regular_gaps(&mut course, 1_000 * SECOND, 1_060 * SECOND, SECOND);
        let seen = course.gaps();
        assert_eq!(seen.len(), 60);
        assert_eq!(seen[0], HeartbeatGap { at: Timestamp(1_001 * SECOND), gap_us: SECOND });
        assert_eq!(seen[59].at, Timestamp(1_060 * SECOND));
    }

    #[test]
    fn the_history_covers_thirty_minutes_at_any_heartbeat_rate() {
        for apart in [SECOND / 10, SECOND, 10 * SECOND, 50 * SECOND] {
            let mut course = HeartbeatHistory::default();
            add_regular_gaps(&mut course, 0, 7_200 * SECOND, apart);
            let seen = course.gaps();
            assert!(seen.len() <= HISTORY_POINTS, "{} points", seen.len());
            let told = seen[seen.len() - 1].at.since(seen[0].at);
            assert!(told.as_secs() >= 30 * 60, "{told:?} with heartbeats {apart} us apart");
            assert!(seen.windows(2).all(|pair| pair[0].at < pair[1].at), "{seen:?}");
        }
    }

    #[test]
    fn a_long_gap_outlives_the_short_ones_around_it() {
        let mut course = HeartbeatHistory::default();
        add_regular_gaps(&mut course, 0, 600 * SECOND, SECOND);
        course.add_gap(Timestamp(640 * SECOND), 40 * SECOND);
        add_regular_gaps(&mut course, 640 * SECOND, 2_000 * SECOND, SECOND);
        let longest = course.gaps().into_iter().max_by_key(|gap| gap.gap_us).expect("there are gaps");
        assert_eq!(longest, HeartbeatGap { at: Timestamp(640 * SECOND), gap_us: 40 * SECOND });
    }

    #[test]
    fn extreme_times_and_gaps_stay_within_the_bound() {
        let mut course = HeartbeatHistory::default();
        course.add_gap(Timestamp(0), 1);
        for at in 1..1_000 {
            course.add_gap(Timestamp(u64::MAX - 1_000 + at), u64::MAX);
        }
        assert_eq!(course.gaps().len(), 2);
    }
}
