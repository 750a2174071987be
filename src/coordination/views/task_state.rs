//! The state of a task as pages, REST, the command line and metrics show it, the number of tasks in each state, and
//! the label of a barrier.
//!
//! Other views use this module; it uses no view. Begin at [`TaskCounts`].

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::coordination::barrier_record::REGISTRATION_BARRIER_ID;

/// The phase of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[schema(as = TaskStanding)]
pub enum TaskPhase {
    /// Has not registered in this run.
    Missing,
    /// Has registered and waits for the others.
    Registering,
    /// Is connected.
    Connected,
    /// Is connected, but its connection broke and its grace has not expired.
    Suspect,
    /// Has disconnected in good order.
    Disconnected,
    /// Has failed.
    Failed,
}

impl TaskPhase {
    /// Every phase, in the order in which a task goes through them.
    pub const ALL: [Self; 6] =
        [Self::Missing, Self::Registering, Self::Connected, Self::Suspect, Self::Disconnected, Self::Failed];

    /// Returns the name of the phase, as in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        TaskState::Phase(self).name()
    }
}

/// The state of a task for people: its phase, or that it is excluded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TaskState {
    /// It is excluded, whatever its phase.
    Excluded,
    /// It is not excluded and has this phase.
    Phase(TaskPhase),
}

impl TaskState {
    /// Every state, in the order of urgency for a person.
    pub const ALL: [Self; 7] = [
        Self::Phase(TaskPhase::Failed),
        Self::Phase(TaskPhase::Suspect),
        Self::Phase(TaskPhase::Missing),
        Self::Phase(TaskPhase::Registering),
        Self::Excluded,
        Self::Phase(TaskPhase::Disconnected),
        Self::Phase(TaskPhase::Connected),
    ];

    /// Returns the state of a task with this phase.
    #[must_use]
    pub fn from_phase(standing: TaskPhase, excluded: bool) -> Self {
        if excluded { Self::Excluded } else { Self::Phase(standing) }
    }

    /// Returns the name of the state, on pages, in JSON and in metrics.
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
}

/// The number of tasks of a run in each state. Each task is counted once: an excluded one as excluded only,
/// whatever its phase.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TaskCounts {
    /// Have not registered in this run.
    pub missing: usize,
    /// Have registered and wait for the others.
    pub registering: usize,
    /// Are connected.
    pub connected: usize,
    /// Are connected, but their connection broke and their grace has not expired.
    pub suspect: usize,
    /// Have disconnected in good order.
    pub disconnected: usize,
    /// Have failed.
    pub failed: usize,
    /// Are excluded.
    pub excluded: usize,
}

impl TaskCounts {
    /// Counts these tasks.
    #[must_use]
    pub fn count_states(states: impl IntoIterator<Item = TaskState>) -> Self {
        let mut counts = Self::default();
        for state in states {
            *counts.count_of_state_mut(state) += 1;
        }
        counts
    }

    fn count_of_state_mut(&mut self, state: TaskState) -> &mut usize {
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

    /// Returns the number of tasks in a state.
    #[must_use]
    pub fn get(mut self, state: TaskState) -> usize {
        *self.count_of_state_mut(state)
    }
}

/// Returns the label of a barrier: the purpose of the service's own barriers, the id of a client's.
#[must_use]
pub fn barrier_label(id: &str) -> &str {
    if id == REGISTRATION_BARRIER_ID {
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
        let counts = TaskCounts::count_states(TaskState::ALL.into_iter().chain([TaskState::Excluded]));
        for state in TaskState::ALL {
            let expected = if state == TaskState::Excluded { 2 } else { 1 };
            assert_eq!(counts.get(state), expected, "{state:?}");
            let json = serde_json::to_value(counts).unwrap();
            assert_eq!(json[state.name()], expected, "{state:?}");
        }
        assert_eq!(TaskState::from_phase(TaskPhase::Failed, true), TaskState::Excluded);
    }

    #[test]
    fn internal_barriers_have_labels() {
        assert_eq!(barrier_label("[Init]Wait_for_all_tasks_to_register"), "registration");
        assert_eq!(barrier_label("Shutdown::0123"), "shutdown");
        assert_eq!(barrier_label("train/step"), "train/step");
    }
}
