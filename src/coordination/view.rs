//! The types of the read models that the REST API, the pages and the command line share: plain data, made on
//! request.
//!
//! `view_builder.rs` and `job_reader.rs` fill them. Begin at [`JobView`].

use std::fmt;
use std::net::SocketAddr;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::actor::{Actor, Reason};
use super::barrier_record::{BarrierArrival, BarrierKind, BarrierRecord};
use super::command::DrainRequest;
use super::devices::Device;
use super::event::{FirstCause, RunOutcome};
use super::exclusion::{ExclusionEndRecord, ExclusionTarget};
use super::heartbeat_history::HeartbeatGap;
use super::heartbeat_stats::HeartbeatStatsView;
use super::ids::{ExclusionId, JobName, RunNumber, TaskId, Timestamp};
use super::settings::JobSettings;
use super::straggler_stats::StragglerView;
use super::task_state::{RunInterval, TaskCounts, TaskPhase, TaskState};

/// A job and its present run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct JobView {
    /// The job's name.
    pub name: JobName,
    /// Its settings.
    pub settings: JobSettings,
    /// The time of the view.
    pub seen_at: Timestamp,
    /// The present run; one that has ended stays until the next opens.
    pub run: RunView,
    /// Earlier runs, newest first.
    pub history: Vec<RunSummary>,
    /// The exclusions in force, by number.
    #[serde(default)]
    pub exclusions: Vec<ExclusionView>,
}

/// One exclusion.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExclusionView {
    /// The number of the exclusion within the job.
    pub id: ExclusionId,
    /// The excluded `task` or `host`.
    #[serde(flatten)]
    pub target: ExclusionTarget,
    /// The tasks of the present run that it keeps out; none once it has ended.
    pub tasks: Vec<TaskId>,
    /// The operator who made it.
    pub actor: Actor,
    /// The operator's reason.
    pub reason: Reason,
    /// The time since which it is in force.
    pub since: Timestamp,
    /// The time at which it expires; `None`: when an operator lifts it.
    pub expires_at: Option<Timestamp>,
    /// The number of registrations that it has refused.
    pub refused: u64,
    /// The time of the last refusal.
    pub last_refused_at: Option<Timestamp>,
    /// The record of its end; `None` while it is in force.
    pub ended: Option<ExclusionEndRecord>,
}

/// The exclusion of a task, in short.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TaskExclusion {
    /// The exclusion's number.
    pub exclusion: ExclusionId,
    /// The operator who made it, as text.
    pub by: String,
    /// The operator's reason.
    pub reason: Reason,
    /// The time at which it expires; `None`: when an operator lifts it.
    pub expires_at: Option<Timestamp>,
}

/// The state of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum RunState {
    /// It waits for its tasks to register.
    Forming,
    /// Every task has registered.
    Running,
    /// Every task shut down.
    Completed,
    /// A task failed and ended the run.
    Failed,
    /// The last live task of a recoverable run was lost.
    Abandoned,
}

impl fmt::Display for RunState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Forming => "forming",
            Self::Running => "running",
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::Abandoned => "abandoned",
        })
    }
}

impl RunState {
    /// Returns the state of a run that ended with this outcome.
    #[must_use]
    pub fn ended(outcome: RunOutcome) -> Self {
        match outcome {
            RunOutcome::Completed => Self::Completed,
            RunOutcome::Failed => Self::Failed,
            RunOutcome::Abandoned => Self::Abandoned,
        }
    }
}

/// One run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RunView {
    /// Its number within the job.
    pub number: RunNumber,
    /// Its service incarnation, in hexadecimal.
    pub incarnation: String,
    /// The state of the run.
    pub state: RunState,
    /// The time at which its registration opened.
    pub opened_at: Timestamp,
    /// The time at which every task had registered.
    pub started_at: Option<Timestamp>,
    /// The time at which it ended.
    pub ended_at: Option<Timestamp>,
    /// The reason for its end, in words, once it has ended.
    #[serde(default)]
    pub end_reason: Option<String>,
    /// The number of live tasks: connected or suspect, and not excluded.
    pub live: usize,
    /// The number of tasks in each state.
    #[serde(default)]
    pub counts: TaskCounts,
    /// Its first error.
    pub first_cause: Option<FirstCause>,
    /// Every task.
    pub tasks: Vec<TaskView>,
    /// The barriers in progress, registration and shutdown among them.
    pub barriers: Vec<BarrierView>,
    /// The latest ended barriers, the newest first (setting `bounds.barriers-recent`).
    #[serde(default)]
    pub recent_barriers: Vec<BarrierRecord>,
    /// The live-set requests in progress.
    pub live_sets: Vec<LiveSetRequestView>,
    /// The number of keys in the store.
    pub keys: usize,
    /// The size of all keys and values in the store, in bytes.
    pub store_bytes: usize,
    /// The state of the coordinated save, once one was requested.
    pub preemption: Option<PreemptionView>,
    /// The devices that the tasks have published.
    pub devices: Vec<Device>,
}

impl RunView {
    /// Returns whether the task's present state began after the first error, and that error came from another
    /// task: its trouble is then a consequence.
    #[must_use]
    pub fn is_consequence(&self, task: &TaskView) -> bool {
        let cause = self.first_cause.as_ref();
        cause.is_some_and(|cause| cause.task != Some(task.task) && task.since >= cause.at)
    }
}

/// One incarnation of a task.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = LifeView)]
pub struct IncarnationView {
    /// Its incarnation, in hexadecimal.
    pub incarnation: String,
    /// The address from which it registered.
    #[schema(value_type = Option<String>)]
    pub peer: Option<SocketAddr>,
    /// The time at which it registered.
    pub registered_at: Timestamp,
    /// The reason for its end; `None` for the present one.
    pub ended: Option<String>,
}

/// One task.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct TaskView {
    /// Its number.
    pub task: TaskId,
    /// The phase of the task.
    pub standing: TaskPhase,
    /// The time since which it is in that phase.
    pub since: Timestamp,
    /// Its incarnations, the present or last one first.
    pub lives: Vec<IncarnationView>,
    /// Its last heartbeat.
    pub last_heartbeat: Option<Timestamp>,
    /// The time since which it is connected, if it is; suspicion does not change it.
    #[serde(default)]
    pub live_since: Option<Timestamp>,
    /// The statistics of its heartbeats, from the second one on.
    #[serde(default)]
    pub pulse: Option<HeartbeatStatsView>,
    /// Its gaps between heartbeats over time, the oldest first: at first one for each heartbeat, later the
    /// longest gap of each step of time, which grows up to 41 s. At most 64 gaps, which cover at least the
    /// last half hour. Only in the view of a single task.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub recent_gaps: Vec<HeartbeatGap>,
    /// Its statistics at barriers, once it has arrived at one.
    #[serde(default)]
    pub straggling: Option<StragglerView>,
    /// Whether it may fail and return.
    pub recoverable: bool,
    /// Whether it returned in this run and has not completed a barrier with all members since.
    pub unsynced: bool,
    /// The exclusion that keeps it out.
    #[serde(default)]
    pub excluded: Option<TaskExclusion>,
    /// The barriers at which it waits, by id, and the live-set request if it waits for one.
    pub waits_at: Vec<String>,
    /// The keys without a value for which it waits: 4 at most. Not the preemption notice, for which every JAX
    /// program waits.
    #[serde(default)]
    pub waits_for: Vec<KeyWait>,
    /// Its error, as clients receive it.
    pub error: Option<String>,
    /// A short form of the error.
    #[serde(default)]
    pub why: Option<String>,
}

/// A barrier in progress.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BarrierView {
    /// Its id.
    pub id: String,
    /// The counter of the instance.
    pub counter: i64,
    /// The kind of the barrier.
    pub kind: BarrierKind,
    /// The number of members.
    pub members: usize,
    /// The number of members that have arrived.
    pub arrived: usize,
    /// The members that it waits for.
    pub missing: Vec<TaskId>,
    /// The first member to arrive.
    pub first: TaskId,
    /// The time of the first arrival.
    pub since: Timestamp,
    /// The time at which it times out.
    pub deadline: Timestamp,
    /// The latest arrivals, in their order: 256 at most.
    #[serde(default)]
    pub arrivals: Vec<BarrierArrival>,
}

/// A live-set request in progress.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = LiveSetView)]
pub struct LiveSetRequestView {
    /// The number of tasks that count: those that have called, and the live ones of the set that have not.
    pub members: usize,
    /// The number of these tasks that have called.
    pub arrived: usize,
    /// The live members that have not called.
    pub missing: Vec<TaskId>,
    /// The first task to call.
    pub first: TaskId,
    /// The time of the first call.
    pub since: Timestamp,
    /// The latest call: its task and time.
    pub last: BarrierArrival,
}

/// A key that a task waits for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct KeyWait {
    /// The key, as text; long keys are cut.
    pub key: String,
    /// The time since which it waits.
    pub since: Timestamp,
}

/// A coordinated save.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PreemptionView {
    /// The content of the notice: the time at which the machines will be gone, as text.
    pub notice: String,
    /// The time at which the notice was written.
    pub since: Timestamp,
    /// The operator who requested it, if one did.
    #[serde(default)]
    pub requested: Option<DrainRequest>,
    /// The step at which each task learned of the notice.
    pub acknowledged: Vec<(TaskId, i64)>,
    /// The number of tasks that have arrived at the barrier of the agreement.
    #[serde(default)]
    pub arrived: usize,
    /// The tasks that the agreement waits for: live ones that have not acknowledged, and members of that
    /// barrier that have not arrived. A task that restarted after it had acknowledged is among them.
    #[serde(default)]
    pub awaited: Vec<TaskId>,
    /// Whether the tasks have not agreed on a step and will not: that barrier failed, or the run has ended.
    #[serde(default)]
    pub failed: bool,
    /// The step at which all tasks save, once all have arrived at that barrier.
    pub agreed_step: Option<i64>,
}

/// An ended run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RunSummary {
    /// Its number within the job.
    pub number: RunNumber,
    /// Its service incarnation, in hexadecimal.
    pub incarnation: String,
    /// Its outcome.
    pub outcome: RunOutcome,
    /// The time at which its registration opened.
    pub opened_at: Timestamp,
    /// The time at which every task had registered.
    pub started_at: Option<Timestamp>,
    /// The time at which it ended.
    pub ended_at: Timestamp,
    /// Its length in microseconds: from `started_at`, or from `opened_at` if it never started, to its end.
    #[serde(default)]
    pub length_us: u64,
    /// The reason for its end, in words.
    #[serde(default)]
    pub end_reason: String,
    /// Its first error.
    pub first_cause: Option<FirstCause>,
    /// The devices that its tasks had published.
    pub devices: Vec<Device>,
}

impl RunSummary {
    /// Returns the list item of the run.
    pub(super) fn line(&self) -> RunListItem {
        RunListItem {
            number: self.number,
            incarnation: self.incarnation.clone(),
            state: RunState::ended(self.outcome),
            opened_at: self.opened_at,
            started_at: self.started_at,
            ended_at: Some(self.ended_at),
            length_us: self.span().final_length_us(),
            first_cause: self.first_cause.clone(),
        }
    }
}

/// The summary of a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct JobSummary {
    /// Its name.
    pub name: JobName,
    /// The number of tasks of its present run.
    pub tasks: usize,
    /// Whether its tasks may fail and return.
    pub recoverable: bool,
    /// Its present run.
    pub run: RunNumber,
    /// The state of the present run.
    pub state: RunState,
    /// The number of live tasks: connected or suspect, and not excluded.
    pub live: usize,
    /// The number of exclusions in force.
    #[serde(default)]
    pub exclusions: usize,
    /// The first error of the present run.
    pub first_cause: Option<FirstCause>,
}

/// The list item of a run, the present one or an ended one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = RunLine)]
pub struct RunListItem {
    /// Its number within the job.
    pub number: RunNumber,
    /// Its service incarnation, in hexadecimal.
    pub incarnation: String,
    /// The state of the run.
    pub state: RunState,
    /// The time at which its registration opened.
    pub opened_at: Timestamp,
    /// The time at which every task that it waited for had registered.
    pub started_at: Option<Timestamp>,
    /// The time at which it ended.
    pub ended_at: Option<Timestamp>,
    /// Its length in microseconds, once it has ended: from `started_at`, or from `opened_at` if it never started, to its end.
    #[serde(default)]
    pub length_us: Option<u64>,
    /// Its first error.
    pub first_cause: Option<FirstCause>,
}

/// A task of the live set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LiveTask {
    /// The task.
    pub task: TaskId,
    /// Its incarnation, in hexadecimal.
    pub incarnation: String,
    /// The address from which it registered.
    #[schema(value_type = Option<String>)]
    pub peer: Option<SocketAddr>,
}

/// The live set, and the live-set requests in progress.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = LiveView)]
pub struct LiveTasksView {
    /// The run.
    pub run: RunNumber,
    /// The version of the task states, which grows with every change; watchers wait for it.
    pub version: i64,
    /// The live tasks: connected, and not excluded.
    pub tasks: Vec<LiveTask>,
    /// The live-set requests in progress.
    pub questions: Vec<LiveSetRequestView>,
}

/// A key of the store, without its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyEntry {
    /// The key, as it is stored; a directory ends with a slash.
    pub key: Bytes,
    /// The length of its value, in bytes; `None` for a directory.
    pub value_bytes: Option<usize>,
    /// The time of the last write.
    pub written_at: Option<Timestamp>,
    /// The task that wrote it last, where it is known.
    pub written_by: Option<TaskId>,
    /// The number of keys below the directory.
    pub keys_below: usize,
    /// The size of the values below the directory, in bytes.
    pub bytes_below: usize,
}

/// A value of the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredValue {
    /// The key, as it is stored.
    pub key: Bytes,
    /// The value.
    pub value: Bytes,
    /// The time of the last write.
    pub written_at: Timestamp,
    /// The task that wrote it last, where it is known.
    pub written_by: Option<TaskId>,
}

impl TaskView {
    /// Returns its state for people.
    #[must_use]
    pub fn state(&self) -> TaskState {
        TaskState::of(self.standing, self.excluded.is_some())
    }
}

impl TaskCounts {
    /// Counts the tasks of a view.
    #[must_use]
    pub fn count_views(tasks: &[TaskView]) -> Self {
        Self::of(tasks.iter().map(TaskView::state))
    }
}

impl RunView {
    /// Returns the interval over which the run is measured.
    #[must_use]
    pub fn span(&self) -> RunInterval {
        RunInterval::new(self.opened_at, self.started_at, self.ended_at)
    }
}

impl RunSummary {
    /// Returns the interval over which the run is measured.
    #[must_use]
    pub fn span(&self) -> RunInterval {
        RunInterval::new(self.opened_at, self.started_at, Some(self.ended_at))
    }
}

impl RunListItem {
    /// Returns the interval over which the run is measured.
    #[must_use]
    pub fn span(&self) -> RunInterval {
        RunInterval::new(self.opened_at, self.started_at, self.ended_at)
    }
}
