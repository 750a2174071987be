//! The commands of operators, their outcomes, the reasons for a refusal, and the preview of an exclusion.
//!
//! Plain data: `operator_commands.rs` dispatches commands to the files that perform them. Begin at [`OperatorCommand`].

use std::time::Duration;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::actor::{Actor, Reason};
use super::event::RunOutcome;
use super::exclusion::ExclusionTarget;
use super::failure::Failure;
use super::ids::{ExclusionId, RunNumber, TaskId, Timestamp};
use super::settings::{JobSettings, SettingsChange};

/// One act.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum OperatorCommand {
    /// A task, or all that comes from a host, shall take no part.
    Exclude {
        /// Whom.
        target: ExclusionTarget,
        /// How long; `None`: until somebody lifts it.
        expires_in: Option<Duration>,
        /// Do it even if that ends the run.
        end_run: bool,
    },
    /// An exclusion shall end.
    Readmit {
        /// Which.
        exclusion: ExclusionId,
    },
    /// All tasks shall agree on a step and save.
    Drain {
        /// When the machines will be gone, as the notice says; `None`: now. JAX waits with the save until a quarter of an
        /// hour before.
        at: Option<Timestamp>,
    },
    /// A value shall be in the store of the present run.
    PutKey {
        /// Where.
        key: Bytes,
        /// What.
        value: Bytes,
        /// Replace what is there; otherwise that is an error.
        overwrite: bool,
    },
    /// A key and everything below it shall be gone from the store of the present run.
    DeleteKey {
        /// Which.
        key: Bytes,
    },
    /// The job shall have other settings.
    Configure(Box<SettingsChange>),
    /// The job shall be no more.
    DeleteJob {
        /// Even if tasks are connected.
        force: bool,
    },
}

/// What has been done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CommandOutcome {
    /// There is an exclusion of this number now.
    Excluded(ExclusionId),
    /// The exclusion is over.
    Readmitted,
    /// The notice is in the store.
    DrainRequested,
    /// The value is in the store.
    KeyWritten,
    /// The key is gone.
    KeyDeleted,
    /// The job has these settings now.
    Configured(Box<JobSettings>),
    /// The job is gone.
    JobDeleted,
}

/// Why an act was refused. Nothing has changed then.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CommandRefusal {
    /// The job is gone.
    #[error("the job does not exist any more")]
    NoSuchJob,
    /// The job has no such task.
    #[error("there is no task {task}: this job has the tasks 0 to {last}")]
    NoSuchTask {
        /// Which was named.
        task: TaskId,
        /// The last that there is.
        last: u32,
    },
    /// Somebody excluded it before.
    #[error("{target} is already excluded by exclusion {exclusion} of {by}: lift it first to change it")]
    AlreadyExcluded {
        /// Whom.
        target: ExclusionTarget,
        /// The exclusion that is in force.
        exclusion: ExclusionId,
        /// Whose it is.
        by: Box<Actor>,
    },
    /// No exclusion has that number.
    #[error("there is no exclusion {0} in this job")]
    NoSuchExclusion(ExclusionId),
    /// The exclusion is over.
    #[error("exclusion {0} has already ended: its target may register")]
    AlreadyOver(ExclusionId),
    /// The exclusion would end the run, and it was not said that this is wanted.
    #[error("excluding {target} would end run {run}: {why}. Set end_run to confirm")]
    EndsRun {
        /// Whom.
        target: ExclusionTarget,
        /// The run that would end.
        run: RunNumber,
        /// Why.
        why: &'static str,
    },
    /// There are too many exclusions.
    #[error("{0} exclusions are in force, the most allowed (setting bounds.exclusions): lift some first")]
    TooManyExclusions(usize),
    /// No run is running.
    #[error("there is nothing to drain: {0}")]
    NotRunning(String),
    /// A coordinated save is under way.
    #[error("this run has been draining since {0}; a run can be drained once")]
    DrainUnderWay(Timestamp),
    /// A setting cannot change while tasks take part in a run.
    #[error("{setting} cannot change while run {run} is in progress: {why}")]
    RunInProgress {
        /// Which setting.
        setting: &'static str,
        /// Which run.
        run: RunNumber,
        /// Why.
        why: &'static str,
    },
    /// What the job holds now would be over the new bounds.
    #[error("the present run holds more than the new bounds allow: {0}")]
    BoundsTooLow(String),
    /// A setting has a value that makes no sense.
    #[error("{0}")]
    BadSetting(&'static str),
    /// Tasks are connected.
    #[error("{0} task(s) of the job are connected: end them first, or force the deletion")]
    TasksConnected(usize),
    /// The store refuses.
    #[error("{0}")]
    Store(Failure),
}

impl CommandRefusal {
    /// The kind of refusal in a word, which stays the same.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::NoSuchJob => "no-such-job",
            Self::NoSuchTask { .. } => "no-such-task",
            Self::AlreadyExcluded { .. } => "already-excluded",
            Self::NoSuchExclusion(_) => "no-such-exclusion",
            Self::AlreadyOver(_) => "already-over",
            Self::EndsRun { .. } => "ends-run",
            Self::TooManyExclusions(_) => "too-many-exclusions",
            Self::NotRunning(_) => "not-running",
            Self::DrainUnderWay(_) => "drain-under-way",
            Self::RunInProgress { .. } => "run-in-progress",
            Self::BoundsTooLow(_) => "bounds-too-low",
            Self::BadSetting(_) => "bad-setting",
            Self::TasksConnected(_) => "tasks-connected",
            Self::Store(_) => "store-refused",
        }
    }
}

/// What an exclusion would do, were it made now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExclusionPreview {
    /// The tasks of the present run that it would take out.
    pub tasks: Vec<TaskId>,
    /// How many waiting calls of theirs would be answered with the exclusion.
    pub calls_refused: usize,
    /// How many waiting calls of others would be answered.
    pub calls_answered: usize,
    /// The barriers that would end, the registration among them.
    pub barriers: Vec<BarrierPreview>,
    /// How many live-set questions would be answered.
    pub live_sets: usize,
    /// The run would start: it waits for nobody else.
    pub starts_run: bool,
    /// The run would end so.
    pub ends_run: Option<RunOutcome>,
    /// The live set that would be left.
    pub live: Vec<TaskId>,
}

/// What would become of a barrier.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BarrierPreview {
    /// Its id.
    pub id: String,
    /// Which use of it.
    pub counter: i64,
    /// It would pass; otherwise it would fail.
    pub passes: bool,
}

/// Who asked for a coordinated save, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DrainRequest {
    /// Who.
    pub actor: Actor,
    /// Why.
    pub reason: Reason,
}
