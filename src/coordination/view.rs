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
    /// When this was seen.
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
    /// Its number within the job.
    pub id: ExclusionId,
    /// Whom it is about: a `task` or a `host`.
    #[serde(flatten)]
    pub target: ExclusionTarget,
    /// The tasks of the present run that are out by it; none once it is over.
    pub tasks: Vec<TaskId>,
    /// Whose decision it is.
    pub actor: Actor,
    /// Why.
    pub reason: Reason,
    /// Since when.
    pub since: Timestamp,
    /// Until when; `None`: until somebody lifts it.
    pub expires_at: Option<Timestamp>,
    /// How many registrations it has turned away.
    pub refused: u64,
    /// The last time that it did.
    pub last_refused_at: Option<Timestamp>,
    /// How it ended; `None` while it is in force.
    pub ended: Option<ExclusionEndRecord>,
}

/// Why a task takes no part.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TaskExclusion {
    /// The exclusion's number.
    pub exclusion: ExclusionId,
    /// Whose decision it is, as text.
    pub by: String,
    /// Why.
    pub reason: Reason,
    /// Until when; `None`: until somebody lifts it.
    pub expires_at: Option<Timestamp>,
}

/// Where a run stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum RunState {
    /// Waits for its tasks to register.
    Forming,
    /// Every task has registered.
    Running,
    /// Every task shut down.
    Completed,
    /// A task failed, and with it the run.
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
    /// The state that a run is in once it has ended so.
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
    /// Where it stands.
    pub state: RunState,
    /// When its registration opened.
    pub opened_at: Timestamp,
    /// When every task had registered.
    pub started_at: Option<Timestamp>,
    /// When it ended.
    pub ended_at: Option<Timestamp>,
    /// Why it ended, in words, once it has.
    #[serde(default)]
    pub end_reason: Option<String>,
    /// How many tasks are live: connected or suspect, and not excluded.
    pub live: usize,
    /// How many tasks are in which state.
    #[serde(default)]
    pub counts: TaskCounts,
    /// Its first error.
    pub first_cause: Option<FirstCause>,
    /// Every task.
    pub tasks: Vec<TaskView>,
    /// The barriers in progress, registration and shutdown among them.
    pub barriers: Vec<BarrierView>,
    /// The last barriers that ended, the latest first (setting `bounds.barriers-recent`).
    #[serde(default)]
    pub recent_barriers: Vec<BarrierRecord>,
    /// Live-set questions in progress.
    pub live_sets: Vec<LiveSetRequestView>,
    /// How many keys the store holds.
    pub keys: usize,
    /// How many bytes its keys and values have.
    pub store_bytes: usize,
    /// The state of a coordinated save, once one was asked for.
    pub preemption: Option<PreemptionView>,
    /// The devices that the tasks have published.
    pub devices: Vec<Device>,
}

impl RunView {
    /// Whether a task has been as it is only since the first error of another: if it is in trouble, that is why.
    #[must_use]
    pub fn is_consequence(&self, task: &TaskView) -> bool {
        let cause = self.first_cause.as_ref();
        cause.is_some_and(|cause| cause.task != Some(task.task) && task.since >= cause.at)
    }
}

/// One life of a task.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = LifeView)]
pub struct IncarnationView {
    /// Its incarnation, in hexadecimal.
    pub incarnation: String,
    /// The address that it registered from.
    #[schema(value_type = Option<String>)]
    pub peer: Option<SocketAddr>,
    /// When it registered.
    pub registered_at: Timestamp,
    /// Why it is over; `None` for the present one.
    pub ended: Option<String>,
}

/// One task.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct TaskView {
    /// Its number.
    pub task: TaskId,
    /// Where it stands.
    pub standing: TaskPhase,
    /// Since when.
    pub since: Timestamp,
    /// Its lives, the present or last one first.
    pub lives: Vec<IncarnationView>,
    /// Its last sign of life.
    pub last_heartbeat: Option<Timestamp>,
    /// Since when it takes part, if it does: suspicion does not change it.
    #[serde(default)]
    pub live_since: Option<Timestamp>,
    /// How far apart its heartbeats come, from the second one on.
    #[serde(default)]
    pub pulse: Option<HeartbeatStatsView>,
    /// Its gaps between heartbeats over time, the oldest first: one a heartbeat at first, later the longest of each step
    /// of time, which grows up to 41 s. At most 64, which tell of the last half hour at least. Only where one task is
    /// asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub recent_gaps: Vec<HeartbeatGap>,
    /// How late it comes to barriers, once it has come to one.
    #[serde(default)]
    pub straggling: Option<StragglerView>,
    /// It may fail and come back.
    pub recoverable: bool,
    /// It came back in this run and has not completed a barrier with all members yet.
    pub unsynced: bool,
    /// The exclusion that keeps it out.
    #[serde(default)]
    pub excluded: Option<TaskExclusion>,
    /// What it waits at: barrier ids, or a live-set question.
    pub waits_at: Vec<String>,
    /// The keys that it waits for, that nobody has written: 4 at most. Not the notice of a preemption, for which every JAX
    /// program waits.
    #[serde(default)]
    pub waits_for: Vec<KeyWait>,
    /// Its error, as clients are told.
    pub error: Option<String>,
    /// The same in few words.
    #[serde(default)]
    pub why: Option<String>,
}

/// A barrier in progress.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BarrierView {
    /// Its id.
    pub id: String,
    /// Which use of it.
    pub counter: i64,
    /// Whose barrier it is.
    pub kind: BarrierKind,
    /// How many members it has.
    pub members: usize,
    /// How many have arrived.
    pub arrived: usize,
    /// Who has not and is waited for.
    pub missing: Vec<TaskId>,
    /// Who came first.
    pub first: TaskId,
    /// When the first came.
    pub since: Timestamp,
    /// When it fails.
    pub deadline: Timestamp,
    /// The latest arrivals, in the order of their coming: 256 at most.
    #[serde(default)]
    pub arrivals: Vec<BarrierArrival>,
}

/// A live-set question in progress.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = LiveSetView)]
pub struct LiveSetRequestView {
    /// How many tasks count: those that have asked, and the live ones of its set that have not.
    pub members: usize,
    /// How many of them have asked.
    pub arrived: usize,
    /// Live members that have not.
    pub missing: Vec<TaskId>,
    /// Who asked first.
    pub first: TaskId,
    /// When the first asked.
    pub since: Timestamp,
    /// Who asked last, and when.
    pub last: BarrierArrival,
}

/// A key that a task waits for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct KeyWait {
    /// The key, as text; long ones are cut.
    pub key: String,
    /// Since when.
    pub since: Timestamp,
}

/// A coordinated save.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PreemptionView {
    /// What the notice says: the time of death, as text.
    pub notice: String,
    /// When it came.
    pub since: Timestamp,
    /// Who asked for it, if it was an operator.
    #[serde(default)]
    pub requested: Option<DrainRequest>,
    /// The step that each task was at when it learned of it.
    pub acknowledged: Vec<(TaskId, i64)>,
    /// How many tasks have reached the barrier at which they agree on the step, if any has.
    #[serde(default)]
    pub arrived: usize,
    /// The tasks that the agreement waits for: live ones that have not acknowledged, and members of that barrier that have
    /// not reached it. A task that restarted after it had acknowledged is among them.
    #[serde(default)]
    pub awaited: Vec<TaskId>,
    /// The tasks have not agreed on a step and will not: that barrier failed, or the run is over.
    #[serde(default)]
    pub failed: bool,
    /// The step at which all will save, once all have reached that barrier.
    pub agreed_step: Option<i64>,
}

/// An ended run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RunSummary {
    /// Its number within the job.
    pub number: RunNumber,
    /// Its service incarnation, in hexadecimal.
    pub incarnation: String,
    /// How it ended.
    pub outcome: RunOutcome,
    /// When its registration opened.
    pub opened_at: Timestamp,
    /// When every task had registered.
    pub started_at: Option<Timestamp>,
    /// When it ended.
    pub ended_at: Timestamp,
    /// Its length in microseconds: from `started_at`, or from `opened_at` if it never started, to its end.
    #[serde(default)]
    pub length_us: u64,
    /// Why it ended, in words.
    #[serde(default)]
    pub end_reason: String,
    /// Its first error.
    pub first_cause: Option<FirstCause>,
    /// The devices that its tasks had published.
    pub devices: Vec<Device>,
}

impl RunSummary {
    /// The run in short.
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

/// A job in short.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct JobSummary {
    /// Its name.
    pub name: JobName,
    /// How many tasks its present run has.
    pub tasks: usize,
    /// Its tasks may fail and come back.
    pub recoverable: bool,
    /// Its present run.
    pub run: RunNumber,
    /// Where that stands.
    pub state: RunState,
    /// How many tasks are live: connected or suspect, and not excluded.
    pub live: usize,
    /// How many exclusions are in force.
    #[serde(default)]
    pub exclusions: usize,
    /// The first error of the present run.
    pub first_cause: Option<FirstCause>,
}

/// One run in short, the present one or an ended one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = RunLine)]
pub struct RunListItem {
    /// Its number within the job.
    pub number: RunNumber,
    /// Its service incarnation, in hexadecimal.
    pub incarnation: String,
    /// Where it stands, or how it ended.
    pub state: RunState,
    /// When its registration opened.
    pub opened_at: Timestamp,
    /// When every task that it waited for had registered.
    pub started_at: Option<Timestamp>,
    /// When it ended.
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
    /// Which.
    pub task: TaskId,
    /// Its incarnation, in hexadecimal.
    pub incarnation: String,
    /// Where it registered from.
    #[schema(value_type = Option<String>)]
    pub peer: Option<SocketAddr>,
}

/// The live set, and the questions about it that are in progress.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = LiveView)]
pub struct LiveTasksView {
    /// In which run.
    pub run: RunNumber,
    /// Grows with every change of any task's state; what watchers wait for.
    pub version: i64,
    /// Who is alive: connected, and not excluded.
    pub tasks: Vec<LiveTask>,
    /// The questions in progress.
    pub questions: Vec<LiveSetRequestView>,
}

/// A key of the store, without its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyEntry {
    /// The key, as it is stored; a directory, with a slash at its end.
    pub key: Bytes,
    /// Its value's length in bytes; `None` for a directory.
    pub value_bytes: Option<usize>,
    /// When the value was written last.
    pub written_at: Option<Timestamp>,
    /// Which task wrote it, where that is known.
    pub written_by: Option<TaskId>,
    /// How many keys lie below the directory.
    pub keys_below: usize,
    /// How many bytes the values of those have.
    pub bytes_below: usize,
}

/// A value of the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredValue {
    /// The key, as it is stored.
    pub key: Bytes,
    /// The value.
    pub value: Bytes,
    /// When it was written last.
    pub written_at: Timestamp,
    /// Which task wrote it, where that is known.
    pub written_by: Option<TaskId>,
}

impl TaskView {
    /// Its state for people.
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
    /// From when to when it is measured.
    #[must_use]
    pub fn span(&self) -> RunInterval {
        RunInterval::new(self.opened_at, self.started_at, self.ended_at)
    }
}

impl RunSummary {
    /// From when to when it is measured.
    #[must_use]
    pub fn span(&self) -> RunInterval {
        RunInterval::new(self.opened_at, self.started_at, Some(self.ended_at))
    }
}

impl RunListItem {
    /// From when to when it is measured.
    #[must_use]
    pub fn span(&self) -> RunInterval {
        RunInterval::new(self.opened_at, self.started_at, self.ended_at)
    }
}
