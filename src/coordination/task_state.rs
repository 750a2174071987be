//! Figures that several readers show (pages, REST, the command line, metrics): counts of tasks by state, the length
//! of a run, the label of a barrier. Each is computed here, once.
//!
//! It reads no view: the views take its results. Begin at [`TaskCounts`].

use std::time::Duration;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::ids::Timestamp;

/// Where a task stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[schema(as = TaskStanding)]
pub enum TaskPhase {
    /// Has never registered in this run.
    Missing,
    /// Has come and waits for the others.
    Registering,
    /// Takes part.
    Connected,
    /// Its connection broke and its grace has not run out.
    Suspect,
    /// Has left in good order.
    Disconnected,
    /// Has failed.
    Failed,
}

/// The state of a task for people: its standing, or that it is excluded. Every task has one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TaskState {
    /// It is excluded, wherever it stands.
    Excluded,
    /// It is not, and stands so.
    Phase(TaskPhase),
}

impl TaskState {
    /// Every one. What needs a person first comes first.
    pub const ALL: [Self; 7] = [
        Self::Phase(TaskPhase::Failed),
        Self::Phase(TaskPhase::Suspect),
        Self::Phase(TaskPhase::Missing),
        Self::Phase(TaskPhase::Registering),
        Self::Excluded,
        Self::Phase(TaskPhase::Disconnected),
        Self::Phase(TaskPhase::Connected),
    ];

    /// The state of a task that stands so.
    #[must_use]
    pub fn of(standing: TaskPhase, excluded: bool) -> Self {
        if excluded { Self::Excluded } else { Self::Phase(standing) }
    }

    /// Its name in JSON and in metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Excluded => "excluded",
            Self::Phase(TaskPhase::Missing) => "missing",
            Self::Phase(TaskPhase::Registering) => "registering",
            Self::Phase(TaskPhase::Connected) => "connected",
            Self::Phase(TaskPhase::Suspect) => "suspect",
            Self::Phase(TaskPhase::Disconnected) => "disconnected",
            Self::Phase(TaskPhase::Failed) => "failed",
        }
    }

    /// Its word for people.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Phase(TaskPhase::Disconnected) => "left",
            other => other.name(),
        }
    }
}

/// How many tasks of a run are in which state. Each task is counted once: one that is excluded as excluded alone,
/// whatever it stands at.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TaskCounts {
    /// Have never registered in this run.
    pub missing: usize,
    /// Have come and wait for the others.
    pub registering: usize,
    /// Take part.
    pub connected: usize,
    /// Take part, but their connection broke and their grace has not run out.
    pub suspect: usize,
    /// Have left in good order.
    pub disconnected: usize,
    /// Have failed.
    pub failed: usize,
    /// Are kept out by an exclusion.
    pub excluded: usize,
}

impl TaskCounts {
    /// Counts tasks.
    #[must_use]
    pub fn of(states: impl IntoIterator<Item = TaskState>) -> Self {
        let mut counts = Self::default();
        for state in states {
            *counts.at(state) += 1;
        }
        counts
    }

    fn at(&mut self, state: TaskState) -> &mut usize {
        match state {
            TaskState::Excluded => &mut self.excluded,
            TaskState::Phase(TaskPhase::Missing) => &mut self.missing,
            TaskState::Phase(TaskPhase::Registering) => &mut self.registering,
            TaskState::Phase(TaskPhase::Connected) => &mut self.connected,
            TaskState::Phase(TaskPhase::Suspect) => &mut self.suspect,
            TaskState::Phase(TaskPhase::Disconnected) => &mut self.disconnected,
            TaskState::Phase(TaskPhase::Failed) => &mut self.failed,
        }
    }

    /// How many are in a state.
    #[must_use]
    pub fn get(mut self, state: TaskState) -> usize {
        *self.at(state)
    }
}

/// From when to when a run is measured. It begins when every task that it waited for had registered, and ends with the run.
/// A run that never came so far begins when its registration opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunInterval {
    /// When it began.
    pub began: Timestamp,
    /// When it ended, if it has.
    pub ended: Option<Timestamp>,
}

impl RunInterval {
    /// The span of a run.
    #[must_use]
    pub fn new(opened_at: Timestamp, started_at: Option<Timestamp>, ended_at: Option<Timestamp>) -> Self {
        Self { began: started_at.unwrap_or(opened_at), ended: ended_at }
    }

    /// How long it lasted, or has lasted so far.
    #[must_use]
    pub fn length(self, now: Timestamp) -> Duration {
        self.ended.unwrap_or(now).since(self.began)
    }

    /// How long it lasted in microseconds, if it has ended.
    #[must_use]
    pub fn final_length_us(self) -> Option<u64> {
        self.ended.map(|ended| ended.0.saturating_sub(self.began.0))
    }
}

/// What a barrier is called: the service's own ones by what they are for, those of clients by their ids.
#[must_use]
pub fn barrier_label(id: &str) -> &str {
    if id == "[Init]Wait_for_all_tasks_to_register" {
        return "registration";
    }
    match id.split_once("::") {
        Some(("Shutdown", _)) => "shutdown",
        Some(("WaitForAllTasks", _)) => "device exchange",
        _ => id,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_task_is_counted_once_and_in_its_own_state() {
        let counts = TaskCounts::of(TaskState::ALL.into_iter().chain([TaskState::Excluded]));
        for state in TaskState::ALL {
            let expected = if state == TaskState::Excluded { 2 } else { 1 };
            assert_eq!(counts.get(state), expected, "{state:?}");
            let json = serde_json::to_value(counts).unwrap();
            assert_eq!(json[state.name()], expected, "{state:?}");
        }
        assert_eq!(TaskState::of(TaskPhase::Failed, true), TaskState::Excluded);
    }

    #[test]
    fn internal_barriers_have_labels() {
        assert_eq!(barrier_label("[Init]Wait_for_all_tasks_to_register"), "registration");
        assert_eq!(barrier_label("Shutdown::0123"), "shutdown");
        assert_eq!(barrier_label("train/step"), "train/step");
    }

    #[test]
    fn a_run_is_measured_from_when_it_was_complete() {
        let at = |seconds: u64| Timestamp(seconds * 1_000_000);
        let whole = RunInterval::new(at(10), Some(at(40)), Some(at(132)));
        assert_eq!((whole.length(at(500)).as_secs(), whole.final_length_us()), (92, Some(92_000_000)));
        let never = RunInterval::new(at(10), None, None);
        assert_eq!((never.length(at(15)).as_secs(), never.final_length_us()), (5, None));
    }
}
