//! The periods of each task of a run: from when until when it was in which state.
//!
//! Pages draw them and REST returns them, so both come from [`RunStates::new`]. Begin there.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::state_history::{RunMark, RunStateHistory, StateChange};
use crate::coordination::{FailureClass, RunNumber, TaskId, TaskPhase, Timestamp};

/// A period for which a task was in one state. A restarted task begins a new one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StatePeriod {
    /// The state.
    pub state: TaskPhase,
    /// Its beginning.
    pub from: Timestamp,
    /// Its end; none for the last period, which lasts.
    pub until: Option<Timestamp>,
}

/// The kinds of marks of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum TaskMarkKind {
    /// It failed.
    Failed,
    /// It registered again, or another process replaced it while it waited for the others.
    Restarted,
    /// It was excluded.
    Excluded,
    /// Its exclusion ended.
    Readmitted,
}

impl TaskMarkKind {
    /// Every kind.
    pub const ALL: [Self; 4] = [Self::Failed, Self::Restarted, Self::Excluded, Self::Readmitted];

    /// Returns the name of the kind, as in JSON and for people.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Failed => "failed",
            Self::Restarted => "restarted",
            Self::Excluded => "excluded",
            Self::Readmitted => "readmitted",
        }
    }
}

/// A moment of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TaskMark {
    /// The time.
    pub at: Timestamp,
    /// The kind of the mark.
    pub kind: TaskMarkKind,
    /// The kind of failure, if it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub class: Option<FailureClass>,
}

/// One task over a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TaskPeriods {
    /// The task.
    pub task: TaskId,
    /// Its periods, the oldest first, without gaps between them.
    pub periods: Vec<StatePeriod>,
    /// Its marks, the oldest first.
    pub marks: Vec<TaskMark>,
}

impl TaskPeriods {
    fn new(task: TaskId, opened_at: Option<Timestamp>) -> Self {
        let missing = |from| StatePeriod { state: TaskPhase::Missing, from, until: None };
        Self { task, periods: opened_at.map(missing).into_iter().collect(), marks: Vec::new() }
    }

    /// Ends the last period and begins the next one.
    fn begin_period(&mut self, state: TaskPhase, at: Timestamp) {
        if let Some(last) = self.periods.last_mut() {
            last.until = Some(at);
        }
        self.periods.push(StatePeriod { state, from: at, until: None });
    }

    /// Returns the phase of the task once it has shut down: a task that was never connected is missing.
    fn phase_after_shutdown(&self) -> TaskPhase {
        let is_whole = self.periods.first().is_some_and(|first| first.state == TaskPhase::Missing);
        let was_connected = self.periods.iter().any(|period| period.state == TaskPhase::Connected);
        if is_whole && !was_connected { TaskPhase::Missing } else { TaskPhase::Disconnected }
    }

    /// Ends the wait for the others to register, if the task waits.
    fn end_registration(&mut self, at: Timestamp) {
        if self.periods.last().is_none_or(|last| last.state == TaskPhase::Registering) {
            self.begin_period(TaskPhase::Missing, at);
        }
    }

    fn add_mark(&mut self, at: Timestamp, kind: TaskMarkKind, class: Option<FailureClass>) {
        self.marks.push(TaskMark { at, kind, class });
    }

    fn apply_change(&mut self, at: Timestamp, change: StateChange) {
        match change {
            StateChange::Registering => self.begin_period(TaskPhase::Registering, at),
            StateChange::Withdrawn | StateChange::RegistrationFailed => self.end_registration(at),
            StateChange::Connected | StateChange::Returned => self.begin_period(TaskPhase::Connected, at),
            StateChange::Suspected => self.begin_period(TaskPhase::Suspect, at),
            StateChange::Disconnected => self.begin_period(self.phase_after_shutdown(), at),
            StateChange::Failed(class) => {
                self.begin_period(TaskPhase::Failed, at);
                self.add_mark(at, TaskMarkKind::Failed, Some(class));
            }
            // A restart of a connected task is seen when the task connects again.
            StateChange::Superseded => {
                if self.periods.last().is_some_and(|last| last.state == TaskPhase::Registering) {
                    self.add_mark(at, TaskMarkKind::Restarted, None);
                }
            }
            StateChange::ConnectedAgain => {
                self.begin_period(TaskPhase::Connected, at);
                self.add_mark(at, TaskMarkKind::Restarted, None);
            }
            StateChange::Excluded => self.add_mark(at, TaskMarkKind::Excluded, None),
            StateChange::Readmitted => self.add_mark(at, TaskMarkKind::Readmitted, None),
        }
    }

    /// Returns the first time at which the task was in trouble: it failed, was suspected, restarted or excluded.
    #[must_use]
    pub fn first_trouble_at(&self) -> Option<Timestamp> {
        let suspected = self.periods.iter().find(|period| period.state == TaskPhase::Suspect);
        let marked = self.marks.iter().find(|mark| mark.kind != TaskMarkKind::Readmitted);
        suspected.map(|period| period.from).into_iter().chain(marked.map(|mark| mark.at)).min()
    }
}

/// The states of all tasks over a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunStates {
    /// The run.
    pub run: RunNumber,
    /// The time at which the run opened.
    pub opened_at: Timestamp,
    /// The time up to which the states are known: the end of the run or the last change after it, or now.
    pub until: Timestamp,
    /// The run goes on, so later changes may follow.
    pub goes_on: bool,
    /// The time from which on the states are known, if the oldest changes are no longer kept.
    pub known_since: Option<Timestamp>,
    /// The moments of the run, the oldest first.
    pub marks: Vec<RunMark>,
    /// Every task, by number.
    pub tasks: Vec<TaskPeriods>,
}

impl RunStates {
    /// Computes the states of tasks, whose last phases are given with the time since which each lasts. `ended_at` is the end of the run, if it has ended.
    #[must_use]
    pub fn new(
        history: &RunStateHistory,
        run: RunNumber,
        last_phases: &[(TaskPhase, Timestamp)],
        (opened_at, ended_at): (Timestamp, Option<Timestamp>),
        now: Timestamp,
    ) -> Self {
        let first_known = if history.is_truncated { None } else { Some(opened_at) };
        let ids = (0..i32::try_from(last_phases.len()).unwrap_or(i32::MAX)).map(TaskId);
        let mut tasks: Vec<TaskPeriods> = ids.map(|task| TaskPeriods::new(task, first_known)).collect();
        let mut until = ended_at.unwrap_or(now);
        for record in history.changes() {
            until = until.max(record.at);
            // The registration fails for all tasks at once; its record names none.
            let changed = match (record.change, usize::try_from(record.task.0)) {
                (StateChange::RegistrationFailed, _) => &mut tasks[..],
                (_, Ok(task)) => tasks.get_mut(task..=task).unwrap_or_default(),
                (_, Err(_)) => &mut [],
            };
            changed.iter_mut().for_each(|task| task.apply_change(record.at, record.change));
        }
        let known_since = history.is_truncated.then(|| history.changes().next().map_or(until, |it| it.at));
        if let Some(known_since) = known_since {
            // A task without a kept change has been in its last phase since before.
            for (task, (state, since)) in tasks.iter_mut().zip(last_phases) {
                if task.periods.is_empty() {
                    let from = known_since.max(*since);
                    task.periods.push(StatePeriod { state: *state, from, until: None });
                }
            }
        }
        let goes_on = ended_at.is_none();
        Self { run, opened_at, until, goes_on, known_since, marks: history.marks.clone(), tasks }
    }
}
