//! Statistics of one task at barriers: how late it arrives, how long others wait for it, and how often.
//!
//! `barrier_stats.rs` supplies the measurements. `service/findings/chronic_straggler.rs` draws conclusions from them.
//! Begin at [`StragglerStats`], then `StragglerStats::add_member_timing`.
//!
//! Barriers of the service itself, and barriers with fewer than two arrivals, do not count. Nor does the arrival of a
//! task that has restarted and is not in step with the others: an outage is not lateness, and the first step after it
//! is a part of the outage. For every other barrier that passed, a task has:
//! - its *lateness*: the time from the first arrival to the arrival of the task;
//! - its *hold-up*, if it arrived last: the time from the last arrival but one to the arrival of the task, for
//!   which the others waited only for this task;
//! - its *share*: the time from the median arrival to the arrival of the task, divided by the skew (the time from
//!   the first arrival to the last). Equal tasks, which arrive in a new order every time, have small shares. A task
//!   for which all others wait has a share of 1, and so has each of several tasks on one slow host. A comparison
//!   with the last arrival but one would miss such tasks.
//!
//! The *score* is a moving average of the shares. Each new share has the weight 1/16; while there are n < 16
//! shares, the weight is 1/n. The first share of a run counts only until there is a second one, because tasks start when they
//! start. From the sixteenth share on, a single late arrival raises the score by a sixteenth at
//! most, and later arrivals reduce it again. A task that is always late has a score near 1. The score has no unit: a
//! straggler matters only if it also costs time, and lateness and hold-up measure this time.
//!
//! The *best* lateness is the lowest average lateness since the eighth barrier. If the best lateness is high too,
//! the task was always late, for example because it has more work than the others. If the best lateness is low, the
//! task has become slow.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The number of instances over which the averages are taken.
const AVERAGED: u64 = 16;
/// The number of instances from which on the average counts as the usual lateness of a task.
const BEST_AFTER: u64 = 8;
/// The number of latest instances for which it is remembered whether the task was last.
const RECENT_INSTANCES: u64 = 64;
/// The score 1, in the fixed-point form of scores.
pub(super) const SCORE_ONE: u64 = 1_000_000;
/// Statistics of one task at the barriers of this run.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct StragglerStats {
    taken_part: u64,
    last: u64,
    /// Whether it was last at each of the recent instances; the newest is the lowest bit.
    recent: u64,
    lateness_total_us: u64,
    /// The moving average of the lateness.
    lateness_us: u64,
    /// The least value of that average, once it covers [`BEST_AFTER`] instances.
    lateness_best_us: Option<u64>,
    /// The moving average of the shares.
    score: u64,
    held_up_us: u64,
}

/// The times of one member at one instance, in microseconds.
pub(super) struct MemberTiming {
    pub lateness: u64,
    /// The share, in units of [`SCORE_ONE`].
    pub share: u64,
    /// The time for which it held up the others, if it was last.
    pub held_up: Option<u64>,
}

impl StragglerStats {
    pub fn add_member_timing(&mut self, part: &MemberTiming) {
        self.taken_part += 1;
        self.last += u64::from(part.held_up.is_some());
        self.recent = self.recent << 1 | u64::from(part.held_up.is_some());
        self.lateness_total_us = self.lateness_total_us.saturating_add(part.lateness);
        // The first value counts only until there is a second one.
        let memory = (self.taken_part - 1).clamp(1, AVERAGED);
        self.lateness_us = update_moving_average(self.lateness_us, part.lateness, memory);
        if memory >= BEST_AFTER {
            let best = self.lateness_best_us.map_or(self.lateness_us, |best| best.min(self.lateness_us));
            self.lateness_best_us = Some(best);
        }
        self.score = update_moving_average(self.score, part.share, memory);
        self.held_up_us = self.held_up_us.saturating_add(part.held_up.unwrap_or_default());
    }

    pub fn view(&self) -> Option<StragglerView> {
        if self.taken_part == 0 {
            return None;
        }
        let recent = self.taken_part.min(RECENT_INSTANCES);
        // A score has six decimals, which an `f64` holds exactly enough.
        #[expect(clippy::cast_precision_loss, reason = "a number up to a million")]
        let score = self.score as f64 / SCORE_ONE as f64;
        Some(StragglerView {
            taken_part: self.taken_part,
            last: self.last,
            recent,
            recent_last: u64::from(self.recent.count_ones()),
            lateness_us: self.lateness_us,
            lateness_best_us: self.lateness_best_us,
            lateness_total_us: self.lateness_total_us,
            held_up_us: self.held_up_us,
            score,
        })
    }

    /// Checks that the counts are consistent.
    pub fn check_invariants(&self) -> Result<(), String> {
        let recent = u64::from(self.recent.count_ones());
        let best_is_least = self.lateness_best_us.is_none_or(|best| best <= self.lateness_us);
        if self.last > self.taken_part || recent > self.last || self.score > SCORE_ONE || !best_is_least {
            return Err(format!("was last {} ({recent} lately) of {} times", self.last, self.taken_part));
        }
        Ok(())
    }
}

/// Moves an average by one part in `memory` of the way to `value`.
fn update_moving_average(average: u64, value: u64, memory: u64) -> u64 {
    if value >= average { average + (value - average) / memory } else { average - (average - value) / memory }
}

/// Statistics of a task at the barriers that clients name, among those that passed with two arrivals or more. A task that has
/// restarted and is not in step arrives at none of them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[schema(as = StragglingView)]
pub struct StragglerView {
    /// The number of these barriers in which it took part in this run.
    pub taken_part: u64,
    /// The number of barriers at which it was the last to arrive.
    pub last: u64,
    /// The number of recent barriers: 64 at most.
    pub recent: u64,
    /// The number of recent barriers at which it was the last to arrive.
    pub recent_last: u64,
    /// The usual time from the first arrival to its own, in microseconds: a moving average over about sixteen
    /// barriers.
    pub lateness_us: u64,
    /// The least value of `lateness_us` in this run; absent before it took part in eight barriers.
    pub lateness_best_us: Option<u64>,
    /// The time from the first arrival to its own, added up over all barriers, in microseconds.
    pub lateness_total_us: u64,
    /// The time for which the others waited for it alone, added up over all barriers at which it was last, in
    /// microseconds.
    pub held_up_us: u64,
    /// From 0 to 1: a moving average, over about sixteen, of how far it came behind the median arrival as a part of the
    /// time between the first arrival and the last. Near 1: it is late every time. One late arrival adds a sixteenth.
    pub score: f64,
}

impl StragglerView {
    /// The lateness from which on a straggler costs enough to matter, in microseconds.
    pub const SIGNIFICANT_LATENESS_US: u64 = 50_000;
    /// The score from which on a task counts as habitually late.
    pub const CHRONIC_SCORE: f64 = 0.75;
    /// The number of barriers that are needed to distinguish a habit from chance.
    const CHRONIC_AFTER: u64 = 16;

    /// Returns whether the task, one of this many, is late at nearly every barrier.
    #[must_use]
    pub fn is_chronic(&self, tasks: usize) -> bool {
        // Of two tasks one is always later, so being later counts as a habit only if it happens nearly every time.
        let enough = if tasks > 2 { 0.0 } else { 0.9 };
        self.taken_part >= Self::CHRONIC_AFTER
            && self.score >= Self::CHRONIC_SCORE
            && self.lateness_us >= Self::SIGNIFICANT_LATENESS_US
            && self.recent_last_arrival_fraction() >= enough
    }

    /// Returns the usual lateness less the best one, in microseconds.
    #[must_use]
    pub fn lateness_above_best_us(&self) -> u64 {
        self.lateness_best_us.map_or(0, |best| self.lateness_us.saturating_sub(best))
    }

    /// Returns whether the task was once fast enough and has become slow.
    #[must_use]
    pub fn has_slowed(&self) -> bool {
        self.lateness_above_best_us() >= Self::SIGNIFICANT_LATENESS_US
    }

    /// Returns the fraction of the recent barriers at which it arrived last.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "numbers up to 64")]
    pub fn recent_last_arrival_fraction(&self) -> f64 {
        self.recent_last as f64 / self.recent.max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member_timing(late: u64, of: u64, last: bool) -> MemberTiming {
        MemberTiming { lateness: late, share: late * SCORE_ONE / of, held_up: last.then_some(late / 2) }
    }

    #[test]
    fn one_late_arrival_is_forgotten_and_a_habit_is_not() {
        let mut once = StragglerStats::default();
        let mut always = StragglerStats::default();
        for round in 0..64 {
            once.add_member_timing(&member_timing(
                if round == 32 { 1_000_000 } else { 0 },
                1_000_000,
                round == 32,
            ));
            always.add_member_timing(&member_timing(1_000_000, 1_000_000, true));
        }
        let (once, always) = (once.view().expect("it took part"), always.view().expect("it took part"));
        assert!(once.score < 0.02 && once.recent_last == 1, "{once:?}");
        assert!(always.score > 0.99 && always.recent_last == 64, "{always:?}");
        assert_eq!(always.held_up_us, 64 * 500_000);
    }

    #[test]
    fn a_task_that_becomes_slow_is_behind_its_best_and_one_that_always_was_is_not() {
        let mut always = StragglerStats::default();
        let mut became = StragglerStats::default();
        for round in 0..128 {
            always.add_member_timing(&member_timing(1_000_000, 1_000_000, true));
            let late = if round < 64 { 10_000 } else { 1_000_000 };
            became.add_member_timing(&member_timing(late, 1_000_000, round >= 64));
            if round < 8 {
                assert_eq!(became.view().and_then(|view| view.lateness_best_us), None);
            }
        }
        let (always, became) = (always.view().expect("it took part"), became.view().expect("it took part"));
        assert_eq!((always.lateness_us, always.lateness_above_best_us()), (1_000_000, 0));
        assert_eq!(became.lateness_best_us, Some(10_000));
        assert!(
            became.lateness_above_best_us() > 900_000 && became.has_slowed() && !always.has_slowed(),
            "{became:?}"
        );
    }
}
