//! Holds the states of tasks as the service reports them, and says which incarnation of a task is connected.
//!
//! `coordination_client.rs` asks for the states. Begin at [`ReportedTaskState`].

use std::collections::BTreeMap;

use super::error::AgentError;
use crate::transfer::{Incarnation, TaskId};

/// The state of a task, as the service reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReportedTaskState {
    /// The task.
    pub task: u32,
    /// Whether it is connected.
    pub connected: bool,
    /// Its incarnation.
    pub incarnation: u64,
    /// Its error; empty if it has none.
    pub error: String,
}

/// Returns the connected tasks with their incarnations.
pub(super) fn connected_incarnations(states: &[ReportedTaskState]) -> BTreeMap<TaskId, Incarnation> {
    states.iter().filter_map(|state| Some((TaskId(state.task), connected_incarnation(state)?))).collect()
}

fn connected_incarnation(state: &ReportedTaskState) -> Option<Incarnation> {
    state.connected.then(|| Incarnation::new(state.incarnation)).flatten()
}

/// Returns why `incarnation` is not the connected one of the task with this state, if it is not.
pub(super) fn check_current_incarnation(
    state: &ReportedTaskState,
    incarnation: Incarnation,
) -> Result<(), AgentError> {
    let why = match (connected_incarnation(state), state.error.is_empty()) {
        (Some(current), _) if current == incarnation => return Ok(()),
        (Some(other), _) => format!("incarnation {other} counts now"),
        (None, true) => "the service does not count it as connected".to_owned(),
        (None, false) => state.error.clone(),
    };
    Err(AgentError::LifeEnded { task: state.task, why })
}

/// Returns an error unless the states show `incarnation` as the connected one of `task`.
pub(super) fn check_connected(
    states: &[ReportedTaskState],
    task: u32,
    incarnation: Incarnation,
) -> Result<(), AgentError> {
    match states.iter().find(|state| state.task == task) {
        Some(state) => check_current_incarnation(state, incarnation),
        None => {
            let text = format!(
                "the job has {} task(s), numbered from 0, and none with the number {task}",
                states.len()
            );
            Err(AgentError::Settings(text))
        }
    }
}
