//! An ended barrier instance that is not fully measured yet. This module computes its record, and the times of each
//! member relative to the others.
//!
//! `barrier_stats.rs` adds these times to the statistics of the members, a few members at a time. Begin at
//! `UnmeasuredBarrier`.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::barrier_record::{BarrierArrival, BarrierKind, BarrierOutcome, BarrierRecord};
use super::barrier_table::{BarrierInstance, BarrierKey};
use super::ids::{TaskId, Timestamp};
use super::straggler_stats::{MemberTiming, SCORE_ONE};

/// An ended instance to be measured: first as a whole, then its members, a few at a time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct UnmeasuredBarrier {
    kind: BarrierKind,
    id: Arc<str>,
    pub instance: Arc<BarrierInstance>,
    ended: Timestamp,
    passed: bool,
    /// The basis of the members' shares, once the whole is measured.
    pub spread: Option<ArrivalSpread>,
}

/// The distribution of the arrivals at an instance over time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ArrivalSpread {
    first: Timestamp,
    median: Timestamp,
    skew_us: u64,
    last: TaskId,
    held_up: u64,
    /// The position before which every member has its share.
    pub position: usize,
}

impl UnmeasuredBarrier {
    pub fn new(
        now: Timestamp,
        key: &BarrierKey,
        id: Arc<str>,
        instance: &Arc<BarrierInstance>,
        passed: bool,
    ) -> Self {
        Self { kind: key.kind(), id, instance: Arc::clone(instance), ended: now, passed, spread: None }
    }

    /// Returns the record of the instance, every arrival, and the basis of the shares, if there are any. Only members in
    /// step have shares, and these compare them with one another.
    pub fn measure_instance(
        &self,
        is_in_step: impl Fn(TaskId) -> bool,
    ) -> (BarrierRecord, Vec<BarrierArrival>, Option<ArrivalSpread>) {
        let instance = &self.instance;
        let arrivals: Vec<BarrierArrival> =
            instance.arrivals().map(|(task, arrival)| BarrierArrival { task, at: arrival.at }).collect();
        // Members that arrived at the same moment are in the order of their numbers.
        let mut order: Vec<(Timestamp, TaskId)> = arrivals.iter().map(|a| (a.at, a.task)).collect();
        let first = order.iter().min().copied();
        let latest = select_latest_arrivals(&mut order);
        let skew_us = match (first, latest.first()) {
            (Some((first, _)), Some(last)) => last.at.0.saturating_sub(first.0),
            _ => 0,
        };
        let counts = self.kind == BarrierKind::Client && self.passed;
        let spread = counts.then(|| {
            order.retain(|(_, task)| is_in_step(*task));
            ArrivalSpread::of_arrivals(&mut order)
        });
        let record = BarrierRecord {
            id: Arc::clone(&self.id),
            counter: instance.counter,
            kind: self.kind,
            began: instance.began,
            ended: self.ended,
            members: instance.members.len(),
            arrived: arrivals.len(),
            first: first.map(|(_, task)| task),
            last: latest.first().map(|last| last.task),
            skew_us,
            waited_us: arrivals.iter().map(|a| self.ended.0.saturating_sub(a.at.0)).sum(),
            outcome: if self.passed { BarrierOutcome::Passed } else { BarrierOutcome::Failed },
            without: instance.not_arrived_tasks().take(BarrierRecord::LISTED_MAX).collect(),
            latest,
        };
        (record, arrivals, spread.flatten())
    }
}

impl ArrivalSpread {
    /// Returns the distribution of these arrivals, whose order changes; `None` if there are fewer than two.
    fn of_arrivals(order: &mut [(Timestamp, TaskId)]) -> Option<Self> {
        let (first, _) = *order.iter().min()?;
        let end = order.len().checked_sub(2)?;
        let (_, &mut (last_but_one, _), latest) = order.select_nth_unstable(end);
        let (last, task) = *latest.first()?;
        let (_, &mut (median, _), _) = order.select_nth_unstable((order.len() - 1) / 2);
        Some(Self {
            first,
            median,
            skew_us: last.0 - first.0,
            last: task,
            held_up: last.0 - last_but_one.0,
            position: 0,
        })
    }

    /// Returns the times of a member in step.
    pub fn member_timing(&self, task: TaskId, at: Timestamp) -> MemberTiming {
        let behind = at.0.saturating_sub(self.median.0);
        MemberTiming {
            lateness: at.0.saturating_sub(self.first.0),
            share: behind
                .saturating_mul(SCORE_ONE)
                .checked_div(self.skew_us)
                .unwrap_or_default()
                .min(SCORE_ONE),
            held_up: (task == self.last).then_some(self.held_up),
        }
    }
}

/// Returns the latest arrivals, the last one first. It changes the order of the others.
fn select_latest_arrivals(order: &mut [(Timestamp, TaskId)]) -> Vec<BarrierArrival> {
    let from = order.len().saturating_sub(BarrierRecord::LISTED_MAX);
    let tail = if from > 0 { order.select_nth_unstable(from - 1).2 } else { order };
    tail.sort_unstable_by(|a, b| b.cmp(a));
    tail.iter().map(|(at, task)| BarrierArrival { task: *task, at: *at }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_stand_in_the_order_of_their_coming() {
        let mut order: Vec<(Timestamp, TaskId)> =
            (0..20).map(|n| (Timestamp(u64::try_from(n * 7 % 20).unwrap_or_default()), TaskId(n))).collect();
        let latest: Vec<u64> =
            select_latest_arrivals(&mut order).iter().map(|arrival| arrival.at.0).collect();
        assert_eq!(latest, [19, 18, 17, 16, 15, 14, 13, 12]);
        assert!(select_latest_arrivals(&mut []).is_empty());
    }
}
