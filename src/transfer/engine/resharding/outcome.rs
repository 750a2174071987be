//! The inputs of a resharding, and its outcome.
//!
//! Begin at [`ShardBuffers`] and [`ReshardError`].

use std::collections::BTreeMap;
use std::time::Duration;

use crate::base::error::{MemoryError, TransferError};
use crate::base::identity::{DeviceId, Member, TaskId};
use crate::memory::Buffer;

/// The shards of this task's devices, before and after.
#[derive(Debug, Clone, Default)]
pub struct ShardBuffers {
    /// The array as it is.
    pub source: BTreeMap<DeviceId, Buffer>,
    /// The array as it shall be.
    pub destination: BTreeMap<DeviceId, Buffer>,
}

/// What a task did for a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Moved {
    /// Bytes sent to other tasks.
    pub sent: u64,
    /// Bytes received of other tasks.
    pub received: u64,
    /// Bytes copied within the task.
    pub copied: u64,
    /// How long it took.
    pub elapsed: Duration,
}

/// Why a plan was not carried out. But for [`Unproven`](Self::Unproven), no byte lands in the shards any more.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReshardError {
    /// A shard is missing, or has another size than the plan says.
    #[error("device {device}: its {role} shard has {found} bytes here; the plan says {wanted}")]
    Shard {
        /// Of which device.
        device: DeviceId,
        /// Before or after.
        role: &'static str,
        /// What the plan says.
        wanted: u64,
        /// What was given.
        found: u64,
    },
    /// Memory is short, or in use.
    #[error("{0}")]
    Memory(#[from] MemoryError),
    /// A transfer failed. All others of the plan were given up. Where a task carries out another plan, it is the first
    /// step with that task.
    #[error("step {step} of the plan: {error}")]
    Transfer {
        /// Which step.
        step: u32,
        /// Why.
        error: TransferError,
    },
    /// It was not done in its time.
    #[error(
        "the plan was not carried out within {limit:?}: {open} of this task's {steps} steps with others were not done, those with {}; see whether they live and carry out the same plan",
        tasks(with)
    )]
    Timeout {
        /// Its time.
        limit: Duration,
        /// How many steps with other tasks were not done.
        open: usize,
        /// How many there are.
        steps: usize,
        /// The tasks that these steps are with.
        with: Vec<TaskId>,
    },
    /// Besides, transfers that were given up have not come to rest, although the connections with these tasks were ended.
    #[error(
        "{error}; {} may still be writing to the shards: use none of them for anything else as long as writing to it is refused because it is in use",
        members(with)
    )]
    Unproven {
        /// What happened.
        error: Box<Self>,
        /// The peers that were written to or read from.
        with: Vec<Member>,
    },
}

fn tasks(all: &[TaskId]) -> String {
    let named: Vec<_> = all.iter().map(|task| format!("task {task}")).collect();
    named.join(", ")
}

fn members(all: &[Member]) -> String {
    let named: Vec<_> = all.iter().map(|member| format!("transfers with {member}")).collect();
    named.join(", ")
}
