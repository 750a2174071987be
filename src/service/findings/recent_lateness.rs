//! Counts at how many of the latest barriers each task came far behind the others.
//!
//! `chronic_straggler.rs` opens a finding about the tasks that were late at nearly all of them. Until then the pages show the
//! counts. Both read the records of barriers, which have the eight latest arrivals: of a larger group of late tasks,
//! no task has its full count. Begin at [`count_late_arrivals`].

use std::collections::BTreeMap;

use crate::coordination::{BarrierKind, BarrierOutcome, BarrierRecord, StragglerView, TaskId};

/// The fewest arrivals of a barrier that counts: of two tasks one is always later.
const ARRIVALS_MIN: usize = 3;

/// The arrivals of one task at the latest barriers at which it was late.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct LateArrivals {
    /// The number of barriers.
    pub count: usize,
    /// The time from the first arrival to its own, added up over them, in microseconds.
    pub lateness_total_us: u64,
}

/// The late arrivals at the latest barriers of a job.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct RecentLateness {
    /// The number of these barriers.
    pub barriers: usize,
    /// Every task that was late at one of them or more.
    pub tasks: BTreeMap<TaskId, LateArrivals>,
}

impl RecentLateness {
    /// Returns the late arrivals of a task, if it was late at this many barriers or more.
    #[must_use]
    pub fn of_task(&self, task: TaskId, least: usize) -> Option<LateArrivals> {
        self.tasks.get(&task).copied().filter(|late| late.count >= least)
    }
}

/// Counts the late arrivals of each task at the latest barriers of a job, at most `window`. `records` has the newest first.
#[must_use]
pub fn count_late_arrivals<'a>(
    records: impl Iterator<Item = &'a BarrierRecord>,
    window: usize,
) -> RecentLateness {
    let mut recent = RecentLateness::default();
    for record in records.filter(|record| is_comparable(record)).take(window) {
        recent.barriers += 1;
        for arrival in &record.latest {
            let lateness_us = record.lateness_us(arrival);
            if is_far_behind(record, lateness_us) {
                let late = recent.tasks.entry(arrival.task).or_default();
                late.count += 1;
                late.lateness_total_us = late.lateness_total_us.saturating_add(lateness_us);
            }
        }
    }
    recent
}

fn is_comparable(record: &BarrierRecord) -> bool {
    record.kind == BarrierKind::Client
        && record.outcome == BarrierOutcome::Passed
        && record.arrived >= ARRIVALS_MIN
}

/// Returns whether an arrival costs time, is in the last quarter of the skew, and is at least half of the skew behind the
/// mean arrival. Equal tasks arrive in a new order every time, and no more than every sixth arrival of one of three is so
/// far behind.
fn is_far_behind(record: &BarrierRecord, lateness_us: u64) -> bool {
    let arrived = u64::try_from(record.arrived).unwrap_or(u64::MAX).max(1);
    let mean_us = record.skew_us.saturating_sub(record.waited_us / arrived);
    lateness_us >= StragglerView::SIGNIFICANT_LATENESS_US
        && lateness_us >= record.skew_us / 4 * 3
        && lateness_us.saturating_sub(mean_us) >= record.skew_us / 2
}
