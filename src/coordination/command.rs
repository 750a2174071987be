//! The commands of operators, their outcomes, the reasons for a refusal, and the preview of an exclusion.
//!
//! The types are plain data. `operator_commands.rs` performs the commands. Begin at [`OperatorCommand`].

use std::time::Duration;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::actor::{Actor, CommandReason};
use super::event::RunOutcome;
use super::exclusion::ExclusionTarget;
use super::failure::Failure;
use super::ids::{ExclusionId, RunNumber, TaskId, Timestamp};
use super::settings::{JobSettings, SettingsChange};

/// A command of an operator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum OperatorCommand {
    /// Exclude a task, or all tasks of a host.
    Exclude {
        /// The task or the host.
        target: ExclusionTarget,
        /// The duration; `None`: until an operator ends the exclusion.
        expires_in: Option<Duration>,
        /// Perform the exclusion even if it ends the run.
        end_run: bool,
    },
    /// End an exclusion.
    Readmit {
        /// The exclusion.
        exclusion: ExclusionId,
    },
    /// Request a coordinated save: all tasks agree on a step and save.
    Drain {
        /// The time at which the machines will be gone, as the notice says; `None`: now. JAX delays the save
        /// until a quarter of an hour before.
        at: Option<Timestamp>,
    },
    /// Write a value to the store of the present run.
    PutKey {
        /// The key.
        key: Bytes,
        /// The value.
        value: Bytes,
        /// Replace an existing value; otherwise an existing value is an error.
        overwrite: bool,
    },
    /// Delete a key and everything below it from the store of the present run.
    DeleteKey {
        /// The key.
        key: Bytes,
    },
    /// Forget to which process task ids belong.
    ForgetTaskOwners {
        /// The task id; `None`: every one.
        task: Option<TaskId>,
    },
    /// Change settings of the job.
    Configure(Box<SettingsChange>),
    /// Delete the job.
    DeleteJob {
        /// Delete it even if tasks are connected.
        force: bool,
    },
}

/// The outcome of a performed command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CommandOutcome {
    /// The exclusion is in force under this number.
    Excluded(ExclusionId),
    /// The exclusion has ended.
    Readmitted,
    /// The preemption notice is in the store.
    DrainRequested,
    /// The value is in the store.
    KeyWritten,
    /// The key is deleted.
    KeyDeleted,
    /// The number of owners that are forgotten.
    TaskOwnersForgotten(usize),
    /// The settings of the job after the change.
    Configured(Box<JobSettings>),
    /// The job is deleted.
    JobDeleted,
}

/// The reason for which a command was refused. A refused command changes nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CommandRefusal {
    /// There is no such job.
    #[error("the job does not exist any more")]
    NoSuchJob,
    /// The job has no such task.
    #[error("there is no task {task}: this job has the tasks 0 to {last}")]
    NoSuchTask {
        /// The task that the command names.
        task: TaskId,
        /// The greatest task id of the job.
        last: u32,
    },
    /// An exclusion of the same target is in force.
    #[error("{target} is already excluded by exclusion {exclusion} of {by}: lift it first to change it")]
    AlreadyExcluded {
        /// The target.
        target: ExclusionTarget,
        /// The exclusion that is in force.
        exclusion: ExclusionId,
        /// The operator who made it.
        by: Box<Actor>,
    },
    /// No exclusion has this number.
    #[error("there is no exclusion {0} in this job")]
    NoSuchExclusion(ExclusionId),
    /// The exclusion has ended already.
    #[error("exclusion {0} has already ended: its target may register")]
    AlreadyOver(ExclusionId),
    /// The exclusion would end the run, and the command does not allow that.
    #[error("excluding {target} would end run {run}: {why}. Set end_run to confirm")]
    EndsRun {
        /// The target.
        target: ExclusionTarget,
        /// The run that would end.
        run: RunNumber,
        /// The reason why the run would end.
        why: &'static str,
    },
    /// The task id has no owner.
    #[error("task id {0} has no owner")]
    NoTaskOwner(TaskId),
    /// The bound on exclusions is reached.
    #[error("{0} exclusions are in force, the most allowed (setting bounds.exclusions): lift some first")]
    TooManyExclusions(usize),
    /// No run is running.
    #[error("there is nothing to drain: {0}")]
    NotRunning(String),
    /// A coordinated save is already in progress.
    #[error("this run has been draining since {0}; a run can be drained once")]
    DrainUnderWay(Timestamp),
    /// A setting cannot change while tasks take part in a run.
    #[error("{setting} cannot change while run {run} is in progress: {why}")]
    RunInProgress {
        /// The setting.
        setting: &'static str,
        /// The run.
        run: RunNumber,
        /// The reason.
        why: &'static str,
    },
    /// The job already holds more than the new bounds allow.
    #[error("the present run holds more than the new bounds allow: {0}")]
    BoundsTooLow(String),
    /// A setting has an invalid value.
    #[error("{0}")]
    BadSetting(&'static str),
    /// Tasks are connected.
    #[error("{0} task(s) of the job are connected: end them first, or force the deletion")]
    TasksConnected(usize),
    /// The store refuses the operation.
    #[error("{0}")]
    Store(Failure),
    /// The service cannot record changes now.
    #[error("{0}")]
    NotRecordable(String),
}

impl CommandRefusal {
    /// Returns the stable, machine-readable name of the refusal.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::NoSuchJob => "no-such-job",
            Self::NoSuchTask { .. } => "no-such-task",
            Self::AlreadyExcluded { .. } => "already-excluded",
            Self::NoSuchExclusion(_) => "no-such-exclusion",
            Self::AlreadyOver(_) => "already-over",
            Self::EndsRun { .. } => "ends-run",
            Self::NoTaskOwner(_) => "no-task-owner",
            Self::TooManyExclusions(_) => "too-many-exclusions",
            Self::NotRunning(_) => "not-running",
            Self::DrainUnderWay(_) => "drain-under-way",
            Self::RunInProgress { .. } => "run-in-progress",
            Self::BoundsTooLow(_) => "bounds-too-low",
            Self::BadSetting(_) => "bad-setting",
            Self::TasksConnected(_) => "tasks-connected",
            Self::Store(_) => "store-refused",
            Self::NotRecordable(_) => "not-recordable",
        }
    }
}

/// The effects that an exclusion would have now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExclusionPreview {
    /// The tasks of the present run that it would remove.
    pub tasks: Vec<TaskId>,
    /// The number of waiting calls of these tasks that would fail with the exclusion.
    pub calls_refused: usize,
    /// The number of waiting calls of other tasks that would be answered.
    pub calls_answered: usize,
    /// The barriers that would end, registration among them.
    pub barriers: Vec<BarrierPreview>,
    /// The number of live-set requests that would be answered.
    pub live_sets: usize,
    /// Whether the run would start, because it waits for no other task.
    pub starts_run: bool,
    /// The outcome of the run, if it would end.
    pub ends_run: Option<RunOutcome>,
    /// The live set that would remain.
    pub live: Vec<TaskId>,
}

/// The effect that an exclusion would have on a barrier.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BarrierPreview {
    /// The barrier's id.
    pub id: String,
    /// The counter of the instance.
    pub counter: i64,
    /// Whether it would pass; otherwise it would fail.
    pub passes: bool,
}

/// The operator and the reason of a coordinated save.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DrainRequest {
    /// The operator.
    pub actor: Actor,
    /// The reason.
    pub reason: CommandReason,
}
