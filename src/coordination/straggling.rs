//! Barriers as measurements: who came when, who kept the others waiting, and whether that is a habit.
//!
//! What is counted for a task, at every barrier that clients name and that passed with two arrivals or more:
//! - its *lateness*: its arrival less the first one;
//! - whether it was *last*, and how long it *held up* the others then: its arrival less the last but one;
//! - its *share*: how far it came behind the median arrival, as a part of the skew (the last arrival less the first).
//!   Equals, who come in a new order every time, have small shares; a task that all the others wait for has 1, and so
//!   has each of several tasks on one slow host.
//!
//! The *score* is a moving average of the shares: each moves it by a sixteenth (by one part in n while there are only n).
//! A single late arrival raises it by a sixteenth and is forgotten; a task that is always late has a score near 1. The
//! score knows no units: to matter, a straggler must also cost time, which lateness and hold-up tell.
//!
//! Beside its usual lateness stands its *best*, the least that this average has been since it is one of sixteen: whoever
//! was always late has the larger share of the work, whoever was not has become slow.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::barrier::{BarrierKey, Instance};
use super::context::Cx;
use super::ids::{JobId, RunNumber, TaskId, Timestamp};
use super::input::Effect;
use super::run::Run;

/// How many instances the averages are made of.
const MEMORY: u64 = 16;
/// Over how many instances it is remembered who was last.
const RECENT: u64 = 64;
/// One, as scores are kept.
const ONE: u64 = 1_000_000;
/// How many of the latest arrivals, and how many absent members, a record names.
const NAMED: usize = 8;

/// Whose barrier it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum BarrierKind {
    /// All tasks register together.
    Registration,
    /// All tasks shut down together.
    Shutdown,
    /// All tasks exchange their devices (generation A).
    Devices,
    /// One that clients named.
    Client,
    /// A live-set question: who is in it waits for the others as at a barrier.
    LiveSet,
}

impl BarrierKind {
    /// Every kind.
    pub const ALL: [Self; 5] =
        [Self::Registration, Self::Shutdown, Self::Devices, Self::Client, Self::LiveSet];

    /// Its name, as in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Registration => "registration",
            Self::Shutdown => "shutdown",
            Self::Devices => "devices",
            Self::Client => "client",
            Self::LiveSet => "live-set",
        }
    }
}

impl BarrierKey {
    pub fn kind(&self) -> BarrierKind {
        match self {
            Self::Registration => BarrierKind::Registration,
            Self::Shutdown => BarrierKind::Shutdown,
            Self::Devices => BarrierKind::Devices,
            Self::Named(_) => BarrierKind::Client,
        }
    }
}

/// A member that has come to a barrier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ArrivalView {
    /// Who.
    pub task: TaskId,
    /// When.
    pub at: Timestamp,
}

/// How an instance of a barrier ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum BarrierOutcome {
    /// It passed.
    Passed,
    /// It failed for all who waited at it.
    Failed,
}

impl BarrierOutcome {
    /// Its name, as in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Failed => "failed",
        }
    }
}

/// One use of a barrier that has ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BarrierRecord {
    /// Its id.
    #[schema(value_type = String)]
    pub id: Arc<str>,
    /// Which use of it.
    pub counter: i64,
    /// Whose barrier it is.
    pub kind: BarrierKind,
    /// When the first member came.
    pub began: Timestamp,
    /// When it passed or failed.
    pub ended: Timestamp,
    /// How many members it had.
    pub members: usize,
    /// How many of them had come.
    pub arrived: usize,
    /// The member that came first, of those that were there in the end.
    pub first: Option<TaskId>,
    /// The member that came last.
    pub last: Option<TaskId>,
    /// The last arrival less the first, in microseconds.
    pub skew_us: u64,
    /// How long those who had come waited, added up, in microseconds.
    pub waited_us: u64,
    /// How it ended.
    pub outcome: BarrierOutcome,
    /// Members that had not come: the first eight of them.
    pub without: Vec<TaskId>,
    /// The latest arrivals, the last one first: eight at most.
    pub latest: Vec<ArrivalView>,
}

impl BarrierRecord {
    /// How long after the first member this one of [`Self::latest`] came, in microseconds.
    #[must_use]
    pub fn lateness_us(&self, arrival: &ArrivalView) -> u64 {
        let last = self.latest.first().map_or(arrival.at, |last| last.at);
        self.skew_us.saturating_sub(last.0.saturating_sub(arrival.at.0))
    }
}

/// An instance of a barrier has ended: its record, and everybody who came.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BarrierEnding {
    /// In which job.
    pub job: JobId,
    /// In which of its runs.
    pub run: RunNumber,
    /// What is kept of it.
    pub record: BarrierRecord,
    /// Every arrival, by task.
    pub arrivals: Vec<ArrivalView>,
}

/// How one task came to the barriers of this run.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Straggling {
    taken_part: u64,
    last: u64,
    /// Whether it was last, of the recent instances; the newest in the lowest bit.
    recent: u64,
    lateness_total_us: u64,
    /// A moving average.
    lateness_us: u64,
    /// The least that the average has been, since it is one of [`MEMORY`].
    lateness_best_us: Option<u64>,
    /// A moving average of its shares.
    score: u64,
    held_up_us: u64,
}

/// One instance as one of its members sees it, in microseconds.
struct Part {
    lateness: u64,
    /// Of [`ONE`].
    share: u64,
    /// It was last, by so much.
    held_up: Option<u64>,
}

impl Straggling {
    fn take_part(&mut self, part: &Part) {
        self.taken_part += 1;
        self.last += u64::from(part.held_up.is_some());
        self.recent = self.recent << 1 | u64::from(part.held_up.is_some());
        self.lateness_total_us = self.lateness_total_us.saturating_add(part.lateness);
        let memory = self.taken_part.min(MEMORY);
        self.lateness_us = towards(self.lateness_us, part.lateness, memory);
        if memory == MEMORY {
            let best = self.lateness_best_us.map_or(self.lateness_us, |best| best.min(self.lateness_us));
            self.lateness_best_us = Some(best);
        }
        self.score = towards(self.score, part.share, memory);
        self.held_up_us = self.held_up_us.saturating_add(part.held_up.unwrap_or_default());
    }

    pub fn view(&self) -> Option<StragglingView> {
        if self.taken_part == 0 {
            return None;
        }
        let recent = self.taken_part.min(RECENT);
        // Six decimals fit into any float.
        #[expect(clippy::cast_precision_loss, reason = "a number up to a million")]
        let score = self.score as f64 / ONE as f64;
        Some(StragglingView {
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

    /// Checks that the counts go together.
    pub fn audit(&self) -> Result<(), String> {
        let recent = u64::from(self.recent.count_ones());
        let best_is_least = self.lateness_best_us.is_none_or(|best| best <= self.lateness_us);
        if self.last > self.taken_part || recent > self.last || self.score > ONE || !best_is_least {
            return Err(format!("was last {} ({recent} lately) of {} times", self.last, self.taken_part));
        }
        Ok(())
    }
}

/// Moves an average by one part in `memory` of the way to `value`.
fn towards(average: u64, value: u64, memory: u64) -> u64 {
    if value >= average { average + (value - average) / memory } else { average - (average - value) / memory }
}

/// How a task comes to the barriers that clients name, among those that passed with two arrivals or more.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct StragglingView {
    /// At how many it took part in this run.
    pub taken_part: u64,
    /// At how many it was the last to come.
    pub last: u64,
    /// How many are recent: 64 at most.
    pub recent: u64,
    /// At how many of the recent ones it was the last to come.
    pub recent_last: u64,
    /// How long after the first it usually comes, in microseconds: a moving average over about sixteen.
    pub lateness_us: u64,
    /// The least that `lateness_us` has been in this run; nothing before it took part in sixteen barriers.
    pub lateness_best_us: Option<u64>,
    /// How long after the first it came, all added up, in microseconds.
    pub lateness_total_us: u64,
    /// How long the others waited for it alone, when it was last, all added up, in microseconds.
    pub held_up_us: u64,
    /// From 0 to 1: a moving average, over about sixteen, of how far it came behind the median arrival as a part of the
    /// time between the first arrival and the last. Near 1: it is late every time. One late arrival adds a sixteenth.
    pub score: f64,
}

impl StragglingView {
    /// From which lateness on a straggler costs enough to matter, in microseconds.
    pub const MATTERS_US: u64 = 50_000;

    /// How much later than at its best it usually comes now, in microseconds.
    #[must_use]
    pub fn behind_best_us(&self) -> u64 {
        self.lateness_best_us.map_or(0, |best| self.lateness_us.saturating_sub(best))
    }

    /// Whether it was once quick enough and has become slow.
    #[must_use]
    pub fn has_slowed(&self) -> bool {
        self.behind_best_us() >= Self::MATTERS_US
    }

    /// The part of the recent barriers to which it came last.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "numbers up to 64")]
    pub fn recent_share_last(&self) -> f64 {
        self.recent_last as f64 / self.recent.max(1) as f64
    }
}

/// An instance that has ended and is to be measured: first as a whole, then for its members a few at a time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Measure {
    kind: BarrierKind,
    id: Arc<str>,
    instance: Arc<Instance>,
    ended: Timestamp,
    passed: bool,
    /// Once the whole is measured: what the shares of its members are made of.
    spread: Option<Spread>,
}

/// How the arrivals at an instance lie in time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Spread {
    first: Timestamp,
    median: Timestamp,
    skew_us: u64,
    last: TaskId,
    held_up: u64,
    /// Members before this position have their shares.
    position: usize,
}

impl Measure {
    pub fn new(cx: &Cx<'_>, key: &BarrierKey, id: Arc<str>, instance: &Arc<Instance>, passed: bool) -> Self {
        Self { kind: key.kind(), id, instance: Arc::clone(instance), ended: cx.now, passed, spread: None }
    }

    /// The record of the instance, everybody who came, and the spread that the shares are made of, if there are any.
    fn whole(&self) -> (BarrierRecord, Vec<ArrivalView>, Option<Spread>) {
        let instance = &self.instance;
        let arrivals: Vec<ArrivalView> =
            instance.arrivals().map(|(task, arrival)| ArrivalView { task, at: arrival.at }).collect();
        // Who came at the same moment is in the order of the numbers.
        let mut order: Vec<(Timestamp, TaskId)> = arrivals.iter().map(|a| (a.at, a.task)).collect();
        let first = order.iter().min().copied();
        let latest = take_latest(&mut order);
        let skew_us = match (first, latest.first()) {
            (Some((first, _)), Some(last)) => last.at.0.saturating_sub(first.0),
            _ => 0,
        };
        let counts = self.kind == BarrierKind::Client && self.passed && arrivals.len() > 1;
        let spread = latest.first().filter(|_| counts).map(|last| {
            let middle = (order.len() - 1) / 2;
            let (_, &mut (median, _), _) = order.select_nth_unstable(middle);
            Spread {
                first: Timestamp(last.at.0.saturating_sub(skew_us)),
                median,
                skew_us,
                last: last.task,
                held_up: last.at.0 - latest.get(1).map_or(last.at.0, |other| other.at.0),
                position: 0,
            }
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
            without: instance.absent_tasks().take(NAMED).collect(),
            latest,
        };
        (record, arrivals, spread)
    }
}

impl Spread {
    fn part(&self, task: TaskId, at: Timestamp) -> Part {
        let behind = at.0.saturating_sub(self.median.0);
        Part {
            lateness: at.0 - self.first.0,
            share: behind.saturating_mul(ONE).checked_div(self.skew_us).unwrap_or_default(),
            held_up: (task == self.last).then_some(self.held_up),
        }
    }
}

impl Run {
    /// Measures the first instance that is to be measured, or goes on with it: keeps its record, tells of it, and counts the
    /// shares of as many members as `budget` allows.
    pub(super) fn measure_next(&mut self, cx: &mut Cx<'_>, budget: &mut usize) {
        let Some(mut measure) = self.measures.pop_front() else { return };
        let spread = match measure.spread.take() {
            Some(spread) => Some(spread),
            None => {
                // To put a thousand arrivals in order costs as much as to answer some hundred calls.
                *budget = budget.saturating_sub(1 + measure.instance.arrived() / 16);
                let (record, arrivals, spread) = measure.whole();
                self.recent.push_back(record.clone());
                self.forget_records(cx.settings.bounds.barriers_recent);
                let (job, run) = (cx.job, cx.run);
                cx.effects.push(Effect::BarrierEnded(Box::new(BarrierEnding { job, run, record, arrivals })));
                spread
            }
        };
        let Some(mut spread) = spread else { return };
        let to = measure.instance.members.len().min(spread.position.saturating_add(*budget));
        *budget -= to - spread.position;
        for (task, arrival) in measure.instance.arrivals_from(spread.position, to) {
            let part = spread.part(task, arrival.at);
            self.own_mut(task).straggling.take_part(&part);
        }
        spread.position = to;
        if to < measure.instance.members.len() {
            measure.spread = Some(spread);
            self.measures.push_front(measure);
        }
    }

    /// Measures everything that is to be measured.
    pub(super) fn measure_all(&mut self, cx: &mut Cx<'_>) {
        while !self.measures.is_empty() {
            self.measure_next(cx, &mut { usize::MAX });
        }
    }

    /// Keeps so many records, the latest.
    pub(super) fn forget_records(&mut self, most: usize) {
        self.recent.drain(..self.recent.len().saturating_sub(most));
    }
}

/// The latest arrivals, the last one first. Changes the order of the others.
fn take_latest(order: &mut [(Timestamp, TaskId)]) -> Vec<ArrivalView> {
    let from = order.len().saturating_sub(NAMED);
    let tail = if from > 0 { order.select_nth_unstable(from - 1).2 } else { order };
    tail.sort_unstable_by(|a, b| b.cmp(a));
    tail.iter().map(|(at, task)| ArrivalView { task: *task, at: *at }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(late: u64, of: u64, last: bool) -> Part {
        Part { lateness: late, share: late * ONE / of, held_up: last.then_some(late / 2) }
    }

    #[test]
    fn one_late_arrival_is_forgotten_and_a_habit_is_not() {
        let mut once = Straggling::default();
        let mut always = Straggling::default();
        for round in 0..64 {
            once.take_part(&part(if round == 32 { 1_000_000 } else { 0 }, 1_000_000, round == 32));
            always.take_part(&part(1_000_000, 1_000_000, true));
        }
        let (once, always) = (once.view().expect("it took part"), always.view().expect("it took part"));
        assert!(once.score < 0.02 && once.recent_last == 1, "{once:?}");
        assert!(always.score > 0.99 && always.recent_last == 64, "{always:?}");
        assert_eq!(always.held_up_us, 64 * 500_000);
    }

    #[test]
    fn a_task_that_becomes_slow_is_behind_its_best_and_one_that_always_was_is_not() {
        let mut always = Straggling::default();
        let mut became = Straggling::default();
        for round in 0..128 {
            always.take_part(&part(1_000_000, 1_000_000, true));
            let late = if round < 64 { 10_000 } else { 1_000_000 };
            became.take_part(&part(late, 1_000_000, round >= 64));
            if round < 15 {
                assert_eq!(became.view().and_then(|view| view.lateness_best_us), None);
            }
        }
        let (always, became) = (always.view().expect("it took part"), became.view().expect("it took part"));
        assert_eq!((always.lateness_us, always.behind_best_us()), (1_000_000, 0));
        assert_eq!(became.lateness_best_us, Some(10_000));
        assert!(
            became.behind_best_us() > 900_000 && became.has_slowed() && !always.has_slowed(),
            "{became:?}"
        );
    }

    #[test]
    fn the_latest_stand_in_the_order_of_their_coming() {
        let mut order: Vec<(Timestamp, TaskId)> =
            (0..20).map(|n| (Timestamp(u64::try_from(n * 7 % 20).unwrap_or_default()), TaskId(n))).collect();
        let latest: Vec<u64> = take_latest(&mut order).iter().map(|arrival| arrival.at.0).collect();
        assert_eq!(latest, [19, 18, 17, 16, 15, 14, 13, 12]);
        assert!(take_latest(&mut []).is_empty());
    }
}
