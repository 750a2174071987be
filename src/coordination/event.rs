//! The events of a job: every change of state, with its time, run and reason.
//!
//! The engine numbers, keeps and publishes them. Begin at [`EventKind`].

use std::net::SocketAddr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::actor::Actor;
use super::exclusion::ExclusionTarget;
use super::ids::{ExclusionId, JobId, RunNumber, TaskId, TaskIncarnation, Timestamp};

/// One change of state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobEvent {
    /// When.
    pub at: Timestamp,
    /// In which job.
    pub job: JobId,
    /// In which of its runs.
    pub run: RunNumber,
    /// What changed.
    pub what: EventKind,
    /// Why, in a sentence.
    pub reason: String,
}

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum RunOutcome {
    /// Every task shut down.
    Completed,
    /// A task failed, and with it the run.
    Failed,
    /// The last live task of a recoverable run was lost.
    Abandoned,
}

impl RunOutcome {
    /// Its name, as in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::Abandoned => "abandoned",
        }
    }
}

/// The first error of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FirstCause {
    /// When it happened.
    pub at: Timestamp,
    /// The task that it came from, where one is known.
    pub task: Option<TaskId>,
    /// What happened, as clients are told.
    pub error: String,
    /// The same in few words.
    #[serde(default)]
    pub why: String,
}

/// The kinds of failure of a task.
#[derive(
    Debug, Default, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum FailureClass {
    /// No heartbeat came in time.
    HeartbeatTimeout,
    /// Its connection broke, and it was not heard again in time.
    ConnectionLost,
    /// Another life of it spoke up in a run that does not survive that.
    Restarted,
    /// It reported an error of its own.
    Reported,
    /// An operator or a rule excluded it.
    Excluded,
    /// The run failed, and with it every task.
    #[default]
    Consequence,
}

impl FailureClass {
    /// Every class.
    pub const ALL: [Self; 6] = [
        Self::HeartbeatTimeout,
        Self::ConnectionLost,
        Self::Restarted,
        Self::Reported,
        Self::Excluded,
        Self::Consequence,
    ];

    /// Its name, as in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::HeartbeatTimeout => "heartbeat-timeout",
            Self::ConnectionLost => "connection-lost",
            Self::Restarted => "restarted",
            Self::Reported => "reported",
            Self::Excluded => "excluded",
            Self::Consequence => "consequence",
        }
    }
}

/// The kinds of change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case", tag = "kind")]
#[schema(as = Change)]
pub enum EventKind {
    /// A job exists.
    JobDeclared {
        /// Who asked for it; `None` if the service was configured so.
        #[serde(default)]
        actor: Option<Actor>,
    },
    /// A run waits for its tasks to register.
    RunOpened,
    /// A task has come and waits for the others.
    TaskRegistering {
        /// Which.
        task: TaskId,
        /// Which life of it.
        incarnation: TaskIncarnation,
        /// From where.
        #[schema(value_type = Option<String>)]
        peer: Option<SocketAddr>,
    },
    /// A task takes part.
    TaskConnected {
        /// Which.
        task: TaskId,
        /// Which life of it.
        incarnation: TaskIncarnation,
        /// It has been in this run before.
        again: bool,
    },
    /// Two processes claim the same task; the newer one holds it.
    TaskSuperseded {
        /// Which.
        task: TaskId,
        /// The life that lost.
        old: TaskIncarnation,
        /// Where that one was.
        #[schema(value_type = Option<String>)]
        old_peer: Option<SocketAddr>,
        /// The life that holds it now.
        new: TaskIncarnation,
        /// Where that one is.
        #[schema(value_type = Option<String>)]
        new_peer: Option<SocketAddr>,
    },
    /// A task's connection broke; it may still come back.
    TaskSuspected {
        /// Which.
        task: TaskId,
    },
    /// A suspected task was heard again in time.
    TaskReturned {
        /// Which.
        task: TaskId,
    },
    /// A task left in good order.
    TaskDisconnected {
        /// Which.
        task: TaskId,
    },
    /// A task failed.
    TaskFailed {
        /// Which.
        task: TaskId,
        /// What kind of failure that is.
        #[serde(default)]
        class: FailureClass,
    },
    /// A call of an earlier life or run was turned away. Said once for each life and connection.
    Fenced {
        /// Which task, where that is known.
        task: Option<TaskId>,
    },
    /// The first arrival at a barrier.
    BarrierStarted {
        /// Its id.
        #[schema(value_type = String)]
        barrier: Arc<str>,
        /// Which use of it.
        counter: i64,
    },
    /// A barrier passed.
    BarrierPassed {
        /// Its id.
        #[schema(value_type = String)]
        barrier: Arc<str>,
        /// Which use of it.
        counter: i64,
        /// Members that it passed without, by the rules for restarted tasks.
        without: Vec<TaskId>,
    },
    /// A barrier failed for all who waited at it.
    BarrierFailed {
        /// Its id.
        #[schema(value_type = String)]
        barrier: Arc<str>,
        /// Which use of it.
        counter: i64,
    },
    /// Somebody asked for a coordinated save: the preemption notice is in the store.
    PreemptionNoticed,
    /// Somebody decided that a task or a host takes no part.
    Excluded {
        /// The exclusion's number.
        exclusion: ExclusionId,
        /// Whom it is about.
        target: ExclusionTarget,
        /// The tasks of the present run that it takes out.
        tasks: Vec<TaskId>,
        /// Who decided it.
        actor: Actor,
    },
    /// An exclusion is over: whom it was about may register again.
    Readmitted {
        /// The exclusion's number.
        exclusion: ExclusionId,
        /// Whom it was about.
        target: ExclusionTarget,
        /// Who lifted it; `None` if its time was over.
        actor: Option<Actor>,
    },
    /// An exclusion turned a registration away. Said once for each exclusion.
    RegistrationRefused {
        /// The exclusion's number.
        exclusion: ExclusionId,
        /// The task that wanted to register.
        task: TaskId,
        /// From where.
        #[schema(value_type = Option<String>)]
        peer: Option<SocketAddr>,
    },
    /// An operator asked for a coordinated save.
    DrainRequested {
        /// Who asked.
        actor: Actor,
    },
    /// An operator changed settings of the job.
    SettingsChanged {
        /// Which, by the names of their settings.
        settings: Vec<String>,
        /// Who did.
        actor: Actor,
    },
    /// An operator deleted the job.
    JobDeleted {
        /// Who did.
        actor: Actor,
    },
    /// An operator wrote a key of the store.
    KeyWritten {
        /// Which, as text; long keys are cut.
        key: String,
        /// Who wrote it.
        actor: Actor,
    },
    /// An operator removed a key of the store and everything below it.
    KeyDeleted {
        /// Which, as text; long keys are cut.
        key: String,
        /// Who removed it.
        actor: Actor,
    },
    /// The first error of the run: its cause. What follows is its consequence.
    FirstCause {
        /// The task that it came from, where one is known.
        task: Option<TaskId>,
    },
    /// Something in what is measured wants a look.
    FindingOpened {
        /// Which detector says so.
        #[schema(value_type = String)]
        finding: Arc<str>,
        /// The tasks that it is about: a few of them.
        tasks: Vec<TaskId>,
    },
    /// It wants a look no more.
    FindingClosed {
        /// Which detector says so.
        #[schema(value_type = String)]
        finding: Arc<str>,
    },
    /// A worker reported transfers that failed. Many for one reason are told of together.
    TransferFailed {
        /// The task that reported it, or the last one.
        task: TaskId,
        /// The task at the other end.
        with: TaskId,
        /// Why: one of a fixed few words.
        #[schema(value_type = String)]
        error: Arc<str>,
        /// How many failures this tells of.
        count: u64,
    },
    /// The run is over.
    RunEnded {
        /// How.
        outcome: RunOutcome,
    },
}

/// What a change is about, besides its job and its run.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Subject<'a> {
    /// The task, if it is about one.
    pub task: Option<TaskId>,
    /// The address of that task's process.
    pub peer: Option<SocketAddr>,
    /// The barrier, and which use of it.
    pub barrier: Option<(&'a str, i64)>,
    /// How the run ended.
    pub outcome: Option<&'static str>,
}

impl EventKind {
    /// The kind of the change, by the name that it has in JSON.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::JobDeclared { .. } => "job-declared",
            Self::RunOpened => "run-opened",
            Self::TaskRegistering { .. } => "task-registering",
            Self::TaskConnected { .. } => "task-connected",
            Self::TaskSuperseded { .. } => "task-superseded",
            Self::TaskSuspected { .. } => "task-suspected",
            Self::TaskReturned { .. } => "task-returned",
            Self::TaskDisconnected { .. } => "task-disconnected",
            Self::TaskFailed { .. } => "task-failed",
            Self::Fenced { .. } => "fenced",
            Self::BarrierStarted { .. } => "barrier-started",
            Self::BarrierPassed { .. } => "barrier-passed",
            Self::BarrierFailed { .. } => "barrier-failed",
            Self::Excluded { .. } => "excluded",
            Self::Readmitted { .. } => "readmitted",
            Self::RegistrationRefused { .. } => "registration-refused",
            Self::DrainRequested { .. } => "drain-requested",
            Self::SettingsChanged { .. } => "settings-changed",
            Self::KeyWritten { .. } => "key-written",
            Self::KeyDeleted { .. } => "key-deleted",
            Self::JobDeleted { .. } => "job-deleted",
            Self::PreemptionNoticed => "preemption-noticed",
            Self::FirstCause { .. } => "first-cause",
            Self::TransferFailed { .. } => "transfer-failed",
            Self::FindingOpened { .. } => "finding-opened",
            Self::FindingClosed { .. } => "finding-closed",
            Self::RunEnded { .. } => "run-ended",
        }
    }

    /// Whether the change is about a task, alone or among others.
    #[must_use]
    pub fn is_about_task(&self, task: TaskId) -> bool {
        match self {
            Self::BarrierPassed { without: tasks, .. }
            | Self::FindingOpened { tasks, .. }
            | Self::Excluded { target: ExclusionTarget::Host(_), tasks, .. } => tasks.contains(&task),
            Self::TransferFailed { task: one, with, .. } => [*one, *with].contains(&task),
            other => other.about().task == Some(task),
        }
    }

    /// What the change is about.
    #[must_use]
    pub fn about(&self) -> Subject<'_> {
        match self {
            Self::TaskRegistering { task, peer, .. } => {
                Subject { task: Some(*task), peer: *peer, ..Subject::default() }
            }
            Self::TaskSuperseded { task, new_peer, .. } => {
                Subject { task: Some(*task), peer: *new_peer, ..Subject::default() }
            }
            Self::RegistrationRefused { task, peer, .. } => {
                Subject { task: Some(*task), peer: *peer, ..Subject::default() }
            }
            Self::Excluded { target, .. } | Self::Readmitted { target, .. } => match target {
                ExclusionTarget::Task(task) => Subject { task: Some(*task), ..Subject::default() },
                ExclusionTarget::Host(_) => Subject::default(),
            },
            Self::TaskConnected { task, .. }
            | Self::TaskSuspected { task }
            | Self::TaskReturned { task }
            | Self::TaskDisconnected { task }
            | Self::TransferFailed { task, .. }
            | Self::TaskFailed { task, .. } => Subject { task: Some(*task), ..Subject::default() },
            Self::Fenced { task } | Self::FirstCause { task } => {
                Subject { task: *task, ..Subject::default() }
            }
            Self::BarrierStarted { barrier, counter }
            | Self::BarrierPassed { barrier, counter, .. }
            | Self::BarrierFailed { barrier, counter } => {
                Subject { barrier: Some((barrier, *counter)), ..Subject::default() }
            }
            Self::RunEnded { outcome } => Subject { outcome: Some(outcome.name()), ..Subject::default() },
            Self::FindingOpened { tasks, .. } => {
                Subject { task: tasks.first().copied(), ..Subject::default() }
            }
            Self::JobDeclared { .. }
            | Self::RunOpened
            | Self::FindingClosed { .. }
            | Self::DrainRequested { .. }
            | Self::SettingsChanged { .. }
            | Self::KeyWritten { .. }
            | Self::KeyDeleted { .. }
            | Self::JobDeleted { .. }
            | Self::PreemptionNoticed => Subject::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_called_as_in_json() {
        let task = TaskId(1);
        let barrier = Arc::<str>::from("b");
        for change in [
            EventKind::JobDeclared { actor: None },
            EventKind::RunOpened,
            EventKind::TaskSuspected { task },
            EventKind::TaskReturned { task },
            EventKind::TaskDisconnected { task },
            EventKind::TaskFailed { task, class: FailureClass::Reported },
            EventKind::Fenced { task: None },
            EventKind::BarrierStarted { barrier: Arc::clone(&barrier), counter: 0 },
            EventKind::BarrierPassed { barrier: Arc::clone(&barrier), counter: 0, without: vec![] },
            EventKind::BarrierFailed { barrier, counter: 0 },
            EventKind::PreemptionNoticed,
            EventKind::FindingOpened { finding: Arc::from("f"), tasks: vec![] },
            EventKind::FindingClosed { finding: Arc::from("f") },
            EventKind::TransferFailed { task, with: task, error: Arc::from("stalled"), count: 1 },
            EventKind::FirstCause { task: None },
            EventKind::RunEnded { outcome: RunOutcome::Failed },
        ] {
            assert_eq!(serde_json::to_value(&change).unwrap()["kind"], change.kind());
        }
    }
}
