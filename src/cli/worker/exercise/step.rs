//! The options of the exercise, the report of a step, and the errors that end the exercise.
//!
//! `transfers.rs` and `resharding.rs` run the transfers of a step. Begin at [`StepReport`].

use std::time::Duration;

use crate::agent::AgentError;
use crate::transfer::plan::PlanError;
use crate::transfer::{DeviceId, MemberId, MemoryError, ReshardError, ReshardStats, TransferError};

/// The time without progress after which a transfer fails.
pub(super) const STALL: Duration = Duration::from_secs(10);

/// The options of the exercise.
#[derive(Debug, Clone)]
pub struct ExerciseOptions {
    /// The size of the largest moved buffer, in bytes.
    pub bytes_max: usize,
    /// The timeout of a barrier, and of a transfer.
    pub limit: Duration,
}

impl Default for ExerciseOptions {
    fn default() -> Self {
        Self { bytes_max: 4 << 20, limit: Duration::from_secs(60) }
    }
}

/// The report of one step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepReport {
    /// Its number, the same for all members.
    pub number: u64,
    /// The tasks that took part.
    pub members: Vec<MemberId>,
    /// The number of received buffers that were correct, byte for byte.
    pub checked: usize,
    /// The number of sent bytes.
    pub sent: u64,
    /// The number of received bytes.
    pub received: u64,
    /// The duration of the transfers, from the first preparation to the last byte.
    pub elapsed: Duration,
    /// The result of the resharding; `None` if only one task took part.
    pub resharded: Option<ReshardResult>,
    /// The failures.
    pub failures: Vec<PeerFailure>,
}

impl StepReport {
    /// Returns the report of a step in which nothing has happened yet.
    pub fn new(number: u64, members: Vec<MemberId>) -> Self {
        let (checked, sent, received, elapsed) = (0, 0, 0, Duration::ZERO);
        Self { number, members, checked, sent, received, elapsed, resharded: None, failures: Vec::new() }
    }
}

/// A failure in a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerFailure {
    /// The members whose loss would explain it: the peer of the failed transfer, or all others if it failed
    /// because of another failure.
    pub with: Vec<MemberId>,
    /// The error.
    pub error: TransferError,
}

/// The result of the resharding in a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReshardResult {
    /// The shardings before and after, as JAX writes them.
    pub what: String,
    /// The number of shards that were correct, byte for byte.
    pub checked: usize,
    /// The amount of data that moved.
    pub moved: ReshardStats,
}

/// The reason for which the exercise cannot continue.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ExerciseError {
    /// This task's incarnation has ended, or the service failed.
    #[error(transparent)]
    Agent(#[from] AgentError),
    /// There is no memory for the buffers.
    #[error("no memory to exercise with")]
    Memory(#[from] MemoryError),
    /// A member has no usable engine.
    #[error("task {task} lives but its engine is not known: {why}")]
    NoEngine {
        /// The task.
        task: u32,
        /// The reason.
        why: String,
    },
    /// Received bytes differ from those sent.
    #[error("step {step}: of {len} bytes from {from}, byte {at} is wrong although the transfer succeeded")]
    Damaged {
        /// The step.
        step: u64,
        /// The sender.
        from: MemberId,
        /// The number of received bytes.
        len: usize,
        /// The position of the first wrong byte.
        at: usize,
    },
    /// An array differs from the one before its sharding changed.
    #[error(
        "step {step}: element ({row}, {column}) of the array is wrong on device {device} although all of it arrived"
    )]
    WrongShard {
        /// The step.
        step: u64,
        /// The device.
        device: DeviceId,
        /// The row of the wrong element.
        row: u64,
        /// Its column.
        column: u64,
    },
    /// The array cannot be divided among this number of devices.
    #[error("no plan for the array: {0}")]
    Plan(#[from] PlanError),
    /// The plan does not fit the shards.
    #[error(transparent)]
    Reshard(ReshardError),
}
