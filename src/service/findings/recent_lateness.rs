//! Counts at how many of the latest barriers each task came far behind the others.
//!
//! `chronic_straggler.rs` opens a finding about the tasks that were late at all of them. Until then the pages show the
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

/// Counts the late arrivals of each task at the latest `window` barriers of a job, of which `records` has the newest
/// first. Returns nothing if fewer barriers have passed.
#[must_use]
pub fn count_late_arrivals<'a>(
    records: impl Iterator<Item = &'a BarrierRecord>,
    window: usize,
) -> BTreeMap<TaskId, LateArrivals> {
    let mut late = BTreeMap::<TaskId, LateArrivals>::new();
    let mut counted = 0;
    for record in records.filter(|record| is_comparable(record)).take(window) {
        counted += 1;
        for arrival in &record.latest {
            let lateness_us = record.lateness_us(arrival);
            if is_far_behind(record, lateness_us) {
                let of_task = late.entry(arrival.task).or_default();
                of_task.count += 1;
                of_task.lateness_total_us = of_task.lateness_total_us.saturating_add(lateness_us);
            }
        }
    }
    if counted < window { BTreeMap::new() } else { late }
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
