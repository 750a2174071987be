//! Lists the steps in which this task takes part, with the memory that they need, and claims the shards for their
//! plans.
//!
//! `executor.rs` launches the steps. Begin at [`local_steps`].

use std::collections::HashSet;

use muster_gpu::Gpu;

use super::inputs::{ReshardArray, ShardBuffers};
use super::outcome::ReshardError;
use crate::base::buffer_definition::{BufferDefinitionEvent, BufferDefinitionPromise};
use crate::base::key::TransferKey;
use crate::base::membership::{DeviceId, TaskId};
use crate::io::device_runs::DeviceSource;
use crate::memory::{AccessKind, Arena, BufferClaim, Span};
use crate::plan::{BufferRole, RunCopies, Step, StepEnd, StepKeys, StridedRuns};

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

/// The bytes of one side of a step as one contiguous range: their own place in the shard, or staging memory.
pub struct PackedBytes {
    /// The range.
    pub span: Span,
    /// For staging memory: the copies by which the bytes are packed into it, or unpacked from it.
    pub runs: Option<RunCopies>,
}

/// A step, with the memory and events that it needs here.
pub struct LocalStep {
    /// The index of its array.
    pub array: usize,
    /// The step.
    pub step: Step,
    /// The key by which both sides know the step among those of all arrays.
    pub key: TransferKey,
    /// The role of this task in the step.
    pub role: StepRole,
    /// The contiguous memory from which its bytes are sent; none for a receive, and for a copy that is direct.
    pub sent: Option<PackedBytes>,
    /// The contiguous memory into which its bytes are received; none for a send, and for a copy that is direct.
    pub received: Option<PackedBytes>,
    /// The copies between two shards, for a direct copy.
    pub runs: Option<RunCopies>,
    /// The event of the arrival that the step passes on.
    pub arrival: Option<BufferDefinitionEvent>,
    /// Complete when its bytes have arrived, for the steps that pass them on.
    pub definers: Vec<BufferDefinitionPromise>,
    /// The copies that follow its arrival, by their index among the tasks.
    pub copies: Vec<usize>,
    /// Whether the step is done.
    pub done: bool,
}

/// Returns the steps of this task, array by array, with their memory and their dependencies.
pub fn local_steps(
    arrays: &[ReshardArray<'_>],
    staging: &[&Arena],
    here: TaskId,
) -> Result<Vec<LocalStep>, ReshardError> {
    let keys = StepKeys::of(arrays.iter().map(|array| array.plan))?;
    let mut tasks: Vec<LocalStep> = Vec::new();
    for (number, ReshardArray { plan, shards }) in arrays.iter().enumerate() {
        let first = tasks.len();
        for step in plan.steps_of_task(here) {
            let role = match (step.source.task == here, step.destination.task == here) {
                (true, true) => StepRole::Copy,
                (true, false) => StepRole::Send(step.destination.task),
                _ => StepRole::Receive(step.source.task),
            };
            let before = step
                .after
                .and_then(|after| tasks[first..].binary_search_by_key(&after, |task| task.step.index).ok());
            let before = before.map(|place| first + place);
            let mut arrival = None;
            let pack = || packed_bytes(number, shards, &step.source, staging, RunCopies::copies_that_pack);
            let unpack =
                || packed_bytes(number, shards, &step.destination, staging, RunCopies::copies_that_unpack);
            let (sent, received) = match (role, before) {
                (StepRole::Copy, _) if is_direct(shards, &step) => (None, None),
                (StepRole::Copy, _) => (pack()?, unpack()?),
                (StepRole::Receive(_), _) => (None, unpack()?),
                (StepRole::Send(_), None) => (pack()?, None),
                (StepRole::Send(_), Some(before)) => {
                    // It is sent from where it arrived as one range: nothing changes those bytes in between.
                    let (definer, event) = BufferDefinitionEvent::new();
                    tasks[before].definers.push(definer);
                    arrival = Some(event);
                    let arrived = tasks[before].received.as_ref();
                    (arrived.map(|arrived| PackedBytes { span: arrived.span.clone(), runs: None }), None)
                }
            };
            let is_direct = role == StepRole::Copy && sent.is_none();
            let runs = is_direct.then(|| plan.step_copies(&step));
            if role == StepRole::Copy
                && let Some(before) = before
            {
                let at = tasks.len();
                tasks[before].copies.push(at);
            }
            let key = keys.key(number, step.index);
            let (definers, copies) = (Vec::new(), Vec::new());
            let (array, done) = (number, false);
            tasks.push(LocalStep {
                array,
                step,
                key,
                role,
                sent,
                received,
                runs,
                arrival,
                definers,
                copies,
                done,
            });
        }
    }
    Ok(tasks)
}

/// Checks the shards of all arrays, and claims them for their plans.
pub fn claim_shard_buffers(
    arrays: &[ReshardArray<'_>],
    here: TaskId,
) -> Result<Vec<BufferClaim>, ReshardError> {
    let mut claims = Vec::new();
    for (number, array) in arrays.iter().enumerate() {
        claim_shard_buffers_of_array(number, array, here, &mut claims)?;
    }
    Ok(claims)
}

fn claim_shard_buffers_of_array(
    number: usize,
    &ReshardArray { plan, shards }: &ReshardArray<'_>,
    here: TaskId,
    claims: &mut Vec<BufferClaim>,
) -> Result<(), ReshardError> {
    let mine: HashSet<DeviceId> = plan
        .placement()
        .devices
        .iter()
        .filter(|placed| placed.task == here)
        .map(|placed| placed.device)
        .collect();
    for (role, array, given, how) in [
        (BufferRole::Source, plan.source(), &shards.source, AccessKind::Read),
        (BufferRole::Destination, plan.destination(), &shards.destination, AccessKind::Write),
    ] {
        for &device in &array.sharding.mesh.devices {
            if !mine.contains(&device) {
                continue;
            }
            let wanted = plan.shard_bytes(role, device);
            let found = given.get(&device);
            if found.map(|buffer| buffer.len() as u64) != Some(wanted) {
                let found = found.map_or(0, |buffer| buffer.len() as u64);
                return Err(ReshardError::Shard { array: number, device, role: role.name(), wanted, found });
            }
            claims.extend(found.map(|buffer| buffer.claim(how)).transpose()?);
        }
    }
    Ok(())
}

/// Returns whether the bytes of a copy are copied from shard to shard: both are in host memory, or the GPU of the destination can
/// access the source.
fn is_direct(shards: &ShardBuffers, step: &Step) -> bool {
    let (Some(from), Some(to)) = (shards.shard_of(&step.source), shards.shard_of(&step.destination)) else {
        return true;
    };
    match to.gpu() {
        None => from.gpu().is_none(),
        Some(gpu) => DeviceSource::of_span(&from.full_span(), gpu).is_some(),
    }
}

/// Returns where the bytes of a side leave or arrive: their own place if they are one contiguous range, else staging memory of the
/// same kind, and the copies between.
fn packed_bytes(
    array: usize,
    shards: &ShardBuffers,
    side: &StepEnd,
    staging: &[&Arena],
    copies: fn(&StridedRuns) -> RunCopies,
) -> Result<Option<PackedBytes>, ReshardError> {
    let Some(shard) = shards.shard_of(side) else { return Ok(None) };
    let bytes = usize::try_from(side.runs.bytes()).unwrap_or(usize::MAX);
    if side.runs.count() <= 1 {
        let start = usize::try_from(side.runs.offset).unwrap_or(usize::MAX);
        let span = shard.range(start..start.saturating_add(bytes))?;
        return Ok(Some(PackedBytes { span, runs: None }));
    }
    let arena = staging.iter().find(|arena| arena.gpu() == shard.gpu());
    let gpu = shard.gpu().map(Gpu::ordinal);
    let arena = arena.ok_or(ReshardError::Staging { array, device: side.device, gpu })?;
    let span = arena.allocate(bytes)?.full_span();
    Ok(Some(PackedBytes { span, runs: Some(copies(&side.runs)) }))
}
