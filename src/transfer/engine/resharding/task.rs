//! The steps of a plan in which one task takes part, with the memory that they need.
//!
//! It launches nothing. Begin at [`divide`].

use std::collections::HashSet;

use super::outcome::{ReshardError, ShardBuffers};
use crate::base::event::{Definer, Event};
use crate::base::identity::{DeviceId, TaskId};
use crate::memory::{Arena, Buffer, Claim, Span};
use crate::plan::{BufferRole, Plan, Step, StepEnd};

/// The role of a task in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepRole {
    /// Copies between two of its own shards.
    Copy,
    /// Sends to this task.
    Send(TaskId),
    /// Receives from this task.
    Receive(TaskId),
}

impl StepRole {
    /// Returns the task at the other end, or none for a copy.
    pub const fn peer(self) -> Option<TaskId> {
        match self {
            Self::Copy => None,
            Self::Send(peer) | Self::Receive(peer) => Some(peer),
        }
    }
}

/// A step, with the memory and events that it needs here.
pub struct StepTask {
    /// The step.
    pub step: Step,
    /// The role of this task in the step.
    pub role: StepRole,
    /// The contiguous memory from which its bytes are sent or into which they are received; none for a copy.
    pub span: Option<Span>,
    /// Whether the bytes are packed into, or unpacked from, staging memory.
    pub staged: bool,
    /// The event of the arrival that the step passes on.
    pub arrival: Option<Event>,
    /// Complete when its bytes have arrived, for the steps that pass them on.
    pub definers: Vec<Definer>,
    /// The copies that follow its arrival, by their index among the tasks.
    pub copies: Vec<usize>,
    /// Whether the step is done.
    pub done: bool,
}

/// Returns the steps of this task, with their memory and their dependencies.
pub fn divide(
    plan: &Plan,
    shards: &ShardBuffers,
    staging: &Arena,
    here: TaskId,
) -> Result<Vec<StepTask>, ReshardError> {
    let mut tasks: Vec<StepTask> = Vec::new();
    for step in plan.for_task(here) {
        let role = match (step.source.task == here, step.destination.task == here) {
            (true, true) => StepRole::Copy,
            (true, false) => StepRole::Send(step.destination.task),
            _ => StepRole::Receive(step.source.task),
        };
        let before =
            step.after.and_then(|after| tasks.binary_search_by_key(&after, |task| task.step.index).ok());
        let mut arrival = None;
        let (span, staged) = match (role, before) {
            (StepRole::Copy, _) => (None, false),
            (StepRole::Receive(_), _) => place(shards, &step.destination, staging)?,
            (StepRole::Send(_), None) => place(shards, &step.source, staging)?,
            (StepRole::Send(_), Some(before)) => {
                // It is sent from where it arrived as one range: nothing changes those bytes in between.
                let (definer, event) = Event::new();
                tasks[before].definers.push(definer);
                arrival = Some(event);
                (tasks[before].span.clone(), false)
            }
        };
        if role == StepRole::Copy
            && let Some(before) = before
        {
            let at = tasks.len();
            tasks[before].copies.push(at);
        }
        let (definers, copies) = (Vec::new(), Vec::new());
        tasks.push(StepTask { step, role, span, staged, arrival, definers, copies, done: false });
    }
    Ok(tasks)
}

/// Checks the shards, and claims them for the plan.
pub fn check(plan: &Plan, shards: &ShardBuffers, here: TaskId) -> Result<Vec<Claim>, ReshardError> {
    let mut claims = Vec::new();
    let mine: HashSet<DeviceId> = plan
        .placement()
        .devices
        .iter()
        .filter(|placed| placed.task == here)
        .map(|placed| placed.device)
        .collect();
    for (role, array, given) in [
        (BufferRole::Source, plan.source(), &shards.source),
        (BufferRole::Destination, plan.destination(), &shards.destination),
    ] {
        for &device in &array.sharding.mesh.devices {
            if !mine.contains(&device) {
                continue;
            }
            let wanted = plan.shard_bytes(role, device);
            let found = given.get(&device);
            if found.map(|buffer| buffer.len() as u64) != Some(wanted) {
                let found = found.map_or(0, |buffer| buffer.len() as u64);
                return Err(ReshardError::Shard { device, role: role.name(), wanted, found });
            }
            claims.extend(found.map(Buffer::claim));
        }
    }
    Ok(claims)
}

/// Returns where the bytes of a side leave or arrive: their own place if they are one stretch, else staging memory.
fn place(
    shards: &ShardBuffers,
    side: &StepEnd,
    staging: &Arena,
) -> Result<(Option<Span>, bool), ReshardError> {
    let buffer = match side.buffer {
        BufferRole::Source => shards.source.get(&side.device),
        BufferRole::Destination => shards.destination.get(&side.device),
    };
    let bytes = usize::try_from(side.runs.bytes()).unwrap_or(usize::MAX);
    if side.runs.count() <= 1 {
        let start = usize::try_from(side.runs.offset).unwrap_or(usize::MAX);
        let span = buffer.map(|buffer| buffer.range(start..start.saturating_add(bytes))).transpose()?;
        return Ok((span, false));
    }
    Ok((Some(staging.allocate(bytes)?.span()), true))
}
