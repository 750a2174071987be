//! The outcome of a resharding: [`ReshardStats`], or a [`ReshardError`].
//!
//! `executor.rs` produces the errors. Begin at [`ReshardError`].

use std::time::Duration;

use crate::base::error::{MemoryError, TransferError};
use crate::base::membership::{DeviceId, MemberId, TaskId};
use crate::plan::PlanError;

/// The statistics of one task's part of a resharding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReshardStats {
    /// The bytes sent to other tasks.
    pub sent: u64,
    /// The bytes received from other tasks.
    pub received: u64,
    /// The bytes copied within the task.
    pub copied: u64,
    /// The time that it took.
    pub elapsed: Duration,
}

/// The reason why plans were not executed. Except for [`Unproven`](Self::Unproven), no byte lands in the
/// shards any more.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReshardError {
    /// A shard is missing, or its size is not the plan's.
    #[error(
        "array {array}, device {device}: its {role} shard has {found} bytes here; the plan says {wanted}"
    )]
    Shard {
        /// The index of the array.
        array: usize,
        /// The device of the shard.
        device: DeviceId,
        /// The role of the shard: before or after the resharding.
        role: &'static str,
        /// The bytes that the plan says.
        wanted: u64,
        /// The bytes that were given; 0 if the shard is missing.
        found: u64,
    },
    /// The plans cannot be executed together.
    #[error("{0}")]
    Plan(#[from] PlanError),
    /// Memory is full, or in use.
    #[error("{0}")]
    Memory(#[from] MemoryError),
    /// A region of a shard is not contiguous, and there is no staging arena in the memory of the shard.
    #[error(
        "array {array}, device {device}: a region of its shard has to be packed, so give a staging arena {}",
        memory_of_gpu(*gpu)
    )]
    Staging {
        /// The index of the array.
        array: usize,
        /// The device of the shard.
        device: DeviceId,
        /// The number of the GPU in whose memory the shard is; none for host memory.
        gpu: Option<u32>,
    },
    /// GPUs of this task have ended no copy for longer than the stall limit.
    #[error(
        "{} has ended no copy of this task for {idle:?}: see whether it answers (`nvidia-smi`)",
        list_gpus(gpus)
    )]
    GpuStalled {
        /// The numbers of the GPUs.
        gpus: Vec<u32>,
        /// How long they have ended none.
        idle: Duration,
    },
    /// A transfer, or a copy by a GPU, failed, and all others were cancelled. If another task executes other plans, this is a step with
    /// that task, and the array is the first that differs, if both sides have one with its number.
    #[error("array {array}, step {step} of its plan: {error}")]
    Transfer {
        /// The index of the array.
        array: usize,
        /// The index of a step with the peer in the plan of that array or of another one.
        step: u32,
        /// The error of its transfer, or of its copy.
        error: TransferError,
    },
    /// The time limit passed.
    #[error("the plan was not carried out within {limit:?}: {}", describe_open(*open, *steps, with, gpus))]
    Timeout {
        /// The limit.
        limit: Duration,
        /// The number of this task's steps with other tasks that were not done.
        open: usize,
        /// The number of this task's steps with other tasks.
        steps: usize,
        /// The tasks at the other end of the steps that were not done.
        with: Vec<TaskId>,
        /// The numbers of this task's GPUs that had not ended their copies.
        gpus: Vec<u32>,
    },
    /// The plan failed with `error`, and what was cancelled is not proven to have ended: transfers with these members, although
    /// the connections with them were ended, and copies by these GPUs.
    #[error(
        "{error}; {} may still be writing to the shards: use none of them for anything else as long as writing to it is refused because it is in use",
        list_unproven(with, gpus)
    )]
    Unproven {
        /// The failure of the plan.
        error: Box<Self>,
        /// The peers of these transfers; this task itself, for transfers within it.
        with: Vec<MemberId>,
        /// The numbers of this task's GPUs that have not ended their copies.
        gpus: Vec<u32>,
    },
}

fn memory_of_gpu(gpu: Option<u32>) -> String {
    gpu.map_or_else(|| "in host memory".to_owned(), |gpu| format!("in the memory of GPU {gpu}"))
}

fn list_tasks(all: &[TaskId]) -> String {
    let named: Vec<_> = all.iter().map(|task| format!("task {task}")).collect();
    named.join(", ")
}

fn list_gpus(gpus: &[u32]) -> String {
    let named: Vec<_> = gpus.iter().map(|gpu| format!("GPU {gpu}")).collect();
    named.join(", ")
}

fn list_unproven(with: &[MemberId], gpus: &[u32]) -> String {
    let transfers = with.iter().map(|member| format!("transfers with {member}"));
    let copies = gpus.iter().map(|gpu| format!("copies by GPU {gpu}"));
    transfers.chain(copies).collect::<Vec<_>>().join(", ")
}

/// Describes what of a plan was not done: steps with other tasks, copies by GPUs, or both.
fn describe_open(open: usize, steps: usize, with: &[TaskId], gpus: &[u32]) -> String {
    let steps = (open > 0).then(|| {
        format!(
            "{open} of this task's {steps} steps with others were not done, those with {}; see whether they live and carry out the same plan",
            list_tasks(with)
        )
    });
    let copies =
        (!gpus.is_empty()).then(|| format!("{} had not ended the copies of this task", list_gpus(gpus)));
    let what: Vec<_> = steps.into_iter().chain(copies).collect();
    if what.is_empty() { "a copy within this task was not done".to_owned() } else { what.join("; ") }
}
