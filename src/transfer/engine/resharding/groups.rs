//! Divides the steps of a resharding into *step groups*: the steps of one group are launched together. Both tasks of
//! a launch compute the same step groups from the same plans.
//!
//! `executor.rs` launches the step groups. Begin at [`step_groups`].

use std::collections::BTreeMap;

use super::inputs::ReshardArray;
use super::local_step::{LocalStep, StepRole};
use crate::base::membership::TaskId;

/// A group of steps that pass bytes on takes no further step once it has this many bytes, so that the next task need
/// not wait for all of them.
const PASSED_ON_TOGETHER: u64 = 4 << 20;

/// Steps with one peer that are launched as one.
pub struct StepGroup {
    /// The peer.
    pub peer: TaskId,
    /// The steps, by their index among the tasks.
    pub steps: Vec<usize>,
}

/// Returns the groups in the order of their launches.
///
/// All steps with a peer that depend on no other step are one group. Steps that pass received bytes on are grouped
/// by their route, so that a group waits for exactly the tasks for which each of its steps would wait alone: a task
/// that is late delays no other step, and no two groups wait for each other.
pub fn step_groups(arrays: &[ReshardArray<'_>], tasks: &[LocalStep]) -> Vec<StepGroup> {
    let mut direct: BTreeMap<TaskId, Vec<usize>> = BTreeMap::new();
    let mut passed_on: Vec<StepGroup> = Vec::new();
    // The group of each route that takes further steps, and its bytes.
    let mut open: BTreeMap<Vec<TaskId>, (usize, u64)> = BTreeMap::new();
    for (at, task) in tasks.iter().enumerate() {
        let (StepRole::Send(peer) | StepRole::Receive(peer)) = task.role else { continue };
        if task.step.after.is_none() {
            direct.entry(peer).or_default().push(at);
            continue;
        }
        let route = arrays[task.array].plan.tasks_on_route(&task.step);
        let (group, bytes) = open.remove(&route).unwrap_or_else(|| {
            passed_on.push(StepGroup { peer, steps: Vec::new() });
            (passed_on.len() - 1, 0)
        });
        passed_on[group].steps.push(at);
        let bytes = bytes.saturating_add(task.step.bytes);
        if bytes < PASSED_ON_TOGETHER {
            open.insert(route, (group, bytes));
        }
    }
    let direct = direct.into_iter().map(|(peer, steps)| StepGroup { peer, steps });
    direct.chain(passed_on).collect()
}
