//! The events of a job. Each event publishes one change, with its time, run and reason.
//!
//! The driver numbers, retains and publishes the events. Begin at [`EventKind`].

use std::net::SocketAddr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::actor::Actor;
use super::exclusion::ExclusionTarget;
use super::ids::{ExclusionId, JobId, RunNumber, TaskId, TaskIncarnation, Timestamp};

/// One event of a job: a change of state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobEvent {
    /// The time of the change.
    pub at: Timestamp,
    /// The job.
    pub job: JobId,
    /// The run of the job.
    pub run: RunNumber,
    /// The change.
    pub what: EventKind,
    /// The reason, in a sentence.
    pub reason: String,
}

/// The outcome of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum RunOutcome {
    /// Every task shut down.
    Completed,
    /// A task failed and ended the run.
    Failed,
    /// The last live task of a recoverable run was lost.
    Abandoned,
}

impl RunOutcome {
    /// Returns the name of the outcome, as in JSON.
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
    /// The time of the error.
    pub at: Timestamp,
    /// The task that caused it, where one is known.
    pub task: Option<TaskId>,
    /// The error, as clients receive it.
    pub error: String,
    /// A short form of the error.
    #[serde(default)]
    pub why: String,
}

/// The kinds of failure of a task.
#[derive(
    Debug, Default, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum FailureClass {
    /// No heartbeat arrived in time.
    HeartbeatTimeout,
    /// Its connection broke, and the task did not return in time.
    ConnectionLost,
    /// Another incarnation of the task called, in a run that does not survive a restart.
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

    /// Returns the name of the class, as in JSON.
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
    /// A job was declared.
    JobDeclared {
        /// The operator; `None` if the job is part of the server's configuration.
        #[serde(default)]
        actor: Option<Actor>,
    },
    /// A run opened and waits for its tasks to register.
    RunOpened,
    /// A task registered and waits for the others.
    TaskRegistering {
        /// The task.
        task: TaskId,
        /// The incarnation.
        incarnation: TaskIncarnation,
        /// The address of its process.
        #[schema(value_type = Option<String>)]
        peer: Option<SocketAddr>,
    },
    /// A task that waited for the others to register does so no longer: its call ended.
    RegistrationWithdrawn {
        /// The task.
        task: TaskId,
    },
    /// A task is connected.
    TaskConnected {
        /// The task.
        task: TaskId,
        /// The incarnation.
        incarnation: TaskIncarnation,
        /// Whether it was connected in this run before.
        again: bool,
    },
    /// Two processes claim the same task; the newer one holds it.
    TaskSuperseded {
        /// The task.
        task: TaskId,
        /// The incarnation that was replaced.
        old: TaskIncarnation,
        /// The address of its process.
        #[schema(value_type = Option<String>)]
        old_peer: Option<SocketAddr>,
        /// The incarnation that replaced it.
        new: TaskIncarnation,
        /// The address of its process.
        #[schema(value_type = Option<String>)]
        new_peer: Option<SocketAddr>,
    },
    /// A task's connection broke; the task may still return.
    TaskSuspected {
        /// The task.
        task: TaskId,
    },
    /// A suspected task returned in time.
    TaskReturned {
        /// The task.
        task: TaskId,
    },
    /// A task disconnected in good order.
    TaskDisconnected {
        /// The task.
        task: TaskId,
    },
    /// A task failed.
    TaskFailed {
        /// The task.
        task: TaskId,
        /// The kind of failure.
        #[serde(default)]
        class: FailureClass,
    },
    /// A call of an earlier incarnation or run was refused. Reported once for each connection.
    Fenced {
        /// The task, where it is known.
        task: Option<TaskId>,
    },
    /// The first arrival at a barrier.
    BarrierStarted {
        /// The barrier's id.
        #[schema(value_type = String)]
        barrier: Arc<str>,
        /// The counter of the instance.
        counter: i64,
    },
    /// A barrier passed.
    BarrierPassed {
        /// The barrier's id.
        #[schema(value_type = String)]
        barrier: Arc<str>,
        /// The counter of the instance.
        counter: i64,
        /// The members without which it passed, by the rules for restarted tasks.
        without: Vec<TaskId>,
    },
    /// A barrier failed for all members that waited at it.
    BarrierFailed {
        /// The barrier's id.
        #[schema(value_type = String)]
        barrier: Arc<str>,
        /// The counter of the instance.
        counter: i64,
        /// The members that had not arrived: the first [`EventKind::LISTED_MAX`] of them. Empty in events that were recorded without the field.
        #[serde(default)]
        without: Vec<TaskId>,
    },
    /// The preemption notice is in the store: a coordinated save was requested.
    PreemptionNoticed,
    /// A task or a host was excluded.
    Excluded {
        /// The exclusion's number.
        exclusion: ExclusionId,
        /// The excluded task or host.
        target: ExclusionTarget,
        /// The tasks of the present run that it removes.
        tasks: Vec<TaskId>,
        /// The operator.
        actor: Actor,
    },
    /// An exclusion ended: its target may register again.
    Readmitted {
        /// The exclusion's number.
        exclusion: ExclusionId,
        /// The task or host that was excluded.
        target: ExclusionTarget,
        /// The operator; `None` if the exclusion expired.
        actor: Option<Actor>,
    },
    /// An exclusion refused a registration. Reported once for each exclusion.
    RegistrationRefused {
        /// The exclusion's number.
        exclusion: ExclusionId,
        /// The task that tried to register.
        task: TaskId,
        /// The address of its process.
        #[schema(value_type = Option<String>)]
        peer: Option<SocketAddr>,
    },
    /// An operator requested a coordinated save.
    DrainRequested {
        /// The operator.
        actor: Actor,
    },
    /// An operator changed settings of the job.
    SettingsChanged {
        /// The names of the changed settings.
        settings: Vec<String>,
        /// The operator.
        actor: Actor,
    },
    /// The service started again and restored the job from its journal: connections and waiting calls are gone.
    ServiceRestarted,
    /// An operator deleted the job.
    JobDeleted {
        /// The operator.
        actor: Actor,
    },
    /// An operator wrote a key of the store.
    KeyWritten {
        /// The key, as text; long keys are cut.
        key: String,
        /// The operator.
        actor: Actor,
    },
    /// An operator removed a key of the store and everything below it.
    KeyDeleted {
        /// The key, as text; long keys are cut.
        key: String,
        /// The operator.
        actor: Actor,
    },
    /// Processes that claimed a task id got one, which they keep over runs.
    TaskIdsAssigned {
        /// The tasks.
        tasks: Vec<TaskId>,
    },
    /// An operator made the service forget to which processes task ids belong.
    TaskOwnersForgotten {
        /// The tasks.
        tasks: Vec<TaskId>,
        /// The operator.
        actor: Actor,
    },
    /// The first error of the run: the cause of those that follow.
    FirstCause {
        /// The task that caused it, where one is known.
        task: Option<TaskId>,
    },
    /// A detector opened a finding.
    FindingOpened {
        /// The name of the detector.
        #[schema(value_type = String)]
        finding: Arc<str>,
        /// Some of the tasks that the finding names.
        tasks: Vec<TaskId>,
    },
    /// A detector closed a finding.
    FindingClosed {
        /// The name of the detector.
        #[schema(value_type = String)]
        finding: Arc<str>,
        /// Some of the tasks that the finding named. Empty in events that were recorded without the field.
        #[serde(default)]
        tasks: Vec<TaskId>,
    },
    /// A worker reported failed transfers. Many failures with one reason are one event.
    TransferFailed {
        /// The task that reported the failure; of several, the last one.
        task: TaskId,
        /// The task at the other end.
        with: TaskId,
        /// The reason: one of a few fixed words.
        #[schema(value_type = String)]
        error: Arc<str>,
        /// The number of failures in this event.
        count: u64,
    },
    /// The run ended.
    RunEnded {
        /// The outcome.
        outcome: RunOutcome,
    },
}

/// The subject of an event, besides its job and its run.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct EventSubject<'a> {
    /// The task, if the event is about one.
    pub task: Option<TaskId>,
    /// The address of that task's process.
    pub peer: Option<SocketAddr>,
    /// The barrier and the counter of the instance.
    pub barrier: Option<(&'a str, i64)>,
    /// The outcome of the run, if it ended.
    pub outcome: Option<&'static str>,
}

impl EventKind {
    /// An event of a barrier that failed lists at most so many of the members that had not arrived.
    pub const LISTED_MAX: usize = 64;

    /// The names of all kinds, as [`Self::kind`] returns them.
    pub const NAMES: [&'static str; 31] = [
        "job-declared",
        "run-opened",
        "task-registering",
        "registration-withdrawn",
        "task-connected",
        "task-superseded",
        "task-suspected",
        "task-returned",
        "task-disconnected",
        "task-failed",
        "fenced",
        "barrier-started",
        "barrier-passed",
        "barrier-failed",
        "preemption-noticed",
        "excluded",
        "readmitted",
        "registration-refused",
        "drain-requested",
        "settings-changed",
        "service-restarted",
        "job-deleted",
        "key-written",
        "key-deleted",
        "task-ids-assigned",
        "task-owners-forgotten",
        "first-cause",
        "finding-opened",
        "finding-closed",
        "transfer-failed",
        "run-ended",
    ];

    /// Returns the kind of the event, by its name in JSON.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::JobDeclared { .. } => "job-declared",
            Self::RunOpened => "run-opened",
            Self::TaskRegistering { .. } => "task-registering",
            Self::RegistrationWithdrawn { .. } => "registration-withdrawn",
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
            Self::TaskIdsAssigned { .. } => "task-ids-assigned",
            Self::TaskOwnersForgotten { .. } => "task-owners-forgotten",
            Self::JobDeleted { .. } => "job-deleted",
            Self::PreemptionNoticed => "preemption-noticed",
            Self::ServiceRestarted => "service-restarted",
            Self::FirstCause { .. } => "first-cause",
            Self::TransferFailed { .. } => "transfer-failed",
            Self::FindingOpened { .. } => "finding-opened",
            Self::FindingClosed { .. } => "finding-closed",
            Self::RunEnded { .. } => "run-ended",
        }
    }

    /// Returns the list of tasks of an event that has one: for a barrier that ended, those that had not arrived.
    fn listed_tasks(&self) -> Option<&[TaskId]> {
        match self {
            Self::BarrierPassed { without: tasks, .. }
            | Self::BarrierFailed { without: tasks, .. }
            | Self::FindingOpened { tasks, .. }
            | Self::FindingClosed { tasks, .. }
            | Self::TaskIdsAssigned { tasks }
            | Self::TaskOwnersForgotten { tasks, .. }
            | Self::Excluded {
                target: ExclusionTarget::Host(_) | ExclusionTarget::NamedHost(_),
                tasks,
                ..
            } => Some(tasks),
            _ => None,
        }
    }

    /// Returns whether the event is about a task, alone or among others.
    #[must_use]
    pub fn is_about_task(&self, task: TaskId) -> bool {
        match (self, self.listed_tasks()) {
            (_, Some(tasks)) => tasks.contains(&task),
            (Self::TransferFailed { task: one, with, .. }, None) => [*one, *with].contains(&task),
            (other, None) => other.subject().task == Some(task),
        }
    }

    /// Returns the tasks of the change, in the order of its list if it has one.
    #[must_use]
    pub fn tasks(&self) -> Vec<TaskId> {
        let alone = || self.subject().task.into_iter().collect();
        self.listed_tasks().map_or_else(alone, <[TaskId]>::to_vec)
    }

    /// Returns the subject of the event.
    #[must_use]
    pub fn subject(&self) -> EventSubject<'_> {
        match self {
            Self::TaskRegistering { task, peer, .. } => {
                EventSubject { task: Some(*task), peer: *peer, ..EventSubject::default() }
            }
            Self::TaskSuperseded { task, new_peer, .. } => {
                EventSubject { task: Some(*task), peer: *new_peer, ..EventSubject::default() }
            }
            Self::RegistrationRefused { task, peer, .. } => {
                EventSubject { task: Some(*task), peer: *peer, ..EventSubject::default() }
            }
            Self::Excluded { target, .. } | Self::Readmitted { target, .. } => match target {
                ExclusionTarget::Task(task) => EventSubject { task: Some(*task), ..EventSubject::default() },
                ExclusionTarget::Host(_) | ExclusionTarget::NamedHost(_) => EventSubject::default(),
            },
            Self::TaskConnected { task, .. }
            | Self::RegistrationWithdrawn { task }
            | Self::TaskSuspected { task }
            | Self::TaskReturned { task }
            | Self::TaskDisconnected { task }
            | Self::TransferFailed { task, .. }
            | Self::TaskFailed { task, .. } => EventSubject { task: Some(*task), ..EventSubject::default() },
            Self::Fenced { task } | Self::FirstCause { task } => {
                EventSubject { task: *task, ..EventSubject::default() }
            }
            Self::BarrierStarted { barrier, counter }
            | Self::BarrierPassed { barrier, counter, .. }
            | Self::BarrierFailed { barrier, counter, .. } => {
                EventSubject { barrier: Some((barrier, *counter)), ..EventSubject::default() }
            }
            Self::RunEnded { outcome } => {
                EventSubject { outcome: Some(outcome.name()), ..EventSubject::default() }
            }
            Self::FindingOpened { tasks, .. } | Self::FindingClosed { tasks, .. } => {
                EventSubject { task: tasks.first().copied(), ..EventSubject::default() }
            }
            Self::JobDeclared { .. }
            | Self::RunOpened
            | Self::TaskIdsAssigned { .. }
            | Self::TaskOwnersForgotten { .. }
            | Self::DrainRequested { .. }
            | Self::SettingsChanged { .. }
            | Self::KeyWritten { .. }
            | Self::KeyDeleted { .. }
            | Self::JobDeleted { .. }
            | Self::ServiceRestarted
            | Self::PreemptionNoticed => EventSubject::default(),
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
            EventKind::RegistrationWithdrawn { task },
            EventKind::TaskSuspected { task },
            EventKind::TaskReturned { task },
            EventKind::TaskDisconnected { task },
            EventKind::TaskFailed { task, class: FailureClass::Reported },
            EventKind::Fenced { task: None },
            EventKind::BarrierStarted { barrier: Arc::clone(&barrier), counter: 0 },
            EventKind::BarrierPassed { barrier: Arc::clone(&barrier), counter: 0, without: vec![] },
            EventKind::BarrierFailed { barrier, counter: 0, without: vec![task] },
            EventKind::PreemptionNoticed,
            EventKind::ServiceRestarted,
            EventKind::FindingOpened { finding: Arc::from("f"), tasks: vec![] },
            EventKind::FindingClosed { finding: Arc::from("f"), tasks: vec![task] },
            EventKind::TaskIdsAssigned { tasks: vec![task] },
            EventKind::TransferFailed { task, with: task, error: Arc::from("stalled"), count: 1 },
            EventKind::FirstCause { task: None },
            EventKind::RunEnded { outcome: RunOutcome::Failed },
        ] {
            assert_eq!(serde_json::to_value(&change).unwrap()["kind"], change.kind());
            assert!(EventKind::NAMES.contains(&change.kind()), "{change:?}");
        }
    }

    #[test]
    fn the_names_are_those_of_all_kinds() {
        // The error lists every name that is known.
        let refused = serde_json::from_str::<EventKind>(r#"{"kind":"unknown"}"#).unwrap_err().to_string();
        let names = EventKind::NAMES.map(|name| format!("`{name}`")).join(", ");
        assert!(refused.contains(&format!("expected one of {names}")), "{refused}");
    }
}
